"""The graph as the analyst sees it: a dump that changes only in a visible diff, and what the code location promises to adopters."""

import json
from pathlib import Path

import dagster as dg
import pytest

from batch_assets.definitions import build_definitions, build_job_definitions
from batch_assets.settings import Settings
from tests.support.jobs import records, settings_in, write_job
from tests.support.models import stub_model

GOLDEN = Path(__file__).with_name("graph.golden.json")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    write_job(tmp_path / "jobs" / "golden", records(3), model=stub_model(tmp_path / "models" / "stub-model"))
    return settings_in(tmp_path / "root", jobs=tmp_path / "jobs")


def dump(definitions: dg.Definitions) -> dict[str, object]:
    """Keys, dependencies, partitions, kinds, owners, group, checks of every node; jobs and sensors by name."""
    graph = definitions.resolve_asset_graph()
    nodes = {}
    for key in sorted(graph.get_all_asset_keys(), key=str):
        node = graph.get(key)
        nodes[key.to_user_string()] = {
            "deps": sorted(parent.to_user_string() for parent in node.parent_keys),
            "partitions": node.partitions_def.name if isinstance(node.partitions_def, dg.DynamicPartitionsDefinition) else None,
            "kinds": sorted(node.kinds),
            "owners": sorted(node.owners),
            "group": node.group_name,
            "executable": node.is_executable,
            "observable": node.is_observable,
            "checks": sorted(check.name for check in node.check_keys),
        }
    repository = definitions.get_repository_def()
    jobs = sorted(job.name for job in repository.get_all_jobs() if not job.name.startswith("__"))
    sensors = {sensor.name: sensor.default_status.value for sensor in repository.sensor_defs}
    return {"nodes": nodes, "jobs": jobs, "sensors": dict(sorted(sensors.items()))}


def test_the_graph_changes_only_in_a_visible_diff(settings: Settings) -> None:
    """To accept a change: delete the golden file, run this test, read the diff."""
    found = dump(build_definitions(settings))
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_a_refused_job_folder_shows_why_and_hides_no_other(settings: Settings) -> None:
    folder = settings.jobs / "broken"
    folder.mkdir()
    (folder / "job.yaml").write_text("input: {table: ./x.csv, key: id}\n", encoding="utf-8")
    graph = build_definitions(settings).resolve_asset_graph()
    keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
    assert {"broken/job_file", "golden/release"} <= keys
    assert "decoding" in (graph.get(dg.AssetKey(["broken", "job_file"])).description or "")


def test_an_adopter_merges_one_job_into_definitions_with_another_executor(settings: Settings) -> None:
    @dg.asset
    def theirs() -> None: ...

    mine = dg.Definitions(assets=[theirs], executor=dg.multiprocess_executor)
    merged = dg.Definitions.merge(mine, build_job_definitions(settings.jobs / "golden" / "job.yaml", settings))
    dg.Definitions.validate_loadable(merged)
    keys = {key.to_user_string() for key in merged.resolve_asset_graph().get_all_asset_keys()}
    assert {"theirs", "golden/published", "golden"} <= keys


def test_the_input_asset_links_the_customers_graph_to_ours(tmp_path: Path) -> None:
    job_file = write_job(tmp_path / "jobs" / "linked", records(3), model=stub_model(tmp_path / "models" / "stub-model"))
    text = job_file.read_text(encoding="utf-8").replace("  key: ticket_id", "  key: ticket_id\n  asset: [raw, support_tickets]")
    job_file.write_text(text, encoding="utf-8")
    graph = build_definitions(settings_in(tmp_path / "root", jobs=tmp_path / "jobs")).resolve_asset_graph()
    assert graph.get(dg.AssetKey(["linked", "snapshot"])).parent_keys == {dg.AssetKey(["raw", "support_tickets"])}
