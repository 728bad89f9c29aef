"""CSV and JSON Lines, record by record with the standard library: one bad line is one malformed record, never a failed file.

Not polars: it turns a lone surrogate into NUL, cuts ragged lines and gives up a whole file for one bad line. Blank lines are no
records. A CSV whose quoting is broken is refused, because nobody can say where its records end. Files are hashed as they are read.
"""

import csv
import hashlib
import io
import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from batch_assets.core.errors import Problem, RefusedError

LINE_BYTES_MAX: Final = 16 << 20  # a longer line (JSON) or field (CSV) is no record of ours: 3,000 times the reference record
READ_BYTES: Final = 512 << 10
BATCH_ROWS: Final = 8192
BATCH_BYTES: Final = 8 << 20  # whichever comes first; a batch of large records stays small
SAMPLE_LINES: Final = 1000  # of each JSON Lines file, to learn which columns there are
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextRows:
    """Rows of one file in order: per requested column a text or None, and why a row is malformed (None when it is not)."""

    first_row: int
    columns: Sequence[Sequence[str | None]]
    malformed: Sequence[str | None]


class HashedFile:
    """The lines of a file, once from front to back; the file is hashed on its way. A line that is too long is given out as None."""

    def __init__(self, path: Path) -> None:
        self.line_number = 0  # of the line that was given out last
        self.bytes_read = 0
        self._file = path.open("rb", buffering=0)
        self._hash = hashlib.sha256()
        self._rest = b""  # read, but no whole line yet
        self._waiting: deque[bytes | None] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def has_waiting(self) -> bool:
        """True when lines have been read or put back, and not been given out."""
        return bool(self._waiting)

    def block(self) -> list[bytes | None]:
        """Some whole lines with their ends, about READ_BYTES; empty at the end of the file."""
        lines = list(self._waiting) or self._next_lines()
        self._waiting.clear()
        self.line_number += len(lines)
        return lines

    def line(self) -> bytes | None:
        """One line; `b""` at the end of the file."""
        if not self._waiting:
            self._waiting.extend(self._next_lines())
        if not self._waiting:
            return b""
        self.line_number += 1
        return self._waiting.popleft()

    def put_back(self, lines: Sequence[bytes | None]) -> None:
        """Give these out again."""
        self._waiting.extendleft(reversed(lines))
        self.line_number -= len(lines)

    def sha256(self) -> str:
        """Hex digest of the whole file; reads what is left of it."""
        while self._read():
            pass
        return self._hash.hexdigest()

    def _read(self) -> bytes:
        chunk = self._file.read(READ_BYTES)
        self._hash.update(chunk)
        if self.bytes_read == 0 and chunk.startswith(_BOM):
            self.bytes_read += len(_BOM)
            return chunk[len(_BOM) :] or self._read()
        self.bytes_read += len(chunk)
        return chunk

    def _next_lines(self) -> list[bytes | None]:
        while chunk := self._read():
            data = self._rest + chunk
            end = data.rfind(b"\n") + 1
            self._rest = data[end:]
            if end:
                return [line if len(line) <= LINE_BYTES_MAX else None for line in io.BytesIO(data[:end]).readlines()]
            if len(data) > LINE_BYTES_MAX:
                self._skip_line()
                return [None]
        last, self._rest = self._rest, b""
        return [last] if last else []

    def _skip_line(self) -> None:
        self._rest = b""
        while chunk := self._read():
            _, found, rest = chunk.partition(b"\n")
            if found:
                self._rest = rest
                return


# ---- CSV


def csv_header(path: Path) -> tuple[str, ...]:
    """Column names of a CSV file. Raises RefusedError when its first line is no header."""
    with HashedFile(path) as file:
        return _read_header(path, file)


def csv_rows(path: Path, file: HashedFile, columns: Sequence[str]) -> Iterator[TextRows]:
    """All records of a CSV file; `columns` must be in its header. Raises RefusedError when the quoting is broken."""
    csv.field_size_limit(LINE_BYTES_MAX)  # of the whole process; the standard 128 KiB would refuse long records
    header = _read_header(path, file)
    places = [header.index(column) for column in columns]
    first_row = 1
    while block := file.block():
        rows, malformed = _plain_block(block, width=len(header)), None
        if rows is None:
            file.put_back(block)
            rows, malformed = _awkward_rows(path, file, width=len(header))
        if rows:
            by_column = list(zip(*rows, strict=True))
            yield TextRows(first_row, tuple(by_column[place] for place in places), malformed or [None] * len(rows))
        first_row += len(rows)


