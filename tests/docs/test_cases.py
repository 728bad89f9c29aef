"""docs/cases.md names tests that exist, for every line at least one."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LINES = [line for line in (REPOSITORY / "docs" / "cases.md").read_text(encoding="utf-8").splitlines() if re.match(r"\| (?!input \|)", line)]
NAMED = sorted({name for line in LINES for name in re.findall(r"`(tests/[\w/]+\.py::\w+)`", line)})


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_is_named_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert re.search(rf"^def {function}\(", (REPOSITORY / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_case_names_a_test() -> None:
    assert [line for line in LINES if "`tests/" not in line] == []
    assert len(LINES) > 20
