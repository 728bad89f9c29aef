"""Commands that need no run: make a job, check it, try it, look at models, schema and machine; and what is refused before any work."""

import json
from pathlib import Path

import pytest

from batch_assets.core.errors import ExitCode, RefusedError
from batch_assets.settings import Settings
from batch_assets.stores.models import model_digest
from tests.cli.terminal import MODEL, Ended, Terminal
from tests.support.job_folders import edit


def test_init_makes_a_job_that_check_accepts_once_its_model_is_pinned(terminal: Terminal) -> None:
    made = terminal.gristmill("init", "my_job", "--json").succeeded()
    assert Path(made.json["folder"]) == terminal.folder / "jobs" / "my_job"
    digest = model_digest(terminal.model).digest
    told = terminal.gristmill("check", "my_job", "--json").refused("job_file.digest_missing")
    assert told["key"] == "model.digest"
    assert "models pin" in told["fix"]
    assert digest in terminal.gristmill("models", "pin", "my_job").succeeded().out
    checked = terminal.gristmill("check", "my_job", "--json").succeeded().json
    assert (checked["job"], checked["model"], checked["model_digest"]) == ("my_job", MODEL, digest)


def test_init_and_check_say_in_words_what_they_found(terminal: Terminal) -> None:
    assert "gristmill check my_job" in terminal.gristmill("init", "my_job").succeeded().out
    terminal.write_job()
    checked = terminal.gristmill("check", "tickets").succeeded().out
    assert checked.startswith("tickets: nothing to refuse\n")
    assert "run.workers_max 1" in checked


def test_init_never_writes_into_a_job_that_exists(terminal: Terminal) -> None:
    before = terminal.write_job().read_bytes()
    terminal.gristmill("init", "tickets", "--json").refused("init.exists")
    assert terminal.job_file.read_bytes() == before


def test_the_schema_command_prints_what_stands_beside_the_jobs(terminal: Terminal, repository: Path) -> None:
    printed = terminal.gristmill("schema", "job").succeeded()
    assert json.loads(printed.out) == json.loads((repository / "jobs" / "job.schema.json").read_text(encoding="utf-8"))


def test_try_answers_the_first_records_and_stores_nothing(terminal: Terminal) -> None:
    terminal.write_job()
    tried = terminal.gristmill("try", "-n", "3", "--json").succeeded().json["records"]
    assert [entry["record_id"] for entry in tried] == ["T-000000", "T-000001", "T-000002"]
    assert tried[1] == {
        "record_id": "T-000001",
        "answer": None,
        "problem": "field body: no value",
        "tokens_prompt": 0,
        "tokens_output": 0,
    }
    assert set(json.loads(tried[2]["answer"])) == {"category", "summary"}
    assert not (terminal.folder / "root").exists()
    assert "T-000002" in terminal.gristmill("try", "-n", "3").succeeded().out


def test_try_refuses_a_placeholder_that_is_no_column_as_check_does(terminal: Terminal) -> None:
    edit(terminal.write_job().parent / "prompt.md", "{{ body }}", "{{ text }}")
    told = terminal.gristmill("try", "--json").refused("prompt.placeholder_no_column")
    assert told == terminal.gristmill("check", "--json").json["error"]


def test_models_digest_is_the_digest_that_a_job_file_pins(terminal: Terminal) -> None:
    found = terminal.gristmill("models", "digest", str(terminal.model), "--json").succeeded().json
    assert found["digest"] == model_digest(terminal.model).digest
    assert "model.safetensors" in found["files"]
    assert terminal.gristmill("models", "digest", str(terminal.model)).succeeded().out == f"{found['digest']}\n"


# --- which job ------------------------------------------------------------------------------------------------------------------------


def test_the_only_job_needs_no_name_and_one_of_two_must_be_named(terminal: Terminal) -> None:
    terminal.write_job()
    assert terminal.gristmill("check", "--json").succeeded().json["job"] == "tickets"
    terminal.gristmill("init", "other").succeeded()
    told = terminal.gristmill("check", "--json").refused("usage.job")
    assert (told["expected"], told["found"]) == ("JOB or --job FILE", "other, tickets")


