"""The composition root of the Dagster side.

`defs` is what `workspace.yaml` points at. Adopters with a code location of their own merge `build_job_definitions` into theirs; it sets no
executor, because two executors cannot be merged (correctness rests on the supervisor's generation, not on the executor).
"""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from batch_assets.assets import build_assets, build_model
from batch_assets.checks import build_checks
from batch_assets.core.errors import RefusedError
from batch_assets.jobs import build_jobs
from batch_assets.settings import Settings
from batch_assets.steps import JobGraph
from batch_assets.stores.job_folders import find_jobs, job_path, load_job
from resources import GristmillResource
from sensors import build_sensors

# Backfill policies and observable multi-assets are beta in the pinned version; FINDINGS has how they behave there.
warnings.filterwarnings("ignore", category=dg.BetaWarning)


@dg.definitions
def defs() -> dg.Definitions:
    """Every job folder of the installation that the environment describes."""
    return build_definitions(Settings.from_environment(os.environ))


def build_definitions(settings: Settings, *, resource: GristmillResource | None = None) -> dg.Definitions:
    """One group per job folder under `settings.jobs`. A folder that is refused shows as one node that says why."""
    known_models: set[str] = set()
    parts = [_part(job_file, settings, known_models) for job_file in find_jobs(settings.jobs)]
    shared = dg.Definitions(resources={"gristmill": resource or GristmillResource.from_settings(settings)}, executor=dg.in_process_executor)
    return dg.Definitions.merge(shared, *parts)


def build_job_definitions(job_file: str | Path, settings: Settings, *, resource_key: str = "gristmill") -> dg.Definitions:
    """The graph, checks, jobs and sensors of one job file, with the resource they need; no executor. Raises RefusedError."""
    part = _job_definitions(Path(job_file), known_models=set())
    return dg.Definitions.merge(part, dg.Definitions(resources={resource_key: GristmillResource.from_settings(settings)}))


def _part(job_file: Path, settings: Settings, known_models: set[str]) -> dg.Definitions:
    del settings
    try:
        return _job_definitions(job_file, known_models=known_models)
    except RefusedError as refused:
        name = job_path(job_file).parent.name
        return dg.Definitions(assets=[dg.AssetSpec([name, "job_file"], description=f"refused: {refused}", group_name="refused_jobs")])


def _job_definitions(job_file: Path, *, known_models: set[str]) -> dg.Definitions:
    graph = JobGraph.of(load_job(job_file, environment=os.environ), job_file)
    assets: Sequence[dg.AssetsDefinition | dg.AssetSpec] = build_assets(graph)
    if graph.model_name not in known_models:
        known_models.add(graph.model_name)
        assets = [build_model(graph.model_name, graph), *assets]
    return dg.Definitions(assets=assets, asset_checks=build_checks(graph), jobs=build_jobs(graph), sensors=build_sensors(graph))
