"""What readers get: pinned to one release, by key, and by SQL."""

import subprocess
import sys
from pathlib import Path

import duckdb
import polars as pl
import pytest

from batch_assets import reading
from batch_assets.core.errors import RefusedError, UnfitEnvironmentError
from batch_assets.core.validation import CheckSettings
from batch_assets.flows.judge import judge
from batch_assets.flows.publish import publish
from batch_assets.flows.release import ReleaseReport, build_release
from batch_assets.reading import query, read_alias, read_record
from batch_assets.stores.installation import Installation
from batch_assets.stores.releases import release_files
from tests.support.finished import JOB, finished_version, open_installation

ALIAS = "tickets"
IMPORTS_NO_DAGSTER = """
import sys
sys.modules["dagster"] = None
import batch_assets.reading as reading
print(reading.read_alias("tickets", root=sys.argv[1]).collect().height)
assert not [name for name in sys.modules if name.startswith(("sqlalchemy", "batch_assets.stores.register", "batch_assets.stores.sql"))]
"""


def published(installation: Installation, *, number: int = 1, records: int = 40, alias: str = ALIAS) -> ReleaseReport:
    row = finished_version(installation, number=number, records=records)
    report = build_release(installation, job=JOB, version=row.name)
    judge(installation, job=JOB, version=row.name, checks=CheckSettings(dead_letters_max=0.5), alias=alias)
    publish(installation, job=JOB, version=row.name, alias=alias, by="anna")
    return report


@pytest.fixture
def root(installation: Installation) -> str:
    return installation.settings.root


def test_a_reader_stays_on_the_release_it_resolved(installation: Installation, root: str) -> None:
    first = published(installation, number=1, records=40)
    reader = read_alias(ALIAS, root=root)
    published(installation, number=2, records=50)
    assert reader.collect()["job_version"].unique().to_list() == [first.version]
    assert read_alias(ALIAS, root=root).collect().height == 50


def test_rows_come_in_key_hash_order(installation: Installation, root: str) -> None:
    published(installation)
    rows = read_alias(ALIAS, root=root).collect()
    assert rows.equals(rows.sort("key_hash", "record_id"))


def test_the_root_is_that_of_the_environment_unless_it_is_given(
    installation: Installation, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(installation)
    monkeypatch.setenv("GRISTMILL_ROOT", root)
    assert read_alias(ALIAS).collect().height == 40


def test_an_unknown_alias_is_refused_and_the_known_ones_are_named(installation: Installation, root: str) -> None:
    with pytest.raises(RefusedError, match="none yet"):
        read_alias("nothing", root=root)
    published(installation)
    with pytest.raises(RefusedError, match="one of: tickets"):
        read_alias("ticket", root=root)


def test_records_are_read_by_id_and_unknown_ids_are_absent(installation: Installation, root: str) -> None:
    published(installation)
    found = read_record(ALIAS, ["T-00003", "T-00017", "nobody"], root=root)
    assert sorted(found["record_id"]) == ["T-00003", "T-00017"]
    assert read_record(ALIAS, ["nobody"], root=root).is_empty()
    assert read_record(ALIAS, [], root=root).is_empty()


def test_a_query_sees_every_alias_as_a_view(installation: Installation, root: str) -> None:
    published(installation)
    published(installation, number=2, records=10, alias="tickets__pilot")
    found = query("select (select count(*) from tickets) a, (select count(*) from tickets__pilot) b", root=root)
    assert found.rows() == [(40, 10)]


def test_a_query_reads_nested_answers(installation: Installation, root: str) -> None:
    published(installation)
    sql = "select category, entities[1].kind kind, count(*) n from tickets where outcome = 'result' group by all"
    assert query(sql, root=root).rows() == [("bug", "order", 38)]


def test_a_wrong_query_is_refused_with_the_views_that_exist(installation: Installation, root: str) -> None:
    published(installation)
    with pytest.raises(RefusedError, match="the views are: tickets"):
        query("select * from ticket", root=root)


@pytest.mark.parametrize(
    "sql",
    [
        "copy tickets to '{there}'",
        "copy (pivot tickets on category) to '{there}'",
        "create table kept as select * from tickets",
        "attach '{there}'; select 1",
        "install httpfs",
        "explain analyze copy (select 1 as x) to '{there}'",
        "explain analyze create table kept as select 1",
        "explain select 1",
    ],
)
def test_a_query_only_reads(installation: Installation, root: str, tmp_path: Path, sql: str) -> None:
    published(installation)
    there = tmp_path / "there"
    with pytest.raises(RefusedError, match="only reads"):
        query(sql.format(there=there), root=root)
    assert not there.exists()


def test_a_query_may_describe_and_pivot(installation: Installation, root: str) -> None:
    published(installation)
    for sql in ("describe tickets", "pivot (select category from tickets) on category in ('bug') using count(*)"):
        assert not query(sql, root=root).is_empty()


def test_a_release_that_cannot_be_read_does_not_stop_queries_of_others(installation: Installation, root: str) -> None:
    published(installation)
    gone = published(installation, number=2, alias="broken")
    (Path(gone.uri) / release_files(gone.uri)[0].name).unlink()
    assert query("select count(*) from tickets", root=root).item() == 40
    with pytest.raises(RefusedError, match="files of this release are no longer there"):
        read_alias("broken", root=root)


def test_a_path_with_a_quote_in_it_is_read(tmp_path: Path) -> None:
    installation = open_installation(tmp_path / "it's")
    published(installation)
    assert query("select count(*) from tickets", root=installation.settings.root).item() == 40


def test_reading_needs_neither_dagster_nor_the_register(installation: Installation, root: str) -> None:
    published(installation)
    Path(root, "register.db").unlink()
    done = subprocess.run([sys.executable, "-c", IMPORTS_NO_DAGSTER, root], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("40", 0), done.stderr


def test_any_reader_of_delta_tables_can_read_a_release(installation: Installation) -> None:
    report = published(installation)
    assert pl.scan_delta(report.uri).collect().height == 40


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_text('{there}')",
        "select * from glob('{there}*')",
        "select * from query('copy (select 1) to ''{there}''')",
        "select * from read_parquet('{release}/*.parquet')",
    ],
)
def test_a_query_sees_no_other_file(installation: Installation, root: str, tmp_path: Path, sql: str) -> None:
    release = published(installation)
    there = tmp_path / "there"
    there.write_text("secret")
    with pytest.raises(RefusedError):
        query(sql.format(there=there, release=release.uri), root=root)
    assert there.read_text() == "secret"


