"""Leases of shards: who may claim, and that nobody acts under an epoch that is over."""

from collections.abc import Callable
from functools import partial

import pytest

from batch_assets.core.errors import GristmillError, StaleGenerationError, StaleLeaseError
from batch_assets.core.leasing import LOSSES_MAX, RETURNED_MAX, HoldReason, LeaseEnd, ShardState
from batch_assets.stores.register import CommittedShard, Lease, Register, ShardRow
from tests.register.conftest import OpenRegister
from tests.support.registers import JOB, planned, planned_shards
from tests.support.threads import at_once


@pytest.fixture
def version(register: Register) -> str:
    """Three wanted shards of ten records."""
    return planned(register, shards=3)


def claim(register: Register, version: str, worker: str) -> Lease:
    lease = register.claim(job=JOB, version=version, worker=worker)
    assert lease is not None
    return lease


def expire(register: Register, lease: Lease, *, renewals: int = 0, end: LeaseEnd = LeaseEnd.EXPIRED) -> bool:
    return register.expire(job=JOB, version=lease.version, shard=lease.shard, epoch=lease.epoch, renewals=renewals, end=end)


def shard(register: Register, version: str, number: int = 1) -> ShardRow:
    return register.shards(JOB, version, [number])[0]


def lead(register: Register, version: str) -> int:
    generation = register.take_lead(job=JOB, version=version, holder="leader", seen=None)
    assert generation is not None
    return generation


def test_claims_go_upwards_and_end_with_none(register: Register, version: str):
    claimed = [claim(register, version, "a").shard for _ in range(3)]
    assert claimed == [1, 2, 3]
    assert register.claim(job=JOB, version=version, worker="a") is None


def test_a_lease_says_what_its_worker_needs(register: Register, version: str):
    lease = claim(register, version, "a")
    assert lease == Lease(
        job=JOB,
        version=version,
        shard=1,
        epoch=1,
        round=0,
        worker="a",
        previous_end=None,
        staged_rounds={},
        rows=10,
        to_answer=10,
        input_attempt="a1",
        input_sha256="sha256:input",
    )
    assert (shard(register, version).owner, shard(register, version).state) == ("a", ShardState.LEASED)


def test_only_wanted_shards_are_claimed(register: Register):
    version = planned(register, shards=5, want=False)
    assert register.claim(job=JOB, version=version, worker="a") is None
    register.want(job=JOB, version=version, shards=[4, 2])
    assert [claim(register, version, "a").shard for _ in range(2)] == [2, 4]
    assert register.claim(job=JOB, version=version, worker="a") is None


def test_nothing_is_claimed_while_the_version_or_the_job_is_held(register: Register, version: str):
    register.hold_version(job=JOB, version=version, reason=HoldReason.BREAKER)
    assert register.claim(job=JOB, version=version, worker="a") is None
    register.lift_version_hold(job=JOB, version=version)
    register.hold_job(JOB, by="kim", note="", reason=HoldReason.PERSON)
    assert register.claim(job=JOB, version=version, worker="a") is None
    register.resume_job(JOB)
    assert register.claim(job=JOB, version=version, worker="a") is not None


def test_a_hold_of_one_job_does_not_stop_another(register: Register, version: str):
    other = planned(register, job="other")
    register.hold_job("other", by="kim", note="")
    assert register.claim(job="other", version=other, worker="a") is None
    assert register.claim(job=JOB, version=version, worker="a") is not None


def test_claims_at_once_never_give_one_shard_twice(open_register: OpenRegister):
    version = planned(open_register(), shards=40)

    def claim_all(register: Register, worker: str) -> list[int]:
        claimed = []
        while lease := register.claim(job=JOB, version=version, worker=worker):
            claimed.append(lease.shard)
        return claimed

    claimed = at_once([partial(claim_all, open_register(), worker) for worker in "abc"])
    assert sorted(number for numbers in claimed for number in numbers) == list(range(1, 41))


