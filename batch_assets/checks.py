"""One asset check per check of the verdict, made by a loop: an op with several has its *Execute* greyed out in the UI.

A check here reads what `judge` recorded and judges nothing itself; `published` reads the same record.
"""

from collections.abc import Sequence

import dagster as dg

from batch_assets import metadata
from batch_assets.core.validation import CheckName
from batch_assets.steps import JobGraph, opened
from resources import GristmillResource


def build_checks(graph: JobGraph) -> Sequence[dg.AssetChecksDefinition]:
    """The checks on `release`."""
    return [_check(graph, name) for name in CheckName]


def _check(graph: JobGraph, name: CheckName) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=graph.key("release"), name=name.value, blocking=True, description=f"`{name}` of the recorded verdict.")
    def check(context: dg.AssetCheckExecutionContext, gristmill: GristmillResource) -> dg.AssetCheckResult:
        op_context = context.op_execution_context
        version = op_context.partition_key if op_context.has_partition_key else None
        with opened(gristmill) as installation:
            verdict = metadata.recorded_verdict(installation, job=graph.name, version=version)
        return metadata.check_result(verdict, name)

    return check
