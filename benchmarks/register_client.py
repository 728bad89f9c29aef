"""One client of the `register` benchmark: `python -m benchmarks.register_client URL POOLED JOB VERSION WORKER SECONDS`.

Says `ready`, waits for a line, claims shards for that long, waits for a line, renews what it holds for that long; tells its counts.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence

from batch_assets.stores.register import Lease, Register


def main(arguments: Sequence[str]) -> None:
    """Two phases, so that all clients do the same thing at the same time."""
    url, pooled, job, version, worker, seconds = arguments
    register = Register(url, pooled=pooled == "pooled")
    register.create()
    leases: list[Lease] = []

    def claim() -> None:
        lease = register.claim(job=job, version=version, worker=worker)
        assert lease is not None, "the version has more shards than can be claimed in that time"
        leases.append(lease)

    _tell("ready")
    sys.stdin.readline()
    _tell({"claims": _repeat(claim, float(seconds))})
    sys.stdin.readline()
    _tell({"renewals": _repeat(lambda: register.renew(leases[-1]), float(seconds))})
    register.close()


def _repeat(call: Callable[[], None], seconds: float) -> int:
    end_s, done = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        call()
        done += 1
    return done


def _tell(fact: object) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
