"""docs/states.md against the register itself: every move tried in every state, and what the page says of states and budgets."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import pytest

from batch_assets.core import leasing
from batch_assets.core.errors import GristmillError, NotFinishedError
from batch_assets.core.leasing import (
    SHARD_TRANSITIONS,
    VERSION_TRANSITIONS,
    Actor,
    HoldReason,
    LeaseEnd,
    ShardMove,
    ShardState,
    VersionMove,
    VersionState,
)
from batch_assets.stores.register import CommittedShard, Lease, Register, ShardRow
from tests.support.registers import JOB, activate, planned, planned_shards, spec

PAGE = (Path(__file__).parents[2] / "docs" / "states.md").read_text()
# States that a shard or version is in when it comes into being, without a move.
BORN: Mapping[StrEnum, Actor] = {
    ShardState.PENDING: Actor.PLANNER,
    ShardState.STAGED: Actor.PLANNER,
    VersionState.PLANNING: Actor.PLANNER,
}


def page_rows(header: str) -> list[list[str]]:
    """Cells of the tables whose header begins so."""
    rows, inside = [], False
    for line in PAGE.splitlines():
        is_header = line.startswith(header)
        inside = is_header or (inside and line.startswith("|"))
        if inside and not is_header and not line.startswith("|---"):
            rows.append([cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")])
    return rows


@pytest.mark.parametrize(("states", "transitions"), [(ShardState, SHARD_TRANSITIONS), (VersionState, VERSION_TRANSITIONS)])
def test_the_page_says_who_sets_each_state_and_which_are_terminal(
    states: type[StrEnum], transitions: Mapping[StrEnum, leasing.ShardTransition | leasing.VersionTransition]
) -> None:
    moves = transitions.values()
    expected = {}
    for state in states:
        setters = {move.actor for move in moves if state in {move.target, getattr(move, "beyond", None)}} | (
            {BORN[state]} if state in BORN else set()
        )
        expected[state.value] = (", ".join(sorted(setters)), "no" if any(state in move.sources for move in moves) else "yes")
    said = {cells[0]: (cells[2], cells[3]) for cells in page_rows("| state | meaning | set by | terminal |")}
    assert {state: said[state] for state in expected} == expected


# --- every move in every state of the register ----------------------------------------------------------------------------------------


class OneShard:
    """A version of one shard that can be brought into any state, and on which every move can be tried."""

    def __init__(self, register: Register, number: int) -> None:
        self.register = register
        self.version = planned(register, shards=1, prompt=f"p{number}")
        self.at = {"job": JOB, "version": self.version}
        generation = register.take_lead(**self.at, holder="leader", seen=None)
        assert generation is not None
        self.led = {**self.at, "generation": generation}
        self.lease: Lease | None = None

    @property
    def row(self) -> ShardRow:
        return self.register.shards(JOB, self.version)[0]

    def bring_to(self, state: ShardState) -> None:
        ways: Mapping[ShardState, list[ShardMove]] = {
            ShardState.PENDING: [],
            ShardState.LEASED: [ShardMove.CLAIM],
            ShardState.STAGED: [ShardMove.CLAIM, ShardMove.STAGE],
            ShardState.COMMITTED: [ShardMove.CLAIM, ShardMove.STAGE, ShardMove.COMMIT],
            ShardState.BLOCKED: [ShardMove.CLAIM, ShardMove.BLOCK],
        }
        for move in ways[state]:
            self.try_move(move)
        assert self.row.state is state

    def try_move(self, move: ShardMove) -> None:
        """By the one who would have the right to it."""
        held = self.lease or Lease(
            **self.at,
            shard=1,
            epoch=1,
            round=0,
            worker="a",
            previous_end=None,
            staged_rounds={},
            rows=10,
            to_answer=10,
            input_attempt="a1",
            input_sha256="",
        )
        row, register = self.row, self.register
        moves: Mapping[ShardMove, Callable[[], object]] = {
            ShardMove.CLAIM: self._claim,
            ShardMove.RENEW: lambda: register.renew(held),
            ShardMove.STAGE: lambda: register.stage(held, slots=2, seconds=1),
            ShardMove.RELEASE: lambda: register.release(held, end=LeaseEnd.DRAINED),
            ShardMove.EXPIRE: lambda: register.expire(**self.at, shard=1, epoch=row.epoch, renewals=row.renewals),
            ShardMove.COMMIT: lambda: register.commit(**self.led, shards=[CommittedShard(number=1, round=row.round)]),
            ShardMove.SEND_BACK: lambda: register.send_back(**self.led, shard=1, reason="ids are missing"),
            ShardMove.BLOCK: lambda: register.block(**self.led, shard=1, reason="its input does not verify"),
            ShardMove.UNBLOCK: lambda: register.unblock(**self.at),
            ShardMove.REDRIVE: self._redrive,
        }
        with suppress(GristmillError):
            moves[move]()

    def _claim(self) -> None:
        self.lease = self.register.claim(**self.at, worker="a") or self.lease

    def _redrive(self) -> None:
        self.register.finish_version(**self.at)  # which it is when its shard is committed, and only then
        self.register.redrive(**self.led, shards=[self.row])


@pytest.mark.parametrize("at_the_bound", [False, True])
def test_every_move_in_every_state_of_a_shard_ends_where_the_page_says(
    register: Register, monkeypatch: pytest.MonkeyPatch, at_the_bound: bool
) -> None:
    """A move that is not defined in a state changes nothing at all."""
    if at_the_bound:
        monkeypatch.setattr(leasing, "LOSSES_MAX", 1)
        monkeypatch.setattr(leasing, "RETURNED_MAX", 0)
    for number, (state, move) in enumerate((state, move) for state in ShardState for move in ShardMove):
        shard = OneShard(register, number)
        shard.bring_to(state)
        before = shard.row
        shard.try_move(move)
        transition = SHARD_TRANSITIONS[move]
        if state in transition.sources:
            assert shard.row.state is ((transition.beyond if at_the_bound else None) or transition.target), (state, move)
        else:
            assert shard.row == before, (state, move)


def test_the_page_says_which_budget_each_move_uses_up(register: Register) -> None:
    used: dict[str, set[str]] = {}
    for number, move in enumerate(ShardMove):
        shard = OneShard(register, number)
        shard.bring_to(min(SHARD_TRANSITIONS[move].sources))
        before = shard.row
        shard.try_move(move)
        used[move] = {budget for budget in ("losses", "returned") if getattr(shard.row, budget) > getattr(before, budget)}
    said = {
        cells[0]: {budget for budget in ("losses", "returned") if f"({budget})" in cells[1]} for cells in page_rows("| move | budget |")
    }
    assert {move: budgets for move, budgets in said.items() if budgets} == {move: budgets for move, budgets in used.items() if budgets}


def version_in(register: Register, state: VersionState) -> str:
    """One shard; committed when that is needed to finish."""
    version = register.register_version(spec(), kind="full").name
    at = {"job": JOB, "version": version}
    if state is VersionState.PLANNING:
        return version
    assert activate(register, version, planned_shards(1, to_answer=0))
    generation = register.take_lead(**at, holder="leader", seen=None)
    assert generation is not None
    register.commit(**at, generation=generation, shards=[CommittedShard(number=1, round=0)])
    if state is VersionState.HELD:
        register.hold_version(**at, reason=HoldReason.BREAKER)
    if state is VersionState.FINISHED:
        register.finish_version(**at)
    return version


def reopen(register: Register, version: str) -> None:
    """By a redrive of all its shards, under the lead."""
    at = {"job": JOB, "version": version}
    generation = register.take_lead(**at, holder="redrive", seen=register.lead(JOB, version))
    assert generation is not None
    with suppress(NotFinishedError):
        register.redrive(**at, generation=generation, shards=register.shards(JOB, version))


@pytest.mark.parametrize("state", [VersionState.PLANNING, VersionState.ACTIVE, VersionState.HELD, VersionState.FINISHED])
@pytest.mark.parametrize("move", list(VersionMove))
def test_every_move_in_every_state_of_a_version_ends_where_the_page_says(
    register: Register, state: VersionState, move: VersionMove
) -> None:
    version = version_in(register, state)
    at = {"job": JOB, "version": version}
    moves: Mapping[VersionMove, Callable[[], object]] = {
        VersionMove.ACTIVATE: lambda: activate(register, version, planned_shards(1), attempt="a2"),
        VersionMove.ACTIVATE_HELD: lambda: activate(register, version, planned_shards(1), attempt="a2", hold=HoldReason.APPROVAL),
        VersionMove.HOLD: lambda: register.hold_version(**at, reason=HoldReason.BREAKER),
        VersionMove.LIFT: lambda: register.lift_version_hold(**at),
        VersionMove.FINISH: lambda: register.finish_version(**at),
        VersionMove.REOPEN: lambda: reopen(register, version),
    }
    moves[move]()
    transition = VERSION_TRANSITIONS[move]
    assert register.version(JOB, version).state is (transition.target if state in transition.sources else state)
