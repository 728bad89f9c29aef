"""What a job folder says: locations, identity, defaults, and what an edit means."""

import json
from pathlib import Path

import jsonschema_rs
import pytest

from batch_assets.core.errors import RefusedError
from batch_assets.core.job_file import job_file_schema
from batch_assets.flows.check import check_job
from batch_assets.flows.scaffold import init_job, schema_text
from batch_assets.stores.job_folders import find_jobs, input_rules_of, load_job, read_job_yaml, recipe_of
from batch_assets.stores.models import pin
from tests.support.job_folders import edit, load, write_job
from tests.support.models import smollm2_model, stub_model

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_smallest_legal_file_gets_the_documented_defaults(tmp_path: Path) -> None:
    job_file = load(edit(write_job(tmp_path), "  acl: acl\n", "")).job_file
    assert (job_file.decoding.temperature, job_file.limits.attempts_max, job_file.limits.answer_timeout_s) == (0, 3, 120)
    assert (job_file.run.workers_max, job_file.run.shard_records, job_file.run.auto_records_max) == (1, 5000, 1_000_000)
    assert (job_file.checks.dead_letters.max, job_file.checks.drift, job_file.nightly) == (0.005, None, None)
    assert (job_file.publish.keep, job_file.publish.auto, load(write_job(tmp_path, "other")).alias) == (5, True, "other")


def test_unit_strings_become_numbers_in_the_unit_of_their_name(tmp_path: Path) -> None:
    text = (
        "limits: {answer_timeout: 2m}\nrun: {deadline: 20h, budget: 50 USD, engine: {max_num_seqs: 64}}\n"
        'nightly: {window: "01:00-07:00 Europe/Berlin"}\n'
        "checks:\n  dead_letters: {max: 0.5%, per_segment_max: 1%}\n  drift: {field: category, change_max: 10 points, severity: warn}\n"
        "  graded: {sample: 400, min: 85%, severity: warn}\ndecoding:\n"
    )
    job_file = load(edit(edit(write_job(tmp_path), "decoding:\n", text), "  acl: acl\n", "  acl: acl\n  segment: acl\n")).job_file
    assert (job_file.limits.answer_timeout_s, job_file.run.deadline_s, job_file.run.budget_usd) == (120, 72_000, 50)
    assert job_file.run.engine == {"max_num_seqs": 64}
    assert (job_file.checks.dead_letters.max, job_file.checks.dead_letters.per_segment_max) == (0.005, 0.01)
    drift, graded = job_file.checks.drift, job_file.checks.graded
    assert drift is not None
    assert graded is not None
    assert (drift.change_max, graded.min, graded.severity) == (0.1, 0.85, "warn")


@pytest.mark.parametrize(
    ("checks", "key"),
    [
        ("drift: {field: category, change_max: 1 points}", "checks.drift"),
        ("graded: {sample: 400, min: 99%}", "checks.graded"),
        ("extra: [my_check]", "checks.extra"),
        ("dead_letters: {per_segment_max: 0%}", "checks.dead_letters.per_segment_max"),
    ],
)
def test_a_gate_that_would_not_be_made_is_refused(tmp_path: Path, checks: str, key: str) -> None:
    with pytest.raises(RefusedError) as refused:
        load(edit(write_job(tmp_path), "decoding:\n", f"checks:\n  {checks}\ndecoding:\n"))
    (problem,) = refused.value.problems
    assert problem.key == key
    assert "it would never stop a release" in problem.what
    assert "out" in problem.fix


def test_keys_that_do_nothing_yet_are_warned_about(tmp_path: Path) -> None:
    text = 'run: {deadline: 20h, budget: 50 USD}\nnightly: {window: "01:00-07:00 Europe/Berlin"}\ndecoding:\n'
    warnings = check_job(load(edit(write_job(tmp_path), "decoding:\n", text)), engine="scripted").warnings
    for key in ("run.deadline", "run.budget", "nightly"):
        assert f"`{key}` is not acted on yet: it changes nothing" in warnings


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("1:30", "1:30"),
        ("00123", "00123"),
        ("2026-11-29", "2026-11-29"),
        ("true", True),
        ("12", 12),
        ("0.5", 0.5),
        ("~", None),
    ],
)
def test_yaml_text_stays_what_was_written(tmp_path: Path, text: str, value: object) -> None:
    """No Norway problem, no sexagesimal numbers, no dates."""
    (tmp_path / "job.yaml").write_text(f"a: {text}\n", encoding="utf-8")
    assert read_job_yaml(tmp_path / "job.yaml") == {"a": value}


