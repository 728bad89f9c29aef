"""Releases and verdicts in the register."""

import pytest

from batch_assets.core.errors import ConflictError, RefusedError
from batch_assets.core.leasing import ReleaseState
from batch_assets.stores.register import Register, ReleaseRow
from tests.support.registers import JOB, planned


@pytest.fixture
def version(register: Register) -> str:
    """A version without releases."""
    return planned(register)


def add(register: Register, version: str, release_id: str = "r-1", digest: str = "sha256:aa") -> ReleaseRow:
    return register.add_release(
        release_id=release_id,
        job=JOB,
        version=version,
        digest=digest,
        rows=30,
        uri="/root/r-1",
        recipe_digest="sha256:re",
        snapshot_digest="sha256:sn",
        counts={"results": 29, "dead_letters": 1},
    )


def test_a_release_is_a_candidate_first(register: Register, version: str):
    added = add(register, version)
    assert (added.state, added.first_published_at, added.counts["results"]) == (ReleaseState.CANDIDATE, None, 29)
    assert register.get_release("r-1") == added


def test_building_the_same_release_again_gives_the_registered_one(register: Register, version: str):
    first = add(register, version)
    register.mark_published("r-1")
    again = add(register, version)
    assert (again.created_at, again.state) == (first.created_at, ReleaseState.PUBLISHED)


def test_an_id_with_other_content_is_a_conflict(register: Register, version: str):
    add(register, version)
    with pytest.raises(ConflictError, match="expected digest sha256:aa, found digest sha256:bb"):
        add(register, version, digest="sha256:bb")
    assert register.get_release("r-1").digest == "sha256:aa"


def test_an_unknown_release_is_refused(register: Register):
    with pytest.raises(RefusedError, match="no release 'r-9'"):
        register.get_release("r-9")


def test_the_first_publication_is_remembered(register: Register, version: str):
    add(register, version)
    assert register.mark_published("r-1")
    first = register.get_release("r-1").first_published_at
    assert register.mark_published("r-1")
    assert register.get_release("r-1").first_published_at == first


def test_a_withdrawn_release_comes_back_by_a_rollback_only(register: Register, version: str):
    add(register, version)
    assert not register.mark_withdrawn("r-1")
    register.mark_published("r-1")
    assert register.mark_withdrawn("r-1")
    assert register.mark_withdrawn("r-1")
    assert not register.mark_published("r-1")
    assert register.get_release("r-1").state is ReleaseState.WITHDRAWN
    assert register.mark_published("r-1", rollback=True)


def test_releases_are_listed_newest_first(register: Register, version: str):
    for release_id in ("r-2", "r-1", "r-3"):
        add(register, version, release_id, f"sha256:{release_id}")
    assert [row.release_id for row in register.releases(JOB)] == ["r-3", "r-1", "r-2"]
    assert register.releases("other") == []


def test_all_verdicts_are_kept_and_the_latest_counts(register: Register, version: str):
    add(register, version)
    assert register.latest_verdict("r-1") is None
    failed = register.add_verdict(release_id="r-1", release_digest="sha256:aa", passed=False, payload={"findings": ["coverage"]})
    passed = register.add_verdict(release_id="r-1", release_digest="sha256:aa", passed=True, payload={"findings": []})
    assert register.latest_verdict("r-1") == passed
    assert register.verdicts("r-1") == [failed, passed]
    assert failed.payload == {"findings": ["coverage"]}
