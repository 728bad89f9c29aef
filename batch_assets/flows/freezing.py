"""From sorted buckets to frozen shards: dispositions, record digests, cuts, one parquet file per shard."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from batch_assets.core.planning import BLANK_CHARACTERS, FIRST_SHARD, bucket_low, cut_bucket, hash_ranges, set_aside
from batch_assets.core.prompting import PromptRenderer, RenderError
from batch_assets.core.records import FIELD_PREFIX, TO_ANSWER, DeadClass
from batch_assets.stores.frozen_input import FrozenInput, frozen_schema
from batch_assets.stores.register import PlannedShard

_BLANK: Final = pl.lit(BLANK_CHARACTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimit:
    """How long a record's own part may be. `bytes_are_bound`: tokens <= UTF-8 bytes, so only longer ones need the tokenizer."""

    renderer: PromptRenderer
    uses: tuple[tuple[str, int], ...]  # (placeholder, times it stands in the prompt), sorted
    tokens_max: int
    bytes_are_bound: bool

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Sorted, each once."""
        return tuple(name for name, _ in self.uses)

    @property
    def bytes(self) -> pl.Expr:
        """UTF-8 bytes of the record's own part; null fields count nothing."""
        return pl.sum_horizontal(pl.col(FIELD_PREFIX + name).str.len_bytes() * times for name, times in self.uses)


@dataclass(slots=True)
class Freezer:
    """Takes buckets in order, writes shards. `finish` gives them with hash ranges that leave no gap."""

    frozen: FrozenInput
    limit: PromptLimit
    shard_records: int
    bits: int
    to_answer: int = 0
    surplus: int = 0
    set_aside_by_class: Counter[str] = field(default_factory=Counter)
    _collected: list[pl.DataFrame] = field(default_factory=list)
    _low: int = 0
    _shards: list[PlannedShard] = field(default_factory=list)

    def add(self, bucket: int, rows: pl.DataFrame) -> None:
        """One bucket: one row per id, sorted by (key_hash, record_id)."""
        frame = disposed(rows, self.limit)
        cut = cut_bucket(collected=self._collected_rows, rows=frame.height, shard_records=self.shard_records)
        if cut.closes:
            self._close()
        if not cut.parts:
            if not self._collected:
                self._low = bucket_low(bucket, self.bits)
            self._collected.append(frame)
            return
        low, start = bucket_low(bucket, self.bits), 0
        for end in _ends(frame["key_hash"], cut.parts):
            self._write(frame.slice(start, end - start), low=low)
            if end < frame.height:
                low, start = frame["key_hash"][end], end

    def finish(self) -> list[PlannedShard]:
        """All shards, in order of hash, numbered from 1."""
        self._close()
        ranges = hash_ranges([shard.hash_low for shard in self._shards])
        return [
            PlannedShard(
                number=shard.number,
                rows=shard.rows,
                to_answer=shard.to_answer,
                hash_low=low,
                hash_high=high,
                input_sha256=shard.input_sha256,
            )
            for shard, (low, high) in zip(self._shards, ranges, strict=True)
        ]

    @property
    def _collected_rows(self) -> int:
        return sum(frame.height for frame in self._collected)

    def _close(self) -> None:
        if self._collected:
            self._write(pl.concat(self._collected), low=self._low)
            self._collected = []

    def _write(self, frame: pl.DataFrame, *, low: int) -> None:
        number = FIRST_SHARD + len(self._shards)
        schema = frozen_schema(self.limit.placeholders)
        sha256 = self.frozen.write(number, frame.with_row_index("position").select(list(schema)).cast(pl.Schema(schema)))
        to_answer = frame.filter(pl.col("disposition") == TO_ANSWER).height
        self._shards.append(
            PlannedShard(number=number, rows=frame.height, to_answer=to_answer, hash_low=low, hash_high=low, input_sha256=sha256)
        )
        self.to_answer += to_answer
        self.surplus += int(frame["surplus"].sum())
        self.set_aside_by_class.update(dict(frame.filter(pl.col("disposition") != TO_ANSWER)["disposition"].value_counts().iter_rows()))


