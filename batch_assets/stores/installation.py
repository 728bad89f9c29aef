"""One installation, opened once per process: the register, the object store, and the doors to everything under the root.

Delta stores are imported only when asked for: the worker opens an installation too and touches no Delta table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from batch_assets.core.errors import Problem, UnfitEnvironmentError
from batch_assets.core.ports import ObjectStore
from batch_assets.settings import Settings
from batch_assets.stores.frozen_input import FrozenInput
from batch_assets.stores.objects import open_objects
from batch_assets.stores.register import Register
from batch_assets.stores.shard_log import ShardLog
from batch_assets.stores.specs import SpecStore

if TYPE_CHECKING:
    from batch_assets.stores.aliases import Aliases
    from batch_assets.stores.outcomes import Outcomes
    from batch_assets.stores.releases import Releases


@dataclass(frozen=True, slots=True)
class Installation:
    """The stores of one root. `objects` paths are relative to `settings.root`."""

    settings: Settings
    register: Register
    objects: ObjectStore

    @classmethod
    def open(cls, settings: Settings, *, pooled: bool = True) -> "Installation":
        """Creates folders and tables that are missing. Raises UnfitEnvironmentError when a store cannot be reached.

        `pooled=False` is for workers: many processes must not hold connections of the database that they do not use.
        """
        _make_folders([Path(settings.root), settings.state] if settings.is_local else [settings.state])
        register = Register(settings.database_url, pooled=pooled)
        register.create()
        return cls(settings, register, open_objects(settings.root))

    def worker_environment(self, *, job: str, version: str) -> dict[str, str]:
        """The variables of a worker process of this version: these settings, with a login to the register that knows this version only."""
        return replace(self.settings, database_url=self.register.worker_url(job=job, version=version)).as_environment()

    def specs(self) -> SpecStore:
        """Registered specs: after registration the only description of a version that is read."""
        return SpecStore(self.objects, self.register.version)

    def shard_log(self, *, job: str, version: str, shard: int) -> ShardLog:
        """The log of one shard."""
        return ShardLog(self.objects, job=job, version=version, shard=shard)

    def frozen_input(self, *, job: str, version: str, attempt: str) -> FrozenInput:
        """The frozen input of one planning attempt."""
        return FrozenInput(self.objects, job=job, version=version, attempt=attempt)

    def outcomes(self, *, job: str, version: str, answer_schema: str) -> "Outcomes":
        """The outcomes table of one version."""
        from batch_assets.stores.outcomes import Outcomes

        return Outcomes(f"{self.settings.root}/{job}/versions/{version}/outcomes", answer_schema=answer_schema)

    def releases(self, *, job: str) -> "Releases":
        """The releases of one job."""
        from batch_assets.stores.releases import Releases

        return Releases(f"{self.settings.root}/{job}/releases")

    def aliases(self) -> "Aliases":
        """The alias table of this root."""
        from batch_assets.stores.aliases import Aliases

        return Aliases(f"{self.settings.root}/aliases")


def _make_folders(folders: Sequence[Path]) -> None:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnfitEnvironmentError(
                Problem(
                    code="store.folder",
                    file=str(folder),
                    what="the installation's folder cannot be made",
                    expected="a folder, or a place where one may be made",
                    found=str(error.strerror),
                    fix="set --root or GRISTMILL_ROOT (and GRISTMILL_STATE) to a folder that you may write",
                )
            ) from error
