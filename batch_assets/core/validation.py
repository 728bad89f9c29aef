"""The gate: what is asked of a release before readers may get it, and how each answer is worded.

Pure. `stores/release_facts.py` counts, range by range; here the counts become checks. A message begins with the
version (the checks page of the UI cannot show it) and names keys, never record or answer text.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

from batch_assets.core.evidence import EXAMPLES_MAX, SEGMENTS_MAX, ReleaseFacts, SegmentCount, shown_id
from batch_assets.core.identity import shard_key, short

DEAD_LETTERS_MAX = 0.005


class CheckName(StrEnum):
    """Every check of a release, in the order in which they are shown."""

    COVERAGE = "coverage"
    ONE_RECIPE = "one_recipe"
    SCHEMA = "schema"
    ACL = "acl"
    DEAD_LETTERS = "dead_letters"


class Severity(StrEnum):
    """What a failing check does to the verdict."""

    BLOCK = "block"
    WARN = "warn"


# Uniqueness is part of coverage. These are what makes a table one that can be trusted: no reason given by a person replaces them.
NEVER_OVERRIDDEN = frozenset({CheckName.COVERAGE, CheckName.ONE_RECIPE, CheckName.ACL})


class DeadLetterLimits(Protocol):
    """What `checks.dead_letters` of a job file says (fractions, not percent)."""

    @property
    def max(self) -> float:
        """Highest share of dead letters in all records."""
        ...

    @property
    def per_segment_max(self) -> float | None:
        """The same within each segment."""
        ...


class CheckLimits(Protocol):
    """The part of a job file's `checks` that is judged here."""

    @property
    def dead_letters(self) -> DeadLetterLimits:
        """Limits of the dead-letter rate."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """What may be tuned. Shares are fractions. Coverage, one recipe, schema and acl are exact and no settings."""

    dead_letters_max: float = DEAD_LETTERS_MAX
    dead_letters_per_segment_max: float | None = None
    dead_letters_severity: Severity = Severity.BLOCK

    @classmethod
    def of(cls, checks: CheckLimits) -> Self:
        """From the `checks` of a job file."""
        limits = checks.dead_letters
        return cls(
            dead_letters_max=limits.max,
            dead_letters_per_segment_max=limits.per_segment_max,
            dead_letters_severity=Severity(getattr(limits, "severity", Severity.BLOCK)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a release must be, from the register and the spec."""

    job: str
    version: str
    snapshot_records: int  # rows of the snapshot, surplus copies included
    recipe_digest: str
    segment_column: str | None = None  # its name in the source, for messages

    @property
    def label(self) -> str:
        """`v0007`: how messages begin."""
        return self.version.partition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check's answer. `metadata` has numbers only, so that they plot."""

    name: CheckName
    passed: bool
    severity: Severity
    message: str
    metadata: Mapping[str, float]

    @property
    def blocks(self) -> bool:
        """True when this result alone forbids publishing."""
        return not self.passed and self.severity is Severity.BLOCK


def run_checks(facts: ReleaseFacts, *, subject: Subject, settings: CheckSettings) -> tuple[CheckResult, ...]:
    """Every check, in order. `facts` are those of the whole release."""
    return (
        _coverage(facts, subject),
        _one_recipe(facts, subject),
        _schema(facts, subject),
        _acl(facts, subject),
        _dead_letters(facts, subject, settings),
    )


def _coverage(facts: ReleaseFacts, subject: Subject) -> CheckResult:
    accounted = facts.results + facts.dead_letters + facts.surplus
    findings = list(_coverage_findings(facts, subject))
    if accounted != subject.snapshot_records:
        findings.append(f"{_sum(facts)} make {accounted:,}, the snapshot has {subject.snapshot_records:,} rows.")
    good = f"{accounted:,} of {subject.snapshot_records:,} accounted for ({_sum(facts)}); missing 0."
    return _result(
        CheckName.COVERAGE,
        subject,
        " ".join(findings) or good,
        passed=not findings,
        metadata={
            "snapshot_records": subject.snapshot_records,
            "results": facts.results,
            "dead_letters": facts.dead_letters,
            "surplus": facts.surplus,
            "missing": facts.missing.count,
            "foreign": facts.foreign.count,
            "doubled": facts.doubled.count,
            "altered": facts.altered.count,
            "misplaced": facts.misplaced.count,
            "coverage_percent": _percent(facts.records - facts.missing.count, facts.records) if facts.records else 100.0,
        },
    )


def _coverage_findings(facts: ReleaseFacts, subject: Subject) -> Iterable[str]:
    shards = ", ".join(shard_key(subject.version, number) for number in facts.missing.shards)
    if facts.missing.count:
        yield f"{_records(facts.missing.count)} in neither table: {facts.missing.named()}. Shard {shards}. Re-run that shard."
    if facts.foreign.count:
        yield f"{_records(facts.foreign.count)} that the snapshot does not have: {facts.foreign.named()}."
    if facts.doubled.count:
        yield f"{_records(facts.doubled.count)} more than once: {facts.doubled.named()}."
    if facts.altered.count:
        yield f"{_records(facts.altered.count)} not as frozen ({', '.join(facts.altered.notes)}): {facts.altered.named()}."
    if facts.misplaced.count:
        yield f"{_records(facts.misplaced.count)} out of the (key_hash, record_id) order: {facts.misplaced.named()}."


