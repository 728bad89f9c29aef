"""Which schema a database has, and bringing it to ours. The steps themselves are in `migrations/`.

Opening a register that is up to date reads one row and does not import alembic: a worker never needs it.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Column, Connection, MetaData, Table, Text, inspect, select

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

REVISION = "0002"  # the last step in migrations/; a test compares
FOLDER = Path(__file__).with_name("migrations")
_BEFORE_ALEMBIC = ("register_schema", "0001")  # a table that says so, and the revision that such a register has

_version = Table("alembic_version", MetaData(), Column("version_num", Text))


def revision_of(connection: Connection) -> str | None:
    """None for a database without tables of ours, or from before there were migrations."""
    if not inspect(connection).has_table(_version.name):
        return None
    return connection.scalar(select(_version.c.version_num))


def is_newer(revision: str) -> bool:
    """Revisions are four digits and count up."""
    return revision > REVISION


def upgrade(connection: Connection) -> None:
    """To REVISION, from nothing or from any revision before it, inside the connection's transaction. Whoever calls it keeps others out."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    script = _script()
    steps = script._upgrade_revs  # noqa: SLF001  what `alembic upgrade` calls; it has no public name
    context = MigrationContext.configure(connection, opts={"script": script, "fn": lambda found, _context: steps("head", found)})
    table, revision = _BEFORE_ALEMBIC
    if revision_of(connection) is None and inspect(connection).has_table(table):
        context.stamp(script, revision)
    with Operations.context(context):
        context.run_migrations()


@cache
def _script() -> "ScriptDirectory":
    from alembic.script import ScriptDirectory

    return ScriptDirectory(FOLDER, version_locations=[FOLDER])
