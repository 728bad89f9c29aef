"""docs/states.md is the specification of the states: it says what the code does."""

from enum import StrEnum
from pathlib import Path

import pytest

from batch_assets.core.breakers import (
    COMPARED_MIN,
    LOST_IN_A_ROW_MAX,
    ROW_BELIEVED_MAX,
    ROW_MAX,
    SAMPLE_MIN,
    UNFIT_IN_A_ROW_MAX,
)
from batch_assets.core.leasing import (
    LOSSES_MAX,
    RETURNED_MAX,
    SHARD_TRANSITIONS,
    VERSION_HOLDS,
    VERSION_TRANSITIONS,
    LeaseEnd,
    ShardState,
    VersionState,
    losses_after,
)
from batch_assets.core.retries import PARTS
from batch_assets.core.supervision import EXIT_UNFIT, STARTS_PER_WORKER_MINUTE_MAX

DOCUMENT = (Path(__file__).parents[2] / "docs" / "states.md").read_text()


def table_rows(header: str) -> list[list[str]]:
    """Cells of the tables whose header row starts so, without the marks of code."""
    rows, inside = [], False
    for line in DOCUMENT.splitlines():
        inside = line.startswith(header) or (inside and line.startswith("|"))
        if inside and not line.startswith((header, "|---")):
            rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("states", [ShardState, VersionState])
def test_every_state_has_its_row(states: type[StrEnum]):
    documented = [cells[0] for cells in table_rows("| state | meaning |")]
    assert set(states) <= set(documented)
    assert sorted(documented) == sorted([*ShardState, *VersionState])


def test_the_shard_moves_are_those_of_the_code():
    documented = {move: (source, target, actor) for move, source, target, actor, _ in table_rows("| move | from | to | by | fence")}
    assert documented == {
        move: (
            ", ".join(sorted(transition.sources)),
            transition.target + (f", then {transition.beyond}" if transition.beyond else ""),
            transition.actor,
        )
        for move, transition in SHARD_TRANSITIONS.items()
    }


def test_the_version_moves_are_those_of_the_code():
    documented = {move: (source, target, actor) for move, source, target, actor, _ in table_rows("| move | from | to | by | condition")}
    assert documented == {
        move: (", ".join(sorted(transition.sources)), transition.target, transition.actor)
        for move, transition in VERSION_TRANSITIONS.items()
    }


def test_the_ends_of_a_lease_are_those_of_the_code():
    documented = {end: loss for end, _, loss, _ in table_rows("| end | who says so")}
    assert documented == {end: "yes" if losses_after(losses=0, end=end) else "no" for end in LeaseEnd}


def test_the_bounds_are_those_of_the_code():
    assert f"at {LOSSES_MAX} losses the shard is blocked" in DOCUMENT
    assert f"the {RETURNED_MAX + 1}th time the shard is blocked" in DOCUMENT


def test_every_hold_of_a_version_is_named():
    assert all(f"`{reason}`" in DOCUMENT for reason in VERSION_HOLDS)


def test_the_bounds_of_the_breakers_are_those_of_the_code():
    budgets = " ".join(cell for cells in table_rows("| what ended |") for cell in cells)
    assert f"{LOST_IN_A_ROW_MAX} in a row for each place" in budgets
    assert f"{UNFIT_IN_A_ROW_MAX} in a row with no answer" in budgets
    assert f"{LOSSES_MAX} losses" in budgets
    doubts = " ".join(cell for cells in table_rows("| doubt |") for cell in cells)
    assert f"more than {ROW_BELIEVED_MAX} failures in a row" in doubts
    assert f"{ROW_MAX} failures in a row" in doubts
    assert f"{SAMPLE_MIN} failures or more" in doubts
    assert f"{COMPARED_MIN} failures, and at each doubling" in doubts
    suspects = " ".join(cell for cells in table_rows("| the log says |") for cell in cells)
    assert f"at most {PARTS} groups" in suspects
    assert f"exit code {EXIT_UNFIT}" in DOCUMENT
    assert f"{STARTS_PER_WORKER_MINUTE_MAX} starts" in " ".join(DOCUMENT.split())
