"""Everything that is refused before any work: each with file, key, expected, found and what to write (issue 2, item 2)."""

import json
from pathlib import Path

import pytest

from batch_assets.core.errors import ExitCode, Problem, RefusedError
from batch_assets.flows.check import check_job
from batch_assets.stores.job_folders import load_job
from tests.support.job_folders import SCHEMA, edit, load, write_job

LINES = {"model": "model:\n", "decoding": "decoding:\n", "input": "input:\n"}


def refusal(job_yaml: Path) -> Problem:
    """The one problem that loading or checking this folder ends with."""
    with pytest.raises(RefusedError) as caught:
        check_job(load(job_yaml), engine="vllm")
    assert caught.value.exit_code is ExitCode.REFUSED
    assert len(caught.value.problems) == 1, str(caught.value)
    return caught.value.problems[0]


def expect(problem: Problem, **parts: object) -> None:
    """Each named part of the problem is, or for text contains, what is given; a fix and a file are always there."""
    assert problem.file
    assert problem.fix
    for name, part in parts.items():
        found = getattr(problem, name)
        assert found == part or (isinstance(part, str) and isinstance(found, str) and part in found), f"{name}: {found!r}"


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        pytest.param(
            "  max_tokens: 64\n",
            "  max_tokens: 64\n  top_k: 5\n",
            {
                "code": "job_file.unknown_key",
                "key": "decoding.top_k",
                "expected": "max_tokens",
                "found": "top_k",
                "fix": "did you mean `top_p`?",
            },
            id="unknown key, with the one that was meant",
        ),
        pytest.param(
            "  key: ticket_id\n",
            "  key: ticket_id\n  max_tokens: 3\n",
            {"code": "job_file.unknown_key", "key": "input.max_tokens", "found": "max_tokens", "fix": "it belongs under `decoding:`"},
            id="key in the wrong section",
        ),
        pytest.param(
            "decoding:\n",
            "name: tickets\ndecoding:\n",
            {"code": "job_file.unknown_key", "key": "name", "found": "name"},
            id="the name is derived, never also in the file",
        ),
        pytest.param(
            "  max_tokens: 64\n",
            "  seed: 1\n",
            {
                "code": "job_file.max_tokens_missing",
                "key": "decoding.max_tokens",
                "expected": "an integer",
                "found": None,
                "fix": "add `max_tokens: 220` under `decoding:`",
            },
            id="missing max_tokens",
        ),
        pytest.param(
            "decoding:\n  max_tokens: 64\n",
            "",
            {"code": "job_file.max_tokens_missing", "key": "decoding.max_tokens", "expected": "an integer", "found": None},
            id="missing section",
        ),
        pytest.param(
            "decoding:\n",
            "limits:\n  answer_timeout: 120\ndecoding:\n",
            {"code": "job_file.bare_number", "key": "limits.answer_timeout", "expected": "Nh", "found": "120", "fix": "write  120h"},
            id="bare number for a duration",
        ),
        pytest.param(
            "decoding:\n",
            "checks:\n  dead_letters: {max: 0.5}\ndecoding:\n",
            {"code": "job_file.bare_number", "key": "checks.dead_letters.max", "expected": "N%", "found": "0.5", "fix": "write  0.5%"},
            id="bare number for a share",
        ),
        pytest.param(
            "decoding:\n",
            "checks:\n  drift: {field: category, change_max: 10}\ndecoding:\n",
            {
                "code": "job_file.bare_number",
                "key": "checks.drift.change_max",
                "expected": "N points",
                "found": "10",
                "fix": "write  10 points",
            },
            id="bare number for points",
        ),
        pytest.param(
            "decoding:\n",
            "run:\n  budget: 50\ndecoding:\n",
            {"code": "job_file.bare_number", "key": "run.budget", "expected": "N USD", "found": "50", "fix": "write  50 USD"},
            id="bare number for money",
        ),
        pytest.param(
            "decoding:\n",
            "run:\n  deadline: 20 h\ndecoding:\n",
            {"code": "job_file.unit", "key": "run.deadline", "expected": "Nh", "found": "20 h", "fix": "write  20h"},
            id="a unit written otherwise",
        ),
        pytest.param(
            "  max_tokens: 64\n",
            '  max_tokens: "64"\n',
            {"code": "job_file.type", "key": "decoding.max_tokens", "expected": "an integer", "found": "64", "fix": "max_tokens: 220"},
            id="text where a number belongs is not converted",
        ),
        pytest.param(
            "decoding:\n",
            "owners: [data people]\ndecoding:\n",
            {"code": "job_file.alphabet", "key": "owners.0", "expected": "team:name", "found": "data people", "fix": "team:support-data"},
            id="an owner that Dagster refuses",
        ),
        pytest.param(
            "decoding:\n",
            "publish: {alias: Tickets}\ndecoding:\n",
            {"code": "job_file.name", "key": "publish.alias", "expected": "ticket_summaries", "found": "Tickets"},
            id="an alias outside the alphabet",
        ),
        pytest.param(
            "decoding:\n",
            "publish: {alias: tickets__pilot}\ndecoding:\n",
            {"code": "job_file.name", "key": "publish.alias", "what": "double", "found": "tickets__pilot"},
            id="an alias that is one of our own names",
        ),
        pytest.param(
            "decoding:\n",
            "nightly: {window: 1 to 7}\ndecoding:\n",
            {"code": "job_file.window", "key": "nightly.window", "expected": "HH:MM-HH:MM Zone", "found": "1 to 7", "fix": "Europe/Berlin"},
            id="a window that is none",
        ),
        pytest.param(
            "decoding:\n",
            'nightly: {window: "01:00-07:00 Europe/Atlantis"}\ndecoding:\n',
            {"code": "job_file.time_zone", "key": "nightly.window", "expected": "an IANA zone", "found": "Europe/Atlantis"},
            id="an unknown time zone",
        ),
        pytest.param(
            "decoding:\n",
            "checks:\n  coverage: 99%\ndecoding:\n",
            {"code": "job_file.unknown_key", "key": "checks.coverage", "expected": "dead_letters", "found": "coverage"},
            id="coverage is not a setting",
        ),
        pytest.param(
            "decoding:\n",
            "run:\n  engine: {dtype: float16}\ndecoding:\n",
            {"code": "job_file.unknown_key", "key": "run.engine.dtype", "found": "dtype", "fix": "it belongs under `model:`"},
            id="a model setting among the speed knobs",
        ),
        pytest.param(
            "${MODELS}/stub",
            "${MODEL_STORE}/stub",
            {
                "code": "job_file.variable_unset",
                "key": "model.path",
                "expected": "MODEL_STORE",
                "found": None,
                "fix": "export MODEL_STORE=",
            },
            id="an unset variable, by name",
        ),
        pytest.param(
            "  key: ticket_id\n",
            "  key: ${MODELS}\n",
            {"code": "job_file.variable_elsewhere", "key": "input.key", "expected": "input.table", "found": "${MODELS}"},
            id="a variable outside the locations",
        ),
        pytest.param(
            "  key: ticket_id\n",
            "  key: ticket_id\n  key: id\n",
            {"code": "job_folder.yaml", "key": "line 4", "what": "`key` occurs twice"},
            id="a key that occurs twice",
        ),
        pytest.param(
            "decoding:\n",
            "decoding: [\n",
            {"code": "job_folder.yaml", "what": "cannot be read"},
            id="broken YAML",
        ),
        pytest.param(
            "  key: ticket_id\n",
            "  key: id\n",
            {"code": "job_file.column_missing", "key": "input.key", "expected": "acl, body, subject, ticket_id", "found": "id"},
            id="a key that is no column",
        ),
        pytest.param(
            "  acl: acl\n",
            "  acl: acl\n  fields: {bodyy: body}\n",
            {"code": "job_file.field_unused", "key": "input.fields.bodyy", "expected": "subject, body", "found": "bodyy"},
            id="a renamed field that the prompt does not use",
        ),
        pytest.param(
            "  acl: acl\n",
            "  acl: acl\n  labels: {kind: subject}\n",
            {"code": "job_file.answer_field_unknown", "key": "input.labels.kind", "expected": "category, summary", "found": "kind"},
            id="a label for what is no answer field",
        ),
        pytest.param(
            "  max_tokens: 64\n",
            "  max_tokens: 9000\n",
            {"code": "job_file.no_room", "key": "decoding.max_tokens", "found": "8,192 - max_tokens 9,000"},
            id="no room for a record",
        ),
    ],
)
def test_job_yaml_is_refused_with_file_key_expected_found_and_what_to_write(
    tmp_path: Path, old: str, new: str, parts: dict[str, object]
) -> None:
    job_yaml = edit(write_job(tmp_path), old, new)
    expect(refusal(job_yaml), file=str(job_yaml), **parts)


