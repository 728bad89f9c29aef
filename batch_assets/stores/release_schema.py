"""What every row of a release must be: the pandera model of its columns, and the rules that an answer schema puts on answer columns.

The committer has validated each answer as JSON against its schema already. Here the *stored* columns are judged again, as vectors: types,
requiredness, enums, bounds, at every depth. Keywords without a vector form (`pattern`, `format`) were the committer's alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import pandera.polars as pa
import polars as pl
from pandera.config import ValidationDepth, config_context
from pandera.errors import SchemaErrors

from batch_assets.core.evidence import EXAMPLES_MAX, Found
from batch_assets.core.records import DeadClass, Outcome
from batch_assets.stores.outcomes import KEY_COLUMNS, SYSTEM_SCHEMA, outcomes_schema

DEPTH_MAX = 32  # as deep as the outcomes table allows
NEVER_NULL = frozenset({*KEY_COLUMNS, "record_digest", "attempt", "epoch", "origin_version", "surplus"})
IS_RESULT = pl.col("outcome") == Outcome.RESULT.value

JsonSchema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """`broken` is true in the rows that break it; `name` is what a message says."""

    name: str
    broken: pl.Expr

    def check(self) -> pa.Check:
        """For pandera, whose checks are true where all is well."""
        return pa.Check(lambda data: data.lazyframe.select(~self.broken.fill_null(value=False)), name=self.name, error=self.name)


def release_model(answer_schema: str) -> pa.DataFrameSchema:
    """Exact columns, order and types, and every rule on their data. `answer_schema` is canonical JSON text."""
    columns = {
        name: pa.Column(dtype, nullable=name not in NEVER_NULL, checks=_known_values(name))
        for name, dtype in outcomes_schema(answer_schema).items()
    }
    rules = [*_row_rules(answer_schema), *_answer_rules(json.loads(answer_schema))]
    return pa.DataFrameSchema(columns, checks=[rule.check() for rule in rules], strict=True, ordered=True)


def broken_rows(rows: pl.DataFrame, model: pa.DataFrameSchema) -> Found:
    """Rows that break the model, named; a wrong column breaks all of them. Data is checked, not only types."""
    try:
        with config_context(validation_depth=ValidationDepth.SCHEMA_AND_DATA):  # else a LazyFrame's data would pass unseen
            model.validate(rows, lazy=True)
    except SchemaErrors as errors:
        return _found(rows, cast("pl.DataFrame", errors.failure_cases))
    return Found()


def _found(rows: pl.DataFrame, cases: pl.DataFrame) -> Found:
    of_column = pl.concat_str("column", pl.lit(": "), pl.col("check").cast(pl.String))
    named = cases.with_columns(note=pl.when(pl.col("column").is_null()).then("check").otherwise(of_column))
    notes = tuple(sorted(named["note"].unique().to_list()))[:EXAMPLES_MAX]
    if named["index"].null_count() > 0:  # a column is wrong, so no row is what it should be
        structural = named.filter(pl.col("index").is_null())
        notes = tuple(sorted({f"{row['note']} ({row['failure_case']})" for row in structural.iter_rows(named=True)}))[:EXAMPLES_MAX]
        return Found(count=max(rows.height, 1), notes=notes)
    wrong = sorted(named["index"].unique().to_list())
    ids = rows["record_id"].gather(wrong[:EXAMPLES_MAX]).to_list()
    return Found(count=len(wrong), ids=tuple("" if each is None else each for each in ids), notes=notes)


def _known_values(name: str) -> list[pa.Check]:
    match name:
        case "outcome":
            return [pa.Check.isin([each.value for each in Outcome])]
        case "dead_class":
            return [pa.Check.isin([each.value for each in DeadClass])]
        case _:
            return []


def _row_rules(answer_schema: str) -> list[Rule]:
    """How outcome, class, attempts and answer columns go together."""
    root: JsonSchema = json.loads(answer_schema)
    answer = _resolved(root, root)
    properties: Mapping[str, JsonSchema] = answer.get("properties", {})
    required = [name for name in answer.get("required", []) if name in properties and not _nullable(root, properties[name])]
    answers = [name for name in outcomes_schema(answer_schema) if name not in SYSTEM_SCHEMA]
    return [
        Rule("a dead letter has a class, a result has none", pl.col("dead_class").is_not_null() == IS_RESULT),
        Rule("a result took at least one attempt", IS_RESULT & (pl.col("attempt") < 1)),
        *(Rule(f"{name}: required in a result", IS_RESULT & pl.col(name).is_null()) for name in required),
        *(Rule(f"{name}: no answer in a dead letter", ~IS_RESULT & pl.col(name).is_not_null()) for name in answers),
    ]


def _answer_rules(root: JsonSchema) -> list[Rule]:
    properties: Mapping[str, JsonSchema] = _resolved(root, root).get("properties", {})
    return [rule for name, part in properties.items() for rule in _value_rules(root, part, pl.col(name), path=name, depth=0)]


def _value_rules(root: JsonSchema, schema: JsonSchema, value: pl.Expr, *, path: str, depth: int) -> list[Rule]:
    """What the schema says of one value, null where nothing is stored."""
    if depth > DEPTH_MAX:
        return []
    schema = _resolved(root, schema)
    rules = [Rule(f"{path}: {word}", broken) for word, broken in _bounds(schema, value)]
    if isinstance(schema.get("items"), Mapping):
        of_items = _value_rules(root, schema["items"], pl.element(), path=f"{path}[]", depth=depth + 1)
        rules += [Rule(rule.name, value.list.eval(rule.broken.fill_null(value=False)).list.any()) for rule in of_items]
        if not _nullable(root, schema["items"]):
            rules.append(Rule(f"{path}[]: null", value.list.eval(pl.element().is_null()).list.any()))
    for name, part in schema.get("properties", {}).items():
        inner = value.struct.field(name)
        rules += _value_rules(root, part, inner, path=f"{path}.{name}", depth=depth + 1)
        if name in schema.get("required", []) and not _nullable(root, part):
            rules.append(Rule(f"{path}.{name}: required", value.is_not_null() & inner.is_null()))
    return rules


def _bounds(schema: JsonSchema, value: pl.Expr) -> list[tuple[str, pl.Expr]]:
    """(keyword, expression that is true where it is broken); null values break nothing."""
    allowed = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    bounds: list[tuple[str, pl.Expr]] = []
    if allowed is not None and all(each is None or isinstance(each, str | int | float) for each in allowed):
        bounds.append(("enum", ~value.is_in([each for each in allowed if each is not None])))
    if "maxLength" in schema:
        bounds.append(("maxLength", value.str.len_chars() > schema["maxLength"]))
    if "minLength" in schema:
        bounds.append(("minLength", value.str.len_chars() < schema["minLength"]))
    if "maxItems" in schema:
        bounds.append(("maxItems", value.list.len() > schema["maxItems"]))
    if "minItems" in schema:
        bounds.append(("minItems", value.list.len() < schema["minItems"]))
    if "maximum" in schema:
        bounds.append(("maximum", value > schema["maximum"]))
    if "minimum" in schema:
        bounds.append(("minimum", value < schema["minimum"]))
    if "exclusiveMaximum" in schema:
        bounds.append(("exclusiveMaximum", value >= schema["exclusiveMaximum"]))
    if "exclusiveMinimum" in schema:
        bounds.append(("exclusiveMinimum", value <= schema["exclusiveMinimum"]))
    return bounds


def _resolved(root: JsonSchema, schema: JsonSchema) -> JsonSchema:
    """The schema behind a $ref, or the one that is not null in an anyOf; `{}` (no rule) for any other union."""
    for _ in range(DEPTH_MAX):
        if "$ref" in schema:
            schema = _referred(root, str(schema["$ref"]))
        elif "anyOf" in schema:
            parts = [part for part in schema["anyOf"] if not _is_null(part)]
            schema = parts[0] if len(parts) == 1 else {}
        else:
            return schema
    return {}


def _referred(root: JsonSchema, reference: str) -> JsonSchema:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found[part.replace("~1", "/").replace("~0", "~")]
    return cast("JsonSchema", found)


def _is_null(schema: JsonSchema) -> bool:
    return schema.get("type") == "null" or ("const" in schema and schema["const"] is None)


def _nullable(root: JsonSchema, schema: JsonSchema) -> bool:
    if "$ref" in schema:
        return _nullable(root, _referred(root, str(schema["$ref"])))
    if "anyOf" in schema:
        return any(_nullable(root, part) for part in schema["anyOf"])
    declared = schema.get("type")
    in_type = declared == "null" or (isinstance(declared, list) and "null" in declared)
    return in_type or _is_null(schema) or None in schema.get("enum", [])
