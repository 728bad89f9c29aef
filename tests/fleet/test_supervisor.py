"""One leads, the others follow; whoever dies, the next one goes on; each committed shard is announced once in each run's view."""

from pathlib import Path

import pytest

from batch_assets.core.errors import NotFinishedError, RefusedError, UnfitEnvironmentError
from batch_assets.core.leasing import RETURNED_MAX, HoldReason, ShardState, VersionState
from batch_assets.core.supervision import WorkerExit
from batch_assets.fleet import supervisor as supervisor_module
from batch_assets.fleet.supervisor import STARTING_MAX_S, _drive
from batch_assets.stores.installation import Installation
from tests.support.fleets import FakeClock, HandFleet, Run, finish, step
from tests.support.versions import SCHEMA, Planned, claim, installation_in, plan_by_hand, spec_of, stage

SHARDS = {number: [f"r{number}-{n}" for n in range(3)] for number in range(1, 6)}
LEASE_S = 6.0


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return installation_in(tmp_path, lease_s=LEASE_S, renew_s=1.0)


@pytest.fixture
def planned(installation: Installation) -> Planned:
    return plan_by_hand(installation, SHARDS, want=False)


def states(planned: Planned) -> dict[int, ShardState]:
    return {row.number: row.state for row in planned.installation.register.shards(planned.job, planned.version)}


def version_state(planned: Planned) -> tuple[VersionState, HoldReason | None]:
    row = planned.installation.register.version(planned.job, planned.version)
    return row.state, row.hold


def ids_in_table(planned: Planned) -> list[str]:
    outcomes = planned.installation.outcomes(job=planned.job, version=planned.version, answer_schema=SCHEMA)
    return sorted(outcomes.read(columns=["record_id"])["record_id"])


def lead_as(planned: Planned, holder: str) -> int:
    """Somebody else leads."""
    register = planned.installation.register
    generation = register.take_lead(
        job=planned.job, version=planned.version, holder=holder, seen=register.lead(planned.job, planned.version)
    )
    assert generation is not None
    return generation


# --- alone ---------------------------------------------------------------------------------------------------------------------------


def test_a_run_leads_answers_all_and_finishes_the_version(planned: Planned) -> None:
    run = Run(planned)
    report = finish(run.turns(), run.clock)
    assert report.committed == (1, 2, 3, 4, 5)
    assert (report.pending, report.blocked, report.held, report.followed) == ((), (), None, False)
    assert ids_in_table(planned) == sorted(record_id for ids in SHARDS.values() for record_id in ids)
    assert version_state(planned) == (VersionState.FINISHED, None)
    assert run.fleet is not None
    assert run.fleet.stopped
    assert planned.installation.register.lead(planned.job, planned.version).released


def test_each_shard_is_announced_once(planned: Planned) -> None:
    run = Run(planned)
    finish(run.turns(), run.clock)
    assert sorted(run.announced) == [1, 2, 3, 4, 5]
    assert planned.installation.register.unannounced(planned.job, planned.version) == []


def test_progress_reaches_the_total_exactly_and_not_before_the_end(planned: Planned) -> None:
    run = Run(planned)
    finish(run.turns(), run.clock)
    assert run.looks[-1].rows == run.looks[-1].total == 15
    assert all(look.rows < look.total for look in run.looks if look.shards_done < 5)


def test_only_the_wanted_shards_are_answered(planned: Planned) -> None:
    run = Run(planned, wanted=frozenset({2, 4}))
    report = finish(run.turns(), run.clock)
    assert report.committed == (2, 4)
    assert {number for number, state in states(planned).items() if state is ShardState.COMMITTED} == {2, 4}
    assert version_state(planned) == (VersionState.ACTIVE, None)


def test_finished_shards_cost_nothing_and_are_announced_again_first(planned: Planned) -> None:
    first = Run(planned, wanted=frozenset({2, 4}))
    finish(first.turns(), first.clock)
    again = Run(planned, wanted=frozenset({2, 3, 4}), holder="run-2")
    finish(again.turns(), again.clock)
    assert again.announced == [2, 4, 3]
    done = Run(planned, wanted=frozenset({2, 3, 4}), holder="run-3")
    finish(done.turns(), done.clock)
    assert done.fleet is not None
    assert done.fleet.started == 0


