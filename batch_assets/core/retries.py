"""Which record is asked next, and who is suspected when an engine dies: decided from a shard's log alone, so that every owner agrees.

Two budgets meet here. A record's own attempts are used up only by failures of its own: an answer that is none, a time limit, or an engine
that died while it had this record and no other. Machines are lost at the cost of the shard (`losses_after` in `leasing.py`).

Nothing is written ahead of a request. Records are admitted in an order that follows from the log (`admission`), and an owner has at most
`window` (it stands in its fence) that are admitted and have no entry: so after an unclean end the suspects are the first `window` of that
order. They are divided into PARTS groups, each answered with nobody beside it; the group that kills its engine is divided again, until one
record dies alone. Only that is an attempt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from batch_assets.core.records import DeadClass
from batch_assets.core.shard_log import Entry, Failed, Folded, Probe

# Restarts for one killer among n suspects: 1 + log16(n) + its attempts. Halving took 9-10 for one and 15-21 for two when it was tried;
# more parts mean smaller groups, and an engine that decodes few at a time.
PARTS: Final = 16
KILLED_TEXT: Final = "the engine died while it had this record and no other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the next owner does about an unclean end. `killed` died alone, which is one attempt of it; None: nobody is blamed."""

    killed: str | None
    groups: tuple[tuple[str, ...], ...]


def admission(ids: Sequence[str], folded: Folded, *, worker: str, attempts_max: int) -> list[int]:
    """Rows (places in `ids`) that `worker` asks, in its order: those that never failed by position, then those that did, the one that
    failed first first. Left out are records with no attempt left, and those whose last one is another worker's to make.

    What is admitted later goes to the end, and entries are put in the order in which they were made: so at any time the records that an
    owner has admitted and that have no entry are the first ones of this list, made from the log as it is then.
    """
    fresh = [row for row, record_id in enumerate(ids) if not folded.is_terminal(record_id) and record_id not in folded.failed]
    again = [each.record_id for each in folded.last_failures.values() if not folded.is_terminal(each.record_id)]
    if not again:
        return fresh
    rows = {record_id: row for row, record_id in enumerate(ids) if record_id in folded.failed}
    mine = [each for each in again if _may_ask(folded.last_failures[each], folded, worker=worker, attempts_max=attempts_max)]
    return fresh + [rows[record_id] for record_id in mine if record_id in rows]  # an id of another shard has no row


def _may_ask(last: Failed, folded: Folded, *, worker: str, attempts_max: int) -> bool:
    """The last attempt is not for the worker that made the one before: another machine, or this one anew, must see the record too."""
    attempts_left = attempts_max - last.attempt
    return attempts_left > 1 or (attempts_left == 1 and folded.workers.get(last.epoch) != worker)


def judge_end(ids: Sequence[str], folded: Folded, *, attempts_max: int, is_engine_proven: bool) -> Verdict | None:
    """What follows from the unclean ends that no verdict has been put about; None when there is none, or nobody to suspect.

    Blame needs an engine that is known to work: while `is_engine_proven` is false (nobody
    has ever had an answer) a record that died alone is only put behind the others.
    """
    suspicion = folded.suspicion
    if suspicion.died:
        return _judge_group(folded, attempts_max=attempts_max, is_engine_proven=is_engine_proven)
    if suspicion.window:
        suspects = admission(ids, folded, worker=suspicion.owner, attempts_max=attempts_max)[: suspicion.window]
        return Verdict(killed=None, groups=tuple(parts([ids[row] for row in suspects]))) if suspects else None
    return None


def _judge_group(folded: Folded, *, attempts_max: int, is_engine_proven: bool) -> Verdict:
    died = folded.suspicion.died
    untried = [record_id for record_id in died if record_id in folded.suspicion.untried]
    others = tuple(group for group in folded.suspicion.groups_left if not set(group) & set(died))
    if len(died) > 1:
        return Verdict(killed=None, groups=(*parts(untried), *others))
    record_id = untried[0]
    if not is_engine_proven:
        return Verdict(killed=None, groups=(*others, died))
    has_attempts = folded.failed.get(record_id, 0) + 1 < attempts_max
    return Verdict(killed=record_id, groups=(*others, died) if has_attempts else others)


def parts(suspects: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """At most PARTS groups of the same size or one less, in order."""
    count = min(PARTS, len(suspects))
    for part in range(count):
        yield tuple(suspects[part * len(suspects) // count : (part + 1) * len(suspects) // count])


def entries_of(verdict: Verdict, folded: Folded) -> list[Entry]:
    """The chunk that the next owner, whose fence is the highest in `folded`, puts before it asks anything."""
    entries: list[Entry] = []
    if verdict.killed is not None:
        attempt = folded.failed.get(verdict.killed, 0) + 1
        entries.append(Failed(verdict.killed, folded.epoch, attempt, DeadClass.ENGINE_KILLED, KILLED_TEXT, tokens_output=0))
    return [*entries, Probe(folded.epoch, verdict.groups)]
