"""Job versions in SQL: registration, activation, holds, and finding one by what people call it."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, exists, insert, select, update

from batch_assets.core.errors import Problem, RefusedError
from batch_assets.core.identity import canonical_json, version_name
from batch_assets.core.leasing import (
    JOB_HOLDS,
    VERSION_HOLDS,
    VERSION_TRANSITIONS,
    HoldReason,
    ShardState,
    VersionMove,
    VersionState,
)
from batch_assets.core.spec import EngineBuild, VersionSpec
from batch_assets.stores.sql.database import Database
from batch_assets.stores.sql.rows import JobHold, PlannedShard, VersionRow, rounds_stored, version_of
from batch_assets.stores.sql.tables import jobs, shards, versions

LIVE_STATES = (VersionState.PLANNING, VersionState.ACTIVE, VersionState.HELD, VersionState.FINISHED)  # equal to these is `unchanged`
NAMED_MAX = 5  # versions that a refusal names
HEX_DIGITS_MIN = 4


class Versions(Database):
    """Versions and holds. `job` and `version` are names."""

    def register_version(self, spec: VersionSpec, *, kind: str, by_sensor: bool = False) -> VersionRow:
        """The version with this identity: the one that exists, else a new one in state `planning` with the job's next number."""
        with self.writing() as connection:
            connection.execute(self.insert_if_absent(jobs).values(job=spec.job, next_number=1))
            # Locks the job's row, so that two who register at once take turns (SQLite: the whole file is ours already).
            number = connection.execute(select(jobs.c.next_number).where(jobs.c.job == spec.job).with_for_update()).scalar_one()
            same = and_(versions.c.job == spec.job, versions.c.identity == spec.identity)
            if connection.scalar(select(versions.c.id).where(same)) is None:
                connection.execute(
                    insert(versions).values(**_columns_of(spec, number), kind=kind, by_sensor=by_sensor, created_at=self.now())
                )
                connection.execute(update(jobs).where(jobs.c.job == spec.job).values(next_number=number + 1))
            return version_of(connection.execute(select(versions).where(same)).mappings().one())

    def find_equal(
        self,
        *,
        job: str,
        recipe_digest: str,
        input_rules_digest: str,
        engine_build: EngineBuild,
        snapshot_digest: str,
        pilot_records: int | None = None,
    ) -> VersionRow | None:
        """The newest version, not retired, that would give the same answers to the same records, whatever its base."""
        statement = (
            select(versions)
            .where(
                versions.c.job == job,
                versions.c.recipe_digest == recipe_digest,
                versions.c.input_rules_digest == input_rules_digest,
                versions.c.engine_build == _build_text(engine_build),
                versions.c.snapshot_digest == snapshot_digest,
                versions.c.pilot_records.is_not_distinct_from(pilot_records),
                versions.c.state.in_(LIVE_STATES),
            )
            .order_by(versions.c.number.desc())
            .limit(1)
        )
        with self.reading() as connection:
            row = connection.execute(statement).mappings().one_or_none()
        return version_of(row) if row else None

    def activate(
        self,
        *,
        job: str,
        version: str,
        attempt: str,
        shards: Sequence[PlannedShard],
        records: int,
        surplus: int,
        set_aside_by_class: Mapping[str, int],
        hold: HoldReason | None = None,
    ) -> bool:
        """Makes one planning attempt the version's input, once, with all its shards. False: another attempt is active, ignore ours.

        A shard without records to answer is born `staged` with 0 slots: only the committer has something to do for it.
        """
        to_answer = sum(shard.to_answer for shard in shards)
        set_aside = sum(set_aside_by_class.values())
        assert records == to_answer + set_aside + surplus, f"{records} records, but {to_answer} + {set_aside} + {surplus} accounted for"
        assert sum(shard.rows for shard in shards) == to_answer + set_aside, "the shards' rows are not the records without surplus copies"
        assert hold is None or hold in VERSION_HOLDS, f"{hold} is a hold of a job"
        move = VERSION_TRANSITIONS[VersionMove.ACTIVATE if hold is None else VersionMove.ACTIVATE_HELD]
        values = {
            "state": move.target,
            "input_attempt": attempt,
            "records": records,
            "to_answer": to_answer,
            "set_aside_by_class": dict(set_aside_by_class),
            "surplus": surplus,
            "shards": len(shards),
        } | self._hold_values(hold, by=None, note=None)
        with self.writing() as connection:
            ours = update(versions).where(_named(job, version), versions.c.state.in_(move.sources)).values(**values)
            if connection.execute(ours).rowcount == 0:
                return self._version(connection, job, version).input_attempt == attempt
            _insert_shards(connection, job, version, shards)
            return True

    def version(self, job: str, name: str) -> VersionRow:
        """By its full name. Raises RefusedError, naming the newest ones."""
        with self.reading() as connection:
            return self._version(connection, job, name)

    def versions(self, job: str) -> list[VersionRow]:
        """By number, the newest last; empty for a job that was never planned."""
        with self.reading() as connection:
            rows = connection.execute(select(versions).where(versions.c.job == job).order_by(versions.c.number)).mappings()
            return [version_of(row) for row in rows]

    def jobs(self) -> list[str]:
        """Names of all jobs that were planned or held, sorted."""
        with self.reading() as connection:
            return list(connection.scalars(select(jobs.c.job).order_by(jobs.c.job)))

    def resolve(self, job: str, selector: str) -> VersionRow:
        """`v7`, `7`, `3fa9c1`, `v0007-3fa9c1` or `latest` (highest number). Raises RefusedError for none or several."""
        known = self.versions(job)[::-1]
        found = _selected(known, selector)
        if len(found) != 1:
            raise _unknown_version(job, selector, found or known, ambiguous=bool(found))
        return found[0]

    def hold_version(self, *, job: str, version: str, reason: HoldReason, note: str | None = None, by: str | None = None) -> bool:
        """Nothing more is claimed from an active version. False when it is not active: a first hold keeps its reason."""
        assert reason in VERSION_HOLDS, f"{reason} is a hold of a job"
        return self._move(VersionMove.HOLD, job, version, self._hold_values(reason, by=by, note=note))

    def lift_version_hold(self, *, job: str, version: str) -> bool:
        """Active again. False when it was not held."""
        return self._move(VersionMove.LIFT, job, version, self._hold_values(None, by=None, note=None))

    def finish_version(self, *, job: str, version: str) -> bool:
        """Finished when every shard is committed. True when it is finished now, by this call or before."""
        left = exists().where(shards.c.job == job, shards.c.version == version, shards.c.state != ShardState.COMMITTED)
        return self._move(VersionMove.FINISH, job, version, {}, ~left) or self.version(job, version).state is VersionState.FINISHED

    def hold_job(self, job: str, *, by: str, note: str, reason: HoldReason = HoldReason.PERSON) -> None:
        """Nothing more is claimed from any version of the job. A later hold replaces an earlier one."""
        assert reason in JOB_HOLDS, f"{reason} is a hold of a version"
        with self.writing() as connection:
            connection.execute(self.insert_if_absent(jobs).values(job=job, next_number=1))
            connection.execute(update(jobs).where(jobs.c.job == job).values(**self._hold_values(reason, by=by, note=note)))

    def job_hold(self, job: str) -> JobHold | None:
        """The job's own hold; those of its versions stand in their rows."""
        with self.reading() as connection:
            row = connection.execute(select(jobs).where(jobs.c.job == job, jobs.c.hold.is_not(None))).mappings().one_or_none()
        if row is None:
            return None
        return JobHold(job=job, reason=HoldReason(row["hold"]), note=row["hold_note"], by=row["hold_by"], held_at=row["held_at"])

    def resume_job(self, job: str) -> bool:
        """Lifts the job's own hold; holds of its versions stay. False when there was none."""
        statement = update(jobs).where(jobs.c.job == job, jobs.c.hold.is_not(None)).values(**self._hold_values(None, by=None, note=None))
        with self.writing() as connection:
            return connection.execute(statement).rowcount == 1

    def _move(self, move: VersionMove, job: str, version: str, values: Mapping[str, Any], *also: ColumnElement[bool]) -> bool:
        transition = VERSION_TRANSITIONS[move]
        statement = update(versions).where(_named(job, version), versions.c.state.in_(transition.sources), *also)
        with self.writing() as connection:
            moved = connection.execute(statement.values(state=transition.target, **values)).rowcount == 1
            if not moved:
                self._version(connection, job, version)  # a name that does not exist is refused, not answered False
            return moved

    def _version(self, connection: Connection, job: str, name: str) -> VersionRow:
        row = connection.execute(select(versions).where(_named(job, name))).mappings().one_or_none()
        if row is None:
            newest = select(versions).where(versions.c.job == job).order_by(versions.c.number.desc()).limit(NAMED_MAX)
            known = [version_of(each) for each in connection.execute(newest).mappings()]
            raise _unknown_version(job, name, known, ambiguous=False)
        return version_of(row)

    def _hold_values(self, reason: HoldReason | None, *, by: str | None, note: str | None) -> dict[str, str | None]:
        return {"hold": reason, "hold_note": note, "hold_by": by, "held_at": self.now() if reason else None}


