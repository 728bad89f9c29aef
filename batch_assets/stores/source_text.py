"""CSV and JSON Lines, record by record with the standard library: one bad line is one malformed record, never a failed file.

Not polars: it turns a lone surrogate into NUL, cuts ragged lines and gives up a whole file for one bad line. Blank lines are no
records. A CSV whose quoting is broken is refused, because nobody can say where its records end. Files are hashed as they are read.
"""

import csv
import hashlib
import io
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from batch_assets.core.errors import Problem, RefusedError

LINE_BYTES_MAX: Final = 16 << 20  # a longer line (JSON) or field (CSV) is no record of ours: 3,000 times the reference record
HEADER_BYTES_MAX: Final = 1 << 20
READ_BYTES: Final = 1 << 20
BATCH_ROWS: Final = 8192
BATCH_BYTES: Final = 8 << 20  # whichever comes first; a batch of large records stays small
SAMPLE_LINES: Final = 1000  # of each JSON Lines file, to learn which columns there are
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextRows:
    """Rows of one file in order: per requested column a text or None, and why a row is malformed (None when it is not)."""

    first_row: int
    columns: tuple[list[str | None], ...]
    malformed: list[str | None]


class HashedFile:
    """A file read once from front to back, hashed on its way; lines are bounded."""

    def __init__(self, path: Path) -> None:
        self._raw = _HashingReader(path)
        self._file = io.BufferedReader(self._raw, READ_BYTES)
        self.line_number = 0

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def line(self, bytes_max: int = LINE_BYTES_MAX) -> bytes | None:
        """The next line with its end; None when it is longer than `bytes_max` (it is skipped); `b""` at the end of the file."""
        line = self._file.readline(bytes_max + 1)
        self.line_number += bool(line)
        if self.line_number == 1 and line.startswith(_BOM):
            line = line[len(_BOM) :]
        if len(line) <= bytes_max:
            return line
        while line and not line.endswith(b"\n"):
            line = self._file.readline(READ_BYTES)
        return None

    def sha256(self) -> str:
        """Hex digest of the whole file; reads what is left of it."""
        while self._file.read(READ_BYTES):
            pass
        return self._raw.hash.hexdigest()


