"""What job.yaml may say, as strict values: INTERFACE section 1. Text from people becomes these models or a list of `Problem`s.

No files here: stores/job_folders.py reads them. Unit strings become numbers whose names end in the unit; a bare number where a unit belongs
is refused with the line to write. Nothing is guessed, converted or ignored.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, LiteralString, cast, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from batch_assets.core.errors import Problem, RefusedError
from batch_assets.core.spec import DuplicatePolicy

NONE = "none"  # `acl: none`: there is a column of that name, or none, and this job means none
NAME = r"[a-z][a-z0-9_]{0,29}"
OWNER = r"team:[a-z0-9_-]+|[^\s@,]+@[^\s@,]+\.[^\s@,]+"
DIGEST = r"sha256:[0-9a-f]{64}"
FOUND_CHARACTERS_MAX = 60
REQUIRED_SECTIONS = ("input", "model", "decoding")

EXAMPLES = {
    "input.table": "./tickets.parquet",
    "input.key": "ticket_id",
    "model.path": "${MODELS}/smollm2-135m-instruct",
    "decoding.max_tokens": "220",
    "nightly.window": '"01:00-07:00 Europe/Berlin"',
    "checks.drift.field": "category",
    "checks.drift.change_max": "10 points",
    "checks.graded.sample": "400",
    "checks.graded.min": "85%",
}
WORDS_OF_TYPE = {
    "string_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a block of keys",
    "model_type": "a block of keys",
}


def name_problem(name: str) -> str | None:
    """Why a job or alias cannot be called so; None when it can. Names occur in paths, role names, labels and predicates."""
    if not re.fullmatch(NAME, name):
        return "a name starts with a letter and has at most 30 of a-z, 0-9 and _"
    if "__" in name or name.endswith("_"):
        return "a name has no double and no trailing underscore: names such as x__pilot are ours"
    return None


def _matching(pattern: str, *, expected: str, fix: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise _refused("alphabet", f"not {expected}", expected=expected, fix=fix)
        return text

    return AfterValidator(check)


def _named(text: str) -> str:
    problem = name_problem(text)
    if problem is not None:
        raise _refused("name", problem, expected="for example ticket_summaries", fix="choose another name")
    return text


def _refused(code: LiteralString, what: str, *, expected: str, fix: str) -> PydanticCustomError:
    # The words go into the context: in the message, pydantic would take braces for placeholders.
    return PydanticCustomError(code, "refused", {"what": what, "expected": expected, "fix": fix})


def _unit(units: Mapping[str, float], *, space: str, example: str) -> tuple[BeforeValidator, WithJsonSchema]:
    """Text of a number and one of `units` (word -> factor); the value is number * factor."""
    pattern = rf"([0-9]+(?:\.[0-9]+)?){space}({'|'.join(map(re.escape, units))})"
    expected = " or ".join(f"N{'' if space == '' else ' '}{unit}" for unit in units)

    def read(value: Any) -> float:
        found = re.fullmatch(pattern, value) if isinstance(value, str) else None
        if found:
            return float(found[1]) * units[found[2]]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            written = f"{value}{'' if space == '' else ' '}{example.lstrip('0123456789. ')}"
            raise _refused("bare_number", "a bare number: it does not say in which unit", expected=expected, fix=f"write  {written}")
        raise _refused("unit", "a number with its unit belongs here", expected=expected, fix=f"write  {example}")

    return BeforeValidator(read), WithJsonSchema({"type": "string", "pattern": f"^{pattern}$", "examples": [example]})


Name = Annotated[str, AfterValidator(_named), WithJsonSchema({"type": "string", "pattern": f"^{NAME}$"})]
Owner = Annotated[str, _matching(OWNER, expected="team:name or an e-mail address", fix="write  team:support-data")]
Digest = Annotated[str, _matching(DIGEST, expected="sha256: and 64 hex digits", fix="let `gristmill models pin JOB` write this line")]
Duration = Annotated[float, *_unit({"s": 1, "m": 60, "h": 3600, "d": 86400}, space="", example="20h"), Field(gt=0)]
Share = Annotated[float, *_unit({"%": 0.01}, space="", example="0.5%"), Field(ge=0, le=1)]
Points = Annotated[float, *_unit({"points": 0.01}, space=" ", example="10 points"), Field(gt=0, le=1)]
Money = Annotated[float, *_unit({"USD": 1}, space=" ", example="50 USD"), Field(gt=0)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]
AssetKeyPart = Annotated[
    str, _matching(r"[A-Za-z0-9_-]+", expected="letters, digits, _ and -", fix="write the asset's key as Dagster shows it")
]


class Part(BaseModel):
    """Strict: no unknown key, no conversion, no change afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=False)


