"""The two Dagster jobs of a job file. Op jobs, because an asset job over two partition sets is refused by Dagster and a run holds one
contiguous range of partitions only. Each op calls the same step as its asset and logs the same events.
"""

from typing import Any

import dagster as dg

from batch_assets import metadata, steps
from batch_assets.core.errors import GateFailedError, NotFinishedError, Problem
from batch_assets.core.identity import shard_key
from batch_assets.core.leasing import ShardState
from batch_assets.steps import JobGraph, PublishConfig
from resources import GristmillResource

Work = dict[str, Any]  # what one op hands to the next: {"version": …}; plain, because Dagster stores it


class RunConfig(dg.Config):
    """What `gristmill run` and the sensors ask of the main job."""

    version: str = ""  # continue this one; empty = plan what is there now
    pilot: int = 0
    approve: bool = False
    publish: bool = True
    by: str = ""


class ShardsConfig(dg.Config):
    """Which shards to finish; empty = everything that is missing in active versions."""

    shards: list[str] = []


def build_jobs(graph: JobGraph) -> list[dg.JobDefinition]:
    """`<job>` runs it all; `<job>__finish_shards` finishes any scattered set in one run."""
    return [_main_job(graph), _finish_job(graph)]


def _main_job(graph: JobGraph) -> dg.JobDefinition:
    name = graph.name

    @dg.op(name=f"{name}__observe", out=dg.Out(dg.Nothing))
    def observe(context: dg.OpExecutionContext, gristmill: GristmillResource) -> None:
        for observed in (steps.observe_model(gristmill, graph), steps.observe_prompt(gristmill, graph), steps.observe_snapshot(gristmill, graph)):
            context.log_event(metadata.as_observation(observed))

    @dg.op(name=f"{name}__plan", ins={"observed": dg.In(dg.Nothing)}, out=dg.Out(is_required=False))
    def plan(context: dg.OpExecutionContext, config: RunConfig, gristmill: GristmillResource) -> Any:
        if config.version:
            with steps.opened(gristmill) as installation:
                row = installation.register.resolve(name, config.version)
                steps.add_partitions(context.instance, installation, graph, version=row.name)
            work: Work = {"version": row.name, "publish": config.publish, "by": config.by}
            yield dg.Output(work)
            return
        report = steps.plan_version(context, gristmill, graph, pilot=config.pilot or None)
        context.log_event(metadata.materialization(graph.key("shard_plan"), metadata.of_plan(report), data_version=report.version))
        with steps.opened(gristmill) as installation:
            if report.needs_approval and not config.approve:
                raise NotFinishedError(steps.waits_for_approval(name, report))
            if steps.is_live(installation, graph, report.version):
                context.log.info(f"{report.version}: nothing new, it is live; 0 model calls")
                steps.log_table(context, installation, graph, changed=False)
                return
        yield dg.Output({"version": report.version, "publish": config.publish, "by": config.by})

    @dg.op(name=f"{name}__shard_results")
    def shard_results(context: dg.OpExecutionContext, gristmill: GristmillResource, work: Work) -> Work:
        with steps.opened(gristmill) as installation:
            steps.answer_version(context, installation, gristmill.job(graph.job_file), graph, version=work["version"], numbers=None)
        return work

    @dg.op(name=f"{name}__release")
    def release(context: dg.OpExecutionContext, gristmill: GristmillResource, work: Work) -> Work:
        report, verdict = steps.release_version(context, gristmill, graph, version=work["version"])
        context.log_event(
            metadata.materialization(
                graph.key("release"), metadata.of_release(report, verdict), data_version=report.release_id, partition=work["version"]
            )
        )
        return work

    @dg.op(name=f"{name}__checks")
    def checks(context: dg.OpExecutionContext, gristmill: GristmillResource, work: Work) -> Work:
        with steps.opened(gristmill) as installation:
            verdict = metadata.recorded_verdict(installation, job=name, version=work["version"])
            for evaluation in metadata.check_evaluations(graph.key("release"), verdict):
                context.log_event(evaluation)
            if not verdict.passed:
                raise GateFailedError(*metadata.gate_problems(graph.alias, verdict))
        return work

    @dg.op(name=f"{name}__published", out=dg.Out(dg.Nothing))
    def published(context: dg.OpExecutionContext, gristmill: GristmillResource, work: Work) -> None:
        if not work["publish"]:
            context.log.info(f"{work['version']} is not published, as asked")
            return
        report = steps.publish_version(context, gristmill, graph, versions=[work["version"]], config=PublishConfig(by=work["by"]))
        context.log_event(
            metadata.materialization(
                graph.key("published"), metadata.of_publish(report), data_version=report.release_id, partition=work["version"]
            )
        )

    @dg.job(
        name=name,
        description=f"{graph.description} Runs it all: observe, plan, results, release, checks, publish.",
        executor_def=dg.in_process_executor,
        resource_defs={"io_manager": dg.mem_io_manager},
        tags={"gristmill/job": name},
    )
    def main() -> None:
        published(checks(release(shard_results(plan(observe())))))

    return main


def _finish_job(graph: JobGraph) -> dg.JobDefinition:
    @dg.op(name=f"{graph.name}__finish", out=dg.Out(dg.Nothing))
    def finish(context: dg.OpExecutionContext, config: ShardsConfig, gristmill: GristmillResource) -> None:
        keys = config.shards
        if not keys:
            with steps.opened(gristmill) as installation:
                keys = [
                    shard_key(version.name, row.number)
                    for version in installation.register.versions(graph.name)
                    if version.is_open
                    for row in installation.register.shards(graph.name, version.name)
                    if row.state is not ShardState.COMMITTED
                ]
        steps.answer_shards(context, gristmill, graph, shard_keys=keys)

    @dg.job(
        name=f"{graph.name}__finish_shards",
        description="Finish any scattered set of shards in one run; without a list, all that are missing.",
        executor_def=dg.in_process_executor,
        resource_defs={"io_manager": dg.mem_io_manager},
        tags={"gristmill/job": graph.name},
    )
    def finish_shards() -> None:
        finish()

    return finish_shards
