"""The outcomes table: repeats insert nothing, wrong sources never reach it, and its columns follow the answer schema."""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from batch_assets.core.errors import RefusedError, StaleGenerationError, UnfitEnvironmentError
from batch_assets.core.records import Outcome
from batch_assets.stores.outcomes import Outcomes, OutcomesWrongError, SourceRefusedError, answer_dtypes
from tests.support.outcome_rows import ANSWER_SCHEMA, outcome_rows


def mine() -> None:
    """The generation is still ours."""


@pytest.fixture
def outcomes(tmp_path: Path) -> Outcomes:
    """An empty table."""
    table = Outcomes(str(tmp_path / "outcomes"), answer_schema=ANSWER_SCHEMA)
    table.create()
    return table


def test_a_repeated_merge_inserts_nothing(outcomes: Outcomes) -> None:
    rows = pl.concat([outcome_rows(["a", "b"], shard=1), outcome_rows(["c"], shard=2, outcome=Outcome.DEAD_LETTER)])
    assert outcomes.merge(rows, [1, 2], still_mine=mine) == 3
    assert outcomes.merge(rows, [1, 2], still_mine=mine) == 0
    assert sorted(outcomes.read()["record_id"]) == ["a", "b", "c"]


def test_a_repeat_through_another_handle_and_a_wider_batch_inserts_only_what_is_new(outcomes: Outcomes) -> None:
    outcomes.merge(outcome_rows(["a"], shard=1), [1], still_mine=mine)
    other = Outcomes(outcomes.uri, answer_schema=ANSWER_SCHEMA)
    assert other.merge(pl.concat([outcome_rows(["a"], shard=1), outcome_rows(["b"], shard=7)]), [1, 7], still_mine=mine) == 1
    assert outcomes.count() == 2


def test_several_shards_are_merged_into_a_table_that_holds_others(outcomes: Outcomes) -> None:
    """With bare integers in the predicate delta-rs 1.6.3 cannot prune here."""
    for shards in ([100, 101, 102], [0, 1, 2], [100, 101, 102]):
        outcomes.merge(pl.concat([outcome_rows([f"r{shard}"], shard=shard) for shard in shards]), shards, still_mine=mine)
    assert outcomes.count() == 6


def test_a_record_that_turned_from_dead_letter_to_result_is_not_inserted_beside_itself(outcomes: Outcomes) -> None:
    """The predicate never names the outcome: with it, a first commit repeated after a redrive would double the row."""
    outcomes.merge(outcome_rows(["a"], shard=1, outcome=Outcome.DEAD_LETTER), [1], still_mine=mine)
    assert outcomes.merge(outcome_rows(["a"], shard=1, outcome=Outcome.RESULT), [1], still_mine=mine) == 0
    assert outcomes.read()["outcome"].to_list() == ["dead_letter"]


def test_more_rows_of_a_shard_than_were_merged_are_noticed(outcomes: Outcomes) -> None:
    outcomes.merge(outcome_rows(["a", "b"], shard=1), [1], still_mine=mine)
    with pytest.raises(OutcomesWrongError):
        outcomes.merge(outcome_rows(["a"], shard=1), [1], still_mine=mine)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda rows: pl.concat([rows, rows]), "more than once"),
        (lambda rows: rows.with_columns(record_id=pl.lit(None, pl.String)), "NULL in record_id"),
        (lambda rows: rows.with_columns(shard=pl.lit(9, pl.Int32)), r"rows of shards \[9\]"),
        (lambda rows: rows.drop("summary"), "columns differ"),
        (lambda rows: rows.with_columns(shard=pl.col("shard").cast(pl.Int64)), "columns differ"),
        (lambda rows: rows.with_columns(extra=pl.lit(1)), "columns differ"),
    ],
    ids=["repeats", "null key", "foreign shard", "missing column", "other type", "extra column"],
)
def test_a_source_that_would_double_or_change_rows_is_refused(
    outcomes: Outcomes, spoil: Callable[[pl.DataFrame], pl.DataFrame], reason: str
) -> None:
    with pytest.raises(SourceRefusedError, match=reason):
        outcomes.merge(spoil(outcome_rows(["a", "b"], shard=1)), [1], still_mine=mine)
    assert outcomes.count() == 0


def test_a_superseded_committer_writes_nothing(outcomes: Outcomes) -> None:
    def stale() -> None:
        raise StaleGenerationError(version="v0001-abcdef", generation_held=1, generation_current=2)

    with pytest.raises(StaleGenerationError):
        outcomes.merge(outcome_rows(["a"], shard=1), [1], still_mine=stale)
    assert outcomes.count() == 0


