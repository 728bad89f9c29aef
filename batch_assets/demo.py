"""`gristmill demo`: the main job on the embedded defaults with a real model, in an installation of its own, one worker killed on purpose.

Every figure is read back from the tables, the source file and the engine's own journal; an equation that is not true ends the demo with 1.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from batch_assets.core.errors import ExitCode, Problem, RefusedError
from batch_assets.core.identity import short
from batch_assets.core.leasing import WorkerState
from batch_assets.core.records import Outcome
from batch_assets.core.request_ids import request_parts
from batch_assets.core.spec import VersionSpec
from batch_assets.engines.journal import JOURNAL_VARIABLE, JournalKind, read_journal
from batch_assets.flows.judge import Verdict, latest_verdict
from batch_assets.launch import RunRequest, execute
from batch_assets.reading import read_alias
from batch_assets.settings import Settings
from batch_assets.stores.installation import Installation
from batch_assets.stores.models import SMOLLM2_NAME, forget_hashes, smollm2, verify_model
from batch_assets.stores.register import VersionRow, WorkerRow

MARKER = ".gristmill-demo"
KEPT = ("models", MARKER)  # the converted model: the same bytes each time, a minute to make
KILL_FROM = 0.38  # of the records to answer
IN_FLIGHT_MIN = 8
POLL_S = 0.1


@dataclass(slots=True)
class Kill:
    """The deliberate kill, once it has happened."""

    worker: int = 0
    done_percent: int = 0


def run_demo(settings: Settings, *, job_file: Path) -> ExitCode:
    """Fresh installation, one run with a kill, one run more that must cost nothing. Prints as it goes."""
    _fresh_root(settings)
    os.environ.setdefault("TQDM_DISABLE", "1")  # the conversion's bars are no output of the demo
    models = Path(os.environ.setdefault("MODELS", str(Path(settings.root) / "models")))
    manifest = smollm2(models / SMOLLM2_NAME)
    forget_hashes()
    started_s = time.monotonic()
    verify_model(models / SMOLLM2_NAME, manifest.digest)
    verified_s = time.monotonic() - started_s
    journal = Path(settings.root) / "engine-journal.txt"
    os.environ[JOURNAL_VARIABLE] = str(journal)
    installation = Installation.open(settings)
    killer = Killer(installation, job=job_file.parent.name)
    killer.start()
    started_s = time.monotonic()
    ended = execute(settings, job_file, RunRequest(by="demo"))
    killer.stop()
    if ended.error is not None:
        raise ended.error
    figures = Figures(installation, job=job_file.parent.name, version=str(ended.version), journal=journal)
    _say("plan", figures.plan)
    _say("model", f"{SMOLLM2_NAME} {short(manifest.digest)}…  verified in {verified_s:.1f} s          {figures.recipe}")
    _say("answer", figures.answered)
    _say("", f"worker {killer.kill.worker} killed at {killer.kill.done_percent} % (kill -9, on purpose): {figures.redone}")
    _say("count", figures.equation)
    _say("gate", figures.gate)
    _say("publish", figures.published)
    calls_before = figures.model_calls
    again = execute(settings, job_file, RunRequest(by="demo"))
    calls = Figures(installation, job=job_file.parent.name, version=str(ended.version), journal=journal).model_calls - calls_before
    _say("again", f"same input, same recipe: {calls} model calls")
    _say("", "")
    _say("look", f'gristmill query "select category, count(*) n from {figures.alias} group by 1 order by n desc"')  # noqa: S608  for people
    _say("shell", _shell_line(settings, models))
    untrue = [
        *figures.untrue(source=job_file.parent / "tickets.jsonl"),
        *([] if calls == 0 and again.error is None else ["the second run asked the model again"]),
        *([] if killer.kill.worker else ["no worker was killed: the run ended before one had enough in flight"]),
    ]
    for line in untrue:
        _say("UNTRUE", line)
    return ExitCode.BUG if untrue else ExitCode.DONE


def _shell_line(settings: Settings, models: Path) -> str:
    """What makes the commands above work in the reader's shell, wherever the demo was started."""
    activate = Path(sys.executable).parent / "activate"
    return f"source {_here(activate)} && export GRISTMILL_ROOT={_here(Path(settings.root))} MODELS={_here(models)}"


