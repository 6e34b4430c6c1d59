"""Which records of which streams this process takes, in which order, and where to go on after a restart.

Owns the split over ranks and loader workers, and the position to resume at. Knows torch's loader; opens no stream
itself: a source comes from the opener that it is given. Records come in the order of the paths, and within a stream in
the producer's; nothing here shuffles. Reading ahead of the step is ``prefetch``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routeplane.errors import ChecksumError, ErrorKind, MissingExtraError, refused

try:
    from torch.utils.data import IterableDataset, get_worker_info
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "torch":
        raise
    raise MissingExtraError(
        "routeplane.batch.dataset needs torch: pip install 'routeplane[torch]'", kind=ErrorKind.MISSING_EXTRA
    ) from error

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from routeplane.record.interfaces import Admission, Report, RouteSource
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["LoaderSource", "RecordDataset"]

_STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where to go on: in the stream of that index, before which the others had ``first`` records together, with the
    rank's record number ``taken``. ``worker``: ``(id, count)`` where that loader worker alone stands there.

    ``base``: the rank's record with which the workers began to take turns. A loader asks worker 0 first, whatever the
    position, so turns are counted from there; single workers that stand at different records still share one base.
    """

    stream: int = 0
    first: int = 0
    taken: int = 0
    base: int = 0
    worker: tuple[int, int] | None = None


