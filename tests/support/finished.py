"""A finished job version made by the real stores, without planner, worker or committer; and ways to spoil it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from deltalake import write_deltalake

from batch_assets.core.identity import canonical_json, digest_of_text
from batch_assets.core.records import TO_ANSWER, Outcome, key_hash
from batch_assets.core.spec import Decoding, EngineBuild, InputRules, ModelSettings, Recipe, Snapshot, SourceKind, VersionSpec
from batch_assets.settings import Settings
from batch_assets.stores.frozen_input import frozen_schema
from batch_assets.stores.installation import Installation
from batch_assets.stores.outcomes import outcomes_schema
from batch_assets.stores.register import CommittedShard, PlannedShard, VersionRow

JOB = "tickets"
ATTEMPT = "a1"
SHARDS_PER_MERGE = 8
ANSWER_SCHEMA = canonical_json(
    {
        "type": "object",
        "additionalProperties": False,
        "required": ["category", "summary", "entities"],
        "properties": {
            "category": {"enum": ["billing", "bug", "other"]},
            "summary": {"type": "string", "minLength": 2, "maxLength": 40},
            "entities": {
                "type": "array",
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["kind", "text"],
                    "properties": {"kind": {"enum": ["order", "date"]}, "text": {"type": "string", "maxLength": 10}},
                },
            },
        },
    }
)

Damage = Callable[[pl.DataFrame], pl.DataFrame]


def open_installation(folder: Path) -> Installation:
    """An empty root of its own."""
    return Installation.open(Settings.from_environment({}, root=str(folder)))


def version_spec(*, number: int = 1, job: str = JOB) -> VersionSpec:
    """Another `number` is another snapshot and another prompt, so another recipe."""
    prompt = f"<!-- user -->\n{{{{ body }}}}\n<!-- {number} -->"
    return VersionSpec(
        job=job,
        recipe=Recipe(
            model_name="tiny",
            model_digest="sha256:" + "0" * 64,
            model_settings=ModelSettings(),
            prompt_digest=digest_of_text(prompt),
            schema_digest=digest_of_text(ANSWER_SCHEMA),
            decoding=Decoding(max_tokens=64),
        ),
        input_rules=InputRules(key="ticket_id", fields=(("body", "body"),), acl="acl", segment="market"),
        engine_build=EngineBuild(engine="scripted", version="1", guidance="1"),
        snapshot=Snapshot(kind=SourceKind.DELTA, uri="/data/tickets", table_id="t", table_version=number),
        prompt=prompt,
        answer_schema=ANSWER_SCHEMA,
        model_path="/models/tiny",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A version whose shards are planned, none of them answered."""

    row: VersionRow
    spec: VersionSpec
    frozen: tuple[pl.DataFrame, ...]  # by shard, the first is number 1 (0 when a canary was asked for)
    numbers: tuple[int, ...]


def finished_version(
    installation: Installation,
    *,
    records: int = 40,
    shards: int = 4,
    set_aside: int = 2,
    surplus: int = 1,
    number: int = 1,
    canary: int = 0,
    job: str = JOB,
    damage: Damage | None = None,
) -> VersionRow:
    """Every record answered and committed. The last `set_aside` of the ids are `empty`, the first record has `surplus` copies.

    `damage` changes the rows before they are merged; set-aside records are dead letters, all others results.
    """
    planned = plan_version(
        installation, records=records, shards=shards, set_aside=set_aside, surplus=surplus, number=number, canary=canary, job=job
    )
    answer_version(installation, planned, damage=damage)
    commit_version(installation, planned)
    return installation.register.version(job, planned.row.name)


def plan_version(
    installation: Installation,
    *,
    records: int,
    shards: int,
    set_aside: int = 0,
    surplus: int = 0,
    number: int = 1,
    canary: int = 0,
    job: str = JOB,
) -> Planned:
    """Register, freeze, activate."""
    spec = version_spec(number=number, job=job)
    row = installation.register.register_version(spec, kind="full")
    installation.specs().write(job, row.name, spec)
    everything = frozen_records(records, set_aside=set_aside, surplus=surplus)
    numbers, parts = _cut(everything, shards=shards, canary=canary)
    store = installation.frozen_input(job=job, version=row.name, attempt=ATTEMPT)
    hashes = [store.write(shard, part) for shard, part in zip(numbers, parts, strict=True)]
    assert installation.register.activate(
        job=job,
        version=row.name,
        attempt=ATTEMPT,
        shards=[_planned(shard, part, sha256) for shard, part, sha256 in zip(numbers, parts, hashes, strict=True)],
        records=records + surplus,
        surplus=surplus,
        set_aside_by_class={"empty": set_aside} if set_aside else {},
    )
    return Planned(row=installation.register.version(job, row.name), spec=spec, frozen=tuple(parts), numbers=tuple(numbers))


