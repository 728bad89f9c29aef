"""Each planted fault makes the right check fail and names the key."""

import json
from pathlib import Path

import polars as pl
import pytest

import batch_assets.flows.release as building
from batch_assets.core.errors import NotFinishedError, UnfitEnvironmentError
from batch_assets.core.evidence import EXAMPLES_MAX
from batch_assets.core.identity import short
from batch_assets.core.records import key_hash
from batch_assets.core.release import file_ranges
from batch_assets.core.validation import CheckName, CheckSettings, Severity
from batch_assets.core.verdict import Verdict
from batch_assets.flows.judge import judge, latest_verdict
from batch_assets.flows.release import build_release
from batch_assets.stores.installation import Installation
from batch_assets.stores.register import VersionRow
from batch_assets.stores.releases import release_files
from tests.support.finished import ANSWER_SCHEMA, JOB, Damage, append_outcomes, finished_version, flip_one_byte, frozen_records

LENIENT = CheckSettings(dead_letters_max=0.1)
VICTIM = frozen_records(40)["record_id"][17]  # somewhere in the middle of the hash order, a result
IS_VICTIM = pl.col("record_id") == VICTIM


def judged(installation: Installation, damage: Damage | None = None, *, checks: CheckSettings = LENIENT, canary: int = 0) -> Verdict:
    """The verdict on a release of forty records whose outcomes were damaged."""
    row = finished_version(installation, damage=damage, canary=canary)
    build_release(installation, job=JOB, version=row.name)
    return judge(installation, job=JOB, version=row.name, checks=checks)


def message(verdict: Verdict, name: CheckName) -> str:
    return next(check.message for check in verdict.checks if check.name is name)


def failed(verdict: Verdict) -> list[CheckName]:
    return [check.name for check in verdict.findings]


def of_victim(**columns: pl.Expr) -> Damage:
    """Change these columns of one record."""

    def damage(rows: pl.DataFrame) -> pl.DataFrame:
        changed = {name: pl.when(IS_VICTIM).then(expr).otherwise(pl.col(name)) for name, expr in columns.items()}
        return rows.with_columns(**changed).cast(rows.schema)

    return damage


def test_a_sound_release_passes_and_the_messages_count(installation: Installation) -> None:
    verdict = judged(installation)
    assert verdict.passed
    assert [check.name for check in verdict.checks] == list(CheckName)
    assert message(verdict, CheckName.COVERAGE) == (
        "v0001: 41 of 41 accounted for (38 results + 2 dead letters + 1 surplus copy); missing 0."
    )
    assert message(verdict, CheckName.DEAD_LETTERS) == "v0001: 5.00 % dead letters <= 10 % (2 of 40; all empty)."


def test_every_message_begins_with_the_version_and_all_metadata_are_numbers(installation: Installation) -> None:
    for check in judged(installation).checks:
        assert check.message.startswith("v0001: ")
        assert all(isinstance(value, int | float) for value in check.metadata.values())


def test_a_missing_id_is_named_with_its_shard(installation: Installation) -> None:
    verdict = judged(installation, lambda rows: rows.filter(~IS_VICTIM))
    assert failed(verdict) == [CheckName.COVERAGE]
    text = message(verdict, CheckName.COVERAGE)
    assert f"1 record in neither table: {VICTIM}. Shard {verdict.version}-00002. Re-run that shard." in text
    assert "make 40, the snapshot has 41 rows" in text


def test_a_foreign_id_is_named(installation: Installation) -> None:
    def foreign(rows: pl.DataFrame) -> pl.DataFrame:
        stranger = rows.filter(IS_VICTIM).with_columns(record_id=pl.lit("X-1"), key_hash=pl.lit(key_hash("X-1")))
        return pl.concat([rows, stranger])

    verdict = judged(installation, foreign)
    assert failed(verdict) == [CheckName.COVERAGE]
    assert "1 record that the snapshot does not have: X-1." in message(verdict, CheckName.COVERAGE)


