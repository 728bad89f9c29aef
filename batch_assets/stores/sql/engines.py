"""SQLAlchemy engines for SQLite and PostgreSQL, each with what makes a transaction on it safe. No statement on a table here."""

import sqlite3
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event

BUSY_TIMEOUT_S: Final = 30.0  # a writer of SQLite was seen to starve for 1-5 s; leases are 60 s and more
POOL_SIZE: Final = 4  # a worker's loop and heartbeat; a supervisor's loop, lead and progress
POOL_OVERFLOW_MAX: Final = 28
BEGIN: Final = "gristmill_begin"  # execution option: the statement with which SQLite begins; None begins nothing
# Of PostgreSQL. A peer that went silently is noticed in half a minute, not after TCP's two hours. A process that was stopped inside a
# transaction keeps its row locks until the server ends it; others wait for a lock longer than that.
CONNECT_TIMEOUT_S: Final = 10
SILENCE_MAX_S: Final = 30
STOPPED_MAX_S: Final = 15
LOCK_TIMEOUT_S: Final = 30


def open_engine(url: URL, *, pooled: bool) -> Engine:
    """Connects to nothing yet. `pooled=False`: on PostgreSQL no connection is kept between two transactions."""
    pool: dict[str, Any] = {"pool_size": POOL_SIZE, "max_overflow": POOL_OVERFLOW_MAX, "pool_timeout": BUSY_TIMEOUT_S}
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, pool)
    return _postgresql(url, {**pool, "pool_pre_ping": True} if pooled else {"poolclass": NullPool})


def _postgresql(url: URL, pool: dict[str, Any]) -> Engine:
    limits = {"idle_in_transaction_session_timeout": STOPPED_MAX_S, "lock_timeout": LOCK_TIMEOUT_S}
    connect = {
        "application_name": "gristmill",
        "connect_timeout": CONNECT_TIMEOUT_S,
        "keepalives_idle": SILENCE_MAX_S // 2,
        "keepalives_interval": SILENCE_MAX_S // 6,
        "keepalives_count": 3,
        "tcp_user_timeout": SILENCE_MAX_S * 1000,
        "options": " ".join(f"-c {name}={seconds}s" for name, seconds in limits.items()),
    }
    return create_engine(url, connect_args={name: value for name, value in connect.items() if name not in url.query}, **pool)


def _sqlite(url: URL, pool: dict[str, Any]) -> Engine:
    # A pooled connection is used by one thread at a time, but not always by the one that opened it.
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}, **pool)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # sqlite3 begins no transactions of its own: `_begin_sqlite` says which kind
    connection.execute("PRAGMA foreign_keys = ON")
    # Every commit is fsynced: an epoch or a `committed` that a power cut takes back would be given out a second time.
    connection.execute("PRAGMA synchronous = FULL")
    # SQLite has no clock of its own, only its host's: leases there are judged by renewal counters, and this says no time at all.
    connection.create_function("gristmill_now", 0, lambda: None)


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE takes the write lock at once and waits its turn; a transaction that begins by reading would fail when it must upgrade.
    statement = connection.get_execution_options().get(BEGIN, "BEGIN")
    if statement is not None:
        connection.exec_driver_sql(statement)


def is_busy(error: BaseException) -> bool:
    """SQLite: another writer did not end in time."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
    return code is not None and code & 0xFF == sqlite3.SQLITE_BUSY
