"""Open a redrive: dead letters of some classes are asked again, in a new round of their shards, under the same version and recipe.

The order is that of docs/states.md: the logs first, then one transaction. Here a round is only opened; who answers and commits it is the
supervisor that runs next. Which classes may be asked again is decided in `core/redrive.py`.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import polars as pl

from batch_assets.core.errors import ConflictError, NotFinishedError, Problem, UnfitEnvironmentError
from batch_assets.core.leasing import LeaseEnd, LeaseObserver, ShardState, VersionState
from batch_assets.core.records import DeadClass, Outcome
from batch_assets.core.shard_log import Fence, Reopen, fold
from batch_assets.fleet.lead import LeadKeeper
from batch_assets.stores.installation import Installation
from batch_assets.stores.outcomes import Outcomes
from batch_assets.stores.register import LeadRow, ShardRow, VersionRow

REDRIVER = "redrive"  # the worker's name in a redrive's fence; the same each time, so that a repeat puts the same entry
SHARDS_PER_READ = 256  # dead letters of so many are held at a time
LOGS_AT_ONCE = 8  # a log is ten small GETs and a PUT; one after the other, 10,000 shards in s3 would take an hour
LOOK_S = 1.0
NAMED_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveReport:
    """What was opened. Nothing at all when `records` is 0: there is no dead letter of these classes."""

    job: str
    version: str
    classes: tuple[str, ...]
    records: int = 0
    records_by_class: Mapping[str, int] = field(default_factory=dict)
    shards: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Numbers and classes; no ids."""
        return {
            "classes": list(self.classes),
            "records": self.records,
            "records_by_class": dict(self.records_by_class),
            "shards": len(self.shards),
        }

    def as_text(self) -> str:
        """One line."""
        if not self.records:
            return f"{self.version}: no dead letter of the classes {', '.join(self.classes)}; nothing to ask again"
        by_class = ", ".join(f"{count:,} {name}" for name, count in self.records_by_class.items())
        return f"{self.version}: {self.records:,} dead letters are asked again ({by_class}), in {len(self.shards):,} shards"


def redrive(
    installation: Installation,
    *,
    job: str,
    version: str,
    classes: Collection[DeadClass],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    failpoint: Callable[[str], None] = lambda _: None,
) -> RedriveReport:
    """Opens a round for every dead letter of these classes. Under the version's lead, so nobody supervises it meanwhile.

    Raises NotFinishedError while the version has anything open (a redrive, too), ConflictError while somebody supervises it,
    UnfitEnvironmentError when a log does not hold what was committed from it.
    """
    nothing = RedriveReport(job=job, version=version, classes=tuple(sorted(classes)))
    if not _chosen(installation, job, version, classes):
        return nothing
    generation = _take_lead(installation, job=job, version=version, clock=clock, sleep=sleep)
    with LeadKeeper(installation.register, job=job, version=version, generation=generation, settings=installation.settings):
        shards = _chosen(installation, job, version, classes)  # again: now nobody else changes them
        reopened: Counter[str] = Counter()
        for some in _parts(shards):
            reopened += _write_logs(installation, _dead_letters(installation, some, classes), some)
        failpoint("before_register")
        if shards:
            installation.register.redrive(job=job, version=version, generation=generation, shards=shards)
    return RedriveReport(
        job=job,
        version=version,
        classes=nothing.classes,
        records=reopened.total(),
        records_by_class=dict(sorted(reopened.items())),
        shards=tuple(shard.number for shard in shards),
    )


def open_round(shards: Collection[ShardRow]) -> list[ShardRow]:
    """Shards that a redrive opened and that are not committed again yet."""
    return [shard for shard in shards if shard.round > 0 and shard.state is not ShardState.COMMITTED]


# --- which shards ---------------------------------------------------------------------------------------------------------------------


def _chosen(installation: Installation, job: str, version: str, classes: Collection[DeadClass]) -> list[ShardRow]:
    """Committed shards of a finished version that have dead letters of these classes, by number."""
    register = installation.register
    shards = register.shards(job, version)
    row = register.version(job, version)
    if row.state is VersionState.ACTIVE:  # all may be committed, and the run that saw it was killed before it said so
        register.finish_version(job=job, version=version)
        row = register.version(job, version)
    if row.state is not VersionState.FINISHED:
        raise NotFinishedError(_is_open(row, shards))
    return [shard for shard in shards if any(shard.stats.get("dead_by_class", {}).get(name) for name in classes)]


