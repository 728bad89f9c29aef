"""Folders for the time of a benchmark, under `.cache/bench` of the repository: a real disk, where a tmpfs would make every fsync free."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.results import REPOSITORY

FOLDER = REPOSITORY / ".cache" / "bench"
GB = 1 << 30


@contextmanager
def workplace(name: str, *, free_gb: float, keep: bool) -> Iterator[Path]:
    """An empty folder, removed at the end unless `keep`. Raises OSError when the disk has less than `free_gb` left."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(FOLDER).free / GB
    if free < free_gb:
        raise OSError(f"{name} needs {free_gb:g} GB of disk, {FOLDER} has {free:.1f} GB left; free some, or run it with --quick")
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=FOLDER))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
