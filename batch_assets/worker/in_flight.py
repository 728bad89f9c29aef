"""The requests that the engine has: whose they are, and which of them have been decoding for too long."""

import math
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from batch_assets.core.ports import Completion
from batch_assets.core.records import DeadClass
from batch_assets.stores.register import Lease

LONELY_FACTOR: Final = 3


class Asker(Protocol):
    """Who wants the answer: a shard's work, or a control."""

    @property
    def lease(self) -> Lease | None: ...
    def take(self, row: int, attempt: int, completion: Completion, now_s: float, /) -> None: ...
    def fail(self, row: int, attempt: int, dead_class: DeadClass, error: str, /, *, tokens_output: int) -> None: ...


class Flight(NamedTuple):
    """One attempt at one record."""

    work: Asker
    row: int
    attempt: int


class InFlight:
    """In the order of submission. An engine serves first come, first served, `decoding_max` at a time: so a request's time starts when it
    is among the oldest `decoding_max`, not when it was submitted; engines do not say it themselves.

    A time limit is for a record that is never answered, not for a slow machine, which would use up the attempts of all records at once:
    it counts only for a request that others have overtaken. One that has nobody beside it gets `LONELY_FACTOR` times as long.
    """

    def __init__(self, *, decoding_max: int, timeout_s: float) -> None:
        self._decoding_max = decoding_max
        self._timeout_s = timeout_s
        self._waiting: dict[str, Flight] = {}
        self._decoding: dict[str, tuple[Flight, float]] = {}
        self._landed_started_s = -math.inf  # the latest start among those that landed

    def __len__(self) -> int:
        return len(self._waiting) + len(self._decoding)

    def add(self, request_id: str, flight: Flight) -> None:
        """It was submitted."""
        self._waiting[request_id] = flight

    def land(self, request_id: str) -> Flight | None:
        """It is finished; None for a request that was dropped."""
        started = self._decoding.pop(request_id, None)
        if started is None:
            return self._waiting.pop(request_id, None)
        self._landed_started_s = max(self._landed_started_s, started[1])
        return started[0]

    def overdue(self, now_s: float) -> list[tuple[str, Flight]]:
        """Those that have been decoding for too long, removed; `now_s` is the worker's engine time."""
        while self._waiting and len(self._decoding) < self._decoding_max:
            request_id = next(iter(self._waiting))
            self._decoding[request_id] = (self._waiting.pop(request_id), now_s)
        late: list[tuple[str, Flight]] = []
        for request_id, (flight, started_s) in self._decoding.items():
            if now_s - started_s < self._timeout_s:
                break  # all after it started later
            if started_s <= self._landed_started_s or now_s - started_s >= LONELY_FACTOR * self._timeout_s:
                late.append((request_id, flight))
        for request_id, _ in late:
            del self._decoding[request_id]
        return late

    def drop(self, is_dropped: Callable[[Flight], bool]) -> list[str]:
        """Removes some; their ids, to be aborted."""
        waiting = [request_id for request_id, flight in self._waiting.items() if is_dropped(flight)]
        decoding = [request_id for request_id, (flight, _) in self._decoding.items() if is_dropped(flight)]
        for request_id in waiting:
            del self._waiting[request_id]
        for request_id in decoding:
            del self._decoding[request_id]
        return [*decoding, *waiting]
