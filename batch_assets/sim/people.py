"""Everybody outside: who starts planners and runs again when they ended, lifts holds, and the cloud that takes machines away.

What happens here is slow (seconds) and aims at processes; what strikes within a call is in `faults.py`.
"""

from collections.abc import Sequence
from itertools import count
from typing import Final

from batch_assets.core.leasing import ShardState, VersionState
from batch_assets.sim.clockwork import Process
from batch_assets.sim.faults import Fault
from batch_assets.sim.processes import World, alive, start_planner, start_run
from batch_assets.sim.workload import JOB

TICK_S: Final = 0.5
RESTART_S: Final = (0.0, 2.5)  # until somebody starts a run again
HELD_S: Final = 2.0
STALL_LEASES: Final = (1.0, 3.5)  # most outlive their lease, and a leader kills after three
NOTICE_SHARE: Final = 0.5  # of reclaimed machines are told before
NOTICE_S: Final = 1.5
RUNS_MAX: Final = 2  # at once
FAULTS_S: Final = 25.0  # then faults stop


class People:
    """One immortal process. `is_over`: the version is finished and everybody has gone home."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._planners: list[Process] = []
        self._runs: list[Process] = []
        self._names = count(1)
        self._held_s = 0.0
        world.clockwork.start("people", self._live)

    @property
    def is_over(self) -> bool:
        """Nothing can happen any more."""
        return self._is_finished and not alive([*self._planners, *self._runs, *self._world.workers.values()])

    @property
    def _is_finished(self) -> bool:
        version = self._world.auditor.version
        return version is not None and version.state is VersionState.FINISHED

    def _live(self, _process: Process) -> None:
        world = self._world
        while not self._is_finished:
            if world.clockwork.now_s >= FAULTS_S and not world.seams.is_quiet:
                world.note("faults stop")
                world.seams.is_quiet = True
            version = world.auditor.version
            if version is None or version.state is VersionState.PLANNING:
                self._plan()
            else:
                self._supervise()
                self._lift(version.state)
            self._strike_workers()
            self._strike_runs()
            world.clockwork.sleep(TICK_S)

    def _plan(self) -> None:
        if alive(self._planners):
            return
        for _ in range(1 + self._world.seams.strikes(Fault.SECOND_PLANNER)):
            self._planners.append(start_planner(self._world, f"planner-{next(self._names)}"))

    def _supervise(self) -> None:
        running = alive(self._runs)
        another = len(running) < RUNS_MAX and self._world.seams.strikes(Fault.SECOND_LEADER, per=TICK_S)
        if not running or another:
            delay_s = self._world.random.uniform(*RESTART_S)
            self._runs.append(start_run(self._world, f"run-{next(self._names)}", delay_s=delay_s))

    def _lift(self, state: VersionState) -> None:
        """A person resumes what was cancelled, and unblocks what lost too many machines."""
        world = self._world
        self._held_s = self._held_s + TICK_S if state is VersionState.HELD else 0.0
        if self._held_s >= HELD_S:
            world.installation.register.lift_version_hold(job=JOB, version=world.version)
        blocked = [shard.number for shard in world.auditor.shards.values() if shard.state == ShardState.BLOCKED]
        if blocked:
            world.installation.register.unblock(job=JOB, version=world.version, shards=blocked)

    def _strike_workers(self) -> None:
        world = self._world
        working = alive(list(world.workers.values()))
        if working and world.seams.strikes(Fault.WORKER_STALLED, per=TICK_S):
            self._stop(world.random.choice(working))
        if working and world.seams.strikes(Fault.RECLAIM, per=TICK_S):
            self._reclaim([world.random.choice(working)])
        if len(working) > 1 and world.seams.strikes(Fault.RECLAIM_WAVE, per=TICK_S):
            self._reclaim(world.random.sample(working, world.random.randint(2, len(working))))

    def _reclaim(self, machines: Sequence[Process]) -> None:
        clockwork, random = self._world.clockwork, self._world.random
        for machine in machines:
            self._world.note(f"{machine.name} is reclaimed")
            if random.random() < NOTICE_SHARE:
                clockwork.notice(machine)
                clockwork.later(NOTICE_S, lambda machine=machine: clockwork.kill(machine))
            else:
                clockwork.kill(machine)

    def _stop(self, process: Process) -> None:
        world = self._world
        seconds = world.random.uniform(*STALL_LEASES) * world.seams.lease_s
        world.note(f"{process.name} is stopped for {seconds:.1f} s")
        world.clockwork.stop(process, seconds)

    def _strike_runs(self) -> None:
        world = self._world
        for run in alive(self._runs):
            if world.seams.strikes(Fault.LEADER_KILLED, per=TICK_S):
                world.note(f"{run.name} is killed")
                world.clockwork.kill(run)
            elif world.seams.strikes(Fault.LEADER_STALLED, per=TICK_S):
                self._stop(run)
            elif world.seams.strikes(Fault.CANCELLED, per=TICK_S):
                world.note(f"{run.name} is cancelled")
                world.cancelled.add(run.name)
