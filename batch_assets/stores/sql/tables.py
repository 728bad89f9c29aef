"""The register's tables. Columns and indexes only; what a state means is in `core/leasing.py`, how a database gets them in `migrations/`.

Portable: the same on SQLite and PostgreSQL, where functions and policies come on top (`migrations/`). Times are ISO text in UTC and for
display, except `renewed_at`: see `Database.lease_clock`.

**Layout.** Every key and index begins with job and version, and a version's shards are inserted together: so versions change different
pages, and a version that is done leaves the cache. Reads that recur each second (what may be claimed, is leased, staged, not announced)
have a partial index each, which holds only the rows in that state, however many shards there are. An index whose columns or whose `where`
name a column that an update changes makes PostgreSQL write every index anew; so no index names `renewals`, `renewed_at` or a worker's
counters, and pages keep free space (`fillfactor`): a renewal or heartbeat then stays in its page and touches no index.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Named,
    Table,
    Text,
    TypedColumns,
    UniqueConstraint,
    text,
)

from batch_assets.core.leasing import ShardState

metadata = MetaData()


class JobColumns(TypedColumns):
    """One row per job: its version counter and its hold."""

    job = Column(Text, primary_key=True)
    next_number = Column(Integer, nullable=False)
    hold: Named[str | None] = Column(Text)
    hold_note: Named[str | None] = Column(Text)
    hold_by: Named[str | None] = Column(Text)
    held_at: Named[str | None] = Column(Text)


class VersionColumns(TypedColumns):
    """One row per job version."""

    id = Column(Integer, primary_key=True)
    job = Column(Text, ForeignKey("jobs.job"), nullable=False)
    name = Column(Text, nullable=False)
    number = Column(Integer, nullable=False)
    identity = Column(Text, nullable=False)
    state = Column(Text, nullable=False)
    hold: Named[str | None] = Column(Text)
    hold_note: Named[str | None] = Column(Text)
    hold_by: Named[str | None] = Column(Text)
    held_at: Named[str | None] = Column(Text)
    kind = Column(Text, nullable=False)
    recipe_digest = Column(Text, nullable=False)
    input_rules_digest = Column(Text, nullable=False)
    engine = Column(Text, nullable=False)
    engine_build = Column(Text, nullable=False)
    snapshot_digest = Column(Text, nullable=False)
    snapshot_label = Column(Text, nullable=False)
    base_release: Named[str | None] = Column(Text)
    pilot_records: Named[int | None] = Column(BigInteger)
    input_attempt: Named[str | None] = Column(Text)
    records = Column(BigInteger, nullable=False)
    to_answer = Column(BigInteger, nullable=False)
    set_aside_by_class: Named[Any] = Column(JSON, nullable=False)
    surplus = Column(BigInteger, nullable=False)
    shards = Column(Integer, nullable=False)
    shard_records = Column(Integer, nullable=False)
    created_at = Column(Text, nullable=False)
    by_sensor = Column(Boolean, nullable=False)


class ShardColumns(TypedColumns):
    """One row per shard of a version's active attempt."""

    job = Column(Text, primary_key=True)
    version = Column(Text, primary_key=True)
    number = Column(Integer, primary_key=True, autoincrement=False)
    state = Column(Text, nullable=False)
    epoch = Column(Integer, nullable=False)
    round = Column(Integer, nullable=False)
    owner: Named[str | None] = Column(Text)
    renewals = Column(Integer, nullable=False)
    renewed_at: Named[datetime | None] = Column(DateTime(timezone=True))
    losses = Column(Integer, nullable=False)
    returned = Column(Integer, nullable=False)
    returned_reason: Named[str | None] = Column(Text)
    blocked_reason: Named[str | None] = Column(Text)
    wanted = Column(Boolean, nullable=False)
    announced = Column(Boolean, nullable=False)
    avoid_worker: Named[str | None] = Column(Text)
    previous_end: Named[str | None] = Column(Text)
    staged_slots: Named[int | None] = Column(Integer)
    staged_rounds: Named[Any] = Column(JSON, nullable=False)
    seconds: Named[float | None] = Column(Double(asdecimal=False))
    input_sha256 = Column(Text, nullable=False)
    rows = Column(Integer, nullable=False)
    to_answer = Column(Integer, nullable=False)
    hash_low = Column(BigInteger, nullable=False)
    hash_high = Column(BigInteger, nullable=False)
    stats: Named[Any] = Column(JSON, nullable=False)


