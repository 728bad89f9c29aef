"""Time: when a lease has lapsed, by whose clock, and that a wrong clock costs work, never a row."""

import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from batch_assets.core.errors import StaleGenerationError, StaleLeaseError
from batch_assets.core.leasing import LeaseObserver, ShardState
from batch_assets.stores.register import LeadRow, LeasedShard, Register
from batch_assets.stores.sql.migrations.r0002_postgresql import CLOCK
from tests.register.test_database import start
from tests.support.registers import JOB, planned

LEASE_S = 90.0
START = datetime(2026, 1, 1, tzinfo=UTC)
SetClock = Callable[[float], None]


@pytest.fixture
def set_clock(tables_in_postgres: str, register_on_postgres: Register) -> Iterator[SetClock]:
    """Sets what the database calls now, in seconds since the test began, to the microsecond."""
    register = register_on_postgres
    stopped = "create or replace function gristmill_now() returns timestamptz language sql volatile as 'select at from stopped_clock'"
    with register.writing() as connection:
        connection.execute(text("create table if not exists stopped_clock (at timestamptz)"))
        connection.execute(text("delete from stopped_clock"))
        connection.execute(text("insert into stopped_clock values (:at)"), {"at": START})
        connection.execute(text(stopped))

    def set_clock(seconds: float) -> None:
        with register.writing() as connection:
            connection.execute(text("update stopped_clock set at = :at"), {"at": START + timedelta(seconds=seconds)})

    yield set_clock
    with register.writing() as connection:
        connection.execute(text(CLOCK.replace("create function", "create or replace function")))
        connection.execute(text("drop table stopped_clock"))


def lapsed(register: Register, version: str) -> list[LeasedShard]:
    """What a leader that has just started, at any time of its own, finds."""
    return register.lapsed(JOB, version, observer=LeaseObserver(lease_s=LEASE_S), now_s=0.0)


def test_on_postgresql_a_lease_lapses_exactly_at_its_end(register_on_postgres: Register, set_clock: SetClock):
    register, version = register_on_postgres, planned(register_on_postgres)
    lease = register.claim(job=JOB, version=version, worker="a")
    set_clock(89.999999)
    assert lapsed(register, version) == []
    set_clock(90)
    assert lapsed(register, version) == [LeasedShard(number=lease.shard, epoch=1, renewals=0, owner="a")]


def test_on_postgresql_a_renewal_begins_the_lease_anew(register_on_postgres: Register, set_clock: SetClock):
    register, version = register_on_postgres, planned(register_on_postgres)
    lease = register.claim(job=JOB, version=version, worker="a")
    set_clock(60)
    register.renew(lease)
    set_clock(149.999999)
    assert lapsed(register, version) == []
    set_clock(150)
    assert [found.renewals for found in lapsed(register, version)] == [1]


def test_a_renewal_after_the_clock_proposed_the_end_keeps_the_lease(register_on_postgres: Register, set_clock: SetClock):
    register, version = register_on_postgres, planned(register_on_postgres)
    lease = register.claim(job=JOB, version=version, worker="a")
    set_clock(90)
    seen = lapsed(register, version)[0]
    register.renew(lease)
    assert not register.expire(job=JOB, version=version, shard=seen.number, epoch=seen.epoch, renewals=seen.renewals)
    register.stage(lease, slots=1, seconds=1)


def test_a_database_clock_that_leaps_ahead_costs_the_lease_and_no_row(register_on_postgres: Register, set_clock: SetClock):
    register, version = register_on_postgres, planned(register_on_postgres, shards=1)
    old = register.claim(job=JOB, version=version, worker="a")
    set_clock(5 * 3600)
    for seen in lapsed(register, version):
        register.expire(job=JOB, version=version, shard=seen.number, epoch=seen.epoch, renewals=seen.renewals)
    new = register.claim(job=JOB, version=version, worker="b")
    with pytest.raises(StaleLeaseError):
        register.stage(old, slots=1, seconds=1)
    register.stage(new, slots=2, seconds=1)
    assert register.staged(JOB, version, 10)[0].staged_slots == 2


def test_a_database_clock_that_goes_back_ends_nothing(register_on_postgres: Register, set_clock: SetClock):
    register, version = register_on_postgres, planned(register_on_postgres)
    register.claim(job=JOB, version=version, worker="a")
    set_clock(-5 * 3600)
    assert lapsed(register, version) == []


def has_lapsed(register: Register, version: str, seen: LeadRow) -> bool:
    return register.lead_has_lapsed(seen, job=JOB, version=version, observer=LeaseObserver(lease_s=LEASE_S), now_s=0.0)


def test_on_postgresql_a_lead_lapses_exactly_at_its_end_and_is_taken_by_generation(register_on_postgres: Register, set_clock: SetClock):
    register, version = register_on_postgres, planned(register_on_postgres)
    assert register.take_lead(job=JOB, version=version, holder="a", seen=None) == 1
    set_clock(30)
    register.renew_lead(job=JOB, version=version, generation=1)
    seen = register.lead(JOB, version)
    set_clock(119.999999)
    assert not has_lapsed(register, version, seen)
    set_clock(120)
    assert has_lapsed(register, version, seen)
    assert register.take_lead(job=JOB, version=version, holder="b", seen=seen) == 2
    assert not has_lapsed(register, version, seen)
    with pytest.raises(StaleGenerationError):
        register.renew_lead(job=JOB, version=version, generation=1)


def test_on_sqlite_a_lease_lapses_by_what_one_observer_saw(tmp_path):
    register = Register(f"sqlite:///{tmp_path}/register.db")
    register.create()
    version = planned(register)
    lease = register.claim(job=JOB, version=version, worker="a")
    observer: LeaseObserver[tuple[int, int]] = LeaseObserver(lease_s=LEASE_S)
    look = lambda now_s: [found.renewals for found in register.lapsed(JOB, version, observer=observer, now_s=now_s)]
    assert look(1e6) == []
    register.renew(lease)
    assert look(1e6 + 60) == []
    assert look(1e6 + 149.999) == []
    assert look(1e6 + 150) == [1]
    register.close()


@pytest.mark.slow
def test_wall_clocks_that_are_hours_apart_end_no_lease_that_is_renewed(register: Register, database_url: str):
    """A leader ends the silent worker's lease and not the other's, although neither wall clock is anywhere near the other."""
    assert shutil.which("faketime"), "apt-get install faketime"
    version = planned(register, shards=2)
    processes = [
        start("work", database_url, JOB, version, "renewing", "6", clock="-5h"),
        start("lead", database_url, JOB, version, "4", "8", clock="+5h"),
    ]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    silent = register.claim(job=JOB, version=version, worker="silent")
    began_s = time.time()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    (worked, _), (led, _) = [process.communicate(timeout=120) for process in processes]
    # Each says first what time it believes it to be.
    believed_s = [float(output.split()[1]) - began_s for output in (led, worked)]
    assert abs(believed_s[0] - believed_s[1]) > 9 * 3600
    assert led.splitlines()[1:] == [f"expired {silent.shard} 1"]
    assert worked.splitlines()[1:] == ["staged 2 1"]
    assert register.counts(JOB, version)[ShardState.STAGED] == 1
    with pytest.raises(StaleLeaseError):
        register.stage(silent, slots=1, seconds=1)
