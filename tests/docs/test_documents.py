"""What our documents say exists: files and headings behind links, commands and their options, make targets, code that can be read."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from batch_assets.cli import app
from tests.docs import documents
from tests.docs.documents import Document

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = {document.name: document for document in documents.find(REPOSITORY)}


@pytest.fixture(params=DOCUMENTS)
def document(request: pytest.FixtureRequest) -> Document:
    return DOCUMENTS[request.param]


@pytest.fixture(scope="module")
def commands() -> dict[str, frozenset[str]]:
    """Every command of the command line, groups and their commands, with the options each has."""
    return dict(_commands(get_command(app)))


def _commands(group: object, prefix: str = "") -> Iterator[tuple[str, frozenset[str]]]:
    for name, command in getattr(group, "commands", {}).items():
        yield f"{prefix}{name}", frozenset(word for option in command.params for word in option.opts)
        yield from _commands(command, f"{prefix}{name} ")


@pytest.fixture(scope="module")
def targets() -> frozenset[str]:
    """Targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_links_lead_somewhere(document: Document) -> None:
    assert list(documents.broken_links(document)) == []


def test_commands_and_their_options_exist(document: Document, commands: dict[str, frozenset[str]]) -> None:
    assert list(documents.unknown_commands(document, commands)) == []


def test_make_targets_exist(document: Document, targets: frozenset[str]) -> None:
    assert list(documents.unknown_targets(document, targets)) == []


def test_python_compiles_yaml_is_read_and_a_whole_job_file_is_accepted(document: Document) -> None:
    assert list(documents.broken_blocks(document)) == []


def test_no_path_of_one_machine_is_told(document: Document) -> None:
    assert list(documents.private_paths(document)) == []


# --- and each of these checks bites ---------------------------------------------------------------------------------------------------


@pytest.fixture
def planted(tmp_path: Path) -> Document:
    """A document with one of everything that is wrong, between things that are right."""
    path = tmp_path / "planted.md"
    path.write_text(PLANTED, encoding="utf-8")
    return documents.read(path, repository=tmp_path)


PLANTED = """# A heading, with `code`
[right](planted.md) [right](#a-heading-with-code) [right](https://example.org/none) `[code](none.md)` [wrong](none.md) [wrong](#nothing)
![wrong](none.png) [`wrong`](none.py)

## Twice
## Twice
[right](#twice-1) [wrong](planted.md#twice-2)

`gristmill models pin JOB`, `gristmill models sharpen`, `gristmill models`, `make test-long`
`gristmill rollback JOB --reason "--why"`, `gristmill run --faster`
```
gristmill grind     # a comment: gristmill is not a command here
make flour ARGS="-k x"
gristmill query "select --json"
```
```python
x = (
```
```yaml
a: [1
```
```yaml
input: {table: ./t.jsonl, key: id}
model: {path: /models/m, digest: nothing}
decoding: {max_tokens: 8}
```
See /work/main and `/tmp/x`, not /network/tmp or ./tmp/x.
"""


def test_a_broken_link_is_found(planted: Document) -> None:
    found = [problem.removeprefix("planted.md: ") for problem in documents.broken_links(planted)]
    assert found == [
        "none.md is not there",
        "#nothing names no heading",
        "none.png is not there",
        "none.py is not there",
        "planted.md#twice-2 names no heading",
    ]


def test_an_unknown_command_option_or_target_is_found(
    planted: Document, commands: dict[str, frozenset[str]], targets: frozenset[str]
) -> None:
    assert sorted(documents.unknown_commands(planted, commands)) == [
        "planted.md: `gristmill grind` is no command",
        "planted.md: `gristmill models sharpen` is no command",
        "planted.md: `gristmill run` has no option --faster",
    ]
    assert list(documents.unknown_targets(planted, targets)) == ["planted.md: `make flour` is no target"]


def test_a_block_that_cannot_be_read_is_found(planted: Document) -> None:
    found = list(documents.broken_blocks(planted))
    assert len(found) == 3
    assert "model.digest" in found[2]


def test_a_private_path_is_found(planted: Document) -> None:
    assert len(list(documents.private_paths(planted))) == 1