def test_without_any_job_the_command_that_makes_one_is_named(terminal: Terminal) -> None:
    told = terminal.gristmill("check", "--json").refused("usage.job")
    assert (told["found"], "gristmill init" in told["fix"]) == ("none", True)


def test_a_job_anywhere_is_named_by_its_file_or_its_folder(terminal: Terminal) -> None:
    job_file = terminal.write_job()
    for path in (job_file, job_file.parent):
        checked = terminal.gristmill("check", "--job", str(path), "--json", GRISTMILL_JOBS=str(terminal.folder / "none"))
        assert checked.succeeded().json["job"] == "tickets"


@pytest.mark.parametrize("command", ["hold", "resume", "versions", "history"])
def test_a_mistyped_job_is_refused_and_never_made(terminal: Terminal, command: str) -> None:
    terminal.write_job()
    ended = terminal.gristmill(command, "tickest")
    assert (ended.code, ended.out) == (ExitCode.REFUSED, "")
    assert "there is no job tickest" in ended.err
    told = terminal.gristmill("doctor", "--json").json["findings"]
    assert next(each["message"] for each in told if each["name"] == "database").endswith(": 0 jobs")


def test_looking_back_needs_no_variable_that_only_a_run_needs(terminal: Terminal) -> None:
    edit(terminal.write_job(), str(terminal.model), "${NO_SUCH_VARIABLE}/model")
    terminal.gristmill("run", "--json").refused("job_file.variable_unset")
    assert terminal.gristmill("history", "--json").succeeded().json == {"schema_version": 1, "alias": "tickets", "history": []}
    assert terminal.gristmill("versions", "--json").succeeded().json["versions"] == []


# --- what is refused ------------------------------------------------------------------------------------------------------------------

REFUSALS = {
    "init": (["Bad-Name"], "init.name"),
    "check": (["nojob"], "job_folder.missing"),
    "try": (["nojob"], "job_folder.missing"),
    "run": (["nojob"], "job_folder.missing"),
    "status": (["nojob"], "version.unknown"),
    "versions": (["nojob"], "usage.job_unknown"),
    "dead-letters": (["nojob"], "version.unknown"),
    "judge": (["nojob"], "version.unknown"),
    "publish": (["nojob"], "version.unknown"),
    "redrive": (["nojob"], "job_folder.missing"),
    "rollback": (["nojob"], "rollback.not_live"),
    "history": (["nojob"], "usage.job_unknown"),
    "query": (["selec 1"], "query.refused"),
    "models digest": (["no_such_folder"], "model.folder_missing"),
}


@pytest.mark.parametrize("command", REFUSALS)
def test_a_refusal_is_one_object_on_stdout_and_the_same_in_words_on_stderr(terminal: Terminal, command: str) -> None:
    terminal.write_job()
    arguments, error = REFUSALS[command]
    terminal.gristmill(*command.split(), *arguments, "--json").refused(error)
    in_words = terminal.gristmill(*command.split(), *arguments)
    assert (in_words.code, in_words.out) == (ExitCode.REFUSED, "")
    assert in_words.err.startswith("refused: ")


@pytest.mark.parametrize("command", [*REFUSALS, "doctor"])
def test_a_wrong_setting_and_a_wrong_option_are_refused_by_every_command_with_json(terminal: Terminal, command: str) -> None:
    arguments = [*command.split(), *REFUSALS.get(command, ([], ""))[0], "--json"]
    assert "--no-such-option" in terminal.gristmill(*arguments, "--no-such-option").refused("usage")["what"]
    if command != "models digest":  # it belongs to no installation
        told = terminal.gristmill(*arguments, GRISTMILL_LEASE_S="soon").refused("settings.seconds")
        assert (told["key"], told["found"], told["fix"]) == ("GRISTMILL_LEASE_S", "soon", "export GRISTMILL_LEASE_S=90")


@pytest.mark.parametrize("name", ["GRISTMILL_LEASE_S", "GRISTMILL_RENEW_S", "GRISTMILL_FLUSH_S"])
@pytest.mark.parametrize("text", ["nan", "inf", "1e400", "1e300", "-1", "0"])
def test_seconds_that_no_timer_can_wait_are_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(RefusedError) as caught:
        Settings.from_environment({name: text})
    (problem,) = caught.value.problems
    assert (problem.code, problem.key, problem.found) == ("settings.seconds", name, text)


