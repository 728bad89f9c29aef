"""The register: everything that is decided by one row winning. Versions, shards, leases, leads, workers, releases, verdicts, holds.

This is its door; the parts are in `stores/sql`, one per table or two. Rules (who may move what) are pure, in `core/leasing.py`, and
specified in docs/states.md. No record, answer or file content is kept here.
"""

from batch_assets.stores.sql.database import utc_now
from batch_assets.stores.sql.isolation import Isolation
from batch_assets.stores.sql.redrive import Redrives
from batch_assets.stores.sql.releases import Releases
from batch_assets.stores.sql.retries import each_call_repeated
from batch_assets.stores.sql.rows import (
    CommittedShard,
    JobHold,
    LeadRow,
    Lease,
    PlannedShard,
    ReleaseRow,
    ShardRow,
    VerdictRow,
    VersionRow,
    WorkerRow,
)
from batch_assets.stores.sql.shards import LeasedShard, Shards
from batch_assets.stores.sql.versions import Versions
from batch_assets.stores.sql.workers import Workers

__all__ = [
    "CommittedShard",
    "JobHold",
    "LeadRow",
    "Lease",
    "LeasedShard",
    "PlannedShard",
    "Register",
    "ReleaseRow",
    "ShardRow",
    "VerdictRow",
    "VersionRow",
    "WorkerRow",
    "utc_now",
]


@each_call_repeated
class Register(Versions, Shards, Redrives, Workers, Releases, Isolation):
    """One database, by URL. Cheap to make (nothing is opened before the first call), safe from any thread, not to be sent to a process.

    Reads wait for nobody. A write is one transaction, durable when the call returns; a call that raised changed nothing, except when the
    database's acknowledgement was lost: then the same call again answers as the first would have. So each call is made again by itself
    while the database is away, restarting or busy, for RETRY_MAX_S (`create` is not: a wrong URL is refused at once); a new method must
    bear that, too.
    """
