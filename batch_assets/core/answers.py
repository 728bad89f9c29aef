"""Answers: which schemas may be asked for, and whether one answer is strict JSON of that schema.

Error texts name a class, a place and an offset; they never repeat the answer. Compiling a schema for the engine is engines/guidance.py.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jsonschema_rs
from pydantic_core import PydanticSerializationError, from_json, to_json

from batch_assets.core.errors import Problem
from batch_assets.core.records import FIELD_PREFIX, RESERVED_COLUMNS, DeadClass

INT64_MIN = -(1 << 63)
INT64_MAX = (1 << 63) - 1
INTEGER_CHARACTERS_MAX = 20
NUMBER_CHARACTERS_MAX = 24  # the longest shortest-form double; a grammar does not bound a fraction
SCHEMA_DEPTH_MAX = 16
PROPERTIES_MAX = 200
CHARACTERS_MAX = 1_000_000  # beyond any model's output: such a bound is none
PROPERTY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
FILE = "answer.schema.json"

KEYWORDS_OF_KIND = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "boolean": set[str](),
}
WORDS_ONLY = {"$schema", "$comment", "title", "description", "examples", "default", "$defs", "definitions"}
STRUCTURE = {"type", "enum", "const", "anyOf", "$ref"}
KNOWN_KEYWORDS = WORDS_ONLY | STRUCTURE | set[str]().union(*KEYWORDS_OF_KIND.values())

JsonSchema = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAnswer:
    """A valid answer: JSON without white space, keys as the model wrote them, integers written as integers."""

    json_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidAnswer:
    """Why an answer does not count. `error` has a place and an offset, never the answer's text."""

    dead_class: DeadClass
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerField:
    """One place of the schema, resolved: `kind` is a JSON type; `characters_max` its longest JSON text, escapes not counted."""

    kind: str
    nullable: bool
    characters_max: int
    properties: tuple[tuple[str, "AnswerField"], ...] = ()
    item: "AnswerField | None" = None

    @property
    def has_integers(self) -> bool:
        """True when a value here may need `3.0` written as `3`."""
        inner = [field for _, field in self.properties] + ([self.item] if self.item else [])
        return self.kind == "integer" or any(field.has_integers for field in inner)


class AnswerChecker:
    """Checks answers against one schema. On the hot path of worker and committer: about 6 us for an answer that is already compact."""

    __slots__ = ("_is_valid", "_names", "_root", "_validator")

    def __init__(self, schema_text: str) -> None:
        schema = json.loads(schema_text)
        # `format` off (a word, not a rule: engines do not enforce it); linear-time patterns; nothing is ever fetched.
        self._validator = jsonschema_rs.Draft202012Validator(
            schema, validate_formats=False, offline=True, pattern_options=jsonschema_rs.RegexOptions()
        )
        self._is_valid = self._validator.is_valid
        root = _Reader(schema, FILE).read()
        self._root = root if root is not None and root.has_integers else None
        self._names = frozenset(_property_names(schema))

    def check(self, text: str, finish_reason: str) -> CheckedAnswer | InvalidAnswer:
        """`finish_reason` is the engine's: only `stop` is a whole answer."""
        if finish_reason != "stop":
            return _not_stopped(finish_reason)
        value, compact = _parsed_compact(text)
        if not compact:
            try:
                value = _STRICT.decode(text)
                compact_text = to_json(value).decode()
            except (ValueError, RecursionError, PydanticSerializationError) as error:
                return InvalidAnswer(dead_class=DeadClass.NOT_JSON, error=_json_error(error))
            text = compact_text
        if not self._is_valid(value):
            return InvalidAnswer(dead_class=DeadClass.SCHEMA, error=self._schema_error(value))
        if self._root is not None:
            return self._with_integers(value, self._root)
        return CheckedAnswer(json_text=text)

    def _with_integers(self, value: Any, root: AnswerField) -> CheckedAnswer | InvalidAnswer:
        try:
            return CheckedAnswer(json_text=to_json(_normalised(value, root)).decode())
        except OverflowError:
            return InvalidAnswer(dead_class=DeadClass.SCHEMA, error="an integer does not fit 64 bits")

    def _schema_error(self, value: Any) -> str:
        error = next(iter(self._validator.iter_errors(value)))
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part if part in self._names else '?'}" for part in error.instance_path)
        return f"${path}: {error.schema_path[-1]}"


