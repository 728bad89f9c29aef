"""vLLM without a server: requests are added to its engine and taken from it as they finish. vLLM is imported when a model is loaded.

The facts that this rests on (0.32, tried) are in FINDINGS; nothing here knows records, shards or attempts beyond a request's name.
"""

import json
import os
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any, Final

from batch_assets.core.errors import EngineFailedError, RecordRejectedError
from batch_assets.core.ports import Completion, EngineConfig, Request
from batch_assets.core.request_ids import request_parts
from batch_assets.core.spec import EngineBuild

OWN_PROCESS: Final = "own_process"
GIB: Final = 1 << 30
SEED_LIMIT: Final = 1 << 63

# Quiet and offline; INFO lines of vLLM would repeat its whole configuration, prompts are never logged at any level that we set.
ENVIRONMENT: Final = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # never fork: polars and delta-rs panic after one
}
# On a CPU two threads of one worker spin against the other workers' and are 5-10 times slower; workers are the unit of scale there.
CPU_ENVIRONMENT: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
# Compiling needs a C compiler and minutes; the default cache would be 4 GB a worker; 256 sequences at 300 tokens/s would each take minutes;
# a prefill of 8,192 tokens is one step, and on a busy CPU one of two minutes, which the watchdog takes for a hung engine (seen).
CPU_SPEED: Final[Mapping[str, object]] = {"enforce_eager": True, "kv_cache_gb": 1.0, "max_num_seqs": 64, "max_num_batched_tokens": 2048}


class VllmOffline:
    """One model in one engine. One thread uses it."""

    def __init__(self, build: EngineBuild) -> None:
        self._build = build
        self._engine: Any = None
        self._params: Any = None
        self._seed: int | None = None  # None: decoding is greedy and a seed means nothing
        self._live: set[str] = set()

    @property
    def build(self) -> EngineBuild:
        """What is installed."""
        return self._build

    @property
    def max_num_seqs(self) -> int:
        """As vLLM decided, from the knob or from the device; only after `load`."""
        return self._engine.vllm_config.scheduler_config.max_num_seqs

    def load(self, config: EngineConfig) -> None:
        """Raises EngineFailedError."""
        on_cpu = self._build.version.startswith("vllm-cpu ")
        speed = {**(CPU_SPEED if on_cpu else {}), **dict(config.speed)}
        _prepare(os.environ, on_cpu=on_cpu, own_process=speed.pop("engine_core", None) == OWN_PROCESS)
        try:
            from vllm import LLM

            self._engine = LLM(**llm_arguments(config, speed)).llm_engine
            self._params = _sampling_params(config)
        except Exception as error:  # vLLM raises whatever its parts raise
            raise EngineFailedError(reason=f"loading {config.model_folder}: {type(error).__name__}: {error}") from error
        self._seed = config.decoding.seed if config.decoding.temperature > 0 else None

    def submit(self, request: Request) -> None:
        """Raises RecordRejectedError for this one request only: too long, empty, ids outside the vocabulary."""
        try:
            self._engine.add_request(request.request_id, {"type": "token", "prompt_token_ids": request.token_ids}, self._params_of(request))
        except (ValueError, TypeError) as error:  # VLLMValidationError is a ValueError; its text may quote the prompt
            raise RecordRejectedError(record_id=request.request_id, reason=type(error).__name__) from error
        self._live.add(request.request_id)

    def poll(self) -> list[Completion]:
        """One step of the model; returns at once when nothing is live. Raises EngineFailedError."""
        if not self._live:
            return []  # with the core in its own process, a step without work would wait for ever
        try:
            finished = [output for output in self._engine.step() if output.finished]
        except Exception as error:  # whatever CUDA, the scheduler or the core's process raise; its text may hold prompts
            raise EngineFailedError(reason=f"a model step raised {type(error).__name__}") from error
        self._live.difference_update(output.request_id for output in finished)
        return [_completion(output) for output in finished]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Frees their place in the batch; ids that are not live are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._live]
        if known:
            self._engine.abort_request(known)
            self._live.difference_update(known)

    def close(self) -> None:
        """Ends the core's process, if it has its own. Twice is fine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.engine_core.shutdown()

    def _params_of(self, request: Request) -> Any:
        """Shared by all when greedy (vLLM clones it). Else a seed for record and attempt: whatever the batch, and another at a retry."""
        if self._seed is None:
            return self._params
        params = copy(self._params)
        parts = request_parts(request.request_id)
        if parts is not None:
            params.seed = (self._seed + zlib.crc32(f"{parts.attempt}:{parts.record_id}".encode())) % SEED_LIMIT
        return params


def llm_arguments(config: EngineConfig, speed: Mapping[str, Any]) -> dict[str, Any]:
    """What `vllm.LLM` is called with: the recipe's settings first, then knobs that change no answer."""
    settings = config.model_settings
    arguments: dict[str, Any] = {
        "model": config.model_folder,
        "load_format": "safetensors",  # `auto` would load a pickle
        "trust_remote_code": False,
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel,
        "seed": config.decoding.seed,
        "enable_prefix_caching": True,
        # Per engine, not per request: `auto` lets the first request's backend run all later schemas.
        "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
    }
    knobs = dict(speed)
    kv_cache_gb = knobs.pop("kv_cache_gb", None)
    if kv_cache_gb is not None:
        knobs["kv_cache_memory_bytes"] = int(float(kv_cache_gb) * GIB)
    return arguments | knobs


def _sampling_params(config: EngineConfig) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    decoding = config.decoding
    return SamplingParams(
        max_tokens=decoding.max_tokens,
        temperature=decoding.temperature,
        top_p=decoding.top_p,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=StructuredOutputsParams(json=json.loads(config.answer_schema)),
    )


def _prepare(environment: MutableMapping[str, str], *, on_cpu: bool, own_process: bool) -> None:
    """VLLM and torch read these when they are imported; what is set already stays, except where the core runs."""
    for name, value in {**ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu else {})}.items():
        environment.setdefault(name, value)
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if own_process else "0"


def _completion(output: Any) -> Completion:
    answer = output.outputs[0]
    return Completion(
        request_id=output.request_id,
        text=answer.text,
        finish_reason=answer.finish_reason or "",
        tokens_prompt=len(output.prompt_token_ids or ()),
        tokens_cached=output.num_cached_tokens or 0,
        tokens_output=len(answer.token_ids),
    )