def test_a_missing_and_a_foreign_id_that_balance_are_both_found(installation: Installation) -> None:
    def swapped(rows: pl.DataFrame) -> pl.DataFrame:
        return of_victim(record_id=pl.lit("X-1"), key_hash=pl.lit(key_hash("X-1")))(rows)

    text = message(judged(installation, swapped), CheckName.COVERAGE)
    assert f"in neither table: {VICTIM}." in text
    assert "does not have: X-1." in text


def test_a_doubled_id_is_named(installation: Installation, finished: VersionRow) -> None:
    outcomes = installation.outcomes(job=JOB, version=finished.name, answer_schema=ANSWER_SCHEMA)
    append_outcomes(installation, finished, outcomes.read().filter(IS_VICTIM))
    build_release(installation, job=JOB, version=finished.name)
    verdict = judge(installation, job=JOB, version=finished.name, checks=LENIENT)
    assert failed(verdict) == [CheckName.COVERAGE]
    assert f"1 record more than once: {VICTIM}." in message(verdict, CheckName.COVERAGE)


def test_a_record_in_both_results_and_dead_letters_is_named(installation: Installation, finished: VersionRow) -> None:
    outcomes = installation.outcomes(job=JOB, version=finished.name, answer_schema=ANSWER_SCHEMA)
    dead = outcomes.read().filter(pl.col("outcome") == "dead_letter").head(1).with_columns(record_id=pl.lit(VICTIM))
    append_outcomes(installation, finished, dead.with_columns(key_hash=pl.lit(key_hash(VICTIM)), shard=pl.lit(2, pl.Int32)))
    build_release(installation, job=JOB, version=finished.name)
    text = message(judge(installation, job=JOB, version=finished.name, checks=LENIENT), CheckName.COVERAGE)
    assert f"1 record more than once: {VICTIM}." in text


@pytest.mark.parametrize(
    ("column", "value"),
    [("acl", pl.lit("everyone")), ("record_class", pl.lit("public")), ("segment", pl.lit("de2")), ("acl", pl.lit(None))],
)
def test_a_row_that_did_not_inherit_is_named(installation: Installation, column: str, value: pl.Expr) -> None:
    verdict = judged(installation, of_victim(**{column: value}))
    assert failed(verdict) == [CheckName.ACL]
    assert message(verdict, CheckName.ACL) == f"v0001: 1 record with another {column} than the input: {VICTIM}."


def test_a_second_recipe_is_named(installation: Installation) -> None:
    other = "sha256:" + "ab" * 32
    verdict = judged(installation, of_victim(recipe=pl.lit(other)))
    assert failed(verdict) == [CheckName.ONE_RECIPE]
    assert f"found {short(other)}): {VICTIM}." in message(verdict, CheckName.ONE_RECIPE)


@pytest.mark.parametrize("column", ["job_version", "origin_version"])
def test_a_row_of_another_version_is_named(installation: Installation, column: str) -> None:
    verdict = judged(installation, of_victim(**{column: pl.lit("v0009-ffffff")}))
    assert failed(verdict) == [CheckName.ONE_RECIPE]
    assert f"found v0009-ffffff): {VICTIM}." in message(verdict, CheckName.ONE_RECIPE)


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"category": pl.lit("refund")}, "category: enum"),
        ({"category": pl.lit(None)}, "category: required in a result"),
        ({"summary": pl.lit("x" * 41)}, "summary: maxLength"),
        ({"summary": pl.lit("x")}, "summary: minLength"),
        ({"entities": pl.concat_list([pl.struct(kind=pl.lit("order"), text=pl.lit("A"))] * 4)}, "entities: maxItems"),
        ({"entities": pl.concat_list(pl.struct(kind=pl.lit("person"), text=pl.lit("A")))}, "entities[].kind: enum"),
        ({"entities": pl.concat_list(pl.struct(kind=pl.lit("date"), text=pl.lit("A" * 11)))}, "entities[].text: maxLength"),
        ({"entities": pl.concat_list(pl.struct(kind=pl.lit(None, pl.String), text=pl.lit("A")))}, "entities[].kind: required"),
        ({"attempt": pl.lit(0)}, "a result took at least one attempt"),
        ({"dead_class": pl.lit("schema")}, "a dead letter has a class, a result has none"),
        ({"outcome": pl.lit("dead_letter"), "dead_class": pl.lit("bored")}, "dead_class: isin"),
        ({"outcome": pl.lit("dead_letter"), "dead_class": pl.lit("schema")}, "category: no answer in a dead letter"),
        ({"record_digest": pl.lit(None)}, "record_digest: not_nullable"),
    ],
)
def test_a_row_against_the_schema_is_named_with_the_rule(installation: Installation, columns: dict[str, pl.Expr], rule: str) -> None:
    verdict = judged(installation, of_victim(**columns))
    assert CheckName.SCHEMA in failed(verdict)
    text = message(verdict, CheckName.SCHEMA)
    assert f"1 record against the schema ({rule}" in text or f"; {rule}" in text
    assert text.endswith(f": {VICTIM}.")