def test_no_more_workers_are_started_than_there_are_open_shards(planned: Planned) -> None:
    run = Run(planned, wanted=None, workers=40)
    finish(run.turns(), run.clock)
    assert run.fleet is not None
    assert run.fleet.started <= 5


def test_a_shard_that_does_not_exist_is_refused_by_name(planned: Planned) -> None:
    with pytest.raises(RefusedError, match=f"{planned.version}-00077"):
        Run(planned, wanted=frozenset({1, 77})).turns()


def test_a_version_that_is_still_being_planned_is_not_supervised(installation: Installation) -> None:
    version = installation.register.register_version(spec_of(), kind="full")
    planned = Planned(installation, version.job, version.name, {}, {})
    with pytest.raises(NotFinishedError, match="planning"):
        Run(planned).turns()


def test_a_shard_whose_log_is_wanting_each_time_is_reported_as_blocked_and_the_others_finish(planned: Planned) -> None:
    run = Run(planned, fleet=HandFleet(planned, leave_out=["r2-1"]))
    report = finish(run.turns(), run.clock)
    assert report.blocked == (2,)
    assert report.committed == (1, 3, 4, 5)
    (row,) = planned.installation.register.shards(planned.job, planned.version, [2])
    assert row.returned == RETURNED_MAX + 1


# --- leases and workers --------------------------------------------------------------------------------------------------------------


def test_a_lease_that_is_not_renewed_is_ended_and_the_shard_answered_by_another(planned: Planned) -> None:
    planned.installation.register.want(job=planned.job, version=planned.version, shards=None)
    claim(planned, worker="dead")
    run = Run(planned)
    started_s = run.clock.now_s
    report = finish(run.turns(), run.clock)
    assert report.committed == (1, 2, 3, 4, 5)
    (row,) = planned.installation.register.shards(planned.job, planned.version, [1])
    assert (row.epoch, row.losses) == (2, 1)
    assert run.clock.now_s - started_s >= LEASE_S


def test_a_worker_that_is_heard_from_no_more_is_killed_so_that_another_takes_its_place(planned: Planned) -> None:
    register = planned.installation.register
    register.worker_started(worker_id="hung", job=planned.job, version=planned.version, host="here", pid=1)
    register.worker_heartbeat("hung", {})
    run = Run(planned, fleet=HandFleet(planned, shards_per_look=0))
    step(run.turns(), run.clock, 150)
    assert run.fleet is not None
    assert "hung" in run.fleet.killed


def test_a_worker_that_never_said_a_word_does_not_take_up_a_place_for_ever(planned: Planned) -> None:
    """It died with its host while it loaded: whoever counts it as alive starts nobody in its place."""
    planned.installation.register.worker_started(worker_id="mute", job=planned.job, version=planned.version, host="gone", pid=1)
    run = Run(planned, fleet=HandFleet(planned, shards_per_look=0))
    turns = run.turns()
    step(turns, run.clock, 150)
    assert run.fleet is not None
    assert "mute" not in run.fleet.killed
    run.clock.sleep(STARTING_MAX_S)
    step(turns, run.clock, 20)
    assert "mute" in run.fleet.killed


def crash(fleet: HandFleet, *, code: int = 1, fruitful: bool = False, words: str = "") -> None:
    """The worker that was just started ends."""
    fleet.exits.append(
        WorkerExit(
            worker_id=f"w{fleet.started}",
            exit_code=code,
            was_fruitful=fruitful,
            last_line_class="ImportError",
            log_path="/state/logs/w.log",
            own_words=words,
        )
    )


def test_workers_that_cannot_start_end_the_run_with_the_class_of_their_last_line(planned: Planned) -> None:
    run = Run(planned, fleet=HandFleet(planned, shards_per_look=0, on_start=crash))
    with pytest.raises(UnfitEnvironmentError, match="ImportError") as error:
        finish(run.turns(), run.clock)
    assert "/state/logs/w.log" in str(error.value)
    assert run.fleet is not None
    assert run.fleet.started <= 2 * 3
    assert version_state(planned) == (VersionState.ACTIVE, None)


