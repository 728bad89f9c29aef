"""The graph of one job, in flow order. Each asset names its inputs, calls one step and reports numbers with units.

What a step does stands in `steps.py`, shared with the ops of `jobs.py`; rules, stores and models are never touched here.
"""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from batch_assets import metadata, steps
from batch_assets.steps import JobGraph, PublishConfig
from resources import GristmillResource


def build_model(name: str, graph: JobGraph) -> dg.AssetsDefinition:
    """Weights by digest; one node for all jobs that use the model of this name."""

    @dg.multi_observable_source_asset(
        name=f"models__{name.replace('-', '_').replace('.', '_')}",
        specs=[dg.AssetSpec(steps.model_key(name), group_name="models", kinds={"huggingface"}, description="Weights, verified by digest.")],
    )
    def model(gristmill: GristmillResource) -> dg.ObserveResult:
        return steps.observe_model(gristmill, graph)

    return model


def build_assets(graph: JobGraph) -> list[Any]:
    """Model -> prompt, snapshot -> shard_plan -> shard_results -> release -> published -> what readers get."""
    common: dict[str, Any] = {
        "group_name": graph.name,
        "owners": list(graph.owners),
        "tags": {"gristmill/job": graph.name, "gristmill/route": "vllm"},
    }

    @dg.multi_observable_source_asset(
        name=f"{graph.name}__prompt",
        specs=[dg.AssetSpec(graph.key("prompt"), kinds={"markdown"}, description="prompt.md and answer.schema.json, by digest.", **common)],
    )
    def prompt(gristmill: GristmillResource) -> dg.ObserveResult:
        return steps.observe_prompt(gristmill, graph)

    @dg.multi_observable_source_asset(
        name=f"{graph.name}__snapshot",
        specs=[
            dg.AssetSpec(
                graph.key("snapshot"),
                kinds={graph.source_kind},
                deps=graph.upstream,
                description="The input table, pinned by content.",
                **common,
            )
        ],
    )
    def snapshot(gristmill: GristmillResource) -> dg.ObserveResult:
        return steps.observe_snapshot(gristmill, graph)

    @dg.asset(
        key=graph.key("shard_plan"),
        deps=[steps.model_key(graph.model_name), prompt, snapshot],
        kinds={"polars", "parquet"},
        description="Frozen input and shards of a job version made from what is there now. Nothing new = nothing happens.",
        **common,
    )
    def shard_plan(context: dg.AssetExecutionContext, gristmill: GristmillResource) -> dg.MaterializeResult:
        report = steps.plan_version(context, gristmill, graph)
        return dg.MaterializeResult(metadata=metadata.of_plan(report), data_version=dg.DataVersion(report.version))

    @dg.asset(
        key=graph.key("shard_results"),
        deps=[graph.key("shard_plan")],
        partitions_def=graph.shards,
        backfill_policy=dg.BackfillPolicy.single_run(),
        output_required=False,  # one event per shard is logged as it is committed; an output would mark the whole range
        kinds={"vllm", "deltalake"},
        description="One square per shard of a job version. Finished shards cost nothing.",
        **common,
    )
    def shard_results(context: dg.AssetExecutionContext, gristmill: GristmillResource) -> Iterator[dg.Output[None]]:
        steps.answer_shards(context, gristmill, graph, shard_keys=context.partition_keys)
        yield from ()  # a generator that yields nothing has no output; a function that returns None has one

    dead_letters = dg.AssetSpec(
        graph.key("dead_letters"),
        deps=[graph.key("shard_results")],
        kinds={"deltalake"},
        description="Records without an answer, and why.",
        **common,
    )

    @dg.asset(
        key=graph.key("release"),
        deps=[dg.AssetDep(graph.key("shard_results"), partition_mapping=dg.AllPartitionMapping())],
        partitions_def=graph.versions,
        kinds={"deltalake", "pandera"},
        description="The candidate and its verdict. Not visible to readers.",
        **common,
    )
    def release(context: dg.AssetExecutionContext, gristmill: GristmillResource) -> dg.MaterializeResult:
        report, verdict = steps.release_version(context, gristmill, graph, version=context.partition_key)
        return dg.MaterializeResult(metadata=metadata.of_release(report, verdict), data_version=dg.DataVersion(report.release_id))

    @dg.asset(
        key=graph.key("published"),
        deps=[graph.key("release")],
        partitions_def=graph.versions,
        backfill_policy=dg.BackfillPolicy.single_run(),  # *All* must not walk the alias through history
        output_required=False,
        kinds={"deltalake"},
        description=f"Green = was published at some time. What readers see now is in `{graph.alias}`.",
        **common,
    )
    def published(context: dg.AssetExecutionContext, config: PublishConfig, gristmill: GristmillResource) -> dg.MaterializeResult:
        report = steps.publish_version(context, gristmill, graph, versions=context.partition_keys, config=config)
        return dg.MaterializeResult(metadata=metadata.of_publish(report), data_version=dg.DataVersion(report.release_id))

    table = dg.AssetSpec(graph.table_key, deps=[graph.key("published")], kinds={"table"}, description="What readers get.", **common)
    return [prompt, snapshot, shard_plan, shard_results, dead_letters, release, published, table]
