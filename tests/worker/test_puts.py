"""Puts on their way: the engine is fed meanwhile, and nothing counts before its put has returned."""

from pathlib import Path

import pytest

from batch_assets.core.errors import EngineFailedError
from batch_assets.stores.installation import Installation
from tests.support.versions import installation_in
from tests.support.workers import LatePuts, drive, expire_all, folded, ids, open_shards, plan


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return installation_in(tmp_path)


def test_the_engine_is_fed_while_a_put_is_on_its_way_and_its_records_do_not_count(installation: Installation) -> None:
    planned = plan(installation, {1: ids(40)})
    puts = LatePuts()
    driven = drive(planned, puts=puts, flush_s=0.0)
    turns = driven.until(lambda _: driven.counters.completed >= 20)
    assert len(puts.waiting) == 1, "slots have an order: one put at a time"
    assert (driven.counters.answered, folded(planned, 1).answered) == (0, {})
    puts.make()
    next(turns)
    assert driven.counters.answered == len(folded(planned, 1).answered) > 0


def test_a_shard_is_staged_only_when_its_last_put_has_returned(installation: Installation) -> None:
    planned = plan(installation, {1: ids(10), 2: ids(10, start=100)})
    driven = drive(planned, puts=LatePuts())
    driven.finish()
    assert open_shards(planned) == []
    for shard, expected in planned.ids.items():
        assert set(folded(planned, shard).answered) == set(expected)


def test_a_put_that_lands_after_the_lease_was_lost_costs_the_shard_and_nothing_else(installation: Installation) -> None:
    planned = plan(installation, {1: ids(30)})
    puts = LatePuts()
    first = drive(planned, puts=puts, flush_s=0.0)
    turns = first.until(lambda _: bool(puts.waiting))
    expire_all(planned)
    second = drive(planned, worker_id="w2")
    second.finish()
    puts.make()
    first.worker.stop()
    for _ in turns:
        pass
    assert open_shards(planned) == []
    assert set(folded(planned, 1).answered) == set(planned.ids[1])
    assert {answer.worker for answer in folded(planned, 1).answered.values()} == {"w2"}


def test_an_engine_that_dies_with_a_put_on_its_way_loses_no_answer(installation: Installation) -> None:
    planned = plan(installation, {1: ids(30)})
    driven = drive(planned, puts=LatePuts(), flush_s=0.0, script={"behaviours": [{"act": "engine_error", "record": "T-0025"}]})
    with pytest.raises(EngineFailedError):
        driven.finish()
    assert driven.counters.answered == driven.counters.completed == len(folded(planned, 1).answered) > 0
