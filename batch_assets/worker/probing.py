"""What a worker does when it is in doubt: it answers suspects alone, and asks what has an answer already before it believes its failures.

The rules are in `core/retries.py` (suspects) and `core/breakers.py` (evidence). Nothing here runs while all is well.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from batch_assets.core.answers import InvalidAnswer
from batch_assets.core.breakers import COMPARED_MIN, ROW_MAX, SAMPLE_MIN, Tally, is_unlike_the_others
from batch_assets.core.errors import RecordRejectedError, UnfitWorkerError
from batch_assets.core.ports import Completion, Engine, Request
from batch_assets.core.records import DeadClass
from batch_assets.core.request_ids import CONTROL_ATTEMPT
from batch_assets.worker.feeder import ShardWork, Tools
from batch_assets.worker.in_flight import Flight, InFlight

NO_ROW: Final = -1


@dataclass(slots=True)
class Control:
    """A request whose answer is known. In a Flight it stands where a ShardWork does; it belongs to no shard, its answer to nobody."""

    tools: Tools
    lease: None = None
    is_back: bool = False
    has_failed: bool = False

    def take(self, row: int, attempt: int, completion: Completion, now_s: float) -> None:  # noqa: ARG002  as a ShardWork does
        """The loop notes a valid one as an answer."""
        self.is_back = True
        if isinstance(self.tools.checker.check(completion.text, completion.finish_reason), InvalidAnswer):
            self._fail()

    def fail(self, row: int, attempt: int, dead_class: DeadClass, error: str, *, tokens_output: int) -> None:  # noqa: ARG002
        """No answer in time."""
        self._fail()

    def _fail(self) -> None:
        self.is_back = self.has_failed = True
        self.tools.evidence.failed()


class Doubts:
    """One thread uses it, the loop's. `before_start` is called when a group of suspects is about to get the engine; `others` counts what
    the other workers of the version have done.
    """

    def __init__(
        self, *, engine: Engine, in_flight: InFlight, tools: Tools, before_start: Callable[[], object], others: Callable[[], Tally]
    ) -> None:
        self._engine, self._in_flight, self._tools = engine, in_flight, tools
        self._before_start, self._others = before_start, others
        self._compare_at = COMPARED_MIN
        self._evidence = tools.evidence
        self._known: Request | None = None
        self._control: Control | None = None

    def remember(self, work: ShardWork) -> None:
        """A shard is about to be forgotten: one request with a known answer is kept for later doubts."""
        self._known = self._known or work.known()

    def weigh(self, works: Sequence[ShardWork], now_s: float) -> None:
        """Failures are believed as long as answers come beside them; else a control decides. Raises UnfitWorkerError, none believed."""
        if not any(work.withheld for work in works):
            return
        if not self._evidence.is_sound:
            is_idle = not self._in_flight and not any(work.has_queued for work in works)
            if not is_idle and self._evidence.row < ROW_MAX:
                return  # an answer may come yet
            if self._asks_control(works):
                return
            if self._evidence.row >= SAMPLE_MIN:
                raise _unfit(works)
        self._compare()
        for work in works:
            work.accept_failures(now_s)

    def _compare(self) -> None:
        """With the other workers, at each doubling of the failures. Raises UnfitWorkerError."""
        counters = self._tools.counters
        if counters.failed < self._compare_at:
            return
        self._compare_at = 2 * counters.failed
        own, others = Tally(completed=counters.completed, failed=counters.failed), self._others()
        if is_unlike_the_others(own, others):
            raise UnfitWorkerError(
                reason=f"{own.failed} of this worker's {own.completed} answers failed, and {others.failed} of {others.completed} elsewhere"
            )

    def probe(self, work: ShardWork, *, is_alone: bool) -> None:
        """The next group of suspects, when engine and log have nothing left of what was before. Raises StaleLeaseError."""
        if not is_alone or self._in_flight or work.has_queued or work.withheld or not work.is_flushed:
            return
        if self._evidence.is_proven or not self._asks_control([work]):
            self._before_start()
            work.start_next_group()

    def _asks_control(self, works: Sequence[ShardWork]) -> bool:
        """Whether one is under way; False when no known answer is at hand. Raises UnfitWorkerError when one has failed."""
        control = self._control
        if control is not None and control.has_failed:
            raise _unfit(works)
        if control is not None and not control.is_back:
            return True
        request = next((known for work in works if (known := work.known()) is not None), self._known)
        if request is not None:
            self._submit(request)
        return request is not None

    def _submit(self, request: Request) -> None:
        self._control = Control(self._tools)
        try:
            self._engine.submit(request)
        except RecordRejectedError:
            self._control.fail(NO_ROW, CONTROL_ATTEMPT, DeadClass.REJECTED, "", tokens_output=0)
        else:
            self._in_flight.add(request.request_id, Flight(self._control, NO_ROW, CONTROL_ATTEMPT))
            self._tools.counters.submitted += 1


def _unfit(works: Sequence[ShardWork]) -> UnfitWorkerError:
    failures = Counter(name for work in works for name in work.withheld)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(failures.items()))
    return UnfitWorkerError(
        reason=f"none of the last {failures.total()} answers of this worker was valid ({counts}), nor was a question answered that has an "
        "answer already, if there was one to ask"
    )
