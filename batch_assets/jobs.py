"""The two Dagster jobs of a job file. Op jobs, because an asset job over two partition sets is refused by Dagster and a run holds one
contiguous range of partitions only. Each op calls the same step as its asset and logs the same events.
"""

from collections.abc import Iterator
from typing import Any

import dagster as dg
from pydantic import Field

from batch_assets import metadata, steps
from batch_assets.core.errors import GateFailedError
from batch_assets.core.identity import shard_key
from batch_assets.core.leasing import ShardState, VersionState
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

    shards: list[str] = Field(default_factory=list)


def build_jobs(graph: JobGraph) -> list[dg.JobDefinition]:
    """`<job>` runs it all; `<job>__finish_shards` finishes any scattered set in one run."""
    return [_main_job(graph), _finish_job(graph)]


def _main_job(graph: JobGraph) -> dg.JobDefinition:
    observe, plan, answer = _observe_op(graph), _plan_op(graph), _answer_op(graph)
    release, judge, publish = _release_op(graph), _judge_op(graph), _publish_op(graph)

    @dg.job(
        name=graph.name,
        description=f"{graph.description} Runs it all: observe, plan, results, release, checks, publish.",
        executor_def=dg.in_process_executor,
        tags={"gristmill/job": graph.name},
    )
    def main() -> None:
        publish(judge(release(answer(plan(observe())))))

    return main


def _observe_op(graph: JobGraph) -> dg.OpDefinition:
    @dg.op(name=f"{graph.name}__observe_inputs", out=dg.Out(dg.Nothing))
    def observe(context: dg.OpExecutionContext, gristmill: GristmillResource) -> None:
        for look in (steps.observe_model, steps.observe_prompt, steps.observe_snapshot):
            context.log_event(metadata.as_observation(look(gristmill, graph)))

    return observe


def _plan_op(graph: JobGraph) -> dg.OpDefinition:
    @dg.op(name=f"{graph.name}__plan_version", ins={"observed": dg.In(dg.Nothing)}, out=dg.Out(is_required=False))
    def plan(context: dg.OpExecutionContext, config: RunConfig, gristmill: GristmillResource) -> Iterator[dg.Output[Work]]:
        if config.version:
            version = steps.continue_version(context, gristmill, graph, version=config.version)
        else:
            report = steps.plan_version(context, gristmill, graph, pilot=config.pilot or None)
            context.log_event(metadata.materialization(graph.key("shard_plan"), metadata.of_plan(report), data_version=report.version))
            if steps.ends_with_plan(context, gristmill, graph, report, approve=config.approve):
                return
            version = report.version
        yield dg.Output({"version": version, "publish": config.publish, "by": config.by})

    return plan


def _answer_op(graph: JobGraph) -> dg.OpDefinition:
    @dg.op(name=f"{graph.name}__answer_shards")
    def answer(context: dg.OpExecutionContext, gristmill: GristmillResource, work: Work) -> Work:
        with steps.opened(gristmill) as installation:
            steps.answer_version(context, installation, gristmill.job(graph.job_file), graph, version=work["version"], numbers=None)
        return work

    return answer


def _release_op(graph: JobGraph) -> dg.OpDefinition:
    @dg.op(name=f"{graph.name}__build_release")
    def release(context: dg.OpExecutionContext, gristmill: GristmillResource, work: Work) -> Work:
        report, verdict = steps.release_version(context, gristmill, graph, version=work["version"])
        event = metadata.materialization(
            graph.key("release"), metadata.of_release(report, verdict), data_version=report.release_id, partition=work["version"]
        )
        context.log_event(event)
        return work

    return release


def _judge_op(graph: JobGraph) -> dg.OpDefinition:
    @dg.op(name=f"{graph.name}__judge_release")
    def judge(context: dg.OpExecutionContext, gristmill: GristmillResource, work: Work) -> Work:
        with steps.opened(gristmill) as installation:
            verdict = metadata.recorded_verdict(installation, job=graph.name, version=work["version"])
            for evaluation in metadata.check_evaluations(graph.key("release"), verdict):
                context.log_event(evaluation)  # pyright: ignore[reportArgumentType]  UserEvent's alias leaves out what its code takes
            if not verdict.passed:
                raise GateFailedError(*verdict.problems)
            by_hand = not gristmill.job(graph.job_file).job_file.publish.auto
        return {**work, "publish": work["publish"] and not by_hand, "by_hand": by_hand}

    return judge


def _publish_op(graph: JobGraph) -> dg.OpDefinition:
    @dg.op(name=f"{graph.name}__move_alias", out=dg.Out(dg.Nothing))
    def publish(context: dg.OpExecutionContext, gristmill: GristmillResource, work: Work) -> None:
        if not work["publish"]:
            by_hand = f"publish.auto is false: `gristmill publish {graph.name} {work['version']}` points readers to it"
            context.log.info("%s is not published; %s", work["version"], by_hand if work["by_hand"] else "as asked")
            return
        report = steps.publish_version(context, gristmill, graph, versions=[work["version"]], config=PublishConfig(by=work["by"]))
        event = metadata.materialization(
            graph.key("published"), metadata.of_publish(report), data_version=report.release_id, partition=work["version"]
        )
        context.log_event(event)

    return publish


def _finish_job(graph: JobGraph) -> dg.JobDefinition:
    @dg.op(name=f"{graph.name}__finish", out=dg.Out(dg.Nothing))
    def finish(context: dg.OpExecutionContext, config: ShardsConfig, gristmill: GristmillResource) -> None:
        keys = config.shards
        if not keys:
            with steps.opened(gristmill) as installation:
                keys = [
                    shard_key(version.name, row.number)
                    for version in installation.register.versions(graph.name)
                    if version.state is VersionState.ACTIVE
                    for row in installation.register.shards(graph.name, version.name)
                    if row.state is not ShardState.COMMITTED
                ]
        steps.answer_shards(context, gristmill, graph, shard_keys=keys)

    @dg.job(
        name=f"{graph.name}__finish_shards",
        description="Finish any scattered set of shards in one run; without a list, all that are missing.",
        executor_def=dg.in_process_executor,
        tags={"gristmill/job": graph.name},
    )
    def finish_shards() -> None:
        finish()

    return finish_shards
