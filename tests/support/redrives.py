"""A finished version with dead letters of several classes, and the steps of a redrive."""

from collections.abc import Collection, Iterable

from batch_assets.core.records import DeadClass
from batch_assets.core.redrive import TRANSIENT_CLASSES
from batch_assets.core.shard_log import Entry
from batch_assets.fleet.committer import Committer
from batch_assets.flows.redrive import RedriveReport, redrive
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import Lease, ShardRow
from tests.support.versions import Planned, dead, failed, stage
from tests.support.workers import plan

IDS = {1: ["a1", "a2", "a3", "a4"], 2: ["b1", "b2"], 3: ["c1", "c2"]}


class CrashError(Exception):
    """The process dies here."""


def finished_with_dead_letters(installation: Installation) -> Planned:
    """Dead letters: a2 `schema`, a3 `timed_out`, a4 `rejected`, b1 `schema`, e1 `empty` (set aside); shard 3 has none."""
    planned = plan(installation, IDS, set_aside={1: ["e1"]})

    def first(lease: Lease) -> Iterable[Entry]:
        yield from (failed("a2", epoch=lease.epoch, attempt=attempt) for attempt in (1, 2, 3))
        yield dead("a2", epoch=lease.epoch)
        yield dead("a3", epoch=lease.epoch, dead_class="timed_out")
        yield dead("a4", epoch=lease.epoch, attempt=1, dead_class="rejected")

    stage(planned, leave_out=["a2", "a3", "a4"], also=first)
    stage(planned, leave_out=["b1"], also=lambda lease: [dead("b1", epoch=lease.epoch)])
    stage(planned)
    commit_all(planned)
    return planned


def leading(planned: Planned) -> int:
    """The lead that nobody has."""
    register = planned.installation.register
    seen = register.lead(planned.job, planned.version)
    generation = register.take_lead(job=planned.job, version=planned.version, holder="run", seen=seen)
    assert generation is not None
    return generation


def commit_all(planned: Planned, *, crash_at: str | None = None) -> list[ShardRow]:
    """Lead, commit what is staged, finish, leave."""
    register, job, version = planned.installation.register, planned.job, planned.version
    generation = leading(planned)

    def failpoint(place: str) -> None:
        if place == crash_at:
            register.leave_lead(job=job, version=version, generation=generation)
            raise CrashError(place)

    commit = Committer(planned.installation, job=job, version=version, generation=generation, failpoint=failpoint)
    committed: list[ShardRow] = []
    while register.staged(job, version, 1) and (step := commit.step()):
        committed += step
    register.finish_version(job=job, version=version)
    register.leave_lead(job=job, version=version, generation=generation)
    return committed


def reopen(planned: Planned, *classes: DeadClass, **more) -> RedriveReport:
    """A redrive of these classes, by default of the transient ones."""
    chosen: Collection[DeadClass] = classes or TRANSIENT_CLASSES
    return redrive(planned.installation, job=planned.job, version=planned.version, classes=chosen, **more)
