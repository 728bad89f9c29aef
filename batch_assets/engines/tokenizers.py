"""Tokenizers for prompts: a model's own (tokenizer.json, chat template) and, for the scripted engine, bytes.

Two instances of a model's tokenizer are kept: one in which chat markers are structural ids (template text) and one in which they are
ordinary text (record text).
"""

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HuggingFaceTokenizer

from batch_assets.core.errors import Problem, RefusedError
from batch_assets.core.ports import Tokenizer

SCRIPTED = "scripted"
BYTES_PER_TOKEN = 4  # about what real tokenizers make of English, so prompts are as long as real ones
MARKERS = {"<|start|>": 1 << 32, "<|end|>": (1 << 32) + 1}  # four bytes never make such a number
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_for(engine: str, model_folder: Path | str) -> Tokenizer:
    """The tokenizer that goes with an engine. Raises RefusedError when the model's own cannot be used."""
    return ByteTokenizer() if engine == SCRIPTED else ModelTokenizer(Path(model_folder))


class ByteTokenizer:
    """Four UTF-8 bytes are one id, two markers are structural. For the scripted engine: its bookkeeping must not wait for a tokenizer."""

    structural_ids = frozenset(MARKERS.values())
    byte_level = True

    def encode_template(self, text: str) -> list[int]:
        """Bytes, with the two markers as ids of their own."""
        tokens: list[int] = []
        for piece in _split_keeping(text, tuple(MARKERS)):
            marker = MARKERS.get(piece)
            tokens += _packed(piece) if marker is None else [marker]
        return tokens

    def encode_record(self, text: str) -> list[int]:
        """Bytes, four an id, the last one filled with zeros. Raises UnicodeEncodeError for a lone surrogate."""
        return _packed(text)

    @staticmethod
    def decode(tokens: Sequence[int]) -> str:
        """The text again, without markers."""
        data = array("I", (token for token in tokens if token not in ByteTokenizer.structural_ids)).tobytes()
        return data.replace(b"\0", b"").decode("utf-8", "replace")

    def chat_text(self, messages: Sequence[tuple[str, str]]) -> str:
        """`<|start|>role`, the content, `<|end|>`, and the start of the answer."""
        return "".join(f"<|start|>{role}\n{content}<|end|>\n" for role, content in messages) + "<|start|>assistant\n"


def _packed(text: str) -> list[int]:
    data = text.encode()
    return memoryview(data + bytes(-len(data) % BYTES_PER_TOKEN)).cast("I").tolist()


class ModelTokenizer:
    """A model's tokenizer.json and chat template."""

    __slots__ = ("_chat", "_encode_records", "_special_tokens", "_template", "byte_level", "structural_ids")

    def __init__(self, folder: Path) -> None:
        content = _tokenizer_json(folder)
        added: list[dict[str, Any]] = content.get("added_tokens") or []
        self._template = _tokenizer(content, folder)
        # Added tokens that are not `special` (Qwen's <tool_call>) would still be found in record text: here all are made special, and
        # `encode_special_tokens` reads special ones as ordinary text.
        records = _tokenizer({**content, "added_tokens": [{**token, "special": True} for token in added]}, folder)
        records.encode_special_tokens = True
        self._encode_records = records.encode_batch_fast
        # Runs of white space are added tokens in some models, without being structure; ordinary text may hold them.
        # The ids are asked of the tokenizer: it renumbers an added token whose id in the file leaves a gap.
        known = self._template.get_added_tokens_decoder().items()
        self.structural_ids = frozenset(number for number, token in known if token.special or token.content.strip())
        self.byte_level = is_byte_level(content)
        config = _json(folder / "tokenizer_config.json")
        self._special_tokens = {name: _token_text(config.get(name)) for name in TOKEN_NAMES}
        self._chat = _chat_template(folder, config)

    def encode_template(self, text: str) -> list[int]:
        """Markers become structural ids; nothing is added around the text."""
        return self._template.encode(text, add_special_tokens=False).ids

    def encode_record(self, text: str) -> list[int]:
        """Markers are ordinary text. Raises TypeError for a lone surrogate."""
        # encode_batch_fast keeps no offsets: a quarter less time than encode, measured on 100 words.
        return self._encode_records([text], add_special_tokens=False)[0].ids

    def chat_text(self, messages: Sequence[tuple[str, str]]) -> str:
        """The model's chat template with the generation prompt. Raises RefusedError when the template refuses the messages."""
        try:
            return self._chat.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                enable_thinking=False,  # the answer is JSON from its first token on: there is no room for thoughts
                **self._special_tokens,
            )
        except TemplateError as error:
            raise RefusedError(
                Problem(
                    code="model.chat_template_refuses",
                    what=f"the model's chat template refuses this prompt: {error}",
                    expected="roles that the model knows",
                    found=", ".join(role for role, _ in messages),
                    fix="put the instructions into the user message, or choose a model with a system role",
                )
            ) from error


