"""What the worker promises about records, whatever the engine does: the real loop, register, log and frozen input; a scripted engine."""

from pathlib import Path

import pytest

from batch_assets.core.errors import EngineFailedError
from batch_assets.core.leasing import HoldReason, LeaseEnd
from batch_assets.core.prompting import PromptRenderer, RenderError, parse_prompt
from batch_assets.core.request_ids import CONTROL_ATTEMPT
from batch_assets.engines.tokenizers import tokenizer_for
from batch_assets.stores.installation import Installation
from batch_assets.worker.loop import LEASES_MAX, Point
from tests.support.jobs import PROMPT
from tests.support.versions import claim, failed, installation_in, write
from tests.support.workers import TURN_S, drive, expire_all, folded, ids, open_shards, plan


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return installation_in(tmp_path)


def act(kind: str, record: str, **more: object) -> dict[str, object]:
    return {"act": kind, "record": record, **more}


def test_every_record_of_every_shard_is_answered_once_and_the_shards_are_staged(installation: Installation) -> None:
    planned = plan(installation, {1: ids(30), 2: ids(7, start=100), 3: ids(1, start=200)}, set_aside={1: ["E-1", "E-2"]})
    driven = drive(planned)
    driven.finish()
    assert open_shards(planned) == []
    for shard, expected in planned.ids.items():
        assert set(folded(planned, shard).answered) == set(expected)
    assert sorted(record for record, _ in driven.engine.asked) == sorted(record for part in planned.ids.values() for record in part)
    assert driven.counters.answered == driven.counters.completed == 38


def test_more_is_in_flight_than_decodes_together_and_never_more_than_the_window(installation: Installation) -> None:
    driven = drive(plan(installation, {1: ids(50)}))
    driven.finish()
    assert driven.engine.live_max == 2 * driven.engine.max_num_seqs


def test_the_next_shard_is_fed_while_one_record_of_this_one_still_decodes(installation: Installation) -> None:
    planned = plan(installation, {1: ids(10), 2: ids(10, start=100), 3: ids(10, start=200)})
    driven = drive(planned, script={"behaviours": [act("slow", planned.ids[1][3], polls=12)]})
    driven.until(lambda point: point is Point.ANSWERED and driven.counters.completed == 19)
    assert driven.worker.leases[0].shard == 1
    driven = drive(planned)
    expire_all(planned)
    driven.finish()
    assert driven.leases_max <= LEASES_MAX


def test_an_invalid_answer_is_asked_for_again_until_it_is_valid(installation: Installation) -> None:
    planned = plan(installation, {1: ids(20)})
    driven = drive(planned, script={"behaviours": [act("invalid", "T-0003", attempts_max=2), act("truncate", "T-0004", attempts_max=1)]})
    driven.finish()
    state = folded(planned, 1)
    assert state.answered["T-0003"].attempt == 3
    assert state.answered["T-0004"].attempt == 2
    assert state.failures_by_class == {"not_json": 2, "truncated": 1}
    assert not state.dead


@pytest.mark.parametrize(
    ("behaviour", "dead_class"),
    [("invalid", "not_json"), ("surrogate", "not_json"), ("wrong_schema", "schema"), ("truncate", "truncated"), ("never", "timed_out")],
)
def test_a_record_that_fails_each_time_is_a_dead_letter_after_its_attempts_and_hurts_nobody(
    installation: Installation, behaviour: str, dead_class: str
) -> None:
    planned = plan(installation, {1: ids(20)})
    driven = drive(planned, script={"behaviours": [act(behaviour, "T-0007")]})
    driven.finish()
    state = folded(planned, 1)
    assert {record: (entry.dead_class, entry.attempt) for record, entry in state.dead.items()} == {"T-0007": (dead_class, 3)}
    assert set(state.answered) == set(ids(20)) - {"T-0007"}
    assert driven.engine.asked_of("T-0007") == 3
    assert open_shards(planned) == []


def test_a_record_that_the_engine_refuses_is_dead_at_once_and_no_neighbour_is_aborted(installation: Installation) -> None:
    planned = plan(installation, {1: ids(40)})
    driven = drive(planned, script={"behaviours": [act("reject", "T-0007")]})
    driven.finish()
    state = folded(planned, 1)
    assert [(entry.dead_class, entry.attempt) for entry in state.dead.values()] == [("rejected", 1)]
    assert len(state.answered) == 39
    assert driven.counters.completed == 39


