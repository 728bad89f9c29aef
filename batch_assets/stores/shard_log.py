"""The log of one shard in the object store: slots 0, 1, 2 … of entries, each put if absent, never changed, never listed.

What the entries mean is decided by the fold in `core/shard_log.py`; who may write, by the fences it knows.
"""

import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from time import sleep
from typing import Any, Final, TypeVar

import polars as pl
from polars.exceptions import PolarsError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from batch_assets.core.errors import ObjectExistsError, ObjectMissingError, Problem, StaleLeaseError, UnfitEnvironmentError
from batch_assets.core.identity import shard_key
from batch_assets.core.ports import ObjectStore
from batch_assets.core.shard_log import ENTRY_TYPES, Answered, Dead, Entry, EntryKind, Failed, Fence, Slot
from batch_assets.stores.objects import TRANSIENT_ERRORS

CHUNK_ENTRIES_MAX: Final = 512  # 64 made the committer half as fast; more than this delays nothing but the first reader
SLOTS_MAX: Final = 1_000_000  # a log longer than this is a bug of a writer, not work
STORE_ATTEMPTS_MAX: Final = 6  # with the waits below about 15 s: longer than a throttled bucket, shorter than a lease
STORE_WAIT_S: Final = 0.25
STORE_WAIT_MAX_S: Final = 8.0

Result = TypeVar("Result")

_CHECKSUM_BYTES: Final = 4
_COLUMN_TYPES: Final[dict[str, pl.DataType]] = {
    "kind": pl.String(),
    "record_id": pl.String(),
    "epoch": pl.Int32(),
    "attempt": pl.Int32(),
    "answer": pl.String(),
    "dead_class": pl.String(),
    "error": pl.String(),
    "tokens_prompt": pl.Int32(),
    "tokens_cached": pl.Int32(),
    "tokens_output": pl.Int32(),
    "worker": pl.String(),
    "round": pl.Int32(),
    "window": pl.Int32(),
    "previous_end": pl.String(),
    "record_ids": pl.List(pl.String()),
    "groups": pl.List(pl.List(pl.String())),
}
_KINDS: Final[dict[type[Entry], EntryKind]] = {entry_type: kind for kind, entry_type in ENTRY_TYPES.items()}


class ShardLog:
    """One shard's slots. `pause` is slept between attempts at a store that fails for a passing reason."""

    def __init__(self, objects: ObjectStore, *, job: str, version: str, shard: int, pause: Callable[[float], None] = sleep) -> None:
        self._objects = objects
        self._folder = f"{job}/versions/{version}/log/shard-{shard:05d}"
        self._pause = pause
        self.key = shard_key(version, shard)

    def read(self, slots: int | None) -> list[Slot]:
        """Slots from 0 until there is none, or exactly `slots` of them (one that is missing raises UnfitEnvironmentError)."""
        found: list[Slot] = []
        while len(found) < (SLOTS_MAX if slots is None else slots):
            try:
                found.append(self.slot(len(found)))
            except ObjectMissingError as error:
                if slots is None:
                    break
                raise UnfitEnvironmentError(_missing(self.key, path=error.data["path"], found=len(found), expected=slots)) from error
        return found

    def slot(self, number: int) -> Slot:
        """Entries of one slot, None when its bytes do not decode. Raises ObjectMissingError, or what the store raised to the last."""
        return decode(_patiently(self._pause, partial(self._objects.get, self._path(number))))

    def writer(self, *, epoch: int, next_slot: int) -> "LogWriter":
        """A writer under `epoch` that has read every slot below `next_slot`."""
        return LogWriter(self, epoch=epoch, next_slot=next_slot)

    def create(self, number: int, data: bytes) -> None:
        """Raises ObjectExistsError when the slot is taken, by whomever."""
        _patiently(self._pause, partial(self._objects.create, self._path(number), data))

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:08d}.arrow"


class LogWriter:
    """Puts entries under one epoch. `next_slot` is how many slots the log has as far as this writer knows; all below it are readable."""

    def __init__(self, log: ShardLog, *, epoch: int, next_slot: int) -> None:
        self._log = log
        self._epoch = epoch
        self.next_slot = next_slot
        self.passed: list[Slot] = []  # slots that others took, in order, while this writer looked for a free one

    def put(self, entries: Sequence[Entry]) -> int:
        """Durable when it returns; gives the slot, or the last one looked at when others hold all of it already.

        Raises StaleLeaseError when a taken slot has a higher fence. A lost acknowledgement looks like a taken slot and needs no care.
        """
        if len(entries) > CHUNK_ENTRIES_MAX:
            msg = f"{len(entries)} entries in one put; split them into chunks of {CHUNK_ENTRIES_MAX}"
            raise ValueError(msg)
        left = list(entries)
        while left:
            try:
                self._log.create(self.next_slot, encode(left))
                left = []
            except ObjectExistsError:
                left = self._pass(left)
            self.next_slot += 1
        return self.next_slot - 1

    def _pass(self, entries: list[Entry]) -> list[Entry]:
        """Reads the taken slot; what is left to put of `entries`."""
        slot = self._log.slot(self.next_slot)
        self.passed.append(slot)
        held = slot or ()
        highest = max((entry.epoch for entry in held if isinstance(entry, Fence)), default=0)
        if highest > self._epoch:
            raise StaleLeaseError(shard=self._log.key, epoch_held=self._epoch, epoch_current=highest)
        return without_held(entries, held=held, epoch=self._epoch)


