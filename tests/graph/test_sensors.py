"""Sensors ask for a run once, and for nothing that a person has to allow first."""

import os
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest

from batch_assets.core.leasing import HoldReason
from batch_assets.flows.planner import plan
from batch_assets.settings import Settings
from batch_assets.steps import JobGraph
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import load_job
from resources import GristmillResource
from sensors import build_sensors
from tests.support.jobs import records, settings_in, write_job
from tests.support.models import stub_model

Tick = Callable[[str], list[dg.RunRequest]]


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    return write_job(tmp_path / "jobs" / "j", records(20), model=stub_model(tmp_path / "models" / "stub"), run={"shard_records": 8})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path / "root", jobs=tmp_path / "jobs")


@pytest.fixture
def tick(job_file: Path, settings: Settings) -> Tick:
    graph = JobGraph.of(load_job(job_file, environment=os.environ), job_file)
    sensors = {sensor.name: sensor for sensor in build_sensors(graph)}
    instance = dg.DagsterInstance.ephemeral()

    def evaluate(name: str) -> list[dg.RunRequest]:
        resource = GristmillResource.from_settings(settings)
        with dg.build_sensor_context(instance=instance, resources={"gristmill": resource}) as context:
            return list(sensors[f"j__{name}"].evaluate_tick(context).run_requests or [])

    return evaluate


def planned(job_file: Path, settings: Settings) -> Installation:
    installation = Installation.open(settings)
    plan(installation, load_job(job_file, environment=os.environ))
    return installation


def test_all_sensors_are_stopped_until_a_person_starts_them(job_file: Path) -> None:
    graph = JobGraph.of(load_job(job_file, environment=os.environ), job_file)
    assert {sensor.default_status for sensor in build_sensors(graph)} == {dg.DefaultSensorStatus.STOPPED}


def test_a_new_snapshot_is_planned_once(tick: Tick, job_file: Path, settings: Settings) -> None:
    first, second = tick("new_snapshot"), tick("new_snapshot")
    assert len(first) == 1
    assert [request.run_key for request in second] == [request.run_key for request in first], "Dagster drops a repeated run key"
    planned(job_file, settings)
    assert tick("new_snapshot") == []


def test_work_left_is_supervised_under_the_leads_generation(tick: Tick, job_file: Path, settings: Settings) -> None:
    assert tick("work_left") == []
    installation = planned(job_file, settings)
    version = installation.register.resolve("j", "latest").name
    requests = tick("work_left")
    assert [request.run_key for request in requests] == [f"{version}:0"]
    shards = requests[0].run_config["ops"]["j__finish"]["config"]["shards"]
    assert len(shards) == installation.register.version("j", version).shards
    generation = installation.register.take_lead(job="j", version=version, holder="somebody", seen=None)
    assert [request.run_key for request in tick("work_left")] == [f"{version}:{generation}"]


def test_a_held_version_and_a_held_job_are_left_alone(tick: Tick, job_file: Path, settings: Settings) -> None:
    installation = planned(job_file, settings)
    version = installation.register.resolve("j", "latest").name
    installation.register.hold_version(job="j", version=version, reason=HoldReason.CANCELLED)
    assert tick("work_left") == []
    installation.register.lift_version_hold(job="j", version=version)
    installation.register.hold_job("j", by="ada", note="wait", reason=HoldReason.PERSON)
    assert (tick("work_left"), tick("new_snapshot"), tick("all_committed")) == ([], [], [])
