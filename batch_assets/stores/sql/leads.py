"""The supervisor lease of each version: one leader, fenced by a generation that only grows."""

from datetime import timedelta

from sqlalchemy import ColumnElement, Connection, and_, false, or_, select, update

from batch_assets.core.errors import StaleGenerationError
from batch_assets.core.leasing import LeaseObserver
from batch_assets.stores.sql.database import Database
from batch_assets.stores.sql.rows import LeadRow, lead_of
from batch_assets.stores.sql.tables import leads


class Leads(Database):
    """Who leads a version. A clock only proposes that a lead has lapsed; whether it is still as it was seen then decides."""

    def lead(self, job: str, version: str) -> LeadRow | None:
        """The lease as it stands; None when nobody ever led. A worker watches `renewals`, which each renewal and each take-over raises."""
        with self.reading() as connection:
            return _lead(connection, job, version)

    def lead_has_lapsed(self, seen: LeadRow, *, job: str, version: str, observer: LeaseObserver[LeadRow], now_s: float) -> bool:
        """Whether `seen` was not renewed for the observer's `lease_s`: by PostgreSQL's clock; on SQLite as this observer saw it."""
        if self.is_sqlite:
            return bool(observer.lapsed({seen: seen.renewals}, now_s=now_s))
        lapsed = leads.c.renewed_at <= self.lease_clock - timedelta(seconds=observer.lease_s)
        with self.reading() as connection:
            return connection.scalar(select(leads.c.generation).where(_of(job, version), _is(seen), lapsed)) is not None

    def take_lead(self, *, job: str, version: str, holder: str, seen: LeadRow | None) -> int | None:
        """The new generation, or None when somebody leads.

        Free is a version that nobody ever led, whose leader left, or whose row is still exactly `seen`: pass a row only when it was seen
        unchanged for LEASE_S. The same holder asking again after a lost acknowledgement waits like any other.
        """
        with self.writing() as connection:
            first = self.insert_if_absent(leads).values(
                job=job, version=version, holder=holder, generation=1, renewals=0, renewed_at=self.lease_clock, released=False
            )
            generation = connection.scalar(first.returning(leads.c.generation))
            if generation is not None:
                return generation
            free = or_(leads.c.released, _is(seen))
            taken = (
                update(leads)
                .where(_of(job, version), free)
                .values(
                    holder=holder,
                    generation=leads.c.generation + 1,
                    renewals=leads.c.renewals + 1,
                    renewed_at=self.lease_clock,
                    released=False,
                )
                .returning(leads.c.generation)
            )
            return connection.execute(taken).scalar_one_or_none()

    def renew_lead(self, *, job: str, version: str, generation: int) -> None:
        """Raises StaleGenerationError when another leads or when the lead was left."""
        with self.writing() as connection:
            mine = and_(_of(job, version), leads.c.generation == generation, ~leads.c.released)
            renewed = update(leads).where(mine).values(renewals=leads.c.renewals + 1, renewed_at=self.lease_clock)
            if connection.execute(renewed).rowcount == 0:
                raise _stale(version, generation, _lead(connection, job, version))

    def leave_lead(self, *, job: str, version: str, generation: int) -> None:
        """Anybody may take it at once. Twice is fine. Raises StaleGenerationError when another leads already."""
        with self.writing() as connection:
            mine = and_(_of(job, version), leads.c.generation == generation)
            if connection.execute(update(leads).where(mine).values(released=True)).rowcount == 0:
                raise _stale(version, generation, _lead(connection, job, version))

    def check_generation(self, *, job: str, version: str, generation: int) -> None:
        """Reads only. Raises StaleGenerationError when another leads or when the lead was left."""
        with self.reading() as connection:
            now = _lead(connection, job, version)
        if now is None or now.generation != generation or now.released:
            raise _stale(version, generation, now)

    def _require_generation(self, connection: Connection, job: str, version: str, generation: int) -> None:
        # The share lock makes a take-over wait until this transaction has ended, so what it writes is written under its own lead.
        mine = select(leads.c.generation).where(_of(job, version), leads.c.generation == generation, ~leads.c.released)
        if connection.execute(mine.with_for_update(read=True)).one_or_none() is None:
            raise _stale(version, generation, _lead(connection, job, version))


def _lead(connection: Connection, job: str, version: str) -> LeadRow | None:
    columns = select(leads.c.holder, leads.c.generation, leads.c.renewals, leads.c.released)
    row = connection.execute(columns.where(_of(job, version))).mappings().one_or_none()
    return lead_of(row) if row else None


def _of(job: str, version: str) -> ColumnElement[bool]:
    return and_(leads.c.job == job, leads.c.version == version)


def _is(seen: LeadRow | None) -> ColumnElement[bool]:
    if seen is None:
        return false()
    return and_(leads.c.holder == seen.holder, leads.c.generation == seen.generation, leads.c.renewals == seen.renewals)


def _stale(version: str, held: int, now: LeadRow | None) -> StaleGenerationError:
    return StaleGenerationError(version=version, generation_held=held, generation_current=now.generation if now else 0)