def test_a_model_that_is_not_the_pinned_one_is_refused_with_both_digests(tmp_path: Path) -> None:
    job_yaml = write_job(tmp_path)
    pinned = load(job_yaml).job_file.model.digest
    edit(tmp_path / "models" / "stub" / "chat_template.jinja", "assistant", "Assistant")
    expect(
        refusal(job_yaml),
        code="model.digest_mismatch",
        file=str(job_yaml),
        key="model.digest",
        expected=pinned,
        found="sha256:",
        fix="models pin",
    )


def test_a_missing_digest_is_refused_with_the_command_that_writes_it(tmp_path: Path) -> None:
    job_yaml = write_job(tmp_path)
    edit(job_yaml, f"  digest: {load(job_yaml).job_file.model.digest}\n", "")
    expect(
        refusal(job_yaml), code="job_file.digest_missing", key="model.digest", expected="a value", found=None, fix="gristmill models pin"
    )


def test_a_digest_of_another_shape_is_refused(tmp_path: Path) -> None:
    job_yaml = edit(write_job(tmp_path), "digest: sha256:", "digest: ")
    expect(refusal(job_yaml), code="job_file.alphabet", key="model.digest", expected="64 hex digits", fix="models pin")


@pytest.mark.parametrize("name", ["Tickets", "1tickets", "tick-ets", "tickets_", "a__b", "x" * 31])
def test_a_job_is_called_by_its_folder_and_names_have_one_alphabet(tmp_path: Path, name: str) -> None:
    job_yaml = write_job(tmp_path, name)
    expect(refusal(job_yaml), code="job_file.name", file=str(job_yaml), expected="ticket_summaries", found=name, fix="rename the folder")