class InputPart(Part):
    """Which records go in and what is taken from them; identity."""

    table: Text
    key: Text
    fields: dict[str, Text] = {}  # only to rename: {placeholder: source column}
    acl: Text | None = None
    record_class: Text | None = None
    segment: Text | None = None
    labels: dict[str, Text] = {}  # {answer field: source column}
    duplicates: Annotated[DuplicatePolicy, Field(strict=False)] = DuplicatePolicy.REFUSE
    asset: Annotated[list[AssetKeyPart], Field(min_length=1)] | None = None  # the customer's own asset, for lineage


class ModelPart(Part):
    """The model and what shapes it; identity. `path` is a location, `digest` says what is there."""

    path: Text
    digest: Digest
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantization: Text | None = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1


class DecodingPart(Part):
    """Identity."""

    max_tokens: Annotated[int, Field(ge=1, le=100_000)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0


class LimitsPart(Part):
    """Identity."""

    input_tokens_max: Annotated[int, Field(ge=1)] | None = None
    attempts_max: Annotated[int, Field(ge=1, le=10)] = 3
    answer_timeout_s: Duration = Field(default=120.0, alias="answer_timeout")


class EnginePart(Part):
    """Speed knobs: none of them changes an answer. What does stands under `model:`."""

    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = None
    kv_cache_gb: Annotated[float, Field(gt=0)] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    enforce_eager: bool | None = None
    engine_core: Literal["in_process", "own_process"] | None = None


class RunPart(Part):
    """How it is run; changes no answer."""

    deadline_s: Duration | None = Field(default=None, alias="deadline")
    budget_usd: Money | None = Field(default=None, alias="budget")
    workers_max: Annotated[int, Field(ge=1, le=10_000)] = 1
    auto_records_max: Annotated[int, Field(ge=0)] = 1_000_000
    shard_records: Annotated[int, Field(ge=1, le=100_000)] = 5000
    knobs: EnginePart = Field(default=EnginePart(), alias="engine")

    @property
    def engine(self) -> dict[str, object]:
        """The speed knobs that the file sets."""
        return self.knobs.model_dump(exclude_none=True)


def _window(text: str) -> str:
    clock = r"([01][0-9]|2[0-3]):[0-5][0-9]"
    if not re.fullmatch(rf"{clock}-{clock} [A-Za-z0-9_+/-]+", text) or text[:5] == text[6:11]:
        raise _refused(
            "window",
            "a window is two clock times and a time zone",
            expected="HH:MM-HH:MM Zone",
            fix='write  "01:00-07:00 Europe/Berlin"',
        )
    return text


class NightlyPart(Part):
    """When the nightly may run. Absent = no nightly sensor."""

    window: Annotated[str, AfterValidator(_window)]

    @property
    def zone(self) -> str:
        """`Europe/Berlin`."""
        return self.window.partition(" ")[2]


class DeadLettersPart(Part):
    """Shares are fractions of all records (or of one segment's)."""

    max: Share = 0.005
    per_segment_max: Share | None = None
    severity: Literal["block", "warn"] = "block"


class DriftPart(Part):
    """How far the shares of an answer field's values may move, in points of 0.01."""

    field: Text
    change_max: Points
    severity: Literal["block", "warn"] = "block"


class GradedPart(Part):
    """A graded sample; `min` is a fraction, gated on the lower bound of its interval."""

    sample: Annotated[int, Field(ge=1, le=100_000)]
    min: Share
    severity: Literal["block", "warn"] = "block"


class ChecksPart(Part):
    """Limits of the gate. Coverage, one recipe, schema and ACL are exact and no settings."""

    dead_letters: DeadLettersPart = DeadLettersPart()
    drift: DriftPart | None = None
    graded: GradedPart | None = None
    extra: list[AssetKeyPart] = []  # names of the user's own Dagster asset checks that join the verdict


class PublishPart(Part):
    """What readers get. `alias` defaults to the job's name."""

    alias: Name | None = None
    keep: Annotated[int, Field(ge=1, le=1000)] = 5
    auto: bool = True


class JobFile(Part):
    """A whole job.yaml."""

    description: Annotated[str, Field(max_length=10_000)] | None = None
    label: Text | None = None
    owners: list[Owner] = []
    prompt: Text = "prompt.md"
    answer: Text = "answer.schema.json"
    input: InputPart
    model: ModelPart
    decoding: DecodingPart
    limits: LimitsPart = LimitsPart()
    run: RunPart = RunPart()
    nightly: NightlyPart | None = None
    checks: ChecksPart = ChecksPart()
    publish: PublishPart = PublishPart()


def parse_job_file(content: Mapping[str, Any], *, file: str) -> JobFile:
    """Raises RefusedError with every problem. `file` is only named in problems."""
    filled: dict[str, Any] = {**content, **{section: content.get(section) or {} for section in REQUIRED_SECTIONS}}
    try:
        return JobFile.model_validate(filled)
    except ValidationError as error:
        raise RefusedError(*(_problem(details, file) for details in error.errors(include_url=False))) from error


def problems_of_unmade_checks(job_file: JobFile, *, file: str) -> list[Problem]:
    """Checks that would have to stop a release and that this version cannot make: accepted in silence, they would be believed in."""
    checks = job_file.checks
    unmade = {
        "checks.drift": checks.drift is not None and checks.drift.severity == "block",
        "checks.graded": checks.graded is not None and checks.graded.severity == "block",
        "checks.extra": bool(checks.extra),
    }
    problems = [
        Problem(
            code="job_file.check_not_made",
            file=file,
            key=key,
            what="this version cannot make this check, so it would never stop a release",
            expected="coverage, one recipe, schema, acl (always made) and checks.dead_letters",
            found=key,
            fix=f"take `{key}` out until it is supported; `publish: {{auto: false}}` lets a person look before readers do",
        )
        for key, asked in unmade.items()
        if asked
    ]
    if checks.dead_letters.per_segment_max is not None and job_file.input.segment in (None, NONE):
        problems.append(
            Problem(
                code="job_file.segment_missing",
                file=file,
                key="checks.dead_letters.per_segment_max",
                what="a limit within each segment, and the job has no segments: it would never stop a release",
                expected="input.segment",
                found="no segment",
                fix="name a column, `segment: market` under `input:`, or take `per_segment_max` out",
            )
        )
    return problems


def keys_not_acted_on(job_file: JobFile) -> tuple[str, ...]:
    """Keys that are read and do nothing yet; none of them decides what readers get."""
    checks = job_file.checks
    idle = {
        "run.deadline": job_file.run.deadline_s is not None,
        "run.budget": job_file.run.budget_usd is not None,
        "nightly": job_file.nightly is not None,
        "checks.drift": checks.drift is not None and checks.drift.severity == "warn",
        "checks.graded": checks.graded is not None and checks.graded.severity == "warn",
        "publish.keep": "keep" in job_file.publish.model_fields_set,
    }
    return tuple(key for key, said in idle.items() if said)


def job_file_schema() -> dict[str, Any]:
    """JSON Schema of job.yaml, for editors."""
    generated: dict[str, Any] = _without_noise(JobFile.model_json_schema(by_alias=True))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **generated, "title": "Gristmill job file"}


