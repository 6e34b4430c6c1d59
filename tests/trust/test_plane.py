"""The whole plane against a small model in memory: producers, turns, crashes, damage and readers, in any order.

Hypothesis makes up the order. Calls are assembled into records, written through a carrier, read again by a reader that
may die at any record, and laid out as a batch. The model is lists: for each producer the blocks that must be there, and
for each token the row that its forward gave. Rows are functions of token ids, so that a row at another token shows.

What the model judges:

* a record comes once, in its producer's order, with its tokens, rows and versions; behind the last one, none is absent;
* a position is behind every block that was passed, and before every block with a record that did not come;
* a new reader begins exactly at the position that the last one stored, and records that come again are the ones behind;
* a damaged block costs its own records, and rows of those that lean on it: what comes has no row that is not true.

The machine fails where it should: ``FAULTS`` are planted one by one in the library, and each is found.

Axes: S tokens, L layers, K slots.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from numpy.typing import NDArray

from routeplane.batch import collate
from routeplane.errors import ErrorKind, RouteplaneError, TransportError
from routeplane.record.assembly import assemble
from routeplane.record.calls import ModelCall
from routeplane.record.interfaces import BlockName, Position
from routeplane.record.policy import ReadPolicy
from routeplane.record.prefixes import join_prefix
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.spec import MISSING
from routeplane.stream import block_reader, folder
from routeplane.stream.blocks import BlockLimits, ReadOptions
from routeplane.testing.builders import SPEC
from tests.stream import test_contract as contracts

_PRODUCERS = ("p", "q")
#: What a producer may have in the place: five long records, so that blocks that were acknowledged are deleted soon.
_MAX_BYTES = 110_000
_POLICY = ReadPolicy(on_corrupt="quarantine", on_truncated="keep", on_alarm="raise")

picks = st.integers(0, 11)


def rows_of(token_ids: Any) -> NDArray[np.int16]:
    """The rows of tokens, by their ids alone: ``[S, L, K]``."""
    ids_S11 = np.asarray(token_ids, dtype=np.int64)[:, None, None]
    layer_L1 = np.asarray(SPEC.layer_ids)[:, None]
    return np.asarray((13 * ids_S11 + 7 * layer_L1 + np.arange(SPEC.top_k)) % 64, dtype=np.int16)


@dataclass
class Segment:
    """An unbroken context: a token's id, the version that sampled it (None: not sampled), and whether its row came."""

    token_ids: list[int] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    has_row: list[bool] = field(default_factory=list)

    @property
    def routes(self) -> NDArray[np.int16]:
        """The true rows ``[S, L, K]``."""
        routes_SLK = rows_of(self.token_ids)
        routes_SLK[~np.asarray(self.has_row, dtype=np.bool_)] = MISSING
        return routes_SLK


@dataclass
class Rollout:
    """A conversation in the making: its calls, and the truth of each context."""

    name: str
    attempt: int = 0
    turns: int = 0
    calls: list[ModelCall] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=lambda: [Segment()])


@dataclass
class Sent:
    """A record that was written, and its truth."""

    record: RouteRecord
    truth: Segment
    again: bool = False  # written before
    harmed: bool = False  # it stands in a damaged block, or may lean on one


@dataclass
class Producer:
    """What a producer holds and what it sealed."""

    writer: Any = None
    every: bool = True  # whether each record is a block
    end: str | None = None
    held: list[Sent] = field(default_factory=list)
    blocks: list[list[Sent]] = field(default_factory=list)

    def seal(self) -> None:
        """What is held is a block."""
        if self.held:
            self.blocks.append(self.held)
            self.held = []


