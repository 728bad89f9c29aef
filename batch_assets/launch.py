"""Dagster runs started from the command line: the same jobs as in the UI, recorded in the same DAGSTER_HOME, executed in this process."""

import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from batch_assets.core.errors import GristmillError, Problem, UnfitEnvironmentError
from batch_assets.definitions import build_job_definitions
from batch_assets.settings import Settings
from batch_assets.steps import TERMINAL_TAG, JobGraph, PublishConfig
from batch_assets.stores.job_folders import job_path, load_job

TEMPLATE = Path(__file__).parent / "templates" / "dagster.yaml"
WORKSPACE = "workspace.yaml"
QUIET = {
    "loggers": {"console": {"config": {"log_level": "CRITICAL"}}}
}  # the terminal shows progress and refusals; the UI has the run's log


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What `gristmill run` asks of the main job."""

    version: str = ""
    pilot: int = 0
    approve: bool = False
    publish: bool = True
    by: str = "unverified"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended. `version` is None when planning was refused; `error` is the refusal of ours that ended it."""

    run_id: str
    run_url: str
    version: str | None
    error: GristmillError | None


def open_instance(settings: Settings) -> dg.DagsterInstance:
    """The instance that the UI shows; its folder and dagster.yaml are made when missing."""
    home = settings.dagster_home
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        shutil.copy(TEMPLATE, home / "dagster.yaml")
    os.environ["DAGSTER_HOME"] = str(home)
    return dg.DagsterInstance.from_config(str(home))


def execute(settings: Settings, job_file: Path, request: RunRequest) -> RunEnd:
    """Run the main job of a job folder to its end. Ctrl-C drains, holds, raises KeyboardInterrupt; foreign errors are raised."""
    definitions = build_job_definitions(job_file, settings)
    name = job_path(job_file).parent.name
    config = {"ops": {f"{name}__plan_version": {"config": asdict(request)}}, **QUIET}
    with open_instance(settings) as instance:
        run_id, error = _run(definitions.resolve_job_def(name), run_config=config, instance=instance, tags={TERMINAL_TAG: "yes"})
        version = request.version or _planned_version(instance, run_id, name)
        return RunEnd(run_id=run_id, run_url=f"{settings.ui_url}/runs/{run_id}", version=version, error=error)


def point_readers(settings: Settings, job_file: Path, *, version: str, config: PublishConfig) -> RunEnd:
    """Materialize one partition of `published`, as the button in the UI does. Raises the refusal that ended it."""
    definitions = build_job_definitions(job_file, settings)
    graph = JobGraph.of(load_job(job_file, environment=os.environ), job_file)
    key = graph.key("published")
    with open_instance(settings) as instance:
        instance.add_dynamic_partitions(f"{graph.name}_versions", [version])
        run_id, error = _run(
            definitions.resolve_implicit_global_asset_job_def(),
            run_config={"ops": {"__".join(key.path): {"config": config.model_dump()}}, **QUIET},
            instance=instance,
            asset_selection=[key],
            partition_key=version,
        )
    if error is not None:
        raise error
    return RunEnd(run_id=run_id, run_url=f"{settings.ui_url}/runs/{run_id}", version=version, error=None)


def _run(job: dg.JobDefinition, **arguments: Any) -> tuple[str, GristmillError | None]:
    """Execute here. Returns the run's id and the refusal of ours that ended it; its exit code is the command's."""
    run_id = str(uuid.uuid4())
    try:
        job.execute_in_process(run_id=run_id, **arguments)
    except dg.DagsterExecutionInterruptedError as interrupted:
        raise KeyboardInterrupt from interrupted
    except dg.Failure as failure:
        if isinstance(failure.__cause__, GristmillError):
            return run_id, failure.__cause__
        raise
    except GristmillError as error:
        return run_id, error
    return run_id, None


def _planned_version(instance: dg.DagsterInstance, run_id: str, name: str) -> str | None:
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION):
        event = entry.dagster_event
        if event is not None and event.asset_key == dg.AssetKey([name, "shard_plan"]):
            return str(event.step_materialization_data.materialization.metadata["job_version"].value)
    return None


def serve_ui(settings: Settings, *, host: str, port: int) -> int:
    """`dagster dev` over the repository's workspace with this installation's settings, until it is ended. Returns its exit code."""
    workspace = _workspace_folder()
    open_instance(settings).dispose()
    environment = {**os.environ, **settings.as_environment(), "DAGSTER_HOME": str(settings.dagster_home)}
    command = [sys.executable, "-m", "dagster", "dev", "-w", str(workspace / WORKSPACE), "-h", host, "-p", str(port)]
    return subprocess.run(command, cwd=workspace, env=environment, check=False).returncode


def _workspace_folder() -> Path:
    for folder in (Path.cwd(), Path(__file__).resolve().parents[1]):
        if (folder / WORKSPACE).exists():
            return folder
    raise UnfitEnvironmentError(
        Problem(
            code="ui.workspace",
            what="no workspace.yaml here nor beside the package",
            expected=f"{Path.cwd() / WORKSPACE}",
            found="nothing",
            fix="run `gristmill ui` in the folder of the project",
        )
    )