def test_a_record_without_a_prompt_is_a_dead_letter_and_no_call(installation: Installation) -> None:
    class Refusing(PromptRenderer):
        def render(self, fields):
            if fields["body"] == "text of T-0002":
                raise RenderError(field="body", reason="not today")
            return super().render(fields)

    planned = plan(installation, {1: ids(5)})
    driven = drive(planned, renderer=Refusing(parse_prompt(PROMPT), tokenizer_for("scripted", "")))
    driven.finish()
    assert [(entry.record_id, entry.dead_class, entry.attempt) for entry in folded(planned, 1).dead.values()] == [
        ("T-0002", "render_error", 0)
    ]
    assert driven.engine.asked_of("T-0002") == 0


def test_retries_wait_until_every_fresh_record_was_asked(installation: Installation) -> None:
    planned = plan(installation, {1: ids(30)})
    first = planned.ids[1][0]
    driven = drive(planned, script={"behaviours": [act("invalid", first, attempts_max=1)]})
    driven.finish()
    assert driven.engine.asked[-1] == (first, 2)


def test_a_time_limit_does_not_run_while_the_process_is_stopped(installation: Installation) -> None:
    planned = plan(installation, {1: ids(4)})
    driven = drive(planned, script={"behaviours": [act("slow", "T-0001", polls=10)]}, answer_timeout_s=20)
    turns = driven.until(lambda point: point is Point.ANSWERED)
    driven.now_s[0] += 3600
    for point in turns:
        if point is Point.IDLE:
            driven.worker.stop()
    assert not folded(planned, 1).failed


CRASH_POINTS = [
    *[(point, nth) for point in (Point.CLAIMED, Point.FENCED, Point.FED, Point.ANSWERED, Point.FLUSHED) for nth in (1, 3)],
    (Point.STAGED, 1),
    (Point.RELEASED, 1),  # a shard of which a last attempt is left to others
    (Point.RELEASED, 2),
]


@pytest.mark.parametrize(("point", "nth"), CRASH_POINTS)
def test_a_crash_anywhere_loses_no_record_doubles_none_and_repeats_no_answer_that_was_put(
    installation: Installation, point: Point, nth: int
) -> None:
    planned = plan(installation, {1: ids(25), 2: ids(25, start=100), 3: ids(25, start=200)})
    behaviours = [act("invalid", "T-0003"), act("invalid", "T-0105", attempts_max=1), act("never", "T-0206")]
    first = drive(planned, script={"behaviours": behaviours}, flush_s=0.3)
    crashed = first.until(lambda reached: reached is point and first.points.count(point) == nth)
    del crashed
    stored = {record for shard in planned.ids for record in folded(planned, shard).answered}
    expire_all(planned)
    second = drive(planned, worker_id="w2", script={"behaviours": behaviours}, flush_s=0.3)
    second.finish()
    assert open_shards(planned) == []
    for shard, expected in planned.ids.items():
        state = folded(planned, shard)
        assert sorted([*state.answered, *state.dead]) == sorted(expected)
        assert set(state.dead) <= {"T-0003", "T-0206"}
    assert not stored & {record for record, attempt in second.engine.asked if attempt != CONTROL_ATTEMPT}
    assert first.engine.asked_of("T-0003") + second.engine.asked_of("T-0003") <= 3 + 1  # one in flight when it crashed


def test_a_worker_that_overslept_drops_its_shard_and_goes_on_with_others(installation: Installation) -> None:
    planned = plan(installation, {1: ids(25), 2: ids(25, start=100)})
    sleeper = drive(planned)
    turns = sleeper.until(lambda point: point is Point.FED)
    expire_all(planned)
    successor = drive(planned, worker_id="w2")
    rest = successor.until(lambda point: point is Point.FENCED)
    for point in turns:
        if point is Point.IDLE and not open_shards(planned):
            sleeper.worker.stop()
        next(rest, None)
        if not open_shards(planned):
            sleeper.worker.stop()
            successor.worker.stop()
    assert ("lease_lost", {"shard": f"{planned.version}-00001", "epoch": 1, "current": 2}) in sleeper.notes
    assert set(folded(planned, 1).answered) == set(planned.ids[1])
    assert {entry.worker for entry in folded(planned, 1).answered.values()} == {"w2"}
    assert set(folded(planned, 2).answered) == set(planned.ids[2])


def test_a_refused_renewal_aborts_the_requests_of_that_shard(installation: Installation) -> None:
    planned = plan(installation, {1: ids(25)})
    driven = drive(planned)
    turns = driven.until(lambda point: point is Point.FED)
    driven.worker.lose(driven.worker.leases[0])
    next(turns)  # answered
    while next(turns) is not Point.FED:
        pass
    assert driven.worker.leases == ()
    assert len(driven.engine._live) == 0


