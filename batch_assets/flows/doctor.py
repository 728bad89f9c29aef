"""What works on this machine and what does not: store, database, Dagster home, device, versions. Changes nothing that lasts."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from batch_assets.core.errors import GristmillError, ObjectExistsError, UnfitEnvironmentError
from batch_assets.engines.build import engine_build
from batch_assets.settings import Settings
from batch_assets.stores.installation import Installation
from batch_assets.stores.objects import open_objects
from batch_assets.stores.register import Register

NEEDED = ("polars", "deltalake", "obstore", "SQLAlchemy", "pydantic", "llguidance", "dagster")
DELTALAKE_GOOD = "1.6.3"  # 1.6.4-1.6.6 corrupt tables: two OPTIMIZE from stale handles both commit
FREE_GB_MIN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    message: str

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def examine(settings: Settings) -> list[Finding]:
    """Each part by itself: one that fails hides no other."""
    looks: list[tuple[str, Callable[[], str]]] = [
        ("store", lambda: _store(settings)),
        ("database", lambda: _database(settings)),
        ("dagster home", lambda: _dagster_home(settings)),
        ("disk", lambda: _disk(settings)),
        ("engine", lambda: _engine(settings)),
        ("device", _device),
        ("versions", _versions),
        ("isolation", lambda: _isolation(settings)),
    ]
    return [_look(name, look) for name, look in looks]


class _BadError(Exception):
    """A finding that is not ok."""


def _look(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name=name, ok=True, message=look())
    except (_BadError, GristmillError, OSError) as bad:
        return Finding(name=name, ok=False, message=str(bad))


def _store(settings: Settings) -> str:
    """A second create of the same object must be refused: every promise of the shard log rests on it."""
    objects = open_objects(settings.root)
    path = f".doctor/{uuid.uuid4().hex}"
    objects.create(path, b"first")
    try:
        objects.create(path, b"second")
    except ObjectExistsError:
        pass
    else:
        msg = f"{settings.root} let a second create of one object pass: shard logs would lose answers; use a store with conditional writes"
        raise _BadError(msg)
    finally:
        if settings.is_local:
            shutil.rmtree(Path(settings.root) / ".doctor", ignore_errors=True)
    return f"{settings.root}: create-if-absent is honoured"


def _database(settings: Settings) -> str:
    with _register(settings) as register:
        return f"{register.isolation().server} at {register.url.render_as_string(hide_password=True)}: {len(register.jobs())} jobs"


def _dagster_home(settings: Settings) -> str:
    present = (settings.dagster_home / "dagster.yaml").exists()
    return f"{settings.dagster_home}{'' if present else ' (made at the first run)'}"


def _disk(settings: Settings) -> str:
    free_gb = shutil.disk_usage(settings.state).free / 1e9
    if free_gb < FREE_GB_MIN:
        msg = f"{settings.state}: {free_gb:.1f} GB free, expected at least {FREE_GB_MIN:g} GB"
        raise _BadError(msg)
    return f"{settings.state}: {free_gb:.0f} GB free"


def _engine(settings: Settings) -> str:
    build = engine_build(settings.engine)
    return f"{build.engine} {build.version}, guidance {build.guidance}"


def _device() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no GPU seen: vLLM runs on the CPU (development and demo only)"
    return "GPU present (nvidia-smi)"


def _versions() -> str:
    found = dict(_installed())
    if found.get("deltalake") != DELTALAKE_GOOD:
        msg = f"deltalake {found.get('deltalake', 'missing')}: expected {DELTALAKE_GOOD}; newer ones corrupt tables, see docs"
        raise _BadError(msg)
    return ", ".join(f"{name} {number}" for name, number in found.items())


def _installed() -> Iterator[tuple[str, str]]:
    for name in NEEDED:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _isolation(settings: Settings) -> str:
    try:
        with _register(settings) as register:
            found = register.isolation()
    except UnfitEnvironmentError:
        return "not known: the database cannot be opened"  # a finding of its own already
    if found.obstacle is not None:
        return f"off: {found.obstacle}"
    return f"on: {found.role} gives the workers of each version a login of their own"


@contextmanager
def _register(settings: Settings) -> Iterator[Register]:
    register = Installation.open(settings).register
    try:
        yield register
    finally:
        register.close()
