"""Slots: one order that all writers agree on, over a real folder."""

from pathlib import Path

import pytest

from batch_assets.core.errors import ObjectExistsError, ObjectMissingError, StaleLeaseError, UnfitEnvironmentError
from batch_assets.core.shard_log import Answered, Dead, Failed, Fence, Reopen, fold
from batch_assets.stores.objects import LocalObjects
from batch_assets.stores.shard_log import CHUNK_ENTRIES_MAX, ShardLog, decode, encode

VERSION = "v0001-3fa9c1"
FENCE = Fence(epoch=1, round=0, worker="w1", window=8, previous_end=None)


def answered(record_id: str, *, epoch: int = 1) -> Answered:
    return Answered(record_id, epoch, 1, '{"summary":"Grüße \\n 退款"}', 10, 0, 5, "w1")


class FlakyObjects(LocalObjects):
    """Fails `failures` times before, or right after, each create took place."""

    def __init__(self, root: str, *, failures: int = 0, lost_acknowledgements: int = 0) -> None:
        super().__init__(root)
        self.failures = failures
        self.lost_acknowledgements = lost_acknowledgements

    def create(self, path: str, data: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the store is busy")
        super().create(path, data)
        if self.lost_acknowledgements:
            self.lost_acknowledgements -= 1
            raise TimeoutError("no answer")


def log_over(objects: LocalObjects) -> ShardLog:
    return ShardLog(objects, job="tickets", version=VERSION, shard=42, pause=lambda _seconds: None)


@pytest.fixture
def log(tmp_path: Path) -> ShardLog:
    return log_over(LocalObjects(str(tmp_path)))


def test_entries_of_every_kind_come_back_as_they_were_put() -> None:
    entries = [
        FENCE,
        answered("00123"),
        answered("row:tickets.csv:7"),
        Failed("x", 1, 1, "schema", "schema at $.category", 9),
        Dead("x", 1, 3, "schema", "schema at $.category"),
        answered("y"),
        Reopen(2, 1, ("x", "z")),
    ]
    assert decode(encode(entries)) == entries


def test_a_flipped_bit_or_a_cut_tail_makes_a_slot_unreadable_not_different() -> None:
    data = encode([FENCE, answered("a")])
    for position in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[position] ^= 1
        assert decode(bytes(flipped)) is None
    assert decode(data[:-1]) is None
    assert decode(b"") is None


def test_slots_are_read_back_in_order_under_the_path_of_the_design(log: ShardLog, tmp_path: Path) -> None:
    writer = log.writer(epoch=1, next_slot=0)
    assert [writer.put([FENCE]), writer.put([answered("a")])] == [0, 1]
    assert (tmp_path / f"tickets/versions/{VERSION}/log/shard-00042/00000001.arrow").exists()
    assert log.read(None) == log.read(2) == [[FENCE], [answered("a")]]
    assert log.read(1) == [[FENCE]]


def test_a_slot_that_was_staged_and_is_gone_is_an_error_that_names_it(log: ShardLog) -> None:
    log.writer(epoch=1, next_slot=0).put([FENCE])
    with pytest.raises(UnfitEnvironmentError, match=r"00000001\.arrow does not exist"):
        log.read(2)


def test_a_writer_goes_behind_a_taken_slot_and_leaves_out_what_is_there_under_its_epoch(log: ShardLog) -> None:
    log.writer(epoch=1, next_slot=0).put([FENCE, answered("a"), Failed("b", 1, 1, "schema", "", 0)])
    second = log.writer(epoch=1, next_slot=0)
    second.put([answered("a"), Failed("b", 1, 1, "schema", "", 0), Failed("b", 1, 2, "schema", "", 0), answered("c")])
    assert log.read(None)[1] == [Failed("b", 1, 2, "schema", "", 0), answered("c")]


def test_an_older_answer_in_a_taken_slot_does_not_stand_in_for_ours(log: ShardLog) -> None:
    """Behind our fence it is void, so leaving ours out would lose the record."""
    owner = log.writer(epoch=2, next_slot=0)
    owner.put([FENCE._replace(epoch=2)])
    log.writer(epoch=1, next_slot=1).put([answered("a", epoch=1)])
    owner.put([answered("a", epoch=2)])
    assert fold(log.read(None), staged_rounds={}).answered["a"].epoch == 2


def test_a_writer_that_meets_a_higher_fence_stops(log: ShardLog) -> None:
    slow = log.writer(epoch=1, next_slot=0)
    slow.put([FENCE])
    log.writer(epoch=2, next_slot=1).put([FENCE._replace(epoch=2, worker="w2")])
    with pytest.raises(StaleLeaseError, match="epoch held 1, current 2"):
        slow.put([answered("a")])
    assert len(log.read(None)) == 2


def test_a_claimer_learns_of_the_slots_that_were_taken_before_its_fence(log: ShardLog) -> None:
    first, second = log.writer(epoch=1, next_slot=0), log.writer(epoch=2, next_slot=0)
    first.put([FENCE, answered("a")])
    second.put([FENCE._replace(epoch=2)])
    assert second.passed == [[FENCE, answered("a")]]


def test_a_put_that_fails_for_a_passing_reason_is_tried_again(tmp_path: Path) -> None:
    log = log_over(FlakyObjects(str(tmp_path), failures=2))
    log.writer(epoch=1, next_slot=0).put([answered("a")])
    assert log.read(None) == [[answered("a")]]


def test_a_put_whose_acknowledgement_is_lost_stands_once(tmp_path: Path) -> None:
    log = log_over(FlakyObjects(str(tmp_path), lost_acknowledgements=1))
    writer = log.writer(epoch=1, next_slot=0)
    writer.put([answered("a")])
    writer.put([answered("b")])
    assert log.read(None) == [[answered("a")], [answered("b")]]


def test_a_store_that_stays_down_is_raised_not_skipped(tmp_path: Path) -> None:
    log = log_over(FlakyObjects(str(tmp_path), failures=1000))
    with pytest.raises(OSError, match="busy"):
        log.writer(epoch=1, next_slot=0).put([answered("a")])


def test_a_chunk_is_bounded(log: ShardLog) -> None:
    with pytest.raises(ValueError, match="split them"):
        log.writer(epoch=1, next_slot=0).put([answered(str(number)) for number in range(CHUNK_ENTRIES_MAX + 1)])


def test_an_object_is_created_once_and_is_whole(tmp_path: Path) -> None:
    objects = LocalObjects(str(tmp_path))
    objects.create("a/b/c", b"first")
    with pytest.raises(ObjectExistsError):
        objects.create("a/b/c", b"second")
    assert objects.get("a/b/c") == b"first"
    with pytest.raises(ObjectMissingError):
        objects.get("a/b/d")
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["c"]


def test_a_path_cannot_leave_the_root(tmp_path: Path) -> None:
    for path in ("../x", "/etc/passwd", "a/../../x", ""):
        with pytest.raises(ValueError, match="no path below the root"):
            LocalObjects(str(tmp_path)).create(path, b"")


def test_file_systems_without_unnamed_files_get_the_same_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.O_TMPFILE")
    test_an_object_is_created_once_and_is_whole(tmp_path)
