"""Whatever a record or an answer says: it is its own affair, and its text stands nowhere but in the data."""

import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_assets.core.answers import AnswerChecker, CheckedAnswer
from batch_assets.core.records import DeadClass
from batch_assets.core.strict_json import decode_strict
from batch_assets.stores.installation import Installation
from tests.cli.terminal import JOB, Terminal
from tests.support.hostile import ANSWERS, SECRET, SET_ASIDE, TEXTS, VOCABULARY
from tests.support.jobs import answer_schema, records
from tests.support.redrives import commit_all
from tests.support.versions import SCHEMA, installation_in
from tests.support.workers import drive, ids, plan

CHECKER = AnswerChecker(json.dumps(answer_schema()))
CLASSES = {DeadClass.NOT_JSON, DeadClass.SCHEMA, DeadClass.TRUNCATED}
any_text = st.text(st.characters(exclude_categories=()))
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text | st.sampled_from(["category", "summary"]), inner, max_size=3),
    max_leaves=8,
)
near_misses = st.builds(
    lambda category, summary, rest: json.dumps({"category": category, "summary": summary, **rest}),
    st.sampled_from(["bug", "other", SECRET]) | any_json,
    any_json,
    st.dictionaries(any_text, any_json, max_size=1),
)


@settings(max_examples=300, deadline=None)
@given(any_text | any_json.map(json.dumps) | near_misses, st.sampled_from(["stop", "stop", "length", "abort"]))
def test_an_answer_is_valid_or_refused_in_words_of_our_own(text: str, finish_reason: str) -> None:
    checked = CHECKER.check(text, finish_reason)
    if isinstance(checked, CheckedAnswer):
        value = decode_strict(checked.json_text)
        checked.json_text.encode()
        assert set(value) == {"category", "summary"}
        assert value["category"] in ("billing", "bug", "how_to", "account_access", "cancellation", "other")
        assert 1 <= len(value["summary"]) <= 40
    else:
        assert checked.dead_class in CLASSES
        assert VOCABULARY.fullmatch(checked.error), checked.error


def test_every_hostile_answer_is_its_own_dead_letter_with_acl_class_and_attempts(tmp_path: Path) -> None:
    """Among others in one shard, through the real loop and the committer."""
    names = dict(zip(ids(len(ANSWERS)), ANSWERS, strict=True))
    planned = plan(installation_in(tmp_path), {1: [*names, *ids(20, start=500)]})
    driven = drive(planned, script={"texts": {record: ANSWERS[name][0] for record, name in names.items()}})
    driven.finish()
    commit_all(planned)
    rows = planned.installation.outcomes(job=planned.job, version=planned.version, answer_schema=SCHEMA).read()
    dead = {row["record_id"]: row for row in rows.filter(pl.col("outcome") == "dead_letter").to_dicts()}
    assert {names[record]: row["dead_class"] for record, row in dead.items()} == {name: kind for name, (_, kind) in ANSWERS.items()}
    for record, row in dead.items():
        assert (row["attempt"], row["acl"], row["record_class"], row["segment"]) == (3, f"acl of {record}", "internal", "de")
        assert VOCABULARY.fullmatch(row["error"]), row["error"]
    assert sorted(rows.filter(pl.col("outcome") == "result")["record_id"]) == ids(20, start=500)
    assert SECRET not in repr(driven.notes)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_of_a_record_or_an_answer_is_in_logs_errors_register_or_metadata(terminal: Terminal) -> None:
    """A whole run with real worker processes, and what commands show of it; then every byte that is no data is searched."""
    terminal.write_job(dead_letters_max="90%")
    names = [f"A{number}" for number in range(len(ANSWERS))]
    lines = [json.dumps({**record, "ticket_id": each}) for record, each in zip(records(len(names)), names, strict=True)]
    lines += [json.dumps({**records(1)[0], "ticket_id": f"T {name}", "body": text}) for name, text in TEXTS.items()]
    sound = '"acl":"support","market":"de","gold":"bug"'
    lines += [f'{{"ticket_id":"S {name}",{sound},"body":{body}}}' for name, (body, _) in SET_ASIDE.items()]
    (terminal.job_file.parent / "tickets.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    script = terminal.folder / "script.json"
    texts = {each: text for each, (text, _) in zip(names, ANSWERS.values(), strict=True)}
    script.write_text(json.dumps({"texts": texts}), encoding="utf-8")

    ended = terminal.gristmill("run", "--json", GRISTMILL_ENGINE_SCRIPT=str(script)).succeeded()
    told = ended.json
    assert (told["outcome"], told["results"], told["snapshot_records"]) == ("published", len(TEXTS), len(lines))

    commands = (["dead-letters", "--json"], ["dead-letters"], ["status"], ["judge"], ["versions"])
    shown = [terminal.gristmill(*command) for command in commands]
    dead = {row["record_id"]: row for row in shown[0].json["dead_letters"]}
    assert [dead.pop(each)["dead_class"] for each in names] == [kind for _, kind in ANSWERS.values()]
    # A line that is no JSON at all has no id: its key is its place in the file.
    assert sorted(row["dead_class"] for row in dead.values()) == sorted(kind for _, kind in SET_ASIDE.values())
    assert {key.partition(":")[0] for key in dead if not key.startswith("S ")} == {"row"}
    told_dead = shown[0].json["dead_letters"]
    assert {row["acl"] for row in told_dead if not row["record_id"].startswith("row:")} == {"support"}
    assert [row["error"] for row in told_dead if row["error"] is not None and not VOCABULARY.fullmatch(row["error"])] == []
    for each in (ended, *shown):
        assert SECRET not in each.out + each.err
    assert leaks(terminal) == []
    (live,) = Installation.open(terminal.settings).aliases().all()
    assert live.version == told["job_version"]


def leaks(terminal: Terminal) -> list[str]:
    """Files of the installation in which SECRET stands, but for the data: frozen input, slots, outcomes, releases."""
    root = Path(terminal.settings.root)
    data = {root / JOB / "versions", root / JOB / "releases"}
    files = [path for path in root.rglob("*") if path.is_file() and not (path.suffix in (".parquet", ".arrow") and data & {*path.parents})]
    assert any(path.suffix == ".log" for path in files)
    assert any("dagster" in path.parts for path in files)
    assert any(path.name.startswith("register.db") for path in files)
    return [str(path.relative_to(root)) for path in files if SECRET.encode() in path.read_bytes()]
