"""Strict answers: what a table cannot hold is no answer, and no error repeats the text."""

import json

import pytest

from batch_assets.core.answer_schema import answer_fields, check_schema, worst_case_characters
from batch_assets.core.answers import AnswerChecker, CheckedAnswer, InvalidAnswer
from batch_assets.core.records import DeadClass

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["category", "summary"],
    "properties": {
        "category": {"enum": ["billing", "bug"]},
        "summary": {"type": "string", "maxLength": 40},
        "score": {"type": ["integer", "null"]},
        "share": {"type": "number"},
        "parts": {
            "type": "array",
            "maxItems": 3,
            "items": {"type": "object", "additionalProperties": False, "properties": {"n": {"type": "integer"}}},
        },
    },
}
GOOD = {"category": "bug", "summary": "Die App stürzt ab"}


@pytest.fixture(scope="module")
def checker() -> AnswerChecker:
    return AnswerChecker(json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ('{"category":"bug","summary":"Größe"}', '{"category":"bug","summary":"Größe"}'),
        ('  {"summary" : "x", "category":\n"bug"} ', '{"summary":"x","category":"bug"}'),
        ('{"category":"bug","summary":"\\u00e9\\/"}', '{"category":"bug","summary":"é/"}'),
        ('{"category":"bug","summary":"a\\u0000b"}', '{"category":"bug","summary":"a\\u0000b"}'),
        ('{"category":"bug","summary":"x","score":3.0}', '{"category":"bug","summary":"x","score":3}'),
        ('{"category":"bug","summary":"x","score":1e2}', '{"category":"bug","summary":"x","score":100}'),
        ('{"category":"bug","summary":"x","score":null}', '{"category":"bug","summary":"x","score":null}'),
        ('{"category":"bug","summary":"x","parts":[{"n":2.0},{}]}', '{"category":"bug","summary":"x","parts":[{"n":2},{}]}'),
        ('{"category":"bug","summary":"x","score":9223372036854775807}', '{"category":"bug","summary":"x","score":9223372036854775807}'),
        ('{"category":"bug","summary":"x","share":9007199254740992}', '{"category":"bug","summary":"x","share":9007199254740992}'),
        ('{"category":"bug","summary":"x","share":0.25}', '{"category":"bug","summary":"x","share":0.25}'),
    ],
)
def test_a_valid_answer_is_stored_without_white_space_and_integers_as_integers(checker: AnswerChecker, text: str, stored: str) -> None:
    checked = checker.check(text, "stop")
    assert checked == CheckedAnswer(stored)
    assert checker.check(stored, "stop") == checked


@pytest.mark.parametrize(
    ("text", "dead_class", "error"),
    [
        ("", DeadClass.NOT_JSON, "not JSON at offset 0"),
        ('{"category":"bug","summary":"SECRET', DeadClass.NOT_JSON, "not JSON at offset 28"),
        ('```json\n{"category":"bug"}', DeadClass.NOT_JSON, "not JSON at offset 0"),
        ('{"category":"bug","summary":"x"} SECRET', DeadClass.NOT_JSON, "not JSON at offset 33"),
        ('{"category":"bug","summary":"x","summary":"SECRET"}', DeadClass.NOT_JSON, "a key occurs twice"),
        ('{"category":"bug","summary":"x","share":NaN}', DeadClass.NOT_JSON, "NaN and Infinity are no JSON"),
        ('{"category":"bug","summary":"x","share":-Infinity}', DeadClass.NOT_JSON, "NaN and Infinity are no JSON"),
        ('{"category":"bug","summary":"x","share":1e999}', DeadClass.NOT_JSON, "a number is too large"),
        ('{"category":"bug","summary":"x","score":9223372036854775808}', DeadClass.SCHEMA, "an integer does not fit 64 bits"),
        ('{"category":"bug","summary":"x","score":1e300}', DeadClass.SCHEMA, "an integer does not fit 64 bits"),
        (
            '{"category":"bug","summary":"x","share":9007199254740993}',
            DeadClass.SCHEMA,
            "an integer under `number` loses digits as a 64-bit float",
        ),
        ('{"category":"bug","summary":"\\ud800"}', DeadClass.NOT_JSON, "not valid Unicode"),
        ('{"category":"bug","summary":"\ud800"}', DeadClass.NOT_JSON, "not valid Unicode"),
        ('{"category":"bug","summary":"a\nSECRET"}', DeadClass.NOT_JSON, "not JSON at offset 30"),
        ("[" * 100_000, DeadClass.NOT_JSON, "nested too deep"),
        ("[]", DeadClass.SCHEMA, "$: type"),
        ('{"category":"bug"}', DeadClass.SCHEMA, "$: required"),
        ('{"category":"SECRET","summary":"x"}', DeadClass.SCHEMA, "$.category: enum"),
        ('{"category":"bug","summary":"x","SECRET":1}', DeadClass.SCHEMA, "$: additionalProperties"),
        ('{"category":"bug","summary":"x","score":"SECRET"}', DeadClass.SCHEMA, "$.score: type"),
        ('{"category":"bug","summary":"x","score":true}', DeadClass.SCHEMA, "$.score: type"),
        ('{"category":"bug","summary":"x","parts":[{},{"n":"SECRET"}]}', DeadClass.SCHEMA, "$.parts[1].n: type"),
    ],
)
def test_an_invalid_answer_is_told_by_class_place_and_offset_alone(
    checker: AnswerChecker, text: str, dead_class: DeadClass, error: str
) -> None:
    assert checker.check(text, "stop") == InvalidAnswer(dead_class=dead_class, error=error)


