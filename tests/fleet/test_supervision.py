"""The decisions of a supervisor: how many workers, which exits are a crash loop, how far the work is."""

import pytest

from batch_assets.core.supervision import (
    EXIT_UNFIT,
    FRUITLESS_EXITS_MAX,
    FRUITLESS_FORGET_S,
    START_WINDOW_S,
    STARTS_PER_WORKER_MINUTE_MAX,
    Done,
    RateMeter,
    StartBudget,
    Underway,
    WorkerExit,
    dead_done,
    last_line_class,
    refusal_text,
    rows_done,
    workers_to_start,
)


def exit_of(code: int | None, *, fruitful: bool = False) -> WorkerExit:
    return WorkerExit(worker_id="w", exit_code=code, was_fruitful=fruitful, last_line_class=None, log_path="w.log")


@pytest.mark.parametrize(
    ("workers", "alive", "open_shards", "allowed", "expected"),
    [(4, 0, 100, 24, 4), (4, 3, 100, 24, 1), (4, 0, 2, 24, 2), (4, 4, 1, 24, 0), (4, 6, 100, 24, 0), (4, 0, 0, 24, 0), (4, 0, 100, 1, 1)],
)
def test_the_fleet_is_filled_up_to_its_size_the_open_shards_and_the_budget(
    workers: int, alive: int, open_shards: int, allowed: int, expected: int
) -> None:
    assert workers_to_start(workers=workers, alive=alive, open_shards=open_shards, allowed=allowed) == expected


def test_starts_are_bounded_per_worker_and_minute() -> None:
    budget = StartBudget(workers=2)
    for second in range(2 * STARTS_PER_WORKER_MINUTE_MAX):
        assert budget.allowed(now_s=float(second)) > 0
        budget.started(now_s=float(second))
    assert budget.allowed(now_s=30.0) == 0
    assert budget.allowed(now_s=START_WINDOW_S) == 1


def test_exits_without_having_done_anything_are_a_crash_loop_when_nothing_else_comes_between() -> None:
    budget = StartBudget(workers=2)
    budget.exited([exit_of(1)] * (FRUITLESS_EXITS_MAX - 1), now_s=0.0)
    budget.exited([exit_of(-9, fruitful=True)], now_s=0.0)
    budget.exited([exit_of(1)] * (FRUITLESS_EXITS_MAX - 1), now_s=0.0)
    assert not budget.crash_loop(now_s=0.0)
    budget.exited([exit_of(-11)], now_s=0.0)
    assert len(budget.crash_loop(now_s=0.0)) == FRUITLESS_EXITS_MAX
    assert budget.allowed(now_s=0.0) == 0
    assert not budget.crash_loop(now_s=FRUITLESS_FORGET_S)


def test_one_refusal_is_enough_and_a_clean_exit_is_none() -> None:
    budget = StartBudget(workers=2)
    budget.exited([exit_of(0)] * 10, now_s=0.0)
    assert not budget.crash_loop(now_s=0.0)
    budget.exited([exit_of(6)], now_s=0.0)
    assert budget.crash_loop(now_s=0.0)


def test_workers_that_answer_nothing_are_not_started_again_and_again() -> None:
    budget = StartBudget(workers=2)
    budget.exited([exit_of(EXIT_UNFIT, fruitful=True)] * FRUITLESS_EXITS_MAX, now_s=0.0)
    assert budget.allowed(now_s=0.0) == 0
    budget.exited([exit_of(0)], now_s=1.0)
    assert budget.allowed(now_s=1.0) > 0


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("Traceback\n  File x\ntorch.OutOfMemoryError: CUDA out of memory for 'the customer wrote'\n\n", "torch.OutOfMemoryError"),
        ("ModuleNotFoundError: No module named 'vllm'", "ModuleNotFoundError"),
        ('{"at": "x", "event": "engine_failed", "reason": "the customer wrote"}', "engine_failed"),
        ("my password is hunter2", None),
        ("", None),
    ],
)
def test_of_a_foreign_last_line_only_the_class_is_quoted(log: str, expected: str | None) -> None:
    assert last_line_class(log) == expected


def test_a_refusal_is_quoted_whole_because_it_is_in_our_own_words() -> None:
    log = 'INFO loading\n{"event": "refused", "code": "model.digest", "text": "  expected sha256:11, found sha256:22"}\n'
    assert refusal_text(log) == "expected sha256:11, found sha256:22"
    assert refusal_text("Killed\n") == ""


def test_rows_done_is_exact_for_committed_shards_and_never_the_total_before_all_are() -> None:
    committed = Done(rows=50, dead=3, set_aside=2, redone=4)
    assert committed.logged == 52
    assert rows_done(total=100, committed=committed, underway=Underway(answered=60, dead=2), all_committed=False) == 60
    assert rows_done(total=100, committed=committed, underway=Underway(answered=500), all_committed=False) == 99
    assert rows_done(total=100, committed=committed, underway=Underway(), all_committed=False) == 50
    assert rows_done(total=100, committed=committed, underway=Underway(), all_committed=True) == 100


def test_dead_letters_are_among_the_rows_that_are_done() -> None:
    committed = Done(rows=50, dead=5, set_aside=4)
    assert dead_done(rows=60, committed=committed, underway=Underway(dead=3)) == 7
    assert dead_done(rows=50, committed=committed, underway=Underway(dead=0)) == 5
    assert dead_done(rows=6, committed=committed, underway=Underway(dead=90)) == 6


def test_a_record_that_a_redrive_opened_again_was_logged_twice_and_counts_once() -> None:
    """100 records, 10 of them dead in the first round; a redrive of 8 recovers 5."""
    committed = Done(rows=100, dead=5, reopened=8)
    logged_by_workers = Underway(answered=95, dead=13)
    assert committed.logged == logged_by_workers.logged == 108
    assert dead_done(rows=100, committed=committed, underway=logged_by_workers) == 5


def test_the_rate_is_that_of_the_last_minute() -> None:
    meter = RateMeter(window_s=60.0)
    assert meter.sample(now_s=0.0, rows=0) == 0
    assert meter.sample(now_s=10.0, rows=100) == 10
    for second in range(20, 200, 10):
        rate = meter.sample(now_s=float(second), rows=100 + 2 * (second - 10))
    assert rate == pytest.approx(2.0)
