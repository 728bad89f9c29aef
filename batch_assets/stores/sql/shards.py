"""Shards and their leases in SQL. Each transition is one conditional UPDATE that names worker and epoch, or generation.

An UPDATE that changed nothing is looked at again in the same transaction: the same holder repeating itself after a lost acknowledgement is
answered as if it had succeeded, anybody else is stale.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, FromClause, Select, and_, exists, func, literal, or_, select, update

from batch_assets.core.errors import GristmillError, StaleLeaseError
from batch_assets.core.identity import shard_key
from batch_assets.core.leasing import (
    SHARD_TRANSITIONS,
    Holding,
    LeaseEnd,
    LeaseObserver,
    ShardMove,
    ShardState,
    VersionState,
    is_already_released,
    is_already_staged,
    is_past_renewing,
    losses_after,
    state_after_end,
    state_after_return,
)
from batch_assets.stores.sql.database import utc_now
from batch_assets.stores.sql.leads import Leads
from batch_assets.stores.sql.rows import CommittedShard, Lease, ShardRow, rounds_stored, shard_of
from batch_assets.stores.sql.tables import jobs, shards, versions

NUMBERS_MAX = 1000  # shard numbers in one statement; SQLite allows 32,766 parameters


class LeasedShard(NamedTuple):
    """What a LeaseObserver watches: key (number, epoch), counter `renewals`."""

    number: int
    epoch: int
    renewals: int
    owner: str


class Shards(Leads):
    """The shards of versions. `job` and `version` are names, `shard` is a number."""

    def __init__(self, url: str, *, now: Callable[[], str] = utc_now, pooled: bool = True) -> None:
        super().__init__(url, now=now, pooled=pooled)
        # Claims whose commit was not acknowledged, by job, version and worker: asked again, the worker gets that shard and no other.
        self._unanswered: dict[tuple[str, str, str], Lease] = {}

    def want(self, *, job: str, version: str, shards: Collection[int] | None) -> None:
        """Makes these claimable (None: all), for as long as the version lives. Wanting again changes nothing."""
        with self.writing() as connection:
            for some in _some(shards):
                connection.execute(update(_T).where(_of(job, version), some, ~_T.c.wanted).values(wanted=True))

    def shards(self, job: str, version: str, numbers: Collection[int] | None = None) -> list[ShardRow]:
        """By number; unknown numbers are left out."""
        with self.reading() as connection:
            return [row for some in _some(numbers) for row in _rows(connection, select(_T).where(_of(job, version), some))]

    def counts(self, job: str, version: str) -> dict[ShardState, int]:
        """Shards in each state, zeros included; reads an index only."""
        statement = select(_T.c.state, func.count()).where(_of(job, version)).group_by(_T.c.state)
        with self.reading() as connection:
            found = {ShardState(state): count for state, count in connection.execute(statement)}
        return {state: found.get(state, 0) for state in ShardState}

    def claim(self, *, job: str, version: str, worker: str) -> Lease | None:
        """The lowest wanted pending shard, under its next epoch; None when there is none or the version or job is held.

        A shard that avoids this worker is left to others. Asking for nothing writes nothing.
        """
        unanswered = self._unanswered.pop((job, version, worker), None)
        if unanswered is not None and self._is_held(unanswered):
            return unanswered
        candidate = _candidate(job, version, worker)
        with self.reading() as connection:
            if connection.scalar(candidate) is None:
                return None
        transition = SHARD_TRANSITIONS[ShardMove.CLAIM]
        claimed = (
            update(_T)
            .where(
                _of(job, version),
                _T.c.number == candidate.with_for_update(skip_locked=True, of=_CANDIDATE).scalar_subquery(),
                _T.c.state.in_(transition.sources),
            )
            .values(state=transition.target, epoch=_T.c.epoch + 1, owner=worker, renewals=0, renewed_at=self.lease_clock, avoid_worker=None)
            .returning(*_T.c)
        )
        with self.writing() as connection:
            row = connection.execute(claimed).mappings().one_or_none()
            if row is None:
                return None
            attempt = connection.scalar(select(versions.c.input_attempt).where(versions.c.job == job, versions.c.name == version))
            assert attempt is not None, f"{version} is active without an input"
            lease = _lease(shard_of(row), worker, attempt)
            self._unanswered[job, version, worker] = lease  # until the commit, which follows here, was heard of
        del self._unanswered[job, version, worker]
        return lease

    def renew(self, lease: Lease) -> None:
        """Raises StaleLeaseError. Fine after the holder's own `stage`."""
        with self.writing() as connection:
            if not _move(connection, ShardMove.RENEW, lease, renewals=_T.c.renewals + 1, renewed_at=self.lease_clock):
                now = _holding(connection, lease)
                if not is_past_renewing(now, epoch=lease.epoch, worker=lease.worker):
                    raise _stale(lease, now)

    def stage(self, lease: Lease, *, slots: int, seconds: float) -> None:
        """The log is complete with its first `slots` slots; `seconds` is how long the lease took. Raises StaleLeaseError."""
        rounds = {**lease.staged_rounds, lease.round: slots}
        with self.writing() as connection:
            if not _move(
                connection,
                ShardMove.STAGE,
                lease,
                staged_slots=slots,
                staged_rounds=rounds_stored(rounds),
                seconds=seconds,
                previous_end=LeaseEnd.RELEASED,
            ):
                now = _holding(connection, lease)
                if not is_already_staged(now, epoch=lease.epoch, worker=lease.worker, slots=slots):
                    raise _stale(lease, now)

    def release(self, lease: Lease, *, end: LeaseEnd, avoid_worker: str | None = None) -> None:
        """The holder gives the shard back. Raises StaleLeaseError."""
        assert end is not LeaseEnd.EXPIRED, "a holder that can still speak releases; expiry is the leader's"
        with self.writing() as connection:
            if not _move(connection, ShardMove.RELEASE, lease, previous_end=end, avoid_worker=avoid_worker):
                now = _holding(connection, lease)
                if not is_already_released(now, epoch=lease.epoch, worker=lease.worker, end=end):
                    raise _stale(lease, now)

    def leased(self, job: str, version: str) -> list[LeasedShard]:
        """By number."""
        return self._leased(_of(job, version))

    def lapsed(self, job: str, version: str, *, observer: LeaseObserver[tuple[int, int]], now_s: float) -> list[LeasedShard]:
        """Leases to `expire`: not renewed for the observer's `lease_s`, by PostgreSQL's clock; on SQLite as this observer saw it.

        A clock only proposes. A lease ends only if its counter is still the one that is returned here, so a wrong clock costs work.
        """
        if self.is_sqlite:
            leases = {(lease.number, lease.epoch): lease for lease in self.leased(job, version)}
            counters = {key: lease.renewals for key, lease in leases.items()}
            return [leases[key] for key in observer.lapsed(counters, now_s=now_s)]
        return self._leased(_of(job, version), _T.c.renewed_at <= self.lease_clock - timedelta(seconds=observer.lease_s))

    def expire(self, *, job: str, version: str, shard: int, epoch: int, renewals: int, end: LeaseEnd = LeaseEnd.EXPIRED) -> bool:
        """Ends a lease from outside, if it is still the one that was seen: not renewed since. True when this call ended it."""
        seen = and_(_of(job, version, shard), _in_sources(ShardMove.EXPIRE), _T.c.epoch == epoch, _T.c.renewals == renewals)
        with self.writing() as connection:
            before = connection.scalar(select(_T.c.losses).where(seen).with_for_update())
            if before is None:
                return False
            losses = losses_after(losses=before, end=end)
            state = state_after_end(losses=losses)
            reason = f"{losses} machines were lost with it" if state is ShardState.BLOCKED else None
            ended = update(_T).where(seen).values(state=state, losses=losses, previous_end=end, blocked_reason=reason)
            return connection.execute(ended).rowcount == 1

    def staged(self, job: str, version: str, limit: int) -> list[ShardRow]:
        """What the committer has to do, by number."""
        statement = select(_T).where(_of(job, version), _in_states(_T, ShardState.STAGED)).limit(limit)
        with self.reading() as connection:
            return _rows(connection, statement)

    def commit(self, *, job: str, version: str, generation: int, shards: Sequence[CommittedShard]) -> list[ShardRow]:
        """All or none of them; as they stand afterwards, by number. A shard that is committed in this round already stays as it is.

        Raises StaleGenerationError when another leads, GristmillError for a shard that is not staged.
        """
        with self.writing() as connection:
            self._require_generation(connection, job, version, generation)
            for shard in sorted(shards, key=lambda shard: shard.number):
                _commit(connection, job, version, shard)
            numbers = [shard.number for shard in shards]
            return [row for some in _some(numbers) for row in _rows(connection, select(_T).where(_of(job, version), some))]

    def send_back(self, *, job: str, version: str, generation: int, shard: int, reason: str) -> ShardState:
        """A staged shard whose log is wanting goes back to pending, a bounded number of times, then it is blocked.

        Returns where the shard stands; one that is not staged any more is left alone. Raises StaleGenerationError.
        """
        with self.writing() as connection:
            self._require_generation(connection, job, version, generation)
            row = _row(connection, job, version, shard)
            if row.state not in SHARD_TRANSITIONS[ShardMove.SEND_BACK].sources:
                return row.state
            returned = row.returned + 1
            state = state_after_return(returned=returned)
            values = {"state": state, "returned": returned, "returned_reason": reason} | _without_cut(row)
            values |= {"blocked_reason": reason} if state is ShardState.BLOCKED else {}
            connection.execute(update(_T).where(_of(job, version, shard), _in_sources(ShardMove.SEND_BACK)).values(**values))
            return state

    def block(self, *, job: str, version: str, generation: int, shard: int, reason: str) -> bool:
        """A person must look. False when it is committed or blocked already. Raises StaleGenerationError."""
        with self.writing() as connection:
            self._require_generation(connection, job, version, generation)
            row = _row(connection, job, version, shard)
            blocked = update(_T).where(_of(job, version, shard), _in_sources(ShardMove.BLOCK))
            values = {"state": ShardState.BLOCKED, "blocked_reason": reason} | _without_cut(row)
            return connection.execute(blocked.values(**values)).rowcount == 1

    def unblock(self, *, job: str, version: str, shards: Collection[int] | None = None) -> int:
        """A person has looked: blocked ones (None: all) are pending again with fresh bounds. Returns how many."""
        values = {"state": ShardState.PENDING, "losses": 0, "returned": 0, "returned_reason": None, "blocked_reason": None}
        with self.writing() as connection:
            statements = [
                update(_T).where(_of(job, version), some, _in_sources(ShardMove.UNBLOCK)).values(**values) for some in _some(shards)
            ]
            return sum(connection.execute(statement).rowcount for statement in statements)

    def forget_avoidance(self, *, job: str, version: str, shard: int, worker: str) -> bool:
        """Nobody else came for a shard that avoids `worker`: it may take it after all."""
        statement = update(_T).where(_of(job, version, shard), _T.c.avoid_worker == worker).values(avoid_worker=None)
        with self.writing() as connection:
            return connection.execute(statement).rowcount == 1

    def unannounced(self, job: str, version: str) -> list[ShardRow]:
        """Committed shards that no run has announced yet, by number."""
        statement = select(_T).where(_of(job, version), ~_T.c.announced, _in_states(_T, ShardState.COMMITTED))
        with self.reading() as connection:
            return _rows(connection, statement)

    def mark_announced(self, *, job: str, version: str, shards: Collection[int]) -> None:
        """Of these, the committed ones were announced."""
        with self.writing() as connection:
            for some in _some(shards):
                announced = update(_T).where(_of(job, version), some, _T.c.state == ShardState.COMMITTED)
                connection.execute(announced.values(announced=True))

    def _is_held(self, lease: Lease) -> bool:
        with self.reading() as connection:
            now = _holding(connection, lease)
        return now.state is ShardState.LEASED and (now.epoch, now.worker) == (lease.epoch, lease.worker)

    def _leased(self, *which: ColumnElement[bool]) -> list[LeasedShard]:
        columns = select(_T.c.number, _T.c.epoch, _T.c.renewals, _T.c.owner)
        statement = columns.where(_in_states(_T, ShardState.LEASED), *which).order_by(_T.c.number)
        with self.reading() as connection:
            return [LeasedShard(*row) for row in connection.execute(statement)]


