"""A journal of what an engine was asked and what it finished, so that tests and the demo count calls instead of believing a plan."""

import os
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from batch_assets.core.ports import Completion, Engine, EngineConfig, Request
from batch_assets.core.spec import EngineBuild

JOURNAL_VARIABLE: Final = "GRISTMILL_ENGINE_JOURNAL"


class JournalKind(StrEnum):
    """First word of a line."""

    LOAD = "load"
    SUBMIT = "submit"
    COMPLETE = "complete"


class JournalLine(NamedTuple):
    """One line: `complete 4711 42:1:1:T-118` (kind, process, request id)."""

    kind: JournalKind
    pid: int
    request_id: str


class JournaledEngine:
    """Any engine, with one appended line per load, submit and completion. Many processes may share the file: appends are whole lines."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)

    @property
    def build(self) -> EngineBuild:
        """Of the engine inside."""
        return self._engine.build

    @property
    def max_num_seqs(self) -> int:
        """Of the engine inside."""
        return self._engine.max_num_seqs

    def load(self, config: EngineConfig) -> None:
        """Loads, then notes it."""
        self._engine.load(config)
        self._note(JournalKind.LOAD, [""])

    def submit(self, request: Request) -> None:
        """Notes the request before it is submitted: one that kills the engine is in the journal."""
        self._note(JournalKind.SUBMIT, [request.request_id])
        self._engine.submit(request)

    def poll(self) -> list[Completion]:
        """One step of the engine inside."""
        completions = self._engine.poll()
        if completions:
            self._note(JournalKind.COMPLETE, [completion.request_id for completion in completions])
        return completions

    def abort(self, request_ids: Sequence[str]) -> None:
        """Aborts are no calls and are not noted."""
        self._engine.abort(request_ids)

    def close(self) -> None:
        """Closes the engine inside; the file is closed with the process."""
        self._engine.close()

    def _note(self, kind: JournalKind, request_ids: Iterable[str]) -> None:
        lines = "".join(f"{kind} {os.getpid()} {_one_line(request_id)}\n" for request_id in request_ids)
        os.write(self._fd, lines.encode())


def read_journal(path: Path) -> list[JournalLine]:
    """Whole lines in the order of their appends; none when there is no file yet. The last one may just be on its way."""
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    parts = [line.split(" ", 2) for line in whole.decode().split("\n") if line]
    return [JournalLine(JournalKind(kind), int(pid), request_id) for kind, pid, request_id in parts]


def _one_line(request_id: str) -> str:
    return request_id.replace("\n", "\\n").replace("\r", "\\r")