def test_a_worker_that_refuses_to_start_is_not_started_again_and_its_words_are_quoted(planned: Planned) -> None:
    def refuse(fleet: HandFleet) -> None:
        crash(fleet, code=6, words="expected sha256:11, found sha256:22")

    run = Run(planned, workers=1, fleet=HandFleet(planned, shards_per_look=0, on_start=refuse))
    with pytest.raises(UnfitEnvironmentError, match="expected sha256:11, found sha256:22"):
        finish(run.turns(), run.clock)
    assert run.fleet is not None
    assert run.fleet.started == 1


def test_a_worker_that_dies_at_work_is_replaced(planned: Planned) -> None:
    deaths = iter([True, False])

    def die_once(fleet: HandFleet) -> None:
        if next(deaths, False):
            crash(fleet, code=-9, fruitful=True)

    run = Run(planned, workers=1, fleet=HandFleet(planned, on_start=die_once))
    assert finish(run.turns(), run.clock).committed == (1, 2, 3, 4, 5)
    assert run.fleet is not None
    assert run.fleet.started == 2


# --- leader and followers ------------------------------------------------------------------------------------------------------------


def test_a_second_run_follows_the_first_and_turns_green_with_it(planned: Planned) -> None:
    clock = FakeClock()
    leader = Run(planned, wanted=frozenset({1, 2, 3}), clock=clock)
    follower = Run(planned, wanted=frozenset({3, 5}), holder="run-2", clock=clock)
    leading, following = leader.turns(), follower.turns()
    report = None
    for _ in range(200):
        step(leading, clock)
        report = report or step(following, clock)
    assert report is not None
    assert (report.committed, report.followed) == ((3, 5), True)
    assert sorted(follower.announced) == [3, 5]
    assert follower.fleet is not None
    assert follower.fleet.started == 0
    assert len(ids_in_table(planned)) == 12


def test_a_follower_takes_over_when_the_leader_is_seen_dead_for_a_lease(planned: Planned) -> None:
    lead_as(planned, "dead run")
    run = Run(planned, holder="run-2")
    started_s = run.clock.now_s
    report = finish(run.turns(), run.clock)
    assert (report.committed, report.followed) == ((1, 2, 3, 4, 5), False)
    assert run.clock.now_s - started_s >= LEASE_S
    assert planned.installation.register.lead(planned.job, planned.version).generation == 2


def test_a_follower_leaves_a_leader_alone_that_renews(planned: Planned) -> None:
    generation = lead_as(planned, "living run")
    run = Run(planned, holder="run-2")
    turns = run.turns()
    for _ in range(30):
        step(turns, run.clock)
        planned.installation.register.renew_lead(job=planned.job, version=planned.version, generation=generation)
    assert planned.installation.register.lead(planned.job, planned.version).holder == "living run"
    assert run.fleet is not None
    assert run.fleet.started == 0


def test_a_lead_that_was_left_is_taken_at_once(planned: Planned) -> None:
    generation = lead_as(planned, "run-0")
    planned.installation.register.leave_lead(job=planned.job, version=planned.version, generation=generation)
    run = Run(planned)
    step(run.turns(), run.clock)
    assert planned.installation.register.lead(planned.job, planned.version).generation == 2


def test_a_superseded_leader_follows_and_commits_nothing_more(planned: Planned) -> None:
    run = Run(planned, fleet=HandFleet(planned, shards_per_look=0))
    turns = run.turns()
    step(turns, run.clock, 3)
    usurper = lead_as(planned, "usurper")
    stage(planned)
    step(turns, run.clock, 4)
    assert states(planned)[1] is ShardState.STAGED
    assert planned.installation.register.lead(planned.job, planned.version).generation == usurper
    assert run.fleet is not None
    assert not run.fleet.stopped  # the workers are the usurper's now


