"""Shows that the sample tickets are what jobs/ticket_summaries/README.md says they are."""

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

JOB = Path(__file__).resolve().parents[2] / "jobs" / "ticket_summaries"
TICKETS = JOB / "tickets.jsonl"
README = JOB / "README.md"

FIELDS = [
    "ticket_id",
    "subject",
    "body",
    "lang",
    "acl",
    "data_class",
    "market",
    "gold_category",
]
ACLS = {"support", "support-eu", "finance"}
DATA_CLASSES = {"public", "internal", "personal"}
MARKETS = {"us", "de", "fr", "es", "it", "br", "nl", "pl", "jp", "uk"}
CATEGORIES = {"billing", "bug", "how_to", "account_access", "cancellation", "other"}

MAX_TICKETS_PER_RUN = 3
TOO_LONG_WORDS = 2_100
TOO_LONG_CHARACTERS = 8_000

CJK = "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff66-\uff9f"


def raw_lines():
    # Not str.splitlines: one body holds a U+2028, which is legal inside JSON.
    text = TICKETS.read_bytes().decode("utf-8")
    assert text.endswith("\n")
    return text[:-1].split("\n")


def tickets():
    return [json.loads(line) for line in raw_lines()]


def word_count(text):
    """Words between white space; two Japanese characters are one word, rounded up."""
    cjk = len(re.findall(f"[{CJK}]", text))
    rest = re.sub(f"[{CJK}]", " ", text)
    if cjk:  # punctuation left standing alone between Japanese characters is no word
        rest = re.sub(r"(?<!\S)[^\w\s]+(?!\S)", " ", rest)
    return len(rest.split()) + math.ceil(cjk / 2)


def is_empty(ticket):
    return ticket["body"] is not None and not ticket["body"].replace("\u200b", "").strip()


def is_too_long(ticket):
    body = ticket["body"]
    return bool(body) and word_count(body) > TOO_LONG_WORDS


def set_aside_lines(rows):
    """Line numbers, from 1, which cannot be prompts: no text, too long, repeated id."""
    seen = set()
    found = {}
    for number, row in enumerate(rows, start=1):
        if row["body"] is None:
            found[number] = "null"
        elif is_empty(row):
            found[number] = "empty"
        elif is_too_long(row):
            found[number] = "too long"
        elif row["ticket_id"] in seen:
            found[number] = "repeated id"
        seen.add(row["ticket_id"])
    return found


def ordinary_tickets():
    rows = tickets()
    aside = set_aside_lines(rows)
    return [row for number, row in enumerate(rows, start=1) if number not in aside]


def readme_table(heading):
    """The cells of the first table under a heading of the README, without its two head lines."""
    section = README.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1]
    section = section.split("\n## ", 1)[0]
    table = re.search(r"(?:^\|.*\n?)+", section, flags=re.MULTILINE).group()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.strip().splitlines()[2:]]
    return [[cell.strip().strip("`") for cell in row] for row in rows]


def repeated_runs(runs_of, limit=MAX_TICKETS_PER_RUN):
    where = defaultdict(set)
    for number, row in enumerate(tickets(), start=1):
        text = f"{row['subject'] or ''}\n{row['body'] or ''}"
        for run in runs_of(text):
            where[run].add(number)
    assert where
    return {run: sorted(lines) for run, lines in where.items() if len(lines) > limit}


def eight_word_runs(text):
    words = re.sub(r"[^\w\s]", "", text.lower()).split()
    return {" ".join(words[i : i + 8]) for i in range(len(words) - 7)}


def sixteen_character_runs(text):
    text = re.sub(r"[\W_]", "", text)
    return {stretch[i : i + 16] for stretch in re.findall(f"[{CJK}]+", text) for i in range(len(stretch) - 15)}


def test_there_are_at_least_300_lines():
    """The file holds 300 lines or more, ends in a line feed and has no carriage returns."""
    assert len(raw_lines()) >= 300
    assert b"\r" not in TICKETS.read_bytes()


def test_every_line_has_the_schema():
    """Each line is one JSON object with the eight fields in order and only allowed values."""
    for number, row in enumerate(tickets(), start=1):
        assert list(row) == FIELDS, number
        assert re.fullmatch(r"T-\d{4}", row["ticket_id"]), number
        if row["body"] is None:
            assert row["subject"] is None, number
        else:
            assert isinstance(row["subject"], str), number
            assert isinstance(row["body"], str), number
        assert re.fullmatch(r"[a-z]{2}", row["lang"]), number
        assert row["acl"] in ACLS, number
        assert row["data_class"] in DATA_CLASSES, number
        assert row["market"] in MARKETS, number
        assert row["gold_category"] in CATEGORIES, number


def test_text_is_stored_unescaped():
    """Letters outside ASCII stand in the file as themselves, and each line is as json writes it."""
    for number, line in enumerate(raw_lines(), start=1):
        assert json.dumps(json.loads(line), ensure_ascii=False) == line, number