def _ends(hashes: pl.Series, parts: Iterable[int]) -> list[int]:
    """Where each part ends; rows with one hash stay together, so that a shard is a range of hashes."""
    ends: list[int] = []
    end = 0
    for rows in parts:
        end += rows
        while 0 < end < len(hashes) and hashes[end] == hashes[end - 1]:
            end += 1
        ends.append(min(end, len(hashes)))
    return [end for place, end in enumerate(ends) if end > (ends[place - 1] if place else 0)]


# ---- dispositions


def disposed(rows: pl.DataFrame, limit: PromptLimit) -> pl.DataFrame:
    """Adds disposition, disposition_detail, surplus, record_digest; fields of rows that are set aside become null."""
    fields = [FIELD_PREFIX + placeholder for placeholder in limit.placeholders]
    judged = rows.select("copies", "fault_class", "fault", *fields).with_columns(
        pl.all_horizontal(pl.col(fields).str.strip_chars(_BLANK).fill_null("x") == "").alias("blank"),
        limit.bytes.alias("bytes"),
        pl.any_horizontal(pl.col(fields).is_null()).alias("has_null"),
    )
    fits = pl.col("bytes") <= limit.tokens_max if limit.bytes_are_bound else pl.lit(value=False)
    sound = (pl.col("copies") == 1) & pl.col("fault_class").is_null() & ~pl.col("has_null") & ~pl.col("blank") & fits
    awkward = judged.with_row_index("row").filter(~sound)
    verdicts = [(row["row"], _judge(row, limit)) for row in awkward.iter_rows(named=True)]
    aside = {row: verdict for row, verdict in verdicts if verdict is not None}
    frame = rows.with_columns(
        _scattered("disposition", {row: verdict[0].value for row, verdict in aside.items()}, rows.height).fill_null(TO_ANSWER),
        _scattered("disposition_detail", {row: verdict[1] for row, verdict in aside.items()}, rows.height),
        (pl.col("copies") - 1).alias("surplus"),
        _record_digests(rows, fields),
    )
    return frame.with_columns(pl.when(pl.col("disposition") == TO_ANSWER).then(pl.col(name)).alias(name) for name in fields)


def _judge(row: dict[str, Any], limit: PromptLimit) -> tuple[DeadClass, str | None] | None:
    nulls = [name for name in limit.placeholders if row[FIELD_PREFIX + name] is None]
    sound = row["copies"] == 1 and row["fault_class"] is None and not nulls and not row["blank"]
    return set_aside(
        copies=row["copies"],
        malformed=row["fault"] if row["fault_class"] == DeadClass.MALFORMED else None,
        has_id=row["fault_class"] != DeadClass.NO_ID,
        null_field=nulls[0] if nulls else None,
        blank=row["blank"],
        tokens=tokens_of(row, limit) if sound else None,
        tokens_max=limit.tokens_max,
    )


def tokens_of(row: Mapping[str, Any], limit: PromptLimit) -> int | None:
    """Tokens of the own part of a row of the frozen input; None when it cannot be rendered, which its worker will find and say."""
    try:
        return limit.renderer.record_tokens({name: row[FIELD_PREFIX + name] for name in limit.placeholders})
    except RenderError:
        return None


def _scattered(name: str, values: dict[int, str | None], height: int) -> pl.Series:
    if not values:
        return pl.Series(name, [None], dtype=pl.String).new_from_index(0, height)
    return pl.Series(name, [values.get(row) for row in range(height)], dtype=pl.String)


def _record_digests(rows: pl.DataFrame, fields: list[str]) -> pl.Series:
    """sha256 (hex) over `name=length:text;` of each field (`name=-;` for null): equal exactly when all fields are equal."""
    parts: list[pl.Expr] = []
    for name in fields:
        text = pl.col(name)
        some = pl.concat_str(pl.lit(f"{name}="), text.str.len_bytes().cast(pl.String), pl.lit(":"), text, pl.lit(";"))
        parts.append(pl.when(text.is_null()).then(pl.lit(f"{name}=-;")).otherwise(some))
    content = rows.select(pl.concat_str(parts).cast(pl.Binary)).to_series().to_list()
    sha256 = hashlib.sha256
    return pl.Series("record_digest", [sha256(text).hexdigest() for text in content], dtype=pl.String)
