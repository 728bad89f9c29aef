"""Strict JSON: what Python's json lets pass and a table cannot hold is refused. Errors never repeat the text."""

import json
from typing import Any, cast

INT64_MIN = -(1 << 63)
INT64_MAX = (1 << 63) - 1
INTEGER_CHARACTERS_MAX = 20


class StrictJsonError(ValueError):
    """Not strict JSON. The message is in our own words: a rule or an offset."""


def decode_strict(text: str) -> Any:
    """A JSON value without repeated keys, NaN, Infinity, numbers beyond 64 bits or endless nesting. Raises StrictJsonError.

    A lone surrogate passes here: it shows when the value is written again.
    """
    try:
        return _DECODER.decode(text)
    except StrictJsonError:
        raise
    except json.JSONDecodeError as error:
        raise StrictJsonError(f"not JSON at offset {error.pos}") from error
    except (RecursionError, ValueError) as error:
        raise StrictJsonError("nested too deep") from error


def as_mapping(value: Any) -> dict[str, Any] | None:
    """The value if it is a JSON object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def as_list(value: Any) -> list[Any] | None:
    """The value if it is a JSON array."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def kind_of(value: Any) -> str:
    """The JSON type of a value, in JSON Schema's words; `3` is an integer, `3.0` a number."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return next((word for kind, word in kinds.items() if isinstance(value, kind)), "something else")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise StrictJsonError("a key occurs twice")
    return value


def _no_constant(_: str) -> Any:
    raise StrictJsonError("NaN and Infinity are no JSON")


def _int64(text: str) -> int:
    if len(text) > INTEGER_CHARACTERS_MAX or not INT64_MIN <= (value := int(text)) <= INT64_MAX:
        raise StrictJsonError("an integer does not fit 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise StrictJsonError("a number is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_int=_int64, parse_float=_finite)
