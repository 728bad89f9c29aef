"""Lines of CASES that no other test says: docs/cases.md has the table of all of them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from batch_assets.core.request_ids import CONTROL_ATTEMPT
from batch_assets.core.statistics import Statistics
from batch_assets.core.validation import CheckSettings
from batch_assets.flows.judge import judge
from batch_assets.flows.planner import plan as plan_job
from batch_assets.flows.publish import publish
from batch_assets.flows.release import build_release
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import load_job
from tests.support.jobs import records, settings_in, write_job
from tests.support.models import stub_model
from tests.support.redrives import commit_all
from tests.support.versions import SCHEMA, Planned, installation_in
from tests.support.workers import drive, folded, ids, plan


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return installation_in(tmp_path / "root")


def outcomes_of(planned: Planned, schema: str = SCHEMA) -> dict[str, tuple[str, str | None]]:
    """record -> (outcome, class)."""
    outcomes = planned.installation.outcomes(job=planned.job, version=planned.version, answer_schema=schema)
    frame = outcomes.read(columns=["record_id", "outcome", "dead_class"])
    assert frame["record_id"].is_unique().all()
    return {record_id: (outcome, dead_class) for record_id, outcome, dead_class in frame.iter_rows()}


def test_of_100_records_the_one_that_is_too_long_is_set_aside_with_its_count_and_the_job_publishes(tmp_path: Path) -> None:
    rows = records(100)
    rows[42]["body"] = "word " * 240
    job_file = write_job(
        tmp_path / "jobs" / "tickets",
        rows,
        model=stub_model(tmp_path / "model"),
        limits={"input_tokens_max": 200},
        run={"shard_records": 40},
    )
    installation = Installation.open(settings_in(tmp_path / "root"))
    report = plan_job(installation, load_job(job_file, environment={}))
    planned = Planned(installation, report.job, report.version, {}, {})
    installation.register.want(job=report.job, version=report.version, shards=None)
    worker = drive(planned)
    worker.finish()
    commit_all(planned)
    assert worker.engine.asked_of("T-000042") == 0
    release = build_release(installation, job=report.job, version=report.version)
    assert (release.results, release.dead_by_class) == (99, {"too_long": 1})
    assert judge(installation, job=report.job, version=report.version, checks=CheckSettings(dead_letters_max=0.01)).passed
    assert publish(installation, job=report.job, version=report.version, alias="tickets", by="anna").changed
    spec = installation.specs().read(report.job, report.version)
    table = installation.outcomes(job=report.job, version=report.version, answer_schema=spec.answer_schema).read()
    (row,) = [row for row in table.to_dicts() if row["record_id"] == "T-000042"]
    assert (row["attempt"], row["error"], row["acl"]) == (0, "300 tokens, at most 200", "support")


def test_records_that_fail_for_a_passing_reason_are_asked_again_on_resume_and_never_counted_as_done(
    installation: Installation,
) -> None:
    """The first worker is killed after their first failure; its successor asks them, and no other, a second time."""
    failing = ids(4)
    planned = plan(installation, {1: ids(12)})
    behaviours = [{"act": "invalid", "record": each} for each in failing]
    first = drive(planned, script={"behaviours": behaviours}, flush_s=0.0)
    first.until(lambda _: len(folded(planned, 1).failed) == 4 and len(folded(planned, 1).answered) == 8)
    assert not set(failing) & {*folded(planned, 1).answered, *folded(planned, 1).dead}
    (lease,) = installation.register.leased(planned.job, planned.version)
    assert installation.register.expire(job=planned.job, version=planned.version, shard=1, epoch=1, renewals=lease.renewals)
    before = folded(planned, 1)
    second = drive(planned, worker_id="w2")
    second.finish()
    asked = [(record, attempt) for record, attempt in second.engine.asked if attempt != CONTROL_ATTEMPT]
    assert {record for record, _ in asked} == set(failing)
    assert all(attempt == before.failed[record] + 1 for record, attempt in asked)
    commit_all(planned)
    assert set(outcomes_of(planned).values()) == {("result", None)}


def test_answers_that_run_into_the_token_limit_are_counted_by_class_and_their_tokens_reported(installation: Installation) -> None:
    cut = ids(100)[::5]
    planned = plan(installation, {1: ids(50), 2: ids(50, start=50)})
    worker = drive(planned, script={"behaviours": [{"act": "truncate", "record": each} for each in cut]})
    worker.finish()
    counted = Statistics.of(row.stats for row in commit_all(planned))
    assert (counted.results, counted.failed, counted.dead_by_class) == (80, 20, {"truncated": 20})
    assert counted.failed_attempts_by_class == {"truncated": 60}
    controls = sum(attempt == CONTROL_ATTEMPT for _, attempt in worker.engine.asked)  # in no log: they are about the engine
    beside = worker.counters.tokens_output - counted.tokens_output - counted.tokens_thrown_away
    assert counted.tokens_thrown_away > 0
    assert (beside > 0) == (controls > 0)


def test_a_thousand_records_that_fail_alike_are_one_line_with_a_count(installation: Installation) -> None:
    planned = plan(installation, {1: ids(1200)})
    failing = [each for number, each in enumerate(ids(1200)) if number % 6]
    worker = drive(planned, script={"max_num_seqs": 256, "behaviours": [{"act": "wrong_schema", "record": each} for each in failing]})
    worker.finish()
    assert [(event, data.get("failures")) for event, data in worker.notes] == [("staged", {"schema": 1000})]  # the last attempts, made anew
    counted = Statistics.of(row.stats for row in commit_all(planned))
    assert counted.lines("v0001") == ["v0001: 1,000 records without an answer, schema; 3,000 attempts failed so"]


def test_every_record_is_a_result_a_failure_or_quarantined_and_classes_come_by_count() -> None:
    shard: Mapping[str, object] = {
        "results": 5,
        "dead_letters": 4,
        "set_aside": 1,
        "dead_by_class": {"empty": 1, "schema": 3},
        "failures_by_class": {"not_json": 2, "schema": 9},
        "retried": 4,
    }
    counted = Statistics.of([shard, {}, shard])
    assert (counted.processed, counted.results, counted.failed, counted.quarantined) == (18, 10, 6, 2)
    assert (counted.failed_attempts, counted.retried) == (22, 8)
    assert counted.lines("v") == [
        "v: 6 records without an answer, schema; 18 attempts failed so",
        "v: 2 records empty, set aside at planning",
        "v: 0 records without an answer, not_json; 4 attempts failed so",
    ]
    assert Statistics(**counted.as_json()) == counted
