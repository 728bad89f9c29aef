"""How far a version is, for people: one value, a live view on a terminal, a plain line every 30 s elsewhere. Decides nothing."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from batch_assets.core.leasing import ShardState
from batch_assets.core.supervision import Done, RateMeter, Underway, dead_done, rows_done
from batch_assets.stores.register import ShardRow, VersionRow, WorkerRow

PLAIN_EVERY_S = 30.0
BAR_CELLS = 24
HOUR_S = 3600
MINUTE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at a version. `rows` reaches `total` exactly when every shard is committed, never before; it includes `dead`."""

    job: str
    version: str
    kind: str
    workers: int
    rows: int
    total: int
    dead: int
    rows_per_s: float
    eta_s: float | None  # None: nothing has been measured yet
    shards_done: int
    shards_running: int  # leased or staged
    shards_waiting: int
    shards_blocked: int
    cached_percent: float | None
    retried: int
    redone: int

    @property
    def is_complete(self) -> bool:
        """Every record has its outcome in the table."""
        return self.rows == self.total


def add_committed(done: Done, shards: Iterable[ShardRow]) -> Done:
    """`done` and the counts of these committed shards."""
    for shard in shards:
        stats = shard.stats
        done = replace(
            done,
            rows=done.rows + shard.rows,
            dead=done.dead + stats.get("dead_letters", 0),
            set_aside=done.set_aside + stats.get("set_aside", 0),
            retried=done.retried + stats.get("retried", 0),
            redone=done.redone + stats.get("redone", 0),
            reopened=done.reopened + stats.get("reopened", 0),
        )
    return done


def underway(workers: Iterable[WorkerRow]) -> Underway:
    """Counters of all workers of a version, summed."""
    counters = [worker.counters for worker in workers]

    def total(name: str) -> int:
        return sum(each.get(name, 0) for each in counters)

    return Underway(
        answered=total("answered"),
        dead=total("dead"),
        failed=total("failed"),
        tokens_prompt=total("tokens_prompt"),
        tokens_cached=total("tokens_cached"),
    )


def measure(
    version: VersionRow,
    *,
    counts: Mapping[ShardState, int],
    committed: Done,
    workers: Sequence[WorkerRow],
    workers_alive: int,
    meter: RateMeter,
    now_s: float,
) -> Progress:
    """The whole version, whichever shards a run asked for: workers count no shards."""
    total = version.records - version.surplus
    now = underway(workers)
    shards_done = counts.get(ShardState.COMMITTED, 0)
    rows = rows_done(total=total, committed=committed, underway=now, all_committed=shards_done == version.shards)
    rate = meter.sample(now_s=now_s, rows=rows)
    return Progress(
        job=version.job,
        version=version.name,
        kind=version.kind,
        workers=workers_alive,
        rows=rows,
        total=total,
        dead=dead_done(rows=rows, committed=committed, underway=now),
        rows_per_s=rate,
        eta_s=(total - rows) / rate if rate > 0 else None,
        shards_done=shards_done,
        shards_running=counts.get(ShardState.LEASED, 0) + counts.get(ShardState.STAGED, 0),
        shards_waiting=counts.get(ShardState.PENDING, 0),
        shards_blocked=counts.get(ShardState.BLOCKED, 0),
        cached_percent=100 * now.tokens_cached / now.tokens_prompt if now.tokens_prompt else None,
        retried=max(now.failed, committed.retried),
        redone=committed.redone,
    )


@contextmanager
def progress_view(*, to_terminal: bool, log: Callable[[str], None]) -> Iterator[Callable[[Progress], None]]:
    """What to call with each look: a live view on standard error, else one plain line every 30 s through `log`."""
    if not to_terminal:
        yield PlainProgress(log)
        return
    with Live(console=Console(stderr=True), auto_refresh=False, transient=False) as live:
        yield lambda progress: live.update(Group(*map(Text, lines(progress))), refresh=True)


class PlainProgress:
    """One line at most every PLAIN_EVERY_S, and one when all is done."""

    def __init__(self, log: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._said_s: float | None = None
        self._said_complete = False

    def __call__(self, progress: Progress) -> None:
        now_s = self._clock()
        due = self._said_s is None or now_s - self._said_s >= PLAIN_EVERY_S
        news = progress.is_complete and not self._said_complete
        if due or news:
            self._said_s, self._said_complete = now_s, progress.is_complete
            self._log("   ".join(lines(progress, bar=False)))


def lines(progress: Progress, *, bar: bool = True) -> list[str]:
    """The three lines of INTERFACE, "Progress"; `bar` False leaves the bar out for a log."""
    return [
        f"{progress.job} {progress.version}   {progress.kind} · {progress.total:,} records · {_counted(progress.workers, 'worker')}",
        _answers_line(progress, bar=bar),
        _shards_line(progress),
    ]


def _answers_line(progress: Progress, *, bar: bool) -> str:
    cells = f"{_bar(progress)}  " if bar else ""
    done = f"{progress.rows:,} of {progress.total:,}   dead {progress.dead:,}"
    return f"answers  {cells}{done}   {progress.rows_per_s:.1f} rows/s   ETA {duration(progress.eta_s)}"


def _shards_line(progress: Progress) -> str:
    blocked = f"  {progress.shards_blocked:,} blocked" if progress.shards_blocked else ""
    cache = f"      cache {progress.cached_percent:.0f} %" if progress.cached_percent is not None else ""
    shards = f"{progress.shards_done:,} done  {progress.shards_running:,} running  {progress.shards_waiting:,} waiting{blocked}"
    return f"shards   {shards}{cache}   retried {progress.retried:,}   redone {progress.redone:,}"


def duration(seconds: float | None) -> str:
    """`0:20`, `1:02:03`, `?` when unknown."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    hours, minutes = whole // HOUR_S, whole % HOUR_S // MINUTE_S
    return f"{hours}:{minutes:02d}:{whole % MINUTE_S:02d}" if hours else f"{minutes}:{whole % MINUTE_S:02d}"


def _bar(progress: Progress) -> str:
    full = BAR_CELLS * progress.rows // progress.total if progress.total else BAR_CELLS
    return "█" * full + "░" * (BAR_CELLS - full)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
