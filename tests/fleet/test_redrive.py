"""A redrive over real logs, register and table: what is asked again, what it comes to, and that nothing else changes, whatever crashes."""

from collections.abc import Iterable
from pathlib import Path

import polars as pl
import pytest

from batch_assets.core.errors import ConflictError, NotFinishedError, UnfitEnvironmentError
from batch_assets.core.leasing import RETURNED_MAX, ShardState, VersionState
from batch_assets.core.records import DeadClass
from batch_assets.core.shard_log import Entry, Reopen, fold
from batch_assets.fleet.committer import Committer
from batch_assets.flows.redrive import REDRIVER
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import Lease, ShardRow
from tests.support.fleets import FakeClock, Run, finish
from tests.support.redrives import IDS, CrashError, commit_all, finished_with_dead_letters, leading, reopen
from tests.support.versions import SCHEMA, Planned, answered, claim, dead, installation_in, stage, write
from tests.support.workers import drive, folded, plan


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return installation_in(tmp_path)


@pytest.fixture
def planned(installation: Installation) -> Planned:
    return finished_with_dead_letters(installation)


def rows(planned: Planned) -> dict[str, tuple[str, str | None, int, int]]:
    """record -> (outcome, class, attempts, round); each record once."""
    outcomes = planned.installation.outcomes(job=planned.job, version=planned.version, answer_schema=SCHEMA)
    frame = outcomes.read(columns=["record_id", "outcome", "dead_class", "attempt", "round"])
    assert frame["record_id"].is_unique().all()
    return {record_id: tuple(rest) for record_id, *rest in frame.iter_rows()}


def shard(planned: Planned, number: int) -> ShardRow:
    (row,) = planned.installation.register.shards(planned.job, planned.version, [number])
    return row


FIRST = {
    "a1": ("result", None, 1, 0),
    "a2": ("dead_letter", "schema", 3, 0),
    "a3": ("dead_letter", "timed_out", 3, 0),
    "a4": ("dead_letter", "rejected", 1, 0),
    "e1": ("dead_letter", "empty", 0, 0),
    "b1": ("dead_letter", "schema", 3, 0),
    "b2": ("result", None, 1, 0),
    "c1": ("result", None, 1, 0),
    "c2": ("result", None, 1, 0),
}


# --- what is opened ------------------------------------------------------------------------------------------------------------------


def test_by_default_dead_letters_of_transient_classes_are_opened_in_a_new_round_of_their_shards(planned: Planned) -> None:
    assert rows(planned) == FIRST
    report = reopen(planned)
    assert (report.records, report.records_by_class, report.shards) == (3, {"schema": 2, "timed_out": 1}, (1, 2))
    assert [(shard(planned, number).state, shard(planned, number).round) for number in (1, 2, 3)] == [
        (ShardState.PENDING, 1),
        (ShardState.PENDING, 1),
        (ShardState.COMMITTED, 0),
    ]
    assert planned.installation.register.version(planned.job, planned.version).state is VersionState.ACTIVE
    assert rows(planned) == FIRST


@pytest.mark.parametrize("named", [DeadClass.TIMED_OUT, DeadClass.REJECTED])
def test_only_the_named_class_is_opened(planned: Planned, named: DeadClass) -> None:
    """A class that is permanent by rule may be named: a new engine setting or a mended tokenizer is a person's to judge."""
    report = reopen(planned, named)
    assert report.records_by_class == {named.value: 1}
    assert set(folded(planned, 1).reopened) == ({"a3"} if named is DeadClass.TIMED_OUT else {"a4"})


def test_nothing_of_the_classes_opens_nothing(planned: Planned) -> None:
    report = reopen(planned, DeadClass.NOT_JSON)
    assert (report.records, report.shards) == (0, ())
    assert planned.installation.register.version(planned.job, planned.version).state is VersionState.FINISHED


def test_the_log_gets_one_slot_with_the_redrive_s_fence_and_the_ids(planned: Planned) -> None:
    staged = shard(planned, 1).staged_slots
    reopen(planned)
    slots = planned.installation.shard_log(job=planned.job, version=planned.version, shard=1).read(None)
    assert staged is not None
    (fence, entry) = slots[staged] or (None, None)
    assert (fence.epoch, fence.round, fence.worker) == (2, 1, REDRIVER)  # type: ignore[union-attr]
    assert entry == Reopen(epoch=2, round=1, record_ids=("a2", "a3"))
    assert len(slots) == staged + 1


# --- what it comes to ----------------------------------------------------------------------------------------------------------------


def test_workers_answer_only_what_was_reopened_with_attempts_from_the_beginning(planned: Planned) -> None:
    reopen(planned)
    worker = drive(
        planned, script={"behaviours": [{"act": "invalid", "record": "a3"}, {"act": "invalid", "record": "b1", "attempts_max": 2}]}
    )
    worker.finish()
    assert sorted(worker.engine.asked) == [("a2", 1), ("a3", 1), ("a3", 2), ("a3", 3), ("b1", 1), ("b1", 2), ("b1", 3)]
    commit_all(planned)
    assert rows(planned) == FIRST | {
        "a2": ("result", None, 1, 1),
        "a3": ("dead_letter", "not_json", 3, 1),
        "b1": ("result", None, 3, 1),
    }
    assert planned.installation.register.version(planned.job, planned.version).state is VersionState.FINISHED


