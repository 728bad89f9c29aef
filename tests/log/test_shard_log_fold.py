"""What the fold promises to everybody who reads a log: workers that resume, the committer, audits."""

from hypothesis import given
from hypothesis import strategies as st

from batch_assets.core.shard_log import Answered, Dead, Entry, Failed, Fence, Reopen, Slot, fold


def fence(epoch: int, *, round: int = 0) -> Fence:  # noqa: A002
    return Fence(epoch=epoch, round=round, worker=f"w{epoch}", window=8, previous_end=None)


def answered(record_id: str, *, epoch: int, attempt: int = 1, answer: str = "{}") -> Answered:
    return Answered(record_id, epoch, attempt, answer, tokens_prompt=10, tokens_cached=0, tokens_output=5, worker=f"w{epoch}")


def failed(record_id: str, *, epoch: int, attempt: int) -> Failed:
    return Failed(record_id, epoch, attempt, "not_json", "not_json at offset 3", tokens_output=7)


def dead(record_id: str, *, epoch: int, attempt: int = 3) -> Dead:
    return Dead(record_id, epoch, attempt, "not_json", "not_json at offset 3")


def test_the_first_valid_terminal_entry_of_a_record_wins() -> None:
    folded = fold(
        [
            [fence(1)],
            [answered("a", epoch=1, answer='{"n":1}'), dead("b", epoch=1)],
            [answered("a", epoch=1, answer='{"n":2}'), answered("b", epoch=1)],
        ],
        staged_rounds={},
    )
    assert folded.answered["a"].answer == '{"n":1}'
    assert set(folded.dead) == {"b"}
    assert "b" not in folded.answered
    assert folded.repeated_answers == 2
    assert folded.tokens_thrown_away == 10


def test_a_worker_that_overslept_adds_nothing_behind_its_successors_fence() -> None:
    late = [answered("a", epoch=1), dead("b", epoch=1), failed("c", epoch=1, attempt=1)]
    folded = fold([[fence(1)], [fence(2)], late, [answered("b", epoch=2)]], staged_rounds={})
    assert set(folded.answered) == {"b"}
    assert not folded.dead
    assert not folded.failed
    assert folded.void_entries == 3


def test_a_lower_fence_is_void_and_does_not_let_its_owner_in() -> None:
    folded = fold([[fence(3)], [fence(2)], [answered("a", epoch=2)], [answered("b", epoch=3)]], staged_rounds={})
    assert set(folded.answered) == {"b"}
    assert folded.epoch == 3
    assert folded.workers == {3: "w3"}


def test_attempts_survive_a_change_of_owner_and_count_once_however_often_they_are_put() -> None:
    folded = fold(
        [[fence(1)], [failed("a", epoch=1, attempt=1)], [failed("a", epoch=1, attempt=1)], [fence(2)], [failed("a", epoch=2, attempt=2)]],
        staged_rounds={},
    )
    assert folded.failed == {"a": 2}


def test_a_dead_record_is_open_again_with_no_attempt_used_once_a_redrive_names_it() -> None:
    slots: list[Slot] = [
        [fence(1)],
        [failed("a", epoch=1, attempt=1), dead("a", epoch=1, attempt=1), dead("b", epoch=1)],
        [fence(2, round=1), Reopen(epoch=2, round=1, record_ids=("a",))],
        [answered("a", epoch=2), answered("b", epoch=2)],
    ]
    folded = fold(slots, staged_rounds={0: 2})
    assert set(folded.answered) == {"a"}
    assert set(folded.dead) == {"b"}
    assert not folded.failed


def test_an_answer_is_final_even_when_a_redrive_names_it() -> None:
    slots: list[Slot] = [[fence(1)], [answered("a", epoch=1)], [fence(2, round=1), Reopen(2, 1, ("a",))], [dead("a", epoch=2)]]
    folded = fold(slots, staged_rounds={0: 2})
    assert set(folded.answered) == {"a"}
    assert not folded.dead


def test_what_was_put_after_staging_is_void_until_the_next_fence() -> None:
    slots: list[Slot] = [[fence(1)], [answered("a", epoch=1)], [dead("b", epoch=1)], [fence(2, round=1)], [answered("b", epoch=2)]]
    folded = fold(slots, staged_rounds={0: 2})
    assert set(folded.answered) == {"a", "b"}
    assert not folded.dead


def test_a_slot_that_does_not_decode_is_occupied_empty_and_reported() -> None:
    folded = fold([[fence(1)], None, [answered("a", epoch=1)]], staged_rounds={})
    assert folded.unreadable_slots == [1]
    assert set(folded.answered) == {"a"}


records = st.sampled_from("abc")
epochs = st.integers(1, 3)
entries: st.SearchStrategy[Entry] = st.one_of(
    st.builds(fence, epochs),
    st.builds(answered, records, epoch=epochs),
    st.builds(failed, records, epoch=epochs, attempt=st.integers(1, 3)),
    st.builds(dead, records, epoch=epochs),
)
logs = st.lists(st.one_of(st.none(), st.lists(entries, max_size=4)), max_size=8)


@given(logs, st.integers(0, 8))
def test_what_a_longer_log_says_never_takes_back_what_a_shorter_one_said(slots: list[Slot], cut: int) -> None:
    before, after = fold(slots[:cut], staged_rounds={}), fold(slots, staged_rounds={})
    assert before.answered.items() <= after.answered.items()
    assert before.dead.items() <= after.dead.items()
    assert not set(after.answered) & set(after.dead)


@given(logs)
def test_each_slot_repeated_at_the_end_of_its_own_epoch_changes_no_outcome(slots: list[Slot]) -> None:
    """A lost acknowledgement makes a writer put the same chunk again; nothing that anybody reads may differ."""
    doubled = [slot for slot in slots for _ in range(2)]
    once, twice = fold(slots, staged_rounds={}), fold(doubled, staged_rounds={})
    assert (once.answered, once.dead, once.failed) == (twice.answered, twice.dead, twice.failed)
