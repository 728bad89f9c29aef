"""One leased shard at work: which record goes to the engine next, what its answer comes to, and what is put in the log when.

A record counts as done only after the put that holds it has returned. Who claims, polls and stages is in `loop.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

import polars as pl

from batch_assets.core.answers import AnswerChecker, InvalidAnswer
from batch_assets.core.errors import RecordRejectedError, StaleLeaseError
from batch_assets.core.ports import Completion
from batch_assets.core.prompting import PromptRenderer, RenderError
from batch_assets.core.records import FIELD_PREFIX, TO_ANSWER, DeadClass
from batch_assets.core.shard_log import Answered, Dead, Entry, Failed, Fence, Folded, Slot, fold
from batch_assets.stores.register import Lease
from batch_assets.stores.shard_log import CHUNK_ENTRIES_MAX, LogWriter, ShardLog
from batch_assets.worker.counters import Counters


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
    window: int  # most records in flight: stands in each fence
    counters: Counters
    puts: Puts = field(default_factory=InlinePuts)


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
        open_rows = [row for row, record_id in enumerate(records.ids) if not folded.is_terminal(record_id)]
        self._open = len(open_rows)  # records without a terminal entry, in the log or about to be put
        # Admission follows from the log alone: attempts failed, then position. The fresh ones are most and need no heap.
        self._failed = {row: folded.failed[records.ids[row]] for row in open_rows if records.ids[row] in folded.failed}
        self._fresh: Iterator[int] = iter([row for row in open_rows if row not in self._failed])
        self._next_fresh = next(self._fresh, None)
        self._retries: list[tuple[int, int]] = []
        for row, attempts in self._failed.items():
            self._retry_or_bury(row, attempts, folded.last_failures[records.ids[row]], opened_s)

    @property
    def has_queued(self) -> bool:
        """Whether a record is waiting to be submitted."""
        return self._next_fresh is not None or bool(self._retries)

    @property
    def is_complete(self) -> bool:
        """Every record is terminal in the log: the shard can be staged."""
        return self._open == 0 and not self._unflushed and self._put is None

    @property
    def is_putting(self) -> bool:
        """A chunk is on its way and does not count yet."""
        return self._put is not None

    @property
    def slots(self) -> int:
        """How many slots the log has."""
        return self._writer.next_slot

    def prompts(self, now_s: float) -> Iterator[tuple[int, int, str, list[int]]]:
        """(row, attempt, record id, token ids) of the records that are queued; one that no prompt can be made of is a dead letter."""
        ids, fields, render = self._records.ids, self._records.fields, self._tools.renderer.render
        while (row := self._next_row()) is not None:
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
            self.fail(row, attempt, checked.dead_class, checked.error, tokens_output=completion.tokens_output, now_s=now_s)
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

    def fail(self, row: int, attempt: int, dead_class: DeadClass, error: str, *, tokens_output: int, now_s: float) -> None:
        """One attempt is used up; the record is tried again after all that failed less often, or is dead."""
        failed = Failed(self._records.ids[row], self.lease.epoch, attempt, dead_class, error, tokens_output)
        self._failed[row] = attempt
        self.failures_by_class[dead_class] = self.failures_by_class.get(dead_class, 0) + 1
        self._tools.counters.failed += 1
        self._add(failed, now_s)
        self._retry_or_bury(row, attempt, failed, now_s)

    def reject(self, row: int, attempt: int, error: RecordRejectedError, now_s: float) -> None:
        """The engine does not take this prompt: permanent, asking again cannot help."""
        reason = f"the engine refused the request ({error.data['reason']})"
        self._bury(row, attempt=attempt, dead_class=DeadClass.REJECTED, error=reason, now_s=now_s)

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
        self._count(chunk)
        return True

    def _count(self, chunk: Sequence[Entry]) -> None:
        counters = self._tools.counters
        counters.flushes += 1
        counters.answered += sum(1 for entry in chunk if isinstance(entry, Answered))
        counters.dead += sum(1 for entry in chunk if isinstance(entry, Dead))

    def _next_row(self) -> int | None:
        row = self._next_fresh
        if row is not None:
            self._next_fresh = next(self._fresh, None)
            return row
        return heappop(self._retries)[1] if self._retries else None

    def _retry_or_bury(self, row: int, attempts: int, last: Failed, now_s: float) -> None:
        if attempts < self._tools.attempts_max:
            heappush(self._retries, (attempts, row))
        else:
            self._bury(row, attempt=attempts, dead_class=last.dead_class, error=last.error, now_s=now_s)

    def _bury(self, row: int, *, attempt: int, dead_class: str, error: str, now_s: float) -> None:
        self._open -= 1
        self._add(Dead(self._records.ids[row], self.lease.epoch, attempt, dead_class, error), now_s)

    def _add(self, entry: Entry, now_s: float) -> None:
        if not self._unflushed:
            self._unflushed_since_s = now_s
        self._unflushed.append(entry)


def open_shard(lease: Lease, *, log: ShardLog, frozen: pl.DataFrame, tools: Tools, now_s: float) -> ShardWork:
    """Puts the fence, then goes on from what the log says. Raises StaleLeaseError when somebody else has claimed since."""
    slots: list[Slot] = log.read(None)
    writer = log.writer(epoch=lease.epoch, next_slot=len(slots))
    fence = Fence(epoch=lease.epoch, round=lease.round, worker=lease.worker, window=tools.window, previous_end=lease.previous_end)
    writer.put([fence])
    # What others put while the fence looked for its slot stands before it and counts.
    folded = fold([*slots, *writer.passed, [fence]], staged_rounds=lease.staged_rounds)
    if folded.epoch > lease.epoch:  # a fence that stood there before we read: no taken slot will ever tell the writer of it
        raise StaleLeaseError(shard=lease.key, epoch_held=lease.epoch, epoch_current=folded.epoch)
    return ShardWork(lease, writer=writer, records=ShardRecords.of(frozen), folded=folded, tools=tools, opened_s=now_s)
