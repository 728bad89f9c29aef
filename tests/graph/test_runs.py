"""Runs inside Dagster over the scripted engine: what is logged, what is refused, what holds."""

from collections import Counter
from pathlib import Path

import dagster as dg
import pytest

from batch_assets.core.errors import GateFailedError, NotFinishedError, RefusedError
from batch_assets.definitions import build_job_definitions
from batch_assets.launch import RunRequest, execute, open_instance, point_readers
from batch_assets.settings import Settings
from batch_assets.steps import PublishConfig
from batch_assets.stores.installation import Installation
from tests.support.jobs import records, settings_in, write_job
from tests.support.models import stub_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
Events = Counter[tuple[str, str, str | None, tuple[str, ...]]]


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    return write_job(tmp_path / "jobs" / "j", records(40), model=stub_model(tmp_path / "models" / "stub"), run={"shard_records": 15})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path / "root", jobs=tmp_path / "jobs")


def execute_assets(
    settings: Settings, job_file: Path, node: str, *, tags: dict[str, str] | None = None, partition: str | None = None
) -> str:
    """Materialize one asset (with its checks) as the UI does; returns the run's id."""
    selection = dg.AssetSelection.assets(dg.AssetKey(["j", node]))  # with its checks, as a launch in the UI
    asset_job = dg.Definitions(jobs=[dg.define_asset_job("asset_path", selection=selection)])
    definitions = dg.Definitions.merge(build_job_definitions(job_file, settings), asset_job)
    with open_instance(settings) as instance:
        job = definitions.resolve_job_def("asset_path")
        return job.execute_in_process(instance=instance, partition_key=partition, tags=tags or {}, raise_on_error=True).run_id


def events_of(settings: Settings, run_ids: list[str]) -> Events:
    """(what, asset, partition, metadata keys) of every event that people see; versions are the same in both installations."""
    found: Events = Counter()
    with open_instance(settings) as instance:
        for run_id in run_ids:
            for entry in instance.all_logs(run_id):
                event = entry.dagster_event
                if event is None:
                    continue
                if event.is_step_materialization:
                    seen = event.step_materialization_data.materialization
                    found[("materialization", str(seen.asset_key), seen.partition, tuple(sorted(seen.metadata)))] += 1
                elif event.event_type is dg.DagsterEventType.ASSET_CHECK_EVALUATION:
                    check = event.asset_check_evaluation_data
                    found[("check", check.check_name, str(check.passed), tuple(sorted(check.metadata)))] += 1
    return found


def test_the_op_job_logs_what_the_assets_log(tmp_path: Path, job_file: Path, settings: Settings) -> None:
    ended = execute(settings, job_file, RunRequest())
    assert ended.error is None
    by_ops = events_of(settings, [ended.run_id])

    other = settings_in(tmp_path / "other", jobs=tmp_path / "jobs")
    runs = [execute_assets(other, job_file, "shard_plan")]
    with open_instance(other) as instance:
        keys = instance.get_dynamic_partitions("j_shards")
        version = instance.get_dynamic_partitions("j_versions")[0]
    span = {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]}
    runs.append(execute_assets(other, job_file, "shard_results", tags=span))
    runs.append(execute_assets(other, job_file, "release", partition=version))
    runs.append(execute_assets(other, job_file, "published", partition=version))

    assert version == ended.version
    assert events_of(other, runs) == by_ops
    assert sum(count for (what, key, *_), count in by_ops.items() if what == "materialization" and "shard_results" in key) == len(keys) == 3


def test_the_same_again_asks_the_model_nothing_and_wakes_nobody(job_file: Path, settings: Settings) -> None:
    first = execute(settings, job_file, RunRequest())
    again = execute(settings, job_file, RunRequest())
    assert (first.error, again.error) == (None, None)
    assert again.version == first.version
    keys = {key for what, key, *_ in events_of(settings, [again.run_id]) if what == "materialization"}
    assert keys == {str(dg.AssetKey(["j", "shard_plan"]))}


def test_a_failed_gate_ends_the_run_red_and_publishes_nothing_even_by_hand(tmp_path: Path, settings: Settings) -> None:
    rows = records(30)
    for row in rows[:4]:
        row["body"] = ""
    job_file = write_job(tmp_path / "jobs" / "j", rows, model=stub_model(tmp_path / "models" / "stub"))
    ended = execute(settings, job_file, RunRequest())
    assert isinstance(ended.error, GateFailedError)
    assert ended.version is not None
    with pytest.raises(GateFailedError):
        point_readers(settings, job_file, version=ended.version, config=PublishConfig())
    assert Installation.open(settings).aliases().read("j") is None


def test_an_invented_version_is_refused_in_words_and_its_partition_key_removed(job_file: Path, settings: Settings) -> None:
    execute(settings, job_file, RunRequest())
    with pytest.raises(RefusedError, match="v0001"):
        point_readers(settings, job_file, version="v0099-aaaaaa", config=PublishConfig())
    with open_instance(settings) as instance:
        assert "v0099-aaaaaa" not in instance.get_dynamic_partitions("j_versions")


def test_a_partition_key_that_is_no_shard_and_a_pilot_below_1_end_a_run_in_words(job_file: Path, settings: Settings) -> None:
    with open_instance(settings) as instance:
        instance.add_dynamic_partitions("j_shards", ["nonsense"])
    with pytest.raises(dg.Failure, match=r"this partition is no shard.*\n.*found 'nonsense'"):
        execute_assets(settings, job_file, "shard_results", partition="nonsense")
    ended = execute(settings, job_file, RunRequest(pilot=-3))
    assert isinstance(ended.error, RefusedError)
    assert Installation.open(settings).register.versions("j") == []


def test_a_rollback_needs_a_reason_and_holds_the_job(job_file: Path, settings: Settings) -> None:
    first = execute(settings, job_file, RunRequest())
    text = job_file.read_text(encoding="utf-8").replace("max_tokens: 64", "max_tokens: 63")
    job_file.write_text(text, encoding="utf-8")
    second = execute(settings, job_file, RunRequest())
    assert second.error is None
    assert first.version is not None
    with pytest.raises(RefusedError):
        point_readers(settings, job_file, version=first.version, config=PublishConfig(rollback=True))
    point_readers(settings, job_file, version=first.version, config=PublishConfig(rollback=True, reason="wrong categories"))
    installation = Installation.open(settings)
    live = installation.aliases().read("j")
    assert live is not None
    assert (live.version, live.rollback, live.reason) == (first.version, True, "wrong categories")
    assert installation.register.job_hold("j") is not None
    held = execute(settings, job_file, RunRequest(version=str(second.version)))
    assert held.error is not None


def test_a_version_planned_by_a_sensor_above_its_limit_waits_for_a_person(tmp_path: Path, settings: Settings) -> None:
    job_file = write_job(tmp_path / "jobs" / "j", records(40), model=stub_model(tmp_path / "models" / "stub"), run={"auto_records_max": 10})
    execute_assets(settings, job_file, "shard_plan", tags={"dagster/sensor_name": "j__new_snapshot"})
    waiting = execute(settings, job_file, RunRequest())
    assert isinstance(waiting.error, NotFinishedError)
    approved = execute(settings, job_file, RunRequest(approve=True))
    assert approved.error is None