def without_held(entries: Iterable[Entry], *, held: Iterable[Entry], epoch: int) -> list[Entry]:
    """`entries` less what a slot holds already: outcomes by record, failures by record and attempt, others when equal.

    Only what was put under `epoch` counts: an older entry behind our fence is void, however much it looks like ours.
    """
    current = [entry for entry in held if entry.epoch == epoch]
    terminal = {entry.record_id for entry in current if isinstance(entry, Answered | Dead)}
    failures = {(entry.record_id, entry.attempt) for entry in current if isinstance(entry, Failed)}
    others = {entry for entry in current if not isinstance(entry, Answered | Dead | Failed)}

    def is_held(entry: Entry) -> bool:
        if isinstance(entry, Answered | Dead):
            return entry.record_id in terminal
        if isinstance(entry, Failed):
            return (entry.record_id, entry.attempt) in failures
        return entry in others

    return [entry for entry in entries if not is_held(entry)]


def encode(entries: Sequence[Entry]) -> bytes:
    """An Arrow IPC stream (zstd) of one row per entry, then four bytes of CRC-32 over it, which Arrow readers ignore.

    Only the columns of the kinds that occur are written. The checksum is there because Arrow has none over its buffers: a flipped bit
    would be another answer, or a panic of the reader.
    """
    columns: dict[str, list[Any]] = {"kind": []}
    for entry_type, run in _runs(entries):
        _append(columns, entry_type, run)
    schema = {name: _COLUMN_TYPES[name] for name in columns}
    buffer = io.BytesIO()
    pl.DataFrame(columns, schema=schema).write_ipc_stream(buffer, compression="zstd")
    data = buffer.getvalue()
    return data + zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "big")


def decode(data: bytes) -> Slot:
    """Inverse of `encode`; None for bytes that are not ours, not whole, or hold a kind that this version does not know."""
    body = data[:-_CHECKSUM_BYTES]
    if not body or zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "big") != data[-_CHECKSUM_BYTES:]:
        return None
    try:
        frame = pl.read_ipc_stream(body)
        return list(_entries(frame))
    except (PolarsError, KeyError, ValueError):
        return None


def _runs(entries: Sequence[Entry]) -> Iterator[tuple[type[Entry], list[Entry]]]:
    for entry_type, run in groupby(entries, key=type):
        yield entry_type, list(run)


def _append(columns: dict[str, list[Any]], entry_type: type[Entry], run: list[Entry]) -> None:
    """Adds the rows of one run; columns that it lacks, or that the rows before it lacked, are filled with nulls."""
    rows_before = len(columns["kind"])
    columns["kind"].extend([_KINDS[entry_type].value] * len(run))
    for name, values in zip(entry_type._fields, zip(*run, strict=True), strict=True):
        columns.setdefault(name, [None] * rows_before).extend(values)
    for values in columns.values():
        if len(values) < rows_before + len(run):
            values.extend([None] * len(run))


def _entries(frame: pl.DataFrame) -> Iterator[Entry]:
    """Raises KeyError or ValueError for a kind or column that is not known."""
    columns = {name: frame.get_column(name).to_list() for name in frame.columns}
    if "record_ids" in columns:
        columns["record_ids"] = [None if ids is None else tuple(ids) for ids in columns["record_ids"]]
    if "groups" in columns:
        columns["groups"] = [None if groups is None else tuple(map(tuple, groups)) for groups in columns["groups"]]
    start = 0
    for kind, run in groupby(columns["kind"]):
        entry_type = ENTRY_TYPES[EntryKind(kind)]
        stop = start + sum(1 for _ in run)
        yield from map(entry_type._make, zip(*(columns[name][start:stop] for name in entry_type._fields), strict=True))
        start = stop


def _patiently(pause: Callable[[float], None], call: Callable[[], Result]) -> Result:
    """A store's passing failures are tried again, a bounded number of times; the last one is raised, never skipped."""
    retrying = Retrying(
        retry=retry_if_exception_type(TRANSIENT_ERRORS),
        stop=stop_after_attempt(STORE_ATTEMPTS_MAX),
        wait=wait_exponential_jitter(multiplier=STORE_WAIT_S, max=STORE_WAIT_MAX_S, jitter=STORE_WAIT_S),
        sleep=pause,
        reraise=True,
    )
    return retrying(call)


def _missing(key: str, *, path: str, found: int, expected: int) -> Problem:
    return Problem(
        code="shard_log.slot_missing",
        what=f"the log of shard {key} has a gap: {path} does not exist, and it was there when the shard was staged",
        expected=f"{expected} slots",
        found=f"{found} before the gap",
        fix="restore that object from the store's versions or backup; if it is lost, plan the job anew",
    )
