"""Job versions in the register: identity, numbers, activation, holds, names."""

from functools import partial

import pytest

from batch_assets.core.errors import RefusedError
from batch_assets.core.leasing import HoldReason, ShardState, VersionState
from batch_assets.core.spec import EngineBuild
from batch_assets.stores.register import CommittedShard, Register
from tests.register.conftest import OpenRegister
from tests.support.registers import BUILD, JOB, activate, planned, planned_shards, spec
from tests.support.threads import at_once


def test_registering_the_same_spec_again_gives_the_same_version(register: Register):
    first = register.register_version(spec(), kind="full")
    again = register.register_version(spec(), kind="full", by_sensor=True)
    assert first == again
    assert first.state is VersionState.PLANNING
    assert first.name == f"v0001-{spec().identity.partition(':')[2][:6]}"


def test_numbers_count_up_per_job(register: Register):
    names = [register.register_version(spec(prompt=prompt), kind="full").number for prompt in "abc"]
    other = register.register_version(spec(job="other"), kind="full").number
    assert (names, other) == ([1, 2, 3], 1)


def test_two_planners_at_once_register_one_version(open_register: OpenRegister):
    registers = [open_register() for _ in range(4)]
    rows = at_once([partial(register.register_version, spec(), kind="full") for register in registers])
    assert all(row == rows[0] for row in rows)
    assert registers[0].versions(JOB) == [rows[0]]


def test_versions_registered_at_once_have_different_numbers(open_register: OpenRegister):
    rows = at_once([partial(open_register().register_version, spec(prompt=prompt), kind="full") for prompt in "abcd"])
    assert sorted(row.number for row in rows) == [1, 2, 3, 4]


def equal(register: Register, **changes):
    wanted = spec()
    arguments = {
        "job": JOB,
        "recipe_digest": wanted.recipe.digest,
        "input_rules_digest": wanted.input_rules.digest,
        "engine_build": BUILD,
        "snapshot_digest": wanted.snapshot.digest,
    }
    return register.find_equal(**(arguments | changes))


def test_an_equal_version_is_found_whatever_its_base_the_newest_first(register: Register):
    register.register_version(spec(), kind="full")
    newer = register.register_version(spec(base="r-1"), kind="incremental")
    assert equal(register) == newer


@pytest.mark.parametrize(
    "changes",
    [
        {"job": "other"},
        {"recipe_digest": spec(prompt="q").recipe.digest},
        {"input_rules_digest": "sha256:other"},
        {"engine_build": EngineBuild(engine="scripted", version="2", guidance="none")},
        {"snapshot_digest": spec(snapshot="b").snapshot.digest},
        {"pilot_records": 100},
    ],
)
def test_a_version_that_differs_in_anything_that_decides_answers_is_not_equal(register: Register, changes):
    register.register_version(spec(), kind="full")
    assert equal(register, **changes) is None


def test_a_pilot_is_equal_to_a_pilot_of_its_size_only(register: Register):
    pilot = register.register_version(spec(pilot_records=100), kind="pilot")
    assert equal(register, pilot_records=100) == pilot
    assert equal(register, pilot_records=50) is None
    assert equal(register) is None


def test_activation_makes_the_shards_and_counts_in_one_step(register: Register):
    version = register.register_version(spec(), kind="full").name
    assert activate(register, version, planned_shards(2, to_answer=8))
    row = register.version(JOB, version)
    assert (row.state, row.input_attempt, row.records, row.to_answer) == (VersionState.ACTIVE, "a1", 20, 16)
    assert (row.set_aside_by_class, row.surplus, row.shards) == ({"empty": 4}, 0, 2)
    assert [(shard.number, shard.state, shard.hash_low) for shard in register.shards(JOB, version)] == [
        (1, ShardState.PENDING, 100),
        (2, ShardState.PENDING, 200),
    ]


def test_hash_ranges_are_kept_over_all_64_bits(register: Register):
    version = register.register_version(spec(), kind="full").name
    shard = planned_shards(1)[0]
    widest = type(shard)(number=1, rows=10, to_answer=10, hash_low=-(2**63), hash_high=2**63 - 1, input_sha256="x")
    activate(register, version, [widest])
    row = register.shards(JOB, version)[0]
    assert (row.hash_low, row.hash_high) == (-(2**63), 2**63 - 1)


def test_a_second_attempt_is_told_to_ignore_its_own_work(register: Register):
    version = register.register_version(spec(), kind="full").name
    activate(register, version, planned_shards(2), attempt="first")
    assert not activate(register, version, planned_shards(3), attempt="second")
    assert register.version(JOB, version).input_attempt == "first"
    assert len(register.shards(JOB, version)) == 2


def test_the_same_attempt_repeated_after_a_lost_acknowledgement_is_done_already(register: Register):
    version = register.register_version(spec(), kind="full").name
    activate(register, version, planned_shards(2))
    assert activate(register, version, planned_shards(2))
    assert len(register.shards(JOB, version)) == 2


def test_of_attempts_at_once_exactly_one_is_active_with_its_own_shards(open_register: OpenRegister):
    version = open_register().register_version(spec(), kind="full").name
    attempts = {f"a{size}": planned_shards(size) for size in (2, 3, 4)}
    won = at_once([partial(activate, open_register(), version, shards, attempt=name) for name, shards in attempts.items()])
    register = open_register()
    winner = register.version(JOB, version).input_attempt
    assert sorted(won) == [False, False, True]
    assert len(register.shards(JOB, version)) == len(attempts[winner])


