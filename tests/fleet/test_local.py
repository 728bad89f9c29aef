"""Worker processes of one host: they outlive their supervisor, are adopted, seen to exit, and stopped within the notice."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from batch_assets.core.leasing import LeaseEnd, ShardState
from batch_assets.fleet.local import LocalFleet
from batch_assets.stores.installation import Installation
from tests.support.versions import Planned, claim, installation_in, plan_by_hand

PATIENCE_S = 30.0
SLEEPER = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
WITH_CHILD = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', *sys.argv[1:]]); time.sleep(600)"
)
FAILING = "raise MemoryError('no room for: the customer wrote')"
REFUSING = """import sys; print('{"event": "refused", "text": "expected sha256:11"}', file=sys.stderr); sys.exit(6)"""


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    return plan_by_hand(installation_in(tmp_path), {1: ["a"], 2: ["b"], 3: ["c"]})


@pytest.fixture
def fleets(planned: Planned) -> Iterator[Callable[..., LocalFleet]]:
    """Makes fleets; whatever processes are left at the end are killed."""
    made: list[LocalFleet] = []

    def make(script: str = SLEEPER, *, generation: int = 1, notice_s: float = 10.0) -> LocalFleet:
        fleet = LocalFleet(
            planned.installation,
            job=planned.job,
            version=planned.version,
            generation=generation,
            speed={"max_num_seqs": 8},
            notice_s=notice_s,
            command=(sys.executable, "-c", script),
        )
        made.append(fleet)
        return fleet

    yield make
    for fleet in made:
        fleet._signal_all(signal.SIGKILL)
        fleet._wait(PATIENCE_S)


def until(condition: Callable[[], object]) -> None:
    """Waits for something that another process does."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not happen"
        time.sleep(0.02)


def exits(fleet: LocalFleet, count: int) -> list:
    """The next so many exits."""
    found: list = []
    until(lambda: found.extend(fleet.reap()) or len(found) >= count)
    return found


def workers(planned: Planned, *, alive_only: bool = True) -> list:
    return planned.installation.register.workers(planned.job, planned.version, alive_only=alive_only)


def test_started_workers_are_registered_with_their_process(planned: Planned, fleets) -> None:
    fleet = fleets()
    fleet.start(2)
    rows = workers(planned)
    assert fleet.alive == len(rows) == 2
    assert len({row.worker_id for row in rows}) == 2
    assert all(psutil.Process(row.pid).is_running() and row.worker_id in psutil.Process(row.pid).cmdline() for row in rows)


def test_workers_read_the_same_settings_and_speed_knobs(planned: Planned, fleets) -> None:
    print_settings = "from batch_assets.settings import Settings; print(Settings.from_environment(os.environ))"
    fleet = fleets(f"import os; {print_settings}; print(os.environ['GRISTMILL_ENGINE_SPEED'])")
    fleet.start(1)
    (ended,) = exits(fleet, 1)
    log = Path(ended.log_path).read_text(encoding="utf-8")
    assert str(planned.installation.settings) in log
    assert '{"max_num_seqs": 8}' in log


def test_a_worker_that_is_killed_is_seen_and_its_lease_ends_at_once(planned: Planned, fleets) -> None:
    fleet = fleets()
    fleet.start(1)
    (row,) = workers(planned)
    claim(planned, worker=row.worker_id)
    os.kill(row.pid, signal.SIGKILL)
    (ended,) = exits(fleet, 1)
    assert (ended.exit_code, ended.was_fruitful, ended.is_clean) == (-signal.SIGKILL, True, False)
    (shard,) = planned.installation.register.shards(planned.job, planned.version, [1])
    assert (shard.state, shard.previous_end, shard.losses) == (ShardState.PENDING, LeaseEnd.EXPIRED, 1)
    assert workers(planned) == []
    assert fleet.alive == 0


def test_of_a_failing_worker_s_log_only_the_class_of_the_last_line_is_told(fleets) -> None:
    fleet = fleets(FAILING)
    fleet.start(1)
    (ended,) = exits(fleet, 1)
    assert (ended.exit_code, ended.last_line_class, ended.was_fruitful, ended.own_words) == (1, "MemoryError", False, "")