_T = shards
_CANDIDATE = shards.alias("candidate")  # a second name: as `shards` it would be taken for the table that is updated


@lru_cache(maxsize=64)  # idle workers ask several times a second: building it anew costs more than running it
def _candidate(job: str, version: str, worker: str) -> Select[int]:
    active = exists().where(versions.c.job == job, versions.c.name == version, versions.c.state == VersionState.ACTIVE)
    held = exists().where(jobs.c.job == job, jobs.c.hold.is_not(None))
    not_avoided = or_(_CANDIDATE.c.avoid_worker.is_(None), _CANDIDATE.c.avoid_worker != worker)
    return (
        select(_CANDIDATE.c.number)
        .where(
            _CANDIDATE.c.job == job,
            _CANDIDATE.c.version == version,
            _in_states(_CANDIDATE, *SHARD_TRANSITIONS[ShardMove.CLAIM].sources),
            _CANDIDATE.c.wanted,
            not_avoided,
            active,
            ~held,
        )
        .order_by(_CANDIDATE.c.number)
        .limit(1)
    )


def _commit(connection: Connection, job: str, version: str, shard: CommittedShard) -> None:
    transition = SHARD_TRANSITIONS[ShardMove.COMMIT]
    mine = and_(_of(job, version, shard.number), _T.c.round == shard.round)
    if shard.epoch is not None:
        mine = and_(mine, _T.c.epoch == shard.epoch)
    statement = update(_T).where(mine, _in_sources(ShardMove.COMMIT))
    if connection.execute(statement.values(state=transition.target, stats=dict(shard.stats), announced=False)).rowcount == 1:
        return
    now = _row(connection, job, version, shard.number)
    if now.state is not transition.target or now.round != shard.round:
        raise GristmillError(
            f"commit of shard {now.key} is refused: expected staged in round {shard.round}, found {now.state} in round {now.round} "
            f"(epoch {now.epoch}); the committer acted on an old reading of it, please report this",
            shard=now.key,
        )


