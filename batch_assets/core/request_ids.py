"""Names of requests to an engine: which attempt at which record this is, for scripts and journals; an engine needs them unique only."""

from typing import Final, NamedTuple

CONTROL_ATTEMPT: Final = 0  # a record that has an answer, asked again to see whether the engine can answer; counts for nobody
WARM_UP = "warm-up"  # the one request that fills the prefix cache; its answer counts for nobody


class RequestParts(NamedTuple):
    """What a request id says."""

    shard: int
    epoch: int
    attempt: int
    record_id: str


def request_id(*, shard: int, epoch: int, attempt: int, record_id: str) -> str:
    """`42:1:1:T-118`: unique among the live requests of a worker, since a record is tried once at a time."""
    return f"{shard}:{epoch}:{attempt}:{record_id}"


def request_parts(text: str) -> RequestParts | None:
    """Inverse of `request_id`; None for a request that is about no record."""
    if text == WARM_UP:
        return None
    shard, epoch, attempt, record_id = text.split(":", 3)
    return RequestParts(int(shard), int(epoch), int(attempt), record_id)


def record_of(text: str) -> str:
    """The record id alone, at a fifth of the cost of all parts; a request that is about no record is its own."""
    return text.split(":", 3)[-1]
