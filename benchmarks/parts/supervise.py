"""Supervises all shards of a version: worker processes, and the committer in this one."""

import time
from collections.abc import Mapping
from typing import Any

from batch_assets.fleet.local import LocalFleet
from batch_assets.fleet.supervisor import Parts, Wish, committer, local_fleet, supervise
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import load_job
from batch_assets.stores.register import ShardRow
from benchmarks.parts.order import Order
from benchmarks.stages import job_file, log_times, settings_of, worker_command
from benchmarks.workloads import JOB

SUMMED = ("results", "dead_letters", "retried", "redone", "tokens_prompt", "tokens_cached", "tokens_output")


def work(order: Order) -> Mapping[str, Any]:
    """Times between the first put (a fence, after the model load), the last put and the last commit; and what came out."""
    installation = Installation.open(settings_of(order.root, engine=order.engine))
    commits_ns: list[int] = []
    started_ns = time.time_ns()  # the clock that stamps files
    report = supervise(
        installation,
        job=JOB,
        version=order.version,
        wanted=None,
        workers=order.workers,
        holder="benchmark",
        speed=load_job(job_file(order.root), environment={}).job_file.run.engine,
        announce=lambda _: commits_ns.append(time.time_ns()),
        progress=lambda _: None,
        should_stop=lambda: False,
        parts=Parts(fleet=PinnedFleet(order.worker_cores) if order.worker_cores else local_fleet, committer=committer),
    )
    assert not report.pending, f"shards {report.pending} were not committed"
    assert not report.blocked, f"shards {report.blocked} were blocked"
    times = log_times(order.root, version=order.version)
    return {
        "load_s": (times.first_put_ns - started_ns) / 1e9,
        "answering_s": times.seconds,
        "last_commit_s": (commits_ns[-1] - times.last_put_ns) / 1e9,
        "first_put_to_last_commit_s": (commits_ns[-1] - times.first_put_ns) / 1e9,
        "slots": times.slots,
        "merges": len(commits_ns),
        **_outcomes(installation, order.version),
    }


class PinnedFleet:
    """Makes fleets whose workers run on these cores alone."""

    def __init__(self, cores: frozenset[int]) -> None:
        self._cores = cores

    def __call__(self, installation: Installation, wish: Wish, generation: int) -> LocalFleet:
        return LocalFleet(
            installation,
            job=wish.job,
            version=wish.version,
            generation=generation,
            speed=wish.speed,
            command=worker_command(self._cores),
        )


def _outcomes(installation: Installation, version: str) -> dict[str, Any]:
    """Rows by key from the table, the rest from the shards' own statistics."""
    spec = installation.specs().read(JOB, version)
    table = installation.outcomes(job=JOB, version=version, answer_schema=spec.answer_schema)
    keys = table.read(columns=["record_id"])["record_id"]
    shards: list[ShardRow] = installation.register.shards(JOB, version)
    return {"rows": len(keys), "distinct_keys": keys.n_unique(), **{name: sum(each.stats[name] for each in shards) for name in SUMMED}}
