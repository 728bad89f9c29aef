"""`gristmill init`: a job folder to start from."""

import json
from importlib.resources import files
from pathlib import Path

from batch_assets.core.errors import Problem, RefusedError
from batch_assets.core.job_file import job_file_schema, name_problem

TEMPLATE_FILES = ("job.yaml", "prompt.md", "answer.schema.json", "tickets.jsonl")
SCHEMA_FILE = "job.schema.json"


def init_job(name: str, jobs_folder: Path) -> Path:
    """Make `jobs_folder/name` from the example; the folder must not exist. Returns it."""
    folder = jobs_folder / name
    problem = name_problem(name)
    if problem is not None:
        raise _refused("name", problem, expected="for example ticket_summaries", found=name, fix="choose another name")
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise _refused(
            "exists", f"{folder} exists", expected="a new name", found=name, fix="choose another name, or edit that job"
        ) from error
    templates = files("batch_assets") / "templates" / "job"
    for file in TEMPLATE_FILES:
        (folder / file).write_text((templates / file).read_text(encoding="utf-8"), encoding="utf-8")
    schema = jobs_folder / SCHEMA_FILE
    if not schema.exists():
        schema.write_text(schema_text(), encoding="utf-8")
    return folder


def schema_text() -> str:
    """job.schema.json as it stands beside the job folders."""
    return json.dumps(job_file_schema(), indent=2, ensure_ascii=False) + "\n"


def _refused(code: str, what: str, *, expected: str, found: str, fix: str) -> RefusedError:
    return RefusedError(Problem(code=f"init.{code}", key="NAME", what=what, expected=expected, found=found, fix=fix))