def test_no_answer_text_is_in_a_message(installation: Installation) -> None:
    verdict = judged(installation, of_victim(summary=pl.lit("SECRET" * 20), category=pl.lit("SECRET")))
    assert not verdict.passed
    assert "SECRET" not in json.dumps(verdict.as_payload())


@pytest.mark.parametrize(
    ("columns", "note"),
    [
        ({"record_digest": pl.lit("0" * 64)}, "record_digest"),
        ({"labels": pl.lit("{}")}, "labels"),
        ({"surplus": pl.lit(7)}, "surplus"),
    ],
)
def test_a_row_that_is_not_as_frozen_is_named(installation: Installation, columns: dict[str, pl.Expr], note: str) -> None:
    text = message(judged(installation, of_victim(**columns)), CheckName.COVERAGE)
    assert f"1 record not as frozen ({note}): {VICTIM}." in text


def test_an_answer_for_a_record_that_was_set_aside_is_found(installation: Installation) -> None:
    empty = "T-00039"

    def answered(rows: pl.DataFrame) -> pl.DataFrame:
        is_empty = pl.col("record_id") == empty
        values = {"outcome": pl.lit("result"), "dead_class": pl.lit(None), "attempt": pl.lit(1), "category": pl.lit("bug")}
        values |= {"summary": pl.lit("fine"), "entities": pl.lit([], rows.schema["entities"])}
        changed = {name: pl.when(is_empty).then(value).otherwise(pl.col(name)) for name, value in values.items()}
        return rows.with_columns(**changed).cast(rows.schema)

    verdict = judged(installation, answered)
    assert failed(verdict) == [CheckName.COVERAGE]
    assert f"not as frozen (disposition): {empty}." in message(verdict, CheckName.COVERAGE)


def test_a_record_set_aside_has_no_attempt(installation: Installation) -> None:
    empty = "T-00039"
    verdict = judged(
        installation, lambda rows: rows.with_columns(attempt=pl.when(pl.col("record_id") == empty).then(1).otherwise("attempt"))
    )
    assert f"not as frozen (disposition): {empty}." in message(verdict, CheckName.COVERAGE)


def test_an_answered_record_cannot_become_one_that_was_set_aside(installation: Installation) -> None:
    nothing = dict.fromkeys(("category", "summary", "entities"), pl.lit(None))
    gone = of_victim(outcome=pl.lit("dead_letter"), dead_class=pl.lit("empty"), attempt=pl.lit(0), **nothing)
    verdict = judged(installation, gone)
    assert failed(verdict) == [CheckName.COVERAGE]
    assert f"1 record not as frozen (disposition): {VICTIM}." in message(verdict, CheckName.COVERAGE)


