"""Claims and renewals per second that many clients get from one register, on SQLite and on PostgreSQL.

450 workers need 15 renewals a second and fewer than 2 claims. PostgreSQL twice: as workers use it (a connection for each transaction) and
with a pool in each client, which shows what connecting costs.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batch_assets.stores.register import Register
from benchmarks import results
from benchmarks.children import QUIET
from benchmarks.results import REPOSITORY, Measurement, Report, Target
from benchmarks.workplace import workplace
from tests.support import postgres
from tests.support.registers import JOB, planned

NEED_PER_S = 450 / 30  # workers at ten times the reference, each renewing every 30 s
RENEWALS_PER_S = Target(goal=10 * NEED_PER_S, bar=2 * NEED_PER_S)
FREE_GB = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is run. Each phase lasts `seconds`; there must be more shards than can be claimed in that time."""

    clients: int = 32
    seconds: float = 10.0
    repeats: int = 3
    shards: int = 50_000

    @classmethod
    def quick(cls) -> "Sizes":
        """Shows that it runs."""
        return cls(clients=4, seconds=1.0, repeats=1, shards=5_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contest:
    name: str
    url: str
    pooled: bool


def run(sizes: Sizes, *, quick: bool, keep: bool = False) -> Report:
    """Contests take turns; a version of its own for each run."""
    machine, started_s = results.machine(), time.monotonic()
    found: dict[str, list[Mapping[str, float]]] = {}
    with workplace("register", free_gb=FREE_GB, keep=keep) as folder, postgres.running() as server:
        for repeat in range(sizes.repeats):
            for contest in _contests(folder, server):
                found.setdefault(contest.name, []).append(_run(contest, sizes, repeat))
    measurements = [
        Measurement(
            name=f"{what}, {name}",
            unit=f"{what}/s",
            values=[run[what] for run in runs],
            target=RENEWALS_PER_S if what == "renewals" and not quick else None,
        )
        for name, runs in found.items()
        for what in ("claims", "renewals")
    ]
    seconds = time.monotonic() - started_s
    return Report(benchmark="register", sizes=asdict(sizes), measurements=measurements, quick=quick, seconds=seconds, machine=machine)


def _contests(folder: Path, server: postgres.Server) -> Iterator[_Contest]:
    yield _Contest(name="SQLite", url=f"sqlite:///{folder}/register.db", pooled=True)
    url = server.url(server.create())
    yield _Contest(name="PostgreSQL, a connection for each transaction", url=url, pooled=False)
    yield _Contest(name="PostgreSQL, pooled", url=url, pooled=True)


def _run(contest: _Contest, sizes: Sizes, repeat: int) -> Mapping[str, float]:
    register = Register(contest.url)
    register.create()
    version = planned(register, shards=sizes.shards, prompt=f"{contest.name} {repeat}")
    register.close()
    with _clients(contest, version, sizes) as clients:
        assert [_line(client) for client in clients] == ["ready"] * len(clients)
        counted: dict[str, float] = {}
        for _ in ("claims", "renewals"):
            for what, count in _phase(clients).items():
                counted[what] = count / sizes.seconds
    return counted


@contextmanager
def _clients(contest: _Contest, version: str, sizes: Sizes) -> "Iterator[list[subprocess.Popen[str]]]":
    command = [sys.executable, "-m", "benchmarks.register_client", contest.url, "pooled" if contest.pooled else "single", JOB, version]
    clients = [
        subprocess.Popen(
            [*command, f"w{number}", f"{sizes.seconds:g}"],
            cwd=REPOSITORY,
            env={**os.environ, **QUIET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(sizes.clients)
    ]
    try:
        yield clients
    finally:
        for client in clients:
            client.kill()
            client.communicate()


def _phase(clients: "Sequence[subprocess.Popen[str]]") -> dict[str, int]:
    """All go at once; the sum of what they tell."""
    for client in clients:
        assert client.stdin is not None, "it was opened as a pipe"
        client.stdin.write("go\n")
        client.stdin.flush()
    told = [_line(client) for client in clients]
    return {what: sum(each[what] for each in told) for what in told[0]}


def _line(client: "subprocess.Popen[str]") -> Any:
    assert client.stdout is not None, "it was opened as a pipe"
    line = client.stdout.readline()
    if not line:
        raise RuntimeError(f"a client ended with exit code {client.wait()} before it was done")
    return json.loads(line)
