"""The registered spec: written once, read back whole, and found out when it was touched."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from batch_assets.core.errors import UnfitEnvironmentError
from batch_assets.core.identity import digest_of_text
from batch_assets.core.spec import EngineBuild, PinnedFile, Snapshot, SourceKind, VersionSpec
from batch_assets.stores.job_folders import input_rules_of, recipe_of
from batch_assets.stores.objects import open_objects
from batch_assets.stores.register import Register
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
def register(tmp_path: Path) -> Register:
    register = Register(f"sqlite:///{tmp_path}/register.db")
    register.create()
    return register


@pytest.fixture
def store(tmp_path: Path, register: Register) -> SpecStore:
    return SpecStore(open_objects(str(tmp_path / "root")), register.version)


@pytest.fixture
def version(register: Register, spec: VersionSpec) -> str:
    """The name under which `spec` is registered."""
    return register.register_version(spec, kind="full").name


def with_prompt(spec: VersionSpec, prompt: str) -> VersionSpec:
    return replace(spec, prompt=prompt, recipe=replace(spec.recipe, prompt_digest=digest_of_text(prompt)))


def test_a_spec_is_read_back_equal(store: SpecStore, version: str, spec: VersionSpec) -> None:
    store.write("tickets", version, spec)
    assert store.read("tickets", version) == spec


def test_what_stands_in_jobs_afterwards_does_not_matter(store: SpecStore, version: str, spec: VersionSpec, tmp_path: Path) -> None:
    store.write("tickets", version, spec)
    edit(tmp_path / "jobs" / "tickets" / "prompt.md", "You read", "You ignore")
    assert store.read("tickets", version).prompt == spec.prompt


def test_writing_the_same_spec_again_is_fine_and_another_is_refused(store: SpecStore, version: str, spec: VersionSpec) -> None:
    store.write("tickets", version, spec)
    store.write("tickets", version, spec)
    other = with_prompt(spec, spec.prompt + "!")
    with pytest.raises(UnfitEnvironmentError, match=r"prompt\.md"):
        store.write("tickets", version, other)
    assert store.read("tickets", version) == spec


def test_the_whole_spec_of_another_version_in_its_place_is_refused_with_both_digests(
    store: SpecStore, register: Register, version: str, spec: VersionSpec, tmp_path: Path
) -> None:
    other = with_prompt(spec, spec.prompt + "!")
    other_version = register.register_version(other, kind="full").name
    store.write("tickets", version, spec)
    store.write("tickets", other_version, other)
    folder = tmp_path / "root" / "tickets" / "versions"
    shutil.rmtree(folder / version / "spec")
    shutil.copytree(folder / other_version / "spec", folder / version / "spec")
    with pytest.raises(UnfitEnvironmentError) as caught:
        store.read("tickets", version)
    (problem,) = caught.value.problems
    assert (problem.expected, problem.found) == (spec.identity, other.identity)
    assert store.read("tickets", other_version) == other


def test_the_attempt_that_became_the_input_is_read_with_what_it_wrote_and_no_other_identity_is_written(
    store: SpecStore, register: Register, version: str, spec: VersionSpec
) -> None:
    store.write("tickets", version, replace(spec, shard_records=7, owners=("team:old",)), attempt="died")
    store.write("tickets", version, spec, attempt="lives")
    register.activate(job="tickets", version=version, attempt="lives", shards=[], records=0, surplus=0, set_aside_by_class={})
    assert store.read("tickets", version) == spec
    with pytest.raises(UnfitEnvironmentError, match=r"spec\.json"):
        store.write("tickets", version, replace(spec, pilot_records=5), attempt="another")


@pytest.mark.parametrize("name", ["spec.json", "prompt.md", "answer.schema.json"])
def test_a_touched_or_missing_file_is_named_with_both_digests(
    store: SpecStore, version: str, spec: VersionSpec, tmp_path: Path, name: str
) -> None:
    store.write("tickets", version, spec)
    path = tmp_path / "root" / "tickets" / "versions" / version / "spec" / name
    text = path.read_text(encoding="utf-8")
    path.chmod(0o644)
    path.write_text(text.replace('"max_tokens":64', '"max_tokens":65') if name == "spec.json" else text + " ", encoding="utf-8")
    with pytest.raises(UnfitEnvironmentError) as caught:
        store.read("tickets", version)
    (problem,) = caught.value.problems
    assert problem.file == f"tickets/versions/{version}/spec/{name}"
    assert str(problem.expected).startswith("sha256:")
    assert str(problem.found).startswith("sha256:")
    path.unlink()
    with pytest.raises(UnfitEnvironmentError, match=name):
        store.read("tickets", version)


def test_the_stored_json_is_canonical_and_without_the_two_texts(store: SpecStore, version: str, spec: VersionSpec, tmp_path: Path) -> None:
    store.write("tickets", version, spec)
    text = (tmp_path / "root" / "tickets" / "versions" / version / "spec" / "spec.json").read_text(encoding="utf-8")
    content = json.loads(text)
    assert text == json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert content["identity"] == spec.identity
    assert "prompt" not in content
    assert "answer_schema" not in content
