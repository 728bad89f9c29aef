"""The source of a job: pinned once, then streamed in batches of text columns with memory that does not grow.

`pin_snapshot` makes an immutable name of what is there now (a Delta version, or files by sha256); `read_batches` reads exactly that or
refuses. What the rows mean (dispositions, duplicates, shards) is decided by flows/planner.py.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl
from deltalake import DeltaTable

from batch_assets.core.errors import Problem, RefusedError
from batch_assets.core.spec import PinnedFile, Snapshot, SourceKind
from batch_assets.stores import source_text
from batch_assets.stores.source_tables import (
    DataFile,
    delta_columns,
    delta_content,
    delta_files,
    open_delta,
    parquet_columns,
    parquet_rows,
    slices,
)

MALFORMED: Final = "__malformed"  # column of every batch: what is wrong with the row in our words, null when nothing is
_JSON_PREFIX: Final = "__json_"
HASH_BYTES: Final = 1 << 20
SAMPLE_BYTES: Final = 256 << 10  # per file, to guess how many rows a text file has
FILES_MAX: Final = 100_000
_SUFFIXES: Final = {".parquet": SourceKind.PARQUET, ".csv": SourceKind.CSV, ".jsonl": SourceKind.JSONL}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBatch:
    """Consecutive rows of one file. `frame`: the requested columns as text (null allowed), a `json_column` for each of the requested
    scalars, then `__malformed`.

    A row whose line cannot be read at all is null in every column but `__malformed`. `first_row` counts from 1 within the file.
    """

    file_name: str
    first_row: int
    frame: pl.DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSize:
    """How much there is to read: exact rows for parquet and Delta, a guess for text; bytes as stored."""

    rows: int
    size_bytes: int


def kind_of(uri: str) -> SourceKind:
    """By suffix (of a file, a glob, or all data files of a folder without _delta_log), else Delta."""
    if (known := _SUFFIXES.get(Path(uri).suffix)) is not None:
        return known
    folder = Path(uri)
    if "://" in uri or not folder.is_dir() or (folder / "_delta_log").is_dir():
        return SourceKind.DELTA
    kinds = {_SUFFIXES[path.suffix] for path in folder.rglob("*") if path.suffix in _SUFFIXES and _is_data(path, folder)}
    return kinds.pop() if len(kinds) == 1 else SourceKind.DELTA


def pin_snapshot(uri: str, kind: SourceKind) -> Snapshot:
    """What is there now. Delta: table id, newest version and its files, which exist; else every file's sha256. Raises RefusedError."""
    _refuse_remote(uri)
    if kind is SourceKind.DELTA:
        table = open_delta(uri)
        delta_files(table, root=uri)
        return Snapshot(
            kind=kind, uri=uri, table_id=str(table.metadata().id), table_version=table.version(), table_content=delta_content(table)
        )
    return Snapshot(kind=kind, uri=uri, files=tuple(_pinned(name, path) for name, path in _files(uri, kind)))


def source_columns(uri: str, kind: SourceKind) -> dict[str, str]:
    """Column -> `text`, `integer`, `float`, `boolean` or another type's own name. Columns that not all files have are left out.

    JSON Lines: what the first lines of each file hold (`text`, `number`, `text|number`, …).
    """
    _refuse_remote(uri)
    match kind:
        case SourceKind.DELTA:
            return delta_columns(open_delta(uri))
        case SourceKind.PARQUET:
            return _common([parquet_columns(str(path)) for _, path in _files(uri, kind)])
        case SourceKind.CSV:
            return _common([dict.fromkeys(source_text.csv_header(path), "text") for _, path in _files(uri, kind)])
        case SourceKind.JSONL:
            seen = [source_text.jsonl_columns(path) for _, path in _files(uri, kind)]
            return {name: _joined(columns.get(name, "null") for columns in seen) for name in {name: 0 for each in seen for name in each}}


def source_size(snapshot: Snapshot) -> SourceSize:
    """Rows and bytes of the pinned source; decides how many buckets the planner makes, nothing else."""
    match snapshot.kind:
        case SourceKind.DELTA:
            files = delta_files(_pinned_table(snapshot), root=snapshot.uri)
            rows = sum(parquet_rows(file.path) if file.rows is None else file.rows for file in files)
            return SourceSize(rows=rows, size_bytes=sum(Path(file.path).stat().st_size for file in files))
        case SourceKind.PARQUET:
            rows = sum(parquet_rows(str(path)) for _, path in _files(snapshot.uri, snapshot.kind))
        case SourceKind.CSV | SourceKind.JSONL:
            rows = sum(_guess_rows(path) for _, path in _files(snapshot.uri, snapshot.kind))
    return SourceSize(rows=rows, size_bytes=sum(file.size_bytes for file in snapshot.files))


def json_column(column: str) -> str:
    """What the JSON text of a source column is called in a batch: its plain text may stand there too."""
    return f"{_JSON_PREFIX}{column}"


