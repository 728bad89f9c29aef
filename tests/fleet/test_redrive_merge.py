"""The MERGE of a redrive: it updates dead letters of an earlier round and nothing else, however often and however late it is repeated.

Each clause of it stands for a fault. The last tests change one clause at a time and see the promise broken.
"""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from batch_assets.core.records import Outcome
from batch_assets.stores import outcomes as outcomes_module
from batch_assets.stores.outcomes import Outcomes, OutcomesWrongError, SourceRefusedError
from tests.support.outcome_rows import ANSWER_SCHEMA, outcome_rows

DEAD, RESULT = Outcome.DEAD_LETTER, Outcome.RESULT


def mine() -> None:
    """The generation is still ours."""


def rows(record_ids: list[str], *, outcome: Outcome, round_: int, shard: int = 1, summary: str = "fine") -> pl.DataFrame:
    """Outcomes of one round."""
    return outcome_rows(record_ids, shard=shard, outcome=outcome, summary=summary).with_columns(round=pl.lit(round_, pl.Int32))


def first_round() -> pl.DataFrame:
    """`a` has a result; `b`, `c` and `d` are dead letters; `z` is one of another shard."""
    return pl.concat(
        [
            rows(["a"], outcome=RESULT, round_=0),
            rows(["b", "c", "d"], outcome=DEAD, round_=0),
            rows(["z"], outcome=DEAD, round_=0, shard=2),
        ]
    )


def second_round() -> pl.DataFrame:
    """`b` was answered, `c` failed again; `d` was not asked."""
    return pl.concat([rows(["b"], outcome=RESULT, round_=1, summary="at last"), rows(["c"], outcome=DEAD, round_=1)])


def states(outcomes: Outcomes) -> list[tuple[str, str, int]]:
    """(record, outcome, round) of every row."""
    return sorted(outcomes.read(columns=["record_id", "outcome", "round"]).rows())


AFTER_FIRST = [
    ("a", "result", 0),
    ("b", "dead_letter", 0),
    ("c", "dead_letter", 0),
    ("d", "dead_letter", 0),
    ("z", "dead_letter", 0),
]
AFTER_SECOND = [
    ("a", "result", 0),
    ("b", "result", 1),
    ("c", "dead_letter", 1),
    ("d", "dead_letter", 0),
    ("z", "dead_letter", 0),
]


@pytest.fixture
def outcomes(tmp_path: Path) -> Outcomes:
    """A table after its first round."""
    table = Outcomes(str(tmp_path / "outcomes"), answer_schema=ANSWER_SCHEMA)
    table.create()
    table.merge(first_round(), [1, 2], still_mine=mine)
    return table


def test_a_redrive_updates_the_dead_letters_that_it_asked_again_and_nothing_else(outcomes: Outcomes) -> None:
    assert outcomes.merge_redrive(second_round(), [1], still_mine=mine) == 2
    assert states(outcomes) == AFTER_SECOND
    (row,) = outcomes.read().filter(pl.col("record_id") == "b").to_dicts()
    assert (row["summary"], row["category"], row["dead_class"]) == ("at last", "bug", None)


def test_a_repeated_redrive_changes_nothing(outcomes: Outcomes) -> None:
    outcomes.merge_redrive(second_round(), [1], still_mine=mine)
    before = outcomes.read().sort("record_id")
    assert Outcomes(outcomes.uri, answer_schema=ANSWER_SCHEMA).merge_redrive(second_round(), [1], still_mine=mine) == 0
    assert outcomes.read().sort("record_id").equals(before)


def test_a_first_commit_that_is_repeated_after_a_redrive_changes_nothing(outcomes: Outcomes) -> None:
    outcomes.merge_redrive(second_round(), [1], still_mine=mine)
    assert outcomes.merge(first_round(), [1, 2], still_mine=mine) == 0
    assert states(outcomes) == AFTER_SECOND


def test_a_redrive_that_is_repeated_after_a_later_one_takes_nothing_back(outcomes: Outcomes) -> None:
    outcomes.merge_redrive(second_round(), [1], still_mine=mine)
    outcomes.merge_redrive(rows(["c"], outcome=DEAD, round_=2), [1], still_mine=mine)
    assert outcomes.merge_redrive(second_round(), [1], still_mine=mine) == 0
    assert ("c", "dead_letter", 2) in states(outcomes)


@pytest.mark.parametrize("outcome", Outcome)
def test_a_result_is_final_even_when_a_later_round_brings_another_outcome(outcomes: Outcomes, outcome: Outcome) -> None:
    with pytest.raises(OutcomesWrongError):
        outcomes.merge_redrive(rows(["a"], outcome=outcome, round_=1, summary="another"), [1], still_mine=mine)
    assert states(outcomes) == AFTER_FIRST
    assert outcomes.read().filter(pl.col("record_id") == "a")["summary"].to_list() == ["fine"]


