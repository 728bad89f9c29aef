"""What the register hands out and takes: one frozen value per kind of row, and how each is read from SQL."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import RowMapping

from batch_assets.core.identity import shard_key
from batch_assets.core.leasing import HoldReason, LeaseEnd, ReleaseState, ShardState, VersionState, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHold:
    """Nothing is claimed from any version of the job."""

    job: str
    reason: HoldReason
    note: str
    by: str
    held_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """One job version. Counts are 0 and `input_attempt` None until its planning is activated."""

    id: int
    job: str
    name: str
    number: int
    identity: str
    state: VersionState
    hold: HoldReason | None  # given in state `held` only
    hold_note: str | None
    hold_by: str | None
    held_at: str | None
    kind: str  # full, pilot, incremental
    recipe_digest: str
    input_rules_digest: str
    engine: str  # vllm, scripted
    engine_build: str  # canonical JSON of the EngineBuild
    snapshot_digest: str
    snapshot_label: str
    base_release: str | None
    pilot_records: int | None
    input_attempt: str | None
    records: int  # rows of the snapshot = to_answer + set aside + surplus
    to_answer: int
    set_aside_by_class: Mapping[str, int]
    surplus: int
    shards: int
    shard_records: int
    created_at: str
    by_sensor: bool

    @property
    def is_open(self) -> bool:
        """Planned and not finished: its shards are claimable, or would be without its hold."""
        return self.state in (VersionState.ACTIVE, VersionState.HELD)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShard:
    """A shard as the planner made it. The hash range is inclusive, signed 64 bits; `rows` are those of its frozen input."""

    number: int
    rows: int
    to_answer: int
    hash_low: int
    hash_high: int
    input_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """One shard as it stands. `owner` is the worker that claimed `epoch`, also after its lease has ended."""

    job: str
    version: str
    number: int
    state: ShardState
    epoch: int  # = claims so far
    round: int  # redrives so far
    owner: str | None
    renewals: int  # of the present epoch
    losses: int  # leases that lapsed in this round
    returned: int  # times the committer sent it back
    returned_reason: str | None
    blocked_reason: str | None
    wanted: bool
    announced: bool
    avoid_worker: str | None
    previous_end: LeaseEnd | None
    staged_slots: int | None  # of the present round, once staged
    staged_rounds: Mapping[int, int]  # round -> slots of its log that count
    seconds: float | None  # as its last holder reported
    input_sha256: str
    rows: int
    to_answer: int
    hash_low: int
    hash_high: int
    stats: Mapping[str, Any]

    @property
    def key(self) -> str:
        """`v0007-3fa9c1-00042`."""
        return shard_key(self.version, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A worker's right to a shard; fenced by (worker, epoch) in everything it does."""

    job: str
    version: str
    shard: int
    epoch: int
    round: int
    worker: str
    previous_end: LeaseEnd | None  # None: nobody had it before
    staged_rounds: Mapping[int, int]
    rows: int
    to_answer: int
    input_attempt: str
    input_sha256: str

    @property
    def key(self) -> str:
        """`v0007-3fa9c1-00042`."""
        return shard_key(self.version, self.shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedShard:
    """A shard whose rows the committer has merged. `epoch` is the staged row's; None trusts round and state."""

    number: int
    round: int
    epoch: int | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadRow:
    """A version's supervisor lease as it was read. `renewals` grows for ever, across generations."""

    holder: str
    generation: int
    renewals: int
    released: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """One worker process. `process_started_s` (epoch seconds, as psutil says) tells it from a later process of the same pid."""

    worker_id: str
    job: str
    version: str
    host: str
    pid: int
    process_started_s: float | None
    generation: int | None  # of the supervisor that started it
    state: WorkerState
    heartbeats: int
    counters: Mapping[str, int]
    started_at: str
    engine_build: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRow:
    """One registered release."""

    release_id: str
    job: str
    version: str
    state: ReleaseState
    digest: str
    rows: int
    uri: str
    recipe_digest: str
    snapshot_digest: str
    created_at: str
    first_published_at: str | None
    counts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    """One verdict; the latest of a release counts (the highest id)."""

    id: int
    release_id: str
    release_digest: str
    passed: bool
    payload: Mapping[str, Any]
    created_at: str


Row = TypeVar("Row", VersionRow, ShardRow, LeadRow, WorkerRow, ReleaseRow, VerdictRow)


def version_of(row: RowMapping) -> VersionRow:
    """A row of `versions`."""
    return _row(VersionRow, row, state=VersionState(row["state"]), hold=HoldReason(row["hold"]) if row["hold"] else None)


def shard_of(row: RowMapping) -> ShardRow:
    """A row of `shards`, without `renewed_at`: that is for the database to compare with its own clock."""
    return _row(
        ShardRow,
        {name: value for name, value in row.items() if name != "renewed_at"},
        state=ShardState(row["state"]),
        previous_end=LeaseEnd(row["previous_end"]) if row["previous_end"] else None,
        staged_rounds=rounds_of(row["staged_rounds"]),
    )


def lead_of(row: RowMapping) -> LeadRow:
    """A row of `leads`."""
    return _row(LeadRow, row)


def worker_of(row: RowMapping) -> WorkerRow:
    """A row of `workers`."""
    return _row(WorkerRow, row, state=WorkerState(row["state"]))


def release_of(row: RowMapping) -> ReleaseRow:
    """A row of `releases`."""
    return _row(ReleaseRow, row, state=ReleaseState(row["state"]))


def verdict_of(row: RowMapping) -> VerdictRow:
    """A row of `verdicts`."""
    return _row(VerdictRow, row)


def rounds_of(stored: Mapping[str, int]) -> dict[int, int]:
    """JSON has no integer keys."""
    return {int(number): slots for number, slots in stored.items()}


def rounds_stored(rounds: Mapping[int, int]) -> dict[str, int]:
    """Inverse of `rounds_of`."""
    return {str(number): slots for number, slots in rounds.items()}


def _row(kind: type[Row], row: Mapping[Any, Any], **read: Any) -> Row:
    # A table's columns and its dataclass's fields are the same names.
    return kind(**(dict(row) | read))
