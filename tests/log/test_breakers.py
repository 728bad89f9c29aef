"""When failures are the worker's, or everybody's: pure rules."""

import pytest

from batch_assets.core.breakers import (
    COMPARED_MIN,
    LOST_IN_A_ROW_MAX,
    ROW_BELIEVED_MAX,
    UNFIT_IN_A_ROW_MAX,
    Evidence,
    FleetBreaker,
    Tally,
    is_unlike_the_others,
)
from batch_assets.core.shard_log import Answered, Dead, Failed, Fence, Pardon, fold
from batch_assets.core.supervision import EXIT_UNFIT, WorkerExit


def exit_of(code: int | None, *, fruitful: bool = True) -> WorkerExit:
    return WorkerExit(worker_id="w", exit_code=code, was_fruitful=fruitful, last_line_class=None, log_path="w.log", own_words="none valid")


def test_failures_are_believed_only_beside_answers() -> None:
    evidence = Evidence()
    assert not evidence.is_sound
    evidence.answered()
    for _ in range(ROW_BELIEVED_MAX):
        evidence.failed()
        assert evidence.is_sound
    evidence.failed()
    assert not evidence.is_sound
    evidence.answered()
    assert evidence.is_sound


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ((100, 90), (1000, 10), True),
        ((400, 100), (1000, 10), True),
        ((400, 99), (1000, 10), False),  # below a quarter
        ((100, 90), (1000, 500), False),  # all fail alike: the snapshot or the recipe
        ((100, 90), (COMPARED_MIN - 1, 0), False),  # nobody to compare with
        ((COMPARED_MIN - 1, COMPARED_MIN - 1), (1000, 0), False),  # too few
        ((0, 100), (1000, 0), True),  # timed out, all of them
    ],
)
def test_a_worker_is_compared_with_all_others(own: tuple[int, int], others: tuple[int, int], expected: bool) -> None:
    assert is_unlike_the_others(Tally(completed=own[0], failed=own[1]), Tally(completed=others[0], failed=others[1])) is expected


def test_one_unfit_worker_is_a_bad_machine_and_a_second_one_is_the_version() -> None:
    breaker = FleetBreaker(workers=4)
    breaker.exited([exit_of(EXIT_UNFIT)] * (UNFIT_IN_A_ROW_MAX - 1), progress=0)
    assert breaker.reason is None
    breaker.exited([exit_of(EXIT_UNFIT)], progress=1)  # somebody has an answer: not everything fails
    assert breaker.reason is None
    breaker.exited([exit_of(EXIT_UNFIT)], progress=1)
    assert breaker.reason == "everything fails alike: none valid; no attempt was used up; read w.log, then resume"


def test_deaths_between_which_something_is_done_hold_nothing() -> None:
    breaker = FleetBreaker(workers=1)
    for progress in range(10 * LOST_IN_A_ROW_MAX):
        breaker.exited([exit_of(-9)], progress=progress)
    assert breaker.reason is None


def test_deaths_in_a_row_hold_the_version_in_proportion_to_the_fleet() -> None:
    breaker = FleetBreaker(workers=2)
    breaker.exited([exit_of(-9)] * (2 * LOST_IN_A_ROW_MAX - 1) + [exit_of(0)] * 5 + [exit_of(1, fruitful=False)] * 5, progress=0)
    assert breaker.reason is None
    breaker.exited([exit_of(70)], progress=0)
    assert breaker.reason is not None
    assert breaker.reason.startswith("24 workers died and no record was answered in between; the last: exit code 70")


def test_a_pardon_voids_the_failures_of_its_epoch_and_no_answer() -> None:
    log = [
        [Fence(1, 0, "w1", 8, None), Failed("a", 1, 1, "schema", "", 7)],
        [Fence(2, 0, "w2", 8, "released"), Failed("a", 2, 2, "schema", "", 7), Failed("b", 2, 1, "schema", "", 7)],
        [Answered("c", 2, 1, "{}", 10, 0, 5, "w2"), Dead("a", 2, 3, "schema", ""), Pardon(2)],
        [Pardon(1)],  # of an epoch that is over: void itself
    ]
    folded = fold(log, staged_rounds={})
    assert folded.failed == {"a": 1}
    assert not folded.dead
    assert set(folded.answered) == {"c"}
    assert folded.void_entries == 4
    assert folded.tokens_thrown_away == 21
