"""The only writer of the outcomes table: staged shards in, committed shards out, a few at a time.

Order, and what a crash between two steps leaves: check, MERGE, committed in SQL. After the MERGE and before SQL the shard is still staged:
whoever comes next checks and merges it again, which inserts nothing. Whether a log answers its input is decided in `shard_check.py`.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import polars as pl

from batch_assets.core.answers import AnswerChecker
from batch_assets.core.errors import Problem, UnfitEnvironmentError
from batch_assets.core.identity import shard_key
from batch_assets.core.shard_log import ROUND_FIRST, fold
from batch_assets.fleet.shard_check import CheckedShard, ShardFacts, WantingShard, check_shard
from batch_assets.stores.installation import Installation
from batch_assets.stores.outcomes import Outcomes
from batch_assets.stores.register import CommittedShard, ShardRow, VersionRow

# A MERGE costs nearly the same for one shard as for many (FINDINGS, Delta), so tiny ones go together; rows and bytes bound the memory.
SHARDS_PER_STEP_MAX = 32
ROWS_PER_STEP_MAX = 25_000
BYTES_PER_STEP_MAX = 128 << 20


class Failpoint(Protocol):
    """Called between two steps with the step's name; tests crash there."""

    def __call__(self, place: str) -> None:
        """Returns, or never."""
        ...


def _no_failpoint(place: str) -> None:
    """Nothing happens."""


@dataclass(frozen=True, slots=True)
class _Version:
    """What is read once: the row and the spec do not change while a version is supervised."""

    row: VersionRow
    checker: AnswerChecker
    outcomes: Outcomes


class Committer:
    """Commits the staged shards of one version under one generation. Raises StaleGenerationError as soon as another leads."""

    def __init__(
        self, installation: Installation, *, job: str, version: str, generation: int, failpoint: Failpoint = _no_failpoint
    ) -> None:
        self._installation = installation
        self._register = installation.register
        self._job = job
        self._version = version
        self._generation = generation
        self._failpoint = failpoint
        self._opened: _Version | None = None

    def step(self) -> list[ShardRow]:
        """One batch of staged shards, lowest numbers first; returns those now committed, as the register has them.

        Shards whose log is wanting are sent back (bounded, then blocked). Empty when nothing is staged or nothing was fit.
        """
        staged = self._register.staged(self._job, self._version, SHARDS_PER_STEP_MAX)
        if not staged:
            return []
        opened = self._open()
        with _collector_paused():
            checked = self._take(opened, staged)
        if not checked:
            return []
        self._failpoint("before_merge")
        self._write(opened.outcomes, checked)
        self._failpoint("before_commit")
        return self._mark(staged, checked)

    def _write(self, outcomes: Outcomes, checked: Sequence[CheckedShard]) -> None:
        """First rounds are inserted, redrives update what they reopened."""
        for write, shards in (
            (outcomes.merge, [shard for shard in checked if shard.round == ROUND_FIRST]),
            (outcomes.merge_redrive, [shard for shard in checked if shard.round > ROUND_FIRST]),
        ):
            if shards:
                rows = pl.concat([shard.rows for shard in shards])
                write(rows, [shard.shard for shard in shards], still_mine=self._still_mine)

    def _still_mine(self) -> None:
        self._register.check_generation(job=self._job, version=self._version, generation=self._generation)

    def _open(self) -> _Version:
        if self._opened is None:
            spec = self._installation.specs().read(self._job, self._version)
            outcomes = self._installation.outcomes(job=self._job, version=self._version, answer_schema=spec.answer_schema)
            outcomes.create()
            self._opened = _Version(self._register.version(self._job, self._version), AnswerChecker(spec.answer_schema), outcomes)
        return self._opened

    def _take(self, opened: _Version, staged: Sequence[ShardRow]) -> list[CheckedShard]:
        """Checks shards until the step is full; what is not taken stays staged for the next one."""
        taken: list[CheckedShard] = []
        rows, size_bytes = 0, 0
        for row in staged:
            shard = self._checked(opened, row)
            if shard is None:
                continue
            taken.append(shard)
            rows += shard.rows.height
            size_bytes += int(shard.rows.estimated_size())
            if rows >= ROWS_PER_STEP_MAX or size_bytes >= BYTES_PER_STEP_MAX:
                break
        return taken

    def _checked(self, opened: _Version, row: ShardRow) -> CheckedShard | None:
        """None when the shard went back (its log is wanting) or was blocked (its log or input is not what was staged or planned)."""
        fenced = {"job": self._job, "version": self._version, "generation": self._generation, "shard": row.number}
        try:
            shard = self._check(opened, row)
        except UnfitEnvironmentError as error:
            self._register.block(**fenced, reason=str(error))
            return None
        if isinstance(shard, WantingShard):
            self._register.send_back(**fenced, reason=shard.reason)
            return None
        return shard

    def _check(self, opened: _Version, shard: ShardRow) -> CheckedShard | WantingShard:
        """Reads exactly the staged slots and the frozen input that the register's sha256 names."""
        if opened.row.input_attempt is None or shard.staged_slots is None:
            raise UnfitEnvironmentError(_not_ours(shard))
        frozen = self._installation.frozen_input(job=self._job, version=self._version, attempt=opened.row.input_attempt)
        slots = self._installation.shard_log(job=self._job, version=self._version, shard=shard.number).read(shard.staged_slots)
        facts = ShardFacts(
            job_version=self._version,
            recipe_digest=opened.row.recipe_digest,
            shard=shard.number,
            round=shard.round,
            epoch=shard.epoch,
        )
        return check_shard(
            facts,
            frozen=frozen.read(shard.number, shard.input_sha256),
            folded=fold(slots, staged_rounds=shard.staged_rounds),
            checker=opened.checker,
            schema=opened.outcomes.schema,
        )

    def _mark(self, staged: Sequence[ShardRow], checked: Sequence[CheckedShard]) -> list[ShardRow]:
        rows = {row.number: row for row in staged}
        committed = [
            CommittedShard(number=shard.shard, round=rows[shard.shard].round, epoch=rows[shard.shard].epoch, stats=shard.stats.as_mapping())
            for shard in checked
        ]
        return self._register.commit(job=self._job, version=self._version, generation=self._generation, shards=committed)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Checking makes some hundred thousand tuples and no cycles; looking for cycles among them was measured at a fifth of a step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _not_ours(shard: ShardRow) -> Problem:
    return Problem(
        code="committer.shard_row",
        what=f"shard {shard_key(shard.version, shard.number)} cannot be committed by this version of gristmill",
        expected="staged slots and an activated input",
        found=f"round {shard.round}, {shard.staged_slots} slots",
        fix="use the gristmill that staged it",
    )