def read_batches(snapshot: Snapshot, columns: Sequence[str], *, scalars: Sequence[str] = ()) -> Iterator[SourceBatch]:
    """All rows of the snapshot, files in order of name, rows in order of their file.

    Columns hold text; integers become decimal text. Columns in `scalars` may hold any scalar and come as its JSON text under the name
    `json_column` gives; a column may be asked for in both ways. Raises RefusedError when a column is of another type, or when a file
    is not, or no longer, what was pinned.
    """
    if snapshot.kind is SourceKind.DELTA:
        for file in delta_files(_pinned_table(snapshot), root=snapshot.uri):
            yield from _table_batches(file, columns, scalars, nullable=True)
        return
    pinned = {file.name: file for file in snapshot.files}
    paths = dict(_files(snapshot.uri, snapshot.kind))
    if pinned.keys() != paths.keys():
        name = min(pinned.keys() ^ paths.keys())
        raise _changed(snapshot.uri, name, expected="the files that were pinned", found="another set of files")
    for name, path in paths.items():
        reader = _table_file if snapshot.kind is SourceKind.PARQUET else _text_file
        yield from reader(snapshot, pinned[name], path, columns, scalars)


# ---- files


def _files(uri: str, kind: SourceKind) -> list[tuple[str, Path]]:
    """(name within the source, path), sorted by name. Raises RefusedError when there is none."""
    base, found = _matches(uri, kind)
    files = sorted((path.relative_to(base).as_posix(), path) for path in found)
    if files and len(files) <= FILES_MAX:
        return files
    raise RefusedError(
        Problem(
            code="source.missing" if not files else "source.too_many_files",
            file=uri,
            key="input.table",
            what=f"there is no .{kind} file here" if not files else "too many files for one source",
            expected=f"a .{kind} file, a folder of them, or a pattern; at most {FILES_MAX:,} files",
            found=f"{len(files):,} files",
            fix="correct input.table" if not files else "write fewer, larger files",
        )
    )


def _matches(uri: str, kind: SourceKind) -> tuple[Path, list[Path]]:
    path = Path(uri)
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        return path, [found for found in path.rglob(f"*.{kind}") if _is_data(found, path)]
    parts = path.parts
    first = next((place for place, part in enumerate(parts) if any(sign in part for sign in "*?[")), len(parts))
    base = Path(*parts[:first])
    if first == len(parts) or not base.is_dir():
        return path, []
    return base, [found for found in base.glob("/".join(parts[first:])) if _is_data(found, base)]


def _is_data(path: Path, base: Path) -> bool:
    """Hidden files and those that begin with `_` are other programs' (`_SUCCESS`, `.crc`)."""
    return path.is_file() and not any(part.startswith((".", "_")) for part in path.relative_to(base).parts)