def _move(connection: Connection, move: ShardMove, lease: Lease, **values: Any) -> bool:
    mine = and_(_of(lease.job, lease.version, lease.shard), _T.c.epoch == lease.epoch, _T.c.owner == lease.worker)
    statement = update(_T).where(mine, _in_sources(move)).values(state=SHARD_TRANSITIONS[move].target, **values)
    return connection.execute(statement).rowcount == 1


def _in_sources(move: ShardMove) -> ColumnElement[bool]:
    return _in_states(_T, *SHARD_TRANSITIONS[move].sources)


def _in_states(table: FromClause, *states: ShardState) -> ColumnElement[bool]:
    """States stand in the statement's text, not among its parameters: only then a partial index is known to hold every row that counts."""
    return or_(*(table.c.state == literal(state, literal_execute=True) for state in sorted(states)))


def _of(job: str, version: str, shard: int | None = None) -> ColumnElement[bool]:
    version_of_it = and_(_T.c.job == job, _T.c.version == version)
    return version_of_it if shard is None else and_(version_of_it, _T.c.number == shard)


def _some(numbers: Collection[int] | None) -> Iterator[ColumnElement[bool]]:
    """Conditions that together select these numbers, in order; one that is always true for None."""
    if numbers is None:
        yield _T.c.number.is_not(None)
        return
    ordered = sorted(set(numbers))
    for start in range(0, len(ordered), NUMBERS_MAX):
        yield _T.c.number.in_(ordered[start : start + NUMBERS_MAX])


