"""The second thread: leases are renewed for an engine that works, and for no other."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from batch_assets.core.leasing import LeaseEnd
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import Lease
from batch_assets.worker.heartbeat import EXIT_STALLED, STALL_MIN_S, Heartbeat
from tests.support.versions import Planned, claim, installation_in
from tests.support.workers import ids, plan

LEASE_S, RENEW_S, BEAT_S = 90.0, 30.0, 2.0


@dataclass
class FakeLoop:
    """What the heartbeat sees of the loop."""

    turns: int = 0
    leases: tuple[Lease, ...] = ()
    lost: list[Lease] = field(default_factory=list)
    stopped: bool = False

    def lose(self, lease: Lease) -> None:
        self.lost.append(lease)

    def stop(self) -> None:
        self.stopped = True


@dataclass
class Beating:
    """A heartbeat under a clock of the test's own."""

    planned: Planned
    loop: FakeLoop = field(default_factory=FakeLoop)
    now_s: float = 1000.0
    left_with: int | None = None

    def __post_init__(self) -> None:
        register = self.planned.installation.register
        register.worker_started(worker_id="w1", job=self.planned.job, version=self.planned.version, host="h", pid=1)
        self.heartbeat = Heartbeat(
            register=register,
            job=self.planned.job,
            version=self.planned.version,
            worker_id="w1",
            pulse=self.loop,
            counters=lambda: {"answered": 7},
            lease_s=LEASE_S,
            renew_s=RENEW_S,
            clock=lambda: self.now_s,
            note=lambda _event, **_data: None,
            leave=self._leave,
        )

    def _leave(self, code: int) -> None:
        self.left_with = code

    def beat_for(self, seconds: float, *, working: bool = True) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s and self.left_with is None:
            self.now_s += BEAT_S
            self.loop.turns += working
            self.heartbeat.beat()


@pytest.fixture
def beating(tmp_path: Path) -> Beating:
    return Beating(plan(installation_in(tmp_path), {1: ids(5)}))


@pytest.fixture
def installation(beating: Beating) -> Installation:
    return beating.planned.installation


def lead(beating: Beating) -> int:
    register = beating.planned.installation.register
    generation = register.take_lead(job=beating.planned.job, version=beating.planned.version, holder="s", seen=None)
    assert generation is not None
    return generation


def test_leases_are_renewed_and_counters_shown_while_the_engine_works(beating: Beating, installation: Installation) -> None:
    beating.loop.leases = (claim(beating.planned),)
    beating.beat_for(3 * RENEW_S)
    (leased,) = installation.register.leased(beating.planned.job, beating.planned.version)
    assert leased.renewals == 3
    (row,) = installation.register.workers(beating.planned.job, beating.planned.version)
    assert (row.state, row.counters) == ("running", {"answered": 7})


def test_a_worker_whose_engine_hangs_leaves_and_its_lease_is_renewed_no_more(beating: Beating, installation: Installation) -> None:
    beating.loop.leases = (claim(beating.planned),)
    beating.beat_for(2 * STALL_MIN_S, working=False)
    assert beating.left_with == EXIT_STALLED
    (leased,) = installation.register.leased(beating.planned.job, beating.planned.version)
    assert leased.renewals <= STALL_MIN_S / RENEW_S


def test_time_in_which_the_whole_process_was_stopped_is_no_stall(beating: Beating) -> None:
    beating.now_s += 3600
    beating.heartbeat.beat()
    assert beating.left_with is None


def test_a_lease_that_was_lost_is_reported_to_the_loop(beating: Beating, installation: Installation) -> None:
    lease = claim(beating.planned)
    beating.loop.leases = (lease,)
    installation.register.release(lease, end=LeaseEnd.DRAINED)
    claim(beating.planned, worker="w2")
    beating.beat_for(RENEW_S)
    assert beating.loop.lost[0] == lease


def test_a_worker_leaves_when_nobody_leads_for_two_leases(beating: Beating) -> None:
    lead(beating)
    beating.beat_for(2 * LEASE_S - BEAT_S)
    assert not beating.loop.stopped
    beating.beat_for(2 * BEAT_S)
    assert beating.loop.stopped


def test_a_worker_stays_while_somebody_leads(beating: Beating, installation: Installation) -> None:
    generation = lead(beating)
    for _ in range(10):
        installation.register.renew_lead(job=beating.planned.job, version=beating.planned.version, generation=generation)
        beating.beat_for(RENEW_S)
    assert not beating.loop.stopped


def test_a_worker_that_was_declared_gone_stops(beating: Beating, installation: Installation) -> None:
    installation.register.worker_gone("w1")
    beating.beat_for(BEAT_S)
    assert beating.loop.stopped
