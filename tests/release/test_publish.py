"""Moving the alias: only past a passing verdict on unchanged files, only forward, one publisher at a time; and back, with a hold."""

import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

import batch_assets.flows.publish as publishing
from batch_assets.core.errors import ConflictError, GateFailedError, GristmillError, RefusedError, UnfitEnvironmentError
from batch_assets.core.leasing import HoldReason, ReleaseState
from batch_assets.core.validation import CheckSettings
from batch_assets.flows.judge import judge, latest_verdict
from batch_assets.flows.publish import PublishReport, history, publish, rollback
from batch_assets.flows.release import ReleaseReport, build_release
from batch_assets.reading import read_alias
from batch_assets.stores.aliases import AliasRow
from batch_assets.stores.installation import Installation
from batch_assets.stores.releases import release_files
from tests.support.finished import JOB, Damage, finished_version, flip_one_byte, open_installation

ALIAS = "tickets"
LENIENT = CheckSettings(dead_letters_max=0.1)
STRICT = CheckSettings(dead_letters_max=0.005)


def judged_release(
    installation: Installation, *, number: int = 1, checks: CheckSettings = LENIENT, damage: Damage | None = None, job: str = JOB
) -> ReleaseReport:
    row = finished_version(installation, number=number, damage=damage, job=job)
    report = build_release(installation, job=job, version=row.name)
    judge(installation, job=job, version=row.name, checks=checks)
    return report


def go(installation: Installation, report: ReleaseReport, *, override: str | None = None, job: str = JOB) -> PublishReport:
    return publish(installation, job=job, version=report.version, alias=ALIAS, by="anna", override=override)


def live(installation: Installation) -> AliasRow | None:
    return installation.aliases().read(ALIAS)


def state(installation: Installation, report: ReleaseReport) -> ReleaseState:
    return installation.register.get_release(report.release_id).state


def test_a_release_whose_verdict_passes_is_what_readers_get(installation: Installation) -> None:
    report = judged_release(installation)
    published = go(installation, report)
    assert (published.changed, published.revision, published.previous_version) == (True, 1, None)
    assert published.readable_after_ms > 0
    assert read_alias(ALIAS, root=installation.settings.root).collect().height == 40
    assert state(installation, report) is ReleaseState.PUBLISHED


def test_publishing_again_changes_nothing(installation: Installation) -> None:
    report = judged_release(installation)
    go(installation, report)
    again = go(installation, report)
    assert (again.changed, again.revision) == (False, 1)


def test_a_release_that_was_never_judged_is_refused(installation: Installation) -> None:
    row = finished_version(installation)
    report = build_release(installation, job=JOB, version=row.name)
    with pytest.raises(GateFailedError, match="never judged"):
        go(installation, report)
    assert live(installation) is None


def test_a_failing_verdict_is_refused_with_its_findings(installation: Installation) -> None:
    report = judged_release(installation, checks=STRICT)
    with pytest.raises(GateFailedError, match=r"5\.00 % dead letters > 0\.5 %"):
        go(installation, report)
    assert live(installation) is None


def test_one_changed_byte_is_refused_and_the_file_is_named(installation: Installation) -> None:
    report = judged_release(installation)
    name = release_files(report.uri)[0].name
    flip_one_byte(Path(report.uri) / name)
    with pytest.raises(UnfitEnvironmentError, match=name):
        go(installation, report)
    assert live(installation) is None


def test_a_file_that_is_gone_is_refused_and_named(installation: Installation) -> None:
    report = judged_release(installation)
    name = release_files(report.uri)[0].name
    (Path(report.uri) / name).unlink()
    with pytest.raises(UnfitEnvironmentError, match=name):
        go(installation, report)


def test_an_override_publishes_past_the_dead_letter_limit_and_is_recorded(installation: Installation) -> None:
    report = judged_release(installation, checks=STRICT)
    published = go(installation, report, override="the two are known to be empty")
    assert published.overridden
    row = live(installation)
    assert row is not None
    assert row.reason is not None
    assert row.reason.startswith("the two are known to be empty [overridden: v0001: 5.00 % dead letters")


