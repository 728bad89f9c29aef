"""How people and programs read what was published: `read_alias`, `read_record`, `query`.

Needs the root and nothing else: no register, no dagster, no credentials beyond reading. An alias is resolved once per call; what is
returned stays on that release, whatever is published meanwhile.

    from batch_assets.reading import read_alias, read_record
    read_alias("ticket_summaries").filter(pl.col("outcome") == "result").collect()
    read_record("ticket_summaries", ["T-118"])
"""

import os
from collections.abc import Collection

import duckdb
import polars as pl

from batch_assets.core.errors import Problem, RefusedError, UnfitEnvironmentError
from batch_assets.core.records import key_hash
from batch_assets.settings import Settings
from batch_assets.stores.aliases import Aliases, AliasRow
from batch_assets.stores.releases import file_locations, release_files

READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)


def read_alias(name: str, *, root: str | None = None) -> pl.LazyFrame:
    """One row per record of the live release, results and dead letters (`outcome`), in (key_hash, record_id) order.

    `root` defaults to GRISTMILL_ROOT. Raises RefusedError for an unknown alias.
    """
    row = resolve_alias(name, root=root)
    return pl.scan_parquet(file_locations(row.uri, release_files(row.uri)))


def read_record(alias: str, ids: Collection[str], *, root: str | None = None) -> pl.DataFrame:
    """Rows of these record ids in the live release; ids that are not in it are simply absent. Opens about one file per id."""
    row = resolve_alias(alias, root=root)
    hashes = {key_hash(record_id) for record_id in ids}
    files = release_files(row.uri)
    wanted = [file for file in files if any(file.hash_low <= value <= file.hash_high for value in hashes)] or files[:1]
    rows = pl.scan_parquet(file_locations(row.uri, wanted))
    return rows.filter(pl.col("key_hash").is_in(sorted(hashes)) & pl.col("record_id").is_in(list(ids))).collect()


def query(sql: str, *, root: str | None = None) -> pl.DataFrame:
    """The answer to a DuckDB query in which every alias of the root is a view of its name. It reads: no other statement is let through."""
    location = _root(root)
    if "://" in location:
        raise RefusedError(
            Problem(
                code="query.root_not_local",
                what=f"`query` reads local roots only, this one is {location} (DuckDB's S3 reader is not part of an offline installation)",
                fix="read_alias(name) in polars, or the table's location in your own SQL engine",
            )
        )
    with duckdb.connect() as connection:
        views = [row.alias for row in _aliases(location).all() if _create_view(connection, row)]
        try:
            return _answer(connection, sql)
        except duckdb.Error as error:
            raise _refused_query(str(error), views=views) from error


def resolve_alias(name: str, *, root: str | None = None) -> AliasRow:
    """Where the alias points now. Raises RefusedError naming the aliases that exist."""
    location = _root(root)
    row = _aliases(location).read(name)
    if row is not None:
        return row
    known = ", ".join(each.alias for each in _aliases(location).all()) or "none yet"
    raise RefusedError(
        Problem(
            code="alias.unknown",
            key=name,
            what=f"no release was ever published under this name in {location}",
            expected=f"one of: {known}",
            found=name,
            fix="gristmill publish JOB, or set GRISTMILL_ROOT to the installation that you mean",
        )
    )


def _root(root: str | None) -> str:
    return Settings.from_environment(os.environ, root=root).root


def _aliases(root: str) -> Aliases:
    return Aliases(f"{root}/aliases")


def _create_view(connection: duckdb.DuckDBPyConnection, row: AliasRow) -> bool:
    """False when the release cannot be read: an alias that nobody asks for must not stop the queries of the others."""
    try:
        files = ", ".join(_quoted(each) for each in file_locations(row.uri, release_files(row.uri)))
    except (RefusedError, UnfitEnvironmentError):
        return False
    connection.execute(f'CREATE VIEW "{row.alias}" AS SELECT * FROM read_parquet([{files}])')  # noqa: S608  alias names match [a-z0-9_]+
    return True


def _answer(connection: duckdb.DuckDBPyConnection, sql: str) -> pl.DataFrame:
    others = [statement.type.name for statement in connection.extract_statements(sql) if statement.type not in READING]
    if others:
        # MULTI is a PIVOT that has to look for its columns first; what it is part of, a COPY for example, DuckDB does not say.
        raise duckdb.InvalidInputException(f"a query only reads, this is {', '.join(others)} (a PIVOT needs its values: IN (…))")
    relation = connection.sql(sql)
    if relation is None:  # no statement at all
        return pl.DataFrame()
    _refuse_columns(relation)
    return pl.DataFrame(relation)  # as an Arrow capsule: DuckDB's own way to polars needs pyarrow


def _refuse_columns(relation: duckdb.DuckDBPyRelation) -> None:
    """Columns that no frame can hold, while SQL can: two of one name, and INTERVAL, at which polars 2.1 panics."""
    doubled = sorted({name for name in relation.columns if relation.columns.count(name) > 1})
    intervals = [name for name, kind in zip(relation.columns, relation.types, strict=True) if "INTERVAL" in str(kind)]
    if doubled:
        raise duckdb.InvalidInputException(f"several columns are called {', '.join(doubled)}: name them with AS")
    if intervals:
        raise duckdb.InvalidInputException(f"{', '.join(intervals)}: an INTERVAL cannot be shown, CAST it to VARCHAR or use date_diff")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _refused_query(message: str, *, views: list[str]) -> RefusedError:
    return RefusedError(
        Problem(
            code="query.refused",
            what=message.partition("\n")[0],
            fix=f"correct the SQL; the views are: {', '.join(sorted(views)) or 'none yet'}",
        )
    )
