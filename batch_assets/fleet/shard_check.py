"""Does the log of a staged shard answer its frozen input? Rows for the outcomes table, or what is wanting.

Nothing a worker wrote is believed but the answer fields, which are validated again: key, hash, ACL, class, segment and labels come from the
frozen input, the recipe from the version, the worker's name from the fence of the epoch. Pure: frames in, frames out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from typing import Any, Final

import polars as pl

from batch_assets.core.answers import AnswerChecker, CheckedAnswer, InvalidAnswer
from batch_assets.core.records import SET_ASIDE_CLASSES, TO_ANSWER, DeadClass, Outcome
from batch_assets.core.shard_log import ROUND_FIRST, Answered, Dead, Folded
from batch_assets.stores.outcomes import SYSTEM_SCHEMA

IDS_NAMED_MAX = 10
ERROR_CHARACTERS_MAX = 500  # our own vocabulary is far shorter; a worker's text is cut, whatever it is
WORKER_CLASSES = frozenset(DeadClass) - frozenset(SET_ASIDE_CLASSES)  # the planner alone sets aside
FROM_INPUT: Final = ("record_id", "key_hash", "acl", "record_class", "segment", "labels", "record_digest", "surplus")
LOGGED_SCHEMA: Final = {
    "record_id": pl.String,
    "outcome": pl.String,
    "attempt": pl.Int32,
    "epoch": pl.Int32,
    "dead_class": pl.String,
    "error": pl.String,
    "tokens_prompt": pl.Int32,
    "tokens_cached": pl.Int32,
    "tokens_output": pl.Int32,
    "answer": pl.String,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What the register says of the staged shard."""

    job_version: str
    recipe_digest: str
    shard: int
    round: int
    epoch: int  # of the lease that staged it


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStats:
    """Numbers of one committed shard. Tokens are those of its answers; `tokens_thrown_away` are output tokens that became none."""

    results: int
    dead_letters: int
    set_aside: int
    dead_by_class: Mapping[str, int] = field(default_factory=dict)
    retried: int = 0  # records that were asked again: after a failed attempt, or by a redrive
    reopened: int = 0  # dead letters that redrives opened again, counted once a round
    recovered: int = 0  # records that a redrive turned from dead letter to result
    failures_by_class: Mapping[str, int] = field(default_factory=dict)
    redone: int = 0  # answers computed and logged again, or logged too late to count
    tokens_prompt: int = 0
    tokens_cached: int = 0
    tokens_output: int = 0
    tokens_thrown_away: int = 0
    attempts_max: int = 0
    leases: int = 0
    foreign_ids: int = 0  # ids that are not this shard's to answer: not believed
    unreadable_slots: int = 0

    def as_mapping(self) -> dict[str, Any]:
        """For the register's `stats` column."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedShard:
    """Rows for the outcomes table, in the frozen input's order: of a first round one per record of the shard, of a later one those of the
    records that it reopened. `stats` are those of the whole shard, over all rounds.
    """

    shard: int
    round: int
    rows: pl.DataFrame
    stats: ShardStats


@dataclass(frozen=True, slots=True, kw_only=True)
class WantingShard:
    """The log does not answer the frozen input; `reason` names at most IDS_NAMED_MAX ids."""

    shard: int
    reason: str


def check_shard(
    facts: ShardFacts, *, frozen: pl.DataFrame, folded: Folded, checker: AnswerChecker, schema: pl.Schema
) -> CheckedShard | WantingShard:
    """Joins by id. Wanting: ids without a valid terminal entry, or ids of other shards written under the lease that staged this one.

    Foreign ids of earlier leases have sent the shard back once already and are left out from then on, so that a sound successor finishes.
    """
    set_aside = frozen.filter(pl.col("disposition") != TO_ANSWER)
    to_answer = frozen.filter(pl.col("disposition") == TO_ANSWER)
    own = set(to_answer["record_id"].to_list())
    foreign = [entry for entries in (folded.answered, folded.dead) for entry in entries.values() if entry.record_id not in own]
    new_foreign = [entry.record_id for entry in foreign if entry.epoch >= facts.epoch]
    if new_foreign:
        return WantingShard(shard=facts.shard, reason=_named("the log holds ids that are not this shard's to answer", new_foreign))
    logged, refused = _logged(folded, own, checker)
    wanting = own.difference(logged["record_id"].to_list())
    if wanting:
        what = f"{len(wanting)} of {len(own)} ids have no valid outcome in the log ({_refusals(refused)})"
        return WantingShard(shard=facts.shard, reason=_named(what, sorted(wanting)))
    rows = _rows(
        facts, to_answer=to_answer.join(logged, on="record_id", how="left", maintain_order="left"), set_aside=set_aside, schema=schema
    )
    rows = rows.with_columns(worker=pl.col("epoch").replace_strict(folded.workers, default=None, return_dtype=pl.String))
    return CheckedShard(
        shard=facts.shard,
        round=facts.round,
        rows=_of_round(facts, rows.select(schema.names()), folded),
        stats=_stats(facts, rows, folded, own=own, set_aside=set_aside, foreign=len(foreign)),
    )


def _of_round(facts: ShardFacts, rows: pl.DataFrame, folded: Folded) -> pl.DataFrame:
    """What this round has to write: all in the first one, else the outcomes of what it reopened."""
    if facts.round == ROUND_FIRST:
        return rows
    reopened = [record_id for record_id, number in folded.reopened.items() if number == facts.round]
    return rows.filter(pl.col("record_id").is_in(reopened))


def _logged(folded: Folded, own: set[str], checker: AnswerChecker) -> tuple[pl.DataFrame, Counter[str]]:
    """Terminal entries of own ids that pass, and how many did not, by class."""
    check = checker.check
    answers = [entry for entry in folded.answered.values() if entry.record_id in own]
    checked = [check(entry.answer, "stop") for entry in answers]
    refused = Counter(each.dead_class.value for each in checked if isinstance(each, InvalidAnswer))
    passed = [(entry, each.json_text) for entry, each in zip(answers, checked, strict=True) if isinstance(each, CheckedAnswer)]
    dead = [entry for entry in folded.dead.values() if entry.record_id in own and entry.dead_class in WORKER_CLASSES]
    return pl.concat([_answered_frame(passed), _dead_frame(dead)]), refused


def _answered_frame(passed: Sequence[tuple[Answered, str]]) -> pl.DataFrame:
    columns = _columns(Answered, [entry for entry, _ in passed])
    return _as_logged({**columns, "answer": [text for _, text in passed]}, outcome=Outcome.RESULT)


def _dead_frame(entries: Sequence[Dead]) -> pl.DataFrame:
    columns = _columns(Dead, entries)
    return _as_logged({**columns, "error": [text[:ERROR_CHARACTERS_MAX] for text in columns["error"]]}, outcome=Outcome.DEAD_LETTER)


def _columns(kind: type[Answered | Dead], entries: Sequence[Answered | Dead]) -> dict[str, Sequence[Any]]:
    """What of an entry goes into a row, by column; the worker's name does not."""
    turned = zip(*entries, strict=True) if entries else repeat(())
    return {name: values for name, values in zip(kind._fields, turned, strict=False) if name in LOGGED_SCHEMA}


