"""(c) Whether memory grows with the number of records: the highest PSS of planner, worker, committer and release at two sizes.

Each part runs in a fresh process on what the part before it left. Narrow rows (an id, 40 bytes of text, a one-word answer), because with
them per-record state that should not be there shows soonest.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batch_assets.fleet.local import LocalFleet
from benchmarks import results
from benchmarks.children import PartRun, run_part
from benchmarks.results import Measurement, Report, Target
from benchmarks.stages import leading, opened, wait_until_heard, wait_until_staged
from benchmarks.workloads import JOB, SHORT_PROMPT, Workload, category_only, write_job
from benchmarks.workplace import workplace
from tests.support.models import stub_model

GROWTH = Target(goal=1.10, bar=1.25, lower_is_better=True)
PARTS = ("planner", "worker", "committer", "release")
TEXT_BYTES = 40
FREE_GB_PER_MILLION = 2.0
WORKER_ID = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Rows of the two runs."""

    small: int = 1_000_000
    large: int = 10_000_000

    @classmethod
    def quick(cls) -> "Sizes":
        """What CI runs."""
        return cls(small=200_000, large=2_000_000)


def run(sizes: Sizes, *, quick: bool, keep: bool = False) -> Report:
    """Both sizes, one after the other."""
    machine = results.machine()
    started_s = time.monotonic()
    small, large = (_measured(records, keep=keep) for records in (sizes.small, sizes.large))
    return Report(
        benchmark="memory",
        sizes={"records_small": sizes.small, "records_large": sizes.large, "record_bytes": TEXT_BYTES},
        measurements=[_measurement(part, small[part], large[part]) for part in PARTS],
        quick=quick,
        seconds=time.monotonic() - started_s,
        machine=machine,
    )


def _measurement(part: str, small: PartRun, large: PartRun) -> Measurement:
    return Measurement(
        name=f"{part}, peak PSS at the large size over the small one",
        unit="ratio",
        values=[large.peak_mb / small.peak_mb],
        target=GROWTH,
        runs=[{"small": _facts(small), "large": _facts(large)}],
        note=f"{small.peak_mb:.0f} -> {large.peak_mb:.0f} MB, of which {large.baseline_mb:.0f} MB are imports",
    )


def _facts(part: PartRun) -> Mapping[str, Any]:
    return {
        "baseline_mb": round(part.baseline_mb, 1),
        "peak_mb": round(part.peak_mb, 1),
        "samples": part.samples,
        **part.facts,
    }


def _measured(records: int, *, keep: bool) -> Mapping[str, PartRun]:
    free_gb = max(1.0, FREE_GB_PER_MILLION * records / 1e6)
    with workplace(f"memory-{records}", free_gb=free_gb, keep=keep) as root:
        workload = Workload(records=records, text_bytes=TEXT_BYTES, schema=category_only(), max_tokens=20, prompt=SHORT_PROMPT)
        write_job(root / "jobs", workload, model=stub_model(root / "models" / "stub"))
        planner = run_part("plan", root=root, metered=True)
        version = planner.facts["version"]
        return {
            "planner": planner,
            "worker": _worker(root, version),
            "committer": run_part("commit", "--version", version, root=root, metered=True),
            "release": run_part("release", "--version", version, root=root, metered=True),
        }


def _worker(root: Path, version: str) -> PartRun:
    """One worker is measured; another answers beside it, so that ten million records take half as long."""
    with opened(root, engine="scripted") as installation, leading(installation, version=version) as generation:
        installation.register.want(job=JOB, version=version, shards=None)
        helper = LocalFleet(installation, job=JOB, version=version, generation=generation, speed={})

        def answered() -> None:
            wait_until_heard(installation, version=version, worker_id=WORKER_ID)
            helper.start(1)
            wait_until_staged(installation, version=version, look=lambda: None)

        try:
            arguments = ("--version", version, "--worker-id", WORKER_ID)
            return run_part(
                "worker", *arguments, root=root, metered=True, environment=installation.settings.as_environment(), until=answered
            )
        finally:
            helper.stop()
