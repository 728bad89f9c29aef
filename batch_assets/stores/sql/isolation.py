"""A login for the workers of each version: with it they see and change their own version's rows and no others (PostgreSQL).

Roles and grants are made by `gristmill_admit_workers`, policies stand beside it in `migrations/`; docs/postgres.md says who may call it.
"""

import secrets
from dataclasses import dataclass

from sqlalchemy import text

from batch_assets.stores.sql.database import Database

PASSWORD_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationState:
    """Whether workers are isolated from each other's versions, and who says so. `obstacle`: what is in the way, None when they are."""

    server: str
    role: str
    obstacle: str | None


class Isolation(Database):
    """Logins of workers."""

    def worker_url(self, *, job: str, version: str) -> str:
        """What a worker of this version is to open: a login of its own, each time the same; this URL where workers cannot be isolated."""
        if self.isolation().obstacle is not None:
            return self.url.render_as_string(hide_password=False)
        with self.writing() as connection:
            admitted = text("select gristmill_admit_workers(:job, :version, :password), gristmill_worker_role(:job, :version)")
            named = {"job": job, "version": version, "password": secrets.token_urlsafe(PASSWORD_BYTES)}
            password, role = connection.execute(admitted, named).one()
        return self.url.set(username=role, password=password).render_as_string(hide_password=False)

    def isolation(self) -> IsolationState:
        """For `gristmill doctor`, and for whoever starts workers."""
        if self.is_sqlite:
            return IsolationState(server="SQLite", role="", obstacle="one file for all: one host, one user (PostgreSQL isolates workers)")
        asked = text(
            "select current_setting('server_version'), current_user::text, rolsuper or rolcreaterole,"
            " row_security_active('shards'), (select tableowner = current_user from pg_tables where tablename = 'shards' limit 1)"
            " from pg_roles where rolname = current_user"
        )
        with self.reading() as connection:
            server, role, may_make_roles, is_bound, is_owner = connection.execute(asked).one()
        obstacle = None
        if is_bound or not is_owner:
            obstacle = f"role {role} does not own the register's tables; supervisors connect as the role that made them"
        elif not may_make_roles:
            obstacle = f"role {role} may not make roles; now: alter role {role} createrole"
        return IsolationState(server=f"PostgreSQL {server.split()[0]}", role=role, obstacle=obstacle)
