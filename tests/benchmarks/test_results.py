"""What benchmarks write: judged by the median, complete, and shown in one table."""

import json
from pathlib import Path

import pytest

from benchmarks.results import Measurement, Met, Report, Target, machine
from benchmarks.table import BEGIN, END, write_table

AT_LEAST = Target(goal=0.95, bar=0.90)
AT_MOST = Target(goal=1.10, bar=1.25, lower_is_better=True)


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (AT_LEAST, 0.95, Met.GOAL),
        (AT_LEAST, 0.949, Met.BAR),
        (AT_LEAST, 0.90, Met.BAR),
        (AT_LEAST, 0.899, Met.MISSED),
        (AT_MOST, 1.10, Met.GOAL),
        (AT_MOST, 1.2, Met.BAR),
        (AT_MOST, 1.26, Met.MISSED),
    ],
)
def test_a_limit_that_is_reached_is_met(target: Target, value: float, met: Met) -> None:
    assert target.judge(value) is met


def test_the_median_decides_and_every_run_is_kept() -> None:
    measured = Measurement(name="x", unit="ratio", values=[0.5, 0.96, 0.97], target=AT_LEAST, runs=[{"run": n} for n in range(3)])
    written = measured.as_json()
    assert written["met"] == Met.GOAL
    assert (written["median"], written["min"], written["max"]) == (0.96, 0.5, 0.97)
    assert written["values"] == [0.5, 0.96, 0.97]
    assert written["runs"] == [{"run": 0}, {"run": 1}, {"run": 2}]


def test_a_measurement_without_a_target_is_not_judged() -> None:
    assert Measurement(name="x", unit="MB/s", values=[1.0]).met is Met.UNJUDGED


def test_a_report_names_its_commit_machine_and_versions_and_the_table_shows_it(tmp_path: Path) -> None:
    measured = Measurement(name="pipeline", unit="rows/s", values=[41_000.0, 42_000.0], target=Target(goal=40_000, bar=20_000))
    report = Report(benchmark="bookkeeping", sizes={"records": 7}, measurements=[measured], quick=False, seconds=61.0, machine=machine())
    written = json.loads(report.write(tmp_path).read_text())
    assert written["machine"]["cores"] >= 1
    assert written["machine"]["cpu"]
    assert {"python", "polars", "deltalake"} <= written["versions"].keys()
    assert {"commit", "uncommitted_changes", "date", "sizes"} <= written.keys()
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table(folder=tmp_path, readme=readme)
    text = readme.read_text()
    assert "| pipeline | 41,500 rows/s | 41,000 - 42,000 | 2 | >= 40,000 | >= 20,000 | goal met |" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
