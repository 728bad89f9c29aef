"""The committer believes nobody, repeats itself without harm, and sends wanting logs back, a bounded number of times."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from batch_assets.core.errors import StaleGenerationError
from batch_assets.core.leasing import RETURNED_MAX, ShardState
from batch_assets.core.records import DeadClass, key_hash
from batch_assets.fleet.committer import Committer
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import ShardRow
from tests.support.versions import (
    SCHEMA,
    Planned,
    answered,
    claim,
    dead,
    failed,
    frozen_frame,
    installation_in,
    plan_by_hand,
    stage,
    write,
)

IDS = {1: ["a1", "a2", "a3"], 2: ["b1", "b2"]}


class CrashError(Exception):
    """The process dies here."""


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return installation_in(tmp_path)


@pytest.fixture
def planned(installation: Installation) -> Planned:
    return plan_by_hand(installation, IDS)


def leading(planned: Planned, *, holder: str = "run") -> int:
    """Take the lead, whoever has it."""
    register = planned.installation.register
    seen = register.lead(planned.job, planned.version)
    generation = register.take_lead(job=planned.job, version=planned.version, holder=holder, seen=seen)
    assert generation is not None
    return generation


def committer(planned: Planned, *, generation: int | None = None, crash_at: str | None = None) -> Committer:
    def failpoint(place: str) -> None:
        if place == crash_at:
            raise CrashError(place)

    generation = leading(planned) if generation is None else generation
    return Committer(planned.installation, job=planned.job, version=planned.version, generation=generation, failpoint=failpoint)


def commit_all(planned: Planned) -> list[ShardRow]:
    """Steps until nothing is staged."""
    commit, committed = committer(planned), []
    while planned.installation.register.staged(planned.job, planned.version, 1):
        committed += commit.step()
    return committed


def table(planned: Planned, *columns: str) -> pl.DataFrame:
    outcomes = planned.installation.outcomes(job=planned.job, version=planned.version, answer_schema=SCHEMA)
    return outcomes.read(columns=columns or None)


def ids(planned: Planned) -> list[str]:
    return sorted(table(planned, "record_id")["record_id"])


def shard(planned: Planned, number: int) -> ShardRow:
    (row,) = planned.installation.register.shards(planned.job, planned.version, [number])
    return row


# --- what a row is made of -----------------------------------------------------------------------------------------------------------


def test_staged_shards_are_committed_together_and_each_record_stands_in_the_table_once(planned: Planned) -> None:
    stage(planned)
    stage(planned, worker="w2")
    assert [(row.number, row.state) for row in committer(planned).step()] == [(1, ShardState.COMMITTED), (2, ShardState.COMMITTED)]
    assert ids(planned) == ["a1", "a2", "a3", "b1", "b2"]


def test_key_hash_acl_class_and_segment_come_from_the_frozen_input_and_the_answer_from_the_log(planned: Planned) -> None:
    stage(planned)
    commit_all(planned)
    (row,) = table(planned).filter(pl.col("record_id") == "a2").to_dicts()
    assert (row["key_hash"], row["acl"], row["record_class"], row["segment"]) == (key_hash("a2"), "acl of a2", "internal", "de")
    assert (row["category"], row["summary"], row["outcome"], row["record_digest"]) == ("bug", "about a2", "result", "digest of a2")
    assert (row["job_version"], row["origin_version"], row["shard"], row["round"], row["epoch"]) == (
        planned.version,
        planned.version,
        1,
        0,
        1,
    )
    assert (row["tokens_prompt"], row["tokens_cached"], row["tokens_output"], row["attempt"]) == (10, 4, 5, 1)
    assert row["recipe"] == planned.installation.register.version(planned.job, planned.version).recipe_digest


def test_the_worker_in_a_row_is_who_held_the_epoch_not_who_an_entry_claims_to_be(planned: Planned) -> None:
    stage(planned, worker="w7", leave_out=["a1"], also=lambda lease: [answered("a1", epoch=lease.epoch, worker="somebody else")])
    commit_all(planned)
    assert set(table(planned, "worker")["worker"]) == {"w7"}


def test_set_aside_records_become_dead_letters_with_no_attempt(installation: Installation) -> None:
    planned = plan_by_hand(installation, {1: ["a1"], 2: []}, set_aside={1: ["e1"], 2: ["e2", "e3"]})
    stage(planned)
    assert len(commit_all(planned)) == 2  # shard 2 has nothing to answer: the planner staged it, with 0 slots
    rows = table(planned).filter(pl.col("outcome") == "dead_letter").sort("record_id")
    assert rows.select("record_id", "dead_class", "error", "attempt", "category").rows() == [
        ("e1", "empty", "the text is blank", 0, None),
        ("e2", "empty", "the text is blank", 0, None),
        ("e3", "empty", "the text is blank", 0, None),
    ]


def test_a_worker_s_dead_letter_keeps_its_class_and_attempts(planned: Planned) -> None:
    stage(planned, leave_out=["a2"], also=lambda lease: [dead("a2", epoch=lease.epoch)])
    commit_all(planned)
    rows = table(planned, "record_id", "dead_class", "attempt", "outcome").filter(pl.col("outcome") == "dead_letter")
    assert rows.rows() == [("a2", "schema", 3, "dead_letter")]


def test_what_a_shard_came_to_is_counted(installation: Installation) -> None:
    planned = plan_by_hand(installation, {1: ["a1", "a2", "a3"]}, set_aside={1: ["e1"]})

    def entries(lease):
        return [
            failed("a1", epoch=lease.epoch),
            answered("a1", epoch=lease.epoch, attempt=2),
            answered("a1", epoch=lease.epoch, attempt=2),
            dead("a3", epoch=lease.epoch),
        ]

    stage(planned, leave_out=["a1", "a3"], also=entries)
    (row,) = commit_all(planned)
    stats = row.stats
    assert (stats["results"], stats["dead_letters"], stats["set_aside"]) == (2, 2, 1)
    assert stats["dead_by_class"] == {"empty": 1, "schema": 1}
    assert (stats["retried"], stats["redone"], stats["attempts_max"], stats["leases"]) == (1, 1, 3, 1)
    assert (stats["tokens_prompt"], stats["tokens_output"], stats["tokens_thrown_away"]) == (20, 10, 12)
    assert row.seconds == 1.5


# --- a log that does not answer its input --------------------------------------------------------------------------------------------


def test_a_log_that_lacks_one_id_goes_back_and_the_id_is_named(planned: Planned) -> None:
    stage(planned, leave_out=["a3"])
    assert committer(planned).step() == []
    row = shard(planned, 1)
    assert row.state is ShardState.PENDING
    assert row.returned_reason is not None
    assert "1 of 3" in row.returned_reason
    assert "a3" in row.returned_reason


def test_a_log_that_lacks_one_id_again_and_again_is_blocked(planned: Planned) -> None:
    for _ in range(RETURNED_MAX + 1):
        assert shard(planned, 1).state is ShardState.PENDING
        stage(planned, leave_out=["a3"])
        assert committer(planned).step() == []
    row = shard(planned, 1)
    assert row.state is ShardState.BLOCKED
    assert "a3" in (row.blocked_reason or "")
    assert claim(planned).shard == 2


def test_a_shard_that_went_back_is_committed_when_its_successor_supplies_what_was_missing(planned: Planned) -> None:
    stage(planned, leave_out=["a3"])
    committer(planned).step()
    stage(planned, worker="w2")
    assert [row.number for row in commit_all(planned)] == [1]
    assert ids(planned) == ["a1", "a2", "a3"]


def test_a_wanting_shard_does_not_keep_its_neighbours_from_being_committed(planned: Planned) -> None:
    stage(planned, leave_out=["a3"])
    stage(planned)
    assert [row.number for row in committer(planned).step()] == [2]


def test_a_worker_that_writes_an_id_of_another_shard_is_not_believed(planned: Planned) -> None:
    """The shard goes back; a sound successor finishes it; the foreign answer stands nowhere."""
    stage(planned, worker="liar", also=lambda lease: [answered("b1", epoch=lease.epoch, text='{"category":"bug","summary":"a lie"}')])
    assert committer(planned).step() == []
    assert "b1" in (shard(planned, 1).returned_reason or "")
    stage(planned, worker="w2")
    stage(planned, worker="w3")
    assert len(commit_all(planned)) == 2
    assert ids(planned) == ["a1", "a2", "a3", "b1", "b2"]
    assert "a lie" not in table(planned, "summary")["summary"].to_list()


def test_workers_that_go_on_writing_foreign_ids_get_the_shard_blocked(planned: Planned) -> None:
    for _ in range(RETURNED_MAX + 1):
        stage(planned, worker="liar", also=lambda lease: [answered(f"foreign {lease.epoch}", epoch=lease.epoch)])
        assert committer(planned).step() == []
    assert shard(planned, 1).state is ShardState.BLOCKED


@pytest.mark.parametrize(
    "text",
    [
        '{"category":"nonsense","summary":"x"}',
        '{"category":"bug"}',
        '{"category":"bug","summary":"x","acl":"everybody"}',
        '{"category":"bug","summary":"x","summary":"y"}',
        "not json",
        '{"category":"bug","summary":"\\ud800"}',
    ],
    ids=["enum", "missing", "wider acl", "key twice", "no json", "lone surrogate"],
)
def test_an_answer_that_the_worker_should_have_refused_is_refused_here(planned: Planned, text: str) -> None:
    stage(planned, leave_out=["a2"], also=lambda lease: [answered("a2", epoch=lease.epoch, text=text)])
    assert committer(planned).step() == []
    reason = shard(planned, 1).returned_reason or ""
    assert "a2" in reason
    assert "refused when they were validated again" in reason
    assert "nonsense" not in reason


@pytest.mark.parametrize("dead_class", ["too_long", "whatever"])
def test_a_dead_letter_of_a_class_that_is_not_the_worker_s_to_give_does_not_count(planned: Planned, dead_class: str) -> None:
    stage(planned, leave_out=["a2"], also=lambda lease: [dead("a2", epoch=lease.epoch, dead_class=dead_class)])
    assert committer(planned).step() == []
    assert shard(planned, 1).state is ShardState.PENDING


def test_entries_of_a_worker_that_overslept_are_void(planned: Planned) -> None:
    """Its shard was leased anew; what it still writes lies behind the successor's fence and changes nothing."""
    old = claim(planned, worker="sleeper")
    register = planned.installation.register
    assert register.expire(job=planned.job, version=planned.version, shard=1, epoch=old.epoch, renewals=0)
    lease = claim(planned, worker="w2")
    write(planned, lease, [answered("a1", epoch=lease.epoch)])
    log = planned.installation.shard_log(job=planned.job, version=planned.version, shard=1)
    late = log.writer(epoch=lease.epoch, next_slot=len(log.read(None)))
    late.put([dead("a2", epoch=old.epoch), answered("a3", epoch=old.epoch, text='{"category":"bug","summary":"late"}')])
    slots = write(planned, lease, [answered(record_id, epoch=lease.epoch) for record_id in ("a2", "a3")])
    register.stage(lease, slots=slots, seconds=1.0)
    commit_all(planned)
    assert dict(table(planned, "record_id", "summary").rows()) == {"a1": "about a1", "a2": "about a2", "a3": "about a3"}


