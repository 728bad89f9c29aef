"""The alias table: one row per alias, moved by compare-and-swap; the versions of the table are the publish history.

A move is one MERGE that names the revision it expects, so of two publishers one wins and the other learns what stands there now.
Nothing here asks whether a release deserves to be published: that is `flows/publish.py`.
"""

from dataclasses import asdict, dataclass
from typing import Any

import polars as pl
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from batch_assets.core.errors import ConflictError, GristmillError, Problem

ALIAS_SCHEMA = pl.Schema(
    {
        "alias": pl.String(),
        "revision": pl.Int64(),
        "job": pl.String(),
        "version": pl.String(),
        "release_id": pl.String(),
        "uri": pl.String(),
        "by": pl.String(),
        "reason": pl.String(),
        "rollback": pl.Boolean(),
        "overridden": pl.Boolean(),
        "at": pl.String(),
    }
)
# The history is read from old versions of the table: their log entries must stay.
CONFIGURATION: dict[str, str | None] = {"delta.checkpointInterval": "10", "delta.enableExpiredLogCleanup": "false"}
# Every conflict means that somebody else committed, so 20 in a row are 20 publishes within a second; the alias of another job counts too.
MOVE_TRIES_MAX = 20
HISTORY_MAX = 100  # each entry opens one version of the table: ~10 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasRow:
    """Where an alias points. `revision` grows by one with every move; `at` is ISO UTC text, for people."""

    alias: str
    revision: int
    job: str
    version: str
    release_id: str
    uri: str
    by: str
    reason: str | None = None
    rollback: bool = False
    overridden: bool = False
    at: str

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return asdict(self)


class AliasDoubledError(GristmillError):
    """The table holds an alias more than once (foreign hands): which of them readers get would be chance."""

    def __init__(self, *, uri: str, alias: str, rows: int) -> None:
        super().__init__(
            f"{uri}: alias {alias} stands in {rows} rows, expected 1; nothing is read or moved until a person has looked at its history",
            uri=uri,
            alias=alias,
            rows=rows,
        )


class Aliases:
    """The table at `uri` (local path or s3://). Every call opens it anew, so what is read is what stands there now."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def read(self, alias: str) -> AliasRow | None:
        """None when nothing was ever published under this name."""
        table = self._open()
        return None if table is None else self._row(table, alias)

    def all(self) -> list[AliasRow]:
        """Every alias, sorted by name."""
        table = self._open()
        return [] if table is None else [AliasRow(**row) for row in self._frame(table).sort("alias").iter_rows(named=True)]

    def history(self, alias: str, *, entries_max: int = HISTORY_MAX) -> list[AliasRow]:
        """Every move of this alias, newest first."""
        table = self._open()
        moves: dict[int, AliasRow] = {}
        newest = -1 if table is None else table.version()
        for version in range(newest, -1, -1):
            row = self._row(DeltaTable(self.uri, version=version), alias)
            if row is None or len(moves) >= entries_max:
                break
            moves[row.revision] = row
        return sorted(moves.values(), key=lambda row: -row.revision)[:entries_max]

    def move(self, row: AliasRow, *, expected: int) -> None:
        """Point the alias at `row`, provided that its revision is still `expected` (0 = it does not exist yet).

        Raises ConflictError, naming what stands there, when somebody was faster. Repeating it after a lost acknowledgement is fine.
        """
        if row.revision != expected + 1:
            msg = f"a move from revision {expected} leads to {expected + 1}, not {row.revision}"
            raise ValueError(msg)
        self._create()
        for _ in range(MOVE_TRIES_MAX):
            try:
                if self._merge(row, expected=expected):
                    return
            except CommitFailedError:
                pass  # another commit came between reading and writing: look again at what stands there
            present = self.read(row.alias)
            if present == row:
                return
            if (present.revision if present else 0) != expected:
                raise _moved(row, expected=expected, present=present)
        raise _crowded(row)

    def _merge(self, row: AliasRow, *, expected: int) -> bool:
        source = pl.DataFrame([asdict(row)], schema=ALIAS_SCHEMA)
        merger = DeltaTable(self.uri).merge(source, "t.alias = s.alias", source_alias="s", target_alias="t")
        if expected == 0:
            merger = merger.when_not_matched_insert_all()
        else:
            merger = merger.when_matched_update_all(predicate=f"t.revision = {int(expected)}")
        metrics = merger.execute()
        return metrics["num_target_rows_inserted"] + metrics["num_target_rows_updated"] == 1

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self.uri)
        except TableNotFoundError:
            return None

    def _create(self) -> None:
        if self._open() is not None:
            return
        try:
            DeltaTable.create(self.uri, Schema.from_arrow(ALIAS_SCHEMA), mode="error", configuration=CONFIGURATION)
        except DeltaError:
            if self._open() is None:  # not the race of two first publishers
                raise

    def _frame(self, table: DeltaTable) -> pl.DataFrame:
        # Paths relative to the table: `file_uris` and `scan_delta` cannot be opened when the root has a space in it (deltalake 1.6.3).
        paths = pl.DataFrame(table.get_add_actions(flatten=True))["path"].to_list() if table.version() else []
        if not paths:
            return pl.DataFrame(schema=ALIAS_SCHEMA)
        files = [f"{self.uri}/{path}" for path in paths]
        return pl.read_parquet(files, glob=False, hive_partitioning=False).select(ALIAS_SCHEMA.names())

    def _row(self, table: DeltaTable, alias: str) -> AliasRow | None:
        rows = self._frame(table).filter(pl.col("alias") == alias)
        if rows.height > 1:
            raise AliasDoubledError(uri=self.uri, alias=alias, rows=rows.height)
        return None if rows.is_empty() else AliasRow(**rows.row(0, named=True))


def _moved(row: AliasRow, *, expected: int, present: AliasRow | None) -> ConflictError:
    found = "nothing"
    if present is not None:
        found = f"revision {present.revision}: {present.version} ({present.release_id}), by {present.by} at {present.at}"
    return ConflictError(
        Problem(
            code="alias.moved",
            key=row.alias,
            what=f"alias {row.alias} was moved by somebody else while {row.version} was being published; it stays as it is",
            expected=f"revision {expected}",
            found=found,
            fix=f"gristmill history {row.job}; if {row.version} is still wanted, publish it again (it is then compared with what is live)",
        )
    )


def _crowded(row: AliasRow) -> ConflictError:
    return ConflictError(
        Problem(
            code="alias.crowded",
            key=row.alias,
            what=f"the alias table changed during each of {MOVE_TRIES_MAX} tries to move {row.alias}; it stays as it is",
            fix=f"look for a publisher in a loop (gristmill history {row.job}), then publish {row.version} again",
        )
    )
