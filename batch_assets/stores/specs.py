"""Specs of registered versions: canonical JSON, the prompt and the answer schema under `<job>/versions/<version>/spec/`.

After registration this is the only description of a version that anybody reads; what stands in jobs/ may change.
"""

import json
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

SPEC_FILE = "spec.json"
PROMPT_FILE = "prompt.md"
SCHEMA_FILE = "answer.schema.json"
FORMAT = 1


class SpecStore:
    """Created once per version, never changed."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def write(self, job: str, version: str, spec: VersionSpec) -> None:
        """Writing the same spec again is fine (also after a crash between its files); a different one is refused."""
        content = spec_content(spec)
        texts = {PROMPT_FILE: spec.prompt, SCHEMA_FILE: spec.answer_schema, SPEC_FILE: canonical_json(content)}
        for name, text in texts.items():  # spec.json last: when it is there, all is there
            self._create(_path(job, version, name), text.encode())

    def read(self, job: str, version: str) -> VersionSpec:
        """Raises UnfitEnvironmentError when a file is missing or is not what its digest says."""
        content = json.loads(self._get(job, version, SPEC_FILE))
        prompt, schema = self._get(job, version, PROMPT_FILE), self._get(job, version, SCHEMA_FILE)
        try:
            spec = spec_of(content, prompt=prompt, answer_schema=schema)
            identity = content["identity"]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(_path(job, version, SPEC_FILE), expected=f"a spec of format {FORMAT}", found=type(error).__name__) from error
        expected = {PROMPT_FILE: spec.recipe.prompt_digest, SCHEMA_FILE: spec.recipe.schema_digest, SPEC_FILE: identity}
        found = {PROMPT_FILE: digest_of_text(prompt), SCHEMA_FILE: digest_of_text(schema), SPEC_FILE: spec.identity}
        for name, digest in expected.items():
            if found[name] != digest:
                raise _damaged(_path(job, version, name), expected=digest, found=found[name])
        return spec

    def _create(self, path: str, data: bytes) -> None:
        try:
            self._objects.create(path, data)
        except ObjectExistsError:
            found = self._objects.get(path)
            if found != data:
                raise _damaged(path, expected=digest_of_text(data.decode()), found="another content under the same version") from None

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
            fix="restore the file from a copy of the root; a registered spec is never edited (edit jobs/ and plan a new version)",
        )
    )
