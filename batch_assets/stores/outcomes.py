"""The outcomes of one job version: a Delta table with one row per record, partitioned by (shard, outcome), written by the committer alone.

Rows enter by an insert-only MERGE whose predicate names the shards literally and never the outcome, so a repeat inserts nothing. A redrive
only updates, and only dead letters of an earlier round. A plain append is banned here: it never conflicts and does duplicate. Nothing here
judges a row; that is `fleet/committer.py`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import polars as pl
from deltalake import DeltaTable, Schema, WriterProperties
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.table import TableMerger

from batch_assets.core.answer_schema import AnswerField, answer_fields, check_schema
from batch_assets.core.errors import GristmillError, Problem, RefusedError, UnfitEnvironmentError
from batch_assets.core.records import Outcome
from batch_assets.core.shard_log import ROUND_FIRST

KEY_COLUMNS = ("job_version", "record_id", "key_hash", "shard", "outcome", "round", "recipe")  # never NULL: NULL equals nothing in a MERGE
SYSTEM_SCHEMA: Mapping[str, type[pl.DataType]] = {
    "job_version": pl.String,
    "record_id": pl.String,
    "key_hash": pl.Int64,
    "shard": pl.Int32,
    "outcome": pl.String,
    "round": pl.Int32,
    "recipe": pl.String,
    "acl": pl.String,
    "record_class": pl.String,
    "segment": pl.String,
    "labels": pl.String,
    "record_digest": pl.String,
    "attempt": pl.Int32,
    "epoch": pl.Int32,
    "worker": pl.String,
    "dead_class": pl.String,
    "error": pl.String,
    "tokens_prompt": pl.Int32,
    "tokens_cached": pl.Int32,
    "tokens_output": pl.Int32,
    "origin_version": pl.String,
    "surplus": pl.Int32,
}
PARTITION_COLUMNS = ["shard", "outcome"]
CONFIGURATION: Mapping[str, str | None] = {
    "delta.checkpointInterval": "10",
    # Statistics of three columns: partition values do the pruning, and texts of a kilobyte are no statistic.
    "delta.dataSkippingNumIndexedCols": "3",
}
REOPEN_MERGES = 20  # an open table slows down with every commit that it has to carry (FINDINGS, Delta)
MERGE_TRIES_MAX = 8  # a real conflict needs a second committer, and `still_mine` ends that after one lease
# Each part was seen to matter (tests/fleet/test_redrive_merge.py): without the first, a result is overwritten; without the second, a round
# that is repeated late takes back what a later one made; and with an insert clause a repeated redrive doubles its results.
STILL_DEAD = "t.outcome = 'dead_letter'"
OF_AN_EARLIER_ROUND = "t.round < s.round"
DTYPE_OF_KIND: Mapping[str, type[pl.DataType]] = {"string": pl.String, "integer": pl.Int64, "number": pl.Float64, "boolean": pl.Boolean}


class SourceRefusedError(GristmillError):
    """A frame that must not be merged (a bug of ours); reaction: stop before the table is touched."""

    def __init__(self, *, uri: str, reason: str) -> None:
        super().__init__(f"rows for {uri} are refused, nothing was written: {reason}", uri=uri, reason=reason)


class OutcomesWrongError(GristmillError):
    """The table holds other rows than were merged into it (a bug of ours or foreign hands); reaction: stop, a person must look."""

    def __init__(self, *, uri: str, shards: Sequence[int], expected: int, found: int) -> None:
        super().__init__(
            f"{uri}: shards {list(shards)}: {expected} rows expected of this commit, {found} found in the table; stop and look at it",
            uri=uri,
            shards=tuple(shards),
            expected=expected,
            found=found,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeFile:
    """One parquet file of the table at its newest version."""

    uri: str
    shard: int
    outcome: str
    rows: int
    size_bytes: int


def _same_record(literal: Sequence[int]) -> str:
    # Bare integers are 64 bits wide and delta-rs 1.6.3 then fails to prune the 32-bit partition column ("Int32 <= Int64").
    numbers = ", ".join(f"CAST({shard} AS INT)" for shard in literal)
    return f"t.shard IN ({numbers}) AND t.record_id = s.record_id"


def _scan(file: OutcomeFile) -> pl.LazyFrame:
    """A data file with its partition's values, which are not in it."""
    return pl.scan_parquet(file.uri, glob=False, hive_partitioning=False).with_columns(
        shard=pl.lit(file.shard, pl.Int32), outcome=pl.lit(file.outcome, pl.String)
    )


def outcomes_schema(answer_schema: str) -> pl.Schema:
    """Columns of the table in order: ours, then one per top-level property of the answer (all NULL in a dead letter)."""
    return pl.Schema({**{name: dtype() for name, dtype in SYSTEM_SCHEMA.items()}, **answer_dtypes(answer_schema)})


