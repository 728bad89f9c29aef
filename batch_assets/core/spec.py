"""What a job version is made of, as stored with it: after registration nothing else is read.

Frozen values only. Text from people comes in through `core/job_file.py` (pydantic); files are read and written by `stores/specs.py`.
`identity` is a digest of content: no times, no paths, no counters, no run, check or publish settings.
"""

from dataclasses import asdict, dataclass, field
from enum import StrEnum

from batch_assets.core.identity import digest_of


class SourceKind(StrEnum):
    """How the source is read; by suffix, else Delta."""

    DELTA = "delta"
    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"


class DuplicatePolicy(StrEnum):
    """What planning does when two rows share an id (or a row has none)."""

    REFUSE = "refuse"
    SET_ASIDE = "set_aside"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings that shape what the model computes; part of the recipe."""

    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Decoding parameters; part of the recipe."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides an answer besides the record: one per job version (I2)."""

    model_name: str
    model_digest: str
    model_settings: ModelSettings
    prompt_digest: str  # over the text of prompt.md
    schema_digest: str  # over the canonical JSON of answer.schema.json
    decoding: Decoding

    @property
    def digest(self) -> str:
        """`sha256:…` over the content; the model's name is no content, its digest is."""
        content = asdict(self)
        del content["model_name"]
        return digest_of(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRules:
    """Which records go in and what is taken from them; part of the identity, not of the recipe."""

    key: str
    fields: tuple[tuple[str, str], ...]  # (placeholder, source column), sorted by placeholder
    acl: str | None = None
    record_class: str | None = None
    segment: str | None = None
    labels: tuple[tuple[str, str], ...] = ()  # (answer field, source column)
    duplicates: DuplicatePolicy = DuplicatePolicy.REFUSE
    input_tokens_max: int | None = None  # of the record's own part; None = model length - max_tokens - prompt
    attempts_max: int = 3
    answer_timeout_s: float = 120.0

    @property
    def digest(self) -> str:
        """`sha256:…` over the content."""
        return digest_of(asdict(self))

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Source columns whose text is used as it is, each once, sorted; a label may stand in one of them too."""
        names = {self.key, *(column for _, column in self.fields)}
        names |= {name for name in (self.acl, self.record_class, self.segment) if name is not None}
        return tuple(sorted(names))

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Source columns of labels, each once, sorted; read as JSON, so that a number stays one."""
        return tuple(sorted({column for _, column in self.labels}))


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedFile:
    """One file of a snapshot: its name within the source (no folder), size, and sha256 of its bytes."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An immutable input: a Delta table at a version, or files by their hashes (sorted by name)."""

    kind: SourceKind
    uri: str  # location; not part of the digest
    table_id: str | None = None
    table_version: int | None = None
    table_content: str | None = None  # `sha256:…` over the data files of that version; None in specs written before it was recorded
    files: tuple[PinnedFile, ...] = ()

    @property
    def digest(self) -> str:
        """Content only: table id, version and the data files of that version for Delta; the sorted file hashes otherwise. A renamed
        file is the same input, except that keys of rows without an id name their file.
        """
        if self.kind is SourceKind.DELTA:
            table = {"kind": self.kind, "table_id": self.table_id, "version": self.table_version}
            return digest_of(table if self.table_content is None else {**table, "content": self.table_content})
        return digest_of({"kind": self.kind, "files": [[pinned.name, pinned.sha256] for pinned in self.files]})

    @property
    def label(self) -> str:
        """`support_tickets@318` for people."""
        stem = self.uri.rstrip("/").rpartition("/")[2].partition(".")[0]
        return f"{stem}@{self.table_version if self.table_version is not None else self.digest.removeprefix('sha256:')[:6]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuild:
    """The inference code a version was registered with; workers with another one refuse."""

    engine: str  # "vllm" or "scripted"
    version: str
    guidance: str
    image: str | None = None

    @property
    def digest(self) -> str:
        """`sha256:…` over the content."""
        return digest_of(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpec:
    """One job version, complete: what the planner registers and what workers, committer and release read back.

    `prompt` and `answer_schema` are the full texts; `model_path` and `snapshot.uri` are locations and part of no digest.
    """

    job: str
    recipe: Recipe
    input_rules: InputRules
    engine_build: EngineBuild
    snapshot: Snapshot
    prompt: str
    answer_schema: str  # canonical JSON text
    model_path: str
    base_release: str | None = None
    pilot_records: int | None = None
    shard_records: int = 5000  # recorded, changes no answer, no part of identity
    owners: tuple[str, ...] = field(default=())

    @property
    def identity(self) -> str:
        """`sha256:…`: job + recipe + input rules + engine build + snapshot + base release (+ pilot size)."""
        return digest_of(
            {
                "job": self.job,
                "recipe": self.recipe.digest,
                "input_rules": self.input_rules.digest,
                "engine_build": self.engine_build.digest,
                "snapshot": self.snapshot.digest,
                "base_release": self.base_release,
                "pilot_records": self.pilot_records,
            }
        )