class Plane(RuleBasedStateMachine):
    """The machine; ``carrier`` is set by what runs it."""

    carrier: Any

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.place = self.carrier.place(self.folder)
        self.version, self.next_id = 0, 1
        self.rollouts: list[Rollout] = []
        self.producers = {name: Producer() for name in _PRODUCERS}
        self._forget_reader(Position(place=""))
        for name in _PRODUCERS:
            self._open(name, every=True)

    def teardown(self) -> None:
        """Give names and files up."""
        for producer in self.producers.values():
            if producer.writer is not None:
                self.carrier.kill(self.place, producer.writer)
        if self.reader is not None:
            self.reader.close()
        self.carrier.release(self.place)
        shutil.rmtree(self.folder)

    # -- engines ---------------------------------------------------------------------------------------------------

    @rule()
    def update_weights(self) -> None:
        """The policy moves on."""
        self.version += 1

    @rule(name=st.sampled_from(_PRODUCERS), prompt=st.integers(1, 6), made=st.integers(1, 5))
    @precondition(lambda self: len(self.rollouts) < 12)
    def begin(self, name: str, prompt: int, made: int) -> None:
        """A rollout with its first turn."""
        rollout = Rollout(name=f"{name}-{len(self.rollouts)}")
        self.rollouts.append(rollout)
        self._call(rollout, fresh=prompt, made=made)

    @rule(pick=picks, fresh=st.integers(0, 4), made=st.integers(1, 5), cached=st.booleans(), update=st.booleans())
    @precondition(lambda self: self.rollouts)
    def take_turn(self, pick: int, fresh: int, made: int, cached: bool, update: bool) -> None:
        """A further turn; the weights may change inside it, and the engine may leave a known prefix out."""
        self._call(self._rollout(pick), fresh=fresh, made=made, cached=cached, update=update)

    @rule(pick=picks, made=st.integers(2, 5), lost=st.integers(1, 3))
    @precondition(lambda self: self.rollouts)
    def cut_a_call_off(self, pick: int, made: int, lost: int) -> None:
        """A call that is aborted: its last rows never come."""
        self._call(self._rollout(pick), fresh=1, made=made, lost=lost)

    @rule(pick=picks, kept=st.integers(1, 4), made=st.integers(1, 4))
    @precondition(lambda self: self.rollouts)
    def trim_the_context(self, pick: int, kept: int, made: int) -> None:
        """The history is cut from the front: another segment begins with tokens of the old one."""
        rollout = self._rollout(pick)
        old = rollout.segments[-1].token_ids
        if len(old) > kept:
            rollout.segments.append(Segment())
            self._call(rollout, prompt=old[-kept:], fresh=1, made=made)

    @rule(pick=picks, made=st.integers(1, 5))
    @precondition(lambda self: self.rollouts)
    def retry(self, pick: int, made: int) -> None:
        """Another attempt, from the beginning."""
        rollout = self._rollout(pick)
        rollout.attempt, rollout.calls, rollout.segments = rollout.attempt + 1, [], [Segment()]
        self._call(rollout, fresh=2, made=made)

    def _rollout(self, pick: int) -> Rollout:
        return self.rollouts[pick % len(self.rollouts)]

    def _call(
        self,
        rollout: Rollout,
        *,
        prompt: list[int] | None = None,
        fresh: int,
        made: int,
        cached: bool = False,
        update: bool = False,
        lost: int = 0,
    ) -> None:
        """One call of an engine, and what is true behind it."""
        truth = rollout.segments[-1]
        before = list(truth.token_ids) if prompt is None else prompt
        ids = list(range(self.next_id, self.next_id + fresh + made))
        self.next_id += len(ids)
        prompt_ids, made_ids = [*before, *ids[:fresh]], ids[fresh:]
        total = len(prompt_ids) + made
        known = 0 if False in truth.has_row else len(truth.has_row)
        first = next((at for at, has in enumerate(truth.has_row) if not has), known) if cached else 0
        stop = max(first, total - 1 - lost)
        parts: tuple[tuple[int, int, int], ...] = ((len(prompt_ids), total, self.version),)
        if update and made > 1:
            half = len(prompt_ids) + made // 2
            parts = ((len(prompt_ids), half, self.version), (half, total, self.version + 1))
            self.version += 1
        fed_ids = [*prompt_ids, *made_ids][first:stop]
        rollout.calls.append(
            ModelCall(
                prompt_ids=np.asarray(prompt_ids),
                generation_ids=np.asarray(made_ids),
                routes=rows_of(fed_ids),
                first_row=first,
                weights_version=None,
                versions=parts,
                call_id=f"{rollout.attempt}.{rollout.turns}.{len(rollout.calls)}",
                loss="aborted" if lost else None,
            )
        )
        grown = total - len(truth.token_ids)
        truth.token_ids += [*prompt_ids, *made_ids][-grown:]
        truth.versions += [None] * (grown - made) + [version for a, b, version in parts for _ in range(a, b)]
        truth.has_row += [False] * grown
        truth.has_row[first:stop] = [True] * (stop - first)

    # -- producers -------------------------------------------------------------------------------------------------

    def _open(self, name: str, *, every: bool) -> None:
        producer = self.producers[name]
        limits = BlockLimits(block_bytes=1 if every else _MAX_BYTES, max_bytes=_MAX_BYTES, sync=False, timeout_s=0.0)
        producer.writer = self.carrier.writer(self.place, run="run", producer=name, limits=limits)
        producer.every, producer.end = every, None

    @rule(pick=picks, name=st.sampled_from(_PRODUCERS))
    @precondition(lambda self: self.rollouts)
    def write(self, pick: int, name: str) -> None:
        """What a rollout came to so far, each context a record; its first rows are those of the last turn's record."""
        rollout, producer = self._rollout(pick), self.producers[name]
        if not rollout.calls or producer.writer is None or self._unread_bytes(producer) > _MAX_BYTES // 2:
            return
        key = RecordKey(f"{rollout.name}.{rollout.turns}", rollout.attempt, 0)
        rollout.turns += 1
        made = assemble(rollout.calls, SPEC, sample_id=key, group=rollout.name, on_break="split")
        assert len(made.records) == len(rollout.segments)
        for record, truth in zip(made.records, rollout.segments, strict=True):
            still = Segment(list(truth.token_ids), list(truth.versions), list(truth.has_row))
            self._put(producer, Sent(record=record, truth=still))

    @rule(name=st.sampled_from(_PRODUCERS))
    def write_much(self, name: str) -> None:
        """A long record that shares nothing: what was acknowledged has to make space for it."""
        producer = self.producers[name]
        if producer.writer is None:
            return
        rollout = Rollout(name=f"long-{self.next_id}")
        self._call(rollout, fresh=1_000, made=1_000)
        (record,) = assemble(rollout.calls, SPEC, sample_id=rollout.name).records
        self._put(producer, Sent(record=record, truth=rollout.segments[0]))

    @rule(name=st.sampled_from(_PRODUCERS), pick=picks)
    def write_again(self, name: str, pick: int) -> None:
        """A producer that was started again does not know what it wrote, and writes some of it once more."""
        producer = self.producers[name]
        written = [sent for block in producer.blocks for sent in block if not sent.harmed]
        if producer.writer is None or not written:
            return
        sent = written[pick % len(written)]
        self.carrier.kill(self.place, producer.writer)
        producer.held = []
        self._open(name, every=producer.every)
        self._put(producer, replace(sent, again=True))
        sent.again = True

    def _put(self, producer: Producer, sent: Sent) -> None:
        if producer.writer is None:
            return
        producer.held.append(sent)
        if self._has_space(producer, lambda: producer.writer.write(sent.record)) and producer.every:
            producer.seal()

    def _has_space(self, producer: Producer, work: Callable[[], object]) -> bool:
        """Do work that may seal a block. A place that is full ends the writer; what it held is lost."""
        try:
            work()
        except TransportError as error:
            # what was not acknowledged, and what that leans on, is all that may fill it
            if error.kind != ErrorKind.TIMED_OUT or self._unread_bytes(producer) < _MAX_BYTES // 4:
                raise
            producer.writer, producer.end, producer.held = None, "crash", []
            return False
        return True

    def _unread_bytes(self, producer: Producer) -> int:
        """Bytes that the producer may not delete, estimated high."""
        name = next(name for name, each in self.producers.items() if each is producer)
        kept = [*producer.blocks[self.stored.number(name) :], producer.held]
        return sum(sent.record.nbytes + 6_000 for block in kept for sent in block)

    @rule(name=st.sampled_from(_PRODUCERS))
    def flush(self, name: str) -> None:
        """Seal what is held; the block is named by its number."""
        producer = self.producers[name]
        if producer.writer is not None:
            expected = BlockName(name, len(producer.blocks)) if producer.held else None
            names: list[BlockName | None] = []
            if self._has_space(producer, lambda: names.append(producer.writer.flush())):
                producer.seal()
                assert [expected] == names

    @rule(name=st.sampled_from(_PRODUCERS), how=st.sampled_from(("crash", "crash", "abort", "close")))
    def end(self, name: str, how: str) -> None:
        """A producer dies, gives up, or is done. What it held is lost in the first two."""
        producer = self.producers[name]
        if producer.writer is None:
            return
        if how == "close":
            if not self._has_space(producer, producer.writer.close):
                return
            producer.seal()
        elif how == "abort":
            producer.writer.abort()
        else:
            self.carrier.kill(self.place, producer.writer)
        producer.writer, producer.end, producer.held = None, how, []

    @rule(name=st.sampled_from(_PRODUCERS), every=st.booleans())
    def start_again(self, name: str, every: bool) -> None:
        """A producer that died or gave up goes on under its name."""
        producer = self.producers[name]
        if producer.writer is None and producer.end != "close":
            self._open(name, every=every)

    @rule(name=st.sampled_from(_PRODUCERS), pick=picks)
    def damage(self, name: str, pick: int) -> None:
        """A bit flips in a sealed block that was not read. Whatever of its rollouts comes after may lean on it."""
        blocks = self.producers[name].blocks
        first = max(self.stored.number(name), self.passed.get(name, 0))
        numbers = range(first, len(blocks))
        if not numbers:
            return
        number = numbers[pick % len(numbers)]
        if any(sent.again or sent.harmed for sent in blocks[number]):
            return
        self.carrier.damage(self.place, BlockName(name, number))
        groups = {sent.record.group for sent in blocks[number]}
        self.harmed_groups |= {(name, group) for group in groups if group is not None}
        for sent in blocks[number]:
            sent.harmed = True

    # -- readers ---------------------------------------------------------------------------------------------------

    def _forget_reader(self, stored: Position) -> None:
        self.reader: Any = None
        self.records: Iterator[RouteRecord] = iter(())
        self.by_call = False
        self.stored = stored
        if not hasattr(self, "came_before"):
            self.came_before: set[RecordKey] = set()
            self.harmed_groups: set[tuple[str, str]] = set()
        self.came = set(self.came_before)
        self.passed: dict[str, int] = {name: stored.number(name) for name in _PRODUCERS}
        #: the block that the last record came from, and how many of its records were passed
        self.current: tuple[str, int] | None = None
        self.within = 0

    @rule(count=st.integers(1, 6), by_call=st.booleans())
    def read(self, count: int, by_call: bool) -> None:
        """A reader, a new one if there is none, takes some records; a trainer lays them out."""
        if self.reader is None:
            self._open_reader(by_call)
        batch = []
        for _ in range(count):
            record = next(self.records, None)
            if record is None:
                self._judge_end()
                break
            self._judge(record)
            batch.append(record)
        self._judge_position()
        if batch:
            self._lay_out(batch)
        if len(batch) < count:
            self._drop()

    def _open_reader(self, by_call: bool) -> None:
        options = ReadOptions(acknowledge="call" if by_call else "next", on_vanished="wait", timeout_s=20.0)
        self.reader = self.carrier.reader(
            self.place, producers=list(_PRODUCERS), follow=False, policy=_POLICY, options=options
        )
        here = self.reader.position()
        assert self.stored.next == here.next
        self.records, self.by_call = iter(self.reader), by_call

    @rule()
    @precondition(lambda self: self.reader is not None)
    def acknowledge(self) -> None:
        """What a consumer made of everything up to here is safe."""
        self.stored = self.reader.reached
        self.reader.acknowledge(self.stored)

    @rule()
    @precondition(lambda self: self.reader is not None)
    def lose_the_reader(self) -> None:
        """The reader dies: what it had not acknowledged comes again."""
        self._drop()

    def _drop(self) -> None:
        self.reader.close()
        behind = {
            sent.record.key
            for name, producer in self.producers.items()
            for block in producer.blocks[: self.stored.number(name)]
            for sent in block
        }
        self.came_before = self.came & behind
        self._forget_reader(self.stored)

    # -- verdicts --------------------------------------------------------------------------------------------------

    def _expected(self, name: str) -> Iterator[tuple[int, int, Sent]]:
        """Records of a producer that were not passed: block, place in it, and what was sent."""
        for number, block in enumerate(self.producers[name].blocks[self.passed[name] :], self.passed[name]):
            for place, sent in enumerate(block):
                if self.current != (name, number) or place >= self.within:
                    yield number, place, sent

    def _judge(self, record: RouteRecord) -> None:
        """The record is the next of its producer, and says what is true."""
        for name in _PRODUCERS:
            for number, place, sent in self._expected(name):
                if sent.record.key == record.key and record.key not in self.came:
                    self._judge_content(record, sent, name)
                    self._arrived(name, number, place)
                    self.came.add(record.key)
                    return
                if not self._may_be_absent(sent):
                    break
        raise AssertionError(f"expected the next record of a producer, got {record.key}")

    def _arrived(self, name: str, number: int, place: int) -> None:
        if self.current != (name, number):
            self._pass_current()
        self.passed[name] = number
        self.current, self.within = (name, number), place + 1

    def _pass_current(self) -> None:
        """The reader was asked for what is behind its block."""
        if self.current is not None:
            self.passed[self.current[0]] = self.current[1] + 1
            self.current = None

    def _may_be_absent(self, sent: Sent) -> bool:
        return sent.harmed or sent.record.key in self.came

    def _judge_content(self, record: RouteRecord, sent: Sent, name: str) -> None:
        truth = sent.truth
        record.verify()
        assert truth.token_ids == record.token_ids.tolist()
        versions: list[int | None] = []
        for span in record.spans:
            made = span.weights_version if span.kind == "generation" else None
            versions += [made] * (span.stop - span.start)
        assert truth.versions == versions
        if sent.harmed or (name, record.group) in self.harmed_groups:
            gone_S = (record.routes == MISSING).all(axis=(1, 2))
            assert np.array_equal(truth.routes[~gone_S], record.routes[~gone_S])
        else:
            assert np.array_equal(truth.routes, record.routes)
            assert sent.record.checksum == record.checksum

    def _judge_end(self) -> None:
        """Nothing that was sealed is absent, unless a producer that gave up ended the reading."""
        self._pass_current()
        left = {
            name: [sent.record.key for _, _, sent in self._expected(name) if not self._may_be_absent(sent)]
            for name in _PRODUCERS
        }
        report = self.reader.report()
        gave_up = [name for name in _PRODUCERS if self.producers[name].end == "abort" and not left[name]]
        assert report.truncated <= bool(gave_up)
        assert report.truncated or not any(left.values()), left
        closed = all(producer.end == "close" for producer in self.producers.values())
        assert report.complete == closed

    def _judge_position(self) -> None:
        """Behind every block that was passed, and before the first record that did not come; stored, if at all, there.

        Between them are blocks whose records were all damaged, or came before.
        """
        reached = self.reader.reached
        for name, producer in self.producers.items():
            due = (number for number, _, sent in self._expected(name) if not self._may_be_absent(sent))
            highest = next(due, len(producer.blocks))
            if self.current is not None and self.current[0] == name:
                highest = self.current[1]
            assert self.passed[name] <= reached.number(name) <= highest
        if not self.by_call:
            self.stored = reached
        assert self.stored.next == self.reader.position().next

    def _lay_out(self, records: list[RouteRecord]) -> None:
        """Every token of a packed batch has the row of its id, or none."""
        batch = collate(records, SPEC, layout="packed")
        for at, record in enumerate(records):
            start, stop = (int(batch.cu_seqlens[at + more]) for more in (0, 1))
            ids = batch.token_ids.reshape(-1)[start:stop].tolist()
            routes = np.asarray(batch.routes.reshape(-1, *SPEC.row_shape)[start:stop])
            assert record.token_ids.tolist() == ids
            gone_S = (routes == MISSING).all(axis=(1, 2))
            assert np.array_equal(rows_of(ids)[~gone_S], routes[~gone_S])
            assert np.array_equal(gone_S, (record.routes == MISSING).all(axis=(1, 2)))


