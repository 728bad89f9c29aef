"""An empty installation per test, and one finished version in it."""

from pathlib import Path

import pytest

from batch_assets.stores.installation import Installation
from batch_assets.stores.register import VersionRow
from tests.support.finished import finished_version, open_installation


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return open_installation(tmp_path / "root")


@pytest.fixture
def finished(installation: Installation) -> VersionRow:
    return finished_version(installation)
