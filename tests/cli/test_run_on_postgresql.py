"""`gristmill` with its register on PostgreSQL: the same commands, and workers that log in as their version."""

import pytest
from sqlalchemy import make_url

from tests.cli.terminal import JOB, Terminal
from tests.support.postgres import Server

pytestmark = pytest.mark.slow


def test_a_job_is_planned_answered_published_and_found_unchanged(tmp_path, postgres_server: Server) -> None:
    database = postgres_server.create()
    url = postgres_server.url(database)
    terminal = Terminal(tmp_path)
    terminal.write_job()
    ended = terminal.gristmill("run", "--by", "anna", "--json", GRISTMILL_DATABASE_URL=url).succeeded().json
    assert (ended["outcome"], ended["results"], ended["dead_letters"], ended["shards"]) == ("published", 22, 2, 3)
    again = terminal.gristmill("run", "--json", GRISTMILL_DATABASE_URL=url).succeeded().json
    assert (again["job_version"], again["model_calls"]) == (ended["job_version"], 0)
    assert terminal.gristmill("status", JOB, "--json", GRISTMILL_DATABASE_URL=url).succeeded().json["job_version"] == ended["job_version"]
    assert not (tmp_path / "root" / "register.db").exists()
    # The workers were there under a name of their own.
    log = (postgres_server.folder / "server.log").read_text(encoding="utf-8")
    assert f"_{JOB}_{ended['job_version']} database={database}" in log


def test_doctor_says_which_database_it_is_and_that_workers_are_isolated(tmp_path, postgres_server: Server) -> None:
    url = postgres_server.url(postgres_server.create())
    findings = Terminal(tmp_path).gristmill("doctor", "--json", GRISTMILL_DATABASE_URL=url).json["findings"]
    told = {finding["name"]: finding["message"] for finding in findings}
    assert told["database"].startswith("PostgreSQL 18")
    assert str(make_url(url).password) not in told["database"]
    assert told["isolation"].startswith("on: gristmill_admin gives")