def test_a_record_that_the_table_does_not_have_is_not_inserted_and_is_noticed(outcomes: Outcomes) -> None:
    with pytest.raises(OutcomesWrongError):
        outcomes.merge_redrive(rows(["unknown"], outcome=RESULT, round_=1), [1], still_mine=mine)
    assert states(outcomes) == AFTER_FIRST


def test_a_record_of_another_shard_is_out_of_reach(outcomes: Outcomes) -> None:
    """Shards are literal, and a row of the source stands under the shard that it names."""
    with pytest.raises(OutcomesWrongError):
        outcomes.merge_redrive(rows(["z"], outcome=RESULT, round_=1, shard=1), [1], still_mine=mine)
    assert states(outcomes) == AFTER_FIRST


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda rows: pl.concat([rows, rows]), "more than once"),
        (lambda rows: rows.with_columns(record_id=pl.lit(None, pl.String)), "NULL in record_id"),
        (lambda rows: rows.with_columns(round=pl.lit(None, pl.Int32)), "NULL in round"),
        (lambda rows: rows.with_columns(round=pl.lit(0, pl.Int32)), "rows of round 0"),
        (lambda rows: rows.with_columns(shard=pl.lit(9, pl.Int32)), r"rows of shards \[9\]"),
        (lambda rows: rows.drop("summary"), "columns differ"),
    ],
    ids=["repeats", "null key", "null round", "first round", "foreign shard", "missing column"],
)
def test_a_source_that_would_double_or_change_rows_is_refused(
    outcomes: Outcomes, spoil: Callable[[pl.DataFrame], pl.DataFrame], reason: str
) -> None:
    with pytest.raises(SourceRefusedError, match=reason):
        outcomes.merge_redrive(spoil(second_round()), [1], still_mine=mine)
    assert states(outcomes) == AFTER_FIRST


def test_only_files_of_dead_letters_are_rewritten(outcomes: Outcomes) -> None:
    """The literal outcome prunes: what makes a small redrive of a big table cheap."""
    before = {file.uri for file in outcomes.files() if (file.shard, file.outcome) in ((1, "result"), (2, "dead_letter"))}
    outcomes.merge_redrive(second_round(), [1], still_mine=mine)
    assert before <= {file.uri for file in outcomes.files()}


# --- each clause changed ---------------------------------------------------------------------------------------------------------------


def test_with_an_insert_clause_a_repeated_redrive_would_double_its_results(outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_insert(frame: pl.DataFrame, literal: list[int]) -> int:
        merger = outcomes._merger(frame, f"{outcomes_module.STILL_DEAD} AND {outcomes_module._same_record(literal)}")
        predicate = f"{outcomes_module.STILL_DEAD} AND {outcomes_module.OF_AN_EARLIER_ROUND}"
        return merger.when_matched_update_all(predicate=predicate).when_not_matched_insert_all().execute()["num_target_rows_updated"]

    monkeypatch.setattr(outcomes, "_redrive_once", with_insert)
    outcomes.merge_redrive(second_round(), [1], still_mine=mine)
    with pytest.raises(OutcomesWrongError):  # and the check behind the MERGE sees it
        outcomes.merge_redrive(second_round(), [1], still_mine=mine)
    assert states(outcomes).count(("b", "result", 1)) == 2


def test_without_the_round_a_late_repeat_would_take_back_a_later_round(outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes_module, "OF_AN_EARLIER_ROUND", "true")
    outcomes.merge_redrive(second_round(), [1], still_mine=mine)
    outcomes.merge_redrive(rows(["c"], outcome=DEAD, round_=2), [1], still_mine=mine)
    outcomes.merge_redrive(rows(["c"], outcome=DEAD, round_=1), [1], still_mine=mine)
    assert ("c", "dead_letter", 1) in states(outcomes)


def test_without_the_literal_outcome_a_result_would_be_overwritten(outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes_module, "STILL_DEAD", "true")
    outcomes.merge_redrive(rows(["a"], outcome=DEAD, round_=1), [1], still_mine=mine)
    assert ("a", "dead_letter", 1) in states(outcomes)


def test_with_the_outcome_in_the_first_predicate_a_repeated_first_commit_would_double_rows(
    outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes.merge_redrive(rows(["b"], outcome=RESULT, round_=1), [1], still_mine=mine)
    real = outcomes_module._same_record
    monkeypatch.setattr(outcomes_module, "_same_record", lambda literal: f"t.outcome = s.outcome AND {real(literal)}")
    with pytest.raises(OutcomesWrongError):
        outcomes.merge(first_round(), [1, 2], still_mine=mine)
    assert [record for record, *_ in states(outcomes)].count("b") == 2
