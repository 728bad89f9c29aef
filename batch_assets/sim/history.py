"""One history: a world made from a seed, driven until the version is finished or an invariant is violated."""

import hashlib
import shutil
import tempfile
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Final

import polars as pl
from deltalake.exceptions import CommitFailedError
from sqlalchemy.exc import OperationalError

from batch_assets.core.errors import UnfitEnvironmentError
from batch_assets.core.identity import canonical_json
from batch_assets.settings import Settings
from batch_assets.sim.clockwork import Clockwork, OvertimeError, Process
from batch_assets.sim.faults import Fault, FaultMix, Seams, StoreError
from batch_assets.sim.invariants import Auditor, Violation
from batch_assets.sim.people import People
from batch_assets.sim.processes import World
from batch_assets.sim.stores import SeamedInstallation, SeamedObjects, SeamedRegister
from batch_assets.sim.twins import MemoryObjects, ModelOutcomes, ModelTable
from batch_assets.sim.workload import JOB, SCHEMA, Workload, drawn, write_job, write_model
from batch_assets.stores.job_folders import load_job
from batch_assets.stores.objects import LocalObjects
from batch_assets.stores.outcomes import Outcomes
from batch_assets.stores.register import Register

LEASE_S: Final = 3.0
RENEW_S: Final = 1.0
FLUSH_S: Final = 0.3
# Of virtual time. Undisturbed a history takes some seconds, and faults stop after 25; records that kill cost starts, of which there are six
# a minute for each worker, and those that are never answered three times 36 s.
LIMIT_S: Final = 600.0
REAL_EVERY: Final = 20
LAST_EVENTS: Final = 60
FAST_FOLDER: Final = Path("/dev/shm")  # noqa: S108  a folder of our own is made in it; files that nobody needs after a crash of the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryReport:
    """What a history came to. `digest` is over every event."""

    seed: int
    is_real: bool
    mix: FaultMix
    violation: Violation | None
    digest: str
    events: int
    last_events: tuple[str, ...]
    virtual_s: float
    struck: Counter[Fault]
    records: int


class Record:
    """The events of a history: a digest over all, and the last of them."""

    def __init__(self) -> None:
        self.events = 0
        self.last: deque[str] = deque(maxlen=LAST_EVENTS)
        self._sha256 = hashlib.sha256()

    def note(self, now_s: float, who: str, what: str) -> None:
        """One event."""
        line = f"{now_s:9.3f}  {who:<12}  {what}"
        self.events += 1
        self.last.append(line)
        self._sha256.update(line.encode())

    @property
    def digest(self) -> str:
        """Of all events so far."""
        return self._sha256.hexdigest()


def run_history(seed: int, *, is_real: bool | None = None) -> HistoryReport:
    """The history of a seed; `is_real` None: every REAL_EVERY-th on files and Delta."""
    with _folder() as folder:
        return _run(seed, folder, is_real=seed % REAL_EVERY == 0 if is_real is None else is_real)


def _run(seed: int, folder: Path, *, is_real: bool) -> HistoryReport:
    random = Random(seed)
    mix = FaultMix.drawn(random)
    workload = drawn(random, mix)
    record = Record()
    auditors: list[Auditor] = []  # filled below: a process that fails is told to the one there will be
    clockwork = Clockwork(failed=lambda process, error: _failed(auditors[0], process, error))
    seams = Seams(clockwork, mix, random, LEASE_S)

    def note(what: str) -> None:
        process = clockwork.current
        record.note(clockwork.now_s, process.name.rsplit("-g", 1)[-1] if process is not None else "", what)

    world = _world(folder, clockwork, seams, workload, note, is_real=is_real)
    auditors.append(world.auditor)
    people = People(world)
    auditor = world.auditor
    try:
        clockwork.run(lambda: bool(auditor.violations) or people.is_over, limit_s=LIMIT_S)
        if not auditor.violations:
            auditor.see_end()
    except OvertimeError as error:
        states = {shard.number: shard.state for shard in auditor.shards.values()}
        auditor.violated("a version is finished once faults have stopped", f"not after {error}: {auditor.version}, shards {states}")
    finally:
        seen = (record.digest, record.events, tuple(record.last), clockwork.now_s)
        seams.is_quiet = True
        clockwork.close()
        auditor.close()
        world.installation.register.close()
    digest, events, last_events, virtual_s = seen
    return HistoryReport(
        seed=seed,
        is_real=is_real,
        mix=mix,
        violation=auditor.violations[0] if auditor.violations else None,
        digest=digest,
        events=events,
        last_events=last_events,
        virtual_s=virtual_s,
        struck=seams.struck,
        records=len(workload.expected),
    )


def _world(folder: Path, clockwork: Clockwork, seams: Seams, workload: Workload, note: Callable[[str], None], *, is_real: bool) -> World:
    database, root = folder / "register.db", folder / "root"
    shutil.copyfile(_template() / "register.db", database)
    objects = LocalObjects(str(root)) if is_real else MemoryObjects()
    table = None if is_real else ModelTable()
    settings = Settings(
        root=str(root),
        state=folder,
        database_url=f"sqlite:///{database}",
        jobs=folder,
        lease_s=LEASE_S,
        renew_s=RENEW_S,
        flush_s=FLUSH_S,
        engine="scripted",
    )

    def rows_of(shards: Collection[int]) -> pl.DataFrame:
        schema = canonical_json(SCHEMA)
        if table is not None:
            return ModelOutcomes(table, answer_schema=schema).read(shards=shards)
        assert auditor.version is not None, "rows of a version that is not planned"
        return Outcomes(f"{root}/{JOB}/versions/{auditor.version.name}/outcomes", answer_schema=schema).read(shards=shards)

    auditor = Auditor(clockwork=clockwork, workload=workload, database=str(database), objects=objects, rows_of=rows_of, note=note)
    register = SeamedRegister(settings.database_url, seams=seams, effects=auditor, now=lambda: f"{clockwork.now_s:012.3f}")
    installation = SeamedInstallation(settings, register, SeamedObjects(objects, seams, auditor), seams, auditor, table)
    job = load_job(write_job(folder / JOB, workload, model=_template() / "model"), environment={})
    return World(clockwork, seams, auditor, installation, job, workload, seams.random, note)


def _failed(auditor: Auditor, process: Process, error: Exception) -> None:
    """A process ended with an error: after an injected fault it may."""
    auditor.note(f"{process.name} ended: {type(error).__name__}")
    codes = [problem.code for problem in error.problems] if isinstance(error, UnfitEnvironmentError) else []
    is_ours = isinstance(error, StoreError | OperationalError | CommitFailedError)
    if not is_ours and codes != ["fleet.workers_do_not_start"]:
        auditor.violated("no process ends but by a fault", "".join(traceback.format_exception(error)))


@lru_cache(maxsize=1)
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="gristmill-sim-", dir=FAST_FOLDER if FAST_FOLDER.is_dir() else None)


@lru_cache(maxsize=1)
def _template() -> Path:
    """An empty register and a model, made once a process."""
    folder = Path(_scratch().name) / "template"
    register = Register(f"sqlite:///{folder}/register.db")
    register.create()
    register.close()
    write_model(folder / "model")
    return folder


@contextmanager
def _folder() -> Generator[Path]:
    folder = Path(tempfile.mkdtemp(dir=_scratch().name))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
