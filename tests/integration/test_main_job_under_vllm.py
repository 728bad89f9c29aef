"""The main job on real parts: real vLLM (tiny model), real Delta, real SQLite, real worker processes, Dagster's own instance."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from batch_assets.core.request_ids import request_parts
from batch_assets.core.shard_log import Answered
from batch_assets.engines.journal import JOURNAL_VARIABLE, JournalKind, read_journal
from batch_assets.reading import read_alias
from batch_assets.settings import Settings
from batch_assets.stores.installation import Installation
from tests.support.dagster_dev import REPOSITORY, wait_for
from tests.support.jobs import answer_schema, records, settings_in, write_job
from tests.support.models import tiny_model

pytestmark = [pytest.mark.real_vllm, pytest.mark.slow, pytest.mark.timeout(600)]
IN_FLIGHT_MIN = 8


def start_run(settings: Settings, job_file: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`gristmill run --json` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "batch_assets.cli", "run", "--job", str(job_file), "--json", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **settings.as_environment(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_vllm_answered(installation: Installation, job: str) -> None:
    """From the register, not from what the test believes."""
    assert {version.engine for version in installation.register.versions(job)} == {"vllm"}


def test_a_worker_killed_in_mid_shard_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    """SIGKILL with answers in the log, 8 in flight and some answered but not stored; the run ends by itself, exactly once each."""
    count = 160
    job_file = write_job(
        tmp_path / "jobs" / "killed",
        records(count),
        model=tiny_model(tmp_path / "models" / "tiny"),
        max_tokens=200,
        schema=answer_schema(summary_min=60, summary_max=90),
        run={"workers_max": 2, "shard_records": 60, "engine": {"max_num_seqs": 16}},
        checks={"dead_letters": {"max": "100%"}},
    )
    settings = settings_in(tmp_path / "root", engine="vllm", lease_s=20.0, renew_s=2.0, flush_s=2.0)
    journal = tmp_path / "journal.txt"
    installation = Installation.open(settings)
    run = start_run(settings, job_file, **{JOURNAL_VARIABLE: str(journal)})

    victim = wait_for(
        lambda: kill_one_in_mid_shard(installation, "killed", journal), limit_s=240, what="a worker in mid-shard", pause_s=0.05
    )
    output, errors = run.communicate(timeout=300)

    assert run.returncode == 0, errors
    summary = json.loads(output)
    assert summary["results"] + summary["dead_letters"] == count
    assert_vllm_answered(installation, "killed")
    table = read_alias("killed", root=settings.root).collect()
    assert sorted(table["record_id"]) == [f"T-{number:06d}" for number in range(count)]
    completed = Counter(
        (parts.record_id, parts.attempt)
        for line in read_journal(journal)
        if line.kind is JournalKind.COMPLETE and (parts := request_parts(line.request_id)) is not None
    )
    assert max(completed.values()) > 1, "no record was answered twice by the engine: the kill came at a quiet moment"
    assert victim not in {worker.worker_id for worker in installation.register.workers("killed", summary["job_version"], alive_only=True)}


def kill_one_in_mid_shard(installation: Installation, job: str, journal: Path) -> str | None:
    """Kills a worker, and says which, once its log holds an answer, enough is in flight and some is finished but not stored."""
    register = installation.register
    for version in register.versions(job):
        for worker in register.workers(job, version.name, alive_only=True):
            held = [lease.number for lease in register.leased(job, version.name) if lease.owner == worker.worker_id]
            stored = {entry.record_id for shard in held for entry in answers_in_log(installation, job, version.name, shard)}
            finished = {
                parts.record_id
                for line in read_journal(journal)
                if line.kind is JournalKind.COMPLETE and line.pid == worker.pid and (parts := request_parts(line.request_id)) is not None
                if parts.shard in held
            }
            if stored and finished - stored and worker.counters.get("in_flight", 0) >= IN_FLIGHT_MIN:
                os.kill(worker.pid, signal.SIGKILL)
                return worker.worker_id
    return None


def answers_in_log(installation: Installation, job: str, version: str, shard: int) -> list[Answered]:
    """Answers that are durable."""
    slots = installation.shard_log(job=job, version=version, shard=shard).read(None)
    return [entry for slot in slots for entry in (slot or ()) if isinstance(entry, Answered)]


def test_a_queued_run_of_the_old_version_uses_the_text_that_was_registered(tmp_path: Path) -> None:
    """job.yaml and prompt.md are edited after planning; the old version is answered with the old prompt, the next run is a new version."""
    job_file = write_job(
        tmp_path / "jobs" / "edited",
        records(12),
        model=tiny_model(tmp_path / "models" / "tiny"),
        max_tokens=64,
        run={"workers_max": 1, "shard_records": 12},
        checks={"dead_letters": {"max": "100%"}},
    )
    settings = settings_in(tmp_path / "root", engine="vllm", lease_s=20.0, renew_s=2.0)
    installation = Installation.open(settings)
    planned = plan_only(settings, job_file)
    old_prompt = (job_file.parent / "prompt.md").read_text(encoding="utf-8")
    (job_file.parent / "prompt.md").write_text(old_prompt.replace("Name the category", "NAME the category"), encoding="utf-8")
    job_file.write_text(job_file.read_text(encoding="utf-8").replace("max_tokens: 64", "max_tokens: 65"), encoding="utf-8")

    run = start_run(settings, job_file, "--version", planned)
    output, errors = run.communicate(timeout=300)

    assert run.returncode == 0, errors
    assert json.loads(output)["job_version"] == planned
    spec = installation.specs().read("edited", planned)
    assert spec.prompt == old_prompt
    assert spec.recipe.decoding.max_tokens == 64
    table = read_alias("edited", root=settings.root).collect()
    assert set(table["recipe"]) == {spec.recipe.digest}
    assert_vllm_answered(installation, "edited")


def plan_only(settings: Settings, job_file: Path) -> str:
    """Registers a version and leaves its shards pending, as a queued run would find them."""
    from batch_assets.flows.planner import plan
    from batch_assets.stores.job_folders import load_job

    return plan(Installation.open(settings), load_job(job_file, environment=os.environ)).version
