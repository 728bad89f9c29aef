"""Worker processes in SQL: started, heard from, gone. Counts for people and for the fleet; no lease depends on them."""

from collections.abc import Mapping

from sqlalchemy import insert, select, update

from batch_assets.core.leasing import ALIVE_STATES, WorkerState
from batch_assets.stores.sql.database import Database
from batch_assets.stores.sql.rows import WorkerRow, worker_of
from batch_assets.stores.sql.tables import workers


class Workers(Database):
    """The workers table. A worker id is used by one process only, ever."""

    def worker_started(
        self,
        *,
        worker_id: str,
        job: str,
        version: str,
        host: str,
        pid: int,
        process_started_s: float | None = None,
        generation: int | None = None,
        engine_build: str | None = None,
    ) -> None:
        """Registers a process as `starting`. Fleet and worker may both call it: what the later one knows is added."""
        process = {"host": host, "pid": pid}
        known = {"process_started_s": process_started_s, "generation": generation, "engine_build": engine_build}
        process |= {name: value for name, value in known.items() if value is not None}
        new = {"worker_id": worker_id, "job": job, "version": version, "state": WorkerState.STARTING, "heartbeats": 0, "counters": {}}
        with self.writing() as connection:
            if connection.execute(update(workers).where(workers.c.worker_id == worker_id).values(**process)).rowcount == 0:
                connection.execute(insert(workers).values(**new, **process, started_at=self.now()))

    def worker_heartbeat(self, worker_id: str, counters: Mapping[str, int]) -> bool:
        """Stores the counters (totals since it started). False: unknown or declared gone; the process should leave."""
        state = {"state": WorkerState.RUNNING}
        beat = {"heartbeats": workers.c.heartbeats + 1, "counters": dict(counters)}
        mine = workers.c.worker_id == worker_id
        with self.writing() as connection:
            waking = update(workers).where(mine, workers.c.state.in_((WorkerState.STARTING, WorkerState.RUNNING)))
            if connection.execute(waking.values(**beat, **state)).rowcount == 1:
                return True
            leaving = update(workers).where(mine, workers.c.state == WorkerState.LEAVING)
            return connection.execute(leaving.values(**beat)).rowcount == 1

    def worker_leaving(self, worker_id: str) -> None:
        """It claims no more and finishes what it has."""
        self._set_worker_state(worker_id, WorkerState.LEAVING)

    def worker_left(self, worker_id: str) -> None:
        """Its own last word. Twice is fine."""
        self._set_worker_state(worker_id, WorkerState.GONE)

    def worker_gone(self, worker_id: str) -> None:
        """The leader saw that the process is no more. Twice is fine."""
        self._set_worker_state(worker_id, WorkerState.GONE)

    def workers(self, job: str, version: str, alive_only: bool = True) -> list[WorkerRow]:  # noqa: FBT001, FBT002  named in the contract
        """By start, then id."""
        statement = select(workers).where(workers.c.job == job, workers.c.version == version)
        if alive_only:
            statement = statement.where(workers.c.state.in_(ALIVE_STATES))
        with self.reading() as connection:
            rows = connection.execute(statement.order_by(workers.c.started_at, workers.c.worker_id)).mappings()
            return [worker_of(row) for row in rows]

    def _set_worker_state(self, worker_id: str, state: WorkerState) -> None:
        alive = update(workers).where(workers.c.worker_id == worker_id, workers.c.state.in_(ALIVE_STATES))
        with self.writing() as connection:
            connection.execute(alive.values(state=state))
