"""How people and programs read what was published: `read_alias`, `read_record`, `query`.

Needs the root and nothing else: no register, no dagster, no credentials beyond reading. An alias is resolved once per call; what is
returned stays on that release, whatever is published meanwhile.

    from batch_assets.reading import read_alias, read_record
    read_alias("ticket_summaries").filter(pl.col("outcome") == "result").collect()
    read_record("ticket_summaries", ["T-118"])
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import duckdb
import polars as pl

from batch_assets.core.errors import Problem, ProblemError, RefusedError
from batch_assets.core.records import key_hash
from batch_assets.settings import Settings
from batch_assets.stores.aliases import Aliases, AliasRow
from batch_assets.stores.releases import file_locations, release_files

# Not EXPLAIN: what it explains is not told, and EXPLAIN ANALYZE of a COPY or a CREATE TABLE does it.
READING = (duckdb.StatementType.SELECT,)
GLOB_CHARACTERS = re.compile(r"[*?\[]")
NO_GUESSES = "hive_partitioning = false"  # parts of a path such as acl=public are no columns


def read_alias(name: str, *, root: str | None = None) -> pl.LazyFrame:
    """One row per record of the live release, results and dead letters (`outcome`), in (key_hash, record_id) order.

    `root` defaults to GRISTMILL_ROOT. Raises RefusedError for an unknown alias.
    """
    row = resolve_alias(name, root=root)
    return _scan(file_locations(row.uri, release_files(row.uri)))


def read_record(alias: str, ids: Collection[str], *, root: str | None = None) -> pl.DataFrame:
    """Rows of these record ids in the live release; ids that are not in it are simply absent. Opens about one file per id."""
    row = resolve_alias(alias, root=root)
    hashes = {key_hash(record_id) for record_id in ids}
    files = release_files(row.uri)
    wanted = [file for file in files if any(file.hash_low <= value <= file.hash_high for value in hashes)] or files[:1]
    rows = _scan(file_locations(row.uri, wanted))
    return rows.filter(pl.col("key_hash").is_in(sorted(hashes)) & pl.col("record_id").is_in(list(ids))).collect()


def _scan(locations: list[str]) -> pl.LazyFrame:
    """Exactly these files: a root may have any name, also `x[1]` or `acl=public`."""
    return pl.scan_parquet(locations, glob=False, hive_partitioning=False)


def query(sql: str, *, root: str | None = None) -> pl.DataFrame:
    """The answer to a DuckDB query in which every alias of the root is a view of its name. It reads these views and nothing else.

    Only SELECT is let through, and the connection can neither open another file nor be told to. An alias whose release is damaged has no
    view; the others have theirs.
    """
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
        views = _Views.made(connection, _aliases(location).all())
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


@dataclass(frozen=True, slots=True)
class _Views:
    """The aliases that can be asked, and why the others cannot."""

    names: tuple[str, ...]
    unreadable: Mapping[str, str]

    @classmethod
    def made(cls, connection: duckdb.DuckDBPyConnection, rows: Sequence[AliasRow]) -> Self:
        """One view an alias; afterwards the connection reads their files only. One damaged release does not stop the others."""
        files: list[str] = []
        unreadable: dict[str, str] = {}
        for row in rows:
            try:
                files += _create_view(connection, row)
            except ProblemError as error:
                unreadable[row.alias] = f"{error.problems[0].what}: found {error.problems[0].found}"
            except duckdb.Error as error:
                unreadable[row.alias] = str(error).partition("\n")[0]
        _lock(connection, files)
        return cls(tuple(row.alias for row in rows if row.alias not in unreadable), unreadable)


def _create_view(connection: duckdb.DuckDBPyConnection, row: AliasRow) -> list[str]:
    """The files that the view reads."""
    files = file_locations(row.uri, release_files(row.uri))
    patterns = [GLOB_CHARACTERS.sub(r"[\g<0>]", each) for each in files]  # DuckDB takes each for a pattern: this one means itself
    listed = ", ".join(_quoted(each) for each in patterns)
    connection.execute(f'CREATE VIEW "{row.alias}" AS SELECT * FROM read_parquet([{listed}], {NO_GUESSES})')  # noqa: S608  alias names match [a-z0-9_]+
    return [*files, *patterns]


def _lock(connection: duckdb.DuckDBPyConnection, files: Sequence[str]) -> None:
    """No other file, no extension, no other setting, until the connection is closed."""
    connection.execute(f"SET allowed_paths = [{', '.join(_quoted(each) for each in sorted(set(files)))}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _answer(connection: duckdb.DuckDBPyConnection, sql: str) -> pl.DataFrame:
    others = [statement.type.name for statement in connection.extract_statements(sql) if statement.type not in READING]
    if others:
        # MULTI is a PIVOT that has to look for its columns first; what it is part of, a COPY for example, DuckDB does not say.
        raise duckdb.InvalidInputException(f"a query only reads (SELECT), this is {', '.join(others)} (a PIVOT needs its values: IN (…))")
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


def _refused_query(message: str, *, views: _Views) -> RefusedError:
    asked = [f"{alias} cannot be read: {reason}" for alias, reason in views.unreadable.items() if re.search(rf"\b{alias}\b", message)]
    return RefusedError(
        Problem(
            code="query.refused",
            what="; ".join(asked) or message.partition("\n")[0],
            fix=f"correct the SQL; the views are: {', '.join(sorted(views.names)) or 'none yet'}",
        )
    )
