"""The answer schema: which JSON Schemas may be asked for, and what columns they make. Compiling for the engine is engines/guidance.py.

Allowed is what three parts agree on: the guided backend enforces it, the validator checks it, and a table has a column for it. So every
string and array is bounded, every object names its properties, every field has one type (or that and null).
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jsonschema_rs

from batch_assets.core.errors import Problem
from batch_assets.core.records import FIELD_PREFIX, RESERVED_COLUMNS
from batch_assets.core.strict_json import INTEGER_CHARACTERS_MAX, StrictJsonError, as_list, as_mapping, decode_strict, kind_of

NUMBER_CHARACTERS_MAX = 24  # the longest shortest-form double; a grammar does not bound a fraction
SCHEMA_DEPTH_MAX = 16
PROPERTIES_MAX = 200
CHARACTERS_MAX = 1_000_000  # beyond any model's output: such a bound is none
PROPERTY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
FILE = "answer.schema.json"
INTERNAL_PREFIX = "__"  # delta-rs adds __delta_rs_target and others to the rows of a MERGE
ONE_TYPE = "a field has one type, or that type and null: it becomes one column"

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
class AnswerField:
    """One place of the schema, resolved: `kind` is a JSON type; `characters_max` its longest JSON text, escapes not counted."""

    kind: str
    nullable: bool
    characters_max: int
    properties: tuple[tuple[str, "AnswerField"], ...] = ()
    item: "AnswerField | None" = None


def read_schema(schema: JsonSchema) -> AnswerField | None:
    """The schema as fields; None when `check_schema` would refuse it."""
    return _Reader(schema, FILE).read()


def validator_of(schema: JsonSchema) -> jsonschema_rs.Draft202012Validator:
    """`format` off (a word, not a rule: engines do not enforce it), patterns in linear time, and nothing is ever fetched."""
    return jsonschema_rs.Draft202012Validator(
        dict(schema), validate_formats=False, offline=True, pattern_options=jsonschema_rs.RegexOptions()
    )


def canonical_schema(schema_text: str) -> str:
    """The schema without white space, keys in the order written. Raises StrictJsonError.

    The order of `properties` is the order in which a guided model answers, so it is content and stays.
    """
    return json.dumps(decode_strict(schema_text), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def answer_fields(schema_text: str) -> tuple[tuple[str, AnswerField], ...]:
    """Top-level properties of a schema that `check_schema` accepts, in its order."""
    root = read_schema(json.loads(schema_text))
    return () if root is None else root.properties


def worst_case_characters(schema_text: str) -> int | None:
    """Length of the longest JSON text that the schema allows (escapes not counted); None for a schema that is refused."""
    root = read_schema(json.loads(schema_text))
    return None if root is None else root.characters_max


def check_schema(schema_text: str, *, file: str = FILE) -> list[Problem]:
    """Every problem of an answer schema, each with what to write. An empty list: each property is a column, each length is bounded."""
    try:
        schema = decode_strict(schema_text)
        schema_text.encode()
    except (StrictJsonError, UnicodeError) as error:
        found = str(error) if isinstance(error, StrictJsonError) else "not valid Unicode"
        fix = "write the schema as one JSON object (jq . shows where it breaks)"
        return [_problem(file, "", "not_json", "not strict JSON", expected="a JSON object", found=found, fix=fix)]
    mapping = as_mapping(schema)
    if mapping is None:
        fix = 'start with {"type": "object", "additionalProperties": false, …}'
        return [_problem(file, "", "not_an_object", "not a JSON object", expected="a JSON object", found=kind_of(schema), fix=fix)]
    reader = _Reader(mapping, file)
    root = reader.read()
    problems = [*reader.problems, *(_problems_of_root(root, file) if root is not None else ())]
    return problems or _problems_of_compiling(mapping, file)


def _problems_of_root(root: AnswerField, file: str) -> Iterator[Problem]:
    if root.kind != "object" or root.nullable:
        fix = 'write {"type": "object", "additionalProperties": false, "required": […], "properties": {…}}'
        yield _problem(file, "type", "top_level", "an answer is one object", expected="object", found=root.kind, fix=fix)
    for name, _ in root.properties:
        if name.lower() in RESERVED_COLUMNS or name.lower().startswith((FIELD_PREFIX, INTERNAL_PREFIX)):
            expected = f"none of {', '.join(RESERVED_COLUMNS)}, no name that starts with {FIELD_PREFIX} or {INTERNAL_PREFIX}"
            what = "the name of this answer field is one of our own columns, or of those that Delta writers make for themselves"
            fix = f"call it answer_{name.lstrip('_')}"
            yield _problem(file, f"properties.{name}", "reserved_name", what, expected=expected, found=name, fix=fix)


def _problems_of_compiling(schema: JsonSchema, file: str) -> list[Problem]:
    try:
        validator_of(schema)
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

    def _field(self, value: Any, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        schema = as_mapping(value)
        if schema is None:
            fix = 'for example {"type": "boolean"}'
            self._refuse(path, "not_a_schema", "not a schema object", expected="{…}", found=kind_of(value), fix=fix)
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
        return self._typed(schema, path, refs)

    def _unknown_keyword(self, path: str, keyword: str) -> None:
        fix = {
            "uniqueItems": "leave it out; duplicates can be removed by who reads the table",
            "oneOf": 'use "anyOf" with one type and {"type": "null"}, or separate fields',
            "allOf": "write all of it in one object",
            "patternProperties": 'name every property, with "additionalProperties": false',
        }.get(keyword, f"take `{keyword}` out")
        what = f"the guided backend does not enforce `{keyword}`, so answers could not be trusted to follow it"
        self._refuse(
            _joined(path, keyword), "keyword", what, expected=f"one of {', '.join(sorted(KNOWN_KEYWORDS))}", found=keyword, fix=fix
        )

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
            self._refuse(
                _joined(path, "$ref"), "ref", "a $ref stands alone and names a definition", expected="#/$defs/…", found=found, fix=fix
            )
            return None
        return self._field(target, path, (*refs, ref))

    def _any_of(self, schema: JsonSchema, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        branches = as_list(schema["anyOf"]) or []
        others = [branch for branch in branches if branch != {"type": "null"}]
        if len(others) != 1 or len(branches) != 2 or schema.keys() - WORDS_ONLY - {"anyOf"}:  # noqa: PLR2004  one type, and null
            fix = '"anyOf": [{…}, {"type": "null"}], alone; or a field for each type'
            found = f"{len(branches)} branches"
            self._refuse(_joined(path, "anyOf"), "union", ONE_TYPE, expected="one type and null", found=found, fix=fix)
            return None
        inner = self._field(others[0], _joined(path, f"anyOf.{branches.index(others[0])}"), refs)
        return None if inner is None else _nullable(inner)

    def _typed(self, schema: JsonSchema, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        kinds = _kinds(schema)
        real = [kind for kind in kinds if kind != "null"]
        if len(real) != 1:
            fix = f'write "type": one of {", ".join(KEYWORDS_OF_KIND)}, or [that, "null"]'
            found = ", ".join(kinds) or "no type"
            self._refuse(_joined(path, "type"), "type", ONE_TYPE, expected="one type", found=found, fix=fix)
            return None
        kind = real[0]
        misplaced = sorted(schema.keys() & set[str]().union(*KEYWORDS_OF_KIND.values()) - KEYWORDS_OF_KIND[kind])
        for keyword in misplaced:
            what = f"`{keyword}` says nothing about a {kind}"
            self._refuse(
                _joined(path, keyword), "keyword_misplaced", what, expected=f"type {kind}", found=keyword, fix=f"take `{keyword}` out"
            )
        field = self._of_kind(kind, schema, path, refs)
        return _nullable(field) if field is not None and "null" in kinds else field

    def _of_kind(self, kind: str, schema: JsonSchema, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        if kind == "object":
            return self._object(schema, path, refs)
        if kind == "array":
            return self._array(schema, path, refs)
        values = _listed_values(schema)
        if values is not None:
            return self._enumerated(kind, values, path)
        if kind == "string":
            return self._string(schema, path)
        lengths = {"integer": _integer_characters(schema), "number": NUMBER_CHARACTERS_MAX, "boolean": len("false")}
        return AnswerField(kind=kind, nullable=False, characters_max=lengths[kind])

    def _enumerated(self, kind: str, values: list[Any], path: str) -> AnswerField | None:
        if not values or any(kind_of(value) not in (kind, "null") for value in values):
            what = "the listed values are not all of one type"
            found = ", ".join(dict.fromkeys(kind_of(value) for value in values)) or "none"
            self._refuse(_joined(path, "enum"), "enum", what, expected=f"values of type {kind}", found=found, fix="list values of one type")
            return None
        longest = max(len(json.dumps(value, ensure_ascii=False)) for value in values)
        return AnswerField(kind=kind, nullable=None in values, characters_max=longest)

    def _string(self, schema: JsonSchema, path: str) -> AnswerField | None:
        bound = _bound(schema.get("maxLength"))
        if bound is None:
            what = "a string without maxLength: the model may write until max_tokens and the answer is cut"
            found = _shown(schema.get("maxLength"))
            self._refuse(path, "string_unbounded", what, expected="maxLength", found=found, fix='add  "maxLength": 280')
            return None
        return AnswerField(kind="string", nullable=False, characters_max=bound + 2)

    def _array(self, schema: JsonSchema, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        bound = _bound(schema.get("maxItems"))
        if bound is None:
            what = "an array without maxItems: the model may write until max_tokens and the answer is cut"
            found = _shown(schema.get("maxItems"))
            self._refuse(path, "array_unbounded", what, expected="maxItems", found=found, fix='add  "maxItems": 5')
        if "items" not in schema:
            what = "an array without items: it may hold anything"
            self._refuse(
                path, "array_items", what, expected="items", found="nothing", fix='add  "items": {"type": "string", "maxLength": 60}'
            )
            return None
        item = self._field(schema["items"], _joined(path, "items"), refs)
        if item is None or bound is None:
            return None
        return AnswerField(kind="array", nullable=False, item=item, characters_max=2 + bound * (item.characters_max + 1))

    def _object(self, schema: JsonSchema, path: str, refs: tuple[str, ...]) -> AnswerField | None:
        properties = as_mapping(schema.get("properties")) or {}
        if not 0 < len(properties) <= PROPERTIES_MAX:
            what = "an object names its properties: each becomes a column"
            expected = f"1 to {PROPERTIES_MAX} properties"
            self._refuse(path, "object_properties", what, expected=expected, found=f"{len(properties)}", fix='add  "properties": {…}')
            return None
        if schema.get("additionalProperties") is not False:
            what = "an object with free keys: the model may invent keys until max_tokens"
            found = _shown(schema.get("additionalProperties"))
            self._refuse(path, "free_keys", what, expected="false", found=found, fix='add  "additionalProperties": false')
        self._names(schema, properties, path)
        fields = [(name, self._field(inner, _joined(path, f"properties.{name}"), refs)) for name, inner in properties.items()]
        known = tuple((name, field) for name, field in fields if field is not None)
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
                self._refuse(
                    _joined(path, f"properties.{name}"), "property_name", what, expected="[A-Za-z_][A-Za-z0-9_]*", found=name, fix=fix
                )
            if name.lower() in seen:
                what = "two properties whose names differ only by case: SQL takes them for one column"
                found = f"{seen[name.lower()]} and {name}"
                self._refuse(_joined(path, f"properties.{name}"), "property_case", what, expected="one", found=found, fix="rename one")
            seen[name.lower()] = name
        for name in as_list(schema.get("required")) or []:
            if name not in properties:
                what = "a required property that is not among the properties: no answer could be valid"
                fix = f"add {name} to properties or take it out of required"
                self._refuse(_joined(path, "required"), "required", what, expected=", ".join(properties), found=str(name), fix=fix)


def _kinds(schema: JsonSchema) -> list[str]:
    """Types that a value may have, from `type`, else from the listed values; empty when one is no JSON type."""
    declared = schema.get("type")
    listed = as_list(declared) or [declared]
    if declared is None:
        listed = [kind_of(value) for value in _listed_values(schema) or []]
    return [] if any(kind not in (*KEYWORDS_OF_KIND, "null") for kind in listed) else list(dict.fromkeys(listed))


def _pointed(root: JsonSchema, ref: str) -> Any:
    target: Any = root
    for part in ref.removeprefix("#/").split("/"):
        target = (as_mapping(target) or {}).get(part.replace("~1", "/").replace("~0", "~"))
    return target


def _listed_values(schema: JsonSchema) -> list[Any] | None:
    if "enum" in schema:
        return as_list(schema["enum"]) or []
    return [schema["const"]] if "const" in schema else None


def _integer_characters(schema: JsonSchema) -> int:
    bounds = [schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum", schema.get("exclusiveMaximum"))]
    if any(bound is None for bound in bounds):
        return INTEGER_CHARACTERS_MAX
    return max(len(str(bound)) for bound in bounds)


def _nullable(field: AnswerField) -> AnswerField:
    return replace(field, nullable=True, characters_max=max(field.characters_max, len("null")))


def _bound(value: Any) -> int | None:
    """A length that bounds something."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= CHARACTERS_MAX else None


def _joined(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)[:60]


def _problem(file: str, key: str, code: str, what: str, *, expected: str, found: str, fix: str) -> Problem:
    return Problem(code=f"answer_schema.{code}", file=file, key=key or None, what=what, expected=expected, found=found, fix=fix)
