"""Plants each bug in a copy of the tree and runs the proofs that should catch it: `python -m tests.planted.run [--only NN] [--json]`.

Exit code 0: every bug was caught. A patch that does not apply, a proof that does not run, and a tree whose proofs fail without any bug
are failures too: each would make "caught" mean nothing.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from shutil import copy2

REPOSITORY = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).resolve().parent
SIM_SEEDS = 300  # a bug must fall within so many crash histories
PROOF_S_MAX = 900.0  # on a machine that others use too
RULES = "tests/rules"
SIM = "sim"
SIM_MODULE = "batch_assets.sim.crash"
FAILED_TEST = re.compile(r"^FAILED (\S+)", re.MULTILINE)
TESTS_FAILED = 1  # pytest's exit code; 2 and more mean that it did not get that far


@dataclass(frozen=True, slots=True)
class Bug:
    """One patch."""

    number: str
    name: str
    breaks: str
    proofs: tuple[str, ...]
    patch: Path


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one bug. `caught_by` is a test, or `sim`; `problem` says why there is no verdict."""

    number: str
    name: str
    breaks: str
    caught_by: str | None
    seconds: float
    problem: str | None = None

    @property
    def is_caught(self) -> bool:
        return self.caught_by is not None


def read_bugs(folder: Path = PATCHES) -> list[Bug]:
    """By number. Raises ValueError for a header that lacks a word."""
    return [read_bug(path) for path in sorted(folder.glob("*.patch"))]


def read_bug(path: Path) -> Bug:
    header = path.read_text().partition("\n--- ")[0]
    words = dict(line.partition(": ")[::2] for line in header.splitlines() if ": " in line)
    number, _, name = path.stem.partition("_")
    missing = {"Breaks", "Proof"} - set(words)
    if missing or not number.isdecimal():
        message = (
            f"{path.name}: expected NN_name.patch that begins with `Breaks: …` and `Proof: …`; missing {sorted(missing) or 'a number'}"
        )
        raise ValueError(message)
    return Bug(number, name, words["Breaks"], tuple(proof.strip() for proof in words["Proof"].split(",")), path)


@contextmanager
def tree_copied() -> Iterator[Path]:
    """The tracked and new files of the repository as they are now, in a folder that is removed afterwards."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=REPOSITORY).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        for name in filter(None, listed):
            source, target = REPOSITORY / name, Path(folder, name)
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                copy2(source, target)
        yield Path(folder)


def apply(bug: Bug, tree: Path, *, check_only: bool = False) -> str | None:
    """None when the patch applies; else git's words."""
    done = _git("apply", *(["--check"] if check_only else []), str(bug.patch), cwd=tree)
    return done.stderr.strip() if done.returncode else None


def plant(bug: Bug) -> Finding:
    """Runs the proofs that the patch names, then the other ones, until one fails."""
    began_s = time.monotonic()
    finding = Finding(bug.number, bug.name, bug.breaks, caught_by=None, seconds=0.0)
    with tree_copied() as tree:
        problem = apply(bug, tree)
        if problem:
            return replace(finding, problem=f"the patch does not apply: {problem}")
        for proof in dict.fromkeys([*bug.proofs, RULES, SIM]):
            caught_by, problem = run_proof(proof, tree)
            if caught_by or problem:
                return replace(finding, caught_by=caught_by, problem=problem, seconds=time.monotonic() - began_s)
    return replace(finding, seconds=time.monotonic() - began_s)


def run_proof(proof: str, tree: Path) -> tuple[str | None, str | None]:
    """(the test that failed, why it could not be run); (None, None) when all is well in this tree."""
    if proof == SIM:
        return _run_sim(tree)
    pytest = ["pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", "--hypothesis-profile=planted", "--timeout=0", proof]
    done = _python(*pytest, cwd=tree)
    failed = FAILED_TEST.search(done.stdout)
    if done.returncode == TESTS_FAILED and failed:
        return failed.group(1), None
    return (None, None) if done.returncode == 0 else (None, f"{proof} does not run: {_tail(done)}")


def _run_sim(tree: Path) -> tuple[str | None, str | None]:
    if find_spec("batch_assets.sim") is None or not (tree / "batch_assets/sim/crash.py").exists():
        return None, None
    done = _python(SIM_MODULE, "--seeds", str(SIM_SEEDS), cwd=tree)
    if done.returncode == 0:
        return None, None
    # A simulation that cannot be imported or called has found nothing.
    return (None, f"sim does not run: {_tail(done)}") if "ImportError" in done.stderr or "usage:" in done.stderr else (SIM, None)


def _python(*module_and_arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", *module_and_arguments]
    try:
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PROOF_S_MAX, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, returncode=-1, stdout="", stderr=f"no end within {PROOF_S_MAX:.0f} s")


def _git(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(cwd.parent)}
    return subprocess.run(["git", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return f"exit code {done.returncode}, {lines[-1] if lines else 'no output'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted.run", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", action="append", metavar="NN", help="this bug alone; may be given again")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    options = parser.parse_args(arguments)
    bugs = [bug for bug in read_bugs() if not options.only or bug.number in options.only]
    if not bugs:
        parser.error(f"there is no bug {', '.join(options.only or ['at all'])}")
    problem = None if options.only else _problem_without_bugs()
    findings = [] if problem else [_told(plant(bug), quiet=options.json) for bug in bugs]
    caught = sum(finding.is_caught for finding in findings)
    if options.json:
        print(json.dumps({"schema_version": 1, "problem": problem, "caught": caught, "bugs": [asdict(each) for each in findings]}))
    else:
        print(problem or f"{caught} of {len(bugs)} planted bugs caught")
    return 0 if not problem and caught == len(bugs) else 1


def _problem_without_bugs() -> str | None:
    with tree_copied() as tree:
        for proof in (RULES, SIM):
            caught_by, problem = run_proof(proof, tree)
            if caught_by or problem:
                return f"without any bug planted, {caught_by or proof} fails ({problem or 'a test failed'}): mend that first"
    return None


def _told(finding: Finding, *, quiet: bool) -> Finding:
    if not quiet:
        verdict = f"caught by {finding.caught_by}" if finding.is_caught else finding.problem or "NOT CAUGHT"
        print(f"{finding.number} {finding.name:<40} {finding.seconds:5.1f} s  {verdict}", flush=True)
    return finding


if __name__ == "__main__":
    sys.exit(main())
