"""One run's supervision of a version: lead it, or follow whoever does, until the wanted shards are committed or blocked.

The leader keeps the fleet at its size, ends lapsed leases, commits, announces. Everything is in the register, so it may be killed at any
time and whoever comes next goes on. Whether something may happen is decided in `core/leasing.py` and `core/supervision.py`.
"""

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from batch_assets.core.breakers import FleetBreaker
from batch_assets.core.errors import GristmillError, NotFinishedError, Problem, RefusedError, StaleGenerationError, UnfitEnvironmentError
from batch_assets.core.identity import shard_key
from batch_assets.core.leasing import HoldReason, LeaseEnd, LeaseObserver, ShardState, VersionState, WorkerState
from batch_assets.core.supervision import HUNG_LEASES, Done, RateMeter, StartBudget, WorkerExit, open_shards, workers_to_start
from batch_assets.fleet.committer import Committer
from batch_assets.fleet.lead import LeadKeeper
from batch_assets.fleet.local import Fleet, LocalFleet
from batch_assets.fleet.progress import Progress, add_committed, measure
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import LeadRow, ShardRow, VersionRow

PAUSE_S = 0.2  # between two looks when there was nothing to commit
HOUSEKEEPING_S = 1.0  # leases, fleet, holds, progress
FOLLOW_S = 1.0
STARTING_MAX_S = 3600.0  # a model of hundreds of GB loads within it; a worker that died on another host before its first word never beats
NAMED_MAX = 10

Turns = Generator[float, None, "SupervisionReport"]  # yields how long to pause


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionReport:
    """How the run's wanted shards stand at its end, by number. `followed`: it ended while another led."""

    committed: tuple[int, ...]
    blocked: tuple[int, ...]
    pending: tuple[int, ...]  # neither: not started, or not done
    held: HoldReason | None
    followed: bool
    held_note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a run wants, and whom it tells."""

    job: str
    version: str
    wanted: frozenset[int] | None  # None: all shards of the version
    workers: int
    holder: str
    speed: Mapping[str, object]
    announce: Callable[[Sequence[ShardRow]], None]
    progress: Callable[[Progress], None]
    should_stop: Callable[[], bool]


def lead_keeper(installation: Installation, wish: Wish, generation: int) -> LeadKeeper:
    """What renews the lead of this generation, in a thread."""
    return LeadKeeper(installation.register, job=wish.job, version=wish.version, generation=generation, settings=installation.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What leading needs, made for one generation; tests and simulations put theirs here."""

    fleet: Callable[[Installation, Wish, int], Fleet]
    committer: Callable[[Installation, Wish, int], Committer]
    keeper: Callable[[Installation, Wish, int], LeadKeeper] = lead_keeper
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def local_fleet(installation: Installation, wish: Wish, generation: int) -> Fleet:
    """Worker processes on this host."""
    return LocalFleet(installation, job=wish.job, version=wish.version, generation=generation, speed=wish.speed)


def committer(installation: Installation, wish: Wish, generation: int) -> Committer:
    """The committer of this generation."""
    return Committer(installation, job=wish.job, version=wish.version, generation=generation)


def supervise(
    installation: Installation,
    *,
    job: str,
    version: str,
    wanted: Collection[int] | None,
    workers: int,
    holder: str,
    speed: Mapping[str, object],
    announce: Callable[[Sequence[ShardRow]], None],
    progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    parts: Parts | None = None,
) -> SupervisionReport:
    """Returns when the wanted shards are committed or blocked, when the version is held, or when `should_stop` says so.

    `announce` gets every committed wanted shard once (those that were committed before come first), and from a leader also those that no
    run has announced. A leader that is stopped or interrupted holds the version (`cancelled`) and stops its workers; one that fails leaves
    them to its successor. Raises RefusedError for unknown shards, UnfitEnvironmentError when workers cannot start.
    """
    wish = Wish(
        job=job,
        version=version,
        wanted=None if wanted is None else frozenset(wanted),
        workers=workers,
        holder=holder,
        speed=speed,
        announce=announce,
        progress=progress,
        should_stop=should_stop,
    )
    parts = parts or Parts(fleet=local_fleet, committer=committer, clock=clock)
    return _drive(Supervisor(installation, wish, parts).turns(), parts.sleep)


def _drive(turns: Turns, sleep: Callable[[float], None]) -> SupervisionReport:
    """Pauses as the turns say. An interrupt that comes while it sleeps is raised inside them, where the clean-up is."""
    try:
        pause_s = next(turns)
        while True:
            try:
                sleep(pause_s)
            except BaseException as error:  # noqa: BLE001  handed on, and raised from there
                pause_s = turns.throw(error)
            else:
                pause_s = next(turns)
    except StopIteration as end:
        return end.value


