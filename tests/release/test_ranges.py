"""How shards become files, and what names a release."""

from batch_assets.core.release import (
    HASH_MAX,
    HASH_MIN,
    ReleaseFile,
    ShardSpan,
    file_name,
    file_ranges,
    release_digest,
    release_name,
    sha256_in,
)


def span(number: int, low: int, high: int, rows: int = 10) -> ShardSpan:
    return ShardSpan(number=number, rows=rows, hash_low=low, hash_high=high)


def test_the_ranges_of_a_release_cover_every_hash_once() -> None:
    ranges = file_ranges([span(2, 100, 200), span(1, -50, 50), span(3, 300, 400)], file_rows=10)
    assert [each.shards for each in ranges] == [(1,), (2,), (3,)]
    assert [(each.hash_low, each.hash_high) for each in ranges] == [(HASH_MIN, 99), (100, 299), (300, HASH_MAX)]


def test_whole_adjacent_shards_share_a_file_up_to_its_size() -> None:
    ranges = file_ranges([span(n, n * 10, n * 10 + 9) for n in range(1, 8)], file_rows=30)
    assert [each.shards for each in ranges] == [(1, 2, 3), (4, 5, 6), (7,)]


def test_shards_that_share_a_hash_share_a_file_so_files_stay_disjoint() -> None:
    ranges = file_ranges([span(1, 0, 50), span(2, 50, 90), span(3, 91, 99)], file_rows=10)
    assert [each.shards for each in ranges] == [(1, 2), (3,)]


def test_the_canary_is_in_no_group() -> None:
    assert [each.shards for each in file_ranges([span(0, HASH_MIN, HASH_MAX), span(1, 0, 9)])] == [(1,)]


def test_a_version_without_shards_has_one_empty_range() -> None:
    (only,) = file_ranges([])
    assert (only.shards, only.hash_low, only.hash_high) == ((), HASH_MIN, HASH_MAX)


def test_a_file_name_says_what_the_file_must_hold() -> None:
    assert sha256_in(file_name(3, "ab" * 32)) == "ab" * 32
    assert sha256_in("foreign.parquet") == ""


def test_the_digest_of_a_release_follows_files_and_identity_not_their_order() -> None:
    one = ReleaseFile(name="a", rows=1, size_bytes=2, sha256="x", hash_low=0, hash_high=0)
    two = ReleaseFile(name="b", rows=1, size_bytes=2, sha256="y", hash_low=1, hash_high=1)
    assert release_digest("i", [one, two]) == release_digest("i", [two, one])
    assert release_digest("i", [one, two]) != release_digest("j", [one, two])
    assert release_digest("i", [one]) != release_digest("i", [one, two])


def test_a_release_is_named_by_its_source_so_two_builders_agree() -> None:
    names = {release_name("v0001-abcdef", identity="i", source_version=source, rebuilds=again) for source in (1, 2) for again in (0, 1)}
    assert len(names) == 4
    assert all(name.startswith("r-v0001-abcdef-") for name in names)
