"""Pinning and reading a source: what is read is what was pinned, one bad line is one bad record, memory is bounded elsewhere."""

import json
import shutil
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable, write_deltalake

from batch_assets.core.errors import RefusedError
from batch_assets.core.identity import digest_of
from batch_assets.core.spec import Snapshot, SourceKind
from batch_assets.stores import source_tables, source_text
from batch_assets.stores.snapshots import MALFORMED, kind_of, pin_snapshot, read_batches, source_columns, source_size

COLUMNS = ["id", "text"]


def pinned(path: Path) -> Snapshot:
    return pin_snapshot(str(path), kind_of(str(path)))


def rows(path: Path, columns: list[str] = COLUMNS, scalars: tuple[str, ...] = ()) -> list[tuple[str | None, ...]]:
    """All rows: the columns, then what is malformed."""
    return [row for batch in read_batches(pinned(path), columns, scalars=scalars) for row in batch.frame.iter_rows()]


def csv_file(folder: Path, content: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl_file(folder: Path, *lines: object) -> Path:
    path = folder / "t.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return path


def refusal(path: Path, columns: list[str] = COLUMNS) -> str:
    with pytest.raises(RefusedError) as refused:
        rows(path, columns)
    return str(refused.value)


# ---- what is pinned


def test_equal_bytes_have_one_digest_wherever_they_lie_and_one_byte_more_another(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = pinned(csv_file(tmp_path, "id,text\n1,a\n"))
    assert pinned(csv_file(tmp_path / "a", "id,text\n1,a\n")).digest == first.digest
    assert pinned(csv_file(tmp_path, "id,text\n1,a \n")).digest != first.digest


def test_a_folder_and_a_pattern_are_sources_of_all_their_files_in_order_of_name(tmp_path: Path) -> None:
    csv_file(tmp_path, "id,text\n3,c\n", "b.csv")
    csv_file(tmp_path, "id,text\n1,a\n2,b\n", "a.csv")
    csv_file(tmp_path, "nothing of ours", "_SUCCESS")
    csv_file(tmp_path, "nothing of ours", ".a.csv.crc")
    assert kind_of(str(tmp_path)) is SourceKind.CSV
    assert [name for name, *_ in rows(tmp_path)] == ["1", "2", "3"]
    assert [file.name for file in pinned(tmp_path / "?.csv").files] == ["a.csv", "b.csv"]
    assert [(batch.file_name, batch.first_row) for batch in read_batches(pinned(tmp_path), COLUMNS)] == [("a.csv", 1), ("b.csv", 1)]


def test_a_source_that_is_not_there_is_refused_with_what_it_may_be(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"no \.csv file here"):
        pinned(tmp_path / "missing.csv")
    with pytest.raises(RefusedError, match="no Delta table here"):
        pinned(tmp_path / "missing")
    with pytest.raises(RefusedError, match="on another host"):
        pin_snapshot("s3://bucket/table", SourceKind.DELTA)


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_a_file_that_changes_between_pinning_and_reading_is_refused(tmp_path: Path, name: str) -> None:
    frame = pl.DataFrame({"id": ["1", "2"], "text": ["a", "b"]})
    write = {"t.csv": frame.write_csv, "t.jsonl": frame.write_ndjson, "t.parquet": frame.write_parquet}[name]
    write(tmp_path / name)
    snapshot = pinned(tmp_path / name)
    content = bytearray((tmp_path / name).read_bytes())
    content[-4 if name != "t.parquet" else 5] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RefusedError, match=r"changed while it was read|cannot be read"):
        list(read_batches(snapshot, COLUMNS))


def test_a_file_that_came_or_went_after_pinning_is_refused(tmp_path: Path) -> None:
    csv_file(tmp_path, "id,text\n1,a\n", "a.csv")
    snapshot = pinned(tmp_path)
    csv_file(tmp_path, "id,text\n2,b\n", "b.csv")
    with pytest.raises(RefusedError, match="changed"):
        list(read_batches(snapshot, COLUMNS))


# ---- CSV


def test_csv_is_text_and_nothing_is_inferred(tmp_path: Path) -> None:
    path = csv_file(tmp_path, 'id,text\r\n00123,"a, ""b""\nc"\r\n7,NA\n')
    assert rows(path) == [("00123", 'a, "b"\nc', None), ("7", "NA", None)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"2,b,c\n", "3 fields, the header has 2"),
        (b"2\n", "1 fields, the header has 2"),
        (b"2,caf\xe9\n", "not UTF-8"),
        (b"2,\xed\xa0\x80\n", "not UTF-8"),  # a lone surrogate, as some programs write it
        (b'2,"b"c\n', "broken quoting"),
    ],
)
def test_a_bad_csv_line_is_one_malformed_record_and_its_neighbours_are_fine(tmp_path: Path, line: bytes, why: str) -> None:
    path = csv_file(tmp_path, b"id,text\n1,a\n" + line + b"3,c\n")
    assert rows(path) == [("1", "a", None), (None, None, f"line 3: {why}"), ("3", "c", None)]


