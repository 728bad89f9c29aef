"""Parquet files and Delta tables in slices: bounded memory, rows in the order of their file, columns as text.

Delta is read file by file, not by a query engine, because a row without an id is named after its file and place. Tables that need more
than that (deletion vectors, column mapping) are refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import polars as pl
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from batch_assets.core.errors import Problem, RefusedError
from batch_assets.core.identity import digest_of

SLICE_ROWS: Final = 32_768
SLICE_ROWS_FIRST: Final = 1024  # the first slice measures how large rows are
SLICE_BYTES: Final = 16 << 20
_ROW: Final = "__row"
_READER_FEATURES: Final = frozenset({"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "typeWidening"})  # harmless to us
_DELTA_TYPES: Final = {
    "string": "text",
    "byte": "integer",
    "short": "integer",
    "integer": "integer",
    "long": "integer",
    "float": "float",
    "double": "float",
    "boolean": "boolean",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One parquet file: where it is, what rows without an id call it, and columns that its folder gives (Delta partitions)."""

    path: str
    name: str
    constants: Mapping[str, str | int | float | bool | None]
    rows: int | None = None


# ---- parquet


def parquet_columns(path: str) -> dict[str, str]:
    """Column -> `text`, `integer`, `float`, `boolean`, or polars' name of another type. Raises RefusedError for no parquet file."""
    try:
        schema = pl.scan_parquet(path, glob=False, hive_partitioning=False).collect_schema()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _unreadable(path, error) from error
    return {name: _type_text(dtype) for name, dtype in schema.items()}


def parquet_rows(path: str) -> int:
    """Rows of one file, from its footer. `parquet_columns` has said that it can be read."""
    return pl.scan_parquet(path, glob=False, hive_partitioning=False).select(pl.len()).collect().item()


def slices(file: DataFile, columns: Sequence[str], *, absent: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
    """The columns of one file in order, a bounded number of rows and bytes at a time; `absent` ones are null."""
    given = {name: pl.lit(value) for name, value in file.constants.items()} | {name: pl.lit(None, dtype=pl.String) for name in absent}
    taken = [given[column].alias(column) if column in given else pl.col(column) for column in columns]
    source = pl.scan_parquet(file.path, glob=False, hive_partitioning=False, low_memory=True)
    rows = parquet_rows(file.path)
    offset, size = 0, SLICE_ROWS_FIRST
    while offset < rows:
        # The row index is there so that constants have a length when nothing else is read.
        try:
            part = source.slice(offset, size).with_row_index(_ROW).select(_ROW, *taken).collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise _unreadable(file.path, error) from error
        offset += part.height
        size = max(1, min(SLICE_ROWS, SLICE_BYTES * part.height // int(part.estimated_size())))
        yield part.drop(_ROW)


def _unreadable(path: str, error: Exception) -> RefusedError:
    return RefusedError(
        Problem(
            code="source.not_parquet",
            file=path,
            what="this file cannot be read as parquet",
            expected="a complete parquet file",
            found=type(error).__name__,
            fix="write the file again, or take it out of the folder",
        )
    )


def _type_text(dtype: pl.DataType) -> str:
    if dtype in (pl.String, pl.Categorical) or isinstance(dtype, pl.Enum):
        return "text"
    if dtype.is_integer():
        return "integer"
    if dtype.is_float():
        return "float"
    if dtype == pl.Boolean:
        return "boolean"
    return str(dtype)


# ---- Delta


def open_delta(uri: str, version: int | None = None) -> DeltaTable:
    """The table, or RefusedError when there is none, it has no such version, or it needs a reader that we are not."""
    try:
        table = DeltaTable(uri, version=version)
    except (DeltaError, OSError, ValueError) as error:
        raise RefusedError(
            Problem(
                code="source.no_delta_table" if version is None else "source.delta_version_gone",
                file=uri,
                what="there is no Delta table here" if version is None else f"version {version} of this Delta table cannot be opened",
                expected="a folder with _delta_log, or a file that ends in .parquet, .csv or .jsonl",
                found=type(error).__name__,
                fix="correct input.table" if version is None else "run again: a new plan pins the newest version",
            )
        ) from error
    unknown = sorted(set(table.protocol().reader_features or ()) - _READER_FEATURES)
    if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        unknown.append("columnMapping")  # older tables have it without a reader feature
    if unknown:
        raise RefusedError(
            Problem(
                code="source.delta_features",
                file=uri,
                what="this Delta table needs reader features that are not supported here",
                expected=f"none but {', '.join(sorted(_READER_FEATURES))}",
                found=", ".join(unknown),
                fix="write the input as a table without them (for deletion vectors: REORG TABLE … APPLY (PURGE), then drop the feature)",
            )
        )
    return table


def delta_columns(table: DeltaTable) -> dict[str, str]:
    """Column -> type as `parquet_columns` says it."""
    return {field.name: _delta_type_text(field.type) for field in table.schema().fields}


def delta_content(table: DeltaTable) -> str:
    """`sha256:…` over the data files of this version as its log names them.

    Table id and version do not say what is there: a table that was restored from a backup and written to anew has both again.
    """
    actions = pl.DataFrame(table.get_add_actions(flatten=True)).select("path", "size_bytes", "modification_time", "num_records")
    return digest_of(actions.with_columns(pl.col("modification_time").cast(pl.Int64)).sort("path").rows())


def delta_files(table: DeltaTable, *, root: str) -> list[DataFile]:
    """Files of this version, sorted by name. Raises RefusedError when one of them is gone (vacuumed)."""
    actions = pl.DataFrame(table.get_add_actions(flatten=True))
    prefix = "partition."
    partitions = [name for name in actions.columns if name.startswith(prefix)]
    files = [
        DataFile(
            path=_location(root, row["path"]),
            name=unquote(row["path"]),
            constants={name.removeprefix(prefix): row[name] for name in partitions},
            rows=row["num_records"],
        )
        for row in actions.select("path", "num_records", *partitions).sort("path").iter_rows(named=True)
    ]
    _refuse_missing(files, table, root=root)
    return files


def _refuse_missing(files: Sequence[DataFile], table: DeltaTable, *, root: str) -> None:
    missing = [file for file in files if not Path(file.path).exists()]
    if missing:
        raise RefusedError(
            Problem(
                code="source.delta_vacuumed",
                file=root,
                key=f"version {table.version()}",
                what=f"{len(missing)} of {len(files)} data files of this table version are gone, most likely by VACUUM",
                expected=f"the file {missing[0].name}",
                found="no such file",
                fix="run again on the newest version; keep versions longer than a job takes (delta.deletedFileRetentionDuration)",
            )
        )


def _location(root: str, path: str) -> str:
    # Not table.file_uris(): deltalake 1.6.3 leaves the root percent-encoded there, so a folder with a space is not found.
    if path.startswith("file://"):
        return unquote(path.removeprefix("file://"))
    return f"{root.rstrip('/')}/{unquote(path)}"


def _delta_type_text(type_: object) -> str:
    name = getattr(type_, "type", None)
    text = name if isinstance(name, str) else str(type_)
    return _DELTA_TYPES.get(text, re.sub(r"^PrimitiveType\(\"(.*)\"\)$", r"\1", text))
