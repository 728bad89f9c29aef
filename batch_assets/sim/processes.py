"""The processes of a simulated world: planners, supervising runs with their fleets, workers. Only what starts them is not the real code."""

import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from socket import gethostname
from typing import Final

from sqlalchemy.exc import OperationalError

from batch_assets.core.answers import AnswerChecker, CheckedAnswer
from batch_assets.core.errors import EngineFailedError, UnfitWorkerError
from batch_assets.core.ports import EngineConfig
from batch_assets.core.prompting import PromptRenderer, parse_prompt
from batch_assets.core.shard_log import Entry
from batch_assets.engines.tokenizers import tokenizer_for
from batch_assets.fleet.lead import LeadKeeper
from batch_assets.fleet.local import Handle, LocalFleet
from batch_assets.fleet.supervisor import Parts, Wish, committer, supervise
from batch_assets.flows.planner import plan
from batch_assets.sim.clockwork import Clockwork, Process
from batch_assets.sim.engine import SteppedEngine
from batch_assets.sim.faults import Fault, Seams
from batch_assets.sim.invariants import Auditor
from batch_assets.sim.workload import JOB, PROMPT, Workload
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import Job
from batch_assets.stores.register import WorkerRow
from batch_assets.worker.__main__ import compose, exit_code_of
from batch_assets.worker.counters import Counters
from batch_assets.worker.feeder import InlinePuts, Puts
from batch_assets.worker.heartbeat import Heartbeat
from batch_assets.worker.loop import Point

IDLE_S: Final = 0.5  # longer than a real worker's, like the next two: looking more often finds nothing and costs most of a history
BEAT_S: Final = 1.05  # a renewal with each beat: it must come within a lease also by skewed clocks, or what takes long never ends
PAUSE_MIN_S: Final = 0.5
LOAD_S: Final = (0.1, 1.0)
NOTICE_S: Final = 2.0  # from SIGTERM to SIGKILL
WAIT_S: Final = 0.05
RENDERER: Final = PromptRenderer(parse_prompt(PROMPT), tokenizer_for("scripted", ""))


@dataclass(slots=True)
class World:
    """Everything that the processes of one history share."""

    clockwork: Clockwork
    seams: Seams
    auditor: Auditor
    installation: Installation
    job: Job
    workload: Workload
    random: Random
    note: Callable[[str], None]
    workers: dict[str, Process] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)  # names of runs that a person has stopped

    def start(self, name: str, body: Callable[[Process], None], *, delay_s: float = 0.0) -> Process:
        """A process that faults may strike, with a clock of its own."""
        self.seams.mortal.add(name)
        rate, offset_s = self.seams.skew()

        def live(process: Process) -> None:
            self.clockwork.sleep(delay_s)
            body(process)

        return self.clockwork.start(name, live, rate=rate, offset_s=offset_s)

    @property
    def version(self) -> str:
        """Of the plan."""
        assert self.auditor.version is not None, "nothing is planned yet"
        return self.auditor.version.name


# --- planners and runs ------------------------------------------------------------------------------------------------------------


def start_planner(world: World, name: str) -> Process:
    """Plans the job."""
    return world.start(name, lambda _process: void(plan(world.installation, world.job)))


def start_run(world: World, name: str, *, delay_s: float) -> Process:
    """Supervises the version to its end, as one Dagster run does."""
    return world.start(name, partial(_run, world), delay_s=delay_s)


def _run(world: World, process: Process) -> None:
    report = supervise(
        world.installation,
        job=JOB,
        version=world.version,
        wanted=None,
        workers=world.workload.workers,
        holder=process.name,
        speed={},
        announce=world.auditor.announced,
        progress=void,
        should_stop=lambda: process.name in world.cancelled,
        parts=Parts(
            fleet=lambda installation, wish, generation: SteppedFleet(world, installation, wish, generation),
            committer=committer,
            keeper=lambda installation, wish, generation: SteppedKeeper(world.clockwork, process, installation, wish, generation),
            clock=world.clockwork.clock_of(process),
            sleep=lambda seconds: world.clockwork.sleep(max(seconds, PAUSE_MIN_S)),
        ),
    )
    world.note(f"{process.name} reports {report}")


class SteppedKeeper(LeadKeeper):
    """Renews in a simulated thread."""

    def __init__(self, clockwork: Clockwork, process: Process, installation: Installation, wish: Wish, generation: int) -> None:
        super().__init__(installation.register, job=wish.job, version=wish.version, generation=generation, settings=installation.settings)
        self._clockwork, self._process, self._every_s = clockwork, process, installation.settings.renew_s
        self._has_ended = False

    def start(self) -> None:
        """Renews from now on."""
        self._clockwork.thread(self._process, self._beats)

    def end(self) -> None:
        """Renews no more."""
        self._has_ended = True

    def _beats(self) -> None:
        while True:
            self._clockwork.sleep(self._every_s)
            if self.is_lost or self._has_ended:
                return
            self.beat()


# --- the fleet --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SteppedHandle:
    """A worker process of this world, as a fleet on its host sees it."""

    world: World
    process: Process
    is_child: bool
    log_path: Path = Path("/nowhere")

    @property
    def worker_id(self) -> str:
        """Its name."""
        return self.process.name

    @property
    def pid(self) -> int:
        """Unique in this world."""
        return self.process.pid

    @property
    def started_s(self) -> float:
        """Nobody asks a second time."""
        return 0.0

    def has_ended(self) -> bool:
        """It runs no more."""
        return not self.process.alive

    def signal(self, number: signal.Signals) -> None:
        """Not from a supervisor that is no more itself."""
        clockwork = self.world.clockwork
        clockwork.require_alive()
        if number is signal.SIGKILL:
            clockwork.kill(self.process)
        else:
            clockwork.notice(self.process)

    def collect(self) -> int | None:
        """The exit code of a child."""
        return self.process.exit_code if self.is_child else None


