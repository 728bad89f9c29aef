"""Releases of one job: immutable Delta tables of parquet files of our own, in (key_hash, record_id) order, committed in one step.

`write_deltalake` does not keep row order, so files are written here and enter by add-actions with statistics. A release has exactly one
version, 0, and only that one is ever read. No file is overwritten: names carry the hash of the content.
"""

import hashlib
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import polars as pl
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, create_table_with_add_actions

from batch_assets.core.errors import ObjectExistsError, ObjectMissingError, Problem, RefusedError, UnfitEnvironmentError
from batch_assets.core.release import HASH_MAX, HASH_MIN, ReleaseFile, file_name, sha256_in
from batch_assets.stores.objects import open_objects

ORDER: Final = ("key_hash", "record_id")
ROW_GROUP_ROWS = 10_000  # what a reader of one record decodes
ZSTD_LEVEL = 3
LOG_COLUMNS = frozenset({"path", "num_records", "size_bytes"})
# appendOnly: no tool may delete or update rows by accident. Readers open version 0, so an append is not seen either.
CONFIGURATION: dict[str, str | None] = {"delta.appendOnly": "true"}


class Releases:
    """All releases of a job under `uri` (local path or s3://)."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._objects = open_objects(uri)

    def uri_of(self, release_id: str) -> str:
        """Location of one release, for every reader of Delta tables."""
        return f"{self.uri}/{release_id}"

    def write_file(self, release_id: str, *, number: int, rows: pl.DataFrame) -> ReleaseFile:
        """Sort the rows and store them as file `number`. Twice the same is fine; the file is durable when this returns."""
        ordered = rows.sort(ORDER)
        data = _parquet(ordered)
        sha256 = hashlib.sha256(data).hexdigest()
        name = file_name(number, sha256)
        self._create(f"{release_id}/{name}", data, sha256=sha256)
        low, high = (HASH_MAX, HASH_MIN) if ordered.is_empty() else (ordered["key_hash"][0], ordered["key_hash"][-1])
        return ReleaseFile(name=name, rows=ordered.height, size_bytes=len(data), sha256=sha256, hash_low=low, hash_high=high)

    def _create(self, path: str, data: bytes, *, sha256: str) -> None:
        try:
            self._objects.create(path, data)
        except ObjectExistsError:
            if hashlib.sha256(self._objects.get(path)).hexdigest() != sha256:
                raise _damaged(f"{self.uri}/{path}", expected=f"sha256 {sha256}", found="other bytes under that name") from None

    def commit(self, release_id: str, *, files: Sequence[ReleaseFile], schema: pl.Schema) -> None:
        """Make the files a Delta table in one step. Of several builders the first one's table stays; theirs holds the same files."""
        uri = self.uri_of(release_id)
        actions = [_add_action(file) for file in files]
        try:
            create_table_with_add_actions(uri, Schema.from_arrow(schema), actions, mode="error", configuration=CONFIGURATION)
        except DeltaError:
            if not DeltaTable.is_deltatable(uri):
                raise

    def files(self, release_id: str) -> list[ReleaseFile]:
        """The files that the table names, in hash order. Raises UnfitEnvironmentError when there is no such table."""
        return release_files(self.uri_of(release_id))

    def columns(self, release_id: str) -> pl.Schema:
        """Columns of the release, in order. Raises UnfitEnvironmentError when its first file cannot be read."""
        uri = f"{self.uri_of(release_id)}/{self.files(release_id)[0].name}"
        try:
            return pl.scan_parquet(uri, glob=False, hive_partitioning=False).collect_schema()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise _damaged(uri, expected="a parquet file", found=_first_line(error)) from error

    def read_file(self, release_id: str, file: ReleaseFile) -> pl.DataFrame:
        """Rows of one file, read from bytes that were verified against its hash. Raises UnfitEnvironmentError."""
        return pl.read_parquet(io.BytesIO(self._verified(release_id, file)))

    def verify(self, release_id: str) -> list[ReleaseFile]:
        """The files, each read anew and compared with its size and hash. Raises UnfitEnvironmentError naming the first that differs."""
        files = self.files(release_id)
        for file in files:
            self._verified(release_id, file)
        return files

    def _verified(self, release_id: str, file: ReleaseFile) -> bytes:
        path = f"{release_id}/{file.name}"
        try:
            data = self._objects.get(path)
        except ObjectMissingError as error:
            raise _damaged(f"{self.uri}/{path}", expected=f"{file.size_bytes} bytes", found="no file") from error
        found = hashlib.sha256(data).hexdigest()
        if found != file.sha256 or len(data) != file.size_bytes:
            raise _damaged(
                f"{self.uri}/{path}", expected=f"{file.size_bytes} bytes, sha256 {file.sha256}", found=f"{len(data)} bytes, sha256 {found}"
            )
        return data

    def write_verdict(self, release_id: str, *, number: int, text: str) -> None:
        """A copy of a recorded verdict beside the release; SQL has the one that counts, so a number that is taken is left alone."""
        try:
            self._objects.create(f"{release_id}/_verdicts/{number:05d}.json", text.encode())
        except ObjectExistsError:
            return


