"""Counting a range: what a build of ours cannot produce, but a disk or foreign hands can."""

import json

import pandera.polars as pa
import polars as pl
import pytest

from batch_assets.core.evidence import SEGMENTS_MAX, Found, ReleaseFacts, SegmentCount, shown_id
from batch_assets.core.release import HASH_MAX, HASH_MIN
from batch_assets.core.validation import CheckName, CheckSettings, Subject, run_checks
from batch_assets.stores.installation import Installation
from batch_assets.stores.release_facts import FROZEN_COLUMNS, count_range
from batch_assets.stores.release_schema import broken_rows, release_model
from tests.support.finished import ANSWER_SCHEMA, Planned, outcome_rows, plan_version

MODEL = release_model(ANSWER_SCHEMA)
REFERRED = json.dumps({"$ref": "#/$defs/answer", "$defs": {"answer": json.loads(ANSWER_SCHEMA)}})


def counted(
    planned: Planned, rows: pl.DataFrame, *, low: int = HASH_MIN, high: int = HASH_MAX, model: pa.DataFrameSchema = MODEL
) -> ReleaseFacts:
    frozen = planned.frozen[0].select(FROZEN_COLUMNS).with_columns(shard=pl.lit(1, pl.Int32))
    subject = Subject(job="tickets", version=planned.row.name, snapshot_records=8, recipe_digest=planned.spec.recipe.digest)
    return count_range(frozen, rows, subject=subject, model=model, hash_low=low, hash_high=high)


def one_shard(installation: Installation) -> tuple[Planned, pl.DataFrame]:
    planned = plan_version(installation, records=8, shards=1)
    return planned, outcome_rows(planned, shard=1, frozen=planned.frozen[0])


def test_rows_out_of_order_are_found(installation: Installation) -> None:
    planned, rows = one_shard(installation)
    assert counted(planned, rows).misplaced == Found()
    turned = pl.concat([rows[1:3], rows[0:1], rows[3:]])
    assert counted(planned, turned).misplaced.ids == (rows["record_id"][0],)


def test_rows_outside_the_range_of_their_file_are_found(installation: Installation) -> None:
    planned, rows = one_shard(installation)
    assert counted(planned, rows, low=rows["key_hash"][1]).misplaced.ids == (rows["record_id"][0],)


def test_a_row_without_an_id_is_foreign_and_breaks_the_schema(installation: Installation) -> None:
    planned, rows = one_shard(installation)
    nameless = rows.with_columns(record_id=pl.when(pl.int_range(pl.len()) == 2).then(None).otherwise("record_id"))
    facts = counted(planned, nameless)
    assert (facts.foreign.count, facts.missing.count, facts.broken.count) == (1, 1, 1)


def test_a_file_with_other_columns_breaks_every_row_and_covers_nothing(installation: Installation) -> None:
    planned, rows = one_shard(installation)
    facts = counted(planned, rows.drop("acl"))
    assert (facts.broken.count, facts.missing.count, facts.rows) == (8, 8, 0)
    assert "acl" in facts.broken.notes[0]


def test_a_column_of_another_type_breaks_every_row(installation: Installation) -> None:
    _, rows = one_shard(installation)
    found = broken_rows(rows.with_columns(pl.col("attempt").cast(pl.Int64)), MODEL)
    assert found.count == 8
    assert "attempt: dtype('Int32')" in found.notes[0]


def test_an_additional_column_breaks_every_row(installation: Installation) -> None:
    _, rows = one_shard(installation)
    assert broken_rows(rows.with_columns(extra=pl.lit(1)), MODEL).count == 8


def test_facts_of_ranges_add_up_to_those_of_the_whole(installation: Installation) -> None:
    planned, rows = one_shard(installation)
    facts = counted(planned, rows)
    both = facts + facts
    assert (both.records, both.rows, both.results) == (16, 16, 16)
    assert sum(segment.records for segment in both.segments.values()) == 16


