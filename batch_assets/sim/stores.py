"""The stores of a simulated world: real ones or their twins behind seams, where faults strike and every effect is shown to the auditor."""

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl
from deltalake.exceptions import CommitFailedError
from sqlalchemy import Connection, Engine

from batch_assets.core.errors import ObjectExistsError
from batch_assets.core.ports import ObjectStore
from batch_assets.sim.faults import ROTTEN_MAX, Fault, Seams, StoreError
from batch_assets.sim.twins import ModelOutcomes, ModelTable
from batch_assets.stores.installation import Installation
from batch_assets.stores.outcomes import Outcomes
from batch_assets.stores.register import Register
from batch_assets.stores.shard_log import STORE_WAIT_S, ShardLog

LATE_PUT_S = (0.5, 12.0)  # how long after its writer gave up a put may still arrive
ROTTEN = b"not what was put"

_COMPILED: dict[Any, Any] = {}  # statements are compiled once a process, not once a history: 2 ms each


class Effects(Protocol):
    """Who is told of every effect, when others can see it."""

    def created(self, path: str, data: bytes) -> None: ...
    def committed(self) -> None: ...
    def merged(self, shards: Collection[int]) -> None: ...


class SeamedObjects:
    """An object store that is slow, busy, deaf and late. Only slots of logs are torn or rot: for the rest a put is whole or not there."""

    def __init__(self, inner: ObjectStore, seams: Seams, effects: Effects) -> None:
        self._inner, self._seams, self._effects = inner, seams, effects
        self._rotten_left = ROTTEN_MAX

    def create(self, path: str, data: bytes) -> None:
        """Put if absent. Raises ObjectExistsError, also for the caller's own bytes, or StoreError, whether or not it was put."""
        self._seams.before_store()
        if self._strikes(Fault.LATE_PUT):
            seams = self._seams
            seams.clockwork.later(seams.random.uniform(*LATE_PUT_S), lambda: self._arrive(path, data))
            raise StoreError("no answer in time; the put is still on its way")
        is_slot = path.endswith(".arrow")
        if is_slot and self._strikes(Fault.TORN_PUT):
            self._put(path, data[: self._seams.random.randrange(len(data))])
            raise StoreError("the connection broke in the middle of a put")
        if is_slot and self._rotten_left and self._strikes(Fault.ROTTEN_PUT):
            self._rotten_left -= 1
            self._put(path, ROTTEN)
        else:
            self._put(path, data)
        self._seams.point()
        if self._strikes(Fault.LOST_PUT):
            raise self._seams.random.choice([StoreError("no answer"), ObjectExistsError(path=path)])

    def get(self, path: str) -> bytes:
        """Raises ObjectMissingError, or StoreError when it cannot be read now."""
        self._seams.before_store()
        return self._inner.get(path)

    def _put(self, path: str, data: bytes) -> None:
        self._inner.create(path, data)
        self._effects.created(path, data)

    def _arrive(self, path: str, data: bytes) -> None:
        """In nobody's name; too late when somebody else has the place."""
        try:
            self._put(path, data)
        except ObjectExistsError:
            return

    def _strikes(self, kind: Fault) -> bool:
        return self._seams.strikes_current(kind)


class SeamedRegister(Register):
    """The real register with a seam before each transaction and one between its commit and the acknowledgement."""

    def __init__(self, url: str, *, seams: Seams, effects: Effects, now: Callable[[], str]) -> None:
        super().__init__(url, now=now)
        self._seams, self._effects = seams, effects

    @contextmanager
    def reading(self) -> Generator[Connection]:
        """As the register's own."""
        self._seams.before_sql()
        with super().reading() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Generator[Connection]:
        """As the register's own; may raise after the commit."""
        self._seams.before_sql()
        with super().writing() as connection:
            yield connection
        self._effects.committed()
        self._seams.after_commit()

    def _opened(self) -> Engine:
        return super()._opened().execution_options(compiled_cache=_COMPILED)


class SeamedOutcomes(Outcomes):
    """The real table with seams around each MERGE."""

    seams: Seams
    effects: Effects

    def _merge_once(self, frame: pl.DataFrame, literal: Sequence[int]) -> int:
        self.seams.before_merge()
        inserted = super()._merge_once(frame, literal)
        self.effects.merged(literal)
        self.seams.point()
        if self.seams.strikes_current(Fault.LOST_MERGE):
            raise self.seams.random.choice([StoreError("no answer"), CommitFailedError("no answer")])
        return inserted


class SeamedModel(SeamedOutcomes, ModelOutcomes):
    """The twin with the same seams, and one in the middle of a MERGE."""


@dataclass(frozen=True, slots=True)
class SeamedInstallation(Installation):
    """An installation over these stores. `table` is the model of the outcomes table; None: a real Delta table under the root."""

    seams: Seams
    effects: Effects
    table: ModelTable | None

    def shard_log(self, *, job: str, version: str, shard: int) -> ShardLog:
        """Waits between its tries in virtual time."""
        return ShardLog(self.objects, job=job, version=version, shard=shard, pause=self._pause)

    def outcomes(self, *, job: str, version: str, answer_schema: str) -> Outcomes:
        """The real table or the model."""
        if self.table is not None:
            outcomes: SeamedOutcomes = SeamedModel(self.table, answer_schema=answer_schema, during=self.seams.during_merge)
        else:
            outcomes = SeamedOutcomes(f"{self.settings.root}/{job}/versions/{version}/outcomes", answer_schema=answer_schema)
        outcomes.seams, outcomes.effects = self.seams, self.effects
        return outcomes

    def _pause(self, seconds: float) -> None:
        # Without the jitter, which is drawn from a source of randomness that no seed rules.
        self.seams.clockwork.sleep(seconds // STORE_WAIT_S * STORE_WAIT_S)
