"""The connection to the register: one engine made when first used, reading and writing transactions, schema creation.

Everything in which SQLite and PostgreSQL differ stands here; the other modules of this folder are portable statements.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Insert, Table, create_engine, event, insert, inspect, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from tenacity import retry, retry_if_exception, stop_after_delay, wait_random

from batch_assets.core.errors import Problem, UnfitEnvironmentError
from batch_assets.stores.sql import tables

BUSY_TIMEOUT_S = 30.0  # a writer of SQLite was seen to starve for 1-5 s; leases are 60 s and more
POOL_SIZE = 4  # a worker's loop and heartbeat; a supervisor's loop, lead and progress
POOL_OVERFLOW_MAX = 28
CREATE_LOCK = 0x67726973  # key of PostgreSQL's advisory lock: "gris"
_BEGIN = "gristmill_begin"  # execution option: the statement with which SQLite begins; None begins nothing


def utc_now() -> str:
    """ISO text in UTC, whole milliseconds; for display only."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _is_busy(error: BaseException) -> bool:
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY


class Database:
    """Reading and writing transactions on one URL, from any thread of this process. Nothing is opened before the first one."""

    def __init__(self, url: str, *, now: Callable[[], str] = utc_now) -> None:
        try:
            self.url = make_url(url)
        except ArgumentError as error:
            raise _no_url() from error
        self.now = now
        self._opening = threading.Lock()
        self._engine: Engine | None = None

    @property
    def is_sqlite(self) -> bool:
        """One file on one host; anything else is a server."""
        return self.url.get_backend_name() == "sqlite"

    def create(self) -> None:
        """Creates what is missing; twice, or in two processes at once, is fine. Raises UnfitEnvironmentError."""
        try:
            self._create()
        except (ArgumentError, DBAPIError, ImportError, OSError) as error:  # ArgumentError, ImportError: no such dialect, no driver
            reason = getattr(error, "orig", error)
            raise UnfitEnvironmentError(
                Problem(
                    code="register.unreachable",
                    key="GRISTMILL_DATABASE_URL",
                    what=f"the register at {self.url.render_as_string(hide_password=True)} cannot be opened: {reason}",
                    fix="check that the database is up, that the URL is right and that its folder may be written",
                )
            ) from error

    def close(self) -> None:
        """Closes the pooled connections; a later call opens new ones."""
        with self._opening:
            if self._engine is not None:
                self._engine.dispose()
            self._engine = None

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One consistent view; waits for nobody on SQLite (WAL)."""
        with self._opened().begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction: committed at the end of the block, rolled back when it raises. SQLite has one writer at a time."""
        with self._opened().execution_options(**{_BEGIN: "BEGIN IMMEDIATE"}).begin() as connection:
            yield connection

    def insert_if_absent(self, table: Table) -> Insert:
        """An insert that does nothing where the key is taken. To learn which, ask for `returning`: psycopg keeps no rowcount of it."""
        maker: Any = sqlite.insert if self.is_sqlite else postgresql.insert
        return maker(table).on_conflict_do_nothing()

    def _create(self) -> None:
        if self.is_sqlite:
            self._prepare_file()
        found = self._schema_found() or self._create_tables()
        if found != tables.SCHEMA_VERSION:
            raise _foreign_schema(found)

    def _schema_found(self) -> int | None:
        # Tables and this row are made in one transaction, so the row says that all are there; no lock is taken to learn it.
        with self.reading() as connection:
            there = inspect(connection).has_table(tables.schema.name)
            return connection.scalar(select(tables.schema.c.version)) if there else None

    def _create_tables(self) -> int:
        with self.writing() as connection:
            if not self.is_sqlite:
                connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": CREATE_LOCK})
            tables.metadata.create_all(connection)
            found = connection.scalar(select(tables.schema.c.version))
            if found is None:
                connection.execute(insert(tables.schema).values(version=tables.SCHEMA_VERSION))
        return found or tables.SCHEMA_VERSION

    # The switch to WAL does not wait for the busy timeout, and processes that create at once meet there.
    @retry(retry=retry_if_exception(_is_busy), stop=stop_after_delay(BUSY_TIMEOUT_S), wait=wait_random(0.01, 0.2), reraise=True)
    def _prepare_file(self) -> None:
        if self.url.database:
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
        with self._opened().execution_options(**{_BEGIN: None}).connect() as connection:
            if connection.exec_driver_sql("PRAGMA journal_mode").scalar() != "wal":
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")

    def _opened(self) -> Engine:
        with self._opening:
            if self._engine is None:
                self._engine = self._open()
            return self._engine

    def _open(self) -> Engine:
        pool: dict[str, Any] = {"pool_size": POOL_SIZE, "max_overflow": POOL_OVERFLOW_MAX, "pool_timeout": BUSY_TIMEOUT_S}
        if not self.is_sqlite:
            return create_engine(self.url, pool_pre_ping=True, **pool)
        # A pooled connection is used by one thread at a time, but not always by the one that opened it.
        engine = create_engine(self.url, connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}, **pool)
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine


def _configure_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # sqlite3 begins no transactions of its own: `_begin_sqlite` says which kind
    connection.execute("PRAGMA foreign_keys = ON")
    # Every commit is fsynced: an epoch or a `committed` that a power cut takes back would be given out a second time.
    connection.execute("PRAGMA synchronous = FULL")


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE takes the write lock at once and waits its turn; a transaction that begins by reading would fail when it must upgrade.
    statement = connection.get_execution_options().get(_BEGIN, "BEGIN")
    if statement is not None:
        connection.exec_driver_sql(statement)


def _no_url() -> UnfitEnvironmentError:
    """What was found is not told: it may hold a password."""
    return UnfitEnvironmentError(
        Problem(
            code="register.url",
            key="GRISTMILL_DATABASE_URL",
            what="this is no database URL",
            expected="sqlite:////folder/register.db or postgresql+psycopg://user:password@host/name",
            found="something else",
            fix="correct the variable, or unset it for the SQLite file of the installation",
        )
    )


def _foreign_schema(found: int) -> UnfitEnvironmentError:
    return UnfitEnvironmentError(
        Problem(
            code="register.schema",
            key="GRISTMILL_DATABASE_URL",
            what="the register was made by another version of gristmill",
            expected=f"schema {tables.SCHEMA_VERSION}",
            found=f"schema {found}",
            fix="use the gristmill that made it, or point GRISTMILL_DATABASE_URL (and GRISTMILL_ROOT) to a new place",
        )
    )
