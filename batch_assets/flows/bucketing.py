"""From the source to sorted buckets: every row gets its key and hash, goes to its bucket on disk, and comes back with its neighbours.

One pass over the data, memory that does not grow with it. What a bucket's rows become (dispositions, shards) is flows/freezing.py's.

Columns of a row on its way: record_id, key_hash, copies (rows that share the id, so far), at_odds (these rows differ in a column of
`DECIDED_ONCE`), fault_class (null, `malformed`, `no_id`), fault, acl, record_class, segment, labels, field_<placeholder>; all text but
key_hash, copies and at_odds.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import numpy as np
import polars as pl

from batch_assets.core.planning import BLANK_CHARACTERS, bucket_bits, bucket_low
from batch_assets.core.records import FIELD_PREFIX, DeadClass, row_key
from batch_assets.core.spec import InputRules, Snapshot
from batch_assets.stores.snapshots import MALFORMED, SourceBatch, json_column, read_batches, source_size
from batch_assets.stores.spill import Spill

BUFFER_ROWS: Final = 65_536  # sorted and scattered together; whichever bound comes first
BUFFER_BYTES: Final = 32 << 20
FAN_OUT_BITS: Final = 8  # buckets written at once; pieces of 256 rows cost 0.6 us a row. More bits: a second level
EXAMPLES_MAX: Final = 10
DECIDED_ONCE: Final = ("acl", "record_class", "segment")  # who may read a record cannot be chosen from rows that disagree
_KEYS: Final = ("key_hash", "record_id")


@dataclass(slots=True)
class Tally:
    """What the pass has seen; ids are examples for a refusal."""

    rows: int = 0
    without_id: int = 0
    repeated: int = 0  # rows beyond the first of their id
    at_odds: int = 0  # ids whose rows differ in ACL, class or segment
    without_id_examples: list[str] = field(default_factory=list)
    repeated_examples: list[str] = field(default_factory=list)
    at_odds_examples: list[str] = field(default_factory=list)


class Buckets:
    """The rows of a snapshot by bucket, once `fill` has read it. A pilot keeps the `pilot` ids with the smallest hashes."""

    def __init__(self, snapshot: Snapshot, rules: InputRules, *, folder: Path, pilot: int | None = None) -> None:
        self.tally = Tally()
        self._snapshot = snapshot
        self._rules = rules
        self._folder = folder
        self._pilot = pilot
        size = source_size(snapshot)
        self.bits = 0 if pilot is not None else bucket_bits(rows=size.rows, size_bytes=size.size_bytes)
        self._coarse_bits = min(self.bits, FAN_OUT_BITS)
        self._spill = Spill(folder, [bucket_low(bucket, self._coarse_bits) for bucket in range(1 << self._coarse_bits)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._spill.__exit__()

    def fill(self) -> None:
        """Reads the whole snapshot. Raises RefusedError when it is not what was pinned."""
        runs = _runs(self._rows())
        if self._pilot is not None:
            runs = _smallest(runs, ids_max=self._pilot)
        for run in runs:
            self.tally.rows += int(run["copies"].sum())
            self._spill.add(run)
            self._count_faults(run)
        self._count_repeats_between_runs()

    def __iter__(self) -> Iterator[tuple[int, pl.DataFrame]]:
        """(bucket, its rows): one row per id, sorted by (key_hash, record_id); empty buckets are left out, the others in order."""
        for coarse in range(1 << self._coarse_bits):
            if self._spill.rows[coarse] == 0:
                continue
            if self.bits == self._coarse_bits:
                yield coarse, _joined(self._spill.frames(coarse))
            else:
                yield from self._fine_buckets(coarse)

    def _fine_buckets(self, coarse: int) -> Iterator[tuple[int, pl.DataFrame]]:
        first = coarse << (self.bits - self._coarse_bits)
        last = (coarse + 1) << (self.bits - self._coarse_bits)
        with Spill(self._folder, [bucket_low(bucket, self.bits) for bucket in range(first, last)]) as spill:
            for run in _runs(self._spill.frames(coarse)):
                spill.add(run)
            for place, bucket in enumerate(range(first, last)):
                if spill.rows[place]:
                    yield bucket, _joined(spill.frames(place))

    def _rows(self) -> Iterator[pl.DataFrame]:
        for batch in read_batches(self._snapshot, self._rules.text_columns, scalars=self._rules.label_columns):
            yield _rows_of(batch, self._rules)

    def _count_faults(self, run: pl.DataFrame) -> None:
        nameless = run.filter(pl.col("fault_class") == DeadClass.NO_ID)["record_id"]
        repeated = run.filter(pl.col("copies") > 1)
        self.tally.without_id += len(nameless)
        self.tally.repeated += int((repeated["copies"] - 1).sum())
        _add_examples(self.tally.without_id_examples, nameless)
        _add_examples(self.tally.repeated_examples, repeated["record_id"])
        self._count_at_odds(run)

    def _count_at_odds(self, rows: pl.DataFrame, *, counted_before: int = 0) -> None:
        at_odds = rows.filter("at_odds")["record_id"]
        self.tally.at_odds += len(at_odds) - counted_before
        _add_examples(self.tally.at_odds_examples, at_odds)

    def _count_repeats_between_runs(self) -> None:
        for coarse in range(1 << self._coarse_bits):
            hashes = self._spill.hashes(coarse)
            repeats = len(hashes) - hashes.n_unique()
            self.tally.repeated += repeats
            if repeats:
                again = hashes.filter(hashes.is_duplicated()).unique()
                named = ["record_id", "key_hash", "copies", "at_odds", *DECIDED_ONCE]
                rows = pl.concat(
                    frame.filter(pl.col("key_hash").is_in(again.implode())).select(named) for frame in self._spill.frames(coarse)
                )
                _add_examples(self.tally.repeated_examples, rows["record_id"])
                self._count_at_odds(_joined([rows]), counted_before=int(rows["at_odds"].sum()))


def _add_examples(examples: list[str], ids: pl.Series) -> None:
    for record_id in ids.head(EXAMPLES_MAX):
        if len(examples) < EXAMPLES_MAX and record_id not in examples:
            examples.append(record_id)


# ---- rows


def _rows_of(batch: SourceBatch, rules: InputRules) -> pl.DataFrame:
    key, malformed = pl.col(rules.key), pl.col(MALFORMED)
    has_id = key.is_not_null() & (key.str.strip_chars(BLANK_CHARACTERS) != "")
    place = pl.int_range(batch.first_row, batch.first_row + pl.len()).cast(pl.String)
    own_key = pl.concat_str(pl.lit(row_key(batch.file_name, 0).removesuffix("0")), place)
    fault_class = pl.when(malformed.is_not_null()).then(pl.lit(DeadClass.MALFORMED.value)).when(~has_id).then(pl.lit(DeadClass.NO_ID.value))
    frame = batch.frame.select(
        pl.when(has_id).then(key).otherwise(own_key).alias("record_id"),
        pl.lit(1, dtype=pl.Int32).alias("copies"),
        pl.lit(value=False).alias("at_odds"),
        fault_class.alias("fault_class"),
        malformed.alias("fault"),
        _column_or_null(rules.acl, "acl"),
        _column_or_null(rules.record_class, "record_class"),
        _column_or_null(rules.segment, "segment"),
        _labels(rules).alias("labels"),
        *(pl.col(column).alias(FIELD_PREFIX + placeholder) for placeholder, column in rules.fields),
    )
    return frame.with_columns(_key_hashes(frame["record_id"]))


def _column_or_null(column: str | None, name: str) -> pl.Expr:
    return (pl.lit(None, dtype=pl.String) if column is None else pl.col(column)).alias(name)


def _labels(rules: InputRules) -> pl.Expr:
    """`{"category":"billing"}` from columns that hold JSON text; null when the job has no labels or the record has none."""
    if not rules.labels:
        return pl.lit(None, dtype=pl.String)
    parts: list[pl.Expr] = []
    for name, column in rules.labels:
        parts += [pl.lit(f'{"," if parts else "{"}"{name}":'), pl.col(json_column(column)).fill_null("null")]
    present = pl.any_horizontal(pl.col(json_column(column)).is_not_null() for _, column in rules.labels)
    return pl.when(present).then(pl.concat_str(*parts, pl.lit("}")))


def _key_hashes(record_ids: pl.Series) -> pl.Series:
    """`core.records.key_hash` of each; a loop in numpy's buffer, because it is run for every record of a source."""
    sha256 = hashlib.sha256
    digests = b"".join([sha256(record_id).digest()[:8] for record_id in record_ids.cast(pl.Binary).to_list()])
    return pl.Series("key_hash", np.frombuffer(digests, dtype=">i8").astype(np.int64))


