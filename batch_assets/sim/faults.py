"""What goes wrong in a history, how often, and where: a mix of faults drawn from the seed, and the seams at which it strikes.

A seam is a point before or after an effect that others can see: a put, a transaction, a MERGE, a turn of the worker's loop. A process that
is killed, stopped or lied to between two seams has shown nothing to anybody, so no other points are needed.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from sqlalchemy.exc import OperationalError

from batch_assets.sim.clockwork import Clockwork, Process

ON_SHARE = 0.55  # of the kinds of faults strike in one history: few at a time find what all at once hide
STALL_LEASES = (0.2, 4.0)
SLOW_S = (0.01, 1.5)
OUTAGE_S = (0.5, 6.0)
OUTAGE_WITHIN_S = 20.0
SKEW_RATES = (0.75, 1.5)  # how fast a skewed process's clock goes; a leader's and a worker's together less than lease / renewal
ROTTEN_MAX = 2  # the committer sends a shard back for each, and blocks it at the fourth


class Fault(StrEnum):
    """A kind of fault."""

    CRASH = "crash"
    STALL = "stall"
    CLOCK_SKEW = "clock skew"
    SLOW_STORE = "slow store"
    STORE_BUSY = "store busy"
    STORE_OUTAGE = "store outage"
    LOST_PUT = "lost ack of a put"
    LATE_PUT = "late put"
    TORN_PUT = "partial slot"
    ROTTEN_PUT = "undecodable slot"
    SQL_BUSY = "database busy"
    SQL_OUTAGE = "database outage"
    LOST_COMMIT = "lost ack of a SQL commit"
    MERGE_FAILED = "MERGE failed"
    LOST_MERGE = "lost ack of a MERGE"
    ENGINE_DEATH = "engine death"
    BAD_ANSWERS = "bad answers"
    BAD_MACHINE = "machine that fails everything"
    KILLER = "record that kills its engine"
    NEVER_ANSWERED = "request that is never answered"
    WORKER_STALLED = "worker stalled"
    RECLAIM = "reclaim"
    RECLAIM_WAVE = "wave of reclaims"
    LEADER_KILLED = "supervisor killed"
    LEADER_STALLED = "supervisor stalled"
    SECOND_LEADER = "second supervisor"
    CANCELLED = "run cancelled"
    SECOND_PLANNER = "second planner"


# How often, when it is on: per seam it can strike at (the first group), per second (the second), per history or process (the third).
RATES: Mapping[Fault, float] = {
    Fault.CRASH: 0.003,
    Fault.STALL: 0.003,
    Fault.SLOW_STORE: 0.08,
    Fault.STORE_BUSY: 0.03,
    Fault.LOST_PUT: 0.04,
    Fault.LATE_PUT: 0.03,
    Fault.TORN_PUT: 0.02,
    Fault.ROTTEN_PUT: 0.01,
    Fault.SQL_BUSY: 0.001,
    Fault.LOST_COMMIT: 0.003,
    Fault.MERGE_FAILED: 0.1,
    Fault.LOST_MERGE: 0.1,
    Fault.ENGINE_DEATH: 0.01,
    Fault.WORKER_STALLED: 0.3,
    Fault.RECLAIM: 0.15,
    Fault.RECLAIM_WAVE: 0.06,
    Fault.LEADER_KILLED: 0.08,
    Fault.LEADER_STALLED: 0.08,
    Fault.SECOND_LEADER: 0.1,
    Fault.CANCELLED: 0.02,
    Fault.CLOCK_SKEW: 0.4,
    Fault.STORE_OUTAGE: 0.6,
    Fault.SQL_OUTAGE: 0.6,
    Fault.BAD_ANSWERS: 0.15,
    Fault.BAD_MACHINE: 0.15,
    Fault.KILLER: 0.02,
    Fault.NEVER_ANSWERED: 0.01,
    Fault.SECOND_PLANNER: 0.5,
}


class StoreError(OSError):
    """What a store of this world raises for a passing reason, or instead of an acknowledgement."""


@dataclass(frozen=True, slots=True)
class FaultMix:
    """The faults of one history: rates of the kinds that are on."""

    rates: Mapping[Fault, float]

    @classmethod
    def drawn(cls, random: Random) -> "FaultMix":
        """Each kind on or off, milder or worse than its usual rate."""
        return cls({kind: min(0.9, rate * 10 ** random.uniform(-0.5, 0.4)) for kind, rate in RATES.items() if random.random() < ON_SHARE})

    def __str__(self) -> str:
        return ", ".join(f"{kind} {rate:.3g}" for kind, rate in self.rates.items()) or "no faults"


@dataclass(slots=True)
class Seams:
    """Decides at each seam what happens there, and counts it. `mortal` are the processes that things happen to."""

    clockwork: Clockwork
    mix: FaultMix
    random: Random
    lease_s: float
    struck: Counter[Fault] = field(default_factory=Counter)
    is_quiet: bool = False  # faults have stopped
    mortal: set[str] = field(default_factory=set)
    _outages: dict[Fault, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in (Fault.STORE_OUTAGE, Fault.SQL_OUTAGE):
            if self.random.random() < self.mix.rates.get(kind, 0.0):
                began_s = self.random.uniform(0, OUTAGE_WITHIN_S)
                self._outages[kind] = (began_s, began_s + self.random.uniform(*OUTAGE_S))

    def strikes(self, kind: Fault, *, per: float = 1.0) -> bool:
        """Draws whether a fault happens here and now; `per` is how much of its rate's unit this is."""
        rate = self.mix.rates.get(kind)
        if rate is None or self.is_quiet or self.random.random() >= rate * per:
            return False
        self.struck[kind] += 1
        return True

    def strikes_current(self, kind: Fault) -> bool:
        """The same, and only when the calling process is one that things happen to."""
        return self._struck_process() is not None and self.strikes(kind)

    def point(self) -> None:
        """A seam without an effect of its own: between two of them the process may be killed or stopped."""
        self.clockwork.require_alive()
        process = self._struck_process()
        if process is None:
            return
        if self.strikes(Fault.CRASH):
            self.clockwork.kill(process)
        if self.strikes(Fault.STALL):
            self.clockwork.stop(process, self.random.uniform(*STALL_LEASES) * self.lease_s)
            self.clockwork.sleep(0)

    def before_store(self) -> None:
        """Of the object store, before anything has happened."""
        self.point()
        if self._struck_process() is None:
            return
        self._slow()
        if self._is_out(Fault.STORE_OUTAGE) or self.strikes(Fault.STORE_BUSY):
            raise StoreError("the store is busy")

    def before_sql(self) -> None:
        """Before a transaction begins; none is open while others run."""
        self.point()
        if self._struck_process() is not None and (self._is_out(Fault.SQL_OUTAGE) or self.strikes(Fault.SQL_BUSY)):
            raise database_error("the database is away")

    def after_commit(self) -> None:
        """The transaction is durable."""
        self.point()
        if self.strikes_current(Fault.LOST_COMMIT):
            raise database_error("the connection was lost while it committed")

    def before_merge(self) -> None:
        """Before a MERGE has read the table."""
        self.point()
        if self.strikes_current(Fault.MERGE_FAILED):
            raise StoreError("the table's store is busy")

    def during_merge(self) -> None:
        """The table was read, nothing is committed."""
        self.point()
        if self._struck_process() is not None:
            self._slow()

    def skew(self) -> tuple[float, float]:
        """Rate and offset of a new process's clock."""
        offset_s = self.random.uniform(0, 1000.0)
        return (self.random.uniform(*SKEW_RATES) if self.strikes(Fault.CLOCK_SKEW) else 1.0), offset_s

    def _slow(self) -> None:
        if self.strikes(Fault.SLOW_STORE):
            self.clockwork.sleep(self.random.uniform(*SLOW_S))

    def _is_out(self, kind: Fault) -> bool:
        began_s, ended_s = self._outages.get(kind, (0.0, 0.0))
        if self.is_quiet or not began_s <= self.clockwork.now_s < ended_s:
            return False
        self.struck[kind] += 1
        return True

    def _struck_process(self) -> Process | None:
        process = self.clockwork.current
        return process if process is not None and not self.is_quiet and process.name in self.mortal else None


def database_error(what: str) -> OperationalError:
    """As SQLAlchemy raises it."""
    return OperationalError(what, None, RuntimeError(what))
