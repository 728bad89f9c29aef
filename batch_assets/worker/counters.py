"""What a worker has done since it started: counted where it happens, shown in the register, decided upon by nobody."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Totals. `completed` counts completions of the engine, valid or not; `answered` and `dead` are records, once they are in the log."""

    submitted: int = 0
    completed: int = 0
    answered: int = 0
    failed: int = 0
    dead: int = 0
    in_flight: int = 0
    flushes: int = 0
    tokens_prompt: int = 0
    tokens_cached: int = 0
    tokens_output: int = 0
    model_loads: int = 0

    def as_dict(self) -> dict[str, int]:
        """For the register's row."""
        return asdict(self)
