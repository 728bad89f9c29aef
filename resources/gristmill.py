"""The one resource: the settings of an installation, as Dagster shows and configures them."""

import os
from pathlib import Path

import dagster as dg

from batch_assets.settings import Settings
from batch_assets.stores.installation import Installation
from batch_assets.stores.job_folders import Job, load_job


class GristmillResource(dg.ConfigurableResource):
    """Opens the stores for a step. Values come from `Settings`, read once by the composition root."""

    root: str
    state: str
    database_url: str
    jobs: str
    lease_s: float
    renew_s: float
    flush_s: float
    engine: str
    engine_script: str | None = None
    ui_url: str

    @classmethod
    def from_settings(cls, settings: Settings) -> "GristmillResource":
        """The resource that opens what `settings` describe."""
        return cls(
            root=settings.root,
            state=str(settings.state),
            database_url=settings.database_url,
            jobs=str(settings.jobs),
            lease_s=settings.lease_s,
            renew_s=settings.renew_s,
            flush_s=settings.flush_s,
            engine=settings.engine,
            engine_script=settings.engine_script,
            ui_url=settings.ui_url,
        )

    def settings(self) -> Settings:
        """The settings again."""
        return Settings(
            root=self.root,
            state=Path(self.state),
            database_url=self.database_url,
            jobs=Path(self.jobs),
            lease_s=self.lease_s,
            renew_s=self.renew_s,
            flush_s=self.flush_s,
            engine=self.engine,
            engine_script=self.engine_script,
            ui_url=self.ui_url,
        )

    def open(self) -> Installation:
        """Stores of this installation; close `.register` when done."""
        return Installation.open(self.settings())

    def job(self, job_file: Path) -> Job:
        """The job folder as it is now. Raises RefusedError with every problem."""
        return load_job(job_file, environment=os.environ)
