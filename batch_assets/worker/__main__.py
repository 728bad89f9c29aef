"""`python -m batch_assets.worker`: one process, one model load, shards of one job version until there are none.

Composes the loop from settings and the registered spec, and refuses before loading when this machine is not the one that the version was
planned for. Log lines are JSON on stderr and hold no record or answer text. Never imports dagster or a Delta table.
"""

import argparse
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl

from batch_assets.core.answers import AnswerChecker
from batch_assets.core.errors import EngineFailedError, GristmillError, Problem, ProblemError, UnfitEnvironmentError, UnfitWorkerError
from batch_assets.core.ports import Engine, EngineConfig, Request
from batch_assets.core.prompting import PromptRenderer, parse_prompt
from batch_assets.core.request_ids import WARM_UP
from batch_assets.core.spec import EngineBuild, VersionSpec
from batch_assets.core.supervision import EXIT_UNFIT
from batch_assets.engines.build import engine_build, open_engine, speed_knobs
from batch_assets.engines.tokenizers import tokenizer_for
from batch_assets.settings import Settings
from batch_assets.stores.installation import Installation
from batch_assets.stores.models import verify_model
from batch_assets.stores.register import Lease, Register
from batch_assets.stores.shard_log import ShardLog
from batch_assets.worker.counters import Counters
from batch_assets.worker.feeder import Puts, ThreadPuts, Tools
from batch_assets.worker.heartbeat import Heartbeat
from batch_assets.worker.loop import Point, Worker

EXIT_ENGINE_FAILED: Final = 70
# FINDINGS: as many in flight as decode together was 8 % slower than a full queue, twice as many was equal to it.
IN_FLIGHT_PER_SEQUENCE: Final = 2
IDLE_S: Final = 0.1
GARBAGE_OBJECTS: Final = 50_000


@dataclass(frozen=True, slots=True)
class VersionShards:
    """Logs and frozen input of the version's shards, in an installation."""

    installation: Installation

    def log(self, lease: Lease) -> ShardLog:
        """Of the lease's shard."""
        return self.installation.shard_log(job=lease.job, version=lease.version, shard=lease.shard)

    def frozen(self, lease: Lease) -> pl.DataFrame:
        """Verified by the sha256 that stands in the shard's row."""
        frozen_input = self.installation.frozen_input(job=lease.job, version=lease.version, attempt=lease.input_attempt)
        return frozen_input.read(lease.shard, lease.input_sha256)


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """The exit code: 0 nothing left or told to stop, 2 and 6 as in `gristmill --help`, 70 the engine failed, 71 it hung, 72 it is unfit."""
    parser = argparse.ArgumentParser(prog="python -m batch_assets.worker", description=__doc__)
    for name in ("--job", "--version", "--worker-id"):
        parser.add_argument(name, required=True)
    chosen = parser.parse_args(arguments)
    try:
        return work(chosen.job, chosen.version, chosen.worker_id, environment)
    except GristmillError as error:
        return exit_code_of(error, note)


def exit_code_of(error: GristmillError, note: Callable[..., None]) -> int:
    """What a worker that ends with this error says last, and its exit code."""
    match error:
        case EngineFailedError():
            note("engine_failed", reason=error.data["reason"])
            return EXIT_ENGINE_FAILED
        case UnfitWorkerError():
            note("unfit", text=str(error))
            return EXIT_UNFIT
        case ProblemError():
            for problem in error.problems:
                note("refused", code=problem.code, text=problem.as_text())
        case _:
            note("failed", reason=str(error))
    return error.exit_code


def work(job: str, version: str, worker_id: str, environment: Mapping[str, str]) -> int:
    """Runs one worker to its end."""
    settings = Settings.from_environment(environment)
    installation = Installation.open(settings, pooled=False)
    spec = installation.specs().read(job, version)
    build = engine_build(settings.engine)
    installation.register.worker_started(
        worker_id=worker_id, job=job, version=version, host=socket.gethostname(), pid=os.getpid(), engine_build=build.version
    )
    require_build(spec, build)
    verify_model(spec.model_path, spec.recipe.model_digest)
    renderer = PromptRenderer(parse_prompt(spec.prompt), tokenizer_for(settings.engine, spec.model_path))
    engine = open_engine(settings.engine, script=settings.engine_script, environment=environment)
    counters = Counters()
    load(engine, spec, speed=speed_knobs(environment), warm_up=renderer.prefix_tokens, counters=counters)
    worker = compose(
        installation,
        spec,
        version=version,
        worker_id=worker_id,
        engine=engine,
        renderer=renderer,
        counters=counters,
        puts=ThreadPuts(),
        clock=time.monotonic,
        note=note,
    )
    signal.signal(signal.SIGTERM, lambda _number, _frame: worker.stop())
    try:
        drive(worker, settings, job=job, version=version, worker_id=worker_id, counters=counters)
        installation.register.worker_left(worker_id)
    finally:
        engine.close()
    return 0


