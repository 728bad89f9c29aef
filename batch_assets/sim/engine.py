"""The scripted engine in virtual time: each step takes some, some steps are its last, and one machine in the world may garble all."""

from typing import Protocol

from batch_assets.core.errors import EngineFailedError
from batch_assets.core.ports import Completion
from batch_assets.core.request_ids import request_parts
from batch_assets.engines.scripted import ScriptedEngine
from batch_assets.sim.faults import Fault, Seams
from batch_assets.sim.workload import Workload

STEP_S = (0.05, 0.4)
GARBAGE = "¿"


class Answers(Protocol):
    """Says whether a text is a valid answer."""

    def __call__(self, completion: Completion, /) -> bool: ...


class SteppedEngine(ScriptedEngine):
    """Tells the workload's oracle what it answered to whom."""

    def __init__(self, workload: Workload, seams: Seams, *, is_valid: Answers, garbles: bool) -> None:
        super().__init__(workload.script)
        self._workload, self._seams, self._is_valid, self._garbles = workload, seams, is_valid, garbles

    def poll(self) -> list[Completion]:
        """Raises EngineFailedError when it dies."""
        if not self._live:
            return []
        self._seams.clockwork.sleep(self._seams.random.uniform(*STEP_S))
        if self._seams.strikes_current(Fault.ENGINE_DEATH):
            raise EngineFailedError(reason="it died")
        return [self._delivered(completion) for completion in super().poll()]

    def _delivered(self, completion: Completion) -> Completion:
        if self._garbles:
            completion = completion._replace(text=GARBAGE)
        parts = request_parts(completion.request_id)
        if parts is not None:
            valid = self._is_valid(completion)
            (self._workload.answers if valid else self._workload.failures).add((parts.record_id, parts.attempt))
            if not valid and not self._garbles:
                self._seams.struck[Fault.BAD_ANSWERS] += 1
        return completion