def test_segments_are_bounded_and_what_is_beyond_fails_the_check() -> None:
    many = ReleaseFacts(rows=SEGMENTS_MAX, results=SEGMENTS_MAX, segments={f"s{n}": SegmentCount(records=1) for n in range(SEGMENTS_MAX)})
    facts = many + ReleaseFacts(rows=1, results=1, segments={"one more": SegmentCount(records=1)})
    assert len(facts.segments) == SEGMENTS_MAX
    subject = Subject(job="j", version="v0001-abcdef", snapshot_records=SEGMENTS_MAX + 1, recipe_digest="sha256:0", segment_column="user")
    checks = run_checks(facts, subject=subject, settings=CheckSettings(dead_letters_per_segment_max=0.5))
    (finding,) = [check for check in checks if not check.passed]
    assert finding.name is CheckName.DEAD_LETTERS
    assert "that is a key, not a segment" in finding.message


def test_ids_in_messages_are_bounded_and_cannot_forge_lines() -> None:
    assert shown_id("T-1") == "T-1"
    assert shown_id("a\nb\x1b[31m") == "a\\nb\\x1b[31m"
    assert len(shown_id("x" * 500)) == 60


def test_dead_letters_of_segments_beyond_the_bound_count_for_the_gate() -> None:
    """A column with too many values must not hide what died in the rows whose segment is not kept."""
    many = ReleaseFacts(rows=SEGMENTS_MAX, results=SEGMENTS_MAX, segments={f"s{n}": SegmentCount(records=1) for n in range(SEGMENTS_MAX)})
    dead: dict[str | None, SegmentCount] = {f"d{n}": SegmentCount(records=1, dead_by_class={"empty": 1}) for n in range(600)}
    facts = many + ReleaseFacts(rows=600, dead_by_class={"empty": 600}, segments=dead)
    subject = Subject(job="j", version="v0001-abcdef", snapshot_records=SEGMENTS_MAX + 600, recipe_digest="sha256:0", segment_column="user")
    checks = run_checks(facts, subject=subject, settings=CheckSettings())
    (finding,) = [check for check in checks if not check.passed]
    assert finding.message == "v0001: 5.66 % dead letters > 0.5 % (600 of 10,600; all empty)."


def test_dead_letters_are_counted_by_outcome_over_all_rows(installation: Installation) -> None:
    planned, rows = one_shard(installation)
    dead = pl.int_range(pl.len()) < 3
    spoiled = rows.with_columns(
        outcome=pl.when(dead).then(pl.lit("dead_letter")).otherwise("outcome"),
        dead_class=pl.when(pl.int_range(pl.len()) < 2).then(pl.lit("schema")).otherwise("dead_class"),
    )
    facts = counted(planned, spoiled)
    assert (facts.dead_letters, dict(facts.dead_by_class)) == (3, {"none": 1, "schema": 2})
    assert sum(segment.dead for segment in facts.segments.values()) == 3


@pytest.mark.parametrize("schema", [ANSWER_SCHEMA, REFERRED], ids=["written out", "behind a $ref"])
def test_the_rules_of_an_answer_hold_wherever_its_schema_is_defined(installation: Installation, schema: str) -> None:
    _, rows = one_shard(installation)
    model = release_model(schema)
    assert broken_rows(rows, model).count == 0
    assert broken_rows(rows.with_columns(summary=pl.lit("x" * 41)), model).notes == ("summary: maxLength",)
    assert broken_rows(rows.with_columns(category=pl.lit(None, pl.String)), model).notes == ("category: required in a result",)


def test_an_answer_field_may_be_called_like_a_column_and_found(installation: Installation) -> None:
    planned, rows = one_shard(installation)
    fields = ["acl_found", "segment_found", "surplus_found"]
    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": fields,
        "properties": {name: {"type": "boolean"} for name in fields},
    }
    named = rows.drop("category", "summary", "entities").with_columns(**dict.fromkeys(fields, pl.lit(value=True)))
    facts = counted(planned, named, model=release_model(json.dumps(schema)))
    assert (facts.rows, facts.widened.count, facts.altered.count, facts.broken.count) == (8, 0, 0, 0)
