"""One leased shard at work: which record goes to the engine next, what its answer comes to, and what is put in the log when.

A record counts as done only after the put that holds it has returned. Who claims, polls and stages is in `loop.py`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final, Protocol

import polars as pl

from batch_assets.core.answers import AnswerChecker, InvalidAnswer
from batch_assets.core.breakers import Evidence
from batch_assets.core.errors import RecordRejectedError, StaleLeaseError
from batch_assets.core.ports import Completion, Request
from batch_assets.core.prompting import PromptRenderer, RenderError
from batch_assets.core.records import FIELD_PREFIX, TO_ANSWER, DeadClass
from batch_assets.core.request_ids import CONTROL_ATTEMPT, request_id
from batch_assets.core.retries import admission, entries_of, judge_end
from batch_assets.core.shard_log import Answered, Dead, Entry, Failed, Fence, Folded, Pardon, Slot, Start, fold
from batch_assets.stores.register import Lease
from batch_assets.stores.shard_log import CHUNK_ENTRIES_MAX, LogWriter, ShardLog
from batch_assets.worker.counters import Counters

# Finished and not yet put, of one shard: one chunk on its way and one that fills. More, and the engine waits for the store, so that the
# suspects after an unclean end stay few.
UNPUT_MAX: Final = 2 * CHUNK_ENTRIES_MAX


class Puts(Protocol):
    """Where puts are made: a thread of its own in a worker, so that the engine is fed while a disk or a network takes its time."""

    def submit(self, call: Callable[[list[Entry]], int], chunk: list[Entry], /) -> Future[int]:
        """Runs it, now or soon; one at a time."""
        ...


class ThreadPuts:
    """One thread, one put at a time, in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="puts")

    def submit(self, call: Callable[[list[Entry]], int], chunk: list[Entry], /) -> Future[int]:
        """Returns at once."""
        return self._thread.submit(call, chunk)


