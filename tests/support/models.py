"""Models for tests: a few bytes for the scripted engine, a tiny random Llama for real vLLM, and SmolLM2 itself.

`tiny` and `smollm2` are made once and kept under `.cache/models` of the repository (not in git); each test may copy or link them.
"""

import json
import os
import shutil
from pathlib import Path

from batch_assets.stores import models

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "models"

CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>'+m['role']+'\n'+m['content']+'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "My order has not arrived, please refund.",
    "The app crashes when I log in with my password.",
    '{"category": "billing", "summary": "Customer asks for refund"}',
] * 20


def stub_model(folder: Path) -> Path:
    """A model folder that passes the manifest's rules and has a real byte-level tokenizer, but no weights worth loading. Milliseconds."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _byte_level_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokens), encoding="utf-8")
        (folder / "model.safetensors").write_bytes(_one_weight())
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192, "eos_token_id": 2}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def tiny_model(folder: Path | None = None) -> Path:
    """2-layer, hidden-64 Llama with random weights (fixed seed) and a byte-level tokenizer: 195 KB, the same digest each time."""
    cached = CACHE / "tiny"
    _make_once(cached, _make_tiny)
    if folder is None:
        return cached
    if not folder.exists():
        shutil.copytree(cached, folder)
    return folder


def smollm2_model() -> Path:
    """SmolLM2-135M-Instruct, bf16 safetensors, kept under `.cache/models`; the first call takes about a minute."""
    folder = CACHE / models.SMOLLM2_NAME
    models.smollm2(folder)
    return folder


def _make_once(folder: Path, make) -> None:
    if folder.exists():
        return
    temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    make(temporary)
    try:
        temporary.rename(folder)
    except OSError:  # another test process was faster with the same bytes
        shutil.rmtree(temporary)


def _byte_level_tokenizer():
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers import models as bpe

    tokenizer = Tokenizer(bpe.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _one_weight() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


def _make_tiny(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_level_tokenizer(), **tokens)
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
