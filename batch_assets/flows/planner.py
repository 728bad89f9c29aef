"""`plan`: from a job as its files say it now to an active job version with frozen input and shards. Planning again changes nothing.

Everything that can be refused is refused before the version is registered. Until `activate`, one SQL transaction, nothing that was
written counts: a planner that dies leaves an unused attempt folder and a version in state `planning`, which the next one completes.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import polars as pl

from batch_assets.core.errors import Problem, RefusedError
from batch_assets.core.leasing import HoldReason, VersionState
from batch_assets.core.planning import FIRST_SHARD, approval_reason, column_problems
from batch_assets.core.prompting import PromptRenderer
from batch_assets.core.records import TO_ANSWER
from batch_assets.core.spec import DuplicatePolicy, SourceKind, VersionSpec
from batch_assets.engines.build import engine_build
from batch_assets.engines.tokenizers import tokenizer_for
from batch_assets.flows.bucketing import DECIDED_ONCE, Buckets, Tally
from batch_assets.flows.freezing import Freezer, PromptLimit, tokens_of
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import Job, input_rules_of, recipe_of
from batch_assets.stores.models import model_length, verify_model
from batch_assets.stores.register import PlannedShard, VersionRow
from batch_assets.stores.snapshots import pin_snapshot, source_columns

SAMPLE_RECORDS: Final = 200  # tokenised for the estimate of tokens per byte: 0.1 s
ID_CHARACTERS_MAX: Final = 60  # of an id that a refusal names


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What planning came to. `records` = to_answer + set aside + surplus. Tokens are of whole prompts, estimated from a sample."""

    job: str
    version: str
    kind: str  # full, pilot, unchanged
    state: VersionState
    records: int
    to_answer: int
    set_aside_by_class: Mapping[str, int]
    surplus: int
    shards: int
    needs_approval: bool
    approval_reason: str | None
    snapshot_label: str
    snapshot_digest: str
    recipe_digest: str
    prompt_digest: str
    schema_digest: str
    model_digest: str
    prefix_tokens: int
    input_tokens_max: int
    input_tokens_mean: float
    input_tokens_p99: float
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return asdict(self)


def plan(
    installation: Installation,
    job: Job,
    *,
    pilot: int | None = None,
    by_sensor: bool = False,
    progress: Callable[[str], object] = lambda _: None,
) -> PlanReport:
    """The version of what the job's files and its source are now; made when there is none, else found (`unchanged`).

    Raises RefusedError (job, pilot, source, ids that stand in several rows) and UnfitEnvironmentError (model digest, stores).
    """
    started_s = time.monotonic()
    if pilot is not None and pilot < 1:
        raise RefusedError(_no_pilot(pilot))
    _refuse_columns(job)
    verify_model(job.model_path, recipe_of(job).model_digest)
    limit = _prompt_limit(installation, job)
    progress(f"hashing {job.source_uri}" if job.source_kind is not SourceKind.DELTA else f"opening {job.source_uri}")
    spec = _spec(installation, job, pilot=pilot)
    row = _equal(installation, spec)
    if row is not None and row.state is not VersionState.PLANNING:
        return _report(installation, spec, row, limit, kind="unchanged", started_s=started_s)
    reason = _make(installation, job, spec, limit, by_sensor=by_sensor, progress=progress)
    made = _equal(installation, spec)
    assert made is not None, "the version that was activated just now is not found"
    return replace(_report(installation, spec, made, limit, kind=made.kind, started_s=started_s), approval_reason=reason)


def _make(
    installation: Installation,
    job: Job,
    spec: VersionSpec,
    limit: PromptLimit,
    *,
    by_sensor: bool,
    progress: Callable[[str], object],
) -> str | None:
    """Why it waits for approval; None when it does not."""
    folder = installation.settings.state / "tmp"
    with Buckets(spec.snapshot, spec.input_rules, folder=folder, pilot=spec.pilot_records) as buckets:
        progress(f"reading {spec.snapshot.label}")
        buckets.fill()
        _refuse_rows(buckets.tally, spec)
        kind = "full" if spec.pilot_records is None else "pilot"
        row = installation.register.register_version(spec, kind=kind, by_sensor=by_sensor)
        progress(f"{buckets.tally.rows:,} records; writing the shards of {row.name}")
        attempt = secrets.token_hex(6)
        installation.specs().write(job.name, row.name, spec, attempt=attempt)
        reason = _approval_reason(installation, job, spec, records=buckets.tally.rows, by_sensor=by_sensor)
        _freeze(installation, row, spec, limit, buckets, attempt=attempt, held=reason is not None)
        return reason


