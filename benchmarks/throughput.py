"""(a) What the pipeline leaves of the engine's speed: its rows per second over those of bare `LLM.generate` on the same prompts.

The same model, schema, guided backend and engine settings, the prefix warmed by one request in both, one core for the engine. Bare: prompts
are tokens before the clock starts, which is around `generate`. Pipeline: a planned job, a worker process, supervisor and committer on the
other core; the clock runs from the first put (a fence: the model is loaded, nothing was asked) to the last durable put.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.children import run_part
from benchmarks.results import Measurement, Report, Target
from benchmarks.workloads import Workload, answers_of, write_job
from benchmarks.workplace import workplace
from tests.support.models import smollm2_model, tiny_model

SHARE_OF_BARE = Target(goal=0.95, bar=0.90)
TOKENS_MEAN_MIN = 100.0
PAIRS = 5
SHORT_PAIRS = 3  # reported without a bar
FREE_GB = 2.0
MODELS = ("tiny", "smollm2")
IN_PROCESS = "in_process"
OWN_PROCESS = "own_process"
# CPUs without bfloat16 instructions are seven times slower with it, and beside a slow engine every pipeline looks good.
DTYPE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One model and one length of answers. A clocked part lasts 15-25 s on one core of 2.4 GHz."""

    model: str
    answers: str
    workload: Workload
    judged: bool

    @property
    def name(self) -> str:
        return f"{self.model}, {self.answers} answers"


def contests(models: Sequence[str]) -> list[Contest]:
    """Long answers are judged: there the engine's work is what it is in real jobs. Short ones show what each record costs."""
    return [contest for contest in _ALL if contest.model in models]


def _workload(*, records: int, summary_min: int, summary_max: int, max_tokens: int, max_num_seqs: int, shard_records: int) -> Workload:
    return Workload(
        records=records,
        text_bytes=200,
        schema=answers_of(summary_min=summary_min, summary_max=summary_max),
        max_tokens=max_tokens,
        shard_records=shard_records,
        dtype=DTYPE,
        engine={"max_num_seqs": max_num_seqs},
    )


