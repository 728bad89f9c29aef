"""The register's tables. Columns and indexes only; what a state means is in `core/leasing.py`.

Times are ISO text in UTC and for display: nothing is decided by them. Every table is laid out by version (job, then version), so versions
do not share pages of an index that is being changed. Portable SQL: the same on SQLite and PostgreSQL.
"""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
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
)

SCHEMA_VERSION = 1  # raised with every change of a table; `Database.create` refuses another

metadata = MetaData()


class SchemaColumns(TypedColumns):
    """One row: which schema the file has."""

    version = Column(Integer, primary_key=True, autoincrement=False)


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


schema = Table("register_schema", metadata, SchemaColumns)
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
    # Claim takes the lowest wanted pending number from it, counts reads nothing else.
    Index("shards_by_state", "job", "version", "state", "wanted", "number"),
    Index("shards_by_announcement", "job", "version", "announced", "state", "number"),
)
leads = Table("leads", metadata, LeadColumns, _of_version())
workers = Table("workers", metadata, WorkerColumns, _of_version(), Index("workers_by_state", "job", "version", "state"))
releases = Table("releases", metadata, ReleaseColumns, _of_version(), Index("releases_by_version", "job", "version"))
verdicts = Table("verdicts", metadata, VerdictColumns, Index("verdicts_by_release", "release_id", "id"))