def test_the_connection_of_a_query_cannot_be_opened_again(installation: Installation, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when a statement that is no SELECT came through."""
    published(installation)
    monkeypatch.setattr(reading, "READING", tuple(duckdb.StatementType.__members__.values()))
    for sql in ("set enable_external_access = true", "set allowed_paths = ['/etc']", "reset lock_configuration"):
        with pytest.raises(RefusedError, match="configuration"):
            query(sql, root=root)


@pytest.mark.parametrize("damage", [b"", b'{"protocol":{"minReaderVersion":1,', b'{"commitInfo":{}}\n'])
def test_a_damaged_log_is_named_when_its_alias_is_asked_and_stops_no_other(installation: Installation, root: str, damage: bytes) -> None:
    published(installation)
    broken = published(installation, number=2, alias="broken")
    Path(broken.uri, "_delta_log", f"{0:020d}.json").write_bytes(damage)
    assert query("select count(*) from tickets", root=root).item() == 40
    with pytest.raises(RefusedError, match="broken cannot be read: this release is not what was built"):
        query("select count(*) from broken", root=root)
    with pytest.raises(UnfitEnvironmentError, match="not what was built and judged"):
        judge(installation, job=JOB, version=broken.version, checks=CheckSettings(dead_letters_max=0.1))
    assert build_release(installation, job=JOB, version=broken.version).built


@pytest.mark.parametrize("damage", [b"", b"PAR1"])
def test_a_damaged_file_is_named_when_its_alias_is_asked_and_stops_no_other(installation: Installation, root: str, damage: bytes) -> None:
    published(installation)
    broken = published(installation, number=2, alias="broken")
    Path(broken.uri, release_files(broken.uri)[0].name).write_bytes(damage)
    assert query("select count(*) from tickets", root=root).item() == 40
    with pytest.raises(RefusedError, match="broken cannot be read"):
        query("select count(*) from broken", root=root)
    with pytest.raises(UnfitEnvironmentError, match="not what was built and judged"):
        installation.releases(job=JOB).columns(broken.release_id)


@pytest.mark.parametrize("name", ["acl=public/segment=eu", "x[1]", "st*r", "q?m", "outcome=result"])
def test_a_root_of_any_name_is_read_as_it_stands(tmp_path: Path, name: str) -> None:
    """No part of a path is taken for a column, and none for a pattern, also beside a folder that it would match."""
    for each in ("star", "x1", "qam", name):
        published(open_installation(tmp_path / each), records=10 if each == name else 20)
    root = str(tmp_path / name)
    assert read_alias(ALIAS, root=root).select("acl", "segment", "outcome").unique().collect().height > 2
    found = query("select count(*), count(distinct acl), count(distinct segment), count(distinct outcome) from tickets", root=root)
    assert found.rows() == [(10, 2, 3, 2)]
    assert read_record(ALIAS, ["T-00003"], root=root)["acl"].to_list() == ["legal"]
