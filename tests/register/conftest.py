"""The databases that the register's promises are kept on. A promise takes `register`, or `open_register` for a second process's view."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batch_assets.stores.register import Register
from tests.support.registers import TickingClock

OpenRegister = Callable[[], Register]


@pytest.fixture(params=["sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    return f"sqlite:///{tmp_path}/register.db"


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
