"""Selectors, judge, publish, rollback, history, holds: over versions whose answers are there already, so that no worker is started."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from batch_assets.core.errors import ExitCode
from batch_assets.core.validation import CheckSettings
from batch_assets.flows.judge import judge
from batch_assets.flows.publish import publish
from batch_assets.flows.release import build_release
from batch_assets.stores.installation import Installation
from tests.cli.terminal import JOB, Terminal
from tests.support.dagster_dev import REPOSITORY
from tests.support.finished import finished_version, plan_version
from tests.support.job_folders import edit

LENIENT = CheckSettings(dead_letters_max=0.2)
READING_LIMIT_S = 60


def three_versions(folder: Path) -> Terminal:
    """v1 and v2 were published, v3 is answered and judged; 2 of 40 records of each are dead letters of class `empty`."""
    terminal = Terminal(folder)
    terminal.write_job()
    installation = Installation.open(terminal.settings)
    for number in (1, 2, 3):
        name = finished_version(installation, number=number).name
        build_release(installation, job=JOB, version=name)
        judge(installation, job=JOB, version=name, checks=LENIENT)
        if number < 3:
            publish(installation, job=JOB, version=name, alias=JOB, by="anna")
    return terminal


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    """Three versions that no test changes."""
    return three_versions(tmp_path_factory.mktemp("looked-at"))


@pytest.fixture
def three(tmp_path: Path) -> Terminal:
    """Three versions of one's own."""
    return three_versions(tmp_path)


def names(terminal: Terminal) -> list[str]:
    """Full names, the oldest first."""
    return [row.name for row in Installation.open(terminal.settings).register.versions(JOB)]


def live(terminal: Terminal) -> str:
    """The version that readers get."""
    row = Installation.open(terminal.settings).aliases().read(JOB)
    assert row is not None
    return row.version


# --- which version --------------------------------------------------------------------------------------------------------------------

SELECTORS: dict[str, tuple[Callable[[str], str], int]] = {
    "live": (lambda _: "live", 2),
    "previous": (lambda _: "previous", 1),
    "latest": (lambda _: "latest", 3),
    "a number": (lambda _: "1", 1),
    "v and a number": (lambda _: "v2", 2),
    "the digest": (lambda name: name.partition("-")[2], 1),
    "the full name": (lambda name: name, 2),
}


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_version_is_named_by(looked_at: Terminal, selector: str) -> None:
    words, number = SELECTORS[selector]
    name = names(looked_at)[number - 1]
    told = looked_at.gristmill("dead-letters", "--version", words(name), "--json").succeeded().json
    assert told["job_version"] == name


def test_readers_of_a_version_default_to_the_latest(looked_at: Terminal) -> None:
    assert looked_at.gristmill("dead-letters", "--json").succeeded().json["job_version"] == names(looked_at)[2]


@pytest.mark.parametrize("command", ["dead-letters --version", "judge tickets", "publish tickets", "rollback tickets", "run --version"])
def test_an_unknown_version_is_refused_with_the_known_ones(looked_at: Terminal, command: str) -> None:
    told = looked_at.gristmill(*command.split(), "v99", "--json").refused("version.unknown")
    assert told["found"] == "v99"
    assert names(looked_at)[2] in told["expected"]


# --- look at it -----------------------------------------------------------------------------------------------------------------------


def test_versions_are_listed_newest_first_and_the_live_one_is_marked(looked_at: Terminal) -> None:
    rows = looked_at.gristmill("versions", "--json").succeeded().json["versions"]
    assert [row["version"] for row in rows] == names(looked_at)[::-1]
    assert [row["live"] for row in rows] == [False, True, False]
    assert looked_at.gristmill("versions").succeeded().out.splitlines()[1].startswith(names(looked_at)[2])


def test_status_counts_what_is_committed(looked_at: Terminal) -> None:
    told = looked_at.gristmill("status", "--json").succeeded().json
    assert (told["job_version"], told["state"], told["shards"]["committed"]) == (names(looked_at)[2], "finished", 4)
    assert "finished · 41 records" in looked_at.gristmill("status").succeeded().out


def test_status_that_is_watched_ends_by_itself_when_nothing_more_happens(looked_at: Terminal) -> None:
    assert looked_at.gristmill("status", "-w", "--json").succeeded().json["state"] == "finished"


