"""Which records of which streams or blocks this process takes, in which order, and where to go on after a restart.

Owns the split over ranks and loader workers, the seeded order, and the position to resume at. Knows torch's loader;
opens no stream and no carrier itself: a source comes from the opener or the BlockSource that it is given. Reading ahead
of the step is ``prefetch``.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from routeplane.errors import ChecksumError, ErrorKind, MissingExtraError, RouteplaneError, naming_stream, refused
from routeplane.record.interfaces import KeyMemory, Position
from routeplane.record.parse import check_count
from routeplane.record.policy import StreamReport

try:
    from torch.utils.data import IterableDataset, get_worker_info
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "torch":
        raise
    raise MissingExtraError(
        "routeplane.batch.dataset needs torch: install the extra routeplane[torch]", kind=ErrorKind.MISSING_EXTRA
    ) from error

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from routeplane.record.interfaces import Admission, BlockName, BlockSource, Report, RouteSource
    from routeplane.record.record import RecordKey, RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["LoaderSource", "RecordDataset", "Shuffle"]

_STATE_VERSION = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffle:
    """A seeded order: each ``window`` records that follow each other, of all ranks, come in a random order.

    So many records are held in memory. A window of at least all records mixes them all.

    >>> Shuffle(seed=0, window=4).order(0, 4) == Shuffle(seed=0, window=4).order(0, 4)
    True
    """

    seed: int
    window: int

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("window", 1)):
            if check_count(getattr(self, name), name, below=2**63) < least:
                raise refused(f"{name} of at least {least}", f"{getattr(self, name)}")

    def order(self, index: int, count: int) -> list[int]:
        """The order of the ``count`` records of window ``index``."""
        return [int(at) for at in np.random.default_rng([self.seed, index]).permutation(count)]


class _Mark(NamedTuple):
    """Where a part of the source (a stream or a block) ends, or the first begins: before it, ``first`` records came, of
    all ranks."""

    first: int
    cursor: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where to go on: from ``mark`` on, with the rank's record number ``taken``. ``worker``: ``(id, count)`` where that
    loader worker alone stands there.

    ``base``: the rank's record with which the workers began to take turns. A loader asks worker 0 first, whatever the
    position, so turns are counted from there; single workers that stand at different records still share one base.
    ``done``: the rank's records from ``base`` on that do not come again, ascending.
    """

    mark: _Mark
    taken: int = 0
    base: int = 0
    worker: tuple[int, int] | None = None
    done: tuple[int, ...] = ()

    def turn(self, taken: int) -> int | None:
        """How many records from ``base`` on come before this one; None where it does not come."""
        before = bisect_left(self.done, taken)
        if taken < self.taken or self.done[before : before + 1] == (taken,):
            return None
        return taken - self.base - before


