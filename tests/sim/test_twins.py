"""The twins keep the promises of the stores that they stand for: the same tests, over both."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from deltalake.exceptions import CommitFailedError

from batch_assets.core.errors import ObjectExistsError, ObjectMissingError
from batch_assets.core.ports import ObjectStore
from batch_assets.sim.clockwork import Clockwork
from batch_assets.sim.faults import FaultMix, Seams
from batch_assets.sim.stores import SeamedRegister
from batch_assets.sim.twins import MemoryObjects, ModelOutcomes, ModelTable
from batch_assets.stores.objects import LocalObjects
from batch_assets.stores.outcomes import Outcomes
from batch_assets.stores.register import Register
from batch_assets.stores.shard_log import ShardLog

# The stores' own tests: collected here again, over this module's fixtures.
from tests.fleet.test_outcomes import (  # noqa: F401
    test_a_record_that_turned_from_dead_letter_to_result_is_not_inserted_beside_itself,
    test_a_repeated_merge_inserts_nothing,
    test_a_source_that_would_double_or_change_rows_is_refused,
    test_a_superseded_committer_writes_nothing,
    test_after_a_conflict_the_merge_runs_again_on_a_reopened_table,
    test_awkward_texts_come_back_as_they_went_in,
    test_conflicts_without_end_are_raised,
    test_more_rows_of_a_shard_than_were_merged_are_noticed,
    test_several_shards_are_merged_into_a_table_that_holds_others,
)
from tests.log.test_shard_log_slots import (  # noqa: F401
    VERSION,
    test_a_chunk_is_bounded,
    test_a_claimer_learns_of_the_slots_that_were_taken_before_its_fence,
    test_a_slot_that_was_staged_and_is_gone_is_an_error_that_names_it,
    test_a_writer_goes_behind_a_taken_slot_and_leaves_out_what_is_there_under_its_epoch,
    test_a_writer_that_meets_a_higher_fence_stops,
    test_an_older_answer_in_a_taken_slot_does_not_stand_in_for_ours,
)
from tests.register.test_leads import *  # noqa: F403
from tests.register.test_leases import *  # noqa: F403
from tests.support.outcome_rows import ANSWER_SCHEMA, outcome_rows
from tests.support.registers import TickingClock

OpenOutcomes = Callable[[], Outcomes]


@pytest.fixture(params=["folder", "memory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryObjects() if request.param == "memory" else LocalObjects(str(tmp_path))


@pytest.fixture
def log() -> ShardLog:
    return ShardLog(MemoryObjects(), job="tickets", version=VERSION, shard=42, pause=lambda _seconds: None)


@pytest.fixture(params=["delta", "model"])
def open_outcomes(request: pytest.FixtureRequest, tmp_path: Path) -> OpenOutcomes:
    """Handles on one table, as several committers have them."""
    table = ModelTable()

    def open_one() -> Outcomes:
        delta = Outcomes(str(tmp_path / "outcomes"), answer_schema=ANSWER_SCHEMA)
        outcomes = ModelOutcomes(table, answer_schema=ANSWER_SCHEMA) if request.param == "model" else delta
        outcomes.create()
        return outcomes

    return open_one


@pytest.fixture
def outcomes() -> Outcomes:
    return ModelOutcomes(ModelTable(), answer_schema=ANSWER_SCHEMA)


class Unseen:
    """Nobody looks at the effects."""

    def created(self, path: str, data: bytes) -> None: ...
    def committed(self) -> None: ...
    def merged(self, shards) -> None: ...


@pytest.fixture
def open_register(tmp_path: Path) -> Iterator[Callable[[], Register]]:
    """The register as the simulation runs it, between faults."""
    clockwork = Clockwork(failed=lambda *_: None)
    seams = Seams(clockwork, FaultMix({}), Random(0), 3.0)
    opened: list[Register] = []

    def open_one() -> Register:
        opened.append(SeamedRegister(f"sqlite:///{tmp_path}/register.db", seams=seams, effects=Unseen(), now=TickingClock()))
        opened[-1].create()
        return opened[-1]

    yield open_one
    for register in opened:
        register.close()


@pytest.fixture
def register(open_register: Callable[[], Register]) -> Register:
    return open_register()


def mine() -> None:
    """The generation is still ours."""


def test_an_object_is_created_once(objects: ObjectStore) -> None:
    objects.create("a/b", b"first")
    with pytest.raises(ObjectExistsError):
        objects.create("a/b", b"second")
    assert objects.get("a/b") == b"first"
    with pytest.raises(ObjectMissingError):
        objects.get("a/c")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", ""])
def test_a_path_below_no_root_is_refused(objects: ObjectStore, path: str) -> None:
    with pytest.raises(ValueError, match="no path below the root"):
        objects.create(path, b"")


def test_two_handles_see_one_table(open_outcomes: OpenOutcomes) -> None:
    first, second = open_outcomes(), open_outcomes()
    assert first.merge(outcome_rows(["a", "b"], shard=1), [1], still_mine=mine) == 2
    assert second.merge(outcome_rows(["a", "b"], shard=1), [1], still_mine=mine) == 0
    second.merge(outcome_rows(["c"], shard=7), [7], still_mine=mine)
    assert sorted(first.read(columns=["record_id"])["record_id"]) == ["a", "b", "c"]
    assert first.read(shards=[7])["record_id"].to_list() == ["c"]
    assert [(file.shard, file.outcome, file.rows) for file in first.files()] == [(1, "result", 2), (7, "result", 1)]
    assert (first.count(), first.count(shards=[1])) == (3, 2)
    assert first.read().schema == first.schema


@pytest.mark.parametrize("kind", ["delta", "model"])
def test_a_merge_that_was_overtaken_over_the_same_shard_fails(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two committers at once read the table before either has committed: the later one must not insert the same rows again."""
    rows = outcome_rows(["a"], shard=1)
    if kind == "delta":
        first, second = (Outcomes(str(tmp_path / "outcomes"), answer_schema=ANSWER_SCHEMA) for _ in range(2))
        first.create()
        second.create()
        stale = second._newest()
        monkeypatch.setattr(second, "_newest", lambda: stale)
        first.merge(rows, [1], still_mine=mine)
    else:
        table = ModelTable()
        first = ModelOutcomes(table, answer_schema=ANSWER_SCHEMA)
        second = ModelOutcomes(table, answer_schema=ANSWER_SCHEMA, during=lambda: void(first.merge(rows, [1], still_mine=mine)))
    with pytest.raises(CommitFailedError):
        second._merge_once(rows, [1])
    assert first.count() == 1


def void(_value: object) -> None:
    """Nobody looks at it."""
