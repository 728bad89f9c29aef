"""Record ids, their hashes, the classes of dead letters, and the columns every table of ours shares.

Record ids are opaque text: they occur in no path, name or predicate, and `00123` stays `00123`.
"""

import hashlib
from enum import StrEnum

HASH_BITS = 64
HASH_OFFSET = 1 << 63


class DeadClass(StrEnum):
    """Why a record has no answer. The first six are set aside by the planner with 0 attempts."""

    TOO_LONG = "too_long"
    EMPTY = "empty"
    NULL = "null"
    MALFORMED = "malformed"
    DUPLICATE_ID = "duplicate_id"
    NO_ID = "no_id"
    RENDER_ERROR = "render_error"
    TRUNCATED = "truncated"
    NOT_JSON = "not_json"
    SCHEMA = "schema"
    DEGENERATE = "degenerate"
    ENGINE_KILLED = "engine_killed"
    TIMED_OUT = "timed_out"
    REJECTED = "rejected"


SET_ASIDE_CLASSES = (
    DeadClass.TOO_LONG,
    DeadClass.EMPTY,
    DeadClass.NULL,
    DeadClass.MALFORMED,
    DeadClass.DUPLICATE_ID,
    DeadClass.NO_ID,
)
# A permanent failure says something about the record; asking again under the same recipe cannot help.
PERMANENT_CLASSES = (*SET_ASIDE_CLASSES, DeadClass.RENDER_ERROR, DeadClass.REJECTED)

TO_ANSWER = "answer"  # disposition of a record that the workers must answer; every other disposition is a DeadClass value


class Outcome(StrEnum):
    """What a record came to; exactly one per record at every version of the outcomes table."""

    RESULT = "result"
    DEAD_LETTER = "dead_letter"


# Columns of ours in the frozen input, the outcomes table and a release. An answer field may have none of these names.
RESERVED_COLUMNS = (
    "record_id",
    "key_hash",
    "position",
    "disposition",
    "disposition_detail",
    "surplus",
    "record_digest",
    "acl",
    "record_class",
    "segment",
    "labels",
    "job_version",
    "shard",
    "outcome",
    "round",
    "recipe",
    "attempt",
    "epoch",
    "worker",
    "dead_class",
    "error",
    "tokens_prompt",
    "tokens_cached",
    "tokens_output",
    "origin_version",
)
FIELD_PREFIX = "field_"  # prompt fields in the frozen input: `field_subject`


def key_hash(record_id: str) -> int:
    """Signed 64-bit integer from the first 8 bytes (big endian) of sha256 of the id's UTF-8 bytes.

    Its order as a signed integer is the order of everything that is sorted by key: buckets, shards, releases.
    """
    return int.from_bytes(hashlib.sha256(record_id.encode("utf-8", "surrogatepass")).digest()[:8], "big", signed=True)


def bucket_of(hash_value: int, bits: int) -> int:
    """Bucket 0 … 2^bits - 1 of a key hash: its first `bits` bits in signed order, so buckets are contiguous and prefixes nest."""
    return (hash_value + HASH_OFFSET) >> (HASH_BITS - bits)


def row_key(file_name: str, row: int) -> str:
    """Key of a row that has no usable id: `row:<file>:<n>`, n counted from 1 within the file (the header is not a row)."""
    return f"row:{file_name}:{row}"
