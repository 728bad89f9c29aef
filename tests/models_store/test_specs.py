"""The registered spec: written once, read back whole, and found out when it was touched."""

import json
from pathlib import Path

import pytest

from batch_assets.core.errors import UnfitEnvironmentError
from batch_assets.core.spec import EngineBuild, PinnedFile, Snapshot, SourceKind, VersionSpec
from batch_assets.stores.job_folders import input_rules_of, recipe_of
from batch_assets.stores.objects import open_objects
from batch_assets.stores.specs import SpecStore
from tests.support.job_folders import edit, load, write_job


@pytest.fixture
def spec(tmp_path: Path) -> VersionSpec:
    job = load(edit(write_job(tmp_path), "  acl: acl\n", "  acl: acl\n  labels: {category: subject}\n  duplicates: set_aside\n"))
    return VersionSpec(
        job=job.name,
        recipe=recipe_of(job),
        input_rules=input_rules_of(job),
        engine_build=EngineBuild(engine="scripted", version="1", guidance="1.7.6"),
        snapshot=Snapshot(kind=SourceKind.JSONL, uri=job.source_uri, files=(PinnedFile(name="tickets.jsonl", size_bytes=3, sha256="ab"),)),
        prompt=job.prompt_text,
        answer_schema=job.schema_text,
        model_path=job.model_path,
        owners=("team:support-data",),
    )


@pytest.fixture
def store(tmp_path: Path) -> SpecStore:
    return SpecStore(open_objects(str(tmp_path / "root")))


def test_a_spec_is_read_back_equal(store: SpecStore, spec: VersionSpec) -> None:
    store.write("tickets", "v0001-3fa9c1", spec)
    assert store.read("tickets", "v0001-3fa9c1") == spec


def test_what_stands_in_jobs_afterwards_does_not_matter(store: SpecStore, spec: VersionSpec, tmp_path: Path) -> None:
    store.write("tickets", "v0001-3fa9c1", spec)
    edit(tmp_path / "jobs" / "tickets" / "prompt.md", "You read", "You ignore")
    assert store.read("tickets", "v0001-3fa9c1").prompt == spec.prompt


def test_writing_the_same_spec_again_is_fine_and_another_is_refused(store: SpecStore, spec: VersionSpec) -> None:
    store.write("tickets", "v0001-3fa9c1", spec)
    store.write("tickets", "v0001-3fa9c1", spec)
    other = VersionSpec(**{name: getattr(spec, name) for name in spec.__slots__} | {"prompt": spec.prompt + "!"})
    with pytest.raises(UnfitEnvironmentError, match=r"prompt\.md"):
        store.write("tickets", "v0001-3fa9c1", other)
    assert store.read("tickets", "v0001-3fa9c1") == spec


@pytest.mark.parametrize("name", ["spec.json", "prompt.md", "answer.schema.json"])
def test_a_touched_or_missing_file_is_named_with_both_digests(store: SpecStore, spec: VersionSpec, tmp_path: Path, name: str) -> None:
    store.write("tickets", "v0001-3fa9c1", spec)
    path = tmp_path / "root" / "tickets" / "versions" / "v0001-3fa9c1" / "spec" / name
    text = path.read_text(encoding="utf-8")
    path.chmod(0o644)
    path.write_text(text.replace('"max_tokens":64', '"max_tokens":65') if name == "spec.json" else text + " ", encoding="utf-8")
    with pytest.raises(UnfitEnvironmentError) as caught:
        store.read("tickets", "v0001-3fa9c1")
    (problem,) = caught.value.problems
    assert problem.file == f"tickets/versions/v0001-3fa9c1/spec/{name}"
    assert str(problem.expected).startswith("sha256:")
    assert str(problem.found).startswith("sha256:")
    path.unlink()
    with pytest.raises(UnfitEnvironmentError, match=name):
        store.read("tickets", "v0001-3fa9c1")


def test_the_stored_json_is_canonical_and_without_the_two_texts(store: SpecStore, spec: VersionSpec, tmp_path: Path) -> None:
    store.write("tickets", "v0001-3fa9c1", spec)
    text = (tmp_path / "root" / "tickets" / "versions" / "v0001-3fa9c1" / "spec" / "spec.json").read_text(encoding="utf-8")
    content = json.loads(text)
    assert text == json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert content["identity"] == spec.identity
    assert "prompt" not in content
    assert "answer_schema" not in content
