"""Redrives: a new round of committed shards, all of them or none, one at a time, under the lead."""

from functools import partial

import pytest

from batch_assets.core.errors import GristmillError, NotFinishedError, StaleGenerationError, StaleLeaseError
from batch_assets.core.leasing import HoldReason, LeaseEnd, ShardState, VersionState
from batch_assets.stores.register import CommittedShard, Lease, Register, ShardRow
from tests.register.conftest import OpenRegister
from tests.support.registers import JOB, planned
from tests.support.threads import at_once


@pytest.fixture
def version(register: Register) -> str:
    """Three shards, each committed with 7 slots under epoch 1; finished."""
    name = planned(register, shards=3)
    commit_all(register, name, lead(register, name))
    return name


def lead(register: Register, version: str) -> int:
    seen = register.lead(JOB, version)
    generation = register.take_lead(job=JOB, version=version, holder="leader", seen=seen)
    assert generation is not None
    return generation


def commit_all(register: Register, version: str, generation: int, *, slots: int = 7) -> list[Lease]:
    """Every shard that can be claimed is staged and committed; the version finishes."""
    leases = []
    while lease := register.claim(job=JOB, version=version, worker="a"):
        register.stage(lease, slots=slots, seconds=1.0)
        leases.append(lease)
    done = [CommittedShard(number=lease.shard, round=lease.round, epoch=lease.epoch, stats={"dead_letters": 1}) for lease in leases]
    register.commit(job=JOB, version=version, generation=generation, shards=done)
    assert register.finish_version(job=JOB, version=version)
    return leases


def redrive(register: Register, version: str, numbers: list[int], *, generation: int | None = None) -> list[ShardRow]:
    """The shards as they were before."""
    seen = register.shards(JOB, version, numbers)
    register.redrive(job=JOB, version=version, generation=generation or lead(register, version), shards=seen)
    return seen


def test_a_redriven_shard_is_claimed_again_under_the_epoch_after_the_redrive_s_own(register: Register, version: str):
    redrive(register, version, [1, 3])
    assert [(row.number, row.state, row.round, row.epoch) for row in register.shards(JOB, version)] == [
        (1, ShardState.PENDING, 1, 2),
        (2, ShardState.COMMITTED, 0, 1),
        (3, ShardState.PENDING, 1, 2),
    ]
    lease = register.claim(job=JOB, version=version, worker="b")
    assert lease is not None
    assert (lease.shard, lease.round, lease.epoch, lease.staged_rounds) == (1, 1, 3, {0: 7})


def test_the_version_is_active_while_a_round_is_open_and_finished_again_when_it_is_committed(register: Register, version: str):
    generation = lead(register, version)
    redrive(register, version, [2], generation=generation)
    assert register.version(JOB, version).state is VersionState.ACTIVE
    assert not register.finish_version(job=JOB, version=version)
    (lease,) = commit_all(register, version, generation, slots=12)
    assert register.version(JOB, version).state is VersionState.FINISHED
    (row,) = register.shards(JOB, version, [2])
    assert (row.round, row.staged_rounds, row.epoch) == (1, {0: 7, 1: 12}, lease.epoch)
    assert register.rounds(JOB, version) == 1


def test_what_the_last_round_came_to_is_kept_until_the_next_is_committed_and_its_troubles_are_not(register: Register, version: str):
    redrive(register, version, [1])
    (row,) = register.shards(JOB, version, [1])
    assert row.stats == {"dead_letters": 1}
    assert (row.losses, row.returned, row.owner, row.staged_slots, row.announced) == (0, 0, None, None, False)


def test_a_redrive_repeated_after_a_lost_acknowledgement_changes_nothing(register: Register, version: str):
    generation = lead(register, version)
    seen = redrive(register, version, [1, 2], generation=generation)
    before = register.shards(JOB, version)
    register.redrive(job=JOB, version=version, generation=generation, shards=seen)
    assert register.shards(JOB, version) == before


def test_a_second_redrive_while_one_is_open_is_refused_in_words_and_changes_nothing(register: Register, version: str):
    redrive(register, version, [1])
    before = register.shards(JOB, version)
    with pytest.raises(NotFinishedError, match="one round at a time"):
        redrive(register, version, [2])
    with pytest.raises(NotFinishedError, match="one round at a time"):
        redrive(register, version, [1, 2])
    assert register.shards(JOB, version) == before


def test_a_version_that_is_not_finished_is_not_redriven(register: Register):
    version = planned(register, shards=2)
    with pytest.raises(NotFinishedError, match="state active"):
        redrive(register, version, [1])
    register.hold_version(job=JOB, version=version, reason=HoldReason.BREAKER)
    with pytest.raises(NotFinishedError, match="state held"):
        redrive(register, version, [1])
    assert all(row.round == 0 for row in register.shards(JOB, version))


def test_who_does_not_lead_redrives_nothing(register: Register, version: str):
    old = lead(register, version)
    register.leave_lead(job=JOB, version=version, generation=old)
    lead(register, version)
    with pytest.raises(StaleGenerationError):
        redrive(register, version, [1], generation=old)
    assert register.version(JOB, version).state is VersionState.FINISHED


def test_the_holder_of_the_last_round_is_stale_in_the_new_one(register: Register):
    version = planned(register, shards=1)
    generation = lead(register, version)
    (old,) = commit_all(register, version, generation)
    redrive(register, version, [1], generation=generation)
    for act in (
        partial(register.renew, old),
        partial(register.stage, old, slots=7, seconds=1.0),
        partial(register.release, old, end=LeaseEnd.RELEASED),
    ):
        with pytest.raises(StaleLeaseError):
            act()
    assert register.shards(JOB, version)[0].state is ShardState.PENDING


def test_a_commit_of_the_last_round_that_is_repeated_after_a_redrive_is_refused(register: Register):
    version = planned(register, shards=1)
    generation = lead(register, version)
    commit_all(register, version, generation)
    redrive(register, version, [1], generation=generation)
    with pytest.raises(GristmillError, match="found pending in round 1"):
        register.commit(job=JOB, version=version, generation=generation, shards=[CommittedShard(number=1, round=0, epoch=1)])


def test_of_two_redrives_at_once_one_opens_the_round(open_register: OpenRegister):
    first, second = open_register(), open_register()
    version = planned(first, shards=40)
    generation = lead(first, version)
    commit_all(first, version, generation)

    def try_it(register: Register, numbers: list[int]) -> bool:
        try:
            redrive(register, version, numbers, generation=generation)
        except NotFinishedError:
            return False
        return True

    opened = at_once([partial(try_it, first, list(range(1, 21))), partial(try_it, second, list(range(21, 41)))])
    assert sorted(opened) == [False, True]
    assert first.rounds(JOB, version) == 20