class InlinePuts:
    """Made before `submit` returns: for tests and simulations, where every put is a point in time."""

    def submit(self, call: Callable[[list[Entry]], int], chunk: list[Entry], /) -> Future[int]:
        """Done when it returns; what the put raises is raised by the future."""
        made: Future[int] = Future()
        try:
            made.set_result(call(chunk))
        except Exception as error:  # noqa: BLE001  handed on by `result`, as an executor does
            made.set_exception(error)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What every shard of a version is worked with."""

    renderer: PromptRenderer
    checker: AnswerChecker
    attempts_max: int
    window: int  # most records in flight
    counters: Counters
    puts: Puts = field(default_factory=InlinePuts)
    evidence: Evidence = field(default_factory=Evidence)

    @property
    def unlogged_max(self) -> int:
        """Most records of one shard that are admitted and have no entry: stands in each fence."""
        return self.window + UNPUT_MAX


@dataclass(frozen=True, slots=True)
class ShardRecords:
    """The records to answer, in the order of the frozen input; a row is a place in these lists."""

    ids: list[str]
    fields: list[dict[str, str]]

    @classmethod
    def of(cls, frozen: pl.DataFrame) -> "ShardRecords":
        """Rows that the planner set aside are left out."""
        rows = frozen.filter(pl.col("disposition") == TO_ANSWER)
        names = [name for name in rows.columns if name.startswith(FIELD_PREFIX)]
        prompts = rows.select(pl.col(name).alias(name.removeprefix(FIELD_PREFIX)) for name in names)
        return cls(rows.get_column("record_id").to_list(), prompts.to_dicts())


class ShardWork:
    """A shard between its fence and its staging. One thread uses it."""

    def __init__(self, lease: Lease, *, writer: LogWriter, records: ShardRecords, folded: Folded, tools: Tools, opened_s: float) -> None:
        self.lease = lease
        self.opened_s = opened_s
        self.failures_by_class: dict[str, int] = {}
        self._writer = writer
        self._records = records
        self._tools = tools
        self._unflushed: list[Entry] = []
        self._put: tuple[list[Entry], Future[int]] | None = None  # on its way; one at a time, since slots have an order
        self._unflushed_since_s = 0.0
        self._withheld: list[tuple[int, Failed | Dead]] = []
        answered = (folded.answered[record_id] for record_id in records.ids if record_id in folded.answered)
        self._known_id = _known_id(answered) if folded.answered else None
        self._open = sum(1 for record_id in records.ids if not folded.is_terminal(record_id))  # without a terminal entry, or one to be put
        self._queue_up(folded)

    def _queue_up(self, folded: Folded) -> None:
        """Suspects first, group after group; records with no attempt left are dead at once."""
        lease, records, tools = self.lease, self._records, self._tools
        rows = {record_id: row for row, record_id in enumerate(records.ids)} if folded.failed or folded.suspicion.untried else {}
        self._groups = deque(tuple(rows[each] for each in group if each in rows) for group in folded.suspicion.groups_left)
        suspects = {row for group in self._groups for row in group}
        order = admission(records.ids, folded, worker=lease.worker, attempts_max=tools.attempts_max)
        # What may be asked now, and what after the suspects; without suspects the two are one.
        self._later = deque(row for row in order if row not in suspects)
        self._queue: deque[int] = deque() if suspects else self._later
        self._failed = {rows[each]: attempts for each, attempts in folded.failed.items() if each in rows and not folded.is_terminal(each)}
        for row in [row for row, attempts in self._failed.items() if attempts >= tools.attempts_max]:
            self._bury_spent(row, folded.last_failures[records.ids[row]], self.opened_s)
        self._left = self._open - len(self._later) - len(suspects)  # whose last attempt is another worker's

    @property
    def has_queued(self) -> bool:
        """Whether a record is waiting to be submitted."""
        return bool(self._queue)

    @property
    def is_probing(self) -> bool:
        """Suspects come first, group after group."""
        return self._queue is not self._later

    @property
    def is_complete(self) -> bool:
        """Every record is terminal in the log: the shard can be staged."""
        return self._open == 0 and self.is_flushed

    @property
    def is_left_to_others(self) -> bool:
        """All that is open is the last attempt at records that failed here: another worker must make it."""
        return self._open == self._left > 0 and self.is_flushed and not self._withheld

    @property
    def is_flushed(self) -> bool:
        """Every entry is in the log."""
        return not self._unflushed and self._put is None

    @property
    def is_putting(self) -> bool:
        """A chunk is on its way and does not count yet."""
        return self._put is not None

    @property
    def slots(self) -> int:
        """How many slots the log has."""
        return self._writer.next_slot

    def prompts(self, now_s: float, *, in_flight: int) -> Iterator[tuple[int, int, str, list[int]]]:
        """(row, attempt, record id, token ids) of the next records that there is room for; one without a prompt is a dead letter."""
        ids, fields, render = self._records.ids, self._records.fields, self._tools.renderer.render
        unput = len(self._unflushed) + len(self._withheld) + (len(self._put[0]) if self._put else 0)
        room = min(self._tools.window, self._tools.unlogged_max - unput) - in_flight
        queue = self._queue
        for row in islice(iter(queue.popleft, None), min(room, len(queue))) if room > 0 else ():
            attempt = self._failed.get(row, 0) + 1
            try:
                token_ids = render(fields[row])
            except RenderError as error:
                self._bury(row, attempt=attempt - 1, dead_class=DeadClass.RENDER_ERROR, error=str(error), now_s=now_s)
            else:
                yield row, attempt, ids[row], token_ids

    def take(self, row: int, attempt: int, completion: Completion, now_s: float) -> None:
        """An answer, or a failure of this record."""
        checked = self._tools.checker.check(completion.text, completion.finish_reason)
        if isinstance(checked, InvalidAnswer):
            self.fail(row, attempt, checked.dead_class, checked.error, tokens_output=completion.tokens_output)
            return
        self._open -= 1
        answered = Answered(
            self._records.ids[row],
            self.lease.epoch,
            attempt,
            checked.json_text,
            completion.tokens_prompt,
            completion.tokens_cached,
            completion.tokens_output,
            self.lease.worker,
        )
        self._add(answered, now_s)

    def fail(self, row: int, attempt: int, dead_class: DeadClass, error: str, *, tokens_output: int) -> None:
        """A failure of this record, withheld until there is evidence that it is one (`accept_failures`)."""
        self.failures_by_class[dead_class] = self.failures_by_class.get(dead_class, 0) + 1
        self._tools.counters.failed += 1
        self._withhold(row, Failed(self._records.ids[row], self.lease.epoch, attempt, dead_class, error, tokens_output))

    def reject(self, row: int, attempt: int, error: RecordRejectedError) -> None:
        """The engine does not take this prompt: permanent, asking again cannot help."""
        reason = f"the engine refused the request ({error.data['reason']})"
        self._withhold(row, Dead(self._records.ids[row], self.lease.epoch, attempt, DeadClass.REJECTED, reason))

    def accept_failures(self, now_s: float) -> None:
        """They are the records' own: an attempt is used up each; a record is tried again after all that wait already, or is dead."""
        withheld, self._withheld = self._withheld, []
        for row, entry in withheld:
            if isinstance(entry, Dead):
                self._open -= 1
                self._add(entry, now_s)
                continue
            self._add(entry, now_s)
            self._failed[row] = entry.attempt
            if entry.attempt >= self._tools.attempts_max:
                self._bury_spent(row, entry, now_s)
            elif entry.attempt == self._tools.attempts_max - 1:
                self._left += 1
            else:
                self._later.append(row)

    def pardon(self, now_s: float) -> None:
        """This worker is unfit: what failed under this lease failed for nobody."""
        self._withheld.clear()
        if self.failures_by_class:
            self._add(Pardon(self.lease.epoch), now_s)

    @property
    def withheld(self) -> list[str]:
        """Classes of the failures that there is no evidence for yet."""
        return [entry.dead_class for _, entry in self._withheld]

    def known(self) -> Request | None:
        """Asks again for an answer of this shard that is known; None while it has none."""
        record_id = self._known_id or _known_id(chain(self._put[0] if self._put else (), self._unflushed))
        if record_id is None:
            return None
        name = request_id(shard=self.lease.shard, epoch=self.lease.epoch, attempt=CONTROL_ATTEMPT, record_id=record_id)
        return Request(name, self._tools.renderer.render(self._records.fields[self._records.ids.index(record_id)]))

    def start_next_group(self) -> None:
        """These suspects are next, and alone; it is in the log before the engine gets the first of them. Raises StaleLeaseError."""
        assert self.is_flushed, "the log must be complete before a group is started"
        if not self._groups:
            self._queue = self._later
            return
        group = self._groups.popleft()
        self._writer.put([Start(self.lease.epoch, tuple(self._records.ids[row] for row in group))])
        self._queue.extend(group)

    def due(self, now_s: float, *, flush_s: float) -> int:
        """How many entries to put now: all when one has waited `flush_s` or nothing is left to wait for, else whole chunks only."""
        waiting = len(self._unflushed)
        if waiting and (self._open == 0 or now_s - self._unflushed_since_s >= flush_s):
            return waiting
        return waiting - waiting % CHUNK_ENTRIES_MAX

    def flush(self, entries: int | None, now_s: float, *, wait: bool) -> bool:
        """Puts the first `entries` (None: all), chunk by chunk; with `wait` they are durable on return, else one may be on its way.

        True when a put has returned since the last call. Raises StaleLeaseError.
        """
        left = len(self._unflushed) if entries is None else entries
        returned = self._settle(wait=wait)
        while left > 0 and self._put is None:
            chunk = self._unflushed[: min(left, CHUNK_ENTRIES_MAX)]
            del self._unflushed[: len(chunk)]
            left -= len(chunk)
            # Less than a chunk was waiting before this turn, so what is left is of this turn.
            self._unflushed_since_s = now_s
            self._put = (chunk, self._tools.puts.submit(self._writer.put, chunk))
            returned = self._settle(wait=wait) or returned
        return returned

    def _settle(self, *, wait: bool) -> bool:
        """Takes note of a put that has returned; only then do its records count."""
        if self._put is None or not (wait or self._put[1].done()):
            return False
        (chunk, made), self._put = self._put, None
        made.result()
        self._known_id = self._known_id or _known_id(chunk)
        self._count(chunk)
        return True

    def _count(self, chunk: Sequence[Entry]) -> None:
        counters = self._tools.counters
        counters.flushes += 1
        counters.answered += sum(1 for entry in chunk if isinstance(entry, Answered))
        counters.dead += sum(1 for entry in chunk if isinstance(entry, Dead))

    def _withhold(self, row: int, entry: Failed | Dead) -> None:
        self._tools.evidence.failed()
        self._withheld.append((row, entry))

    def _bury_spent(self, row: int, last: Failed, now_s: float) -> None:
        self._bury(row, attempt=last.attempt, dead_class=last.dead_class, error=last.error, now_s=now_s)

    def _bury(self, row: int, *, attempt: int, dead_class: str, error: str, now_s: float) -> None:
        self._open -= 1
        self._add(Dead(self._records.ids[row], self.lease.epoch, attempt, dead_class, error), now_s)

    def _add(self, entry: Entry, now_s: float) -> None:
        if not self._unflushed:
            self._unflushed_since_s = now_s
        self._unflushed.append(entry)


