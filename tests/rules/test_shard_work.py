"""One shard in the hands of workers that crash, oversleep and wait for their puts: attempts, answers and what counts as done."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batch_assets.core.answers import AnswerChecker
from batch_assets.core.errors import StaleLeaseError
from batch_assets.core.ports import Completion
from batch_assets.core.records import DeadClass
from batch_assets.core.shard_log import Answered, Dead, Entry, Failed, Fence, fold
from batch_assets.stores.register import Lease
from batch_assets.stores.shard_log import STORE_ATTEMPTS_MAX, ShardLog
from batch_assets.worker.counters import Counters
from batch_assets.worker.feeder import ShardWork, Tools, open_shard
from tests.rules.efforts import Effort
from tests.rules.fold_model import ModelLog, placed
from tests.rules.memory_objects import Fault, MemoryObjects
from tests.support.versions import SCHEMA, answer_text, frozen_frame

VERSION = "v0001-3fa9c1"
IDS = ["a", "b", "c", "d", "e"]
FROZEN = frozen_frame(IDS)
ATTEMPTS_MAX = 3
CHECKER = AnswerChecker(SCHEMA)

recent = st.sampled_from([0, 0, 0, 0, 1, 2])


class AnyRenderer:
    """A prompt is its text's length: what is rendered is no matter here."""

    def render(self, fields: dict[str, str]) -> list[int]:
        return [len(fields["body"])]


class PutOnItsWay:
    """A future that is done when the machine says so, or when somebody waits for it."""

    def __init__(self, call: Callable[[list[Entry]], int], chunk: list[Entry]) -> None:
        self._call, self._chunk = call, chunk
        self._made: int | BaseException | None = None

    def make(self) -> None:
        if self._made is None:
            try:
                self._made = self._call(self._chunk)
            except (StaleLeaseError, TimeoutError) as error:
                self._made = error

    def done(self) -> bool:
        return self._made is not None

    def result(self) -> int:
        self.make()
        if isinstance(self._made, BaseException):
            raise self._made
        assert self._made is not None
        return self._made


class SlowPuts:
    """Nothing is put before it is asked for."""

    def __init__(self) -> None:
        self.on_their_way: list[PutOnItsWay] = []

    def submit(self, call: Callable[[list[Entry]], int], chunk: list[Entry], /) -> Any:
        self.on_their_way.append(PutOnItsWay(call, chunk))
        return self.on_their_way[-1]


@dataclass(slots=True)
class Holder:
    """A worker with one lease of the shard."""

    lease: Lease
    counters: Counters = field(default_factory=Counters)
    puts: SlowPuts = field(default_factory=SlowPuts)
    work: ShardWork | None = None
    in_flight: list[tuple[int, int, str]] = field(default_factory=list)  # row, attempt, record id
    attempts_at_open: dict[str, int] = field(default_factory=dict)
    failed_last: set[str] = field(default_factory=set)  # records that this worker was the last to fail at, under an earlier lease
    failures: Counter[str] = field(default_factory=Counter)  # of this holder, flushed or not


