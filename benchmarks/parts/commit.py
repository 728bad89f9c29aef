"""Commits every staged shard of a version, lowest numbers first, or shuffled."""

import random
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batch_assets.fleet.committer import Committer
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import Register, ShardRow
from benchmarks.parts.order import Order
from benchmarks.stages import leading, settings_of
from benchmarks.workloads import JOB, SEED


class ShuffledRegister(Register):
    """Gives staged shards in an order of its own: a large fleet finishes them in any."""

    def staged(self, job: str, version: str, limit: int) -> list[ShardRow]:
        rows = super().staged(job, version, sys.maxsize)
        return random.Random(f"{SEED} {len(rows)}").sample(rows, min(limit, len(rows)))


def work(order: Order) -> Mapping[str, Any]:
    """Seconds of all steps, with the opening of the table; the version is finished then."""
    installation = Installation.open(settings_of(order.root, engine=order.engine))
    if order.shuffled:
        installation = replace(installation, register=ShuffledRegister(installation.settings.database_url))
    with leading(installation, version=order.version) as generation:
        commit = Committer(installation, job=JOB, version=order.version, generation=generation)
        merges = rows = 0
        started_s = time.monotonic()
        while committed := commit.step():
            merges += 1
            rows += sum(shard.rows for shard in committed)
        commit_s = time.monotonic() - started_s
    installation.register.finish_version(job=JOB, version=order.version)
    return {"commit_s": commit_s, "merges": merges, "rows": rows}
