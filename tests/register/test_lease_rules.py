"""The rules of leases alone: no database, no clock."""

from batch_assets.core.leasing import (
    JOB_HOLDS,
    LOSSES_MAX,
    RETURNED_MAX,
    SHARD_TRANSITIONS,
    VERSION_HOLDS,
    HoldReason,
    LeaseEnd,
    LeaseObserver,
    ShardMove,
    ShardState,
    VersionState,
    is_claimable,
    losses_after,
    may_move,
    state_after_end,
    state_after_return,
)


def test_a_lease_seen_unchanged_for_its_whole_length_has_lapsed():
    observer = LeaseObserver[int](lease_s=90)
    assert observer.lapsed({1: 5}, now_s=1000) == []
    assert observer.lapsed({1: 5}, now_s=1089.9) == []
    assert observer.lapsed({1: 5}, now_s=1090) == [1]


def test_a_renewal_starts_the_time_anew():
    observer = LeaseObserver[int](lease_s=90)
    observer.lapsed({1: 5}, now_s=0)
    observer.lapsed({1: 6}, now_s=89)
    assert observer.lapsed({1: 6}, now_s=178) == []
    assert observer.lapsed({1: 6}, now_s=179) == [1]


def test_a_counter_that_is_seen_for_the_first_time_never_lapses_at_once():
    """A leader that starts late, or slept, waits a lease of its own."""
    assert LeaseObserver[int](lease_s=90).lapsed({1: 5}, now_s=1_000_000) == []


def test_the_next_epoch_of_a_shard_is_another_lease():
    observer = LeaseObserver[tuple[int, int]](lease_s=90)
    observer.lapsed({(7, 1): 0}, now_s=0)
    assert observer.lapsed({(7, 2): 0}, now_s=90) == []


def test_a_lease_that_was_away_is_a_new_one():
    observer = LeaseObserver[int](lease_s=90)
    observer.lapsed({1: 5}, now_s=0)
    observer.lapsed({}, now_s=50)
    assert observer.lapsed({1: 5}, now_s=100) == []


def test_only_a_lapsed_lease_counts_as_a_machine_lost():
    assert {end: losses_after(losses=3, end=end) for end in LeaseEnd} == {
        LeaseEnd.RELEASED: 3,
        LeaseEnd.DRAINED: 3,
        LeaseEnd.NODE_GONE: 3,
        LeaseEnd.EXPIRED: 4,
    }


def test_machines_lost_are_bounded():
    assert state_after_end(losses=LOSSES_MAX - 1) is ShardState.PENDING
    assert state_after_end(losses=LOSSES_MAX) is ShardState.BLOCKED


def test_logs_found_wanting_are_bounded():
    assert state_after_return(returned=RETURNED_MAX) is ShardState.PENDING
    assert state_after_return(returned=RETURNED_MAX + 1) is ShardState.BLOCKED


def test_nothing_is_claimed_from_a_version_that_is_not_active_or_from_a_held_job():
    claimable = {(state, hold) for state in VersionState for hold in (None, *HoldReason) if is_claimable(version=state, job_hold=hold)}
    assert claimable == {(VersionState.ACTIVE, None)}


def test_every_hold_is_of_a_version_or_of_a_job():
    assert set(HoldReason) == VERSION_HOLDS | JOB_HOLDS
    assert not VERSION_HOLDS & JOB_HOLDS


def test_a_committed_shard_is_moved_by_a_redrive_alone():
    assert [move for move in ShardMove if may_move(move, ShardState.COMMITTED)] == [ShardMove.REDRIVE]


def test_every_shard_can_still_reach_committed_until_it_is():
    ways = {state: {state} for state in ShardState}
    for _ in ShardState:
        for transition in SHARD_TRANSITIONS.values():
            for source in transition.sources:
                ways[source] |= ways[transition.target]
    assert all(ShardState.COMMITTED in reachable for reachable in ways.values())