def play(carrier: Any, *, examples: int, steps: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    """Run the machine over a carrier; raises what it found."""
    machine = type("Machine", (Plane,), {"carrier": carrier})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_plane_over_a_folder() -> None:
    """Any order of turns, crashes, damage and readers: what the model says is what comes."""
    play(contracts.TestFolder(), examples=40, steps=40)


@pytest.mark.slow
def test_the_plane_over_a_folder_for_longer() -> None:
    """The same, over many more and longer orders."""
    play(contracts.TestFolder(), examples=400, steps=60)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_plane_over_ray() -> None:
    """The same machine over a place that is an actor."""
    from tests.ray_cluster import local_cluster
    from tests.stream.test_ray import TestRay

    with local_cluster(object_store_bytes=200 * 2**20):
        play(TestRay(), examples=15, steps=40)


# ----------------------------------------------------------------------------------------------------------------------
# The machine can fail
# ----------------------------------------------------------------------------------------------------------------------


def _acknowledged_early(reader: Any, name: BlockName) -> Iterator[RouteRecord]:
    if reader._options.acknowledge == "next":
        reader.acknowledge(reader._reached.after(name))
    yield from _BLOCK_RECORDS(reader, name)


def _one_block_further(store: Any, position: Position) -> None:
    further = {name: number + store._files.exists(BlockName(name, number)) for name, number in position.next.items()}
    _SAVE_POSITION(store, replace(position, next=further))


def _one_block_short(store: Any, position: Position) -> None:
    _SAVE_POSITION(store, replace(position, next={name: max(0, at - 1) for name, at in position.next.items()}))


def _number_used_again(slot: Any) -> None:
    _BEGIN(slot)
    slot._next = max(0, slot._next - 1)


def _rows_shifted(record: RouteRecord, *, stored: RouteRecord, whole: RouteRecord) -> RouteRecord:
    joined = _JOIN_PREFIX(record, stored=stored, whole=whole)
    routes_SLK = joined.routes.copy()
    routes_SLK[: record.routes_start] = np.roll(routes_SLK[: record.routes_start], 1, axis=0)
    return replace(joined, routes=routes_SLK, checksum=None)


def _versions_of_the_first_part(call: ModelCall) -> Any:
    return tuple((start, stop, call.versions[0][2]) for start, stop, _ in _VERSIONS(call))


_BLOCK_RECORDS, _JOIN_PREFIX = block_reader.BlockReader._block_records, join_prefix
_SAVE_POSITION, _BEGIN = folder.FolderStore.save_position, folder.FolderSlot._begin
_VERSIONS = ModelCall.version_spans

#: What is wrong -> the part of the library that does so, and how.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a block is acknowledged before it is given": (block_reader.BlockReader, "_block_records", _acknowledged_early),
    "a position is stored one block further": (folder.FolderStore, "save_position", _one_block_further),
    "a position is stored one block short": (folder.FolderStore, "save_position", _one_block_short),
    "a restarted producer uses a number again": (folder.FolderSlot, "_begin", _number_used_again),
    "blocks are deleted that were not acknowledged": (folder.FolderSlot, "_acknowledged", lambda slot: slot._next),
    "rows that a record shares are one token off": (block_reader, "join_prefix", _rows_shifted),
    "an update inside a call is not seen": (ModelCall, "version_spans", _versions_of_the_first_part),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    """Each fault makes the machine fail."""
    owner, name, broken = FAULTS[fault]
    # the model's verdict, the library's own refusal, or a block that the machine means to damage and that is gone
    verdicts = (AssertionError, RouteplaneError, ExceptionGroup, FileNotFoundError)
    with mock.patch.object(owner, name, broken), pytest.raises(verdicts):
        play(contracts.TestFolder(), examples=1_000, steps=60, phases=(Phase.generate,))
