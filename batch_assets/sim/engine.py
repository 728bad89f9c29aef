"""The scripted engine in virtual time. Some steps are its last, some records kill it, and some machines garble all."""

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from batch_assets.core.errors import EngineFailedError
from batch_assets.core.ports import Completion, Request
from batch_assets.core.request_ids import CONTROL_ATTEMPT, request_parts
from batch_assets.engines.scripted import ScriptedEngine
from batch_assets.sim.faults import Fault, Seams
from batch_assets.sim.workload import Workload

STEP_S = (0.05, 0.4)
FRUITLESS_STEP_S = (1.0, 3.0)  # with nothing to decode but what never ends: time limits are long, and each step costs real time
WHOLE_PROCESS_SHARE = 0.5  # of the records that kill take the process with the engine
GARBAGE = "¿"


class Answers(Protocol):
    """Says whether a text is a valid answer."""

    def __call__(self, completion: Completion, /) -> bool: ...


class SteppedEngine(ScriptedEngine):
    """Tells the workload's oracle what it answered to whom."""

    def __init__(self, workload: Workload, seams: Seams, *, is_valid: Answers, garbles: bool) -> None:
        super().__init__(workload.script)
        self._workload, self._seams, self._is_valid, self._garbles = workload, seams, is_valid, garbles

    def submit(self, request: Request) -> None:
        """Raises RecordRejectedError when the script says so."""
        super().submit(request)
        if len(self._live) > 1:
            self._workload.alone.difference_update(self._asked())

    def poll(self) -> list[Completion]:
        """Raises EngineFailedError when it dies."""
        if not self._live:
            return []
        clockwork = self._seams.clockwork
        waits = all((parts := request_parts(each)) is not None and parts.record_id in self._workload.never for each in self._live)
        clockwork.sleep(self._seams.random.uniform(*(FRUITLESS_STEP_S if waits else STEP_S)))
        if self._seams.strikes_current(Fault.ENGINE_DEATH):
            raise EngineFailedError(reason="it died")
        if self._decodes_killer():
            self._seams.struck[Fault.KILLER] += 1
            process = clockwork.current
            if process is not None and self._seams.random.random() < WHOLE_PROCESS_SHARE:
                clockwork.kill(process)
            raise EngineFailedError(reason="a record killed it")
        return [self._delivered(completion) for completion in super().poll()]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forgets them."""
        for request_id in request_ids:
            parts = request_parts(request_id)
            if parts is not None and request_id in self._live:
                self._workload.given_up.add((parts.record_id, parts.attempt))
                self._seams.struck[Fault.NEVER_ANSWERED] += parts.record_id in self._workload.never
        super().abort(request_ids)

    def _asked(self) -> set[tuple[str, int]]:
        """(record, epoch) of all that it has."""
        return {(parts.record_id, parts.epoch) for each in self._live if (parts := request_parts(each)) is not None}

    def _decodes_killer(self) -> bool:
        decoding = islice(self._live, self.max_num_seqs)
        return any(parts.record_id in self._workload.killers for each in decoding if (parts := request_parts(each)) is not None)

    def _delivered(self, completion: Completion) -> Completion:
        if self._garbles:
            completion = completion._replace(text=GARBAGE)
        parts = request_parts(completion.request_id)
        if parts is None:
            return completion
        valid = self._is_valid(completion)
        if parts.attempt != CONTROL_ATTEMPT:
            (self._workload.answers if valid else self._workload.failures).add((parts.record_id, parts.attempt))
        if not valid and not self._garbles:
            self._seams.struck[Fault.BAD_ANSWERS] += 1
        return completion
