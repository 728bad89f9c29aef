"""The simulation finds things: each of these bugs, planted into the real code, violates an invariant within 300 seeds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import polars as pl
import pytest
from sqlalchemy import update

from batch_assets.core.breakers import Evidence
from batch_assets.core.errors import StaleLeaseError
from batch_assets.core.leasing import ShardState
from batch_assets.core.retries import Verdict, judge_end
from batch_assets.core.shard_log import Fence, fold
from batch_assets.fleet import committer
from batch_assets.fleet.committer import Committer
from batch_assets.sim.history import HistoryReport, run_history
from batch_assets.stores.register import Lease, Register
from batch_assets.stores.shard_log import LogWriter, without_held
from batch_assets.stores.sql.tables import shards
from batch_assets.worker import feeder
from batch_assets.worker.feeder import ShardWork
from batch_assets.worker.probing import Doubts

SEEDS_MAX = 300
Plant = Callable[[pytest.MonkeyPatch], None]


def first_violation() -> HistoryReport:
    """Of the first seed that finds something; twins only, which are fast."""
    for seed in range(1, SEEDS_MAX + 1):
        report = run_history(seed, is_real=False)
        if report.violation is not None:
            return report
    raise AssertionError(f"not found within {SEEDS_MAX} seeds")


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A claimer begins to write without its fence."""
    put = LogWriter.put

    def without_fence(writer: LogWriter, entries):
        left = [entry for entry in entries if not isinstance(entry, Fence)]
        return put(writer, left) if left else writer.next_slot - 1

    patch.setattr(LogWriter, "put", without_fence)


def renewal_by_id_alone(patch: pytest.MonkeyPatch) -> None:
    """Whoever once held a shard keeps its successor's lease alive."""

    def renew(register: Register, lease: Lease) -> None:
        held = (shards.c.version == lease.version, shards.c.number == lease.shard, shards.c.state == ShardState.LEASED)
        with register.writing() as connection:
            if connection.execute(update(shards).where(*held).values(renewals=shards.c.renewals + 1)).rowcount == 0:
                raise StaleLeaseError(shard=lease.key, epoch_held=lease.epoch, epoch_current=0)

    patch.setattr(Register, "renew", renew)


def counted_before_durable(patch: pytest.MonkeyPatch) -> None:
    """A chunk counts as soon as it was handed over, whatever becomes of its put."""

    def settle(work: ShardWork, *, wait: bool) -> bool:
        if work._put is None:
            return False
        (chunk, _), work._put = work._put, None
        work._count(chunk)
        return True

    patch.setattr(ShardWork, "_settle", settle)


def committed_before_merge(patch: pytest.MonkeyPatch) -> None:
    """The register says committed while the rows are still on their way."""

    def step(self: Committer):
        staged = self._register.staged(self._job, self._version, 32)
        checked = self._take(self._open(), staged) if staged else []
        if not checked:
            return []
        rows = self._mark(staged, checked)
        frames = [shard.rows for shard in checked]
        self._open().outcomes.merge(pl.concat(frames), [shard.shard for shard in checked], still_mine=self._still_mine)
        return rows

    patch.setattr(Committer, "step", step)


def generation_not_checked(patch: pytest.MonkeyPatch) -> None:
    """A supervisor that overslept commits on beside its successor."""
    patch.setattr(Register, "_require_generation", lambda *_: None)
    patch.setattr(Register, "check_generation", lambda *_, **__: None)


def epochs_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """A writer goes on behind a higher fence, and its entries count like any other. Either bug alone is caught by the other rule."""

    def go_on(writer: LogWriter, entries):
        slot = writer._log.slot(writer.next_slot)
        writer.passed.append(slot)
        return without_held(entries, held=slot or (), epoch=writer._epoch)

    def lenient(slots, *, staged_rounds):
        entries = [entry for slot in slots for entry in slot or ()]
        return fold([sorted(entries, key=lambda entry: isinstance(entry, Fence))], staged_rounds={})

    patch.setattr(LogWriter, "_pass", go_on)
    patch.setattr(feeder, "fold", lenient)
    patch.setattr(committer, "fold", lenient)


def neighbours_answer(patch: pytest.MonkeyPatch) -> None:
    """An answer is put under the id of the record before it, once in a while."""
    take = ShardWork.take

    def shifted(work: ShardWork, row, attempt, completion, now_s):
        take(work, row - 1 if row % 7 == 6 else row, attempt, completion, now_s)

    patch.setattr(ShardWork, "take", shifted)


def one_attempt_too_many(patch: pytest.MonkeyPatch) -> None:
    """Off by one where a record has used its attempts up."""
    begin = ShardWork.__init__

    def generous(work: ShardWork, lease, *, tools, **named):
        begin(work, lease, tools=replace(tools, attempts_max=tools.attempts_max + 1), **named)

    patch.setattr(ShardWork, "__init__", generous)


def failures_believed_at_once(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether the worker can answer at all."""
    patch.setattr(Evidence, "is_sound", property(lambda _: True))


def suspects_are_blamed(patch: pytest.MonkeyPatch) -> None:
    """Whoever was in the engine when it died has used up an attempt, alone or not."""

    def blame(ids, folded, *, attempts_max, is_engine_proven):
        verdict = judge_end(ids, folded, attempts_max=attempts_max, is_engine_proven=is_engine_proven)
        return verdict and Verdict(killed=verdict.killed or verdict.groups[0][0], groups=verdict.groups)

    patch.setattr(feeder, "judge_end", blame)


def suspects_are_not_alone(patch: pytest.MonkeyPatch) -> None:
    """The next group gets the engine while it still has the one before."""

    def probe(doubts: Doubts, work: ShardWork, *, is_alone: bool) -> None:
        if work.is_flushed:
            work.start_next_group()

    patch.setattr(Doubts, "probe", probe)


PLANTS = (
    no_fence,
    renewal_by_id_alone,
    counted_before_durable,
    committed_before_merge,
    generation_not_checked,
    epochs_not_looked_at,
    neighbours_answer,
    one_attempt_too_many,
    failures_believed_at_once,
    suspects_are_blamed,
    suspects_are_not_alone,
)


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, record_property: Callable[[str, object], None]) -> None:
    with planted(plant):
        report = first_violation()
    assert report.violation is not None
    record_property("found", f"seed {report.seed}: {report.violation.invariant}")
