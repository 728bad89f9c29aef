"""What must hold in every history, looked at after each effect, over what it changed: transactions, puts and MERGEs.

It reads the stores from below the seams and knows two things that no process knows: who acts, and what every record must come to.
"""

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from batch_assets.core.breakers import SAMPLE_MIN
from batch_assets.core.leasing import LOSSES_MAX, SHARD_TRANSITIONS, ShardMove, ShardState, VersionState
from batch_assets.core.ports import ObjectStore
from batch_assets.core.records import TO_ANSWER, DeadClass, Outcome, key_hash
from batch_assets.core.shard_log import Answered, Dead, Entry, Failed, Fence, Pardon, Start, fold
from batch_assets.sim.clockwork import Clockwork
from batch_assets.sim.stores import ROTTEN
from batch_assets.sim.workload import JOB, Expected, Workload
from batch_assets.stores.frozen_input import FrozenInput
from batch_assets.stores.register import ShardRow
from batch_assets.stores.shard_log import decode

_SHARDS = (
    "select number, state, epoch, owner, renewals, round, losses, returned, staged_slots, staged_rounds, input_sha256, blocked_reason "
    "from shards order by number"
)
_MOVES = {
    (source, target): move
    for move, transition in SHARD_TRANSITIONS.items()
    for source in transition.sources
    for target in (transition.target, transition.beyond)
    if target is not None
}
_LEADERS_MOVES = (ShardMove.COMMIT, ShardMove.SEND_BACK, ShardMove.BLOCK)  # fenced by the generation


class Violation(NamedTuple):
    """An invariant that did not hold."""

    invariant: str
    found: str


class SeenShard(NamedTuple):
    """A shard's row as it was last seen."""

    number: int
    state: str
    epoch: int
    owner: str | None
    renewals: int
    round: int
    losses: int
    returned: int
    staged_slots: int | None
    staged_rounds: str
    input_sha256: str
    blocked_reason: str | None


@dataclass(frozen=True, slots=True)
class SeenVersion:
    """The version's row; there is one."""

    name: str
    state: VersionState
    attempt: str | None


