"""How hard a rule is tried: `quick` in CI, `long` by `make test-long`. The same histories each time: a failure is one for everybody."""

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

LONG_FACTOR = 40  # minutes instead of seconds

# For tests/planted: that a bug is found is all it asks, so nothing is shrunk and the first failure is enough.
settings.register_profile("planted", phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)


# Hypothesis spends most of a long run on variations of its first histories; many short runs, each with a seed, find more in the same time.
HISTORIES_PER_SEED = 10


@dataclass(frozen=True, slots=True)
class Effort:
    """Multiplies what a test calls its quick number of examples."""

    factor: int

    def settings(self, *, examples: int, steps: int = 50) -> settings:
        """`examples` examples of at most `steps` steps; derandomized, without a database of earlier failures."""
        return settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,  # the machine is shared: a slow step is no finding
            suppress_health_check=list(HealthCheck),
        )

    def run(self, machine: Callable[[], RuleBasedStateMachine], *, histories: int, steps: int) -> None:
        """So many histories (times the factor), by seeds 0, 1, 2 …"""
        for number in range(self.factor * histories // HISTORIES_PER_SEED):
            run_state_machine_as_test(seed(number)(machine), settings=self.settings(examples=HISTORIES_PER_SEED, steps=steps))
