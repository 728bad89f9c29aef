"""The doors between our parts and the outside: small protocols, and the values that pass through them. No implementation.

Requests and completions are named tuples, as log entries are: one of each is made for every record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from batch_assets.core.spec import Decoding, EngineBuild, ModelSettings


class ObjectStore(Protocol):
    """Bytes under paths (`/`-separated, relative to the root). Implemented in stores/objects.py (local folder, s3)."""

    def create(self, path: str, data: bytes) -> None:
        """Put if absent, durable when it returns. Raises ObjectExistsError when the path is taken."""
        ...

    def get(self, path: str) -> bytes:
        """Raises ObjectMissingError when there is none; any other failure is raised as it is and means `unreadable`."""
        ...


class Tokenizer(Protocol):
    """Text to token ids. `structural` ids (chat markers, end of text) must never occur in a record's part."""

    @property
    def structural_ids(self) -> frozenset[int]:
        """Every added or special token id."""
        ...

    def encode_template(self, text: str) -> list[int]:
        """Template text: markers such as `<|im_start|>` become their structural ids; nothing is added around it."""
        ...

    def encode_record(self, text: str) -> list[int]:
        """Record text: markers are ordinary text; nothing is added around it."""
        ...

    @property
    def byte_level(self) -> bool:
        """True when tokens <= UTF-8 bytes holds for every text."""
        ...

    def chat_text(self, messages: Sequence[tuple[str, str]]) -> str:
        """The model's chat template over (role, content) pairs, with the generation prompt, not tokenised."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine needs to load. `speed` are knobs that change no answer (max_num_seqs, kv cache, eager …)."""

    model_folder: str
    model_settings: ModelSettings
    decoding: Decoding
    answer_schema: str  # canonical JSON text
    speed: tuple[tuple[str, object], ...] = ()


class Request(NamedTuple):
    """One prompt for the engine. `request_id` is unique among live requests."""

    request_id: str
    token_ids: list[int]


class Completion(NamedTuple):
    """One finished request. `finish_reason` is the engine's word (`stop`, `length`, …)."""

    request_id: str
    text: str
    finish_reason: str
    tokens_prompt: int
    tokens_cached: int
    tokens_output: int


class Engine(Protocol):
    """Load once, keep many requests in flight, take each answer as it finishes."""

    @property
    def build(self) -> EngineBuild:
        """What this engine is; compared with the version's pinned build before loading."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """How many requests decode together; the feeder keeps more than this in flight."""
        ...

    def load(self, config: EngineConfig) -> None:
        """Load the model. Raises EngineFailedError."""
        ...

    def submit(self, request: Request) -> None:
        """Raises RecordRejectedError for this one request only; the engine goes on."""
        ...

    def poll(self) -> list[Completion]:
        """One step; may be empty. Raises EngineFailedError when the engine is dead."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget these; unknown ids are ignored."""
        ...

    def close(self) -> None:
        """Free the device. Twice is fine."""
        ...
