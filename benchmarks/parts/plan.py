"""Plans the job folder below the root."""

from collections.abc import Mapping
from typing import Any

from batch_assets.flows.planner import plan
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import load_job
from benchmarks.parts.order import Order
from benchmarks.stages import job_file, settings_of


def work(order: Order) -> Mapping[str, Any]:
    """The version's name and sizes. Every record is to be answered."""
    job = load_job(job_file(order.root), environment={})
    report = plan(Installation.open(settings_of(order.root, engine=order.engine)), job)
    assert report.records == report.to_answer, f"records of a benchmark were set aside: {dict(report.set_aside_by_class)}"
    return {"version": report.version, "records": report.records, "shards": report.shards, "prefix_tokens": report.prefix_tokens}
