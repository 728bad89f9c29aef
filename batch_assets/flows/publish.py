"""Move an alias: forward when the gate allows it (`publish`), back to what readers had before (`rollback`).

The order of the steps is what makes a crash harmless: nothing that readers see changes before the one compare-and-swap of the alias, and
everything after it is repeated by the next call. Every refusal leaves readers with what they have.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from batch_assets.core.errors import ConflictError, GateFailedError, Problem, RefusedError
from batch_assets.core.leasing import HoldReason, ReleaseState
from batch_assets.core.validation import NEVER_OVERRIDDEN, CheckSettings
from batch_assets.core.verdict import VALIDATOR_VERSION, Verdict
from batch_assets.flows.judge import judge, latest_verdict, select_release
from batch_assets.flows.release import verify_release
from batch_assets.stores.aliases import AliasRow
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import ReleaseRow, utc_now
from batch_assets.stores.releases import file_locations, release_files


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """Where the alias points now. `changed` is false when it pointed there already."""

    alias: str
    job: str
    version: str
    release_id: str
    revision: int
    previous_version: str | None
    by: str
    reason: str | None
    overridden: bool
    rollback: bool
    changed: bool
    readable_after_ms: float  # from the beginning of the swap until a reader resolved the alias to this release and found its files


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """One intended change of an alias."""

    alias: str
    release: ReleaseRow
    live: AliasRow | None
    by: str
    reason: str | None = None
    rollback: bool = False
    overridden: bool = False

    @property
    def expected(self) -> int:
        return self.live.revision if self.live else 0

    def row(self, *, at: str) -> AliasRow:
        return AliasRow(
            alias=self.alias,
            revision=self.expected + 1,
            job=self.release.job,
            version=self.release.version,
            release_id=self.release.release_id,
            uri=self.release.uri,
            by=self.by,
            reason=self.reason,
            rollback=self.rollback,
            overridden=self.overridden,
            at=at,
        )


def publish(
    installation: Installation,
    *,
    job: str,
    alias: str,
    by: str,
    version: str | None = None,
    release_id: str | None = None,
    reason: str | None = None,
    override: str | None = None,
    checks: CheckSettings | None = None,
    now: Callable[[], str] = utc_now,
) -> PublishReport:
    """Point readers at a release (by id, else the newest of the version) whose verdict passes; only forward, and once per release.

    A verdict that was made under other `checks` (default: its own settings), or compared with something else than what is live, is made
    again at once: same rows, no model call.
    `override` is the reason for publishing past a failing verdict; coverage, uniqueness, one recipe and acl are never skipped.
    Raises GateFailedError, RefusedError, ConflictError (somebody else was faster), UnfitEnvironmentError (the release was damaged).
    """
    live = installation.aliases().read(alias)
    release = select_release(installation, job=job, version=version, release_id=release_id)
    if live is not None and live.release_id == release.release_id:
        installation.register.mark_published(release.release_id, rollback=live.rollback)  # a crash may have come before it
        return _unchanged(live)
    _refuse_backward(installation, release, live=live, alias=alias)
    _verify(installation, release)
    verdict = _current_verdict(installation, release, live=live, alias=alias, checks=checks)
    overridden = _allowed(verdict, override=override)
    move = _Move(alias=alias, release=release, live=live, by=by, reason=_reason(reason, override, verdict), overridden=overridden)
    return _swap(installation, move, now=now)


def rollback(
    installation: Installation,
    *,
    job: str,
    alias: str,
    reason: str,
    by: str,
    version: str | None = None,
    previous: bool = False,
    now: Callable[[], str] = utc_now,
) -> PublishReport:
    """Point readers back at a release that was published before (default: the one before the live one), and hold the job's automation.

    Its verdict of that time is enough; its files are verified anew. What is left behind is withdrawn: no base, not published again, and no
    target of a rollback. With `previous` it goes to the default one, and raises ConflictError when that is not of `version` (any more).
    """
    if not reason.strip():
        raise _no_reason(alias)
    live = installation.aliases().read(alias)
    if live is None or live.job != job:
        raise _nothing_to_leave(job, alias, live)
    release = _rollback_target(installation, job=job, alias=alias, live=live, version=None if previous else version)
    if previous and release.version != version:
        raise _other_previous(alias, expected=version, found=release.version)
    if release.release_id == live.release_id:
        return _unchanged(live)
    _verify(installation, release)
    installation.register.hold_job(job, by=by, note=f"rollback of {alias} to {release.version}: {reason}", reason=HoldReason.ROLLBACK)
    if _is_older(installation, release, live=live):
        installation.register.mark_published(live.release_id)  # it was, even when its publisher crashed before saying so
        installation.register.mark_withdrawn(live.release_id)
    return _swap(installation, _Move(alias=alias, release=release, live=live, by=by, reason=reason, rollback=True), now=now)


def history(installation: Installation, *, alias: str) -> list[AliasRow]:
    """Every move of the alias, newest first."""
    return installation.aliases().history(alias)


# --- the swap -------------------------------------------------------------------------------------------------------------------------


def _swap(installation: Installation, move: _Move, *, now: Callable[[], str]) -> PublishReport:
    row = move.row(at=now())
    started_s = time.perf_counter()
    installation.aliases().move(row, expected=move.expected)
    readable_after_ms = _until_readable(installation, row, started_s=started_s)
    installation.register.mark_published(move.release.release_id, rollback=move.rollback)
    return _report(row, previous=move.live.version if move.live else None, changed=True, readable_after_ms=readable_after_ms)


def _until_readable(installation: Installation, row: AliasRow, *, started_s: float) -> float:
    """Resolve the alias as a reader does. That another move came at once is no failure of this one."""
    installation.aliases().read(row.alias)
    file_locations(row.uri, release_files(row.uri))
    return round((time.perf_counter() - started_s) * 1000, 1)


def _unchanged(live: AliasRow) -> PublishReport:
    return _report(live, previous=None, changed=False, readable_after_ms=0.0)


def _report(row: AliasRow, *, previous: str | None, changed: bool, readable_after_ms: float) -> PublishReport:
    return PublishReport(
        alias=row.alias,
        job=row.job,
        version=row.version,
        release_id=row.release_id,
        revision=row.revision,
        previous_version=previous,
        by=row.by,
        reason=row.reason,
        overridden=row.overridden,
        rollback=row.rollback,
        changed=changed,
        readable_after_ms=readable_after_ms,
    )


def _verify(installation: Installation, release: ReleaseRow) -> None:
    """The release is still what was built. Raises UnfitEnvironmentError naming the file that differs."""
    row = installation.register.version(release.job, release.version)
    verify_release(installation.releases(job=release.job), release, identity=row.identity)


# --- forward --------------------------------------------------------------------------------------------------------------------------


def _number(version: str) -> int:
    """7 of `v0007-3fa9c1`."""
    return int(version.partition("-")[0].removeprefix("v"))


def _is_older(installation: Installation, release: ReleaseRow, *, live: AliasRow) -> bool:
    """Of an earlier version, or of the same one and built earlier: before a redrive."""
    if release.version != live.version:
        return _number(release.version) < _number(live.version)
    newest_first = [each.release_id for each in installation.register.releases(release.job)]
    return newest_first.index(release.release_id) > newest_first.index(live.release_id)


def _refuse_backward(installation: Installation, release: ReleaseRow, *, live: AliasRow | None, alias: str) -> None:
    """Another job's alias, a release that readers had before, or a version older than the live one."""
    if live is not None and live.job != release.job:
        raise _refused("publish.other_job", alias, what=f"alias {alias} belongs to job {live.job}", fix="set another publish.alias")
    if release.state is not ReleaseState.CANDIDATE and not _is_new_to(installation, release, alias=alias):
        what = f"{release.release_id} ({release.version}) is {release.state}: a release is published once"
        raise _refused("publish.once", alias, what=what, fix=_instead_of_once(release, alias))
    if live is None:
        return
    if _is_older(installation, release, live=live):
        what = f"{release.version} ({release.release_id}) is older than what is live, {live.version} ({live.release_id})"
        raise _refused("publish.backward", alias, what=what, fix="publish goes forward only; plan a new version for a correction")