def release_files(uri: str) -> list[ReleaseFile]:
    """Files of the release at `uri`, in hash order, from its log alone (version 0: what the builder committed)."""
    try:
        actions = pl.DataFrame(DeltaTable(uri, version=0).get_add_actions(flatten=True))
    except TableNotFoundError as error:
        raise _damaged(uri, expected="a release (a Delta table)", found="nothing") from error
    except (DeltaError, ValueError, OSError) as error:  # a log that is cut off or overwritten
        raise _damaged(uri, expected="a release (a Delta table)", found=f"a log that cannot be read ({_first_line(error)})") from error
    if missing := LOG_COLUMNS - set(actions.columns):
        raise _damaged(uri, expected="the files of a release", found=f"a log without {', '.join(sorted(missing))}")
    files = [
        ReleaseFile(
            name=row["path"],
            rows=row["num_records"],
            size_bytes=row["size_bytes"],
            sha256=sha256_in(row["path"]),
            hash_low=HASH_MAX if row.get("min.key_hash") is None else row["min.key_hash"],
            hash_high=HASH_MIN if row.get("max.key_hash") is None else row["max.key_hash"],
        )
        for row in actions.iter_rows(named=True)
    ]
    return sorted(files, key=lambda file: file.name)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def file_locations(uri: str, files: Sequence[ReleaseFile]) -> list[str]:
    """Where readers find these files. Raises RefusedError when a local one is gone: a pinned version still opens after a clean-up."""
    locations = [f"{uri}/{file.name}" for file in files]
    gone = [each for each in locations if "://" not in each and not Path(each).exists()]
    if gone:
        raise RefusedError(
            Problem(
                code="release.files_gone",
                file=uri,
                what="files of this release are no longer there",
                expected=f"{len(locations)} files",
                found=f"{len(gone)} missing, the first is {gone[0]}",
                fix="resolve the alias again (read_alias), or publish a version whose release is whole",
            )
        )
    return locations


def table_version(uri: str) -> int:
    """The newest version of a Delta table: what a reader must see unchanged when it reads in several steps."""
    return DeltaTable(uri).version()


def _parquet(rows: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    rows.write_parquet(buffer, compression="zstd", compression_level=ZSTD_LEVEL, row_group_size=ROW_GROUP_ROWS, statistics=True)
    return buffer.getvalue()


def _add_action(file: ReleaseFile) -> AddAction:
    return AddAction(file.name, file.size_bytes, {}, time.time_ns() // 1_000_000, data_change=True, stats=_statistics(file))


def _statistics(file: ReleaseFile) -> str:
    ends = {} if file.rows == 0 else {"minValues": {"key_hash": file.hash_low}, "maxValues": {"key_hash": file.hash_high}}
    return json.dumps({"numRecords": file.rows, "nullCount": {"key_hash": 0}, **ends})


def _damaged(what: str, *, expected: str, found: str) -> UnfitEnvironmentError:
    return UnfitEnvironmentError(
        Problem(
            code="release.damaged",
            file=what,
            what="this release is not what was built and judged; readers keep what they have",
            expected=expected,
            found=found,
            fix="materialize `release` again (a new one is built beside it), and find out who writes under the root",
        )
    )
