"""The tables of the first register."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Everything, in an empty database."""
    op.create_table(
        "jobs",
        sa.Column("job", sa.Text, primary_key=True),
        _number("next_number"),
        *_hold(),
    )
    op.create_table(
        "versions",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("job", sa.Text, sa.ForeignKey("jobs.job"), nullable=False),
        _text("name"),
        _number("number"),
        _text("identity"),
        _text("state"),
        *_hold(),
        *(_text(name) for name in ("kind", "recipe_digest", "input_rules_digest", "engine", "engine_build", "snapshot_digest")),
        _text("snapshot_label"),
        sa.Column("base_release", sa.Text),
        sa.Column("pilot_records", sa.BigInteger),
        sa.Column("input_attempt", sa.Text),
        sa.Column("records", sa.BigInteger, nullable=False),
        sa.Column("to_answer", sa.BigInteger, nullable=False),
        sa.Column("set_aside_by_class", sa.JSON, nullable=False),
        sa.Column("surplus", sa.BigInteger, nullable=False),
        _number("shards"),
        _number("shard_records"),
        _text("created_at"),
        sa.Column("by_sensor", sa.Boolean, nullable=False),
        sa.UniqueConstraint("job", "name"),
        sa.UniqueConstraint("job", "number"),
        sa.UniqueConstraint("job", "identity"),
    )
    op.create_table(
        "shards",
        *_version_key(),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        _text("state"),
        _number("epoch"),
        _number("round"),
        sa.Column("owner", sa.Text),
        _number("renewals"),
        _number("losses"),
        _number("returned"),
        sa.Column("returned_reason", sa.Text),
        sa.Column("blocked_reason", sa.Text),
        sa.Column("wanted", sa.Boolean, nullable=False),
        sa.Column("announced", sa.Boolean, nullable=False),
        sa.Column("avoid_worker", sa.Text),
        sa.Column("previous_end", sa.Text),
        sa.Column("staged_slots", sa.Integer),
        sa.Column("staged_rounds", sa.JSON, nullable=False),
        sa.Column("seconds", sa.Double),
        _text("input_sha256"),
        _number("rows"),
        _number("to_answer"),
        sa.Column("hash_low", sa.BigInteger, nullable=False),
        sa.Column("hash_high", sa.BigInteger, nullable=False),
        sa.Column("stats", sa.JSON, nullable=False),
        _of_version(),
    )
    op.create_index("shards_by_state", "shards", ["job", "version", "state", "wanted", "number"])
    op.create_index("shards_by_announcement", "shards", ["job", "version", "announced", "state", "number"])
    op.create_table(
        "leads",
        *_version_key(),
        _text("holder"),
        _number("generation"),
        _number("renewals"),
        sa.Column("released", sa.Boolean, nullable=False),
        _of_version(),
    )
    op.create_table(
        "workers",
        sa.Column("worker_id", sa.Text, primary_key=True),
        _text("job"),
        _text("version"),
        _text("host"),
        _number("pid"),
        sa.Column("process_started_s", sa.Double),
        sa.Column("generation", sa.Integer),
        _text("state"),
        _number("heartbeats"),
        sa.Column("counters", sa.JSON, nullable=False),
        _text("started_at"),
        sa.Column("engine_build", sa.Text),
        _of_version(),
    )
    op.create_index("workers_by_state", "workers", ["job", "version", "state"])
    op.create_table(
        "releases",
        sa.Column("release_id", sa.Text, primary_key=True),
        *(_text(name) for name in ("job", "version", "state", "digest")),
        sa.Column("rows", sa.BigInteger, nullable=False),
        *(_text(name) for name in ("uri", "recipe_digest", "snapshot_digest", "created_at")),
        sa.Column("first_published_at", sa.Text),
        sa.Column("counts", sa.JSON, nullable=False),
        _of_version(),
    )
    op.create_index("releases_by_version", "releases", ["job", "version"])
    op.create_table(
        "verdicts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("release_id", sa.Text, sa.ForeignKey("releases.release_id"), nullable=False),
        _text("release_digest"),
        sa.Column("passed", sa.Boolean, nullable=False),
        sa.Column("payload", sa.JSON, nullable=False),
        _text("created_at"),
    )
    op.create_index("verdicts_by_release", "verdicts", ["release_id", "id"])


def _text(name: str) -> "sa.Column[str]":
    return sa.Column(name, sa.Text, nullable=False)


def _number(name: str) -> "sa.Column[int]":
    return sa.Column(name, sa.Integer, nullable=False)


def _hold() -> "list[sa.Column[str | None]]":
    return [sa.Column(name, sa.Text) for name in ("hold", "hold_note", "hold_by", "held_at")]


def _version_key() -> "list[sa.Column[str]]":
    return [sa.Column(name, sa.Text, primary_key=True) for name in ("job", "version")]


def _of_version() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["job", "version"], ["versions.job", "versions.name"])
