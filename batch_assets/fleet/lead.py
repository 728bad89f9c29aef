"""Keeping the supervisor lease while one leads: a thread that renews it, and a flag that says when it is lost."""

import threading
from types import TracebackType
from typing import Self

from sqlalchemy.exc import DBAPIError

from batch_assets.core.errors import StaleGenerationError
from batch_assets.settings import Settings
from batch_assets.stores.register import Register

JOIN_S = 35.0  # a renewal that waits for SQLite's busy timeout ends within that


class LeadKeeper:
    """Context in which the lead is renewed every `renew_s`. Left at the end, unless it was lost.

    The thread does not look at what the supervisor does: a supervisor that hangs in a MERGE still leads, and its process either goes on or
    dies with the thread. Safety rests on the generation in every write, not on this flag.
    """

    def __init__(self, register: Register, *, job: str, version: str, generation: int, settings: Settings) -> None:
        self._register = register
        self._lease = {"job": job, "version": version, "generation": generation}
        self._renew_s = settings.renew_s
        self._failures = 0
        self._failures_max = max(1, int(settings.lease_s / settings.renew_s) - 1)
        self._leave = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lead-{version}", daemon=True)

    @property
    def is_lost(self) -> bool:
        """True when another leads, or when the register could not be reached for about a lease."""
        return self._lost.is_set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()
        try:
            self._register.leave_lead(**self._lease)
        except StaleGenerationError:
            self._lost.set()

    def start(self) -> None:
        """Renews from now on."""
        self._thread.start()

    def end(self) -> None:
        """Renews no more."""
        self._leave.set()
        self._thread.join(JOIN_S)

    def beat(self) -> None:
        """One renewal."""
        try:
            self._register.renew_lead(**self._lease)
            self._failures = 0
        except StaleGenerationError:
            self._lost.set()
        except DBAPIError:
            self._failures += 1  # the next renewal tries again; the lease outlives some
            if self._failures >= self._failures_max:
                self._lost.set()

    def _renew(self) -> None:
        while not self.is_lost and not self._leave.wait(self._renew_s):
            self.beat()