def test_an_override_without_a_reason_is_none(installation: Installation) -> None:
    report = judged_release(installation, checks=STRICT)
    with pytest.raises(GateFailedError):
        go(installation, report, override="  ")


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: rows.filter(pl.col("record_id") != "T-00007"),
        lambda rows: rows.with_columns(acl=pl.lit("everyone")),
        lambda rows: rows.with_columns(recipe=pl.lit("sha256:" + "ab" * 32)),
    ],
    ids=["coverage", "acl", "one_recipe"],
)
def test_an_override_never_skips_coverage_acl_or_one_recipe(installation: Installation, damage: Damage) -> None:
    report = judged_release(installation, damage=damage)
    with pytest.raises(GateFailedError):
        go(installation, report, override="I know better")
    assert live(installation) is None


def test_a_verdict_compared_with_what_was_live_before_is_made_again(installation: Installation) -> None:
    second = judged_release(installation, number=2)
    third = judged_release(installation, number=3)
    go(installation, second)
    go(installation, third)
    verdict = latest_verdict(installation, job=JOB, version=third.version)
    assert verdict is not None
    assert (verdict.compared_to.revision, verdict.compared_to.release_id) == (1, second.release_id)
    assert len(installation.register.verdicts(third.release_id)) == 2


def test_a_verdict_that_is_made_again_decides_with_the_limits_of_now(installation: Installation) -> None:
    second = judged_release(installation, number=2)
    third = judged_release(installation, number=3)
    go(installation, second)
    with pytest.raises(GateFailedError, match=r"0\.5 %"):
        publish(installation, job=JOB, version=third.version, alias=ALIAS, by="anna", checks=STRICT)


def test_a_verdict_made_under_laxer_limits_than_those_of_now_is_made_again(installation: Installation) -> None:
    report = judged_release(installation)
    with pytest.raises(GateFailedError, match=r"0\.5 %"):
        publish(installation, job=JOB, version=report.version, alias=ALIAS, by="anna", checks=STRICT)
    assert live(installation) is None
    assert publish(installation, job=JOB, version=report.version, alias=ALIAS, by="anna", checks=LENIENT).changed


def test_a_verdict_row_that_lacks_checks_is_no_pass_and_is_made_again(installation: Installation) -> None:
    report = judged_release(installation, checks=STRICT)
    (row,) = installation.register.verdicts(report.release_id)
    for kept in ([], [check for check in row.payload["checks"] if check["name"] != "dead_letters"]):
        payload = {**row.payload, "checks": kept}
        installation.register.add_verdict(release_id=report.release_id, release_digest=report.digest, passed=True, payload=payload)
        verdict = latest_verdict(installation, job=JOB, release_id=report.release_id)
        assert verdict is not None
        assert not verdict.passed
        assert "dead_letters" in [problem.key for problem in verdict.problems]
        with pytest.raises(GateFailedError, match=r"5\.00 % dead letters"):
            go(installation, report)
    assert live(installation) is None


def test_an_edited_alias_gets_the_release_and_what_follows(installation: Installation) -> None:
    """The old alias stays as it is; under the new one everything works as if it had always been called so."""
    first, second = judged_release(installation, number=1), judged_release(installation, number=2)
    go(installation, first)
    moved = publish(installation, job=JOB, version=first.version, alias="other", by="anna")
    assert (moved.changed, moved.revision, moved.previous_version) == (True, 1, None)
    assert publish(installation, job=JOB, version=second.version, alias="other", by="anna").changed
    assert rollback(installation, job=JOB, alias="other", reason="wrong", by="ben").version == first.version
    with pytest.raises(RefusedError, match="is withdrawn"):
        publish(installation, job=JOB, version=second.version, alias=ALIAS, by="anna")
    row = live(installation)
    assert row is not None
    assert row.version == first.version