def test_statistics_are_those_of_the_whole_shard_over_all_rounds(planned: Planned) -> None:
    reopen(planned)
    drive(planned).finish()
    (first, second) = commit_all(planned)
    stats = first.stats
    assert (stats["results"], stats["dead_letters"], stats["dead_by_class"]) == (3, 2, {"empty": 1, "rejected": 1})
    assert (stats["reopened"], stats["recovered"], stats["retried"]) == (2, 2, 2)
    assert stats["failures_by_class"] == {"schema": 3}
    assert stats["tokens_thrown_away"] == 21
    assert (second.stats["reopened"], second.stats["recovered"]) == (1, 1)


def test_a_second_redrive_asks_what_is_still_dead_and_leaves_what_the_first_one_answered(planned: Planned) -> None:
    reopen(planned)
    drive(planned, script={"behaviours": [{"act": "invalid", "record": "a3"}]}).finish()
    commit_all(planned)
    report = reopen(planned)
    assert (report.records, report.shards) == (1, (1,))
    drive(planned).finish()
    commit_all(planned)
    assert rows(planned) == FIRST | {"a2": ("result", None, 1, 1), "a3": ("result", None, 1, 2), "b1": ("result", None, 1, 1)}
    assert shard(planned, 1).stats["reopened"] == 3


def test_the_supervisor_leads_a_redrive_as_any_other_work_and_progress_reaches_the_total_once(planned: Planned) -> None:
    reopen(planned)
    run = Run(planned)
    assert run.fleet is not None
    run.fleet._answer_one = lambda worker: drive_one(planned, worker)  # type: ignore[method-assign]
    report = finish(run.turns(), run.clock)
    assert report.committed == (1, 2, 3)
    assert {row[0] for row in rows(planned).values() if row[3] == 1} == {"result"}
    assert [look.rows for look in run.looks if look.shards_done == 3] == [9] * len([look for look in run.looks if look.shards_done == 3])
    assert all(look.rows < look.total for look in run.looks if look.shards_done < 3)


def drive_one(planned: Planned, worker: str) -> None:
    """A worker that answers one shard's open records by hand."""
    lease = planned.installation.register.claim(job=planned.job, version=planned.version, worker=worker)
    if lease is not None:
        answer_open(planned, lease)


def answer_open(planned: Planned, lease: Lease, *, also: Iterable[Entry] = ()) -> None:
    open_ids = [each for each in planned.ids[lease.shard] if not folded(planned, lease.shard).is_terminal(each)]
    slots = write(planned, lease, [*also, *(answered(each, epoch=lease.epoch, worker=lease.worker) for each in open_ids)])
    planned.installation.register.stage(lease, slots=slots, seconds=1.0)


# --- faults --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before_merge", "before_commit"])
def test_a_redrive_whose_commit_is_repeated_changes_nothing(planned: Planned, place: str) -> None:
    """Killed before the MERGE, or between it and the register: whoever comes next commits it once."""
    reopen(planned)
    drive(planned).finish()
    with pytest.raises(CrashError):
        commit_all(planned, crash_at=place)
    between = rows(planned)
    commit_all(planned)
    after = rows(planned)
    assert after == FIRST | {"a2": ("result", None, 1, 1), "a3": ("result", None, 1, 1), "b1": ("result", None, 1, 1)}
    assert between == (FIRST if place == "before_merge" else after)


def test_a_redrive_killed_between_the_logs_and_the_register_is_completed_by_the_next_one(planned: Planned) -> None:
    def crash(place: str) -> None:
        raise CrashError(place)

    with pytest.raises(CrashError):
        reopen(planned, DeadClass.SCHEMA, failpoint=crash)
    assert {shard(planned, number).state for number in (1, 2, 3)} == {ShardState.COMMITTED}
    assert reopen(planned).records == 3
    log = planned.installation.shard_log(job=planned.job, version=planned.version, shard=1)
    assert fold(log.read(None), staged_rounds=shard(planned, 1).staged_rounds).reopened == {"a2": 1, "a3": 1}
    drive(planned).finish()
    commit_all(planned)
    assert {record for record, row in rows(planned).items() if row[3] == 1} == {"a2", "a3", "b1"}


def test_the_same_redrive_again_after_such_a_crash_puts_nothing_twice(planned: Planned) -> None:
    def crash(place: str) -> None:
        raise CrashError(place)

    with pytest.raises(CrashError):
        reopen(planned, failpoint=crash)
    log = planned.installation.shard_log(job=planned.job, version=planned.version, shard=1)
    before = len(log.read(None))
    reopen(planned)
    assert len(log.read(None)) == before


def test_a_second_redrive_while_one_is_open_is_refused_in_words(planned: Planned) -> None:
    reopen(planned)
    with pytest.raises(NotFinishedError, match=r"a redrive of .* is open: 2 of its shards"):
        reopen(planned)
    with pytest.raises(NotFinishedError, match="--version"):
        reopen(planned, DeadClass.REJECTED)


