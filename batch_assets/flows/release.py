"""Build the release of a finished version: its outcomes, range by range in hash order, as one immutable table.

Building is no judging: what the outcomes hold is written as it is, and `flows/judge.py` finds what is wrong with it. Nothing is
overwritten; a build that crashed is repeated and ends in the same release.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from batch_assets.core.errors import NotFinishedError, Problem, UnfitEnvironmentError
from batch_assets.core.identity import shard_key
from batch_assets.core.leasing import ReleaseState, ShardState, VersionState
from batch_assets.core.records import Outcome
from batch_assets.core.release import CANARY_SHARD, FileRange, ReleaseFile, ShardSpan, file_ranges, release_digest, release_name
from batch_assets.core.statistics import Statistics
from batch_assets.stores.installation import Installation
from batch_assets.stores.outcomes import Outcomes
from batch_assets.stores.register import ReleaseRow, ShardRow, VersionRow
from batch_assets.stores.releases import Releases, table_version

REBUILDS_MAX = 20  # so often may the files of one version's release be found damaged before a person must look
NAMED_MAX = 5
BUILDABLE = frozenset({VersionState.ACTIVE, VersionState.HELD, VersionState.FINISHED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReport:
    """One release and its numbers. `built` is false when it was there already."""

    job: str
    version: str
    release_id: str
    uri: str
    digest: str
    rows: int
    results: int
    dead_letters: int
    dead_by_class: Mapping[str, int]
    surplus: int
    files: int
    size_bytes: int
    statistics: Statistics
    built: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Rows that were written."""

    results: int = 0
    surplus: int = 0
    dead_by_class: Mapping[str, int]

    @classmethod
    def of(cls, rows: pl.DataFrame) -> "_Counts":
        dead = rows.filter(pl.col("outcome") != Outcome.RESULT.value)
        by_class = {name or "": count for name, count in dead["dead_class"].value_counts().sort("dead_class").iter_rows()}
        return cls(results=rows.height - dead.height, surplus=int(rows["surplus"].sum()), dead_by_class=by_class)

    def __add__(self, other: "_Counts") -> "_Counts":
        return _Counts(
            results=self.results + other.results,
            surplus=self.surplus + other.surplus,
            dead_by_class=Counter(self.dead_by_class) + Counter(other.dead_by_class),
        )


