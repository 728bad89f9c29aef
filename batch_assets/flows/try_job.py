"""`gristmill try`: render and answer the first few records of a source on the screen. Plans, registers and stores nothing."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from batch_assets.core.answers import AnswerChecker, InvalidAnswer
from batch_assets.core.errors import RecordRejectedError
from batch_assets.core.ports import Completion, Engine, EngineConfig, Request
from batch_assets.core.prompting import PromptRenderer, RenderError, parse_prompt
from batch_assets.engines.open import open_engine
from batch_assets.engines.tokenizers import tokenizer_for
from batch_assets.settings import Settings
from batch_assets.stores.job_folders import Job, input_rules_of, recipe_of
from batch_assets.stores.models import verify_model
from batch_assets.stores.snapshots import pin_snapshot, read_batches

SHOWN_CHARACTERS_MAX = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One record: its id, its answer or why there is none, and its tokens."""

    record_id: str
    answer: str | None
    problem: str | None
    tokens_prompt: int
    tokens_output: int

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