def test_slots_behind_the_staged_ones_are_not_read(planned: Planned) -> None:
    lease = stage(planned, leave_out=["a3"])
    write(planned, lease, [answered("a3", epoch=lease.epoch)])
    assert committer(planned).step() == []


def test_a_frozen_input_that_changed_since_planning_blocks_its_shard_alone(planned: Planned) -> None:
    stage(planned)
    stage(planned)
    frozen = planned.installation.frozen_input(job=planned.job, version=planned.version, attempt="a1")
    path = Path(planned.installation.settings.root) / frozen.path(1)
    frozen_frame(["a1", "a2", "x9"]).write_parquet(path)
    assert [row.number for row in committer(planned).step()] == [2]
    assert shard(planned, 1).state is ShardState.BLOCKED
    assert "frozen input" in (shard(planned, 1).blocked_reason or "")


def test_a_log_with_a_gap_blocks_its_shard(planned: Planned) -> None:
    lease = stage(planned)
    root = Path(planned.installation.settings.root)
    (root / planned.job / "versions" / planned.version / "log" / f"shard-{lease.shard:05d}" / "00000001.arrow").unlink()
    assert committer(planned).step() == []
    assert shard(planned, lease.shard).state is ShardState.BLOCKED


def test_a_slot_whose_bytes_are_damaged_is_occupied_and_empty_so_its_answers_are_missing(planned: Planned) -> None:
    lease = stage(planned)
    root = Path(planned.installation.settings.root)
    path = root / planned.job / "versions" / planned.version / "log" / f"shard-{lease.shard:05d}" / "00000001.arrow"
    path.write_bytes(path.read_bytes()[:-9])
    assert committer(planned).step() == []
    assert "3 of 3" in (shard(planned, lease.shard).returned_reason or "")