def _take_lead(installation: Installation, *, job: str, version: str, clock: Callable[[], float], sleep: Callable[[float], None]) -> int:
    """The generation. A lead that was not left is waited for, for one lease: its holder may be dead, or just about to leave."""
    register, lease_s = installation.register, installation.settings.lease_s
    observer: LeaseObserver[LeadRow] = LeaseObserver(lease_s=lease_s)
    until_s = clock() + lease_s + 2 * LOOK_S
    while True:
        lead = register.lead(job, version)
        lapsed = bool(lead is not None and observer.lapsed({lead: lead.renewals}, now_s=clock()))
        if lead is None or lead.released or lapsed:
            generation = register.take_lead(job=job, version=version, holder=REDRIVER, seen=lead)
            if generation is not None:
                return generation
        if clock() >= until_s:
            raise ConflictError(_somebody_leads(job, version, lead))
        sleep(LOOK_S)


def _parts(shards: Sequence[ShardRow]) -> Iterator[Sequence[ShardRow]]:
    for start in range(0, len(shards), SHARDS_PER_READ):
        yield shards[start : start + SHARDS_PER_READ]


# --- the logs -------------------------------------------------------------------------------------------------------------------------


def _dead_letters(installation: Installation, shards: Sequence[ShardRow], classes: Collection[DeadClass]) -> pl.DataFrame:
    """`shard`, `record_id`, `dead_class` of what is asked again, as the outcomes table has it: what was committed is what people see."""
    job, version = shards[0].job, shards[0].version
    spec = installation.specs().read(job, version)
    outcomes: Outcomes = installation.outcomes(job=job, version=version, answer_schema=spec.answer_schema)
    rows = outcomes.read(
        shards=[shard.number for shard in shards], columns=["shard", "record_id", "dead_class"], outcome=Outcome.DEAD_LETTER
    )
    return rows.filter(pl.col("dead_class").is_in([name.value for name in classes])).sort("shard", "record_id")


def _write_logs(installation: Installation, dead: pl.DataFrame, shards: Sequence[ShardRow]) -> Counter[str]:
    """Reopens each shard's own; returns how many records, by class."""
    ids = {number: rows["record_id"].to_list() for (number,), rows in dead.group_by("shard")}
    with ThreadPoolExecutor(max_workers=LOGS_AT_ONCE, thread_name_prefix="redrive") as threads:
        list(threads.map(partial(_write_log, installation), shards, [ids.get(shard.number, []) for shard in shards]))
    return Counter(dict(dead["dead_class"].value_counts().iter_rows()))


def _write_log(installation: Installation, shard: ShardRow, record_ids: Sequence[str]) -> None:
    """Puts the fence and the ids behind what was staged, in one slot, unless an interrupted redrive has put them already."""
    log = installation.shard_log(job=shard.job, version=shard.version, shard=shard.number)
    slots = log.read(None)
    before = fold(slots, staged_rounds=shard.staged_rounds)
    round_, epoch = shard.round + 1, shard.epoch + 1
    left = [record_id for record_id in record_ids if before.reopened.get(record_id) != round_]
    unknown = [record_id for record_id in left if record_id not in before.dead]
    if unknown:
        raise UnfitEnvironmentError(_not_in_log(shard, unknown))
    if left:
        fence = Fence(epoch=epoch, round=round_, worker=REDRIVER, window=0, previous_end=LeaseEnd.RELEASED)
        log.writer(epoch=epoch, next_slot=len(slots)).put([fence, Reopen(epoch=epoch, round=round_, record_ids=tuple(left))])


# --- refusals -------------------------------------------------------------------------------------------------------------------------


def _is_open(row: VersionRow, shards: Sequence[ShardRow]) -> Problem:
    redriven = open_round(shards)
    left = sum(shard.state is not ShardState.COMMITTED for shard in shards)
    what = (
        f"a redrive of {row.name} is open: {len(redriven):,} of its shards are not committed yet"
        if redriven
        else f"{row.name} is {row.state}: {left:,} of {len(shards):,} shards are not committed, so its dead letters are not all known"
    )
    return Problem(
        code="redrive.open" if redriven else "redrive.not_finished",
        file=row.job,
        key=row.name,
        what=what,
        expected="a finished version",
        found=f"state {row.state}",
        fix=f"gristmill run {row.job} --version {row.name} goes on with it; redrive it afterwards",
    )


def _somebody_leads(job: str, version: str, lead: LeadRow | None) -> Problem:
    return Problem(
        code="redrive.supervised",
        file=job,
        key=version,
        what=f"{version} is being supervised; a redrive is opened by whoever leads it, and nothing was opened",
        expected="no run at work on it",
        found=lead.holder if lead else "another redrive",
        fix=f"wait until that run has ended (gristmill status {job} -w), then redrive it",
    )


def _not_in_log(shard: ShardRow, record_ids: Sequence[str]) -> Problem:
    return Problem(
        code="redrive.log",
        file=shard.version,
        key=shard.key,
        what=f"the log of {shard.key} does not hold dead letters that were committed from it; the redrive is not opened",
        expected=f"{len(record_ids):,} dead letters: {', '.join(record_ids[:NAMED_MAX])}",
        found="other entries, or slots that do not decode",
        fix="restore the slots of that log from the store's versions or backup; if they are lost, plan the job anew",
    )
