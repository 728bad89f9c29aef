"""In CI a skip is a failure unless it is allowed by name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import may_skip, read_allowed_skips

SUITE = """
import pytest

def test_runs(): pass

def test_skips_in_its_body(): pytest.skip("no database here")

@pytest.mark.skip(reason="by mark")
def test_skips_by_mark(): pass

@pytest.mark.xfail(reason="known")
def test_expected_to_fail(): assert False
"""


@pytest.fixture
def suite(tmp_path: Path, repository: Path) -> Path:
    """A small project with our conftest: its tests skip in every way there is."""
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(repository / "tests" / "conftest.py", tests)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tests / "test_suite.py").write_text(SUITE)
    (tests / "allowed_skips.txt").write_text("")
    return tmp_path


def run(suite: Path, *, ci: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CI": ci}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA"]
    return subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("ci", ["", "0", "false"])
def test_outside_ci_a_skip_is_a_skip(suite: Path, ci: str):
    finished = run(suite, ci=ci)
    assert finished.returncode == 0, finished.stdout
    assert "1 passed, 2 skipped, 1 xfailed" in finished.stdout


def test_in_ci_a_skip_fails_and_says_what_to_do(suite: Path):
    finished = run(suite, ci="1")
    assert finished.returncode == 1
    assert "1 failed, 1 passed, 1 xfailed, 1 error" in finished.stdout  # a mark skips during setup: pytest calls that an error
    assert "skipped in CI: tests/test_suite.py::test_skips_in_its_body: Skipped: no database here" in finished.stdout
    assert "make it run, or name it in tests/allowed_skips.txt with a reason" in finished.stdout


def test_in_ci_an_allowed_skip_is_a_skip(suite: Path):
    (suite / "tests" / "allowed_skips.txt").write_text("# heading\ntests/test_suite.py::test_skips_*  # shown by this test\n")
    finished = run(suite, ci="true")
    assert finished.returncode == 0, finished.stdout
    assert "1 passed, 2 skipped, 1 xfailed" in finished.stdout


def test_in_ci_a_module_that_skips_itself_fails(suite: Path):
    (suite / "tests" / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module_here')\n")
    finished = run(suite, ci="1")
    assert finished.returncode != 0
    assert "skipped in CI: tests/test_module.py" in finished.stdout


def test_an_allowed_skip_needs_a_reason():
    with pytest.raises(pytest.UsageError, match="no reason in"):
        read_allowed_skips("tests/test_a.py::test_b\n")


def test_brackets_of_an_allowed_node_id_are_its_parameters():
    assert may_skip("tests/test_a.py::test_b[postgres]", ["tests/test_a.py::test_b[postgres]"])
    assert not may_skip("tests/test_a.py::test_bp", ["tests/test_a.py::test_b[postgres]"])


def test_every_allowed_skip_of_this_suite_has_a_reason(repository: Path):
    read_allowed_skips((repository / "tests" / "allowed_skips.txt").read_text())