# --- crashes -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before_merge", "before_commit"])
def test_killed_between_staged_and_committed_the_next_one_commits_it_once(planned: Planned, place: str) -> None:
    stage(planned)
    stage(planned)
    with pytest.raises(CrashError):
        committer(planned, crash_at=place).step()
    assert [shard(planned, number).state for number in (1, 2)] == [ShardState.STAGED] * 2
    assert [row.number for row in commit_all(planned)] == [1, 2]
    assert ids(planned) == ["a1", "a2", "a3", "b1", "b2"]


def test_a_commit_whose_acknowledgement_was_lost_is_repeated_without_harm(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(planned)
    generation = leading(planned)
    register = planned.installation.register
    real = type(register).commit

    def lost(self, **arguments):
        real(self, **arguments)
        raise CrashError

    monkeypatch.setattr(type(register), "commit", lost)
    with pytest.raises(CrashError):
        committer(planned, generation=generation).step()
    monkeypatch.undo()
    assert committer(planned, generation=generation).step() == []
    assert shard(planned, 1).state is ShardState.COMMITTED
    assert ids(planned) == ["a1", "a2", "a3"]


@pytest.mark.parametrize("place", ["before_merge", "before_commit"])
def test_a_committer_process_that_is_killed_leaves_nothing_doubled(tmp_path: Path, planned: Planned, place: str) -> None:
    """The same with a real process that ends without any clean-up."""
    stage(planned)
    stage(planned)
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from batch_assets.fleet.committer import Committer\n"
        "from tests.support.versions import installation_in\n"
        "folder, job, version, generation, place = sys.argv[1:]\n"
        "Committer(installation_in(Path(folder)), job=job, version=version, generation=int(generation),\n"
        "          failpoint=lambda at: os._exit(9) if at == place else None).step()\n"
    )
    arguments = [str(tmp_path), planned.job, planned.version, str(leading(planned)), place]
    assert subprocess.run([sys.executable, "-c", script, *arguments], check=False).returncode == 9
    assert len(commit_all(planned)) == 2
    assert ids(planned) == ["a1", "a2", "a3", "b1", "b2"]


