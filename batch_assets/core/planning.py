"""Decisions of the planner: how many buckets, where shards are cut, what is set aside and why, who must approve. Pure.

A bucket is a prefix of the key hash; a shard is part of one bucket or several whole adjacent buckets, so everything later (coverage,
carrying rows, the release) joins bucket by bucket. Rows are streamed, spilled and written by flows/planner.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from batch_assets.core.errors import Problem
from batch_assets.core.records import HASH_BITS, HASH_OFFSET, DeadClass
from batch_assets.core.spec import InputRules, SourceKind

BUCKET_ROWS: Final = 50_000  # sorted in memory, one at a time
BUCKET_BYTES: Final = 64 << 20  # the same for large records: 5 KB rows make buckets of 13,000
BUCKET_BITS_MAX: Final = 16  # 3 billion rows; the spill's two levels of 8 bits
CANARY_SHARD: Final = 0  # reserved: a stratified sample that runs first
FIRST_SHARD: Final = 1
HASH_LOW: Final = -HASH_OFFSET
HASH_HIGH: Final = HASH_OFFSET - 1

# What `str.strip` takes, and characters that show nothing: zero-width, direction marks, invisible operators, byte order mark.
BLANK_CHARACTERS: Final = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680"
    "\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e"
    "\u2060\u2061\u2062\u2063\u2064\u2066\u2067\u2068\u2069\u3164\ufe0f\ufeff\uffa0"
)


# ---- buckets and shards


def bucket_bits(*, rows: int, size_bytes: int) -> int:
    """Hash bits that name a bucket, from the source's size (decoded bytes); 0 = all rows are one bucket."""
    buckets = max(rows / BUCKET_ROWS, size_bytes / BUCKET_BYTES, 1)
    return min(BUCKET_BITS_MAX, math.ceil(math.log2(buckets)))


def bucket_low(bucket: int, bits: int) -> int:
    """Smallest key hash of a bucket."""
    return (bucket << (HASH_BITS - bits)) - HASH_OFFSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What one more bucket does to the shards."""

    closes: bool  # the shard that collects whole buckets ends before this one
    parts: tuple[int, ...]  # rows of each shard that is part of this bucket; empty: the bucket joins the collecting shard


def cut_bucket(*, collected: int, rows: int, shard_records: int) -> Cut:
    """`collected`: rows in the shard that collects whole buckets. A bucket larger than a shard is cut into equal parts."""
    if rows <= shard_records:
        return Cut(closes=collected > 0 and collected + rows > shard_records, parts=())
    parts = math.ceil(rows / shard_records)
    smaller, larger = divmod(rows, parts)
    return Cut(closes=collected > 0, parts=tuple(smaller + 1 if part < larger else smaller for part in range(parts)))


def hash_ranges(lows: Sequence[int]) -> list[tuple[int, int]]:
    """Inclusive ranges that leave no gap, from the smallest hash of each shard, ascending; together they are all 64-bit hashes."""
    starts = [HASH_LOW, *lows[1:]] if lows else []
    return list(zip(starts, [low - 1 for low in lows[1:]] + [HASH_HIGH], strict=True)) if starts else []


# ---- what is set aside


def set_aside(  # noqa: PLR0911  one return per class
    *,
    copies: int,
    malformed: str | None,
    has_id: bool,
    null_field: str | None,
    blank: bool,
    tokens: int | None,
    tokens_max: int,
) -> tuple[DeadClass, str | None] | None:
    """Class and detail (our words, no record text) of a record that no worker gets; None: it is to be answered.

    Of rows that share an id none is answered, because nobody knows which one is meant; this comes before what is wrong with one of them.
    """
    if copies > 1:
        return DeadClass.DUPLICATE_ID, f"{copies} rows share this id"
    if malformed is not None:
        return DeadClass.MALFORMED, malformed
    if not has_id:
        return DeadClass.NO_ID, None
    if null_field is not None:
        return DeadClass.NULL, f"{null_field} is null"
    if blank:
        return DeadClass.EMPTY, None
    if tokens is not None and tokens > tokens_max:
        return DeadClass.TOO_LONG, f"{tokens} tokens, at most {tokens_max}"
    return None


# ---- what is refused


def column_problems(rules: InputRules, columns: Mapping[str, str], *, source: str, kind: SourceKind) -> list[Problem]:
    """Columns that the source lacks or that hold another type. `columns` as stores/snapshots.py says them: name -> type text.

    JSON Lines have a type per line (`number|text`): there a wrong one makes its record malformed, as long as some line is right.
    """
    uses = [(column, f"the placeholder {{{{ {name} }}}}", _FIELD_TYPES) for name, column in rules.fields]
    uses += [(column, f"the label of {name}", _LABEL_TYPES) for name, column in rules.labels]
    named = (("key", rules.key), ("acl", rules.acl), ("record_class", rules.record_class), ("segment", rules.segment))
    uses += [(column, f"input.{name}", _NAME_TYPES) for name, column in named if column is not None]
    enough = _any_fits if kind is SourceKind.JSONL else _all_fit
    problems = [_column_problem(column, use, types, columns, source, enough) for column, use, types in uses]
    return [problem for problem in problems if problem is not None]


_FIELD_TYPES: Final = frozenset({"text"})
_NAME_TYPES: Final = frozenset({"text", "integer"})
_LABEL_TYPES: Final = frozenset({"text", "integer", "float", "boolean", "number"})


def _any_fits(found: set[str], types: frozenset[str]) -> bool:
    return bool(found & types) or found == {"null"}


def _all_fit(found: set[str], types: frozenset[str]) -> bool:
    return found <= types | {"null"}


def _column_problem(  # noqa: PLR0917  one column and the one rule for it
    column: str,
    use: str,
    types: frozenset[str],
    columns: Mapping[str, str],
    source: str,
    enough: Callable[[set[str], frozenset[str]], bool],
) -> Problem | None:
    found = columns.get(column)
    if found is None:
        return Problem(
            code="source.column_missing",
            file=source,
            key=column,
            what=f"the source has no column {column}, which {use} needs",
            expected=f"a column {column}",
            found=", ".join(columns) or "no columns",
            fix="correct the name in prompt.md or job.yaml (rename with input.fields), or the source",
        )
    if enough(set(found.split("|")), types):
        return None
    return Problem(
        code="source.column_type",
        file=source,
        key=column,
        what=f"column {column} cannot be used by {use}",
        expected=" or ".join(sorted(types)),
        found=found,
        fix=f"write {column} as text in the source",
    )


# ---- who must approve


def approval_reason(
    *, by_sensor: bool, records: int, records_max: int, recipe_digest: str, published_recipe_digest: str | None
) -> str | None:
    """Why a person must start this version; None when a sensor may. What a person planned needs nobody else."""
    if not by_sensor:
        return None
    if published_recipe_digest is None:
        return "nothing of this job is published yet: a person starts the first version"
    if published_recipe_digest != recipe_digest:
        return "the recipe is not the published one"
    if records > records_max:
        return f"{records:,} records, a sensor may start {records_max:,} (run.auto_records_max)"
    return None