def _here(path: Path) -> str:
    return f"$PWD/{path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else str(path)


def _say(name: str, text: str) -> None:
    print(f"{name:9} {text}", flush=True)


def _fresh_root(settings: Settings) -> None:
    """An installation of the demo's own: emptied at each start, and refused when it is somebody's."""
    root = Path(settings.root)
    if root.exists() and any(root.iterdir()) and not (root / MARKER).exists():
        raise RefusedError(
            Problem(
                code="demo.root",
                file=str(root),
                what="the demo empties its root, and this folder was not made by a demo",
                expected="an empty or missing folder",
                found=f"{sum(1 for _ in root.iterdir())} entries",
                fix="gristmill demo --root .demo",
            )
        )
    root.mkdir(parents=True, exist_ok=True)
    (root / MARKER).touch()
    for entry in root.iterdir():
        if entry.name not in KEPT:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


class Killer(threading.Thread):
    """Kills the second worker once about 40 % is answered and it has enough in flight."""

    def __init__(self, installation: Installation, *, job: str) -> None:
        super().__init__(daemon=True)
        self._register = installation.register
        self._job = job
        self._stopped = threading.Event()
        self.kill = Kill()

    def run(self) -> None:
        """Look, until it has killed or is stopped."""
        while not self._stopped.wait(POLL_S) and not self.kill.worker:
            self._look()

    def stop(self) -> None:
        """The run has ended."""
        self._stopped.set()
        self.join()

    def _look(self) -> None:
        versions = self._register.versions(self._job)
        if not versions or not versions[-1].to_answer:
            return
        workers = self._register.workers(self._job, versions[-1].name, alive_only=True)
        answered = sum(worker.counters.get("answered", 0) + worker.counters.get("dead", 0) for worker in workers)
        share = answered / versions[-1].to_answer
        victim = self._victim(workers)
        if share >= KILL_FROM and victim is not None:
            os.kill(victim.pid, signal.SIGKILL)
            self.kill = Kill(
                worker=sorted(worker.worker_id for worker in workers).index(victim.worker_id) + 1, done_percent=round(100 * share)
            )

    def _victim(self, workers: Sequence[WorkerRow]) -> WorkerRow | None:
        busy = [
            worker
            for worker in workers
            if worker.state is WorkerState.RUNNING
            and worker.counters.get("in_flight", 0) >= IN_FLIGHT_MIN
            and worker.counters.get("answered", 0) > 0
        ]
        return max(busy, key=lambda worker: worker.worker_id, default=None)