def _freeze(
    installation: Installation, row: VersionRow, spec: VersionSpec, limit: PromptLimit, buckets: Buckets, *, attempt: str, held: bool
) -> None:
    frozen = installation.frozen_input(job=row.job, version=row.name, attempt=attempt)
    freezer = Freezer(frozen=frozen, limit=limit, shard_records=spec.shard_records, bits=buckets.bits)
    for bucket, rows in buckets:
        freezer.add(bucket, rows)
    shards = freezer.finish()
    _assert_nothing_lost(buckets.tally, freezer, shards)
    installation.register.activate(  # False: another planner was faster with the same content; our files are left unused
        job=row.job,
        version=row.name,
        attempt=attempt,
        shards=shards,
        records=buckets.tally.rows,
        surplus=freezer.surplus,
        set_aside_by_class=freezer.set_aside_by_class,
        hold=HoldReason.APPROVAL if held else None,
    )


def _assert_nothing_lost(tally: Tally, freezer: Freezer, shards: list[PlannedShard]) -> None:
    frozen = freezer.to_answer + freezer.set_aside_by_class.total()
    assert tally.rows == frozen + freezer.surplus, f"{tally.rows} rows read, {frozen} frozen + {freezer.surplus} surplus copies"
    assert frozen == sum(shard.rows for shard in shards), "a frozen row is in no shard"


# ---- what is planned


def _spec(installation: Installation, job: Job, *, pilot: int | None) -> VersionSpec:
    return VersionSpec(
        job=job.name,
        recipe=recipe_of(job),
        input_rules=input_rules_of(job),
        engine_build=engine_build(installation.settings.engine),
        snapshot=pin_snapshot(job.source_uri, job.source_kind),
        prompt=job.prompt_text,
        answer_schema=job.schema_text,
        model_path=job.model_path,
        pilot_records=pilot,
        shard_records=job.job_file.run.shard_records,
        owners=tuple(job.job_file.owners),
    )


def _equal(installation: Installation, spec: VersionSpec) -> VersionRow | None:
    return installation.register.find_equal(
        job=spec.job,
        recipe_digest=spec.recipe.digest,
        input_rules_digest=spec.input_rules.digest,
        engine_build=spec.engine_build,
        snapshot_digest=spec.snapshot.digest,
        pilot_records=spec.pilot_records,
    )


def _approval_reason(installation: Installation, job: Job, spec: VersionSpec, *, records: int, by_sensor: bool) -> str | None:
    published = installation.aliases().read(job.alias) if by_sensor else None
    return approval_reason(
        by_sensor=by_sensor,
        records=records,
        records_max=job.job_file.run.auto_records_max,
        recipe_digest=spec.recipe.digest,
        published_recipe_digest=None if published is None else installation.register.get_release(published.release_id).recipe_digest,
    )


def _prompt_limit(installation: Installation, job: Job) -> PromptLimit:
    tokenizer = tokenizer_for(installation.settings.engine, job.model_path)
    renderer = PromptRenderer(job.template, tokenizer)
    uses = Counter(name for message in job.template.messages for name in message.fields)
    rules, recipe = input_rules_of(job), recipe_of(job)
    length = model_length(job.model_path, recipe.model_settings)
    room = length - recipe.decoding.max_tokens - renderer.template_tokens
    if room < 1:
        raise RefusedError(_no_room(length, recipe.decoding.max_tokens, renderer.template_tokens))
    return PromptLimit(
        renderer=renderer,
        uses=tuple(sorted(uses.items())),
        tokens_max=min(room, rules.input_tokens_max or room),
        bytes_are_bound=tokenizer.byte_level,
    )


# ---- what is refused


def _no_pilot(pilot: int) -> Problem:
    return Problem(
        code="plan.pilot",
        key="pilot",
        what="a pilot is a version over that many records of its job",
        expected="a number of records, at least 1; no pilot (0 in a run's config) for all of them",
        found=str(pilot),
        fix="write the number of records to try, for example 200",
    )


def _refuse_columns(job: Job) -> None:
    columns = source_columns(job.source_uri, job.source_kind)
    problems = column_problems(input_rules_of(job), columns, source=job.source_uri, kind=job.source_kind)
    if problems:
        raise RefusedError(*problems)


def _refuse_rows(tally: Tally, spec: VersionSpec) -> None:
    problems: list[Problem] = []
    refuses = spec.input_rules.duplicates is DuplicatePolicy.REFUSE
    if tally.rows == 0:
        problems.append(_no_records(spec))
    if refuses and tally.repeated:
        problems.append(_repeated_ids(tally, spec))
    if not refuses and tally.at_odds:
        problems.append(_rows_at_odds(tally, spec))
    if refuses and tally.without_id:
        problems.append(_rows_without_id(tally, spec))
    if problems:
        raise RefusedError(*problems)


def _no_records(spec: VersionSpec) -> Problem:
    return Problem(
        code="source.no_records",
        file=spec.snapshot.uri,
        key="input.table",
        what="the source has no records",
        expected="at least one record",
        found="0",
        fix="look at the source; a version without records could only publish an empty table",
    )


