"""A redrive in Dagster: its shards are missing work for jobs and sensors, and a backfill of them turns them green as usual."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from batch_assets.core.leasing import ShardState, VersionState
from batch_assets.core.redrive import TRANSIENT_CLASSES
from batch_assets.definitions import build_job_definitions
from batch_assets.flows.redrive import redrive
from batch_assets.launch import RunRequest, execute, open_instance
from batch_assets.settings import Settings
from batch_assets.steps import JobGraph
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import load_job
from resources import GristmillResource
from sensors import build_sensors
from tests.graph.test_runs import execute_assets
from tests.support.jobs import records, settings_in, write_job
from tests.support.models import stub_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FAILING = ("T-000003", "T-000030")


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    return write_job(
        tmp_path / "jobs" / "j",
        records(40),
        model=stub_model(tmp_path / "models" / "stub"),
        run={"shard_records": 10},
        checks={"dead_letters": {"max": "20%"}},
    )


@pytest.fixture
def settings(tmp_path: Path, job_file: Path) -> Settings:
    """Published, and redriven: two records failed, in two of its shards or in one."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"behaviours": [{"act": "invalid", "record": each} for each in FAILING]}), encoding="utf-8")
    settings = settings_in(tmp_path / "root", jobs=tmp_path / "jobs")
    failing = settings_in(tmp_path / "root", jobs=tmp_path / "jobs", engine_script=str(path))
    assert execute(failing, job_file, RunRequest()).error is None
    installation = Installation.open(settings)
    version = installation.register.resolve("j", "latest").name
    assert redrive(installation, job="j", version=version, classes=TRANSIENT_CLASSES).records == 2
    return settings


def open_keys(settings: Settings) -> list[str]:
    register = Installation.open(settings).register
    return [row.key for row in register.shards("j", register.resolve("j", "latest").name) if row.state is not ShardState.COMMITTED]


def test_a_backfill_of_the_open_shards_turns_them_green_and_the_next_release_is_another(job_file: Path, settings: Settings) -> None:
    """Sensors see it likewise: work that is left, then a version to release once more."""
    keys = open_keys(settings)
    (work,) = tick(job_file, settings, "work_left")
    assert work.run_config["ops"]["j__finish"]["config"]["shards"] == keys
    assert list(tick(job_file, settings, "all_committed")) == []
    for key in keys:
        execute_assets(settings, job_file, "shard_results", partition=key)
    assert open_keys(settings) == []
    for key in keys:
        newest = materializations(settings, "shard_results", key)[0]
        assert (newest.tags or {})["dagster/data_version"] == f"{key.rpartition('-')[0]}/1"
        assert values(newest)["reopened"] == 3 - len(keys)
    assert list(tick(job_file, settings, "work_left")) == []
    (release,) = tick(job_file, settings, "all_committed")
    assert not str(release.run_key).endswith(":release:0"), "Dagster drops a run key that the first release had"

    version = Installation.open(settings).register.resolve("j", "latest")
    assert version.state is VersionState.FINISHED
    execute_assets(settings, job_file, "release", partition=version.name)
    after, before = (values(each) for each in materializations(settings, "release", version.name))
    assert after["release_id"] != before["release_id"]
    told = {name: after[name] for name in ("processed", "failed", "retried", "quarantined", "reopened", "recovered")}
    assert told == {"processed": 40, "failed": 0, "retried": 2, "quarantined": 0, "reopened": 2, "recovered": 2}
    assert (before["failed"], after["tokens_thrown_away"] > 0) == (2, True)
    assert list(tick(job_file, settings, "all_committed")) == []


def test_open_rounds_are_missing_work_for_the_job_that_finishes_shards_and_a_class_is_one_line(job_file: Path, settings: Settings) -> None:
    with open_instance(settings) as instance:
        job = build_job_definitions(job_file, settings).resolve_job_def("j__finish_shards")
        run_id = job.execute_in_process(instance=instance).run_id
        lines = [entry.user_message for entry in instance.all_logs(run_id) if "attempts failed so" in entry.user_message]
    assert open_keys(settings) == []
    version = Installation.open(settings).register.resolve("j", "latest").name
    assert lines == [f"{version}: 0 records without an answer, not_json; 6 attempts failed so"]


def materializations(settings: Settings, node: str, partition: str) -> list[dg.AssetMaterialization]:
    """Of one partition, newest first."""
    wanted = dg.AssetRecordsFilter(asset_key=dg.AssetKey(["j", node]), asset_partitions=[partition])
    with open_instance(settings) as instance:
        found = instance.fetch_materializations(wanted, limit=9).records
    return [record.asset_materialization for record in found if record.asset_materialization is not None]


def values(event: dg.AssetMaterialization) -> dict[str, Any]:
    """Its metadata."""
    return {name: entry.value for name, entry in event.metadata.items()}


def tick(job_file: Path, settings: Settings, name: str) -> Iterator[dg.RunRequest]:
    """What a sensor asks for now."""
    graph = JobGraph.of(load_job(job_file, environment=os.environ), job_file)
    sensors = {sensor.name: sensor for sensor in build_sensors(graph)}
    resource = GristmillResource.from_settings(settings)
    with dg.build_sensor_context(instance=dg.DagsterInstance.ephemeral(), resources={"gristmill": resource}) as context:
        yield from sensors[f"j__{name}"].evaluate_tick(context).run_requests or []