def test_a_placeholder_that_is_no_column_is_refused_with_the_columns(tmp_path: Path) -> None:
    job_yaml = write_job(tmp_path)
    prompt = edit(job_yaml.parent / "prompt.md", "{{ body }}", "{{ text }}")
    expect(
        refusal(job_yaml),
        code="prompt.placeholder_no_column",
        file=str(prompt),
        key="{{ text }}",
        expected="one of acl, body, subject, ticket_id",
        found="text",
        fix="fields: {text: the_column}",
    )


def test_a_placeholder_may_be_renamed_to_a_column(tmp_path: Path) -> None:
    job_yaml = write_job(tmp_path)
    edit(job_yaml.parent / "prompt.md", "{{ body }}", "{{ text }}")
    edit(job_yaml, "  acl: acl\n", "  acl: acl\n  fields: {text: body}\n")
    assert check_job(load(job_yaml), engine="scripted").columns.keys() == {"ticket_id", "subject", "body", "acl"}


@pytest.mark.parametrize(
    ("piece", "found", "code"),
    [
        ("{{ body | upper }}", "{{ body | upper }}", "prompt.placeholder"),
        ("{{ body.text }}", "{{ body.text }}", "prompt.placeholder"),
        ("{{ 7*7 }}", "{{ 7*7 }}", "prompt.placeholder"),
        ("{{ body }} {{ subject", "{{ subject", "prompt.placeholder_open"),
        ("{{ body }} {% if x %}", "{% if x %}", "prompt.template_logic"),
    ],
)
def test_a_prompt_has_bare_column_names_and_no_logic(tmp_path: Path, piece: str, found: str, code: str) -> None:
    job_yaml = write_job(tmp_path)
    prompt = edit(job_yaml.parent / "prompt.md", "{{ body }}", piece)
    problem = refusal(job_yaml)
    expect(problem, code=code, file=str(prompt), key="user", found=found)
    assert problem.expected


