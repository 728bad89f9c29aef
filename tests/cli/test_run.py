"""`gristmill run`, with real worker processes around the scripted engine: what it says, how it ends, what the same again costs."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batch_assets.core.errors import ExitCode
from batch_assets.stores.installation import Installation
from tests.cli.terminal import JOB, Ended, Terminal
from tests.support.dagster_dev import REPOSITORY, wait_for
from tests.support.job_folders import edit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
KEYS = {
    "schema_version",
    "job",
    "job_version",
    "kind",
    "outcome",
    "snapshot_records",
    "results",
    "dead_letters",
    "dead_letters_by_class",
    "carried",
    "model_calls",
    "shards",
    "tokens_prompt",
    "tokens_cached",
    "tokens_output",
    "tokens_thrown_away",
    "seconds",
    "cost_usd",
    "verdict",
    "published",
    "live_version",
    "previous_version",
    "run_url",
    "report",
}


@dataclass(frozen=True, slots=True)
class Done:
    """A job that was run once, and what that run said."""

    terminal: Terminal
    first: Ended


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """24 records in 3 shards, published; no test changes it."""
    terminal = Terminal(tmp_path_factory.mktemp("done"))
    terminal.write_job()
    return Done(terminal, terminal.gristmill("run", "--by", "anna", "--json"))


def test_a_run_publishes_and_says_so_in_one_object(done: Done) -> None:
    told = done.first.succeeded().json
    assert set(told) >= KEYS
    assert (told["job"], told["kind"], told["outcome"], told["published"]) == (JOB, "full", "published", True)
    assert (told["snapshot_records"], told["results"], told["dead_letters_by_class"]) == (24, 22, {"empty": 1, "null": 1})
    assert (told["model_calls"], told["shards"]) == (22, 3)
    assert told["verdict"] == {"passed": True, "findings": []}
    assert (told["live_version"], told["previous_version"]) == (told["job_version"], None)


def test_what_a_run_made_is_what_the_other_commands_show(done: Done) -> None:
    version = done.first.json["job_version"]
    assert done.terminal.gristmill("status", "--json").succeeded().json["results"] == 22
    assert [row["version"] for row in done.terminal.gristmill("versions", "--json").succeeded().json["versions"]] == [version]
    dead = done.terminal.gristmill("dead-letters", "--version", "live", "--json").succeeded().json["dead_letters"]
    assert {row["record_id"]: row["dead_class"] for row in dead} == {"T-000000": "empty", "T-000001": "null"}
    (move,) = done.terminal.gristmill("history", "--json").succeeded().json["history"]
    assert (move["version"], move["by"]) == (version, "anna")
    rows = done.terminal.gristmill("query", "select outcome, count(*) n from tickets group by 1 order by 1", "--json").json["rows"]
    assert rows == [{"outcome": "dead_letter", "n": 2}, {"outcome": "result", "n": 22}]


def test_the_same_again_is_unchanged_and_asks_the_model_nothing(done: Done) -> None:
    again = done.terminal.gristmill("run", "--json").succeeded().json
    assert (again["outcome"], again["model_calls"], again["tokens_prompt"]) == ("unchanged", 0, 0)
    assert (again["job_version"], again["published"]) == (done.first.json["job_version"], True)


def test_a_script_can_ask_that_unchanged_is_not_0(done: Done) -> None:
    ended = done.terminal.gristmill("run", "--fail-if-unchanged")
    assert ended.code == ExitCode.NOT_FINISHED
    assert "unchanged; readers get" in ended.out


@pytest.mark.parametrize("selector", ["1", "live"])
def test_a_version_is_continued_by_any_selector(done: Done, selector: str) -> None:
    told = done.terminal.gristmill("run", "--version", selector, "--json").succeeded().json
    assert (told["job_version"], told["outcome"], told["model_calls"]) == (done.first.json["job_version"], "unchanged", 0)


def test_a_run_in_the_background_is_one_object_now_and_one_in_its_log(done: Done) -> None:
    started = subprocess.run(
        [sys.executable, "-m", "batch_assets.cli", "run", JOB, "--detach", "--json"],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", **done.terminal.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(started.stdout)
    assert told["job"] == JOB
    lines = wait_for(lambda: objects_in(Path(told["log"])), limit_s=60, what="the run in the background")
    assert [line["outcome"] for line in lines] == ["unchanged"]


def objects_in(log: Path) -> list[dict[str, Any]]:
    """What `--json` wrote, between lines of progress."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]


