"""A deterministic engine without a model: for tests, and to measure bookkeeping. Never a default, and no stand-in for quality.

It answers every request with a small valid answer of the schema, and misbehaves on the records that its script names.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, assert_never
from zlib import crc32

from pydantic import BaseModel, ConfigDict, ValidationError

from batch_assets.core.errors import EngineFailedError, Problem, RecordRejectedError, RefusedError
from batch_assets.core.identity import canonical_json
from batch_assets.core.ports import Completion, EngineConfig, Request
from batch_assets.core.request_ids import record_of, request_parts
from batch_assets.core.spec import EngineBuild
from batch_assets.engines.schema_samples import sample_answers
from batch_assets.engines.tokenizers import BYTES_PER_TOKEN, ByteTokenizer

SCRIPTED_BUILD: Final = EngineBuild(engine="scripted", version="1", guidance="none")
ANSWER_VARIANTS: Final = 16


class Act(StrEnum):
    """What the engine does with a request that a behaviour names."""

    INVALID = "invalid"  # text that is no JSON
    WRONG_SCHEMA = "wrong_schema"  # JSON of another schema
    SURROGATE = "surrogate"  # a lone surrogate inside a string
    TRUNCATE = "truncate"  # finish_reason length
    REJECT = "reject"  # refused when submitted
    NEVER = "never"  # no completion until it is aborted
    SLOW = "slow"  # `polls` polls later than others
    CRASH = "crash"  # the process is killed, as by the OOM killer, when it is polled
    ENGINE_ERROR = "engine_error"  # poll raises
    STALL = "stall"  # poll does not return


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Behaviour(_Strict):
    """Which requests: by record id or by text within the prompt; by default at every attempt."""

    act: Act
    record: str | None = None
    contains: str | None = None
    attempts_max: int | None = None  # only at attempts up to this
    polls: int = 20


class Script(_Strict):
    """What the JSON file may say."""

    max_num_seqs: int = 256
    answers_per_poll: int | None = None  # default max_num_seqs
    poll_s: float = 0.0  # each poll that finds work takes at least this long
    load_s: float = 0.0
    answer: dict[str, Any] | None = None  # the same for all; default: small valid answers of the schema
    answers: dict[str, Any] = {}  # by record id
    texts: dict[str, str] = {}  # by record id, written as they are: need be no JSON
    behaviours: tuple[Behaviour, ...] = ()


class ScriptedEngine:
    """Answers in the order of submission. One thread uses it."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._live: dict[str, tuple[Request, Behaviour | None]] = {}
        self._slow: dict[str, int] = {}  # request -> polls left
        self._answers: list[str] = []
        self._by_record = {record_id: canonical_json(answer) for record_id, answer in script.answers.items()} | script.texts

    @property
    def build(self) -> EngineBuild:
        """The same on every machine."""
        return SCRIPTED_BUILD

    @property
    def max_num_seqs(self) -> int:
        """As the script says."""
        return self._script.max_num_seqs

    def load(self, config: EngineConfig) -> None:
        """Makes the answers that the schema allows."""
        time.sleep(self._script.load_s)
        given = self._script.answer
        self._answers = [canonical_json(given)] if given is not None else sample_answers(config.answer_schema, ANSWER_VARIANTS)

    def submit(self, request: Request) -> None:
        """Raises RecordRejectedError when the script says so."""
        behaviour = self._behaviour(request) if self._script.behaviours else None
        if behaviour is not None and behaviour.act is Act.REJECT:
            raise RecordRejectedError(record_id=request.request_id, reason="the script rejects it")
        if behaviour is not None and behaviour.act is Act.SLOW:
            self._slow[request.request_id] = behaviour.polls
        self._live[request.request_id] = (request, behaviour)

    def poll(self) -> list[Completion]:
        """Completes the oldest `answers_per_poll` requests."""
        if self._live and self._script.poll_s:
            time.sleep(self._script.poll_s)
        return list(self._completions())

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forgets them."""
        for request_id in request_ids:
            self._live.pop(request_id, None)
            self._slow.pop(request_id, None)

    def close(self) -> None:
        """Nothing to free."""

    def _behaviour(self, request: Request) -> Behaviour | None:
        parts = request_parts(request.request_id)
        if parts is None:
            return None
        for behaviour in self._script.behaviours:
            if behaviour.attempts_max is not None and parts.attempt > behaviour.attempts_max:
                continue
            if behaviour.record is not None and behaviour.record != parts.record_id:
                continue
            if behaviour.contains is not None and behaviour.contains not in _text_of(request):
                continue
            return behaviour
        return None

    def _completions(self) -> Iterator[Completion]:
        wanted = self._script.answers_per_poll or self._script.max_num_seqs
        for request, behaviour in list(self._live.values()):
            if wanted == 0:
                return
            if behaviour is not None and self._is_late(request, behaviour):
                continue
            wanted -= 1
            del self._live[request.request_id]
            text = self._answer(request)
            yield _completion(request, text, "stop") if behaviour is None else _misbehave(request, behaviour, text)

    def _is_late(self, request: Request, behaviour: Behaviour) -> bool:
        if behaviour.act is not Act.SLOW:
            return behaviour.act is Act.NEVER
        self._slow[request.request_id] -= 1
        return self._slow[request.request_id] > 0

    def _answer(self, request: Request) -> str:
        # By the record, not by the attempt or the epoch: an answer that is computed again is the same answer.
        record_id = record_of(request.request_id)
        given = self._by_record.get(record_id)
        return given if given is not None else self._answers[crc32(record_id.encode("utf-8", "replace")) % len(self._answers)]


def read_script(path: Path | None) -> Script:
    """Raises RefusedError when the file is not a script."""
    if path is None:
        return Script()
    try:
        return Script.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise RefusedError(
            Problem(
                code="settings.engine_script",
                file=str(path),
                key="GRISTMILL_ENGINE_SCRIPT",
                what=f"no script for the scripted engine: {error}",
                expected="a JSON object of batch_assets.engines.scripted.Script",
                found="something else",
                fix="correct the file, or unset GRISTMILL_ENGINE_SCRIPT",
            )
        ) from error


def _misbehave(request: Request, behaviour: Behaviour, text: str) -> Completion:
    match behaviour.act:
        case Act.INVALID:
            return _completion(request, "no JSON at all", "stop")
        case Act.WRONG_SCHEMA:
            return _completion(request, '{"no_such_field_of_any_schema":1}', "stop")
        case Act.SURROGATE:
            return _completion(request, '{"\\ud800":1}', "stop")
        case Act.TRUNCATE:
            return _completion(request, text[:-1], "length")
        case Act.CRASH:
            os.kill(os.getpid(), signal.SIGKILL)
            raise EngineFailedError(reason="killed by its script")
        case Act.ENGINE_ERROR:
            raise EngineFailedError(reason="the script says so")
        case Act.STALL:
            while True:
                time.sleep(1)
        case Act.SLOW | Act.NEVER | Act.REJECT:
            return _completion(request, text, "stop")
        case _:
            assert_never(behaviour.act)


def _completion(request: Request, text: str, finish_reason: str) -> Completion:
    return Completion(
        request_id=request.request_id,
        text=text,
        finish_reason=finish_reason,
        tokens_prompt=len(request.token_ids),
        tokens_cached=0,
        tokens_output=len(text) // BYTES_PER_TOKEN + 1,
    )


def _text_of(request: Request) -> str:
    """The prompt as text; the byte tokenizer's markers are left out."""
    return ByteTokenizer.decode(request.token_ids)
