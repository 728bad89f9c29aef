"""Answers: whether one answer is strict JSON of the job's schema. Which schemas may be asked for is core/answer_schema.py.

Error texts name a class, a place and an offset; they never repeat the answer.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import PydanticSerializationError, from_json, to_json

from batch_assets.core.answer_schema import AnswerField, read_schema, validator_of
from batch_assets.core.records import DeadClass
from batch_assets.core.strict_json import INT64_MAX, INT64_MIN, StrictJsonError, as_list, as_mapping, decode_strict

# A degenerate answer: a string that ran into its maxLength, this long or longer, whose second half is one piece repeated so often. A model
# that is caught in a loop is stopped by the schema's bound alone, and what it wrote is valid. Shorter bounds stop too little to tell.
DEGENERATE_CHARACTERS_MIN: Final = 128
DEGENERATE_REPEATS_MIN: Final = 4
QUOTES: Final = 2


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """A valid answer: JSON without white space, keys as the model wrote them, integers written as integers, and no number that a
    table's 64-bit float would change.
    """

    json_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidAnswer:
    """Why an answer does not count. `error` has a place or an offset, never the answer's text."""

    dead_class: DeadClass
    error: str


class AnswerChecker:
    """Checks answers against one schema. On the hot path of worker and committer: about 6 us for an answer that is already compact."""

    __slots__ = ("_is_degenerate", "_is_valid", "_names", "_normalise", "_validator")

    def __init__(self, schema_text: str) -> None:
        schema = json.loads(schema_text)
        self._validator = validator_of(schema)
        self._is_valid = self._validator.is_valid
        root = read_schema(schema)
        self._normalise = None if root is None else _normaliser(root)
        self._is_degenerate = None if root is None else _degenerate_test(root)
        self._names = frozenset(_property_names(schema))

    def check(self, text: str, finish_reason: str) -> CheckedAnswer | InvalidAnswer:
        """`finish_reason` is the engine's: only `stop` is a whole answer."""
        if finish_reason != "stop":
            return _not_stopped(finish_reason)
        value, compact = _parsed_compact(text)
        if not compact:
            try:
                value = decode_strict(text)
                text = to_json(value).decode()
            except StrictJsonError as error:
                return InvalidAnswer(dead_class=DeadClass.NOT_JSON, error=str(error))
            except (ValueError, PydanticSerializationError):
                return InvalidAnswer(dead_class=DeadClass.NOT_JSON, error="not valid Unicode")
        refused = self._refused(value)
        if refused is not None:
            return refused
        if self._normalise is not None:
            return _with_integers(self._normalise, value)
        return CheckedAnswer(text)

    def _refused(self, value: Any) -> InvalidAnswer | None:
        if not self._is_valid(value):
            return InvalidAnswer(dead_class=DeadClass.SCHEMA, error=self._schema_error(value))
        if self._is_degenerate is not None and self._is_degenerate(value):
            return InvalidAnswer(dead_class=DeadClass.DEGENERATE, error="a string repeats itself until its maxLength")
        return None

    def _schema_error(self, value: Any) -> str:
        error = next(iter(self._validator.iter_errors(value)))
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part if part in self._names else '?'}" for part in error.instance_path)
        return f"${path}: {error.schema_path[-1]}"


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


def _with_integers(normalise: Callable[[Any], Any], value: Any) -> CheckedAnswer | InvalidAnswer:
    try:
        return CheckedAnswer(to_json(normalise(value)).decode())
    except OverflowError as error:
        return InvalidAnswer(dead_class=DeadClass.SCHEMA, error=str(error))


def _not_stopped(finish_reason: str) -> InvalidAnswer:
    if finish_reason == "length":
        return InvalidAnswer(dead_class=DeadClass.TRUNCATED, error="the answer ran into the token limit")
    return InvalidAnswer(dead_class=DeadClass.TRUNCATED, error="the engine ended the answer before its end")


def _normaliser(field: AnswerField) -> Callable[[Any], Any] | None:
    """Writes integers as int (`3.0` is a valid JSON Schema integer), in place; None when there is nothing to do below `field`.

    The function raises OverflowError, with what is wrong, for an integer that its column cannot hold.
    """
    if field.kind == "integer":
        return _as_int64
    if field.kind == "number":
        return _as_float64
    if field.item is not None:
        return _for_items(_normaliser(field.item))
    inner = [(name, normalise) for name, child in field.properties if (normalise := _normaliser(child)) is not None]
    return _for_properties(inner) if inner else None


def _as_int64(value: Any) -> Any:
    if value is None:
        return None
    if not INT64_MIN <= value <= INT64_MAX:
        msg = "an integer does not fit 64 bits"
        raise OverflowError(msg)
    return int(value)


def _as_float64(value: Any) -> Any:
    """As it is; a column of `number` holds 64-bit floats, and beyond 2^53 they skip integers."""
    if isinstance(value, int) and int(float(value)) != value:
        msg = "an integer under `number` loses digits as a 64-bit float"
        raise OverflowError(msg)
    return value


def _for_items(normalise: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    if normalise is None:
        return None
    return lambda value: None if value is None else [normalise(inner) for inner in value]


def _for_properties(inner: list[tuple[str, Callable[[Any], Any]]]) -> Callable[[Any], Any]:
    def normalise_object(value: Any) -> Any:
        for name, normalise in inner:
            if value is not None and name in value:
                value[name] = normalise(value[name])
        return value

    return normalise_object


def _degenerate_test(field: AnswerField) -> Callable[[Any], bool] | None:
    """Whether a string at or below `field` is degenerate; None when none of them may be long enough."""
    if field.kind == "string":
        length = field.characters_max - QUOTES
        return None if length < DEGENERATE_CHARACTERS_MIN else lambda value: value is not None and len(value) == length and is_loop(value)
    if field.item is not None:
        inner = _degenerate_test(field.item)
        return None if inner is None else lambda value: value is not None and any(map(inner, value))
    tests = [(name, test) for name, child in field.properties if (test := _degenerate_test(child)) is not None]
    return (lambda value: value is not None and any(test(value.get(name)) for name, test in tests)) if tests else None


def is_loop(text: str) -> bool:
    """Whether the second half of `text` is one piece repeated DEGENERATE_REPEATS_MIN times or more, the last one perhaps cut."""
    tail = text[len(text) // 2 :]
    longest = len(tail) // DEGENERATE_REPEATS_MIN
    piece = tail.find(tail[:longest], 1)  # where it begins anew: a loop does so after one piece
    return 0 < piece <= longest and tail[piece:] == tail[:-piece]


def _property_names(schema: Any) -> Iterator[str]:
    """Every property name in a schema: an error path may show these and no others."""
    mapping = as_mapping(schema)
    if mapping is not None:
        yield from as_mapping(mapping.get("properties")) or ()
    for inner in mapping.values() if mapping is not None else as_list(schema) or ():
        yield from _property_names(inner)
