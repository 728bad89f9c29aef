"""What reaches the outcomes table: what a log says of its own shard, once, under the present leader, before SQL calls it committed."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import polars as pl
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from batch_assets.core.answers import AnswerChecker
from batch_assets.core.errors import StaleGenerationError
from batch_assets.core.leasing import LeaseEnd, ShardState
from batch_assets.core.records import DeadClass, key_hash
from batch_assets.core.shard_log import Answered, Dead, Entry, Fence, fold
from batch_assets.fleet.committer import Committer
from batch_assets.fleet.shard_check import CheckedShard, ShardFacts, WantingShard, check_shard
from batch_assets.stores.installation import Installation
from batch_assets.stores.outcomes import OutcomeFile, Outcomes, OutcomesWrongError, SourceRefusedError, outcomes_schema
from batch_assets.stores.register import Lease, Register, ShardRow
from tests.rules.efforts import Effort
from tests.rules.fold_model import ModelLog
from tests.rules.memory_objects import MemoryObjects
from tests.support import outcome_rows
from tests.support.jobs import settings_in
from tests.support.versions import SCHEMA, Planned, answer_text, answered, dead, frozen_frame, plan_by_hand, stage, write

CHECKER = AnswerChecker(SCHEMA)
COLUMNS = outcomes_schema(SCHEMA)

# --- one shard ------------------------------------------------------------------------------------------------------------------------

OWN, SET_ASIDE, FOREIGN = ["a", "b", "c"], ["s"], ["x", "s"]
EPOCH = 3  # of the lease that staged it
FROZEN = frozen_frame(OWN, set_aside=SET_ASIDE)

any_ids = st.sampled_from([*OWN * 4, *FOREIGN])
epochs = st.integers(1, EPOCH)
entries: st.SearchStrategy[Entry] = st.one_of(
    st.builds(lambda record_id, epoch: answered(record_id, epoch=epoch, worker="somebody else"), any_ids, epochs),
    st.builds(lambda record_id, epoch: answered(record_id, epoch=epoch, text='{"acl": "all"}'), any_ids, epochs),
    st.builds(
        lambda record_id, epoch, why: dead(record_id, epoch=epoch, dead_class=why), any_ids, epochs, st.sampled_from(["schema", "empty"])
    ),
    st.builds(lambda epoch: Fence(epoch, 0, f"w{epoch}", 8, None), epochs),
)
endings = st.permutations([answered(record_id, epoch=EPOCH) for record_id in OWN])


def expected_rows(slots: Sequence[Sequence[Entry]]) -> dict[str, Answered | Dead] | None:
    """What each record to answer came to; None when the shard must go back."""
    folded = ModelLog(slots, staged_rounds={}).folded()
    outcomes = {**folded.answered, **folded.dead}
    lying = [entry for record_id, entry in outcomes.items() if record_id not in OWN and entry.epoch >= EPOCH]
    fit = {record_id: entry for record_id, entry in outcomes.items() if record_id in OWN and is_fit(entry)}
    return None if lying or set(fit) != set(OWN) else fit


def is_fit(entry: Answered | Dead) -> bool:
    return entry.answer == answer_text(entry.record_id) if isinstance(entry, Answered) else entry.dead_class == DeadClass.SCHEMA


def test_a_row_is_its_record_s_own_and_of_a_worker_s_word_only_the_answer_counts(effort: Effort) -> None:
    ends: Counter[type] = Counter()

    @effort.settings(examples=150)
    @given(st.lists(entries, max_size=5), endings)
    def check(earlier: list[Entry], ending: list[Entry]) -> None:
        slots = [[Fence(1, 0, "w1", 8, None)], earlier, [Fence(EPOCH, 0, f"w{EPOCH}", 8, None)], ending]
        facts = ShardFacts(job_version="v0001-abcdef", recipe_digest="sha256:00", shard=1, round=0, epoch=EPOCH)
        checked = check_shard(facts, frozen=FROZEN, folded=fold(slots, staged_rounds={}), checker=CHECKER, schema=COLUMNS)
        expected = expected_rows(slots)
        ends[type(checked)] += 1
        if isinstance(checked, WantingShard):
            assert expected is None
            return
        assert expected is not None
        rows = {row["record_id"]: row for row in checked.rows.to_dicts()}
        assert sorted(rows) == sorted([*OWN, *SET_ASIDE])
        assert checked.rows.height == len(rows)
        for record_id, row in rows.items():
            assert (row["acl"], row["key_hash"], row["record_digest"]) == (
                f"acl of {record_id}",
                key_hash(record_id),
                f"digest of {record_id}",
            )
            assert (row["record_class"], row["segment"], row["shard"], row["recipe"]) == ("internal", "de", 1, "sha256:00")
            check_outcome(row, expected.get(record_id), workers=ModelLog(slots, staged_rounds={}).folded().workers)

    check()
    assert set(ends) == {CheckedShard, WantingShard}


def check_outcome(row: dict[str, object], entry: Answered | Dead | None, *, workers: Mapping[int, str]) -> None:
    """`entry` is None for what the planner set aside; `workers` are those whose fences stand in the log, by epoch."""
    found = (row["outcome"], row["dead_class"], row["summary"], row["epoch"], row["worker"])
    match entry:
        case Answered():
            expected = ("result", None, json.loads(entry.answer)["summary"], entry.epoch, workers.get(entry.epoch))
        case Dead():
            expected = ("dead_letter", entry.dead_class, None, entry.epoch, workers.get(entry.epoch))
        case None:
            expected = ("dead_letter", "empty", None, 0, None)
    assert found == expected


# --- the table ------------------------------------------------------------------------------------------------------------------------


class MemoryOutcomes(Outcomes):
    """The table as a list of rows. Like Delta's, its MERGE inserts what has no match: also a key that stands twice in the source."""

    def __init__(self, *, schema: str, before_merge: Callable[[], None]) -> None:
        super().__init__("memory", answer_schema=schema)
        self.rows = pl.DataFrame(schema=self.schema)
        self._before_merge = before_merge

    def create(self) -> None:
        """It is there."""

    def _merge_once(self, frame: pl.DataFrame, literal: Sequence[int]) -> int:
        self._before_merge()
        there = self.rows.filter(pl.col("shard").is_in(literal)).select("record_id")
        new = frame.join(there, on="record_id", how="anti")
        self.rows = pl.concat([self.rows, new])
        return new.height

    def files(self, *, shards: object = None) -> list[OutcomeFile]:
        counts = self.rows.group_by("shard", "outcome").len().iter_rows()
        named = None if shards is None else set(shards)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return [
            OutcomeFile(uri="", shard=shard, outcome=outcome, rows=rows, size_bytes=0)
            for shard, outcome, rows in counts
            if named is None or shard in named
        ]


