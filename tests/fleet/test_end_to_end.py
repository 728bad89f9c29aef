"""Real worker processes (scripted engine), real register, logs and Delta table: whatever is killed, each record stands there once."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from batch_assets.core.leasing import HoldReason, ShardState, VersionState
from batch_assets.fleet.supervisor import SupervisionReport, supervise
from batch_assets.flows.planner import plan
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import load_job
from batch_assets.stores.register import ShardRow
from tests.support.jobs import records, settings_in, write_job
from tests.support.models import stub_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PATIENCE_S = 120.0
RECORDS = 240
SHARD_RECORDS = 40
SLOW = {"max_num_seqs": 8, "answers_per_poll": 4, "poll_s": 0.05}  # about 80 records a second: time to be killed in the middle


@dataclass
class Job:
    """A planned version of real files, and one supervising run in a thread of its own."""

    installation: Installation
    name: str
    version: str
    workers: int = 2
    announced: list[int] = field(default_factory=list)
    reports: list[SupervisionReport] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def supervise(self, *, holder: str = "run-1", wanted: Sequence[int] | None = None) -> SupervisionReport:
        return supervise(
            self.installation,
            job=self.name,
            version=self.version,
            wanted=wanted,
            workers=self.workers,
            holder=holder,
            speed={},
            announce=self._announce,
            progress=lambda _: None,
            should_stop=self.stop.is_set,
        )

    def _announce(self, rows: Sequence[ShardRow]) -> None:
        self.announced += [row.number for row in rows]

    def in_a_thread(self, *, holder: str = "run-1") -> threading.Thread:
        def run() -> None:
            try:
                self.reports.append(self.supervise(holder=holder))
            except BaseException as error:
                self.errors.append(error)
                raise

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def living(self) -> list[psutil.Process]:
        rows = self.installation.register.workers(self.name, self.version, alive_only=True)
        return [psutil.Process(row.pid) for row in rows if psutil.pid_exists(row.pid)]

    def shards(self) -> list[ShardRow]:
        return self.installation.register.shards(self.name, self.version)

    def answered_slots(self) -> int:
        root = Path(self.installation.settings.root) / self.name / "versions" / self.version / "log"
        return sum(1 for path in root.glob("shard-*/*.arrow") if path.stem != "00000000")

    def assert_every_record_once(self) -> None:
        spec = self.installation.specs().read(self.name, self.version)
        rows = self.installation.outcomes(job=self.name, version=self.version, answer_schema=spec.answer_schema).read()
        assert sorted(rows["record_id"]) == sorted(str(row["ticket_id"]) for row in records(RECORDS))
        assert set(rows["outcome"]) == {"result"}
        assert set(rows["acl"]) == {"support"}
        assert self.installation.register.version(self.name, self.version).state is VersionState.FINISHED


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    model = stub_model(tmp_path / "models" / "stub")
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SLOW), encoding="utf-8")
    settings = settings_in(tmp_path / "root", jobs=tmp_path / "jobs", engine_script=str(script), lease_s=10.0, renew_s=1.0, flush_s=0.2)
    job_file = write_job(tmp_path / "jobs" / "tickets", records(RECORDS), model=model, run={"shard_records": SHARD_RECORDS})
    installation = Installation.open(settings)
    report = plan(installation, load_job(job_file, environment={}))
    made = Job(installation, report.job, report.version)
    yield made
    made.stop.set()
    for row in installation.register.workers(made.name, made.version, alive_only=False):
        if psutil.pid_exists(row.pid) and row.worker_id in psutil.Process(row.pid).cmdline():
            os.kill(row.pid, signal.SIGKILL)
    installation.register.close()


def until(condition: Callable[[], object]) -> None:
    """Waits for something that other processes do."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not happen"
        time.sleep(0.05)


def suspended_owner(job: Job) -> psutil.Process:
    """A worker that was stopped while it held a shard."""
    register = job.installation.register
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        pids = {row.worker_id: row.pid for row in register.workers(job.name, job.version)}
        for lease in register.leased(job.name, job.version):
            process = psutil.Process(pids[lease.owner])
            process.suspend()
            if any(held.owner == lease.owner for held in register.leased(job.name, job.version)):
                return process
            process.resume()
        time.sleep(0.05)
    raise AssertionError("nobody holds a shard")