class _Paths:
    """Streams behind paths, as parts of a dataset; the cursor is the index of a path."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], opener: Callable[[str], RouteSource]) -> None:
        self._paths = tuple(os.fspath(path) for path in paths)
        if not self._paths or len(set(self._paths)) < len(self._paths):
            raise refused("at least one path, each once", f"{list(self._paths)}")
        self._opener = opener
        self._digests: dict[str, str | None] = {}
        self.begin: Any = 0

    def parts(self, cursor: Any) -> Iterator[str]:
        """Each stream from an index on."""
        return iter(self._paths[cursor:])

    def behind(self, cursor: Any, path: Any) -> Any:
        """The cursor behind a stream that stood at a cursor."""
        del path
        return cursor + 1

    def open(self, path: str) -> RouteSource:
        """A stream. Raises ChecksumError where it is another than when it was opened before."""
        source = self._opener(path)
        digest = getattr(source, "digest", None)
        if self._digests.setdefault(path, digest) != digest:
            _close(source)
            raise _changed(path, self._digests[path], digest)
        return source

    def is_repeat(self, record: RouteRecord, path: Any) -> bool:
        """A stream has each record once, as its reader checks."""
        del record, path
        return False

    def identity(self) -> list[list[str]]:
        """Every path with its digest; opens the streams that were not opened yet."""
        return [[path, self._digest(path)] for path in self._paths]

    def _digest(self, path: str) -> str:
        if path not in self._digests:
            _close(self.open(path))
        digest = self._digests[path]
        if digest is None:
            raise refused("a whole stream, whose trailer names its content", f"one without a digest @ {path}")
        return digest

    def check_identity(self, theirs: Any) -> None:
        """Raise for other paths, or ChecksumError for a stream that changed."""
        if isinstance(theirs, str):
            raise refused(f"a state of paths {list(self._paths)}", f"one of the place {theirs}")
        ours = self.identity()
        if [path for path, _ in ours] != [path for path, _ in theirs]:
            raise refused(f"a state of paths {[path for path, _ in ours]}", f"{[path for path, _ in theirs]}")
        for (path, digest), (_, known) in zip(ours, theirs, strict=True):
            if digest != known:
                raise _changed(path, known, digest)

    def check_cursor(self, cursor: Any) -> None:
        """Raise UsageError for what is not an index of a path."""
        if not isinstance(cursor, int) or not 0 <= cursor <= len(self._paths):
            raise refused(f"a state within {len(self._paths)} streams", f"one in stream {cursor}")

    def acknowledge(self, cursor: Any) -> None:
        """Nothing: a file stays."""

    def admit(self, records: Sequence[RouteRecord]) -> Admission:
        """Judge records under the policy of the first stream."""
        source = self.open(self._paths[0])
        try:
            return source.admit(records)
        finally:
            _close(source)

    def spec(self) -> RouteSpec:
        """The geometry of the first stream."""
        source = self.open(self._paths[0])
        _close(source)
        return source.spec


class _Blocks:
    """The blocks of a place, as parts of a dataset; the cursor is a position as JSON."""

    def __init__(self, source: BlockSource, opener: Callable[[BlockName], RouteSource]) -> None:
        self._source, self._opener = source, opener
        self._memory = KeyMemory(b"")

    @property
    def begin(self) -> Any:
        """What is acknowledged."""
        return self._source.position().to_json()

    def parts(self, cursor: Any) -> Iterator[BlockName]:
        """Each block behind a position; waits for those that are still to come."""
        position = Position.from_json(cursor)
        self._memory = KeyMemory(position.keys)
        return self._source.names(position=position)

    def behind(self, cursor: Any, name: Any) -> Any:
        """The position behind a block that was read, whose records are remembered."""
        return Position.from_json(cursor).after(name, keys=self._memory.to_bytes()).to_json()

    def open(self, name: BlockName) -> RouteSource:
        """A block."""
        return self._opener(name)

    def is_repeat(self, record: RouteRecord, name: Any) -> bool:
        """Whether the record came before: its producer was restarted and wrote it again."""
        return self._memory.is_repeat(record, where=f"block {name}")

    def identity(self) -> str:
        """The place's identifier."""
        return self._source.position().place

    def check_identity(self, theirs: Any) -> None:
        """Raise UsageError for another place."""
        if theirs != self.identity():
            raise refused(f"a state in the place {self.identity()}", f"{theirs!r}")

    def check_cursor(self, cursor: Any) -> None:
        """Raise UsageError for what is not a position in the place."""
        if Position.from_json(str(cursor)).place != self.identity():
            raise refused(f"a position in the place {self.identity()}", str(cursor)[:120])

    def acknowledge(self, cursor: Any) -> None:
        """State that all blocks before are done with."""
        self._source.acknowledge(Position.from_json(cursor))

    def admit(self, records: Sequence[RouteRecord]) -> Admission:
        """Judge records under the reader's policy."""
        return self._source.admit(records)

    def spec(self) -> RouteSpec:
        """The geometry of the place, or of what the opener makes of its first block."""
        if self._opener == self._source.open:
            return self._source.spec
        source = self._opener(next(self._source.names()))
        _close(source)
        return source.spec


def _close(source: RouteSource) -> None:
    close = getattr(source, "close", None)
    if close is not None:
        close()


