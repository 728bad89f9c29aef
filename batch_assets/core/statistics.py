"""What a job version came to, in numbers: sums over what the committer counted in each shard. Pure; shown by status, summary and release.

Every record that was processed is in exactly one of `results`, `failed` and `quarantined`; the last two are its dead letters.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from batch_assets.core.records import SET_ASIDE_CLASSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of all committed shards. Records, but for `failed_attempts` and the tokens."""

    processed: int = 0
    results: int = 0
    failed: int = 0  # asked, and no valid answer came in any attempt
    quarantined: int = 0  # set aside at planning: never sent to the model
    retried: int = 0  # asked again, after a failed attempt or by a redrive, whatever came of it
    reopened: int = 0  # dead letters that redrives asked again, counted once a round
    recovered: int = 0  # of those, records that have a result now
    dead_by_class: Mapping[str, int] = field(default_factory=dict[str, int])
    failed_attempts: int = 0
    failed_attempts_by_class: Mapping[str, int] = field(default_factory=dict[str, int])
    redone: int = 0  # answers computed a second time
    tokens_prompt: int = 0  # of answers that count, as `tokens_output`
    tokens_output: int = 0
    tokens_thrown_away: int = 0  # output tokens that became no answer

    @classmethod
    def of(cls, shards: Iterable[Mapping[str, Any]]) -> Self:
        """From the register's `stats` of each shard; a shard that was never committed has none and adds nothing."""
        counted = [stats for stats in shards if stats]
        dead, attempts = _summed(counted, "dead_by_class"), _summed(counted, "failures_by_class")
        results, quarantined = _sum(counted, "results"), _sum(counted, "set_aside")
        return cls(
            processed=results + _sum(counted, "dead_letters"),
            results=results,
            failed=_sum(counted, "dead_letters") - quarantined,
            quarantined=quarantined,
            retried=_sum(counted, "retried"),
            reopened=_sum(counted, "reopened"),
            recovered=_sum(counted, "recovered"),
            dead_by_class=dead,
            failed_attempts=sum(attempts.values()),
            failed_attempts_by_class=attempts,
            redone=_sum(counted, "redone"),
            tokens_prompt=_sum(counted, "tokens_prompt"),
            tokens_output=_sum(counted, "tokens_output"),
            tokens_thrown_away=_sum(counted, "tokens_thrown_away"),
        )

    def as_json(self) -> dict[str, Any]:
        """Names as above."""
        return asdict(self)

    def lines(self, version: str) -> list[str]:
        """One line a class, with counts: however many records failed alike, the log says so once."""
        classes = dict.fromkeys([*self.dead_by_class, *self.failed_attempts_by_class])
        return [f"{version}: {self._of_class(name)}" for name in sorted(classes, key=lambda name: -self.dead_by_class.get(name, 0))]

    def _of_class(self, name: str) -> str:
        dead, attempts = self.dead_by_class.get(name, 0), self.failed_attempts_by_class.get(name, 0)
        if name in SET_ASIDE_CLASSES:
            return f"{dead:,} records {name}, set aside at planning"
        return f"{dead:,} records without an answer, {name}; {attempts:,} attempts failed so"


def _sum(shards: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(int(stats.get(name, 0)) for stats in shards)


def _summed(shards: Iterable[Mapping[str, Any]], name: str) -> dict[str, int]:
    """Counts by class, most frequent first."""
    total: Counter[str] = Counter()
    for stats in shards:
        total.update(stats.get(name, {}))
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))
