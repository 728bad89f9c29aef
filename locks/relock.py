"""Write locks/dev-py311.txt and locks/worker.txt from pyproject.toml; README.md beside this file says when and why.

`python locks/relock.py` keeps every version that a lock has and adds what pyproject.toml newly asks for; `--upgrade NAME` lets go of
one name, `--upgrade-all` of all. It needs a package index and the `uv` beside this Python (or UV=/path/to/uv), and changes nothing else.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

LOCKS = Path(__file__).resolve().parent
PYPROJECT = LOCKS.parent / "pyproject.toml"
DEV_LOCK = LOCKS / "dev-py311.txt"
WORKER_LOCK = LOCKS / "worker.txt"

# glibc of Debian 12; older ones (Ubuntu 22.04 has 2.35) take the same wheels, except that a wheel may ask for up to this one.
PLATFORM = "x86_64-manylinux_2_36"
DEV_PYTHON = "3.11"
WORKER_PYTHONS = ("3.11", "3.12")  # 3.12 is what the official vllm image runs; 3.11 is where the lock is tested
VLLM = "vllm==0.32.0"

# No PyPI index lists a +cpu wheel, so no resolver finds this line: it is written by hand. PyTorch's own CPU index has the file
# torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl.
TORCH_VERSION = "2.13.0+cpu"
TORCH_SHA256 = ("6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",)
TORCH_REQUIRES = (
    "filelock",
    "fsspec>=0.8.5",
    "jinja2",
    "networkx>=2.5.1",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "typing-extensions>=4.10.0",
)

# name -> (version, sha256 of every wheel that fits)
Pins = dict[str, tuple[str, set[str]]]


def canonical(name: str) -> str:
    """The name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(lock: Path) -> dict[str, str]:
    """Name -> version of a lock; empty when there is none yet."""
    if not lock.exists():
        return {}
    return {canonical(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", lock.read_text(), re.MULTILINE)}


def resolve(requirements: list[str], *, constraints: dict[str, str], python: str) -> Pins:
    """Every package that `requirements` need, each with the wheels for one Python on Linux x86_64."""
    with tempfile.TemporaryDirectory() as folder:
        source, pins, out = (Path(folder) / name for name in ("requirements.in", "constraints.txt", "pylock.toml"))
        source.write_text("\n".join(requirements) + "\n")
        pins.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items() if name != "torch"))
        command = [
            os.environ.get("UV", str(Path(sys.executable).with_name("uv"))),
            "pip",
            "compile",
            str(source),
            "--constraint",
            str(pins),
            "--python-version",
            python,
        ]
        command += ["--config-file", str(LOCKS / "uv.toml"), "--python-platform", PLATFORM, "--only-binary", ":all:"]
        command += ["--format", "pylock.toml", "--output-file", str(out), "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        packages = tomllib.loads(out.read_text())["packages"]
    for package in packages:
        if not package.get("wheels"):
            sys.exit(f"{package['name']} {package['version']} has no wheel for Python {python} on {PLATFORM}: pin another version of it")
    return {
        canonical(package["name"]): (package["version"], {wheel["hashes"]["sha256"] for wheel in package["wheels"]}) for package in packages
    }


def write_lock(lock: Path, pins: Pins, *, head: str) -> None:
    """One package a paragraph, sorted by name."""
    blocks = [
        " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in sorted(digests))])
        for name, (version, digests) in sorted(pins.items())
    ]
    lock.write_text(head + "\n".join(blocks) + "\n")
    print(f"{lock.relative_to(LOCKS.parent)}: {len(pins)} packages")


def main() -> None:
    """Resolve both locks; the worker's takes its versions from the development lock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="append", default=[], metavar="NAME", help="let go of this package's version (repeatable)")
    parser.add_argument("--upgrade-all", action="store_true", help="let go of every version")
    parser.add_argument("--seed", type=Path, help="take versions from this lock where ours has none")
    asked = parser.parse_args()

    project = tomllib.loads(PYPROJECT.read_text())["project"]
    base: list[str] = project["dependencies"]
    extras: dict[str, list[str]] = project["optional-dependencies"]

    kept = {} if asked.upgrade_all else (locked_versions(asked.seed) if asked.seed else {}) | locked_versions(DEV_LOCK)
    for name in asked.upgrade:
        kept.pop(canonical(name), None)

    everything = [*base, *(line for lines in extras.values() for line in lines), *TORCH_REQUIRES]
    development = resolve(everything, constraints=kept, python=DEV_PYTHON)
    development["torch"] = (TORCH_VERSION, set(TORCH_SHA256))
    write_lock(
        DEV_LOCK,
        development,
        head="# Written by locks/relock.py for Python 3.11 on Linux x86_64; do not edit.\n"
        "# Every package that development, tests and the demo need.\n"
        "# pip install --no-deps --require-hashes --only-binary :all: -r locks/dev-py311.txt\n",
    )

    versions = {name: version for name, (version, _) in development.items()}
    in_the_image = set(resolve([VLLM], constraints={}, python=WORKER_PYTHONS[-1])) | {"torch"}
    worker: Pins = {}
    for python in WORKER_PYTHONS:
        for name, (version, digests) in resolve([*base, *extras["postgres"]], constraints=versions, python=python).items():
            if name not in in_the_image:
                worker.setdefault(name, (version, set()))[1].update(digests)
    write_lock(
        WORKER_LOCK,
        worker,
        head=f"# Written by locks/relock.py for Python {' and '.join(WORKER_PYTHONS)} on Linux x86_64; do not edit.\n"
        f"# What a worker needs that the image of {VLLM} does not bring.\n"
        "# pip install --no-deps --require-hashes --only-binary :all: -r locks/worker.txt\n",
    )


if __name__ == "__main__":
    main()
