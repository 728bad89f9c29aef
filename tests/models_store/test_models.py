"""Model folders: what counts, what is refused, and that one changed byte is found and named."""

import threading
from pathlib import Path

import pytest

from batch_assets.core.errors import ExitCode, RefusedError, UnfitEnvironmentError
from batch_assets.core.spec import ModelSettings
from batch_assets.stores import models
from batch_assets.stores.models import model_digest, model_length, pin, smollm2, verify_model, with_digest_line, write_manifest
from tests.support.job_folders import edit, load, write_job
from tests.support.models import smollm2_model, stub_model, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return stub_model(tmp_path / "stub")


def test_the_same_files_have_the_same_digest_wherever_they_are(tmp_path: Path, folder: Path) -> None:
    assert model_digest(stub_model(tmp_path / "elsewhere" / "other")).digest == model_digest(folder).digest


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"])
def test_one_changed_byte_in_any_file_that_is_loaded_is_another_model(folder: Path, name: str) -> None:
    pinned = model_digest(folder)
    write_manifest(folder, pinned)
    path = folder / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UnfitEnvironmentError) as caught:
        verify_model(folder, pinned.digest)
    (problem,) = caught.value.problems
    assert caught.value.exit_code is ExitCode.ENVIRONMENT
    assert (problem.expected, problem.file) == (pinned.digest, str(folder))
    assert problem.found == model_digest(folder).digest
    assert f"changed {name}" in problem.what


def test_a_missing_and_a_new_file_are_named(folder: Path) -> None:
    pinned = model_digest(folder)
    write_manifest(folder, pinned)
    (folder / "chat_template.jinja").rename(folder / "chat.jinja")
    with pytest.raises(UnfitEnvironmentError, match=r"missing chat_template\.jinja; new chat\.jinja"):
        verify_model(folder, pinned.digest)


def test_without_a_known_manifest_the_digests_are_told(folder: Path) -> None:
    with pytest.raises(UnfitEnvironmentError, match="expected sha256:0"):
        verify_model(folder, "sha256:" + "0" * 64)


def test_hidden_files_and_documents_are_ignored_and_named(folder: Path) -> None:
    before = model_digest(folder)
    (folder / ".cache").mkdir()
    for name in (".gitattributes", ".cache/x.bin", "README.md", "LICENSE"):
        (folder / name).write_text("x", encoding="utf-8")
    manifest = model_digest(folder)
    assert manifest.digest == before.digest
    assert manifest.ignored == (".cache/x.bin", ".gitattributes", "LICENSE", "README.md")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "x.PKL", "modeling_x.py", "original/consolidated.00.pth", "m.gguf"])
def test_pickles_and_code_are_refused_not_skipped(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    with pytest.raises(RefusedError, match=name):
        model_digest(folder)


def test_a_linked_folder_is_refused_and_a_linked_file_is_read(folder: Path, tmp_path: Path) -> None:
    digest = model_digest(folder).digest
    moved = (folder / "config.json").rename(tmp_path / "blob")
    (folder / "config.json").symlink_to(moved)
    assert model_digest(folder).digest == digest
    (folder / "more").symlink_to(tmp_path)
    with pytest.raises(RefusedError, match="found more"):
        model_digest(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(RefusedError, match="not complete"):
        model_digest(folder)


def test_a_folder_that_is_not_there_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="gristmill models smollm2"):
        model_digest(tmp_path / "none")


def test_a_file_changed_in_the_same_second_with_the_same_size_is_read_again(folder: Path) -> None:
    """The cache of one process must not hide a change."""
    before = model_digest(folder).digest
    edit(folder / "chat_template.jinja", "assistant", "assistent")
    assert model_digest(folder).digest != before


def test_the_length_of_a_model_is_its_config_s_or_what_the_job_says(folder: Path) -> None:
    assert model_length(folder, ModelSettings()) == 8192
    assert model_length(folder, ModelSettings(max_model_len=2048)) == 2048
    edit(folder / "tokenizer_config.json", "{", '{"model_max_length": 4096, ')
    assert model_length(folder, ModelSettings()) == 4096


def test_pin_rewrites_only_the_digest_line(tmp_path: Path) -> None:
    job_yaml = write_job(tmp_path)
    edit(job_yaml, "  digest: ", "  digest:   ")
    edit(tmp_path / "models" / "stub" / "chat_template.jinja", "assistant", "Assistant")
    before = job_yaml.read_text(encoding="utf-8").splitlines()
    digest = pin(job_yaml, environment={"MODELS": str(tmp_path / "models")})
    after = job_yaml.read_text(encoding="utf-8").splitlines()
    assert [line for line in after if "digest:" not in line] == [line for line in before if "digest:" not in line]
    assert load(job_yaml).job_file.model.digest == digest == model_digest(tmp_path / "models" / "stub").digest


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model:\n  path: a\ndecoding:\n", "model:\n  path: a\n  digest: D\ndecoding:\n"),
        ("model:\n  path: a  # where\n  # note\n", "model:\n  path: a  # where\n  digest: D\n  # note\n"),
        ("model:\n  digest: old  # keep\n  path: a\n", "model:\n  digest: D  # keep\n  path: a\n"),
        ("model:\n    path: a", "model:\n    path: a\n    digest: D\n"),
        ("model:\n  path: a\n  digest:\n", "model:\n  path: a\n  digest: D\n"),
        ("input:\n  digest: mine\nmodel: # m\n  path: a\n\nx: 1\n", "input:\n  digest: mine\nmodel: # m\n  path: a\n  digest: D\n\nx: 1\n"),
        ("model: {path: a}\n", None),
        ("input:\n  path: a\n", None),
    ],
)
def test_the_digest_line_is_found_or_added_under_model(before: str, after: str | None) -> None:
    assert with_digest_line(before, "D") == after


def test_making_smollm2_does_nothing_when_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_convert_smollm2", stub_model)
    first = smollm2(tmp_path / "m" / "smollm2")
    monkeypatch.setattr(models, "_convert_smollm2", lambda out: pytest.fail("made again"))
    assert smollm2(tmp_path / "m" / "smollm2").digest == first.digest
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["smollm2"]


def test_a_crash_while_making_smollm2_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(out: Path) -> None:
        stub_model(out)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert_smollm2", crash)
    with pytest.raises(KeyboardInterrupt):
        smollm2(tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []


def test_two_makers_of_smollm2_at_once_leave_one_whole_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def make(out: Path) -> None:
        both.wait(timeout=10)
        stub_model(out)

    monkeypatch.setattr(models, "_convert_smollm2", make)
    digests: list[str] = []
    threads = [threading.Thread(target=lambda: digests.append(smollm2(tmp_path / "smollm2").digest)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]


@pytest.mark.slow
def test_the_tiny_model_is_the_same_each_time() -> None:
    assert model_digest(tiny_model()).digest == "sha256:e352e0f67b996b30f44e8c51a26f37d76b9ae14f5cc76dc35a6667ee5dfd1642"


@pytest.mark.slow
def test_smollm2_is_the_model_that_the_example_job_pins() -> None:
    manifest = model_digest(smollm2_model())
    assert manifest.digest == "sha256:d27b464693c7a9a580caf6fc503b8d082c54dc468f8af2bbfcff12069f5ebab5"
    assert manifest.parameters == 134_515_008
