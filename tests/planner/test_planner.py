"""Planning a job: everything of the source is in the plan exactly once, nothing is planned twice, nothing half."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import yaml
from deltalake import write_deltalake

from batch_assets.core.errors import RefusedError, UnfitEnvironmentError
from batch_assets.core.leasing import HoldReason, VersionState
from batch_assets.core.planning import HASH_HIGH, HASH_LOW
from batch_assets.core.records import TO_ANSWER, key_hash
from batch_assets.engines.tokenizers import BYTES_PER_TOKEN
from batch_assets.flows import bucketing, planner
from batch_assets.flows.planner import PlanReport, plan
from batch_assets.stores import source_text
from batch_assets.stores.frozen_input import frozen_schema
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import Job, load_job
from tests.support.jobs import records, settings_in, write_job
from tests.support.models import stub_model

Rows = Iterable[Mapping[str, object]]
MakeJob = Callable[..., Job]


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation.open(settings_in(tmp_path / "root"))


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """Writes a job folder over rows (JSON Lines), or over another table, and loads it."""
    model = stub_model(tmp_path / "model")

    def make(rows: Rows = (), *, table: Path | None = None, **settings: object) -> Job:
        path = write_job(tmp_path / "jobs" / "tickets", [], model=model, **settings)  # type: ignore[arg-type]
        # ASCII, so that a lone surrogate can be written as JSON writes it.
        (path.parent / "tickets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if table is not None:
            content = yaml.safe_load(path.read_text())
            content["input"]["table"] = str(table)
            path.write_text(yaml.safe_dump(content))
        return load_job(path, environment={})

    return make


def frozen_rows(installation: Installation, report: PlanReport) -> pl.DataFrame:
    """All rows of the plan with their shard, in order."""
    row = installation.register.version(report.job, report.version)
    assert row.input_attempt is not None
    frozen = installation.frozen_input(job=report.job, version=report.version, attempt=row.input_attempt)
    shards = installation.register.shards(report.job, report.version)
    return pl.concat(frozen.read(shard.number, shard.input_sha256).with_columns(shard=shard.number) for shard in shards)


def classes(installation: Installation, report: PlanReport) -> dict[str, tuple[str, str | None]]:
    """record id -> (disposition, detail) of what is set aside."""
    frame = frozen_rows(installation, report).filter(pl.col("disposition") != TO_ANSWER)
    return {row["record_id"]: (row["disposition"], row["disposition_detail"]) for row in frame.iter_rows(named=True)}


def folders(installation: Installation) -> list[str]:
    return sorted(str(path) for path in Path(installation.settings.root).rglob("*") if "register.db" not in path.name)


# ---- the plan


def test_every_record_is_in_one_shard_in_order_and_the_ranges_of_the_shards_are_all_hashes(
    installation: Installation, make_job: MakeJob
) -> None:
    report = plan(installation, make_job(records(299), run={"shard_records": 50}))
    frame = frozen_rows(installation, report)
    shards = installation.register.shards(report.job, report.version)
    assert (report.kind, report.records, report.to_answer, report.shards, len(shards)) == ("full", 299, 299, 6, 6)
    assert [shard.number for shard in shards] == [1, 2, 3, 4, 5, 6]  # 0 is the canary's
    assert sorted(frame["record_id"]) == [str(row["ticket_id"]) for row in records(299)]
    assert frame["key_hash"].is_sorted()
    assert [shard.hash_low for shard in shards] == [HASH_LOW, *(shard.hash_high + 1 for shard in shards[:-1])]
    assert shards[-1].hash_high == HASH_HIGH
    for shard in shards:
        part = frame.filter(pl.col("shard") == shard.number)
        assert part.height == shard.rows == shard.to_answer
        assert part["key_hash"].is_between(shard.hash_low, shard.hash_high).all()
        assert part["position"].to_list() == list(range(shard.rows))


def test_a_frozen_row_holds_what_the_job_says_and_nothing_else(installation: Installation, make_job: MakeJob) -> None:
    rows = [{**records(1)[0], "secret": "x"}]
    frame = frozen_rows(installation, plan(installation, make_job(rows)))
    assert frame.drop("shard").schema == pl.Schema(frozen_schema(("body",)))
    body = str(rows[0]["body"])
    assert frame.row(0, named=True) == {
        "position": 0,
        "record_id": "T-000000",
        "key_hash": key_hash("T-000000"),
        "disposition": "answer",
        "disposition_detail": None,
        "surplus": 0,
        "record_digest": hashlib.sha256(f"field_body={len(body)}:{body};".encode()).hexdigest(),
        "acl": "support",
        "record_class": None,
        "segment": "de",
        "labels": '{"category":"billing"}',
        "field_body": body,
        "shard": 1,
    }


def test_a_column_that_is_also_a_label_keeps_its_value_for_every_other_use(
    installation: Installation, make_job: MakeJob, tmp_path: Path
) -> None:
    pl.DataFrame(records(3)).write_csv(tmp_path / "t.csv")
    job = make_job(table=tmp_path / "t.csv")
    labels = {"category": "acl", "summary": "ticket_id"}
    changed = job.job_file.input.model_copy(update={"labels": labels, "segment": "acl", "record_class": "ticket_id"})
    job = replace(job, job_file=job.job_file.model_copy(update={"input": changed}))
    row = frozen_rows(installation, plan(installation, job)).sort("record_id").row(0, named=True)
    assert [row[name] for name in ("record_id", "acl", "segment", "record_class")] == ["T-000000", "support", "support", "T-000000"]
    assert row["labels"] == '{"category":"support","summary":"T-000000"}'


def nasty() -> list[dict[str, object]]:
    sound = {"acl": "support", "market": "de", "gold": "bug"}
    return [
        *records(5),
        {**sound, "ticket_id": "null", "body": None},
        {**sound, "ticket_id": "absent"},
        {**sound, "ticket_id": "empty", "body": ""},
        {**sound, "ticket_id": "spaces", "body": "   "},
        {**sound, "ticket_id": "zero width", "body": "\u200b"},
        {**sound, "ticket_id": "surrogate", "body": "a \ud800 b"},
        {**sound, "ticket_id": "number", "body": 7},
        {**sound, "ticket_id": "long", "body": "word " * 240},
        {**sound, "ticket_id": None, "body": "who am I"},
        {**sound, "ticket_id": "twice", "body": "one"},
        {**sound, "ticket_id": "twice", "body": "two"},
        {**sound, "ticket_id": "twice", "body": None},
    ]


def test_each_poison_record_is_set_aside_with_its_own_class_and_the_equation_holds(installation: Installation, make_job: MakeJob) -> None:
    job = make_job(nasty(), duplicates="set_aside", limits={"input_tokens_max": 200})
    report = plan(installation, job)
    assert classes(installation, report) == {
        "null": ("null", "body is null"),
        "absent": ("null", "body is null"),
        "empty": ("empty", None),
        "spaces": ("empty", None),
        "zero width": ("empty", None),
        "surrogate": ("malformed", "line 11: body holds a lone surrogate"),
        "number": ("malformed", "line 12: body holds number, not text"),
        "long": ("too_long", "300 tokens, at most 200"),
        "row:tickets.jsonl:14": ("no_id", None),
        "twice": ("duplicate_id", "3 rows share this id"),
    }
    assert report.set_aside_by_class == {"null": 2, "empty": 3, "malformed": 2, "too_long": 1, "no_id": 1, "duplicate_id": 1}
    assert (report.records, report.to_answer, report.surplus) == (17, 5, 2)
    frame = frozen_rows(installation, report)
    assert frame.filter(pl.col("disposition") != TO_ANSWER)["field_body"].null_count() == 10
    assert dict(frame.filter(pl.col("surplus") > 0).select("record_id", "surplus").iter_rows()) == {"twice": 2}


def test_the_details_of_what_is_set_aside_hold_no_record_text(installation: Installation, make_job: MakeJob) -> None:
    rows = [*records(1), {**records(1)[0], "ticket_id": "T-1", "body": ["SECRET"]}]
    job = make_job(rows)
    table = Path(job.source_uri)
    table.write_text(table.read_text() + '{"ticket_id": "T-2", "body": "SECRET\n"SECRET"\n{"SECRET": "SECRET"}\n')
    details = {
        detail for _, detail in classes(installation, plan(installation, replace(job, job_file=with_policy(job, "set_aside")))).values()
    }
    assert len(details) >= 3
    assert not any("SECRET" in str(detail) for detail in details)


@pytest.mark.parametrize(
    ("column", "values"),
    [("acl", ("secret", None)), ("acl", ("zz-secret", "aa-public")), ("market", ("de", "us"))],
    ids=["no acl", "another acl", "another segment"],
)
@pytest.mark.parametrize("buffer_rows", [2, 100], ids=["in two runs", "in one run"])
def test_rows_of_one_id_that_differ_in_acl_or_segment_are_refused_because_nobody_can_tell_who_may_read_them(  # noqa: PLR0917
    installation: Installation,
    make_job: MakeJob,
    monkeypatch: pytest.MonkeyPatch,
    buffer_rows: int,
    column: str,
    values: tuple[str | None, ...],
) -> None:
    monkeypatch.setattr(bucketing, "BUFFER_ROWS", buffer_rows)
    monkeypatch.setattr(source_text, "READ_BYTES", 64)
    sound = records(6)
    pair = [{**sound[0], "ticket_id": "twice", column: value} for value in values]
    with pytest.raises(RefusedError, match=r"differ in who may read them.*: twice\n.*\n?.*1 ids whose rows differ"):
        plan(installation, make_job([pair[0], *sound, pair[1]], duplicates="set_aside"))
    assert installation.register.versions("tickets") == []
    report = plan(installation, make_job([pair[0], *sound, pair[0]], duplicates="set_aside"))
    assert classes(installation, report) == {"twice": ("duplicate_id", "2 rows share this id")}


def with_policy(job: Job, policy: str) -> object:
    return job.job_file.model_copy(update={"input": job.job_file.input.model_copy(update={"duplicates": policy})})


def test_only_records_whose_bytes_may_be_too_many_are_tokenised(
    installation: Installation, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised: list[int] = []
    record_tokens = planner.PromptRenderer.record_tokens

    def counted(self: planner.PromptRenderer, fields: Mapping[str, str]) -> int:
        tokens = record_tokens(self, fields)
        tokenised.append(tokens)
        return tokens

    monkeypatch.setattr(planner.PromptRenderer, "record_tokens", counted)
    monkeypatch.setattr(planner, "SAMPLE_RECORDS", 0)
    rows = [{**records(1)[0], "ticket_id": str(size), "body": "x" * size} for size in (10, 99, 100, 101, 150, 401)]
    report = plan(installation, make_job(rows, limits={"input_tokens_max": 100}))
    assert sorted(tokenised) == [26, 38, 101]
    assert set(classes(installation, report)) == {"401"}


def test_without_a_limit_the_record_may_fill_what_prompt_and_answer_leave(installation: Installation, make_job: MakeJob) -> None:
    job = make_job(records(1), max_tokens=64)
    report = plan(installation, job)
    rows = [
        {**records(1)[0], "ticket_id": str(extra), "body": "x" * (BYTES_PER_TOKEN * report.input_tokens_max + extra)} for extra in (0, 1)
    ]
    report = plan(installation, make_job(rows, max_tokens=64))
    assert set(classes(installation, report)) == {"1"}
    assert report.prefix_tokens + report.input_tokens_max + 64 < 8192
    assert report.input_tokens_mean > report.input_tokens_max


def test_a_prompt_that_leaves_no_room_is_refused(installation: Installation, make_job: MakeJob) -> None:
    with pytest.raises(RefusedError, match="leave no room for a record"):
        plan(installation, make_job(records(1), max_tokens=8192))


def test_a_shard_of_set_aside_records_only_waits_for_the_committer_alone(installation: Installation, make_job: MakeJob) -> None:
    report = plan(installation, make_job([{**records(1)[0], "body": ""}]))
    (shard,) = installation.register.shards(report.job, report.version)
    assert (shard.state, shard.staged_slots, shard.rows, shard.to_answer) == ("staged", 0, 1, 0)


# ---- kinds of source


def test_equal_records_make_equal_plans_whatever_the_source(installation: Installation, make_job: MakeJob, tmp_path: Path) -> None:
    frame = pl.DataFrame(records(120))
    frame.write_csv(tmp_path / "t.csv")
    frame.write_parquet(tmp_path / "t.parquet")
    for part in range(3):
        write_deltalake(tmp_path / "table", frame[part * 40 : part * 40 + 40], mode="append", partition_by=["market"])
    plans = []
    for table in (None, tmp_path / "t.csv", tmp_path / "t.parquet", tmp_path / "table"):
        report = plan(installation, make_job(records(120), table=table, run={"shard_records": 50}))
        plans.append(frozen_rows(installation, report).rows())
    assert plans[0] == plans[1] == plans[2] == plans[3]


def test_a_large_source_goes_through_many_buckets_and_comes_out_the_same(
    installation: Installation, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(records(2000), run={"shard_records": 70})
    one_bucket = frozen_rows(installation, plan(installation, job))
    monkeypatch.setattr("batch_assets.core.planning.BUCKET_ROWS", 30)
    monkeypatch.setattr(bucketing, "BUFFER_ROWS", 300)
    monkeypatch.setattr(bucketing, "FAN_OUT_BITS", 4)
    report = plan(installation, replace(job, name="other"))
    many = frozen_rows(installation, report)
    assert many.drop("position", "shard").equals(one_bucket.drop("position", "shard"))
    assert max(shard.rows for shard in installation.register.shards("other", report.version)) <= 70


def test_integer_keys_of_a_table_are_decimal_text(installation: Installation, make_job: MakeJob, tmp_path: Path) -> None:
    pl.DataFrame(records(3)).with_columns(ticket_id=pl.Series([7, 10, None])).write_parquet(tmp_path / "t.parquet")
    report = plan(installation, make_job(table=tmp_path / "t.parquet", duplicates="set_aside"))
    assert set(frozen_rows(installation, report)["record_id"]) == {"7", "10", "row:t.parquet:3"}


# ---- what is refused leaves nothing behind


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([*records(30), *records(2)], "T-000000, T-000001|T-000001, T-000000"),
        ([*records(3), {**records(1)[0], "ticket_id": None}], "row:tickets.jsonl:4"),
        ([], "no column ticket_id|no records"),
        ([{**row, "body": 5} for row in records(3)], "column body cannot be used"),
        ([{"ticket_id": "T-1", "body": "a", "acl": "x", "gold": "bug"}], "no column market"),
    ],
    ids=["repeated ids", "no id", "no records", "numbers for text", "no column"],
)
def test_a_refused_source_registers_no_version_and_writes_nothing(
    installation: Installation, make_job: MakeJob, rows: Rows, why: str
) -> None:
    before = folders(installation)
    with pytest.raises(RefusedError, match=why):
        plan(installation, make_job(rows))
    assert installation.register.versions("tickets") == []
    assert [path for path in folders(installation) if path not in before and not path.endswith("/tmp")] == []


def test_a_column_of_numbers_for_a_prompt_field_is_refused_by_name(installation: Installation, make_job: MakeJob, tmp_path: Path) -> None:
    pl.DataFrame(records(3)).with_columns(body=pl.Series([1, 2, 3])).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(RefusedError, match="column body cannot be used by the placeholder"):
        plan(installation, make_job(table=tmp_path / "t.parquet"))


def test_a_model_with_one_other_byte_is_refused(installation: Installation, make_job: MakeJob) -> None:
    job = make_job(records(3))
    weights = Path(job.model_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(UnfitEnvironmentError, match="not the model that was pinned"):
        plan(installation, job)


# ---- planning again


def test_planning_again_changes_nothing(installation: Installation, make_job: MakeJob) -> None:
    job = make_job(records(30))
    first = plan(installation, job)
    before, row = folders(installation), installation.register.version("tickets", first.version)
    again = plan(installation, job)
    assert (again.kind, again.version) == ("unchanged", first.version)
    assert (again.records, again.to_answer, again.input_tokens_mean) == (first.records, first.to_answer, first.input_tokens_mean)
    assert folders(installation) == before
    assert installation.register.version("tickets", first.version) == row


def test_what_changes_no_answer_makes_no_version_and_what_does_makes_one(installation: Installation, make_job: MakeJob) -> None:
    first = plan(installation, make_job(records(30)))
    assert plan(installation, make_job(records(30), run={"shard_records": 7})).version == first.version
    changes: list[Mapping[str, object]] = [
        {"max_tokens": 65},
        {"prompt": "<!-- user -->\nSay {{ body }}\n"},
        {"limits": {"attempts_max": 2}},
    ]
    versions = [plan(installation, make_job(records(30), **change)).version for change in changes]
    versions.append(plan(installation, make_job(records(31))).version)
    assert [version[:5] for version in versions] == ["v0002", "v0003", "v0004", "v0005"]


def test_the_spec_is_stored_so_that_later_edits_do_not_reach_this_version(installation: Installation, make_job: MakeJob) -> None:
    job = make_job(records(3))
    report = plan(installation, job)
    (job.folder / "prompt.md").write_text("edited")
    spec = installation.specs().read("tickets", report.version)
    assert (spec.prompt, spec.answer_schema, spec.recipe.digest) == (job.prompt_text, job.schema_text, report.recipe_digest)


def test_a_planner_that_dies_leaves_an_unused_attempt_and_the_next_one_completes_the_version(
    installation: Installation, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(records(30), run={"shard_records": 10})

    def dies(**_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(installation.register, "activate", dies)
        with pytest.raises(KeyboardInterrupt):
            plan(installation, job)
    (half,) = installation.register.versions("tickets")
    assert (half.state, half.input_attempt) == (VersionState.PLANNING, None)
    assert installation.register.shards("tickets", half.name) == []
    report = plan(installation, job)
    assert (report.version, report.kind, report.state) == (half.name, "full", VersionState.ACTIVE)
    assert frozen_rows(installation, report).height == 30


@pytest.mark.parametrize(
    "change",
    [{"run": {"shard_records": 10}}, {"owners": ["team:others"]}, {"table": True}, {"model": True}],
    ids=["shard size", "owners", "moved table", "moved model"],
)
def test_a_planner_that_died_does_not_bind_the_next_one_to_what_is_no_part_of_the_identity(
    installation: Installation, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Mapping[str, object]
) -> None:
    job = make_job(records(30))
    with monkeypatch.context() as dying:
        dying.setattr(planner, "_freeze", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            plan(installation, job)
    if "table" in change:
        (tmp_path / "moved").mkdir()
        job = replace(job, source_uri=str(shutil.move(job.source_uri, tmp_path / "moved")))
    elif "model" in change:
        job = replace(job, model_path=str(shutil.move(job.model_path, tmp_path / "moved model")))
    else:
        job = replace(job, job_file=type(job.job_file).model_validate({**job.job_file.model_dump(exclude_unset=True), **change}))
    report = plan(installation, job)
    spec = installation.specs().read("tickets", report.version)
    assert (report.kind, len(installation.register.versions("tickets"))) == ("full", 1)
    assert (spec.shard_records, list(spec.owners)) == (job.job_file.run.shard_records, job.job_file.owners)
    assert (spec.snapshot.uri, spec.model_path) == (job.source_uri, job.model_path)


def test_of_two_planners_at_once_one_attempt_counts(installation: Installation, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(records(30))
    activate = installation.register.activate
    reports: list[PlanReport] = []

    def another_first(**values: object) -> bool:
        monkeypatch.setattr(installation.register, "activate", activate)
        reports.append(plan(installation, job))
        return activate(**values)  # type: ignore[arg-type]

    monkeypatch.setattr(installation.register, "activate", another_first)
    reports.append(plan(installation, job))
    assert reports[0].version == reports[1].version
    assert frozen_rows(installation, reports[1]).height == 30
    attempts = list((Path(installation.settings.root) / "tickets" / "versions" / reports[0].version / "input").iterdir())
    assert len(attempts) == 2


# ---- pilots and approval


def test_a_pilot_is_a_version_of_its_own_with_that_many_records(installation: Installation, make_job: MakeJob) -> None:
    job = make_job(records(100))
    full, pilot, again = plan(installation, job), plan(installation, job, pilot=20), plan(installation, job, pilot=20)
    assert (pilot.kind, pilot.records, again.kind) == ("pilot", 20, "unchanged")
    assert pilot.version != full.version
    assert again.version == pilot.version
    assert set(frozen_rows(installation, pilot)["record_id"]) < set(frozen_rows(installation, full)["record_id"])


@pytest.mark.parametrize("pilot", [-3, 0])
def test_a_pilot_of_no_records_is_refused(installation: Installation, make_job: MakeJob, pilot: int) -> None:
    with pytest.raises(RefusedError, match=f"at least 1.*found {pilot}"):
        plan(installation, make_job(records(5)), pilot=pilot)
    assert installation.register.versions("tickets") == []


def test_what_a_sensor_may_not_start_is_born_held_for_approval(installation: Installation, make_job: MakeJob) -> None:
    report = plan(installation, make_job(records(30)), by_sensor=True)
    row = installation.register.version("tickets", report.version)
    assert report.needs_approval
    assert report.approval_reason == "nothing of this job is published yet: a person starts the first version"
    assert (row.state, row.hold, row.by_sensor) == (VersionState.HELD, HoldReason.APPROVAL, True)
    assert not plan(installation, make_job(records(31))).needs_approval


def test_the_counts_of_a_plan_add_up_by_class(installation: Installation, make_job: MakeJob) -> None:
    report = plan(installation, make_job([*records(20), *nasty()[5:13]]))
    frame = frozen_rows(installation, report)
    assert Counter(frame["disposition"]) == Counter({TO_ANSWER: report.to_answer}) + Counter(report.set_aside_by_class)
    assert report.records == frame.height + report.surplus
    assert json.dumps(report.as_json())
