"""What a part is told to do."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """From the command line of `benchmarks.part`."""

    root: Path
    engine: str
    version: str = ""
    workers: int = 1
    worker_cores: frozenset[int] = frozenset()  # empty: anywhere
    worker_id: str = ""
    shuffled: bool = False
