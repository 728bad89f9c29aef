"""What the tests of real processes run: `python -m tests.register.processes ROLE URL …`. Says `ready`, waits for a line, then acts."""

import sys

from batch_assets.core.errors import StaleLeaseError
from batch_assets.core.leasing import ShardState
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


def create(url: str) -> None:
    """Creates the tables and reads one."""
    register = Register(url)
    say("ready")
    sys.stdin.readline()
    register.create()
    say("jobs", len(register.jobs()))


if __name__ == "__main__":
    {"contend": contend, "create": create}[sys.argv[1]](*sys.argv[2:])