def test_after_a_conflict_the_merge_runs_again_on_a_reopened_table(outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit went through and its acknowledgement was lost: no second copy of a row."""
    rows = outcome_rows(["a", "b"], shard=1)
    real, asked = outcomes._merge_once, []

    def lost_acknowledgement(frame: pl.DataFrame, literal: list[int]) -> int:
        inserted = real(frame, literal)
        if len(asked) == 1:
            raise CommitFailedError
        return inserted

    monkeypatch.setattr(outcomes, "_merge_once", lost_acknowledgement)
    assert outcomes.merge(rows, [1], still_mine=lambda: asked.append(1)) == 0
    assert len(asked) == 2
    assert sorted(outcomes.read()["record_id"]) == ["a", "b"]


def test_conflicts_without_end_are_raised(outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch) -> None:
    def conflict(frame: pl.DataFrame, literal: list[int]) -> int:
        raise CommitFailedError(frame.height, literal)

    monkeypatch.setattr(outcomes, "_merge_once", conflict)
    with pytest.raises(CommitFailedError):
        outcomes.merge(outcome_rows(["a"], shard=1), [1], still_mine=mine)


def test_only_partitions_of_the_named_shards_are_read(outcomes: Outcomes) -> None:
    rows = pl.concat([outcome_rows([f"r{shard}"], shard=shard) for shard in range(5)])
    outcomes.merge(rows, range(5), still_mine=mine)
    assert sorted(outcomes.read(shards=[1, 3], columns=["record_id"])["record_id"]) == ["r1", "r3"]
    assert [(file.shard, file.outcome, file.rows) for file in outcomes.files(shards=[3])] == [(3, "result", 1)]
    assert all(Path(file.uri).exists() for file in outcomes.files())


def test_many_merges_on_one_handle_stay_right(outcomes: Outcomes) -> None:
    for shard in range(25):
        outcomes.merge(outcome_rows([f"r{shard}"], shard=shard), [shard], still_mine=mine)
    assert outcomes.count() == 25
    assert DeltaTable(outcomes.uri).version() == 25


def test_creating_twice_is_fine_and_another_answer_schema_is_refused(outcomes: Outcomes) -> None:
    Outcomes(outcomes.uri, answer_schema=ANSWER_SCHEMA).create()
    other = schema_of({"score": {"type": "integer"}})
    with pytest.raises(UnfitEnvironmentError, match="another answer schema"):
        Outcomes(outcomes.uri, answer_schema=other).create()


def test_awkward_texts_come_back_as_they_went_in(outcomes: Outcomes) -> None:
    texts = ["NUL \x00 inside", "quote ' \" \\ ; --", "日本語 🎟", "line\nbreak", ""]
    rows = pl.concat([outcome_rows([f"id {text}"], shard=1, summary=text) for text in texts])
    outcomes.merge(rows, [1], still_mine=mine)
    outcomes.merge(rows, [1], still_mine=mine)
    found = outcomes.read(columns=["record_id", "summary"])
    assert dict(found.iter_rows()) == {f"id {text}": text for text in texts}


def schema_of(properties: dict[str, object], **more: object) -> str:
    """An answer schema with these properties."""
    return json.dumps({"type": "object", "additionalProperties": False, "properties": properties, **more})


def test_every_property_has_the_column_type_of_its_values() -> None:
    text = {"type": "string", "maxLength": 9}
    entity = {"type": "object", "additionalProperties": False, "properties": {"kind": text, "page": {"type": "integer"}}}
    schema = schema_of(
        {
            "category": {"enum": ["a", "b"]},
            "stars": {"enum": [1, 2, None]},
            "score": {"type": ["number", "null"]},
            "sure": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "fixed": {"const": "x"},
            "entities": {"type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/entity"}},
        },
        **{"$defs": {"entity": entity}},
    )
    assert answer_dtypes(schema) == {
        "category": pl.String(),
        "stars": pl.Int64(),
        "score": pl.Float64(),
        "sure": pl.Boolean(),
        "fixed": pl.String(),
        "entities": pl.List(pl.Struct({"kind": pl.String(), "page": pl.Int64()})),
    }


def test_a_property_that_no_column_can_hold_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match=r"properties\.a"):
        answer_dtypes(schema_of({"a": {"type": ["string", "integer"]}}))
    with pytest.raises(RefusedError, match=r"properties\.shard"):
        answer_dtypes(schema_of({"shard": {"type": "boolean"}}))


@pytest.mark.parametrize("name", ["a folder", "größe", "c#1", "50%"])
def test_a_root_may_have_any_name(tmp_path: Path, name: str) -> None:
    table = Outcomes(str(tmp_path / name / "outcomes"), answer_schema=ANSWER_SCHEMA)
    table.create()
    table.merge(pl.concat([outcome_rows(["a"], shard=1), outcome_rows(["b"], shard=7)]), [1, 7], still_mine=mine)
    assert table.read(shards=[7])["record_id"].to_list() == ["b"]
    assert table.read(columns=["record_id"]).height == 2
