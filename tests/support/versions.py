"""A planned version with real frozen input, and workers that write its logs by hand: right, lacking, or lying."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from batch_assets.core.identity import canonical_json, digest_of_text
from batch_assets.core.records import TO_ANSWER, DeadClass, key_hash
from batch_assets.core.shard_log import Answered, Dead, Entry, Failed, Fence
from batch_assets.core.spec import Decoding, EngineBuild, InputRules, ModelSettings, Recipe, Snapshot, SourceKind, VersionSpec
from batch_assets.stores.frozen_input import frozen_schema
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import Lease, PlannedShard
from tests.support.jobs import answer_schema, settings_in

JOB = "tickets"
ATTEMPT = "a1"
SCHEMA = canonical_json(answer_schema())
CHUNK = 512


@dataclass(frozen=True, slots=True)
class Planned:
    """A version that is active and wanted. `ids` are those to answer, by shard, in the frozen input's order."""

    installation: Installation
    job: str
    version: str
    ids: Mapping[int, Sequence[str]]
    set_aside: Mapping[int, Sequence[str]]


def installation_in(folder: Path, **changes: object) -> Installation:
    """An empty installation."""
    return Installation.open(settings_in(folder, **changes))


def spec_of(*, job: str = JOB, prompt: str = "p", schema: str = SCHEMA) -> VersionSpec:
    """A spec whose digests are right."""
    return VersionSpec(
        job=job,
        recipe=Recipe(
            model_name="stub",
            model_digest="sha256:00",
            model_settings=ModelSettings(),
            prompt_digest=digest_of_text(prompt),
            schema_digest=digest_of_text(schema),
            decoding=Decoding(max_tokens=64),
        ),
        input_rules=InputRules(key="ticket_id", fields=(("body", "body"),), acl="acl"),
        engine_build=EngineBuild(engine="scripted", version="1", guidance="none"),
        snapshot=Snapshot(kind=SourceKind.JSONL, uri="/nowhere.jsonl"),
        prompt=prompt,
        answer_schema=schema,
        model_path="/models/stub",
    )


def frozen_frame(ids: Sequence[str], *, set_aside: Sequence[str] = (), body: Callable[[str], str] = "text of {}".format) -> pl.DataFrame:
    """Frozen input of one shard; set-aside records are `empty`."""
    rows = [
        {
            "record_id": record_id,
            "key_hash": key_hash(record_id),
            "disposition": DeadClass.EMPTY.value if record_id in set(set_aside) else TO_ANSWER,
            "disposition_detail": "the text is blank" if record_id in set(set_aside) else None,
            "surplus": 0,
            "record_digest": f"digest of {record_id}",
            "acl": f"acl of {record_id}",
            "record_class": "internal",
            "segment": "de",
            "labels": None,
            "field_body": None if record_id in set(set_aside) else body(record_id),
        }
        for record_id in [*ids, *set_aside]
    ]
    rows.sort(key=lambda row: (row["key_hash"], row["record_id"]))
    return pl.DataFrame([{"position": position, **row} for position, row in enumerate(rows)], schema=frozen_schema(("body",)))


def plan_by_hand(
    installation: Installation,
    shards: Mapping[int, Sequence[str]],
    *,
    set_aside: Mapping[int, Sequence[str]] | None = None,
    prompt: str = "p",
    want: bool = True,
    body: Callable[[str], str] = "text of {}".format,
    schema: str = SCHEMA,
    adapt: Callable[[VersionSpec], VersionSpec] = lambda spec: spec,
) -> Planned:
    """Register, freeze, activate; the ids of each shard are the caller's, whatever their hashes."""
    aside = set_aside or {}
    spec = adapt(spec_of(prompt=prompt, schema=schema))
    version = installation.register.register_version(spec, kind="full").name
    installation.specs().write(spec.job, version, spec)
    frozen = installation.frozen_input(job=spec.job, version=version, attempt=ATTEMPT)
    planned, ordered = [], {}
    for number, ids in shards.items():
        frame = frozen_frame(ids, set_aside=aside.get(number, ()), body=body)
        ordered[number] = frame.filter(pl.col("disposition") == TO_ANSWER)["record_id"].to_list()
        planned.append(
            PlannedShard(
                number=number,
                rows=frame.height,
                to_answer=len(ids),
                hash_low=frame["key_hash"][0],
                hash_high=frame["key_hash"][-1],
                input_sha256=frozen.write(number, frame),
            )
        )
    count_aside = sum(map(len, aside.values()))
    assert installation.register.activate(
        job=spec.job,
        version=version,
        attempt=ATTEMPT,
        shards=planned,
        records=sum(shard.rows for shard in planned),
        surplus=0,
        set_aside_by_class={"empty": count_aside} if count_aside else {},
    )
    if want:
        installation.register.want(job=spec.job, version=version, shards=None)
    return Planned(installation, spec.job, version, ordered, aside)


def answer_text(record_id: str) -> str:
    """A valid answer that names its record."""
    return canonical_json({"category": "bug", "summary": f"about {record_id}"[:40]})


def answered(record_id: str, *, epoch: int, text: str | None = None, attempt: int = 1, worker: str = "w1") -> Answered:
    """One answer of 10 prompt tokens (4 cached) and 5 output tokens."""
    return Answered(record_id, epoch, attempt, text or answer_text(record_id), 10, 4, 5, worker)


def failed(record_id: str, *, epoch: int, attempt: int = 1) -> Failed:
    """One failed attempt of 7 output tokens."""
    return Failed(record_id, epoch, attempt, DeadClass.SCHEMA.value, "$.category: enum", 7)


def dead(record_id: str, *, epoch: int, attempt: int = 3, dead_class: str = DeadClass.SCHEMA.value) -> Dead:
    """A dead letter of a worker."""
    return Dead(record_id, epoch, attempt, dead_class, "$.category: enum")


def claim(planned: Planned, *, worker: str = "w1") -> Lease:
    """The next shard; there must be one."""
    lease = planned.installation.register.claim(job=planned.job, version=planned.version, worker=worker)
    assert lease is not None
    return lease


def write(planned: Planned, lease: Lease, entries: Iterable[Entry]) -> int:
    """Fence and entries, as the holder of `lease` would put them; returns how many slots the log has then."""
    log = planned.installation.shard_log(job=lease.job, version=lease.version, shard=lease.shard)
    writer = log.writer(epoch=lease.epoch, next_slot=len(log.read(None)))
    writer.put([Fence(lease.epoch, lease.round, lease.worker, 64, lease.previous_end)])
    todo = list(entries)
    for start in range(0, len(todo), CHUNK):
        writer.put(todo[start : start + CHUNK])
    return writer.next_slot


def stage(
    planned: Planned, *, worker: str = "w1", leave_out: Sequence[str] = (), also: Callable[[Lease], Iterable[Entry]] = lambda _: ()
) -> Lease:
    """Claim the next shard, answer all of it but `leave_out`, add what `also` says, stage it."""
    lease = claim(planned, worker=worker)
    ids = [record_id for record_id in planned.ids[lease.shard] if record_id not in set(leave_out)]
    slots = write(planned, lease, [*also(lease), *(answered(record_id, epoch=lease.epoch, worker=worker) for record_id in ids)])
    planned.installation.register.stage(lease, slots=slots, seconds=1.5)
    return lease
