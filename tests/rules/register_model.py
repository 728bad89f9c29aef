"""What the register must answer and hold, said once more without SQL: docs/states.md as plain Python over plain objects.

Each move changes the model and says how the same call on the register must end. Nothing of `core/leasing.py` is used but its words.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from batch_assets.core.leasing import HoldReason, LeaseEnd, ShardState, VersionState, WorkerState

# Small bounds, so that short histories reach them; the test puts them in the code's place.
LOSSES_MAX = 3
RETURNED_MAX = 1


class Verdict(StrEnum):
    """How a call ends."""

    GRANTED = "granted"  # something changed
    ALREADY = "already done"  # nothing changed, and the caller may go on: it is as it asked for
    REFUSED = "refused"  # nothing changed, and the caller must stop


@dataclass(slots=True)
class ModelShard:
    """Field names are those of a ShardRow."""

    number: int
    state: ShardState
    input_sha256: str
    staged_slots: int | None
    staged_rounds: dict[int, int]
    epoch: int = 0
    round: int = 0
    owner: str | None = None
    renewals: int = 0
    losses: int = 0
    returned: int = 0
    returned_reason: str | None = None
    blocked_reason: str | None = None
    wanted: bool = False
    announced: bool = False
    avoid_worker: str | None = None
    previous_end: LeaseEnd | None = None

    def is_held_by(self, worker: str, epoch: int) -> bool:
        """The only right to renew, stage or release."""
        return self.state is ShardState.LEASED and (self.owner, self.epoch) == (worker, epoch)

    def was_staged_by(self, worker: str, epoch: int) -> bool:
        """Nobody has claimed since that holder staged it."""
        return self.state in {ShardState.STAGED, ShardState.COMMITTED} and (self.owner, self.epoch) == (worker, epoch)

    def open_round_again(self) -> None:
        """What was staged in this round does not bound the log any more."""
        self.staged_slots = None
        self.staged_rounds.pop(self.round, None)


@dataclass(slots=True)
class ModelLead:
    """Field names are those of a LeadRow."""

    holder: str
    generation: int
    renewals: int
    released: bool


@dataclass(slots=True)
class ModelVersion:
    """One version with all that belongs to it."""

    job: str
    name: str
    state: VersionState = VersionState.PLANNING
    hold: HoldReason | None = None
    input_attempt: str | None = None
    shards: dict[int, ModelShard] = field(default_factory=dict)
    lead: ModelLead | None = None
    workers: dict[str, WorkerState] = field(default_factory=dict)

    # --- planner and people --------------------------------------------------------------------------------------------------------

    def activate(self, attempt: str, planned: Iterable[tuple[int, int]], *, sha256: str, hold: HoldReason | None) -> bool:
        """`planned` is (number, records to answer). True when the attempt is the version's input now."""
        if self.state is not VersionState.PLANNING:
            return self.input_attempt == attempt
        self.state = VersionState.ACTIVE if hold is None else VersionState.HELD
        self.hold, self.input_attempt = hold, attempt
        for number, to_answer in planned:
            nothing_to_do = to_answer == 0
            self.shards[number] = ModelShard(
                number=number,
                state=ShardState.STAGED if nothing_to_do else ShardState.PENDING,
                input_sha256=sha256,
                staged_slots=0 if nothing_to_do else None,
                staged_rounds={0: 0} if nothing_to_do else {},
            )
        return True

    def hold_for(self, reason: HoldReason) -> bool:
        if self.state is not VersionState.ACTIVE:
            return False
        self.state, self.hold = VersionState.HELD, reason
        return True

    def lift(self) -> bool:
        if self.state is not VersionState.HELD:
            return False
        self.state, self.hold = VersionState.ACTIVE, None
        return True

    def finish(self) -> bool:
        """True when it is finished now."""
        if self.state is VersionState.ACTIVE and all(shard.state is ShardState.COMMITTED for shard in self.shards.values()):
            self.state = VersionState.FINISHED
        return self.state is VersionState.FINISHED

    def want(self, numbers: Collection[int] | None) -> None:
        for shard in self._some(numbers):
            shard.wanted = True

    def unblock(self, numbers: Collection[int] | None) -> int:
        blocked = [shard for shard in self._some(numbers) if shard.state is ShardState.BLOCKED]
        for shard in blocked:
            shard.state, shard.losses, shard.returned = ShardState.PENDING, 0, 0
            shard.returned_reason = shard.blocked_reason = None
        return len(blocked)

    # --- workers -------------------------------------------------------------------------------------------------------------------

    def claimable(self, worker: str, *, job_hold: HoldReason | None) -> int | None:
        """The number that this worker must get, None for none."""
        if self.state is not VersionState.ACTIVE or job_hold is not None:
            return None
        claiming = {name for name, state in self.workers.items() if state in {WorkerState.STARTING, WorkerState.RUNNING}}
        alone = not claiming - {worker}
        free = [
            shard.number
            for shard in self.shards.values()
            if shard.wanted and shard.state is ShardState.PENDING and (alone or shard.avoid_worker != worker)
        ]
        return min(free, default=None)

    def claim(self, number: int, worker: str) -> ModelShard:
        shard = self.shards[number]
        shard.state, shard.owner, shard.renewals, shard.avoid_worker = ShardState.LEASED, worker, 0, None
        shard.epoch += 1
        return shard

    def renew(self, number: int, *, worker: str, epoch: int) -> Verdict:
        shard = self.shards[number]
        if shard.is_held_by(worker, epoch):
            shard.renewals += 1
            return Verdict.GRANTED
        return Verdict.ALREADY if shard.was_staged_by(worker, epoch) else Verdict.REFUSED

    def stage(self, number: int, *, worker: str, epoch: int, slots: int) -> Verdict:
        shard = self.shards[number]
        if shard.is_held_by(worker, epoch):
            shard.state, shard.staged_slots, shard.previous_end = ShardState.STAGED, slots, LeaseEnd.RELEASED
            shard.staged_rounds[shard.round] = slots
            return Verdict.GRANTED
        return Verdict.ALREADY if shard.was_staged_by(worker, epoch) and shard.staged_slots == slots else Verdict.REFUSED

    def release(self, number: int, *, worker: str, epoch: int, end: LeaseEnd, avoid_worker: str | None) -> Verdict:
        shard = self.shards[number]
        if shard.is_held_by(worker, epoch):
            shard.state, shard.previous_end, shard.avoid_worker = ShardState.PENDING, end, avoid_worker
            return Verdict.GRANTED
        unclaimed_since = shard.state is ShardState.PENDING and (shard.owner, shard.epoch) == (worker, epoch)
        return Verdict.ALREADY if unclaimed_since and shard.previous_end is end else Verdict.REFUSED

    # --- the leader ----------------------------------------------------------------------------------------------------------------

    def expire(self, number: int, *, epoch: int, renewals: int, end: LeaseEnd) -> bool:
        shard = self.shards[number]
        if shard.state is not ShardState.LEASED or (shard.epoch, shard.renewals) != (epoch, renewals):
            return False
        shard.state, shard.previous_end = ShardState.PENDING, end
        if end is LeaseEnd.EXPIRED:
            shard.losses += 1
        if shard.losses >= LOSSES_MAX:
            shard.state, shard.blocked_reason = ShardState.BLOCKED, f"{shard.losses} machines were lost with it"
        return True

    def leads(self, generation: int) -> bool:
        """The only right to commit, send back or block."""
        return self.lead is not None and self.lead.generation == generation and not self.lead.released

    def commit(self, generation: int, wanted: Mapping[int, tuple[int, int | None]]) -> Verdict:
        """`wanted`: number -> (round, epoch or None). All or none."""
        if not self.leads(generation):
            return Verdict.REFUSED
        fresh = []
        for number, (round_, epoch) in wanted.items():
            shard = self.shards[number]
            if shard.round != round_ or shard.state not in {ShardState.STAGED, ShardState.COMMITTED}:
                return Verdict.REFUSED
            if shard.state is ShardState.STAGED:
                if epoch not in {None, shard.epoch}:
                    return Verdict.REFUSED
                fresh.append(shard)
        for shard in fresh:
            shard.state, shard.announced = ShardState.COMMITTED, False
        return Verdict.GRANTED if fresh else Verdict.ALREADY

    def send_back(self, generation: int, number: int, reason: str) -> Verdict:
        shard = self.shards[number]
        if not self.leads(generation):
            return Verdict.REFUSED
        if shard.state is not ShardState.STAGED:
            return Verdict.ALREADY
        shard.returned += 1
        shard.returned_reason = reason
        shard.open_round_again()
        shard.state = ShardState.PENDING
        if shard.returned > RETURNED_MAX:
            shard.state, shard.blocked_reason = ShardState.BLOCKED, reason
        return Verdict.GRANTED

    def block(self, generation: int, number: int, reason: str) -> Verdict:
        shard = self.shards[number]
        if not self.leads(generation):
            return Verdict.REFUSED
        if shard.state in {ShardState.COMMITTED, ShardState.BLOCKED}:
            return Verdict.ALREADY
        shard.state, shard.blocked_reason = ShardState.BLOCKED, reason
        shard.open_round_again()
        return Verdict.GRANTED

    def forget_avoidance(self, number: int, worker: str) -> bool:
        shard = self.shards[number]
        if shard.avoid_worker != worker:
            return False
        shard.avoid_worker = None
        return True

    def announce(self, numbers: Collection[int]) -> None:
        for shard in self._some(numbers):
            shard.announced = shard.announced or shard.state is ShardState.COMMITTED

    # --- the lead ------------------------------------------------------------------------------------------------------------------

    def take_lead(self, holder: str, seen: tuple[str, int, int] | None) -> int | None:
        """`seen`: holder, generation and renewals of the row that stood unchanged for a lease."""
        now = self.lead
        if now is None:
            self.lead = ModelLead(holder, 1, 0, released=False)
        elif now.released or (now.holder, now.generation, now.renewals) == seen:
            self.lead = ModelLead(holder, now.generation + 1, now.renewals + 1, released=False)
        else:
            return None
        return self.lead.generation

    def renew_lead(self, generation: int) -> Verdict:
        if not self.leads(generation) or self.lead is None:
            return Verdict.REFUSED
        self.lead.renewals += 1
        return Verdict.GRANTED

    def leave_lead(self, generation: int) -> Verdict:
        if self.lead is None or self.lead.generation != generation:
            return Verdict.REFUSED
        was_released, self.lead.released = self.lead.released, True
        return Verdict.ALREADY if was_released else Verdict.GRANTED

    def _some(self, numbers: Collection[int] | None) -> list[ModelShard]:
        return [shard for shard in self.shards.values() if numbers is None or shard.number in numbers]


@dataclass(slots=True)
class ModelObserver:
    """Which leases one observer may call lapsed, from everything it has ever seen."""

    lease_s: float
    looks: list[tuple[float, dict[object, int]]] = field(default_factory=list)

    def lapsed(self, leases: Mapping[object, int], *, now_s: float) -> list[object]:
        """A lease has lapsed when some look at least `lease_s` ago, and every look since, saw it with the counter that it has now."""
        self.looks.append((now_s, dict(leases)))
        return [key for key, counter in leases.items() if self._stood_still(lambda seen, k=key, c=counter: seen.get(k) == c, now_s)]

    def _stood_still(self, is_same: Callable[[dict[object, int]], bool], now_s: float) -> bool:
        return any(
            now_s - then_s >= self.lease_s and all(is_same(seen) for _, seen in self.looks[index:])
            for index, (then_s, _) in enumerate(self.looks)
        )
