"""The connection to the register: one engine made when first used, reading and writing transactions, the schema brought up to date.

SQLite and PostgreSQL differ here (transactions, opening), in `engines.py` (connections), `isolation.py` (roles), `migrations/`, and where
a lapsed lease is looked for; all other statements of this folder are portable.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import finalize

from sqlalchemy import Connection, Engine, Insert, Table, func, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from tenacity import retry, retry_if_exception, stop_after_delay, wait_random

from batch_assets.core.errors import Problem, UnfitEnvironmentError
from batch_assets.stores.sql import schema
from batch_assets.stores.sql.engines import BEGIN, BUSY_TIMEOUT_S, is_busy, open_engine

MIGRATION_LOCK = 0x67726973  # key of PostgreSQL's advisory lock: "gris"


def utc_now() -> str:
    """ISO text in UTC, whole milliseconds; for display only."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Database:
    """Reading and writing transactions on one URL, from any thread of this process. Nothing is opened before the first one.

    `pooled=False` is for worker processes, of which there are many: on PostgreSQL they hold a connection only while they use it.
    """

    # When a lease was last renewed, by the one clock that all see: PostgreSQL's. No time at all (null) on SQLite.
    lease_clock = func.gristmill_now(type_=postgresql.TIMESTAMP(timezone=True))

    def __init__(self, url: str, *, now: Callable[[], str] = utc_now, pooled: bool = True) -> None:
        try:
            self.url = make_url(url)
        except ArgumentError as error:
            raise _no_url() from error
        if self.is_sqlite and _is_in_memory(self.url):
            raise _in_memory()
        self.now = now
        self._pooled = pooled
        self._opening = threading.Lock()
        self._engine: Engine | None = None

    @property
    def is_sqlite(self) -> bool:
        """One file on one host; anything else is a server."""
        return self.url.get_backend_name() == "sqlite"

    def create(self) -> None:
        """Creates or upgrades the tables; twice, or in two processes at once, is fine. Raises UnfitEnvironmentError."""
        try:
            self._create()
        except (ArgumentError, DBAPIError, ImportError, OSError) as error:  # ArgumentError, ImportError: no such dialect, no driver
            reason = getattr(error, "orig", error)
            self.close()
            raise UnfitEnvironmentError(
                Problem(
                    code="register.unreachable",
                    key="GRISTMILL_DATABASE_URL",
                    what=f"the register at {self.url.render_as_string(hide_password=True)} cannot be opened: {reason}",
                    fix="check that the database is up, that the URL is right and that its folder may be written",
                )
            ) from error

    def close(self) -> None:
        """Closes the pooled connections; a later call opens new ones. A register that is let go of without it closes them, too."""
        with self._opening:
            if self._engine is not None:
                self._dispose()
            self._engine = None

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One consistent view; waits for nobody."""
        view = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with self._opened().execution_options(**view).begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction: committed at the end of the block, rolled back when it raises. SQLite has one writer at a time."""
        with self._opened().execution_options(**{BEGIN: "BEGIN IMMEDIATE"}).begin() as connection:
            yield connection

    def insert_if_absent(self, table: Table) -> Insert:
        """An insert that does nothing where the key is taken. To learn which, ask for `returning`: psycopg keeps no rowcount of it."""
        maker: Any = sqlite.insert if self.is_sqlite else postgresql.insert
        return maker(table).on_conflict_do_nothing()

    def _create(self) -> None:
        if self.is_sqlite:
            self._prepare_file()
        # A revision is written in the transaction that makes it, so it says that all of it is there; no lock is taken to learn it.
        with self.reading() as connection:
            found = schema.revision_of(connection)
        if found is not None and schema.is_newer(found):
            raise _newer_schema(found)
        if found != schema.REVISION:
            self._upgrade()

    def _upgrade(self) -> None:
        with self.writing() as connection:
            if not self.is_sqlite:
                connection.execute(text("select pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            schema.upgrade(connection)

    # The switch to WAL does not wait for the busy timeout, and processes that create at once meet there.
    @retry(retry=retry_if_exception(is_busy), stop=stop_after_delay(BUSY_TIMEOUT_S), wait=wait_random(0.01, 0.2), reraise=True)
    def _prepare_file(self) -> None:
        if self.url.database:
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
        with self._opened().execution_options(**{BEGIN: None}).connect() as connection:
            if connection.exec_driver_sql("PRAGMA journal_mode").scalar() != "wal":
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")

    def _opened(self) -> Engine:
        with self._opening:
            if self._engine is None:
                self._engine = open_engine(self.url, pooled=self._pooled)
                self._dispose = finalize(self, self._engine.dispose)
            return self._engine


def _is_in_memory(url: URL) -> bool:
    return not url.database or ":memory:" in url.database or url.query.get("mode") == "memory"


def _in_memory() -> UnfitEnvironmentError:
    return UnfitEnvironmentError(
        Problem(
            code="register.in_memory",
            key="GRISTMILL_DATABASE_URL",
            what="a register in memory is gone when its process ends, and no worker sees it",
            expected="sqlite:////absolute/path/register.db or postgresql+psycopg://user@host/name",
            found="an SQLite database without a file",
            fix="unset GRISTMILL_DATABASE_URL (a file under the root is used then), or name a file",
        )
    )


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


def _newer_schema(found: str) -> UnfitEnvironmentError:
    return UnfitEnvironmentError(
        Problem(
            code="register.schema",
            key="GRISTMILL_DATABASE_URL",
            what="the register was upgraded by a newer gristmill",
            expected=f"schema {schema.REVISION} or older",
            found=f"schema {found}",
            fix="use that gristmill here too, or point GRISTMILL_DATABASE_URL (and GRISTMILL_ROOT) to a new place",
        )
    )
