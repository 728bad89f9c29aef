"""A model's tokenizer and chat template: what is structure, what is text, and what cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest

from batch_assets.core.errors import RefusedError
from batch_assets.engines.tokenizers import ModelTokenizer, is_byte_level
from tests.support.job_folders import edit
from tests.support.models import stub_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return stub_model(tmp_path / "stub")


def change(folder: Path, **parts: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **parts}), encoding="utf-8")


def added(number: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **flags}


def test_an_added_token_that_is_not_special_is_structure_too(folder: Path) -> None:
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    change(folder, added_tokens=[*tokens, added(600, "<tool_call>", special=False), added(601, "\n\n\n", special=False)])
    tokenizer = ModelTokenizer(folder)
    (call,), (blank,) = tokenizer.encode_template("<tool_call>"), tokenizer.encode_template("\n\n\n")
    assert call not in tokenizer.encode_record("<tool_call>")
    assert call in tokenizer.structural_ids
    assert blank not in tokenizer.structural_ids, "a run of white space is no structure"


def test_a_prompt_is_never_cut_or_padded_by_the_tokenizer_s_own_settings(folder: Path) -> None:
    change(folder, truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0})
    assert len(ModelTokenizer(folder).encode_record("0123456789")) == 10


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, True),
        ({"normalizer": {"type": "NFC"}}, False),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}}, False),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}}, False),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel", "add_prefix_space": False}],
                }
            },
            True,
        ),
        ({"model": {"type": "Unigram"}}, False),
    ],
)
def test_tokens_are_bounded_by_bytes_only_where_that_is_certain(folder: Path, parts: dict[str, Any], *, expected: bool) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert is_byte_level({**content, **parts}) is expected


def test_a_model_without_a_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RefusedError, match="no chat template"):
        ModelTokenizer(folder)
    edit(folder / "tokenizer_config.json", "{", '{"chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}], ')
    assert ModelTokenizer(folder).chat_text([("user", "hi")]) == "hi"


def test_a_chat_template_that_refuses_the_roles_is_told_in_words(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}", encoding="utf-8")
    with pytest.raises(RefusedError, match="System role not supported"):
        ModelTokenizer(folder).chat_text([("system", "x"), ("user", "y")])


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ strftime_now('%Y') }}"])
def test_a_chat_template_runs_in_a_sandbox_without_a_clock(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(RefusedError, match="chat template refuses"):
        ModelTokenizer(folder).chat_text([("user", "y")])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {"type": "nothing"}}'])
def test_a_tokenizer_that_cannot_be_read_is_refused(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(RefusedError, match="tokenizer cannot be used"):
        ModelTokenizer(folder)