def frozen_records(records: int, *, set_aside: int = 0, surplus: int = 0) -> pl.DataFrame:
    """Ids T-00000 … in (key_hash, record_id) order, without `position`."""
    ids = [f"T-{n:05d}" for n in range(records)]
    answered = records - set_aside
    frame = pl.DataFrame(
        {
            "position": [0] * records,
            "record_id": ids,
            "key_hash": [key_hash(record_id) for record_id in ids],
            "disposition": [TO_ANSWER if n < answered else "empty" for n in range(records)],
            "disposition_detail": [None if n < answered else "no text" for n in range(records)],
            "surplus": [surplus if n == 0 else 0 for n in range(records)],
            "record_digest": [hashlib.sha256(record_id.encode()).hexdigest() for record_id in ids],
            "acl": [("support", "legal")[n % 2] for n in range(records)],
            "record_class": ["internal"] * records,
            "segment": [("de", "fr", "jp")[n % 3] for n in range(records)],
            "labels": [None] * records,
            "field_body": [f"ticket {n}" if n < answered else None for n in range(records)],
        },
        schema=frozen_schema(("body",)),
    )
    return frame.sort("key_hash", "record_id")


def _cut(everything: pl.DataFrame, *, shards: int, canary: int) -> tuple[list[int], list[pl.DataFrame]]:
    step = max(1, everything.height // canary) if canary else 0
    taken = everything.gather_every(step).head(canary) if canary else everything.clear()
    rest = everything.join(taken, on="record_id", how="anti", maintain_order="left")
    size = -(-rest.height // shards)
    parts = [rest.slice(n * size, size) for n in range(shards)]
    numbers = list(range(1, shards + 1))
    if canary:
        parts, numbers = [taken, *parts], [0, *numbers]
    return numbers, [part.with_columns(position=pl.int_range(pl.len(), dtype=pl.Int32)) for part in parts]


def _planned(number: int, part: pl.DataFrame, sha256: str) -> PlannedShard:
    to_answer = part.filter(pl.col("disposition") == TO_ANSWER).height
    low, high = part["key_hash"][0], part["key_hash"][-1]
    return PlannedShard(number=number, rows=part.height, to_answer=to_answer, hash_low=low, hash_high=high, input_sha256=sha256)


def outcome_rows(planned: Planned, *, shard: int, frozen: pl.DataFrame) -> pl.DataFrame:
    """What the committer would make of this shard when every record was answered."""
    answered = pl.col("disposition") == TO_ANSWER
    schema = outcomes_schema(planned.spec.answer_schema)
    rows = frozen.with_columns(
        job_version=pl.lit(planned.row.name),
        origin_version=pl.lit(planned.row.name),
        shard=pl.lit(shard, pl.Int32),
        outcome=pl.when(answered).then(pl.lit(Outcome.RESULT.value)).otherwise(pl.lit(Outcome.DEAD_LETTER.value)),
        round=pl.lit(0, pl.Int32),
        recipe=pl.lit(planned.spec.recipe.digest),
        attempt=pl.when(answered).then(1).otherwise(0).cast(pl.Int32),
        epoch=pl.when(answered).then(1).otherwise(0).cast(pl.Int32),
        worker=pl.lit("w1"),
        dead_class=pl.when(answered).then(None).otherwise(pl.col("disposition")),
        error=pl.col("disposition_detail"),
        tokens_prompt=pl.lit(100, pl.Int32),
        tokens_cached=pl.lit(50, pl.Int32),
        tokens_output=pl.lit(20, pl.Int32),
        category=pl.when(answered).then(pl.lit("bug")),
        summary=pl.when(answered).then(pl.lit("fine")),
        entities=pl.when(answered).then(pl.concat_list(pl.struct(kind=pl.lit("order"), text=pl.lit("A-1")))),
    )
    return rows.select(schema.names()).cast(schema)


def answer_version(installation: Installation, planned: Planned, *, damage: Damage | None = None) -> None:
    """MERGEs of several shards each, as damaged."""
    row = planned.row
    outcomes = installation.outcomes(job=row.job, version=row.name, answer_schema=planned.spec.answer_schema)
    outcomes.create()
    shards = list(zip(planned.numbers, planned.frozen, strict=True))
    for start in range(0, len(shards), SHARDS_PER_MERGE):
        some = shards[start : start + SHARDS_PER_MERGE]
        rows = pl.concat([outcome_rows(planned, shard=shard, frozen=frozen) for shard, frozen in some])
        outcomes.merge(damage(rows) if damage else rows, [shard for shard, _ in some], still_mine=lambda: None)


def commit_version(installation: Installation, planned: Planned, *, leave_out: Sequence[int] = ()) -> None:
    """Claim, stage and commit every shard but `leave_out` in the register; finish the version when that is all."""
    register, job, name = installation.register, planned.row.job, planned.row.name
    register.want(job=job, version=name, shards=None)
    while (lease := register.claim(job=job, version=name, worker="w1")) is not None:
        if lease.shard not in leave_out:
            register.stage(lease, slots=1, seconds=1.0)
    generation = register.take_lead(job=job, version=name, holder="test", seen=register.lead(job, name))
    assert generation is not None
    done = [shard for shard in planned.numbers if shard not in leave_out]
    register.commit(job=job, version=name, generation=generation, shards=[CommittedShard(number=each, round=0) for each in done])
    register.leave_lead(job=job, version=name, generation=generation)
    if not leave_out:
        register.finish_version(job=job, version=name)


def append_outcomes(installation: Installation, row: VersionRow, rows: pl.DataFrame) -> None:
    """A bug that the committer must never have: rows that enter without a MERGE."""
    write_deltalake(f"{installation.settings.root}/{row.job}/versions/{row.name}/outcomes", rows, mode="append")


def flip_one_byte(path: Path) -> None:
    """The smallest damage a disk can do."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