class WorkMachine(RuleBasedStateMachine):
    """Time stands still; a leader that is never wrong ends leases whenever it likes."""

    def __init__(self, struck: Counter[str]) -> None:
        super().__init__()
        self.struck = struck
        self.objects = MemoryObjects()
        self.log = ShardLog(self.objects, job="tickets", version=VERSION, shard=1, pause=lambda _seconds: None)
        self.holders: list[Holder] = []
        self.epoch = 0
        self.staged_slots: int | None = None
        self.somebody_claims()

    @precondition(lambda self: self.staged_slots is None)
    @rule()
    def somebody_claims(self) -> None:
        self.epoch += 1
        lease = Lease(
            job="tickets",
            version=VERSION,
            shard=1,
            epoch=self.epoch,
            round=0,
            worker=f"w{self.epoch % 2}",  # two take turns, and a crash may let the same one come again
            previous_end=None,
            staged_rounds={},
            rows=len(IDS),
            to_answer=len(IDS),
            input_attempt="a1",
            input_sha256="",
        )
        self.holders.append(Holder(lease))

    @rule(back=recent)
    def holder_opens_the_shard(self, back: int) -> None:
        holder = self._holder(back)
        if holder is None or holder.work is not None:
            return
        tools = Tools(
            renderer=AnyRenderer(),  # pyright: ignore[reportArgumentType]
            checker=CHECKER,
            attempts_max=ATTEMPTS_MAX,
            window=8,
            counters=holder.counters,
            puts=holder.puts,
        )
        superseded = self._highest_fence() > holder.lease.epoch
        with self._alive(holder):
            holder.work = open_shard(holder.lease, log=self.log, frozen=FROZEN, tools=tools, now_s=0, is_engine_proven=lambda: True)
            assert not superseded, "it went to work although a successor's fence stands in the log"
            folded = ModelLog(self.objects.slots(), staged_rounds={}).folded()
            holder.attempts_at_open = dict(folded.failed)
            holder.failed_last = {each for each, last in folded.last_failures.items() if folded.workers[last.epoch] == holder.lease.worker}

    @rule(back=recent, count=st.integers(1, 5))
    def holder_feeds(self, back: int, count: int) -> None:
        holder = self._opened(back)
        if holder is None or holder.work is None:
            return
        for row, attempt, record_id, _ in islice(holder.work.prompts(0, in_flight=len(holder.in_flight)), count):
            assert attempt == self._attempts(holder, record_id) + 1, "an attempt was lost, or counted twice"
            assert attempt <= ATTEMPTS_MAX
            is_ours = holder.failures[record_id] > 0 or record_id in holder.failed_last
            assert attempt < ATTEMPTS_MAX or not is_ours, "the last attempt is another worker's"
            assert record_id not in {live for _, _, live in holder.in_flight}
            holder.in_flight.append((row, attempt, record_id))

    @rule(back=recent, which=st.integers(0, 4), fate=st.sampled_from(["answered", "answered", "answered", "invalid", "timed out"]))
    def engine_finishes_one(self, back: int, which: int, fate: str) -> None:
        holder = self._opened(back)
        if holder is None or holder.work is None or not holder.in_flight:
            return
        row, attempt, record_id = holder.in_flight.pop(which % len(holder.in_flight))
        if fate == "timed out":
            holder.work.fail(row, attempt, DeadClass.TIMED_OUT, "no answer in time", tokens_output=0)
        else:
            text = answer_text(record_id) if fate == "answered" else "{"
            holder.work.take(row, attempt, Completion(record_id, text, "stop", 10, 0, 5), 0)
        holder.failures[record_id] += fate != "answered"

    @rule(back=recent)
    def its_failures_are_believed(self, back: int) -> None:
        """There is evidence that they are the records' own."""
        holder = self._opened(back)
        if holder is not None and holder.work is not None:
            holder.work.accept_failures(0)

    @rule(back=recent, bad=st.integers(0, 6), flushes=st.booleans(), wait=st.booleans())
    def holder_does_the_rest(self, back: int, bad: int, flushes: bool, wait: bool) -> None:
        """Else few histories would ever finish a shard. So many of its answers are invalid; the last put may still be on its way."""
        holder = self._opened(back)
        for number in range(len(IDS) + bad):
            if holder in self.holders:
                self.holder_feeds(back, len(IDS))
                self.engine_finishes_one(back, 0, "invalid" if number < bad else "answered")
                self.its_failures_are_believed(back)
                if flushes:
                    self.holder_flushes(back, wait=number >= len(IDS))
        if holder in self.holders:
            self.holder_flushes(back, wait=wait)
        if self.staged_slots is None:
            self.present_holder_stages_when_it_thinks_it_is_done()

    @rule(back=recent, wait=st.booleans())
    def holder_flushes(self, back: int, wait: bool) -> None:
        holder = self._opened(back)
        if holder is not None and holder.work is not None:
            with self._alive(holder):
                holder.work.flush(None, 0, wait=wait)

    @rule(back=recent)
    def its_put_returns(self, back: int) -> None:
        holder = self._opened(back)
        if holder is not None:
            for put in holder.puts.on_their_way:
                put.make()

    @rule(back=recent)
    def holder_crashes(self, back: int) -> None:
        holder = self._holder(back)
        if holder is not None:
            self.holders.remove(holder)

    @precondition(lambda self: self.staged_slots is None)
    @rule()
    def present_holder_stages_when_it_thinks_it_is_done(self) -> None:
        holder = next((each for each in self.holders if each.lease.epoch == self.epoch), None)
        if holder is None or holder.work is None or not holder.work.is_complete:
            return
        self.staged_slots = holder.work.slots
        folded = fold(self.log.read(self.staged_slots), staged_rounds={0: self.staged_slots})
        assert {*folded.answered, *folded.dead} == set(IDS), "staged, and a record has no outcome"
        assert all(folded.failed[record_id] == ATTEMPTS_MAX for record_id in folded.dead), "dead before its attempts were used up"
        self.struck["staged"] += 1

    @rule(coming=st.sampled_from([[Fault.LOST], [Fault.DOWN, Fault.LATE], [Fault.LATE] * STORE_ATTEMPTS_MAX]))
    def store_will_fail(self, coming: list[Fault]) -> None:
        self.objects.faults.extend(coming)

    @rule()
    def late_puts_arrive(self) -> None:
        self.objects.arrive()

    # --- what holds after every step -------------------------------------------------------------------------------------------------

    @invariant()
    def every_answer_is_about_its_record(self) -> None:
        for _, entry in placed(self.objects.slots()):
            if isinstance(entry, Answered):
                assert entry.answer == answer_text(entry.record_id)

    @invariant()
    def nothing_counts_before_it_stands_in_the_log(self) -> None:
        logged = Counter((type(entry), entry.epoch) for _, entry in placed(self.objects.slots()))
        for holder in self.holders:
            assert holder.counters.answered <= logged[Answered, holder.lease.epoch]
            assert holder.counters.dead <= logged[Dead, holder.lease.epoch]

    @invariant()
    def a_shard_with_nothing_to_do_is_staged_or_left_to_others(self) -> None:
        for work in (holder.work for holder in self.holders if not holder.in_flight):
            if work is not None and work.is_flushed and not work.has_queued and not work.withheld:
                assert work.is_complete != work.is_left_to_others, "nobody would ever end this shard"

    @invariant()
    def no_attempt_is_written_twice(self) -> None:
        """Of those that count: a void one was made by somebody who had lost the shard."""
        slots = self.objects.slots()
        model = ModelLog(slots, staged_rounds={})
        counted = [
            (each.entry.record_id, each.entry.attempt)
            for index, each in enumerate(model.entries)
            if isinstance(each.entry, Failed) and not model.is_void(index)
        ]
        assert len(counted) == len(set(counted))

    @contextmanager
    def _alive(self, holder: Holder) -> Iterator[None]:
        """A worker that is told it is stale, or whose store gives up, is gone."""
        try:
            yield
        except (StaleLeaseError, TimeoutError) as error:
            self.struck[type(error).__name__] += 1
            self.holders.remove(holder)

    def _attempts(self, holder: Holder, record_id: str) -> int:
        return holder.attempts_at_open.get(record_id, 0) + holder.failures[record_id]

    def _holder(self, back: int) -> Holder | None:
        return self.holders[max(-1 - back, -len(self.holders))] if self.holders else None

    def _opened(self, back: int) -> Holder | None:
        self.holder_opens_the_shard(back)
        return self._holder(back)

    def _highest_fence(self) -> int:
        return max((entry.epoch for _, entry in placed(self.objects.slots()) if isinstance(entry, Fence)), default=0)


