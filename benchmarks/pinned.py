"""`python -m benchmarks.pinned 0,1 MODULE ARGUMENTS…`: becomes `python -m MODULE ARGUMENTS…` on these cores alone.

Libraries size their thread pools by the cores they find, so a process is pinned before it starts, not after.
"""

import os
import sys


def command(cores: frozenset[int], module: str) -> tuple[str, ...]:
    """What to start instead of `python -m MODULE`."""
    return (sys.executable, "-m", "benchmarks.pinned", ",".join(map(str, sorted(cores))), module)


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])  # the same pid: whoever started it may signal it
