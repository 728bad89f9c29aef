"""The real worker loop over real stores and the scripted engine, driven step by step under a clock of the test's own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest

from batch_assets.core.answers import AnswerChecker
from batch_assets.core.breakers import Evidence
from batch_assets.core.ports import Completion, EngineConfig, Request
from batch_assets.core.prompting import PromptRenderer, parse_prompt
from batch_assets.core.request_ids import request_parts
from batch_assets.core.shard_log import Entry, Folded, fold
from batch_assets.engines.scripted import Script, ScriptedEngine
from batch_assets.engines.tokenizers import tokenizer_for
from batch_assets.worker.__main__ import VersionShards
from batch_assets.worker.counters import Counters
from batch_assets.worker.feeder import InlinePuts, Puts, Tools
from batch_assets.worker.loop import Point, Worker
from tests.support.jobs import PROMPT
from tests.support.versions import Planned, plan_by_hand

TURN_S = 0.1
RESTARTS_MAX = 20
POINTS_MAX = 20_000  # a loop that yields more often than this hangs


class CountingEngine(ScriptedEngine):
    """The scripted engine, and what was asked of it, as (record id, attempt)."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.asked: list[tuple[str, int]] = []
        self.live_max = 0

    def submit(self, request: Request) -> None:
        parts = request_parts(request.request_id)
        assert parts is not None
        self.asked.append((parts.record_id, parts.attempt))
        super().submit(request)
        self.live_max = max(self.live_max, len(self._live))

    def poll(self) -> list[Completion]:
        return super().poll()

    def asked_of(self, record_id: str) -> int:
        """How often the engine was asked about one record."""
        return sum(1 for asked, _ in self.asked if asked == record_id)


@dataclass
class Driven:
    """A worker and the clock under which it is driven; each point takes TURN_S."""

    worker: Worker
    engine: CountingEngine
    counters: Counters
    planned: Planned
    now_s: list[float]
    points: list[Point] = field(default_factory=list)
    leases_max: int = 0
    worker_id: str = ""
    restarts: int = 0
    make: Callable[[str], Worker] = field(default=lambda _: pytest.fail("no way to make another"))
    notes: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)

    def turns(self) -> Iterator[Point]:
        """Points of the loop, the clock moved on after each."""
        for point in self.worker.run():
            self.points.append(point)
            self.leases_max = max(self.leases_max, len(self.worker.leases))
            assert len(self.points) < POINTS_MAX, "the worker does not end"
            yield point
            self.now_s[0] += TURN_S

    def until(self, condition: Callable[[Point], bool]) -> Iterator[Point]:
        """Drives to the first point where it holds and gives the rest of the run; dropping that is a crash."""
        turns = self.turns()
        for point in turns:
            if condition(point):
                return turns
        raise AssertionError("the worker ended before that")

    def finish(self) -> None:
        """Drives until every shard is staged, then tells the worker to stop.

        A worker that left for the sake of a last attempt is followed by another one with the same engine, as a supervisor would start it.
        """
        for _ in range(RESTARTS_MAX):
            for point in self.turns():
                if point is Point.IDLE and not open_shards(self.planned):
                    self.worker.stop()
            if not open_shards(self.planned):
                return
            self.restarts += 1
            self.worker = self.make(f"{self.worker_id}.{self.restarts}")
        raise AssertionError("the shards are not finished, whoever works on them")


class LatePuts:
    """A slow disk: a put is made when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, call: Callable[[list[Entry]], int], chunk: list[Entry], /) -> Future[int]:
        """Nothing is written yet."""
        made = _Awaited(self)
        self.waiting.append(lambda: made.settle(call, chunk))
        return made

    def make(self) -> None:
        """Everything that waits, in order."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each()


class _Awaited(Future[int]):
    def __init__(self, puts: LatePuts) -> None:
        super().__init__()
        self._puts = puts

    def settle(self, call: Callable[[list[Entry]], int], chunk: list[Entry]) -> None:
        try:
            self.set_result(call(chunk))
        except Exception as error:  # noqa: BLE001  raised by `result`
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> int:
        if not self.done():
            self._puts.make()
        return super().result(timeout)


def plan(installation, shards: Mapping[int, Sequence[str]], **changes) -> Planned:
    """A version whose prompt is a real one."""
    return plan_by_hand(installation, shards, prompt=PROMPT, **changes)


def ids(count: int, *, start: int = 0) -> list[str]:
    """Record ids T-0000 …"""
    return [f"T-{number:04d}" for number in range(start, start + count)]


def drive(
    planned: Planned,
    *,
    worker_id: str = "w1",
    script: Mapping[str, object] | None = None,
    attempts_max: int = 3,
    answer_timeout_s: float = 5.0,
    flush_s: float = 2.0,
    renderer: PromptRenderer | None = None,
    puts: Puts | None = None,
) -> Driven:
    """A worker that has loaded the scripted engine and claimed nothing yet."""
    spec = planned.installation.specs().read(planned.job, planned.version)
    engine = CountingEngine(Script.model_validate({"max_num_seqs": 4, **(script or {})}))
    engine.load(
        EngineConfig(
            model_folder="", model_settings=spec.recipe.model_settings, decoding=spec.recipe.decoding, answer_schema=spec.answer_schema
        )
    )
    counters = Counters()
    tools = Tools(
        renderer=renderer or PromptRenderer(parse_prompt(spec.prompt), tokenizer_for("scripted", "")),
        checker=AnswerChecker(spec.answer_schema),
        attempts_max=attempts_max,
        window=2 * engine.max_num_seqs,
        counters=counters,
        puts=puts or InlinePuts(),
    )
    now_s = [1000.0]
    notes: list[tuple[str, Mapping[str, object]]] = []

    def make(name: str) -> Worker:
        return Worker(
            job=planned.job,
            version=planned.version,
            worker_id=name,
            register=planned.installation.register,
            shards=VersionShards(planned.installation),
            engine=engine,
            tools=replace(tools, evidence=Evidence()),
            answer_timeout_s=answer_timeout_s,
            flush_s=flush_s,
            clock=lambda: now_s[0],
            note=lambda event, **data: notes.append((event, data)),
        )

    return Driven(make(worker_id), engine, counters, planned, now_s, notes=notes, worker_id=worker_id, make=make)


def open_shards(planned: Planned) -> list[int]:
    """Numbers of shards that are not staged yet."""
    rows = planned.installation.register.shards(planned.job, planned.version)
    return [row.number for row in rows if row.state not in ("staged", "committed")]


def folded(planned: Planned, shard: int) -> Folded:
    """What the log says, as the committer would read it: exactly the staged slots, or all there are."""
    (row,) = planned.installation.register.shards(planned.job, planned.version, [shard])
    log = planned.installation.shard_log(job=planned.job, version=planned.version, shard=shard)
    return fold(log.read(row.staged_slots), staged_rounds=row.staged_rounds)


def expire_all(planned: Planned) -> None:
    """What a leader does with leases that nobody renews."""
    for lease in planned.installation.register.leased(planned.job, planned.version):
        assert planned.installation.register.expire(
            job=planned.job, version=planned.version, shard=lease.number, epoch=lease.epoch, renewals=lease.renewals
        )
