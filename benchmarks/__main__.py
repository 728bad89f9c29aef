"""`python -m benchmarks [throughput|bookkeeping|memory|register|planner|release|all] [--quick]`: measure, write, say what is met."""

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import bookkeeping, by_part, memory, register, throughput
from benchmarks.results import FOLDER, QUICK_FOLDER, Met, Report
from benchmarks.table import write_table

BAR_MISSED = 1


class Which(StrEnum):
    """What is measured."""

    THROUGHPUT = "throughput"
    BOOKKEEPING = "bookkeeping"
    MEMORY = "memory"
    REGISTER = "register"
    PLANNER = "planner"
    RELEASE = "release"
    ALL = "all"
    TABLE = "table"  # measures nothing: writes README's table anew


def main(
    which: Annotated[Which, typer.Argument(help="what to measure; `table` only writes README's table anew")] = Which.ALL,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="small sizes, to see that everything runs; writes results/quick")] = False,
    pairs: Annotated[int | None, typer.Option(min=1, help="throughput: alternating pairs for each contest with a bar")] = None,
    models: Annotated[str | None, typer.Option(help="throughput: tiny, smollm2, or both with a comma")] = None,
    engine_core: Annotated[str, typer.Option(help="throughput: in_process or own_process, the same for both contestants")] = "in_process",
    repeats: Annotated[int | None, typer.Option(min=1, help="bookkeeping: how often")] = None,
    results: Annotated[Path | None, typer.Option(help="folder for the results")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="leave the folders under .cache/bench")] = False,
) -> None:
    """Benchmarks of Gristmill. Full runs want a quiet machine; their durations stand in benchmarks/README.md."""
    if which is Which.TABLE:
        write_table()
        return
    signal.signal(signal.SIGTERM, _interrupt)
    chosen: dict[Which, Callable[[], Report]] = {
        Which.THROUGHPUT: lambda: throughput.run(
            _throughput_sizes(quick=quick, pairs=pairs, models=models, engine_core=engine_core), quick=quick, keep=keep
        ),
        Which.BOOKKEEPING: lambda: bookkeeping.run(_bookkeeping_sizes(quick=quick, repeats=repeats), quick=quick, keep=keep),
        Which.REGISTER: lambda: register.run(register.Sizes.quick() if quick else register.Sizes(), quick=quick, keep=keep),
        Which.PLANNER: lambda: by_part.run_planner(quick=quick),
        Which.RELEASE: lambda: by_part.run_release(quick=quick),
        Which.MEMORY: lambda: memory.run(memory.Sizes.quick() if quick else memory.Sizes(), quick=quick, keep=keep),
    }
    folder = results or (QUICK_FOLDER if quick else FOLDER)
    wanted = chosen if which is Which.ALL else {which: chosen[which]}
    reports = [_report(measure(), folder) for measure in wanted.values()]
    if folder == FOLDER:
        write_table()
    if any(report.missed for report in reports):
        raise typer.Exit(BAR_MISSED)


def _interrupt(_number: int, _frame: object) -> None:
    """As Ctrl-C: parts are ended, their workers with them, and folders removed."""
    raise KeyboardInterrupt


def _throughput_sizes(*, quick: bool, pairs: int | None, models: str | None, engine_core: str) -> throughput.Sizes:
    sizes = throughput.Sizes.quick() if quick else throughput.Sizes()
    sizes = replace(sizes, engine_core=engine_core)
    if models is not None:
        names = tuple(models.split(","))
        unknown = sorted(set(names) - set(throughput.MODELS))
        if unknown:
            raise typer.BadParameter(
                f"{', '.join(unknown)} is no model of ours; there are {', '.join(throughput.MODELS)}", param_hint="--models"
            )
        sizes = replace(sizes, models=names)
    return sizes if pairs is None else replace(sizes, pairs=pairs, short_pairs=min(pairs, sizes.short_pairs))


def _bookkeeping_sizes(*, quick: bool, repeats: int | None) -> bookkeeping.Sizes:
    sizes = bookkeeping.Sizes.quick() if quick else bookkeeping.Sizes()
    return sizes if repeats is None else replace(sizes, repeats=repeats)


def _report(report: Report, folder: Path) -> Report:
    path = report.write(folder)
    for each in report.measurements:
        verdict = "" if each.met is Met.UNJUDGED else f"  {each.met}"
        note = f"  ({each.note})" if each.note else ""
        spread = f"{min(each.values):,.4g} - {max(each.values):,.4g}"
        print(f"{each.name}: {each.median:,.4g} {each.unit}, {spread} in {len(each.values)} runs{verdict}{note}")
    print(f"{report.benchmark} took {report.seconds:.0f} s; every run is in {path}", flush=True)
    return report


if __name__ == "__main__":
    sys.exit(typer.run(main))
