"""The database under the register: creation, transactions, and real processes that meet in one file."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from batch_assets.core.errors import UnfitEnvironmentError
from batch_assets.core.leasing import ShardState
from batch_assets.stores.register import Register
from tests.register.conftest import OpenRegister
from tests.support.registers import JOB, planned, spec
from tests.support.threads import at_once

REPOSITORY = Path(__file__).parents[2]


def start(*arguments: str, clock: str | None = None) -> "subprocess.Popen[str]":
    """`clock`: how far its wall clock is off, as faketime writes it (`+5h`)."""
    faked = ["faketime", "-m", "-f", clock] if clock else []
    return subprocess.Popen(
        [*faked, sys.executable, "-m", "tests.register.processes", *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def all_at_once(processes: "list[subprocess.Popen[str]]") -> list[list[list[str]]]:
    """Lets processes that said `ready` go together; their lines, split."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [[line.split() for line in output.splitlines()] for output in outputs]


def test_two_processes_on_one_database_never_both_win(open_register: OpenRegister, database_url: str):
    """Each shard is staged by exactly one process, under the epoch that the register shows; whoever lost its lease was told."""
    register = open_register()
    version = planned(register, shards=60)
    first, second = all_at_once([start("contend", database_url, JOB, version, worker) for worker in ("a", "b")])
    events = [(what, int(shard), int(epoch)) for what, shard, epoch in first + second]
    staged = {shard: epoch for what, shard, epoch in events if what == "staged"}
    assert len([event for event in events if event[0] == "staged"]) == 60
    assert staged == {row.number: row.epoch for row in register.shards(JOB, version)}
    assert {row.number: row.staged_slots for row in register.shards(JOB, version)} == staged
    assert {shard for what, shard, epoch in events if (what, epoch) == ("stale", 1)} == set(range(3, 61, 3))
    # An epoch ends once: staged, or ended from outside and then its holder was stale.
    assert sorted(event[1:] for event in events if event[0] == "expired") == sorted(event[1:] for event in events if event[0] == "stale")
    assert register.counts(JOB, version)[ShardState.STAGED] == 60


def test_processes_that_create_the_database_at_once_all_find_it_whole(empty_database_url: str):
    outputs = all_at_once([start("create", empty_database_url) for _ in range(3)])
    assert outputs == [[["jobs", "0"]]] * 3


def test_threads_that_create_at_once_all_find_it_whole(empty_database_url: str):
    registers = [Register(empty_database_url) for _ in range(6)]
    at_once([register.create for register in registers])
    assert [register.jobs() for register in registers] == [[]] * 6
    at_once([register.close for register in registers])


def test_creating_again_keeps_everything(open_register: OpenRegister):
    version = planned(open_register())
    again = open_register()
    assert [row.name for row in again.versions(JOB)] == [version]


def test_a_register_that_was_closed_opens_again(register: Register):
    version = planned(register)
    register.close()
    assert register.version(JOB, version).name == version


def test_nothing_is_opened_before_the_first_call(tmp_path: Path):
    Register(f"sqlite:///{tmp_path}/new/register.db").close()
    assert list(tmp_path.iterdir()) == []


def test_a_database_of_a_newer_schema_is_refused(empty_database_url: str):
    register = Register(empty_database_url)
    register.create()
    with register.writing() as connection:
        connection.execute(text("update alembic_version set version_num = '9999'"))
    with pytest.raises(UnfitEnvironmentError, match=r"(?s)newer gristmill.*found schema 9999"):
        register.create()
    register.close()


def test_a_place_that_is_no_database_is_refused_with_its_name(tmp_path: Path):
    (tmp_path / "register.db").write_text("this is a text file, and a long one at that" * 100)
    with pytest.raises(UnfitEnvironmentError, match=r"register\.db cannot be opened"):
        Register(f"sqlite:///{tmp_path}/register.db").create()


def test_a_transaction_that_raises_leaves_nothing(register: Register):
    def break_off() -> None:
        with register.writing() as connection:
            connection.execute(text("update alembic_version set version_num = '9999'"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    register.create()


def test_a_writer_waits_for_another_instead_of_failing(open_register: OpenRegister):
    def register_ten(register: Register, letter: str) -> list[int]:
        return [register.register_version(spec(prompt=f"{letter}{i}"), kind="full").number for i in range(10)]

    rows = at_once([partial(register_ten, open_register(), letter) for letter in "abcd"])
    assert sorted(number for numbers in rows for number in numbers) == list(range(1, 41))


def test_rows_that_belong_to_nothing_are_refused(register: Register):
    with pytest.raises(IntegrityError):
        register.worker_started(worker_id="a", job="nothing", version="v0001-000000", host="h", pid=1)