def _repeated_ids(tally: Tally, spec: VersionSpec) -> Problem:
    return Problem(
        code="source.duplicate_ids",
        file=spec.snapshot.uri,
        key=spec.input_rules.key,
        what=f"some ids stand in more than one row: {_named(tally.repeated_examples, tally.repeated)}",
        expected="each id once",
        found=f"{tally.repeated:,} rows too many",
        fix="remove them from the source, or write  duplicates: set_aside  under input: (such an id becomes one dead letter)",
    )


def _rows_at_odds(tally: Tally, spec: VersionSpec) -> Problem:
    """One of the rows would decide who may read the record, and nobody has said which: the dead letter could be wider than a row."""
    given = [f"input.{name} ({column})" for name in DECIDED_ONCE if (column := getattr(spec.input_rules, name)) is not None]
    return Problem(
        code="source.duplicate_ids_at_odds",
        file=spec.snapshot.uri,
        key=spec.input_rules.key,
        what=f"rows that share an id differ in who may read them, or in class or segment: {_named(tally.at_odds_examples, tally.at_odds)}",
        expected=f"equal {', '.join(given)} in all rows of an id; then the id is set aside as one dead letter",
        found=f"{tally.at_odds:,} ids whose rows differ there",
        fix="remove the surplus rows from the source, give them ids of their own, or make those columns equal",
    )


def _rows_without_id(tally: Tally, spec: VersionSpec) -> Problem:
    return Problem(
        code="source.rows_without_id",
        file=spec.snapshot.uri,
        key=spec.input_rules.key,
        what=f"some rows have no id: {_named(tally.without_id_examples, tally.without_id)}",
        expected=f"text in {spec.input_rules.key} in every row",
        found=f"{tally.without_id:,} rows without",
        fix="give them ids in the source, or write  duplicates: set_aside  under input: (each becomes a dead letter no_id)",
    )


def _named(examples: list[str], total: int) -> str:
    names = ", ".join(name if len(name) <= ID_CHARACTERS_MAX else name[:ID_CHARACTERS_MAX] + "…" for name in examples)
    return names + (", …" if total > len(examples) else "")


def _no_room(length: int, max_tokens: int, template_tokens: int) -> Problem:
    return Problem(
        code="prompt.no_room",
        key="decoding.max_tokens",
        what="the prompt and the answer leave no room for a record",
        expected=f"prompt + max_tokens below the model's {length} tokens",
        found=f"{template_tokens} + {max_tokens}",
        fix="shorten prompt.md, lower decoding.max_tokens, or choose a model with a longer context",
    )


# ---- the report


def _report(
    installation: Installation, spec: VersionSpec, row: VersionRow, limit: PromptLimit, *, kind: str, started_s: float
) -> PlanReport:
    mean, p99 = _prompt_tokens(installation, row, limit)
    waits = row.state is VersionState.HELD and row.hold is HoldReason.APPROVAL
    return PlanReport(
        job=row.job,
        version=row.name,
        kind=kind,
        state=row.state,
        records=row.records,
        to_answer=row.to_answer,
        set_aside_by_class=dict(row.set_aside_by_class),
        surplus=row.surplus,
        shards=row.shards,
        needs_approval=waits,
        approval_reason=row.hold_note if waits else None,
        snapshot_label=row.snapshot_label,
        snapshot_digest=spec.snapshot.digest,
        recipe_digest=spec.recipe.digest,
        prompt_digest=spec.recipe.prompt_digest,
        schema_digest=spec.recipe.schema_digest,
        model_digest=spec.recipe.model_digest,
        prefix_tokens=len(limit.renderer.prefix_tokens),
        input_tokens_max=limit.tokens_max,
        input_tokens_mean=mean,
        input_tokens_p99=p99,
        seconds=time.monotonic() - started_s,
    )


def _prompt_tokens(installation: Installation, row: VersionRow, limit: PromptLimit) -> tuple[float, float]:
    """Mean and 99th percentile of prompt tokens, from the first shard: ids are hashed, so every shard is a sample of the whole."""
    assert row.input_attempt is not None, f"{row.name} is {row.state} without input"
    shard = installation.register.shards(row.job, row.name, [FIRST_SHARD])[0]
    frozen = installation.frozen_input(job=row.job, version=row.name, attempt=row.input_attempt)
    frame = frozen.read(FIRST_SHARD, shard.input_sha256).filter(pl.col("disposition") == TO_ANSWER)
    if frame.is_empty():
        return 0.0, 0.0
    size = frame.select(limit.bytes.cast(pl.Float64).alias("bytes"))
    mean_bytes, p99_bytes = size.select(pl.col("bytes").mean(), pl.col("bytes").quantile(0.99).alias("p99")).row(0)
    sample = frame.head(SAMPLE_RECORDS)
    tokens = sum(tokens_of(record, limit) or 0 for record in sample.iter_rows(named=True))
    tokens_per_byte = tokens / max(1.0, size.head(SAMPLE_RECORDS)["bytes"].sum())
    fixed = limit.renderer.template_tokens
    return round(fixed + tokens_per_byte * mean_bytes, 1), round(fixed + tokens_per_byte * p99_bytes, 1)
