"""Job folders and installations that tests write: a few lines of input, a small schema, a model by digest."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from batch_assets.settings import Settings
from batch_assets.stores.models import model_digest

CATEGORIES = ["billing", "bug", "how_to", "account_access", "cancellation", "other"]
PROMPT = """<!-- system -->
Name the category of the support ticket. Answer with one JSON object: `category` and a short `summary`.

<!-- user -->
{{ body }}
"""


def answer_schema(*, summary_min: int = 1, summary_max: int = 40, categories: Sequence[str] = CATEGORIES) -> dict[str, object]:
    """A category and a bounded summary."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["category", "summary"],
        "properties": {
            "category": {"enum": list(categories)},
            "summary": {"type": "string", "minLength": summary_min, "maxLength": summary_max},
        },
    }


def records(count: int, *, words: int = 12, start: int = 0) -> list[dict[str, object]]:
    """`count` different tickets with ids T-000000 …; text differs in each word group, so that answers differ too."""
    topics = ["invoice", "login", "refund", "crash", "export", "password", "shipping", "label", "price", "language"]
    return [
        {
            "ticket_id": f"T-{number:06d}",
            "body": " ".join(f"{topics[(number + word) % len(topics)]} {number * 31 + word}" for word in range(words // 2)),
            "acl": "support",
            "market": ["de", "us", "fr"][number % 3],
            "gold": CATEGORIES[number % len(CATEGORIES)],
        }
        for number in range(start, start + count)
    ]


def write_job(
    folder: Path,
    rows: Iterable[Mapping[str, object]],
    *,
    model: Path,
    max_tokens: int = 64,
    schema: Mapping[str, object] | None = None,
    prompt: str = PROMPT,
    run: Mapping[str, object] | None = None,
    checks: Mapping[str, object] | None = None,
    duplicates: str = "refuse",
    limits: Mapping[str, object] | None = None,
    publish: Mapping[str, object] | None = None,
) -> Path:
    """A job folder with `tickets.jsonl` beside job.yaml; returns the path of job.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tickets.jsonl").open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    job: dict[str, object] = {
        "description": "Test tickets.",
        "owners": ["team:tests"],
        "input": {
            "table": "./tickets.jsonl",
            "key": "ticket_id",
            "acl": "acl",
            "segment": "market",
            "labels": {"category": "gold"},
            "duplicates": duplicates,
        },
        "model": {"path": str(model), "digest": model_digest(model).digest},
        "decoding": {"max_tokens": max_tokens},
    }
    for name, value in (("limits", limits), ("run", run), ("checks", checks), ("publish", publish)):
        if value is not None:
            job[name] = dict(value)
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    (folder / "prompt.md").write_text(prompt, encoding="utf-8")
    (folder / "answer.schema.json").write_text(json.dumps(schema or answer_schema()), encoding="utf-8")
    return folder / "job.yaml"


def settings_in(folder: Path, *, jobs: Path | None = None, **changes: object) -> Settings:
    """An installation under `folder`, with short leases; the scripted engine unless a test says `engine="vllm"`."""
    values: dict[str, object] = {
        "root": str(folder),
        "state": folder,
        "database_url": f"sqlite:///{folder}/register.db",
        "jobs": jobs or folder / "jobs",
        "lease_s": 6.0,
        "renew_s": 1.0,
        "flush_s": 0.5,
        "engine": "scripted",
    }
    return Settings(**{**values, **changes})  # type: ignore[arg-type]
