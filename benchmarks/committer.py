"""The committer alone: microseconds per row and peak memory over staged shards in random order.

    python benchmarks/committer.py --rows 200000 --shard-records 5000 --answer-characters 800 [--profile]

Logs are written first (not measured), by hand, as workers would. Prints one JSON object. Memory: run it in a fresh process for each size.
"""

import argparse
import cProfile
import json
import pstats
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from batch_assets.core.identity import canonical_json
from batch_assets.fleet.committer import Committer
from tests.support.jobs import answer_schema
from tests.support.versions import Planned, answered, claim, installation_in, plan_by_hand, write


def main() -> None:
    """Stage everything, shuffle, commit, print."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        planned = _staged(Path(folder), options)
        register = planned.installation.register
        generation = register.take_lead(job=planned.job, version=planned.version, holder="bench", seen=None)
        assert generation is not None
        _shuffle(planned, seed=options.seed)
        committer = Committer(planned.installation, job=planned.job, version=planned.version, generation=generation)
        before_mb = _peak_mb()
        profile = cProfile.Profile(time.process_time) if options.profile else None
        if profile:
            profile.enable()
        started_s, cpu_s, step_s, steps = time.perf_counter(), time.process_time(), [], []
        while register.staged(planned.job, planned.version, 1):
            step_started_s = time.perf_counter()
            steps.append(len(committer.step()))
            step_s.append(round(time.perf_counter() - step_started_s, 3))
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        if profile:
            profile.disable()
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(18)
        counted = planned.installation.outcomes(
            job=planned.job, version=planned.version, answer_schema=_schema(options.answer_characters)
        ).count()
        assert counted == options.rows, counted
        print(
            json.dumps(
                {
                    "rows": options.rows,
                    "us_per_row_wall": round(wall_s / options.rows * 1e6, 2),
                    "us_per_row_cpu": round(cpu_s / options.rows * 1e6, 2),
                    "shards_per_step": steps,
                    "step_s_first_and_last": [step_s[:3], step_s[-3:]],
                    "peak_mb": _peak_mb(),
                    "peak_before_first_step_mb": before_mb,
                }
            )
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--shard-records", type=int, default=5000)
    parser.add_argument("--answer-characters", type=int, default=800)
    parser.add_argument("--record-characters", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


def _schema(characters: int) -> str:
    return canonical_json(answer_schema(summary_max=characters + 100))


def _staged(folder: Path, options: argparse.Namespace) -> Planned:
    installation = installation_in(folder)
    ids = [f"T-{number:08d}" for number in range(options.rows)]
    shards = {
        number + 1: ids[start : start + options.shard_records] for number, start in enumerate(range(0, options.rows, options.shard_records))
    }
    filler = " ".join(f"w{n}" for n in range(options.record_characters))[: options.record_characters]
    planned = plan_by_hand(installation, shards, body=lambda record_id: record_id + filler, schema=_schema(options.answer_characters))
    words = [f"word{n}" for n in range(2000)]
    dice = random.Random(options.seed)
    for _ in shards:
        lease = claim(planned)
        text = " ".join(dice.choices(words, k=options.answer_characters // 8 + 10))
        entries = (
            answered(
                record_id,
                epoch=lease.epoch,
                text=canonical_json({"category": "bug", "summary": f"{record_id} {text[position % 40 :]}"[: options.answer_characters]}),
            )
            for position, record_id in enumerate(planned.ids[lease.shard])
        )
        slots = write(planned, lease, entries)
        installation.register.stage(lease, slots=slots, seconds=1.0)
    return planned


def _shuffle(planned: Planned, *, seed: int) -> None:
    """Hand the committer its shards in random order, as a fleet would stage them."""
    order = list(planned.ids)
    random.Random(seed).shuffle(order)
    rank = {number: place for place, number in enumerate(order)}
    register = planned.installation.register
    real = register.staged

    def staged(job: str, version: str, limit: int) -> list:
        return sorted(real(job, version, len(rank)), key=lambda row: rank[row.number])[:limit]

    register.staged = staged


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