def test_dead_letters_are_filtered_by_class_and_limited_while_all_are_counted(looked_at: Terminal) -> None:
    def ids(*options: str) -> list[str]:
        told = looked_at.gristmill("dead-letters", *options, "--json").succeeded().json
        assert told["by_class"] == {"empty": 2}
        return [row["record_id"] for row in told["dead_letters"]]

    assert sorted(ids()) == ["T-00038", "T-00039"]
    assert len(ids("--limit", "1")) == 1
    assert len(ids("--class", "empty")) == 2
    assert ids("--class", "too_long") == []
    in_words = looked_at.gristmill("dead-letters").succeeded().out
    assert f"{names(looked_at)[2]}: 2 dead letters 2 empty" in in_words
    assert "T-00039" in in_words


def test_a_limit_below_one_is_wrong_usage(looked_at: Terminal) -> None:
    looked_at.gristmill("dead-letters", "--limit", "0", "--json").refused("usage")


def test_history_says_what_readers_were_pointed_at_and_by_whom(looked_at: Terminal) -> None:
    told = looked_at.gristmill("history", "--json").succeeded().json
    assert told["alias"] == JOB
    assert [(move["version"], move["by"]) for move in told["history"]] == [(name, "anna") for name in names(looked_at)[1::-1]]
    assert looked_at.gristmill("history").succeeded().out.count("anna") == 2


def test_query_sees_each_alias_as_a_view(looked_at: Terminal) -> None:
    sql = "select category, count(*) n, sum(surplus) copies from tickets where outcome = 'result' group by 1"
    told = looked_at.gristmill("query", sql, "--json").succeeded().json
    assert (told["columns"], told["rows"]) == (["category", "n", "copies"], [{"category": "bug", "n": 38, "copies": 1}])
    assert "bug       38" in looked_at.gristmill("query", sql).succeeded().out


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("selec 1", "syntax error"),
        ("select * from mails", "mails does not exist"),
        ("select nothing from tickets", "nothing"),
        ("select 1 as a, 2 as a", "several columns are called a"),
        ("select now() - now() as age", "age: an INTERVAL cannot be shown"),
    ],
)
def test_sql_that_cannot_be_answered_is_refused_with_the_views_that_there_are(looked_at: Terminal, sql: str, words: str) -> None:
    told = looked_at.gristmill("query", sql, "--json").refused("query.refused")
    assert words in told["what"]
    assert told["fix"].endswith("the views are: tickets")


# --- judge and publish ----------------------------------------------------------------------------------------------------------------


def test_judge_ends_with_3_when_the_gate_fails_and_with_0_once_the_limit_is_edited(three: Terminal) -> None:
    edit(three.job_file, "max: 20%", "max: 1%")
    failed = three.gristmill("judge", "--json")
    assert (failed.code, failed.json["passed"], failed.json["job_version"]) == (ExitCode.GATE_FAILED, False, names(three)[2])
    in_words = three.gristmill("judge")
    assert (in_words.code, "FAIL  dead_letters" in in_words.out) == (ExitCode.GATE_FAILED, True)
    edit(three.job_file, "max: 1%", "max: 20%")
    assert three.gristmill("judge", "--json").succeeded().json["passed"]


def test_publish_points_readers_there_and_again_changes_nothing(three: Terminal) -> None:
    told = three.gristmill("publish", "--by", "ben", "--json").succeeded().json
    _, second, third = names(three)
    assert told == {
        "schema_version": 1,
        "alias": JOB,
        "live_version": third,
        "previous_version": second,
        "revision": 3,
        "changed": True,
    }
    again = three.gristmill("publish", "--json").succeeded().json
    assert (again["revision"], again["changed"]) == (3, False)
    assert f"{JOB} is at {third} already" in three.gristmill("publish").succeeded().out
    assert three.gristmill("history", "--json").succeeded().json["history"][0]["by"] == "ben"


def test_publish_is_refused_by_a_failed_gate_unless_a_reason_is_given(three: Terminal) -> None:
    edit(three.job_file, "max: 20%", "max: 1%")
    three.gristmill("judge")
    refused = three.gristmill("publish", "--json")
    assert refused.code == ExitCode.GATE_FAILED
    assert "not published: " in refused.err
    assert "5.00 % dead letters > 1 %" in refused.err
    assert refused.json["error"]["what"] in refused.err
    assert live(three) == names(three)[1]
    three.gristmill("publish", "--override", "the two are known to be empty").succeeded()
    assert live(three) == names(three)[2]


