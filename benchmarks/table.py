"""The table of last results in README.md, written from results/*.json: nobody copies a number by hand."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, REPOSITORY

README = REPOSITORY / "benchmarks" / "README.md"
BEGIN = "<!-- results: written by `python -m benchmarks table` -->"
END = "<!-- end of results -->"
HEADER = "| what | median | min - max | runs | goal | bar | |"


def write_table(*, folder: Path = FOLDER, readme: Path = README) -> None:
    """Replaces what stands between the two marks."""
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n{table(folder)}\n\n{END}{after}", encoding="utf-8")


def table(folder: Path) -> str:
    """All results of a folder, one table for each file."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return "\n\n".join("\n".join(_lines(report)) for report in reports) or "No results yet."


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    machine = report["machine"]
    changed = " with uncommitted changes" if report["uncommitted_changes"] else ""
    yield f"**{report['benchmark']}**: {report['date'][:10]}, commit {(report['commit'] or 'unknown')[:7]}{changed},"
    yield f"{machine['cpu']}, {machine['cores_usable']} cores, {machine['memory_gb']:g} GB,"
    yield f"load {machine['load_1m']:g} before; {report['seconds'] / 60:.0f} min."
    yield ""
    yield HEADER
    yield "|---|---|---|---|---|---|---|"
    for each in report["measurements"]:
        yield _row(each)


def _row(each: Mapping[str, Any]) -> str:
    goal, bar = (_limit(each, name) for name in ("goal", "bar"))
    spread = f"{_number(each['min'])} - {_number(each['max'])}"
    name = f"{each['name']} ({each['note']})" if each["note"] else each["name"]
    met = "" if each["goal"] is None else each["met"]
    return f"| {name} | {_number(each['median'])} {each['unit']} | {spread} | {len(each['values'])} | {goal} | {bar} | {met} |"


def _limit(each: Mapping[str, Any], name: str) -> str:
    if each[name] is None:
        return ""
    return f"{'<=' if each['lower_is_better'] else '>='} {_number(each[name])}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
