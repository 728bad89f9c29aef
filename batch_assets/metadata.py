"""Reports of the flows as Dagster metadata and events: exactly the keys of the interface, numeric where a plot is wanted, unit last.

Nothing is computed here that a flow did not report, and no record or answer text passes through.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import polars as pl

from batch_assets.core.errors import NotFinishedError, Problem
from batch_assets.core.identity import short
from batch_assets.core.spec import Snapshot
from batch_assets.core.validation import CheckName, CheckResult, Severity
from batch_assets.core.verdict import Verdict
from batch_assets.flows.judge import latest_verdict
from batch_assets.flows.planner import PlanReport
from batch_assets.flows.publish import PublishReport
from batch_assets.flows.release import ReleaseReport
from batch_assets.stores.aliases import AliasRow
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import Job
from batch_assets.stores.models import ModelManifest
from batch_assets.stores.register import ShardRow
from batch_assets.stores.snapshots import source_columns

Metadata = dict[str, Any]
READ_LINES = 'read_alias("{alias}")  # polars\ngristmill query "select * from {alias} limit 5"  # DuckDB'
COUNTS_AS_NUMBERS = (
    "results",
    "dead_letters",
    "retried",
    "reopened",
    "tokens_prompt",
    "tokens_output",
    "tokens_thrown_away",
    "attempts_max",
    "leases",
)


def of_model(manifest: ModelManifest) -> Metadata:
    """Metadata of `models/<name>`."""
    return {
        "digest": manifest.digest,
        "parameters_billions": round(manifest.parameters / 1e9, 3),
        "files": len(manifest.files),
        "size_gb": round(manifest.size_bytes / 1e9, 3),
        "verified_at": dg.MetadataValue.timestamp(datetime.now(UTC)),
    }


def of_prompt(job: Job, *, digest: str, prefix_tokens: int, published_prompt: str | None) -> Metadata:
    """Metadata of `<job>/prompt`; the texts are the user's own files."""
    details: Metadata = {
        "digest": digest,
        "prompt": dg.MetadataValue.md(job.prompt_text),
        "answer_schema": dg.MetadataValue.json(json.loads(job.schema_text)),
        "shared_prefix_tokens": prefix_tokens,
    }
    if published_prompt is not None:
        lines = difflib.unified_diff(published_prompt.splitlines(), job.prompt_text.splitlines(), "published", "now", lineterm="")
        details["diff_to_published"] = dg.MetadataValue.md("```diff\n" + "\n".join(lines) + "\n```")
    return details


def of_snapshot(snapshot: Snapshot) -> Metadata:
    """Metadata of `<job>/snapshot`."""
    columns = source_columns(snapshot.uri, snapshot.kind)
    details: Metadata = {
        "dagster/uri": snapshot.uri,
        "dagster/column_schema": _column_schema(columns),
        "digest": snapshot.digest,
    }
    if snapshot.table_version is not None:
        details["table_version"] = snapshot.table_version
    return details


def of_plan(report: PlanReport) -> Metadata:
    """Metadata of `<job>/shard_plan`."""
    return {
        "job_version": report.version,
        "kind": report.kind,
        "records": report.records,
        "to_answer_records": report.to_answer,
        "set_aside_records": sum(report.set_aside_by_class.values()),
        "set_aside_by_class": _table([{"class": name, "records": count} for name, count in sorted(report.set_aside_by_class.items())]),
        "surplus_copies": report.surplus,
        "shards": report.shards,
        "input_tokens_mean": report.input_tokens_mean,
        "input_tokens_p99": report.input_tokens_p99,
        "needs_approval": report.needs_approval,
    }


def plan_sentence(report: PlanReport) -> str:
    """The plan in one line, for the log and the demo."""
    aside = ", ".join(
        f"{count:,} {name.replace('_', ' ')}" for name, count in sorted(report.set_aside_by_class.items(), key=lambda item: -item[1])
    )
    surplus = f", {report.surplus:,} surplus {'copy' if report.surplus == 1 else 'copies'}" if report.surplus else ""
    return (
        f"{report.records:,} records at {report.snapshot_label} -> {report.version} ({report.kind}): {report.shards:,} shards, "
        f"{report.to_answer:,} to answer, {sum(report.set_aside_by_class.values()):,} set aside{f' ({aside})' if aside else ''}{surplus}"
    )


def of_shard(shard: ShardRow) -> Metadata:
    """Metadata of one shard's materialization."""
    stats = shard.stats
    details: Metadata = {name: stats[name] for name in COUNTS_AS_NUMBERS if name in stats}
    seconds = float(stats.get("seconds") or 0.0)
    if seconds > 0:
        details["rows_per_s"] = round(shard.rows / seconds, 2)
        details["worker_seconds"] = round(seconds, 2)
    if stats.get("tokens_prompt"):
        details["tokens_cached_percent"] = round(100 * stats["tokens_cached"] / stats["tokens_prompt"], 1)
    return details


def of_dead_letters(report: ReleaseReport) -> Metadata:
    """Metadata of `<job>/dead_letters`: counts only, the records are read with `gristmill dead-letters`."""
    return {
        "job_version": report.version,
        "dead_letters": report.dead_letters,
        "by_class": _table([{"class": name, "records": count} for name, count in sorted(report.dead_by_class.items())]),
    }