@pytest.mark.parametrize("marker", ["<!-- System -->", "<!--system-->", "<!-- assistant -->"])
def test_a_role_marker_is_an_exact_line(tmp_path: Path, marker: str) -> None:
    job_yaml = write_job(tmp_path)
    prompt = edit(job_yaml.parent / "prompt.md", "<!-- system -->", marker)
    with pytest.raises(RefusedError) as caught:
        load(job_yaml)
    expect(caught.value.problems[0], code="prompt.role_marker", file=str(prompt), key="line 1", expected="<!-- user -->", found=marker)


def schema_with(summary: object) -> dict[str, object]:
    return {**SCHEMA, "properties": {**SCHEMA["properties"], "summary": summary}}


TEXT = {"type": "string", "maxLength": 9}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (schema_with({"type": "string"}), ("string_unbounded", "properties.summary", "maxLength", "nothing", '"maxLength": 280')),
        (schema_with({"type": "array", "items": TEXT}), ("array_unbounded", "properties.summary", "maxItems", "nothing", '"maxItems": 5')),
        (
            schema_with({"type": "array", "maxItems": 3, "items": {"type": "string"}}),
            ("string_unbounded", "properties.summary.items", "maxLength", "nothing", "maxLength"),
        ),
        (
            schema_with({"$ref": "https://example.org/s.json"}),
            ("remote_ref", "properties.summary.$ref", "#/$defs/", "https://example.org", "$defs"),
        ),
        (schema_with({"$ref": "other.json#/a"}), ("remote_ref", "properties.summary.$ref", "#/$defs/", "other.json#/a", "$defs")),
        (schema_with({"$ref": "#/$defs/none"}), ("ref", "properties.summary.$ref", "#/$defs/", "#/$defs/none", "$defs")),
        (
            {**schema_with({"$ref": "#/$defs/a"}), "$defs": {"a": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/a"}}}},
            ("recursive_ref", "properties.summary.items.$ref", "no circle", "#/$defs/a", "depth"),
        ),
        (
            schema_with({"type": "array", "maxItems": 3, "items": TEXT, "uniqueItems": True}),
            ("keyword", "properties.summary.uniqueItems", "one of", "uniqueItems", "leave it out"),
        ),
        (schema_with({**TEXT, "not": {"const": "x"}}), ("keyword", "properties.summary.not", "one of", "not", "take `not` out")),
        (schema_with({"oneOf": [TEXT]}), ("keyword", "properties.summary.oneOf", "one of", "oneOf", "anyOf")),
        ({**SCHEMA, "if": {}}, ("keyword", "if", "one of", "if", "take `if` out")),
        ({**SCHEMA, "additionalProperties": True}, ("free_keys", None, "false", "true", '"additionalProperties": false')),
        ({key: SCHEMA[key] for key in ("type", "properties")}, ("free_keys", None, "false", "nothing", '"additionalProperties": false')),
        (TEXT, ("top_level", "type", "object", "string", '"type": "object"')),
        (
            schema_with({"type": ["string", "integer"], "maxLength": 4}),
            ("type", "properties.summary.type", "one type", "string, integer", "null"),
        ),
        (
            schema_with({"anyOf": [TEXT, {"type": "boolean"}]}),
            ("union", "properties.summary.anyOf", "one type and null", "2 branches", "null"),
        ),
        (schema_with({}), ("type", "properties.summary.type", "one type", "no type", "type")),
        (schema_with({"type": "text"}), ("type", "properties.summary.type", "one type", "no type", "type")),
        (
            schema_with({"type": "boolean", "maxLength": 4}),
            ("keyword_misplaced", "properties.summary.maxLength", "boolean", "maxLength", "out"),
        ),
        ({**SCHEMA, "required": ["sumary"]}, ("required", "required", "category, summary", "sumary", "sumary")),
        (
            {**SCHEMA, "required": [], "properties": {"outcome": TEXT}},
            ("reserved_name", "properties.outcome", "none of record_id", "outcome", "answer_outcome"),
        ),
        ({**SCHEMA, "required": [], "properties": {"Shard": TEXT}}, ("reserved_name", "properties.Shard", "none of", "Shard", "call it")),
        (
            {**SCHEMA, "required": [], "properties": {"field_x": TEXT}},
            ("reserved_name", "properties.field_x", "none of", "field_x", "call it"),
        ),
        (
            {**SCHEMA, "required": [], "properties": {"__delta_rs_target": TEXT}},
            ("reserved_name", "properties.__delta_rs_target", "or __", "__delta_rs_target", "answer_delta_rs_target"),
        ),
        ({**SCHEMA, "required": [], "properties": {"a b": TEXT}}, ("property_name", "properties.a b", "[A-Za-z_]", "a b", "rename")),
        ({**SCHEMA, "required": [], "properties": {"a": TEXT, "A": TEXT}}, ("property_case", "properties.A", "one", "a and A", "rename")),
        (schema_with({**TEXT, "pattern": "("}), ("not_a_schema", None, "draft 2020-12", '"("', "correct")),
        (schema_with({**TEXT, "minLength": 99}), ("not_guided", None, "llguidance", "unsatisfiable", "maxLength")),
    ],
)
def test_an_answer_schema_is_refused_with_what_to_write(
    tmp_path: Path, schema: object, told: tuple[str, str | None, str, str, str]
) -> None:
    code, key, expected, found, fix = told
    job_yaml = write_job(tmp_path)
    file = job_yaml.parent / "answer.schema.json"
    file.write_text(json.dumps(schema), encoding="utf-8")
    expect(refusal(job_yaml), code=f"answer_schema.{code}", file=str(file), key=key, expected=expected, found=found, fix=fix)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "not JSON at offset 1"),
        ('{"type": "object", "type": "array"}', "a key occurs twice"),
        ('{"a": NaN}', "NaN and Infinity are no JSON"),
    ],
)
def test_an_answer_schema_is_strict_json(tmp_path: Path, text: str, found: str) -> None:
    job_yaml = write_job(tmp_path)
    (job_yaml.parent / "answer.schema.json").write_text(text, encoding="utf-8")
    expect(refusal(job_yaml), code="answer_schema.not_json", expected="a JSON object", found=found, fix="one JSON object")


