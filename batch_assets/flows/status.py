"""Where a job stands, for people and scripts: read from the register and the tables, never derived from a plan."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from batch_assets.core.errors import Problem, RefusedError
from batch_assets.core.identity import shard_key
from batch_assets.core.leasing import ALIVE_STATES, ShardState, VersionState
from batch_assets.core.records import Outcome
from batch_assets.core.statistics import Statistics
from batch_assets.flows.redrive import open_round
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import VersionRow

WATCH_S = 2.0
BLOCKED_NAMED_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The newest version of a job. `answered` counts records in committed shards and what living workers report of theirs."""

    job: str
    job_version: str
    state: str
    hold: str | None
    job_hold: str | None
    records: int
    shards: dict[str, int]
    blocked: tuple[str, ...]
    results: int
    dead_letters: int
    answered_by_workers: int
    workers: int
    in_flight: int
    redrive_shards: int  # opened by a redrive and not committed again yet
    statistics: Statistics

    def as_json(self) -> dict[str, Any]:
        """One object, `schema_version` 1."""
        return {"schema_version": 1, **asdict(self)}

    def as_text(self) -> str:
        """Two or three lines."""
        counts = "  ".join(f"{count:,} {state}" for state, count in self.shards.items() if count) or "none"
        held = f" ({self.hold})" if self.hold else ""
        counted = self.statistics
        lines = [
            (
                f"{self.job} {self.job_version}   {self.state}{held} · {self.records:,} records · "
                f"{self.workers} workers, {self.in_flight} in flight"
            ),
            f"shards   {counts}      committed: {self.results:,} results, {self.dead_letters:,} dead letters",
        ]
        if self.blocked:
            lines.append(f"blocked  {', '.join(self.blocked)}: need a person")
        if self.redrive_shards:
            again = f"`gristmill run {self.job} --version {self.job_version}` goes on with them"
            lines.append(f"redrive  {self.redrive_shards:,} shards are open again; {again}")
        if counted.retried or counted.failed:
            lines.append(
                f"records  {counted.processed:,} processed, {counted.failed:,} failed, {counted.retried:,} retried, "
                f"{counted.quarantined:,} quarantined; {counted.tokens_thrown_away:,} tokens thrown away"
            )
        if self.job_hold:
            lines.append(f"on hold  {self.job_hold}; `gristmill resume {self.job}` lifts it")
        return "\n".join(lines)

    @property
    def settled(self) -> bool:
        """Nothing more happens by itself."""
        return self.state not in (VersionState.PLANNING.value, VersionState.ACTIVE.value)


def job_status(installation: Installation, *, job: str) -> JobStatus:
    """The newest version now. Raises RefusedError when the job has none."""
    register = installation.register
    row = register.resolve(job, "latest")
    hold = register.job_hold(job)
    shards = register.shards(job, row.name)
    workers = [worker for worker in register.workers(job, row.name, alive_only=True) if worker.state in ALIVE_STATES]
    statistics = Statistics.of(shard.stats for shard in shards)
    return JobStatus(
        job=job,
        job_version=row.name,
        state=row.state.value,
        hold=row.hold.value if row.hold else None,
        job_hold=f"{hold.reason.value} by {hold.by}: {hold.note}" if hold else None,
        records=row.records,
        shards={state.value: sum(shard.state is state for shard in shards) for state in ShardState},
        blocked=tuple(shard_key(row.name, shard.number) for shard in shards if shard.state is ShardState.BLOCKED)[:BLOCKED_NAMED_MAX],
        results=statistics.results,
        dead_letters=statistics.failed + statistics.quarantined,
        answered_by_workers=sum(worker.counters.get("answered", 0) for worker in workers),
        workers=len(workers),
        in_flight=sum(worker.counters.get("in_flight", 0) for worker in workers),
        redrive_shards=len(open_round(shards)),
        statistics=statistics,
    )


def watch_status(installation: Installation, *, job: str) -> Iterator[JobStatus]:
    """Again and again until nothing more happens by itself."""
    while True:
        status = job_status(installation, job=job)
        yield status
        if status.settled:
            return
        time.sleep(WATCH_S)


def select_version(installation: Installation, *, job: str, alias: str, selector: str) -> VersionRow:
    """`v7`, `7`, `3fa9c1`, `latest`, `live` (what the alias shows) or `previous` (what it showed before). Raises RefusedError."""
    if selector not in ("live", "previous"):
        return installation.register.resolve(job, selector)
    shown = [entry.version for entry in installation.aliases().history(alias) if entry.job == job]
    distinct = list(dict.fromkeys(shown))
    wanted = 0 if selector == "live" else 1
    if len(distinct) <= wanted:
        raise RefusedError(
            Problem(
                code=f"version.no_{selector}",
                file=job,
                key=alias,
                what=f"there is no {selector} version",
                expected=f"{wanted + 1} published versions",
                found=", ".join(distinct) or "none",
                fix=f"gristmill versions {job}",
            )
        )
    return installation.register.version(job, distinct[wanted])


def version_rows(installation: Installation, *, job: str, alias: str) -> list[dict[str, Any]]:
    """One plain row a version, newest first."""
    live = installation.aliases().read(alias)
    return [
        {
            "version": row.name,
            "state": row.state.value,
            "hold": row.hold.value if row.hold else None,
            "kind": row.kind,
            "snapshot": row.snapshot_label,
            "records": row.records,
            "shards": row.shards,
            "engine": row.engine,
            "live": live is not None and live.job == job and live.version == row.name,
            "created_at": row.created_at,
        }
        for row in sorted(installation.register.versions(job), key=lambda row: -row.number)
    ]


def resume_job(installation: Installation, *, job: str) -> list[str]:
    """Lift the job's hold and the holds of its versions; says what was lifted and what is still to do."""
    register = installation.register
    said = [f"{job}: hold lifted"] if register.resume_job(job) else []
    for row in register.versions(job):
        if row.state is VersionState.HELD and row.hold is not None:
            register.lift_version_hold(job=job, version=row.name)
            said.append(f"{row.name}: hold `{row.hold.value}` lifted; `gristmill run {job} --version {row.name}` goes on with it")
    return said or [f"{job}: nothing is on hold"]


def dead_letter_rows(
    installation: Installation, *, job: str, version: str, dead_class: str | None, limit: int
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """(records without an answer, at most `limit`; counts by class). Only shards that were ever committed; no record text.

    While a redrive is open its records are shown as they were: that is what the table holds until it is committed.
    """
    spec = installation.specs().read(job, version)
    outcomes = installation.outcomes(job=job, version=version, answer_schema=spec.answer_schema)
    columns = ["record_id", "shard", "dead_class", "attempt", "error", "acl", "record_class", "segment"]
    rows: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for shard in installation.register.shards(job, version):
        if shard.state is not ShardState.COMMITTED and shard.round == 0:
            continue
        dead = outcomes.read(shards=[shard.number], columns=columns, outcome=Outcome.DEAD_LETTER)
        for name, count in dead.group_by("dead_class").len().iter_rows():
            counts[name] = counts.get(name, 0) + count
        wanted = dead if dead_class is None else dead.filter(pl.col("dead_class") == dead_class)
        rows.extend(wanted.head(limit - len(rows)).to_dicts())
    return rows, dict(sorted(counts.items()))