def test_a_pilot_has_a_version_and_an_alias_of_its_own(terminal: Terminal) -> None:
    """The same pilot again is unchanged, and `publish` of it leaves the job's own readers alone."""
    terminal.write_job()
    first = terminal.gristmill("run", "--pilot", "6", "--json").succeeded().json
    assert (first["kind"], first["outcome"], first["snapshot_records"]) == ("pilot", "published", 6)
    for arguments in (["--pilot", "6"], ["--version", "latest"]):
        again = terminal.gristmill("run", *arguments, "--json").succeeded().json
        assert (again["job_version"], again["outcome"], again["model_calls"]) == (first["job_version"], "unchanged", 0)
    told = terminal.gristmill("publish", "--json").succeeded().json
    assert (told["alias"], told["live_version"], told["changed"]) == ("tickets__pilot", first["job_version"], False)
    assert terminal.gristmill("judge", "--json").succeeded().json["passed"]
    assert [row.alias for row in Installation.open(terminal.settings).aliases().all()] == ["tickets__pilot"]


def test_a_run_whose_gate_fails_ends_with_3_and_is_published_without_a_model_call_once_the_limit_is_edited(terminal: Terminal) -> None:
    terminal.write_job(dead_letters_max="1%")
    failed = terminal.gristmill("run", "--json")
    assert (failed.code, failed.json["outcome"], failed.json["live_version"]) == (ExitCode.GATE_FAILED, "gate_failed", None)
    assert failed.json["error"]["what"] in failed.err
    assert failed.err.count("not published: ") == len(failed.json["verdict"]["findings"]) == 1
    assert "Traceback" not in failed.err
    edit(terminal.job_file, "max: 1%", "max: 20%")
    judged = terminal.gristmill("run", "--no-publish", "--json").succeeded().json
    assert (judged["outcome"], judged["live_version"], judged["model_calls"]) == ("judged", None, 0)
    told = terminal.gristmill("run", "--json").succeeded().json
    assert (told["outcome"], told["model_calls"]) == ("published", 0)


def test_a_job_on_hold_is_planned_and_not_answered_and_resume_lets_it_go_on(terminal: Terminal) -> None:
    terminal.write_job()
    terminal.gristmill("hold", "--reason", "prices change").succeeded()
    held = terminal.gristmill("run", "--json")
    assert (held.code, held.json["outcome"], held.json["model_calls"]) == (ExitCode.NOT_FINISHED, "not_finished", 0)
    told = held.json["error"]
    assert told["code"] == "run.not_finished"
    assert f"gristmill resume {JOB}" in told["fix"]
    assert told["fix"] in held.err
    terminal.gristmill("resume").succeeded()
    published = terminal.gristmill("run", "--version", held.json["job_version"], "--json").succeeded().json
    assert (published["outcome"], published["model_calls"]) == ("published", 22)


def test_a_changed_weight_ends_with_6_and_both_digests(terminal: Terminal) -> None:
    terminal.write_job()
    pinned = terminal.gristmill("models", "digest", str(terminal.model), "--json").json["digest"]
    edit(terminal.model / "chat_template.jinja", "assistant", "Assistant")
    ended = terminal.gristmill("run", "--json")
    assert (ended.code, ended.json["outcome"], ended.json["job_version"]) == (ExitCode.ENVIRONMENT, "environment", None)
    told = ended.json["error"]
    assert (told["code"], told["expected"]) == ("model.digest_mismatch", pinned)
    assert told["found"] in ended.err
    assert "Traceback" not in ended.err


def test_a_job_that_is_published_by_hand_ends_after_its_verdict_and_says_how(terminal: Terminal) -> None:
    terminal.write_job()
    with terminal.job_file.open("a", encoding="utf-8") as file:
        file.write("publish: {auto: false}\n")
    told = terminal.gristmill("run", "--json").succeeded().json
    assert (told["outcome"], told["verdict"]["passed"], told["live_version"]) == ("judged", True, None)
    version = told["job_version"]
    assert f"not published; `gristmill publish {JOB} {version}`" in terminal.gristmill("run").succeeded().out
    terminal.gristmill("publish", JOB, version).succeeded()
    assert terminal.gristmill("run", "--json").succeeded().json["outcome"] == "unchanged"


def test_an_alias_that_was_edited_is_what_the_next_run_publishes_to(terminal: Terminal) -> None:
    terminal.write_job()
    first = terminal.gristmill("run", "--json").succeeded().json["job_version"]
    with terminal.job_file.open("a", encoding="utf-8") as file:
        file.write("publish: {alias: other}\n")
    told = terminal.gristmill("run", "--json").succeeded().json
    assert (told["job_version"], told["model_calls"], told["outcome"], told["live_version"]) == (first, 0, "published", first)
    assert terminal.gristmill("run", "--json").succeeded().json["outcome"] == "unchanged"
    sql = "select count(*) from other"
    assert terminal.gristmill("query", sql, "--json").succeeded().json["rows"] == [{"count_star()": 24}]