def _one_recipe(facts: ReleaseFacts, subject: Subject) -> CheckResult:
    other = facts.other_recipe
    wanted = short(subject.recipe_digest)
    found = ", ".join(other.notes)
    bad = f"{_records(other.count)} of another recipe or version than {wanted} of {subject.version} (found {found}): {other.named()}."
    good = f"one recipe, {wanted}, in all {facts.rows:,} rows."
    return _result(
        CheckName.ONE_RECIPE,
        subject,
        bad if other.count else good,
        passed=other.count == 0,
        metadata={"rows": facts.rows, "rows_of_other_recipes": other.count},
    )


def _schema(facts: ReleaseFacts, subject: Subject) -> CheckResult:
    broken = facts.broken
    bad = f"{_records(broken.count)} against the schema ({'; '.join(broken.notes)}): {broken.named()}."
    good = f"{facts.rows:,} rows are what the release schema and the answer schema allow."
    return _result(
        CheckName.SCHEMA,
        subject,
        bad if broken.count else good,
        passed=broken.count == 0,
        metadata={"rows": facts.rows, "rows_broken": broken.count},
    )


def _acl(facts: ReleaseFacts, subject: Subject) -> CheckResult:
    widened = facts.widened
    bad = f"{_records(widened.count)} with another {' / '.join(widened.notes)} than the input: {widened.named()}."
    good = f"acl, record class and segment of {facts.rows:,} rows are those of the input."
    return _result(
        CheckName.ACL,
        subject,
        bad if widened.count else good,
        passed=widened.count == 0,
        metadata={"rows": facts.rows, "rows_not_inherited": widened.count},
    )


def _dead_letters(facts: ReleaseFacts, subject: Subject, settings: CheckSettings) -> CheckResult:
    total = SegmentCount(records=facts.rows, dead_by_class=facts.dead_by_class)
    findings: list[str] = []
    if _rate(total) > settings.dead_letters_max:
        findings.append(_too_many(total, limit=settings.dead_letters_max))
    findings += _segment_findings(facts, subject, settings)
    good = f"{_share(total)} dead letters <= {percent(settings.dead_letters_max)} ({_counts(total)})."
    return _result(
        CheckName.DEAD_LETTERS,
        subject,
        " ".join(findings) or good,
        passed=not findings,
        severity=settings.dead_letters_severity,
        metadata={
            "dead_letters": total.dead,
            "records": total.records,
            "dead_letters_percent": _percent(total.dead, total.records),
            "dead_letters_percent_max": settings.dead_letters_max * 100,
            **{f"dead_letters_{name}": count for name, count in facts.dead_by_class.items()},
        },
    )


def _segment_findings(facts: ReleaseFacts, subject: Subject, settings: CheckSettings) -> list[str]:
    limit = settings.dead_letters_per_segment_max
    if limit is None or subject.segment_column is None:
        return []
    over = sorted(((name, count) for name, count in facts.segments.items() if _rate(count) > limit), key=lambda each: -_rate(each[1]))
    findings = [
        f"{subject.segment_column} `{'none' if name is None else shown_id(name)}` {_too_many(count, limit=limit)}"
        for name, count in over[:EXAMPLES_MAX]
    ]
    if len(over) > EXAMPLES_MAX:
        findings.append(f"And {len(over) - EXAMPLES_MAX:,} more segments.")
    if facts.segments_dropped:
        findings.append(f"{subject.segment_column} has more than {SEGMENTS_MAX:,} values: that is a key, not a segment.")
    return findings


def _result(
    name: CheckName,
    subject: Subject,
    text: str,
    *,
    passed: bool,
    metadata: Mapping[str, float],
    severity: Severity = Severity.BLOCK,
) -> CheckResult:
    return CheckResult(name=name, passed=passed, severity=severity, message=f"{subject.label}: {text}", metadata=metadata)


def _sum(facts: ReleaseFacts) -> str:
    text = f"{facts.results:,} results + {facts.dead_letters:,} dead letters"
    return f"{text} + {facts.surplus:,} surplus {'copy' if facts.surplus == 1 else 'copies'}" if facts.surplus else text


def _records(count: int) -> str:
    return f"{count:,} {'record' if count == 1 else 'records'}"


def _rate(counts: SegmentCount) -> float:
    return counts.dead / counts.records if counts.records else 0.0


def _too_many(counts: SegmentCount, *, limit: float) -> str:
    return f"{_share(counts)} dead letters > {percent(limit)} ({_counts(counts)})."


def _counts(counts: SegmentCount) -> str:
    """`1,204 of 93,300; 1,190 of them too_long, 14 not_json`."""
    by_class = sorted(counts.dead_by_class.items(), key=lambda each: (-each[1], each[0]))
    classes = ", ".join(f"{count:,} {name}" for name, count in by_class)
    text = f"{counts.dead:,} of {counts.records:,}"
    if len(by_class) == 1 and by_class[0][1] == counts.dead:
        return f"{text}; all {by_class[0][0]}"
    return f"{text}; {classes}" if classes else text


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def _share(counts: SegmentCount) -> str:
    return f"{_percent(counts.dead, counts.records):.2f} %"


def percent(fraction: float) -> str:
    """`0.5 %`."""
    return f"{round(fraction * 100, 6):g} %"