def test_a_superseded_committer_neither_merges_nor_commits(planned: Planned) -> None:
    stage(planned)
    old = committer(planned)
    leading(planned, holder="another")
    with pytest.raises(StaleGenerationError):
        old.step()
    assert shard(planned, 1).state is ShardState.STAGED
    assert ids(planned) == []


def test_a_committer_superseded_after_its_merge_leaves_the_shard_to_the_next_one(planned: Planned) -> None:
    stage(planned)
    generation = leading(planned)

    def usurp(place: str) -> None:
        if place == "before_commit":
            leading(planned, holder="another")

    old = Committer(planned.installation, job=planned.job, version=planned.version, generation=generation, failpoint=usurp)
    with pytest.raises(StaleGenerationError):
        old.step()
    assert [row.number for row in commit_all(planned)] == [1]
    assert ids(planned) == ["a1", "a2", "a3"]


def test_many_small_shards_go_into_few_merges(installation: Installation) -> None:
    planned = plan_by_hand(installation, {number: [f"r{number}-{n}" for n in range(3)] for number in range(1, 41)})
    for _ in range(40):
        stage(planned)
    commit = committer(planned)
    steps: Sequence[int] = [len(commit.step()), len(commit.step()), len(commit.step())]
    assert sum(steps) == 40
    assert steps[-1] == 0
    assert len(ids(planned)) == len(set(ids(planned))) == 120


def test_every_worker_class_is_a_dead_class_that_the_planner_does_not_give() -> None:
    from batch_assets.fleet.shard_check import WORKER_CLASSES

    assert DeadClass.SCHEMA in WORKER_CLASSES
    assert DeadClass.EMPTY not in WORKER_CLASSES