def test_counts_that_do_not_add_up_are_no_plan(register: Register):
    version = register.register_version(spec(), kind="full").name
    with pytest.raises(AssertionError, match="accounted for"):
        register.activate(job=JOB, version=version, attempt="a", shards=planned_shards(1), records=11, surplus=0, set_aside_by_class={})


def test_a_shard_without_records_to_answer_is_born_staged_with_no_slots(register: Register):
    version = register.register_version(spec(), kind="full").name
    activate(register, version, planned_shards(1, to_answer=0))
    shard = register.staged(JOB, version, 10)[0]
    assert (shard.state, shard.staged_slots, shard.staged_rounds) == (ShardState.STAGED, 0, {0: 0})


def test_a_version_is_found_by_everything_that_people_call_it(register: Register):
    first = register.register_version(spec(prompt="a"), kind="full")
    second = register.register_version(spec(prompt="b"), kind="full")
    hexadecimal = first.name.partition("-")[2]
    assert {register.resolve(JOB, said).id for said in ("v1", "1", "v0001", hexadecimal, first.name)} == {first.id}
    assert register.resolve(JOB, "latest") == second


@pytest.mark.parametrize("selector", ["v9", "latest ", "abcdef0", "", "v", "-1", "²"])
def test_an_unknown_version_is_refused_with_what_there_is(register: Register, selector: str):
    for prompt in "ab":
        register.register_version(spec(prompt=prompt), kind="full")
    known = [row.name for row in register.versions(JOB)][::-1]
    with pytest.raises(RefusedError, match=f"one of {known[0]}, {known[1]}"):
        register.resolve(JOB, selector)


def test_a_job_that_was_never_planned_is_refused_with_what_to_do(register: Register):
    with pytest.raises(RefusedError, match="plan it first"):
        register.version("nothing", "v0001-000000")
    with pytest.raises(RefusedError, match="plan it first"):
        register.hold_version(job="nothing", version="v0001-000000", reason=HoldReason.CANCELLED)


def test_jobs_are_listed_by_name(register: Register):
    for job in ("b", "a"):
        register.register_version(spec(job=job), kind="full")
    assert register.jobs() == ["a", "b"]


def test_a_version_born_held_becomes_active_when_it_is_lifted(register: Register):
    version = planned(register, hold=HoldReason.APPROVAL)
    row = register.version(JOB, version)
    assert (row.state, row.hold) == (VersionState.HELD, HoldReason.APPROVAL)
    assert register.claim(job=JOB, version=version, worker="w") is None
    assert register.lift_version_hold(job=JOB, version=version)
    assert (register.version(JOB, version).state, register.version(JOB, version).hold) == (VersionState.ACTIVE, None)
    assert register.claim(job=JOB, version=version, worker="w") is not None


def test_a_held_version_keeps_its_first_reason(register: Register):
    version = planned(register, hold=HoldReason.APPROVAL)
    assert not register.hold_version(job=JOB, version=version, reason=HoldReason.CANCELLED)
    assert register.version(JOB, version).hold is HoldReason.APPROVAL


def test_lifting_what_is_not_held_changes_nothing(register: Register):
    version = planned(register)
    assert not register.lift_version_hold(job=JOB, version=version)
    assert not register.resume_job(JOB)


def test_a_hold_of_the_job_and_one_of_its_version_are_lifted_apart(register: Register):
    version = planned(register)
    register.hold_version(job=JOB, version=version, reason=HoldReason.CANCELLED, note="ctrl-c", by="kim")
    register.hold_job(JOB, by="kim", note="bad answers", reason=HoldReason.ROLLBACK)
    hold = register.job_hold(JOB)
    assert hold is not None
    assert (hold.reason, hold.by, hold.note) == (HoldReason.ROLLBACK, "kim", "bad answers")
    assert register.resume_job(JOB)
    assert register.job_hold(JOB) is None
    assert register.version(JOB, version).hold_note == "ctrl-c"
    assert register.claim(job=JOB, version=version, worker="w") is None
    register.lift_version_hold(job=JOB, version=version)
    assert register.claim(job=JOB, version=version, worker="w") is not None


def test_a_job_can_be_held_before_anything_is_planned(register: Register):
    register.hold_job(JOB, by="kim", note="wait")
    version = planned(register)
    assert register.claim(job=JOB, version=version, worker="w") is None


def test_a_version_is_finished_only_when_every_shard_is_committed(register: Register):
    version = planned(register, shards=2)
    generation = register.take_lead(job=JOB, version=version, holder="h", seen=None)
    for number in (1, 2):
        assert not register.finish_version(job=JOB, version=version)
        lease = register.claim(job=JOB, version=version, worker="w")
        register.stage(lease, slots=1, seconds=1)
        register.commit(job=JOB, version=version, generation=generation, shards=[CommittedShard(number=number, round=0)])
    assert register.finish_version(job=JOB, version=version)
    assert register.finish_version(job=JOB, version=version)
    assert register.version(JOB, version).state is VersionState.FINISHED