class RecordDataset(IterableDataset["RouteRecord"]):
    """The records of streams or of a place of blocks, split over ranks and loader workers; resumes at the exact record.

    ``source``: one path or several, of regular files or archives, read in this order; or a BlockSource, such as the
    reader of a folder, Ray or Mooncake, whose blocks are read as they come. ``opener``: makes a source of a path, such
    as ``functools.partial(open_stream, on_corrupt="quarantine")``, or of a block's name, such as ``reader.open``;
    called again for every part and iteration; must be picklable where workers are spawned. The dataset closes what it
    opened. ``shuffle``: a seeded order; None: the source's.

    **Split.** Of all records that the source yields, counted from 0 over all streams, rank ``r`` takes those with
    ``count % world_size == r``; of these, counted from the loaded position, loader worker ``w`` of ``W`` takes every
    ``W``-th. No record is dropped or repeated, so ranks may differ by one record. Every process reads and checks every
    record, and yields its own; to split the reading too, give each rank paths of its own and no ``world_size``.
    Records that a restarted producer wrote again are dropped, by key and checksum.

    **Order.** ``DataLoader(dataset, batch_size=None, num_workers=W)`` yields the same records in the same order for
    every ``W``, 0 included. (With a ``batch_size``, where each worker batches its own records, and with
    ``in_order=False``, all records still come, in another order.)

    **Resuming.** ``state_dict()`` is the position after the last record handed out; ``load_state_dict`` sets where the
    next iteration begins, and that one alone: the iteration after it is whole again, as far as blocks are still there.
    ``commit(state)`` acknowledges what lies before a state, once the trainer's checkpoint is durable; nothing else here
    acknowledges a block.

    * Without workers, that is all: exactly the rest comes.
    * ``microbatches`` is one record ahead of its batch, and ``prefetch`` some batches. ``state_dict(consumed=n)`` is
      the position after the first ``n`` records of the iteration: add up ``len(batch.keys)`` of the batches trained on.
      With ``microbatches(sort_within=w)``, records come in the source's order by windows of ``w`` alone: round the sum
      down to a multiple of ``w`` unless all were trained on, or records that wait in later batches are left out. Where
      ``Shard(data_parallel=)`` deals the records, this dataset hands out those of all ranks: multiply the sum by the
      world.
    * A loop that filters groups is done with records in another order than they came. ``state_dict(consumed=keys)``,
      with the keys of the records that were trained on or dropped, is the position before the first record that is not
      among them; of what was handed out behind it, the resumed run gets the others alone. After a ``commit``, name what
      was consumed since: the dataset remembers the rest, and the keys of nothing before it. A key that came twice is
      done with in both places.
    * With workers, torch's loader iterates copies of the dataset, of which it learns nothing. Read
      ``dataset.through(loader)`` instead of the loader: it counts what arrives, past what workers read ahead. The
      state is the rank's, and is resumed under any number of workers.
    * A loader that calls ``state_dict`` inside its workers (torchdata's stateful one) gets positions of single workers,
      which are accepted by the same worker out of as many, and refused elsewhere.

    A state names every stream by path and trailer digest, or the place by its identifier, the rank, the world size and
    the order; another of any is refused. Streams before the position are opened to compare digests, not read; of the
    stream or block that holds it (with a shuffle: from the one where its window begins), what comes before is read,
    checked and dropped.

    One iteration at a time. Errors of the opener and its sources pass through. Raises UsageError (ARGUMENT), SpecError
    for a stream of another geometry, ChecksumError for one that changed since it was first opened.

    >>> import tempfile
    >>> from routeplane import new_stream, open_stream
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> record = watermarked_record(0, num_tokens=3, spec=spec)
    >>> folder = tempfile.TemporaryDirectory()
    >>> with new_stream(folder.name + "/a.arrows", spec) as sink:
    ...     sink.write(record)
    >>> dataset = RecordDataset(folder.name + "/a.arrows", opener=open_stream)
    >>> [read.num_tokens for read in dataset]
    [3]
    >>> folder.cleanup()
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | BlockSource,
        opener: Callable[[Any], RouteSource],
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: Shuffle | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise refused("0 <= rank < world_size", f"rank {rank} of {world_size}")
        self._parts = _parts_of(source, opener)
        self._rank, self._world_size, self._shuffle = rank, world_size, shuffle
        self._window = 1 if shuffle is None else shuffle.window
        self._spec: RouteSpec | None = None
        self._source: RouteSource | None = None  # the one that is being read
        self._judge: RouteSource | None = None  # the last that was, whose policy judges batches
        self._past: Any = None  # reports of those that were
        self._pending: _Place | None = None  # loaded, and not begun at
        self._start = _Place(mark=_Mark(0, self._parts.begin))
        self._marks = [self._start.mark]  # where the iteration began, and where each of its parts did
        self._handed: list[tuple[int, RecordKey]] = []  # the rank's number of each record that came, and its key
        self._settled = self._start  # the committed place: what came before it is forgotten
        self._forgotten = 0  # how many records of the iteration that were
        self._tells_marks = False  # to the process that reads through a loader

    @property
    def spec(self) -> RouteSpec:
        """The geometry of the records; opens the first stream where none was opened before."""
        return self._parts.spec() if self._spec is None else self._spec

    def admit(self, records: Sequence[RouteRecord]) -> Admission:
        """Judge records as one batch, under the policy of the opener's sources. ``microbatches`` asks for it."""
        return (self._judge or self._parts).admit(records)

    def report(self) -> Report | None:
        """What this process read so far, other ranks' records included; None before the first.

        The sources' reports, merged. What loader workers read stands in the copies that they iterate.
        """
        now: Any = None if self._source is None else self._source.report()
        found: Report | None = now if self._past is None else self._past if now is None else self._past.merge(now)
        return found

    def through(self, loader: DataLoader[RouteRecord]) -> LoaderSource:
        """The records of a torch DataLoader over this dataset, counted here as they arrive.

        Raises UsageError for a loader of another dataset, or one that has a ``batch_size``, gives up order, or keeps
        its workers (they would never see a state that is loaded later).
        """
        return LoaderSource(self, loader)

    def __iter__(self) -> Iterator[RouteRecord]:
        info = get_worker_info()
        worker = None if info is None else (info.id, info.num_workers)
        wanted = None if self._pending is None else self._pending.worker
        if wanted is not None and wanted != worker:
            raise refused(f"worker {wanted[0]} of {wanted[1]}, whose state was loaded", f"{worker or 'no worker'}")
        records = self._records(self._begin(), worker or (0, 1))
        return self._with_marks(records) if self._tells_marks and worker is not None else records

    def _begin(self) -> _Place:
        """Start an iteration, at the loaded position or at the beginning."""
        self._start = self._pending or _Place(mark=_Mark(0, self._parts.begin))
        self._pending, self._marks, self._handed = None, [self._start.mark], []
        self._settled, self._forgotten = self._start, 0
        return self._start

    @property
    def dealt(self) -> tuple[int, int]:
        """``(rank, world_size)``: which of all records are yielded."""
        return self._rank, self._world_size

    def by_rank(self) -> Iterator[tuple[int, RouteRecord]]:
        """The records of all ranks, each with the rank whose it is; counted as an iteration, of this rank's alone.

        ``microbatches(batches="even")`` asks for it. Raises UsageError (ARGUMENT) after ``load_state_dict``: where the
        other ranks stand is not in a state; and in a loader's worker.
        """
        if self._pending is not None or get_worker_info() is not None:
            raise refused(
                "a dataset at its beginning, in the trainer's process", "a loaded state, or a loader's worker"
            )
        return self._dealt(self._begin(), (0, 1))

    def _records(self, start: _Place, worker: tuple[int, int]) -> Generator[RouteRecord]:
        for owner, record in self._dealt(start, worker):
            if owner == self._rank:
                yield record

    def _with_marks(self, records: Iterator[RouteRecord]) -> Iterator[Any]:
        """Each record with the parts that began before it and that the other side was not told of."""
        told = 1
        for record in records:
            fresh, told = self._marks[told:], len(self._marks)
            yield _Arrival(record, fresh)

    def _note(self, marks: Sequence[_Mark]) -> None:
        self._marks += [
            mark for mark in marks if mark.first > self._marks[-1].first or mark.cursor == self._marks[0].cursor
        ]

    def _dealt(self, start: _Place, worker: tuple[int, int]) -> Generator[tuple[int, RouteRecord]]:
        """The records of other ranks, and of this one those that are this worker's and not before the position."""
        first = self._window_of(start.taken) * self._window
        for count, record in self._ordered(start.mark, first):
            taken, owner = divmod(count, self._world_size)
            if owner != self._rank:
                yield owner, record
                continue
            turn = start.turn(taken)
            if turn is not None and turn % worker[1] == worker[0]:
                self._handed.append((taken, record.key))
                yield owner, record

    def _arrived(self, record: RouteRecord) -> None:
        """Count a record that a loader's worker handed out: the next that comes."""
        taken = self._handed[-1][0] + 1 if self._handed else self._start.taken
        while self._start.turn(taken) is None:
            taken += 1
        self._handed.append((taken, record.key))

    def _window_of(self, taken: int) -> int:
        """The window of the records that all ranks take with this number; ``by_rank`` shows the others'."""
        return taken * self._world_size // self._window

    def _ordered(self, mark: _Mark, first: int) -> Iterator[tuple[int, RouteRecord]]:
        """The records from one that begins a window on, each with its number in the order to hand them out."""
        held: list[RouteRecord] = []
        for count, record in self._arriving(mark):
            if count < first:
                continue
            if self._shuffle is None:
                yield count, record
                continue
            held.append(record)
            if len(held) == self._window:
                yield from self._mixed(held, first)
                first, held = first + self._window, []
        yield from self._mixed(held, first)

    def _mixed(self, records: list[RouteRecord], first: int) -> Iterator[tuple[int, RouteRecord]]:
        order = [] if self._shuffle is None else self._shuffle.order(first // self._window, len(records))
        return ((first + at, records[index]) for at, index in enumerate(order))

    def _arriving(self, mark: _Mark) -> Generator[tuple[int, RouteRecord]]:
        """The records of the parts from a mark on, each with its number; those that came before are dropped."""
        count, cursor = mark
        for part in self._parts.parts(cursor):
            before = cursor
            with self._read(part) as source:
                for record, is_last in _ending(self._fresh(source, part)):
                    count += 1
                    if is_last:  # noted before it is handed out: nothing of the part is left then
                        cursor = self._pass(count, cursor, part)
                    yield count - 1, record
            if cursor == before:  # a part without records
                cursor = self._pass(count, cursor, part)

    def _pass(self, count: int, cursor: Any, part: Any) -> Any:
        """Note that a part was read, and return the cursor behind it."""
        behind = self._parts.behind(cursor, part)
        self._marks.append(_Mark(count, behind))
        return behind

    def _fresh(self, source: RouteSource, part: Any) -> Iterator[RouteRecord]:
        """The records of a part that did not come before."""
        for record in source:
            if self._parts.is_repeat(record, part):
                self._past = _repeat() if self._past is None else self._past.merge(_repeat())
            else:
                yield record

    @contextmanager
    def _read(self, part: Any) -> Generator[RouteSource]:
        with naming_stream(str(part)):
            source = self._parts.open(part)
        try:
            if self._spec is None:
                self._spec = source.spec
            self._spec.require_same_geometry(source.spec, where=str(part))
            self._source = self._judge = source
            with naming_stream(str(part)):
                yield source
        finally:
            if self._source is source:  # an iteration that was given up may end while the next one reads
                self._source = None
            read: Any = source.report()
            self._past = read if self._past is None else self._past.merge(read)
            _close(source)

    def state_dict(self, *, consumed: int | Collection[RecordKey] | None = None) -> dict[str, Any]:
        """The position, as plain values for JSON or ``torch.save``. ``consumed``: see the class.

        Opens the streams that were not opened yet, for their digests. Raises UsageError for a source without one (a
        stream that was cut), for ``consumed`` beyond what was handed out or before what was committed, and for
        ``consumed`` in a loader's worker.
        """
        info = get_worker_info()
        if consumed is not None and info is not None:
            raise refused("consumed in the trainer's process", "a loader's worker")
        start = self._pending or self._start
        if consumed is None or isinstance(consumed, int):
            taken, done = self._behind(consumed), (self._pending or self._settled).done
        else:
            taken, done = self._without(frozenset(consumed))
        first = self._window_of(taken) * self._window
        marks = [start.mark, *(mark for mark in self._marks if self._pending is None and mark.first <= first)]
        worker = start.worker if info is None else (info.id, info.num_workers)
        base = taken if worker is None else start.base
        return {
            **self._identity(),
            "first": marks[-1].first,
            "cursor": marks[-1].cursor,
            "taken": taken,
            "base": base,
            "worker": None if worker is None else list(worker),
            "done": [number for number in done if number >= base],
        }

    def _behind(self, consumed: int | None) -> int:
        """The rank's record behind the first ``consumed`` of the iteration."""
        handed = [] if self._pending is not None else self._handed
        least = 0 if self._pending is not None else self._forgotten
        most = least + len(handed)
        if consumed is not None and not least <= consumed <= most:
            committed = f", and at least the {least} that were committed" if least else ""
            raise refused(f"consumed of at most the {most} records handed out{committed}", f"{consumed}")
        count = most if consumed is None else consumed
        return handed[count - least - 1][0] + 1 if count > least else (self._pending or self._settled).taken

    def _without(self, consumed: frozenset[RecordKey]) -> tuple[int, tuple[int, ...]]:
        """The first record that is not consumed, and the records from there on that are."""
        place, handed = self._pending or self._settled, [] if self._pending is not None else self._handed
        unknown = consumed.difference(key for _, key in handed)
        if unknown:
            known = f"the {len(handed)} records handed out since the last commit"
            raise refused(f"consumed keys of {known}", f"{len(unknown)} others, such as {min(map(str, unknown))}")
        ends = {*place.done, *(taken for taken, key in handed if key in consumed)}
        first = place.taken
        while first in ends:
            first += 1
        return first, tuple(sorted(number for number in ends if number > first))

    def _identity(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "rank": self._rank,
            "world_size": self._world_size,
            "shuffle": None if self._shuffle is None else [self._shuffle.seed, self._shuffle.window],
            "source": self._parts.identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration where ``state`` was taken; see the class for what that takes.

        Raises UsageError (ARGUMENT) for a state of other paths or another place, of another rank, world size or order,
        or of none of ours, and ChecksumError for a stream that changed since.
        """
        self._pending = self._checked(state)

    def commit(self, state: Mapping[str, Any]) -> None:
        """State that everything before ``state`` is done with: call it once the checkpoint that holds it is durable.

        Acknowledges the blocks of a place, which may be deleted then; files and archives stay as they are. Raises as
        ``load_state_dict``, and UsageError for a state before one that was committed.
        """
        place = self._checked(state)
        self._parts.acknowledge(place.mark.cursor)
        self._marks = [mark for mark in self._marks if mark.first >= place.mark.first] or [place.mark]
        if self._pending is None:
            kept = [entry for entry in self._handed if entry[0] >= place.taken]
            self._forgotten += len(self._handed) - len(kept)
            self._handed, self._settled = kept, place

    def _checked(self, state: Mapping[str, Any]) -> _Place:
        place = _parse_place(state)
        ours = self._identity()
        for name in ("version", "rank", "world_size", "shuffle"):
            if ours[name] != state[name]:
                raise refused(f"a state of {name} {ours[name]}", f"{state[name]}")
        self._parts.check_identity(state["source"])
        self._parts.check_cursor(place.mark.cursor)
        return place

    def __getstate__(self) -> dict[str, Any]:
        # what a worker gets opens its own sources
        return {**vars(self), "_source": None, "_judge": None}


class _Arrival(NamedTuple):
    """What a loader's worker sends: a record, and the parts that it began since."""

    record: RouteRecord
    marks: list[_Mark]


def _parts_of(source: Any, opener: Callable[[Any], RouteSource]) -> _Paths | _Blocks:
    if hasattr(source, "names") and hasattr(source, "acknowledge"):
        return _Blocks(source, opener)
    return _Paths([source] if isinstance(source, str | os.PathLike) else source, opener)


def _ending(records: Iterator[RouteRecord]) -> Iterator[tuple[RouteRecord, bool]]:
    """Each record, and whether it is the last; an error comes in its place, behind the records before it."""
    last = next(records, None)
    while last is not None:
        try:
            following = next(records, None)
        except RouteplaneError:
            yield last, False
            raise
        yield last, following is None
        last = following


def _repeat() -> StreamReport:
    return StreamReport(repeats=1, complete=True)


class LoaderSource:
    """A source for ``microbatches`` whose records loader workers read; made by ``dataset.through``."""

    def __init__(self, dataset: RecordDataset, loader: DataLoader[RouteRecord]) -> None:
        for holds, expected in (
            (loader.dataset is dataset, "a loader of this dataset"),
            (loader.batch_size is None and loader.batch_sampler is None, "a loader with batch_size=None"),
            (getattr(loader, "in_order", True), "a loader that keeps the order"),
            (not loader.persistent_workers, "a loader without persistent_workers"),
        ):
            if not holds:
                raise refused(expected, "another")
        self._dataset, self._loader = dataset, loader

    @property
    def spec(self) -> RouteSpec:
        """The geometry of the records."""
        return self._dataset.spec

    @property
    def dealt(self) -> tuple[int, int]:
        """``(rank, world_size)`` of the dataset; records of other ranks are dropped in the workers."""
        return self._dataset.dealt

    def admit(self, records: Sequence[RouteRecord]) -> Admission:
        """Judge records as one batch, under the policy of the opener's sources."""
        return self._dataset.admit(records)

    def __iter__(self) -> Iterator[RouteRecord]:
        if self._loader.num_workers == 0:
            yield from self._loader  # iterates the dataset itself
            return
        dataset = self._dataset
        dataset._tells_marks = True
        try:
            arriving: Any = iter(self._loader)  # copies the dataset into the workers, with the position that was loaded
        finally:
            dataset._tells_marks = False
        dataset._begin()
        for record, marks in arriving:
            dataset._note(marks)
            dataset._arrived(record)
            yield record


def _parse_place(state: Mapping[str, Any]) -> _Place:
    try:
        worker, source = state["worker"], state["source"]
        if not isinstance(source, str):
            for path, digest in source:
                if not isinstance(path, str) or not isinstance(digest, str):
                    raise ValueError(f"a stream as path and digest, not {path!r}, {digest!r}")
        counts = [state[name] for name in ("first", "taken", "base", "version", "rank", "world_size")]
        if not all(isinstance(value, int) and value >= 0 for value in (*counts, *(worker or ()))):
            raise ValueError("counts that are none")
        pair = None if worker is None else (worker[0], worker[1])
        mark, done = _Mark(counts[0], state["cursor"]), tuple(state["done"])
        if not all(isinstance(value, int) for value in done) or list(done) != sorted(set(done)):
            raise ValueError("numbers of records that are not in order")
        state["shuffle"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise refused("what state_dict() returned", f"{str(state)[:120]} ({error})") from None
    return _Place(mark=mark, taken=counts[1], base=counts[2], worker=pair, done=done)


def _changed(path: str, expected: str | None, got: str | None) -> ChecksumError:
    return ChecksumError(
        f"expected the stream as it was, of digest {expected}, got {got} @ {path}", kind=ErrorKind.CHECKSUM
    )