def test_one_register_serves_many_threads(register: Register):
    version = planned(register, shards=30)
    leases = at_once([lambda worker=worker: [claim(register, version, f"w{worker}") for _ in range(3)] for worker in range(10)])
    at_once([lambda mine=mine: [register.renew(lease) for lease in mine] for mine in leases])
    assert sorted(lease.shard for mine in leases for lease in mine) == list(range(1, 31))
    assert {leased.renewals for leased in register.leased(JOB, version)} == {1}


def test_asking_for_work_when_there_is_none_waits_for_no_writer(open_register: OpenRegister):
    """An idle fleet must not slow the leader: the question alone takes no lock."""
    register, other = open_register(), open_register()
    version = planned(register, shards=0)
    with other.writing():
        assert register.claim(job=JOB, version=version, worker="a") is None
        assert register.counts(JOB, version)[ShardState.PENDING] == 0


def test_a_released_shard_goes_on_under_the_next_epoch(register: Register, version: str):
    register.release(claim(register, version, "a"), end=LeaseEnd.DRAINED)
    again = claim(register, version, "b")
    assert (again.shard, again.epoch, again.previous_end) == (1, 2, LeaseEnd.DRAINED)


def overslept(register: Register, version: str) -> Lease:
    """A lease of `a` that lapsed and was claimed by `b`."""
    old = claim(register, version, "a")
    assert expire(register, old)
    assert claim(register, version, "b").epoch == old.epoch + 1
    return old