def is_byte_level(content: dict[str, Any]) -> bool:
    """True when tokens <= UTF-8 bytes is certain for every text: byte-level BPE, no normaliser (NFC may lengthen), no added prefix."""
    stages = _flattened(content.get("pre_tokenizer"), "pretokenizers")
    byte_level = [stage for stage in stages if stage.get("type") == "ByteLevel"]
    return (
        content.get("model", {}).get("type") == "BPE"
        and content.get("normalizer") is None
        and len(byte_level) == 1
        and not byte_level[0].get("add_prefix_space", True)
    )


def _flattened(stage: dict[str, Any] | None, children: str) -> list[dict[str, Any]]:
    if stage is None:
        return []
    if stage.get("type") == "Sequence":
        return [inner for child in stage.get(children, []) for inner in _flattened(child, children)]
    return [stage]


def _split_keeping(text: str, markers: tuple[str, ...]) -> list[str]:
    pieces = [text]
    for marker in markers:
        pieces = [part for piece in pieces for part in _around(piece, marker)]
    return pieces


def _around(piece: str, marker: str) -> list[str]:
    parts: list[str] = []
    for number, part in enumerate(piece.split(marker)):
        parts += [marker, part] if number else [part]
    return parts


def _tokenizer_json(folder: Path) -> dict[str, Any]:
    content = _json(folder / "tokenizer.json")
    if "model" not in content:
        raise _unusable(folder / "tokenizer.json", "no `model` in it")
    return {**content, "truncation": None, "padding": None}  # a prompt is never cut silently


def _tokenizer(content: dict[str, Any], folder: Path) -> HuggingFaceTokenizer:
    try:
        return HuggingFaceTokenizer.from_str(json.dumps(content))
    except Exception as error:  # tokenizers raises bare Exception, nothing narrower
        raise _unusable(folder / "tokenizer.json", str(error)) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unusable(path, type(error).__name__) from error
    if not isinstance(content, dict):
        raise _unusable(path, "not a JSON object")
    return content


def _chat_template(folder: Path, config: dict[str, Any]) -> Any:
    text = _chat_template_text(folder, config)
    # The same settings as transformers, in a sandbox: a model's template is a stranger's text. No clock: `strftime_now` stays undefined.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise _unusable(folder, f"its chat template does not compile: {error}") from error


def _chat_template_text(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise _unusable(folder, "no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")
    return template


def _to_json(value: Any, *, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _token_text(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else (token or "")


def _unusable(path: Path, reason: str) -> RefusedError:
    return RefusedError(
        Problem(
            code="model.tokenizer_unusable",
            file=str(path),
            key="model.path",
            what=f"the model's tokenizer cannot be used: {reason}",
            expected="tokenizer.json, tokenizer_config.json and a chat template of an instruct model",
            found="something else",
            fix="copy the model's tokenizer files into the folder, or choose an instruct model",
        )
    )
