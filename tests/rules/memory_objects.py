"""An object store in memory that fails as told: before a put, after it (a lost acknowledgement), or with a put that arrives later."""

from collections import deque
from enum import StrEnum
from functools import lru_cache

from batch_assets.core.errors import ObjectExistsError, ObjectMissingError
from batch_assets.core.shard_log import Slot
from batch_assets.stores.shard_log import decode

_decoded = lru_cache(maxsize=10_000)(decode)


class Fault(StrEnum):
    """What happens to one `create`; each but `none` is seen by the caller as the same passing error."""

    NONE = "none"
    DOWN = "down"  # nothing was stored
    LOST = "lost"  # stored, and the caller does not learn it
    LATE = "late"  # on its way: stored when it arrives, if nobody has taken the path by then


class MemoryObjects:
    """`faults` are used up one per `create`; when there are none left, all goes well."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.faults: deque[Fault] = deque()
        self.on_their_way: list[tuple[str, bytes]] = []

    def create(self, path: str, data: bytes) -> None:
        """Put if absent."""
        fault = self.faults.popleft() if self.faults else Fault.NONE
        if fault is Fault.LATE:
            self.on_their_way.append((path, data))
        elif fault is not Fault.DOWN:
            if path in self.stored:
                raise ObjectExistsError(path=path)
            self.stored[path] = data
        if fault is not Fault.NONE:
            raise TimeoutError(fault)

    def get(self, path: str) -> bytes:
        """Raises ObjectMissingError."""
        try:
            return self.stored[path]
        except KeyError as error:
            raise ObjectMissingError(path=path) from error

    def arrive(self) -> None:
        """What was on its way is there now, where there was room for it."""
        for path, data in self.on_their_way:
            self.stored.setdefault(path, data)
        self.on_their_way.clear()

    def slots(self) -> list[Slot]:
        """What `ShardLog.read` gives when all that is stored is one shard's log, without decoding the same bytes again and again."""
        return [_decoded(data) for _, data in sorted(self.stored.items())]
