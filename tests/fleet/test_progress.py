"""Progress as people see it: the same words on a terminal and in a log."""

from dataclasses import replace

from batch_assets.fleet.progress import PLAIN_EVERY_S, PlainProgress, Progress, duration, lines, progress_view
from tests.support.fleets import FakeClock

LOOK = Progress(
    job="ticket_summaries",
    version="v0007-3fa9c1",
    kind="full",
    workers=2,
    rows=241,
    total=300,
    dead=6,
    rows_per_s=2.94,
    eta_s=20.1,
    shards_done=4,
    shards_running=1,
    shards_waiting=1,
    shards_blocked=0,
    cached_percent=58.2,
    retried=3,
    redone=0,
)


def test_the_live_view_has_the_three_lines_of_the_interface() -> None:
    assert lines(LOOK) == [
        "ticket_summaries v0007-3fa9c1   full · 300 records · 2 workers",
        "answers  ███████████████████░░░░░  241 of 300   dead 6   2.9 rows/s   ETA 0:20",
        "shards   4 done  1 running  1 waiting      cache 58 %   retried 3   redone 0",
    ]


def test_blocked_shards_are_named_when_there_are_any() -> None:
    assert "1 blocked" in lines(replace(LOOK, shards_blocked=1))[2]


def test_a_log_gets_one_line_every_half_minute_and_one_at_the_end() -> None:
    said: list[str] = []
    clock = FakeClock()
    say = PlainProgress(said.append, clock=clock)
    for _ in range(int(3 * PLAIN_EVERY_S)):
        say(LOOK)
        clock.sleep(1.0)
    assert len(said) == 3
    for _ in range(3):
        say(replace(LOOK, rows=300))
    assert len(said) == 4
    assert "300 of 300" in said[-1]
    assert "█" not in said[-1]


def test_durations_are_written_as_people_read_them() -> None:
    assert [duration(seconds) for seconds in (None, 0, 20.4, 61, 3723)] == ["?", "0:00", "0:20", "1:01", "1:02:03"]


def test_without_a_terminal_the_view_is_the_log() -> None:
    said: list[str] = []
    with progress_view(to_terminal=False, log=said.append) as show:
        show(LOOK)
    assert len(said) == 1


def test_on_a_terminal_nothing_goes_to_the_log() -> None:
    said: list[str] = []
    with progress_view(to_terminal=True, log=said.append) as show:
        show(LOOK)
    assert said == []
