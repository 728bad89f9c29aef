"""The log of a shard said once more: DESIGN's sentences over the whole list of entries, one record and one entry at a time.

Nothing is carried along from slot to slot: each question is answered by looking at everything that stands before. Quadratic on purpose.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from batch_assets.core.shard_log import Answered, Dead, Entry, Failed, Fence, Folded, Reopen, Slot


class Placed(NamedTuple):
    """An entry and where it stands."""

    slot: int
    entry: Entry


def placed(slots: Sequence[Slot]) -> list[Placed]:
    """Every entry that can be read, in the order that all writers agree on."""
    return [Placed(number, entry) for number, slot in enumerate(slots) for entry in slot or ()]


class ModelLog:
    """A log that is complete: what was put, in order, and each staged round's slot count.

    It knows no unclean ends and no pardons (`Probe`, `Start`, `Pardon`): logs given to it have none, so that nobody is ever suspected.
    """

    def __init__(self, slots: Sequence[Slot], *, staged_rounds: Mapping[int, int]) -> None:
        self.slots = slots
        self.staged_rounds = staged_rounds
        self.entries = placed(slots)

    def highest_fence_before(self, index: int) -> int:
        """ "an entry is valid only if its epoch is >= the highest fence before it (a lower fence is itself void)" """
        return max((each.entry.epoch for each in self.entries[:index] if isinstance(each.entry, Fence)), default=0)

    def is_standing_fence(self, index: int) -> bool:
        entry = self.entries[index].entry
        return isinstance(entry, Fence) and entry.epoch >= self.highest_fence_before(index)

    def round_at_slot(self, slot: int) -> int:
        """Of the last standing fence in an earlier slot."""
        rounds = [each.entry.round for index, each in enumerate(self.entries) if each.slot < slot and self.is_standing_fence(index)]
        return rounds[-1] if rounds else 0

    def is_between_staging_and_the_next_fence(self, index: int) -> bool:
        """ "what lies between a round's staged slot count and the next fence is void for every epoch" """
        return any(
            end <= self.entries[index].slot
            and self.round_at_slot(end) == round_
            and not any(self.is_standing_fence(other) for other in range(index) if self.entries[other].slot >= end)
            for round_, end in self.staged_rounds.items()
        )

    def round_at(self, index: int) -> int:
        """Of the last standing fence before this entry."""
        rounds = [
            each.entry.round
            for other, each in enumerate(self.entries[:index])
            if isinstance(each.entry, Fence) and self.is_standing_fence(other)
        ]
        return rounds[-1] if rounds else 0

    def is_void(self, index: int) -> bool:
        entry = self.entries[index].entry
        if isinstance(entry, Fence):
            return not self.is_standing_fence(index)
        if isinstance(entry, Reopen) and not entry.round == self.round_at(index) > 0:
            return True  # it stands behind the fence of its own round, and the first round is no redrive's
        return entry.epoch < self.highest_fence_before(index) or self.is_between_staging_and_the_next_fence(index)

    def folded(self) -> Folded:
        """As `fold` must say it."""
        valid = [each.entry for index, each in enumerate(self.entries) if not self.is_void(index)]
        void = [each.entry for index, each in enumerate(self.entries) if self.is_void(index)]
        answered, dead, repeated, failed, last, reopens = {}, {}, [], {}, {}, {}
        for record_id in dict.fromkeys(entry.record_id for entry in valid if isinstance(entry, Answered | Dead | Failed)):
            outcome = outcome_of(record_id, valid)
            repeated += outcome.repeated
            if outcome.reopens:
                reopens[record_id] = outcome.reopens
            if isinstance(outcome.final, Answered):
                answered[record_id] = outcome.final
            elif isinstance(outcome.final, Dead):
                dead[record_id] = outcome.final
            attempts = max((failure.attempt for failure in outcome.failures), default=0)
            if attempts:
                failed[record_id] = attempts
                last[record_id] = next(failure for failure in outcome.failures if failure.attempt == attempts)
        fences = [entry for entry in valid if isinstance(entry, Fence)]
        failures = [entry for entry in valid if isinstance(entry, Failed)]
        thrown_away = [*failures, *repeated, *(entry for entry in void if isinstance(entry, Answered | Failed))]
        return Folded(
            answered=answered,
            dead=dead,
            failed=failed,
            last_failures=last,
            reopened={record_id: rounds[-1] for record_id, rounds in reopens.items()},
            reopens=sum(len(rounds) for rounds in reopens.values()),
            epoch=fences[-1].epoch if fences else 0,
            round=fences[-1].round if fences else 0,
            window=fences[-1].window if fences else 0,
            workers={fence.epoch: fence.worker for fence in fences},
            unreadable_slots=[number for number, slot in enumerate(self.slots) if slot is None],
            void_entries=len(void),
            repeated_answers=len(repeated),
            failures=len(failures),
            failures_by_class={
                name: sum(entry.dead_class == name for entry in failures) for name in {entry.dead_class for entry in failures}
            },
            tokens_thrown_away=sum(entry.tokens_output for entry in thrown_away),
        )


class RecordOutcome(NamedTuple):
    """What became of one record."""

    final: Answered | Dead | None
    failures: list[Failed]  # since it was last opened
    repeated: list[Answered]  # answers that came too late
    reopens: list[int]  # rounds of the redrives that found it dead


def outcome_of(record_id: str, valid: Sequence[Entry]) -> RecordOutcome:
    """ "the first valid terminal entry of a record wins; an answer is final for ever, a dead until a reopen names the record" """
    final: Answered | Dead | None = None
    failures: list[Failed] = []
    repeated: list[Answered] = []
    reopens: list[int] = []
    for entry in valid:
        match entry:
            case Reopen() if record_id in entry.record_ids and isinstance(final, Dead):
                final, failures = None, []
                reopens.append(entry.round)
            case Failed() if entry.record_id == record_id:
                failures.append(entry)
            case Answered() if entry.record_id == record_id and final is not None:
                repeated.append(entry)
            case Answered() | Dead() if entry.record_id == record_id:
                final = final or entry
            case _:
                pass
    return RecordOutcome(final, failures, repeated, reopens)
