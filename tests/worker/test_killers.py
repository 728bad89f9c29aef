"""Records that kill their engine, and workers whose engine is bad: who is dead afterwards, who is not, and how often it began anew.

The real loop, register, log and frozen input. An engine that dies takes its worker with it; the leader ends the leases; the next one comes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pytest

from batch_assets.core.breakers import ROW_MAX
from batch_assets.core.errors import EngineFailedError, UnfitWorkerError
from batch_assets.core.leasing import LeaseEnd, ShardState
from batch_assets.core.request_ids import CONTROL_ATTEMPT, record_of
from batch_assets.core.shard_log import Start
from batch_assets.stores.installation import Installation
from batch_assets.worker.loop import Point
from tests.support.versions import Planned, installation_in
from tests.support.workers import Driven, drive, expire_all, folded, ids, open_shards, plan

DEATHS_MAX = 100


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return installation_in(tmp_path)


def killing(records: Sequence[str], **more: object) -> dict[str, object]:
    return {"behaviours": [{"act": "engine_error", "record": record} for record in records], **more}


def outlive(planned: Planned, script: Mapping[str, object]) -> list[Driven]:
    """One worker after the other, each until its engine dies; the last one finished everything."""
    workers: list[Driven] = []
    for number in range(DEATHS_MAX):
        workers.append(drive(planned, worker_id=f"w{number}", script=script))
        try:
            workers[-1].finish()
        except EngineFailedError:
            expire_all(planned)
        else:
            return workers
    raise AssertionError("it does not come to an end")


def assert_exactly_dead(planned: Planned, killers: Sequence[str]) -> None:
    for shard, expected in planned.ids.items():
        state = folded(planned, shard)
        assert set(state.dead) == set(killers) & set(expected)
        assert set(state.answered) == set(expected) - set(killers)
        assert all((entry.dead_class, entry.attempt) == ("engine_killed", 3) for entry in state.dead.values())
        assert set(state.failed) == set(state.dead)  # no innocent has used an attempt


def test_a_record_that_kills_its_engine_is_dead_after_three_deaths_alone_and_nobody_else_is(installation: Installation) -> None:
    planned = plan(installation, {1: ids(40)})
    workers = outlive(planned, killing(["T-0013"]))
    assert_exactly_dead(planned, ["T-0013"])
    # At its normal work, in its group if that is more than one, and three times alone.
    assert len(workers) - 1 in (4, 5)
    assert installation.register.shards(planned.job, planned.version)[0].losses == len(workers) - 1


@pytest.mark.parametrize("seed", range(4))
def test_any_killers_are_found_and_no_innocent_has_used_an_attempt(installation: Installation, seed: int) -> None:
    random = Random(seed)
    planned = plan(installation, {1: ids(50), 2: ids(30, start=100)})
    killers = random.sample([each for part in planned.ids.values() for each in part], k=random.randint(1, 4))
    workers = outlive(planned, killing(killers, answers_per_poll=random.randint(1, 4), max_num_seqs=random.choice([4, 16])))
    assert_exactly_dead(planned, killers)
    assert len(workers) - 1 <= len(killers) * (1 + 1 + 3)


def test_suspects_are_alone_in_the_engine_and_their_worker_holds_one_shard(installation: Installation) -> None:
    planned = plan(installation, {1: ids(40), 2: ids(40, start=100)})
    first = drive(planned, script=killing(["T-0013"]))
    with pytest.raises(EngineFailedError):
        first.finish()
    expire_all(planned)
    second = drive(planned, worker_id="w2", script=killing(["T-0013"]))
    seen: list[tuple[int, set[str]]] = []

    def look() -> None:
        for point in second.turns():
            if point is Point.FED and (started := folded(planned, 1).suspicion.started):
                live = {record_of(request) for request in second.engine._live}
                seen.append((len(second.worker.leases), live - set(started)))

    with pytest.raises(EngineFailedError):
        look()
    assert seen
    assert {leases for leases, _ in seen} == {1}
    assert not any(strangers for _, strangers in seen)


def test_a_worker_that_dies_with_two_leases_makes_suspects_in_both(installation: Installation) -> None:
    planned = plan(installation, {1: ids(9), 2: ids(30, start=100)})
    slow = {"act": "slow", "record": planned.ids[1][-1], "polls": 30}
    driven = drive(planned, script={"behaviours": [slow, {"act": "engine_error", "record": planned.ids[2][10]}]})
    with pytest.raises(EngineFailedError):
        driven.finish()
    assert len(driven.worker.leases) == 2
    expire_all(planned)
    outlive(planned, killing([planned.ids[2][10]]))
    assert_exactly_dead(planned, [planned.ids[2][10]])
    for shard in planned.ids:
        log = planned.installation.shard_log(job=planned.job, version=planned.version, shard=shard)
        assert any(isinstance(entry, Start) for slot in log.read(None) for entry in slot or ())


def test_a_notice_while_suspects_are_answered_blames_nobody(installation: Installation) -> None:
    planned = plan(installation, {1: ids(40)})
    script = {"answers_per_poll": 1, "behaviours": [{"act": "engine_error", "record": "T-0013", "attempts_max": 1}]}
    first = drive(planned, script=script)
    with pytest.raises(EngineFailedError):
        first.finish()
    expire_all(planned)
    second = drive(planned, worker_id="w2", script={"answers_per_poll": 1})
    turns = second.until(lambda point: point is Point.FED and bool(folded(planned, 1).suspicion.started))
    second.worker.stop()
    assert list(turns)[-1] is Point.RELEASED
    drive(planned, worker_id="w3").finish()
    assert_exactly_dead(planned, [])


def test_a_worker_whose_engine_always_dies_blames_nobody(installation: Installation) -> None:
    """It dies of whatever it is asked, its control too; then a sound one answers all."""
    planned = plan(installation, {1: ids(40)})
    drive(planned, worker_id="sound", script={"answers_per_poll": 1}, flush_s=0.1).until(lambda point: point is Point.FLUSHED)
    expire_all(planned)
    everything = {"behaviours": [{"act": "engine_error"}]}
    for number in range(20):
        bad = drive(planned, worker_id=f"bad-{number}", script=everything)
        with pytest.raises(EngineFailedError):
            bad.finish()
        assert [attempt for _, attempt in bad.engine.asked] == [CONTROL_ATTEMPT]
        expire_all(planned)
    drive(planned, worker_id="sound-2").finish()
    assert_exactly_dead(planned, [])


def test_where_nothing_was_ever_answered_nobody_is_blamed_and_the_shard_is_blocked_in_the_end(installation: Installation) -> None:
    planned = plan(installation, {1: ids(40)})
    for number in range(DEATHS_MAX):
        if installation.register.shards(planned.job, planned.version)[0].state is ShardState.BLOCKED:
            break
        with pytest.raises(EngineFailedError):
            drive(planned, worker_id=f"w{number}", script={"behaviours": [{"act": "engine_error"}]}).finish()
        expire_all(planned)
    (row,) = installation.register.shards(planned.job, planned.version)
    assert row.blocked_reason == "50 machines were lost with it"
    assert not folded(planned, 1).failed
    assert not folded(planned, 1).dead


def test_a_version_of_one_record_that_kills_comes_to_its_end(installation: Installation) -> None:
    planned = plan(installation, {1: ids(1)})
    outlive(planned, killing(["T-0000"]))
    assert_exactly_dead(planned, ["T-0000"])


# ------------------------------------------------------------------------------------------------------------------------ bad answers


@pytest.mark.parametrize("behaviour", ["invalid", "wrong_schema", "truncate", "reject", "never"])
def test_a_worker_that_gets_no_valid_answer_uses_up_no_attempt_and_gives_its_shards_back(
    installation: Installation, behaviour: str
) -> None:
    planned = plan(installation, {1: ids(100)})
    driven = drive(planned, script={"behaviours": [{"act": behaviour}]}, answer_timeout_s=1.0)
    with pytest.raises(UnfitWorkerError) as unfit:
        driven.finish()
    assert f"none of the last {ROW_MAX}" in str(unfit.value) or behaviour in ("never", "reject")
    (row,) = installation.register.shards(planned.job, planned.version)
    assert (row.state, row.previous_end, row.avoid_worker, row.losses) == (ShardState.PENDING, LeaseEnd.RELEASED, "w1", 0)
    state = folded(planned, 1)
    assert not state.failed
    assert not state.dead
    drive(planned, worker_id="w2").finish()
    assert_exactly_dead(planned, [])


def test_a_worker_that_begins_to_garble_is_found_out_by_a_question_whose_answer_is_known(installation: Installation) -> None:
    """Every answer from the 30th on is none; the control fails as well, so it is not the records."""
    planned = plan(installation, {1: ids(200)})
    driven = drive(planned, flush_s=0.1)
    turns = driven.until(lambda point: point is Point.ANSWERED and driven.counters.completed >= 30)
    broken = drive(planned, script={"behaviours": [{"act": "invalid"}]})
    driven.engine._script = broken.engine._script
    for live, (request, _) in driven.engine._live.items():
        driven.engine._live[live] = (request, broken.engine._script.behaviours[0])
    with pytest.raises(UnfitWorkerError):
        list(turns)
    state = folded(planned, 1)
    assert len(state.failed) <= 3
    assert not state.dead
    drive(planned, worker_id="w2").finish()
    assert set(folded(planned, 1).answered) == set(planned.ids[1])


def test_a_worker_that_fails_more_often_than_the_others_leaves_and_what_failed_there_failed_for_nobody(installation: Installation) -> None:
    """Half of its answers are garbled; elsewhere one of a hundred is. Answers that it has put stay."""
    planned = plan(installation, {1: ids(400)})
    register = installation.register
    register.worker_started(worker_id="sound", job=planned.job, version=planned.version, host="h", pid=1)
    register.worker_heartbeat("sound", {"completed": 2000, "failed": 20})
    garbled = [{"act": "invalid", "record": record} for record in planned.ids[1][::2]]
    driven = drive(planned, script={"behaviours": garbled}, flush_s=0.1)
    with pytest.raises(UnfitWorkerError, match=r"of this worker's \d+ answers failed, and 20 of 2000 elsewhere"):
        driven.finish()
    state = folded(planned, 1)
    assert len(state.answered) > 20
    assert not state.failed
    assert state.void_entries > 0
    drive(planned, worker_id="sound").finish()
    assert_exactly_dead(planned, [])


def test_many_records_that_fail_beside_a_known_answer_are_their_own_fault(installation: Installation) -> None:
    """The last 80 of 100 fail each time: the control is answered, so these are dead letters and not a bad worker."""
    planned = plan(installation, {1: ids(100)})
    bad = list(planned.ids[1][20:])
    driven = drive(planned, script={"behaviours": [{"act": "invalid", "record": record} for record in bad]})
    driven.finish()
    assert set(folded(planned, 1).dead) == set(bad)
    assert any(attempt == CONTROL_ATTEMPT for _, attempt in driven.engine.asked)


def test_a_record_that_needed_a_second_try_is_no_control(installation: Installation) -> None:
    """It would fail as a control, and a sound worker would leave for ever: the next one would ask it again (crash history of seed 5)."""
    planned = plan(installation, {1: ids(20)})
    first, *rest = planned.ids[1]
    flaky = {"act": "invalid", "record": first, "attempts_max": 1}
    driven = drive(planned, script={"behaviours": [flaky, *({"act": "invalid", "record": record} for record in rest[:6])]})
    driven.finish()
    driven = drive(planned, worker_id="w2", script={"behaviours": [flaky, *({"act": "invalid", "record": record} for record in rest[:6])]})
    driven.finish()
    assert folded(planned, 1).answered[first].attempt == 2
    assert set(folded(planned, 1).dead) == set(rest[:6])


def test_a_version_of_a_few_records_that_all_fail_comes_to_its_end(installation: Installation) -> None:
    planned = plan(installation, {1: ids(3)})
    driven = drive(planned, script={"behaviours": [{"act": "invalid"}]})
    driven.finish()
    assert {entry.dead_class for entry in folded(planned, 1).dead.values()} == {"not_json"}
    assert len(folded(planned, 1).dead) == 3


def test_failures_that_pass_are_tried_again_on_resume_until_their_attempts_are_used_up(installation: Installation) -> None:
    planned = plan(installation, {1: ids(40)})
    passing = [{"act": "invalid", "record": record, "attempts_max": 1} for record in planned.ids[1][:4]]
    first = drive(planned, script={"behaviours": passing}, flush_s=0.0)
    turns = first.until(lambda point: point is Point.FLUSHED and len(folded(planned, 1).failed) == 4)
    first.worker.stop()
    list(turns)
    assert not set(folded(planned, 1).answered) & set(planned.ids[1][:4])
    drive(planned, worker_id="w2", script={"behaviours": passing}).finish()
    state = folded(planned, 1)
    assert set(state.answered) == set(planned.ids[1])
    assert {state.answered[record].attempt for record in planned.ids[1][:4]} == {2}


def test_the_last_attempt_at_a_record_is_made_by_another_worker(installation: Installation) -> None:
    planned = plan(installation, {1: ids(20), 2: ids(20, start=100)})
    script = {"behaviours": [{"act": "invalid", "record": "T-0003", "attempts_max": 2}]}
    register = installation.register
    for worker in ("w1", "w2"):
        register.worker_started(worker_id=worker, job=planned.job, version=planned.version, host="h", pid=1)
    first = drive(planned, script=script)
    turns = first.until(lambda point: point is Point.RELEASED)
    assert register.shards(planned.job, planned.version, [1])[0].avoid_worker == "w1"
    assert first.engine.asked_of("T-0003") == 2
    second = drive(planned, worker_id="w2", script=script)
    rest = second.turns()
    for _ in turns:
        if next(rest, None) is Point.IDLE and not open_shards(planned):
            second.worker.stop()
            first.worker.stop()
    assert [record for record, attempt in second.engine.asked if attempt == 3] == ["T-0003"]
    state = folded(planned, 1)
    assert (state.answered["T-0003"].worker, state.answered["T-0003"].attempt) == ("w2", 3)
    assert first.restarts == 0


def test_when_nobody_else_comes_within_a_lease_the_worker_ends_so_that_its_successor_may_try(installation: Installation) -> None:
    planned = plan(installation, {1: ids(20)})
    for worker in ("w1", "busy"):
        installation.register.worker_started(worker_id=worker, job=planned.job, version=planned.version, host="h", pid=1)
    driven = drive(planned, script={"behaviours": [{"act": "invalid", "record": "T-0003"}]})
    released_s: float | None = None
    for point in driven.turns():
        if point is Point.RELEASED:
            released_s = driven.now_s[0]
    assert released_s is not None
    assert 90.0 <= driven.now_s[0] - released_s < 92.0
    assert open_shards(planned) == [1]
