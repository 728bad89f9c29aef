"""Writers of one log: whatever the store does to their puts and whoever else writes, no entry is lost and none stands there twice."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batch_assets.core.errors import StaleLeaseError, UnfitEnvironmentError
from batch_assets.core.shard_log import Answered, Dead, Entry, Failed, Fence, Folded, Reopen, Slot, fold
from batch_assets.stores.shard_log import STORE_ATTEMPTS_MAX, LogWriter, ShardLog
from tests.rules.efforts import Effort
from tests.rules.fold_model import ModelLog, placed
from tests.rules.memory_objects import Fault, MemoryObjects

RECORDS = "abcd"
ATTEMPTS_MAX = 3
FOLDER = "tickets/versions/v0001-3fa9c1/log/shard-00001"

recent = st.sampled_from([0, 0, 0, 0, 1, 2])
faults = st.one_of(
    st.lists(st.sampled_from([Fault.DOWN, Fault.LOST, Fault.LATE, Fault.NONE]), min_size=1, max_size=4),
    st.sampled_from([Fault.LATE, Fault.DOWN]).map(lambda fault: [fault] * STORE_ATTEMPTS_MAX),  # the caller gives up
)


def highest_fence(slots: Sequence[Slot]) -> int:
    """0 when there is none."""
    return max((entry.epoch for _, entry in placed(slots) if isinstance(entry, Fence)), default=0)


def outcome(kind: type[Entry], record_id: str, *, epoch: int, attempt: int) -> Entry:
    if kind is Failed:
        return Failed(record_id, epoch, attempt, "schema", "", 7)
    if kind is Answered:
        return Answered(record_id, epoch, attempt, f'{{"n":{epoch}}}', 10, 0, 5, f"w{epoch}")
    return Dead(record_id, epoch, attempt, "schema", "")


@dataclass(slots=True)
class Holder:
    """Somebody who claimed an epoch; it may sleep as long as it likes and then go on."""

    epoch: int
    round: int
    staged_rounds: dict[int, int]
    read: list[Slot] | None = None
    writer: LogWriter | None = None
    folded: Folded = field(default_factory=Folded)  # what it believes, its own acknowledged puts included
    is_lost: bool = False  # it was told that it is stale, or its store gave up

    def open_records(self) -> list[str]:
        return [record_id for record_id in RECORDS if not self.folded.is_terminal(record_id)]


class LogMachine(RuleBasedStateMachine):
    """One shard. The register's part (epochs, the cut of a staged round) is played by the machine, and played right."""

    def __init__(self, struck: Counter[str]) -> None:
        super().__init__()
        self.struck = struck
        self.objects = MemoryObjects()
        self.log = ShardLog(self.objects, job="tickets", version="v0001-3fa9c1", shard=1, pause=lambda _seconds: None)
        self.holders: list[Holder] = []
        self.staged_rounds: dict[int, int] = {}
        self.round = 0
        self.at_staging: dict[int, Folded] = {}
        self._claim()

    # --- those who hold the shard, or once did --------------------------------------------------------------------------------------

    @precondition(lambda self: self.round not in self.staged_rounds)
    @rule()
    def somebody_claims(self) -> None:
        self._claim()

    def _claim(self) -> None:
        self.holders.append(Holder(len(self.holders) + 1, self.round, dict(self.staged_rounds)))

    @rule(back=recent)
    def holder_reads(self, back: int) -> None:
        holder = self._holder(back)
        if holder.read is None:
            holder.read = self.log.read(None)

    @rule(back=recent)
    def holder_puts_its_fence(self, back: int) -> None:
        holder = self._holder(back)
        if holder.writer is not None:
            return
        self.holder_reads(back)
        assert holder.read is not None
        holder.writer = self.log.writer(epoch=holder.epoch, next_slot=len(holder.read))
        fence = Fence(holder.epoch, holder.round, f"w{holder.epoch}", 4, None)
        if self._put(holder, [fence]):
            holder.folded = fold([*holder.read, *holder.writer.passed, [fence]], staged_rounds=holder.staged_rounds)
            holder.is_lost = holder.folded.epoch > holder.epoch  # a successor's fence stood there before it looked

    @rule(back=recent, kinds=st.lists(st.sampled_from([Answered, Answered, Failed, Dead]), min_size=1, max_size=3))
    def holder_puts_outcomes(self, back: int, kinds: list[type[Entry]]) -> None:
        """Each of another record: the next one that it believes open."""
        self.holder_puts_its_fence(back)
        holder = self._holder(back)
        if holder.is_lost or holder.writer is None:
            return
        entries = [self._entry(kind, record_id, holder) for kind, record_id in zip(kinds, holder.open_records(), strict=False)]
        if entries and self._put(holder, entries):
            for entry in entries:
                self._believe(holder.folded, entry)
            self._check_that_they_count(holder, entries)

    def _entry(self, kind: type[Entry], record_id: str, holder: Holder) -> Entry:
        attempts = holder.folded.failed.get(record_id, 0)
        is_spent = attempts >= ATTEMPTS_MAX and kind is Failed
        return outcome(Dead if is_spent else kind, record_id, epoch=holder.epoch, attempt=attempts + (kind is not Dead and not is_spent))

    def _believe(self, folded: Folded, entry: Entry) -> None:
        match entry:
            case Answered():
                folded.answered[entry.record_id] = entry
            case Dead():
                folded.dead[entry.record_id] = entry
            case Failed():
                folded.failed[entry.record_id] = entry.attempt
            case _:
                pass

    def _put(self, holder: Holder, entries: list[Entry]) -> bool:
        """True when it returned; otherwise this holder does nothing more."""
        if holder.is_lost or holder.writer is None:
            return False
        try:
            slot = holder.writer.put(entries)
        except StaleLeaseError:
            assert highest_fence(self.objects.slots()) > holder.epoch, "told to stop without a higher fence"
            end = "stale"
        except TimeoutError:
            end = "gave up"
        else:
            passed = self.objects.slots()[: slot + 1][len(holder.read or ()) :]
            assert highest_fence(passed) <= holder.epoch, "a higher fence was passed without a word"
            end = "returned"
        self.struck[end] += 1
        holder.is_lost = end != "returned"
        return not holder.is_lost

    def _check_that_they_count(self, holder: Holder, entries: list[Entry]) -> None:
        """What was acknowledged is what every later reader finds, unless the shard was staged before: then nobody may add to it."""
        if holder.round in self.staged_rounds:
            return
        folded = fold(self.objects.slots(), staged_rounds=self.staged_rounds)
        for entry in entries:
            match entry:
                case Answered():
                    assert folded.answered[entry.record_id] == entry
                case Dead():
                    assert folded.dead[entry.record_id] == entry
                case Failed():
                    assert folded.failed[entry.record_id] == entry.attempt
                case _:
                    raise AssertionError

    # --- the store -------------------------------------------------------------------------------------------------------------------

    @rule(coming=faults)
    def store_will_fail(self, coming: list[Fault]) -> None:
        self.objects.faults.extend(coming)

    @rule()
    def late_puts_arrive(self) -> None:
        self.objects.arrive()

    @rule()
    def something_unreadable_takes_a_slot(self) -> None:
        free = len(self.objects.slots())
        self.objects.stored[f"{FOLDER}/{free:08d}.arrow"] = b"cut off"

    # --- the supervisor --------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.round not in self.staged_rounds)
    @rule()
    def present_holder_stages(self) -> None:
        """The last to claim, when all that it put was acknowledged."""
        holder = self.holders[-1]
        if holder.writer is None or holder.is_lost or highest_fence(self.objects.slots()) > holder.epoch:
            return
        slots = self.staged_rounds[self.round] = holder.writer.next_slot
        folded = fold(self.log.read(slots), staged_rounds=self.staged_rounds)
        assert (folded.answered, folded.dead, folded.failed) == (holder.folded.answered, holder.folded.dead, holder.folded.failed)
        self.at_staging[self.round] = folded
        self.struck["staged"] += 1

    @precondition(lambda self: self.round in self.staged_rounds)
    @rule()
    def shard_is_sent_back(self) -> None:
        del self.staged_rounds[self.round], self.at_staging[self.round]
        self._claim()

    @precondition(lambda self: self.round in self.staged_rounds)
    @rule()
    def shard_is_redriven(self) -> None:
        """What the committer has read is settled: the dead of this round are open again, in the next one."""
        dead = tuple(sorted(self.at_staging[self.round].dead))
        self.round += 1
        self._claim()
        holder = self.holders[-1]
        holder.read = self.log.read(None)
        holder.writer = self.log.writer(epoch=holder.epoch, next_slot=len(holder.read))
        chunk = [Fence(holder.epoch, self.round, "supervisor", 4, None), Reopen(holder.epoch, self.round, dead)]
        if self._put(holder, chunk):
            holder.folded = fold([*holder.read, *holder.writer.passed, chunk], staged_rounds=holder.staged_rounds)
            assert set(holder.open_records()) >= set(dead)
            assert not set(dead) & set(holder.folded.failed)
            self.struck["redriven"] += 1

    # --- what holds after every step -------------------------------------------------------------------------------------------------

    @invariant()
    def no_entry_stands_there_twice(self) -> None:
        entries = [(type(entry), *entry[:3]) for _, entry in placed(self.objects.slots())]
        assert len(entries) == len(set(entries))

    @invariant()
    def fold_and_model_agree_on_what_it_says(self) -> None:
        slots = self.objects.slots()
        assert fold(slots, staged_rounds=self.staged_rounds) == ModelLog(slots, staged_rounds=self.staged_rounds).folded()

    @invariant()
    def what_was_staged_is_what_the_committer_reads(self) -> None:
        for round_, at_staging in self.at_staging.items():
            slots = self.objects.slots()[: self.staged_rounds[round_]]
            earlier = {number: end for number, end in self.staged_rounds.items() if number <= round_}
            assert fold(slots, staged_rounds=earlier) == at_staging
            later = fold(self.objects.slots(), staged_rounds=self.staged_rounds)
            assert at_staging.answered.items() <= later.answered.items()

    def _holder(self, back: int) -> Holder:
        return self.holders[max(-1 - back, -len(self.holders))]


