"""Releases and verdicts in SQL. What readers get is decided by the alias table alone; these rows say what each release came to."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Select, func, insert, select, update

from batch_assets.core.errors import ConflictError, Problem, RefusedError
from batch_assets.core.leasing import ReleaseState
from batch_assets.stores.sql.database import Database
from batch_assets.stores.sql.rows import ReleaseRow, VerdictRow, release_of, verdict_of
from batch_assets.stores.sql.tables import releases, verdicts


class Releases(Database):
    """Releases by id; verdicts are only ever added."""

    def add_release(
        self,
        *,
        release_id: str,
        job: str,
        version: str,
        digest: str,
        rows: int,
        uri: str,
        recipe_digest: str,
        snapshot_digest: str,
        counts: Mapping[str, Any],
    ) -> ReleaseRow:
        """Registers a candidate; the same content again gives the row that exists. Raises ConflictError for other content of that id."""
        values = {"release_id": release_id, "job": job, "version": version, "digest": digest, "rows": rows, "uri": uri}
        values |= {"recipe_digest": recipe_digest, "snapshot_digest": snapshot_digest, "counts": dict(counts)}
        with self.writing() as connection:
            new = self.insert_if_absent(releases).values(**values, state=ReleaseState.CANDIDATE, created_at=self.now())
            connection.execute(new)
            row = release_of(connection.execute(select(releases).where(releases.c.release_id == release_id)).mappings().one())
        if (row.job, row.version, row.digest) != (job, version, digest):
            raise _other_content(row, digest)
        return row

    def releases(self, job: str) -> list[ReleaseRow]:
        """Newest first."""
        return self._releases(releases.c.job == job)

    def get_release(self, release_id: str) -> ReleaseRow:
        """Raises RefusedError when there is none."""
        found = self._releases(releases.c.release_id == release_id)
        if not found:
            raise RefusedError(
                Problem(
                    code="release.unknown",
                    what=f"there is no release {release_id!r}",
                    expected="a registered release",
                    found=release_id,
                    fix="`gristmill versions JOB` lists versions and their releases",
                )
            )
        return found[0]

    def mark_published(self, release_id: str, *, rollback: bool = False) -> bool:
        """It is or was what readers get. A withdrawn one comes back by a rollback only. False when its state does not allow it."""
        sources = [ReleaseState.CANDIDATE, ReleaseState.PUBLISHED] + ([ReleaseState.WITHDRAWN] if rollback else [])
        first = func.coalesce(releases.c.first_published_at, self.now())
        return self._mark(release_id, sources, state=ReleaseState.PUBLISHED, first_published_at=first)

    def mark_withdrawn(self, release_id: str) -> bool:
        """A rollback left it: no base for the next version, never published automatically. False when it was not published."""
        return self._mark(release_id, [ReleaseState.PUBLISHED, ReleaseState.WITHDRAWN], state=ReleaseState.WITHDRAWN)

    def add_verdict(self, *, release_id: str, release_digest: str, passed: bool, payload: Mapping[str, Any]) -> VerdictRow:
        """The newest verdict of the release from now on."""
        values = {"release_id": release_id, "release_digest": release_digest, "passed": passed, "payload": dict(payload)}
        with self.writing() as connection:
            added = insert(verdicts).values(**values, created_at=self.now()).returning(*verdicts.c)
            return verdict_of(connection.execute(added).mappings().one())

    def latest_verdict(self, release_id: str) -> VerdictRow | None:
        """The one that counts; None when it was never judged."""
        found = self._verdicts(select(verdicts).where(verdicts.c.release_id == release_id).order_by(verdicts.c.id.desc()).limit(1))
        return found[0] if found else None

    def verdicts(self, release_id: str) -> list[VerdictRow]:
        """All, oldest first."""
        return self._verdicts(select(verdicts).where(verdicts.c.release_id == release_id).order_by(verdicts.c.id))

    def _releases(self, which: ColumnElement[bool]) -> list[ReleaseRow]:
        statement = select(releases).where(which).order_by(releases.c.created_at.desc(), releases.c.release_id.desc())
        with self.reading() as connection:
            return [release_of(row) for row in connection.execute(statement).mappings()]

    def _verdicts(self, statement: Select[Any]) -> list[VerdictRow]:
        with self.reading() as connection:
            return [verdict_of(row) for row in connection.execute(statement).mappings()]

    def _mark(self, release_id: str, sources: list[ReleaseState], **values: Any) -> bool:
        statement = update(releases).where(releases.c.release_id == release_id, releases.c.state.in_(sources))
        with self.writing() as connection:
            return connection.execute(statement.values(**values)).rowcount == 1


def _other_content(row: ReleaseRow, digest: str) -> ConflictError:
    return ConflictError(
        Problem(
            code="release.conflict",
            what=f"release {row.release_id} is registered with other content (job {row.job}, version {row.version})",
            expected=f"digest {row.digest}",
            found=f"digest {digest}",
            fix="a release is never overwritten: register this one under its own id, and please report how two got the same",
        )
    )
