"""The supervisor lease: one leader per version, and followers that take over only from one that is silent."""

from functools import partial

import pytest

from batch_assets.core.errors import StaleGenerationError
from batch_assets.stores.register import CommittedShard, LeadRow, Register
from tests.register.conftest import OpenRegister
from tests.support.registers import JOB, planned
from tests.support.threads import at_once


@pytest.fixture
def version(register: Register) -> str:
    """A version that nobody leads."""
    return planned(register)


def take(register: Register, version: str, holder: str, seen: LeadRow | None = None) -> int | None:
    return register.take_lead(job=JOB, version=version, holder=holder, seen=seen)


def test_the_first_to_ask_leads_under_generation_one(register: Register, version: str):
    assert register.lead(JOB, version) is None
    assert take(register, version, "a") == 1
    assert take(register, version, "b") is None
    assert register.lead(JOB, version) == LeadRow(holder="a", generation=1, renewals=0, released=False)


def test_of_supervisors_that_start_at_once_one_leads(open_register: OpenRegister):
    version = planned(open_register())
    generations = at_once([partial(take, open_register(), version, holder) for holder in "abcd"])
    assert sorted(generations, key=str) == [1, None, None, None]


def test_a_lead_that_was_renewed_since_it_was_seen_is_not_taken(register: Register, version: str):
    take(register, version, "a")
    seen = register.lead(JOB, version)
    register.renew_lead(job=JOB, version=version, generation=1)
    assert take(register, version, "b", seen) is None
    register.renew_lead(job=JOB, version=version, generation=1)


def test_a_lead_that_is_still_as_it_was_seen_is_taken_and_the_old_one_is_stale(register: Register, version: str):
    take(register, version, "a")
    assert take(register, version, "b", register.lead(JOB, version)) == 2
    for act in (register.renew_lead, register.leave_lead, register.check_generation):
        with pytest.raises(StaleGenerationError, match="generation held 1, current 2"):
            act(job=JOB, version=version, generation=1)
    register.renew_lead(job=JOB, version=version, generation=2)
    register.check_generation(job=JOB, version=version, generation=2)


def test_of_followers_that_take_over_at_once_one_leads(open_register: OpenRegister):
    register = open_register()
    version = planned(register)
    take(register, version, "a")
    seen = register.lead(JOB, version)
    generations = at_once([partial(take, open_register(), version, holder, seen) for holder in "bcde"])
    assert sorted(generations, key=str) == [2, None, None, None]


def test_of_a_renewal_and_a_take_over_at_once_one_wins(open_register: OpenRegister):
    leader, follower = open_register(), open_register()
    version = planned(leader)
    generation = take(leader, version, "a")

    def renewed() -> bool:
        try:
            leader.renew_lead(job=JOB, version=version, generation=generation)
        except StaleGenerationError:
            return False
        return True

    for _ in range(20):
        seen = follower.lead(JOB, version)
        kept, taken = at_once([renewed, partial(take, follower, version, "b", seen)])
        assert kept == (taken is None)
        generation = generation if kept else taken


def test_a_lead_that_was_left_is_free_at_once(register: Register, version: str):
    take(register, version, "a")
    register.leave_lead(job=JOB, version=version, generation=1)
    register.leave_lead(job=JOB, version=version, generation=1)
    with pytest.raises(StaleGenerationError):
        register.renew_lead(job=JOB, version=version, generation=1)
    with pytest.raises(StaleGenerationError):
        register.check_generation(job=JOB, version=version, generation=1)
    assert take(register, version, "b") == 2


def test_a_left_lead_commits_nothing(register: Register, version: str):
    take(register, version, "a")
    register.leave_lead(job=JOB, version=version, generation=1)
    with pytest.raises(StaleGenerationError):
        register.commit(job=JOB, version=version, generation=1, shards=[CommittedShard(number=1, round=0)])


def test_the_same_name_asking_again_does_not_lead_twice(register: Register, version: str):
    """A second process under an old name must not share a generation with the first."""
    take(register, version, "a")
    assert take(register, version, "a") is None


def test_one_counter_shows_renewals_and_take_overs_alike(register: Register, version: str):
    take(register, version, "a")
    counters = [register.lead(JOB, version).renewals]
    register.renew_lead(job=JOB, version=version, generation=1)
    counters.append(register.lead(JOB, version).renewals)
    take(register, version, "b", register.lead(JOB, version))
    counters.append(register.lead(JOB, version).renewals)
    assert counters == [0, 1, 2]


def test_each_version_has_a_lead_of_its_own(register: Register, version: str):
    other = planned(register, prompt="q")
    assert (take(register, version, "a"), take(register, other, "b")) == (1, 1)