def test_publish_goes_forward_only(installation: Installation) -> None:
    first = judged_release(installation, number=1)
    second = judged_release(installation, number=2)
    go(installation, second)
    with pytest.raises(RefusedError, match="older than what is live"):
        go(installation, first)
    row = live(installation)
    assert row is not None
    assert row.version == second.version


def test_a_release_that_readers_had_before_is_not_published_again(installation: Installation) -> None:
    first, second = judged_release(installation, number=1), judged_release(installation, number=2)
    go(installation, first)
    go(installation, second)
    with pytest.raises(RefusedError, match="gristmill rollback"):
        go(installation, first)


def test_an_alias_of_another_job_is_not_taken(installation: Installation) -> None:
    go(installation, judged_release(installation))
    other = judged_release(installation, job="mails")
    with pytest.raises(RefusedError, match="belongs to job tickets"):
        go(installation, other, job="mails")


def test_a_publisher_that_crashed_after_the_swap_is_completed_by_the_next_call(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = judged_release(installation)
    with monkeypatch.context() as crash:
        crash.setattr(publishing, "_until_readable", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            go(installation, report)
    assert state(installation, report) is ReleaseState.CANDIDATE
    assert not go(installation, report).changed
    assert state(installation, report) is ReleaseState.PUBLISHED


# --- rollback ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Two:
    """Two published versions; the second is live."""

    first: ReleaseReport
    second: ReleaseReport


@pytest.fixture
def two(installation: Installation) -> Two:
    first, second = judged_release(installation, number=1), judged_release(installation, number=2)
    go(installation, first)
    go(installation, second)
    return Two(first, second)


def back(installation: Installation, version: str | None = None, reason: str = "wrong categories") -> PublishReport:
    return rollback(installation, job=JOB, alias=ALIAS, version=version, reason=reason, by="ben")


def test_a_rollback_points_readers_back_withdraws_what_it_left_and_holds_the_job(installation: Installation, two: Two) -> None:
    report = back(installation)
    assert (report.version, report.revision, report.previous_version, report.rollback) == (two.first.version, 3, two.second.version, True)
    assert state(installation, two.second) is ReleaseState.WITHDRAWN
    assert state(installation, two.first) is ReleaseState.PUBLISHED
    hold = installation.register.job_hold(JOB)
    assert hold is not None
    assert (hold.reason, hold.by) == (HoldReason.ROLLBACK, "ben")


def test_a_withdrawn_release_is_not_published_again(installation: Installation, two: Two) -> None:
    back(installation)
    with pytest.raises(RefusedError, match="is withdrawn"):
        go(installation, two.second)


def test_a_new_version_goes_forward_after_a_rollback(installation: Installation, two: Two) -> None:
    back(installation)
    installation.register.resume_job(JOB)
    third = judged_release(installation, number=3)
    assert go(installation, third).previous_version == two.first.version


def test_a_rollback_needs_a_reason(installation: Installation, two: Two) -> None:
    with pytest.raises(RefusedError, match="needs a reason"):
        back(installation, reason=" ")
    row = live(installation)
    assert row is not None
    assert row.version == two.second.version


def test_a_rollback_goes_only_to_what_was_published_before(installation: Installation, two: Two) -> None:
    third = judged_release(installation, number=3)
    with pytest.raises(RefusedError, match="nothing to go back to"):
        back(installation, version=third.version)
    assert installation.register.job_hold(JOB) is None
    assert state(installation, two.second) is ReleaseState.PUBLISHED


def test_a_second_rollback_does_not_return_to_what_was_withdrawn(installation: Installation, two: Two) -> None:
    back(installation)
    with pytest.raises(RefusedError, match="nothing to go back to"):
        back(installation)
    assert two.first.version == getattr(live(installation), "version", None)


def test_a_rollback_to_what_was_withdrawn_is_refused_in_words(installation: Installation, two: Two) -> None:
    back(installation)
    with pytest.raises(RefusedError, match=f"{two.second.version} .* was withdrawn by an earlier rollback"):
        back(installation, version=two.second.version, reason="it was right after all")
    assert two.first.version == getattr(live(installation), "version", None)


def test_a_second_rollback_goes_further_back(installation: Installation, two: Two) -> None:
    go(installation, judged_release(installation, number=3))
    assert [back(installation).version, back(installation).version] == [two.second.version, two.first.version]


def test_a_default_target_that_another_rollback_took_meanwhile_is_a_conflict(installation: Installation, two: Two) -> None:
    go(installation, judged_release(installation, number=3))
    chosen = publishing.previous_release(installation, job=JOB, alias=ALIAS).version
    back(installation)
    with pytest.raises(ConflictError, match="moved by somebody else"):
        rollback(installation, job=JOB, alias=ALIAS, version=chosen, previous=True, reason="wrong", by="anna")


def test_a_rollback_to_a_damaged_release_is_refused_before_anything_changes(installation: Installation, two: Two) -> None:
    flip_one_byte(Path(two.first.uri) / release_files(two.first.uri)[0].name)
    with pytest.raises(UnfitEnvironmentError):
        back(installation)
    assert installation.register.job_hold(JOB) is None
    assert state(installation, two.second) is ReleaseState.PUBLISHED


def test_a_rollback_that_crashed_before_the_swap_reaches_the_same_target_when_repeated(
    installation: Installation, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as crash:
        crash.setattr(publishing, "_swap", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            back(installation)
    assert back(installation).version == two.first.version


def test_the_history_says_who_why_and_whether_it_was_a_rollback(installation: Installation, two: Two) -> None:
    back(installation)
    moves = history(installation, alias=ALIAS)
    assert [(move.version, move.by, move.rollback, move.reason) for move in moves] == [
        (two.first.version, "ben", True, "wrong categories"),
        (two.second.version, "anna", False, None),
        (two.first.version, "anna", False, None),
    ]


# --- two at once --------------------------------------------------------------------------------------------------------------------------


def _publish_at_once(root: str, version: str, name: str, barrier: object, results: object) -> None:
    """Both have judged and read the alias before either swaps: the wait stands right before the compare-and-swap."""
    installation = open_installation(Path(root))
    swap = publishing._swap

    def swap_together(*args: object, **kwargs: object) -> PublishReport:
        barrier.wait(timeout=60)  # pyright: ignore[reportAttributeAccessIssue]
        return swap(*args, **kwargs)  # pyright: ignore[reportArgumentType]

    publishing._swap = swap_together
    try:
        report = publish(installation, job=JOB, version=version, alias=ALIAS, by=name)
        results.put((name, "won", report.version))  # pyright: ignore[reportAttributeAccessIssue]
    except GristmillError as error:
        results.put((name, type(error).__name__, str(error)))  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("published_before", [False, True])
def test_of_two_publishers_at_once_one_wins_and_the_other_learns_what_it_would_have_overwritten(
    installation: Installation, *, published_before: bool
) -> None:
    if published_before:
        go(installation, judged_release(installation, number=1))
    versions = [judged_release(installation, number=number).version for number in (2, 3)]
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(2), spawn.Queue()
    root = installation.settings.root
    processes = [
        spawn.Process(target=_publish_at_once, args=(root, version, name, barrier, results))
        for version, name in zip(versions, ("anna", "ben"), strict=True)
    ]
    for process in processes:
        process.start()
    ended = {name: (how, what) for name, how, what in (results.get(timeout=100) for _ in processes)}
    for process in processes:
        process.join()
    winner = next(name for name, (how, _) in ended.items() if how == "won")
    loser = "ben" if winner == "anna" else "anna"
    how, told = ended[loser]
    assert how == ConflictError.__name__, told
    assert f"by {winner}" in told
    row = live(installation)
    assert row is not None
    assert row.version == ended[winner][1]
    assert row.version in told
    assert row.revision == (2 if published_before else 1)