_LONG, _SHORT = "100-token", "20-token"
_ALL = (
    # The tiny model's tokens are bytes or a few of them, and random weights like the rare ones.
    Contest(
        model="tiny",
        answers=_LONG,
        judged=True,
        workload=_workload(records=400, summary_min=180, summary_max=200, max_tokens=900, max_num_seqs=64, shard_records=130),
    ),
    Contest(
        model="tiny",
        answers=_SHORT,
        judged=False,
        workload=_workload(records=2000, summary_min=4, summary_max=6, max_tokens=120, max_num_seqs=64, shard_records=500),
    ),
    Contest(
        model="smollm2",
        answers=_LONG,
        judged=True,
        workload=_workload(records=96, summary_min=360, summary_max=420, max_tokens=900, max_num_seqs=16, shard_records=48),
    ),
    Contest(
        model="smollm2",
        answers=_SHORT,
        judged=False,
        workload=_workload(records=192, summary_min=20, summary_max=30, max_tokens=120, max_num_seqs=16, shard_records=64),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How often and how much. `records` overrides the contests' own."""

    pairs: int = PAIRS
    short_pairs: int = SHORT_PAIRS
    models: Sequence[str] = MODELS
    records: int | None = None
    engine_core: str = IN_PROCESS

    @classmethod
    def quick(cls) -> "Sizes":
        """Shows that it runs."""
        return cls(pairs=1, short_pairs=1, models=("tiny",), records=40)


def run(sizes: Sizes, *, quick: bool, keep: bool = False) -> Report:
    """All contests, one after the other; within each, pipeline and bare take turns."""
    machine = results.machine()
    started_s = time.monotonic()
    measurements: list[Measurement] = []
    for contest in contests(sizes.models):
        measurements += _contest(_sized(contest, sizes), sizes, quick=quick, keep=keep)
    return Report(
        benchmark="throughput",
        sizes={
            "pairs": sizes.pairs,
            "short_pairs": sizes.short_pairs,
            "engine_core": sizes.engine_core,
            "contests": {each.name: _described(_sized(each, sizes).workload) for each in contests(sizes.models)},
        },
        measurements=measurements,
        quick=quick,
        seconds=time.monotonic() - started_s,
        machine=machine,
    )


def _sized(contest: Contest, sizes: Sizes) -> Contest:
    engine = {**contest.workload.engine, "engine_core": sizes.engine_core}
    records = sizes.records or contest.workload.records
    return replace(contest, workload=replace(contest.workload, engine=engine, records=records))


def _described(workload: Workload) -> Mapping[str, Any]:
    return {
        "records": workload.records,
        "record_bytes": workload.text_bytes,
        "max_tokens": workload.max_tokens,
        "shard_records": workload.shard_records,
        "dtype": workload.dtype,
        "engine": dict(workload.engine),
    }


def _contest(contest: Contest, sizes: Sizes, *, quick: bool, keep: bool) -> list[Measurement]:
    pairs = [_pair(contest, keep=keep) for _ in range(sizes.pairs if contest.judged else sizes.short_pairs)]
    if contest.judged:
        means = [run["tokens_output_mean"] for pair in pairs for run in pair]
        assert min(means) >= TOKENS_MEAN_MIN, f"{contest.name}: answers have {min(means):.0f} tokens on average; raise minLength"
    pipeline, bare = ([pair[place] for pair in pairs] for place in (0, 1))
    return [
        Measurement(
            name=f"pipeline over bare LLM.generate, {contest.name}",
            unit="ratio of rows/s",
            values=[one["rows_per_s"] / other["rows_per_s"] for one, other in pairs],
            target=SHARE_OF_BARE if contest.judged and not quick else None,
        ),
        *(
            Measurement(name=f"{who}, {contest.name}", unit="rows/s", values=[run["rows_per_s"] for run in runs], runs=runs)
            for who, runs in (("pipeline", pipeline), ("bare LLM.generate", bare))
        ),
    ]


def _pair(contest: Contest, *, keep: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    model = {"tiny": tiny_model, "smollm2": smollm2_model}[contest.model]()
    with workplace("throughput", free_gb=FREE_GB, keep=keep) as root:
        write_job(root / "jobs", contest.workload, model=model)
        planned = run_part("plan", root=root, engine="vllm").facts
        return _pipeline(contest, root, planned), _bare(contest, root, planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cores:
    """Who runs where. With one core for all there is nothing to choose."""

    engine: frozenset[int]
    rest: frozenset[int]

    @classmethod
    def of(cls, engine_core: str) -> "_Cores":
        usable = sorted(os.sched_getaffinity(0))
        if engine_core == OWN_PROCESS or len(usable) == 1:  # an engine core of its own is there to use a second core
            return cls(engine=frozenset(usable), rest=frozenset(usable))
        return cls(engine=frozenset(usable[:1]), rest=frozenset(usable[1:]))


def _pipeline(contest: Contest, root: Path, planned: Mapping[str, Any]) -> Mapping[str, Any]:
    records, cores = contest.workload.records, _Cores.of(contest.workload.engine["engine_core"])
    arguments = ("--version", planned["version"], "--worker-cores", ",".join(map(str, sorted(cores.engine))))
    facts = run_part("supervise", *arguments, root=root, engine="vllm", cores=cores.rest).facts
    assert facts["rows"] == facts["distinct_keys"] == records, f"{facts['distinct_keys']} of {records} ids are in the table"
    assert facts["dead_letters"] == 0, f"{facts['dead_letters']} records have no answer: the contestants did not do the same work"
    return {
        "rows_per_s": records / facts["answering_s"],
        "tokens_output_mean": facts["tokens_output"] / records,
        "tokens_per_s": facts["tokens_output"] / facts["answering_s"],
        "plan_s": planned["seconds"],
        **facts,
    }


def _bare(contest: Contest, root: Path, planned: Mapping[str, Any]) -> Mapping[str, Any]:
    cores = _Cores.of(contest.workload.engine["engine_core"])
    facts = run_part("bare", "--version", planned["version"], root=root, engine="vllm", cores=cores.engine).facts
    assert facts["invalid"] == 0, f"{facts['invalid']} answers of the bare engine are not valid: the contestants did not do the same work"
    return {
        "rows_per_s": facts["rows"] / facts["generate_s"],
        "tokens_output_mean": facts["tokens_output"] / facts["rows"],
        "tokens_per_s": facts["tokens_output"] / facts["generate_s"],
        **facts,
    }
