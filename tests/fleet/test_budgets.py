"""Real worker processes under a real supervisor: one record must not hurt the others, and one bad worker must not hurt the records."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import psutil
import pytest

from batch_assets.core import breakers, supervision
from batch_assets.core.breakers import UNFIT_IN_A_ROW_MAX
from batch_assets.core.leasing import HoldReason, VersionState
from batch_assets.fleet.supervisor import SupervisionReport, supervise
from batch_assets.flows.planner import plan
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import load_job
from batch_assets.stores.register import WorkerRow
from tests.support.jobs import records, settings_in, write_job
from tests.support.models import stub_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
RECORDS = 120
SHARD_RECORDS = 40
ENGINE = {"max_num_seqs": 8, "answers_per_poll": 4}


@dataclass
class Job:
    """A planned version of real files, and a script that its workers' engines follow."""

    installation: Installation
    name: str
    version: str
    script: Path

    def behave(self, *behaviours: Mapping[str, object]) -> None:
        self.script.write_text(json.dumps({**ENGINE, "behaviours": behaviours}), encoding="utf-8")

    def supervise(self, *, workers: int) -> SupervisionReport:
        return supervise(
            self.installation,
            job=self.name,
            version=self.version,
            wanted=None,
            workers=workers,
            holder="run-1",
            speed={},
            announce=lambda _: None,
            progress=lambda _: None,
            should_stop=lambda: False,
        )

    def outcomes(self) -> pl.DataFrame:
        spec = self.installation.specs().read(self.name, self.version)
        return self.installation.outcomes(job=self.name, version=self.version, answer_schema=spec.answer_schema).read()

    def dead(self) -> dict[str, tuple[str, int]]:
        rows = self.outcomes().filter(pl.col("outcome") == "dead_letter")
        return {row["record_id"]: (row["dead_class"], row["attempt"]) for row in rows.iter_rows(named=True)}

    def workers(self) -> list[WorkerRow]:
        return self.installation.register.workers(self.name, self.version, alive_only=False)

    def assert_all_others_answered(self, *dead: str) -> None:
        rows = self.outcomes()
        assert sorted(rows["record_id"]) == sorted(str(row["ticket_id"]) for row in records(RECORDS))
        results = rows.filter(pl.col("outcome") == "result")
        assert set(rows["record_id"]) - set(results["record_id"]) == set(dead)
        assert results["attempt"].max() == 1, "a neighbour has used up an attempt"
        assert self.installation.register.version(self.name, self.version).state is VersionState.FINISHED


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    script = tmp_path / "script.json"
    settings = settings_in(tmp_path / "root", jobs=tmp_path / "jobs", engine_script=str(script), lease_s=10.0, renew_s=1.0, flush_s=0.2)
    model = stub_model(tmp_path / "models" / "stub")
    job_file = write_job(tmp_path / "jobs" / "tickets", records(RECORDS), model=model, run={"shard_records": SHARD_RECORDS})
    installation = Installation.open(settings)
    report = plan(installation, load_job(job_file, environment={}))
    made = Job(installation, report.job, report.version, script)
    made.behave()
    yield made
    for row in made.workers():
        if psutil.pid_exists(row.pid) and row.worker_id in psutil.Process(row.pid).cmdline():
            os.kill(row.pid, signal.SIGKILL)
    installation.register.close()


@pytest.fixture
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that need not wait between starts: how many there are is the question here, not how fast they follow each other."""
    monkeypatch.setattr(supervision, "STARTS_PER_WORKER_MINUTE_MAX", 1000)


def crash(record: str) -> dict[str, object]:
    return {"act": "crash", "record": record}


def record(number: int) -> str:
    return str(records(RECORDS)[number]["ticket_id"])


def test_the_process_dies_whenever_record_13_is_in_its_batch(job: Job) -> None:
    job.behave(crash(record(13)))
    report = job.supervise(workers=1)
    assert not report.blocked
    assert not report.pending
    assert job.dead() == {record(13): ("engine_killed", 3)}
    job.assert_all_others_answered(record(13))
    assert len(job.workers()) <= 1 + 1 + 2 + 3  # the first, one for each time the group is divided, three attempts


@pytest.mark.usefixtures("quick_starts")
def test_two_killers_one_of_which_takes_its_worker_along_and_one_its_engine_only(job: Job) -> None:
    job.behave(crash(record(13)), {"act": "engine_error", "record": record(14)})
    job.supervise(workers=2)
    assert job.dead() == {record(13): ("engine_killed", 3), record(14): ("engine_killed", 3)}
    job.assert_all_others_answered(record(13), record(14))
    assert len(job.workers()) <= 2 + 2 * (1 + 2 + 3)


def test_everything_fails_alike_and_the_version_is_held_with_one_message_and_no_attempt_used(job: Job) -> None:
    job.behave({"act": "invalid"})
    report = job.supervise(workers=1)
    assert report.held is HoldReason.BREAKER
    row = job.installation.register.version(job.name, job.version)
    assert row.hold_note is not None
    assert row.hold_note.startswith("everything fails alike: none of the last ")
    assert "not_json" in row.hold_note
    assert len(job.workers()) == UNFIT_IN_A_ROW_MAX
    job.behave()
    job.installation.register.lift_version_hold(job=job.name, version=job.version)
    assert job.supervise(workers=1).held is None
    assert job.dead() == {}
    job.assert_all_others_answered()


@pytest.mark.usefixtures("quick_starts")
def test_a_machine_that_dies_of_whatever_it_is_asked_holds_the_version_and_blames_no_record(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakers, "LOST_IN_A_ROW_MAX", 5)  # fewer of the same: each is a process of some seconds
    job.behave({"act": "crash"})
    report = job.supervise(workers=1)
    assert report.held is HoldReason.BREAKER
    note = job.installation.register.version(job.name, job.version).hold_note
    assert note is not None
    assert note.startswith("5 workers died and no record was answered in between; the last: exit code -9")
    job.behave()
    job.installation.register.lift_version_hold(job=job.name, version=job.version)
    job.supervise(workers=1)
    assert job.dead() == {}
    job.assert_all_others_answered()


def test_a_record_that_fails_each_time_is_dead_after_a_restart_of_the_only_worker(job: Job) -> None:
    job.behave({"act": "invalid", "record": record(7)})
    job.supervise(workers=1)
    assert job.dead() == {record(7): ("not_json", 3)}
    job.assert_all_others_answered(record(7))
    assert len(job.workers()) == 2