@dataclass(slots=True)
class View:
    """What this run has seen of the version's shards, and announced. Reads only what may have changed since."""

    wanted: frozenset[int]
    unsettled: set[int]  # of the whole version: not committed
    blocked: set[int] = field(default_factory=set)
    committed: Done = field(default_factory=Done)
    announced: set[int] = field(default_factory=set)

    def see(self, rows: Sequence[ShardRow]) -> list[ShardRow]:
        """Takes rows as they are now; returns those that are committed and were not before."""
        news = [row for row in rows if row.state is ShardState.COMMITTED and row.number in self.unsettled]
        self.blocked |= {row.number for row in rows if row.state is ShardState.BLOCKED}
        self.blocked -= {row.number for row in rows if row.state is not ShardState.BLOCKED}
        self.unsettled -= {row.number for row in news}
        self.committed = add_committed(self.committed, news)
        return news

    def is_outdated(self, counts: Mapping[ShardState, int], *, shards: int) -> bool:
        """Whether somebody else committed, blocked or unblocked a shard."""
        return counts[ShardState.COMMITTED] != shards - len(self.unsettled) or counts[ShardState.BLOCKED] != len(self.blocked)

    @property
    def open(self) -> frozenset[int]:
        """Wanted shards that are neither committed nor blocked."""
        return self.wanted & self.unsettled - self.blocked


