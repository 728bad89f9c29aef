"""Rows for an outcomes table, as the committer would make them."""

from collections.abc import Sequence

import polars as pl

from batch_assets.core.identity import canonical_json
from batch_assets.core.records import Outcome, key_hash
from batch_assets.stores.outcomes import outcomes_schema

ANSWER_SCHEMA = canonical_json(
    {
        "type": "object",
        "additionalProperties": False,
        "required": ["category", "summary"],
        "properties": {"category": {"enum": ["billing", "bug"]}, "summary": {"type": "string", "maxLength": 80}},
    }
)
VERSION = "v0001-abcdef"


def outcome_rows(record_ids: Sequence[str], *, shard: int, outcome: Outcome = Outcome.RESULT, summary: str = "fine") -> pl.DataFrame:
    """One row per id in the table's exact schema; the category of a result is `bug`."""
    answered = outcome is Outcome.RESULT
    rows = [
        {
            "job_version": VERSION,
            "record_id": record_id,
            "key_hash": key_hash(record_id),
            "shard": shard,
            "outcome": outcome.value,
            "round": 0,
            "recipe": "sha256:00",
            "attempt": 1,
            "epoch": 1,
            "dead_class": None if answered else "schema",
            "tokens_output": 12,
            "origin_version": VERSION,
            "surplus": 0,
            "category": "bug" if answered else None,
            "summary": summary if answered else None,
        }
        for record_id in record_ids
    ]
    return pl.DataFrame(rows, schema=outcomes_schema(ANSWER_SCHEMA))