def test_blank_lines_a_byte_order_mark_and_a_missing_last_line_end_are_no_faults(tmp_path: Path) -> None:
    path = csv_file(tmp_path, b"\xef\xbb\xbf\n\nid,text\n\n1,a\n   \n2,b")
    assert rows(path) == [("1", "a", None), ("2", "b", None)]


@pytest.mark.parametrize(
    "rest",
    ['2,"b\n3,c\n4,d\n', '2,"b\n3,"c"\n4,d\n', '2,"'],
    ids=["never closed", "closed by a later record's quote", "cut off"],
)
def test_a_csv_whose_quoting_is_broken_is_refused_with_the_line(tmp_path: Path, rest: str) -> None:
    assert "broken from line 3 on" in refusal(csv_file(tmp_path, "id,text\n1,a\n" + rest))


def test_a_quote_that_never_closes_is_refused_before_the_file_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_text, "LINE_BYTES_MAX", 4096)
    path = csv_file(tmp_path, 'id,text\n1,"a\n' + "2,bbbbbbbbbb\n" * 2000 + '3,"c"\n')
    assert "broken from line 2 on" in refusal(path)


def test_a_line_that_is_too_long_is_one_malformed_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_text, "LINE_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(source_text, "READ_BYTES", 4096)
    path = csv_file(tmp_path, "id,text\n1,a\n2," + "b" * (2 << 20) + "\n3,c\n")
    assert rows(path) == [("1", "a", None), (None, None, "line 3: longer than 1 MiB"), ("3", "c", None)]
    path = jsonl_file(tmp_path, {"id": "1", "text": "a"}, {"id": "2", "text": "b" * (2 << 20)}, {"id": "3", "text": "c"})
    assert rows(path) == [("1", "a", None), (None, None, "line 2: longer than 1 MiB"), ("3", "c", None)]


@pytest.mark.parametrize("read_bytes", [7, 64, 100_000])
def test_records_are_the_same_wherever_a_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int) -> None:
    monkeypatch.setattr(source_text, "READ_BYTES", read_bytes)
    monkeypatch.setattr(source_text, "BATCH_ROWS", 3)
    texts = [f"line {number}\nand, {'x' * (number % 9)} \u2028 é" if number % 3 else f"plain {number}" for number in range(50)]
    path = tmp_path / "t.csv"
    pl.DataFrame({"id": [str(number) for number in range(50)], "text": texts}).write_csv(path)
    assert rows(path) == [(str(number), text, None) for number, text in enumerate(texts)]
    firsts = [(batch.first_row, batch.frame["id"][0]) for batch in read_batches(pinned(path), COLUMNS)]
    assert all(str(first - 1) == record_id for first, record_id in firsts)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a header"),
        (b"\xff\xfei\x00d\x00\n", "not a header"),
        (b"id,text,id\n1,a,2\n", "names 'id' twice"),
        (b"id,body\n1,a\n", "no column text"),
    ],
)
def test_a_csv_without_a_usable_header_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    assert why in refusal(csv_file(tmp_path, content))


# ---- JSON Lines


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (b'{"id": "2", "text": ', (None, None, "line 2: not JSON")),
        (b'{"id": "2", "text": NaN}', (None, None, "line 2: not JSON")),
        (b'{"id": "2", "text": "a", "text": "b"}', (None, None, "line 2: not JSON")),
        (b'{"id": "2", "text": "\xe9"}', (None, None, "line 2: not UTF-8")),
        (b"[" * 100_000, (None, None, "line 2: not JSON")),
        (b'["2", "b"]', (None, None, "line 2: array, not an object")),
        (b'{"id": 2, "text": "b"}', (None, "b", "line 2: id holds number, not text")),
        (b'{"id": "2", "text": 7}', ("2", None, "line 2: text holds number, not text")),
        (b'{"id": "2", "text": ["b"]}', ("2", None, "line 2: text holds array, not text")),
        (b'{"id": "2", "text": "\\ud800 b"}', ("2", None, "line 2: text holds a lone surrogate")),
        (b'{"id": "2", "text": "b\\u0000"}', ("2", None, "text holds a NUL")),
        (b'{"id": "2", "text": null}', ("2", None, None)),
        (b'{"id": "2"}', ("2", None, None)),
        (b'{"id": "2", "text": "\\ud83d\\ude00", "more": 7}', ("2", "\U0001f600", None)),
    ],
)
def test_a_json_line_is_one_record_whatever_is_wrong_with_it(tmp_path: Path, line: bytes, row: tuple[str | None, ...]) -> None:
    path = jsonl_file(tmp_path, {"id": "1", "text": "a"}, line, {"id": "3", "text": "c"})
    assert rows(path) == [("1", "a", None), row, ("3", "c", None)]