def test_all_problems_of_the_three_files_are_told_at_once(tmp_path: Path) -> None:
    job_yaml = edit(write_job(tmp_path), "  max_tokens: 64\n", "  max_tokens: 64\n  top_k: 5\n")
    edit(job_yaml.parent / "prompt.md", "{{ body }}", "{{ body() }}")
    edit(job_yaml.parent / "answer.schema.json", ', "maxLength": 80', "")
    with pytest.raises(RefusedError) as caught:
        load_job(job_yaml, environment={})
    codes = {problem.code for problem in caught.value.problems}
    assert codes == {"job_file.unknown_key", "prompt.placeholder", "answer_schema.string_unbounded", "job_file.variable_unset"}


@pytest.mark.parametrize("file", ["job.yaml", "prompt.md", "answer.schema.json"])
def test_a_missing_or_unreadable_file_is_named(tmp_path: Path, file: str) -> None:
    job_yaml = write_job(tmp_path)
    path = job_yaml.parent / file
    path.write_bytes(b"caf\xe9")
    expect(refusal(job_yaml), code="job_folder.not_utf8", file=str(path), found="not UTF-8 at byte 3", expected="UTF-8")
    path.unlink()
    expect(
        refusal(job_yaml),
        code="job_folder.missing",
        file=str(path),
        found="no such file",
        expected="job.yaml, prompt.md",
        fix="gristmill init",
    )
