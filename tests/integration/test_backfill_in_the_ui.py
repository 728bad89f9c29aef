"""What an analyst does in the UI, through the same GraphQL mutations, against a real `dagster dev`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batch_assets.core.leasing import ShardState
from batch_assets.stores.installation import Installation
from tests.support.dagster_dev import LOCATION, REPOSITORY, DagsterDev, dagster_dev, wait_for
from tests.support.jobs import records, settings_in, write_job
from tests.support.models import tiny_model

LAUNCH_ASSETS = """
mutation($selector: JobOrPipelineSelector!) {
  launchPipelineExecution(executionParams: {selector: $selector, runConfigData: {}, mode: "default"}) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on InvalidSubsetError { message }
  }
}"""
LAUNCH_BACKFILL = """
mutation($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename
    ... on LaunchBackfillSuccess { backfillId }
    ... on PythonError { message }
    ... on InvalidSubsetError { message }
  }
}"""
RUN_STATUS = "query($id: ID!) { runOrError(runId: $id) { ... on Run { status pipelineName } } }"
GREEN = """
query($key: AssetKeyInput!) {
  assetNodeOrError(assetKey: $key) {
    ... on AssetNode {
      assetPartitionStatuses { ... on DefaultPartitionStatuses { materializedPartitions failedPartitions unmaterializedPartitions } }
    }
  }
}"""
BACKFILL_STATUS = "query($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill { status } } }"


@pytest.mark.real_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_backfill_of_scattered_shards_turns_green_one_by_one_and_the_run_of_the_command_line_is_there_too(tmp_path: Path) -> None:
    """Plan, a backfill of three scattered shards and `gristmill run` in one Dagster instance, under real vLLM."""
    model = tiny_model(tmp_path / "models" / "tiny")
    job_file = write_job(
        tmp_path / "jobs" / "uijob",
        records(160),
        model=model,
        max_tokens=64,
        run={"workers_max": 1, "shard_records": 20, "engine": {"max_num_seqs": 4}},
    )
    settings = settings_in(tmp_path / "root", jobs=tmp_path / "jobs", engine="vllm", lease_s=20.0, renew_s=2.0)
    settings.state.mkdir(parents=True)
    with dagster_dev(settings) as dev:
        _launch_plan(dev)
        shards = wait_for(lambda: _statuses(dev)["unmaterializedPartitions"], limit_s=120, what="shards of the plan")
        chosen = [shards[0], shards[3], shards[-1]]
        backfill_id = _launch_backfill(dev, chosen)
        seen: list[int] = []
        wait_for(lambda: _backfill_ended(dev, backfill_id, seen), limit_s=400, what=f"the backfill; see {dev.log}", pause_s=0.3)
        assert sorted(_statuses(dev)["materializedPartitions"]) == sorted(chosen)
        assert any(0 < count < len(chosen) for count in seen), f"partitions did not turn green one by one: {seen}"
        _only_these_are_committed(settings, chosen)

        ended = subprocess.run(
            [sys.executable, "-m", "batch_assets.cli", "run", "--job", str(job_file), "--json"],
            cwd=REPOSITORY,
            env=_environment(settings),
            capture_output=True,
            text=True,
            check=False,
        )
        summary = json.loads(ended.stdout)
        assert ended.returncode in (0, 3), ended.stderr
        run_id = summary["run_url"].rpartition("/")[2]
        found = dev.query(RUN_STATUS, {"id": run_id})["runOrError"]
        assert found["pipelineName"] == "uijob"
        assert sorted(_statuses(dev)["materializedPartitions"]) == sorted(shards)
    installation = Installation.open(settings)
    assert {version.engine for version in installation.register.versions("uijob")} == {"vllm"}


def _environment(settings: Any) -> dict[str, str]:
    import os

    return {**os.environ, **settings.as_environment()}


def _selector(**more: Any) -> dict[str, Any]:
    return {"repositoryLocationName": LOCATION, "repositoryName": "__repository__", **more}


def _launch_plan(dev: DagsterDev) -> None:
    selector = _selector(pipelineName="__ASSET_JOB", assetSelection=[{"path": ["uijob", "shard_plan"]}], assetCheckSelection=[])
    launched = dev.query(LAUNCH_ASSETS, {"selector": selector})["launchPipelineExecution"]
    assert launched["__typename"] == "LaunchRunSuccess", launched
    run_id = launched["run"]["runId"]
    wait_for(
        lambda: dev.query(RUN_STATUS, {"id": run_id})["runOrError"]["status"] == "SUCCESS",
        limit_s=180,
        what=f"the plan's run; see {dev.log}",
    )


def _statuses(dev: DagsterDev) -> dict[str, list[str]]:
    return dev.query(GREEN, {"key": {"path": ["uijob", "shard_results"]}})["assetNodeOrError"]["assetPartitionStatuses"]


def _launch_backfill(dev: DagsterDev, partitions: list[str]) -> str:
    params = {"assetSelection": [{"path": ["uijob", "shard_results"]}], "partitionNames": partitions}
    launched = dev.query(LAUNCH_BACKFILL, {"params": params})["launchPartitionBackfill"]
    assert launched["__typename"] == "LaunchBackfillSuccess", launched
    return launched["backfillId"]


def _backfill_ended(dev: DagsterDev, backfill_id: str, seen: list[int]) -> bool:
    seen.append(len(_statuses(dev)["materializedPartitions"]))
    status = dev.query(BACKFILL_STATUS, {"id": backfill_id})["partitionBackfillOrError"]["status"]
    assert status in ("REQUESTED", "COMPLETED_SUCCESS"), status
    return status == "COMPLETED_SUCCESS"


def _only_these_are_committed(settings: Any, chosen: list[str]) -> None:
    register = Installation.open(settings).register
    version = register.resolve("uijob", "latest")
    committed = {row.key for row in register.shards("uijob", version.name) if row.state is ShardState.COMMITTED}
    assert committed == set(chosen)