def _plain_block(block: Sequence[bytes | None], *, width: int) -> Sequence[Sequence[str | None]] | None:
    """The block's records when each line is a sound one: three times faster than line by line. None: look at each."""
    try:
        rows = list(csv.reader([line.decode() for line in block if line is not None], strict=True))
    except (UnicodeDecodeError, csv.Error):
        return None
    return rows if len(rows) == len(block) and all(len(row) == width for row in rows) else None


def _awkward_rows(path: Path, file: HashedFile, *, width: int) -> tuple[Sequence[Sequence[str | None]], Sequence[str | None]]:
    """The next records one by one, with what is wrong with each: all lines that wait, and on to where the last record ends."""
    rows: list[Sequence[str | None]] = []
    malformed: list[str | None] = []
    lines = _CsvLines(file)
    reader = csv.reader(lines, strict=True)
    bytes_end = file.bytes_read + BATCH_BYTES
    while file.has_waiting and len(rows) < BATCH_ROWS and file.bytes_read < bytes_end:
        row, fault = _csv_record(path, lines, reader, width=width)
        if row is not None or fault is not None:
            rows.append(row or (None,) * width)
            malformed.append(fault)
    return rows, malformed


class _LineTooLongError(Exception):
    pass


class _CsvLines:
    """One line after another as text for `csv.reader`; `begin` before each record."""

    def __init__(self, file: HashedFile) -> None:
        self._file = file
        self.first = 0  # line on which the present record begins
        self.undecodable = False  # a line of the present record was not UTF-8

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
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.undecodable = True
            return line.decode(errors="replace")


def _csv_record(path: Path, lines: _CsvLines, reader: Any, *, width: int) -> tuple[list[str] | None, str | None]:
    """One record, or what is wrong with it; neither for blank lines."""
    lines.begin()
    try:
        row = next(reader, [])
    except _LineTooLongError:
        _refuse_unless_alone(path, lines, "a line is too long")
        return None, f"line {lines.first}: longer than {LINE_BYTES_MAX >> 20} MiB"
    except csv.Error as error:
        if "unexpected end" in str(error):
            _refuse_quoting(path, lines.first, "the file ends inside a quoted field")
        _refuse_unless_alone(path, lines, "a quoted field does not end where it should")
        return None, f"line {lines.first}: broken quoting"
    if lines.undecodable:
        return None, f"line {lines.first}: not UTF-8"
    if len(row) == width:
        return row, None
    if not row or (len(row) == 1 and not row[0].strip()):
        return None, None
    return None, f"line {lines.first}: {len(row)} fields, the header has {width}"


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
    line = file.line()
    while line is not None and line.isspace():
        line = file.line()
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


def jsonl_rows(file: HashedFile, columns: Sequence[str], *, scalars: Sequence[str]) -> Iterator[TextRows]:
    """All records of a JSON Lines file: `columns`, which must hold text, then `scalars` as JSON text. A column may be in both."""
    first_row = 1
    width = len(columns) + len(scalars)
    while block := file.block():
        rows: list[Sequence[str | None]] = []
        malformed: list[str | None] = []
        for number, line in enumerate(block, file.line_number - len(block) + 1):
            if line is None or not line.isspace():
                row, fault = _json_row(line, columns, scalars)
                rows.append(row or (None,) * width)
                malformed.append(fault and f"line {number}: {fault}")
        if rows:
            yield TextRows(first_row, tuple(zip(*rows, strict=True)), malformed)
        first_row += len(rows)


def _json_row(line: bytes | None, columns: Sequence[str], scalars: Sequence[str]) -> tuple[list[str | None] | None, str | None]:
    record, fault = _json_record(line)
    if record is None:
        return None, fault
    escapes = line is not None and b"\\u" in line  # only an escape can make a lone surrogate of UTF-8
    row: list[str | None] = []
    for column in columns:
        value = record.get(column)
        wrong = None
        if escapes or not isinstance(value, str):
            value, wrong = _json_text(value)
        fault = fault or (wrong and f"{column} holds {wrong}")
        row.append(value)
    for column in scalars:
        value, wrong = _json_scalar(record.get(column))
        fault = fault or (wrong and f"{column} holds {wrong}")
        row.append(value)
    return row, fault


def _json_scalar(value: object) -> tuple[str | None, str | None]:
    """The JSON text of one value, or what it holds that it should not."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, "a number beyond all floats"  # `1e999` is JSON; what Python would write for it, Infinity, is not
    return _json_text(_ENCODER.encode(value) if isinstance(value, (str, bool, int, float)) else value)


def _json_text(value: object) -> tuple[str | None, str | None]:
    """The text of one field, or what it holds that it should not."""
    if value is None:
        return None, None
    if not isinstance(value, str):
        return None, f"{_json_type(value)}, not text"
    if not value.isascii() and _has_surrogate(value):
        return None, "a lone surrogate"
    return value, None


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


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)
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
