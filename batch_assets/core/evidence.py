"""What was counted in a release: the evidence that the checks of `core/validation.py` judge. Counted by `stores/release_facts.py`.

Facts of ranges add up, whatever their number: examples and segments are bounded, so memory does not grow with the release.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

EXAMPLES_MAX = 10
EXAMPLE_CHARACTERS_MAX = 60  # ids are opaque text of any length
SEGMENTS_MAX = 10_000  # more than this is no segment but a key, and its counts would grow with the input

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Rows that should not be as they are: how many, and the first few by name. `notes` say what is wrong with them."""

    count: int = 0
    ids: tuple[str, ...] = ()
    shards: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: "Found") -> "Found":
        return Found(
            count=self.count + other.count,
            ids=_first(self.ids, other.ids),
            shards=_first(self.shards, other.shards),
            notes=_first(self.notes, other.notes),
        )

    def named(self) -> str:
        """`T-118, T-2044 and 7 more`."""
        shown = ", ".join(shown_id(each) for each in self.ids)
        more = self.count - len(self.ids)
        return f"{shown} and {more:,} more" if more > 0 else shown


def _first(ours: tuple[_T, ...], theirs: tuple[_T, ...]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys((*ours, *theirs)))[:EXAMPLES_MAX]


def shown_id(record_id: str) -> str:
    """A record id fit for a message: bounded, and control characters escaped."""
    shown = record_id if record_id.isprintable() else record_id.encode("unicode_escape").decode()
    return shown if len(shown) <= EXAMPLE_CHARACTERS_MAX else f"{shown[: EXAMPLE_CHARACTERS_MAX - 1]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCount:
    """Records of one segment, and its dead letters by class."""

    records: int = 0
    dead_by_class: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def dead(self) -> int:
        """Dead letters of all classes."""
        return sum(self.dead_by_class.values())

    def __add__(self, other: "SegmentCount") -> "SegmentCount":
        return SegmentCount(records=self.records + other.records, dead_by_class=Counter(self.dead_by_class) + Counter(other.dead_by_class))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFacts:
    """What was counted in one range of a release, or, added up, in all of it."""

    records: int = 0  # rows of the frozen input
    surplus: int = 0  # surplus copies of repeated ids
    rows: int = 0  # rows of the release
    results: int = 0
    dead_by_class: Mapping[str, int] = field(default_factory=dict[str, int])  # of all rows, whatever their segment
    missing: Found = field(default_factory=Found)  # in the frozen input only
    foreign: Found = field(default_factory=Found)  # in the release only
    doubled: Found = field(default_factory=Found)  # more than once in the release
    altered: Found = field(default_factory=Found)  # hash, shard, digest or disposition are not those of the frozen input
    misplaced: Found = field(default_factory=Found)  # out of order, or in another file than their hash says
    other_recipe: Found = field(default_factory=Found)
    widened: Found = field(default_factory=Found)  # acl, record class or segment are not those of the frozen input
    broken: Found = field(default_factory=Found)  # not what the release schema or the answer schema allows
    segments: Mapping[str | None, SegmentCount] = field(default_factory=dict[str | None, SegmentCount])
    segments_dropped: int = 0  # records of segments beyond SEGMENTS_MAX

    @property
    def dead_letters(self) -> int:
        """Rows that are no result."""
        return self.rows - self.results

    def __add__(self, other: "ReleaseFacts") -> "ReleaseFacts":
        segments, dropped = _merged(self.segments, other.segments)
        return ReleaseFacts(
            records=self.records + other.records,
            surplus=self.surplus + other.surplus,
            rows=self.rows + other.rows,
            results=self.results + other.results,
            dead_by_class=Counter(self.dead_by_class) + Counter(other.dead_by_class),
            missing=self.missing + other.missing,
            foreign=self.foreign + other.foreign,
            doubled=self.doubled + other.doubled,
            altered=self.altered + other.altered,
            misplaced=self.misplaced + other.misplaced,
            other_recipe=self.other_recipe + other.other_recipe,
            widened=self.widened + other.widened,
            broken=self.broken + other.broken,
            segments=segments,
            segments_dropped=self.segments_dropped + other.segments_dropped + dropped,
        )


def _merged(
    ours: Mapping[str | None, SegmentCount], theirs: Mapping[str | None, SegmentCount]
) -> tuple[dict[str | None, SegmentCount], int]:
    merged = dict(ours)
    dropped = 0
    for segment, counts in theirs.items():
        if segment in merged:
            merged[segment] += counts
        elif len(merged) < SEGMENTS_MAX:
            merged[segment] = counts
        else:
            dropped += counts.records
    return merged, dropped