ACTIONS: dict[str, Callable[[Register, Lease], None]] = {
    "renew": lambda register, lease: register.renew(lease),
    "stage": lambda register, lease: register.stage(lease, slots=3, seconds=1),
    "release": lambda register, lease: register.release(lease, end=LeaseEnd.RELEASED),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_worker_that_overslept_is_stale_in_everything_it_does(register: Register, version: str, action: str):
    old = overslept(register, version)
    before = shard(register, version)
    with pytest.raises(StaleLeaseError, match="epoch held 1, current 2; drop this worker's rows"):
        ACTIONS[action](register, old)
    assert shard(register, version) == before


@pytest.mark.parametrize("action", ACTIONS)
def test_a_lapsed_lease_is_stale_before_anybody_else_has_claimed(register: Register, version: str, action: str):
    lease = claim(register, version, "a")
    expire(register, lease)
    with pytest.raises(StaleLeaseError):
        ACTIONS[action](register, lease)
    assert shard(register, version).state is ShardState.PENDING


@pytest.mark.parametrize("action", ACTIONS)
def test_a_workers_own_earlier_lease_is_stale_once_it_has_claimed_the_shard_again(register: Register, version: str, action: str):
    old = claim(register, version, "a")
    expire(register, old)
    again = claim(register, version, "a")
    with pytest.raises(StaleLeaseError):
        ACTIONS[action](register, old)
    assert (shard(register, version).state, shard(register, version).renewals) == (ShardState.LEASED, 0)
    register.renew(again)


@pytest.mark.parametrize("action", ACTIONS)
def test_the_epoch_of_another_worker_is_no_right(register: Register, version: str, action: str):
    theirs = claim(register, version, "a")
    forged = Lease(**({name: getattr(theirs, name) for name in Lease.__slots__} | {"worker": "b"}))
    with pytest.raises(StaleLeaseError):
        ACTIONS[action](register, forged)
    register.renew(theirs)


@pytest.mark.parametrize("action", ["renew", "stage"])
def test_a_shard_that_was_sent_back_is_no_longer_its_stagers(register: Register, version: str, action: str):
    generation = lead(register, version)
    lease = claim(register, version, "a")
    register.stage(lease, slots=2, seconds=1)
    register.send_back(job=JOB, version=version, generation=generation, shard=1, reason="ids are missing")
    with pytest.raises(StaleLeaseError):
        ACTIONS[action](register, lease)


def test_a_repeated_stage_is_done_already_also_when_it_was_committed_meanwhile(register: Register, version: str):
    generation = lead(register, version)
    lease = claim(register, version, "a")
    register.stage(lease, slots=4, seconds=2.5)
    register.stage(lease, slots=4, seconds=2.5)
    register.commit(job=JOB, version=version, generation=generation, shards=[CommittedShard(number=1, round=0)])
    register.stage(lease, slots=4, seconds=2.5)
    assert shard(register, version).state is ShardState.COMMITTED


def test_a_stage_with_another_log_is_no_repetition(register: Register, version: str):
    lease = claim(register, version, "a")
    register.stage(lease, slots=4, seconds=1)
    with pytest.raises(StaleLeaseError):
        register.stage(lease, slots=5, seconds=1)
    assert shard(register, version).staged_slots == 4


def test_a_repeated_release_is_done_already_until_somebody_claims(register: Register, version: str):
    lease = claim(register, version, "a")
    register.release(lease, end=LeaseEnd.RELEASED)
    register.release(lease, end=LeaseEnd.RELEASED)
    claim(register, version, "b")
    with pytest.raises(StaleLeaseError):
        register.release(lease, end=LeaseEnd.RELEASED)


def test_a_renewal_that_the_holders_own_stage_overtook_is_fine(register: Register, version: str):
    lease = claim(register, version, "a")
    register.stage(lease, slots=1, seconds=1)
    register.renew(lease)
    assert shard(register, version).renewals == 0


def test_staging_keeps_the_slots_of_the_round(register: Register, version: str):
    register.stage(claim(register, version, "a"), slots=17, seconds=3.5)
    row = shard(register, version)
    assert (row.staged_slots, row.staged_rounds, row.seconds, row.previous_end) == (17, {0: 17}, 3.5, LeaseEnd.RELEASED)
    assert register.staged(JOB, version, 10) == [row]


def test_a_lease_that_was_renewed_since_it_was_seen_does_not_expire(register: Register, version: str):
    lease = claim(register, version, "a")
    seen = register.leased(JOB, version)[0]
    register.renew(lease)
    assert not expire(register, lease, renewals=seen.renewals)
    register.renew(lease)
    assert shard(register, version).state is ShardState.LEASED


def test_a_lease_of_the_next_epoch_does_not_expire_by_what_was_seen_of_the_last(register: Register, version: str):
    old = overslept(register, version)
    assert not expire(register, old)
    assert shard(register, version).owner == "b"


def test_of_a_renewal_and_an_expiry_at_once_one_wins(open_register: OpenRegister):
    worker, leader = open_register(), open_register()
    version = planned(worker, shards=20)

    def renewed(lease: Lease) -> bool:
        try:
            worker.renew(lease)
        except StaleLeaseError:
            return False
        return True

    for _ in range(20):
        lease = claim(worker, version, "a")
        won = at_once([partial(renewed, lease), partial(expire, leader, lease)])
        assert sorted(won) == [False, True]
        state = shard(leader, version, lease.shard).state
        assert state is (ShardState.LEASED if won[0] else ShardState.PENDING)
        if not won[0]:
            claim(worker, version, "a")


def test_of_a_stage_and_an_expiry_at_once_one_wins(open_register: OpenRegister):
    worker, leader = open_register(), open_register()
    version = planned(worker, shards=20)

    def staged(lease: Lease) -> bool:
        try:
            worker.stage(lease, slots=1, seconds=1)
        except StaleLeaseError:
            return False
        return True

    for _ in range(20):
        lease = claim(worker, version, "a")
        won = at_once([partial(staged, lease), partial(expire, leader, lease)])
        assert sorted(won) == [False, True]
        assert shard(leader, version, lease.shard).state is (ShardState.STAGED if won[0] else ShardState.PENDING)


def test_a_shard_that_loses_machines_again_and_again_is_blocked_for_a_person(register: Register, version: str):
    for loss in range(1, LOSSES_MAX + 1):
        assert shard(register, version).state is ShardState.PENDING
        expire(register, claim(register, version, "a"))
        assert shard(register, version).losses == loss
    row = shard(register, version)
    assert (row.state, row.blocked_reason) == (ShardState.BLOCKED, f"{LOSSES_MAX} machines were lost with it")
    assert claim(register, version, "a").shard == 2


def test_a_node_that_is_known_to_be_gone_is_no_loss(register: Register, version: str):
    expire(register, claim(register, version, "a"), end=LeaseEnd.NODE_GONE)
    assert (shard(register, version).losses, shard(register, version).previous_end) == (0, LeaseEnd.NODE_GONE)


def test_a_holder_does_not_call_its_own_lease_expired(register: Register, version: str):
    with pytest.raises(AssertionError):
        register.release(claim(register, version, "a"), end=LeaseEnd.EXPIRED)


def start(register: Register, version: str, *workers: str) -> None:
    for worker in workers:
        register.worker_started(worker_id=worker, job=JOB, version=version, host="h", pid=1)


def test_a_shard_that_avoids_a_worker_goes_to_another(register: Register, version: str):
    start(register, version, "a", "b")
    register.release(claim(register, version, "a"), end=LeaseEnd.RELEASED, avoid_worker="a")
    assert claim(register, version, "a").shard == 2
    assert claim(register, version, "b").shard == 1
    assert shard(register, version).avoid_worker is None


def test_a_fleet_of_one_takes_the_shard_that_avoids_it_under_another_name(register: Register, version: str):
    start(register, version, "a")
    register.release(claim(register, version, "a"), end=LeaseEnd.RELEASED, avoid_worker="a")
    assert claim(register, version, "a").shard == 2
    register.worker_gone("a")
    assert claim(register, version, "a2").shard == 1


def test_a_shard_that_nobody_else_came_for_forgets_whom_it_avoids(register: Register, version: str):
    start(register, version, "a", "b")
    register.release(claim(register, version, "a"), end=LeaseEnd.RELEASED, avoid_worker="a")
    assert register.forget_avoidance(job=JOB, version=version, shard=1, worker="a")
    assert claim(register, version, "a").shard == 1


def staged_shards(register: Register, version: str, count: int) -> None:
    for _ in range(count):
        register.stage(claim(register, version, "a"), slots=1, seconds=1)


def test_a_commit_takes_all_its_shards_or_none(register: Register, version: str):
    generation = lead(register, version)
    staged_shards(register, version, 2)
    shards = [CommittedShard(number=number, round=0) for number in (1, 2, 3)]
    with pytest.raises(GristmillError, match="expected staged in round 0, found pending"):
        register.commit(job=JOB, version=version, generation=generation, shards=shards)
    assert register.counts(JOB, version)[ShardState.COMMITTED] == 0
    committed = register.commit(job=JOB, version=version, generation=generation, shards=shards[:2])
    assert [(row.number, row.state) for row in committed] == [(1, ShardState.COMMITTED), (2, ShardState.COMMITTED)]


def test_a_commit_repeated_after_a_lost_acknowledgement_changes_nothing(register: Register, version: str):
    generation = lead(register, version)
    staged_shards(register, version, 1)
    first = CommittedShard(number=1, round=0, epoch=1, stats={"results": 9})
    register.commit(job=JOB, version=version, generation=generation, shards=[first])
    register.mark_announced(job=JOB, version=version, shards=[1])
    before = shard(register, version)
    assert register.commit(job=JOB, version=version, generation=generation, shards=[first]) == [before]
    assert (before.stats, before.announced) == ({"results": 9}, True)


def test_a_commit_of_another_round_or_epoch_is_refused(register: Register, version: str):
    generation = lead(register, version)
    staged_shards(register, version, 1)
    for wrong in (CommittedShard(number=1, round=1), CommittedShard(number=1, round=0, epoch=7)):
        with pytest.raises(GristmillError, match="is refused"):
            register.commit(job=JOB, version=version, generation=generation, shards=[wrong])
    assert shard(register, version).state is ShardState.STAGED


def test_what_the_leader_decides_needs_the_present_generation(register: Register, version: str):
    old = lead(register, version)
    seen = register.lead(JOB, version)
    assert register.take_lead(job=JOB, version=version, holder="next", seen=seen) == old + 1
    staged_shards(register, version, 1)
    before = shard(register, version)
    at = {"job": JOB, "version": version, "generation": old}
    with pytest.raises(StaleGenerationError, match="generation held 1, current 2; stop committing"):
        register.commit(**at, shards=[CommittedShard(number=1, round=0)])
    with pytest.raises(StaleGenerationError):
        register.send_back(**at, shard=1, reason="x")
    with pytest.raises(StaleGenerationError):
        register.block(**at, shard=1, reason="x")
    assert shard(register, version) == before


def test_logs_that_are_wanting_come_back_a_few_times_then_block(register: Register, version: str):
    generation = lead(register, version)
    states = []
    for _ in range(RETURNED_MAX + 1):
        register.stage(claim(register, version, "a"), slots=2, seconds=1)
        states.append(register.send_back(job=JOB, version=version, generation=generation, shard=1, reason="3 ids are missing"))
    assert states == [ShardState.PENDING] * RETURNED_MAX + [ShardState.BLOCKED]
    assert shard(register, version).blocked_reason == "3 ids are missing"


def test_a_shard_sent_back_opens_its_round_again(register: Register, version: str):
    generation = lead(register, version)
    register.stage(claim(register, version, "a"), slots=2, seconds=1)
    register.send_back(job=JOB, version=version, generation=generation, shard=1, reason="x")
    lease = claim(register, version, "b")
    assert (lease.epoch, lease.round, lease.staged_rounds, lease.previous_end) == (2, 0, {}, LeaseEnd.RELEASED)
    register.stage(lease, slots=5, seconds=1)
    assert shard(register, version).staged_rounds == {0: 5}


def test_sending_back_what_is_not_staged_leaves_it_alone(register: Register, version: str):
    generation = lead(register, version)
    assert register.send_back(job=JOB, version=version, generation=generation, shard=1, reason="x") is ShardState.PENDING
    assert shard(register, version).returned == 0


def test_a_blocked_shard_waits_for_a_person_and_then_starts_with_fresh_bounds(register: Register, version: str):
    generation = lead(register, version)
    lease = claim(register, version, "a")
    assert register.block(job=JOB, version=version, generation=generation, shard=1, reason="its input does not verify")
    assert not register.block(job=JOB, version=version, generation=generation, shard=1, reason="again")
    with pytest.raises(StaleLeaseError):
        register.renew(lease)
    assert claim(register, version, "a").shard == 2
    assert register.unblock(job=JOB, version=version) == 1
    row = shard(register, version)
    assert (row.state, row.losses, row.returned, row.blocked_reason) == (ShardState.PENDING, 0, 0, None)
    assert claim(register, version, "b").epoch == 2


def test_a_shard_is_announced_once(register: Register, version: str):
    generation = lead(register, version)
    staged_shards(register, version, 2)
    register.commit(job=JOB, version=version, generation=generation, shards=[CommittedShard(number=n, round=0) for n in (2, 1)])
    assert [row.number for row in register.unannounced(JOB, version)] == [1, 2]
    register.mark_announced(job=JOB, version=version, shards=[1, 3])
    assert [row.number for row in register.unannounced(JOB, version)] == [2]
    assert not shard(register, version, 3).announced


def test_counts_have_every_state(register: Register, version: str):
    claim(register, version, "a")
    assert register.counts(JOB, version) == {
        ShardState.PENDING: 2,
        ShardState.LEASED: 1,
        ShardState.STAGED: 0,
        ShardState.COMMITTED: 0,
        ShardState.BLOCKED: 0,
    }


def test_more_shards_than_one_statement_takes_are_wanted_and_read(register: Register):
    version = planned(register, shards=0)
    assert register.shards(JOB, version) == []
    many = planned(register, prompt="q", shards=2500, want=False)
    register.want(job=JOB, version=many, shards=range(1, 2402))
    assert len([row for row in register.shards(JOB, many, range(1, 9999)) if row.wanted]) == 2401
    assert [row.number for row in register.shards(JOB, many)] == [planned_.number for planned_ in planned_shards(2500)]
