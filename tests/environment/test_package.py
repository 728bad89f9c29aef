"""What is installed where: the wheel holds one package, the worker needs no dagster, the Makefile explains itself."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WITHOUT_DAGSTER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("dagster"):
            raise ImportError(f"{name} is blocked: the worker image has no dagster")

sys.meta_path.insert(0, Refuse())
try:
    import dagster
except ImportError:
    pass
else:
    raise SystemExit("the block does not work")

import importlib
for module in sys.argv[1:]:
    importlib.import_module(module)
assert not [name for name in sys.modules if name.startswith("dagster")]
"""

TARGETS = {"setup", "demo", "ui", "check", "test", "test-long", "sim", "planted-bugs", "bench", "docs", "lint", "clean"}


@pytest.mark.parametrize("module", ["batch_assets", "batch_assets.worker.__main__", "batch_assets.reading", "batch_assets.cli"])
def test_imports_without_dagster(module: str):
    finished = subprocess.run([sys.executable, "-c", WITHOUT_DAGSTER, module], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_importing_the_package_imports_nothing():
    script = "import sys; before = set(sys.modules); import batch_assets; print(sorted(set(sys.modules) - before))"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "['batch_assets']"


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(repository)], check=True)
    (built,) = folder.glob("gristmill-*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_only_the_package(wheel: zipfile.ZipFile):
    assert {name.split("/")[0] for name in wheel.namelist()} == {"batch_assets", "gristmill-0.1.0.dist-info"}


def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile, repository: Path):
    tracked = subprocess.run(["git", "ls-files", "batch_assets"], cwd=repository, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.split()) - set(wheel.namelist()) == set()


def test_the_wheel_brings_the_command(wheel: zipfile.ZipFile):
    assert "gristmill = batch_assets.cli:main" in wheel.read("gristmill-0.1.0.dist-info/entry_points.txt").decode()


def test_the_base_needs_neither_dagster_nor_vllm(wheel: zipfile.ZipFile):
    lines = re.findall(r"^Requires-Dist: (.*)$", wheel.read("gristmill-0.1.0.dist-info/METADATA").decode(), re.MULTILINE)
    base = [line for line in lines if "extra ==" not in line]
    assert base
    assert [line for line in base if line.startswith(("dagster", "vllm", "torch", "boto3", "pyarrow"))] == []


def test_make_help_names_every_target(repository: Path):
    finished = subprocess.run(["make", "help"], cwd=repository, capture_output=True, text=True, check=True)
    shown = {line.split()[0] for line in finished.stdout.splitlines() if line.startswith("  ")}
    assert shown == TARGETS | {"help"}


def test_ci_runs_what_a_developer_runs(repository: Path):
    script = (repository / ".ci" / "run").read_text()
    assert script.rstrip().endswith("make --no-print-directory test")
    assert (repository / ".ci" / "run").stat().st_mode & 0o111