def test_publish_goes_forward_only(three: Terminal) -> None:
    three.gristmill("publish", JOB, "v1", "--json").refused("publish.once")
    assert live(three) == names(three)[1]


def test_a_release_with_a_damaged_log_is_refused_in_words_built_again_and_published(three: Terminal) -> None:
    installation = Installation.open(three.settings)
    (release,) = [row for row in installation.register.releases(JOB) if row.version == names(three)[2]]
    Path(release.uri, "_delta_log", f"{0:020d}.json").write_bytes(b"")
    three.gristmill("publish", "--json").refused("release.damaged", code=ExitCode.ENVIRONMENT)
    rebuilt = three.gristmill("judge", "--json").succeeded().json["release"]
    assert rebuilt != release.release_id
    assert three.gristmill("publish", "--json").succeeded().json["changed"]
    assert three.gristmill("query", "select count(*) n from tickets", "--json").succeeded().json["rows"] == [{"n": 40}]


def test_limits_that_were_tightened_after_the_verdict_decide(three: Terminal) -> None:
    edit(three.job_file, "max: 20%", "max: 1%")
    refused = three.gristmill("publish", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (ExitCode.GATE_FAILED, "gate.dead_letters")
    assert live(three) == names(three)[1]


# --- back, and holds ------------------------------------------------------------------------------------------------------------------


def test_rollback_needs_a_reason_goes_back_and_holds_the_job_until_resume(three: Terminal) -> None:
    first, second, _ = names(three)
    three.gristmill("rollback", "--json").refused("rollback.no_reason")
    assert live(three) == second
    told = three.gristmill("rollback", "--reason", "wrong categories", "--by", "ben", "--json").succeeded().json
    assert (told["live_version"], told["previous_version"], told["changed"]) == (first, second, True)
    assert live(three) == first
    assert three.gristmill("status", "--json").json["job_hold"] == f"rollback by ben: rollback of {JOB} to {first}: wrong categories"
    assert f"gristmill resume {JOB}" in three.gristmill("status").out
    assert three.gristmill("resume").succeeded().out == f"{JOB}: hold lifted\n"
    assert three.gristmill("status", "--json").json["job_hold"] is None


def test_a_second_rollback_does_not_put_back_what_was_withdrawn(three: Terminal) -> None:
    first, second, _ = names(three)
    three.gristmill("rollback", "--reason", "wrong categories").succeeded()
    three.gristmill("rollback", "--reason", "still wrong", "--json").refused("rollback.no_target")
    three.gristmill("rollback", JOB, second, "--reason", "it was right", "--json").refused("rollback.withdrawn")
    assert live(three) == first


def test_hold_and_resume(three: Terminal) -> None:
    assert f"gristmill resume {JOB}" in three.gristmill("hold", "--reason", "prices change", "--by", "anna").succeeded().out
    assert three.gristmill("status", "--json").json["job_hold"] == "person by anna: prices change"
    assert three.gristmill("resume").succeeded().out == f"{JOB}: hold lifted\n"
    assert three.gristmill("resume").succeeded().out == f"{JOB}: nothing is on hold\n"


# --- true processes -------------------------------------------------------------------------------------------------------------------


def test_the_installed_command_refuses_with_2_one_object_and_no_traceback(looked_at: Terminal) -> None:
    ended = subprocess.run(
        [Path(sys.executable).with_name("gristmill"), "rollback", JOB, "v99", "--json"],
        env={"PATH": "/usr/bin:/bin", **looked_at.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, json.loads(ended.stdout)["error"]["code"]) == (ExitCode.REFUSED, "version.unknown")
    assert ended.stderr.startswith("refused: ")
    assert "Traceback" not in ended.stderr


def test_a_watched_status_is_one_object_a_line_and_ctrl_c_ends_it_with_130(terminal: Terminal) -> None:
    terminal.write_job()
    planned = plan_version(Installation.open(terminal.settings), records=8, shards=2)
    with subprocess.Popen(
        [sys.executable, "-m", "batch_assets.cli", "status", "--watch", "--json"],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", **terminal.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        try:
            assert watching.stdout is not None
            assert json.loads(watching.stdout.readline())["job_version"] == planned.row.name
            watching.send_signal(signal.SIGINT)
            _, errors = watching.communicate(timeout=READING_LIMIT_S)
        finally:
            watching.kill()
    assert (watching.returncode, errors) == (ExitCode.INTERRUPTED, "stopped\n")
