"""Job folders as people write them: job.yaml, prompt.md, answer.schema.json, read whole or refused with every problem found.

Only planning and `check` read them; a registered version is read from stores/specs.py.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import yaml

from batch_assets.core.answer_schema import answer_fields, canonical_schema, check_schema
from batch_assets.core.errors import Problem, RefusedError
from batch_assets.core.identity import digest_of_text
from batch_assets.core.job_file import NONE, JobFile, keys_not_acted_on, name_problem, parse_job_file, problems_of_unmade_checks
from batch_assets.core.prompting import PromptTemplate, parse_prompt
from batch_assets.core.spec import Decoding, InputRules, ModelSettings, Recipe, SourceKind
from batch_assets.stores.snapshots import kind_of

_T = TypeVar("_T")
JOB_FILE = "job.yaml"
FILE_BYTES_MAX = 1 << 20  # a job file, prompt or schema is a few kilobytes
VARIABLE = re.compile(r"\$\{([^}]*)\}")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LOCATIONS = ("input.table", "model.path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job folder, read. `source_uri` and `model_path` are resolved locations and part of no digest."""

    name: str
    folder: Path
    job_file: JobFile
    prompt_text: str
    template: PromptTemplate
    schema_text: str  # no white space, keys in the order written
    source_uri: str
    source_kind: SourceKind
    model_path: str
    warnings: tuple[str, ...] = ()

    @property
    def alias(self) -> str:
        """What readers ask for."""
        return self.job_file.publish.alias or self.name

    @property
    def prompt_file(self) -> Path:
        """Where the prompt was read from."""
        return self.folder / self.job_file.prompt

    @property
    def schema_file(self) -> Path:
        """Where the answer schema was read from."""
        return self.folder / self.job_file.answer


def find_jobs(folder: Path) -> list[Path]:
    """The job.yaml of every job folder directly under `folder`, sorted by name; none when there is no such folder."""
    return sorted(folder.glob(f"*/{JOB_FILE}"))


def job_path(job_yaml: str | Path) -> Path:
    """The job file as an absolute path in the folder as it was given: a job's name and all of its files come from that folder.

    No symlink is followed. Of a job.yaml that is a link to another job's, the name would be the other's and the prompt this one's.
    """
    return Path(os.path.abspath(job_yaml))  # noqa: PTH100  `resolve` follows links, `absolute` keeps `..`


def load_job(job_yaml: Path, *, environment: Mapping[str, str]) -> Job:
    """Read one job folder. Raises RefusedError with all problems of its three files."""
    job_yaml = Path(job_yaml)
    folder = job_path(job_yaml).parent
    content = read_job_yaml(job_yaml)
    problems = [*_problems_of_name(folder.name, job_yaml), *_stray_variables(content, job_yaml)]
    locations, of_locations = resolved_locations(content, environment=environment, file=str(job_yaml))
    job_file = _collected(problems, lambda: parse_job_file(content, file=str(job_yaml)))
    names = job_file or _file_names(content)
    prompt_text = _collected(problems, lambda: _read_text(job_yaml.parent / names.prompt))
    schema_text = _collected(problems, lambda: _read_text(job_yaml.parent / names.answer))
    template = None
    if prompt_text is not None:
        template = _collected(problems, lambda: parse_prompt(prompt_text, file=str(job_yaml.parent / names.prompt)))
    if schema_text is not None:
        of_schema = check_schema(schema_text, file=str(job_yaml.parent / names.answer))
        problems += of_schema
        schema_text = None if of_schema else canonical_schema(schema_text)
    problems += of_locations
    if job_file is not None:
        problems += problems_of_unmade_checks(job_file, file=str(job_yaml))
    if job_file is not None and template is not None:
        problems += _problems_between(job_file, template, schema_text, str(job_yaml))
    if problems:
        raise RefusedError(*problems)
    assert job_file is not None, "else there is a problem"
    assert template is not None, "else there is a problem"
    assert prompt_text is not None, "else there is a problem"
    assert schema_text is not None, "else there is a problem"
    source_uri = _located(locations["input.table"], folder)
    return Job(
        name=folder.name,
        folder=folder,
        job_file=job_file,
        prompt_text=prompt_text,
        template=template,
        schema_text=schema_text,
        source_uri=source_uri,
        source_kind=kind_of(source_uri),
        model_path=_located(locations["model.path"], folder),
        warnings=tuple(f"`{key}` is not acted on yet: it changes nothing" for key in keys_not_acted_on(job_file)),
    )


