"""The worker's second thread: says that it lives, renews its leases while the engine makes progress, and sees when nobody leads any more.

Nothing about records here. It has a database connection of its own, so that a slow one of the loop does not cost a lease.
"""

import os
import threading
from collections.abc import Callable
from typing import Final, Protocol

from sqlalchemy.exc import OperationalError

from batch_assets.core.errors import StaleLeaseError
from batch_assets.stores.register import LeadRow, Lease, Register

EXIT_BUG: Final = 1
EXIT_STALLED: Final = 71
STALL_MIN_S: Final = 300.0  # one step on an overloaded CPU was seen to take 120 s; leaving then would only start the same step anew
LEASES_WITHOUT_LEAD: Final = 2
BEAT_MAX_S: Final = 2.0
BEATS_PER_RENEWAL: Final = 3


class Pulse(Protocol):
    """What the heartbeat sees of the loop; every member may be used from its thread."""

    @property
    def turns(self) -> int: ...
    @property
    def leases(self) -> tuple[Lease, ...]: ...
    def lose(self, lease: Lease) -> None: ...
    def stop(self) -> None: ...


class Heartbeat:
    """`beat` is one round of duties, by `clock`; `start` beats in a daemon thread until `end`."""

    def __init__(
        self,
        *,
        register: Register,
        job: str,
        version: str,
        worker_id: str,
        pulse: Pulse,
        counters: Callable[[], dict[str, int]],
        lease_s: float,
        renew_s: float,
        clock: Callable[[], float],
        note: Callable[..., None],
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._register, self._pulse, self._counters = register, pulse, counters
        self._job, self._version, self._worker_id = job, version, worker_id
        self._lease_s, self._renew_s = lease_s, renew_s
        self._stall_s = max(STALL_MIN_S, lease_s)
        self._clock, self._note, self._leave = clock, note, leave
        self._beat_s = min(BEAT_MAX_S, renew_s / BEATS_PER_RENEWAL)
        self._renewed_s = self._led_s = self._beaten_s = clock()
        self._turns, self._unmoved_s = pulse.turns, 0.0
        self._lead: LeadRow | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Returns when the last beat is over."""
        self._ended.set()
        self._thread.join()

    def beat(self) -> None:
        """Progress first: a lease is never renewed for an engine that hangs."""
        now_s = self._clock()
        if self._has_stalled(now_s):
            self._note("stalled", seconds=self._unmoved_s, leases=[lease.key for lease in self._pulse.leases])
            self._leave(EXIT_STALLED)
            return
        if now_s - self._renewed_s >= self._renew_s:
            self._renewed_s = now_s
            self._renew()
        if not self._register.worker_heartbeat(self._worker_id, self._counters()):
            self._note("declared_gone")
            self._pulse.stop()
        self._watch_lead(now_s)

    def _has_stalled(self, now_s: float) -> bool:
        """Time in which this thread did not run either (a stopped process) proves nothing about the engine."""
        since_beat_s, self._beaten_s = now_s - self._beaten_s, now_s
        turns, self._turns = self._turns, self._pulse.turns
        self._unmoved_s = 0.0 if turns != self._turns else self._unmoved_s + min(since_beat_s, 2 * self._beat_s)
        return self._unmoved_s >= self._stall_s

    def _renew(self) -> None:
        for lease in self._pulse.leases:
            try:
                self._register.renew(lease)
            except StaleLeaseError:
                self._pulse.lose(lease)

    def _watch_lead(self, now_s: float) -> None:
        """A version without a supervisor for two leases has nobody who commits: leave, and let the next one start workers anew."""
        lead = self._register.lead(self._job, self._version)
        if lead != self._lead:
            self._lead, self._led_s = lead, now_s
        if now_s - self._led_s >= LEASES_WITHOUT_LEAD * self._lease_s:
            self._note("no_supervisor", seconds=now_s - self._led_s)
            self._pulse.stop()

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._beat_s):
                try:
                    self.beat()
                except OperationalError as error:  # a database that is away for a while; the leases say how long it may be
                    self._note("database_away", reason=type(error.orig).__name__)
        except BaseException as error:
            # A worker without a heartbeat holds its shards until they lapse and looks alive: better no worker.
            self._note("heartbeat_failed", reason=f"{type(error).__name__}: {error}")
            self._leave(EXIT_BUG)
            raise
