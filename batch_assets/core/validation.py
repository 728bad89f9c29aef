"""The gate: what is asked of a release before readers may get it, and how a verdict is worded.

Pure. `stores/release_facts.py` counts, range by range; here the counts become checks and the checks a verdict. A message begins with the
version (the checks page of the UI cannot show it) and names keys, never record or answer text.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol, Self, TypeVar

from batch_assets.core.errors import Problem
from batch_assets.core.identity import shard_key, short

VALIDATOR_VERSION = "1"  # raised when a check asks something else: a verdict of another one is judged again before publishing
EXAMPLES_MAX = 10
EXAMPLE_CHARACTERS_MAX = 60  # ids are opaque text of any length
SEGMENTS_MAX = 10_000  # more than this is no segment but a key, and its counts would grow with the input
DEAD_LETTERS_MAX = 0.005


_T = TypeVar("_T")


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
class Found:
    """Rows that should not be as they are: how many, and the first few by name. `notes` say what is wrong with them."""

    count: int = 0
    ids: tuple[str, ...] = ()
    shards: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: "Found") -> "Found":
        return Found(
            count=self.count + other.count,
            ids=_first(self.ids, other.ids),
            shards=_first(self.shards, other.shards),
            notes=_first(self.notes, other.notes),
        )

    def named(self) -> str:
        """`T-118, T-2044 and 7 more`."""
        shown = ", ".join(shown_id(each) for each in self.ids)
        more = self.count - len(self.ids)
        return f"{shown} and {more:,} more" if more > 0 else shown


def _first(ours: tuple[_T, ...], theirs: tuple[_T, ...]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys((*ours, *theirs)))[:EXAMPLES_MAX]


def shown_id(record_id: str) -> str:
    """A record id fit for a message: bounded, and control characters escaped."""
    shown = record_id if record_id.isprintable() else record_id.encode("unicode_escape").decode()
    return shown if len(shown) <= EXAMPLE_CHARACTERS_MAX else f"{shown[: EXAMPLE_CHARACTERS_MAX - 1]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCount:
    """Records of one segment, and its dead letters by class."""

    records: int = 0
    dead_by_class: Mapping[str, int] = field(default_factory=dict)

    @property
    def dead(self) -> int:
        """Dead letters of all classes."""
        return sum(self.dead_by_class.values())

    def __add__(self, other: "SegmentCount") -> "SegmentCount":
        return SegmentCount(records=self.records + other.records, dead_by_class=Counter(self.dead_by_class) + Counter(other.dead_by_class))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFacts:
    """What was counted in one range of a release, or, added up, in all of it."""

    records: int = 0  # rows of the frozen input
    surplus: int = 0  # surplus copies of repeated ids
    rows: int = 0  # rows of the release
    results: int = 0
    missing: Found = field(default_factory=Found)  # in the frozen input only
    foreign: Found = field(default_factory=Found)  # in the release only
    doubled: Found = field(default_factory=Found)  # more than once in the release
    altered: Found = field(default_factory=Found)  # hash, shard, digest or disposition are not those of the frozen input
    misplaced: Found = field(default_factory=Found)  # out of order, or in another file than their hash says
    other_recipe: Found = field(default_factory=Found)
    widened: Found = field(default_factory=Found)  # acl, record class or segment are not those of the frozen input
    broken: Found = field(default_factory=Found)  # not what the release schema or the answer schema allows
    segments: Mapping[str | None, SegmentCount] = field(default_factory=dict)
    segments_dropped: int = 0  # records of segments beyond SEGMENTS_MAX

    @property
    def dead_letters(self) -> int:
        """Rows that are no result."""
        return self.rows - self.results

    @property
    def dead_by_class(self) -> Mapping[str, int]:
        """Dead letters of all segments, most frequent first."""
        total: Counter[str] = Counter()
        for segment in self.segments.values():
            total.update(segment.dead_by_class)
        return dict(total.most_common())

    def __add__(self, other: "ReleaseFacts") -> "ReleaseFacts":
        segments, dropped = _merged(self.segments, other.segments)
        return ReleaseFacts(
            records=self.records + other.records,
            surplus=self.surplus + other.surplus,
            rows=self.rows + other.rows,
            results=self.results + other.results,
            missing=self.missing + other.missing,
            foreign=self.foreign + other.foreign,
            doubled=self.doubled + other.doubled,
            altered=self.altered + other.altered,
            misplaced=self.misplaced + other.misplaced,
            other_recipe=self.other_recipe + other.other_recipe,
            widened=self.widened + other.widened,
            broken=self.broken + other.broken,
            segments=segments,
            segments_dropped=self.segments_dropped + other.segments_dropped + dropped,
        )


def _merged(
    ours: Mapping[str | None, SegmentCount], theirs: Mapping[str | None, SegmentCount]
) -> tuple[dict[str | None, SegmentCount], int]:
    merged = dict(ours)
    dropped = 0
    for segment, counts in theirs.items():
        if segment in merged:
            merged[segment] += counts
        elif len(merged) < SEGMENTS_MAX:
            merged[segment] = counts
        else:
            dropped += counts.records
    return merged, dropped


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTo:
    """What was live when the verdict was made. Revision 0 and no release: nothing yet."""

    alias: str
    revision: int
    release_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The recorded answer of the gate for one release, bound to what was judged and how."""

    job: str
    version: str
    release_id: str
    release_digest: str
    checks: tuple[CheckResult, ...]
    settings: CheckSettings
    compared_to: ComparedTo
    validator_version: str = VALIDATOR_VERSION

    @property
    def passed(self) -> bool:
        """True when nothing blocks."""
        return not any(check.blocks for check in self.checks)

    @property
    def findings(self) -> tuple[CheckResult, ...]:
        """Every check that did not pass, whatever its severity."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def summary(self) -> str:
        """`passed`, `warned: dead_letters` or `failed: coverage, acl`."""
        blocking = [check.name for check in self.checks if check.blocks]
        if blocking:
            return f"failed: {', '.join(blocking)}"
        return f"warned: {', '.join(check.name for check in self.findings)}" if self.findings else "passed"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The blocking findings, for an error."""
        return tuple(_problem(self, check) for check in self.checks if check.blocks)

    def as_json(self) -> dict[str, Any]:
        """For `--json`: did it pass, and what was found."""
        findings = [{"check": each.name.value, "severity": each.severity.value, "message": each.message} for each in self.findings]
        return {"passed": self.passed, "findings": findings}

    def as_payload(self) -> dict[str, Any]:
        """Plain values for SQL and for the copy beside the release."""
        return {**asdict(self), "passed": self.passed, "summary": self.summary}

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Self:
        """Inverse of `as_payload`."""
        return cls(
            job=payload["job"],
            version=payload["version"],
            release_id=payload["release_id"],
            release_digest=payload["release_digest"],
            checks=tuple(_check_result(each) for each in payload["checks"]),
            settings=_settings(payload["settings"]),
            compared_to=ComparedTo(**payload["compared_to"]),
            validator_version=payload["validator_version"],
        )


def _check_result(plain: Mapping[str, Any]) -> CheckResult:
    return CheckResult(**{**plain, "name": CheckName(plain["name"]), "severity": Severity(plain["severity"])})


def _settings(plain: Mapping[str, Any]) -> CheckSettings:
    return CheckSettings(**{**plain, "dead_letters_severity": Severity(plain["dead_letters_severity"])})


def _problem(verdict: Verdict, check: CheckResult) -> Problem:
    tunable = check.name is CheckName.DEAD_LETTERS
    return Problem(
        code=f"gate.{check.name}",
        file=verdict.release_id,
        key=check.name,
        what=check.message,
        fix=f"look at the dead letters (gristmill dead-letters {verdict.job}), then edit checks.dead_letters and judge again, "
        f"or publish with an override and a reason"
        if tunable
        else f"readers keep the old version; run {verdict.version} again or plan a new one",
    )


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
    findings = []
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