def recipe_of(job: Job) -> Recipe:
    """Everything that decides an answer besides the record."""
    model, decoding = job.job_file.model, job.job_file.decoding
    return Recipe(
        model_name=Path(job.model_path).name,
        model_digest=model.digest,
        model_settings=ModelSettings(
            dtype=model.dtype,
            quantization=model.quantization,
            max_model_len=model.max_model_len,
            tensor_parallel=model.tensor_parallel,
        ),
        prompt_digest=digest_of_text(job.prompt_text),
        schema_digest=digest_of_text(job.schema_text),
        decoding=Decoding(
            max_tokens=decoding.max_tokens,
            temperature=float(decoding.temperature),
            top_p=float(decoding.top_p),
            seed=decoding.seed,
        ),
    )


def input_rules_of(job: Job) -> InputRules:
    """Which records go in; fields follow from the placeholders, `input.fields` only renames."""
    given, limits = job.job_file.input, job.job_file.limits
    return InputRules(
        key=given.key,
        fields=tuple(sorted((name, given.fields.get(name, name)) for name in job.template.fields)),
        acl=_meant(given.acl),
        record_class=_meant(given.record_class),
        segment=_meant(given.segment),
        labels=tuple(sorted(given.labels.items())),
        duplicates=given.duplicates,
        input_tokens_max=limits.input_tokens_max,
        attempts_max=limits.attempts_max,
        answer_timeout_s=float(limits.answer_timeout_s),
    )


def read_job_yaml(job_yaml: Path) -> dict[str, Any]:
    """The file as plain values. Raises RefusedError for broken YAML, a key that occurs twice, anchors, and what is no block of keys."""
    text = _read_text(job_yaml)
    try:
        content = yaml.load(text, Loader=_PlainLoader)  # noqa: S506  a SafeLoader, made stricter
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise _unreadable(job_yaml, "yaml", error.problem or "broken YAML", line=mark.line + 1 if mark else None) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _unreadable(job_yaml, "yaml", "broken YAML") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise _unreadable(job_yaml, "not_a_mapping", "not a block of keys")
    return content


def resolved_locations(content: Mapping[str, Any], *, environment: Mapping[str, str], file: str) -> tuple[dict[str, str], list[Problem]]:
    """`input.table` and `model.path` with their `${VAR}` filled in, and a problem for each variable that is not set."""
    locations: dict[str, str] = {}
    problems: list[Problem] = []
    for key in LOCATIONS:
        section, leaf = key.split(".")
        block = content.get(section)
        text = block.get(leaf) if isinstance(block, dict) else None
        if isinstance(text, str):
            problems += _unset_variables(text, key, environment, file)
            locations[key] = VARIABLE.sub(lambda found: environment.get(found[1], ""), text)
    return locations, problems


def model_folder_of(job_yaml: Path, *, environment: Mapping[str, str]) -> Path:
    """The model folder that a job file names, even when nothing else in it is complete (`models pin` writes the digest)."""
    locations, problems = resolved_locations(read_job_yaml(job_yaml), environment=environment, file=str(job_yaml))
    problems = [problem for problem in problems if problem.key == "model.path"]
    if "model.path" not in locations:
        problems.append(
            Problem(
                code="job_file.path_missing",
                file=str(job_yaml),
                key="model.path",
                what="`model.path` is missing",
                expected="the model's folder",
                found=None,
                fix="add `path: ${MODELS}/smollm2-135m-instruct` under `model:`",
            )
        )
    if problems:
        raise RefusedError(*problems)
    return Path(_located(locations["model.path"], job_path(job_yaml).parent))


class _PlainLoader(yaml.SafeLoader):
    """YAML's plain core: true and false, decimal numbers, text. No `no` for false, no 1:30 for 90, no dates, anchors or repeated keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent) or getattr(self.peek_event(), "anchor", None):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(None, None, "anchors and aliases are not used in job files", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002  PyYAML's signature
        seen: set[str] = set()
        for name, _ in node.value:
            if name.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key `{name.value}` occurs twice", name.start_mark)
            seen.add(name.value)
        return super().construct_mapping(node, deep)


_PlainLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"(?:true|false)\Z", "tf"),
    ("null", r"(?:null|~|)\Z", ["n", "~", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)\Z", "-+0123456789"),
    ("float", r"[-+]?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+][0-9]+)?\Z", "-+0123456789"),
):
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


@dataclass(frozen=True, slots=True)
class _FileNames:
    prompt: str
    answer: str


def _file_names(content: Mapping[str, Any]) -> _FileNames:
    """Where prompt and schema are, also when the job file has other problems: all are told at once."""
    prompt, answer = content.get("prompt"), content.get("answer")
    return _FileNames(prompt if isinstance(prompt, str) else "prompt.md", answer if isinstance(answer, str) else "answer.schema.json")


def _collected(problems: list[Problem], read: Callable[[], _T]) -> _T | None:
    """What `read` gives; None when it refuses, its problems kept."""
    try:
        return read()
    except RefusedError as refused:
        problems += refused.problems
        return None


def _read_text(path: Path) -> str:
    """UTF-8 without a byte order mark; line ends as Python reads text."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise _unreadable(path, "too_long", f"longer than {FILE_BYTES_MAX:,} bytes")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(path, "not_utf8", f"not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise _unreadable(
            path, "missing", "there is no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
        ) from error