def build_release(installation: Installation, *, job: str, version: str) -> ReleaseReport:
    """The release of everything that the version's outcomes table holds now; the same again returns the one that exists.

    After a redrive the id is another; the earlier release stays. Raises NotFinishedError while a shard is not committed.
    """
    row = installation.register.version(job, version)
    shards = installation.register.shards(job, row.name)
    _refuse_unfinished(row, shards)
    spec = installation.specs().read(job, row.name)
    outcomes = installation.outcomes(job=job, version=row.name, answer_schema=spec.answer_schema)
    source_version = table_version(outcomes.uri)
    for rebuilds in range(REBUILDS_MAX):
        release_id = release_name(row.name, identity=row.identity, source_version=source_version, rebuilds=rebuilds)
        known = _known(installation, job=job, release_id=release_id)
        if known is None:
            built = _build(installation, row, shards=shards, outcomes=outcomes, release_id=release_id)
            _refuse_changed(row, before=source_version, now=table_version(outcomes.uri))
            return _report(_register(installation, row, built), built=True)
        if _whole(installation, known):
            return _report(known, built=False)
    raise _damaged_too_often(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    release_id: str
    files: Sequence[ReleaseFile]
    counts: _Counts
    rounds: int  # redrives of all its shards, summed
    statistics: Statistics


def _build(installation: Installation, row: VersionRow, *, shards: Sequence[ShardRow], outcomes: Outcomes, release_id: str) -> _Built:
    releases = installation.releases(job=row.job)
    files: list[ReleaseFile] = []
    counts = _Counts(dead_by_class={})
    for number, rows in enumerate(_rows_by_range(outcomes, shards)):
        files.append(releases.write_file(release_id, number=number, rows=rows))
        counts += _Counts.of(rows)
    releases.commit(release_id, files=files, schema=outcomes.schema)
    # What the table names, not what was just written: another builder of the same rows may have committed first.
    return _Built(
        release_id=release_id,
        files=releases.files(release_id),
        counts=counts,
        rounds=sum(shard.round for shard in shards),
        statistics=Statistics.of(shard.stats for shard in shards),
    )


def _rows_by_range(outcomes: Outcomes, shards: Sequence[ShardRow]) -> Iterator[pl.DataFrame]:
    """One frame per file; together every row of these shards, once."""
    canary = outcomes.read(shards=[CANARY_SHARD]) if any(shard.number == CANARY_SHARD for shard in shards) else None
    for span in file_ranges([_span(shard) for shard in shards]):
        rows = outcomes.read(shards=span.shards)
        yield rows if canary is None else pl.concat([rows, _within(canary, span)])


def _span(shard: ShardRow) -> ShardSpan:
    return ShardSpan(number=shard.number, rows=shard.rows, hash_low=shard.hash_low, hash_high=shard.hash_high)


def _within(rows: pl.DataFrame, span: FileRange) -> pl.DataFrame:
    return rows.filter(pl.col("key_hash").is_between(span.hash_low, span.hash_high))


def _register(installation: Installation, row: VersionRow, built: _Built) -> ReleaseRow:
    counts = built.counts
    dead = sum(counts.dead_by_class.values())
    return installation.register.add_release(
        release_id=built.release_id,
        job=row.job,
        version=row.name,
        digest=release_digest(row.identity, built.files),
        rows=counts.results + dead,
        uri=installation.releases(job=row.job).uri_of(built.release_id),
        recipe_digest=row.recipe_digest,
        snapshot_digest=row.snapshot_digest,
        counts={
            "results": counts.results,
            "dead_letters": dead,
            "dead_by_class": dict(counts.dead_by_class),
            "surplus": counts.surplus,
            "files": len(built.files),
            "size_bytes": sum(file.size_bytes for file in built.files),
            "rounds": built.rounds,
            "statistics": built.statistics.as_json(),
        },
    )


def is_of_last_round(installation: Installation, release: ReleaseRow) -> bool:
    """False while a redrive of its version is open, or was committed after this release was built: then it has a successor to come."""
    finished = installation.register.version(release.job, release.version).state is VersionState.FINISHED
    return finished and release.counts.get("rounds", 0) == installation.register.rounds(release.job, release.version)


def _known(installation: Installation, *, job: str, release_id: str) -> ReleaseRow | None:
    return next((each for each in installation.register.releases(job) if each.release_id == release_id), None)


def _whole(installation: Installation, known: ReleaseRow) -> bool:
    """False when its files are not the ones that were registered: then a new one is built beside it."""
    if known.state is ReleaseState.RETIRED:
        return False
    identity = installation.register.version(known.job, known.version).identity
    try:
        verify_release(installation.releases(job=known.job), known, identity=identity)
    except UnfitEnvironmentError:
        return False
    return True


def verify_release(releases: Releases, known: ReleaseRow, *, identity: str) -> None:
    """Every file read anew and compared, and their list with the registered digest. Raises UnfitEnvironmentError naming what differs."""
    found = release_digest(identity, releases.verify(known.release_id))
    if found != known.digest:
        raise UnfitEnvironmentError(
            Problem(
                code="release.digest",
                file=known.uri,
                what=f"release {known.release_id} has other files than those that were registered",
                expected=known.digest,
                found=found,
                fix=f"build it again: materialize `release` of {known.version}, or gristmill judge {known.job} {known.version}",
            )
        )


def report_of(row: ReleaseRow) -> ReleaseReport:
    """The report of a release that is registered."""
    return _report(row, built=False)


def _report(row: ReleaseRow, *, built: bool) -> ReleaseReport:
    return ReleaseReport(
        job=row.job,
        version=row.version,
        release_id=row.release_id,
        uri=row.uri,
        digest=row.digest,
        rows=row.rows,
        results=row.counts["results"],
        dead_letters=row.counts["dead_letters"],
        dead_by_class=row.counts["dead_by_class"],
        surplus=row.counts["surplus"],
        files=row.counts["files"],
        size_bytes=row.counts["size_bytes"],
        statistics=Statistics(**row.counts.get("statistics", {})),
        built=built,
    )


def _refuse_unfinished(row: VersionRow, shards: Sequence[ShardRow]) -> None:
    left = [shard for shard in shards if shard.state is not ShardState.COMMITTED]
    if row.state in BUILDABLE and not left:
        return
    named = ", ".join(f"{shard_key(row.name, shard.number)} {shard.state}" for shard in left[:NAMED_MAX])
    more = f" and {len(left) - NAMED_MAX:,} more" if len(left) > NAMED_MAX else ""
    redriven = any(shard.round > 0 for shard in left)
    why = "a redrive is open, and its earlier release stays" if redriven else f"it is {row.state}"
    raise NotFinishedError(
        Problem(
            code="release.not_finished",
            file=row.job,
            key=row.name,
            what=f"{row.name} has no release yet: {why}; {len(left):,} of {len(shards):,} shards are not committed",
            expected="every shard committed",
            found=f"{named}{more}" if left else f"state {row.state}",
            fix=f"gristmill run {row.job} --version {row.name}",
        )
    )


def _refuse_changed(row: VersionRow, *, before: int, now: int) -> None:
    if before == now:
        return
    raise NotFinishedError(
        Problem(
            code="release.outcomes_changed",
            file=row.job,
            key=row.name,
            what=f"the outcomes of {row.name} changed while its release was being built; the build is not used",
            expected=f"version {before} of the outcomes table",
            found=f"version {now}",
            fix="build it again when nothing is committed to this version any more",
        )
    )


def _damaged_too_often(row: VersionRow) -> UnfitEnvironmentError:
    return UnfitEnvironmentError(
        Problem(
            code="release.damaged_again",
            file=row.job,
            key=row.name,
            what=f"{REBUILDS_MAX} releases of {row.name} were built, and each was found damaged later",
            fix="find out who or what changes files under the root before building another",
        )
    )
