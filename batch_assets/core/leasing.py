"""The states that SQL keeps, who may move them, and the rules of leases. docs/states.md is the specification of this page.

Data and pure predicates only. The statements that make a move are in `stores/sql`; they take their `where` from the tables here.
Time is an argument (`now_s`, on the observer's own monotonic clock) and is never compared with another machine's.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

# A loss is a lease that lapsed or whose process died. Narrowing two records that kill their engine was measured to cost 15-21 restarts of
# one shard; at fifty it is the shard or the fleet that is broken, and a person must look.
LOSSES_MAX = 50
# How often the committer may find a staged log wanting before a person must look: the same log is wrong in the same way each time.
RETURNED_MAX = 3


class ShardState(StrEnum):
    """Where a shard stands."""

    PENDING = "pending"  # nobody's: claimable once somebody wants it
    LEASED = "leased"  # one worker's, under `epoch`
    STAGED = "staged"  # the log is complete, the committer's turn
    COMMITTED = "committed"  # every id of it is in the outcomes table
    BLOCKED = "blocked"  # a person must look


class VersionState(StrEnum):
    """Where a job version stands. Only `active` ones are claimed from."""

    PLANNING = "planning"
    ACTIVE = "active"
    HELD = "held"
    FINISHED = "finished"
    RETIRING = "retiring"
    RETIRED = "retired"


class HoldReason(StrEnum):
    """Why nothing is claimed from a version or a job."""

    APPROVAL = "approval"
    CANCELLED = "cancelled"
    BREAKER = "breaker"
    CANARY = "canary"
    ROLLBACK = "rollback"
    PERSON = "person"


VERSION_HOLDS = frozenset({HoldReason.APPROVAL, HoldReason.CANCELLED, HoldReason.BREAKER, HoldReason.CANARY})
JOB_HOLDS = frozenset({HoldReason.ROLLBACK, HoldReason.PERSON})


class LeaseEnd(StrEnum):
    """How a shard's lease ended. After `expired` alone its unlogged records are suspects, and the shard has lost a machine."""

    RELEASED = "released"
    DRAINED = "drained"
    NODE_GONE = "node_gone"
    EXPIRED = "expired"


class WorkerState(StrEnum):
    """Where a worker process stands."""

    STARTING = "starting"  # started, not heard from: the model loads
    RUNNING = "running"
    LEAVING = "leaving"
    GONE = "gone"


ALIVE_STATES = frozenset({WorkerState.STARTING, WorkerState.RUNNING, WorkerState.LEAVING})
CLAIMING_STATES = frozenset({WorkerState.STARTING, WorkerState.RUNNING})  # who could take a shard that avoids another


class ReleaseState(StrEnum):
    """Where a release stands. `published` means: it is or was what readers get."""

    CANDIDATE = "candidate"
    PUBLISHED = "published"
    WITHDRAWN = "withdrawn"
    RETIRED = "retired"


class Actor(StrEnum):
    """Who makes a move, and by what it is fenced."""

    PLANNER = "planner"  # one transaction, the first attempt wins
    WORKER = "worker"  # its own name and the epoch of its lease
    LEADER = "leader"  # the generation of its supervisor lease, or the counter that it saw
    PERSON = "person"


class ShardMove(StrEnum):
    """Every way a shard changes."""

    CLAIM = "claim"
    RENEW = "renew"
    STAGE = "stage"
    RELEASE = "release"
    EXPIRE = "expire"
    COMMIT = "commit"
    SEND_BACK = "send_back"
    BLOCK = "block"
    UNBLOCK = "unblock"
    REDRIVE = "redrive"


class VersionMove(StrEnum):
    """Every way a job version changes."""

    ACTIVATE = "activate"
    ACTIVATE_HELD = "activate_held"
    HOLD = "hold"
    LIFT = "lift"
    FINISH = "finish"
    REOPEN = "reopen"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTransition:
    """From any of `sources` to `target`, or to `beyond` when a bound is reached."""

    sources: frozenset[ShardState]
    target: ShardState
    actor: Actor
    beyond: ShardState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionTransition:
    """From any of `sources` to `target`."""

    sources: frozenset[VersionState]
    target: VersionState
    actor: Actor


SHARD_TRANSITIONS: Mapping[ShardMove, ShardTransition] = {
    ShardMove.CLAIM: ShardTransition(sources=frozenset({ShardState.PENDING}), target=ShardState.LEASED, actor=Actor.WORKER),
    ShardMove.RENEW: ShardTransition(sources=frozenset({ShardState.LEASED}), target=ShardState.LEASED, actor=Actor.WORKER),
    ShardMove.STAGE: ShardTransition(sources=frozenset({ShardState.LEASED}), target=ShardState.STAGED, actor=Actor.WORKER),
    ShardMove.RELEASE: ShardTransition(sources=frozenset({ShardState.LEASED}), target=ShardState.PENDING, actor=Actor.WORKER),
    ShardMove.EXPIRE: ShardTransition(
        sources=frozenset({ShardState.LEASED}), target=ShardState.PENDING, beyond=ShardState.BLOCKED, actor=Actor.LEADER
    ),
    ShardMove.COMMIT: ShardTransition(sources=frozenset({ShardState.STAGED}), target=ShardState.COMMITTED, actor=Actor.LEADER),
    ShardMove.SEND_BACK: ShardTransition(
        sources=frozenset({ShardState.STAGED}), target=ShardState.PENDING, beyond=ShardState.BLOCKED, actor=Actor.LEADER
    ),
    ShardMove.BLOCK: ShardTransition(
        sources=frozenset({ShardState.PENDING, ShardState.LEASED, ShardState.STAGED}), target=ShardState.BLOCKED, actor=Actor.LEADER
    ),
    ShardMove.UNBLOCK: ShardTransition(sources=frozenset({ShardState.BLOCKED}), target=ShardState.PENDING, actor=Actor.PERSON),
    ShardMove.REDRIVE: ShardTransition(sources=frozenset({ShardState.COMMITTED}), target=ShardState.PENDING, actor=Actor.LEADER),
}