def canonical_schema(schema_text: str) -> str:
    """The schema without white space, keys in the order written: the order of `properties` is the order in which a model answers, so it
    is content. Raises ValueError for what is no strict JSON."""
    return json.dumps(_STRICT.decode(schema_text), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def answer_fields(schema_text: str) -> tuple[tuple[str, AnswerField], ...]:
    """Top-level properties of a schema that `check_schema` accepts, in its order."""
    root = _Reader(json.loads(schema_text), FILE).read()
    return () if root is None else root.properties


def worst_case_characters(schema_text: str) -> int | None:
    """Length of the longest JSON text that the schema allows (escapes not counted); None for a schema that is refused."""
    root = _Reader(json.loads(schema_text), FILE).read()
    return None if root is None else root.characters_max


def check_schema(schema_text: str, *, file: str = FILE) -> list[Problem]:
    """Every problem of an answer schema, each with what to write. An empty list: each property is a column, each length is bounded."""
    try:
        schema = _STRICT.decode(schema_text)
    except (ValueError, RecursionError) as error:
        fix = "write the schema as one JSON object (jq . shows where it breaks)"
        return [_problem(file, "", "not_json", "not strict JSON", expected="a JSON object", found=_json_error(error), fix=fix)]
    if not isinstance(schema, dict):
        fix = 'start with {"type": "object", "additionalProperties": false, …}'
        return [_problem(file, "", "not_an_object", "not a JSON object", expected="a JSON object", found=_word(schema), fix=fix)]
    reader = _Reader(cast("JsonSchema", schema), file)
    root = reader.read()
    problems = reader.problems
    if root is not None:
        problems += _problems_of_root(root, file)
    return problems or _problems_of_compiling(schema_text, file)


def _problems_of_root(root: AnswerField, file: str) -> Iterator[Problem]:
    if root.kind != "object" or root.nullable:
        fix = 'write {"type": "object", "additionalProperties": false, "required": […], "properties": {…}}'
        yield _problem(file, "type", "top_level", "an answer is one object", expected="object", found=root.kind, fix=fix)
    for name, _ in root.properties:
        if name.lower() in RESERVED_COLUMNS or name.lower().startswith(FIELD_PREFIX):
            expected = f"none of {', '.join(RESERVED_COLUMNS)}, no name that starts with {FIELD_PREFIX}"
            what = "the name of this answer field is one of our own columns"
            yield _problem(file, f"properties.{name}", "reserved_name", what, expected=expected, found=name, fix=f"call it answer_{name}")


def _problems_of_compiling(schema_text: str, file: str) -> list[Problem]:
    try:
        AnswerChecker(schema_text)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        what = "the validator cannot use this schema"
        found = str(error).partition("\n")[0]
        return [_problem(file, "", "not_a_schema", what, expected="JSON Schema, draft 2020-12", found=found, fix="correct it")]
    return []


class _Reader:
    """Walks a schema once: collects problems, and resolves it to `AnswerField`s."""

    def __init__(self, schema: JsonSchema, file: str) -> None:
        self.schema = schema
        self.file = file
        self.problems: list[Problem] = []

    def read(self) -> AnswerField | None:
        return self._field(self.schema, "", ())

    def _refuse(self, path: str, code: str, what: str, *, expected: str, found: str, fix: str) -> None:
        self.problems.append(_problem(self.file, path, code, what, expected=expected, found=found, fix=fix))

    def _field(self, schema: Any, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        if not isinstance(schema, dict):
            self._refuse(path, "not_a_schema", "not a schema object", expected="{…}", found=_word(schema), fix='for example {"type": "boolean"}')
            return None
        if path.count(".") > SCHEMA_DEPTH_MAX * 2:
            self._refuse(path, "too_deep", "nested too deep", expected=f"at most {SCHEMA_DEPTH_MAX} levels", found="more", fix="flatten it")
            return None
        unknown = sorted(schema.keys() - KNOWN_KEYWORDS)
        for keyword in unknown:
            self._unknown_keyword(path, keyword)
        if unknown:
            return None
        if "$ref" in schema:
            return self._referred(schema, path, refs)
        if "anyOf" in schema:
            return self._any_of(schema, path, refs)
        return self._typed(cast("JsonSchema", schema), path, refs)

    def _unknown_keyword(self, path: str, keyword: str) -> None:
        fix = {
            "uniqueItems": "leave it out; duplicates can be removed by who reads the table",
            "oneOf": 'use "anyOf" with one type and {"type": "null"}, or separate fields',
            "allOf": "write all of it in one object",
            "patternProperties": 'name every property, with "additionalProperties": false',
        }.get(keyword, f"take `{keyword}` out")
        what = f"the guided backend does not enforce `{keyword}`, so answers could not be trusted to follow it"
        self._refuse(_joined(path, keyword), "keyword", what, expected=f"one of {', '.join(sorted(KNOWN_KEYWORDS))}", found=keyword, fix=fix)

    def _referred(self, schema: JsonSchema, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        ref = schema["$ref"]
        if not isinstance(ref, str) or not ref.startswith("#/"):
            what = "a $ref that leaves this file: an answer schema is complete in itself and nothing is fetched"
            fix = "copy the definition under $defs and write #/$defs/NAME"
            self._refuse(_joined(path, "$ref"), "remote_ref", what, expected="#/$defs/…", found=str(ref), fix=fix)
            return None
        if ref in refs:
            what = "a $ref that leads back to itself: the answer could be endless"
            fix = "write the nesting out to the depth that you need"
            self._refuse(_joined(path, "$ref"), "recursive_ref", what, expected="no circle", found=ref, fix=fix)
            return None
        target = _pointed(self.schema, ref)
        beside = sorted(schema.keys() - WORDS_ONLY - {"$ref"})
        if target is None or beside:
            found = f"$ref with {', '.join(beside)} beside it" if beside else ref
            fix = "define it under $defs, and write everything that belongs to it there"
            self._refuse(_joined(path, "$ref"), "ref", "a $ref stands alone and names a definition", expected="#/$defs/…", found=found, fix=fix)
            return None
        return self._field(target, path, (*refs, ref))

    def _any_of(self, schema: JsonSchema, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        branches = schema["anyOf"]
        others = [branch for branch in branches if branch != {"type": "null"}] if isinstance(branches, list) else []
        if len(others) != 1 or len(branches) != 2 or schema.keys() - WORDS_ONLY - {"anyOf"}:  # noqa: PLR2004  one type, and null
            what = "a field has one type, or that type and null: it becomes one column"
            fix = '"anyOf": [{…}, {"type": "null"}], alone; or a field for each type'
            found = f"{len(branches)} branches" if isinstance(branches, list) else "something else"
            self._refuse(_joined(path, "anyOf"), "union", what, expected="one type and null", found=found, fix=fix)
            return None
        inner = self._field(others[0], _joined(path, f"anyOf.{branches.index(others[0])}"), refs)
        return None if inner is None else _nullable(inner)

    def _typed(self, schema: JsonSchema, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        kinds = self._kinds(schema, path)
        real = [kind for kind in kinds if kind != "null"]
        if len(real) != 1:
            what = "a field has one type, or that type and null: it becomes one column"
            fix = f'write "type": one of {", ".join(KEYWORDS_OF_KIND)}, or [that, "null"]'
            found = ", ".join(kinds) or "no type"
            self._refuse(_joined(path, "type"), "type", what, expected="one type", found=found, fix=fix)
            return None
        kind = real[0]
        misplaced = sorted(schema.keys() & set[str]().union(*KEYWORDS_OF_KIND.values()) - KEYWORDS_OF_KIND[kind])
        for keyword in misplaced:
            what = f"`{keyword}` says nothing about a {kind}"
            self._refuse(_joined(path, keyword), "keyword_misplaced", what, expected=f"type {kind}", found=keyword, fix=f"take `{keyword}` out")
        field = self._of_kind(kind, schema, path, refs)
        return _nullable(field) if field is not None and "null" in kinds else field

    def _kinds(self, schema: JsonSchema, path: str) -> list[str]:
        declared = schema.get("type")
        if declared is not None:
            listed = declared if isinstance(declared, list) else [declared]
            unknown = [kind for kind in listed if kind not in (*KEYWORDS_OF_KIND, "null")]
            return [] if unknown else list(dict.fromkeys(listed))
        values = _listed_values(schema)
        if values is None:
            return []
        return list(dict.fromkeys(_word(value) for value in values))

    def _of_kind(self, kind: str, schema: JsonSchema, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        values = _listed_values(schema)
        if values is not None and kind not in ("object", "array"):
            return self._enumerated(kind, values, path)
        match kind:
            case "object":
                return self._object(schema, path, refs)
            case "array":
                return self._array(schema, path, refs)
            case "string":
                return self._string(schema, path)
            case "integer":
                return AnswerField(kind=kind, nullable=False, characters_max=_integer_characters(schema))
            case "number":
                return AnswerField(kind=kind, nullable=False, characters_max=NUMBER_CHARACTERS_MAX)
            case _:
                return AnswerField(kind=kind, nullable=False, characters_max=len("false"))

    def _enumerated(self, kind: str, values: list[Any], path: str) -> AnswerField | None:
        if not values or any(_word(value) not in (kind, "null") for value in values):
            what = "the listed values are not all of one type"
            found = ", ".join(dict.fromkeys(_word(value) for value in values)) or "none"
            self._refuse(_joined(path, "enum"), "enum", what, expected=f"values of type {kind}", found=found, fix="list values of one type")
            return None
        longest = max(len(json.dumps(value, ensure_ascii=False)) for value in values)
        return AnswerField(kind=kind, nullable=None in values, characters_max=longest)

    def _string(self, schema: JsonSchema, path: str) -> AnswerField | None:
        bound = schema.get("maxLength")
        if not _is_bound(bound):
            what = "a string without maxLength: the model may write until max_tokens and the answer is cut"
            self._refuse(path, "string_unbounded", what, expected="maxLength", found=_shown(bound), fix='add  "maxLength": 280')
            return None
        return AnswerField(kind="string", nullable=False, characters_max=bound + 2)

    def _array(self, schema: JsonSchema, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        bound = schema.get("maxItems")
        if not _is_bound(bound):
            what = "an array without maxItems: the model may write until max_tokens and the answer is cut"
            self._refuse(path, "array_unbounded", what, expected="maxItems", found=_shown(bound), fix='add  "maxItems": 5')
        if "items" not in schema:
            what = "an array without items: it may hold anything"
            self._refuse(path, "array_items", what, expected="items", found="nothing", fix='add  "items": {"type": "string", "maxLength": 60}')
            return None
        item = self._field(schema["items"], _joined(path, "items"), refs)
        if item is None or not _is_bound(bound):
            return None
        return AnswerField(kind="array", nullable=False, item=item, characters_max=2 + bound * (item.characters_max + 1))

    def _object(self, schema: JsonSchema, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not 0 < len(properties) <= PROPERTIES_MAX:
            found = f"{len(properties)}" if isinstance(properties, dict) else "none"
            what = "an object names its properties: each becomes a column"
            expected = f"1 to {PROPERTIES_MAX} properties"
            self._refuse(path, "object_properties", what, expected=expected, found=found, fix='add  "properties": {…}')
            return None
        if schema.get("additionalProperties") is not False:
            what = "an object with free keys: the model may invent keys until max_tokens"
            found = _shown(schema.get("additionalProperties"))
            self._refuse(path, "free_keys", what, expected="false", found=found, fix='add  "additionalProperties": false')
        self._names(schema, properties, path)
        fields = {name: self._field(inner, _joined(path, f"properties.{name}"), refs) for name, inner in properties.items()}
        known = tuple((name, field) for name, field in fields.items() if field is not None)
        if len(known) < len(fields):
            return None
        length = 1 + sum(len(name) + 4 + field.characters_max for name, field in known)
        return AnswerField(kind="object", nullable=False, properties=known, characters_max=length)

    def _names(self, schema: JsonSchema, properties: JsonSchema, path: str) -> None:
        seen: dict[str, str] = {}
        for name in properties:
            if not PROPERTY_NAME.fullmatch(name):
                what = "a property becomes a column: its name has letters, digits and _"
                fix = "rename it"
                self._refuse(_joined(path, f"properties.{name}"), "property_name", what, expected="[A-Za-z_][A-Za-z0-9_]*", found=name, fix=fix)
            if name.lower() in seen:
                what = "two properties whose names differ only by case: SQL takes them for one column"
                found = f"{seen[name.lower()]} and {name}"
                self._refuse(_joined(path, f"properties.{name}"), "property_case", what, expected="one", found=found, fix="rename one")
            seen[name.lower()] = name
        required = schema.get("required", [])
        for name in required if isinstance(required, list) else []:
            if name not in properties:
                what = "a required property that is not among the properties: no answer could be valid"
                fix = f"add {name} to properties or take it out of required"
                self._refuse(_joined(path, "required"), "required", what, expected=", ".join(properties), found=str(name), fix=fix)


class _StrictJsonError(ValueError):
    """Legal for Python's json, not for us; the text is our own."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _StrictJsonError("a key occurs twice")
    return value


def _no_constant(_: str) -> Any:
    raise _StrictJsonError("NaN and Infinity are no JSON")


def _int64(text: str) -> int:
    if len(text) > INTEGER_CHARACTERS_MAX or not INT64_MIN <= (value := int(text)) <= INT64_MAX:
        raise _StrictJsonError("an integer does not fit 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _StrictJsonError("a number is too large")
    return value


_STRICT = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_int=_int64, parse_float=_finite)


def _parsed_compact(text: str) -> tuple[Any, bool]:
    """(value, True) when writing the value again gives exactly this text.

    Then nothing was lenient: no key twice, no NaN, no lone surrogate, no white space. That is what a guided engine writes, and it costs a
    fifth of the strict decoder. Integers are looked at again by the caller.
    """
    try:
        value = from_json(text, allow_inf_nan=False, cache_strings="keys")
        return value, to_json(value) == text.encode()
    except (ValueError, TypeError, RecursionError, PydanticSerializationError):
        return None, False


def _json_error(error: Exception) -> str:
    match error:
        case _StrictJsonError():
            return str(error)
        case json.JSONDecodeError():
            return f"not JSON at offset {error.pos}"
        case RecursionError():
            return "nested too deep"
        case _:
            return "not valid Unicode"


def _not_stopped(finish_reason: str) -> InvalidAnswer:
    if finish_reason == "length":
        return InvalidAnswer(dead_class=DeadClass.TRUNCATED, error="the answer ran into the token limit")
    return InvalidAnswer(dead_class=DeadClass.TRUNCATED, error="the engine ended the answer before its end")


def _normalised(value: Any, field: AnswerField) -> Any:
    """Integers as int (`3.0` is a valid JSON Schema integer); raises OverflowError beyond 64 bits."""
    if value is None or not field.has_integers:
        return value
    if field.kind == "integer":
        if not INT64_MIN <= value <= INT64_MAX:
            raise OverflowError
        return int(value)
    if field.item is not None:
        item = field.item
        return [_normalised(inner, item) for inner in value]
    kinds = dict(field.properties)
    return {name: _normalised(inner, kinds[name]) for name, inner in value.items()}


def _property_names(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        properties = schema.get("properties")
        yield from properties if isinstance(properties, dict) else ()
        for inner in schema.values():
            yield from _property_names(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _property_names(inner)


def _pointed(root: JsonSchema, ref: str) -> Any:
    target: Any = root
    for part in ref.removeprefix("#/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    return target


def _listed_values(schema: JsonSchema) -> list[Any] | None:
    if "enum" in schema:
        return schema["enum"] if isinstance(schema["enum"], list) else []
    return [schema["const"]] if "const" in schema else None


def _integer_characters(schema: JsonSchema) -> int:
    bounds = [schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum", schema.get("exclusiveMaximum"))]
    if any(bound is None for bound in bounds):
        return INTEGER_CHARACTERS_MAX
    return max(len(str(bound)) for bound in bounds)


def _nullable(field: AnswerField) -> AnswerField:
    return AnswerField(
        kind=field.kind,
        nullable=True,
        characters_max=max(field.characters_max, len("null")),
        properties=field.properties,
        item=field.item,
    )


def _is_bound(bound: Any) -> bool:
    return isinstance(bound, int) and not isinstance(bound, bool) and 0 <= bound <= CHARACTERS_MAX


def _joined(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)[:60]


def _word(value: Any) -> str:
    words = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return words.get(type(value), "something else")


def _problem(file: str, key: str, code: str, what: str, *, expected: str, found: str, fix: str) -> Problem:
    return Problem(code=f"answer_schema.{code}", file=file, key=key or None, what=what, expected=expected, found=found, fix=fix)