def test_a_refusing_worker_is_quoted(fleets) -> None:
    fleet = fleets(REFUSING)
    fleet.start(1)
    (ended,) = exits(fleet, 1)
    assert (ended.is_refusal, ended.own_words) == (True, "expected sha256:11")


def test_stopping_waits_until_all_have_left(planned: Planned, fleets) -> None:
    fleet = fleets()
    fleet.start(2)
    pids = [row.pid for row in workers(planned)]
    assert len(fleet.stop()) == 2
    assert not any(map(psutil.pid_exists, pids))
    assert workers(planned) == []


def test_a_worker_that_does_not_listen_is_killed_after_the_notice(planned: Planned, fleets) -> None:
    fleet = fleets(DEAF, notice_s=1.0)
    fleet.start(1)
    (row,) = workers(planned)
    log = planned.installation.settings.state / "logs" / f"{row.worker_id}.log"
    until(lambda: "deaf" in log.read_text(encoding="utf-8"))
    (ended,) = fleet.stop()
    assert ended.exit_code == -signal.SIGKILL


def test_what_a_dead_worker_leaves_in_its_session_ends_with_it(planned: Planned, fleets) -> None:
    """vLLM's engine core is a process of its own."""
    fleet = fleets(WITH_CHILD)
    fleet.start(1)
    (row,) = workers(planned)
    until(lambda: psutil.Process(row.pid).children())
    (child,) = psutil.Process(row.pid).children()
    os.kill(row.pid, signal.SIGKILL)
    exits(fleet, 1)
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_the_next_supervisor_adopts_what_lives_and_sees_what_does_not(planned: Planned, fleets) -> None:
    """The supervisor is another process, and is killed."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from batch_assets.fleet.local import LocalFleet\n"
        "from tests.support.versions import installation_in\n"
        "folder, job, version = sys.argv[1:]\n"
        "import os, signal\n"
        f"command = (sys.executable, '-c', {SLEEPER!r})\n"
        "LocalFleet(installation_in(Path(folder)), job=job, version=version, generation=1, speed={}, command=command).start(2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    folder = planned.installation.settings.root
    killed = subprocess.run([sys.executable, "-c", script, folder, planned.job, planned.version], check=False)
    assert killed.returncode == -signal.SIGKILL
    first, second = workers(planned)
    claim(planned, worker=second.worker_id)
    os.kill(second.pid, signal.SIGKILL)
    fleet = fleets(generation=2)
    fleet.adopt()
    (ended,) = exits(fleet, 1)
    assert (ended.worker_id, ended.exit_code, ended.was_fruitful) == (second.worker_id, None, True)
    assert fleet.alive == 1
    fleet.stop()
    assert not psutil.pid_exists(first.pid) or psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE


def test_a_pid_that_another_process_has_now_is_not_adopted(planned: Planned, fleets) -> None:
    planned.installation.register.worker_started(
        worker_id="old", job=planned.job, version=planned.version, host=os.uname().nodename, pid=os.getpid()
    )
    fleet = fleets()
    fleet.adopt()
    assert [ended.worker_id for ended in fleet.reap()] == ["old"]
    assert workers(planned) == []


def test_workers_of_other_hosts_are_counted_and_left_alone(planned: Planned, fleets) -> None:
    planned.installation.register.worker_started(worker_id="far", job=planned.job, version=planned.version, host="elsewhere", pid=1)
    fleet = fleets()
    fleet.adopt()
    assert (fleet.alive, fleet.reap()) == (1, [])
    fleet.kill("far")
    fleet.adopt()
    assert fleet.alive == 0


def test_an_installation_without_workers_has_an_empty_fleet(planned: Planned, fleets) -> None:
    assert isinstance(planned.installation, Installation)
    fleet = fleets()
    fleet.adopt()
    assert (fleet.alive, fleet.reap(), fleet.stop()) == (0, [], [])
