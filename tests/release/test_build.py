"""Building a release from the outcomes of a finished version."""

from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable

import batch_assets.flows.release as building
from batch_assets.core.errors import NotFinishedError
from batch_assets.core.release import file_ranges
from batch_assets.flows.release import build_release
from batch_assets.stores.installation import Installation
from batch_assets.stores.outcomes import outcomes_schema
from batch_assets.stores.register import VersionRow
from batch_assets.stores.releases import release_files
from tests.support.finished import (
    ANSWER_SCHEMA,
    JOB,
    answer_version,
    append_outcomes,
    commit_version,
    finished_version,
    flip_one_byte,
    frozen_records,
    outcome_rows,
    plan_version,
)


@pytest.fixture
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of ten rows, so that forty records make several."""
    monkeypatch.setattr(building, "file_ranges", lambda spans: file_ranges(spans, file_rows=10))


def rows_of(uri: str) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(f"{uri}/{file.name}") for file in release_files(uri)])


def test_a_release_has_one_row_per_record_results_and_dead_letters(installation: Installation, finished: VersionRow) -> None:
    report = build_release(installation, job=JOB, version=finished.name)
    rows = rows_of(report.uri)
    assert sorted(rows["record_id"]) == sorted(frozen_records(40)["record_id"])
    assert (report.rows, report.results, report.dead_letters, report.surplus) == (40, 38, 2, 1)
    assert report.dead_by_class == {"empty": 2}
    assert rows.schema == outcomes_schema(ANSWER_SCHEMA)


@pytest.mark.usefixtures("_small_files")
def test_rows_are_in_key_hash_order_and_files_are_disjoint(installation: Installation, finished: VersionRow) -> None:
    report = build_release(installation, job=JOB, version=finished.name)
    files = release_files(report.uri)
    assert len(files) == 4
    rows = rows_of(report.uri)
    assert rows.equals(rows.sort("key_hash", "record_id"))
    assert all(left.hash_high < right.hash_low for left, right in pairwise(files))


@pytest.mark.usefixtures("_small_files")
def test_statistics_in_the_log_are_those_of_the_files(installation: Installation, finished: VersionRow) -> None:
    report = build_release(installation, job=JOB, version=finished.name)
    for file in release_files(report.uri):
        hashes = pl.read_parquet(f"{report.uri}/{file.name}")["key_hash"]
        assert (file.rows, file.hash_low, file.hash_high) == (len(hashes), hashes.min(), hashes.max())


@pytest.mark.usefixtures("_small_files")
def test_a_reader_of_delta_tables_prunes_to_the_file_of_a_key(installation: Installation, finished: VersionRow) -> None:
    report = build_release(installation, job=JOB, version=finished.name)
    table = DeltaTable(report.uri)
    assert table.version() == 0
    wanted = release_files(report.uri)[2]
    found = pl.scan_delta(table).filter(pl.col("key_hash") == wanted.hash_low).collect()
    assert found.height == 1


@pytest.mark.usefixtures("_small_files")
def test_records_of_the_canary_stand_among_the_others_by_their_hash(installation: Installation) -> None:
    row = finished_version(installation, canary=5)
    rows = rows_of(build_release(installation, job=JOB, version=row.name).uri)
    assert rows.height == 40
    assert rows.equals(rows.sort("key_hash", "record_id"))
    assert rows.filter(pl.col("shard") == 0).height == 5


def test_building_again_returns_the_release_that_exists(installation: Installation, finished: VersionRow) -> None:
    first = build_release(installation, job=JOB, version=finished.name)
    again = build_release(installation, job=JOB, version=finished.name)
    assert (first.built, again.built) == (True, False)
    assert (again.release_id, again.digest) == (first.release_id, first.digest)
    assert len(installation.register.releases(JOB)) == 1


def test_a_build_that_crashed_before_it_was_registered_ends_in_the_same_release(
    installation: Installation, finished: VersionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as crash:
        crash.setattr(building, "_register", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_release(installation, job=JOB, version=finished.name)
    report = build_release(installation, job=JOB, version=finished.name)
    assert report.built
    assert report.rows == 40
    assert [path.name for path in (Path(installation.settings.root) / JOB / "releases").iterdir()] == [report.release_id]


def test_a_damaged_release_is_built_anew_beside_it(installation: Installation, finished: VersionRow) -> None:
    first = build_release(installation, job=JOB, version=finished.name)
    flip_one_byte(Path(first.uri) / release_files(first.uri)[0].name)
    again = build_release(installation, job=JOB, version=finished.name)
    assert again.built
    assert again.release_id != first.release_id
    assert rows_of(again.uri).height == 40


def test_a_version_with_open_shards_has_no_release_and_they_are_named(installation: Installation) -> None:
    planned = plan_version(installation, records=40, shards=4)
    answer_version(installation, planned)
    commit_version(installation, planned, leave_out=[3])
    with pytest.raises(NotFinishedError, match=f"1 of 4 shards are not committed(?s:.*){planned.row.name}-00003"):
        build_release(installation, job=JOB, version=planned.row.name)


def test_outcomes_that_change_while_a_release_is_built_refuse_it(
    installation: Installation, finished: VersionRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = installation.outcomes(job=JOB, version=finished.name, answer_schema=ANSWER_SCHEMA).read().head(1)
    monkeypatch.setattr(building, "file_ranges", lambda spans: (append_outcomes(installation, finished, rows), file_ranges(spans))[1])
    with pytest.raises(NotFinishedError, match="changed while its release was being built"):
        build_release(installation, job=JOB, version=finished.name)


def test_a_version_of_set_aside_records_only_has_a_release(installation: Installation) -> None:
    planned = plan_version(installation, records=3, shards=1, set_aside=3)
    answer_version(installation, planned)
    commit_version(installation, planned)
    report = build_release(installation, job=JOB, version=planned.row.name)
    assert (report.results, report.dead_letters) == (0, 3)


def test_the_release_holds_what_the_outcomes_hold(installation: Installation) -> None:
    planned = plan_version(installation, records=12, shards=2)
    answer_version(installation, planned)
    commit_version(installation, planned)
    report = build_release(installation, job=JOB, version=planned.row.name)
    expected = pl.concat([outcome_rows(planned, shard=n, frozen=part) for n, part in zip(planned.numbers, planned.frozen, strict=True)])
    assert rows_of(report.uri).equals(expected.sort("key_hash", "record_id"))
