"""A job folder on disk that nothing is wrong with, and changes to it: what most tests of the job file start from."""

import json
from pathlib import Path

from batch_assets.stores.job_folders import Job, load_job
from batch_assets.stores.models import model_digest
from tests.support.models import stub_model

PROMPT = """<!-- system -->
You read one ticket and name its category and a short summary.

<!-- user -->
Subject: {{ subject }}

{{ body }}
"""
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["category", "summary"],
    "properties": {"category": {"enum": ["billing", "bug", "other"]}, "summary": {"type": "string", "maxLength": 80}},
}
ROWS = [
    {"ticket_id": f"T-{number}", "subject": "Invoice", "body": f"Charged twice, case {number}", "acl": "support"} for number in range(3)
]


def write_job(parent: Path, name: str = "tickets") -> Path:
    """`parent/jobs/<name>/` with a scripted-engine model beside it; returns its job.yaml. `MODELS` is `parent/models`."""
    folder = parent / "jobs" / name
    folder.mkdir(parents=True)
    digest = model_digest(stub_model(parent / "models" / "stub")).digest
    (folder / "prompt.md").write_text(PROMPT, encoding="utf-8")
    (folder / "answer.schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    (folder / "tickets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    job_yaml = folder / "job.yaml"
    job_yaml.write_text(
        "input:\n  table: ./tickets.jsonl\n  key: ticket_id\n  acl: acl\n"
        f"model:\n  path: ${{MODELS}}/stub\n  digest: {digest}\n"
        "decoding:\n  max_tokens: 64\n",
        encoding="utf-8",
    )
    return job_yaml


def edit(path: Path, old: str, new: str) -> Path:
    """Replace one piece of a file; it must be there."""
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{old!r} is not in {path.name}"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def load(job_yaml: Path) -> Job:
    """The folder that `write_job` made, read."""
    return load_job(job_yaml, environment={"MODELS": str(job_yaml.parents[2] / "models")})
