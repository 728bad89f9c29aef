"""Who is suspected when an engine dies, and who is blamed: the rules over a log, played by owners that die in every way."""

from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from batch_assets.core.leasing import LeaseEnd
from batch_assets.core.retries import PARTS, admission, entries_of, judge_end, parts
from batch_assets.core.shard_log import Answered, Dead, Entry, Failed, Fence, Probe, Start, fold
from batch_assets.stores.shard_log import decode, encode

ATTEMPTS_MAX = 3
ENDS_MAX = 200


def answered(record_id: str, epoch: int) -> Answered:
    return Answered(record_id, epoch, 1, "{}", 10, 0, 5, f"w{epoch}")


class DiedError(Exception):
    """The engine died."""


@dataclass
class Shard:
    """A shard's log, and owners that keep the rules: as `worker/` does, in as few lines as possible."""

    ids: list[str]
    killers: frozenset[str]
    window: int
    random: Random
    is_proven: bool = True
    log: list[list[Entry]] = field(default_factory=list)
    ends: list[LeaseEnd] = field(default_factory=list)
    answered_twice: int = 0

    def folded(self):
        return fold(self.log, staged_rounds={})

    def own(self, *, leaves: float = 0.0) -> bool:
        """One owner from its fence to its end; True when every record is terminal."""
        epoch = len(self.ends) + 1
        self.log.append([Fence(epoch, 0, f"w{epoch}", self.window, self.ends[-1] if self.ends else None)])
        try:
            verdict = judge_end(self.ids, self.folded(), attempts_max=ATTEMPTS_MAX, is_engine_proven=self.is_proven)
            if verdict is not None:
                self._maybe_die(leaves)
                self.log.append(entries_of(verdict, self.folded()))
            self._bury(epoch)
            for group in self.folded().suspicion.groups_left:
                self._maybe_die(leaves)
                self.log.append([Start(epoch, group)])
                self._answer(list(group), epoch, leaves)
            while queue := admission(self.ids, self.folded(), worker=f"w{epoch}", attempts_max=ATTEMPTS_MAX):
                self._answer([self.ids[row] for row in queue[: self.window]], epoch, leaves)
        except DiedError:
            return False
        return all(self.folded().is_terminal(record_id) for record_id in self.ids)

    def _bury(self, epoch: int) -> None:
        folded = self.folded()
        spent = [each for each, attempts in folded.failed.items() if attempts >= ATTEMPTS_MAX and not folded.is_terminal(each)]
        if spent:
            self.log.append([Dead(each, epoch, ATTEMPTS_MAX, folded.last_failures[each].dead_class, "") for each in spent])

    def _answer(self, batch: list[str], epoch: int, leaves: float) -> None:
        """The engine has all of them; they finish in any order, and it dies of a killer after any number of the others."""
        innocents = [each for each in batch if each not in self.killers]
        self.random.shuffle(innocents)
        dies = len(innocents) < len(batch)
        finished = innocents[: self.random.randint(0, len(innocents))] if dies else innocents
        for record_id in finished:
            if self.random.random() < leaves:
                self._end()
            self.log.append([answered(record_id, epoch)])
        if dies:
            self._end(LeaseEnd.EXPIRED)

    def _maybe_die(self, leaves: float) -> None:
        if self.random.random() < leaves:
            self._end()

    def _end(self, end: LeaseEnd | None = None) -> None:
        """Not by a record unless it says so: a preemption, or a machine that is lost."""
        self.ends.append(end or self.random.choice(list(LeaseEnd)))
        raise DiedError


shards = st.integers(1, 120).flatmap(
    lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1), max_size=4), st.integers(1, 60), st.integers())
)


@given(shards, st.sampled_from([0.0, 0.0, 0.005, 0.05]))
@settings(max_examples=150, deadline=None)
def test_exactly_the_killers_are_dead_whoever_else_dies_on_the_way(shard: tuple[int, set[int], int, int], leaves: float) -> None:
    count, killers, window, seed = shard
    ids = [f"r{number}" for number in range(count)]
    played = Shard(ids, frozenset(f"r{number}" for number in killers), window, Random(seed))
    for _ in range(ENDS_MAX):
        if played.own(leaves=leaves):
            break
    state = played.folded()
    assert set(state.dead) == played.killers
    assert {entry.dead_class for entry in state.dead.values()} <= {"engine_killed"}
    assert all(entry.attempt == ATTEMPTS_MAX for entry in state.dead.values())
    assert set(state.answered) == set(ids) - played.killers
    if leaves == 0.0:
        # A death at normal work, one for each time its group is divided (120 / 16 / 16), and its attempts: for each killer.
        assert len(played.ends) <= len(killers) * (1 + 2 + ATTEMPTS_MAX)


@given(st.integers(1, 80), st.integers(1, 30), st.integers())
@settings(max_examples=60, deadline=None)
def test_preemptions_suspect_nobody_and_cost_no_attempt(count: int, window: int, seed: int) -> None:
    random = Random(seed)
    played = Shard([f"r{number}" for number in range(count)], frozenset(), window, random)
    for _ in range(ENDS_MAX):
        if played.own(leaves=0.1):
            break
        played.ends[-1] = random.choice([LeaseEnd.RELEASED, LeaseEnd.DRAINED, LeaseEnd.NODE_GONE])
    state = played.folded()
    assert not any(isinstance(entry, Probe | Start) for slot in played.log for entry in slot)
    assert not state.failed
    assert not state.dead