def test_a_worker_that_is_told_to_stop_puts_what_is_finished_and_gives_its_shard_back(installation: Installation) -> None:
    planned = plan(installation, {1: ids(30)})
    driven = drive(planned, flush_s=60)
    turns = driven.until(lambda point: point is Point.ANSWERED and driven.counters.completed >= 8)
    driven.worker.stop()
    assert list(turns)[-1] is Point.RELEASED
    stored = set(folded(planned, 1).answered)
    assert len(stored) == driven.counters.completed
    successor = drive(planned, worker_id="w2")
    successor.finish()
    assert set(folded(planned, 1).answered) == set(planned.ids[1])
    assert not stored & {record for record, _ in successor.engine.asked}
    (row,) = installation.register.shards(planned.job, planned.version)
    assert row.losses == 0


def test_answers_that_were_finished_are_in_the_log_when_the_engine_fails(installation: Installation) -> None:
    planned = plan(installation, {1: ids(30)})
    driven = drive(planned, script={"behaviours": [act("engine_error", planned.ids[1][20])]}, flush_s=60)
    with pytest.raises(EngineFailedError):
        driven.finish()
    assert len(folded(planned, 1).answered) == driven.counters.completed >= 8
    assert installation.register.leased(planned.job, planned.version)  # left for the leader, which sees the process exit


def test_no_answer_waits_longer_than_the_flush_interval(installation: Installation) -> None:
    planned = plan(installation, {1: ids(200)})
    driven = drive(planned, flush_s=1.0, script={"answers_per_poll": 1})
    lag_max = 0
    for point in driven.turns():
        if point is Point.IDLE:
            driven.worker.stop()
        if point is Point.FLUSHED:
            lag_max = max(lag_max, 0)
        if point is Point.FED:
            lag_max = max(lag_max, driven.counters.completed - driven.counters.answered)
    # One answer a turn of two points or more: what is not stored is never older than the interval.
    assert 0 < lag_max <= 1.0 / (2 * TURN_S)


def test_attempts_of_earlier_owners_count(installation: Installation) -> None:
    planned = plan(installation, {1: ids(5)})
    lease = claim(planned, worker="w0")
    write(planned, lease, [failed("T-0001", epoch=1, attempt=attempt) for attempt in (1, 2)] + [failed("T-0002", epoch=1, attempt=3)])
    expire_all(planned)
    driven = drive(planned, script={"behaviours": [act("invalid", "T-0001")]})
    driven.finish()
    assert driven.engine.asked_of("T-0001") == 1
    assert driven.engine.asked_of("T-0002") == 0
    assert {record: entry.dead_class for record, entry in folded(planned, 1).dead.items()} == {"T-0001": "not_json", "T-0002": "schema"}


def test_a_held_or_finished_version_ends_its_workers(installation: Installation) -> None:
    planned = plan(installation, {1: ids(5)})
    installation.register.hold_version(job=planned.job, version=planned.version, reason=HoldReason.CANCELLED)
    driven = drive(planned)
    assert Point.CLAIMED not in list(driven.turns())


def test_a_worker_waits_while_others_may_give_shards_back(installation: Installation) -> None:
    planned = plan(installation, {1: ids(5)})
    other = claim(planned, worker="other")
    driven = drive(planned)
    turns = driven.turns()
    assert all(next(turns) is not Point.CLAIMED for _ in range(60))
    installation.register.release(other, end=LeaseEnd.DRAINED)
    driven.finish()
    assert open_shards(planned) == []


def test_error_texts_hold_nothing_of_the_answer(installation: Installation) -> None:
    planned = plan(installation, {1: ids(3)})
    driven = drive(planned, script={"behaviours": [act("invalid", "T-0001"), act("wrong_schema", "T-0002")]})
    driven.finish()
    for entry in folded(planned, 1).dead.values():
        assert "no JSON at all" not in entry.error
        assert "no_such_field" not in entry.error


def test_a_slow_machine_uses_up_nobodys_attempts(installation: Installation) -> None:
    """All of a batch take longer than the time limit: that is not a failure of each record."""
    planned = plan(installation, {1: ids(4)})
    slow = [act("slow", record, polls=20) for record in ids(4)]
    driven = drive(planned, script={"behaviours": slow}, answer_timeout_s=3.0)
    driven.finish()
    assert driven.now_s[0] > 1000.0 + 3.0
    assert not folded(planned, 1).failed
