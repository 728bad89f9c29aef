"""The fold against its model, over any log that a store could hold."""

from hypothesis import given
from hypothesis import strategies as st

from batch_assets.core.shard_log import Answered, Dead, Entry, Failed, Fence, Reopen, Slot, fold
from tests.rules.efforts import Effort
from tests.rules.fold_model import ModelLog

records = st.sampled_from("abc")
epochs = st.integers(1, 4)
rounds = st.integers(0, 2)


def fence(epoch: int, round_: int) -> Fence:
    return Fence(epoch=epoch, round=round_, worker=f"w{epoch}", window=4 + epoch, previous_end=None)


def answered(record_id: str, epoch: int, attempt: int) -> Answered:
    return Answered(record_id, epoch, attempt, f'{{"n":{epoch}}}', 10, 0, 3, f"w{epoch}")


def failed(record_id: str, epoch: int, attempt: int, dead_class: str) -> Failed:
    return Failed(record_id, epoch, attempt, dead_class, f"{dead_class} under {epoch}", 7)


def redrive(epoch: int, round_: int, record_ids: tuple[str, ...]) -> list[Entry]:
    return [fence(epoch, round_), Reopen(epoch, round_, record_ids)]


entries: st.SearchStrategy[Entry] = st.one_of(
    st.builds(fence, epochs, rounds),
    st.builds(fence, epochs, st.just(0)),
    st.builds(answered, records, epochs, st.integers(1, 3)),
    st.builds(failed, records, epochs, st.integers(1, 3), st.sampled_from(["schema", "not_json"])),
    st.builds(Dead, records, epochs, st.just(3), st.just("schema"), st.just("")),
    st.builds(Reopen, epochs, rounds, st.sets(records, min_size=1).map(lambda ids: tuple(sorted(ids)))),
)
chunks = st.lists(entries, min_size=1, max_size=4)
# As a redrive puts it, of records that failed and are dead or are not: else few histories would hold a reopen that is valid.
redrives = st.builds(redrive, epochs, st.integers(1, 2), st.just(("a", "b")))
ends = st.builds(lambda epoch: [failed("a", epoch, 3, "schema"), Dead("a", epoch, 3, "schema", "")], epochs)
slots = st.one_of(chunks, chunks, redrives, ends, st.none())
logs = st.lists(slots, max_size=12)


@st.composite
def staged_logs(draw: st.DrawFn) -> tuple[list[Slot], dict[int, int]]:
    """A log, and for some rounds a slot at which that round was open and may have been staged."""
    log = draw(logs)
    model = ModelLog(log, staged_rounds={})
    ends = draw(st.sets(st.integers(0, len(log)), max_size=3))
    return log, {model.round_at_slot(end): end for end in sorted(ends)}


def test_the_fold_says_what_design_says_of_any_log(effort: Effort) -> None:
    @effort.settings(examples=600)
    @given(staged_logs())
    def check(staged: tuple[list[Slot], dict[int, int]]) -> None:
        log, staged_rounds = staged
        assert fold(log, staged_rounds=staged_rounds) == ModelLog(log, staged_rounds=staged_rounds).folded()

    check()


def test_the_committer_s_reading_of_a_staged_round_never_changes(effort: Effort) -> None:
    """Whatever is put behind the staged slots, until a redrive opens the round again: answers stay, and no record changes sides."""

    @effort.settings(examples=200)
    @given(logs, logs)
    def check(staged: list[Slot], late: list[Slot]) -> None:
        round_ = ModelLog(staged, staged_rounds={}).round_at_slot(len(staged))
        below_fences = [[entry for entry in slot if not isinstance(entry, Fence)] if slot else slot for slot in late]
        before = fold(staged, staged_rounds={})
        after = fold([*staged, *below_fences], staged_rounds={round_: len(staged)})
        assert (after.answered, after.dead, after.failed) == (before.answered, before.dead, before.failed)

    check()