def _as_logged(columns: Mapping[str, Sequence[Any]], *, outcome: Outcome) -> pl.DataFrame:
    given = pl.DataFrame(columns, schema={name: LOGGED_SCHEMA[name] for name in columns})
    missing = {name: pl.lit(None, dtype) for name, dtype in LOGGED_SCHEMA.items() if name not in columns}
    return given.with_columns(**{**missing, "outcome": pl.lit(outcome.value)}).select(*LOGGED_SCHEMA)


def _rows(facts: ShardFacts, *, to_answer: pl.DataFrame, set_aside: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
    """All columns but `worker`, in the frozen input's order."""
    aside = set_aside.select(
        "position",
        *FROM_INPUT,
        outcome=pl.lit(Outcome.DEAD_LETTER.value),
        attempt=pl.lit(0, pl.Int32),
        epoch=pl.lit(0, pl.Int32),
        dead_class=pl.col("disposition"),
        error=pl.col("disposition_detail"),
        **{name: pl.lit(None, LOGGED_SCHEMA[name]) for name in ("tokens_prompt", "tokens_cached", "tokens_output", "answer")},
    )
    both = pl.concat([to_answer.select(aside.columns), aside]).sort("position")
    answer_fields = {name: dtype for name, dtype in schema.items() if name not in SYSTEM_SCHEMA}
    decoded = both["answer"].str.json_decode(pl.Struct(answer_fields)).struct.unnest()
    return (
        both.drop("answer")
        .hstack(decoded)
        .with_columns(
            job_version=pl.lit(facts.job_version),
            origin_version=pl.lit(facts.job_version),
            shard=pl.lit(facts.shard, pl.Int32),
            round=pl.lit(facts.round, pl.Int32),
            recipe=pl.lit(facts.recipe_digest),
        )
    )


def _stats(facts: ShardFacts, rows: pl.DataFrame, folded: Folded, *, own: set[str], set_aside: pl.DataFrame, foreign: int) -> ShardStats:
    dead = rows.filter(pl.col("outcome") == Outcome.DEAD_LETTER.value)
    totals = rows.select(pl.col("tokens_prompt", "tokens_cached", "tokens_output").sum()).row(0)
    return ShardStats(
        results=rows.height - dead.height,
        dead_letters=dead.height,
        set_aside=set_aside.height,
        dead_by_class=dict(dead["dead_class"].value_counts().sort("dead_class").iter_rows()),
        retried=len(own.intersection(folded.failed.keys() | folded.reopened.keys())),
        reopened=folded.reopens,
        recovered=len(own.intersection(folded.reopened.keys() & folded.answered.keys())),
        failures_by_class=dict(sorted(folded.failures_by_class.items())),
        redone=folded.repeated_answers,
        tokens_prompt=totals[0],
        tokens_cached=totals[1],
        tokens_output=totals[2],
        tokens_thrown_away=folded.tokens_thrown_away,
        attempts_max=int(rows["attempt"].max() or 0),  # pyright: ignore[reportArgumentType]  an Int32 column
        leases=facts.epoch - facts.round,  # each redrive took an epoch of its own
        foreign_ids=foreign,
        unreadable_slots=len(folded.unreadable_slots),
    )


def _refusals(refused: Mapping[str, int]) -> str:
    if not refused:
        return "no answer in it was refused"
    return "answers refused when they were validated again: " + ", ".join(f"{count} {name}" for name, count in sorted(refused.items()))


def _named(what: str, ids: Sequence[str]) -> str:
    more = f" and {len(ids) - IDS_NAMED_MAX} more" if len(ids) > IDS_NAMED_MAX else ""
    return f"{what}: {', '.join(ids[:IDS_NAMED_MAX])}{more}"
