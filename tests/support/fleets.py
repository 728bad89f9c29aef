"""A fleet without processes, a clock without time: enough to drive the real supervisor, committer and register."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batch_assets.core.supervision import WorkerExit
from batch_assets.fleet.progress import Progress
from batch_assets.fleet.supervisor import Parts, Supervisor, Turns, Wish, committer
from batch_assets.stores.register import ShardRow
from tests.support.versions import Planned, answered, write

STEPS_MAX = 500


class FakeClock:
    """Seconds that pass only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class HandFleet:
    """Each worker answers `shards_per_look` shards whenever the supervisor looks at the fleet."""

    planned: Planned
    shards_per_look: int = 1
    leave_out: Sequence[str] = ()
    exits: list[WorkerExit] = field(default_factory=list)
    on_start: Callable[["HandFleet"], None] = lambda fleet: None
    alive: int = 0
    started: int = 0
    stopped: bool = False
    killed: list[str] = field(default_factory=list)

    def adopt(self) -> None:
        for worker in range(self.alive * self.shards_per_look):
            self._answer_one(f"hand-{worker}")

    def _answer_one(self, worker: str) -> None:
        planned = self.planned
        register = planned.installation.register
        lease = register.claim(job=planned.job, version=planned.version, worker=worker)
        if lease is not None:
            ids = [each for each in planned.ids[lease.shard] if each not in self.leave_out]
            slots = write(planned, lease, [answered(each, epoch=lease.epoch, worker=worker) for each in ids])
            register.stage(lease, slots=slots, seconds=1.0)

    def start(self, count: int) -> None:
        self.started += count
        self.alive += count
        for _ in range(count):
            self.on_start(self)

    def reap(self) -> list[WorkerExit]:
        exits, self.exits = self.exits, []
        self.alive -= len(exits)
        return exits

    def kill(self, worker_id: str) -> None:
        self.killed.append(worker_id)

    def stop(self) -> list[WorkerExit]:
        self.stopped, self.alive = True, 0
        return []


@dataclass
class Run:
    """One run's supervision, driven by hand."""

    planned: Planned
    wanted: frozenset[int] | None = None
    workers: int = 2
    holder: str = "run-1"
    fleet: HandFleet | None = None
    clock: FakeClock = field(default_factory=FakeClock)
    announced: list[int] = field(default_factory=list)
    looks: list[Progress] = field(default_factory=list)
    stop: bool = False

    def __post_init__(self) -> None:
        self.fleet = self.fleet or HandFleet(self.planned)

    def wish(self) -> Wish:
        return Wish(
            job=self.planned.job,
            version=self.planned.version,
            wanted=self.wanted,
            workers=self.workers,
            holder=self.holder,
            speed={},
            announce=self._announce,
            progress=self.looks.append,
            should_stop=lambda: self.stop,
        )

    def _announce(self, rows: Sequence[ShardRow]) -> None:
        self.announced += [row.number for row in rows]

    def parts(self) -> Parts:
        assert self.fleet is not None
        fleet = self.fleet
        return Parts(fleet=lambda *_: fleet, committer=committer, clock=self.clock, sleep=self.clock.sleep)

    def turns(self) -> Turns:
        return Supervisor(self.planned.installation, self.wish(), self.parts()).turns()


def step(turns: Turns, clock: FakeClock, times: int = 1):
    """So many turns; the report when it ended."""
    for _ in range(times):
        try:
            clock.sleep(next(turns))
        except StopIteration as end:
            return end.value
    return None


def finish(turns: Turns, clock: FakeClock):
    """Turns until it ends by itself."""
    report = step(turns, clock, STEPS_MAX)
    assert report is not None, "it does not end"
    return report
