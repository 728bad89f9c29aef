"""The pipeline as benchmarks run it: an installation of its own, a lead, workers; and the clocks that its stages leave behind.

The parts are the product's own; only what Dagster does around them is left out. What is measured belongs to the benchmarks themselves.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from batch_assets.core.leasing import ShardState
from batch_assets.core.prompting import PromptRenderer, parse_prompt
from batch_assets.core.records import FIELD_PREFIX
from batch_assets.core.spec import VersionSpec
from batch_assets.engines.tokenizers import tokenizer_for
from batch_assets.fleet.lead import LeadKeeper
from batch_assets.fleet.local import LocalFleet
from batch_assets.settings import Settings
from batch_assets.stores.installation import Installation
from benchmarks import pinned
from benchmarks.workloads import JOB

WORKER = "batch_assets.worker"
HOLDER = "benchmark"
POLL_S = 0.1
ANSWER_S_MAX = 3600.0


def settings_of(root: Path, *, engine: str) -> Settings:
    """The defaults of an installation: leases, renewals and flushes are those of production. A script of `write_answers` is used."""
    script = script_file(root)
    return Settings(
        root=str(root),
        state=root,
        database_url=f"sqlite:///{root}/register.db",
        jobs=root / "jobs",
        engine=engine,
        engine_script=str(script) if script.exists() else None,
    )


@contextmanager
def opened(root: Path, *, engine: str) -> Iterator[Installation]:
    """The installation of a benchmark's root."""
    installation = Installation.open(settings_of(root, engine=engine))
    try:
        yield installation
    finally:
        installation.register.close()


def job_file(root: Path) -> Path:
    """Where `write_job(root / "jobs", …)` puts it."""
    return root / "jobs" / JOB / "job.yaml"


def script_file(root: Path) -> Path:
    """What the scripted engine answers, when a benchmark wants other answers than its sixteen small ones."""
    return root / "engine_script.json"


def worker_command(cores: frozenset[int]) -> tuple[str, ...]:
    """A worker on these cores alone."""
    return pinned.command(cores, WORKER)


def prompts(installation: Installation, spec: VersionSpec, *, version: str) -> tuple[list[int], list[list[int]]]:
    """(shared prefix, prompts of all records in the order of the shards), as token ids: what workers make of the frozen input."""
    renderer = PromptRenderer(parse_prompt(spec.prompt), tokenizer_for(spec.engine_build.engine, spec.model_path))
    attempt = installation.register.version(JOB, version).input_attempt
    assert attempt is not None, "the version was planned"
    frozen = installation.frozen_input(job=JOB, version=version, attempt=attempt)
    columns = {FIELD_PREFIX + placeholder: placeholder for placeholder, _ in spec.input_rules.fields}
    found: list[list[int]] = []
    for shard in installation.register.shards(JOB, version):
        rows = frozen.read(shard.number, shard.input_sha256).select(columns.keys()).rename(columns)
        found += [renderer.render(fields) for fields in rows.iter_rows(named=True)]
    return renderer.prefix_tokens, found


@contextmanager
def leading(installation: Installation, *, version: str) -> Iterator[int]:
    """Holds the supervisor lease, so that workers stay; gives the generation."""
    register = installation.register
    generation = register.take_lead(job=JOB, version=version, holder=HOLDER, seen=None)
    assert generation is not None, "somebody else leads a version of the benchmark's own root"
    with LeadKeeper(register, job=JOB, version=version, generation=generation, settings=installation.settings):
        yield generation


def open_shards(installation: Installation, *, version: str) -> int:
    """Shards that no worker has finished."""
    counts = installation.register.counts(JOB, version)
    return counts.get(ShardState.PENDING, 0) + counts.get(ShardState.LEASED, 0)


def answer_all(installation: Installation, *, version: str, generation: int, workers: int, speed: Mapping[str, object]) -> float:
    """Worker processes until every shard is staged, without a committer; returns the seconds from their start. `leading` must be held."""
    installation.register.want(job=JOB, version=version, shards=None)
    fleet = LocalFleet(installation, job=JOB, version=version, generation=generation, speed=speed)
    started_s = time.monotonic()
    fleet.start(workers)
    try:
        wait_until_staged(installation, version=version, look=lambda: _none_ended(fleet))
        return time.monotonic() - started_s
    finally:
        fleet.stop()


def wait_until_staged(installation: Installation, *, version: str, look: Callable[[], None]) -> None:
    """Calls `look` between two looks at the register. Raises TimeoutError after an hour."""
    until_s = time.monotonic() + ANSWER_S_MAX
    while open_shards(installation, version=version):
        if time.monotonic() > until_s:
            raise TimeoutError(f"{open_shards(installation, version=version)} shards are not staged after {ANSWER_S_MAX:.0f} s")
        look()
        time.sleep(POLL_S)


def wait_until_heard(installation: Installation, *, version: str, worker_id: str) -> None:
    """Until the worker's first heartbeat: it has loaded its engine and can be told to end."""
    register = installation.register
    until_s = time.monotonic() + ANSWER_S_MAX
    while not any(row.worker_id == worker_id and row.heartbeats > 0 for row in register.workers(JOB, version, alive_only=True)):
        if time.monotonic() > until_s:
            raise TimeoutError(f"worker {worker_id} has not been heard of after {ANSWER_S_MAX:.0f} s")
        time.sleep(POLL_S)


def _none_ended(fleet: LocalFleet) -> None:
    exits = fleet.reap()
    if exits:
        raise RuntimeError(f"a worker ended before its work was done (exit code {exits[0].exit_code}); its log: {exits[0].log_path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTimes:
    """When the first and the last slot of a version's logs came to be, in ns since 1970. A slot gets its name (and ctime) when it is whole
    and on the disk; a first slot holds the fence alone, put after the model was loaded and before the first request.
    """

    first_put_ns: int
    last_put_ns: int
    slots: int

    @property
    def seconds(self) -> float:
        return (self.last_put_ns - self.first_put_ns) / 1e9


def log_times(root: Path, *, version: str) -> LogTimes:
    """From the files' change times: a link makes one, and nothing touches a slot afterwards."""
    times = [slot.stat().st_ctime_ns for slot in (root / JOB / "versions" / version / "log").glob("shard-*/*.arrow")]
    return LogTimes(first_put_ns=min(times), last_put_ns=max(times), slots=len(times))