def test_a_version_that_is_being_answered_is_not_redriven(installation: Installation) -> None:
    planned = plan(installation, IDS)
    stage(planned)
    with pytest.raises(NotFinishedError, match="not all known"):
        reopen(planned)


def test_a_version_whose_last_run_was_killed_before_it_said_finished_is(planned: Planned) -> None:
    register = planned.installation.register
    reopen(planned)
    drive(planned, script={"behaviours": [{"act": "invalid", "record": "a3"}]}).finish()
    generation = leading(planned)
    Committer(planned.installation, job=planned.job, version=planned.version, generation=generation).step()
    register.leave_lead(job=planned.job, version=planned.version, generation=generation)
    assert register.version(planned.job, planned.version).state is VersionState.ACTIVE
    assert reopen(planned).records == 1


def test_while_somebody_leads_nothing_is_opened(planned: Planned) -> None:
    register, clock = planned.installation.register, FakeClock()
    generation = leading(planned)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        register.renew_lead(job=planned.job, version=planned.version, generation=generation)

    with pytest.raises(ConflictError, match="being supervised"):
        reopen(planned, clock=clock, sleep=sleep)
    assert shard(planned, 1).round == 0


def test_a_leader_that_died_without_leaving_is_waited_for_one_lease(planned: Planned) -> None:
    clock = FakeClock()
    leading(planned)
    assert reopen(planned, clock=clock, sleep=clock.sleep).records == 3


def test_what_the_last_holder_puts_late_is_void_behind_the_redrive_s_fence(planned: Planned) -> None:
    """It overslept since the first round; its answer does not count, nor does its word that the record is dead."""
    reopen(planned)
    log = planned.installation.shard_log(job=planned.job, version=planned.version, shard=1)
    late = log.writer(epoch=1, next_slot=len(log.read(None)))
    late.put([answered("a2", epoch=1, text='{"category":"bug","summary":"late"}'), dead("a3", epoch=1)])
    assert folded(planned, 1).reopened == {"a2": 1, "a3": 1}
    assert not any(folded(planned, 1).is_terminal(record_id) for record_id in ("a2", "a3"))


def test_a_worker_of_the_new_round_that_answers_what_was_not_reopened_is_not_believed(planned: Planned) -> None:
    reopen(planned, DeadClass.TIMED_OUT)
    lease = claim(planned)
    lie = '{"category":"bug","summary":"a lie"}'
    answer_open(planned, lease, also=[answered(each, epoch=lease.epoch, text=lie) for each in ("a1", "a2", "e1")])
    commit_all(planned)
    assert shard(planned, 1).returned == 1  # e1 is not a worker's to answer
    answer_open(planned, claim(planned, worker="w2"))
    commit_all(planned)
    assert rows(planned) == FIRST | {"a3": ("result", None, 1, 1)}


def test_a_reopened_record_that_the_log_lacks_sends_the_shard_back_and_at_last_blocks_it(planned: Planned) -> None:
    reopen(planned)
    for _ in range(RETURNED_MAX + 1):
        lease = claim(planned)
        assert lease.shard == 1
        planned.installation.register.stage(lease, slots=write(planned, lease, []), seconds=1.0)
        commit_all(planned)
    assert shard(planned, 1).state is ShardState.BLOCKED
    assert "2 of 4 ids" in (shard(planned, 1).blocked_reason or "")
    assert rows(planned) == FIRST


def test_a_redrive_entry_that_no_redrive_wrote_opens_nothing(installation: Installation) -> None:
    planned = plan(installation, {1: ["a1", "a2"]})

    def forged(lease: Lease) -> Iterable[Entry]:
        yield dead("a1", epoch=lease.epoch)
        yield Reopen(lease.epoch, 0, ("a1",))
        yield Reopen(lease.epoch, 1, ("a1",))

    stage(planned, leave_out=["a1"], also=forged)
    found = folded(planned, 1)
    assert (set(found.dead), found.reopened, found.void_entries) == ({"a1"}, {}, 2)


def test_a_log_that_lost_its_dead_letters_is_not_redriven(planned: Planned) -> None:
    root = Path(planned.installation.settings.root)
    path = root / planned.job / "versions" / planned.version / "log" / "shard-00001" / "00000001.arrow"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UnfitEnvironmentError, match="a2, a3"):
        reopen(planned)
    assert shard(planned, 1).state is ShardState.COMMITTED
    assert planned.installation.register.version(planned.job, planned.version).state is VersionState.FINISHED


def test_acl_class_and_hash_of_a_redriven_row_are_the_frozen_input_s(planned: Planned) -> None:
    reopen(planned)
    drive(planned).finish()
    commit_all(planned)
    outcomes = planned.installation.outcomes(job=planned.job, version=planned.version, answer_schema=SCHEMA)
    (row,) = outcomes.read().filter(pl.col("record_id") == "a2").to_dicts()
    assert (row["acl"], row["record_class"], row["record_digest"], row["job_version"]) == (
        "acl of a2",
        "internal",
        "digest of a2",
        planned.version,
    )
