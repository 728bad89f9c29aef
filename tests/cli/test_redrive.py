"""`gristmill redrive`, with real worker processes around the scripted engine: what is asked again, what it says, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from batch_assets.core.errors import ExitCode
from tests.cli.terminal import JOB, Terminal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
FAILING = ("T-000003", "T-000005", "T-000020")


def script(terminal: Terminal, *behaviours: dict[str, Any]) -> dict[str, str]:
    """The variable that makes workers misbehave so."""
    path = Path(terminal.folder) / f"script-{len(behaviours)}.json"
    path.write_text(json.dumps({"behaviours": list(behaviours)}), encoding="utf-8")
    return {"GRISTMILL_ENGINE_SCRIPT": str(path)}


@pytest.fixture
def dead(terminal: Terminal) -> Terminal:
    """24 records in 3 shards, published: two set aside, one `schema`, one `rejected`, one cut off; 19 results."""
    terminal.write_job(dead_letters_max="30%")
    behaviours = [{"act": act, "record": record} for act, record in zip(("wrong_schema", "reject", "truncate"), FAILING, strict=True)]
    told = terminal.gristmill("run", "--json", **script(terminal, *behaviours)).succeeded().json
    assert told["dead_letters_by_class"] == {"empty": 1, "null": 1, "rejected": 1, "schema": 1, "truncated": 1}
    return terminal


def test_a_redrive_asks_transient_dead_letters_again_and_publishes_a_new_release_of_the_same_version(dead: Terminal) -> None:
    """The same again finds nothing to ask; a permanent class is asked when it is named."""
    before = dead.gristmill("dead-letters").succeeded().out
    assert f"2 of them failed for a reason that may pass: `gristmill redrive {JOB}`" in before
    told = dead.gristmill("redrive", "--json").succeeded().json
    assert told["redrive"] == {
        "classes": ["degenerate", "engine_killed", "not_json", "schema", "timed_out", "truncated"],
        "records": 2,
        "records_by_class": {"schema": 1, "truncated": 1},
        "shards": 2,
    }
    assert (told["outcome"], told["model_calls"], told["results"]) == ("published", 2, 21)
    assert told["dead_letters_by_class"] == {"empty": 1, "null": 1, "rejected": 1}
    counted = told["statistics"]
    assert (counted["processed"], counted["results"], counted["failed"], counted["quarantined"]) == (24, 21, 1, 2)
    assert (counted["reopened"], counted["recovered"], counted["retried"], counted["failed_attempts"]) == (2, 2, 2, 6)
    assert counted["tokens_thrown_away"] > 0
    moves = dead.gristmill("history", "--json").json["history"]
    assert [move["version"] for move in moves] == [told["job_version"]] * 2
    assert len({move["release_id"] for move in moves}) == 2
    assert "may pass" not in dead.gristmill("dead-letters").succeeded().out
    again = dead.gristmill("redrive", "--json").succeeded().json
    assert (again["outcome"], again["redrive"]["records"]) == ("unchanged", 0)
    assert "nothing to ask again" in dead.gristmill("redrive").succeeded().out
    named = dead.gristmill("redrive", "--class", "rejected", "--json").succeeded().json
    assert (named["redrive"]["records_by_class"], named["model_calls"], named["results"]) == ({"rejected": 1}, 1, 22)


@pytest.mark.parametrize(
    ("name", "words"), [("too_long", "set aside at planning"), ("empty", "nothing was sent to the model"), ("nonsense", "no such class")]
)
def test_classes_that_no_redrive_can_help_are_refused(terminal: Terminal, name: str, words: str) -> None:
    terminal.write_job()
    told = terminal.gristmill("redrive", "--class", name, "--json").refused("redrive.class")
    assert words in told["what"]
    assert "rejected" in told["expected"]


def test_an_open_redrive_is_shown_refuses_a_second_one_and_is_continued_by_a_run(dead: Terminal) -> None:
    """By a plain run too: same input and recipe, so the same version, and what is open in it is not `nothing new`."""
    opened = dead.gristmill("redrive", "--no-run", "--json").succeeded().json
    assert (opened["outcome"], opened["redrive"]["records"]) == ("opened", 2)
    refused = dead.gristmill("redrive", "--json").refused("redrive.open", code=ExitCode.NOT_FINISHED)
    assert f"gristmill run {JOB} --version {opened['job_version']}" in refused["fix"]
    status = dead.gristmill("status", "--json").succeeded().json
    assert (status["redrive_shards"], status["state"], status["results"]) == (2, "active", 19)
    assert "2 shards are open again" in dead.gristmill("status").out
    assert dead.gristmill("dead-letters", "--json").json["by_class"]["schema"] == 1
    judged = dead.gristmill("judge", "--json")
    assert judged.refused("release.not_finished", code=ExitCode.NOT_FINISHED)["what"].count("a redrive is open")
    told = dead.gristmill("run", "--json").succeeded().json
    assert (told["outcome"], told["model_calls"], told["results"]) == ("published", 2, 21)
    again = dead.gristmill("run", "--version", opened["job_version"], "--json").succeeded().json
    assert (again["outcome"], again["model_calls"]) == ("unchanged", 0)


def test_a_redrive_whose_gate_fails_ends_with_3_and_readers_keep_the_earlier_release(terminal: Terminal) -> None:
    terminal.write_job(dead_letters_max="30%")
    spoil = script(terminal, {"act": "invalid", "record": FAILING[0]})
    first = terminal.gristmill("run", "--json", **spoil).succeeded().json
    terminal.write_job(dead_letters_max="9%")
    ended = terminal.gristmill("redrive", "--json", **spoil)
    assert (ended.code, ended.json["outcome"]) == (ExitCode.GATE_FAILED, "gate_failed")
    assert ended.json["dead_letters_by_class"]["not_json"] == 1
    (move,) = terminal.gristmill("history", "--json").json["history"]
    assert move["version"] == first["job_version"]
