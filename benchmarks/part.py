"""One part of the pipeline in a process of its own: `python -m benchmarks.part NAME --root DIR …`. Started by `children.py`.

It imports the part's module, writes `{"ready": true}`, waits for a line on stdin (whoever measures memory takes the baseline now), does the
work and writes its facts as one line of JSON.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.parts.order import Order

PARTS = ("plan", "worker", "supervise", "commit", "release", "bare")


def main(arguments: Sequence[str]) -> None:
    """Imports, waits, works, tells."""
    name, order = _order(arguments)
    work = importlib.import_module(f"benchmarks.parts.{name}").work
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # whatever libraries print goes to the log
        print(json.dumps({"ready": True}), file=answers, flush=True)
        sys.stdin.readline()
        started_s, before = time.monotonic(), os.times()
        facts = work(order)
        seconds, now = time.monotonic() - started_s, os.times()
        # CPU seconds say what a part costs also when other work was in its way; those of `children` are of processes that have ended.
        cpu_s = now.user + now.system - before.user - before.system
        children_cpu_s = now.children_user + now.children_system - before.children_user - before.children_system
        print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "children_cpu_s": children_cpu_s, **facts}), file=answers, flush=True)


def _order(arguments: Sequence[str]) -> tuple[str, Order]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.part", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--version", default="")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--worker-cores", default="")
    parser.add_argument("--worker-id", default="")
    parser.add_argument("--shuffled", action="store_true")
    given = parser.parse_args(arguments)
    order = Order(
        root=given.root,
        engine=given.engine,
        version=given.version,
        workers=given.workers,
        worker_cores=frozenset(int(core) for core in given.worker_cores.split(",") if core),
        worker_id=given.worker_id,
        shuffled=given.shuffled,
    )
    return given.part, order


if __name__ == "__main__":
    main(sys.argv[1:])