class RecordDataset(IterableDataset["RouteRecord"]):
    """The records of one or many streams, split over ranks and loader workers; resumes at the exact record.

    ``paths``: one path or several, of regular files (a pipe cannot be opened twice), read in this order. ``opener``:
    makes a source of a path, such as ``functools.partial(open_stream, on_corrupt="quarantine")``; called again for
    every stream and iteration; must be picklable where workers are spawned. The dataset closes what it opened.

    **Split.** Of all records that the sources yield, counted from 0 over all streams, rank ``r`` takes those with
    ``count % world_size == r``; of these, counted from the loaded position, loader worker ``w`` of ``W`` takes every
    ``W``-th. No record is dropped or repeated, so ranks may differ by one record. Every process reads and checks every
    record, and yields its own; to split the reading too, give each rank paths of its own and no ``world_size``.

    **Order.** ``DataLoader(dataset, batch_size=None, num_workers=W)`` yields the same records in the same order for
    every ``W``, 0 included. (With a ``batch_size``, where each worker batches its own records, and with
    ``in_order=False``, all records still come, in another order.)

    **Resuming.** ``state_dict()`` is the position after the last record handed out; ``load_state_dict`` sets where the
    next iteration begins, and that one alone: the iteration after it is whole again.

    * Without workers, that is all: exactly the rest comes.
    * ``microbatches`` is one record ahead of its batch, and ``prefetch`` some batches. ``state_dict(consumed=n)`` is
      the position after the first ``n`` records of the iteration: add up ``len(batch.keys)`` of the batches trained on.
      With ``microbatches(sort_within=w)``, records come in the source's order by windows of ``w`` alone: round the sum
      down to a multiple of ``w`` unless all were trained on, or records that wait in later batches are left out. Where
      ``Shard(data_parallel=)`` deals the records, this dataset hands out those of all ranks: multiply the sum by the
      world.
    * With workers, torch's loader iterates copies of the dataset, of which it learns nothing. Read
      ``dataset.through(loader)`` instead of the loader: it counts what arrives, past what workers read ahead. The
      state is the rank's, and is resumed under any number of workers.
    * A loader that calls ``state_dict`` inside its workers (torchdata's stateful one) gets positions of single workers,
      which are accepted by the same worker out of as many, and refused elsewhere.

    A state names every stream by path and trailer digest, the rank and the world size; another of any is refused.
    Streams before the position are opened to compare digests, not read; of the one that holds it (with workers: from
    the one where the iteration began), what comes before is read, checked and dropped.

    One iteration at a time. Errors of the opener and its sources pass through. Raises UsageError (ARGUMENT), SpecError
    for a stream of another geometry, ChecksumError for one that changed since it was first opened.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        opener: Callable[[str], RouteSource],
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._paths = tuple(os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths))
        if not self._paths or len(set(self._paths)) < len(self._paths):
            raise refused("at least one path, each once", f"{list(self._paths)}")
        if not 0 <= rank < world_size:
            raise refused("0 <= rank < world_size", f"rank {rank} of {world_size}")
        self._opener = opener
        self._rank, self._world_size = rank, world_size
        self._digests: dict[str, str | None] = {}
        self._spec: RouteSpec | None = None
        self._source: RouteSource | None = None  # the one that is being read
        self._past: Any = None  # reports of those that were
        self._pending: _Place | None = None  # loaded, and not begun at
        self._marks = [_Place()]  # where the iteration began, and where each of its streams did
        self._handed = 0

    @property
    def spec(self) -> RouteSpec:
        """The geometry of the records; opens the first stream where none was opened before."""
        if self._spec is None:
            with self._opened(self._paths[0]) as source:
                return source.spec
        return self._spec

    def admit(self, records: Sequence[RouteRecord]) -> Admission:
        """Judge records as one batch, under the policy of the opener's sources. ``microbatches`` asks for it."""
        if self._source is not None:
            return self._source.admit(records)
        with self._opened(self._paths[0]) as source:
            return source.admit(records)

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
        return self._records(self._begin(), worker or (0, 1))

    def _begin(self) -> _Place:
        """Start an iteration, at the loaded position or at the beginning."""
        start = self._pending or _Place()
        self._pending, self._marks, self._handed = None, [start], 0
        return start

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

    def _dealt(self, start: _Place, worker: tuple[int, int]) -> Generator[tuple[int, RouteRecord]]:
        """The records of other ranks, and of this one those that are this worker's and not before the position."""
        count = start.first
        for stream in range(start.stream, len(self._paths)):
            # this many of the records before are the rank's
            taken = -(-max(count - self._rank, 0) // self._world_size)
            self._marks.append(_Place(stream=stream, first=count, taken=taken))
            with self._read(self._paths[stream]) as source:
                for record in source:
                    taken, owner = divmod(count, self._world_size)
                    count += 1
                    turn = (taken - start.base) % worker[1]
                    if owner != self._rank:
                        yield owner, record
                    elif taken >= start.taken and turn == worker[0]:
                        self._handed = taken + 1 - start.taken
                        yield owner, record

    @contextmanager
    def _read(self, path: str) -> Generator[RouteSource]:
        with self._opened(path) as source:
            self._source = source
            try:
                yield source
            finally:
                read: Any = source.report()
                self._past = read if self._past is None else self._past.merge(read)
                if self._source is source:  # an iteration that was given up may end while the next one reads
                    self._source = None

    @contextmanager
    def _opened(self, path: str) -> Generator[RouteSource]:
        source = self._opener(path)
        try:
            self._check(path, source)
            yield source
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()

    def _check(self, path: str, source: RouteSource) -> None:
        """Refuse a stream of another geometry than the first, or of another content than when it was opened before."""
        if self._spec is None:
            self._spec = source.spec
        self._spec.require_same_geometry(source.spec, where=path)
        digest = getattr(source, "digest", None)
        if self._digests.setdefault(path, digest) != digest:
            raise _changed(path, self._digests[path], digest)

    def _digest(self, path: str) -> str:
        if path not in self._digests:
            with self._opened(path):
                pass
        digest = self._digests[path]
        if digest is None:
            raise refused("a whole stream, whose trailer names its content", f"one without a digest @ {path}")
        return digest

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """The position, as plain values for JSON or ``torch.save``. ``consumed``: see the class.

        Opens the streams that were not opened yet, for their digests. Raises UsageError for a source without one (a
        stream that was cut), for ``consumed`` beyond what was handed out, and for ``consumed`` in a loader's worker.
        """
        info = get_worker_info()
        handed = 0 if self._pending is not None else self._handed
        if consumed is not None and (info is not None or not 0 <= consumed <= handed):
            where = "in the trainer's process" if info is not None else f"of at most the {handed} records handed out"
            raise refused(f"consumed {where}", f"{consumed}")
        start = self._pending or self._marks[0]
        taken = start.taken + (handed if consumed is None else consumed)
        marks = [start] if self._pending is not None else [mark for mark in self._marks if mark.taken <= taken]
        worker = start.worker if info is None else (info.id, info.num_workers)
        return {
            **self._identity(),
            "stream": marks[-1].stream,
            "first": marks[-1].first,
            "taken": taken,
            "base": taken if worker is None else start.base,
            "worker": None if worker is None else list(worker),
        }

    def _identity(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "rank": self._rank,
            "world_size": self._world_size,
            "streams": [[path, self._digest(path)] for path in self._paths],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration where ``state`` was taken; see the class for what that takes.

        Raises UsageError (ARGUMENT) for a state of other paths, of another rank or world size, or of none of ours, and
        ChecksumError for a stream that changed since.
        """
        place = _parse_place(state)
        ours = self._identity()
        theirs: list[list[str]] = [list(entry) for entry in state["streams"]]
        for name, expected, got in (
            *((name, ours[name], state[name]) for name in ("version", "rank", "world_size")),
            ("paths", [path for path, _ in ours["streams"]], [path for path, _ in theirs]),
        ):
            if expected != got:
                raise refused(f"a state of {name} {expected}", f"{got}")
        for (path, digest), (_, known) in zip(ours["streams"], theirs, strict=True):
            if digest != known:
                raise _changed(path, known, digest)
        if not 0 <= place.stream < len(self._paths):
            raise refused(f"a state within {len(self._paths)} streams", f"one in stream {place.stream}")
        self._pending = place

    def __getstate__(self) -> dict[str, Any]:
        # what a worker gets opens its own sources
        return {**vars(self), "_source": None}


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
        arriving = iter(self._loader)  # copies the dataset into the workers, with the position that was loaded
        if self._loader.num_workers == 0:
            yield from arriving  # iterates the dataset itself
            return
        self._dataset._begin()
        for record in arriving:
            self._dataset._handed += 1
            yield record


def _parse_place(state: Mapping[str, Any]) -> _Place:
    try:
        for path, digest in state["streams"]:
            if not isinstance(path, str) or not isinstance(digest, str):
                raise ValueError(f"a stream as path and digest, not {path!r}, {digest!r}")
        worker = state["worker"]
        counts = [state[name] for name in ("stream", "first", "taken", "base")]
        counts += [state[name] for name in ("version", "rank", "world_size")]
        if not all(isinstance(value, int) and value >= 0 for value in (*counts, *(worker or ()))):
            raise ValueError("counts that are none")
        pair = None if worker is None else (worker[0], worker[1])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise refused("what state_dict() returned", f"{str(state)[:120]} ({error})") from None
    return _Place(stream=counts[0], first=counts[1], taken=counts[2], base=counts[3], worker=pair)


def _changed(path: str, expected: str | None, got: str | None) -> ChecksumError:
    return ChecksumError(
        f"expected the stream as it was, of digest {expected}, got {got} @ {path}", kind=ErrorKind.CHECKSUM
    )
