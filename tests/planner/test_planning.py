"""Rules of the planner, without files."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_assets.core.planning import (
    BLANK_CHARACTERS,
    BUCKET_BITS_MAX,
    BUCKET_ROWS,
    HASH_HIGH,
    HASH_LOW,
    approval_reason,
    bucket_bits,
    bucket_low,
    column_problems,
    cut_bucket,
    hash_ranges,
    set_aside,
)
from batch_assets.core.records import DeadClass, bucket_of
from batch_assets.core.spec import InputRules, SourceKind

SOUND = {"copies": 1, "malformed": None, "has_id": True, "null_field": None, "blank": False, "tokens": None, "tokens_max": 10}


@pytest.mark.parametrize(("rows", "bits"), [(0, 0), (300, 0), (BUCKET_ROWS, 0), (BUCKET_ROWS + 1, 1), (200_000, 2), (10_000_000, 8)])
def test_a_bucket_has_at_most_about_fifty_thousand_rows(rows: int, bits: int) -> None:
    assert bucket_bits(rows=rows, size_bytes=0) == bits


def test_large_records_make_smaller_buckets_and_no_source_more_than_the_most() -> None:
    assert bucket_bits(rows=50_000, size_bytes=250 << 20) == 2
    assert bucket_bits(rows=10**12, size_bytes=10**18) == BUCKET_BITS_MAX


@given(st.integers(HASH_LOW, HASH_HIGH), st.integers(0, BUCKET_BITS_MAX))
def test_a_hash_lies_between_the_lows_of_its_bucket_and_the_next(hash_value: int, bits: int) -> None:
    bucket = bucket_of(hash_value, bits)
    assert bucket_low(bucket, bits) <= hash_value
    assert bucket + 1 == 1 << bits or hash_value < bucket_low(bucket + 1, bits)


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(1, 25))
def test_a_shard_is_part_of_one_bucket_or_whole_adjacent_buckets_and_never_too_large(sizes: list[int], shard_records: int) -> None:
    shards: list[int] = []
    collected = 0
    for rows in sizes:
        cut = cut_bucket(collected=collected, rows=rows, shard_records=shard_records)
        if cut.closes:
            shards.append(collected)
            collected = 0
        if cut.parts:
            assert collected == 0, "a part of a bucket shares its shard with another bucket"
            assert sum(cut.parts) == rows
            assert max(cut.parts) - min(cut.parts) <= 1
            shards += cut.parts
        else:
            collected += rows
    shards += [collected] if collected else []
    assert sum(shards) == sum(sizes)
    assert all(0 < rows <= shard_records for rows in shards)


def test_299_records_in_shards_of_50_are_6_shards() -> None:
    assert cut_bucket(collected=0, rows=299, shard_records=50).parts == (50, 50, 50, 50, 50, 49)


@given(st.sets(st.integers(HASH_LOW, HASH_HIGH), min_size=1, max_size=20))
def test_the_ranges_of_the_shards_are_all_hashes_without_gap_or_overlap(lows: set[int]) -> None:
    ranges = hash_ranges(sorted(lows))
    assert ranges[0][0] == HASH_LOW
    assert ranges[-1][1] == HASH_HIGH
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(ranges))


def test_no_shards_have_no_ranges() -> None:
    assert hash_ranges([]) == []


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, None),
        ({"tokens": 10}, None),
        ({"tokens": 11}, (DeadClass.TOO_LONG, "11 tokens, at most 10")),
        ({"blank": True}, (DeadClass.EMPTY, None)),
        ({"null_field": "body", "blank": True}, (DeadClass.NULL, "body is null")),
        ({"has_id": False, "null_field": "body"}, (DeadClass.NO_ID, None)),
        ({"malformed": "line 7: not JSON", "has_id": False}, (DeadClass.MALFORMED, "line 7: not JSON")),
        ({"copies": 3, "malformed": "line 7: not JSON"}, (DeadClass.DUPLICATE_ID, "3 rows share this id")),
    ],
)
def test_a_record_is_set_aside_for_the_first_reason_that_holds(facts: dict[str, object], expected: object) -> None:
    assert set_aside(**{**SOUND, **facts}) == expected  # type: ignore[arg-type]


def test_white_space_and_characters_that_show_nothing_are_blank() -> None:
    spaces = [chr(point) for point in range(0x3100) if chr(point).isspace()]
    assert set(spaces) <= set(BLANK_CHARACTERS)
    assert {"\u200b", "\ufeff", "\u2060"} <= set(BLANK_CHARACTERS)
    assert not any(character.isalnum() for character in BLANK_CHARACTERS if character not in "\u115f\u1160\u3164\uffa0")  # Hangul fillers


RULES = InputRules(key="id", fields=(("body", "text"),), acl="acl", labels=(("category", "gold"),))


def problems(columns: dict[str, str], kind: SourceKind = SourceKind.PARQUET) -> list[tuple[str, str | None]]:
    return [(problem.code, problem.key) for problem in column_problems(RULES, columns, source="t.parquet", kind=kind)]


def test_every_column_that_is_missing_or_of_a_wrong_type_is_named() -> None:
    fine = {"id": "integer", "text": "text", "acl": "text", "gold": "float"}
    assert problems(fine) == []
    assert problems({**fine, "text": "integer"}) == [("source.column_type", "text")]
    assert problems({"id": "float", "text": "text", "gold": "text"}) == [("source.column_type", "id"), ("source.column_missing", "acl")]


def test_a_column_that_is_text_in_some_files_only_is_refused() -> None:
    assert problems({"id": "text", "text": "integer|text", "acl": "text", "gold": "text"}) == [("source.column_type", "text")]


def test_in_json_lines_a_wrong_type_in_some_lines_is_those_records_own() -> None:
    columns = {"id": "text", "text": "number|text", "acl": "null", "gold": "text"}
    assert problems(columns, SourceKind.JSONL) == []
    assert problems({**columns, "id": "number"}, SourceKind.JSONL) == [("source.column_type", "id")]


@pytest.mark.parametrize(
    ("by_sensor", "records", "published", "held"),
    [(False, 99, None, False), (True, 5, "r1", False), (True, 5, "r0", True), (True, 11, "r1", True), (True, 5, None, True)],
)
def test_a_sensor_starts_only_the_published_recipe_within_its_limit(
    by_sensor: bool, records: int, published: str | None, held: bool
) -> None:
    reason = approval_reason(by_sensor=by_sensor, records=records, records_max=10, recipe_digest="r1", published_recipe_digest=published)
    assert (reason is not None) == held
