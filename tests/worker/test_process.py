"""`python -m batch_assets.worker` as its supervisor starts it."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest

from batch_assets.core.leasing import HoldReason, LeaseEnd
from batch_assets.core.request_ids import CONTROL_ATTEMPT, WARM_UP, request_parts
from batch_assets.core.spec import VersionSpec
from batch_assets.engines.build import SPEED_VARIABLE, engine_build
from batch_assets.engines.journal import JOURNAL_VARIABLE, JournalKind, read_journal
from batch_assets.stores.installation import Installation
from batch_assets.stores.models import model_digest
from tests.support.models import stub_model, tiny_model
from tests.support.versions import Planned, installation_in
from tests.support.workers import folded, ids, open_shards, plan

LIMIT_S = 240  # importing and loading vLLM beside a busy test run
ENGINE_KILLED = -signal.SIGKILL


@contextmanager
def worker(
    planned: Planned, *, script: dict[str, object] | None = None, worker_id: str = "w1", environment: Mapping[str, str] | None = None
):
    """A running worker; killed at the end if it still runs. Its log is `<root>/<worker_id>.log`."""
    settings = planned.installation.settings
    if script is not None:
        path = settings.state / "script.json"
        path.write_text(json.dumps(script))
        settings = replace(settings, engine_script=str(path))
    arguments = ["--job", planned.job, "--version", planned.version, "--worker-id", worker_id]
    variables = {
        "PATH": "/usr/bin:/bin",
        **settings.as_environment(),
        JOURNAL_VARIABLE: str(settings.state / "journal"),
        **(environment or {}),
    }
    with (settings.state / f"{worker_id}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "batch_assets.worker", *arguments], env=variables, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def events(planned: Planned, worker_id: str = "w1") -> list[dict[str, object]]:
    text = (planned.installation.settings.state / f"{worker_id}.log").read_text()
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    limit = monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, "the worker ended"
        assert monotonic() < limit, "it did not happen"
        sleep(0.05)


def on(model: Path) -> Callable[[VersionSpec], VersionSpec]:
    """A spec whose model is this folder."""
    digest = model_digest(model).digest
    return lambda spec: replace(spec, model_path=str(model), recipe=replace(spec.recipe, model_digest=digest))


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return installation_in(tmp_path / "root", lease_s=30.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return stub_model(tmp_path / "model")


def finish(planned: Planned) -> None:
    """What the supervisor does when all is committed; the worker then has nothing to wait for."""
    planned.installation.register.hold_version(job=planned.job, version=planned.version, reason=HoldReason.CANCELLED)


def test_a_worker_answers_all_shards_with_one_model_load_and_ends_with_its_version(installation: Installation, model: Path) -> None:
    planned = plan(installation, {number: ids(10, start=number * 100) for number in range(1, 21)}, adapt=on(model))
    with worker(planned) as process:
        wait_until(lambda: not open_shards(planned), process)
        finish(planned)
        assert process.wait(LIMIT_S) == 0
    lines = read_journal(installation.settings.state / "journal")
    assert [line.kind for line in lines].count(JournalKind.LOAD) == 1
    asked = [parts.record_id for line in lines if line.kind is JournalKind.SUBMIT and (parts := request_parts(line.request_id))]
    assert sorted(asked) == sorted(record for part in planned.ids.values() for record in part)
    assert [line.request_id for line in lines if line.kind is JournalKind.SUBMIT].count(WARM_UP) == 1
    (row,) = installation.register.workers(planned.job, planned.version, alive_only=False)
    assert (row.state, row.counters["answered"], row.counters["model_loads"], row.counters["in_flight"]) == ("gone", 200, 1, 0)


def test_sigterm_puts_what_is_finished_gives_the_shard_back_and_ends_with_zero(installation: Installation, model: Path) -> None:
    planned = plan(installation, {1: ids(5000)}, adapt=on(model))
    with worker(planned, script={"max_num_seqs": 8, "poll_s": 0.02}) as process:
        wait_until(lambda: len(folded(planned, 1).answered) > 0, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    (row,) = installation.register.shards(planned.job, planned.version)
    assert (row.state, row.previous_end, row.losses) == ("pending", LeaseEnd.DRAINED, 0)
    completed = [line for line in read_journal(installation.settings.state / "journal") if line.kind is JournalKind.COMPLETE]
    assert len(folded(planned, 1).answered) == len(completed) - 1  # one was the warm-up


def test_sigkill_loses_no_answer_older_than_the_flush_interval(installation: Installation, model: Path) -> None:
    planned = plan(installation, {1: ids(400)}, adapt=on(model))
    with worker(planned, script={"max_num_seqs": 8, "poll_s": 0.02}) as process:
        wait_until(lambda: len(folded(planned, 1).answered) > 40, process)
        process.kill()
        process.wait()
    stored = set(folded(planned, 1).answered)
    (lease,) = installation.register.leased(planned.job, planned.version)
    assert installation.register.expire(job=planned.job, version=planned.version, shard=1, epoch=1, renewals=lease.renewals)
    with worker(planned, worker_id="w2", script={"max_num_seqs": 64}) as process:
        wait_until(lambda: not open_shards(planned), process)
    assert set(folded(planned, 1).answered) == set(planned.ids[1])
    again = [
        request_parts(line.request_id) for line in read_journal(installation.settings.state / "journal") if line.kind is JournalKind.SUBMIT
    ]
    asked_again = {parts.record_id for parts in again if parts and parts.epoch == 2 and parts.attempt != CONTROL_ATTEMPT}
    assert not stored & asked_again


def test_a_worker_with_another_engine_build_refuses(installation: Installation, model: Path) -> None:
    planned = plan(
        installation, {1: ids(5)}, adapt=lambda spec: replace(on(model)(spec), engine_build=replace(spec.engine_build, version="0"))
    )
    with worker(planned) as process:
        assert process.wait(LIMIT_S) == 6
    (refused,) = [event for event in events(planned) if event["event"] == "refused"]
    assert refused["code"] == "engine.build_mismatch"
    assert "expected scripted 0" in str(refused["text"])


def test_a_worker_refuses_weights_of_which_one_byte_was_changed(installation: Installation, model: Path) -> None:
    planned = plan(installation, {1: ids(5)}, adapt=on(model))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with worker(planned) as process:
        assert process.wait(LIMIT_S) == 6
    (refused,) = [event for event in events(planned) if event["event"] == "refused"]
    assert refused["code"] == "model.digest_mismatch"


def test_an_engine_that_fails_ends_its_worker_with_code_70(installation: Installation, model: Path) -> None:
    planned = plan(installation, {1: ids(50)}, adapt=on(model))
    with worker(planned, script={"max_num_seqs": 4, "behaviours": [{"act": "engine_error", "record": "T-0007"}]}) as process:
        assert process.wait(LIMIT_S) == 70
    assert events(planned)[-1]["event"] == "engine_failed"


@pytest.mark.real_vllm
@pytest.mark.slow
def test_a_worker_answers_a_shard_with_a_real_model_under_real_vllm(tmp_path: Path) -> None:
    model = tiny_model()
    build = engine_build("vllm")
    installation = installation_in(tmp_path / "root", engine="vllm", lease_s=60.0)
    planned = plan(installation, {1: ids(24)}, adapt=lambda spec: replace(on(model)(spec), engine_build=build))
    speed = json.dumps({"kv_cache_gb": 0.0625, "max_num_seqs": 8})
    with worker(planned, environment={SPEED_VARIABLE: speed}) as process:
        wait_until(lambda: not open_shards(planned), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    state = folded(planned, 1)
    assert set(state.answered) | set(state.dead) == set(planned.ids[1])
    assert len(state.answered) >= 20  # random weights may run into the token limit
    assert all(set(json.loads(entry.answer)) == {"category", "summary"} for entry in state.answered.values())
    assert max(entry.tokens_cached for entry in state.answered.values()) >= 0