def compose(
    installation: Installation,
    spec: VersionSpec,
    *,
    version: str,
    worker_id: str,
    engine: Engine,
    renderer: PromptRenderer,
    counters: Counters,
    puts: Puts,
    clock: Callable[[], float],
    note: Callable[..., None],
) -> Worker:
    """The loop of one process. A simulation composes it here too, with its own engine, clock and threads."""
    register, settings = installation.register, installation.settings
    return Worker(
        job=spec.job,
        version=version,
        worker_id=worker_id,
        register=register,
        shards=VersionShards(installation),
        engine=engine,
        tools=Tools(
            renderer=renderer,
            checker=AnswerChecker(spec.answer_schema),
            attempts_max=spec.input_rules.attempts_max,
            window=engine.max_num_seqs * IN_FLIGHT_PER_SEQUENCE,
            counters=counters,
            puts=puts,
        ),
        answer_timeout_s=spec.input_rules.answer_timeout_s,
        flush_s=settings.flush_s,
        clock=clock,
        note=note,
        lease_s=settings.lease_s,
        # What was done so far must be known if this worker dies now: a supervisor counts deaths between which nothing was done.
        before_start=lambda: register.worker_heartbeat(worker_id, counters.as_dict()),
    )


def drive(worker: Worker, settings: Settings, *, job: str, version: str, worker_id: str, counters: Counters) -> None:
    """The loop, with a heartbeat on a database connection of its own beside it."""
    register = Register(settings.database_url, pooled=False)
    heartbeat = Heartbeat(
        register=register,
        job=job,
        version=version,
        worker_id=worker_id,
        pulse=worker,
        counters=counters.as_dict,
        lease_s=settings.lease_s,
        renew_s=settings.renew_s,
        clock=time.monotonic,
        note=note,
    )
    heartbeat.start()
    # What is loaded lives as long as the process, and prompts and entries are freed by their reference counts: collect seldom.
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)
    try:
        for point in worker.run():
            if point is Point.IDLE:
                time.sleep(IDLE_S)
        heartbeat.end()
        register.worker_heartbeat(worker_id, counters.as_dict())  # the last word on what was done
    finally:
        register.close()


def load(engine: Engine, spec: VersionSpec, *, speed: tuple[tuple[str, object], ...], warm_up: list[int], counters: Counters) -> None:
    """Loads the model and fills the prefix cache with one request, whose answer is nobody's: a cold batch shares nothing yet."""
    started_s = time.monotonic()
    engine.load(
        EngineConfig(
            model_folder=spec.model_path,
            model_settings=spec.recipe.model_settings,
            decoding=spec.recipe.decoding,
            answer_schema=spec.answer_schema,
            speed=speed,
        )
    )
    counters.model_loads += 1
    loaded_s = time.monotonic()
    if warm_up:
        engine.submit(Request(request_id=WARM_UP, token_ids=warm_up))
        while not engine.poll():
            pass
    note("loaded", seconds=round(loaded_s - started_s, 2), warm_up_seconds=round(time.monotonic() - loaded_s, 2))


def require_build(spec: VersionSpec, found: EngineBuild) -> None:
    """Raises UnfitEnvironmentError: two builds may answer differently, and a version has one recipe."""
    if found != spec.engine_build:
        raise UnfitEnvironmentError(
            Problem(
                code="engine.build_mismatch",
                what=f"this worker has another engine build than the version of {spec.job} was registered with",
                expected=_build_text(spec.engine_build),
                found=_build_text(found),
                fix="start the workers from the image or lock that it was planned with, or hold that version and plan the job anew",
            )
        )


def note(event: str, **data: Any) -> None:
    """One line for the worker's log."""
    line = json.dumps({"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, **data}, ensure_ascii=False)
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _build_text(build: EngineBuild) -> str:
    return f"{build.engine} {build.version} · {build.guidance}" + (f" · image {build.image}" if build.image else "")


if __name__ == "__main__":
    sys.exit(main())