def _named(job: str, version: str) -> ColumnElement[bool]:
    return and_(versions.c.job == job, versions.c.name == version)


def _build_text(build: EngineBuild) -> str:
    return canonical_json({name: getattr(build, name) for name in ("engine", "version", "guidance", "image")})


def _columns_of(spec: VersionSpec, number: int) -> dict[str, Any]:
    return {
        "job": spec.job,
        "name": version_name(number, spec.identity),
        "number": number,
        "identity": spec.identity,
        "state": VersionState.PLANNING,
        "recipe_digest": spec.recipe.digest,
        "input_rules_digest": spec.input_rules.digest,
        "engine": spec.engine_build.engine,
        "engine_build": _build_text(spec.engine_build),
        "snapshot_digest": spec.snapshot.digest,
        "snapshot_label": spec.snapshot.label,
        "base_release": spec.base_release,
        "pilot_records": spec.pilot_records,
        "records": 0,
        "to_answer": 0,
        "set_aside_by_class": {},
        "surplus": 0,
        "shards": 0,
        "shard_records": spec.shard_records,
    }


def _insert_shards(connection: Connection, job: str, version: str, planned: Sequence[PlannedShard]) -> None:
    if planned:
        connection.execute(insert(shards), [_shard_columns(job, version, shard) for shard in planned])


