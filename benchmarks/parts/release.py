"""Builds the release of a finished version and judges it."""

import time
from collections.abc import Mapping
from typing import Any

from batch_assets.core.validation import CheckSettings
from batch_assets.flows.judge import judge
from batch_assets.flows.release import build_release
from batch_assets.stores.installation import Installation
from benchmarks.parts.order import Order
from benchmarks.stages import settings_of
from benchmarks.workloads import JOB


def work(order: Order) -> Mapping[str, Any]:
    """Seconds of both; the verdict passes."""
    installation = Installation.open(settings_of(order.root, engine=order.engine))
    started_s = time.monotonic()
    report = build_release(installation, job=JOB, version=order.version)
    built_s = time.monotonic()
    verdict = judge(installation, job=JOB, release_id=report.release_id, checks=CheckSettings())
    failed = [check.name for check in verdict.checks if not check.passed]
    assert not failed, f"the release of a benchmark fails {failed}"
    return {"rows": report.rows, "files": report.files, "build_s": built_s - started_s, "judge_s": time.monotonic() - built_s}