class Auditor:
    """Implements `Effects`. `violations` stays empty in a history without a bug; `note` gets every effect in words."""

    def __init__(
        self,
        *,
        clockwork: Clockwork,
        workload: Workload,
        database: str,
        objects: ObjectStore,
        rows_of: Callable[[Collection[int]], pl.DataFrame],
        note: Callable[[str], None],
    ) -> None:
        self.violations: list[Violation] = []
        self.version: SeenVersion | None = None
        self.shards: dict[int, SeenShard] = {}
        self._clockwork, self._workload, self._objects, self._rows_of, self.note = clockwork, workload, objects, rows_of, note
        self._connection = sqlite3.connect(database, isolation_level=None)
        self._generation, self._released = 0, False
        self._generations: dict[str, int] = {}  # process -> the one it took last
        self._owners: dict[tuple[int, int], str] = {}  # (shard, epoch) -> who claimed it
        self._frozen: dict[int, dict[str, str]] = {}  # shard -> record -> disposition
        self._slots: defaultdict[int, int] = defaultdict(int)  # how many each log has
        self._highest: defaultdict[int, int] = defaultdict(int)  # epoch of the last claimer that has put anything
        self._rotten: set[int] = set()  # shards with a slot that the store has lost
        self._in_time: set[tuple[int, str, int]] = set()  # (shard, record, epoch) put before a later claimer's first put
        self._failed: defaultdict[str, list[Failed]] = defaultdict(list)  # by record, as they were put
        self._believed: Counter[str | None] = Counter()  # failures that a worker has put as the records' own
        self._pardoned: set[tuple[int, int]] = set()  # (shard, epoch)
        self._rows: dict[str, tuple[Any, ...]] = {}  # the outcomes table as it was last seen

    def close(self) -> None:
        """The connection."""
        self._connection.close()

    def violated(self, invariant: str, found: str) -> None:
        """Keeps it; the history ends."""
        self.note(f"VIOLATED {invariant}: {found}")
        self.violations.append(Violation(invariant, found))

    def _require(self, holds: bool, invariant: str, found: Callable[[], str]) -> None:  # noqa: FBT001  a statement, as in `assert`
        if not holds:
            self.violated(invariant, found())

    # --- transactions -------------------------------------------------------------------------------------------------------------

    def committed(self) -> None:
        """A transaction is durable."""
        versions = self._connection.execute("select name, state, input_attempt from versions").fetchall()
        if not versions:
            return
        self._require(len(versions) == 1, "the same plan is one version", lambda: str(versions))
        name, state, attempt = versions[0]
        was, self.version = self.version, SeenVersion(name, VersionState(state), attempt)
        if was != self.version:
            self.note(f"version {state}")
            self._require(was is None or was.attempt in (None, attempt), "a version's input is set once", lambda: f"{was} -> {attempt}")
        if attempt is not None and not self._frozen:
            self._see_input(attempt)
        self._see_lead()
        for row in self._connection.execute(_SHARDS):
            now = SeenShard(*row)
            before = self.shards.get(now.number)
            if before != now:
                self.shards[now.number] = now
                self._see_shard(before, now)
        if was is not None and self.version.state is VersionState.FINISHED is not was.state:
            open_ = [shard.number for shard in self.shards.values() if shard.state != ShardState.COMMITTED]
            self._require(not open_, "a finished version has only committed shards", lambda: str(open_))

    def announced(self, rows: Sequence[ShardRow]) -> None:
        """A run told people of these."""
        early = [row.number for row in rows if self.shards[row.number].state != ShardState.COMMITTED]
        self._require(not early, "only committed shards are announced", lambda: str(early))

    def _see_lead(self) -> None:
        lead = self._connection.execute("select generation, released from leads").fetchone()
        if lead is None:
            return
        generation, self._released = int(lead[0]), bool(lead[1])
        self._require(generation >= self._generation, "generations only grow", lambda: f"{self._generation} -> {generation}")
        if generation > self._generation:
            self.note(f"leads under generation {generation}")
            self._generations[self._actor] = generation
        self._generation = generation

    def _see_shard(self, before: SeenShard | None, now: SeenShard) -> None:
        if before is None:
            return
        what = f"shard {now.number} {before.state} -> {now.state}, epoch {before.epoch} -> {now.epoch}, owner {now.owner}"
        if before.state != now.state:
            self.note(what)
        elif before.renewals < now.renewals:
            self._require(self._actor == now.owner, "a lease is renewed by its owner alone", lambda: f"{what}, by {self._actor}")
        move = _MOVES.get((ShardState(before.state), ShardState(now.state)))
        same = before.state == now.state
        self._require(same or move is not None, "a shard moves as docs/states.md says", lambda: what)
        is_claim = move is ShardMove.CLAIM and not same
        self._require(now.epoch == before.epoch + is_claim, "an epoch is raised by each claim and by nothing else", lambda: what)
        if same:
            return
        if is_claim:
            self._owners[now.number, now.epoch] = str(now.owner)
            self._require(self._actor == now.owner, "who claims is who owns", lambda: f"{what}, by {self._actor}")
        elif now.state == ShardState.STAGED:
            self._require(self._actor == now.owner, "a shard is staged by its owner alone", lambda: f"{what}, by {self._actor}")
            self._see_staged(now)
        elif before.state == ShardState.STAGED or now.state == ShardState.COMMITTED:
            self._see_leaders_move(what)
        if now.state == ShardState.COMMITTED:
            self._see_committed(now)
        elif now.state == ShardState.BLOCKED:
            self._require(now.losses >= LOSSES_MAX, "a shard is blocked for lost machines alone", lambda: f"{what}: {now.blocked_reason}")
        if now.returned > before.returned:
            self._require(now.number in self._rotten, "a shard goes back only when its store has lost a slot", lambda: what)

    def _see_leaders_move(self, what: str) -> None:
        held = self._generations.get(self._actor, 0)
        leads = held == self._generation and not self._released
        self._require(leads, "only who leads commits", lambda: f"{what}, by {self._actor} ({held}, current {self._generation})")

    def _see_staged(self, now: SeenShard) -> None:
        log = [decode(self._objects.get(self._slot_path(now.number, slot))) for slot in range(now.staged_slots or 0)]
        rounds = {int(number): slots for number, slots in json.loads(now.staged_rounds).items()}
        folded = fold(log, staged_rounds=rounds)
        wanting = [each for each in self._to_answer(now.number) if not folded.is_terminal(each)]
        lost = bool(wanting) and now.number not in self._rotten
        self._require(not lost, "a staged log answers every record", lambda: f"shard {now.number} lacks {wanting[:5]}")

    def _see_committed(self, now: SeenShard) -> None:
        found = sorted(self._rows_of([now.number])["record_id"])
        wanted = sorted(self._frozen[now.number])
        self._require(found == wanted, "a committed shard is in the table, each record once", lambda: _difference(wanted, found))

    @property
    def _actor(self) -> str:
        process = self._clockwork.current
        return process.name if process is not None else "nobody"

    # --- the plan -----------------------------------------------------------------------------------------------------------------

    def _see_input(self, attempt: str) -> None:
        """The frozen input of the version, as soon as it has one: every record of the source, with what the source says of it."""
        assert self.version is not None
        frozen = FrozenInput(self._objects, job=JOB, version=self.version.name, attempt=attempt)
        surplus = 0
        for row in self._connection.execute(_SHARDS):
            shard = SeenShard(*row)
            frame = frozen.read(shard.number, shard.input_sha256)
            surplus += int(frame["surplus"].sum())
            self._frozen[shard.number] = dict(frame.select("record_id", "disposition").iter_rows())
            for record in frame.iter_rows(named=True):
                self._see_origin(record, record["disposition"])
        planned = sorted(record_id for records in self._frozen.values() for record_id in records)
        wanted = sorted(self._workload.expected)
        self._require(planned == wanted, "every record is planned once", lambda: _difference(wanted, planned))
        self._require(surplus == self._workload.surplus, "surplus copies are counted", lambda: f"{surplus}, {self._workload.surplus}")

    def _see_origin(self, row: Mapping[str, Any], disposition: str | None) -> None:
        record_id = row["record_id"]
        wanted = self._workload.expected.get(record_id)
        if wanted is None:
            return self.violated("no record is made up", str(record_id))
        same = (wanted.acl in (None, row["acl"])) and (wanted.segment in (None, row["segment"])) and row["key_hash"] == key_hash(record_id)
        self._require(same, "ACL, segment and hash are the record's own", lambda: f"{record_id}: {row['acl']}, {row['segment']}")
        self._require(disposition in (None, wanted.disposition), "a record is set aside as it must", lambda: f"{record_id}: {disposition}")
        return None

    def _to_answer(self, shard: int) -> list[str]:
        return [record_id for record_id, disposition in self._frozen[shard].items() if disposition == TO_ANSWER]

    # --- puts ---------------------------------------------------------------------------------------------------------------------

    def created(self, path: str, data: bytes) -> None:
        """An object is there; `data` is what was to be put."""
        if "/log/shard-" not in path:
            self.note(f"put {path.split('/')[3]} {path.rsplit('/', 1)[1]}")
            return
        *_, folder, name = path.split("/")
        shard, number = int(folder.removeprefix("shard-")), int(name.removesuffix(".arrow"))
        slot = decode(data)
        self._require(number == self._slots[shard], "a log has no gap", lambda: f"{path}, {self._slots[shard]} slots")
        self._slots[shard] = number + 1
        if data == ROTTEN:
            self._rotten.add(shard)
        words = "undecodable" if slot is None else ", ".join(_in_words(entry) for entry in slot)
        self.note(f"put shard {shard} slot {number}: {words}")
        for entry in slot or ():
            self._see_entry(shard, entry)

    def _see_entry(self, shard: int, entry: Entry) -> None:
        what = f"shard {shard}: {_in_words(entry)}"
        known = self.shards[shard].epoch
        self._require(entry.epoch <= known, "nobody writes under an epoch that was not given out", lambda: f"{what}, current {known}")
        if entry.epoch > self._highest[shard]:
            fenced = isinstance(entry, Fence) or shard in self._rotten
            self._require(fenced, "a claimer's first put is its fence", lambda: what)
            self._highest[shard] = entry.epoch
        if isinstance(entry, Pardon) and entry.epoch == self._highest[shard]:
            self._pardoned.add((shard, entry.epoch))
        elif isinstance(entry, Start) and len(entry.record_ids) == 1:
            self._workload.alone.add((entry.record_ids[0], entry.epoch))
        elif isinstance(entry, Answered | Failed | Dead):
            if entry.epoch == self._highest[shard]:
                self._in_time.add((shard, entry.record_id, entry.epoch))
            own = self._frozen[shard].get(entry.record_id) == TO_ANSWER
            self._require(own, "a log holds its own shard's records", lambda: what)
            least = 0 if isinstance(entry, Dead) else 1  # 0 is a control's, which is no attempt
            within = least <= entry.attempt <= self._workload.attempts_max
            self._require(within, "attempts never exceed the limit", lambda: what)
            self._see_attempt(shard, entry, what)

    def _see_attempt(self, shard: int, entry: Answered | Failed | Dead, what: str) -> None:
        record_id, workload = entry.record_id, self._workload
        workload.alone.discard((record_id, entry.epoch))
        if isinstance(entry, Answered):
            wanted = workload.expected[record_id].answer
            self._require(json.loads(entry.answer) == wanted, "an answer is the engine's for that record", lambda: f"{what} {entry.answer}")
            held = (record_id, entry.attempt) in workload.answers
        elif isinstance(entry, Failed):
            self._failed[record_id].append(entry)
            self._believed[self._owners.get((shard, entry.epoch))] += 1
            held = self._may_have_failed(entry)
        else:
            held = self._may_be_dead(record_id, entry.dead_class, entry.attempt)
        self._require(held, "an attempt is counted for what the engine did", lambda: what)

    def _may_have_failed(self, entry: Failed) -> bool:
        """An engine is blamed on a record that it had alone under an earlier lease, once for each such lease."""
        if entry.dead_class == DeadClass.ENGINE_KILLED:
            alone = {epoch for record_id, epoch in self._workload.alone if record_id == entry.record_id and epoch < entry.epoch}
            blamed = {each.epoch for each in self._failed[entry.record_id] if each.dead_class == DeadClass.ENGINE_KILLED}
            return len(alone) >= len(blamed)
        asked = (entry.record_id, entry.attempt)
        return asked in (self._workload.given_up if entry.dead_class == DeadClass.TIMED_OUT else self._workload.failures)

    def _may_be_dead(self, record_id: str, dead_class: str, attempt: int) -> bool:
        workload = self._workload
        if dead_class == DeadClass.REJECTED:
            return record_id in workload.rejected
        return attempt == workload.attempts_max == len({each.attempt for each in self._failed[record_id]})

    def _slot_path(self, shard: int, slot: int) -> str:
        assert self.version is not None
        return f"{JOB}/versions/{self.version.name}/log/shard-{shard:05d}/{slot:08d}.arrow"

    # --- the table ----------------------------------------------------------------------------------------------------------------

    def merged(self, shards: Collection[int]) -> None:
        """A MERGE over these shards is durable."""
        self.note(f"merged shards {sorted(shards)}")
        rows = self._rows_of(shards)
        ids = rows["record_id"].to_list()
        self._require(len(ids) == len(set(ids)), "each record has one row", lambda: f"{len(ids)} rows, {len(set(ids))} records")
        for row in rows.iter_rows(named=True):
            self._see_row(row)

    def _see_row(self, row: Mapping[str, Any]) -> None:
        record_id, what = row["record_id"], f"{row['record_id']}: {row['outcome']} {row['dead_class']} epoch {row['epoch']} {row['worker']}"
        content = tuple(row.values())
        before = self._rows.setdefault(record_id, content)
        self._require(before == content, "a row never changes", lambda: f"{before} -> {content}")
        self._require(record_id in self._frozen[row["shard"]], "a row stands in its record's shard", lambda: what)
        self._see_origin(row, None)
        wanted = self._workload.expected[record_id]
        if wanted.disposition != TO_ANSWER:
            same = (row["outcome"], row["dead_class"], row["attempt"]) == (Outcome.DEAD_LETTER, wanted.disposition, 0)
            self._require(same, "a record that was set aside is a dead letter of its class", lambda: what)
        else:
            self._see_worked(row, wanted, what)

    def _see_worked(self, row: Mapping[str, Any], wanted: Expected, what: str) -> None:
        record_id, shard = row["record_id"], row["shard"]
        if row["outcome"] == Outcome.RESULT:
            answer = {"category": row["category"], "summary": row["summary"]}
            self._require(answer == wanted.answer, "a result is the engine's answer for that record", lambda: f"{what} {answer}")
        else:
            dead = self._may_be_dead(record_id, row["dead_class"], row["attempt"])
            self._require(dead, "a dead letter has used its attempts", lambda: f"{what} attempt {row['attempt']}")
            self._see_dead(shard, row, what)
        in_time = (shard, record_id, row["epoch"]) in self._in_time
        self._require(in_time, "what is written behind a later claimer's fence counts for nothing", lambda: what)
        owner = self._owners.get((shard, row["epoch"]))
        unknown = row["worker"] is None and shard in self._rotten  # the fence that named its owner is lost
        self._require(row["worker"] == owner or unknown, "a row names who held the lease", lambda: f"{what}, owner {owner}")

    def _see_dead(self, shard: int, row: Mapping[str, Any], what: str) -> None:
        """Never for what machines did."""
        record_id, workload = row["record_id"], self._workload
        failed = [each for each in self._failed[record_id] if (shard, each.epoch) not in self._pardoned]
        pardoned = (shard, row["epoch"]) in self._pardoned
        self._require(not pardoned, "what an unfit worker found dead is not", lambda: what)
        used = row["dead_class"] == DeadClass.REJECTED or len({each.attempt for each in failed}) == workload.attempts_max
        self._require(used, "a pardoned failure is no attempt", lambda: f"{what}: {failed}")
        if record_id in workload.killers:
            self._require(row["dead_class"] == DeadClass.ENGINE_KILLED, "a record that kills is dead because it kills", lambda: what)
        # Chance can take a machine as often as a record has attempts, each time while it has this record alone: nobody can tell.
        is_unlucky = all(each.dead_class == DeadClass.ENGINE_KILLED for each in failed)
        # With one attempt there is no second look, and fewer failures than SAMPLE_MIN are believed where no answer is at hand to ask again.
        is_unlucky |= workload.attempts_max == 1 and self._believed[row["worker"]] < SAMPLE_MIN
        sound = record_id not in workload.innocent or is_unlucky
        self._require(sound, "a record that is answered well is no dead letter", lambda: f"{what}: {failed}")

    def see_end(self) -> None:
        """All of it again, when the version is finished and nobody is left."""
        rows = self._rows_of(list(self.shards))
        self.merged(list(self.shards))
        found, wanted = sorted(rows["record_id"]), sorted(self._workload.expected)
        self._require(found == wanted, "results and dead letters are the snapshot, each record once", lambda: _difference(wanted, found))
        self.committed()
        open_ = [shard.number for shard in self.shards.values() if shard.state != ShardState.COMMITTED]
        self._require(not open_, "every shard is committed in the end", lambda: str(open_))


def _in_words(entry: Entry) -> str:
    kind = type(entry).__name__.lower()
    if isinstance(entry, Answered | Failed | Dead):
        return f"{kind} {entry.record_id} attempt {entry.attempt} epoch {entry.epoch}"
    return f"{kind} epoch {entry.epoch}"


def _difference(wanted: Sequence[str], found: Sequence[str]) -> str:
    missing, more = sorted(set(wanted) - set(found)), len(found) - len(set(found) & set(wanted))
    return f"missing {missing[:5]}, {more} too many"
