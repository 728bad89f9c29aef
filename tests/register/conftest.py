"""The databases that the register's promises are kept on. A promise takes `register`, or `open_register` for a second process's view."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import delete

from batch_assets.stores.register import Register
from batch_assets.stores.sql.tables import metadata
from tests.support.postgres import Server
from tests.support.registers import TickingClock

OpenRegister = Callable[[], Register]


@pytest.fixture(scope="session")
def tables_in_postgres(postgres_server: Server) -> str:
    """One database with tables for all tests that only need rows: making one for each took longer than the tests."""
    url = postgres_server.url(postgres_server.create())
    register = Register(url)
    register.create()
    register.close()
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without rows of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/register.db"
    url: str = request.getfixturevalue("tables_in_postgres")
    remove_rows(url)
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of each kind in which nothing was created yet."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/register.db"
        return
    server: Server = request.getfixturevalue("postgres_server")
    name = server.create()
    yield server.url(name)
    server.drop(name)


def remove_rows(url: str) -> None:
    """One transaction; deleting few rows is faster than truncating many tables."""
    register = Register(url)
    with register.writing() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(delete(table))
    register.close()


@pytest.fixture
def register_on_postgres(tables_in_postgres: str) -> Iterator[Register]:
    """Without rows, for what only PostgreSQL promises."""
    remove_rows(tables_in_postgres)
    register = Register(tables_in_postgres)
    yield register
    register.close()


@pytest.fixture
def open_register(database_url: str) -> Iterator[OpenRegister]:
    """Makes registers on one database, each with connections of its own, as another process would have."""
    opened: list[Register] = []
    clock = TickingClock()

    def open_one() -> Register:
        opened.append(Register(database_url, now=clock))
        opened[-1].create()
        return opened[-1]

    yield open_one
    for register in opened:
        register.close()


@pytest.fixture
def register(open_register: OpenRegister) -> Register:
    """A register with tables and no rows."""
    return open_register()
