"""`gristmill check`: everything about a job folder that can be refused, offline, before any work; and the defaults that it implies."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from batch_assets.core.answer_schema import worst_case_characters
from batch_assets.core.errors import Problem, ProblemError, RefusedError
from batch_assets.core.identity import digest_of_text, short
from batch_assets.core.prompting import PromptRenderer
from batch_assets.core.spec import InputRules, ModelSettings
from batch_assets.engines.guidance import compile_problem
from batch_assets.engines.tokenizers import tokenizer_for
from batch_assets.stores.job_folders import JOB_FILE, Job, input_rules_of, recipe_of
from batch_assets.stores.models import ModelManifest, model_length, verify_model
from batch_assets.stores.snapshots import source_columns

_T = TypeVar("_T")
CHARACTERS_PER_TOKEN = 4  # of latin text; other scripts have fewer, so this warns late rather than always
GOVERNED_COLUMNS = ("acl", "record_class", "segment")

MEANING = (
    ("input, model, decoding, limits, prompt.md, answer.schema.json", "a new job version"),
    ("checks", "judged again, no model call"),
    ("run, nightly, publish, owners, description", "read at the next run, no new version"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """A job folder that nothing was found against. Token numbers are for this model's tokenizer and chat template."""

    job: str
    source: str
    source_kind: str
    columns: dict[str, str]
    model: str
    model_digest: str
    model_length: int
    parameters: int
    recipe_digest: str
    prompt_digest: str
    schema_digest: str
    prefix_tokens: int
    template_tokens: int
    max_tokens: int
    input_tokens_max: int
    worst_case_characters: int
    defaults: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "defaults": dict(self.defaults), "warnings": list(self.warnings), "a_change_means": dict(MEANING)}

    def as_text(self) -> str:
        """For a terminal."""
        lines = [
            f"{self.job}: nothing to refuse",
            f"input    {self.source} ({self.source_kind}, {len(self.columns)} columns)",
            f"model    {self.model} {short(self.model_digest)}  {self.parameters / 1e9:.3g} B parameters, {self.model_length:,} tokens",
            f"prompt   {short(self.prompt_digest)}   {self.prefix_tokens} of {self.template_tokens} tokens shared by all records",
            f"schema   {short(self.schema_digest)}   at most {self.worst_case_characters:,} characters, {self.max_tokens} tokens",
            f"record   at most {self.input_tokens_max:,} tokens",
            "defaults " + ", ".join(f"{key} {value}" for key, value in self.defaults),
            *(f"a change of {what}: {meaning}" for what, meaning in MEANING),
            *(f"warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)


def check_job(job: Job, *, engine: str) -> CheckReport:
    """Raises RefusedError with every problem found. Reads the source's columns and the model's files; writes and fetches nothing."""
    problems: list[Problem] = []
    file = str(job.folder / JOB_FILE)
    columns = _collected(problems, lambda: source_columns(job.source_uri, job.source_kind))
    if columns is not None:
        problems += column_problems(job, columns)
    guided = compile_problem(job.schema_text, file=str(job.schema_file))
    problems += [guided] if guided is not None else []
    manifest = _collected(problems, lambda: _verified(job, file))
    renderer = None
    if manifest is not None:
        renderer = _collected(problems, lambda: PromptRenderer(job.template, tokenizer_for(engine, job.model_path)))
    room = None
    if renderer is not None:
        room = _collected(problems, lambda: record_room(job, renderer.template_tokens, file))
    if problems:
        raise RefusedError(*problems)
    assert columns is not None, "else there is a problem"
    assert manifest is not None, "else there is a problem"
    assert renderer is not None, "else there is a problem"
    assert room is not None, "else there is a problem"
    return _report(job, columns, manifest, renderer, room)


def column_problems(job: Job, columns: dict[str, str]) -> list[Problem]:
    """Columns that the job names and the source does not have."""
    file = str(job.folder / JOB_FILE)
    rules = input_rules_of(job)
    problems = [
        Problem(
            code="prompt.placeholder_no_column",
            file=str(job.prompt_file) if name == column else file,
            key=f"{{{{ {name} }}}}" if name == column else f"input.fields.{name}",
            what="a placeholder that is no column of the source",
            expected=f"one of {', '.join(sorted(columns))}",
            found=column,
            fix=f"name a column, or rename: `fields: {{{name}: the_column}}` under `input:`",
        )
        for name, column in rules.fields
        if column not in columns
    ]
    for key, column in _named_columns(rules):
        if column not in columns:
            problems.append(
                Problem(
                    code="job_file.column_missing",
                    file=file,
                    key=key,
                    what="the source has no such column",
                    expected=f"one of {', '.join(sorted(columns))}",
                    found=column,
                    fix=f"name a column of {job.source_uri}",
                )
            )
    return problems


def record_room(job: Job, template_tokens: int, file: str) -> int:
    """Tokens that a record's own part may have: `limits.input_tokens_max`, else what the model's length leaves. Raises RefusedError."""
    recipe = recipe_of(job)
    longest, length = model_length(job.model_path, ModelSettings()), model_length(job.model_path, recipe.model_settings)
    room = length - recipe.decoding.max_tokens - template_tokens
    asked = job.job_file.limits.input_tokens_max
    if length > longest:
        raise _room_problem(
            "model_length", file, "model.max_model_len", expected=f"at most {longest:,}, the model's own", found=f"{length:,}"
        )
    if room < 1:
        found = f"{length:,} - max_tokens {recipe.decoding.max_tokens:,} - prompt {template_tokens:,} = {room:,}"
        raise _room_problem("no_room", file, "decoding.max_tokens", expected="room for a record within the model's length", found=found)
    if asked is not None and asked > room:
        found = f"{asked:,}"
        raise _room_problem(
            "input_tokens_max",
            file,
            "limits.input_tokens_max",
            expected=f"at most {room:,} (model length - max_tokens - prompt)",
            found=found,
        )
    return asked or room


def _room_problem(code: str, file: str, key: str, *, expected: str, found: str) -> RefusedError:
    return RefusedError(
        Problem(
            code=f"job_file.{code}",
            file=file,
            key=key,
            what="prompt, record and answer do not fit the model together",
            expected=expected,
            found=found,
            fix="lower this number, shorten the prompt, or choose a model with a longer context",
        )
    )


def _verified(job: Job, file: str) -> ModelManifest:
    try:
        return verify_model(job.model_path, job.job_file.model.digest)
    except ProblemError as error:
        # For the reader of the job file the line to change is in the job file.
        raise RefusedError(*(_in_job_file(problem, file) for problem in error.problems)) from error


def _in_job_file(problem: Problem, file: str) -> Problem:
    place = f"{problem.what} ({problem.file})" if problem.file else problem.what
    return Problem(
        code=problem.code, file=file, key=problem.key, what=place, expected=problem.expected, found=problem.found, fix=problem.fix
    )


def _collected(problems: list[Problem], read: Callable[[], _T]) -> _T | None:
    try:
        return read()
    except ProblemError as error:
        problems += error.problems
        return None


def _named_columns(rules: InputRules) -> Iterator[tuple[str, str]]:
    yield "input.key", rules.key
    for name in GOVERNED_COLUMNS:
        column = getattr(rules, name)
        if column is not None:
            yield f"input.{name}", column
    for answer_field, column in rules.labels:
        yield f"input.labels.{answer_field}", column


def _report(job: Job, columns: dict[str, str], manifest: ModelManifest, renderer: PromptRenderer, room: int) -> CheckReport:
    recipe = recipe_of(job)
    worst = worst_case_characters(job.schema_text)
    assert worst is not None, "a loaded job has a schema that was accepted"
    return CheckReport(
        job=job.name,
        source=job.source_uri,
        source_kind=job.source_kind.value,
        columns=columns,
        model=recipe.model_name,
        model_digest=manifest.digest,
        model_length=model_length(job.model_path, recipe.model_settings),
        parameters=manifest.parameters,
        recipe_digest=recipe.digest,
        prompt_digest=digest_of_text(job.prompt_text),
        schema_digest=digest_of_text(job.schema_text),
        prefix_tokens=len(renderer.prefix_tokens),
        template_tokens=renderer.template_tokens,
        max_tokens=recipe.decoding.max_tokens,
        input_tokens_max=room,
        worst_case_characters=worst,
        defaults=tuple(_defaults(job)),
        warnings=(*job.warnings, *renderer.warnings, *_warnings(job, columns, worst)),
    )


def _defaults(job: Job) -> Iterator[tuple[str, str]]:
    """Values in force that the file does not need to say."""
    settings = job.job_file
    yield "decoding.temperature", f"{settings.decoding.temperature:g}"
    yield "input.duplicates", settings.input.duplicates.value
    yield "limits.attempts_max", str(settings.limits.attempts_max)
    yield "limits.answer_timeout", f"{settings.limits.answer_timeout_s:g}s"
    yield "run.workers_max", str(settings.run.workers_max)
    yield "run.shard_records", str(settings.run.shard_records)
    yield "run.auto_records_max", str(settings.run.auto_records_max)
    yield "checks.dead_letters.max", f"{settings.checks.dead_letters.max:.4g}"
    yield "publish.alias", job.alias
    yield "publish.keep", str(settings.publish.keep)
    yield "publish.auto", str(settings.publish.auto).lower()


def _warnings(job: Job, columns: dict[str, str], worst: int) -> Iterator[str]:
    for name in GOVERNED_COLUMNS:
        if getattr(job.job_file.input, name) is None and name in columns:
            yield f"the source has a column `{name}` that the job does not use: say `{name}: {name}` under `input:`, or `{name}: none`"
    max_tokens = job.job_file.decoding.max_tokens
    if worst > max_tokens * CHARACTERS_PER_TOKEN:
        yield (
            f"the longest answer has {worst:,} characters, about {worst // CHARACTERS_PER_TOKEN:,} tokens of latin text; "
            f"max_tokens {max_tokens:,} would cut it: lower maxLength and maxItems, or raise max_tokens"
        )
