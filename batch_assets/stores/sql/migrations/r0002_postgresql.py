"""Partial indexes, the leases' clock, and on PostgreSQL free space in hot pages, `gristmill_now()` and one version per worker's role."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

# Tests replace it. Not now(), which stands still while a transaction waits for a lock.
CLOCK = "create function gristmill_now() returns timestamptz language sql volatile as 'select clock_timestamp()'"

# Roles belong to the whole server, so the database is in their names: 53 characters of the 63 that a name may have.
ROLE = """
create function gristmill_worker_role(job text, version text) returns text language sql stable as
$$ select 'gm_' || left(md5(current_database()), 6) || '_' || job || '_' || version $$
"""

# Makes, once, the login of a version's workers; the same again returns the password that it has. Whoever calls it must own the tables and
# have CREATEROLE. What a worker may not touch it has no grant for; which rows, the policies below say.
ADMIT = """
create function gristmill_admit_workers(for_job text, for_version text, new_password text) returns text language plpgsql as $$
declare
    everyone text := 'gm_' || left(md5(current_database()), 6) || '_workers';
    login text := gristmill_worker_role(for_job, for_version);
    known text;
begin
    perform pg_advisory_xact_lock(hashtext(everyone));
    select password into known from worker_logins where job = for_job and version = for_version;
    if known is not null then
        return known;
    end if;
    if not exists (select from pg_roles where rolname = everyone) then
        execute format('create role %I nologin', everyone);
    end if;
    execute format('grant select on alembic_version, jobs, versions, shards, leads, workers to %I', everyone);
    execute format('grant update (state, epoch, owner, renewals, renewed_at, avoid_worker, previous_end, staged_slots, staged_rounds,'
        ' seconds) on shards to %I', everyone);
    execute format('grant insert, update on workers to %I', everyone);
    if not exists (select from pg_roles where rolname = login) then
        execute format('create role %I login', login);
    end if;
    execute format('alter role %I password %L', login, new_password);
    execute format('grant %I to %I', everyone, login);
    insert into worker_logins (job, version, role, password) values (for_job, for_version, login, new_password);
    return new_password;
end $$
"""

# The owner of the tables is not bound by them; everybody else sees and changes what its own name says.
MINE = "current_user = gristmill_worker_role(job, version)"
POLICIES = (
    "create policy own_job on jobs for select using (exists (select from versions where versions.job = jobs.job))",
    "create policy own_version on versions for select using (current_user = gristmill_worker_role(job, name))",
    f"create policy own_version on leads for select using ({MINE})",
    f"create policy own_version on workers using ({MINE})",
    f"create policy own_shards on shards for select using ({MINE})",
    # A worker claims, renews, stages and gives back. What is staged, committed or blocked is not its to change any more.
    (
        f"create policy own_leases on shards for update using ({MINE} and state in ('pending', 'leased'))"
        f" with check ({MINE} and state in ('pending', 'leased', 'staged'))"
    ),
)
GUARDED = ("jobs", "versions", "leads", "workers", "shards", "releases", "verdicts", "worker_logins")


def upgrade() -> None:
    """From 0001."""
    for table in ("shards", "leads"):
        op.add_column(table, sa.Column("renewed_at", sa.DateTime(timezone=True)))
    _index_by_state()
    op.create_table(
        "worker_logins",
        sa.Column("job", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("password", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["job", "version"], ["versions.job", "versions.name"]),
    )
    op.execute("drop table if exists register_schema")  # how registers said their schema before there were migrations
    if op.get_bind().dialect.name == "postgresql":
        _prepare_postgresql()


def _index_by_state() -> None:
    for name in ("shards_by_state", "shards_by_announcement"):
        op.drop_index(name, "shards")
    op.create_index("shards_by_state", "shards", ["job", "version", "state"])
    not_announced = "not announced" if op.get_bind().dialect.name == "postgresql" else "announced = 0"
    for name, columns, where in (
        ("shards_pending", ["wanted", "number"], "state = 'pending'"),
        ("shards_leased", ["number"], "state = 'leased'"),
        ("shards_staged", ["number"], "state = 'staged'"),
        ("shards_unannounced", ["number"], f"state = 'committed' and {not_announced}"),
    ):
        condition = sa.text(where)
        op.create_index(name, "shards", ["job", "version", *columns], postgresql_where=condition, sqlite_where=condition)


def _prepare_postgresql() -> None:
    for table, percent in (("shards", 80), ("leads", 50), ("workers", 50)):
        op.execute(f"alter table {table} set (fillfactor = {percent})")
    for function in (CLOCK, ROLE, ADMIT):
        op.execute(function)
    op.execute("revoke execute on function gristmill_admit_workers from public")
    for table in GUARDED:
        op.execute(f"alter table {table} enable row level security")
    for policy in POLICIES:
        op.execute(policy)
    # Leases that run while the register is upgraded begin anew.
    op.execute("update shards set renewed_at = gristmill_now()")
    op.execute("update leads set renewed_at = gristmill_now()")
