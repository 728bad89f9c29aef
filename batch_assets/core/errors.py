"""Errors of the whole package: one class per *reaction*, each carrying data and able to cross a process border.

A message names what failed, which thing, what was expected and found, and what to do now. Classes that end a command carry the
exit code of INTERFACE (`gristmill --help` prints them). Nothing here reads, logs or formats for a terminal.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar


class ExitCode(IntEnum):
    """How a `gristmill` command ended."""

    DONE = 0
    BUG = 1
    REFUSED = 2
    GATE_FAILED = 3
    NOT_FINISHED = 4
    CONFLICT = 5
    ENVIRONMENT = 6
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One refusal, for a terminal (four lines) and for `--json` (one object).

    `code` is stable and dotted (`job_file.max_tokens_missing`); `key` is the path inside `file`; `fix` is what to write or run now.
    """

    code: str
    what: str
    fix: str
    file: str | None = None
    key: str | None = None
    expected: str | None = None
    found: str | None = None

    def as_text(self) -> str:
        """`file  key`, then what is wrong, then expected / found, then what to do now."""
        where = "  ".join(part for part in (self.file, self.key) if part)
        lines = [where] if where else []
        lines.append(f"  {self.what}")
        if self.expected is not None or self.found is not None:
            lines.append(f"  expected {self.expected or 'something else'}, found {'nothing' if self.found is None else self.found}")
        lines.append(f"  now: {self.fix}")
        return "\n".join(lines)


class GristmillError(Exception):
    """Base of every error of ours. Subclasses take keyword arguments only and store them as attributes."""

    exit_code: ClassVar[ExitCode] = ExitCode.BUG

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.data = data
        for name, value in data.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword-only arguments do not unpickle by themselves; the message and the data are all there is.
        return (_rebuild, (type(self), str(self), self.data))


def _rebuild(cls: type[GristmillError], message: str, data: dict[str, Any]) -> GristmillError:
    error = cls.__new__(cls)
    GristmillError.__init__(error, message, **data)
    return error


class ProblemError(GristmillError):
    """An error that is a list of problems; reaction: print them all, end with the exit code of the class."""

    code: ClassVar[str] = "bug"

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(problem.as_text() for problem in problems), problems=problems)

    problems: tuple[Problem, ...]


class RefusedError(ProblemError):
    """Usage or a job file that is refused before any work."""

    exit_code = ExitCode.REFUSED


class GateFailedError(ProblemError):
    """The verdict does not allow publishing; readers keep what they have."""

    exit_code = ExitCode.GATE_FAILED


class NotFinishedError(ProblemError):
    """Held, shards left, or out of time: nothing is lost, somebody must continue."""

    exit_code = ExitCode.NOT_FINISHED


class ConflictError(ProblemError):
    """Another publisher or planner was faster; what it did stands."""

    exit_code = ExitCode.CONFLICT


class UnfitEnvironmentError(ProblemError):
    """A store, database, engine build, model digest or credential is not what the work needs."""

    exit_code = ExitCode.ENVIRONMENT


class StaleLeaseError(GristmillError):
    """A worker acted on a shard under an epoch that has been superseded; reaction: drop this shard, claim another."""

    def __init__(self, *, shard: str, epoch_held: int, epoch_current: int) -> None:
        super().__init__(
            f"lease on shard {shard} is stale: epoch held {epoch_held}, current {epoch_current}; "
            "drop this worker's rows and claim another shard",
            shard=shard,
            epoch_held=epoch_held,
            epoch_current=epoch_current,
        )


class StaleGenerationError(GristmillError):
    """A supervisor or committer acted under a generation that has been superseded; reaction: stop leading, follow."""

    def __init__(self, *, version: str, generation_held: int, generation_current: int) -> None:
        super().__init__(
            f"supervisor lease on {version} is stale: generation held {generation_held}, current {generation_current}; "
            "stop committing and follow the one that leads",
            version=version,
            generation_held=generation_held,
            generation_current=generation_current,
        )


class RecordRejectedError(GristmillError):
    """The engine refused one request when it was submitted; reaction: a failure of that record alone."""

    def __init__(self, *, record_id: str, reason: str) -> None:
        super().__init__(f"the engine refused a record: {reason}", record_id=record_id, reason=reason)


class EngineFailedError(GristmillError):
    """The engine died or hangs; reaction: the worker leaves, its leases end, somebody else goes on."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(f"the engine failed: {reason}; this worker leaves and its shards go back", reason=reason)


class UnfitWorkerError(GristmillError):
    """A worker's engine fails whichever record it is asked; reaction: leave, using up no record's attempt."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason, reason=reason)


class ObjectExistsError(GristmillError):
    """Create-if-absent met an existing object; reaction: read it and decide."""

    def __init__(self, *, path: str) -> None:
        super().__init__(f"object {path} exists already; it is never overwritten", path=path)


class ObjectMissingError(GristmillError):
    """An object that was asked for does not exist."""

    def __init__(self, *, path: str) -> None:
        super().__init__(f"object {path} does not exist", path=path)