def test_labels_may_be_any_scalar_and_come_as_json(tmp_path: Path) -> None:
    path = jsonl_file(
        tmp_path, {"id": "1", "gold": 'b"x'}, {"id": "2", "gold": 3}, {"id": "3", "gold": True}, {"id": "4"}, {"id": "5", "gold": [1]}
    )
    assert [row[1:] for row in rows(path, ["id"], ("gold",))] == [
        ('"b\\"x"', None),
        ("3", None),
        ("true", None),
        (None, None),
        (None, "line 5: gold holds array, not text"),
    ]
    parquet = tmp_path / "t.parquet"
    for values, texts in (
        (['b"x', None], ['"b\\"x"', None]),
        ([3, None], ["3", None]),
        ([0.5, None], ["0.5", None]),
        ([True, None], ["true", None]),
    ):
        pl.DataFrame({"id": ["1", "2"], "gold": values}).write_parquet(parquet)
        assert [row[1] for row in rows(parquet, ["id"], ("gold",))] == texts
    assert [row[1] for row in rows(csv_file(tmp_path, "id,gold\n1,3\n"), ["id"], ("gold",))] == ['"3"']


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "delta"])
def test_a_column_that_is_also_a_label_comes_as_it_is_and_as_json(tmp_path: Path, kind: str) -> None:
    frame = pl.DataFrame({"id": ["1"], "gold": ['b"x']})
    path = tmp_path / ("table" if kind == "delta" else f"t.{kind}")
    write = {"csv": frame.write_csv, "jsonl": frame.write_ndjson, "parquet": frame.write_parquet}
    if kind == "delta":
        write_deltalake(path, frame)
    else:
        write[kind](path)
    assert rows(path, ["id", "gold"], ("gold", "id")) == [("1", 'b"x', '"b\\"x"', '"1"', None)]


def test_a_label_beyond_all_floats_is_malformed_because_json_has_no_infinity(tmp_path: Path) -> None:
    path = jsonl_file(tmp_path, b'{"id": "1", "gold": 1e999}', b'{"id": "2", "gold": -1e999}', {"id": "3", "gold": 1e300})
    assert rows(path, ["id"], ("gold",)) == [
        ("1", None, "line 1: gold holds a number beyond all floats"),
        ("2", None, "line 2: gold holds a number beyond all floats"),
        ("3", "1e+300", None),
    ]


# ---- parquet and Delta


