"""(d) planner, and release: what their own scripts measure, in the form of all the others. No bars.

`planner.py` and `release.py` belong to those parts and may be run by themselves; they count CPU seconds, which other work disturbs little.
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import planner, release, results
from benchmarks.results import Measurement, Report

PLANNER_ROWS = (200_000, 2_000_000)
PLANNER_ROWS_QUICK = (20_000, 100_000)
RELEASE_ROWS = 2_000_000
RELEASE_ROWS_QUICK = 50_000


def run_planner(*, quick: bool) -> Report:
    """MB of source per CPU second of planning, over those of polars copying the same columns, for each kind of source."""
    machine = results.machine()
    started_s = time.monotonic()
    sizes = PLANNER_ROWS_QUICK if quick else PLANNER_ROWS
    found = {kind: planner.compared(kind, sizes) for kind in planner.KINDS}
    return Report(
        benchmark="planner",
        sizes={"records_small": sizes[0], "records_large": sizes[1]},
        measurements=[_planner_measurement(kind, facts) for kind, facts in found.items()],
        quick=quick,
        seconds=time.monotonic() - started_s,
        machine=machine,
    )


def _planner_measurement(kind: str, facts: Mapping[str, Any]) -> Measurement:
    plan_mb, copy_mb = facts["plan_mb_per_cpu_s"], facts["copy_mb_per_cpu_s"]
    return Measurement(
        name=f"planner over a plain polars copy, {kind}",
        unit="ratio of MB/CPU s",
        values=[plan_mb / copy_mb],
        runs=[facts],
        note=f"{plan_mb:g} and {copy_mb:g} MB/s, {facts['plan_cpu_us_per_record']:g} us a record",
    )


def run_release(*, quick: bool) -> Report:
    """Rows per second of build, judge and publish, and of a plain polars copy of the same table."""
    machine = results.machine()
    started_s = time.monotonic()
    rows = RELEASE_ROWS_QUICK if quick else RELEASE_ROWS
    with tempfile.TemporaryDirectory() as folder:
        release.in_fresh_process("prepare", Path(folder), rows)
        found = {step: release.in_fresh_process(step, Path(folder), rows) for step in release.STEPS}
    return Report(
        benchmark="release",
        sizes={"records": rows, "shard_records": release.SHARD_ROWS},
        measurements=[
            Measurement(name=f"release, {step}", unit="rows/s", values=[rows / facts["wall_s"]], runs=[facts])
            for step, facts in found.items()
        ],
        quick=quick,
        seconds=time.monotonic() - started_s,
        machine=machine,
    )
