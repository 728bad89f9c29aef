"""Starts the parts of a benchmark, each in a fresh process, and measures them from outside. What a part does is `part.py`'s."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import pinned
from benchmarks.pss import PssMeter, tree_pss_mb
from benchmarks.results import REPOSITORY

SETTLE_S = 0.3  # imports have returned; the allocator may still hand pages back
LOG_LINES = 15
INTERRUPT_S = 45.0  # a fleet gives its workers 30 s
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Two threads that spin on a shared machine are 5-10x slower than one (FINDINGS, vLLM).
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRun:
    """What a part said of itself, and the memory of its process tree if it was metered. `baseline_mb` is after its imports."""

    facts: Mapping[str, Any]
    baseline_mb: float = 0.0
    peak_mb: float = 0.0
    samples: int = 0


def run_part(
    name: str,
    *arguments: str,
    root: Path,
    engine: str = "scripted",
    cores: frozenset[int] = frozenset(),
    environment: Mapping[str, str] | None = None,
    until: Callable[[], None] | None = None,
    metered: bool = False,
) -> PartRun:
    """Runs one part to its end, or raises RuntimeError. `cores`: on these alone. When `until` returns, it is told to end (SIGTERM).

    `metered`: its memory is sampled, which walks its page tables twenty times a second: a sixth of two cores. Never beside a clock.
    """
    module = "benchmarks.part"
    command = pinned.command(cores, module) if cores else (sys.executable, "-m", module)
    log = root / "logs" / f"part-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("ab") as errors,
        subprocess.Popen(
            [*command, name, "--root", str(root), "--engine", engine, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, **QUIET, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as child,
    ):
        try:
            return (_metered if metered else _run)(child, name, log, until)
        except BaseException:
            _end(child)
            raise


def _end(child: subprocess.Popen[str]) -> None:
    """An interrupt first: a supervisor stops its workers then, and killed at once it would leave them."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(INTERRUPT_S)
    except subprocess.TimeoutExpired:
        child.kill()


def _metered(child: subprocess.Popen[str], name: str, log: Path, until: Callable[[], None] | None) -> PartRun:
    _line_of(child, name, log)
    time.sleep(SETTLE_S)
    baseline_mb = tree_pss_mb(child.pid)
    with PssMeter(child.pid) as meter:
        facts = _work(child, name, log, until)
    return PartRun(facts=facts, baseline_mb=baseline_mb, peak_mb=max(meter.peak_mb, baseline_mb), samples=meter.samples)


def _run(child: subprocess.Popen[str], name: str, log: Path, until: Callable[[], None] | None) -> PartRun:
    _line_of(child, name, log)
    return PartRun(facts=_work(child, name, log, until))


def _work(child: subprocess.Popen[str], name: str, log: Path, until: Callable[[], None] | None) -> Mapping[str, Any]:
    assert child.stdin is not None, "it was opened as a pipe"
    child.stdin.write("\n")
    child.stdin.flush()
    if until is not None:
        until()
        child.send_signal(signal.SIGTERM)
    facts = _line_of(child, name, log)
    child.wait()
    return facts


def _line_of(child: subprocess.Popen[str], name: str, log: Path) -> Mapping[str, Any]:
    assert child.stdout is not None, "it was opened as a pipe"
    line = child.stdout.readline()
    if not line:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
        raise RuntimeError(f"part {name} ended with exit code {child.wait()} before it was done; {log} ends with\n{tail}")
    return json.loads(line)
