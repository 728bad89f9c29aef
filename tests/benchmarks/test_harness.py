"""The benchmarks run from end to end at tiny sizes, with the scripted engine; what they measure there is worth nothing."""

import json
from pathlib import Path

import pytest

from benchmarks import bookkeeping, memory, register
from benchmarks.results import Report

pytestmark = pytest.mark.slow


def written(report: Report, folder: Path) -> dict:
    return json.loads(report.write(folder).read_text())


def test_bookkeeping_counts_every_row_and_says_how_each_run_went(tmp_path: Path) -> None:
    sizes = bookkeeping.Sizes(records=600, repeats=1, shard_records=100)
    found = written(bookkeeping.run(sizes, quick=True), tmp_path)
    pipeline, committer = found["measurements"]
    assert pipeline["runs"][0]["rows"] == pipeline["runs"][0]["distinct_keys"] == 600
    assert committer["runs"][0]["rows"] == 600
    assert pipeline["median"] > 0 < committer["median"]


def test_memory_measures_every_part_at_both_sizes(tmp_path: Path) -> None:
    found = written(memory.run(memory.Sizes(small=300, large=600), quick=True), tmp_path)
    assert [each["name"].split(",")[0] for each in found["measurements"]] == list(memory.PARTS)
    for each in found["measurements"]:
        for run in each["runs"][0].values():
            assert 0 < run["baseline_mb"] <= run["peak_mb"]
            assert run["samples"] > 0


def test_register_counts_claims_and_renewals_on_both_databases(tmp_path: Path) -> None:
    found = written(register.run(register.Sizes(clients=2, seconds=0.5, repeats=1, shards=2000), quick=True), tmp_path)
    names = {each["name"] for each in found["measurements"]}
    assert {f"{what}, {where}" for what in ("claims", "renewals") for where in ("SQLite", "PostgreSQL, pooled")} < names
    assert all(each["median"] > 0 for each in found["measurements"])
