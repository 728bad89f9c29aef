"""Small valid answers of an answer schema, for the scripted engine. Only for schemas that `core/answer_schema.py` lets pass."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from batch_assets.core.identity import canonical_json

WORDS = ("refund", "delivery", "password", "invoice", "Größe", "退款", "retraso", "panne")


def sample_answers(schema_text: str, count: int) -> list[str]:
    """`count` answers as canonical JSON; number k takes the k-th choice wherever the schema offers one."""
    schema = json.loads(schema_text)
    return [canonical_json(_sample(schema, number)) for number in range(count)]


def _sample(schema: Mapping[str, Any], number: int) -> Any:
    if "const" in schema:
        return schema["const"]
    for keyword in ("enum", "anyOf"):
        if keyword in schema:
            choice = schema[keyword][number % len(schema[keyword])]
            return choice if keyword == "enum" else _sample(choice, number)
    kinds = schema["type"]
    return _SAMPLES[kinds[0] if isinstance(kinds, list) else kinds](schema, number)


def _object(schema: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {name: _sample(child, number) for name, child in schema.get("properties", {}).items()}


def _array(schema: Mapping[str, Any], number: int) -> list[Any]:
    size = max(schema.get("minItems", 0), min(1, schema.get("maxItems", 1)))
    return [_sample(schema["items"], number + place) for place in range(size)]


def _text(schema: Mapping[str, Any], number: int) -> str:
    text = f"{WORDS[number % len(WORDS)]} {number}"
    return text.ljust(schema.get("minLength", 0), ".")[: schema.get("maxLength", len(text) + 1)]


def _number(schema: Mapping[str, Any], number: int) -> int:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
    high = schema.get("maximum", low + number)
    return int(min(low + number, high))


_SAMPLES: Final[Mapping[str, Callable[[Mapping[str, Any], int], Any]]] = {
    "object": _object,
    "array": _array,
    "string": _text,
    "integer": _number,
    "number": lambda schema, number: float(_number(schema, number)),
    "boolean": lambda _schema, number: number % 2 == 0,
    "null": lambda _schema, _number: None,
}
