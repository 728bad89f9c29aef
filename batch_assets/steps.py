"""What an asset and its op share: open the stores, call one flow, log the events that people see.

Belongs here: keys, partitions and events of one job's graph. Does not: any rule about shards, releases or publishing (flows, fleet), nor
the metadata of an event (`metadata.py`). Refusals of ours become `dg.Failure` with the text that says what to do now; their cause stays
attached, so that the command line ends with its exit code.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from batch_assets import metadata
from batch_assets.core.errors import GristmillError, NotFinishedError, Problem, RefusedError
from batch_assets.core.identity import digest_of, shard_key, split_shard_key
from batch_assets.core.leasing import HoldReason
from batch_assets.core.prompting import PromptRenderer
from batch_assets.core.statistics import Statistics
from batch_assets.core.validation import CheckSettings
from batch_assets.core.verdict import Verdict
from batch_assets.engines.tokenizers import tokenizer_for
from batch_assets.fleet.progress import progress_view
from batch_assets.fleet.supervisor import SupervisionReport, supervise
from batch_assets.flows.judge import judge
from batch_assets.flows.planner import PlanReport, plan
from batch_assets.flows.publish import PublishReport, publish, rollback
from batch_assets.flows.release import ReleaseReport, build_release, is_of_last_round
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import Job
from batch_assets.stores.models import verify_model
from batch_assets.stores.register import ShardRow, VersionRow
from batch_assets.stores.snapshots import pin_snapshot
from resources import GristmillResource

Context = dg.AssetExecutionContext | dg.OpExecutionContext
SENSOR_TAG = "dagster/sensor_name"
BACKFILL_TAG = "dagster/backfill"
TERMINAL_TAG = "gristmill/terminal"  # set by `gristmill run`: progress goes to the terminal as a live view
PILOT_SUFFIX = "__pilot"


class PublishConfig(dg.Config):
    """What the dialog of `published` asks."""

    rollback: bool = False
    previous: bool = False  # with `rollback`: only if this version is what stood there before the live one
    reason: str = ""
    override: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class JobGraph:
    """Names of one job in Dagster, taken from its folder when the code location loads."""

    name: str
    job_file: Path
    owners: tuple[str, ...]
    alias: str
    model_name: str
    source_kind: str
    description: str
    upstream: tuple[dg.AssetKey, ...] = ()

    @classmethod
    def of(cls, job: Job, job_file: Path) -> "JobGraph":
        """The graph's names for one job folder."""
        settings = job.job_file
        return cls(
            name=job.name,
            job_file=job_file,
            owners=tuple(settings.owners),
            alias=job.alias,
            model_name=Path(job.model_path).name,
            source_kind={"delta": "deltalake"}.get(job.source_kind.value, job.source_kind.value),
            description=settings.description or f"Answers of {Path(job.model_path).name} for every record.",
            upstream=(dg.AssetKey(list(settings.input.asset)),) if settings.input.asset else (),
        )

    def key(self, node: str) -> dg.AssetKey:
        """`ticket_summaries/shard_plan`."""
        return dg.AssetKey([self.name, node])

    @property
    def table_key(self) -> dg.AssetKey:
        """What readers get."""
        return dg.AssetKey([self.alias])

    @property
    def shards(self) -> dg.DynamicPartitionsDefinition:
        """Keys `v0007-3fa9c1-00042`."""
        return dg.DynamicPartitionsDefinition(name=f"{self.name}_shards")

    @property
    def versions(self) -> dg.DynamicPartitionsDefinition:
        """Keys `v0007-3fa9c1`."""
        return dg.DynamicPartitionsDefinition(name=f"{self.name}_versions")


def model_key(name: str) -> dg.AssetKey:
    """`models/smollm2-135m-instruct`, shared by every job that uses it."""
    return dg.AssetKey(["models", name.lower().replace(".", "-")])


@contextmanager
def opened(gristmill: GristmillResource) -> Iterator[Installation]:
    """Stores for one step; refusals of ours end it with their text and without a retry."""
    installation = gristmill.open()
    try:
        yield installation
    except GristmillError as error:
        raise dg.Failure(description=str(error), allow_retries=False) from error
    finally:
        installation.register.close()


# --- observe ---------------------------------------------------------------------------------------------------------------------


