"""Release and gate: peak memory and rows/s of build + judge at two sizes, each case in a process of its own.

`python benchmarks/release.py [ROWS_SMALL ROWS_LARGE]` (0.2 M and 2 M narrow rows unless said otherwise) prints one JSON object. The
finished version is made by tests/support/finished.py in another process. Memory is VmHWM of the measured process, which has no children;
the baseline is what the same process has after its imports. The copy is the same table, read and written by polars in one stream.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl

ROWS = (200_000, 2_000_000)
SHARD_ROWS = 5_000
STEPS = ("build", "judge", "publish", "copy")
REPOSITORY = Path(__file__).resolve().parents[1]


def prepared(root: Path, rows: int) -> dict[str, float]:
    """A finished version of `rows` records in shards of SHARD_ROWS."""
    from tests.support.finished import finished_version, open_installation  # noqa: PLC0415

    finished_version(open_installation(root), records=rows, shards=-(-rows // SHARD_ROWS))
    return {}


def measured(root: Path, step: str) -> dict[str, float]:
    """One step on the only version of this root."""
    from batch_assets.core.validation import CheckSettings  # noqa: PLC0415  imports are part of the measured baseline
    from batch_assets.flows.judge import judge, select_release  # noqa: PLC0415
    from batch_assets.flows.publish import publish  # noqa: PLC0415
    from batch_assets.flows.release import build_release  # noqa: PLC0415
    from batch_assets.stores.releases import release_files  # noqa: PLC0415
    from tests.support.finished import JOB, open_installation  # noqa: PLC0415

    installation = open_installation(root)
    (version,) = installation.register.versions(JOB)
    baseline_mb, started_s, started_cpu_s = peak_mb(), time.perf_counter(), time.process_time()
    match step:
        case "build":
            build_release(installation, job=JOB, version=version.name)
        case "judge":
            assert judge(installation, job=JOB, version=version.name, checks=CheckSettings()).passed
        case "publish":
            publish(installation, job=JOB, version=version.name, alias=JOB, by="benchmark")
        case _:
            release = select_release(installation, job=JOB)
            files = [f"{release.uri}/{file.name}" for file in release_files(release.uri)]
            pl.scan_parquet(files).sink_parquet(root / "copy.parquet", compression="zstd", compression_level=3)
    return {
        "baseline_mb": baseline_mb,
        "peak_mb": peak_mb(),
        "wall_s": round(time.perf_counter() - started_s, 3),
        "cpu_s": round(time.process_time() - started_cpu_s, 3),
    }


def peak_mb() -> float:
    """VmHWM of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return round(int(line.split()[1]) / 1024, 1)


def in_fresh_process(step: str, root: Path, rows: int) -> dict[str, float]:
    """This file again, for one step."""
    command = [sys.executable, __file__, "--step", step, str(root), str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY, env={"PYTHONPATH": str(REPOSITORY)})
    return json.loads(done.stdout)


def main() -> None:
    """Every step at both sizes, and the ratios that are judged."""
    sizes = tuple(int(each) for each in sys.argv[1:]) or ROWS
    cases: dict[int, dict[str, dict[str, float]]] = {}
    for rows in sizes:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            in_fresh_process("prepare", root, rows)
            cases[rows] = {step: in_fresh_process(step, root, rows) for step in STEPS}
    small, large = cases[min(sizes)], cases[max(sizes)]
    result = {
        "rows": cases,
        "peak_ratio": {step: round(large[step]["peak_mb"] / small[step]["peak_mb"], 3) for step in ("build", "judge")},
        "rows_per_s": {step: round(max(sizes) / large[step]["wall_s"]) for step in STEPS},
        "build_and_judge_over_copy": round((large["build"]["wall_s"] + large["judge"]["wall_s"]) / large["copy"]["wall_s"], 2),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        step, root, rows = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
        print(json.dumps(prepared(root, rows) if step == "prepare" else measured(root, step)))
    else:
        main()
