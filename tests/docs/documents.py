"""Reading our Markdown: its links, its headings, its code, and what of that is not so. Each check returns problems as sentences."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from batch_assets.core.errors import RefusedError
from batch_assets.core.job_file import parse_job_file

FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[[^\]\n]*\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:", re.IGNORECASE)  # https:, mailto:
COMMAND = re.compile(r"(?<![\w./-])(?:\.venv/bin/)?gristmill +([^\n;|&]*)")
MAKE = re.compile(r"(?<![\w./-])make +([a-z][a-z-]*)")
OPTION = re.compile(r"(?<!\S)(--?[a-z][a-z-]*)")
PRIVATE = re.compile(r"(?<![\w.])/(?:work|tmp)/")
WHOLE_JOB_FILE = {"input", "model", "decoding"}  # the sections that every job.yaml has


@dataclass(frozen=True, slots=True)
class Document:
    """One Markdown file; `name` is its path from the repository."""

    name: str
    path: Path
    text: str

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """(language, code) of every fenced block."""
        return [(found["language"], found["code"]) for found in FENCE.finditer(self.text)]

    @property
    def code(self) -> list[str]:
        """Every fenced block and every `span`."""
        return [code for _, code in self.blocks] + SPAN.findall(FENCE.sub("", self.text))

    @property
    def links(self) -> list[str]:
        """Targets of links and images, those inside code left out. What a link is called may be code."""
        prose = re.sub(r"`[^`\n]*\]\([^`\n]*`", "", FENCE.sub("", self.text))
        return LINK.findall(prose)

    @property
    def anchors(self) -> set[str]:
        """What GitHub makes of the headings; a heading that occurs again gets -1, -2."""
        found: set[str] = set()
        for heading in HEADING.findall(FENCE.sub("", self.text)):
            words = re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower()).replace(" ", "-")
            again = sum(1 for each in found if re.fullmatch(rf"{re.escape(words)}(-\d+)?", each))
            found.add(f"{words}-{again}" if again else words)
        return found


def read(path: Path, *, repository: Path) -> Document:
    """A file of the repository."""
    return Document(path.relative_to(repository).as_posix(), path, path.read_text(encoding="utf-8"))


def find(repository: Path) -> list[Document]:
    """README, CHANGELOG, the benchmarks' README and everything under docs/."""
    fixed = [repository / name for name in ("README.md", "CHANGELOG.md", "benchmarks/README.md")]
    return [read(path, repository=repository) for path in (*fixed, *sorted((repository / "docs").rglob("*.md")))]


def broken_links(document: Document) -> Iterator[str]:
    """Relative links to what is not there, and anchors that are no heading."""
    for target in document.links:
        if ELSEWHERE.match(target):
            continue
        name, _, anchor = target.partition("#")
        path = document.path.parent / name if name else document.path
        if not path.exists():
            yield f"{document.name}: {target} is not there"
        elif anchor and anchor not in Document(name, path, path.read_text(encoding="utf-8")).anchors:
            yield f"{document.name}: {target} names no heading"


def unknown_commands(document: Document, commands: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """`gristmill …` that does not exist. `commands` has every command (`models pin` too) and its options."""
    for code in document.code:
        for words in COMMAND.findall(code):
            said = words.partition("#")[0].partition("  ")[0]
            command = _command_in(said, commands)
            if command is None:
                if not said.startswith("--help"):
                    yield f"{document.name}: `gristmill {said.strip()}` is no command"
                continue
            for option in OPTION.findall(re.sub(r"\"[^\"]*\"", "", said)):
                if option not in commands[command] | {"--help"}:
                    yield f"{document.name}: `gristmill {command}` has no option {option}"


def _command_in(said: str, commands: Mapping[str, frozenset[str]]) -> str | None:
    words = said.split()[:2]
    is_group = any(name.startswith(f"{words[0]} ") for name in commands) if words else False
    name = " ".join(words if is_group else words[:1])
    return name if name in commands else None


def unknown_targets(document: Document, targets: frozenset[str]) -> Iterator[str]:
    """`make …` that is not in the Makefile."""
    for code in document.code:
        for target in MAKE.findall(code):
            if target not in targets:
                yield f"{document.name}: `make {target}` is no target"


def broken_blocks(document: Document) -> Iterator[str]:
    """Python that does not compile, YAML that cannot be read, a whole job.yaml that `gristmill check` would refuse."""
    for language, code in document.blocks:
        try:
            if language == "python":
                compile(code, document.name, "exec")
            if language == "yaml":
                _read_yaml(code, file=document.name)
        except (SyntaxError, yaml.YAMLError, RefusedError) as error:
            yield f"{document.name}: a {language} block: {error}"


def _read_yaml(code: str, *, file: str) -> None:
    content = yaml.safe_load(code)
    if isinstance(content, dict) and content.keys() >= WHOLE_JOB_FILE:
        parse_job_file(content, file=file)


def private_paths(document: Document) -> Iterator[str]:
    """Places that exist on the author's machine only."""
    for number, line in enumerate(document.text.splitlines(), start=1):
        if PRIVATE.search(line):
            yield f"{document.name}:{number}: {line.strip()}"
