"""What holds for every test: quiet and offline libraries, and no silent skip in CI.

With CI set, a skipped test or module fails unless tests/allowed_skips.txt names its node id (or a glob of it) with a reason: a suite
that skips what it cannot run stays green while it proves less and less.
"""

import os
import re
import signal
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.support import postgres

REPOSITORY = Path(__file__).resolve().parent.parent
ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")

# Set before any test imports them: they read these at import, and subprocesses inherit them.
os.environ |= {
    "DAGSTER_DISABLE_TELEMETRY": "yes",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# A shell starts what it puts in the background with SIGINT ignored, and children inherit that: a test's Ctrl-C would reach nobody.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def skip_is_failure() -> bool:
    """True in CI."""
    return os.environ.get("CI", "").lower() not in {"", "0", "false"}


def read_allowed_skips(text: str) -> list[str]:
    """The globs of tests/allowed_skips.txt; a line without a reason is refused."""
    globs = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        glob, mark, reason = line.partition("  #")
        if not mark or not reason.strip():
            message = f"tests/allowed_skips.txt: no reason in {line!r}; write `glob  # reason`"
            raise pytest.UsageError(message)
        globs.append(glob.strip())
    return globs


def may_skip(node_id: str, globs: list[str]) -> bool:
    """Only `*` and `?` are special: a `[` in a node id starts its parameters, not a set of characters."""
    return any(fnmatchcase(node_id, re.sub(r"\[", "[[]", glob)) for glob in globs)


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip that nobody allowed into a failure that says so; an expected failure (xfail) is not a skip."""
    if not report.skipped or hasattr(report, "wasxfail") or not skip_is_failure():
        return
    if may_skip(report.nodeid, read_allowed_skips(ALLOWED_SKIPS.read_text())):
        return
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped in CI: {report.nodeid}: {why}\nmake it run, or name it in tests/allowed_skips.txt with a reason"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests that skip by mark, fixture or in their body."""
    report = yield
    fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Modules that skip while they are imported."""
    report = yield
    fail_if_skipped(report)
    return report


@pytest.fixture(autouse=True)
def _no_settings_from_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own GRISTMILL_… must not reach a test; one that needs a setting sets it."""
    for name in os.environ:
        if name.startswith("GRISTMILL_") and name != "GRISTMILL_SHARED":
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data shared with this repository: GRISTMILL_SHARED, or ../shared."""
    folder = Path(os.environ.get("GRISTMILL_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}; set GRISTMILL_SHARED")
    return folder


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    """One private cluster for the whole session, started by the first test that asks for it."""
    with postgres.running() as server:
        yield server