def test_anchors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a: &x [1]\nb: [*x, *x]\n", encoding="utf-8")
    with pytest.raises(RefusedError, match="anchors"):
        read_job_yaml(tmp_path / "job.yaml")


def test_a_job_file_that_is_a_link_has_the_name_and_the_files_of_the_folder_it_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = write_job(tmp_path, "a"), write_job(tmp_path, "b")
    edit(second.with_name("prompt.md"), "You read", "You ignore")
    second.unlink()
    second.symlink_to("../a/job.yaml")
    job = load(second)
    assert (job.name, job.folder, job.source_uri) == ("b", second.parent, str(second.parent / "tickets.jsonl"))
    assert job.prompt_text == job.prompt_file.read_text()
    assert "You ignore" in job.prompt_text
    assert load(first).name == "a"
    monkeypatch.chdir(second.parent)
    environment = {"MODELS": str(tmp_path / "models")}
    assert [load_job(Path(name), environment=environment).name for name in ("job.yaml", "../a/job.yaml", "../b/job.yaml")] == [
        "b",
        "a",
        "b",
    ]


def test_locations_are_resolved_from_the_job_folder_and_the_environment(tmp_path: Path) -> None:
    job_yaml = write_job(tmp_path)
    assert load(job_yaml).source_uri == str(job_yaml.parent / "tickets.jsonl")
    edit(job_yaml, "./tickets.jsonl", "${TABLE}")
    job = load_job(job_yaml, environment={"TABLE": "s3://bucket/tickets", "MODELS": str(tmp_path / "models")})
    assert (job.source_uri, job.source_kind.value, job.model_path) == ("s3://bucket/tickets", "delta", str(tmp_path / "models" / "stub"))


def identities(job_yaml: Path) -> tuple[str, str]:
    job = load(job_yaml)
    return recipe_of(job).digest, input_rules_of(job).digest


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("job.yaml", "max_tokens: 64", "max_tokens: 65", (True, False)),
        ("job.yaml", "  path:", "  dtype: float32\n  path:", (True, False)),
        ("prompt.md", "one ticket", "one  ticket", (True, False)),
        ("answer.schema.json", '"bug", ', "", (True, False)),
        ("job.yaml", "  acl: acl\n", "  acl: none\n", (False, True)),
        ("job.yaml", "  acl: acl\n", "  acl: acl\n  duplicates: set_aside\n", (False, True)),
        ("job.yaml", "decoding:\n", "limits: {attempts_max: 2}\ndecoding:\n", (False, True)),
        ("job.yaml", "decoding:\n", "checks: {dead_letters: {max: 2%}}\ndecoding:\n", (False, False)),
        (
            "job.yaml",
            "decoding:\n",
            "run: {workers_max: 9, shard_records: 7}\npublish: {keep: 2}\nowners: [a@b.org]\ndecoding:\n",
            (False, False),
        ),
        ("answer.schema.json", ", ", ",  ", (False, False)),
    ],
)
def test_position_says_what_makes_a_new_version(tmp_path: Path, file: str, old: str, new: str, changes: tuple[bool, bool]) -> None:
    job_yaml = write_job(tmp_path)
    before = identities(job_yaml)
    edit(job_yaml.parent / file, old, new)
    assert tuple(one != other for one, other in zip(before, identities(job_yaml), strict=True)) == changes


def test_the_order_of_answer_properties_is_content(tmp_path: Path) -> None:
    """A guided model answers in this order: a reason before a category is another recipe than after it."""
    job_yaml = write_job(tmp_path)
    before = identities(job_yaml)
    file = job_yaml.parent / "answer.schema.json"
    schema = json.loads(file.read_text())
    schema["properties"] = dict(reversed(schema["properties"].items()))
    file.write_text(json.dumps(schema), encoding="utf-8")
    assert identities(job_yaml)[0] != before[0]


def test_line_ends_and_a_byte_order_mark_are_no_content(tmp_path: Path) -> None:
    job_yaml = write_job(tmp_path)
    before = identities(job_yaml)
    prompt = job_yaml.parent / "prompt.md"
    prompt.write_bytes(b"\xef\xbb\xbf" + prompt.read_bytes().replace(b"\n", b"\r\n"))
    assert identities(job_yaml) == before


