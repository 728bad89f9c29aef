"""The log of a shard: its entries, and the fold that says what a shard's records have come to.

Pure: bytes, slots and retries are in `stores/shard_log.py`. Whoever resumes, commits or audits a shard uses this one fold, so that all of
them agree; DESIGN ("The log of a shard") has the reasons. Entries are named tuples, not dataclasses: millions are made and folded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from batch_assets.core.leasing import LeaseEnd

ROUND_FIRST = 0


class EntryKind(StrEnum):
    """The word for an entry in a slot. `assist` is reserved; a slot that holds one is unreadable to this version."""

    FENCE = "fence"
    ANSWERED = "answered"
    FAILED = "failed"
    DEAD = "dead"
    REOPEN = "reopen"
    PROBE = "probe"
    START = "start"
    PARDON = "pardon"
    ASSIST = "assist"


class Fence(NamedTuple):
    """The claimer's first put: entries of lower epochs that come after it are void."""

    epoch: int
    round: int
    worker: str
    window: int  # how many records this worker admits at most before their entries are put
    previous_end: str | None  # how the lease before this one ended (a LeaseEnd), None for the first


class Answered(NamedTuple):
    """A valid answer; final once it is the first terminal entry of its record."""

    record_id: str
    epoch: int
    attempt: int  # 1 = answered at the first try
    answer: str  # canonical JSON text
    tokens_prompt: int
    tokens_cached: int
    tokens_output: int
    worker: str


class Failed(NamedTuple):
    """One attempt that the record itself used up. The error text is of our own vocabulary, never the record's or the answer's."""

    record_id: str
    epoch: int
    attempt: int
    dead_class: str
    error: str
    tokens_output: int  # computed and thrown away


class Dead(NamedTuple):
    """No further attempt. `attempt` is how many the record used (0: never sent to the engine)."""

    record_id: str
    epoch: int
    attempt: int
    dead_class: str
    error: str


class Reopen(NamedTuple):
    """A redrive: these dead records are open again, with no attempt used."""

    epoch: int
    round: int
    record_ids: tuple[str, ...]


class Probe(NamedTuple):
    """The verdict on an unclean end before this epoch: each group is answered with nobody beside it in the engine, in this order.

    It replaces the verdict before it.
    """

    epoch: int
    groups: tuple[tuple[str, ...], ...]  # record ids


class Start(NamedTuple):
    """The engine gets these records now and no others: what dies after this died of one of them."""

    epoch: int
    record_ids: tuple[str, ...]


class Pardon(NamedTuple):
    """The worker of this epoch found itself unfit: the failures that it put under it are void, and so are the dead letters they led to."""

    epoch: int


Entry = Fence | Answered | Failed | Dead | Reopen | Probe | Start | Pardon
Slot = Sequence[Entry] | None  # None: the bytes were read and do not decode; the slot is occupied and empty

ENTRY_TYPES: Mapping[EntryKind, type[Entry]] = {
    EntryKind.FENCE: Fence,
    EntryKind.ANSWERED: Answered,
    EntryKind.FAILED: Failed,
    EntryKind.DEAD: Dead,
    EntryKind.REOPEN: Reopen,
    EntryKind.PROBE: Probe,
    EntryKind.START: Start,
    EntryKind.PARDON: Pardon,
}


@dataclass(slots=True)
class Suspicion:
    """What unclean ends have left open; empty in a clean history. Who the suspects are is worked out in `core/retries.py`.

    At most one of `window`, `died` and `started` says something at a time.
    """

    window: int = 0  # the owner that died at its normal work had at most so many records without an entry; no verdict on it yet
    owner: str = ""  # who that was
    died: tuple[str, ...] = ()  # the group that the engine had when its owner died; no verdict on it yet
    started: tuple[str, ...] = ()  # the group that the engine has
    groups: tuple[tuple[str, ...], ...] = ()  # of the last verdict
    untried: set[str] = field(default_factory=set)  # records of `groups` that have had no entry since that verdict

    @property
    def is_open(self) -> bool:
        """There was an unclean end that no verdict has been put about."""
        return bool(self.window or self.died)

    @property
    def groups_left(self) -> tuple[tuple[str, ...], ...]:
        """What of the groups is still to be answered alone."""
        left = (tuple(record_id for record_id in group if record_id in self.untried) for group in self.groups)
        return tuple(group for group in left if group)


@dataclass(slots=True)
class Folded:
    """What a log says. `answered` and `dead` share no record; `failed` counts the attempts of each record that failed at least once since
    it was last opened, whatever became of it.
    """

    answered: dict[str, Answered] = field(default_factory=dict)
    dead: dict[str, Dead] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    last_failures: dict[str, Failed] = field(default_factory=dict)  # of the records in `failed`, the latest failure last
    suspicion: Suspicion = field(default_factory=Suspicion)
    reopened: dict[str, int] = field(default_factory=dict)  # dead letters that a redrive opened again -> its round, the latest
    reopens: int = 0  # how often, over all records and rounds
    epoch: int = 0  # the highest fence
    round: int = ROUND_FIRST
    window: int = 0  # of the highest fence
    workers: dict[int, str] = field(default_factory=dict)  # epoch -> who held it
    unreadable_slots: list[int] = field(default_factory=list)
    void_entries: int = 0  # below a fence, or between a round's staged slots and the next fence
    repeated_answers: int = 0  # valid ones that came after the record's terminal entry
    failures: int = 0
    failures_by_class: dict[str, int] = field(default_factory=dict)
    tokens_thrown_away: int = 0  # output tokens of failures, void and repeated answers

    def is_terminal(self, record_id: str) -> bool:
        """True when the record needs no further work in this round."""
        return record_id in self.answered or record_id in self.dead