VERSION_TRANSITIONS: Mapping[VersionMove, VersionTransition] = {
    VersionMove.ACTIVATE: VersionTransition(sources=frozenset({VersionState.PLANNING}), target=VersionState.ACTIVE, actor=Actor.PLANNER),
    VersionMove.ACTIVATE_HELD: VersionTransition(sources=frozenset({VersionState.PLANNING}), target=VersionState.HELD, actor=Actor.PLANNER),
    VersionMove.HOLD: VersionTransition(sources=frozenset({VersionState.ACTIVE}), target=VersionState.HELD, actor=Actor.LEADER),
    VersionMove.LIFT: VersionTransition(sources=frozenset({VersionState.HELD}), target=VersionState.ACTIVE, actor=Actor.PERSON),
    VersionMove.FINISH: VersionTransition(sources=frozenset({VersionState.ACTIVE}), target=VersionState.FINISHED, actor=Actor.LEADER),
    # From `finished` only: so every shard is committed, and no second round is opened while one is open.
    VersionMove.REOPEN: VersionTransition(sources=frozenset({VersionState.FINISHED}), target=VersionState.ACTIVE, actor=Actor.LEADER),
}


def may_move(move: ShardMove, state: ShardState) -> bool:
    """Whether `move` is defined in `state`; that the actor is the right one is a question of epoch or generation."""
    return state in SHARD_TRANSITIONS[move].sources


def may_move_version(move: VersionMove, state: VersionState) -> bool:
    """Whether `move` is defined in `state`."""
    return state in VERSION_TRANSITIONS[move].sources


def is_claimable(*, version: VersionState, job_hold: HoldReason | None) -> bool:
    """Whether any shard of the version may be claimed; every claim tests it."""
    return version is VersionState.ACTIVE and job_hold is None


def losses_after(*, losses: int, end: LeaseEnd) -> int:
    """Machines lost with this shard. A notice or a node that is known to be gone is nobody's fault and not counted."""
    return losses + 1 if end is LeaseEnd.EXPIRED else losses


def state_after_end(*, losses: int) -> ShardState:
    """Where a shard goes whose lease ended from outside; `losses` counts this one."""
    return ShardState.BLOCKED if losses >= LOSSES_MAX else ShardState.PENDING


def state_after_return(*, returned: int) -> ShardState:
    """Where a shard goes whose log was found wanting; `returned` counts this time. The last log allowed is number RETURNED_MAX + 1."""
    return ShardState.BLOCKED if returned > RETURNED_MAX else ShardState.PENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What the register knows of a shard's lease. `worker` is who claimed `epoch`; it stays after the lease has ended."""

    state: ShardState
    epoch: int
    worker: str | None
    previous_end: LeaseEnd | None = None
    staged_slots: int | None = None


def is_already_staged(now: Holding, *, epoch: int, worker: str, slots: int) -> bool:
    """A stage whose acknowledgement was lost: the same holder, the same log."""
    done = now.state in (ShardState.STAGED, ShardState.COMMITTED)
    return done and (now.epoch, now.worker, now.staged_slots) == (epoch, worker, slots)


def is_already_released(now: Holding, *, epoch: int, worker: str, end: LeaseEnd) -> bool:
    """A release whose acknowledgement was lost: nobody has claimed since, and the lease ended as the holder says."""
    return now.state is ShardState.PENDING and (now.epoch, now.worker, now.previous_end) == (epoch, worker, end)


def is_past_renewing(now: Holding, *, epoch: int, worker: str) -> bool:
    """A renewal that its own holder's `stage` overtook: nothing to renew, and nobody else has the shard."""
    return now.state in (ShardState.STAGED, ShardState.COMMITTED) and (now.epoch, now.worker) == (epoch, worker)


Key = TypeVar("Key", bound=Hashable)


class LeaseObserver(Generic[Key]):
    """Says which leases have not been renewed for `lease_s`, as seen by this observer alone.

    A lease is a key (for a shard: number and epoch; for a supervisor: its generation) with a counter that each renewal raises. Nobody's
    clock is compared with another's: an observer that starts, or that was stopped, can only be late.
    """

    def __init__(self, *, lease_s: float) -> None:
        self.lease_s = lease_s
        self._seen: dict[Key, tuple[int, float]] = {}

    def lapsed(self, leases: Mapping[Key, int], *, now_s: float) -> list[Key]:
        """Keys whose counter has stood unchanged for `lease_s`, in the order given. Keys that are not given are forgotten."""
        seen: dict[Key, tuple[int, float]] = {}
        for key, counter in leases.items():
            before = self._seen.get(key)
            seen[key] = before if before is not None and before[0] == counter else (counter, now_s)
        self._seen = seen
        return [key for key, (_, since_s) in seen.items() if now_s - since_s >= self.lease_s]
