"""Frozen input: what is read is what was planned."""

from pathlib import Path

import polars as pl
import pytest

from batch_assets.core.errors import ObjectExistsError, UnfitEnvironmentError
from batch_assets.stores.frozen_input import FrozenInput, frozen_schema
from batch_assets.stores.objects import LocalObjects


@pytest.fixture
def frozen(tmp_path: Path) -> FrozenInput:
    return FrozenInput(LocalObjects(str(tmp_path)), job="j", version="v0001-abcdef", attempt="a1")


def frame(text: str = "hello") -> pl.DataFrame:
    schema = frozen_schema(("body",))
    return pl.DataFrame([{"position": 0, "record_id": "T-1", "key_hash": 7, "disposition": "answer", "field_body": text}], schema=schema)


def test_a_shard_reads_back_as_it_was_written_and_may_be_written_again(frozen: FrozenInput) -> None:
    sha256 = frozen.write(42, frame())
    assert frozen.write(42, frame()) == sha256
    assert frozen.read(42, sha256).equals(frame())
    assert frozen.path(42) == "j/versions/v0001-abcdef/input/a1/shard-00042.parquet"


def test_other_content_never_replaces_a_shard(frozen: FrozenInput) -> None:
    sha256 = frozen.write(1, frame())
    with pytest.raises(ObjectExistsError):
        frozen.write(1, frame("another"))
    assert frozen.read(1, sha256).equals(frame())


def test_a_shard_that_was_changed_is_refused_with_both_digests(frozen: FrozenInput, tmp_path: Path) -> None:
    sha256 = frozen.write(1, frame())
    path = tmp_path / frozen.path(1)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UnfitEnvironmentError, match=sha256):
        frozen.read(1, sha256)