def _unreadable(path: Path, code: str, reason: str, *, line: int | None = None) -> RefusedError:
    return RefusedError(
        Problem(
            code=f"job_folder.{code}",
            file=str(path),
            key=None if line is None else f"line {line}",
            what=f"this file cannot be read: {reason}",
            expected="job.yaml, prompt.md and answer.schema.json in UTF-8, in the folder of the job",
            found=reason,
            fix="correct the file, or start from the example: gristmill init my_job",
        )
    )


def _problems_of_name(name: str, job_yaml: Path) -> Iterator[Problem]:
    problem = name_problem(name)
    if problem is not None:
        yield Problem(
            code="job_file.name",
            file=str(job_yaml),
            what=f"the job's name is its folder's name, and {problem}",
            expected="for example ticket_summaries",
            found=name,
            fix="rename the folder",
        )


def _stray_variables(content: Mapping[str, Any], job_yaml: Path) -> Iterator[Problem]:
    for key, text in _texts(content, ""):
        if key not in LOCATIONS and VARIABLE.search(text):
            yield Problem(
                code="job_file.variable_elsewhere",
                file=str(job_yaml),
                key=key,
                what="${…} stands only in locations: elsewhere it would make what a job is depend on who starts it",
                expected=f"text; ${{…}} only in {' and '.join(LOCATIONS)}",
                found=text,
                fix="write the value itself",
            )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{key}.{number}")


def _unset_variables(text: str, key: str, environment: Mapping[str, str], file: str) -> Iterator[Problem]:
    for name in VARIABLE.findall(text):
        if not VARIABLE_NAME.fullmatch(name) or not environment.get(name):
            yield Problem(
                code="job_file.variable_unset",
                file=file,
                key=key,
                what=f"the environment variable {name} is not set" if VARIABLE_NAME.fullmatch(name) else f"${{{name}}} is no variable",
                expected=f"{name} in the environment",
                found=None,
                fix=f"export {name}=…",
            )


def _problems_between(job_file: JobFile, template: PromptTemplate, schema_text: str | None, file: str) -> Iterator[Problem]:
    """What one file says about another."""
    for name in job_file.input.fields:
        if name not in template.fields:
            yield _between(
                "field_unused",
                file,
                key=f"input.fields.{name}",
                what="a field that the prompt does not use",
                expected=f"one of {', '.join(template.fields)}",
                found=name,
                fix=f"write {{{{ {name} }}}} in the prompt, or remove the line",
            )
    if schema_text is not None:
        yield from _problems_with_answer(job_file, [name for name, _ in answer_fields(schema_text)], file)
    if job_file.nightly is not None and not _is_zone(job_file.nightly.zone):
        yield _between(
            "time_zone",
            file,
            key="nightly.window",
            what="an unknown time zone",
            expected="an IANA zone",
            found=job_file.nightly.zone,
            fix='write  "01:00-07:00 Europe/Berlin"',
        )


def _problems_with_answer(job_file: JobFile, known: list[str], file: str) -> Iterator[Problem]:
    named = [(f"input.labels.{name}", name) for name in job_file.input.labels]
    if job_file.checks.drift is not None:
        named.append(("checks.drift.field", job_file.checks.drift.field))
    for key, name in named:
        if name not in known:
            yield _between(
                "answer_field_unknown",
                file,
                key=key,
                what="this names something that is no field of the answer",
                expected=f"one of {', '.join(known)}",
                found=name,
                fix="name a top-level property of answer.schema.json",
            )


def _between(code: str, file: str, *, key: str, what: str, expected: str, found: str, fix: str) -> Problem:
    return Problem(code=f"job_file.{code}", file=file, key=key, what=what, expected=expected, found=found, fix=fix)


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def _located(text: str, folder: Path) -> str:
    """Absolute: what is no URL is a path from the job's folder."""
    return text if "://" in text else str(folder / text)


def _meant(column: str | None) -> str | None:
    return None if column == NONE else column
