"""The register against its model: any transition, by anybody, in any order, late or repeated, ends as docs/states.md says."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import count
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import select

from batch_assets.core import leasing
from batch_assets.core.errors import GristmillError, StaleGenerationError, StaleLeaseError
from batch_assets.core.leasing import HoldReason, LeaseEnd, LeaseObserver, ShardState, WorkerState
from batch_assets.stores.register import CommittedShard, LeadRow, Lease, LeasedShard, Register, ShardRow
from batch_assets.stores.sql import tables
from batch_assets.stores.sql.rows import shard_of
from tests.rules.efforts import Effort
from tests.rules.register_model import LOSSES_MAX, RETURNED_MAX, ModelLead, ModelObserver, ModelShard, ModelVersion, Verdict
from tests.support.registers import activate, planned_shards, spec

LEASE_S = 90
SHARD_FIELDS = [each.name for each in fields(ModelShard)]
LEAD_FIELDS = [each.name for each in fields(ModelLead)]
shard_fields, lead_fields = attrgetter(*SHARD_FIELDS), attrgetter(*LEAD_FIELDS)
history_numbers = count(1)

# Most of a history happens to one version; the others are there to be left alone, or to be acted on by mistake.
versions = st.sampled_from([0] * 8 + [1, 2])
workers = st.sampled_from(["a", "b"])
numbers = st.integers(1, 3)
choices = st.integers(0, 4)  # the first ones are what the call is for, the last ones are any shard
some_numbers = st.sets(numbers, min_size=1)
recent = st.sampled_from([0, 0, 0, 1, 2, 3, 5])  # how far back in what was handed out; 0 is the latest
generations = st.sampled_from([0] * 6 + [-1, -2, 1])  # from the present one
ends = st.sampled_from([LeaseEnd.RELEASED, LeaseEnd.DRAINED, LeaseEnd.NODE_GONE])
forgeries = st.sampled_from([None] * 6 + ["worker", "epoch"])


@dataclass(frozen=True, slots=True)
class Everything:
    """What the register keeps of some versions, by (job, version)."""

    versions: Mapping[tuple[str, str], tuple[object, ...]]
    shards: dict[tuple[str, str], list[tuple[object, ...]]] = field(default_factory=lambda: defaultdict(list))
    leads: dict[tuple[str, str], tuple[object, ...]] = field(default_factory=dict)


class RegisterMachine(RuleBasedStateMachine):
    """Three versions, two of them of one job; leases, leads and sightings are kept for ever, so that each comes back late."""

    struck: Counter[str]  # move and verdict, over all histories: that none was left out

    def __init__(self, register: Register, struck: Counter[str]) -> None:
        super().__init__()
        self.register, self.struck = register, struck
        history = next(history_numbers)
        self.job, other = f"job{history}", f"other{history}"
        self.versions = [self._registered(self.job, "p"), self._registered(self.job, "q"), self._registered(other, "p")]
        for each in (self.versions[0], self.versions[2]):
            self._activate(each, "a1", hold=None)
        self._want(self.versions[0], {1, 2, 3})
        self.job_holds: dict[str, HoldReason | None] = {self.job: None, other: None}
        self.leases: list[tuple[ModelVersion, Lease]] = []
        self.sightings: list[tuple[ModelVersion, LeasedShard]] = []
        self.leads: list[LeadRow] = []
        self._take_lead(self.versions[0], "first", None)
        self.now_s = 0.0
        # Two leaders and two followers, each with eyes of its own; the second of each pair looks rarely.
        self.observers = [(LeaseObserver[Any](lease_s=LEASE_S), ModelObserver(lease_s=LEASE_S)) for _ in range(4)]
        self.grown: dict[str, int] = {}
        self._reads = [
            select(table).where(table.c.job.in_([self.job, other])).order_by(*table.primary_key)
            for table in (tables.versions, tables.shards, tables.leads)
        ]

    def _registered(self, job: str, prompt: str) -> ModelVersion:
        return ModelVersion(job=job, name=self.register.register_version(spec(job=job, prompt=prompt), kind="full").name)

    def _activate(self, version: ModelVersion, attempt: str, *, hold: HoldReason | None) -> None:
        sha256 = f"sha256:{attempt}"
        # The last shard has nothing to answer: the planner stages it.
        shards = [*planned_shards(2, input_sha256=sha256), replace(planned_shards(3, input_sha256=sha256)[2], to_answer=0)]
        expected = version.activate(attempt, [(shard.number, shard.to_answer) for shard in shards], sha256=sha256, hold=hold)
        assert activate(self.register, version.name, shards, job=version.job, attempt=attempt, hold=hold) == expected

    def _want(self, version: ModelVersion, wanted: Collection[int] | None) -> None:
        version.want(wanted)
        self.register.want(job=version.job, version=version.name, shards=wanted)

    def _at(self, version: ModelVersion) -> dict[str, str]:
        return {"job": version.job, "version": version.name}

    def _ends(self, move: str, expected: Verdict, call: Callable[[], object], error: type[GristmillError]) -> None:
        """The call on the register ends as the model says; that what is kept agrees is compared after every step."""
        self.struck[f"{move}: {expected}"] += 1
        if expected is Verdict.REFUSED:
            with pytest.raises(error):
                call()
        else:
            call()

    # --- planner and people ----------------------------------------------------------------------------------------------------------

    @rule(v=versions, attempt=st.sampled_from(["a1", "a2"]), hold=st.sampled_from([None, HoldReason.APPROVAL]))
    def plan_attempt_ends(self, v: int, attempt: str, hold: HoldReason | None) -> None:
        self._activate(self.versions[v], attempt, hold=hold)

    @rule(v=versions, what=st.sampled_from(["want", "want", "unblock", "unblock", "finish"]), some=st.one_of(st.none(), some_numbers))
    def run_or_person_asks(self, v: int, what: str, some: Collection[int] | None) -> None:
        version = self.versions[v]
        match what:
            case "want":
                self._want(version, some)
            case "unblock":
                unblocked = version.unblock(some)
                self.struck[f"unblock: {unblocked > 0}"] += 1
                assert self.register.unblock(**self._at(version), shards=some) == unblocked
            case _:
                finished = version.finish()
                assert self.register.finish_version(**self._at(version)) == finished

    @rule(v=versions, what=st.sampled_from(["hold", "lift", "lift", "hold job", "resume job", "resume job"]))
    def somebody_holds_or_resumes(self, v: int, what: str) -> None:
        version = self.versions[v]
        match what:
            case "hold":
                assert self.register.hold_version(**self._at(version), reason=HoldReason.BREAKER) == version.hold_for(HoldReason.BREAKER)
            case "lift":
                assert self.register.lift_version_hold(**self._at(version)) == version.lift()
            case "hold job":
                self.job_holds[self.job] = HoldReason.PERSON
                self.register.hold_job(self.job, by="kim", note="")
            case _:
                held, self.job_holds[self.job] = self.job_holds[self.job], None
                assert self.register.resume_job(self.job) == (held is not None)

    # --- workers -----------------------------------------------------------------------------------------------------------------------

    @rule(v=versions, worker=workers)
    def worker_claims(self, v: int, worker: str) -> None:
        self._claim(self.versions[v], self._worker(worker))

    @rule(v=versions, worker=workers, renewals=st.integers(0, 2), slots=st.integers(1, 2))
    def worker_does_a_shard(self, v: int, worker: str, renewals: int, slots: int) -> None:
        """An ordinary life, so that histories get somewhere whichever rules they are made of."""
        if self._claim(self.versions[v], self._worker(worker)):
            for _ in range(renewals):
                self.worker_renews(back=0, forged=None)
            self.worker_stages(back=0, forged=None, slots=slots)

    @rule(worker=workers, renewals=st.integers(0, 2), looks=st.booleans())
    def worker_dies_with_a_shard(self, worker: str, renewals: int, looks: bool) -> None:
        """A leader that looked at once ends the lease a lease later; one that looks late waits."""
        if self._claim(self.versions[0], self._worker(worker)):
            for _ in range(renewals):
                self.worker_renews(back=0, forged=None)
            if looks:
                self.leader_ends_lapsed_leases(v=0, leader=0)
            self.time_passes(seconds=LEASE_S)
            self.leader_ends_lapsed_leases(v=0, leader=0)

    def _claim(self, version: ModelVersion, name: str) -> bool:
        number = version.claimable(name, job_hold=self.job_holds[version.job])
        lease = self.register.claim(**self._at(version), worker=name)
        self.struck[f"claim: {number is not None}"] += 1
        assert (lease.shard if lease else None) == number
        if lease is None or number is None:
            return False
        shard = version.claim(number, name)
        assert (lease.epoch, lease.round, lease.worker) == (shard.epoch, shard.round, name)
        assert (lease.previous_end, lease.staged_rounds) == (shard.previous_end, shard.staged_rounds)
        assert (lease.input_attempt, lease.input_sha256) == (version.input_attempt, shard.input_sha256)
        self.leases.append((version, lease))
        return True

    @precondition(lambda self: self.leases)
    @rule(back=recent, forged=forgeries)
    def worker_renews(self, back: int, forged: str | None) -> None:
        version, lease = self._lease(back, forged)
        expected = version.renew(lease.shard, worker=lease.worker, epoch=lease.epoch)
        self._ends("renew", expected, lambda: self.register.renew(lease), StaleLeaseError)

    @precondition(lambda self: self.leases)
    @rule(back=recent, forged=forgeries, slots=st.sampled_from([1, 1, 1, 2]))
    def worker_stages(self, back: int, forged: str | None, slots: int) -> None:
        version, lease = self._lease(back, forged)
        expected = version.stage(lease.shard, worker=lease.worker, epoch=lease.epoch, slots=slots)
        self._ends("stage", expected, lambda: self.register.stage(lease, slots=slots, seconds=1), StaleLeaseError)

    @precondition(lambda self: self.leases)
    @rule(back=recent, forged=forgeries, end=ends, avoids=st.booleans())
    def worker_releases(self, back: int, forged: str | None, end: LeaseEnd, avoids: bool) -> None:
        version, lease = self._lease(back, forged)
        avoid = lease.worker if avoids else None
        expected = version.release(lease.shard, worker=lease.worker, epoch=lease.epoch, end=end, avoid_worker=avoid)
        self._ends("release", expected, lambda: self.register.release(lease, end=end, avoid_worker=avoid), StaleLeaseError)

    @rule(worker=workers, state=st.sampled_from([*WorkerState, None]), number=numbers)
    def worker_comes_or_goes(self, worker: str, state: WorkerState | None, number: int) -> None:
        version, name = self.versions[0], self._worker(worker)
        now = version.workers.get(name)
        match state:
            case WorkerState.STARTING:
                self.register.worker_started(**self._at(version), worker_id=name, host="h", pid=1)
                version.workers.setdefault(name, WorkerState.STARTING)
            case WorkerState.RUNNING:
                assert self.register.worker_heartbeat(name, {}) == (now not in {None, WorkerState.GONE})
                if now is WorkerState.STARTING:
                    version.workers[name] = WorkerState.RUNNING
            case WorkerState.LEAVING | WorkerState.GONE:
                (self.register.worker_leaving if state is WorkerState.LEAVING else self.register.worker_gone)(name)
                if now not in {None, WorkerState.GONE}:
                    version.workers[name] = state
            case None:
                forgotten = version.forget_avoidance(number, name)
                assert self.register.forget_avoidance(**self._at(version), shard=number, worker=name) == forgotten

    @rule(v=versions, worker=workers, stages=st.booleans(), end=ends)
    def worker_repeats_itself_after_a_lost_acknowledgement(self, v: int, worker: str, stages: bool, end: LeaseEnd) -> None:
        if self._claim(self.versions[v], self._worker(worker)):
            for _ in range(2):
                if stages:
                    self.worker_stages(back=0, forged=None, slots=1)
                else:
                    self.worker_releases(back=0, forged=None, end=end, avoids=False)
            self.worker_renews(back=0, forged=None)

    def _worker(self, letter: str) -> str:
        return f"{self.job}-{letter}"

    def _lease(self, back: int, forged: str | None) -> tuple[ModelVersion, Lease]:
        """One of the latest leases, or what somebody makes of it who has no right to it."""
        version, lease = self.leases[max(-1 - back, -len(self.leases))]
        if forged == "worker":
            other = self._worker("b" if lease.worker.endswith("a") else "a")
            return version, replace(lease, worker=other)
        return version, replace(lease, epoch=lease.epoch + 1) if forged == "epoch" else lease

    # --- leases end ------------------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, LEASE_S - 1, LEASE_S, LEASE_S / 2]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(v=versions)
    def somebody_looks(self, v: int) -> None:
        """What is seen now is acted upon later."""
        version = self.versions[v]
        self.sightings += [(version, seen) for seen in self._leased(version)]
        lead = self.register.lead(version.job, version.name)
        self.leads += [lead] if lead else []

    @precondition(lambda self: self.sightings)
    @rule(back=recent, end=st.sampled_from([LeaseEnd.EXPIRED, LeaseEnd.EXPIRED, LeaseEnd.NODE_GONE]))
    def lease_is_ended_as_it_was_seen(self, back: int, end: LeaseEnd) -> None:
        version, seen = self.sightings[max(-1 - back, -len(self.sightings))]
        self._expire(version, seen.number, epoch=seen.epoch, renewals=seen.renewals, end=end)

    @rule(v=st.sampled_from([0, 0, 0, 1]), leader=st.sampled_from([0, 0, 0, 1]))
    def leader_ends_lapsed_leases(self, v: int, leader: int) -> None:
        version, (observer, model) = self.versions[v], self.observers[leader]
        leases = {(version.name, seen.number, seen.epoch): seen.renewals for seen in self._leased(version)}
        lapsed = model.lapsed(leases, now_s=self.now_s)
        assert observer.lapsed(leases, now_s=self.now_s) == lapsed
        for key in lapsed:
            _, number, epoch = key
            self._expire(version, number, epoch=epoch, renewals=leases[key], end=LeaseEnd.EXPIRED)

    def _expire(self, version: ModelVersion, number: int, *, epoch: int, renewals: int, end: LeaseEnd) -> None:
        ended = version.expire(number, epoch=epoch, renewals=renewals, end=end)
        self.struck[f"expire: {ended}"] += 1
        assert self.register.expire(**self._at(version), shard=number, epoch=epoch, renewals=renewals, end=end) == ended

    def _leased(self, version: ModelVersion) -> list[LeasedShard]:
        leased = self.register.leased(version.job, version.name)
        expected = [shard for shard in version.shards.values() if shard.state is ShardState.LEASED]
        assert leased == [(shard.number, shard.epoch, shard.renewals, shard.owner) for shard in expected]
        return leased

    @rule(v=versions, worker=workers)
    def lease_is_renewed_after_it_was_seen(self, v: int, worker: str) -> None:
        """Whoever then ends it as it was seen ends nothing."""
        if self._claim(self.versions[v], self._worker(worker)):
            self.somebody_looks(v=v)
            self.worker_renews(back=0, forged=None)
            _, lease = self.leases[-1]
            self._expire(self.versions[v], lease.shard, epoch=lease.epoch, renewals=0, end=LeaseEnd.EXPIRED)

    # --- the leader ------------------------------------------------------------------------------------------------------------------

    @rule(v=versions, holder=workers, back=st.sampled_from([None, 0, 0, 1, 2]))
    def somebody_takes_the_lead(self, v: int, holder: str, back: int | None) -> None:
        """With any row that anybody ever saw."""
        seen = None if back is None or not self.leads else self.leads[max(-1 - back, -len(self.leads))]
        self._take_lead(self.versions[v], holder, seen)

    @rule(v=st.sampled_from([0, 0, 0, 1]), follower=st.sampled_from([2, 2, 3]))
    def follower_takes_over_when_the_lead_has_lapsed(self, v: int, follower: int) -> None:
        version, (observer, model) = self.versions[v], self.observers[follower]
        lead = self.register.lead(version.job, version.name)
        leases = {} if lead is None else {(version.name, lead.holder, lead.generation): lead.renewals}
        lapsed = model.lapsed(leases, now_s=self.now_s)
        assert observer.lapsed(leases, now_s=self.now_s) == lapsed
        if lead is not None and lapsed:
            self._take_lead(version, f"follower{follower}", lead)

    @rule(v=versions, renewals=st.integers(1, 2))
    def lead_is_renewed_after_it_was_seen(self, v: int, renewals: int) -> None:
        """Whoever then takes it as it was seen takes nothing."""
        version = self.versions[v]
        self.somebody_looks(v=v)
        for _ in range(renewals):
            self.leader_keeps_or_leaves(v=v, off=0, what="renew")
        if version.lead is not None:
            self._take_lead(version, "follower", self.leads[-1])

    def _take_lead(self, version: ModelVersion, holder: str, seen: LeadRow | None) -> None:
        expected = version.take_lead(holder, (seen.holder, seen.generation, seen.renewals) if seen else None)
        self.struck[f"take_lead: {expected is not None}"] += 1
        assert self.register.take_lead(**self._at(version), holder=holder, seen=seen) == expected

    @rule(v=versions, off=generations, what=st.sampled_from(["renew", "renew", "leave", "leave twice", "ask"]))
    def leader_keeps_or_leaves(self, v: int, off: int, what: str) -> None:
        version, generation = self._generation(v, off)
        at = {**self._at(version), "generation": generation}
        match what:
            case "renew":
                self._ends("renew_lead", version.renew_lead(generation), lambda: self.register.renew_lead(**at), StaleGenerationError)
            case "leave" | "leave twice":
                for _ in range(1 if what == "leave" else 2):
                    self._ends("leave_lead", version.leave_lead(generation), lambda: self.register.leave_lead(**at), StaleGenerationError)
            case _:
                expected = Verdict.ALREADY if version.leads(generation) else Verdict.REFUSED
                self._ends("check_generation", expected, lambda: self.register.check_generation(**at), StaleGenerationError)

    @rule(
        v=versions, off=generations, wanted=some_numbers, round_=st.sampled_from([0, 0, 0, 1]), epoch_off=st.sampled_from([None, 0, 0, -1])
    )
    def leader_commits(self, v: int, off: int, wanted: Collection[int], round_: int, epoch_off: int | None) -> None:
        version, generation = self._generation(v, off)
        if not version.shards:
            return
        shards = [
            CommittedShard(number=number, round=round_, epoch=None if epoch_off is None else version.shards[number].epoch + epoch_off)
            for number in wanted
        ]
        self._commit(version, generation, shards)

    @rule(off=generations)
    def leader_commits_all_that_is_staged(self, off: int) -> None:
        version, generation = self._generation(0, off)
        staged = self.register.staged(version.job, version.name, 2)
        assert [row.number for row in staged] == [each.number for each in version.shards.values() if each.state is ShardState.STAGED][:2]
        for _ in range(2 if staged else 0):  # again: the acknowledgement may have been lost
            self._commit(version, generation, [CommittedShard(number=row.number, round=row.round, epoch=row.epoch) for row in staged])

    def _commit(self, version: ModelVersion, generation: int, shards: list[CommittedShard]) -> None:
        expected = version.commit(generation, {shard.number: (shard.round, shard.epoch) for shard in shards})
        self._ends(
            "commit", expected, lambda: self.register.commit(**self._at(version), generation=generation, shards=shards), GristmillError
        )

    @rule(v=versions, off=generations, which=choices)
    def leader_sends_back(self, v: int, off: int, which: int) -> None:
        version, generation = self._generation(v, off)
        number = self._choose(version, which, {ShardState.STAGED})
        at = {**self._at(version), "generation": generation, "shard": number, "reason": "ids are missing"}
        if number is not None:
            expected = version.send_back(generation, number, "ids are missing")
            self._ends("send_back", expected, lambda: self.register.send_back(**at), StaleGenerationError)

    @rule(v=versions, off=generations, which=choices)
    def leader_blocks(self, v: int, off: int, which: int) -> None:
        version, generation = self._generation(v, off)
        number = self._choose(version, which, {ShardState.COMMITTED, ShardState.BLOCKED})
        at = {**self._at(version), "generation": generation, "shard": number, "reason": "its input does not verify"}
        if number is not None:
            expected = version.block(generation, number, "its input does not verify")
            self._ends("block", expected, lambda: self.register.block(**at), StaleGenerationError)

    def _choose(self, version: ModelVersion, which: int, states: Collection[ShardState]) -> int | None:
        """A shard in one of the states, if there is one and the draw does not want another."""
        meant = [number for number, shard in version.shards.items() if shard.state in states]
        candidates = [*meant, *version.shards]
        return candidates[which % len(candidates)] if candidates else None

    @rule(v=versions, told=some_numbers)
    def leader_announces(self, v: int, told: Collection[int]) -> None:
        version = self.versions[v]
        untold = [shard.number for shard in version.shards.values() if shard.state is ShardState.COMMITTED and not shard.announced]
        assert [row.number for row in self.register.unannounced(version.job, version.name)] == untold
        version.announce(told)
        self.register.mark_announced(**self._at(version), shards=told)

    def _generation(self, v: int, off: int) -> tuple[ModelVersion, int]:
        version = self.versions[v]
        return version, (version.lead.generation if version.lead else 0) + off

    # --- what holds after every step -------------------------------------------------------------------------------------------------

    @invariant()
    def everything_is_as_the_model_says_in_every_version(self) -> None:
        found = self._everything()
        for version in self.versions:
            at = (version.job, version.name)
            assert found.shards[at] == [shard_fields(shard) for shard in version.shards.values()], SHARD_FIELDS
            assert found.leads.get(at) == (version.lead and lead_fields(version.lead)), LEAD_FIELDS
            assert found.versions[at] == (version.state, version.hold, version.input_attempt)

    def _everything(self) -> "Everything":
        """What is kept of the three versions, read at one moment; it must also hold by itself, whatever the model says."""
        with self.register.reading() as connection:
            versions, shards, leads = (list(connection.execute(each)) for each in self._reads)
        found = Everything({(row.job, row.name): (row.state, row.hold, row.input_attempt) for row in versions})
        for row in (shard_of(row._mapping) for row in shards):
            self._check_shard(row)
            found.shards[row.job, row.version].append(shard_fields(row))
        for row in leads:
            self._only_grows(f"{row.job}/{row.version}/generation", row.generation)
            self._only_grows(f"{row.job}/{row.version}/renewals", row.renewals)
            found.leads[row.job, row.version] = lead_fields(row)
        return found

    def _check_shard(self, row: ShardRow) -> None:
        self._only_grows(f"{row.job}/{row.key}/epoch", row.epoch)
        self._only_grows(f"{row.job}/{row.key}/round", row.round)
        self._only_grows(f"{row.job}/{row.key}/committed in round {row.round}", int(row.state is ShardState.COMMITTED))
        if row.state in {ShardState.STAGED, ShardState.COMMITTED}:
            assert row.staged_slots is not None
            assert row.staged_rounds[row.round] == row.staged_slots
        assert (row.state is ShardState.BLOCKED) == (row.blocked_reason is not None)

    def _only_grows(self, what: str, value: int) -> None:
        assert value >= self.grown.get(what, 0), f"{what} fell from {self.grown[what]} to {value}"
        self.grown[what] = value

    @invariant()
    def no_epoch_of_a_shard_was_handed_out_twice(self) -> None:
        handed_out = [(lease.job, lease.version, lease.shard, lease.epoch) for _, lease in self.leases]
        assert len(handed_out) == len(set(handed_out))


MOVES: Mapping[str, Collection[Verdict | bool]] = {
    "claim": [True, False],
    "renew": list(Verdict),
    "stage": list(Verdict),
    "release": list(Verdict),
    "expire": [True, False],
    "take_lead": [True, False],
    "renew_lead": [Verdict.GRANTED, Verdict.REFUSED],
    "leave_lead": list(Verdict),
    "check_generation": [Verdict.ALREADY, Verdict.REFUSED],
    "commit": list(Verdict),
    "send_back": list(Verdict),
    "block": list(Verdict),
    "unblock": [True, False],
}


def test_every_transition_ends_as_the_states_page_says(register: Register, effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing, "LOSSES_MAX", LOSSES_MAX)
    monkeypatch.setattr(leasing, "RETURNED_MAX", RETURNED_MAX)
    struck: Counter[str] = Counter()
    effort.run(lambda: RegisterMachine(register, struck), histories=80, steps=30)
    expected = {f"{move}: {verdict}" for move, verdicts in MOVES.items() for verdict in verdicts}
    missing = sorted(expected - set(struck))
    assert not missing, f"no history came to these ends: {missing}"