@given(st.integers(1, 80), st.integers(1, 30), st.integers())
@settings(max_examples=60, deadline=None)
def test_machines_that_die_of_themselves_cost_no_record_an_attempt_unless_it_was_alone(count: int, window: int, seed: int) -> None:
    played = Shard([f"r{number}" for number in range(count)], frozenset(), window, Random(seed))
    for _ in range(ENDS_MAX):
        if played.own(leaves=0.03):
            break
    state = played.folded()
    assert not state.dead
    alone = {entry.record_ids for slot in played.log for entry in slot if isinstance(entry, Start) and len(entry.record_ids) == 1}
    assert {(record_id,) for record_id in state.failed} <= alone


FENCE = Fence(1, 0, "w1", 4, None)
IDS = ["a", "b", "c", "d", "e", "f"]


def verdict_of(*slots: list[Entry], proven: bool = True):
    return judge_end(IDS, fold(slots, staged_rounds={}), attempts_max=ATTEMPTS_MAX, is_engine_proven=proven)


def fence(epoch: int, end: LeaseEnd = LeaseEnd.EXPIRED, window: int = 4) -> list[Entry]:
    return [Fence(epoch, 0, f"w{epoch}", window, end)]


def test_the_suspects_are_the_first_so_many_records_without_an_entry() -> None:
    verdict = verdict_of([FENCE], [answered("b", 1)], fence(2))
    assert verdict is not None
    assert verdict.groups == (("a",), ("c",), ("d",), ("e",))
    assert verdict_of([FENCE], [answered("b", 1)], fence(2, LeaseEnd.DRAINED)) is None


def test_an_owner_that_died_before_its_fence_had_asked_nothing() -> None:
    assert verdict_of(fence(2)) is None


def test_an_owner_that_dies_before_its_verdict_hides_nobody() -> None:
    verdict = verdict_of([FENCE], fence(2), fence(3, LeaseEnd.NODE_GONE, window=1))
    assert verdict is not None
    assert [each for group in verdict.groups for each in group] == ["a", "b", "c", "d"]


def test_a_worker_that_comes_back_for_its_own_shard_has_not_died() -> None:
    """It was stopped for longer than its lease, and nobody else has claimed since (crash history of seed 1)."""
    back = [Fence(2, 0, "w1", 4, LeaseEnd.EXPIRED)]
    assert verdict_of([FENCE], back) is None
    probing = [[FENCE], fence(2), [Probe(2, (("a",), ("b",)))], [Start(2, ("a",))]]
    back = [Fence(3, 0, "w2", 4, LeaseEnd.EXPIRED)]
    assert verdict_of(*probing, back) is None
    assert fold([*probing, back], staged_rounds={}).suspicion.groups_left == (("a",), ("b",))
    assert verdict_of(*probing, fence(3)) is not None


def test_a_death_before_a_start_blames_nobody_and_one_after_it_narrows() -> None:
    before = [[FENCE], fence(2), [Probe(2, (("a", "b"), ("c",)))]]
    assert verdict_of(*before, fence(3)) is None
    assert fold([*before, fence(3)], staged_rounds={}).suspicion.groups_left == (("a", "b"), ("c",))
    verdict = verdict_of(*before, [Start(2, ("a", "b"))], fence(3))
    assert verdict is not None
    assert (verdict.killed, verdict.groups) == (None, (("a",), ("b",), ("c",)))


def test_a_death_alone_is_an_attempt_and_the_record_waits_behind_the_others() -> None:
    state = [[FENCE], fence(2), [Probe(2, (("a",), ("b",)))], [Start(2, ("a",))], fence(3)]
    verdict = verdict_of(*state)
    assert verdict is not None
    assert (verdict.killed, verdict.groups) == ("a", (("b",), ("a",)))
    folded = fold(state, staged_rounds={})
    assert [type(entry) for entry in entries_of(verdict, folded)] == [Failed, Probe]
    assert fold([*state, entries_of(verdict, folded)], staged_rounds={}).failed == {"a": 1}


def test_nobody_is_blamed_while_no_engine_has_ever_answered() -> None:
    verdict = verdict_of([FENCE], fence(2), [Probe(2, (("a",), ("b",)))], [Start(2, ("a",))], fence(3), proven=False)
    assert verdict is not None
    assert (verdict.killed, verdict.groups) == (None, (("b",), ("a",)))


def test_a_start_before_a_preemption_is_forgotten() -> None:
    slots = [[FENCE], fence(2), [Probe(2, (("a",),))], [Start(2, ("a",))], fence(3, LeaseEnd.NODE_GONE)]
    assert verdict_of(*slots) is None
    assert fold(slots, staged_rounds={}).suspicion.groups_left == (("a",),)


def test_the_last_attempt_is_left_to_another_worker() -> None:
    failures: list[Entry] = [Failed("b", 1, attempt, "schema", "", 0) for attempt in (1, 2)] + [Failed("a", 1, 1, "schema", "", 0)]
    folded = fold([[FENCE], failures], staged_rounds={})
    assert [IDS[row] for row in admission(IDS, folded, worker="w1", attempts_max=3)] == ["c", "d", "e", "f", "a"]
    assert [IDS[row] for row in admission(IDS, folded, worker="w2", attempts_max=3)] == ["c", "d", "e", "f", "b", "a"]


@given(st.integers(1, 3000))
def test_parts_are_few_even_and_whole(count: int) -> None:
    suspects = [str(number) for number in range(count)]
    groups = list(parts(suspects))
    assert len(groups) <= PARTS
    assert [each for group in groups for each in group] == suspects
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_verdicts_and_starts_come_back_from_their_bytes() -> None:
    entries: list[Entry] = [
        Failed("a", 3, 1, "engine_killed", "x", 0),
        Probe(3, (("a", "b"), ("c",))),
        Probe(3, ()),
        Start(3, ("a", "b")),
        FENCE,
    ]
    assert decode(encode(entries)) == entries
    assert decode(encode(entries[2:3])) == entries[2:3]