def test_a_shard_comes_to_its_end_whatever_its_workers_do(effort: Effort) -> None:
    struck: Counter[str] = Counter()
    effort.run(lambda: WorkMachine(struck), histories=100, steps=20)
    assert set(struck) == {"staged", "StaleLeaseError", "TimeoutError"}


def test_a_worker_that_finds_its_successors_fence_in_the_log_does_not_begin() -> None:
    """It would compute a whole shard of void answers before the register told it."""
    machine = WorkMachine(Counter())
    machine.somebody_claims()
    machine.holder_opens_the_shard(back=0)
    assert machine.holders[0].lease.epoch == 1
    machine.holder_opens_the_shard(back=1)
    assert [holder.lease.epoch for holder in machine.holders] == [2]


def test_a_worker_that_comes_again_leaves_the_last_attempt_to_others_still() -> None:
    machine = WorkMachine(Counter())
    machine.holder_does_the_rest(back=0, bad=len(IDS) + 1, flushes=True, wait=True)  # the first record fails twice
    machine.somebody_claims()
    machine.somebody_claims()  # the first worker again
    machine.holder_opens_the_shard(back=0)
    again = machine.holders[-1]
    assert again.attempts_at_open[IDS[0]] == ATTEMPTS_MAX - 1
    assert IDS[0] in again.failed_last
    assert again.work is not None
    assert again.work.is_left_to_others
    machine.somebody_claims()
    machine.holder_does_the_rest(back=0, bad=0, flushes=True, wait=True)
    assert machine.struck["staged"] == 1