class LeadColumns(TypedColumns):
    """One row per version that was ever supervised: who leads, under which generation."""

    job = Column(Text, primary_key=True)
    version = Column(Text, primary_key=True)
    holder = Column(Text, nullable=False)
    generation = Column(Integer, nullable=False)
    renewals = Column(Integer, nullable=False)
    renewed_at: Named[datetime | None] = Column(DateTime(timezone=True))
    released = Column(Boolean, nullable=False)


class WorkerColumns(TypedColumns):
    """One row per worker process that was ever started."""

    worker_id = Column(Text, primary_key=True)
    job = Column(Text, nullable=False)
    version = Column(Text, nullable=False)
    host = Column(Text, nullable=False)
    pid = Column(Integer, nullable=False)
    process_started_s: Named[float | None] = Column(Double(asdecimal=False))
    generation: Named[int | None] = Column(Integer)
    state = Column(Text, nullable=False)
    heartbeats = Column(Integer, nullable=False)
    counters: Named[Any] = Column(JSON, nullable=False)
    started_at = Column(Text, nullable=False)
    engine_build: Named[str | None] = Column(Text)


class WorkerLoginColumns(TypedColumns):
    """One row per version whose workers have a login of their own (PostgreSQL): made once, so that adopted workers keep theirs."""

    job = Column(Text, primary_key=True)
    version = Column(Text, primary_key=True)
    role = Column(Text, nullable=False)
    password = Column(Text, nullable=False)


class ReleaseColumns(TypedColumns):
    """One row per registered release."""

    release_id = Column(Text, primary_key=True)
    job = Column(Text, nullable=False)
    version = Column(Text, nullable=False)
    state = Column(Text, nullable=False)
    digest = Column(Text, nullable=False)
    rows = Column(BigInteger, nullable=False)
    uri = Column(Text, nullable=False)
    recipe_digest = Column(Text, nullable=False)
    snapshot_digest = Column(Text, nullable=False)
    created_at = Column(Text, nullable=False)
    first_published_at: Named[str | None] = Column(Text)
    counts: Named[Any] = Column(JSON, nullable=False)


class VerdictColumns(TypedColumns):
    """One row per verdict; none is ever changed."""

    id = Column(Integer, primary_key=True)
    release_id = Column(Text, ForeignKey("releases.release_id"), nullable=False)
    release_digest = Column(Text, nullable=False)
    passed = Column(Boolean, nullable=False)
    payload: Named[Any] = Column(JSON, nullable=False)
    created_at = Column(Text, nullable=False)


def _of_version() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["job", "version"], ["versions.job", "versions.name"])


def _of_shards_in(state: ShardState, name: str, *columns: str, on_postgresql: str = "", on_sqlite: str = "") -> Index:
    where = f"state = '{state}'"
    return Index(name, "job", "version", *columns, postgresql_where=text(where + on_postgresql), sqlite_where=text(where + on_sqlite))


jobs = Table("jobs", metadata, JobColumns)
versions = Table(
    "versions",
    metadata,
    VersionColumns,
    UniqueConstraint("job", "name"),
    UniqueConstraint("job", "number"),
    UniqueConstraint("job", "identity"),
)
shards = Table(
    "shards",
    metadata,
    ShardColumns,
    _of_version(),
    Index("shards_by_state", "job", "version", "state"),  # counts reads nothing else
    _of_shards_in(ShardState.PENDING, "shards_pending", "wanted", "number"),  # claim takes the first wanted one
    _of_shards_in(ShardState.LEASED, "shards_leased", "number"),
    _of_shards_in(ShardState.STAGED, "shards_staged", "number"),
    _of_shards_in(  # SQLite has no booleans: each is written as its statements will be
        ShardState.COMMITTED, "shards_unannounced", "number", on_postgresql=" and not announced", on_sqlite=" and announced = 0"
    ),
    postgresql_with={"fillfactor": 80},
)
leads = Table("leads", metadata, LeadColumns, _of_version(), postgresql_with={"fillfactor": 50})
workers = Table(
    "workers",
    metadata,
    WorkerColumns,
    _of_version(),
    Index("workers_by_state", "job", "version", "state"),
    postgresql_with={"fillfactor": 50},
)
worker_logins = Table("worker_logins", metadata, WorkerLoginColumns, _of_version())
releases = Table("releases", metadata, ReleaseColumns, _of_version(), Index("releases_by_version", "job", "version"))
verdicts = Table("verdicts", metadata, VerdictColumns, Index("verdicts_by_release", "release_id", "id"))
