"""Redrives in SQL: a new round of committed shards, and the version active again, in one transaction."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, and_, func, select, update

from batch_assets.core.errors import GristmillError, NotFinishedError, Problem
from batch_assets.core.leasing import SHARD_TRANSITIONS, VERSION_TRANSITIONS, ShardMove, VersionMove
from batch_assets.stores.sql.leads import Leads
from batch_assets.stores.sql.rows import ShardRow, shard_of
from batch_assets.stores.sql.tables import shards, versions

NUMBERS_MAX = 1000  # shard numbers in one statement; SQLite allows 32,766 parameters
# Of the lease that ended when the shard was staged, and of the round before, nothing holds for the new round but the slots of its log.
FRESH = {
    "owner": None,
    "renewals": 0,
    "losses": 0,
    "returned": 0,
    "returned_reason": None,
    "blocked_reason": None,
    "avoid_worker": None,
    "staged_slots": None,
    "announced": False,
}


class Redrives(Leads):
    """Rounds of shards. `job` and `version` are names."""

    def redrive(self, *, job: str, version: str, generation: int, shards: Sequence[ShardRow]) -> None:
        """Opens the next round of these shards, given as they were read; all of them or none. The same again changes nothing.

        Raises StaleGenerationError when another leads, NotFinishedError when the version is not finished: a round is open already.
        """
        with self.writing() as connection:
            self._require_generation(connection, job, version, generation)
            if _is_opened(shards, _rows_now(connection, job, version, [shard.number for shard in shards])):
                return
            _reopen_version(connection, job, version)
            for some in _chunks(shards):
                _open_round(connection, job, version, some)

    def rounds(self, job: str, version: str) -> int:
        """Redrives of a version's shards, summed. It only grows, so two equal sums are the same rounds."""
        statement = select(func.coalesce(func.sum(_T.c.round), 0)).where(_T.c.job == job, _T.c.version == version)
        with self.reading() as connection:
            return int(connection.execute(statement).scalar_one())


_T = shards


def _is_opened(seen: Sequence[ShardRow], now: Sequence[ShardRow]) -> bool:
    """An acknowledgement was lost: each of them is past the reading that is being acted on by exactly this redrive."""
    rounds = {row.number: row.round for row in now}
    return all(rounds.get(row.number) == row.round + 1 for row in seen)


def _reopen_version(connection: Connection, job: str, version: str) -> None:
    transition = VERSION_TRANSITIONS[VersionMove.REOPEN]
    named = and_(versions.c.job == job, versions.c.name == version)
    reopened = update(versions).where(named, versions.c.state.in_(transition.sources)).values(state=transition.target)
    if connection.execute(reopened).rowcount == 0:
        found = connection.scalar(select(versions.c.state).where(named))
        raise NotFinishedError(
            Problem(
                code="redrive.not_finished",
                file=version,
                what=f"{version} is not redriven: only a finished version is, and one round at a time",
                expected="state finished",
                found=f"state {found}",
                fix=f"gristmill run {job} --version {version}, then redrive it",
            )
        )


def _open_round(connection: Connection, job: str, version: str, seen: Sequence[ShardRow]) -> None:
    transition = SHARD_TRANSITIONS[ShardMove.REDRIVE]
    as_seen = {(row.number, row.round, row.epoch) for row in seen}
    numbers = [row.number for row in seen]
    now = {(row.number, row.round, row.epoch) for row in _rows_now(connection, job, version, numbers)}
    opened = update(_T).where(_of(job, version, numbers), _T.c.state.in_(transition.sources))
    values = {"state": transition.target, "round": _T.c.round + 1, "epoch": _T.c.epoch + 1, **FRESH}
    if now != as_seen or connection.execute(opened.values(**values)).rowcount != len(numbers):
        raise GristmillError(
            f"redrive of {version} is refused: shards {sorted(number for number, *_ in now ^ as_seen)[:10]} are not as they were read; "
            "nothing was changed, please report this",
            version=version,
        )


def _rows_now(connection: Connection, job: str, version: str, numbers: Sequence[int]) -> list[ShardRow]:
    """Locked until the transaction ends."""
    found: list[ShardRow] = []
    for start in range(0, len(numbers), NUMBERS_MAX):
        statement = select(_T).where(_of(job, version, numbers[start : start + NUMBERS_MAX])).order_by(_T.c.number).with_for_update()
        found += [shard_of(row) for row in connection.execute(statement).mappings()]
    return found


def _of(job: str, version: str, numbers: Sequence[int]) -> ColumnElement[bool]:
    return and_(_T.c.job == job, _T.c.version == version, _T.c.number.in_(numbers))


def _chunks(rows: Sequence[ShardRow]) -> list[Sequence[ShardRow]]:
    return [rows[start : start + NUMBERS_MAX] for start in range(0, len(rows), NUMBERS_MAX)]