def _is_new_to(installation: Installation, release: ReleaseRow, *, alias: str) -> bool:
    """Readers have it under another alias (`publish.alias` was edited) and never had it under this one."""
    if release.state is not ReleaseState.PUBLISHED:
        return False
    return all(move.release_id != release.release_id for move in installation.aliases().history(alias))


def _instead_of_once(release: ReleaseRow, alias: str) -> str:
    if release.state is ReleaseState.PUBLISHED:
        return f'gristmill rollback {release.job} {release.version} --reason "…" (alias {alias})'
    return "change the job and run it: a new version goes forward"


def _current_verdict(
    installation: Installation, release: ReleaseRow, *, live: AliasRow | None, alias: str, checks: CheckSettings | None
) -> Verdict:
    """The recorded verdict, made again when it is not about this content, this validator, what is live now, and the limits of now."""
    verdict = latest_verdict(installation, job=release.job, release_id=release.release_id)
    if verdict is None:
        raise GateFailedError(
            Problem(
                code="gate.no_verdict",
                file=release.release_id,
                key=release.version,
                what=f"{release.version} was never judged; readers keep what they have",
                fix=f"gristmill judge {release.job} {release.version}",
            )
        )
    same_limits = checks is None or verdict.settings == checks
    if same_limits and not verdict.missing and _is_current(verdict, release, live=live, alias=alias):
        return verdict
    return judge(installation, job=release.job, release_id=release.release_id, checks=checks or verdict.settings, alias=alias)


