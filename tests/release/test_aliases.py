"""The alias table on real Delta: one move wins, the others are told."""

import multiprocessing
from pathlib import Path

import pytest

from batch_assets.core.errors import ConflictError
from batch_assets.stores.aliases import Aliases, AliasRow

PUBLISHERS = 4
ROUNDS = 5


def alias_row(revision: int, *, alias: str = "tickets", by: str = "a", version: str = "v0001-abcdef") -> AliasRow:
    return AliasRow(
        alias=alias,
        revision=revision,
        job="tickets",
        version=version,
        release_id=f"r-{version}-{by}",
        uri="/nowhere",
        by=by,
        at="2026-11-29T01:00:00Z",
    )


def test_nothing_was_published_before_the_first_move(tmp_path: Path) -> None:
    aliases = Aliases(str(tmp_path / "aliases"))
    assert aliases.read("tickets") is None
    assert aliases.all() == []
    assert aliases.history("tickets") == []


def test_a_move_is_what_is_read_next(tmp_path: Path) -> None:
    aliases = Aliases(str(tmp_path / "aliases"))
    aliases.move(alias_row(1), expected=0)
    aliases.move(alias_row(2, version="v0002-abcdef"), expected=1)
    assert aliases.read("tickets") == alias_row(2, version="v0002-abcdef")


def test_a_root_may_have_spaces_and_letters_of_any_language(tmp_path: Path) -> None:
    aliases = Aliases(str(tmp_path / "my données #1" / "aliases"))
    aliases.move(alias_row(1), expected=0)
    aliases.move(alias_row(2), expected=1)
    assert aliases.read("tickets") == alias_row(2)


def test_an_outdated_move_is_told_what_it_would_have_overwritten(tmp_path: Path) -> None:
    aliases = Aliases(str(tmp_path / "aliases"))
    aliases.move(alias_row(1), expected=0)
    aliases.move(alias_row(2, by="anna", version="v0003-123456"), expected=1)
    with pytest.raises(ConflictError, match=r"revision 2: v0003-123456.*by anna"):
        aliases.move(alias_row(2, by="ben"), expected=1)
    assert aliases.read("tickets") == alias_row(2, by="anna", version="v0003-123456")


def test_a_first_move_that_was_not_first_is_refused(tmp_path: Path) -> None:
    aliases = Aliases(str(tmp_path / "aliases"))
    aliases.move(alias_row(1, by="anna"), expected=0)
    with pytest.raises(ConflictError, match="by anna"):
        aliases.move(alias_row(1, by="ben"), expected=0)


def test_a_move_that_is_repeated_after_a_lost_acknowledgement_is_done(tmp_path: Path) -> None:
    aliases = Aliases(str(tmp_path / "aliases"))
    aliases.move(alias_row(1), expected=0)
    aliases.move(alias_row(1), expected=0)
    assert [row.revision for row in aliases.history("tickets")] == [1]


def test_moving_an_alias_that_does_not_stand_at_the_expected_revision_is_refused_even_when_it_is_lower(tmp_path: Path) -> None:
    aliases = Aliases(str(tmp_path / "aliases"))
    with pytest.raises(ConflictError, match="nothing"):
        aliases.move(alias_row(8), expected=7)


def test_aliases_do_not_touch_each_other(tmp_path: Path) -> None:
    aliases = Aliases(str(tmp_path / "aliases"))
    aliases.move(alias_row(1), expected=0)
    aliases.move(alias_row(1, alias="other"), expected=0)
    aliases.move(alias_row(2), expected=1)
    assert [(row.alias, row.revision) for row in aliases.all()] == [("other", 1), ("tickets", 2)]


def test_the_history_is_every_move_newest_first(tmp_path: Path) -> None:
    aliases = Aliases(str(tmp_path / "aliases"))
    for revision in range(1, 26):  # past two checkpoints of the table
        aliases.move(alias_row(revision, by=f"p{revision}"), expected=revision - 1)
    aliases.move(alias_row(1, alias="other"), expected=0)
    assert [row.by for row in aliases.history("tickets")] == [f"p{revision}" for revision in range(25, 0, -1)]
    assert [row.revision for row in aliases.history("tickets", entries_max=3)] == [25, 24, 23]


def _move_repeatedly(uri: str, name: str, alias: str, barrier: object, results: object) -> None:
    """One publisher: as often as there are rounds, move from what it reads; says which revisions it won."""
    aliases = Aliases(uri)
    won = []
    for _ in range(ROUNDS):
        barrier.wait()  # pyright: ignore[reportAttributeAccessIssue]
        present = aliases.read(alias)
        expected = present.revision if present else 0
        try:
            aliases.move(alias_row(expected + 1, alias=alias, by=name), expected=expected)
        except ConflictError:
            continue
        won.append((alias, expected + 1, name))
    results.put(won)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.timeout(120)
def test_of_several_processes_that_move_at_once_one_wins_each_revision(tmp_path: Path) -> None:
    """Four processes, two aliases in one table, created in the race: every won revision stands in the history under its winner."""
    spawn = multiprocessing.get_context("spawn")
    uri = str(tmp_path / "aliases")
    barrier, results = spawn.Barrier(PUBLISHERS), spawn.Queue()
    processes = [spawn.Process(target=_move_repeatedly, args=(uri, f"p{n}", f"alias_{n % 2}", barrier, results)) for n in range(PUBLISHERS)]
    for process in processes:
        process.start()
    won = [move for _ in processes for move in results.get(timeout=100)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    aliases = Aliases(uri)
    stands = [(row.alias, row.revision, row.by) for alias in ("alias_0", "alias_1") for row in aliases.history(alias)]
    assert sorted(won) == sorted(stands)
    assert len(won) >= 2 * ROUNDS  # in each round somebody wins each alias