def _without_noise(value: Any, *, names: bool = False) -> Any:
    """No titles (they repeat the key) and no defaults (ours are numbers where the file has unit strings). `names`: keys are names here."""
    if isinstance(value, list):
        return [_without_noise(inner) for inner in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    kept = {name: inner for name, inner in cast("dict[str, Any]", value).items() if names or name not in ("title", "default")}
    return {name: _without_noise(inner, names=name in ("properties", "$defs") and not names) for name, inner in kept.items()}


def _problem(details: ErrorDetails, file: str) -> Problem:
    place = tuple(str(part) for part in details["loc"])
    key = ".".join(place)
    context: dict[str, Any] = details.get("ctx") or {}
    match details["type"]:
        case "missing":
            return _missing(key, place, file)
        case "extra_forbidden":
            return _unknown(key, place, file)
        case code if "fix" in context:
            what, expected, fix = (str(context[name]) for name in ("what", "expected", "fix"))
            return Problem(
                code=f"job_file.{code}", file=file, key=key, what=what, expected=expected, found=_shown(details["input"]), fix=fix
            )
        case code:
            expected = _expected(code, context, details["msg"])
            return Problem(
                code=f"job_file.{'type' if code in WORDS_OF_TYPE else 'value'}",
                file=file,
                key=key,
                what="not a value that this key may have",
                expected=expected,
                found=_shown(details["input"]),
                fix=f"write {expected}" + (f", for example  {place[-1]}: {EXAMPLES[key]}" if key in EXAMPLES else ""),
            )


def _missing(key: str, place: tuple[str, ...], file: str) -> Problem:
    leaf, under = place[-1], ".".join(place[:-1])
    fix = f"add `{leaf}: {EXAMPLES.get(key, '…')}` under `{under}:`" if under else f"add `{leaf}:`"
    if key == "model.digest":
        fix = "run `gristmill models pin JOB`: it writes this line"
    field = _part_at(place[:-1]).model_fields.get(leaf)
    expected = "an integer" if field is not None and field.annotation is int else "a value"
    return Problem(code=f"job_file.{leaf}_missing", file=file, key=key, what=f"`{key}` is missing", expected=expected, found=None, fix=fix)


def _unknown(key: str, place: tuple[str, ...], file: str) -> Problem:
    known = _keys_of(_part_at(place[:-1]))
    close = difflib.get_close_matches(place[-1], known, n=1)
    elsewhere = [section for section, keys in _keys_by_section().items() if place[-1] in keys and section != ".".join(place[:-1])]
    fix = f"did you mean `{close[0]}`?" if close else "take it out"
    if not close and elsewhere:
        fix = f"it belongs under `{elsewhere[0]}:`" if elsewhere[0] else "it belongs at the left margin"
    return Problem(
        code="job_file.unknown_key",
        file=file,
        key=key,
        what=f"unknown key `{place[-1]}`",
        expected=f"one of {', '.join(known)}",
        found=place[-1],
        fix=fix,
    )


def _part_at(place: tuple[str, ...]) -> type[Part]:
    """The model that describes the block at `place`; the whole file when there is none."""
    part: type[Part] = JobFile
    for name in place:
        field = next((field for field_name, field in part.model_fields.items() if name in (field_name, field.alias)), None)
        candidates = () if field is None else (field.annotation, *get_args(field.annotation))
        part = next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, Part)), part)
    return part


def _keys_of(part: type[Part]) -> list[str]:
    return [field.alias or name for name, field in part.model_fields.items()]


def _keys_by_section() -> dict[str, list[str]]:
    sections = {name: _part_at((name,)) for name in _keys_of(JobFile)}
    return {"": _keys_of(JobFile), **{name: _keys_of(part) for name, part in sections.items() if part is not JobFile}}


def _expected(code: str, context: Mapping[str, Any], message: str) -> str:
    bounds: dict[str, Callable[[], str]] = {
        "greater_than": lambda: f"more than {context['gt']:g}",
        "greater_than_equal": lambda: f"at least {context['ge']:g}",
        "less_than": lambda: f"less than {context['lt']:g}",
        "less_than_equal": lambda: f"at most {context['le']:g}",
        "literal_error": lambda: str(context["expected"]),
        "enum": lambda: str(context["expected"]),
        "string_too_short": lambda: "text that is not empty",
        "string_too_long": lambda: f"at most {context['max_length']} characters",
        "too_short": lambda: "at least one entry",
    }
    return WORDS_OF_TYPE.get(code) or (bounds[code]() if code in bounds else message)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= FOUND_CHARACTERS_MAX else text[: FOUND_CHARACTERS_MAX - 1] + "…"
