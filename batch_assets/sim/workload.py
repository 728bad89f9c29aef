"""The job of a simulated history: a small source with odd records in it, and what must become of each. Drawn from the seed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import yaml

from batch_assets.core.identity import canonical_json
from batch_assets.core.records import TO_ANSWER, DeadClass
from batch_assets.engines.scripted import Act, Behaviour, Script
from batch_assets.sim.faults import Fault, FaultMix
from batch_assets.stores.models import model_digest

JOB: Final = "tickets"
RECORDS: Final = (12, 44)
SHARD_RECORDS: Final = (5, 14)
WORKERS: Final = (1, 4)
ODD_SHARE: Final = 0.08  # of the source: blank, null, without an id, or an id that stands in another row too
KILLERS_MAX: Final = 2  # in one history: each costs several restarts
NEVER_MAX: Final = 1  # three time limits one after the other
ANSWER_TIMEOUT: Final = "12s"  # more than of one turn's time counts against a record (`TURN_COUNTED_MAX_S`)
CATEGORIES: Final = ("billing", "bug", "how_to", "other")
PROMPT: Final = "<!-- system -->\nName the category of the ticket.\n\n<!-- user -->\n{{ body }}\n"
SCHEMA: Final = {
    "type": "object",
    "additionalProperties": False,
    "required": ["category", "summary"],
    "properties": {"category": {"enum": list(CATEGORIES)}, "summary": {"type": "string", "minLength": 1, "maxLength": 60}},
}
BAD_ACTS: Final = (Act.INVALID, Act.WRONG_SCHEMA, Act.TRUNCATE, Act.SURROGATE)


@dataclass(frozen=True, slots=True)
class Expected:
    """What must become of one record. `disposition` is TO_ANSWER or the class that the planner sets it aside with."""

    disposition: str
    acl: str | None
    segment: str | None
    answer: Mapping[str, str]


@dataclass(slots=True)
class Workload:
    """Source rows, script of the engine, and the oracle: `expected` by record id."""

    rows: list[dict[str, object]]
    expected: dict[str, Expected]
    script: Script
    innocent: frozenset[str]  # records that the engine answers well whenever it is asked
    killers: frozenset[str]  # an engine that decodes one of these dies, or its process does
    never: frozenset[str]  # never answered
    rejected: frozenset[str]
    surplus: int
    shard_records: int
    attempts_max: int
    workers: int
    answers: set[tuple[str, int]] = field(default_factory=set)  # (record, attempt) that some engine answered well
    failures: set[tuple[str, int]] = field(default_factory=set)  # … or badly
    given_up: set[tuple[str, int]] = field(default_factory=set)  # … or did not answer until it was told to forget them
    alone: set[tuple[str, int]] = field(default_factory=set)  # (record, epoch): begun, with nobody beside it, and no entry came of it

    @property
    def to_answer(self) -> int:
        """Records that the workers must answer."""
        return sum(each.disposition == TO_ANSWER for each in self.expected.values())


def drawn(random: Random, mix: FaultMix) -> Workload:
    """A workload that fits the mix: records that are answered badly only when it says so."""
    rows = [_row(random, number) for number in range(random.randint(*RECORDS))]
    surplus = _spoil(random, rows)
    attempts_max = random.choice([1, 2, 3, 3])
    expected = {record_id: each for number, row in enumerate(rows) for record_id, each in [_expected(number, row, rows)]}
    sound = [record_id for record_id, each in expected.items() if each.disposition == TO_ANSWER]
    behaviours = [
        _misbehaviour(random, record_id, attempts_max) for record_id in sound if random.random() < mix.rates.get(Fault.BAD_ANSWERS, 0.0)
    ]
    killers = _some(random, sound, mix.rates.get(Fault.KILLER, 0.0), at_most=KILLERS_MAX)
    never = _some(random, sound, mix.rates.get(Fault.NEVER_ANSWERED, 0.0), at_most=NEVER_MAX)
    behaviours = [*(Behaviour(act=Act.NEVER, record=each) for each in sorted(never)), *behaviours]  # the first that fits a request counts
    sequences = random.randint(2, 4)
    return Workload(
        rows=rows,
        expected=expected,
        script=Script(
            max_num_seqs=sequences,
            answers_per_poll=random.randint(1, sequences),
            answers={record_id: dict(expected[record_id].answer) for record_id in sound},
            behaviours=tuple(behaviours),
        ),
        innocent=frozenset(sound) - killers - {each.record for each in behaviours if each.act is not Act.SLOW},
        killers=killers,
        never=never - killers,
        rejected=frozenset(each.record for each in behaviours if each.act is Act.REJECT and each.record is not None) - killers - never,
        surplus=surplus,
        shard_records=random.randint(*SHARD_RECORDS),
        attempts_max=attempts_max,
        workers=random.randint(*WORKERS),
    )


def _some(random: Random, sound: Sequence[str], rate: float, *, at_most: int) -> frozenset[str]:
    return frozenset([record_id for record_id in sound if random.random() < rate][:at_most])


def _row(random: Random, number: int) -> dict[str, object]:
    return {
        "ticket_id": f"T-{number:04d}",
        "body": f"text of {number} {random.randrange(1000)}",
        "acl": f"team-{number % 5}",
        "market": ["de", "us", "fr"][number % 3],
    }


def _spoil(random: Random, rows: list[dict[str, object]]) -> int:
    """Makes some rows odd; the number of surplus copies. The first row stays sound, and nobody copies an id that is copied already."""
    surplus = 0
    for number in range(1, len(rows)):
        if random.random() >= ODD_SHARE:
            continue
        kind = random.choice(["blank", "null", "no id", "copy"])
        if kind == "blank":
            rows[number]["body"] = "  "
        elif kind == "null":
            rows[number]["body"] = None
        elif kind == "no id":
            rows[number]["ticket_id"] = None
        else:
            # Rows of one id that differ in ACL or segment are refused by the planner.
            rows[number] |= {name: rows[0][name] for name in ("ticket_id", "acl", "market")}
            surplus += 1
    return surplus


def _expected(number: int, row: Mapping[str, object], rows: list[dict[str, object]]) -> tuple[str, Expected]:
    record_id = row["ticket_id"]
    copies = sum(each["ticket_id"] == record_id for each in rows)
    if record_id is None:
        disposition: str = DeadClass.NO_ID
    elif copies > 1:
        disposition = DeadClass.DUPLICATE_ID
    elif row["body"] is None:
        disposition = DeadClass.NULL
    else:
        disposition = TO_ANSWER if str(row["body"]).strip() else DeadClass.EMPTY
    name = str(record_id) if record_id is not None else f"row:tickets.jsonl:{number + 1}"
    answer = {"category": CATEGORIES[number % len(CATEGORIES)], "summary": f"about {name}"}
    return name, Expected(disposition, str(row["acl"]), str(row["market"]), answer)


def _misbehaviour(random: Random, record_id: str, attempts_max: int) -> Behaviour:
    """Rejected, late, or answered badly: always, or until its last attempt or the one before."""
    kind = random.choice(["reject", "slow", "bad", "bad", "flaky", "flaky"])
    if kind == "reject":
        return Behaviour(act=Act.REJECT, record=record_id)
    if kind == "slow":
        return Behaviour(act=Act.SLOW, record=record_id, polls=random.randint(2, 12))
    attempts = None if kind == "bad" else random.randint(1, attempts_max)
    return Behaviour(act=random.choice(BAD_ACTS), record=record_id, attempts_max=attempts)


def write_job(folder: Path, workload: Workload, *, model: Path) -> Path:
    """The job's files; returns the path of job.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in workload.rows)
    job: dict[str, Any] = {
        "description": "Simulated tickets.",
        "owners": ["team:sim"],
        "input": {"table": "./tickets.jsonl", "key": "ticket_id", "acl": "acl", "segment": "market", "duplicates": "set_aside"},
        "model": {"path": str(model), "digest": model_digest(model).digest},
        "decoding": {"max_tokens": 64},
        "limits": {"attempts_max": workload.attempts_max, "answer_timeout": ANSWER_TIMEOUT},
        "run": {"shard_records": workload.shard_records},
    }
    files = {"tickets.jsonl": lines, "job.yaml": yaml.safe_dump(job), "prompt.md": PROMPT, "answer.schema.json": canonical_json(SCHEMA)}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "job.yaml"


def write_model(folder: Path) -> Path:
    """The least that passes for a model: the scripted engine reads none of it."""
    folder.mkdir(parents=True)
    header = canonical_json({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (folder / "config.json").write_text(canonical_json({"max_position_embeddings": 8192}), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder
