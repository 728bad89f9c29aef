"""What a supervisor decides: how many workers to start, which exit is a crash loop, how far the work is. No process, clock or store here.

Whether a shard or a version may move is `leasing.py`; who carries these decisions out is `fleet/supervisor.py`.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from batch_assets.core.errors import ExitCode
from batch_assets.core.leasing import ShardState

# One start a worker per 10 s on average: records that kill their engine cost up to 21 restarts (DESIGN, suspects), and they are found in
# minutes at this rate; without a bound a broken image would start thousands of processes an hour.
STARTS_PER_WORKER_MINUTE_MAX = 6
START_WINDOW_S = 60.0
# Exits in a row before any of the fleet held a shard or sent a prompt: the next start would end in the same way.
FRUITLESS_EXITS_MAX = 3
FRUITLESS_FORGET_S = 600.0  # while others work: a passing lack of memory must not keep the fleet small for the rest of a night
HUNG_LEASES = 3.0  # a worker that has not been heard from for so many leases lost its shards long ago; its process only takes up the place
EXIT_UNFIT = 72  # a worker whose engine gives no valid answer to anything
OPEN_STATES = (ShardState.PENDING, ShardState.LEASED)
CLASS_OF_LAST_LINE = re.compile(r"^\s*([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Killed|refused))\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How a worker process ended. `exit_code` is negative for a signal, None when it was not our child (adopted)."""

    worker_id: str
    exit_code: int | None
    was_fruitful: bool  # held a shard or sent a prompt to its engine
    last_line_class: str | None
    log_path: str
    own_words: str = ""  # what it said when it refused, or found itself unfit

    @property
    def is_clean(self) -> bool:
        """It left because there was nothing left to do, or because it was told to."""
        return self.exit_code == ExitCode.DONE

    @property
    def is_refusal(self) -> bool:
        """It refused to start (digest, engine build, settings): the next one would refuse too."""
        return self.exit_code in (ExitCode.ENVIRONMENT, ExitCode.REFUSED)

    @property
    def is_unfit(self) -> bool:
        """It left because its engine answers nothing, whichever record it is asked."""
        return self.exit_code == EXIT_UNFIT


@dataclass(slots=True)
class StartBudget:
    """Bounds worker starts. Mutable; `now_s` is the supervisor's monotonic clock."""

    workers: int
    _starts_s: deque[float] = field(default_factory=deque)
    _fruitless: list[tuple[float, WorkerExit]] = field(default_factory=list)

    def allowed(self, *, now_s: float) -> int:
        """How many may be started now; none while there is a crash loop."""
        while self._starts_s and now_s - self._starts_s[0] >= START_WINDOW_S:
            self._starts_s.popleft()
        return 0 if self.crash_loop(now_s=now_s) else max(0, self.workers * STARTS_PER_WORKER_MINUTE_MAX - len(self._starts_s))

    def started(self, *, now_s: float) -> None:
        """One was started."""
        self._starts_s.append(now_s)

    def exited(self, exits: Iterable[WorkerExit], *, now_s: float) -> None:
        """A worker that got somewhere, or left in peace, ends the row of fruitless ones."""
        for each in exits:
            if each.is_clean or (each.was_fruitful and not each.is_unfit):
                self._fruitless.clear()
            else:
                self._fruitless.append((now_s, each))

    def crash_loop(self, *, now_s: float) -> Sequence[WorkerExit]:
        """The exits that show that starting another is of no use; empty while it may be."""
        recent = [each for ended_s, each in self._fruitless if now_s - ended_s < FRUITLESS_FORGET_S]
        hopeless = len(recent) >= FRUITLESS_EXITS_MAX or any(each.is_refusal for each in recent)
        return tuple(recent) if hopeless else ()


def workers_to_start(*, workers: int, alive: int, open_shards: int, allowed: int) -> int:
    """Fill the fleet up to `workers`, but to no more than there are shards that nobody has finished."""
    return max(0, min(min(workers, open_shards) - alive, allowed))


def open_shards(counts: Mapping[ShardState, int]) -> int:
    """Shards that need a worker."""
    return sum(counts.get(state, 0) for state in OPEN_STATES)


def last_line_class(log_tail: str) -> str | None:
    """`torch.OutOfMemoryError` from a log's end: the class of an error (or the event of a line of ours) and nothing after it.

    A foreign message may quote a record.
    """
    for line in reversed(log_tail.splitlines()):
        if line.strip():
            found = CLASS_OF_LAST_LINE.match(line)
            return found.group(1) if found else _noted(line).get("event")
    return None


def refusal_text(log_tail: str) -> str:
    """What a worker said when it refused to start or to go on, in our own words; empty when its log has no refusal."""
    noted = [_noted(line) for line in log_tail.splitlines()]
    return "\n".join(str(line.get("text", "")).strip() for line in noted if line.get("event") in ("refused", "unfit"))


def _noted(line: str) -> Mapping[str, Any]:
    """A line of a worker's log, which is one JSON object; empty for any other line."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What is committed, exactly: sums over the shards' own counts."""

    rows: int = 0
    dead: int = 0  # set-aside ones included
    set_aside: int = 0
    retried: int = 0
    redone: int = 0
    reopened: int = 0  # dead letters that redrives opened again: each has one more entry

    @property
    def logged(self) -> int:
        """Terminal entries that workers wrote for these records, repeated ones included: what their counters have counted."""
        return self.rows - self.set_aside + self.redone + self.reopened


@dataclass(frozen=True, slots=True, kw_only=True)
class Underway:
    """Sums of the counters of all workers of the version, those that are gone included."""

    answered: int = 0
    dead: int = 0
    failed: int = 0
    tokens_prompt: int = 0
    tokens_cached: int = 0

    @property
    def logged(self) -> int:
        """Terminal entries written so far."""
        return self.answered + self.dead


def rows_done(*, total: int, committed: Done, underway: Underway, all_committed: bool) -> int:
    """Records with an outcome: exact for committed shards, as workers count for open ones, `total` only when all are committed."""
    if all_committed:
        return total
    open_rows = total - committed.rows
    return committed.rows + max(0, min(underway.logged - committed.logged, open_rows - 1))


def dead_done(*, rows: int, committed: Done, underway: Underway) -> int:
    """Dead letters among the `rows` that are done; never more than those."""
    by_workers = committed.dead - committed.set_aside + committed.reopened
    return min(committed.dead + max(0, underway.dead - by_workers), rows)


@dataclass(slots=True)
class RateMeter:
    """Rows per second over the last `window_s`, from samples of (now_s, rows done)."""

    window_s: float = 60.0
    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def sample(self, *, now_s: float, rows: int) -> float:
        """Adds a sample; 0 until there are two at different times."""
        self._samples.append((now_s, rows))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= self.window_s:  # noqa: PLR2004  a slope needs two
            self._samples.popleft()
        first_s, first_rows = self._samples[0]
        return max(0, rows - first_rows) / (now_s - first_s) if now_s > first_s else 0.0