def test_no_record_enters_the_table_twice_whatever_is_merged(effort: Effort) -> None:
    """In one MERGE or in two: a source that would double a key is refused before anything is written."""
    batches = st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2)), min_size=1, max_size=4), min_size=1, max_size=3)

    @effort.settings(examples=60)
    @given(batches)
    def check(batches: list[list[tuple[str, int]]]) -> None:
        table = MemoryOutcomes(schema=outcome_rows.ANSWER_SCHEMA, before_merge=lambda: None)
        for batch in batches:
            frame = pl.concat([outcome_rows.outcome_rows([f"{record_id}{shard}"], shard=shard) for record_id, shard in batch])
            before = table.rows
            try:
                table.merge(frame, [1, 2], still_mine=lambda: None)
            except SourceRefusedError:
                assert len(set(batch)) < len(batch)
                assert table.rows.equals(before)
            except OutcomesWrongError:  # a part of it was there before: the table is not what was merged, and a person must look
                assert before.height > 0
            assert table.rows["record_id"].n_unique() == table.rows.height

    check()


# --- the committer --------------------------------------------------------------------------------------------------------------------

PLACES = ["before_merge", "before_commit"]
SHARDS = {1: ["a1", "a2"], 2: ["b1"], 3: ["c1", "c2"]}


class CrashError(Exception):
    """The process dies here."""


@dataclass(frozen=True)
class MemoryInstallation(Installation):
    """An installation whose table is in memory."""

    table: MemoryOutcomes | None = None

    def outcomes(self, *, job: str, version: str, answer_schema: str) -> Outcomes:
        assert self.table is not None
        return self.table


