"""`gristmill try`: render and answer the first few records of a source on the screen. Plans, registers and stores nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batch_assets.core.answers import AnswerChecker, CheckedAnswer
from batch_assets.core.errors import RecordRejectedError, RefusedError
from batch_assets.core.ports import Completion, Engine, EngineConfig, Request
from batch_assets.core.prompting import PromptRenderer, RenderError
from batch_assets.engines.build import open_engine
from batch_assets.engines.tokenizers import tokenizer_for
from batch_assets.flows.check import column_problems
from batch_assets.settings import Settings
from batch_assets.stores.job_folders import Job, input_rules_of, recipe_of
from batch_assets.stores.models import verify_model
from batch_assets.stores.snapshots import pin_snapshot, read_batches, source_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One record: its id, its answer or why there is none, and its tokens."""

    record_id: str
    answer: str | None
    problem: str | None
    tokens_prompt: int = 0
    tokens_output: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def try_job(job: Job, *, settings: Settings, records_max: int) -> list[Tried]:
    """The first records of the source, in its order. Raises RefusedError, UnfitEnvironmentError, EngineFailedError."""
    problems = column_problems(job, source_columns(job.source_uri, job.source_kind))
    if problems:
        raise RefusedError(*problems)
    recipe = recipe_of(job)
    verify_model(job.model_path, recipe.model_digest)
    renderer = PromptRenderer(job.template, tokenizer_for(settings.engine, job.model_path))
    records = list(_first_records(job, records_max))
    engine = open_engine(settings.engine, script=settings.engine_script)
    engine.load(
        EngineConfig(
            model_folder=job.model_path,
            model_settings=recipe.model_settings,
            decoding=recipe.decoding,
            answer_schema=job.schema_text,
            speed=tuple(job.job_file.run.knobs.model_dump(exclude_none=True).items()),
        )
    )
    try:
        return _answers(engine, renderer, AnswerChecker(job.schema_text), records)
    finally:
        engine.close()


def _first_records(job: Job, records_max: int) -> Iterator[tuple[str, Mapping[str, str | None]]]:
    """(id, field texts); a row without an id is named by its place."""
    rules = input_rules_of(job)
    left = records_max
    for batch in read_batches(pin_snapshot(job.source_uri, job.source_kind), rules.text_columns):
        for number, row in enumerate(batch.frame.head(left).iter_rows(named=True)):
            left -= 1
            yield row[rules.key] or f"row {batch.first_row + number}", {name: row[column] for name, column in rules.fields}
        if left <= 0:
            return


def _answers(
    engine: Engine, renderer: PromptRenderer, checker: AnswerChecker, records: list[tuple[str, Mapping[str, str | None]]]
) -> list[Tried]:
    tried: dict[int, Tried] = {}
    for number, (record_id, fields) in enumerate(records):
        try:
            tokens = renderer.render({name: text for name, text in fields.items() if text is not None})
            engine.submit(Request(request_id=f"0:0:1:{number}", token_ids=tokens))
        except (RenderError, RecordRejectedError) as refused:
            tried[number] = Tried(record_id=record_id, answer=None, problem=str(refused))
    while len(tried) < len(records):
        for completion in engine.poll():
            number = int(completion.request_id.rpartition(":")[2])
            tried[number] = _tried(records[number][0], completion, checker)
    return [tried[number] for number in sorted(tried)]


def _tried(record_id: str, completion: Completion, checker: AnswerChecker) -> Tried:
    checked = checker.check(completion.text, completion.finish_reason)
    valid = isinstance(checked, CheckedAnswer)
    return Tried(
        record_id=record_id,
        answer=checked.json_text if isinstance(checked, CheckedAnswer) else None,
        problem=None if valid else f"{checked.dead_class}: {checked.error}",
        tokens_prompt=completion.tokens_prompt,
        tokens_output=completion.tokens_output,
    )