def of_release(report: ReleaseReport, verdict: Verdict) -> Metadata:
    """Metadata of a `release` partition: the verdict stands here because a failed check leaves the partition green."""
    rows = report.results + report.dead_letters
    counted = report.statistics
    return {
        "verdict": verdict.summary,
        "release_id": report.release_id,
        "dagster/partition_row_count": report.rows,
        "dagster/uri": report.uri,
        "results": report.results,
        "dead_letters": report.dead_letters,
        "dead_letters_percent": round(100 * report.dead_letters / rows, 3) if rows else 0.0,
        "surplus_copies": report.surplus,
        "processed": counted.processed,
        "failed": counted.failed,
        "retried": counted.retried,
        "quarantined": counted.quarantined,
        "reopened": counted.reopened,
        "recovered": counted.recovered,
        "tokens_thrown_away": counted.tokens_thrown_away,
        "findings": _table([_finding(result) for result in verdict.findings]),
    }


def of_publish(report: PublishReport) -> Metadata:
    """Metadata of a `published` partition."""
    return {
        "previous_version": report.previous_version or "",
        "reason": report.reason or "",
        "overridden": report.overridden,
        "by": f"{report.by} (unverified)",
        "readable_after_ms": report.readable_after_ms,
        "revision": report.revision,
    }


def of_table(installation: Installation, live: AliasRow, previous: AliasRow | None) -> Metadata:
    """Metadata of what readers get."""
    release = installation.register.get_release(live.release_id)
    spec = installation.specs().read(live.job, live.version)
    recipe = spec.recipe
    return {
        "live_version": live.version,
        "previous_version": previous.version if previous else "",
        "dagster/row_count": release.rows,
        "dagster/uri": live.uri,
        "dagster/table_name": live.alias,
        "dagster/column_schema": _column_schema(installation.releases(job=live.job).columns(live.release_id)),
        "recipe": dg.MetadataValue.md(
            f"model `{recipe.model_name}` `{short(recipe.model_digest, 12)}`, prompt `{short(recipe.prompt_digest)}`, "
            f"schema `{short(recipe.schema_digest)}`, max_tokens {recipe.decoding.max_tokens}, temperature {recipe.decoding.temperature:g}"
        ),
        "how_to_read": dg.MetadataValue.md("```\n" + READ_LINES.format(alias=live.alias) + "\n```"),
    }


# --- verdicts and events ----------------------------------------------------------------------------------------------------------


def recorded_verdict(installation: Installation, *, job: str, version: str | None) -> Verdict:
    """The latest verdict of a version (None: of the newest release). Raises NotFinishedError when nothing was judged yet."""
    verdict = latest_verdict(installation, job=job, version=version)
    if verdict is None:
        raise NotFinishedError(
            Problem(
                code="verdict.missing",
                file=job,
                key=version,
                what="nothing was judged yet",
                fix=f"materialize `release` of {version or 'a finished version'}, or `gristmill judge {job}`",
            )
        )
    return verdict


def check_result(verdict: Verdict, name: CheckName) -> dg.AssetCheckResult:
    """One recorded check as Dagster shows it."""
    result = next(each for each in verdict.checks if each.name == name)
    return dg.AssetCheckResult(
        passed=result.passed,
        severity=_severity(result),
        description=result.message,
        metadata={"job_version": verdict.version, **result.metadata},
    )


def check_evaluations(key: dg.AssetKey, verdict: Verdict) -> Iterator[dg.AssetCheckEvaluation]:
    """The same for the op job, which logs what the checks would yield."""
    for result in verdict.checks:
        yield dg.AssetCheckEvaluation(
            asset_key=key,
            check_name=result.name.value,
            passed=result.passed,
            severity=_severity(result),
            description=result.message,
            metadata={"job_version": verdict.version, **result.metadata},
            blocking=True,
        )


def materialization(key: dg.AssetKey, details: Metadata, *, data_version: str, partition: str | None = None) -> dg.AssetMaterialization:
    """What the op job logs where an asset would return a result."""
    return dg.AssetMaterialization(key, metadata=details, partition=partition, tags={"dagster/data_version": data_version})


def as_observation(observed: dg.ObserveResult) -> dg.AssetObservation:
    """What the op job logs where an observable asset would return a result."""
    tags = {"dagster/data_version": observed.data_version.value} if observed.data_version else {}
    return dg.AssetObservation(observed.asset_key or "", metadata=observed.metadata or {}, tags=tags)


def _severity(result: CheckResult) -> dg.AssetCheckSeverity:
    return dg.AssetCheckSeverity.ERROR if result.severity is Severity.BLOCK else dg.AssetCheckSeverity.WARN


def _finding(result: CheckResult) -> Mapping[str, str]:
    return {"check": result.name.value, "severity": result.severity.value, "finding": result.message}


def _table(rows: list[Mapping[str, Any]]) -> dg.TableMetadataValue | str:
    if not rows:
        return ""
    schema = dg.TableSchema(
        columns=[dg.TableColumn(name, "int" if isinstance(value, int) else "string") for name, value in rows[0].items()]
    )
    return dg.MetadataValue.table(records=[dg.TableRecord(dict(row)) for row in rows], schema=schema)


def _column_schema(columns: Mapping[str, str | pl.DataType]) -> dg.TableSchema:
    return dg.TableSchema(columns=[dg.TableColumn(name, str(kind)) for name, kind in columns.items()])