def test_a_governed_column_that_the_job_does_not_mention_is_a_warning_and_none_means_none(tmp_path: Path) -> None:
    job_yaml = edit(write_job(tmp_path), "  acl: acl\n", "")
    assert any("`acl`" in warning for warning in check_job(load(job_yaml), engine="vllm").warnings)
    edit(job_yaml, "  key: ticket_id\n", "  key: ticket_id\n  acl: none\n")
    assert check_job(load(job_yaml), engine="vllm").warnings == ()
    assert input_rules_of(load(job_yaml)).acl is None


def test_check_warns_when_max_tokens_cuts_the_longest_answer(tmp_path: Path) -> None:
    report = check_job(load(edit(write_job(tmp_path), "max_tokens: 64", "max_tokens: 20")), engine="vllm")
    assert "max_tokens 20 would cut it" in report.warnings[0]


def test_check_warns_when_a_placeholder_precedes_the_instructions(tmp_path: Path) -> None:
    job_yaml = write_job(tmp_path)
    edit(job_yaml.parent / "prompt.md", "You read", "{{ subject }} You read")
    assert any(warning.startswith("prefix cache: ") for warning in check_job(load(job_yaml), engine="vllm").warnings)


def test_check_tells_the_room_of_a_record_and_the_limit_may_only_be_lower(tmp_path: Path) -> None:
    job_yaml = write_job(tmp_path)
    report = check_job(load(job_yaml), engine="vllm")
    assert report.input_tokens_max == 8192 - 64 - report.template_tokens
    edit(job_yaml, "decoding:\n", f"limits: {{input_tokens_max: {report.input_tokens_max + 1}}}\ndecoding:\n")
    with pytest.raises(RefusedError, match=r"limits\.input_tokens_max"):
        check_job(load(job_yaml), engine="vllm")


def test_a_check_report_is_plain_values_and_readable_text(tmp_path: Path) -> None:
    report = check_job(load(write_job(tmp_path)), engine="vllm")
    content = json.loads(json.dumps(report.as_json()))
    assert content["prefix_tokens"] <= content["template_tokens"]
    assert "a change of checks: judged again, no model call" in report.as_text()


def test_init_makes_a_folder_that_passes_check_once_the_model_is_pinned(tmp_path: Path) -> None:
    stub_model(tmp_path / "models" / "smollm2-135m-instruct")
    environment = {"MODELS": str(tmp_path / "models")}
    job_yaml = init_job("my_job", tmp_path / "jobs") / "job.yaml"
    assert find_jobs(tmp_path / "jobs") == [job_yaml]
    pin(job_yaml, environment=environment)
    assert check_job(load_job(job_yaml, environment=environment), engine="vllm").warnings == ()


@pytest.mark.parametrize("name", ["my_job", "My-Job", "a__b"])
def test_init_refuses_a_taken_name_and_a_name_outside_the_alphabet(tmp_path: Path, name: str) -> None:
    init_job("my_job", tmp_path)
    with pytest.raises(RefusedError, match="choose another name"):
        init_job(name, tmp_path)


def test_the_published_schema_of_the_job_file_is_the_code_s() -> None:
    """Rewrite it with `gristmill schema job`."""
    assert (REPOSITORY / "jobs" / "job.schema.json").read_text(encoding="utf-8") == schema_text()


def test_the_schema_for_editors_accepts_the_example_and_refuses_bare_numbers() -> None:
    validator = jsonschema_rs.Draft202012Validator(job_file_schema())
    example = read_job_yaml(REPOSITORY / "jobs" / "ticket_summaries" / "job.yaml")
    assert validator.is_valid(example)
    assert not validator.is_valid({**example, "limits": {"answer_timeout": 120}})


@pytest.mark.slow
def test_the_example_job_passes_check_with_the_real_model() -> None:
    job_yaml = REPOSITORY / "jobs" / "ticket_summaries" / "job.yaml"
    report = check_job(load_job(job_yaml, environment={"MODELS": str(smollm2_model().parent)}), engine="vllm")
    assert report.warnings == ()
    assert report.input_tokens_max >= 1777  # the longest ordinary ticket