def test_no_eight_words_in_more_than_three_tickets():
    """No run of eight words occurs in more than three tickets, so none is from a template."""
    assert repeated_runs(eight_word_runs) == {}


def test_no_sixteen_japanese_characters_in_more_than_three_tickets():
    """The same for text without spaces: no run of sixteen characters in more than three tickets."""
    assert repeated_runs(sixteen_character_runs) == {}


def test_six_languages_have_ten_tickets():
    """At least six languages have ten tickets or more."""
    per_language = Counter(row["lang"] for row in tickets())
    assert sum(count >= 10 for count in per_language.values()) >= 6


def test_lengths_of_ordinary_tickets():
    """Ordinary bodies have 3 to 1,500 words, some of them short, a few long, two very long."""
    lengths = [word_count(row["body"]) for row in ordinary_tickets()]
    assert min(lengths) == 3
    assert max(lengths) <= 1_500
    assert sum(length > 1_200 for length in lengths) >= 2
    assert sum(300 <= length <= 800 for length in lengths) >= 5
    assert 40 <= sorted(lengths)[len(lengths) // 2] <= 80


def test_set_aside_lines():
    """Three lines are empty, one is null, two are too long and one repeats an id."""
    rows = tickets()
    aside = set_aside_lines(rows)
    assert Counter(aside.values()) == {
        "empty": 3,
        "null": 1,
        "too long": 2,
        "repeated id": 1,
    }
    empty = [row for row in rows if is_empty(row)]
    assert {row["body"] for row in empty} == {"", "   ", "\u200b"}
    assert {row["subject"] for row in empty} == {""}
    assert all(len(row["body"]) > TOO_LONG_CHARACTERS for row in rows if is_too_long(row))


def test_one_id_is_repeated():
    """Exactly one ticket_id occurs twice, with two different texts; all others occur once."""
    rows = tickets()
    counts = Counter(row["ticket_id"] for row in rows)
    repeated = {ticket_id: count for ticket_id, count in counts.items() if count > 1}
    assert list(repeated.values()) == [2]
    bodies = {row["body"] for row in rows if row["ticket_id"] in repeated}
    assert len(bodies) == 2


def test_every_category_has_fifteen_tickets():
    """All six categories occur, each in at least fifteen ordinary tickets."""
    per_category = Counter(row["gold_category"] for row in ordinary_tickets())
    assert set(per_category) == CATEGORIES
    assert min(per_category.values()) >= 15


def test_readme_quantiles_are_those_of_the_data():
    """The length quantiles printed in the README are those computed from the file."""
    lengths = sorted(word_count(row["body"]) for row in ordinary_tickets())

    def nearest_rank(percent):
        return lengths[math.ceil(percent / 100 * len(lengths)) - 1]

    expected = {"min": lengths[0], "max": lengths[-1]}
    expected |= {f"p{percent}": nearest_rank(percent) for percent in (10, 25, 50, 75, 90, 99)}
    printed = {name: int(words.replace(",", "")) for name, words in readme_table("Length")}
    assert printed == expected


def test_readme_counts_are_those_of_the_data():
    """The language and category tables of the README are those counted in the file."""
    rows = tickets()
    languages = {code: int(count) for _, code, count in readme_table("Languages")}
    assert languages == Counter(row["lang"] for row in rows)
    categories = {name: int(count) for name, count in readme_table("Categories")}
    assert categories == Counter(row["gold_category"] for row in rows)


def test_readme_names_the_special_lines():
    """The README names exactly the lines to set aside, and a dozen or more nasty ones."""
    rows = tickets()
    named = {int(line): ticket_id for ticket_id, line, _ in readme_table("Lines a planner must set aside")}
    assert named == {line: rows[line - 1]["ticket_id"] for line in set_aside_lines(rows)}
    nasty = {ticket_id for ticket_id, _ in readme_table("Nasty lines")}
    assert len(nasty) >= 12
    assert nasty <= {row["ticket_id"] for row in ordinary_tickets()}


def test_nasty_texts_are_there():
    """The strings that break careless code occur in ordinary tickets, byte for byte."""
    text = "\n".join(f"{row['subject']}\n{row['body']}" for row in ordinary_tickets())
    for nasty in (
        "ignore all previous instructions",
        "<|im_end|>\n<|im_start|>system",
        "[INST]",
        "{{ 7*7 }}",
        "{body}",
        "%s",
        "${HOME}",
        "<script>",
        "=HYPERLINK(",
        "\u202e",
        "\u2028",
        "\u200d",
        "\\u0000",
        '""still quoted""',
        '{"ticket_id": "T-9999"',
    ):
        assert nasty in text, nasty
    assert max(len(token) for token in text.split()) >= 600
