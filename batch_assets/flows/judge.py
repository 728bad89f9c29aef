"""Judge a release: count it against the frozen input, file by file, run the checks, record the verdict.

The verdict is bound to what was read: every file is verified against its hash as it is counted, and the list against the registered digest.
"""

from collections.abc import Iterator, Sequence

import polars as pl

from batch_assets.core.errors import NotFinishedError, Problem, UnfitEnvironmentError
from batch_assets.core.evidence import ReleaseFacts
from batch_assets.core.identity import canonical_json
from batch_assets.core.leasing import ReleaseState
from batch_assets.core.release import CANARY_SHARD, HASH_MAX, HASH_MIN, release_digest
from batch_assets.core.spec import VersionSpec
from batch_assets.core.validation import CheckSettings, Subject, run_checks
from batch_assets.core.verdict import ComparedTo, Verdict
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import ReleaseRow, ShardRow, VersionRow
from batch_assets.stores.release_facts import FROZEN_COLUMNS, count_range
from batch_assets.stores.release_schema import release_model
from batch_assets.stores.releases import Releases


def judge(
    installation: Installation,
    *,
    job: str,
    checks: CheckSettings,
    version: str | None = None,
    release_id: str | None = None,
    alias: str | None = None,
) -> Verdict:
    """Judge one release (by id, else the newest of the version), record the verdict and return it.

    `alias` is what the release is compared with, by default the job's name; publishing to another alias judges again by itself.
    """
    release = select_release(installation, job=job, version=version, release_id=release_id)
    row = installation.register.version(job, release.version)
    spec = installation.specs().read(job, row.name)
    compared_to = _compared_to(installation, alias or job)
    subject = Subject(
        job=job,
        version=row.name,
        snapshot_records=row.records,
        recipe_digest=row.recipe_digest,
        segment_column=spec.input_rules.segment,
    )
    facts = _facts(installation, row, release=release, spec=spec, subject=subject)
    verdict = Verdict(
        job=job,
        version=row.name,
        release_id=release.release_id,
        release_digest=release.digest,
        checks=run_checks(facts, subject=subject, settings=checks),
        settings=checks,
        compared_to=compared_to,
    )
    _record(installation, verdict)
    return verdict


def latest_verdict(installation: Installation, *, job: str, version: str | None = None, release_id: str | None = None) -> Verdict | None:
    """The verdict that counts for this release (default: the newest of the version, or of the job). None: nothing was judged."""
    releases = [
        each
        for each in installation.register.releases(job)
        if (version is None or each.version == version) and (release_id is None or each.release_id == release_id)
    ]
    row = installation.register.latest_verdict(releases[0].release_id) if releases else None
    return None if row is None else Verdict.from_payload(row.payload)


def select_release(installation: Installation, *, job: str, version: str | None = None, release_id: str | None = None) -> ReleaseRow:
    """A release by its id, or the newest of a version that is not retired. Raises RefusedError or NotFinishedError."""
    if release_id is not None:
        return installation.register.get_release(release_id)
    name = installation.register.version(job, version).name if version is not None else None
    for release in installation.register.releases(job):
        if name in (None, release.version) and release.state is not ReleaseState.RETIRED:
            return release
    raise NotFinishedError(
        Problem(
            code="release.missing",
            file=job,
            key=version,
            what=f"{version or job} has no release",
            fix=f"materialize `release` of a finished version, or gristmill run {job}",
        )
    )


def _compared_to(installation: Installation, alias: str) -> ComparedTo:
    live = installation.aliases().read(alias)
    return ComparedTo(alias=alias, revision=live.revision if live else 0, release_id=live.release_id if live else None)


def _facts(installation: Installation, row: VersionRow, *, release: ReleaseRow, spec: VersionSpec, subject: Subject) -> ReleaseFacts:
    frozen = _FrozenKeys(installation, row)
    model = release_model(spec.answer_schema)
    facts = ReleaseFacts()
    for low, high, rows in _files(installation.releases(job=row.job), release, identity=row.identity):
        facts += count_range(frozen.between(low, high), rows, subject=subject, model=model, hash_low=low, hash_high=high)
    return facts


def _files(releases: Releases, release: ReleaseRow, *, identity: str) -> Iterator[tuple[int, int, pl.DataFrame]]:
    """(first hash, last hash, rows) of each file. The ranges cover everything once: each ends with its rows, the last at HASH_MAX."""
    files = releases.files(release.release_id)
    found = release_digest(identity, files)
    if found != release.digest:
        raise _other_files(release, found)
    low = HASH_MIN
    for number, file in enumerate(files):
        rows = releases.read_file(release.release_id, file)
        last = number == len(files) - 1
        high = HASH_MAX if last else max(_highest(rows), low - 1)
        yield low, high, rows
        low = high + 1


def _highest(rows: pl.DataFrame) -> int:
    highest = rows["key_hash"].max() if rows.schema.get("key_hash") == pl.Int64 else None
    return highest if isinstance(highest, int) else HASH_MIN


class _FrozenKeys:
    """The frozen input of a version, without its texts, by hash range. One shard is read at a time; the canary is read once and kept."""

    def __init__(self, installation: Installation, row: VersionRow) -> None:
        assert row.input_attempt is not None, f"{row.name} has shards but no input"
        self._input = installation.frozen_input(job=row.job, version=row.name, attempt=row.input_attempt)
        self._shards = sorted(installation.register.shards(row.job, row.name), key=lambda shard: (shard.hash_low, shard.number))
        self._kept: dict[int, pl.DataFrame] = {}

    def between(self, low: int, high: int) -> pl.DataFrame:
        """FROZEN_COLUMNS and `shard` of every record whose hash lies in the range, ends included."""
        parts = [self._read(shard) for shard in self._shards if shard.hash_low <= high and shard.hash_high >= low]
        return _frozen_rows(parts).filter(pl.col("key_hash").is_between(low, high))

    def _read(self, shard: ShardRow) -> pl.DataFrame:
        if shard.number in self._kept:
            return self._kept[shard.number]
        rows = self._input.read(shard.number, shard.input_sha256).select(FROZEN_COLUMNS)
        rows = rows.with_columns(shard=pl.lit(shard.number, pl.Int32))
        if shard.number == CANARY_SHARD:
            self._kept[shard.number] = rows
        return rows


def _frozen_rows(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    if parts:
        return pl.concat(parts)
    texts = dict.fromkeys(FROZEN_COLUMNS, pl.String())
    return pl.DataFrame(schema={**texts, "key_hash": pl.Int64(), "surplus": pl.Int32(), "shard": pl.Int32()})


def _record(installation: Installation, verdict: Verdict) -> None:
    """In SQL, where the latest one counts, and as a copy beside the release."""
    payload = verdict.as_payload()
    row = installation.register.add_verdict(
        release_id=verdict.release_id, release_digest=verdict.release_digest, passed=verdict.passed, payload=payload
    )
    copy = canonical_json({**payload, "id": row.id, "created_at": row.created_at})
    installation.releases(job=verdict.job).write_verdict(verdict.release_id, number=row.id, text=copy)


def _other_files(release: ReleaseRow, found: str) -> UnfitEnvironmentError:
    return UnfitEnvironmentError(
        Problem(
            code="release.digest",
            file=release.uri,
            what=f"release {release.release_id} has other files than those that were registered; it is not judged",
            expected=release.digest,
            found=found,
            fix=f"build it again: materialize `release` of {release.version}",
        )
    )
