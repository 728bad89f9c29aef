"""Worker processes on this host: started, adopted, seen to exit, stopped. Each in a session of its own, so that it outlives its supervisor.

Nothing here decides how many there should be or whether an exit is a crash loop (`core/supervision.py`), and no worker is talked to but by
signals: what it does stands in the register.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from batch_assets.core.leasing import LeaseEnd
from batch_assets.core.supervision import WorkerExit, last_line_class, refusal_text
from batch_assets.engines.build import SPEED_VARIABLE
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import WorkerRow

NOTICE_S = 30.0  # from SIGTERM to SIGKILL: what a spot machine gives, too
POLL_S = 0.05
LOG_TAIL_BYTES = 16384


class Fleet(Protocol):
    """Workers of one version, as a supervisor sees them. Local processes here; Kubernetes Jobs later."""

    @property
    def alive(self) -> int:
        """How many are there, starting ones included."""
        ...

    def adopt(self) -> None:
        """Take over what is registered and lives; what is registered and does not live is an exit of the next `reap`."""
        ...

    def start(self, count: int) -> None:
        """Start so many more."""
        ...

    def reap(self) -> Sequence[WorkerExit]:
        """Those that ended since the last call. Their leases have been ended."""
        ...

    def kill(self, worker_id: str) -> None:
        """End one that is no more to be reached by words."""
        ...

    def stop(self) -> Sequence[WorkerExit]:
        """Ask all to leave, wait for the notice, kill the rest; returns when none is left."""
        ...


class Handle(Protocol):
    """One worker process, ours or adopted."""

    @property
    def worker_id(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def log_path(self) -> Path: ...

    @property
    def started_s(self) -> float:
        """When it began, as the host says it: with the pid it names one process for ever."""
        ...

    def has_ended(self) -> bool:
        """It runs no more, or another process has its pid now."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Nothing happens to one that has ended."""
        ...

    def collect(self) -> int | None:
        """Ends what is left of it; its exit code, None when that is not for us to know."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker of this host: ours (`child`), or adopted from a supervisor that is no more."""

    worker_id: str
    pid: int
    log_path: Path
    child: subprocess.Popen[bytes] | None = None

    @property
    def started_s(self) -> float:
        """Of our child, which may be a zombie: nobody else waits for it."""
        return psutil.Process(self.pid).create_time()

    def has_ended(self) -> bool:
        """True also for a zombie, and for a pid that another process has now."""
        if self.child is not None:
            # WNOWAIT: the pid stays taken until `reap_group` has used it.
            return self.child.returncode is not None or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        try:
            # A worker id is used once: another process that has this pid now does not have it among its arguments, nor has a zombie.
            return self.worker_id not in psutil.Process(self.pid).cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return True

    def signal(self, number: signal.Signals) -> None:
        """To the worker alone, which tells its own children; SIGKILL to its whole session, or an engine core would stay."""
        with suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def collect(self) -> int | None:
        """Ends what it left in its session (an engine core), then its exit code; None when it was not our child."""
        if self.child is None:
            return None
        if self.child.returncode is None:
            self.signal(signal.SIGKILL)
        return self.child.wait()