class CommitMachine(RuleBasedStateMachine):
    """Workers that stage right and wrong logs; leaders that crash between two steps, or are superseded there and go on."""

    def __init__(self, register: Register, folder: Path, number: int, struck: Counter[str]) -> None:
        super().__init__()
        self.struck = struck
        self.register = register
        self.table = MemoryOutcomes(schema=SCHEMA, before_merge=self._somebody_merges)
        installation = MemoryInstallation(settings_in(folder), register, MemoryObjects(), self.table)
        job = f"job{number}"
        self.planned: Planned = plan_by_hand(installation, SHARDS, set_aside={2: ["e1"]}, adapt=lambda spec: replace(spec, job=job))
        self.generation = 0  # of the leader that acts now
        self.leaders: list[tuple[int, Committer]] = []
        self.trouble: tuple[str, str] | None = None
        self.somebody_takes_the_lead()

    def _at(self) -> dict[str, str]:
        return {"job": self.planned.job, "version": self.planned.version}

    @rule(
        shards=st.integers(1, 3),
        lack=st.sampled_from([None, None, "a2", "c1"]),
        lie=st.sampled_from([None, None, None, "a1", "b1", "c1"]),
        again=st.booleans(),
        late=st.booleans(),
    )
    def workers_stage_shards(self, shards: int, lack: str | None, lie: str | None, again: bool, late: bool) -> None:
        """Logs that lack a record, hold one of another shard, or the same answers twice; what lacks may come too late."""

        def also(lease: Lease) -> list[Entry]:
            lies = [answered(lie, epoch=lease.epoch)] if lie else []
            own = [answered(record_id, epoch=lease.epoch) for record_id in self.planned.ids[lease.shard] if record_id != lack]
            return [*lies, *(own if again else [])]

        for _ in range(min(shards, self.register.counts(*self._at().values())[ShardState.PENDING])):
            lease = stage(self.planned, leave_out=[lack] if lack else [], also=also)
            if late:
                write(self.planned, lease, [answered(record_id, epoch=lease.epoch) for record_id in self.planned.ids[lease.shard]])

    @rule()
    def worker_dies_with_a_shard(self) -> None:
        lease = self.register.claim(**self._at(), worker="w9")
        if lease is not None:
            assert self.register.expire(**self._at(), shard=lease.shard, epoch=lease.epoch, renewals=0, end=LeaseEnd.NODE_GONE)

    @rule()
    def somebody_takes_the_lead(self) -> None:
        seen = self.register.lead(*self._at().values())
        generation = self.register.take_lead(**self._at(), holder="run", seen=seen)
        assert generation is not None
        committer = Committer(self.planned.installation, **self._at(), generation=generation, failpoint=self._at_failpoint)
        self.leaders.append((generation, committer))

    @rule(back=st.sampled_from([0, 0, 0, 1, 2]), trouble=st.sampled_from([None, None, *product(PLACES, ["crash", "superseded"])]))
    def leader_commits(self, back: int, trouble: tuple[str, str] | None) -> None:
        self.generation, committer = self.leaders[max(-1 - back, -len(self.leaders))]
        self.trouble = trouble
        before = self._committed()
        try:
            committed = committer.step()
        except CrashError as crash:
            self.struck[f"crash {crash}"] += 1
        except StaleGenerationError:
            self.struck["stale"] += 1
            assert self._present_generation() != self.generation
            assert self._committed() == before
        else:
            self.struck["committed"] += len(committed)
            assert all(self._is_answered_by_what_was_staged(row) for row in committed)
            assert not committed or self._present_generation() == self.generation
        self.trouble = None

    def _is_answered_by_what_was_staged(self, row: ShardRow) -> bool:
        log = self.planned.installation.shard_log(**self._at(), shard=row.number)
        folded = ModelLog(log.read(row.staged_slots), staged_rounds={}).folded()
        return {*folded.answered, *folded.dead} >= set(self.planned.ids[row.number])

    def _at_failpoint(self, place: str) -> None:
        if self.trouble == (place, "crash"):
            raise CrashError(place)
        if self.trouble == (place, "superseded"):
            self.somebody_takes_the_lead()

    def _somebody_merges(self) -> None:
        assert self._present_generation() == self.generation, "a leader that was superseded wrote to the table"

    def _present_generation(self) -> int:
        lead = self.register.lead(*self._at().values())
        return lead.generation if lead else 0

    def _committed(self) -> list[int]:
        return [row.number for row in self.register.shards(*self._at().values()) if row.state is ShardState.COMMITTED]

    @invariant()
    def each_record_stands_in_the_table_at_most_once_with_its_own_values(self) -> None:
        rows = self.table.rows
        assert rows["record_id"].n_unique() == rows.height
        for row in rows.iter_rows(named=True):
            record_id = row["record_id"]
            assert (row["acl"], row["key_hash"]) == (f"acl of {record_id}", key_hash(record_id))
            assert row["outcome"] == "dead_letter" or row["summary"] == f"about {record_id}"
            assert record_id in [*SHARDS[row["shard"]], *self.planned.set_aside.get(row["shard"], ())]

    @invariant()
    def what_sql_calls_committed_is_in_the_table_whole(self) -> None:
        for number in self._committed():
            found = sorted(self.table.rows.filter(pl.col("shard") == number)["record_id"])
            assert found == sorted([*SHARDS[number], *self.planned.set_aside.get(number, ())])


def test_committed_means_that_every_record_of_the_shard_stands_in_the_table_once(
    register: Register, tmp_path: Path, effort: Effort
) -> None:
    struck: Counter[str] = Counter()
    machines: list[CommitMachine] = []

    def machine() -> CommitMachine:
        machines.append(CommitMachine(register, tmp_path, len(machines), struck))
        return machines[-1]

    effort.run(machine, histories=40, steps=12)
    assert set(struck) == {"committed", "stale", "crash before_merge", "crash before_commit"}