def observe_model(gristmill: GristmillResource, graph: JobGraph) -> dg.ObserveResult:
    """The weights' digest, hashed now."""
    with opened(gristmill):
        job = gristmill.job(graph.job_file)
        manifest = verify_model(job.model_path, job.job_file.model.digest)
        return dg.ObserveResult(
            asset_key=model_key(graph.model_name),
            data_version=dg.DataVersion(manifest.digest),
            metadata=metadata.of_model(manifest),
        )


def observe_prompt(gristmill: GristmillResource, graph: JobGraph) -> dg.ObserveResult:
    """The digest of prompt.md and answer.schema.json."""
    with opened(gristmill) as installation:
        job = gristmill.job(graph.job_file)
        live = installation.aliases().read(graph.alias)
        published_prompt = installation.specs().read(job.name, live.version).prompt if live and live.job == job.name else None
        digest = digest_of([job.prompt_text, job.schema_text])
        return dg.ObserveResult(
            asset_key=graph.key("prompt"),
            data_version=dg.DataVersion(digest),
            metadata=metadata.of_prompt(
                job, digest=digest, prefix_tokens=_prefix_tokens(job, gristmill.engine), published_prompt=published_prompt
            ),
        )


def observe_snapshot(gristmill: GristmillResource, graph: JobGraph) -> dg.ObserveResult:
    """The input's content digest: table@version, or the sorted file hashes."""
    with opened(gristmill):
        job = gristmill.job(graph.job_file)
        snapshot = pin_snapshot(job.source_uri, job.source_kind)
        return dg.ObserveResult(
            asset_key=graph.key("snapshot"),
            data_version=dg.DataVersion(snapshot.digest),
            metadata=metadata.of_snapshot(snapshot),
        )


def _prefix_tokens(job: Job, engine: str) -> int:
    return len(PromptRenderer(job.template, tokenizer_for(engine, job.model_path)).prefix_tokens)


# --- plan ------------------------------------------------------------------------------------------------------------------------


def plan_version(context: Context, gristmill: GristmillResource, graph: JobGraph, *, pilot: int | None = None) -> PlanReport:
    """Make (or find) the job version of what is there now, and show its shards as partitions."""
    with opened(gristmill) as installation:
        report = plan(
            installation, gristmill.job(graph.job_file), pilot=pilot, by_sensor=SENSOR_TAG in context.run.tags, progress=context.log.info
        )
        add_partitions(context.instance, installation, graph, version=report.version)
        context.log.info(metadata.plan_sentence(report))
        return report


def add_partitions(instance: dg.DagsterInstance, installation: Installation, graph: JobGraph, *, version: str) -> None:
    """Partition keys of a version and of its shards; keys that are there stay as they are."""
    instance.add_dynamic_partitions(f"{graph.name}_versions", [version])
    keys = [shard_key(version, row.number) for row in installation.register.shards(graph.name, version)]
    known = set(instance.get_dynamic_partitions(f"{graph.name}_shards"))
    missing = [key for key in keys if key not in known]
    if missing:
        instance.add_dynamic_partitions(f"{graph.name}_shards", missing)


def continue_version(context: Context, gristmill: GristmillResource, graph: JobGraph, *, version: str) -> str:
    """A version that is registered already, by any selector; its partitions are there afterwards."""
    with opened(gristmill) as installation:
        row = installation.register.resolve(graph.name, version)
        add_partitions(context.instance, installation, graph, version=row.name)
        return row.name


def ends_with_plan(context: Context, gristmill: GristmillResource, graph: JobGraph, report: PlanReport, *, approve: bool) -> bool:
    """True when there is nothing to do: readers get this version already. Raises NotFinishedError when it waits for approval."""
    with opened(gristmill) as installation:
        if report.needs_approval and not approve:
            raise NotFinishedError(_waits_for_approval(graph.name, report))
        if not _is_live(installation, graph, report.version):
            return False
        context.log.info("%s: nothing new, it is live; 0 model calls", report.version)
        log_table(context, installation, graph, changed=False)
        return True


# --- answer ----------------------------------------------------------------------------------------------------------------------


