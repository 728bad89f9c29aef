"""When failures say something about a worker, or about all of them, and not about the records: nobody's attempt is used up then.

A worker weighs its own failures (`Evidence`) before it puts any in a log; a supervisor weighs how workers ended (`FleetBreaker`). What is
counted is in `worker/loop.py` and `fleet/supervisor.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from batch_assets.core.supervision import WorkerExit

# Failures after an answer that are believed at once. More in a row and they wait for the next answer: at a failure rate of 5 % that is one
# wait in 160,000 records, and a worker that begins to garble uses up three attempts of three records at most, never a last one.
ROW_BELIEVED_MAX: Final = 3
# Failures in a row that call for a question whose answer is known. At a rate of 50 % once in 10^19 records.
ROW_MAX: Final = 64
# Fewer records than this that all fail are a poor sample: a night with one changed record, and that one poison, must come to its end.
SAMPLE_MIN: Final = 8
# A worker is compared with the others once it has this many failures, and again at each doubling: two percent of a bad worker's 3,000 an
# hour, and a number that chance does not make.
COMPARED_MIN: Final = 64
FAILING_SHARE_MIN: Final = 0.25  # below it a worker is worth its place, whatever the others do
FAILING_FACTOR_MIN: Final = 4.0  # times the share of the others: they have records of the same snapshot, in the order of a hash
UNFIT_IN_A_ROW_MAX: Final = 2  # one machine may be bad; the second one that garbles all, with no answer in between, makes it the recipe
# Machines lost, for each place in the fleet, with no record answered or dead in between. A record that kills costs at most 1 + 3 divisions
# of its group + 1 unproven death + 3 attempts, and then it is dead.
LOST_IN_A_ROW_MAX: Final = 12


@dataclass(slots=True)
class Evidence:
    """Whether this worker's engine can answer at all: since it was loaded, and now."""

    is_proven: bool = False  # it has given an answer
    row: int = 0  # failures since its last answer

    def answered(self) -> None:
        """It gave a valid answer."""
        self.is_proven, self.row = True, 0

    def failed(self) -> None:
        """An answer that is none, a time limit, a refusal."""
        self.row += 1

    @property
    def is_sound(self) -> bool:
        """Failures are the records' own."""
        return self.is_proven and self.row <= ROW_BELIEVED_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Answers of an engine, and failures of any kind."""

    completed: int = 0
    failed: int = 0

    @property
    def failing_share(self) -> float:
        """0 to 1; 0 when nothing was asked."""
        return min(1.0, self.failed / self.completed) if self.completed else min(1.0, float(self.failed))


def is_unlike_the_others(own: Tally, others: Tally) -> bool:
    """Whether a worker fails so much more often than all others together that it must be the worker. Nobody to compare with: False."""
    enough = own.failed >= COMPARED_MIN and others.completed >= COMPARED_MIN
    return enough and own.failing_share >= max(FAILING_SHARE_MIN, FAILING_FACTOR_MIN * others.failing_share)


@dataclass(slots=True)
class FleetBreaker:
    """Says when the whole version must be held: workers end, whichever records they have, and nothing is answered in between.

    Exits of workers that never held a shard are not its business (`StartBudget`). Mutable.
    """

    workers: int
    _progress: int = 0
    _lost: list[WorkerExit] = field(default_factory=list)
    _unfit: list[WorkerExit] = field(default_factory=list)

    def exited(self, exits: Iterable[WorkerExit], *, progress: int) -> None:
        """`progress` is how many records all workers of the version have answered or declared dead so far."""
        if progress > self._progress:
            self._progress = progress
            self._lost.clear()
            self._unfit.clear()
        for each in exits:
            if each.is_unfit:
                self._unfit.append(each)
            elif not each.is_clean and not each.is_refusal and each.was_fruitful:
                self._lost.append(each)

    @property
    def reason(self) -> str | None:
        """Why to hold, for people; None while there is hope."""
        if len(self._unfit) >= UNFIT_IN_A_ROW_MAX:
            last = self._unfit[-1]
            return f"everything fails alike: {last.own_words}; no attempt was used up; read {last.log_path}, then resume"
        if len(self._lost) >= LOST_IN_A_ROW_MAX * max(1, self.workers):
            last = self._lost[-1]
            ended = f"exit code {last.exit_code}, its log ends with {last.last_line_class or 'no error of a known form'}"
            lost = f"{len(self._lost)} workers died and no record was answered in between"
            return f"{lost}; the last: {ended}; read {last.log_path}, then resume"
        return None
