"""What every rule needs: how hard to try, and an empty register."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from batch_assets.stores.register import Register
from tests.rules.efforts import LONG_FACTOR, Effort
from tests.support.registers import TickingClock


@pytest.fixture(
    params=[pytest.param(1, id="quick"), pytest.param(LONG_FACTOR, id="long", marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def effort(request: pytest.FixtureRequest) -> Effort:
    """Few examples for CI, many for `make test-long`."""
    return Effort(request.param)


@pytest.fixture(params=["sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind; nothing below this fixture knows which."""
    return f"sqlite:///{tmp_path}/register.db"


@pytest.fixture
def register(database_url: str) -> Iterator[Register]:
    """A register with tables and no rows. Histories share it, each under job names of its own."""
    opened = Register(database_url, now=TickingClock())
    opened.create()
    yield opened
    opened.close()
