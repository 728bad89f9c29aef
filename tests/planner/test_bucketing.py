"""Buckets: every row of the source comes back once, in order of its key, beside the rows that share its id."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import polars as pl
import pytest

from batch_assets.core.records import bucket_of, key_hash
from batch_assets.core.spec import InputRules, SourceKind
from batch_assets.flows import bucketing
from batch_assets.flows.bucketing import Buckets
from batch_assets.stores import source_text
from batch_assets.stores.snapshots import pin_snapshot
from batch_assets.stores.spill import Spill

RULES = InputRules(key="id", fields=(("body", "body"),), acl="acl")


def source(folder: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps({"acl": "support", **row}) + "\n" for row in rows))
    return path


def buckets_of(path: Path, *, pilot: int | None = None) -> tuple[Buckets, list[tuple[int, pl.DataFrame]]]:
    with Buckets(pin_snapshot(str(path), SourceKind.JSONL), RULES, folder=path.parent / "tmp", pilot=pilot) as buckets:
        buckets.fill()
        return buckets, list(buckets)


def tickets(count: int) -> list[dict[str, object]]:
    return [{"id": f"T-{number}", "body": f"text {number}"} for number in range(count)]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batch_assets.core.planning.BUCKET_ROWS", 20)
    monkeypatch.setattr(bucketing, "BUFFER_ROWS", 64)


@pytest.mark.parametrize("fan_out_bits", [1, 3, 8])
def test_every_row_comes_back_once_in_its_bucket_sorted_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_buckets: None, fan_out_bits: int
) -> None:
    monkeypatch.setattr(bucketing, "FAN_OUT_BITS", fan_out_bits)
    made, buckets = buckets_of(source(tmp_path, tickets(1000)))
    assert made.bits >= 5
    assert [bucket for bucket, _ in buckets] == sorted(bucket for bucket, _ in buckets)
    everything = pl.concat(frame for _, frame in buckets)
    assert sorted(everything["record_id"]) == sorted(str(ticket["id"]) for ticket in tickets(1000))
    assert everything["key_hash"].is_sorted()
    assert all(row["key_hash"] == key_hash(row["record_id"]) for row in everything.iter_rows(named=True))
    assert all(bucket_of(hash_value, made.bits) == bucket for bucket, frame in buckets for hash_value in frame["key_hash"])
    assert {row["record_id"]: row["field_body"] for row in everything.iter_rows(named=True)} == {
        ticket["id"]: ticket["body"] for ticket in tickets(1000)
    }


def test_buckets_do_not_depend_on_the_order_of_the_source(tmp_path: Path, small_buckets: None) -> None:
    (tmp_path / "a").mkdir()
    rows = [*tickets(300), *({"id": "T-5", "body": text} for text in ("z", "b", "a"))]
    _, forward = buckets_of(source(tmp_path, rows))
    _, backward = buckets_of(source(tmp_path / "a", rows[::-1]))
    assert pl.concat(frame for _, frame in forward).equals(pl.concat(frame for _, frame in backward))


def test_rows_that_share_an_id_become_one_with_their_number_within_and_between_runs(tmp_path: Path, small_buckets: None) -> None:
    rows = [*tickets(300), {"id": "T-299", "body": "again"}, {"id": "T-7", "body": "again"}, {"id": "T-7", "body": "and again"}]
    made, buckets = buckets_of(source(tmp_path, rows))
    repeated = pl.concat(frame for _, frame in buckets).filter(pl.col("copies") > 1)
    assert dict(repeated.select("record_id", "copies").iter_rows()) == {"T-299": 2, "T-7": 3}
    assert (made.tally.rows, made.tally.repeated) == (303, 3)
    assert sorted(made.tally.repeated_examples) == ["T-299", "T-7"]


def test_ids_whose_rows_differ_in_acl_are_counted_once_within_and_between_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_buckets: None
) -> None:
    monkeypatch.setattr(source_text, "READ_BYTES", 256)
    within = [{"id": "T-1", "body": "again", "acl": "other"}, {"id": "T-2", "body": "again", "acl": "support"}]
    between = [{"id": record_id, "body": "and again", "acl": acl} for record_id, acl in (("T-1", "third"), ("T-3", None), ("T-3", "x"))]
    made, _ = buckets_of(source(tmp_path, [*tickets(10), *within, *tickets(300)[10:], *between]))
    assert (made.tally.repeated, made.tally.at_odds, sorted(made.tally.at_odds_examples)) == (5, 2, ["T-1", "T-3"])


def test_one_id_in_every_row_is_one_row(tmp_path: Path, small_buckets: None) -> None:
    made, buckets = buckets_of(source(tmp_path, [{"id": "same", "body": str(number)} for number in range(1000)]))
    assert [frame.select("record_id", "copies").rows() for _, frame in buckets] == [[("same", 1000)]]
    assert made.tally.repeated == 999


def test_rows_without_an_id_are_named_after_their_file_and_place(tmp_path: Path) -> None:
    rows = [{"id": "T-1", "body": "a"}, {"id": None, "body": "b"}, {"id": " \u200b", "body": "c"}, {"body": "d"}, {"id": 5, "body": "e"}]
    made, buckets = buckets_of(source(tmp_path, rows))
    found = {row["record_id"]: row["fault_class"] for _, frame in buckets for row in frame.iter_rows(named=True)}
    assert found == {
        "T-1": None,
        "row:t.jsonl:2": "no_id",
        "row:t.jsonl:3": "no_id",
        "row:t.jsonl:4": "no_id",
        "row:t.jsonl:5": "malformed",
    }
    assert made.tally.without_id == 3


def test_a_pilot_is_the_ids_with_the_smallest_hashes_with_all_their_copies(tmp_path: Path, small_buckets: None) -> None:
    smallest = sorted((ticket["id"] for ticket in tickets(500)), key=lambda record_id: key_hash(str(record_id)))[:50]
    rows = [*tickets(500), {"id": smallest[0], "body": "again"}, {"id": "T-499", "body": "again"}]
    made, buckets = buckets_of(source(tmp_path, rows), pilot=50)
    (_, frame), *more = buckets
    assert not more
    assert frame["record_id"].to_list() == smallest
    assert made.tally.rows == 51


def test_nothing_is_left_on_disk(tmp_path: Path) -> None:
    buckets_of(source(tmp_path, tickets(10)))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_spill_gives_back_what_each_bucket_was_given(tmp_path: Path) -> None:
    frames = [pl.DataFrame({"key_hash": [-5, 3, 3, 9], "text": ["a", None, "c", "d"]}), pl.DataFrame({"key_hash": [9], "text": ["e"]})]
    with Spill(tmp_path, [-10, 0, 5, 100]) as spill:
        for frame in frames:
            spill.add(frame)
        assert spill.rows == [1, 2, 2, 0]
        assert [sorted(spill.hashes(bucket)) for bucket in range(4)] == [[-5], [3, 3], [9, 9], []]
        assert [row for frame in spill.frames(2) for row in frame.select("key_hash", "text").iter_rows()] == [(9, "e"), (9, "d")]
