"""The frozen input of one planning attempt: one parquet file per shard, put if absent, read back only with its sha256.

`FROZEN_SCHEMA` says the columns; after them come `field_<placeholder>` text columns, null where the record is set aside. Rows are
ordered by (key_hash, record_id) and `position` counts them from 0. Who decides what stands in a row: flows/planner.py.
"""

import hashlib
import io
from dataclasses import dataclass
from typing import Final

import polars as pl

from batch_assets.core.errors import ObjectExistsError, Problem, UnfitEnvironmentError
from batch_assets.core.identity import shard_key
from batch_assets.core.ports import ObjectStore
from batch_assets.core.records import FIELD_PREFIX

FROZEN_SCHEMA: Final[dict[str, pl.DataType]] = {
    "position": pl.Int32(),
    "record_id": pl.String(),
    "key_hash": pl.Int64(),
    "disposition": pl.String(),
    "disposition_detail": pl.String(),
    "surplus": pl.Int32(),
    "record_digest": pl.String(),
    "acl": pl.String(),
    "record_class": pl.String(),
    "segment": pl.String(),
    "labels": pl.String(),
}


def frozen_schema(placeholders: tuple[str, ...]) -> dict[str, pl.DataType]:
    """Exact columns and types of a shard's frozen input, in order."""
    return FROZEN_SCHEMA | {FIELD_PREFIX + placeholder: pl.String() for placeholder in placeholders}


@dataclass(frozen=True, slots=True)
class FrozenInput:
    """Door to `<job>/versions/<version>/input/<attempt>/`."""

    objects: ObjectStore
    job: str
    version: str
    attempt: str

    def path(self, shard: int) -> str:
        """Path of one shard's file, relative to the root."""
        return f"{self.job}/versions/{self.version}/input/{self.attempt}/shard-{shard:05d}.parquet"

    def write(self, shard: int, frame: pl.DataFrame) -> str:
        """Store one shard and return the sha256 (64 hex digits) of its bytes. Storing the same bytes again is fine."""
        assert frame.columns[: len(FROZEN_SCHEMA)] == list(FROZEN_SCHEMA), frame.columns
        buffer = io.BytesIO()
        frame.write_parquet(buffer, compression="zstd", compression_level=1, statistics=False)
        data = buffer.getvalue()
        try:
            self.objects.create(self.path(shard), data)
        except ObjectExistsError:
            if self.objects.get(self.path(shard)) != data:
                raise
        return hashlib.sha256(data).hexdigest()

    def read(self, shard: int, sha256: str) -> pl.DataFrame:
        """The shard as it was planned. Raises UnfitEnvironmentError when its bytes are not the ones that were planned."""
        data = self.objects.get(self.path(shard))
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise UnfitEnvironmentError(
                Problem(
                    code="frozen_input.sha256",
                    file=self.path(shard),
                    what=f"the frozen input of shard {shard_key(self.version, shard)} is not the one that was planned",
                    expected=f"sha256 {sha256}",
                    found=found,
                    fix=f"restore that file from a backup; nothing of this shard is answered or committed until then (job {self.job})",
                )
            )
        return pl.read_parquet(io.BytesIO(data))