class _HashingReader(io.RawIOBase):
    def __init__(self, path: Path) -> None:
        self.hash = hashlib.sha256()
        self._file = path.open("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self._file.readinto(buffer)
        self.hash.update(memoryview(buffer)[:size])
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


class _Batch:
    """Collects rows and says when there are enough."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._first_row = 1
        self._rows: list[Sequence[str | None]] = []
        self._malformed: list[str | None] = []
        self._bytes_from = 0

    def add(self, row: Sequence[str | None] | None, malformed: str | None, *, bytes_read: int) -> bool:
        """`row` None: nothing of it can be read. True when the batch is full."""
        self._rows.append((None,) * self._width if row is None else row)
        self._malformed.append(malformed)
        return len(self._rows) >= BATCH_ROWS or bytes_read - self._bytes_from >= BATCH_BYTES

    def take(self, *, bytes_read: int) -> Iterator[TextRows]:
        """What has been collected, if anything; collecting starts again."""
        if self._rows:
            yield TextRows(self._first_row, tuple(list(values) for values in zip(*self._rows, strict=True)), self._malformed)
        self._first_row += len(self._rows)
        self._rows, self._malformed, self._bytes_from = [], [], bytes_read


# ---- CSV


def csv_header(path: Path) -> tuple[str, ...]:
    """Column names of a CSV file. Raises RefusedError when its first line is no header."""
    with HashedFile(path) as file:
        return _read_header(path, file)


def csv_rows(path: Path, file: HashedFile, columns: Sequence[str]) -> Iterator[TextRows]:
    """All records of a CSV file; `columns` must be in its header. Raises RefusedError when the quoting is broken."""
    header = _read_header(path, file)
    places = [header.index(column) for column in columns]
    lines = _CsvLines(file)
    csv.field_size_limit(LINE_BYTES_MAX)  # of the whole process; the standard 128 KiB would refuse long records
    reader = csv.reader(lines, strict=True)
    batch = _Batch(len(columns))
    for row, malformed in _csv_records(path, lines, reader, width=len(header)):
        taken = None if row is None else [row[place] for place in places]
        if batch.add(taken, malformed, bytes_read=lines.bytes_read):
            yield from batch.take(bytes_read=lines.bytes_read)
    yield from batch.take(bytes_read=lines.bytes_read)


class _LineTooLongError(Exception):
    pass


class _CsvLines:
    """Text lines for `csv.reader`; remembers whether one since `begin` was not UTF-8."""

    def __init__(self, file: HashedFile) -> None:
        self._file = file
        self.bytes_read = 0
        self.first = 0  # line on which the present record begins
        self.undecodable = False

    def begin(self) -> None:
        self.first = self._file.line_number + 1
        self.undecodable = False

    @property
    def spanned(self) -> int:
        """Lines read for the present record."""
        return self._file.line_number - self.first + 1

    def __iter__(self) -> "_CsvLines":
        return self

    def __next__(self) -> str:
        line = self._file.line()
        if line is None:
            raise _LineTooLongError
        if not line:
            raise StopIteration
        self.bytes_read += len(line)
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.undecodable = True
            return line.decode(errors="replace")


def _csv_records(path: Path, lines: _CsvLines, reader: Any, *, width: int) -> Iterator[tuple[list[str] | None, str | None]]:
    while True:
        lines.begin()
        try:
            row = next(reader)
        except StopIteration:
            return
        except _LineTooLongError:
            _refuse_unless_alone(path, lines, "a line is too long")
            yield None, f"line {lines.first}: longer than {LINE_BYTES_MAX >> 20} MiB"
            continue
        except csv.Error as error:
            if "unexpected end" in str(error):
                _refuse_quoting(path, lines.first, "the file ends inside a quoted field")
            _refuse_unless_alone(path, lines, "a quoted field does not end where it should")
            yield None, f"line {lines.first}: broken quoting"
            continue
        if len(row) == width and not lines.undecodable:
            yield row, None
        elif row and (len(row) > 1 or row[0].strip()):
            yield None, _csv_fault(lines, found=len(row), width=width)


def _csv_fault(lines: _CsvLines, *, found: int, width: int) -> str:
    if lines.undecodable:
        return f"line {lines.first}: not UTF-8"
    return f"line {lines.first}: {found} fields, the header has {width}"


def _refuse_unless_alone(path: Path, lines: _CsvLines, why: str) -> None:
    """A fault inside one line is that line's own; one that was found lines later means that records have been swallowed."""
    if lines.spanned > 1:
        _refuse_quoting(path, lines.first, why)


def _refuse_quoting(path: Path, line: int, why: str) -> NoReturn:
    raise RefusedError(
        Problem(
            code="source.csv_quoting",
            file=str(path),
            key=f"line {line}",
            what=f"the quoting is broken from line {line} on: {why}, so nobody can tell where the records after it end",
            expected='fields with quotes, commas or line ends inside "…", quotes doubled',
            found="a quote that opens and does not close",
            fix=f"look at line {line}, repair the file or write it again with a CSV library",
        )
    )


def _read_header(path: Path, file: HashedFile) -> tuple[str, ...]:
    line = b"\n"
    while line is not None and line and not line.strip():
        line = file.line(HEADER_BYTES_MAX)
    try:
        names = tuple(next(csv.reader([(line or b"").decode()], strict=True)))
    except (StopIteration, csv.Error, UnicodeDecodeError):
        names = ()
    twice = sorted({name for name in names if names.count(name) > 1})
    if names and not twice:
        return names
    raise RefusedError(
        Problem(
            code="source.csv_header",
            file=str(path),
            key="line 1",
            what="the first line is not a header" if not twice else f"the header names {twice[0]!r} twice",
            expected="UTF-8 column names, separated by commas, each once",
            found="nothing readable" if not twice else f"{len(names)} columns",
            fix="write a header line, in UTF-8",
        )
    )


# ---- JSON Lines


def jsonl_columns(path: Path) -> dict[str, str]:
    """Columns and types seen in the first lines: `text`, `number`, … or several joined by `|`; null alone says nothing."""
    seen: dict[str, set[str]] = {}
    with HashedFile(path) as file:
        for _ in range(SAMPLE_LINES):
            line = file.line()
            if line == b"":
                break
            record, _ = _json_record(line)
            for name, value in (record or {}).items():
                seen.setdefault(name, set()).update(() if value is None else (_json_type(value),))
    return {name: "|".join(sorted(types)) or "null" for name, types in seen.items()}


def jsonl_rows(file: HashedFile, columns: Sequence[str], *, scalars: Collection[str]) -> Iterator[TextRows]:
    """All records of a JSON Lines file. `scalars` may hold any scalar and come as JSON text; the other columns must hold text."""
    batch = _Batch(len(columns))
    bytes_read = 0
    while (line := file.line()) != b"":
        if line is not None and line.isspace():
            continue
        record, fault = _json_record(line)
        bytes_read += len(line or b"")
        row = None
        if record is not None:
            row, fault = _json_row(record, columns, scalars)
        if batch.add(row, fault and f"line {file.line_number}: {fault}", bytes_read=bytes_read):
            yield from batch.take(bytes_read=bytes_read)
    yield from batch.take(bytes_read=bytes_read)


def _json_record(line: bytes | None) -> tuple[dict[str, Any] | None, str | None]:
    """One line as an object, or what is wrong with it in our own words: the line's text never stands in an error."""
    if line is None:
        return None, f"longer than {LINE_BYTES_MAX >> 20} MiB"
    try:
        record = _DECODER.decode(line.decode())
    except UnicodeDecodeError:
        return None, "not UTF-8"
    except (ValueError, RecursionError):
        return None, "not JSON"
    if not isinstance(record, dict):
        return None, f"{_json_type(record)}, not an object"
    return record, None


def _json_row(record: dict[str, Any], columns: Sequence[str], scalars: Collection[str]) -> tuple[list[str | None], str | None]:
    row: list[str | None] = []
    fault = None
    for column in columns:
        value = record.get(column)
        if column in scalars and (value is None or isinstance(value, (str, bool, int, float))):
            value = json.dumps(value, ensure_ascii=False)
        if value is not None and not isinstance(value, str):
            fault = f"{column} holds {_json_type(value)}, not text"
            value = None
        elif value is not None and not value.isascii() and _has_surrogate(value):
            fault = f"{column} holds a lone surrogate"
            value = None
        row.append(value)
    return row, fault


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError  # which of the two is meant? nobody knows
    return record


def _refuse_constant(_: str) -> NoReturn:
    raise ValueError  # NaN, Infinity: Python's own, not JSON


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object_without_repeats, parse_constant=_refuse_constant)


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "text"
        case list():
            return "array"
        case _:
            return "object"