def answer_shards(context: Context, gristmill: GristmillResource, graph: JobGraph, *, shard_keys: Collection[str]) -> None:
    """Supervise (or follow) until these shards are committed; each turns green as it is. Any scattered set, any number of versions."""
    with opened(gristmill) as installation:
        numbers_by_version: dict[str, list[int]] = defaultdict(list)
        for key in shard_keys:
            version, number = _split(key)
            numbers_by_version[version].append(number)
        for version, numbers in sorted(numbers_by_version.items()):
            answer_version(context, installation, gristmill.job(graph.job_file), graph, version=version, numbers=numbers)


def _split(key: str) -> tuple[str, int]:
    try:
        return split_shard_key(key)
    except ValueError as error:
        raise RefusedError(
            Problem(
                code="shard.no_key",
                what="this partition is no shard: somebody has added a key that planning did not make",
                expected="for example v0007-3fa9c1-00042",
                found=repr(key),
                fix="choose partitions that planning has made, and delete this one in the UI",
            )
        ) from error


def answer_version(
    context: Context, installation: Installation, job: Job, graph: JobGraph, *, version: str, numbers: Collection[int] | None
) -> SupervisionReport:
    """Supervise one version; `numbers` None = all its shards. A person lifts what waits for one: blocked, approval, cancelled."""
    row = installation.register.resolve(graph.name, version)
    if SENSOR_TAG not in context.run.tags:
        installation.register.unblock(job=graph.name, version=row.name, shards=numbers)
        if row.hold in (HoldReason.APPROVAL, HoldReason.CANCELLED):
            installation.register.lift_version_hold(job=graph.name, version=row.name)
    to_terminal = TERMINAL_TAG in context.run.tags and sys.stderr.isatty()
    with progress_view(to_terminal=to_terminal, log=_progress_log(context)) as show:
        report = supervise(
            installation,
            job=graph.name,
            version=row.name,
            wanted=None if numbers is None else set(numbers),
            workers=job.job_file.run.workers_max,
            holder=f"run-{context.run.run_id}",
            speed=job.job_file.run.knobs.model_dump(exclude_none=True),
            announce=lambda shards: _announce(context, graph, row.recipe_digest, shards),
            progress=show,
            should_stop=lambda: False,
        )
    for line in Statistics.of(shard.stats for shard in installation.register.shards(graph.name, row.name)).lines(row.name):
        context.log.info(line)
    if report.pending or report.blocked or report.held:
        raise NotFinishedError(_left(graph.name, row.name, report))
    return report


def _progress_log(context: Context) -> Callable[[str], None]:
    """Plain progress lines go to the run's log; of a run that was started by a command, to its stderr as well."""

    def log(line: str) -> None:
        context.log.info(line)
        if TERMINAL_TAG in context.run.tags:
            sys.stderr.write(f"{line}\n")

    return log


def _announce(context: Context, graph: JobGraph, recipe_digest: str, shards: Sequence[ShardRow]) -> None:
    for shard in shards:
        context.log_event(
            dg.AssetMaterialization(
                graph.key("shard_results"),
                partition=shard_key(shard.version, shard.number),
                metadata=metadata.of_shard(shard),
                tags={"dagster/data_version": f"{shard.version}/{shard.round}", "dagster/code_version": recipe_digest},
            )
        )


def _left(job: str, version: str, report: SupervisionReport) -> Problem:
    held = f"{report.held} ({report.held_note})" if report.held_note else report.held or "no"
    return Problem(
        code="run.not_finished",
        file=version,
        what=f"{len(report.pending)} shards not started or not done, {len(report.blocked)} need a person, held: {held}",
        expected="every wanted shard committed",
        found=", ".join(shard_key(version, number) for number in sorted(report.blocked)[:10]) or f"{len(report.pending)} pending",
        fix=f"gristmill status {job}; then `gristmill resume {job}` and `gristmill run {job} --version {version}`",
    )


# --- release, judge, publish -----------------------------------------------------------------------------------------------------


def release_version(context: Context, gristmill: GristmillResource, graph: JobGraph, *, version: str) -> tuple[ReleaseReport, Verdict]:
    """Build the candidate (or find it) and judge it; the verdict is recorded, and the checks show it."""
    with opened(gristmill) as installation:
        row = _known(context, installation, graph, version)
        report = build_release(installation, job=graph.name, version=version)
        checks = check_settings(gristmill.job(graph.job_file))
        verdict = judge(installation, job=graph.name, release_id=report.release_id, alias=alias_of(graph.alias, row), checks=checks)
        context.log_event(dg.AssetMaterialization(graph.key("dead_letters"), metadata=metadata.of_dead_letters(report)))
        return report, verdict


