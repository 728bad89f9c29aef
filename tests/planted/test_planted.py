"""Planted bugs in CI: every patch applies, and five of them, others each day, are caught. All of them: `make planted-bugs`."""

from datetime import UTC, datetime

import pytest

from tests.planted.run import Bug, apply, plant, read_bugs, tree_copied

BUGS_MIN = 20
PER_DAY = 5
BUGS = read_bugs()


def of_the_day(bugs: list[Bug], day: int) -> list[Bug]:
    """PER_DAY of them; all come up within len / PER_DAY days."""
    first = day * PER_DAY
    return [bugs[(first + offset) % len(bugs)] for offset in range(PER_DAY)]


def named(bug: Bug) -> str:
    return f"{bug.number}_{bug.name}"


def test_there_are_enough_bugs_and_their_numbers_are_their_own() -> None:
    assert len(BUGS) >= BUGS_MIN
    assert len({bug.number for bug in BUGS}) == len(BUGS)


def test_every_patch_applies_to_the_tree_as_it_is() -> None:
    with tree_copied() as tree:
        problems = {named(bug): apply(bug, tree, check_only=True) for bug in BUGS}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_the_bugs_of_successive_days_are_all_of_them() -> None:
    days = -(-len(BUGS) // PER_DAY)
    assert {bug.number for day in range(days) for bug in of_the_day(BUGS, day)} == {bug.number for bug in BUGS}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", of_the_day(BUGS, datetime.now(UTC).toordinal()), ids=named)
def test_a_bug_of_the_day_is_caught(bug: Bug) -> None:
    finding = plant(bug)
    assert finding.is_caught, finding


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bug", BUGS, ids=named)
def test_every_bug_is_caught(bug: Bug) -> None:
    finding = plant(bug)
    assert finding.is_caught, finding
