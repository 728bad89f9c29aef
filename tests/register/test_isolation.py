"""A login per version (PostgreSQL): a worker's own connection sees and changes its version's rows, and nothing else."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError

from batch_assets.core.errors import GristmillError
from batch_assets.core.leasing import LeaseEnd, ShardState
from batch_assets.stores.register import CommittedShard, Register
from tests.support.postgres import ADMIN, PASSWORD, Server
from tests.support.registers import JOB, planned

OpenAs = Callable[[str], Register]


@pytest.fixture
def leader(register_on_postgres: Register) -> Register:
    """Owns the tables and may make roles."""
    return register_on_postgres


@pytest.fixture
def open_as_worker(leader: Register) -> Iterator[OpenAs]:
    """Opens the register as the workers of a version do."""
    opened: list[Register] = []

    def open_one(version: str) -> Register:
        opened.append(Register(leader.worker_url(job=JOB, version=version), pooled=False))
        opened[-1].create()
        return opened[-1]

    yield open_one
    for register in opened:
        register.close()


def test_a_worker_does_all_its_work_with_its_own_login(leader: Register, open_as_worker: OpenAs):
    version = planned(leader)
    worker = open_as_worker(version)
    worker.worker_started(worker_id="w", job=JOB, version=version, host="h", pid=1)
    assert worker.worker_heartbeat("w", {"answered": 1})
    generation = leader.take_lead(job=JOB, version=version, holder="leader", seen=None)
    assert worker.lead(JOB, version).generation == generation
    given_back = worker.claim(job=JOB, version=version, worker="w")
    worker.release(given_back, end=LeaseEnd.DRAINED)
    worker.release(given_back, end=LeaseEnd.DRAINED)
    lease = worker.claim(job=JOB, version=version, worker="w")
    worker.renew(lease)
    worker.stage(lease, slots=3, seconds=1)
    worker.stage(lease, slots=3, seconds=1)
    leader.commit(job=JOB, version=version, generation=generation, shards=[CommittedShard(number=lease.shard, round=0)])
    worker.stage(lease, slots=3, seconds=1)
    leader.hold_job(JOB, by="kim", note="")
    assert worker.claim(job=JOB, version=version, worker="w") is None
    worker.worker_leaving("w")
    worker.worker_left("w")
    assert leader.counts(JOB, version)[ShardState.COMMITTED] == 1


def test_a_worker_neither_sees_nor_changes_another_version(leader: Register, open_as_worker: OpenAs):
    mine, other, other_job = planned(leader), planned(leader, prompt="q"), planned(leader, job="other")
    worker = open_as_worker(mine)
    leader.worker_started(worker_id="theirs", job=JOB, version=other, host="h", pid=1)
    theirs = leader.claim(job=JOB, version=other, worker="theirs")
    before = leader.shards(JOB, other)
    assert [row.name for row in worker.versions(JOB)] == [mine]
    assert (worker.shards(JOB, other), worker.shards("other", other_job), worker.jobs()) == ([], [], [JOB])
    assert worker.claim(job=JOB, version=other, worker="w") is None
    assert worker.workers(JOB, other) == []
    assert not worker.worker_heartbeat("theirs", {})
    for act in (worker.renew, lambda lease: worker.release(lease, end=LeaseEnd.RELEASED)):
        with pytest.raises(GristmillError, match="there is no shard"):
            act(theirs)
    with pytest.raises(DBAPIError, match="row-level security"):
        worker.worker_started(worker_id="w", job=JOB, version=other, host="h", pid=1)
    assert leader.shards(JOB, other) == before


@pytest.mark.parametrize(
    "statement",
    [
        "select * from releases",
        "select * from verdicts",
        "select * from worker_logins",
        "update versions set state = 'held'",
        "update jobs set hold = null",
        "update leads set generation = 99",
        "update shards set wanted = true",
        "update shards set input_sha256 = 'x'",
        "update shards set stats = '{}'",
        "update shards set round = 7",
        "update shards set version = 'v0002-000000'",
        "insert into verdicts (release_id, release_digest, passed, payload, created_at) values ('r', 'd', true, '{}', '')",
        "delete from shards",
        "delete from workers",
        "truncate shards",
        "create role intruder",
        "create table mine (x integer)",
        "alter table shards disable row level security",
        "set role gristmill_admin",
    ],
)
def test_a_worker_may_not(leader: Register, open_as_worker: OpenAs, statement: str):
    worker = open_as_worker(planned(leader))
    with pytest.raises(ProgrammingError, match=r"permission denied|must be owner"), worker.writing() as connection:
        connection.execute(text(statement))


def test_a_worker_may_not_commit_or_undo_what_is_staged(leader: Register, open_as_worker: OpenAs):
    version = planned(leader)
    worker = open_as_worker(version)
    lease = worker.claim(job=JOB, version=version, worker="w")
    with pytest.raises(DBAPIError, match="row-level security"), worker.writing() as connection:
        connection.execute(text("update shards set state = 'committed' where number = 1"))
    worker.stage(lease, slots=1, seconds=1)
    with worker.writing() as connection:
        assert connection.execute(text("update shards set state = 'pending' where number = 1")).rowcount == 0


def test_the_login_is_made_once_so_that_adopted_workers_keep_theirs(leader: Register):
    version, other = planned(leader), planned(leader, prompt="q")
    first = leader.worker_url(job=JOB, version=version)
    assert leader.worker_url(job=JOB, version=version) == first
    assert leader.worker_url(job=JOB, version=other) != first
    assert make_url(first).username.endswith(f"_{JOB}_{version}")


def test_the_login_is_its_password(leader: Register):
    url = make_url(leader.worker_url(job=JOB, version=planned(leader)))
    with (
        pytest.raises(OperationalError, match="password authentication failed"),
        Register(url.set(password="guessed").render_as_string(hide_password=False))._opened().connect(),
    ):
        pass


def test_a_worker_holds_no_connection_between_transactions(leader: Register, open_as_worker: OpenAs):
    version = planned(leader)
    worker = open_as_worker(version)
    worker.renew(worker.claim(job=JOB, version=version, worker="w"))
    with leader.reading() as connection:
        user = connection.scalar(text("select gristmill_worker_role(:job, :version)"), {"job": JOB, "version": version})
        # A backend needs a moment to go after its client has said good-bye.
        assert (
            connection.scalar(text("select count(*) from pg_stat_activity where usename = :user and state = 'active'"), {"user": user}) == 0
        )


def test_a_role_that_may_not_make_roles_says_so_and_its_workers_use_its_own_login(postgres_server: Server):
    name = postgres_server.create()
    with postgres_server.connect() as connection:
        connection.execute("drop role if exists plain")
        connection.execute(f"create role plain login password '{PASSWORD}'")
        connection.execute(f"alter database {name} owner to plain")
    register = Register(postgres_server.url(name, user="plain"))
    register.create()
    version = planned(register)
    assert register.isolation().obstacle == "role plain may not make roles; now: alter role plain createrole"
    assert make_url(register.worker_url(job=JOB, version=version)).username == "plain"
    register.close()
    postgres_server.drop(name)


def test_isolation_is_on_for_the_owner_that_may_make_roles_and_not_for_a_worker(leader: Register, open_as_worker: OpenAs):
    state = leader.isolation()
    assert (state.role, state.obstacle) == (ADMIN, None)
    assert state.server.startswith("PostgreSQL ")
    assert "does not own the register's tables" in open_as_worker(planned(leader)).isolation().obstacle