def answer_dtypes(answer_schema: str) -> dict[str, pl.DataType]:
    """Column type of every top-level property, in the schema's order; every column may be NULL.

    Text and enums String, integer Int64, number Float64, boolean, array List, object Struct. Raises RefusedError for a schema that
    `check_schema` refuses: what it lets through has exactly one type per field.
    """
    problems = check_schema(answer_schema)
    if problems:
        raise RefusedError(*problems)
    return {name: _dtype(field) for name, field in answer_fields(answer_schema)}


def _dtype(field: AnswerField) -> pl.DataType:
    if field.kind == "object":
        return pl.Struct({name: _dtype(inner) for name, inner in field.properties})
    if field.kind == "array":
        assert field.item is not None, "an array without items was refused"
        return pl.List(_dtype(field.item))
    return DTYPE_OF_KIND[field.kind]()


class Outcomes:
    """The table at `uri` (local path or s3://). One writer at a time by the committer's generation; any number of readers."""

    def __init__(self, uri: str, *, answer_schema: str) -> None:
        self.uri = uri
        self.schema = outcomes_schema(answer_schema)
        self._table: DeltaTable | None = None
        self._merges_since_open = 0

    def create(self) -> None:
        """Idempotent, also in two processes at once. Raises UnfitEnvironmentError when the table there has other columns."""
        try:
            table = DeltaTable(self.uri)
        except TableNotFoundError:
            table = self._create()
        self._adopt(table)

    def _create(self) -> DeltaTable:
        try:
            return DeltaTable.create(
                self.uri, schema=Schema.from_arrow(self.schema), mode="error", partition_by=PARTITION_COLUMNS, configuration=CONFIGURATION
            )
        except DeltaError:
            return DeltaTable(self.uri)  # another was faster: its table is as good, and `_adopt` looks at the columns

    def _adopt(self, table: DeltaTable) -> None:
        expected = Schema.from_arrow(self.schema)
        if table.schema() != expected:
            raise UnfitEnvironmentError(
                Problem(
                    code="outcomes.other_columns",
                    file=self.uri,
                    what="the outcomes table was made for another answer schema",
                    expected=", ".join(field.name for field in expected.fields),
                    found=", ".join(field.name for field in table.schema().fields),
                    fix="run this version with the release of Gristmill that planned it, or plan a new version",
                )
            )
        self._table = table
        self._merges_since_open = 0

    def _newest(self) -> DeltaTable:
        """The table at its newest version."""
        if self._table is None or self._merges_since_open >= REOPEN_MERGES:
            self._adopt(DeltaTable(self.uri))
        else:
            self._table.update_incremental()
        assert self._table is not None
        return self._table

    def merge(self, frame: pl.DataFrame, shards: Collection[int], *, still_mine: Callable[[], None]) -> int:
        """Insert the rows whose record is not there yet; returns how many were inserted (0 for a repeat).

        `frame` has exactly `schema`, each record once, and only rows of `shards`. `still_mine` raises when another generation leads; it is
        asked before each try. Raises SourceRefusedError before writing, CommitFailedError after MERGE_TRIES_MAX conflicts.
        """
        literal = sorted({int(shard) for shard in shards})
        self._check_source(frame, literal)
        if frame.is_empty():
            return 0
        inserted = self._patiently(lambda: self._merge_once(frame, literal), still_mine=still_mine)
        self._check_rows(frame, literal, inserted=inserted)
        return inserted

    def merge_redrive(self, frame: pl.DataFrame, shards: Collection[int], *, still_mine: Callable[[], None]) -> int:
        """Update the rows that are dead letters of an earlier round; returns how many were (0 for a repeat). Nothing is ever inserted.

        `frame` as in `merge`, with the outcomes of reopened records alone, each under the round that reopened it. Raises as `merge` does,
        and OutcomesWrongError when a record of it is not there afterwards, or not as this round left it.
        """
        literal = sorted({int(shard) for shard in shards})
        self._check_source(frame, literal)
        if frame.is_empty():
            return 0
        if frame["round"].min() == ROUND_FIRST:
            raise SourceRefusedError(uri=self.uri, reason=f"rows of round {ROUND_FIRST}, which is no redrive's")
        updated = self._patiently(lambda: self._redrive_once(frame, literal), still_mine=still_mine)
        if updated != frame.height:
            self._check_redriven(frame, literal)
        return updated

    def _patiently(self, write_once: Callable[[], int], *, still_mine: Callable[[], None]) -> int:
        for tries_left in reversed(range(MERGE_TRIES_MAX)):
            still_mine()
            try:
                return write_once()
            except CommitFailedError:
                self._table = None
                if tries_left == 0:
                    raise
        raise AssertionError  # the last try returns or raises

    def _merge_once(self, frame: pl.DataFrame, literal: Sequence[int]) -> int:
        metrics = self._merger(frame, _same_record(literal)).when_not_matched_insert_all().execute()
        return int(metrics["num_target_rows_inserted"])

    def _redrive_once(self, frame: pl.DataFrame, literal: Sequence[int]) -> int:
        merger = self._merger(frame, f"{STILL_DEAD} AND {_same_record(literal)}")
        metrics = merger.when_matched_update_all(predicate=f"{STILL_DEAD} AND {OF_AN_EARLIER_ROUND}").execute()
        return int(metrics["num_target_rows_updated"])

    def _merger(self, frame: pl.DataFrame, predicate: str) -> TableMerger:
        table = self._newest()
        self._merges_since_open += 1
        return table.merge(
            frame,
            predicate,
            source_alias="s",
            target_alias="t",
            streamed_exec=True,  # the predicate's literals prune; collecting the source first was measured a sixth slower
            writer_properties=WriterProperties(compression="ZSTD", compression_level=1),
        )

    def _check_source(self, frame: pl.DataFrame, literal: Sequence[int]) -> None:
        """What a MERGE of delta-rs does not notice and would turn into doubled or silently changed rows (FINDINGS, Delta)."""
        if frame.schema != self.schema or frame.columns != list(self.schema):
            raise SourceRefusedError(uri=self.uri, reason=f"columns differ: expected {self.schema}, found {frame.schema}")
        nulls = [name for name in KEY_COLUMNS if frame[name].null_count() > 0]
        if nulls:
            raise SourceRefusedError(uri=self.uri, reason=f"NULL in {', '.join(nulls)}")
        repeats = frame.height - frame["record_id"].n_unique()
        if repeats:
            raise SourceRefusedError(uri=self.uri, reason=f"{repeats} record ids stand in it more than once")
        foreign = sorted(set(frame["shard"].unique()) - set(literal))
        if foreign:
            raise SourceRefusedError(uri=self.uri, reason=f"rows of shards {foreign[:10]}, only {literal} were named")

    def _check_rows(self, frame: pl.DataFrame, literal: Sequence[int], *, inserted: int) -> None:
        """After a repeat: the table holds exactly the rows of these shards. A first MERGE inserts all, and there is nothing to ask."""
        if inserted == frame.height:
            return
        found = sum(file.rows for file in self.files(shards=literal))
        if found != frame.height:
            raise OutcomesWrongError(uri=self.uri, shards=literal, expected=frame.height, found=found)

    def _check_redriven(self, frame: pl.DataFrame, literal: Sequence[int]) -> None:
        """After a repeat: each record of it stands there once, as this round or a later one left it."""
        found = self.read(shards=literal, columns=["record_id", "round", "outcome"])
        both = frame.select("record_id", "round", "outcome").join(found, on="record_id", suffix="_found")
        later = pl.col("round_found") > pl.col("round")
        same = (pl.col("round_found") == pl.col("round")) & (pl.col("outcome_found") == pl.col("outcome"))
        right = both.filter(later | same).height
        if (both.height, right) != (frame.height, frame.height):
            raise OutcomesWrongError(uri=self.uri, shards=literal, expected=frame.height, found=right)

    def read(
        self, *, shards: Collection[int] | None = None, columns: Sequence[str] | None = None, outcome: Outcome | None = None
    ) -> pl.DataFrame:
        """Rows of these shards and this outcome (all when None) at the newest version, in no order; other partitions are not opened."""
        # Not scan_delta: deltalake 1.6.3 hands out percent-encoded paths, so a root with a blank or a # in its name is not found.
        parts = [_scan(file) for file in self.files(shards=shards) if outcome in (None, file.outcome)]
        rows = (
            pl.concat(parts).select(columns or self.schema.names())
            if parts
            else pl.LazyFrame(schema=self.schema).select(columns or pl.all())
        )
        return rows.collect()

    def count(self, *, shards: Collection[int] | None = None) -> int:
        """Rows of these shards, from the table's log alone."""
        return sum(file.rows for file in self.files(shards=shards))

    def files(self, *, shards: Collection[int] | None = None) -> list[OutcomeFile]:
        """Files of these shards at the newest version, sorted by (shard, outcome, uri)."""
        wanted = None if shards is None else {int(shard) for shard in shards}
        found = [file for file in self._all_files() if wanted is None or file.shard in wanted]
        return sorted(found, key=lambda file: (file.shard, file.outcome, file.uri))

    def _all_files(self) -> Iterator[OutcomeFile]:
        actions = pl.DataFrame(self._newest().get_add_actions(flatten=True))
        for row in actions.iter_rows(named=True):
            yield OutcomeFile(
                uri=f"{self.uri}/{row['path']}",
                shard=row["partition.shard"],
                outcome=row["partition.outcome"],
                rows=row["num_records"],
                size_bytes=row["size_bytes"],
            )