def _pinned(name: str, path: Path) -> PinnedFile:
    return PinnedFile(name=name, size_bytes=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _guess_rows(path: Path) -> int:
    with path.open("rb") as file:
        sample = file.read(SAMPLE_BYTES)
    return path.stat().st_size * sample.count(b"\n") // max(1, len(sample)) + 1


def _common(columns_by_file: Sequence[dict[str, str]]) -> dict[str, str]:
    names = [name for name in columns_by_file[0] if all(name in columns for columns in columns_by_file)]
    return {name: _joined(columns[name] for columns in columns_by_file) for name in names}


def _joined(types: Iterable[str]) -> str:
    parts = {part for text in types for part in text.split("|")}
    return "|".join(sorted(parts - {"null"})) or "null"


# ---- reading


def _pinned_table(snapshot: Snapshot) -> DeltaTable:
    table = open_delta(snapshot.uri, snapshot.table_version)
    if str(table.metadata().id) != snapshot.table_id:
        raise _changed(snapshot.uri, "_delta_log", expected=f"table id {snapshot.table_id}", found=str(table.metadata().id))
    if snapshot.table_content is not None and (found := delta_content(table)) != snapshot.table_content:
        raise _changed(snapshot.uri, "_delta_log", expected=f"the files of version {snapshot.table_version} as pinned", found=found)
    return table


def _text_file(snapshot: Snapshot, pinned: PinnedFile, path: Path, columns: Sequence[str], scalars: Sequence[str]) -> Iterator[SourceBatch]:
    with source_text.HashedFile(path) as file:
        if snapshot.kind is SourceKind.CSV:
            _refuse_absent(str(path), (*columns, *scalars), source_text.csv_header(path))
            rows = source_text.csv_rows(path, file, (*columns, *scalars))
        else:
            rows = source_text.jsonl_rows(file, columns, scalars=scalars)
        quoted = scalars if snapshot.kind is SourceKind.CSV else ()
        names = (*columns, *map(json_column, scalars), MALFORMED)
        for part in rows:
            content = dict(zip(names, (*part.columns, part.malformed), strict=True))
            frame = pl.DataFrame(content, schema=dict.fromkeys(names, pl.String))
            frame = frame.with_columns(_json_of(pl.String, json_column(column)) for column in quoted)
            yield SourceBatch(file_name=pinned.name, first_row=part.first_row, frame=_without_nul(frame, columns))
        _refuse_changed(snapshot, pinned, found=file.sha256())


def _table_file(
    snapshot: Snapshot, pinned: PinnedFile, path: Path, columns: Sequence[str], scalars: Sequence[str]
) -> Iterator[SourceBatch]:
    try:
        yield from _table_batches(DataFile(path=str(path), name=pinned.name, constants={}), columns, scalars, nullable=False)
    except RefusedError:
        _refuse_changed(snapshot, pinned, found=_sha256(path))  # the better reason why it could not be read
        raise
    _refuse_changed(snapshot, pinned, found=_sha256(path))  # polars reads it, so it is hashed after, not while


def _table_batches(file: DataFile, columns: Sequence[str], scalars: Sequence[str], *, nullable: bool) -> Iterator[SourceBatch]:
    stored = parquet_columns(file.path)
    wanted = tuple(dict.fromkeys((*columns, *scalars)))
    absent = [column for column in wanted if column not in stored and column not in file.constants]
    if not nullable:
        _refuse_absent(file.path, wanted, stored)
    first_row = 1
    for part in slices(file, wanted, absent=absent):
        frame = part.select(
            *(_text_of(file.path, part.schema[name], name) for name in columns),
            *(_scalar_of(file.path, part.schema[name], name).alias(json_column(name)) for name in scalars),
        )
        frame = frame.with_columns(pl.lit(None, dtype=pl.String).alias(MALFORMED))
        yield SourceBatch(file_name=file.name, first_row=first_row, frame=_without_nul(frame, columns))
        first_row += part.height


def _text_of(path: str, dtype: pl.DataType, column: str) -> pl.Expr:
    if _is_text(dtype) or dtype.is_integer():
        return pl.col(column).cast(pl.String)
    raise _of_another_type(path, dtype, column)


def _scalar_of(path: str, dtype: pl.DataType, column: str) -> pl.Expr:
    if _is_text(dtype) or dtype.is_numeric() or dtype == pl.Boolean:
        return _json_of(dtype, column)
    raise _of_another_type(path, dtype, column)


def _is_text(dtype: pl.DataType) -> bool:
    return dtype in (pl.String, pl.Categorical, pl.Null) or isinstance(dtype, pl.Enum)


def _of_another_type(path: str, dtype: pl.DataType, column: str) -> RefusedError:
    return RefusedError(
        Problem(
            code="source.column_type",
            file=path,
            key=column,
            what=f"column {column} has a type that is not text",
            expected="text (integers are fine for key, acl, record_class and segment)",
            found=str(dtype),
            fix=f"write {column} as text in the source",
        )
    )


def _json_of(dtype: pl.DataType | type[pl.DataType], column: str) -> pl.Expr:
    """The scalar as JSON text; a null stays null."""
    value = pl.col(column) if dtype not in (pl.Categorical, pl.Null) else pl.col(column).cast(pl.String)
    text = pl.struct(value.alias("")).struct.json_encode().str.strip_prefix('{"":').str.strip_suffix("}")
    return pl.when(value.is_not_null()).then(text).alias(column)


def _without_nul(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """A NUL in any column makes the row malformed: C programs and databases cut the text there. Its neighbours are unaffected."""
    for column in columns:
        holds = pl.col(column).str.contains("\0", literal=True).fill_null(value=False)
        if frame.select(holds.any()).item():
            fault = pl.when(holds & pl.col(MALFORMED).is_null()).then(pl.lit(f"{column} holds a NUL")).otherwise(pl.col(MALFORMED))
            frame = frame.with_columns(fault.alias(MALFORMED), pl.when(~holds).then(pl.col(column)).alias(column))
    return frame


# ---- refusals


def _refuse_remote(uri: str) -> None:
    if "://" in uri:
        raise RefusedError(
            Problem(
                code="source.not_local",
                file=uri,
                key="input.table",
                what="a source on another host cannot be read yet",
                expected="a path on this host",
                found=uri,
                fix="mount or copy the table, and name its path in input.table",
            )
        )


def _refuse_absent(path: str, columns: Sequence[str], there: Collection[str]) -> None:
    absent = [column for column in columns if column not in there]
    if absent:
        raise RefusedError(
            Problem(
                code="source.column_missing",
                file=path,
                key=absent[0],
                what=f"the source has no column {absent[0]}",
                expected=f"a column {absent[0]}",
                found=", ".join(there),
                fix="correct the job file, or the source",
            )
        )


def _refuse_changed(snapshot: Snapshot, pinned: PinnedFile, *, found: str) -> None:
    if found != pinned.sha256:
        raise _changed(snapshot.uri, pinned.name, expected=f"sha256 {pinned.sha256}", found=found)


def _changed(uri: str, name: str, *, expected: str, found: str) -> RefusedError:
    return RefusedError(
        Problem(
            code="source.changed",
            file=uri,
            key=name,
            what="the file changed while it was read; nothing has been planned from it",
            expected=expected,
            found=found,
            fix="run again when nobody writes to it; write new data under a new name, or use a Delta table",
        )
    )
