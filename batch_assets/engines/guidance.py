"""Can the guided backend compile a schema? Asked with llguidance itself, as vLLM's guidance backend does, without importing vLLM."""

import llguidance

from batch_assets.core.errors import Problem

FOUND_CHARACTERS_MAX = 200


def compile_problem(schema_text: str, *, file: str) -> Problem | None:
    """None when the schema compiles; else what the backend says about it."""
    try:
        # The same call and the same default as vLLM 0.32 with disable_any_whitespace.
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema_text, defaults={"whitespace_flexible": False})
        reason = llguidance.LLMatcher.validate_grammar(grammar)
    except ValueError as error:
        reason = str(error)
    if not reason:
        return None
    return Problem(
        code="answer_schema.not_guided",
        file=file,
        what="the guided backend cannot compile this schema",
        expected="a schema that llguidance compiles",
        found=" ".join(reason.split())[:FOUND_CHARACTERS_MAX],
        fix="use plain types, enum, maxLength, maxItems and simple patterns (no lookaround)",
    )