def test_every_command_that_has_json_is_in_these_lists() -> None:
    from typer.main import get_command

    from batch_assets.cli import app

    def with_json(commands: object, prefix: str = "") -> set[str]:
        found: set[str] = set()
        for name, command in getattr(commands, "commands", {}).items():
            found |= with_json(command, f"{prefix}{name} ")
            if any("--json" in option.opts for option in command.params):
                found.add(f"{prefix}{name}")
        return found

    assert with_json(get_command(app)) == {*REFUSALS, "doctor"}


def test_all_problems_of_a_job_file_are_told_in_words_and_counted_in_json(terminal: Terminal) -> None:
    job_file = edit(terminal.write_job(), "max_tokens: 64", "max_tokens: 64\n  top_k: 5")
    edit(job_file.parent / "prompt.md", "{{ body }}", "{{ body() }}")
    ended = terminal.gristmill("check", "--json")
    told = ended.refused("job_file.unknown_key")
    assert (told["file"], told["key"], told["found"]) == (str(job_file), "decoding.top_k", "top_k")
    assert ended.json["errors"] == 2
    assert ended.err.count("refused: ") == 2
    assert str(job_file.parent / "prompt.md") in ended.err


@pytest.mark.parametrize("arguments", [["nosuch"], ["check", "--nosuch"], ["try", "-n", "0"], ["query"], ["models", "nosuch"]])
def test_wrong_usage_ends_with_2_and_points_to_the_help(terminal: Terminal, arguments: list[str]) -> None:
    ended = terminal.gristmill(*arguments)
    assert (ended.code, ended.out) == (ExitCode.REFUSED, "")
    assert "--help" in ended.err
    assert "Traceback" not in ended.err


def test_the_help_lists_the_exit_codes(terminal: Terminal) -> None:
    text = " ".join(terminal.gristmill("--help").succeeded().out.split())
    for code in ExitCode:
        assert f"{int(code)} " in text.partition("Exit codes:")[2]


# --- the environment ------------------------------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_bad_here(terminal: Terminal) -> None:
    findings = terminal.gristmill("doctor", "--json").succeeded().json["findings"]
    assert [finding["name"] for finding in findings if not finding["ok"]] == []
    assert terminal.gristmill("doctor").succeeded().out.count("ok  ") == len(findings)


def test_doctor_ends_with_6_when_one_thing_is_bad_and_still_looks_at_the_others(terminal: Terminal) -> None:
    ended = terminal.gristmill("doctor", "--json", GRISTMILL_DATABASE_URL="nosuch://host/name")
    assert ended.code == ExitCode.ENVIRONMENT
    assert [finding["name"] for finding in ended.json["findings"] if not finding["ok"]] == ["database"]


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("nosuch://host/name", "register.unreachable"),
        ("no url", "register.url"),
        ("sqlite://", "register.in_memory"),
        ("sqlite:///:memory:", "register.in_memory"),
        ("sqlite:///file:x?mode=memory&uri=true", "register.in_memory"),
    ],
)
def test_a_register_that_cannot_be_opened_is_an_environment_problem(terminal: Terminal, url: str, error: str) -> None:
    terminal.write_job()
    told = terminal.gristmill("status", "--json", GRISTMILL_DATABASE_URL=url).refused(error, code=ExitCode.ENVIRONMENT)
    assert told["key"] == "GRISTMILL_DATABASE_URL"


def test_a_root_that_cannot_be_made_is_an_environment_problem(terminal: Terminal) -> None:
    root = terminal.write_job() / "root"  # below a file
    told = terminal.gristmill("status", "--root", str(root), "--json").refused("store.folder", code=ExitCode.ENVIRONMENT)
    assert told["file"] == str(root)


def test_a_bug_of_ours_is_called_one_and_its_traceback_is_shown_only_when_asked_for(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("batch_assets.flows.check.check_job", fail)
    terminal.write_job()
    ended: Ended = terminal.gristmill("check", "--json")
    assert (ended.code, ended.json["error"]["code"]) == (ExitCode.BUG, "bug")
    assert "Traceback" not in ended.err
    assert "GRISTMILL_DEBUG=1" in ended.err
    assert "Traceback" in terminal.gristmill("check", GRISTMILL_DEBUG="1").err