def check_settings(job: Job) -> CheckSettings:
    """The `checks` of the job file as it is now: a limit can be edited and judged again."""
    return CheckSettings.of(job.job_file.checks)


def publish_version(
    context: Context, gristmill: GristmillResource, graph: JobGraph, *, versions: Sequence[str], config: PublishConfig
) -> PublishReport:
    """Point readers at one version: forward by default, back only when asked with a reason."""
    with opened(gristmill) as installation:
        _one_target(context, graph, versions)
        version = versions[0]
        alias = alias_of(graph.alias, _known(context, installation, graph, version))
        by = config.by or "unverified"
        if config.rollback:
            report = rollback(
                installation,
                job=graph.name,
                alias=alias,
                version=version,
                previous=config.previous,
                reason=config.reason,
                by=by,
            )
        else:
            report = publish(
                installation,
                job=graph.name,
                version=version,
                alias=alias,
                by=by,
                reason=config.reason or None,
                override=config.override or None,
                checks=check_settings(gristmill.job(graph.job_file)),
            )
        if alias == graph.alias:
            log_table(context, installation, graph, changed=report.changed)
        return report


def alias_of(alias: str, row: VersionRow) -> str:
    """Where a version is published: a pilot never moves what readers of the job get."""
    return f"{alias}{PILOT_SUFFIX}" if row.pilot_records is not None else alias


def _is_live(installation: Installation, graph: JobGraph, version: str) -> bool:
    """Readers get this version, and what they get is all there is of it: no redrive is open or waits to be released."""
    live = installation.aliases().read(alias_of(graph.alias, installation.register.version(graph.name, version)))
    if live is None or live.job != graph.name or live.version != version:
        return False
    return is_of_last_round(installation, installation.register.get_release(live.release_id))


def _waits_for_approval(job: str, report: PlanReport) -> Problem:
    """A version that a sensor may not start by itself."""
    return Problem(
        code="run.needs_approval",
        file=job,
        key=report.version,
        what=f"{report.version} waits for approval: {report.approval_reason or 'it was planned by a sensor'}",
        expected="a person's yes",
        found=f"{report.to_answer:,} records to answer",
        fix=f"gristmill run {job} --yes, or `gristmill resume {job}`",
    )


def log_table(context: Context, installation: Installation, graph: JobGraph, *, changed: bool) -> None:
    """Tell downstream: a materialization when what readers get has changed, otherwise an observation, which wakes nobody."""
    live = installation.aliases().read(graph.alias)
    if live is None:
        return
    moves = installation.aliases().history(graph.alias)
    previous = next((move for move in moves[1:] if move.version != live.version), None)
    details = metadata.of_table(installation, live, previous)
    tags = {"dagster/data_version": live.release_id}
    event = dg.AssetMaterialization if changed else dg.AssetObservation
    context.log_event(event(graph.table_key, metadata=details, tags=tags))


def _known(context: Context, installation: Installation, graph: JobGraph, version: str) -> VersionRow:
    """Refuse an invented partition key in words, and remove it."""
    try:
        return installation.register.version(graph.name, version)
    except GristmillError:
        context.instance.delete_dynamic_partition(f"{graph.name}_versions", version)
        raise


def _one_target(context: Context, graph: JobGraph, versions: Collection[str]) -> None:
    targets = set(versions)
    backfill_id = context.run.tags.get(BACKFILL_TAG)
    backfill = context.instance.get_backfill(backfill_id) if backfill_id else None
    if backfill is not None and backfill.asset_backfill_data is not None:
        subset = backfill.asset_backfill_data.target_subset.get_partitions_subset(graph.key("published"))
        targets |= set(subset.get_partition_keys())
    if len(targets) != 1:
        raise RefusedError(
            Problem(
                code="publish.several",
                file=graph.name,
                key="published",
                what="readers are pointed at one version; several were chosen, and none of them was published",
                expected="one version",
                found=", ".join(sorted(targets)),
                fix="materialize exactly one partition of `published`",
            )
        )