class LocalFleet:
    """The workers of one version on this host. One thread uses it."""

    def __init__(
        self,
        installation: Installation,
        *,
        job: str,
        version: str,
        generation: int,
        speed: Mapping[str, object],
        notice_s: float = NOTICE_S,
        command: Sequence[str] = (sys.executable, "-m", "batch_assets.worker"),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._installation = installation
        self._register = installation.register
        self._job = job
        self._version = version
        self._generation = generation
        self._speed = dict(speed)
        self._notice_s = notice_s
        self._command = tuple(command)
        self._sleep = sleep
        self._host = socket.gethostname()
        self._workers: dict[str, Handle] = {}
        self._elsewhere: set[str] = set()  # alive on other hosts: counted, never touched
        self._started = 0

    @property
    def alive(self) -> int:
        """Processes of this host that had not ended at the last look, and registered workers of other hosts."""
        return len(self._workers) + len(self._elsewhere)

    def adopt(self) -> None:
        """Registered workers of this host join the fleet; `reap` finds those that do not live. Those of other hosts are only counted."""
        rows = self._register.workers(self._job, self._version, alive_only=True)
        self._elsewhere = {row.worker_id for row in rows if row.host != self._host}
        for row in rows:
            if row.host == self._host and row.worker_id not in self._workers:
                self._workers[row.worker_id] = self._found(row)

    def start(self, count: int) -> None:
        """A process each, registered as soon as it has a pid."""
        for _ in range(count):
            self._started += 1
            self._start(f"{self._job}-{self._version}-g{self._generation}-w{self._started}")

    def _start(self, worker_id: str) -> None:
        worker = self._workers[worker_id] = self._spawn(worker_id)
        self._register.worker_started(
            worker_id=worker_id,
            job=self._job,
            version=self._version,
            host=self._host,
            pid=worker.pid,
            process_started_s=worker.started_s,
            generation=self._generation,
        )

    def _spawn(self, worker_id: str) -> Handle:
        log_path = self._log_path(worker_id)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["--job", self._job, "--version", self._version, "--worker-id", worker_id]
        settings = self._installation.worker_environment(job=self._job, version=self._version)
        environment = {**os.environ, **settings, SPEED_VARIABLE: json.dumps(self._speed)}
        with log_path.open("ab") as log:
            child = subprocess.Popen(
                [*self._command, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        return WorkerProcess(worker_id, child.pid, log_path, child)

    def _found(self, row: WorkerRow) -> Handle:
        return WorkerProcess(row.worker_id, row.pid, self._log_path(row.worker_id))

    def _log_path(self, worker_id: str) -> Path:
        return self._installation.settings.state / "logs" / f"{worker_id}.log"

    def reap(self) -> list[WorkerExit]:
        """Ended processes leave the fleet, are marked gone, and their leases end at once: nobody has to wait for them to lapse."""
        ended = [worker for worker in self._workers.values() if worker.has_ended()]
        if not ended:
            return []
        rows = {row.worker_id: row for row in self._register.workers(self._job, self._version, alive_only=False)}
        return [self._reap(worker, rows.get(worker.worker_id)) for worker in ended]

    def _reap(self, worker: Handle, row: WorkerRow | None) -> WorkerExit:
        exit_code = worker.collect()
        held = self._end_leases(worker.worker_id)
        self._register.worker_gone(worker.worker_id)
        del self._workers[worker.worker_id]
        submitted = row.counters.get("submitted", 0) if row is not None else 0
        tail = _tail(worker.log_path)
        return WorkerExit(
            worker_id=worker.worker_id,
            exit_code=exit_code,
            was_fruitful=held > 0 or submitted > 0,
            last_line_class=last_line_class(tail),
            log_path=str(worker.log_path),
            own_words=refusal_text(tail),
        )

    def _end_leases(self, worker_id: str) -> int:
        """How many it still held. One that left in order has released them itself."""
        held = [lease for lease in self._register.leased(self._job, self._version) if lease.owner == worker_id]
        for lease in held:
            self._register.expire(
                job=self._job, version=self._version, shard=lease.number, epoch=lease.epoch, renewals=lease.renewals, end=LeaseEnd.EXPIRED
            )
        return len(held)

    def kill(self, worker_id: str) -> None:
        """SIGKILL, and `reap` sees it. One of another host is only counted no more; if it lives it learns so at its next heartbeat."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.signal(signal.SIGKILL)
        else:
            self._register.worker_gone(worker_id)

    def stop(self) -> list[WorkerExit]:
        """SIGTERM to all, SIGKILL to what is left after the notice. Interrupted while it waits (a second Ctrl-C), it kills at once."""
        exits: list[WorkerExit] = []
        try:
            self._signal_all(signal.SIGTERM)
            exits += self._wait(self._notice_s)
        finally:
            self._signal_all(signal.SIGKILL)
            exits += self._wait(self._notice_s)
        return exits

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            worker.signal(number)

    def _wait(self, limit_s: float) -> list[WorkerExit]:
        exits = self.reap()
        for _ in range(int(limit_s / POLL_S)):
            if not self._workers:
                break
            self._sleep(POLL_S)
            exits += self.reap()
        return exits


def _tail(path: Path) -> str:
    """The end of a log, empty when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""