def test_no_entry_is_lost_or_doubled_whatever_the_store_does(effort: Effort) -> None:
    struck: Counter[str] = Counter()
    effort.run(lambda: LogMachine(struck), histories=150, steps=30)
    assert set(struck) == {"returned", "stale", "gave up", "staged", "redriven"}


def test_a_staged_log_that_has_a_gap_is_an_error_and_never_a_shorter_log(effort: Effort) -> None:
    @effort.settings(examples=20)
    @given(st.integers(1, 5), st.data())
    def check(slots: int, data: st.DataObject) -> None:
        objects = MemoryObjects()
        log = ShardLog(objects, job="tickets", version="v0001-3fa9c1", shard=1)
        writer = log.writer(epoch=1, next_slot=0)
        for number in range(slots):
            writer.put([Dead(str(number), 1, 3, "schema", "")])
        gap = data.draw(st.integers(0, slots - 1))
        del objects.stored[f"{FOLDER}/{gap:08d}.arrow"]
        with pytest.raises(UnfitEnvironmentError, match="has a gap"):
            log.read(slots)

    check()


def test_what_a_put_leaves_out_stands_in_the_log_under_its_own_epoch(effort: Effort) -> None:
    """Also for writers that should have stopped: each begins anywhere, as if it had read what is below and believed none of it."""
    puts = st.lists(
        st.tuples(st.integers(1, 2), st.sampled_from("ab"), st.sampled_from([Answered, Failed, Dead]), st.integers(0, 9)), max_size=8
    )

    @effort.settings(examples=150)
    @given(puts)
    def check(puts: list[tuple[int, str, type[Entry], int]]) -> None:
        objects = MemoryObjects()
        log = ShardLog(objects, job="tickets", version="v0001-3fa9c1", shard=1)
        for epoch, record_id, kind, start in puts:
            log.writer(epoch=epoch, next_slot=min(start, len(objects.slots()))).put([outcome(kind, record_id, epoch=epoch, attempt=1)])
            ours = [entry for _, entry in placed(objects.slots()) if entry.epoch == epoch and entry[0] == record_id]
            assert any(isinstance(entry, Failed) == (kind is Failed) for entry in ours)

    check()
