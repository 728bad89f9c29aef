"""The requests that the engine has: whose they are, and which of them have been decoding for too long."""

from collections.abc import Callable
from typing import NamedTuple

from batch_assets.worker.feeder import ShardWork


class Flight(NamedTuple):
    """One attempt at one record."""

    work: ShardWork
    row: int
    attempt: int


class InFlight:
    """In the order of submission. An engine serves first come, first served, `decoding_max` at a time: so a request's time starts when it
    is among the oldest `decoding_max`, not when it was submitted; engines do not say it themselves.
    """

    def __init__(self, *, decoding_max: int, timeout_s: float) -> None:
        self._decoding_max = decoding_max
        self._timeout_s = timeout_s
        self._waiting: dict[str, Flight] = {}
        self._decoding: dict[str, tuple[Flight, float]] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._decoding)

    def add(self, request_id: str, flight: Flight) -> None:
        """It was submitted."""
        self._waiting[request_id] = flight

    def land(self, request_id: str) -> Flight | None:
        """It is finished; None for a request that was dropped."""
        started = self._decoding.pop(request_id, None)
        return self._waiting.pop(request_id, None) if started is None else started[0]

    def overdue(self, now_s: float) -> list[tuple[str, Flight]]:
        """Those that have been decoding for the time limit, removed; `now_s` is the worker's engine time."""
        while self._waiting and len(self._decoding) < self._decoding_max:
            request_id = next(iter(self._waiting))
            self._decoding[request_id] = (self._waiting.pop(request_id), now_s)
        late: list[tuple[str, Flight]] = []
        for request_id, (flight, started_s) in self._decoding.items():
            if now_s - started_s < self._timeout_s:
                break  # all after it started later
            late.append((request_id, flight))
        for request_id, _ in late:
            del self._decoding[request_id]
        return late

    def drop(self, is_dropped: Callable[[Flight], bool]) -> list[str]:
        """Removes some; their ids, to be aborted."""
        live = {**self._waiting, **{request_id: flight for request_id, (flight, _) in self._decoding.items()}}
        dropped = [request_id for request_id, flight in live.items() if is_dropped(flight)]
        for request_id in dropped:
            self.land(request_id)
        return dropped