class Supervisor:
    """Use `supervise`. `turns` yields at every point where it would pause, so that a simulation can drive or drop it there."""

    def __init__(self, installation: Installation, wish: Wish, parts: Parts) -> None:
        self._installation = installation
        self._register = installation.register
        self._lease_s = installation.settings.lease_s
        self._wish = wish
        self._parts = parts
        self._row, self._view = self._begin()
        self._meter = RateMeter()

    # --- both roles --------------------------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[VersionRow, View]:
        wish = self._wish
        row = self._register.version(wish.job, wish.version)
        if row.state not in (VersionState.ACTIVE, VersionState.HELD, VersionState.FINISHED):
            raise NotFinishedError(_not_supervised(row))
        rows = self._register.shards(wish.job, wish.version)
        known = frozenset(shard.number for shard in rows)
        unknown = sorted((wish.wanted or frozenset()) - known)
        if unknown:
            raise RefusedError(_unknown_shards(wish, unknown, known=len(known)))
        view = View(known if wish.wanted is None else wish.wanted, unsettled=set(known))
        self._register.want(job=wish.job, version=wish.version, shards=wish.wanted)
        return row, self._announced(view, view.see(rows))

    def turns(self) -> Turns:
        """Lead when nobody does, follow otherwise, until there is nothing left to wait for."""
        observer: LeaseObserver[LeadRow] = LeaseObserver(lease_s=self._lease_s)
        followed = False
        while not self._is_over():
            generation = self._take_lead(observer)
            if generation is None:
                followed = True
                yield FOLLOW_S
            else:
                followed = False
                yield from self._lead(generation)
            self._look()  # before the next try: a leader that has just left may have left nothing to lead
        self._finish_if_complete()
        self._look()
        return self._report(followed=followed)

    def _is_over(self) -> bool:
        return not self._view.open or self._wish.should_stop() or self._hold() is not None

    def _hold(self) -> HoldReason | None:
        job_hold = self._register.job_hold(self._wish.job)
        return job_hold.reason if job_hold is not None else self._register.version(self._wish.job, self._wish.version).hold

    def _take_lead(self, observer: LeaseObserver[LeadRow]) -> int | None:
        wish = self._wish
        lead = self._register.lead(wish.job, wish.version)
        if (
            lead is not None
            and not lead.released
            and not self._register.lead_has_lapsed(lead, job=wish.job, version=wish.version, observer=observer, now_s=self._parts.clock())
        ):
            return None
        return self._register.take_lead(job=wish.job, version=wish.version, holder=wish.holder, seen=lead)

    def _look(self) -> Mapping[ShardState, int]:
        """See what others did, announce our own wanted shards among it, show progress."""
        wish = self._wish
        counts = self._register.counts(wish.job, wish.version)
        if self._view.is_outdated(counts, shards=self._row.shards):
            news = self._view.see(self._register.shards(wish.job, wish.version, self._view.unsettled))
            self._announced(self._view, [row for row in news if row.number in self._view.wanted])
        wish.progress(
            measure(
                self._row,
                counts=counts,
                committed=self._view.committed,
                workers=self._register.workers(wish.job, wish.version, alive_only=False),
                workers_alive=len(self._register.workers(wish.job, wish.version, alive_only=True)),
                meter=self._meter,
                now_s=self._parts.clock(),
            )
        )
        return counts

    def _announced(self, view: View, rows: Sequence[ShardRow]) -> View:
        """Tell each shard once in this run, then note that it was told: after a crash in between it is told again, never left out."""
        wish = self._wish
        news = [row for row in rows if row.number not in view.announced]
        if news:
            wish.announce(news)
            view.announced.update(row.number for row in news)
            self._register.mark_announced(job=wish.job, version=wish.version, shards=[row.number for row in news])
        return view

    def _finish_if_complete(self) -> None:
        if not self._view.unsettled:
            self._register.finish_version(job=self._wish.job, version=self._wish.version)

    def _report(self, *, followed: bool) -> SupervisionReport:
        view = self._view
        held = self._hold()
        return SupervisionReport(
            committed=tuple(sorted(view.wanted - view.unsettled)),
            blocked=tuple(sorted(view.wanted & view.blocked)),
            pending=tuple(sorted(view.open)),
            held=held,
            followed=followed,
            held_note=self._register.version(self._wish.job, self._wish.version).hold_note if held is HoldReason.BREAKER else None,
        )

    # --- leading -----------------------------------------------------------------------------------------------------------------

    def _lead(self, generation: int) -> Generator[float, None, None]:
        """Until no wanted shard of the version is open, whoever wants it; or held, stopped, superseded."""
        wish = self._wish
        with self._parts.keeper(self._installation, wish, generation) as keeper:
            fleet = self._parts.fleet(self._installation, wish, generation)
            try:
                yield from self._leading(generation, keeper, fleet)
            except StaleGenerationError:
                return  # another leads and has adopted the fleet: follow
            except (Exception, GeneratorExit):
                raise  # a bug or a lost store: the workers go on, whoever leads next adopts them
            except BaseException:  # Ctrl-C, or Dagster's interrupt
                self._cancel(fleet)
                raise

    def _leading(self, generation: int, keeper: LeadKeeper, fleet: Fleet) -> Generator[float, None, None]:
        wish, clock = self._wish, self._parts.clock
        commit = self._parts.committer(self._installation, wish, generation)
        duties = Duties(self._installation, wish, fleet, StartBudget(wish.workers))
        self._announced(self._view, self._register.unannounced(wish.job, wish.version))
        due_s = clock()
        while not keeper.is_lost:
            committed = commit.step()
            self._announced(self._view, self._view.see(committed))
            if clock() >= due_s:
                due_s = clock() + HOUSEKEEPING_S
                if wish.should_stop():
                    return self._cancel(fleet)
                counts = self._look()
                if self._hold() is not None or not self._is_anything_wanted():
                    self._finish_if_complete()
                    fleet.stop()
                    return self._commit_rest(commit)
                duties.run(counts, now_s=clock())
            if not committed:
                yield PAUSE_S
        return None

    def _is_anything_wanted(self) -> bool:
        """Also shards that only other runs want: they follow, and wait for the leader."""
        if self._view.open:
            return True
        rows = self._register.shards(self._wish.job, self._wish.version, self._view.unsettled)
        return any(row.wanted and row.state is not ShardState.BLOCKED for row in rows)

    def _commit_rest(self, commit: Committer) -> None:
        """What workers staged on their way out."""
        while committed := commit.step():
            self._announced(self._view, self._view.see(committed))

    def _cancel(self, fleet: Fleet) -> None:
        """Hold first, so that nothing is claimed while the workers leave, and no sensor starts it again."""
        note = f"the run {self._wish.holder} was cancelled"
        self._register.hold_version(
            job=self._wish.job, version=self._wish.version, reason=HoldReason.CANCELLED, note=note, by=self._wish.holder
        )
        fleet.stop()


