"""A real `dagster dev` over the repository's workspace, in a session of its own, and its GraphQL door."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from batch_assets.launch import open_instance
from batch_assets.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
LOCATION = "batch_assets.definitions"
START_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class DagsterDev:
    """A running instance."""

    url: str
    log: Path

    def query(self, text: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One GraphQL request; errors fail the test."""
        body = json.dumps({"query": text, "variables": dict(variables or {})}).encode()
        request = Request(f"{self.url}/graphql", data=body, headers={"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as response:
            answer = json.loads(response.read())
        assert "errors" not in answer, answer
        return answer["data"]


@contextmanager
def dagster_dev(settings: Settings, **environment: str) -> Iterator[DagsterDev]:
    """Up when its GraphQL answers with our repository loaded; its whole process group is ended afterwards."""
    open_instance(settings).dispose()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = settings.state / "dagster-dev.log"
    variables = {**os.environ, **settings.as_environment(), "DAGSTER_HOME": str(settings.dagster_home), **environment}
    command = [sys.executable, "-m", "dagster", "dev", "-w", "workspace.yaml", "-h", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=output, stderr=output, start_new_session=True)
    try:
        dev = DagsterDev(f"http://127.0.0.1:{port}", log)
        wait_for(lambda: _is_up(dev, process), limit_s=START_LIMIT_S, what=f"dagster dev; see {log}")
        yield dev
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                continue


def _is_up(dev: DagsterDev, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, dev.log.read_text()[-4000:]
    try:
        found = dev.query("{ repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }")
    except (URLError, ConnectionError, TimeoutError):
        return False
    return bool(found["repositoriesOrError"].get("nodes"))


def wait_for(condition: Callable[[], Any], *, limit_s: float, what: str, pause_s: float = 0.5) -> Any:
    """The first truthy value; fails when it takes too long."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        value = condition()
        if value:
            return value
        time.sleep(pause_s)
    raise AssertionError(f"waited {limit_s:g} s for {what}")
