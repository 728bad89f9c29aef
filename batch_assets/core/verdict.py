"""The recorded answer of the gate: what was judged, how, compared with what. Made by `flows/judge.py`, asked by `flows/publish.py`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from batch_assets.core.errors import Problem
from batch_assets.core.validation import CheckName, CheckResult, CheckSettings, Severity

VALIDATOR_VERSION = "2"  # raised when a check asks something else: a verdict of another one is judged again before publishing


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
        """True when every check was made and nothing blocks."""
        return not self.missing and not any(check.blocks for check in self.checks)

    @property
    def missing(self) -> tuple[CheckName, ...]:
        """Checks that were not made: `judge` makes all of them, so this row is not what it recorded."""
        made = {check.name for check in self.checks}
        return tuple(name for name in CheckName if name not in made)

    @property
    def findings(self) -> tuple[CheckResult, ...]:
        """Every check that did not pass, whatever its severity."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def summary(self) -> str:
        """`passed`, `warned: dead_letters` or `failed: coverage, acl`."""
        blocking = [*(check.name for check in self.checks if check.blocks), *self.missing]
        if blocking:
            return f"failed: {', '.join(blocking)}"
        return f"warned: {', '.join(check.name for check in self.findings)}" if self.findings else "passed"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The blocking findings, for an error."""
        return (*(_problem(self, check) for check in self.checks if check.blocks), *(_not_made(self, name) for name in self.missing))

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
    return CheckResult(
        name=CheckName(plain["name"]),
        passed=plain["passed"],
        severity=Severity(plain["severity"]),
        message=plain["message"],
        metadata=plain["metadata"],
    )


def _settings(plain: Mapping[str, Any]) -> CheckSettings:
    return CheckSettings(
        dead_letters_max=plain["dead_letters_max"],
        dead_letters_per_segment_max=plain["dead_letters_per_segment_max"],
        dead_letters_severity=Severity(plain["dead_letters_severity"]),
    )


def _problem(verdict: Verdict, check: CheckResult) -> Problem:
    fix = f"readers keep what they have; run {verdict.version} again or plan a new one"
    if check.name is CheckName.DEAD_LETTERS:
        fix = f"gristmill dead-letters {verdict.job}; then edit checks.dead_letters and judge again, or publish with an override"
    return Problem(code=f"gate.{check.name}", file=verdict.release_id, key=check.name, what=check.message, fix=fix)


def _not_made(verdict: Verdict, name: CheckName) -> Problem:
    fix = f"gristmill judge {verdict.job} {verdict.version}"
    return Problem(code=f"gate.{name}", file=verdict.release_id, key=name, what=f"the recorded verdict lacks this check: {name}", fix=fix)
