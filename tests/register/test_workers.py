"""The workers table: what the fleet counts."""

import pytest

from batch_assets.core.leasing import WorkerState
from batch_assets.stores.register import Register, WorkerRow
from tests.support.registers import JOB, planned


@pytest.fixture
def version(register: Register) -> str:
    """A version without workers."""
    return planned(register)


def start(register: Register, version: str, worker: str, **known) -> None:
    register.worker_started(worker_id=worker, job=JOB, version=version, host="h", pid=7, **known)


def row(register: Register, version: str, worker: str) -> WorkerRow:
    return next(each for each in register.workers(JOB, version, alive_only=False) if each.worker_id == worker)


def test_a_worker_is_starting_until_it_is_heard_from(register: Register, version: str):
    start(register, version, "a", generation=3)
    assert (row(register, version, "a").state, row(register, version, "a").heartbeats) == (WorkerState.STARTING, 0)
    assert register.worker_heartbeat("a", {"submitted": 5, "answered": 2})
    heard = row(register, version, "a")
    assert (heard.state, heard.heartbeats, heard.counters) == (WorkerState.RUNNING, 1, {"submitted": 5, "answered": 2})


def test_fleet_and_worker_both_say_what_they_know(register: Register, version: str):
    start(register, version, "a", generation=3, process_started_s=12.5)
    register.worker_heartbeat("a", {})
    start(register, version, "a", engine_build="{}")
    found = row(register, version, "a")
    assert (found.generation, found.process_started_s, found.engine_build, found.heartbeats) == (3, 12.5, "{}", 1)


def test_a_leaving_worker_is_alive_until_it_is_gone(register: Register, version: str):
    start(register, version, "a")
    register.worker_leaving("a")
    assert register.worker_heartbeat("a", {"answered": 9})
    assert [(each.worker_id, each.state) for each in register.workers(JOB, version)] == [("a", WorkerState.LEAVING)]
    register.worker_left("a")
    register.worker_gone("a")
    assert register.workers(JOB, version) == []
    assert row(register, version, "a").counters == {"answered": 9}


def test_a_worker_that_was_declared_gone_is_told_so(register: Register, version: str):
    start(register, version, "a")
    register.worker_gone("a")
    assert not register.worker_heartbeat("a", {})
    register.worker_leaving("a")
    assert row(register, version, "a").state is WorkerState.GONE


def test_an_unknown_worker_is_told_to_leave(register: Register):
    assert not register.worker_heartbeat("nobody", {})


def test_workers_are_listed_by_version_in_the_order_they_started(register: Register, version: str):
    other = planned(register, prompt="q")
    for worker, of in (("b", version), ("a", version), ("c", other)):
        start(register, of, worker)
    assert [each.worker_id for each in register.workers(JOB, version)] == ["b", "a"]