def test_a_version_is_answered_by_worker_processes_and_each_record_stands_in_the_table_once(job: Job) -> None:
    report = job.supervise()
    assert report.pending == report.blocked == ()
    assert sorted(job.announced) == [row.number for row in job.shards()]
    job.assert_every_record_once()
    until(lambda: not job.living())


def test_a_worker_killed_in_the_middle_of_a_shard_is_replaced_and_the_version_finishes(job: Job) -> None:
    thread = job.in_a_thread()
    until(lambda: job.answered_slots() > 2 and job.living())
    job.living()[0].kill()
    thread.join(PATIENCE_S)
    assert job.errors == []
    assert job.reports[0].pending == ()
    job.assert_every_record_once()
    assert max(row.epoch for row in job.shards()) >= 2
    assert len(job.installation.register.workers(job.name, job.version, alive_only=False)) == 3


def test_a_killed_supervisor_leaves_its_workers_to_the_next_one(job: Job, tmp_path: Path) -> None:
    """They are adopted, no model is loaded again, and nothing stands in the table twice."""
    script = (
        "import sys\n"
        "from batch_assets.fleet.supervisor import supervise\n"
        "from batch_assets.settings import Settings\n"
        "from batch_assets.stores.installation import Installation\n"
        "import os\n"
        "installation = Installation.open(Settings.from_environment(os.environ))\n"
        "supervise(installation, job=sys.argv[1], version=sys.argv[2], wanted=None, workers=2,\n"
        "          holder='run-0', speed={}, announce=lambda _: None, progress=lambda _: None, should_stop=lambda: False)\n"
    )
    environment = {**os.environ, **job.installation.settings.as_environment()}
    first = subprocess.Popen([sys.executable, "-c", script, job.name, job.version], env=environment)
    until(lambda: job.answered_slots() > 2 and len(job.living()) == 2)
    first.kill()
    first.wait()
    before = {process.pid for process in job.living()}
    report = job.supervise(holder="run-1")
    assert report.pending == ()
    job.assert_every_record_once()
    started = job.installation.register.workers(job.name, job.version, alive_only=False)
    assert before <= {row.pid for row in started}
    assert len(started) == 2
    assert job.installation.register.lead(job.name, job.version).generation == 2


def test_two_runs_at_once_have_one_fleet_and_both_see_every_shard(job: Job) -> None:
    other = Job(job.installation, job.name, job.version)
    threads = [job.in_a_thread(holder="run-1"), other.in_a_thread(holder="run-2")]
    for thread in threads:
        thread.join(PATIENCE_S)
    assert job.errors == other.errors == []
    numbers = [row.number for row in job.shards()]
    assert sorted(job.announced) == sorted(other.announced) == numbers
    assert sorted([job.reports[0].followed, other.reports[0].followed]) == [False, True]
    assert len(job.installation.register.workers(job.name, job.version, alive_only=False)) == 2
    job.assert_every_record_once()


def test_a_cancelled_run_gives_its_shards_back_and_the_next_one_goes_on_where_it_stopped(job: Job) -> None:
    thread = job.in_a_thread()
    until(lambda: job.answered_slots() > 2)
    job.stop.set()
    thread.join(PATIENCE_S)
    assert job.errors == []
    assert job.reports[0].held is HoldReason.CANCELLED
    assert job.living() == []
    assert all(row.state is not ShardState.LEASED and row.losses == 0 for row in job.shards())
    job.stop.clear()
    job.installation.register.lift_version_hold(job=job.name, version=job.version)
    assert job.supervise(holder="run-2").pending == ()
    job.assert_every_record_once()
    assert sum(row.stats["redone"] for row in job.shards()) == 0


def test_a_worker_that_is_stopped_for_longer_than_its_lease_adds_nothing_when_it_wakes(job: Job) -> None:
    thread = job.in_a_thread()
    until(lambda: job.answered_slots() > 2)
    sleeper = suspended_owner(job)
    until(lambda: any(row.losses for row in job.shards()))
    sleeper.resume()
    thread.join(PATIENCE_S)
    assert job.errors == []
    assert job.reports[0].pending == ()
    job.assert_every_record_once()
