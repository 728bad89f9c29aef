"""Calls that start together, to make two of them meet in a database."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

Result = TypeVar("Result")

BARRIER_TIMEOUT_S = 60  # a call whose thread died would leave the others waiting for ever


def at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Their results, in order; raises what the first failing one raised."""
    barrier = Barrier(len(calls))

    def start_together(call: Callable[[], Result]) -> Result:
        barrier.wait(BARRIER_TIMEOUT_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(start_together, calls))