def _shard_columns(job: str, version: str, shard: PlannedShard) -> dict[str, Any]:
    nothing_to_answer = shard.to_answer == 0
    return {
        "job": job,
        "version": version,
        "number": shard.number,
        "state": ShardState.STAGED if nothing_to_answer else ShardState.PENDING,
        "epoch": 0,
        "round": 0,
        "renewals": 0,
        "losses": 0,
        "returned": 0,
        "wanted": False,
        "announced": False,
        "staged_slots": 0 if nothing_to_answer else None,
        "staged_rounds": rounds_stored({0: 0} if nothing_to_answer else {}),
        "input_sha256": shard.input_sha256,
        "rows": shard.rows,
        "to_answer": shard.to_answer,
        "hash_low": shard.hash_low,
        "hash_high": shard.hash_high,
        "stats": {},
    }


def _selected(known: Sequence[VersionRow], selector: str) -> list[VersionRow]:
    if selector == "latest":
        return list(known[:1])
    digits = selector.removeprefix("v")
    by_number = [row for row in known if digits.isdecimal() and row.number == int(digits)]
    by_name = [row for row in known if row.name == selector]
    by_hex = [row for row in known if len(selector) >= HEX_DIGITS_MIN and row.identity.partition(":")[2].startswith(selector)]
    return by_name or by_number or by_hex


def _unknown_version(job: str, selector: str, known: Sequence[VersionRow], *, ambiguous: bool) -> RefusedError:
    names = ", ".join(row.name for row in known[:NAMED_MAX])
    return RefusedError(
        Problem(
            code="version.ambiguous" if ambiguous else "version.unknown",
            what=f"{selector!r} names several versions of job {job}" if ambiguous else f"job {job} has no version {selector!r}",
            expected=f"one of {names} (newest first)" if names else "a planned version",
            found=selector,
            fix=f"name one of them, or `latest`; `gristmill versions {job}` lists all"
            if names
            else f"plan it first: gristmill run {job} (or check the job's name)",
        )
    )