def test_a_wrong_hash_is_found_though_the_id_is_right(installation: Installation) -> None:
    verdict = judged(installation, of_victim(key_hash=pl.col("key_hash") + 1))
    assert CheckName.COVERAGE in failed(verdict)
    assert VICTIM in message(verdict, CheckName.COVERAGE)


def test_faults_are_found_in_a_release_of_many_files_and_with_a_canary(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "file_ranges", lambda spans: file_ranges(spans, file_rows=10))
    verdict = judged(installation, lambda rows: rows.filter(~IS_VICTIM), canary=5)
    assert failed(verdict) == [CheckName.COVERAGE]
    assert f"1 record in neither table: {VICTIM}." in message(verdict, CheckName.COVERAGE)


def test_a_release_of_many_files_and_a_canary_passes(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "file_ranges", lambda spans: file_ranges(spans, file_rows=10))
    assert judged(installation, canary=5).passed


def test_at_most_ten_ids_are_named(installation: Installation) -> None:
    text = message(judged(installation, lambda rows: rows.head(0)), CheckName.COVERAGE)
    assert "40 records in neither table" in text
    assert "and 30 more" in text
    assert text.count("T-0") == EXAMPLES_MAX


def test_dead_letters_above_the_limit_fail_with_their_classes(installation: Installation) -> None:
    verdict = judged(installation, checks=CheckSettings(dead_letters_max=0.005))
    assert failed(verdict) == [CheckName.DEAD_LETTERS]
    assert not verdict.passed
    assert message(verdict, CheckName.DEAD_LETTERS) == "v0001: 5.00 % dead letters > 0.5 % (2 of 40; all empty)."


def test_a_segment_above_its_own_limit_fails_though_the_whole_is_below(installation: Installation) -> None:
    settings = CheckSettings(dead_letters_max=0.1, dead_letters_per_segment_max=0.07)
    verdict = judged(installation, checks=settings)
    assert failed(verdict) == [CheckName.DEAD_LETTERS]
    # T-00038 is in `jp` (13 records), T-00039 in `de` (14)
    assert "market `jp` 7.69 % dead letters > 7 % (1 of 13; all empty)." in message(verdict, CheckName.DEAD_LETTERS)


def test_a_check_that_only_warns_does_not_stop_the_release(installation: Installation) -> None:
    verdict = judged(installation, checks=CheckSettings(dead_letters_max=0.005, dead_letters_severity=Severity.WARN))
    assert verdict.passed
    assert verdict.summary == "warned: dead_letters"


def test_judging_again_with_another_limit_changes_the_verdict_not_the_release(installation: Installation) -> None:
    first = judged(installation, checks=CheckSettings(dead_letters_max=0.005))
    second = judge(installation, job=JOB, version=first.version, checks=LENIENT)
    assert (first.passed, second.passed) == (False, True)
    assert first.release_digest == second.release_digest
    assert [row.passed for row in installation.register.verdicts(first.release_id)] == [False, True]


def test_a_verdict_is_recorded_in_full_and_copied_beside_the_release(installation: Installation) -> None:
    verdict = judged(installation)
    assert latest_verdict(installation, job=JOB, version=verdict.version) == verdict
    (copy,) = Path(installation.releases(job=JOB).uri_of(verdict.release_id), "_verdicts").iterdir()
    assert Verdict.from_payload(json.loads(copy.read_text())) == verdict


def test_a_release_whose_file_was_changed_is_not_judged(installation: Installation, finished: VersionRow) -> None:
    report = build_release(installation, job=JOB, version=finished.name)
    name = release_files(report.uri)[0].name
    flip_one_byte(Path(report.uri) / name)
    with pytest.raises(UnfitEnvironmentError, match=name):
        judge(installation, job=JOB, version=finished.name, checks=LENIENT)


def test_a_version_without_a_release_cannot_be_judged(installation: Installation, finished: VersionRow) -> None:
    with pytest.raises(NotFinishedError, match="has no release"):
        judge(installation, job=JOB, version=finished.name, checks=LENIENT)
    assert latest_verdict(installation, job=JOB, version=finished.name) is None
