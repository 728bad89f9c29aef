"""What the tests of real processes run: `python -m tests.register.processes ROLE URL …`. Says `ready`, waits for a line, then acts."""

import sys
import time

from batch_assets.core.errors import StaleLeaseError
from batch_assets.core.leasing import LeaseObserver, ShardState
from batch_assets.stores.register import Lease, Register


def say(*words: object) -> None:
    """One line, at once."""
    print(*words, flush=True)


def contend(url: str, job: str, version: str, worker: str) -> None:
    """Claims, renews and stages until every shard is staged, and meanwhile ends some leases of the others, as a hasty leader would."""
    register = Register(url)
    register.create()
    say("ready")
    sys.stdin.readline()
    while register.counts(job, version)[ShardState.STAGED] < len(register.shards(job, version)):
        lease = register.claim(job=job, version=version, worker=worker)
        end_leases_of_others(register, job, version, worker)
        if lease is not None:
            oversleep(register, lease)
            finish(register, lease)


def oversleep(register: Register, lease: Lease) -> None:
    """Holds every third shard, the first time, until another has ended its lease."""
    mine = (lease.shard, lease.epoch)
    while (
        lease.shard % 3 == 0
        and lease.epoch == 1
        and mine in {(held.number, held.epoch) for held in register.leased(lease.job, lease.version)}
    ):
        end_leases_of_others(register, lease.job, lease.version, lease.worker)


def end_leases_of_others(register: Register, job: str, version: str, worker: str) -> None:
    """Of every third shard, in its first epochs: so the run still ends."""
    for leased in register.leased(job, version):
        doomed = leased.owner != worker and leased.number % 3 == 0 and leased.epoch < 4
        if doomed and register.expire(job=job, version=version, shard=leased.number, epoch=leased.epoch, renewals=leased.renewals):
            say("expired", leased.number, leased.epoch)


def finish(register: Register, lease: Lease) -> None:
    """Says whether this process or nobody under this epoch has staged the shard."""
    try:
        register.renew(lease)
        register.stage(lease, slots=lease.epoch, seconds=1)
    except StaleLeaseError:
        say("stale", lease.shard, lease.epoch)
    else:
        say("staged", lease.shard, lease.epoch)


def work(url: str, job: str, version: str, worker: str, seconds: str) -> None:
    """Claims one shard, renews it several times a second for that long, and stages it."""
    register = Register(url, pooled=False)
    register.create()
    say("ready")
    sys.stdin.readline()
    say("believes", time.time())
    lease = register.claim(job=job, version=version, worker=worker)
    assert lease is not None
    end_s = time.monotonic() + float(seconds)
    while time.monotonic() < end_s:
        register.renew(lease)
        time.sleep(0.3)
    finish(register, lease)


def lead(url: str, job: str, version: str, lease_s: str, seconds: str) -> None:
    """Ends lapsed leases, as a supervisor does, for that long."""
    register = Register(url)
    register.create()
    observer: LeaseObserver[tuple[int, int]] = LeaseObserver(lease_s=float(lease_s))
    say("ready")
    sys.stdin.readline()
    say("believes", time.time())
    end_s = time.monotonic() + float(seconds)
    while time.monotonic() < end_s:
        for seen in register.lapsed(job, version, observer=observer, now_s=time.monotonic()):
            if register.expire(job=job, version=version, shard=seen.number, epoch=seen.epoch, renewals=seen.renewals):
                say("expired", seen.number, seen.epoch)
        time.sleep(0.2)


def create(url: str) -> None:
    """Creates the tables and reads one."""
    register = Register(url)
    say("ready")
    sys.stdin.readline()
    register.create()
    say("jobs", len(register.jobs()))


if __name__ == "__main__":
    {"contend": contend, "create": create, "lead": lead, "work": work}[sys.argv[1]](*sys.argv[2:])
