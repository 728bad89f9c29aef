"""What a leader decides without looking at a process: how many workers it starts, when it gives up, how far the work is."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from batch_assets.core.errors import ExitCode
from batch_assets.core.supervision import (
    FRUITLESS_EXITS_MAX,
    FRUITLESS_FORGET_S,
    START_WINDOW_S,
    STARTS_PER_WORKER_MINUTE_MAX,
    Done,
    StartBudget,
    Underway,
    WorkerExit,
    dead_done,
    rows_done,
    workers_to_start,
)
from tests.rules.efforts import Effort

WORKERS = 2
counts = st.integers(0, 50)
exit_codes = st.sampled_from([ExitCode.DONE, ExitCode.BUG, ExitCode.ENVIRONMENT, -9, None])


class StartMachine(RuleBasedStateMachine):
    """A budget, and everything that ever happened to it."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = StartBudget(workers=WORKERS)
        self.now_s = 0.0
        self.starts_s: list[float] = []
        self.exits: list[tuple[float, WorkerExit]] = []

    @rule(seconds=st.sampled_from([1.0, START_WINDOW_S - 1, START_WINDOW_S, FRUITLESS_FORGET_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(alive=st.integers(0, 3), shards=st.integers(0, 4))
    def leader_fills_the_fleet(self, alive: int, shards: int) -> None:
        count = workers_to_start(workers=WORKERS, alive=alive, open_shards=shards, allowed=self.budget.allowed(now_s=self.now_s))
        assert count >= 0
        assert count == 0 or alive + count <= min(WORKERS, shards)
        for _ in range(count):
            self.budget.started(now_s=self.now_s)
            self.starts_s.append(self.now_s)

    @rule(code=exit_codes, was_fruitful=st.booleans())
    def worker_exits(self, code: int | None, was_fruitful: bool) -> None:
        ended = WorkerExit(worker_id="w", exit_code=code, was_fruitful=was_fruitful, last_line_class=None, log_path="")
        self.budget.exited([ended], now_s=self.now_s)
        self.exits.append((self.now_s, ended))

    def fruitless_in_a_row(self) -> list[WorkerExit]:
        """The last exits, back to the last one that got somewhere, as far as they are remembered."""
        row = []
        for ended_s, each in reversed(self.exits):
            if each.was_fruitful or each.exit_code == ExitCode.DONE:
                break
            if self.now_s - ended_s < FRUITLESS_FORGET_S:
                row.append(each)
        return row[::-1]

    @invariant()
    def starts_are_bounded_in_every_window(self) -> None:
        recent = sum(self.now_s - start_s < START_WINDOW_S for start_s in self.starts_s)
        assert recent <= WORKERS * STARTS_PER_WORKER_MINUTE_MAX

    @invariant()
    def it_gives_up_on_a_row_of_fruitless_exits_or_on_one_refusal(self) -> None:
        row = self.fruitless_in_a_row()
        is_hopeless = len(row) >= FRUITLESS_EXITS_MAX or any(each.exit_code == ExitCode.ENVIRONMENT for each in row)
        assert list(self.budget.crash_loop(now_s=self.now_s)) == (row if is_hopeless else [])
        assert not is_hopeless or self.budget.allowed(now_s=self.now_s) == 0


def test_starts_are_bounded_and_end_when_they_are_of_no_use(effort: Effort) -> None:
    effort.run(StartMachine, histories=100, steps=40)


def test_progress_reaches_the_total_exactly_and_never_before_the_end(effort: Effort) -> None:
    @effort.settings(examples=100)
    @given(
        open_rows=st.integers(1, 50),
        committed=st.builds(Done, rows=counts, dead=counts, set_aside=counts, redone=counts),
        underway=st.builds(Underway, answered=counts, dead=counts),
    )
    def check(open_rows: int, committed: Done, underway: Underway) -> None:
        total = committed.rows + open_rows
        rows = rows_done(total=total, committed=committed, underway=underway, all_committed=False)
        assert committed.rows <= rows < total
        assert 0 <= dead_done(rows=rows, committed=committed, underway=underway) <= rows
        assert rows_done(total=total, committed=committed, underway=underway, all_committed=True) == total

    check()