class SteppedFleet(LocalFleet):
    """The fleet of one host whose processes are simulated ones."""

    def __init__(self, world: World, installation: Installation, wish: Wish, generation: int) -> None:
        super().__init__(
            installation,
            job=wish.job,
            version=wish.version,
            generation=generation,
            speed=wish.speed,
            notice_s=NOTICE_S,
            sleep=world.clockwork.sleep,
        )
        self._world = world

    def _spawn(self, worker_id: str) -> Handle:
        self._world.clockwork.require_alive()
        process = self._world.workers[worker_id] = self._world.start(worker_id, partial(_work, self._world))
        return SteppedHandle(self._world, process, is_child=True)

    def _found(self, row: WorkerRow) -> Handle:
        return SteppedHandle(self._world, self._world.workers[row.worker_id], is_child=False)


# --- workers ----------------------------------------------------------------------------------------------------------------------


def _work(world: World, process: Process) -> None:
    """What `python -m batch_assets.worker` is, with an engine, a clock and threads of this world."""
    try:
        _answer(world, process)
    except (EngineFailedError, UnfitWorkerError) as error:
        # Other errors are shown to who watches the history: they may have been injected, or not.
        world.clockwork.kill(process, exit_code=exit_code_of(error, partial(_note, world, process)))


def _answer(world: World, process: Process) -> None:
    installation, clockwork, seams = world.installation, world.clockwork, world.seams
    register, settings = installation.register, installation.settings
    spec = installation.specs().read(JOB, world.version)
    register.worker_started(worker_id=process.name, job=JOB, version=world.version, host=gethostname(), pid=process.pid)
    checker = AnswerChecker(spec.answer_schema)
    engine = SteppedEngine(
        world.workload,
        seams,
        is_valid=lambda completion: isinstance(checker.check(completion.text, completion.finish_reason), CheckedAnswer),
        garbles=seams.strikes(Fault.BAD_MACHINE),
    )
    clockwork.sleep(world.random.uniform(*LOAD_S))
    engine.load(
        EngineConfig(
            model_folder="", model_settings=spec.recipe.model_settings, decoding=spec.recipe.decoding, answer_schema=spec.answer_schema
        )
    )
    counters = Counters()
    puts: Puts = InlinePuts() if world.random.random() < 0.5 else SteppedPuts(clockwork, process)  # noqa: PLR2004
    clock, note = clockwork.clock_of(process), partial(_note, world, process)
    worker = compose(
        installation,
        spec,
        version=world.version,
        worker_id=process.name,
        engine=engine,
        renderer=RENDERER,
        counters=counters,
        puts=puts,
        clock=clock,
        note=note,
    )
    process.on_notice = worker.stop
    heartbeat = Heartbeat(
        register=register,
        job=JOB,
        version=world.version,
        worker_id=process.name,
        pulse=worker,
        counters=counters.as_dict,
        lease_s=settings.lease_s,
        renew_s=settings.renew_s,
        clock=clock,
        note=note,
        leave=lambda code: clockwork.kill(process, exit_code=code),
    )
    clockwork.thread(process, lambda: _beat(world, heartbeat))
    for point in worker.run():
        seams.point()
        if point is Point.IDLE:
            clockwork.sleep(IDLE_S)
    register.worker_heartbeat(process.name, counters.as_dict())
    register.worker_left(process.name)


def _beat(world: World, heartbeat: Heartbeat) -> None:
    while True:
        world.clockwork.sleep(BEAT_S)
        with suppress(OperationalError):
            heartbeat.beat()


def _note(world: World, process: Process, event: str, **data: object) -> None:
    world.note(f"{process.name} {event} {_words(data)}")


def _words(data: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in data.items())


class SteppedPuts:
    """Made in a thread of their own, as a worker's are, while its loop goes on."""

    def __init__(self, clockwork: Clockwork, process: Process) -> None:
        self._clockwork, self._process = clockwork, process

    def submit(self, call: Callable[[list[Entry]], int], chunk: list[Entry], /) -> Future[int]:
        """Returns at once."""
        made = _Awaited(self._clockwork.sleep)
        self._clockwork.thread(self._process, lambda: self._make(made, call, chunk))
        return made

    def _make(self, made: Future[int], call: Callable[[list[Entry]], int], chunk: list[Entry]) -> None:
        try:
            made.set_result(call(chunk))
        except Exception as error:  # noqa: BLE001  handed on by `result`, as an executor does
            made.set_exception(error)


class _Awaited(Future[int]):
    """Whoever waits for it lets virtual time go on."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        super().__init__()
        self._sleep = sleep

    def result(self, timeout: float | None = None) -> int:
        """When it is made; `timeout` is not looked at."""
        while not self.done():
            self._sleep(WAIT_S)
        return super().result(0 if timeout is None else timeout)


def void(_value: object) -> None:
    """Nobody looks at it."""


def alive(processes: Sequence[Process]) -> list[Process]:
    """Those that are."""
    return [process for process in processes if process.alive]
