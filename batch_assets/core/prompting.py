"""Prompts: what prompt.md may say, and how a record becomes token ids. Pure; tokenizers are in engines/, files in stores/.

A prompt is a few messages; inside them stand bare column names (`{{ body }}`). Template text and record text are tokenised apart, so a
record can neither write a chat marker nor change how the text around it is split, and what comes before the first placeholder is the same
token ids for every record: the shared prefix.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from batch_assets.core.errors import GristmillError, Problem, RefusedError
from batch_assets.core.ports import Tokenizer

ROLES = ("system", "user")
MARKER_LINE = re.compile(r"<!-- (system|user) -->")
# Looks as if it was meant as a marker: one word in an HTML comment alone on its line.
NEARLY_MARKER = re.compile(r"\s*<!--\s*([A-Za-z_]+)\s*-->\s*")
PLACEHOLDER = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
COLUMN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TEMPLATE_LOGIC = re.compile(r"\{%.*?%\}|\{#.*?#\}", re.DOTALL)
FOUND_CHARACTERS_MAX = 60
# A private-use character: no chat template writes one, and a prompt that holds one is refused.
SENTINEL = "\ue07a"


class RenderError(GristmillError):
    """This record cannot become a prompt; reaction: a dead letter `render_error`, permanent. The message holds no record text."""

    def __init__(self, *, field: str, reason: str) -> None:
        super().__init__(f"field {field}: {reason}", field=field, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message: text, field, text, field, … text (`texts` is one longer than `fields`; texts may be empty)."""

    role: str
    texts: tuple[str, ...]
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate:
    """A parsed prompt.md: an optional system message, then one user message."""

    messages: tuple[Message, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """Placeholders, each once, in the order of first use."""
        return tuple(dict.fromkeys(name for message in self.messages for name in message.fields))


def parse_prompt(text: str, *, file: str = "prompt.md") -> PromptTemplate:
    """Raises RefusedError with every problem found. `file` is only named in problems."""
    problems: list[Problem] = []
    messages = [_message(role, content, file, problems) for role, content in _sections(text, file, problems)]
    if not problems:
        problems += _problems_of_shape(messages, file)
    if problems:
        raise RefusedError(*problems)
    return PromptTemplate(messages=tuple(messages))


class PromptRenderer:
    """Fields to token ids, for one template and one tokenizer. `render` is on the hot path: template parts are tokenised once, here."""

    __slots__ = ("_encode", "_parts", "_structural", "_structural_first", "_structural_last", "prefix_tokens", "template_tokens")

    def __init__(self, template: PromptTemplate, tokenizer: Tokenizer) -> None:
        texts, fields = _chat_parts(template, tokenizer)
        tokenised = [tokenizer.encode_template(text) if text else [] for text in texts]
        self._encode = tokenizer.encode_record
        self._structural = tokenizer.structural_ids
        self._structural_first = min(self._structural, default=0)
        self._structural_last = max(self._structural, default=-1)
        self.prefix_tokens: list[int] = tokenised[0]
        self.template_tokens = sum(map(len, tokenised))  # all of the prompt but the record's own part
        self._parts = tuple(zip(fields, tokenised[1:], strict=True))

    def render(self, fields: Mapping[str, str]) -> list[int]:
        """The whole prompt of one record. Raises RenderError when a field is missing or its tokens hold a structural id."""
        tokens = self.prefix_tokens.copy()
        for name, suffix in self._parts:
            part = self.encode_field(name, fields.get(name))
            tokens += part
            tokens += suffix
        return tokens

    def encode_field(self, name: str, text: str | None) -> list[int]:
        """Token ids of one field's text; what `render` puts in the placeholder's place."""
        if text is None:
            raise RenderError(field=name, reason="no value")
        try:
            part = self._encode(text)
        except (TypeError, UnicodeError) as error:  # tokenizers: a lone surrogate is a TypeError
            raise RenderError(field=name, reason="the text is not valid Unicode") from error
        if self._has_structural(part):
            raise RenderError(field=name, reason="the tokenizer makes a structural token of its text")
        return part

    def _has_structural(self, part: list[int]) -> bool:
        """Structural ids mostly stand together before or behind all others: two comparisons tell, three times as fast."""
        if not part or max(part) < self._structural_first or min(part) > self._structural_last:
            return False
        return not self._structural.isdisjoint(part)

    def record_tokens(self, fields: Mapping[str, str]) -> int:
        """Tokens of the record's own part, as `limits.input_tokens_max` counts them. Raises RenderError."""
        return sum(len(self.encode_field(name, fields.get(name))) for name, _ in self._parts)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about prompts that are legal but probably not meant."""
        shared, total = len(self.prefix_tokens), self.template_tokens
        if shared * 2 < total:
            return (f"prefix cache: {shared} of {total} tokens shared; put the instructions before the first placeholder",)
        return ()


def _sections(text: str, file: str, problems: list[Problem]) -> list[tuple[str, str]]:
    sections: list[tuple[str, list[str]]] = []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        marker = MARKER_LINE.fullmatch(line)
        nearly = NEARLY_MARKER.fullmatch(line)
        if marker:
            sections.append((marker[1], []))
        elif nearly:
            problems.append(_marker_problem(file, number, line))
        elif sections:
            sections[-1][1].append(line)
        elif line.strip():
            problems.append(_text_before_marker(file, number, line))
            break
    return [(role, "\n".join(lines).strip("\n")) for role, lines in sections]


def _marker_problem(file: str, number: int, line: str) -> Problem:
    return Problem(
        code="prompt.role_marker",
        file=file,
        key=f"line {number}",
        what="a role marker is one of two exact lines",
        expected=" or ".join(f"<!-- {role} -->" for role in ROLES),
        found=_shortened(line),
        fix="write <!-- system --> or <!-- user -->, alone on the line",
    )


def _text_before_marker(file: str, number: int, line: str) -> Problem:
    return Problem(
        code="prompt.text_before_role",
        file=file,
        key=f"line {number}",
        what="text before the first role marker: it is not clear who says it",
        expected="the line <!-- system --> or <!-- user -->",
        found=_shortened(line),
        fix="put <!-- system --> above the instructions and <!-- user --> above the record's placeholders",
    )


def _message(role: str, content: str, file: str, problems: list[Problem]) -> Message:
    texts: list[str] = []
    fields: list[str] = []
    end = 0
    for found in PLACEHOLDER.finditer(content):
        name = found[1].strip()
        texts.append(content[end : found.start()])
        fields.append(name)
        end = found.end()
        if not COLUMN_NAME.fullmatch(name):
            problems.append(_placeholder_problem(file, role, found[0]))
    texts.append(content[end:])
    problems += [problem for text in texts for problem in _problems_of_text(text, file, role)]
    return Message(role=role, texts=tuple(texts), fields=tuple(fields))


def _placeholder_problem(file: str, role: str, found: str) -> Problem:
    return Problem(
        code="prompt.placeholder",
        file=file,
        key=role,
        what="a placeholder is a bare column name: no filters, dots, calls or expressions",
        expected="for example {{ body }}",
        found=_shortened(found),
        fix="write the column's name alone; a column with another kind of name is renamed under input.fields: {body: Ticket Text}",
    )


def _problems_of_text(text: str, file: str, role: str) -> list[Problem]:
    problems: list[Problem] = []
    if "{{" in text:
        problems.append(
            Problem(
                code="prompt.placeholder_open",
                file=file,
                key=role,
                what="`{{` without `}}`",
                expected="for example {{ body }}",
                found=_shortened(text[text.index("{{") :]),
                fix="close the placeholder with }}",
            )
        )
    if logic := TEMPLATE_LOGIC.search(text):
        problems.append(
            Problem(
                code="prompt.template_logic",
                file=file,
                key=role,
                what="a prompt has no template logic: every record gets the same text around its fields",
                expected="text and bare placeholders",
                found=_shortened(logic[0]),
                fix="take it out; prepare such a text as a column of the source",
            )
        )
    if SENTINEL in text:
        problems.append(
            Problem(
                code="prompt.private_use_character",
                file=file,
                key=role,
                what="the private-use character U+E07A stands in the prompt; it is used inside to find the placeholders",
                expected="another character",
                found="U+E07A",
                fix="take it out",
            )
        )
    return problems


def _problems_of_shape(messages: list[Message], file: str) -> list[Problem]:
    roles = [message.role for message in messages]
    if roles not in (["user"], ["system", "user"]):
        return [
            Problem(
                code="prompt.roles",
                file=file,
                what="a prompt is at most one system message, then one user message",
                expected="<!-- system --> …, <!-- user --> …",
                found=", ".join(f"<!-- {role} -->" for role in roles) or "an empty file",
                fix="put the instructions under one <!-- system --> and the placeholders under one <!-- user -->",
            )
        ]
    if not any(message.fields for message in messages):
        return [
            Problem(
                code="prompt.no_placeholder",
                file=file,
                what="no placeholder: every record would get the same prompt",
                expected="a column of the source, for example {{ body }}",
                found="none",
                fix="write {{ column }} where the record's text belongs",
            )
        ]
    return []


def _chat_parts(template: PromptTemplate, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """The chat text cut at the placeholders: texts (one more than fields) and the fields between them."""
    contents: list[tuple[str, str]] = []
    fields: list[str] = []
    for message in template.messages:
        pieces = [message.texts[0]]
        for name, text in zip(message.fields, message.texts[1:], strict=True):
            pieces += [f"{SENTINEL}{len(fields)}{SENTINEL}", text]
            fields.append(name)
        contents.append((message.role, "".join(pieces)))
    pieces = re.split(f"{SENTINEL}([0-9]+){SENTINEL}", tokenizer.chat_text(contents))
    numbers = [int(number) for number in pieces[1::2]]
    if numbers != list(range(len(fields))):
        raise RefusedError(
            Problem(
                code="prompt.chat_template",
                what="the model's chat template leaves out, repeats or reorders parts of the prompt",
                expected=f"placeholders in the order 0 to {len(fields) - 1}",
                found=", ".join(map(str, numbers)) or "none",
                fix="check that the model's chat template supports these roles (some have no system message)",
            )
        )
    return pieces[0::2], fields


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= FOUND_CHARACTERS_MAX else line[: FOUND_CHARACTERS_MAX - 1] + "…"
