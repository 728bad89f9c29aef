"""The command line as a user meets it: its own entry point in this process, an environment of its own, what it wrote and how it ended."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from batch_assets.cli import main
from batch_assets.core.errors import ExitCode
from batch_assets.settings import Settings
from tests.support.jobs import records, settings_in, write_job
from tests.support.models import stub_model

JOB = "tickets"
MODEL = "smollm2-135m-instruct"  # the name in the example of `init`; here a stub of a few bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """One command, done."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout, in one line; anything more or less fails the test."""
        assert self.out.count("\n") == 1, f"not one line: {self.out!r}; stderr: {self.err}"
        value = json.loads(self.out)
        assert isinstance(value, dict)
        assert value["schema_version"] == 1
        return value

    def succeeded(self) -> "Ended":
        """Itself, if it ended with 0 and blamed nobody."""
        assert self.code == ExitCode.DONE, self.err or self.out
        assert "Traceback" not in self.err
        return self

    def refused(self, error: str, *, code: ExitCode = ExitCode.REFUSED) -> dict[str, Any]:
        """The error object, if it is this one; stderr says the same in words, to the last part, and shows no traceback."""
        told = self.json["error"]
        assert (self.code, told["code"]) == (code, error), self.err
        for part in ("file", "key", "what", "expected", "found", "fix"):
            assert told[part] is None or error == "usage" or told[part] in self.err, f"{part} {told[part]!r} is not in {self.err!r}"
        assert told["fix"]
        assert "Traceback" not in self.err
        return told


@dataclass(frozen=True, slots=True)
class Terminal:
    """A shell in a folder that holds an installation, `jobs` and `models`; the engine is the scripted one."""

    folder: Path

    @property
    def settings(self) -> Settings:
        """Of the installation."""
        return settings_in(self.folder / "root", jobs=self.folder / "jobs")

    @property
    def environment(self) -> dict[str, str]:
        """What the user has exported."""
        return {**self.settings.as_environment(), "MODELS": str(self.folder / "models")}

    @property
    def model(self) -> Path:
        """The stub model's folder."""
        return stub_model(self.folder / "models" / MODEL)

    @property
    def job_file(self) -> Path:
        """job.yaml of the one job."""
        return self.folder / "jobs" / JOB / "job.yaml"

    def gristmill(self, *arguments: str, **environment: str) -> Ended:
        """Run one command to its end, with these variables set in addition."""
        return run_main(arguments, {**self.environment, **environment})

    def write_job(self, *, count: int = 24, dead_letters_max: str = "20%", shard_records: int = 8) -> Path:
        """A job over `count` records; of the first two, one is empty and one has no text."""
        rows = records(count)
        rows[0]["body"], rows[1]["body"] = "", None
        return write_job(
            self.job_file.parent,
            rows,
            model=self.model,
            run={"shard_records": shard_records, "workers_max": 1},
            checks={"dead_letters": {"max": dead_letters_max}},
        )


def run_main(arguments: tuple[str, ...], environment: Mapping[str, str]) -> Ended:
    """`batch_assets.cli.main` under these arguments and variables; the process's own are as before when it is done."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["gristmill", *arguments])
        for name in [name for name in os.environ if name.startswith("GRISTMILL_")]:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("DAGSTER_HOME", "")  # a run sets its own; this puts back what was there
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, out.getvalue(), err.getvalue())
