"""A database that is away, restarts, or whose answer is lost: each call is made again and answers as the first would have."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError

from batch_assets.core.leasing import HoldReason, LeaseEnd, ShardState
from batch_assets.stores.register import CommittedShard, Lease, Register
from batch_assets.stores.sql.retries import is_passing
from tests.register.conftest import OpenRegister
from tests.support.postgres import Server
from tests.support.registers import JOB, planned, spec


def lose_the_next_answer(register: Register) -> None:
    """The next commit is done, and the connection breaks before its acknowledgement arrives."""
    dialect = register._opened().dialect
    commit = dialect.do_commit

    def committed_unheard(connection: Any) -> None:
        dialect.do_commit = commit
        commit(connection)
        connection.dbapi_connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    dialect.do_commit = committed_unheard


@pytest.fixture
def register(register_on_postgres: Register) -> Register:
    """Only a server can go away."""
    return register_on_postgres


def leased(register: Register, version: str) -> Lease:
    lease = register.claim(job=JOB, version=version, worker="w")
    assert lease is not None
    return lease


TRANSITIONS: dict[str, Callable[[Register, str, Lease], object]] = {
    "renew": lambda register, _, lease: register.renew(lease),
    "stage": lambda register, _, lease: register.stage(lease, slots=2, seconds=1),
    "release": lambda register, _, lease: register.release(lease, end=LeaseEnd.DRAINED),
    "expire": lambda register, version, lease: register.expire(job=JOB, version=version, shard=lease.shard, epoch=1, renewals=0),
    "block": lambda register, version, lease: register.block(job=JOB, version=version, generation=1, shard=lease.shard, reason="x"),
    "renew_lead": lambda register, version, _: register.renew_lead(job=JOB, version=version, generation=1),
    "leave_lead": lambda register, version, _: register.leave_lead(job=JOB, version=version, generation=1),
    "hold": lambda register, version, _: register.hold_version(job=JOB, version=version, reason=HoldReason.BREAKER),
    "register": lambda register, version, _: register.register_version(spec(prompt="new"), kind="full"),
}


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_transition_whose_answer_was_lost_is_done_once(register: Register, transition: str):
    version = planned(register)
    register.take_lead(job=JOB, version=version, holder="leader", seen=None)
    lease = leased(register, version)
    lose_the_next_answer(register)
    TRANSITIONS[transition](register, version, lease)
    row = register.shards(JOB, version, [lease.shard])[0]
    states = {"stage": ShardState.STAGED, "release": ShardState.PENDING, "expire": ShardState.PENDING, "block": ShardState.BLOCKED}
    assert (row.state, row.epoch, row.losses) == (states.get(transition, ShardState.LEASED), 1, 1 if transition == "expire" else 0)
    assert len(register.versions(JOB)) == (2 if transition == "register" else 1)


def test_a_claim_whose_answer_was_lost_is_the_same_claim(register: Register):
    version = planned(register)
    lose_the_next_answer(register)
    lease = leased(register, version)
    assert (lease.shard, lease.epoch) == (1, 1)
    assert register.counts(JOB, version)[ShardState.LEASED] == 1
    assert leased(register, version).shard == 2


def test_a_commit_whose_answer_was_lost_is_done_once(register: Register):
    version = planned(register)
    register.take_lead(job=JOB, version=version, holder="leader", seen=None)
    register.stage(leased(register, version), slots=2, seconds=1)
    lose_the_next_answer(register)
    rows = register.commit(job=JOB, version=version, generation=1, shards=[CommittedShard(number=1, round=0, epoch=1)])
    assert [row.state for row in rows] == [ShardState.COMMITTED]


def test_a_lead_whose_answer_was_lost_is_not_shared(register: Register):
    """It waits like any other: a second process under that name must not lead under the same generation."""
    version = planned(register)
    lose_the_next_answer(register)
    assert register.take_lead(job=JOB, version=version, holder="a", seen=None) is None
    assert register.take_lead(job=JOB, version=version, holder="a", seen=register.lead(JOB, version)) == 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["restart", "crash"])
def test_a_call_outlasts_a_server_that_goes_and_comes_back(register: Register, postgres_server: Server, how: signal.Signals):
    version = planned(register)
    lease = leased(register, version)
    postgres_server.stop(how)
    renewal = threading.Thread(target=register.renew, args=(lease,))
    renewal.start()
    time.sleep(1)
    assert renewal.is_alive()
    postgres_server.start()
    renewal.join()
    assert register.leased(JOB, version)[0].renewals == 1


def test_a_process_that_sleeps_inside_a_transaction_does_not_keep_its_locks(open_register: OpenRegister, register: Register):
    with register.reading() as connection:
        limits = [connection.scalar(text(f"show {name}")) for name in ("idle_in_transaction_session_timeout", "lock_timeout")]
    assert limits == ["15s", "30s"]


def test_what_a_caller_did_wrong_is_not_tried_again(register: Register):
    began_s = time.monotonic()
    with pytest.raises(IntegrityError) as raised:
        register.worker_started(worker_id="a", job="nothing", version="v0001-000000", host="h", pid=1)
    assert not is_passing(raised.value)
    assert time.monotonic() - began_s < 10


def test_a_broken_deadlock_is_tried_again(register: Register):
    version = planned(register, shards=2)
    meet = threading.Barrier(2, timeout=30)
    errors: list[DBAPIError] = []

    def lock(first: int, second: int) -> None:
        try:
            with register.writing() as connection:
                for number in (first, second):
                    connection.execute(text(f"update shards set renewals = 0 where number = {number}"))
                    if number == first:
                        meet.wait()
        except DBAPIError as error:
            errors.append(error)

    threads = [threading.Thread(target=lock, args=numbers) for numbers in ((1, 2), (2, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    assert is_passing(errors[0])
    assert leased(register, version).shard == 1
