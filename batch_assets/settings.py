"""Settings of an installation, read once from the environment by whoever composes (cli, definitions, worker `__main__`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batch_assets.core.errors import Problem, RefusedError

LEASE_S = 90.0  # three missed renewals; shorter and a slow object store looks like a dead worker
RENEW_S = 30.0
FLUSH_S = 2.0
LEASE_MIN_S = 2.0
SECONDS_MAX = 7 * 24 * 3600.0  # whoever waits a week for a dead worker has mistyped; far below what timers of the system bear
ENGINES = ("vllm", "scripted")  # the default first; the other is for tests and bookkeeping benchmarks


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where things are and how long they last. `root` is a local folder (absolute) or an `s3://` location."""

    root: str
    state: Path  # local: SQLite, Dagster home, caches
    database_url: str
    jobs: Path
    lease_s: float = LEASE_S
    renew_s: float = RENEW_S
    flush_s: float = FLUSH_S
    engine: str = ENGINES[0]
    engine_script: str | None = None  # JSON text file for the scripted engine
    ui_url: str = "http://127.0.0.1:3000"

    @property
    def dagster_home(self) -> Path:
        """DAGSTER_HOME of this installation, so that `gristmill run` and the UI show the same runs."""
        return self.state / "dagster"

    @property
    def is_local(self) -> bool:
        """True when the root is a folder on this host."""
        return "://" not in self.root

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], *, root: str | None = None) -> "Settings":
        """`GRISTMILL_ROOT` (default ./.gristmill), `_STATE`, `_DATABASE_URL`, `_JOBS`, `_LEASE_S`, `_RENEW_S`, `_FLUSH_S`, `_ENGINE`,
        `_ENGINE_SCRIPT`, `_UI_URL`; `root` wins over the environment. Raises RefusedError.
        """
        chosen = root or environment.get("GRISTMILL_ROOT") or ".gristmill"
        local = "://" not in chosen
        if local:
            chosen = str(Path(chosen).resolve())
        state_text = environment.get("GRISTMILL_STATE")
        if root and local:
            state_text = state_text if environment.get("GRISTMILL_ROOT") in (None, root) else None
        if state_text is None and not local:
            raise RefusedError(
                Problem(
                    code="settings.state_missing",
                    key="GRISTMILL_STATE",
                    what=f"the root {chosen} is not local, so the state (database, Dagster home, caches) needs a folder of its own",
                    expected="a local folder",
                    found="nothing",
                    fix="export GRISTMILL_STATE=/var/lib/gristmill",
                )
            )
        engine = environment.get("GRISTMILL_ENGINE") or ENGINES[0]
        if engine not in ENGINES:
            raise RefusedError(unknown_engine(engine))
        state = Path(state_text).resolve() if state_text else Path(chosen)
        lease_s = _seconds(environment, "GRISTMILL_LEASE_S", LEASE_S)
        renew_s = _seconds(environment, "GRISTMILL_RENEW_S", min(RENEW_S, lease_s / 3))
        if lease_s < LEASE_MIN_S or renew_s * 2 > lease_s:
            raise RefusedError(
                Problem(
                    code="settings.lease",
                    key="GRISTMILL_LEASE_S",
                    what="a lease must outlive at least two renewals",
                    expected=f">= {LEASE_MIN_S:g} s and >= 2 * GRISTMILL_RENEW_S",
                    found=f"lease {lease_s:g} s, renewal {renew_s:g} s",
                    fix=f"export GRISTMILL_LEASE_S={max(LEASE_MIN_S, renew_s * 3):g}",
                )
            )
        return cls(
            root=chosen,
            state=state,
            database_url=environment.get("GRISTMILL_DATABASE_URL") or f"sqlite:///{state}/register.db",
            jobs=Path(environment.get("GRISTMILL_JOBS") or "jobs").resolve(),
            lease_s=lease_s,
            renew_s=renew_s,
            flush_s=_seconds(environment, "GRISTMILL_FLUSH_S", FLUSH_S),
            engine=engine,
            engine_script=environment.get("GRISTMILL_ENGINE_SCRIPT"),
            ui_url=environment.get("GRISTMILL_UI_URL") or "http://127.0.0.1:3000",
        )

    def as_environment(self) -> dict[str, str]:
        """The variables from which a child process reads these same settings."""
        variables = {
            "GRISTMILL_ROOT": self.root,
            "GRISTMILL_STATE": str(self.state),
            "GRISTMILL_DATABASE_URL": self.database_url,
            "GRISTMILL_JOBS": str(self.jobs),
            "GRISTMILL_LEASE_S": f"{self.lease_s:g}",
            "GRISTMILL_RENEW_S": f"{self.renew_s:g}",
            "GRISTMILL_FLUSH_S": f"{self.flush_s:g}",
            "GRISTMILL_ENGINE": self.engine,
            "GRISTMILL_UI_URL": self.ui_url,
        }
        if self.engine_script is not None:
            variables["GRISTMILL_ENGINE_SCRIPT"] = self.engine_script
        return variables


def unknown_engine(engine: str) -> Problem:
    """What is said of any other name than those of `ENGINES`."""
    return Problem(
        code="settings.engine",
        key="GRISTMILL_ENGINE",
        what="no engine of that name",
        expected=f"{ENGINES[0]} (or {ENGINES[1]}, for tests and bookkeeping benchmarks)",
        found=engine,
        fix=f"export GRISTMILL_ENGINE={ENGINES[0]}",
    )


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= SECONDS_MAX:
        raise RefusedError(
            Problem(
                code="settings.seconds",
                key=name,
                what="not a number of seconds",
                expected=f"a number above 0, at most {SECONDS_MAX:.0f} (a week)",
                found=text,
                fix=f"export {name}={default:g}",
            )
        )
    return value