def test_a_shard_committed_by_a_run_that_died_before_telling_is_announced_by_the_next_leader(planned: Planned) -> None:
    register = planned.installation.register
    register.want(job=planned.job, version=planned.version, shards=None)
    stage(planned)
    dead = lead_as(planned, "dead run")
    supervisor_module.Committer(planned.installation, job=planned.job, version=planned.version, generation=dead).step()
    register.leave_lead(job=planned.job, version=planned.version, generation=dead)
    run = Run(planned, wanted=frozenset({2}), holder="run-2")
    finish(run.turns(), run.clock)
    assert 1 in run.announced
    assert register.unannounced(planned.job, planned.version) == []


def test_the_leader_goes_on_while_another_run_waits_for_other_shards(planned: Planned) -> None:
    run = Run(planned, wanted=frozenset({1}))
    turns = run.turns()
    step(turns, run.clock)
    planned.installation.register.want(job=planned.job, version=planned.version, shards=[5])
    report = finish(turns, run.clock)
    assert report.committed == (1,)
    assert states(planned)[5] is ShardState.COMMITTED


# --- stop ----------------------------------------------------------------------------------------------------------------------------


def test_a_cancelled_run_stops_its_workers_and_holds_the_version(planned: Planned) -> None:
    run = Run(planned, fleet=HandFleet(planned, shards_per_look=0))
    turns = run.turns()
    step(turns, run.clock, 3)
    run.stop = True
    report = finish(turns, run.clock)
    assert report.held is HoldReason.CANCELLED
    assert report.pending == (1, 2, 3, 4, 5)
    assert version_state(planned) == (VersionState.HELD, HoldReason.CANCELLED)
    assert run.fleet is not None
    assert run.fleet.stopped
    assert planned.installation.register.lead(planned.job, planned.version).released


def test_an_interrupt_while_it_sleeps_is_a_cancel_and_goes_on_to_whoever_raised_it(planned: Planned) -> None:
    run = Run(planned, fleet=HandFleet(planned, shards_per_look=0))
    naps = iter(range(3))

    def interrupted(seconds: float) -> None:
        run.clock.sleep(seconds)
        if next(naps, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _drive(run.turns(), interrupted)
    assert version_state(planned) == (VersionState.HELD, HoldReason.CANCELLED)
    assert run.fleet is not None
    assert run.fleet.stopped


def test_a_follower_that_is_cancelled_leaves_the_version_to_its_leader(planned: Planned) -> None:
    lead_as(planned, "living run")
    run = Run(planned, holder="run-2")
    turns = run.turns()
    step(turns, run.clock, 2)
    run.stop = True
    assert finish(turns, run.clock).pending == (1, 2, 3, 4, 5)
    assert version_state(planned) == (VersionState.ACTIVE, None)


def test_a_failing_supervisor_leaves_its_workers_and_the_lead_to_the_next_one(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(supervisor_module.Committer, "step", lost)
    run = Run(planned)
    with pytest.raises(ConnectionError):
        finish(run.turns(), run.clock)
    assert run.fleet is not None
    assert not run.fleet.stopped
    assert version_state(planned) == (VersionState.ACTIVE, None)
    assert planned.installation.register.lead(planned.job, planned.version).released


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_a_hold_by_a_person_ends_every_run_and_says_so(planned: Planned, role: str) -> None:
    if role == "follower":
        lead_as(planned, "living run")
    run = Run(planned, fleet=HandFleet(planned, shards_per_look=0))
    turns = run.turns()
    step(turns, run.clock, 2)
    planned.installation.register.hold_job(planned.job, by="ana", note="wait for me")
    report = finish(turns, run.clock)
    assert report.held is HoldReason.PERSON
    assert run.fleet is not None
    assert run.fleet.stopped is (role == "leader")


def test_a_held_version_is_not_started(planned: Planned) -> None:
    planned.installation.register.hold_version(job=planned.job, version=planned.version, reason=HoldReason.CANCELLED)
    run = Run(planned)
    report = finish(run.turns(), run.clock)
    assert report.held is HoldReason.CANCELLED
    assert planned.installation.register.lead(planned.job, planned.version) is None