def _rows(connection: Connection, statement: Select[Any]) -> list[ShardRow]:
    return [shard_of(row) for row in connection.execute(statement.order_by(_T.c.number)).mappings()]


def _row(connection: Connection, job: str, version: str, shard: int, *, locked: bool = True) -> ShardRow:
    """Locked until the transaction ends, unless said otherwise. A shard that does not exist is a bug of the caller."""
    statement = select(_T).where(_of(job, version, shard))
    row = connection.execute(statement.with_for_update() if locked else statement).mappings().one_or_none()
    if row is None:
        raise GristmillError(
            f"there is no shard {shard_key(version, shard)} of job {job}; please report this", shard=shard_key(version, shard)
        )
    return shard_of(row)


def _without_cut(row: ShardRow) -> dict[str, Any]:
    # The round is open again: what its log holds so far counts for the next holder and for the committer alike. Were the old cut kept until
    # the next stage, the two would read different logs.
    kept = {number: slots for number, slots in row.staged_rounds.items() if number != row.round}
    return {"staged_slots": None, "staged_rounds": rounds_stored(kept)}


def _holding(connection: Connection, lease: Lease) -> Holding:
    """Not locked: a worker's role may lock only what it may still change, and an answer needs no more than having been true."""
    row = _row(connection, lease.job, lease.version, lease.shard, locked=False)
    return Holding(state=row.state, epoch=row.epoch, worker=row.owner, previous_end=row.previous_end, staged_slots=row.staged_slots)


def _lease(row: ShardRow, worker: str, attempt: str) -> Lease:
    return Lease(
        job=row.job,
        version=row.version,
        shard=row.number,
        epoch=row.epoch,
        round=row.round,
        worker=worker,
        previous_end=row.previous_end,
        staged_rounds=row.staged_rounds,
        rows=row.rows,
        to_answer=row.to_answer,
        input_attempt=attempt,
        input_sha256=row.input_sha256,
    )


def _stale(lease: Lease, now: Holding) -> StaleLeaseError:
    return StaleLeaseError(shard=lease.key, epoch_held=lease.epoch, epoch_current=now.epoch)
