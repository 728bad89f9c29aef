"""Specs of registered versions: canonical JSON, the prompt and the answer schema under `<job>/versions/<version>/spec/`.

After registration this is the only description of a version that anybody reads; what stands in jobs/ may change. The register holds
the digests of each version, so that a folder of another version in its place is found by whoever reads it.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from batch_assets.core.errors import ObjectExistsError, ObjectMissingError, Problem, UnfitEnvironmentError
from batch_assets.core.identity import canonical_json, digest_of_text
from batch_assets.core.ports import ObjectStore
from batch_assets.core.spec import (
    Decoding,
    DuplicatePolicy,
    EngineBuild,
    InputRules,
    ModelSettings,
    PinnedFile,
    Recipe,
    Snapshot,
    SourceKind,
    VersionSpec,
)
from batch_assets.stores.register import VersionRow

SPEC_FILE = "spec.json"
PROMPT_FILE = "prompt.md"
SCHEMA_FILE = "answer.schema.json"
FORMAT = 1


class SpecStore:
    """Created once per version, never changed. `registered` gives a version's row by (job, full name)."""

    def __init__(self, objects: ObjectStore, registered: Callable[[str, str], VersionRow]) -> None:
        self._objects = objects
        self._registered = registered

    def write(self, job: str, version: str, spec: VersionSpec, *, attempt: str | None = None) -> None:
        """Writing the same spec again is fine (also after a crash between its files); one of another identity is refused.

        A planning that died may have left another spec of the same identity: what is no part of it (shard size, owners, locations) has
        been edited since. Then this one is put beside it, for those who read the version once `attempt` is its input.
        """
        content = canonical_json(spec_content(spec))
        texts = {PROMPT_FILE: spec.prompt, SCHEMA_FILE: spec.answer_schema, SPEC_FILE: content}
        for name, text in texts.items():  # spec.json last: when it is there, all is there
            path = _path(job, version, name)
            found = self._create(path, text)
            if found == text.encode():
                continue
            if name != SPEC_FILE or attempt is None or not _is_of_identity(found, spec.identity):
                raise _damaged(path, expected=digest_of_text(text), found="another content under the same version")
            self._create(_path(job, version, _spec_file(attempt)), content)

    def read(self, job: str, version: str) -> VersionSpec:
        """Raises UnfitEnvironmentError when a file is missing, not what its digest says, or of another version than the register says."""
        row = self._registered(job, version)
        name, text = self._get_spec(row)
        try:
            content = json.loads(text)
        except ValueError as error:
            raise _damaged(_path(job, version, name), expected="JSON", found=type(error).__name__) from error
        prompt, schema = self._get(job, version, PROMPT_FILE), self._get(job, version, SCHEMA_FILE)
        try:
            spec = spec_of(content, prompt=prompt, answer_schema=schema)
            identity = content["identity"]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(_path(job, version, name), expected=f"a spec of format {FORMAT}", found=type(error).__name__) from error
        for file, expected, found in (
            (PROMPT_FILE, spec.recipe.prompt_digest, digest_of_text(prompt)),
            (SCHEMA_FILE, spec.recipe.schema_digest, digest_of_text(schema)),
            (name, identity, spec.identity),
            (name, row.identity, spec.identity),
            (name, row.recipe_digest, spec.recipe.digest),
        ):
            if found != expected:
                raise _damaged(_path(job, version, file), expected=expected, found=found)
        return spec

    def _get_spec(self, row: VersionRow) -> tuple[str, str]:
        """(file, text) of the spec that the active planning attempt wrote, which is seldom one of its own."""
        if row.input_attempt is not None:
            name = _spec_file(row.input_attempt)
            try:
                return name, self._objects.get(_path(row.job, row.name, name)).decode(errors="replace")
            except ObjectMissingError:
                pass
        return SPEC_FILE, self._get(row.job, row.name, SPEC_FILE)

    def _create(self, path: str, text: str) -> bytes:
        """What is there afterwards."""
        data = text.encode()
        try:
            self._objects.create(path, data)
        except ObjectExistsError:
            return self._objects.get(path)
        return data

    def _get(self, job: str, version: str, name: str) -> str:
        path = _path(job, version, name)
        try:
            return self._objects.get(path).decode()
        except (ObjectMissingError, UnicodeDecodeError) as error:
            raise _damaged(path, expected="the registered spec", found=type(error).__name__) from error


def spec_content(spec: VersionSpec) -> dict[str, Any]:
    """Plain values of a spec, without the two texts, and with its identity beside it."""
    content = asdict(spec)
    del content["prompt"], content["answer_schema"]
    return {"format": FORMAT, "identity": spec.identity, **content}


def spec_of(content: dict[str, Any], *, prompt: str, answer_schema: str) -> VersionSpec:
    """Inverse of `spec_content`. Raises KeyError, TypeError or ValueError for what is no spec."""
    recipe, rules, snapshot = content["recipe"], content["input_rules"], content["snapshot"]
    return VersionSpec(
        job=content["job"],
        recipe=Recipe(
            **{
                **recipe,
                "model_settings": ModelSettings(**recipe["model_settings"]),
                "decoding": Decoding(**recipe["decoding"]),
            }
        ),
        input_rules=InputRules(
            **{
                **rules,
                "fields": _pairs(rules["fields"]),
                "labels": _pairs(rules["labels"]),
                "duplicates": DuplicatePolicy(rules["duplicates"]),
            }
        ),
        engine_build=EngineBuild(**content["engine_build"]),
        snapshot=Snapshot(
            **{
                **snapshot,
                "kind": SourceKind(snapshot["kind"]),
                "files": tuple(PinnedFile(**entry) for entry in snapshot["files"]),
            }
        ),
        prompt=prompt,
        answer_schema=answer_schema,
        model_path=content["model_path"],
        base_release=content["base_release"],
        pilot_records=content["pilot_records"],
        shard_records=content["shard_records"],
        owners=tuple(content["owners"]),
    )


def _pairs(values: list[list[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((first, second) for first, second in values)


def _is_of_identity(content: bytes, identity: str) -> bool:
    try:
        return json.loads(content)["identity"] == identity
    except (ValueError, KeyError, TypeError):
        return False


def _spec_file(attempt: str) -> str:
    return f"spec-{attempt}.json"


def _path(job: str, version: str, name: str) -> str:
    return f"{job}/versions/{version}/spec/{name}"


def _damaged(path: str, *, expected: str, found: str) -> UnfitEnvironmentError:
    return UnfitEnvironmentError(
        Problem(
            code="spec.damaged",
            file=path,
            what="the registered spec of this version is not what it was when it was registered",
            expected=expected,
            found=found,
            fix="restore the folder from a copy of the root; a registered spec is never edited (edit jobs/ and plan a new version)",
        )
    )
