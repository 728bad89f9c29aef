"""Planner: peak memory at two sizes and MB/s against a plain polars copy of the same columns; each case in a process of its own.

`python benchmarks/planner.py [ROWS_SMALL ROWS_LARGE]` (0.2 M and 2 M narrow rows unless said otherwise) prints one JSON object. Memory is
VmHWM of the planning process, which has no children; the baseline is what the same process has after its imports. Speeds are CPU seconds:
they do not depend on who else uses the machine.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl
from deltalake import write_deltalake

ROWS = (200_000, 2_000_000)
CHUNK_ROWS = 250_000
KINDS = ("csv", "delta", "parquet", "jsonl")
REPOSITORY = Path(__file__).resolve().parents[1]


def narrow_rows(start: int, rows: int) -> pl.DataFrame:
    """An id and about 40 bytes of text that does not compress to nothing."""
    number = pl.int_range(start, start + rows)
    text = pl.format("ticket {} about {} again", number, number.hash(seed=7))
    return pl.select(ticket_id=pl.format("T-{}", number), body=text, acl=pl.lit("support"), market=pl.lit("de"), gold=pl.lit("bug"))


def write_source(folder: Path, kind: str, rows: int) -> Path:
    """The source in pieces, so that this process stays small too."""
    path = folder / (f"t{rows}" if kind in {"delta", "parquet"} else f"t{rows}.{kind}")
    if kind == "parquet":
        path.mkdir()
    for part, start in enumerate(range(0, rows, CHUNK_ROWS)):
        frame = narrow_rows(start, min(CHUNK_ROWS, rows - start))
        if kind == "delta":
            write_deltalake(path, frame, mode="append")
        elif kind == "parquet":
            frame.write_parquet(path / f"part-{part:03d}.parquet")
        else:
            with path.open("ab") as file:
                if kind == "csv":
                    frame.write_csv(file, include_header=part == 0)
                else:
                    frame.write_ndjson(file)
    return path


def planned(folder: Path, source: Path) -> dict[str, float]:
    """Run by itself in a fresh process: plan one job over `source`."""
    import yaml  # noqa: PLC0415  imports are part of the measured baseline

    from batch_assets.flows.planner import plan  # noqa: PLC0415
    from batch_assets.stores.installation import Installation  # noqa: PLC0415
    from batch_assets.stores.job_folders import load_job  # noqa: PLC0415
    from tests.support.jobs import settings_in, write_job  # noqa: PLC0415
    from tests.support.models import stub_model  # noqa: PLC0415

    job_yaml = write_job(folder / "jobs" / "tickets", [], model=stub_model(folder / "model"))
    content = yaml.safe_load(job_yaml.read_text())
    content["input"]["table"] = str(source)
    job_yaml.write_text(yaml.safe_dump(content))
    installation = Installation.open(settings_in(folder / "root"))
    job = load_job(job_yaml, environment={})
    baseline_mb, started_s, wall_s = peak_mb(), time.process_time(), time.monotonic()
    report = plan(installation, job)
    return {
        "records": report.records,
        "shards": report.shards,
        "baseline_mb": baseline_mb,
        "peak_mb": peak_mb(),
        "cpu_s": time.process_time() - started_s,
        "wall_s": time.monotonic() - wall_s,
    }


def copied(folder: Path, source: Path) -> dict[str, float]:
    """Run by itself in a fresh process: a plain polars copy of the same columns to parquet."""
    started_s = time.process_time()
    readers = {".csv": pl.scan_csv, ".jsonl": pl.scan_ndjson}
    paths = source if source.suffix else sorted(source.glob("*.parquet"))
    frame = readers.get(source.suffix, pl.scan_parquet)(paths)
    frame.sink_parquet(folder / "copy.parquet")
    return {"cpu_s": time.process_time() - started_s, "peak_mb": peak_mb()}


def peak_mb() -> float:
    """Highest resident set of this process so far, in MB (10^6 bytes)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def in_fresh_process(what: str, source: Path) -> dict[str, float]:
    """Result of `planned` or `copied`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, what, folder, str(source)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY, env=None)
    return json.loads(done.stdout)


def compared(kind: str, sizes: tuple[int, int]) -> dict[str, float]:
    """One kind of source: growth of the peak from the small to the large size, and speed at the large one."""
    with tempfile.TemporaryDirectory() as folder:
        sources = [write_source(Path(folder), kind, rows) for rows in sizes]
        small, large = (in_fresh_process("planned", source) for source in sources)
        copy = in_fresh_process("copied", sources[1])
        files = [sources[1]] if sources[1].is_file() else list(sources[1].rglob("*.parquet"))
        size_mb = sum(file.stat().st_size for file in files) / 1e6
    return {
        "source_mb": round(size_mb, 1),
        "baseline_mb": round(small["baseline_mb"]),
        "peak_small_mb": round(small["peak_mb"]),
        "peak_large_mb": round(large["peak_mb"]),
        "peak_growth_percent": round(100 * (large["peak_mb"] / small["peak_mb"] - 1), 1),
        "plan_cpu_us_per_record": round(1e6 * large["cpu_s"] / large["records"], 2),
        "plan_mb_per_cpu_s": round(size_mb / large["cpu_s"], 1),
        "copy_mb_per_cpu_s": round(size_mb / copy["cpu_s"], 1),
    }


def main(arguments: list[str]) -> None:
    """The whole comparison, or one case of it."""
    if arguments and arguments[0] in {"planned", "copied"}:
        sys.path.insert(0, str(REPOSITORY))
        case = planned if arguments[0] == "planned" else copied
        print(json.dumps(case(Path(arguments[1]), Path(arguments[2]))))
        return
    sizes = (int(arguments[0]), int(arguments[1])) if arguments else ROWS
    kinds = tuple(arguments[2:]) or KINDS
    print(json.dumps({"rows": sizes, **{kind: compared(kind, sizes) for kind in kinds}}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