def _known_id(entries: Iterable[Entry]) -> str | None:
    """The first record that was answered at the first try. One that needed more may fail again, and a worker would be blamed for it."""
    return next((entry.record_id for entry in entries if isinstance(entry, Answered) and entry.attempt == 1), None)


def open_shard(
    lease: Lease, *, log: ShardLog, frozen: pl.DataFrame, tools: Tools, now_s: float, is_engine_proven: Callable[[], bool]
) -> ShardWork:
    """Puts the fence, and a verdict after an unclean end, then goes on from what the log says.

    Raises StaleLeaseError when somebody else has claimed since.
    """
    slots: list[Slot] = log.read(None)
    writer = log.writer(epoch=lease.epoch, next_slot=len(slots))
    fence = Fence(epoch=lease.epoch, round=lease.round, worker=lease.worker, window=tools.unlogged_max, previous_end=lease.previous_end)
    writer.put([fence])
    # What others put while the fence looked for its slot stands before it and counts.
    slots = [*slots, *writer.passed, [fence]]
    folded = fold(slots, staged_rounds=lease.staged_rounds)
    if folded.epoch > lease.epoch:  # a fence that stood there before we read: no taken slot will ever tell the writer of it
        raise StaleLeaseError(shard=lease.key, epoch_held=lease.epoch, epoch_current=folded.epoch)
    records = ShardRecords.of(frozen)
    if folded.suspicion.is_open:
        proven = bool(folded.answered) or is_engine_proven()
        verdict = judge_end(records.ids, folded, attempts_max=tools.attempts_max, is_engine_proven=proven)
        if verdict is not None:
            entries = entries_of(verdict, folded)
            writer.put(entries)
            folded = fold([*slots, entries], staged_rounds=lease.staged_rounds)
    return ShardWork(lease, writer=writer, records=records, folded=folded, tools=tools, opened_s=now_s)
