"""How much memory a process and its descendants take, sampled from outside.

PSS, not RSS: a page that several processes share counts once over all of them, so the sum over a tree is what the machine has to give.
"""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

SAMPLES_PER_S = 20
KB_PER_MB = 1024


def tree_pss_mb(pid: int) -> float:
    """Sum over the process and everything below it; 0 when it has ended."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return 0.0
    return sum(_pss_mb(each) for each in (pid, *(child.pid for child in below)))


def _pss_mb(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / KB_PER_MB
    except (FileNotFoundError, ProcessLookupError):  # ended between two looks
        return 0.0
    return 0.0


class PssMeter:
    """Samples a process tree while the context lasts."""

    def __init__(self, pid: int) -> None:
        self.peak_mb = 0.0
        self.samples = 0
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="pss", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            self.peak_mb = max(self.peak_mb, tree_pss_mb(self._pid))
            self.samples += 1
            due_s = max(due_s + 1 / SAMPLES_PER_S, time.monotonic())  # a tree that takes long to read is sampled less often
