"""Builders for the register's tests: a spec, a planned version, a clock that ticks."""

from collections.abc import Sequence
from itertools import count

from batch_assets.core.leasing import HoldReason
from batch_assets.core.spec import Decoding, EngineBuild, InputRules, ModelSettings, PinnedFile, Recipe, Snapshot, SourceKind, VersionSpec
from batch_assets.stores.register import PlannedShard, Register

JOB = "ticket_summaries"
BUILD = EngineBuild(engine="scripted", version="1", guidance="none")


class TickingClock:
    """A `now` for rows: each reading is one second later, so what was written first reads as earlier."""

    def __init__(self) -> None:
        self._readings = count()

    def __call__(self) -> str:
        minutes, seconds = divmod(next(self._readings), 60)
        return f"2026-01-01T{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}+00:00"


def spec(
    *, job: str = JOB, prompt: str = "p", snapshot: str = "a", pilot_records: int | None = None, base: str | None = None
) -> VersionSpec:
    """A spec that is valid for the register; `prompt` and `snapshot` stand for their contents."""
    return VersionSpec(
        job=job,
        recipe=Recipe(
            model_name="m",
            model_digest="sha256:00",
            model_settings=ModelSettings(),
            prompt_digest=f"sha256:{prompt}",
            schema_digest="sha256:11",
            decoding=Decoding(max_tokens=8),
        ),
        input_rules=InputRules(key="id", fields=(("body", "body"),)),
        engine_build=BUILD,
        snapshot=Snapshot(
            kind=SourceKind.JSONL, uri="/data/tickets.jsonl", files=(PinnedFile(name="tickets.jsonl", size_bytes=1, sha256=snapshot),)
        ),
        prompt=prompt,
        answer_schema="{}",
        model_path="/models/m",
        base_release=base,
        pilot_records=pilot_records,
    )


def planned_shards(count_: int, *, to_answer: int = 10, input_sha256: str = "sha256:input") -> list[PlannedShard]:
    """Shards 1 … n of ten rows each; `to_answer` of them for workers."""
    return [
        PlannedShard(
            number=number, rows=10, to_answer=to_answer, hash_low=number * 100, hash_high=number * 100 + 99, input_sha256=input_sha256
        )
        for number in range(1, count_ + 1)
    ]


def activate(
    register: Register, version: str, shards: Sequence[PlannedShard], *, job: str = JOB, attempt: str = "a1", hold: HoldReason | None = None
) -> bool:
    """Activates with counts that add up: what is not to be answered is set aside as `empty`."""
    rows, to_answer = sum(shard.rows for shard in shards), sum(shard.to_answer for shard in shards)
    set_aside = {"empty": rows - to_answer} if rows > to_answer else {}
    return register.activate(
        job=job, version=version, attempt=attempt, shards=shards, records=rows, surplus=0, set_aside_by_class=set_aside, hold=hold
    )


def planned(
    register: Register, *, job: str = JOB, shards: int = 3, prompt: str = "p", want: bool = True, hold: HoldReason | None = None
) -> str:
    """The name of a version of that many shards, active (unless `hold`) and wanted."""
    version = register.register_version(spec(job=job, prompt=prompt), kind="full").name
    assert activate(register, version, planned_shards(shards), job=job, hold=hold)
    if want:
        register.want(job=job, version=version, shards=None)
    return version
