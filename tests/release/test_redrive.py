"""After a redrive there is a new release with an id, a digest and a verdict of its own; the earlier one stays as it was."""

from pathlib import Path

import pytest

from batch_assets.core.errors import NotFinishedError, RefusedError
from batch_assets.core.leasing import ReleaseState
from batch_assets.core.validation import CheckSettings
from batch_assets.core.verdict import Verdict
from batch_assets.flows.judge import judge
from batch_assets.flows.publish import publish, rollback
from batch_assets.flows.release import ReleaseReport, build_release, is_of_last_round, verify_release
from batch_assets.reading import read_alias
from tests.support.redrives import commit_all, finished_with_dead_letters, reopen
from tests.support.versions import Planned, installation_in
from tests.support.workers import drive

LENIENT = CheckSettings(dead_letters_max=0.6)
STRICTER = CheckSettings(dead_letters_max=0.3)


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    """9 records, 5 of them dead letters; published."""
    planned = finished_with_dead_letters(installation_in(tmp_path))
    build(planned)
    go(planned, checks=LENIENT)
    return planned


def build(planned: Planned) -> ReleaseReport:
    return build_release(planned.installation, job=planned.job, version=planned.version)


def verdict(planned: Planned, *, checks: CheckSettings) -> Verdict:
    return judge(planned.installation, job=planned.job, version=planned.version, checks=checks)


def go(planned: Planned, *, checks: CheckSettings):
    verdict(planned, checks=checks)
    return publish(planned.installation, job=planned.job, version=planned.version, alias=planned.job, by="anna")


def redriven(planned: Planned, **script: object) -> None:
    """Opened, answered, committed."""
    reopen(planned)
    drive(planned, script=script).finish()
    commit_all(planned)


def test_a_redrive_leads_to_a_new_release_and_leaves_the_earlier_one_whole(planned: Planned) -> None:
    before = build(planned)
    redriven(planned)
    after = build(planned)
    assert after.release_id != before.release_id
    assert (before.results, before.dead_letters) == (4, 5)
    assert (after.results, after.dead_letters, after.dead_by_class) == (7, 2, {"empty": 1, "rejected": 1})
    register, identity = planned.installation.register, planned.installation.register.version(planned.job, planned.version).identity
    earlier = register.get_release(before.release_id)
    verify_release(planned.installation.releases(job=planned.job), earlier, identity=identity)
    assert earlier.state is ReleaseState.PUBLISHED


def test_a_redrive_that_recovers_nothing_leads_to_a_new_release_too(planned: Planned) -> None:
    before = build(planned)
    redriven(planned, behaviours=[{"act": "invalid", "record": record} for record in ("a2", "a3", "b1")])
    assert build(planned).release_id != before.release_id
    assert build(planned).dead_by_class == {"empty": 1, "rejected": 1, "not_json": 3}


def test_a_commit_that_is_repeated_leads_to_the_release_that_exists(planned: Planned) -> None:
    before = build(planned)
    commit_all(planned)
    assert build(planned).release_id == before.release_id


def test_the_new_release_is_judged_anew_and_publishing_it_goes_forward(planned: Planned) -> None:
    before = planned.installation.aliases().read(planned.job)
    assert before is not None
    redriven(planned)
    build(planned)
    assert verdict(planned, checks=STRICTER).passed
    published = publish(planned.installation, job=planned.job, version=planned.version, alias=planned.job, by="anna")
    assert (published.changed, published.revision) == (True, before.revision + 1)
    assert published.release_id != before.release_id
    outcomes = read_alias(planned.job, root=planned.installation.settings.root).collect()["outcome"]
    assert sorted(outcomes) == ["dead_letter"] * 2 + ["result"] * 7


def test_readers_keep_the_earlier_release_while_the_redrive_is_open_and_until_the_new_one_is_published(planned: Planned) -> None:
    before = planned.installation.aliases().read(planned.job)
    reopen(planned)
    with pytest.raises(NotFinishedError, match="a redrive is open, and its earlier release stays"):
        build(planned)
    drive(planned).finish()
    commit_all(planned)
    assert planned.installation.aliases().read(planned.job) == before


def test_the_earlier_release_is_not_published_again_and_a_rollback_reaches_it(planned: Planned) -> None:
    earlier = build(planned).release_id
    redriven(planned)
    later = build(planned).release_id
    go(planned, checks=LENIENT)
    with pytest.raises(RefusedError, match="published once"):
        publish(planned.installation, job=planned.job, release_id=earlier, alias=planned.job, by="anna")
    report = rollback(planned.installation, job=planned.job, alias=planned.job, version=planned.version, reason="worse", by="anna")
    assert report.release_id == earlier
    assert planned.installation.register.get_release(later).state is ReleaseState.WITHDRAWN


def test_a_release_knows_whether_its_version_was_redriven_since(planned: Planned) -> None:
    register = planned.installation.register
    first = register.get_release(build(planned).release_id)
    assert is_of_last_round(planned.installation, first)
    reopen(planned)
    assert not is_of_last_round(planned.installation, first)
    drive(planned).finish()
    commit_all(planned)
    assert not is_of_last_round(planned.installation, first)
    assert is_of_last_round(planned.installation, register.get_release(build(planned).release_id))
