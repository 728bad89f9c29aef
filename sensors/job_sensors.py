"""New snapshot -> plan; work left in an approved version -> supervise; everything committed -> release, checks, publish.

Run keys name what is asked for (snapshot digest, version and generation), so that a tick that is repeated asks for nothing new.
"""

from collections.abc import Iterator, Sequence

import dagster as dg

from batch_assets.core.leasing import ShardState, VersionState
from batch_assets.flows.release import is_of_last_round
from batch_assets.steps import JobGraph
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import VersionRow
from batch_assets.stores.snapshots import pin_snapshot
from resources import GristmillResource

TICK_S = 60
UNDER_WAY = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def build_sensors(graph: JobGraph) -> Sequence[dg.SensorDefinition]:
    """The three sensors of one job, stopped by default."""
    return [_new_snapshot(graph), _work_left(graph), _all_committed(graph)]


def _new_snapshot(graph: JobGraph) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{graph.name}__new_snapshot",
        target=[graph.key("shard_plan")],
        minimum_interval_seconds=TICK_S,
        description="Plans the newest snapshot once it differs from what was planned last.",
    )
    def new_snapshot(context: dg.SensorEvaluationContext, gristmill: GristmillResource) -> dg.SensorResult | dg.SkipReason:
        installation = gristmill.open()
        try:
            if installation.register.job_hold(graph.name) is not None:
                return dg.SkipReason(f"{graph.name} is on hold; `gristmill resume {graph.name}` lifts it")
            job = gristmill.job(graph.job_file)
            digest = pin_snapshot(job.source_uri, job.source_kind).digest
            planned = {row.snapshot_digest for row in installation.register.versions(graph.name)}
        finally:
            installation.register.close()
        if digest in planned:
            return dg.SkipReason("the newest snapshot is planned already")
        # Not keyed by the digest alone: a plan that failed may be asked for again, once its run has ended.
        request = dg.RunRequest(run_key=f"{digest}:{_attempts(context, graph, digest)}", tags={"gristmill/snapshot": digest})
        return dg.SensorResult(run_requests=[request], cursor=digest)

    return new_snapshot


def _attempts(context: dg.SensorEvaluationContext, graph: JobGraph, digest: str) -> int:
    """Ended runs that tried to plan this snapshot."""
    filters = dg.RunsFilter(
        tags={"gristmill/snapshot": digest, "dagster/sensor_name": f"{graph.name}__new_snapshot"},
        statuses=[dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED],
    )
    return context.instance.get_runs_count(filters)


def _work_left(graph: JobGraph) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{graph.name}__work_left",
        job_name=f"{graph.name}__finish_shards",
        minimum_interval_seconds=TICK_S,
        description="Supervises versions that are active and have shards left.",
    )
    def work_left(context: dg.SensorEvaluationContext, gristmill: GristmillResource) -> dg.SensorResult:
        installation = gristmill.open()
        try:
            requests = _supervision_requests(installation, graph)
            return dg.SensorResult(run_requests=[request for request in requests if not _is_at_work(context, request)])
        finally:
            installation.register.close()

    return work_left


def _is_at_work(context: dg.SensorEvaluationContext, request: dg.RunRequest) -> bool:
    """A run that a sensor asked for has this version already; a second one would only follow it."""
    filters = dg.RunsFilter(tags={"gristmill/version": request.tags["gristmill/version"]}, statuses=UNDER_WAY)
    return context.instance.get_runs_count(filters) > 0


def _supervision_requests(installation: Installation, graph: JobGraph) -> Iterator[dg.RunRequest]:
    if installation.register.job_hold(graph.name) is not None:
        return
    for version in _versions_in(installation, graph, VersionState.ACTIVE):
        counts = installation.register.counts(graph.name, version.name)
        if not any(counts.get(state, 0) for state in (ShardState.PENDING, ShardState.LEASED, ShardState.STAGED)):
            continue
        lead = installation.register.lead(graph.name, version.name)
        generation = lead.generation if lead is not None else 0
        keys = [
            f"{version.name}-{row.number:05d}"
            for row in installation.register.shards(graph.name, version.name)
            if row.state not in (ShardState.COMMITTED, ShardState.BLOCKED)
        ]
        yield dg.RunRequest(
            run_key=f"{version.name}:{generation}",
            run_config={"ops": {f"{graph.name}__finish": {"config": {"shards": keys}}}},
            tags={"gristmill/version": version.name},
        )


def _all_committed(graph: JobGraph) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{graph.name}__all_committed",
        job_name=graph.name,
        minimum_interval_seconds=TICK_S,
        description="Builds, judges and publishes a version whose shards are all committed: once, and once more after a redrive.",
    )
    def all_committed(gristmill: GristmillResource) -> dg.SensorResult:
        installation = gristmill.open()
        try:
            if installation.register.job_hold(graph.name) is not None:
                return dg.SensorResult(skip_reason=f"{graph.name} is on hold; `gristmill resume {graph.name}` lifts it")
            judged = {row.version for row in installation.register.releases(graph.name) if is_of_last_round(installation, row)}
            return dg.SensorResult(
                run_requests=[
                    dg.RunRequest(
                        run_key=f"{version.name}:release:{installation.register.rounds(graph.name, version.name)}",
                        run_config={"ops": {f"{graph.name}__plan_version": {"config": {"version": version.name}}}},
                        tags={"gristmill/version": version.name},
                    )
                    for version in _versions_in(installation, graph, VersionState.FINISHED)
                    if version.name not in judged
                ]
            )
        finally:
            installation.register.close()

    return all_committed


def _versions_in(installation: Installation, graph: JobGraph, state: VersionState) -> list[VersionRow]:
    return [row for row in installation.register.versions(graph.name) if row.state is state]
