"""Releases as data: how shards are grouped into files, what names a release, what its digest covers, and what may follow what.

Pure. Files are written and read by `stores/releases.py`; whether a release is good is decided in `core/validation.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from batch_assets.core.identity import digest_of, short
from batch_assets.core.records import HASH_OFFSET

# About one bucket of the planner: 1 KB rows make a frame of 50 MB and a file of 20 MB; 50 M records make 1,000 files, which open in 10 ms.
FILE_ROWS = 50_000
HASH_MIN = -HASH_OFFSET
HASH_MAX = HASH_OFFSET - 1
CANARY_SHARD = 0  # a sample drawn from everywhere; every other shard is one stretch of the hash order


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpan:
    """One shard as the release sees it: its rows and its hash range, both ends included."""

    number: int
    rows: int
    hash_low: int
    hash_high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """One file to be: whole shards, and the stretch of the hash order it covers. The ranges of a release cover everything, once."""

    shards: tuple[int, ...]
    hash_low: int
    hash_high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFile:
    """One parquet file of a release. `sha256` (hex) is part of its name; `hash_low` > `hash_high` when it has no rows."""

    name: str
    rows: int
    size_bytes: int
    sha256: str
    hash_low: int
    hash_high: int


def file_ranges(shards: Sequence[ShardSpan], *, file_rows: int = FILE_ROWS) -> list[FileRange]:
    """Whole shards in hash order, up to `file_rows` a file; shards that share a hash share a file, so files are disjoint in it.

    The canary is in none of the groups: its rows belong into every range by their hash.
    """
    ordered = sorted((span for span in shards if span.number != CANARY_SHARD), key=lambda span: (span.hash_low, span.hash_high))
    groups: list[list[ShardSpan]] = [[]]
    for span in ordered:
        group = groups[-1]
        touches = bool(group) and span.hash_low <= max(other.hash_high for other in group)
        if group and not touches and sum(other.rows for other in group) + span.rows > file_rows:
            groups.append([])
        groups[-1].append(span)
    return _covering(groups)


def _covering(groups: Sequence[Sequence[ShardSpan]]) -> list[FileRange]:
    """The gap between two groups goes to the earlier one; the ends are open."""
    lows = [HASH_MIN, *(group[0].hash_low for group in groups[1:])]
    highs = [*(low - 1 for low in lows[1:]), HASH_MAX]
    return [
        FileRange(shards=tuple(span.number for span in group), hash_low=low, hash_high=high)
        for group, low, high in zip(groups, lows, highs, strict=True)
    ]


def release_name(version: str, *, identity: str, source_version: int, rebuilds: int) -> str:
    """`r-v0007-3fa9c1-0a1b2c`: the same for everybody who builds the same rows, so a race or a crash ends in one release.

    `source_version` is the version of the outcomes table; `rebuilds` counts releases of the same rows whose files were damaged since.
    """
    return f"r-{version}-{short(digest_of({'identity': identity, 'outcomes': source_version, 'rebuilds': rebuilds}))}"


def release_digest(identity: str, files: Sequence[ReleaseFile]) -> str:
    """`sha256:…` over the identity of the version and the sorted (file, bytes, sha256)."""
    return digest_of({"identity": identity, "files": sorted([file.name, file.size_bytes, file.sha256] for file in files)})


def file_name(number: int, sha256: str) -> str:
    """`part-00042-<sha256>.parquet`: a name says what the file must hold, so writing it twice is harmless and a damaged one is found."""
    return f"part-{number:05d}-{sha256}.parquet"


def sha256_in(name: str) -> str:
    """The hash that a file's name promises; empty when it is no name of ours."""
    stem = name.rpartition("/")[2].removesuffix(".parquet")
    return stem.rpartition("-")[2] if stem.startswith("part-") else ""
