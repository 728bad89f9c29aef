"""(b) What everything around the model costs: rows per second with an engine that answers at once.

`pipeline`: two workers and, in a third process, supervisor and committer, from the first put to the last commit. `committer`: shards that
were answered before, committed in random order, as a large fleet finishes them.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.children import run_part
from benchmarks.results import Measurement, Report, Target
from benchmarks.stages import answer_all, leading, opened, script_file
from benchmarks.workloads import Workload, answers_of, write_answers, write_job
from benchmarks.workplace import workplace
from tests.support.models import stub_model

ROWS_PER_S = Target(goal=40_000, bar=20_000)
WORKERS = 2
SUMMARY_BYTES = 150
TEXT_BYTES = 1000
FREE_GB = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is run."""

    records: int = 200_000
    repeats: int = 3
    shard_records: int = 5000

    @classmethod
    def quick(cls) -> "Sizes":
        """Shows that it runs."""
        return cls(records=20_000, repeats=1, shard_records=1000)


def run(sizes: Sizes, *, quick: bool, keep: bool = False) -> Report:
    """Every repeat in an installation of its own."""
    machine = results.machine()
    started_s = time.monotonic()
    pipeline: list[Mapping[str, Any]] = []
    committer: list[Mapping[str, Any]] = []
    for _ in range(sizes.repeats):
        with workplace("bookkeeping", free_gb=FREE_GB, keep=keep) as folder:
            pipeline.append(_pipeline(_planned(folder / "pipeline", sizes), sizes))
            committer.append(_committer(_planned(folder / "committer", sizes), sizes))
    return Report(
        benchmark="bookkeeping",
        sizes={
            "records": sizes.records,
            "record_bytes": TEXT_BYTES,
            "summary_bytes": SUMMARY_BYTES,
            "shard_records": sizes.shard_records,
            "workers": WORKERS,
        },
        measurements=[
            _measurement("pipeline, first put to last commit", pipeline, quick=quick),
            _measurement("committer alone, shards in random order", committer, quick=quick),
        ],
        quick=quick,
        seconds=time.monotonic() - started_s,
        machine=machine,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    root: Path
    version: str


def _planned(root: Path, sizes: Sizes) -> _Planned:
    workload = Workload(
        records=sizes.records,
        text_bytes=TEXT_BYTES,
        schema=answers_of(summary_min=1, summary_max=2 * SUMMARY_BYTES),
        max_tokens=400,
        shard_records=sizes.shard_records,
    )
    write_job(root / "jobs", workload, model=stub_model(root / "models" / "stub"))
    write_answers(script_file(root), records=sizes.records, summary_bytes=SUMMARY_BYTES)
    return _Planned(root=root, version=run_part("plan", root=root).facts["version"])


def _pipeline(planned: _Planned, sizes: Sizes) -> Mapping[str, Any]:
    facts = run_part("supervise", "--version", planned.version, "--workers", str(WORKERS), root=planned.root).facts
    assert facts["rows"] == facts["distinct_keys"] == sizes.records, f"{facts['distinct_keys']} of {sizes.records} ids are in the table"
    return {"rows_per_s": sizes.records / facts["first_put_to_last_commit_s"], **facts}


def _committer(planned: _Planned, sizes: Sizes) -> Mapping[str, Any]:
    with opened(planned.root, engine="scripted") as installation, leading(installation, version=planned.version) as generation:
        answered_s = answer_all(installation, version=planned.version, generation=generation, workers=WORKERS, speed={})
    facts = run_part("commit", "--shuffled", "--version", planned.version, root=planned.root).facts
    assert facts["rows"] == sizes.records, f"{facts['rows']} of {sizes.records} rows were committed"
    return {"rows_per_s": sizes.records / facts["commit_s"], "answered_before_s": answered_s, **facts}


def _measurement(name: str, runs: Sequence[Mapping[str, Any]], *, quick: bool) -> Measurement:
    return Measurement(
        name=name, unit="rows/s", values=[run["rows_per_s"] for run in runs], target=None if quick else ROWS_PER_S, runs=runs
    )