class Duties:
    """What a leader does each second besides committing: see who ended, end lapsed leases, fill the fleet."""

    def __init__(self, installation: Installation, wish: Wish, fleet: Fleet, budget: StartBudget) -> None:
        self._register = installation.register
        self._wish = wish
        self._fleet = fleet
        self._budget = budget
        self._breaker = FleetBreaker(wish.workers)
        lease_s = installation.settings.lease_s
        self._leases: LeaseObserver[tuple[int, int]] = LeaseObserver(lease_s=lease_s)
        self._heartbeats: LeaseObserver[str] = LeaseObserver(lease_s=HUNG_LEASES * lease_s)
        self._starts: LeaseObserver[str] = LeaseObserver(lease_s=STARTING_MAX_S)

    def run(self, counts: Mapping[ShardState, int], *, now_s: float) -> None:
        """Raises UnfitEnvironmentError when nobody works and starting another worker is of no use."""
        self._fleet.adopt()
        exits = self._fleet.reap()
        self._budget.exited(exits, now_s=now_s)
        if self._breaks(exits):
            return  # held: the workers are told to leave at the next look
        working = self._expire_lapsed(now_s=now_s)
        self._kill_hung(now_s=now_s)
        crash_loop = self._budget.crash_loop(now_s=now_s)
        if crash_loop and not working:
            raise _crash_loop(self._wish, crash_loop)
        self._fill(counts, now_s=now_s)

    def _breaks(self, exits: Sequence[WorkerExit]) -> bool:
        """Holds the version when its workers end whichever records they have; a person must look."""
        if not exits:
            return False
        workers = self._register.workers(self._wish.job, self._wish.version, alive_only=False)
        done = sum(worker.counters.get("answered", 0) + worker.counters.get("dead", 0) for worker in workers)
        self._breaker.exited(exits, progress=done)
        reason = self._breaker.reason
        if reason is not None:
            self._register.hold_version(
                job=self._wish.job, version=self._wish.version, reason=HoldReason.BREAKER, note=reason, by=self._wish.holder
            )
        return reason is not None

    def _expire_lapsed(self, *, now_s: float) -> bool:
        """Whether any shard is leased."""
        job, version = self._wish.job, self._wish.version
        for lease in self._register.lapsed(job, version, observer=self._leases, now_s=now_s):
            self._register.expire(
                job=job, version=version, shard=lease.number, epoch=lease.epoch, renewals=lease.renewals, end=LeaseEnd.EXPIRED
            )
        return bool(self._register.leased(job, version))

    def _kill_hung(self, *, now_s: float) -> None:
        """A stopped or wedged process lost its shards after one lease; it must not take up a place (and a GPU) for ever."""
        workers = self._register.workers(self._wish.job, self._wish.version, alive_only=True)
        starting = {worker.worker_id: worker.heartbeats for worker in workers if worker.state is WorkerState.STARTING}
        heard = {worker.worker_id: worker.heartbeats for worker in workers if worker.worker_id not in starting}
        for worker_id in [*self._heartbeats.lapsed(heard, now_s=now_s), *self._starts.lapsed(starting, now_s=now_s)]:
            self._fleet.kill(worker_id)

    def _fill(self, counts: Mapping[ShardState, int], *, now_s: float) -> None:
        count = workers_to_start(
            workers=self._wish.workers,
            alive=self._fleet.alive,
            open_shards=open_shards(counts),
            allowed=self._budget.allowed(now_s=now_s),
        )
        for _ in range(count):
            self._budget.started(now_s=now_s)
        self._fleet.start(count)


def _crash_loop(wish: Wish, exits: Sequence[WorkerExit]) -> GristmillError:
    last = exits[-1]
    if last.is_refusal:
        found = last.own_words
    else:
        found = f"exit code {last.exit_code}, its log ends with {last.last_line_class or 'no error of a known form'}"
    return UnfitEnvironmentError(
        Problem(
            code="fleet.workers_do_not_start",
            file=wish.version,
            what=f"{len(exits)} worker(s) ended without having held a shard; no more are started, nothing is lost",
            expected="a worker that loads its model and claims a shard",
            found=found,
            fix=f"read {last.log_path}, then run it again",
        )
    )


def _unknown_shards(wish: Wish, unknown: Sequence[int], *, known: int) -> Problem:
    names = ", ".join(shard_key(wish.version, number) for number in unknown[:NAMED_MAX])
    return Problem(
        code="shards.unknown",
        file=wish.version,
        what=f"{len(unknown)} of the wanted shards do not exist: {names}",
        expected=f"shards of {wish.version}, which has {known}",
        found=names,
        fix=f"plan the version again, or choose among its shards: gristmill status {wish.job}",
    )


def _not_supervised(row: VersionRow) -> Problem:
    return Problem(
        code="version.not_supervised",
        file=row.name,
        what=f"version {row.name} is {row.state}: it has no shards to answer",
        expected="active, held or finished",
        found=row.state,
        fix=f"plan it to the end first: gristmill run {row.job}",
    )