@pytest.mark.parametrize("finish_reason", ["length", "abort", ""])
def test_only_stop_is_a_whole_answer(checker: AnswerChecker, finish_reason: str) -> None:
    invalid = checker.check(json.dumps(GOOD), finish_reason)
    assert isinstance(invalid, InvalidAnswer)
    assert invalid.dead_class is DeadClass.TRUNCATED


def test_formats_are_words_and_no_rules() -> None:
    schema = {**SCHEMA, "required": [], "properties": {"day": {"type": "string", "format": "date", "maxLength": 10}}}
    assert AnswerChecker(json.dumps(schema)).check('{"day":"soon"}', "stop") == CheckedAnswer('{"day":"soon"}')


def test_a_pattern_is_checked_in_linear_time() -> None:
    schema = {**SCHEMA, "required": [], "properties": {"a": {"type": "string", "maxLength": 60, "pattern": "^(a+)+$"}}}
    invalid = AnswerChecker(json.dumps(schema)).check('{"a":"' + "a" * 50 + '!"}', "stop")
    assert invalid == InvalidAnswer(dead_class=DeadClass.SCHEMA, error="$.a: pattern")


def test_definitions_nullable_unions_and_listed_values_are_accepted_as_columns() -> None:
    schema = {
        **SCHEMA,
        "$defs": {"level": {"type": "integer", "minimum": 1, "maximum": 5}},
        "required": ["level"],
        "properties": {
            "level": {"$ref": "#/$defs/level"},
            "note": {"anyOf": [{"type": "string", "maxLength": 10}, {"type": "null"}]},
            "kind": {"enum": ["a", None]},
            "version": {"const": 2},
            "sure": {"type": "boolean"},
        },
    }
    assert check_schema(json.dumps(schema)) == []
    kinds = {name: (field.kind, field.nullable) for name, field in answer_fields(json.dumps(schema))}
    assert kinds == {
        "level": ("integer", False),
        "note": ("string", True),
        "kind": ("string", True),
        "version": ("integer", False),
        "sure": ("boolean", False),
    }


def test_the_longest_answer_is_at_least_as_long_as_any_valid_one() -> None:
    longest = {
        "category": "billing",
        "summary": "x" * 40,
        "score": -(2**63),
        "share": -1.2345678901234567e-100,
        "parts": [{"n": -(2**63)}] * 3,
    }
    text = json.dumps(longest, separators=(",", ":"))
    assert isinstance(AnswerChecker(json.dumps(SCHEMA)).check(text, "stop"), CheckedAnswer)
    worst = worst_case_characters(json.dumps(SCHEMA))
    assert worst is not None
    assert len(text) <= worst <= len(text) + 10


LONG = json.dumps(
    {
        "type": "object",
        "additionalProperties": False,
        "required": ["summary", "entities"],
        "properties": {
            "summary": {"type": ["string", "null"], "maxLength": 160},
            "entities": {"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 128}},
        },
    }
)


@pytest.mark.parametrize(
    ("summary", "entities", "is_degenerate"),
    [
        ("x" * 160, [], True),
        (("refund " * 30)[:160], [], True),
        (("The customer waits for " + "money back, " * 20)[:160], [], True),
        ("ok", ["a", "-=" * 64], True),
        ("x" * 159, [], False),  # it came to an end by itself
        (" ".join(str(number * 7919) for number in range(80))[:160], [], False),
        (("a phrase of more than twenty characters, " * 4)[:160], [], False),  # fewer than four times in the second half
        (None, [], False),
    ],
)
def test_an_answer_that_repeats_itself_until_the_schema_stops_it_is_degenerate(
    summary: str | None, entities: list[str], is_degenerate: bool
) -> None:
    checked = AnswerChecker(LONG).check(json.dumps({"summary": summary, "entities": entities}), "stop")
    if is_degenerate:
        assert checked == InvalidAnswer(dead_class=DeadClass.DEGENERATE, error="a string repeats itself until its maxLength")
    else:
        assert isinstance(checked, CheckedAnswer)
