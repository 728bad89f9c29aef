"""A worker, which ends when it is told to (SIGTERM). Its settings come from the environment, as a fleet sets it."""

from collections.abc import Mapping
from typing import Any

from batch_assets.worker.__main__ import main
from benchmarks.parts.order import Order
from benchmarks.workloads import JOB


def work(order: Order) -> Mapping[str, Any]:
    """Its exit code."""
    return {"exit_code": main(["--job", JOB, "--version", order.version, "--worker-id", order.worker_id])}