# ---- runs


def _runs(frames: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """The rows gathered into bounded frames, sorted by key, one row per id in each."""
    waiting: list[pl.DataFrame] = []
    rows = size = 0
    for frame in frames:
        waiting.append(frame)
        rows += frame.height
        size += int(frame.estimated_size())
        if rows >= BUFFER_ROWS or size >= BUFFER_BYTES:
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
    if rows:
        yield _joined(waiting)


def _smallest(runs: Iterable[pl.DataFrame], *, ids_max: int) -> Iterator[pl.DataFrame]:
    """One frame with the `ids_max` ids of the smallest hashes: a sample that depends on nothing but the ids."""
    kept: list[pl.DataFrame] = []
    for run in runs:
        kept = [_joined([*kept, run]).head(ids_max)]
    yield from kept


def _joined(frames: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """One frame sorted by (key_hash, record_id) with one row per id; of different rows with one id the smallest is kept."""
    frame = pl.concat(frames, rechunk=False)
    repeated = frame["key_hash"].is_duplicated()
    if not repeated.any():
        return frame.sort(_KEYS)
    rest = [name for name in frame.columns if name not in {*_KEYS, "copies", "at_odds"}]
    differs = [pl.col(name).n_unique() > 1 for name in DECIDED_ONCE]
    at_odds = pl.any_horizontal(pl.col("at_odds").any(), *differs).alias("at_odds")
    kept = [pl.col("copies").sum(), at_odds, *(pl.col(name).first() for name in rest)]
    once = frame.filter(repeated).sort([*_KEYS, *rest]).group_by(_KEYS, maintain_order=True).agg(kept).select(frame.columns)
    return pl.concat([frame.filter(~repeated), once.cast({"copies": pl.Int32})]).sort(_KEYS)
