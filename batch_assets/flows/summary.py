"""What a run came to: the object that `gristmill run --json` prints, counted from the register, the logs and the tables."""

from dataclasses import dataclass
from typing import Any

from batch_assets.core.errors import GristmillError
from batch_assets.core.leasing import VersionState
from batch_assets.core.statistics import Statistics
from batch_assets.flows.judge import Verdict, latest_verdict
from batch_assets.stores.installation import Installation


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the engines of a job were asked so far, as workers counted at their submits (a killed worker's last beat counts)."""

    model_calls: int = 0
    tokens_prompt: int = 0
    tokens_cached: int = 0
    tokens_output: int = 0

    def since(self, before: "Usage") -> "Usage":
        """The difference."""
        return Usage(
            model_calls=self.model_calls - before.model_calls,
            tokens_prompt=self.tokens_prompt - before.tokens_prompt,
            tokens_cached=self.tokens_cached - before.tokens_cached,
            tokens_output=self.tokens_output - before.tokens_output,
        )


def usage_of(installation: Installation, *, job: str) -> Usage:
    """Over all workers that a job ever had."""
    workers = [
        worker for row in installation.register.versions(job) for worker in installation.register.workers(job, row.name, alive_only=False)
    ]
    return Usage(
        model_calls=sum(worker.counters.get("submitted", 0) for worker in workers),
        tokens_prompt=sum(worker.counters.get("tokens_prompt", 0) for worker in workers),
        tokens_cached=sum(worker.counters.get("tokens_cached", 0) for worker in workers),
        tokens_output=sum(worker.counters.get("tokens_output", 0) for worker in workers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Keys as the interface names them. `outcome`: published, unchanged, judged, gate_failed, not_finished, refused."""

    job: str
    job_version: str | None
    kind: str | None
    outcome: str
    snapshot_records: int
    results: int
    dead_letters: int
    dead_letters_by_class: dict[str, int]
    surplus_copies: int
    shards: int
    usage: Usage
    tokens_thrown_away: int
    statistics: Statistics  # of the whole version, whichever run did it
    seconds: float
    verdict: Verdict | None
    published: bool
    live_version: str | None
    previous_version: str | None
    run_url: str
    error: GristmillError | None

    def as_json(self) -> dict[str, Any]:
        """One object, `schema_version` 1."""
        answer: dict[str, Any] = {
            "schema_version": 1,
            "job": self.job,
            "job_version": self.job_version,
            "kind": self.kind,
            "outcome": self.outcome,
            "snapshot_records": self.snapshot_records,
            "results": self.results,
            "dead_letters": self.dead_letters,
            "dead_letters_by_class": self.dead_letters_by_class,
            "surplus_copies": self.surplus_copies,
            "carried": 0,
            "model_calls": self.usage.model_calls,
            "shards": self.shards,
            "tokens_prompt": self.usage.tokens_prompt,
            "tokens_cached": self.usage.tokens_cached,
            "tokens_output": self.usage.tokens_output,
            "tokens_thrown_away": self.tokens_thrown_away,
            "statistics": self.statistics.as_json(),
            "seconds": round(self.seconds, 1),
            "cost_usd": None,
            "verdict": None if self.verdict is None else self.verdict.as_json(),
            "published": self.published,
            "live_version": self.live_version,
            "previous_version": self.previous_version,
            "run_url": self.run_url,
            "report": None,
        }
        problems = getattr(self.error, "problems", ())
        if problems:
            first = problems[0]
            names = ("code", "what", "file", "key", "expected", "found", "fix")
            answer["error"] = {name: getattr(first, name) for name in names}
        return answer

    def as_text(self) -> str:
        """A few lines for people."""
        lines = []
        if self.job_version is not None:
            classes = ", ".join(f"{count} {name}" for name, count in self.dead_letters_by_class.items())
            lines.append(
                f"{self.job} {self.job_version}   {self.snapshot_records:,} records: {self.results:,} results, "
                f"{self.dead_letters:,} dead letters{f' ({classes})' if classes else ''}, {self.surplus_copies:,} surplus copies"
            )
            lines.append(f"model calls {self.usage.model_calls:,}   tokens out {self.usage.tokens_output:,}   {self.seconds:.1f} s")
            counted = self.statistics
            if counted.retried or counted.failed:
                lines.append(
                    f"retried {counted.retried:,}   failed {counted.failed:,}   quarantined {counted.quarantined:,}   "
                    f"tokens thrown away {counted.tokens_thrown_away:,}"
                )
        if self.outcome == "judged" and self.verdict is not None and self.verdict.passed:
            lines.append(f"not published; `gristmill publish {self.job} {self.job_version}` points readers to it")
        lines.append(f"{self.outcome.replace('_', ' ')}; readers get {self.live_version or 'nothing yet'}      {self.run_url}")
        return "\n".join(lines)

    @classmethod
    def of(
        cls,
        installation: Installation,
        *,
        job: str,
        alias: str,
        version: str | None,
        before: Usage,
        live_before: str | None,
        seconds: float,
        run_url: str,
        error: GristmillError | None,
    ) -> "RunSummary":
        """Read back what stands there now. `live_before` is the release that readers got before the run."""
        register = installation.register
        row = register.version(job, version) if version is not None else None
        shards = register.shards(job, version) if version is not None else []
        statistics = Statistics.of(shard.stats for shard in shards)
        moves = installation.aliases().history(alias)
        live = moves[0] if moves else None
        verdict = latest_verdict(installation, job=job, version=version) if version is not None else None
        usage = usage_of(installation, job=job).since(before)
        published = live is not None and live.job == job and live.version == version
        return cls(
            job=job,
            job_version=version,
            kind=row.kind if row else None,
            outcome=_outcome(error, verdict, published=published, moved=published and live is not None and live.release_id != live_before),
            snapshot_records=row.records if row else 0,
            results=statistics.results,
            dead_letters=statistics.failed + statistics.quarantined,
            dead_letters_by_class=dict(statistics.dead_by_class),
            surplus_copies=row.surplus if row and row.state is VersionState.FINISHED else 0,
            shards=len(shards),
            usage=usage,
            tokens_thrown_away=statistics.tokens_thrown_away if usage.model_calls else 0,
            statistics=statistics,
            seconds=seconds,
            verdict=verdict,
            published=published,
            live_version=live.version if live else None,
            previous_version=next((move.version for move in moves[1:] if live is not None and move.version != live.version), None),
            run_url=run_url,
            error=error,
        )


def _outcome(error: GristmillError | None, verdict: Verdict | None, *, published: bool, moved: bool) -> str:
    if error is not None:
        return {3: "gate_failed", 4: "not_finished", 5: "conflict", 6: "environment"}.get(int(error.exit_code), "refused")
    if moved:
        return "published"
    if published:
        return "unchanged"
    return "judged" if verdict is not None else "planned"