def _is_current(verdict: Verdict, release: ReleaseRow, *, live: AliasRow | None, alias: str) -> bool:
    compared = verdict.compared_to
    same_live = (compared.alias, compared.revision) == (alias, live.revision if live else 0)
    return same_live and verdict.release_digest == release.digest and verdict.validator_version == VALIDATOR_VERSION


def _allowed(verdict: Verdict, *, override: str | None) -> bool:
    """True when it is an override. Raises GateFailedError with the findings."""
    if verdict.passed:
        return False
    hard = [check for check in verdict.checks if check.blocks and check.name in NEVER_OVERRIDDEN]
    if override is None or not override.strip() or hard:
        raise GateFailedError(*verdict.problems)
    return True


def _reason(reason: str | None, override: str | None, verdict: Verdict) -> str | None:
    """An override keeps its reason and what it overrode."""
    if verdict.passed or override is None:
        return reason
    findings = " ".join(check.message for check in verdict.checks if check.blocks)
    return f"{override} [overridden: {findings}]"


# --- back -----------------------------------------------------------------------------------------------------------------------------


def previous_release(installation: Installation, *, job: str, alias: str) -> ReleaseRow:
    """Where a rollback without a named version goes now. Raises RefusedError when there is nothing to go back to."""
    live = installation.aliases().read(alias)
    if live is None or live.job != job:
        raise _nothing_to_leave(job, alias, live)
    return _rollback_target(installation, job=job, alias=alias, live=live, version=None)


def _rollback_target(installation: Installation, *, job: str, alias: str, live: AliasRow, version: str | None) -> ReleaseRow:
    """The newest release behind this alias before the live one (of `version`, when given) that was not withdrawn since."""
    withdrawn: ReleaseRow | None = None
    for move in installation.aliases().history(alias):
        if move.job != job or move.release_id == live.release_id or version not in (None, move.version):
            continue
        release = installation.register.get_release(move.release_id)
        if release.state is ReleaseState.WITHDRAWN:
            withdrawn = withdrawn or release
        elif release.state is not ReleaseState.RETIRED and (version is not None or _is_older(installation, release, live=live)):
            return release
    if version == live.version:
        return installation.register.get_release(live.release_id)
    if version is not None and withdrawn is not None:
        raise _is_withdrawn(withdrawn, alias)
    raise RefusedError(
        Problem(
            code="rollback.no_target",
            file=job,
            key=alias,
            what=f"nothing to go back to: {alias} needs a release that stood behind it before, was not withdrawn and still exists",
            expected="a version that was published before",
            found=version or "none",
            fix=f"gristmill history {job}",
        )
    )


def _is_withdrawn(release: ReleaseRow, alias: str) -> RefusedError:
    what = f"{release.version} ({release.release_id}) was withdrawn by an earlier rollback and does not come back"
    fix = f"gristmill history {release.job} names what else readers had; or change the job and run it: a new version goes forward"
    return _refused("rollback.withdrawn", alias, what=what, fix=fix)


def _other_previous(alias: str, *, expected: str | None, found: str) -> ConflictError:
    return ConflictError(
        Problem(
            code="rollback.moved",
            key=alias,
            what=f"alias {alias} was moved by somebody else meanwhile; it stays as it is",
            expected=f"{expected} as the release before the live one",
            found=found,
            fix="look at `gristmill history`, and roll back again if that is still wanted",
        )
    )


def _no_reason(alias: str) -> RefusedError:
    return _refused("rollback.no_reason", alias, what="going back needs a reason; it is shown in the history", fix='add --reason "…"')


def _nothing_to_leave(job: str, alias: str, live: AliasRow | None) -> RefusedError:
    found = "it was never published" if live is None else f"it belongs to job {live.job}"
    return _refused("rollback.not_live", alias, what=f"{job} is not live behind {alias}: {found}", fix=f"gristmill history {job}")


def _refused(code: str, alias: str, *, what: str, fix: str) -> RefusedError:
    return RefusedError(Problem(code=code, key=alias, what=f"{what}; readers keep what they have", fix=fix))
