"""Digests of content: what makes two job versions the same. No times, no paths, no counters go in."""

import hashlib
import json
from typing import Any

DIGEST_PREFIX = "sha256:"
VERSION_HEX_DIGITS = 6


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, no white space, no NaN: equal values give equal text on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_of_text(text: str) -> str:
    """`sha256:` + 64 hex digits over the UTF-8 bytes."""
    return digest_of_bytes(text.encode())


def digest_of_bytes(data: bytes) -> str:
    """`sha256:` + 64 hex digits."""
    return DIGEST_PREFIX + hashlib.sha256(data).hexdigest()


def digest_of(value: Any) -> str:
    """Digest over the canonical JSON of a plain value (dicts, lists, text, numbers)."""
    return digest_of_text(canonical_json(value))


def short(digest: str, digits: int = VERSION_HEX_DIGITS) -> str:
    """First hex digits, for people: `3fa9c1`."""
    return digest.removeprefix(DIGEST_PREFIX)[:digits]


def version_name(number: int, identity: str) -> str:
    """`v0007-3fa9c1`: a speakable counter and six hex digits of the identity digest."""
    return f"v{number:04d}-{short(identity)}"


def shard_key(version: str, shard: int) -> str:
    """Partition key and log name of a shard: `v0007-3fa9c1-00042`."""
    return f"{version}-{shard:05d}"


def split_shard_key(key: str) -> tuple[str, int]:
    """Inverse of `shard_key`; raises ValueError for text that is no shard key."""
    version, _, number = key.rpartition("-")
    if not version or not number.isdecimal():
        msg = f"{key!r} is no shard key; one looks like v0007-3fa9c1-00042"
        raise ValueError(msg)
    return version, int(number)
