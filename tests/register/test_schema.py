"""The schema: what the migrations make is what `tables.py` says, on both databases, from nothing and from the first release."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, event, inspect, text

from batch_assets.core.errors import UnfitEnvironmentError
from batch_assets.stores.register import Register
from batch_assets.stores.sql import schema
from batch_assets.stores.sql.tables import metadata
from tests.support.postgres import Server
from tests.support.registers import JOB, planned


def described(connection: Connection) -> dict[str, Any]:
    """Tables with columns, keys, constraints and indexes; on PostgreSQL also their storage settings."""
    inspector = inspect(connection)
    tables = {
        table: {
            "columns": {column["name"]: (str(column["type"]), column["nullable"]) for column in inspector.get_columns(table)},
            "key": inspector.get_pk_constraint(table)["constrained_columns"],
            "references": sorted(
                (key["constrained_columns"], key["referred_table"], key["referred_columns"]) for key in inspector.get_foreign_keys(table)
            ),
            "unique": sorted(unique["column_names"] for unique in inspector.get_unique_constraints(table)),
            "indexes": {index["name"]: (index["column_names"], predicate(index)) for index in inspector.get_indexes(table)},
        }
        for table in inspector.get_table_names()
        if table != "alembic_version"
    }
    if connection.dialect.name == "postgresql":
        for table, options in connection.execute(text("select relname, reloptions from pg_class where relkind = 'r'")):
            if table in tables:
                tables[table]["options"] = options
    return tables


def predicate(index: Any) -> str | None:
    options = index.get("dialect_options", {})
    where = options.get("postgresql_where") or options.get("sqlite_where")
    return re.sub(r"::text|[()\"]", "", str(where)) if where is not None else None


def in_database(url: str, do: Callable[[Connection], Any]) -> Any:
    engine = create_engine(url)
    with engine.begin() as connection:
        done = do(connection)
    engine.dispose()
    return done


@pytest.fixture
def wanted(empty_database_url: str, postgres_server: Server, tmp_path) -> dict[str, Any]:
    """What `tables.py` makes on the same kind of database."""
    is_sqlite = empty_database_url.startswith("sqlite")
    url = f"sqlite:///{tmp_path}/wanted.db" if is_sqlite else postgres_server.url(postgres_server.create())
    in_database(url, metadata.create_all)
    return in_database(url, described)


def create(url: str) -> Register:
    register = Register(url)
    register.create()
    return register


def test_the_migrations_make_what_the_tables_say(empty_database_url: str, wanted: dict[str, Any]):
    create(empty_database_url).close()
    assert in_database(empty_database_url, described) == wanted


def first_release(connection: Connection) -> None:
    """A register as the first release made it: no alembic, the schema's number in a table."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    script = ScriptDirectory(schema.FOLDER, version_locations=[schema.FOLDER])
    with Operations.context(MigrationContext.configure(connection)):
        script.get_revision("0001").module.upgrade()
    connection.execute(text("create table register_schema (version integer primary key)"))
    connection.execute(text("insert into register_schema values (1)"))
    connection.execute(text("insert into jobs (job, next_number, hold) values ('old_job', 3, 'person')"))


def test_a_register_of_the_first_release_is_upgraded_and_keeps_its_rows(empty_database_url: str, wanted: dict[str, Any]):
    in_database(empty_database_url, first_release)
    register = create(empty_database_url)
    assert register.jobs() == ["old_job"]
    register.close()
    assert in_database(empty_database_url, described) == wanted


def test_the_last_revision_is_the_one_that_is_expected_and_they_count_up():
    script = ScriptDirectory(schema.FOLDER, version_locations=[schema.FOLDER])
    revisions = [step.revision for step in script.walk_revisions()][::-1]
    assert revisions == [f"{number:04d}" for number in range(1, len(revisions) + 1)]
    assert script.get_heads() == [schema.REVISION]


def test_a_newer_schema_is_refused_in_words_and_left_alone(empty_database_url: str):
    create(empty_database_url).close()
    in_database(empty_database_url, lambda connection: connection.execute(text("update alembic_version set version_num = '9999'")))
    register = Register(empty_database_url)
    with pytest.raises(UnfitEnvironmentError, match=r"(?s)upgraded by a newer gristmill.*or older, found schema 9999.*use that gristmill"):
        register.create()
    register.close()


def test_a_step_that_fails_leaves_the_schema_as_it_was(empty_database_url: str, monkeypatch: pytest.MonkeyPatch):
    in_database(empty_database_url, first_release)
    before = in_database(empty_database_url, described)
    in_database(empty_database_url, lambda connection: connection.execute(text("create table worker_logins (x integer)")))
    with pytest.raises(UnfitEnvironmentError, match="worker_logins"):
        create(empty_database_url)
    in_database(empty_database_url, lambda connection: connection.execute(text("drop table worker_logins")))
    assert in_database(empty_database_url, described) == before
    create(empty_database_url).close()


def test_opening_what_is_up_to_date_does_not_import_alembic(register: Register, database_url: str):
    import subprocess
    import sys

    version = planned(register)
    look = (
        "import sys; from batch_assets.stores.register import Register\n"
        f"register = Register({database_url!r}); register.create(); print(register.version({JOB!r}, {version!r}).name)\n"
        "assert 'alembic' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.strip() == version


READS: dict[str, Callable[[Register, str], object]] = {
    "shards_pending": lambda register, version: register.claim(job=JOB, version=version, worker="w"),
    "shards_leased": lambda register, version: register.leased(JOB, version),
    "shards_staged": lambda register, version: register.staged(JOB, version, 10),
    "shards_unannounced": lambda register, version: register.unannounced(JOB, version),
}


@pytest.mark.parametrize("index", READS)
def test_what_is_read_each_second_comes_from_the_partial_index_of_its_state(register: Register, index: str):
    version = planned(register, shards=2000)
    with register.writing() as connection:
        connection.execute(text("update shards set state = 'committed', announced = true where number <= 1500"))
    with register.writing() as connection:
        connection.execute(text("analyze"))
    statements: list[tuple[str, Any]] = []
    engine = register._opened()
    event.listen(engine, "before_cursor_execute", lambda _c, _cursor, statement, values, *_: statements.append((statement, values)))
    READS[index](register, version)
    statement, values = next(each for each in statements if "shards" in each[0])
    explain = "EXPLAIN QUERY PLAN " if register.is_sqlite else "EXPLAIN "
    with register.reading() as connection:
        plan = "\n".join(str(row) for row in connection.exec_driver_sql(explain + statement, values))
    assert index in plan