def test_integers_become_decimal_text_and_a_nul_spoils_only_its_row(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pl.DataFrame({"id": [1, 2, None], "text": ["a", "b\0", None]}).write_parquet(path)
    assert rows(path) == [("1", "a", None), ("2", None, "text holds a NUL"), (None, None, None)]


def test_a_column_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pl.DataFrame({"id": ["1"], "text": [0.5]}).write_parquet(path)
    assert "column text has a type that is not text" in refusal(path)


def test_parquet_comes_in_bounded_slices_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_tables, "SLICE_BYTES", 64 << 10)
    path = tmp_path / "t.parquet"
    pl.DataFrame({"id": [str(number) for number in range(5000)], "text": ["x" * 100] * 5000}).write_parquet(path)
    batches = list(read_batches(pinned(path), COLUMNS))
    assert [row for batch in batches for row in batch.frame["id"]] == [str(number) for number in range(5000)]
    assert max(batch.frame.height for batch in batches[1:]) < 1000
    assert [batch.first_row for batch in batches] == [int(batch.frame["id"][0]) + 1 for batch in batches]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Three versions: two files in two partitions, two files more with another column, then everything overwritten."""
    path = tmp_path / "tickets and more"
    first = pl.DataFrame({"id": ["1", "2"], "text": ["a", "b"], "market": ["de", "us/x y"]})
    write_deltalake(path, first, partition_by=["market"])
    write_deltalake(path, first.with_columns(id=pl.Series(["3", "4"]), more=pl.lit("m")), mode="append", schema_mode="merge")
    write_deltalake(
        path,
        pl.DataFrame(
            {"id": ["9"], "text": ["z"], "market": [None], "more": ["n"]}, schema=dict.fromkeys(("id", "text", "market", "more"), pl.String)
        ),
        mode="overwrite",
    )
    return path


def at_version(path: Path, version: int) -> Snapshot:
    return Snapshot(kind=SourceKind.DELTA, uri=str(path), table_id=str(DeltaTable(path).metadata().id), table_version=version)


def test_a_delta_table_is_pinned_by_id_and_version_and_read_as_it_was_then(table: Path) -> None:
    snapshot = pinned(table)
    assert (snapshot.kind, snapshot.table_version, snapshot.label) == (SourceKind.DELTA, 2, "tickets and more@2")
    columns = ["id", "market", "more"]
    assert [row[:3] for batch in read_batches(snapshot, columns) for row in batch.frame.iter_rows()] == [("9", None, "n")]
    older = {row[:3] for batch in read_batches(at_version(table, 1), columns) for row in batch.frame.iter_rows()}
    assert older == {("1", "de", None), ("2", "us/x y", None), ("3", "de", "m"), ("4", "us/x y", "m")}
    assert source_size(at_version(table, 1)).rows == 4
    assert source_columns(str(table), SourceKind.DELTA) == dict.fromkeys(("id", "text", "market", "more"), "text")


def test_only_partition_columns_can_be_read(table: Path) -> None:
    found = [row[0] for batch in read_batches(at_version(table, 1), ["market"]) for row in batch.frame.iter_rows()]
    assert sorted(found) == ["de", "de", "us/x y", "us/x y"]


def test_a_version_whose_files_were_vacuumed_is_refused_before_reading(table: Path) -> None:
    old = at_version(table, 1)
    DeltaTable(table).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(RefusedError, match="data files of this table version are gone"):
        list(read_batches(old, COLUMNS))
    assert [row[0] for row in rows(table)] == ["9"]


def test_another_table_under_the_same_path_is_refused(table: Path) -> None:
    old = at_version(table, 2)
    with pytest.raises(RefusedError, match="changed"):
        list(read_batches(Snapshot(kind=SourceKind.DELTA, uri=old.uri, table_id="another", table_version=2), COLUMNS))


def test_a_table_restored_from_a_backup_and_written_to_anew_is_another_snapshot_under_the_same_label(table: Path, tmp_path: Path) -> None:
    rows_then = pl.DataFrame({"id": ["1"], "text": ["a"], "market": ["de"], "more": ["m"]})
    shutil.copytree(table, tmp_path / "backup")
    write_deltalake(table, rows_then, mode="append")
    first = pinned(table)
    shutil.rmtree(table)
    shutil.copytree(tmp_path / "backup", table)
    write_deltalake(table, rows_then.with_columns(id=pl.lit("2")), mode="append")
    second = pinned(table)
    assert (second.table_id, second.table_version, second.label) == (first.table_id, first.table_version, first.label)
    assert second.digest != first.digest
    with pytest.raises(RefusedError, match="changed"):
        list(read_batches(first, COLUMNS))
    assert pinned(Path(shutil.copytree(table, tmp_path / "copy"))).digest == second.digest


def test_a_snapshot_that_was_stored_without_the_content_of_its_table_keeps_its_digest(table: Path) -> None:
    old = at_version(table, 2)
    assert old.digest == digest_of({"kind": "delta", "table_id": old.table_id, "version": 2})
    assert next(iter(read_batches(old, ["id"]))).frame["id"].to_list() == ["9"]


def test_a_table_with_deletion_vectors_is_refused_because_deleted_rows_would_come_back(table: Path) -> None:
    first_log = min((table / "_delta_log").glob("*.json"))
    protocol = {
        "protocol": {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": ["deletionVectors"],
            "writerFeatures": ["deletionVectors"],
        }
    }
    lines = [line for line in first_log.read_text().splitlines() if "protocol" not in json.loads(line)]
    first_log.write_text("\n".join([json.dumps(protocol), *lines]) + "\n")
    with pytest.raises(RefusedError, match="deletionVectors"):
        pinned(table)


def test_columns_and_types_are_known_before_reading(tmp_path: Path) -> None:
    pl.DataFrame({"id": [1], "text": ["a"], "ok": [True], "n": [0.5], "tags": [["a"]]}).write_parquet(tmp_path / "a.parquet")
    pl.DataFrame({"id": ["1"], "text": ["a"], "only_here": ["x"]}).write_parquet(tmp_path / "b.parquet")
    assert source_columns(str(tmp_path / "a.parquet"), SourceKind.PARQUET) == {
        "id": "integer",
        "text": "text",
        "ok": "boolean",
        "n": "float",
        "tags": "List(String)",
    }
    assert source_columns(str(tmp_path / "*.parquet"), SourceKind.PARQUET) == {"id": "integer|text", "text": "text"}
    lines = jsonl_file(tmp_path, {"id": "1", "a": 1}, {"id": 2, "b": None}, b"nonsense")
    assert source_columns(str(lines), SourceKind.JSONL) == {"id": "number|text", "a": "number", "b": "null"}


def test_every_batch_ends_with_the_malformed_column(tmp_path: Path) -> None:
    batch = next(iter(read_batches(pinned(csv_file(tmp_path, "a,id,text\n1,2,3\n")), ["text", "id"])))
    assert batch.frame.columns == ["text", "id", MALFORMED]
    assert set(batch.frame.dtypes) == {pl.String}
