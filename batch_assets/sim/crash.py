"""`python -m batch_assets.sim.crash`: crash histories over the real planner, worker loop, log, supervisor and committer.

Each seed draws a small job and a mix of faults, lets it run in virtual time until it is finished, and looks after every effect whether
each invariant still holds. The same seed is the same history, event for event. Every 20th runs on SQLite and Delta files, the others on
twins in memory. Ends with exit code 1 at the first violation, after printing the seed, what was violated and the last events.
"""

import argparse
import sys
import time  # noqa: TID251  how long it took; histories know virtual time only
from collections import Counter
from collections.abc import Sequence
from typing import Final

from batch_assets.sim.faults import Fault
from batch_assets.sim.history import HistoryReport, run_history

SEEDS: Final = 200
FIRST_SEED: Final = 1
SAY_EVERY_S: Final = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m batch_assets.sim.crash", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many histories (default {SEEDS})")
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone, with its last events")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        report = run_history(chosen.seed)
        _say(_described(report, with_events=True))
        return 1 if report.violation else 0
    return _run_many(range(chosen.first, chosen.first + chosen.seeds))


def _run_many(seeds: range) -> int:
    began_s = said_s = time.perf_counter()
    struck: Counter[Fault] = Counter()
    virtual_s = 0.0
    for seed in seeds:
        report = run_history(seed)
        struck += report.struck
        virtual_s += report.virtual_s
        if report.violation is not None:
            _say(_described(report, with_events=True))
            return 1
        if time.perf_counter() - said_s >= SAY_EVERY_S:
            said_s = time.perf_counter()
            _say(f"seed {seed}: {seed - seeds.start + 1} of {len(seeds)} histories")
    took_s = time.perf_counter() - began_s
    _say(f"{len(seeds)} histories, seeds {seeds.start} to {seeds.stop - 1}: no invariant was violated")
    _say(f"{virtual_s:,.0f} s of virtual time in {took_s:.1f} s, {took_s / len(seeds):.3f} s a history")
    _say(_counts(struck))
    return 0


def _described(report: HistoryReport, *, with_events: bool) -> str:
    kind = "SQLite and Delta files" if report.is_real else "twins in memory"
    lines = [
        f"seed {report.seed} on {kind}: {report.records} records, {report.events} events in {report.virtual_s:.1f} s of virtual time",
        f"digest {report.digest}",
        f"faults: {report.mix}",
        f"struck: {', '.join(f'{fault} {times}' for fault, times in report.struck.most_common()) or 'none'}",
    ]
    if with_events:
        lines += report.last_events
    if report.violation is not None:
        lines += [
            f"VIOLATED: {report.violation.invariant}",
            report.violation.found,
            f"again: python -m batch_assets.sim.crash --seed {report.seed}",
        ]
    return "\n".join(lines)


def _counts(struck: Counter[Fault]) -> str:
    width = max(len(fault) for fault in Fault)
    return "\n".join(["how often each kind of fault struck:", *(f"  {fault:<{width}}  {struck[fault]:>8,}" for fault in Fault)])


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