class Figures:
    """What the tables say after a run, and whether it adds up."""

    def __init__(self, installation: Installation, *, job: str, version: str, journal: Path) -> None:
        self._installation = installation
        self._job = job
        self._row: VersionRow = installation.register.version(job, version)
        self._spec: VersionSpec = installation.specs().read(job, version)
        self._journal = Counter(_completions(journal))
        self.alias = next(row.alias for row in installation.aliases().all() if row.job == job)
        self._release = read_alias(self.alias, root=installation.settings.root).collect()
        self._verdict: Verdict | None = latest_verdict(installation, job=job, version=version)

    @property
    def plan(self) -> str:
        """What was planned, as the register has it."""
        row = self._row
        aside = ", ".join(
            f"{count} {name.replace('_', ' ')}" for name, count in sorted(row.set_aside_by_class.items(), key=lambda i: -i[1])
        )
        surplus = f", {row.surplus} surplus cop{'y' if row.surplus == 1 else 'ies'}" if row.surplus else ""
        return (
            f"{row.records} tickets at {row.snapshot_label} -> {row.name}: {row.shards} shards, {row.to_answer} to answer, "
            f"{sum(row.set_aside_by_class.values())} set aside ({aside}){surplus}"
        )

    @property
    def recipe(self) -> str:
        """Prompt and schema by digest."""
        return f"prompt {short(self._spec.recipe.prompt_digest)}   schema {short(self._spec.recipe.schema_digest)}"

    @property
    def answered(self) -> str:
        """Records that the workers brought to an end, and how fast, over the time that shards were held."""
        shards = self._installation.register.shards(self._job, self._row.name)
        workers = self._installation.register.workers(self._job, self._row.name, alive_only=False)
        done = self._release.filter(~pl.col("dead_class").is_in(list(self._row.set_aside_by_class)) | pl.col("dead_class").is_null()).height
        per_worker = sum(float(shard.seconds or 0) for shard in shards) / max(1, min(len(workers), 2))
        return f"{done} of {self._row.to_answer} · {min(len(workers), 2)} workers · {done / per_worker if per_worker else 0:.1f} rows/s"

    @property
    def redone(self) -> str:
        """From the engine's journal: an attempt that completed twice was computed again."""
        again = sum(count - 1 for count in self._journal.values())
        return f"{again} answers computed again, {self._lost} lost, {self._twice} twice"

    @property
    def _results(self) -> int:
        return self._release.filter(pl.col("outcome") == Outcome.RESULT.value).height

    @property
    def _dead(self) -> int:
        return self._release.filter(pl.col("outcome") == Outcome.DEAD_LETTER.value).height

    @property
    def _surplus(self) -> int:
        return int(self._release["surplus"].sum() or 0)

    @property
    def _lost(self) -> int:
        return self._row.records - self._row.surplus - self._release["record_id"].n_unique()

    @property
    def _twice(self) -> int:
        return self._release.height - self._release["record_id"].n_unique()

    @property
    def equation(self) -> str:
        """I4, counted in the published table."""
        surplus = f"{self._surplus} surplus cop{'y' if self._surplus == 1 else 'ies'}"
        return f"{self._results} results + {self._dead} dead letters + {surplus} = {self._row.records} records, proven by key"

    @property
    def gate(self) -> str:
        """Checks passed, and how often the small model is right by the labels."""
        checks = self._verdict.checks if self._verdict else ()
        passed = sum(result.passed for result in checks)
        return (
            f"{passed} of {len(checks)} checks passed        category right in {self.right_percent:.0f} % "
            "(a 135 M model: this demo shows bookkeeping, not wisdom)"
        )

    @property
    def right_percent(self) -> float:
        """Share of results whose category equals the label."""
        labelled = self._release.filter((pl.col("outcome") == Outcome.RESULT.value) & pl.col("labels").is_not_null())
        if labelled.is_empty():
            return 0.0
        right = sum(
            json.loads(labels).get("category") == category for labels, category in labelled.select("labels", "category").iter_rows()
        )
        return 100 * right / labelled.height

    @property
    def published(self) -> str:
        """Where readers are pointed now."""
        live = self._installation.aliases().read(self.alias)
        return f"{self.alias} -> {live.version if live else 'nothing'}      rollback: gristmill rollback {self._job}"

    @property
    def model_calls(self) -> int:
        """Completions in the engine's journal, repeated ones included."""
        return sum(self._journal.values())

    def untrue(self, *, source: Path) -> Iterator[str]:
        """Every printed equation that does not hold. The source is read here by itself, line by line."""
        lines = [json.loads(line) for line in source.read_bytes().split(b"\n") if line.strip()]
        ids = {line["ticket_id"] for line in lines}
        if self._results + self._dead + self._surplus != len(lines):
            yield f"{self._results} + {self._dead} + {self._surplus} is not {len(lines)}, the lines of {source.name}"
        if set(self._release["record_id"]) != ids:
            yield f"keys differ: {len(ids ^ set(self._release['record_id']))} are in only one of source and table"
        if self._lost or self._twice:
            yield f"{self._lost} lost, {self._twice} twice"
        if self._release["recipe"].n_unique() != 1:
            yield "the table holds more than one recipe"
        if self._verdict is None or not self._verdict.passed:
            yield "the gate did not pass"
        live = self._installation.aliases().read(self.alias)
        if live is None or live.version != self._row.name:
            yield "readers do not get this version"
        answered = [json.loads(labels)["category"] for labels in self._release["labels"].drop_nulls()]
        if not answered:
            yield "no labels: the accuracy line means nothing"


def _completions(journal: Path) -> Iterator[tuple[str, int]]:
    """(record id, attempt) of completed requests; the warm-up is about no record."""
    for line in read_journal(journal):
        parts = request_parts(line.request_id) if line.kind is JournalKind.COMPLETE else None
        if parts is not None:
            yield parts.record_id, parts.attempt
