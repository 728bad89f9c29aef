"""Histories of crashes over the real code: no invariant is violated, every fault strikes, and a seed is one history."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from batch_assets.sim.crash import main
from batch_assets.sim.faults import Fault
from batch_assets.sim.history import REAL_EVERY, run_history

SEEDS_IN_CI = 45  # a second each, and enough for the rarest fault; more are run by hand (`make sim`) and by the long test
SEEDS_LONG = 2000
RARE = 1  # of each kind of fault a run of CI sees at least so many


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_history_violates_an_invariant_and_every_fault_strikes() -> None:
    struck = _run(range(1, SEEDS_IN_CI + 1))
    assert [fault for fault in Fault if struck[fault] < RARE] == []


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_no_history_of_many_violates_an_invariant() -> None:
    _run(range(10_001, 10_001 + SEEDS_LONG))


@pytest.mark.slow
def test_a_seed_is_one_history_event_for_event_also_in_another_process() -> None:
    seeds = (3, REAL_EVERY)
    digests = [run_history(seed).digest for seed in seeds]
    assert digests == [run_history(seed).digest for seed in seeds]
    program = f"from batch_assets.sim.history import run_history\nfor seed in {seeds}: print(run_history(seed).digest)"
    again = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert again.stdout.split() == digests


def test_another_seed_is_another_history() -> None:
    assert run_history(3).digest != run_history(4).digest


def test_the_command_says_what_struck_how_often(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--first", "5"]) == 0
    said = capsys.readouterr().out
    assert "2 histories, seeds 5 to 6: no invariant was violated" in said
    assert all(fault in said for fault in Fault)


def test_the_command_replays_one_seed_with_its_faults_and_last_events(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("seed 5 on twins in memory: ")
    assert "faults: " in said
    assert "version finished" in said


def _run(seeds: range) -> Counter[Fault]:
    struck: Counter[Fault] = Counter()
    for seed in seeds:
        report = run_history(seed)
        assert report.violation is None, f"seed {seed}: {report.violation}\n" + "\n".join(report.last_events)
        struck += report.struck
    return struck