def fold(slots: Sequence[Slot], *, staged_rounds: Mapping[int, int], pardoned: frozenset[int] = frozenset()) -> Folded:
    """What the slots of one shard, in order, amount to.

    `staged_rounds` maps each round that was staged to its slot count: what lies between that count and the next fence is void. `pardoned`
    are epochs whose failures are void; the fold finds them itself and begins anew, which is rare.
    """
    folded = Folded()
    closed = False
    for number, slot in enumerate(slots):
        closed = closed or staged_rounds.get(folded.round) == number
        if slot is None:
            folded.unreadable_slots.append(number)
            continue
        for entry in slot:
            if isinstance(entry, Fence):
                closed = _take_fence(folded, entry, closed=closed)
            elif closed or entry.epoch < folded.epoch or (pardoned and _is_pardoned(entry, pardoned)):
                _count_void(folded, entry)
            elif isinstance(entry, Answered):
                _take_answer(folded, entry)
            elif isinstance(entry, Failed):
                _take_failure(folded, entry)
            elif isinstance(entry, Pardon) and entry.epoch not in pardoned:
                return fold(slots, staged_rounds=staged_rounds, pardoned=pardoned | {entry.epoch})
            else:
                _take_seldom(folded, entry)
    return folded


def _is_pardoned(entry: Entry, pardoned: frozenset[int]) -> bool:
    return entry.epoch in pardoned and isinstance(entry, Failed | Dead)


def _take_seldom(folded: Folded, entry: Entry) -> None:
    """A valid entry of a kind of which a log has few."""
    if isinstance(entry, Dead):
        if entry.record_id not in folded.answered:
            folded.dead.setdefault(entry.record_id, entry)
            folded.suspicion.untried.discard(entry.record_id)
    elif isinstance(entry, Reopen):
        _take_reopen(folded, entry)
    elif isinstance(entry, Probe):
        folded.suspicion = Suspicion(groups=entry.groups, untried={each for group in entry.groups for each in group})
    elif isinstance(entry, Start):
        folded.suspicion.started = entry.record_ids


def _take_fence(folded: Folded, fence: Fence, *, closed: bool) -> bool:
    """Whether entries are void after this fence."""
    if fence.epoch < folded.epoch:
        folded.void_entries += 1
        return closed
    if fence.round != folded.round:
        folded.suspicion = Suspicion()  # a round ends with every record terminal: nothing is left to suspect
    else:
        _take_end(folded, fence)
    folded.epoch = fence.epoch
    folded.round = fence.round
    folded.window = fence.window
    folded.workers[fence.epoch] = fence.worker
    return False


def _take_end(folded: Folded, fence: Fence) -> None:
    """What the end of the lease before this fence leaves open. A notice, or a node that is known to be gone, suspects nobody; nor does a
    worker that comes back for its own shard: it was stopped for a while, and a name is of one process.
    """
    suspicion = folded.suspicion
    has_died = fence.previous_end == LeaseEnd.EXPIRED and folded.workers.get(folded.epoch) != fence.worker
    if not has_died:
        suspicion.started = ()
    elif any(record_id in suspicion.untried for record_id in suspicion.started):
        suspicion.died, suspicion.started = suspicion.started, ()
    elif not suspicion.untried and not suspicion.window and not suspicion.died:
        # Its owner was past probing, if it had to probe at all. One that died before its own verdict, or between two groups, gave the
        # engine nothing that is in doubt, and what was in doubt before it still is.
        suspicion.window, suspicion.owner = folded.window, folded.workers.get(folded.epoch, "")


def _take_answer(folded: Folded, answered: Answered) -> None:
    if folded.is_terminal(answered.record_id):
        folded.repeated_answers += 1
        folded.tokens_thrown_away += answered.tokens_output
    else:
        folded.answered[answered.record_id] = answered
        if folded.suspicion.untried:
            folded.suspicion.untried.discard(answered.record_id)


def _take_failure(folded: Folded, failed: Failed) -> None:
    folded.failures += 1
    folded.failures_by_class[failed.dead_class] = folded.failures_by_class.get(failed.dead_class, 0) + 1
    folded.tokens_thrown_away += failed.tokens_output
    # Attempts are numbered on by whoever resumes from this fold, so the highest number is their count, and a repeated entry counts once.
    if failed.attempt > folded.failed.get(failed.record_id, 0):
        folded.failed[failed.record_id] = failed.attempt
        folded.last_failures.pop(failed.record_id, None)  # to the end: who fails first is asked again first
        folded.last_failures[failed.record_id] = failed
        folded.suspicion.untried.discard(failed.record_id)


def _take_reopen(folded: Folded, reopen: Reopen) -> None:
    if reopen.round != folded.round or reopen.round == ROUND_FIRST:  # of no redrive: its fence would have begun that round
        folded.void_entries += 1
        return
    for record_id in reopen.record_ids:
        if folded.dead.pop(record_id, None) is not None:
            folded.failed.pop(record_id, None)
            folded.last_failures.pop(record_id, None)
            folded.reopened[record_id] = reopen.round
            folded.reopens += 1


def _count_void(folded: Folded, entry: Entry) -> None:
    folded.void_entries += 1
    if isinstance(entry, Answered | Failed):
        folded.tokens_thrown_away += entry.tokens_output
