"""Count one range of a release against the frozen input of the same range, by key. What the counts mean: `core/evidence.py`.

Memory is that of one range (about 50,000 rows) whatever the size of the release. Nothing about the release's layout is believed: the range
of a file is what its own rows say.
"""

from collections.abc import Mapping
from typing import Final

import pandera.polars as pa
import polars as pl

from batch_assets.core.evidence import EXAMPLES_MAX, Found, ReleaseFacts, SegmentCount
from batch_assets.core.identity import short
from batch_assets.core.records import SET_ASIDE_CLASSES, TO_ANSWER, Outcome
from batch_assets.core.validation import Subject
from batch_assets.stores.release_schema import broken_rows

# What is needed of a frozen input; its prompt fields (the bulk) are dropped as soon as a shard is read.
FROZEN_COLUMNS: Final = ("record_id", "key_hash", "disposition", "surplus", "record_digest", "acl", "record_class", "segment", "labels")
KEPT: Final = ("key_hash", "shard", "surplus", "record_digest", "labels")  # must be the frozen input's
NO_CLASS: Final = "none"
FOUND: Final = "@found"  # after a column of both sides; no answer field can have a name with an @
INHERITED: Final = ("acl", "record_class", "segment")


def count_range(
    frozen: pl.DataFrame, rows: pl.DataFrame, *, subject: Subject, model: pa.DataFrameSchema, hash_low: int, hash_high: int
) -> ReleaseFacts:
    """`frozen` has FROZEN_COLUMNS and `shard`; `rows` are those of one file in its order; both ends of the range are included."""
    broken = broken_rows(rows, model)
    if not _countable(rows, model):
        return ReleaseFacts(records=frozen.height, surplus=_sum(frozen, "surplus"), missing=_named(frozen), broken=broken)
    once = rows.unique("record_id", keep="first", maintain_order=True)
    both = frozen.join(once, on="record_id", how="inner", suffix=FOUND, maintain_order="left")
    return ReleaseFacts(
        records=frozen.height,
        surplus=_sum(frozen, "surplus"),
        rows=rows.height,
        results=int((rows["outcome"] == Outcome.RESULT.value).sum()),
        dead_by_class=_dead_by_class(rows),
        missing=_named(frozen.join(once, on="record_id", how="anti", maintain_order="left")),
        foreign=_named(once.join(frozen, on="record_id", how="anti", maintain_order="left")),
        doubled=_doubled(frozen, rows),
        altered=_differing(both, {**_changes(both, KEPT), "disposition": _other_disposition()}),
        misplaced=_misplaced(rows, hash_low=hash_low, hash_high=hash_high),
        other_recipe=_other_recipe(rows, subject),
        widened=_differing(both, _changes(both, INHERITED)),
        broken=broken,
        segments=_segments(rows),
    )


def _countable(rows: pl.DataFrame, model: pa.DataFrameSchema) -> bool:
    """False when a column is missing or has another type: the schema check says so, nothing else can be asked."""
    return all(rows.schema.get(name) == column.dtype.type for name, column in model.columns.items())


def _sum(frame: pl.DataFrame, column: str) -> int:
    return int(frame[column].sum())


def _named(rows: pl.DataFrame, *, notes: tuple[str, ...] = ()) -> Found:
    """The count of these rows and the first of their ids, in the order given."""
    ids = tuple("" if each is None else each for each in rows["record_id"].head(EXAMPLES_MAX).to_list())
    shards = tuple(rows["shard"].drop_nulls().unique(maintain_order=True).head(EXAMPLES_MAX).to_list())
    return Found(count=rows.height, ids=ids, shards=shards, notes=notes)


def _doubled(frozen: pl.DataFrame, rows: pl.DataFrame) -> Found:
    """Ids, not rows: one that stands three times counts once. A frozen input that repeats an id is as wrong as a release that does."""
    repeated = [frame.filter(pl.col("record_id").is_duplicated()).select("record_id", "shard") for frame in (frozen, rows)]
    return _named(pl.concat(repeated).unique("record_id", keep="first", maintain_order=True))


def _changes(both: pl.DataFrame, columns: tuple[str, ...]) -> dict[str, pl.Expr]:
    return {name: pl.col(name).ne_missing(pl.col(f"{name}{FOUND}")) for name in columns if f"{name}{FOUND}" in both.columns}


def _other_disposition() -> pl.Expr:
    """A record that was set aside must be a dead letter of that class with no attempt; one to answer has none of the planner's classes."""
    aside = pl.col("disposition") != TO_ANSWER
    dead, classed = pl.col("outcome") == Outcome.DEAD_LETTER.value, pl.col("dead_class").eq_missing(pl.col("disposition"))
    as_aside = dead & classed & (pl.col("attempt") == 0)
    planners = pl.col("dead_class").is_in([each.value for each in SET_ASIDE_CLASSES]).fill_null(value=False)
    return (aside & ~as_aside) | (~aside & planners)


def _differing(both: pl.DataFrame, changes: Mapping[str, pl.Expr]) -> Found:
    flags = both.select(**changes)
    notes = tuple(name for name in changes if flags[name].any())
    return _named(both.filter(flags.select(pl.any_horizontal(pl.all())).to_series()), notes=notes) if notes else Found()


def _misplaced(rows: pl.DataFrame, *, hash_low: int, hash_high: int) -> Found:
    hashes, ids = pl.col("key_hash"), pl.col("record_id")
    before = (hashes < hashes.shift()) | ((hashes == hashes.shift()) & (ids < ids.shift()))
    return _named(rows.filter(before.fill_null(value=False) | (hashes < hash_low) | (hashes > hash_high)))


def _other_recipe(rows: pl.DataFrame, subject: Subject) -> Found:
    recipe = pl.col("recipe").ne_missing(subject.recipe_digest)
    version = pl.col("job_version").ne_missing(subject.version) | pl.col("origin_version").ne_missing(subject.version)
    other = rows.filter(recipe | version)
    if other.is_empty():
        return Found()
    recipes = [short(each) for each in other.filter(recipe)["recipe"].drop_nulls().unique().sort().to_list()]
    versions = pl.concat([other["job_version"], other["origin_version"]]).drop_nulls().unique().sort().to_list()
    notes = (*recipes, *(each for each in versions if each != subject.version))
    return _named(other, notes=notes[:EXAMPLES_MAX])


def _dead(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows that are no result, each with a class: one that lacks it is a dead letter all the same."""
    dead = rows.filter(pl.col("outcome").ne_missing(Outcome.RESULT.value))
    return dead.with_columns(pl.col("dead_class").fill_null(NO_CLASS))


def _dead_by_class(rows: pl.DataFrame) -> dict[str, int]:
    return dict(_dead(rows).group_by("dead_class").len().sort("dead_class").iter_rows())


def _segments(rows: pl.DataFrame) -> dict[str | None, SegmentCount]:
    counted = rows.group_by("segment").len().sort("segment")
    segments: dict[str | None, SegmentCount] = {segment: SegmentCount(records=count) for segment, count in counted.iter_rows()}
    for segment, dead_class, count in _dead(rows).group_by("segment", "dead_class").len().sort("segment", "dead_class").iter_rows():
        segments[segment] += SegmentCount(dead_by_class={dead_class: count})
    return segments
