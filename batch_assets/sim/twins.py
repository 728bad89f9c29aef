"""Twins of the stores, in memory: the same contracts, without a disk. tests/sim runs the stores' own tests against them.

The register needs none: the real one runs on a SQLite file in memory. No faults here.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import polars as pl
from deltalake.exceptions import CommitFailedError

from batch_assets.core.errors import ObjectExistsError, ObjectMissingError
from batch_assets.core.records import Outcome
from batch_assets.stores.outcomes import OutcomeFile, Outcomes


class MemoryObjects:
    """An object store; `paths` may be looked at."""

    def __init__(self) -> None:
        self.paths: dict[str, bytes] = {}

    def create(self, path: str, data: bytes) -> None:
        """Put if absent. Raises ObjectExistsError."""
        _require_below_root(path)
        if path in self.paths:
            raise ObjectExistsError(path=path)
        self.paths[path] = data

    def get(self, path: str) -> bytes:
        """Raises ObjectMissingError when there is none."""
        _require_below_root(path)
        try:
            return self.paths[path]
        except KeyError as error:
            raise ObjectMissingError(path=path) from error


def _require_below_root(path: str) -> None:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        msg = f"{path!r} is no path below the root"
        raise ValueError(msg)


@dataclass(slots=True)
class ModelTable:
    """What a Delta table of outcomes holds at its newest version: rows by shard, and which shards each version touched."""

    schema: pl.Schema | None = None
    shards: dict[int, pl.DataFrame] = field(default_factory=dict)
    commits: list[frozenset[int]] = field(default_factory=list)


def _nothing() -> None:
    """Nothing happens."""


class ModelOutcomes(Outcomes):
    """The outcomes store over a ModelTable, which all handles of one table share.

    Its own are the table and the MERGE; what stands around them (checks of the source, tries after a conflict, the count after a repeat) is
    the real store's. A MERGE that was overtaken by another one over the same shards fails as Delta's does; `during` is called where that
    may happen.
    """

    def __init__(self, table: ModelTable, *, answer_schema: str, during: Callable[[], None] = _nothing) -> None:
        super().__init__("memory://outcomes", answer_schema=answer_schema)
        self._model = table
        self._during = during

    def create(self) -> None:
        """Idempotent. Columns that differ are the real store's to refuse: one world has one schema."""
        self._model.schema = self._model.schema or self.schema
        assert self._model.schema == self.schema, "another answer schema"

    def _merge_once(self, frame: pl.DataFrame, literal: Sequence[int]) -> int:
        model, read = self._model, len(self._model.commits)
        held = {record_id for shard in literal for record_id in self._rows(shard)["record_id"]}
        self._during()
        if any(not touched.isdisjoint(literal) for touched in model.commits[read:]):
            raise CommitFailedError("another MERGE has changed these shards")
        news = frame.filter(~pl.col("record_id").is_in(held))
        for (shard,), rows in news.partition_by("shard", as_dict=True).items():
            model.shards[int(shard)] = pl.concat([self._rows(int(shard)), rows])
        model.commits.append(frozenset(news["shard"]))
        return news.height

    def _rows(self, shard: int) -> pl.DataFrame:
        found = self._model.shards.get(shard)
        return pl.DataFrame(schema=self.schema) if found is None else found

    def read(
        self, *, shards: Collection[int] | None = None, columns: Sequence[str] | None = None, outcome: Outcome | None = None
    ) -> pl.DataFrame:
        """Rows of these shards and this outcome (all when None)."""
        chosen = sorted(self._model.shards) if shards is None else sorted(set(shards))
        rows = pl.concat([pl.DataFrame(schema=self.schema), *(self._rows(shard) for shard in chosen)])
        return rows.filter(outcome is None or pl.col("outcome") == outcome).select(columns or pl.all())

    def files(self, *, shards: Collection[int] | None = None) -> list[OutcomeFile]:
        """One made-up file for each shard and outcome."""
        counts = self.read(shards=shards, columns=["shard", "outcome"]).group_by("shard", "outcome").len().sort("shard", "outcome")
        return [
            OutcomeFile(uri=f"{self.uri}/{shard}/{outcome}", shard=shard, outcome=outcome, rows=rows, size_bytes=0)
            for shard, outcome, rows in counts.iter_rows()
        ]
