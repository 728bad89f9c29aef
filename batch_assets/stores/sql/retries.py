"""Calls that are made again when the database was away, busy, or broke a deadlock; which errors say so, and for how long.

Only for calls that may be repeated: the first one may have been done, and only its acknowledgement lost.
"""

from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from sqlalchemy.exc import DBAPIError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from batch_assets.stores.sql.database import Database
from batch_assets.stores.sql.engines import is_busy

RETRY_MAX_S: Final = 120.0  # a managed PostgreSQL that fails over to its standby is away for one to two minutes
PAUSE_FIRST_S: Final = 0.05
PAUSE_MAX_S: Final = 2.0
PASSING_STATES: Final = frozenset({
    "40001",  # serialization failure
    "40P01",  # deadlock, broken at our cost
    "55P03",  # lock_timeout: somebody sleeps on the row
    "53300",  # no connection left
    "57P01",  # the server is shut down
    "57P02",  # … has crashed
    "57P03",  # … is starting
    "25P03",  # idle in a transaction for too long: this process was stopped
})  # fmt: skip
_CONNECTION_CLASS = "08"

P = ParamSpec("P")
Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=Database)


def is_passing(error: BaseException) -> bool:
    """The database itself says that the same call may go well a moment later, or nothing was heard from it any more."""
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated or is_busy(error):
        return True
    state: str | None = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return state in PASSING_STATES or state.startswith(_CONNECTION_CLASS)
    # psycopg knows no state when there was no server to tell one: connection refused, timed out, closed unexpectedly.
    return type(error.orig).__module__.startswith("psycopg") and type(error.orig).__name__ == "OperationalError"


_RETRYING = Retrying(
    retry=retry_if_exception(is_passing),
    stop=stop_after_delay(RETRY_MAX_S),
    wait=wait_random_exponential(PAUSE_FIRST_S, max=PAUSE_MAX_S),
    reraise=True,
)


def repeated(call: Callable[P, Result]) -> Callable[P, Result]:
    """`call`, made again with growing pauses while its errors are passing, for RETRY_MAX_S; then the last error is raised."""

    @wraps(call)
    def repeating(*arguments: P.args, **named: P.kwargs) -> Result:
        return _RETRYING(call, *arguments, **named)

    return repeating


def each_call_repeated(register: type[Kind]) -> type[Kind]:
    """Every public method that a class has from its parents and that is no part of `Database` itself, `repeated`."""
    for name in dir(register):
        if not name.startswith("_") and not hasattr(Database, name):
            setattr(register, name, repeated(getattr(register, name)))
    return register
