"""The worker's hot path: claim -> fence -> feed -> answer -> flush -> stage, over and over, for one job version and one loaded model.

`run` is a generator: it yields wherever a crash matters, and whoever drives it may stop there, sleep there, or never come back. Time,
register, log, frozen input and engine are arguments, so a simulation drives this very loop. What a shard does with its records is in
`feeder.py`.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final, Protocol

import polars as pl

from batch_assets.core.breakers import Tally
from batch_assets.core.errors import EngineFailedError, RecordRejectedError, StaleLeaseError, UnfitWorkerError
from batch_assets.core.leasing import CLAIMING_STATES, LeaseEnd, ShardState, is_claimable
from batch_assets.core.ports import Completion, Engine, Request
from batch_assets.core.records import DeadClass
from batch_assets.core.request_ids import request_id
from batch_assets.core.retries import PARTS
from batch_assets.stores.register import Lease, Register
from batch_assets.stores.shard_log import ShardLog
from batch_assets.worker.feeder import ShardWork, Tools, open_shard
from batch_assets.worker.in_flight import Flight, InFlight
from batch_assets.worker.probing import Doubts

LEASES_MAX: Final = 2  # one whose tail decodes, one that is fed; a third would only be one more to repeat after a crash
CLAIM_PAUSE_S: Final = 0.5  # between claims that find nothing: a claim is a write transaction
TURN_COUNTED_MAX_S: Final = 10.0  # of a turn's time counts against a record: a process that was stopped has not decoded


class Point(StrEnum):
    """Where `run` yields."""

    CLAIMED = "claimed"
    FENCED = "fenced"
    FED = "fed"
    ANSWERED = "answered"
    FLUSHED = "flushed"
    STAGED = "staged"
    RELEASED = "released"
    IDLE = "idle"  # nothing to do; sleep a little before going on


class Shards(Protocol):
    """Where the shards of the version are: their logs and their frozen input."""

    def log(self, lease: Lease) -> ShardLog: ...
    def frozen(self, lease: Lease) -> pl.DataFrame: ...


class Worker:
    """One thread runs it. `stop`, `lose`, `leases` and `turns` are for the heartbeat's thread, and for signal handlers."""

    def __init__(
        self,
        *,
        job: str,
        version: str,
        worker_id: str,
        register: Register,
        shards: Shards,
        engine: Engine,
        tools: Tools,
        answer_timeout_s: float,
        flush_s: float,
        clock: Callable[[], float],
        note: Callable[..., None],
        lease_s: float = 90.0,
        before_start: Callable[[], object] = lambda: None,
    ) -> None:
        self.leases: tuple[Lease, ...] = ()
        self.turns = 0  # grows whenever the engine gave control back: the watchdog's proof of progress
        self._job, self._version, self._worker_id = job, version, worker_id
        self._register, self._shards, self._engine, self._tools = register, shards, engine, tools
        self._in_flight = InFlight(decoding_max=engine.max_num_seqs, timeout_s=answer_timeout_s)
        self._doubts = Doubts(engine=engine, in_flight=self._in_flight, tools=tools, before_start=before_start, others=self._others)
        self._flush_s, self._clock, self._note = flush_s, clock, note
        self._works: list[ShardWork] = []  # oldest first
        self._lost: deque[Lease] = deque()
        self._stopping = self._exhausted = False
        self._next_claim_s = self._turn_began_s = clock()
        self._turn_s = self._engine_s = 0.0
        self._left_to_others: set[int] = set()  # shards with a last attempt that this worker must not make
        self._lease_s, self._waits_since_s = lease_s, clock()

    # ------------------------------------------------------------------------------------------------------------- the hot path

    def run(self) -> Iterator[Point]:
        """Until it is told to stop, or the version has nothing to claim and will not have.

        Raises EngineFailedError, answers safe, and UnfitWorkerError, shards given back.
        """
        try:
            while not self._stopping and not self._exhausted:
                self._measure_turn()
                yield from self._claim()
                self._feed()
                yield Point.FED
                self._answer()
                yield Point.ANSWERED
                yield from self._flush()
                yield from self._stage()
                if not self._works:
                    yield Point.IDLE
        except UnfitWorkerError:
            for work in self._works:
                work.pardon(self._clock())
            yield from self._leave(LeaseEnd.RELEASED, avoid_worker=self._worker_id)
            raise
        yield from self._leave(LeaseEnd.DRAINED)

    def _claim(self) -> Iterator[Point]:
        """The next shard, while the tail of the present one decodes."""
        if not self._wants_shard():
            return
        lease = self._register.claim(job=self._job, version=self._version, worker=self._worker_id)
        if lease is None:
            self._next_claim_s = self._clock() + CLAIM_PAUSE_S
            self._exhausted = not self._works and (not self._is_open() or self._must_begin_anew())
            return
        self.leases = (*self.leases, lease)
        yield Point.CLAIMED
        with self._holding(lease):
            self._works.append(
                open_shard(
                    lease,
                    log=self._shards.log(lease),
                    frozen=self._shards.frozen(lease),
                    tools=self._tools,
                    now_s=self._clock(),
                    is_engine_proven=self._is_engine_proven,
                )
            )
        yield Point.FENCED

    def _feed(self) -> None:
        """More requests than the engine decodes at a time, so that it never waits for the next one."""
        self._doubts.weigh(self._works, self._clock())
        for work in tuple(self._works):
            if work.is_probing:
                with self._holding(work.lease):
                    self._doubts.probe(work, is_alone=len(self._works) == 1)
            for row, attempt, record_id, token_ids in work.prompts(self._clock(), in_flight=len(self._in_flight)):
                name = request_id(shard=work.lease.shard, epoch=work.lease.epoch, attempt=attempt, record_id=record_id)
                try:
                    self._engine.submit(Request(request_id=name, token_ids=token_ids))
                except RecordRejectedError as error:
                    work.reject(row, attempt, error)
                else:
                    self._in_flight.add(name, Flight(work, row, attempt))
                    self._tools.counters.submitted += 1

    def _answer(self) -> None:
        """One step of the engine, and what it finished."""
        completions = self._poll()
        now_s = self._clock()
        evidence = self._tools.evidence
        answers, failures_before = 0, evidence.row
        for completion in completions:
            flight = self._in_flight.land(completion.request_id)
            if flight is not None:
                answers += 1
                self._count(completion)
                flight.work.take(flight.row, flight.attempt, completion, now_s)
        if answers > evidence.row - failures_before:
            evidence.answered()
        for name, flight in self._in_flight.overdue(self._engine_s):
            self._engine.abort([name])
            flight.work.fail(flight.row, flight.attempt, DeadClass.TIMED_OUT, "no answer in time", tokens_output=0)
        self._tools.counters.in_flight = len(self._in_flight)
        self.turns += 1

    def _flush(self) -> Iterator[Point]:
        """No answer waits longer than `flush_s`, judged by how long the last turn took; none waits while there is nothing to do."""
        for work in tuple(self._works):
            now_s = self._clock()
            is_idle = not self._in_flight and not work.has_queued
            due = work.due(now_s, flush_s=0.0 if is_idle else self._flush_s - self._turn_s)
            if due or work.is_putting:
                returned = False
                with self._holding(work.lease):
                    returned = work.flush(due, now_s, wait=not self._in_flight)
                if returned:
                    yield Point.FLUSHED

    def _stage(self) -> Iterator[Point]:
        """A shard whose records are all terminal in the log goes to the committer; one that needs other eyes, to another worker."""
        for work in tuple(self._works):
            if work.is_complete:
                with self._holding(work.lease):
                    self._register.stage(work.lease, slots=work.slots, seconds=self._clock() - work.opened_s)
                    self._note("staged", shard=work.lease.key, epoch=work.lease.epoch, slots=work.slots, failures=work.failures_by_class)
                self._doubts.remember(work)
                self._forget(work.lease)
                yield Point.STAGED
            elif work.is_left_to_others:
                with self._holding(work.lease):
                    self._register.release(work.lease, end=LeaseEnd.RELEASED, avoid_worker=self._worker_id)
                self._left_to_others.add(work.lease.shard)
                self._waits_since_s = self._clock()
                self._forget(work.lease)
                yield Point.RELEASED

    # --------------------------------------------------------------------------------------------- leaving, losing, and small questions

    def stop(self) -> None:
        """Claim no more, put what is finished, give the shards back, end."""
        self._stopping = True

    def lose(self, lease: Lease) -> None:
        """A renewal was refused: the shard is somebody else's."""
        self._lost.append(lease)

    def _leave(self, end: LeaseEnd, *, avoid_worker: str | None = None) -> Iterator[Point]:
        self._engine.abort(self._in_flight.drop(lambda _flight: True))
        for work in tuple(self._works):
            with self._holding(work.lease):
                work.flush(None, self._clock(), wait=True)
                self._register.release(work.lease, end=end, avoid_worker=avoid_worker)
            self._forget(work.lease)
            yield Point.RELEASED

    def _poll(self) -> list[Completion]:
        try:
            return self._engine.poll()
        except EngineFailedError:
            # What it had finished is good. The leases are left: the leader sees this process exit, and the next owner looks for suspects.
            for work in tuple(self._works):
                with self._holding(work.lease):
                    work.flush(None, self._clock(), wait=True)
            raise

    @contextmanager
    def _holding(self, lease: Lease) -> Generator[None]:
        """A stale lease costs its shard and nothing else."""
        try:
            yield
        except StaleLeaseError as error:
            self._note("lease_lost", shard=lease.key, epoch=lease.epoch, current=error.data["epoch_current"])
            self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        self._engine.abort(self._in_flight.drop(lambda flight: flight.work.lease is lease))
        self._works = [work for work in self._works if work.lease is not lease]
        self.leases = tuple(held for held in self.leases if held is not lease)

    def _measure_turn(self) -> None:
        while self._lost:
            self._forget(self._lost.popleft())
        now_s = self._clock()
        self._turn_s, self._turn_began_s = now_s - self._turn_began_s, now_s
        self._engine_s += min(self._turn_s, TURN_COUNTED_MAX_S)

    def _wants_shard(self) -> bool:
        is_hungry = len(self._in_flight) < self._tools.window and not any(work.has_queued or work.is_probing for work in self._works)
        return is_hungry and len(self.leases) < LEASES_MAX and self._clock() >= self._next_claim_s

    def _is_open(self) -> bool:
        """Whether the version may yet have a shard to claim: pending ones that nobody wants yet, or that others give back."""
        hold = self._register.job_hold(self._job)
        return is_claimable(version=self._register.version(self._job, self._version).state, job_hold=hold.reason if hold else None)

    def _must_begin_anew(self) -> bool:
        """A last attempt is left, and nobody else comes for it: this worker ends, and the one that is started in its place may make it."""
        if not self._left_to_others:
            return False
        rows = self._register.shards(self._job, self._version, self._left_to_others)
        self._left_to_others = {row.number for row in rows if row.state is ShardState.PENDING and row.avoid_worker == self._worker_id}
        workers = self._register.workers(self._job, self._version, alive_only=True)
        has_others = any(each.state in CLAIMING_STATES and each.worker_id != self._worker_id for each in workers)
        waited_s = self._clock() - self._waits_since_s
        return bool(self._left_to_others) and (not has_others or waited_s >= self._lease_s)

    def _others(self) -> Tally:
        """What all other workers of the version have done, those that are gone included."""
        workers = self._register.workers(self._job, self._version, alive_only=False)
        counters = [worker.counters for worker in workers if worker.worker_id != self._worker_id]
        return Tally(completed=sum(each.get("completed", 0) for each in counters), failed=sum(each.get("failed", 0) for each in counters))

    def _is_engine_proven(self) -> bool:
        """Whether anybody of the version was ever given an answer; a handful of records need no such proof to come to their end."""
        version = self._register.version(self._job, self._version)
        workers = self._register.workers(self._job, self._version, alive_only=False)
        is_answered = any(worker.counters.get("answered", 0) for worker in workers)
        return self._tools.evidence.is_proven or is_answered or version.to_answer <= PARTS

    def _count(self, completion: Completion) -> None:
        counters = self._tools.counters
        counters.completed += 1
        counters.tokens_prompt += completion.tokens_prompt
        counters.tokens_cached += completion.tokens_cached
        counters.tokens_output += completion.tokens_output
