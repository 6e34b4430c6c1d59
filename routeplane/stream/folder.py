"""The carrier ``folder``: sealed blocks as files, in a place that several processes and hosts may share.

    <place>/manifest.json                             run, groups, spec; made once, by the first opener
    <place>/producers/<name>/lock                     held (flock) by the living writer of that name
    <place>/producers/<name>/number.json              number of the next block; never derived from the files
    <place>/producers/<name>/end.json                 closed or aborted
    <place>/producers/<name>/000000012.arrows         a block, renamed into place
    <place>/groups/<name>/lock                        held by the living reader of that group
    <place>/groups/<name>/position.json               what the group acknowledged, and the keys it remembers

Every JSON file carries a checksum and is replaced by rename. On ``/dev/shm`` this is the shared-memory transport; on a
shared file system it crosses hosts. Readers copy a block before they verify it, so that a writer that truncates or
rewrites a file afterwards changes nothing that a trainer holds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import xxhash

from routeplane.errors import DataError, ErrorKind, FormatError, StoreError, UsageError
from routeplane.record.interfaces import BlockName, Position
from routeplane.record.parse import check_count
from routeplane.record.policy import ReadPolicy
from routeplane.record.spec import RouteSpec
from routeplane.stream.block_reader import BlockReader, BlockStore
from routeplane.stream.blocks import (
    DEFAULT_GROUP,
    DEFAULT_LIMITS,
    DEFAULT_OPTIONS,
    DEFAULT_POLICY,
    BlockLimits,
    BlockState,
    BlockWriter,
    Manifest,
    ProducerSlot,
    ReadOptions,
    Retention,
    SealedBlock,
    check_name,
    group_taken,
    producer_closed,
    producer_taken,
    wait_until,
)
from routeplane.stream.files import BufferPool

__all__ = ["open_reader", "open_writer", "producers_of"]

# A reader that looks whether a producer lives holds its lock for a moment; a writer tries again for so long.
_LOCK_TRIES_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


def open_writer(
    place: str | os.PathLike[str],
    spec: RouteSpec,
    *,
    run: str,
    producer: str,
    groups: Sequence[str] = (DEFAULT_GROUP,),
    encoding: Literal["plain", "narrow", "auto"] = "auto",
    limits: BlockLimits = DEFAULT_LIMITS,
) -> BlockWriter:
    """Open a place as one of its producers; the first opener creates it.

    Args:
        place: a folder on a file system that has flock.
        run: name of the run; a place of another run is refused.
        producer: name of this producer; one living writer per name. A restarted producer goes on where it stood.
        groups: every group that will read; a block is kept until all of them acknowledged it.
        encoding: of all blocks of the place.
        limits: block size, byte bound, fsync, timeout.

    Returns a RouteSink that the caller closes. Raises UsageError (PRODUCER_TAKEN for a name that is in use), SpecError
    for a place of another geometry, FormatError for damaged files, StoreError for a file system without locks.

    >>> import tempfile
    >>> from routeplane import RouteSpec
    >>> from routeplane.stream import folder
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1), model="m")
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with folder.open_writer(place, spec, run="run-1", producer="engine-0") as writer:
    ...         pass
    ...     with folder.open_reader(place, producers=1) as reader:
    ...         list(reader), reader.report().complete
    ([], True)
    """
    root, found = declare_place(place, Manifest.of(spec, run=run, groups=groups, encoding=encoding))
    blocks = BlockFiles(producer_home(root, producer), sync=limits.sync)
    return BlockWriter(FolderSlot(root, blocks, groups=found.groups, limits=limits), found, limits=limits)


def declare_place(place: str | os.PathLike[str], declared: Manifest) -> tuple[Path, Manifest]:
    """Create a place, or check that it is the same one. Returns its folder and manifest; raises as ``open_writer``."""
    root = Path(place)
    root.mkdir(parents=True, exist_ok=True)
    return root, _declare(root, declared)


def producer_home(root: Path, producer: str) -> Path:
    """Where a producer's control data lies."""
    return root / "producers" / check_name(producer, "producer")


def open_reader(
    place: str | os.PathLike[str],
    *,
    producers: int | Sequence[str],
    group: str = DEFAULT_GROUP,
    follow: bool = True,
    policy: ReadPolicy = DEFAULT_POLICY,
    options: ReadOptions = DEFAULT_OPTIONS,
) -> BlockReader:
    """Open a place as the one reader of a group; waits for the place to be created.

    Args:
        producers: how many producers, or which names, are expected; complete means that all of them closed.
        group: a group that the place declares.
        follow: whether to wait for blocks that are still to come.
        policy: what to do with data that is wrong.
        options: acknowledgement, vanished producers, timeout.

    Returns a RouteSource and BlockSource that the caller closes. Raises UsageError (GROUP_TAKEN for a group that has a
    living reader), FormatError for damaged files, TransportError (TIMED_OUT).
    """
    store = FolderStore(found_place(place, options.timeout_s if follow else 0.0), group=group)
    return BlockReader(store, producers=producers, follow=follow, policy=policy, options=options)


def producers_of(place: str | os.PathLike[str]) -> list[str]:
    """List the producers that ever opened a place.

    Args:
        place: the folder of a place.

    Returns their names, sorted. Raises FileNotFoundError for a folder that is not a place.

    >>> producers_of("/nowhere")
    Traceback (most recent call last):
    FileNotFoundError: expected the folder of a place of blocks, got none @ /nowhere
    """
    if not (Path(place) / "manifest.json").exists():
        raise FileNotFoundError(f"expected the folder of a place of blocks, got none @ {place}")
    try:
        return sorted(entry.name for entry in os.scandir(Path(place) / "producers") if entry.is_dir())
    except FileNotFoundError:
        return []


# -- files -------------------------------------------------------------------------------------------------------------


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _load(path: Path) -> dict[str, Any] | None:
    """A JSON file of ours; None where there is none. Raises FormatError (MANIFEST) for a damaged one."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(text)
        given = document.pop("checksum")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        document, given = None, None
    if not isinstance(document, dict) or given != _digest(document):
        raise FormatError(f"expected a file with its checksum, got a damaged one @ {path}", kind=ErrorKind.MANIFEST)
    return document


@contextmanager
def _meaning(path: Path) -> Iterator[None]:
    """Turn what a document of another content raises into FormatError (MANIFEST): a checksum can be right by chance, or
    by intent."""
    try:
        yield
    except (AttributeError, DataError, KeyError, TypeError, UsageError, ValueError) as error:
        raise FormatError(f"expected a file of a place, got another ({error}) @ {path}", kind=ErrorKind.MANIFEST) from (
            None
        )


class _Numbers(NamedTuple):
    """What a producer used: its next number, numbers without a block, and what each block leans on."""

    next: int = 0
    void: tuple[int, ...] = ()
    leans: Mapping[int, tuple[int, ...]] = MappingProxyType({})


def _numbers(home: Path) -> _Numbers | None:
    """The numbers of a producer; None before its first block. Raises FormatError."""
    path = home / "number.json"
    document = _load(path)
    if document is None:
        return None
    with _meaning(path):
        leans = {int(name): tuple(map(_number, others)) for name, others in document["leans"].items()}
        return _Numbers(_number(document["next"]), tuple(map(_number, document["void"])), leans)


def _number(value: object) -> int:
    return check_count(value, "a number of a block", below=2**63)


def _position(home: Path) -> Position | None:
    """What a group acknowledged; None before the first. Raises FormatError."""
    path = home / "position.json"
    document = _load(path)
    if document is None:
        return None
    with _meaning(path):
        return Position.from_json(document["position"])


def _end_of(home: Path) -> str | None:
    """How a producer ended; None where it has not. Raises FormatError."""
    path = home / "end.json"
    document = _load(path)
    if document is None:
        return None
    with _meaning(path):
        if document["how"] not in ("closed", "aborted"):
            raise ValueError(f"an end that is {document['how']!r}")
        return str(document["how"])


def _store(path: Path, document: Mapping[str, Any], *, sync: bool) -> None:
    """Replace a JSON file by rename."""
    data = json.dumps({**document, "checksum": _digest(document)}, separators=(",", ":")).encode()
    written = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(written, "xb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(written, path)
    except OSError as error:
        written.unlink(missing_ok=True)
        raise _full(error, path) from error
    if sync:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _full(error: OSError, path: Path) -> OSError:
    if error.errno in _FULL:
        return StoreError(f"expected space for {path}, got {error.strerror}", kind=ErrorKind.NO_SPACE)
    return error


def _declare(root: Path, manifest: Manifest) -> Manifest:
    """The manifest of a place, which is created where there is none; one of several openers at once wins."""
    path = root / "manifest.json"
    document = _load(path)
    if document is None:
        written = path.with_name(f".manifest.{secrets.token_hex(4)}.tmp")
        _store(written, manifest.to_document(), sync=True)
        try:
            with suppress(FileExistsError):
                os.link(written, path)  # unlike a rename, never replaces another opener's
        finally:
            written.unlink(missing_ok=True)
        _sync_folder(root)
        document = _load(path)
    if document is None:
        raise FormatError(f"expected a manifest, got none @ {path}", kind=ErrorKind.MANIFEST)
    found = Manifest.from_document(document)
    found.require_same(manifest)
    for group in found.groups:
        (root / "groups" / group).mkdir(parents=True, exist_ok=True)
    return found


def found_place(place: str | os.PathLike[str], timeout_s: float | None) -> Path:
    """The folder of a place, once it is there. Raises TransportError (TIMED_OUT)."""
    path = Path(place) / "manifest.json"
    wait_until(path.exists, timeout_s, expected=lambda: f"a place {path}")
    return path.parent


def _block_path(home: Path, number: int) -> Path:
    return home / f"{number:09d}.arrows"


def _written_path(home: Path, number: int) -> Path:
    """Where a block is written before it is renamed."""
    return home / f".{number:09d}.tmp"


# -- locks -------------------------------------------------------------------------------------------------------------


class FileLock:
    """A lock file held by this process until ``release`` or its death; a forked child does not hold it."""

    def __init__(self, path: Path, *, taken: Callable[[], UsageError], tries_s: float = 0.0) -> None:
        """Take the lock. ``taken`` makes the error where another process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + tries_s
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if _try_lock(descriptor, path) and _is_same_file(descriptor, path):
                break
            os.close(descriptor)
            if time.monotonic() >= end:
                raise taken()
            time.sleep(0.005)
        self._close = weakref.finalize(self, os.close, descriptor)
        _require_locks(path)
        # a child's copy of the descriptor would hold the lock for as long as the child lives
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _release_in_child(reference))

    def release(self) -> None:
        """Give the lock up; again is not an error."""
        self._close()


def _release_in_child(reference: weakref.ref[FileLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.release()


def _try_lock(descriptor: int, path: Path, *, shared: bool = False) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"expected a file system with locks (flock), got {error.strerror} @ {path}", kind=ErrorKind.WRITER
        ) from error
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Whether the locked file is still the one of that name."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    locked = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (locked.st_dev, locked.st_ino)


def _require_locks(path: Path) -> None:
    """Raise StoreError where a lock that is held can be taken again: a file system that only pretends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    free = _try_lock(descriptor, path)
    os.close(descriptor)
    if free:
        raise StoreError(f"expected a file system with locks (flock), got one without @ {path}", kind=ErrorKind.WRITER)


def _is_locked(path: Path) -> bool:
    """Whether a living process holds a lock file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor, path, shared=True)
    finally:
        os.close(descriptor)


# -- where the bytes lie -----------------------------------------------------------------------------------------------


class BlockFiles:
    """One producer's blocks as files beside its control data. Another carrier keeps the bytes elsewhere: ``mooncake``.

    A block is prepared, then committed. A block that was prepared and not committed leaves a file that says so.
    """

    def __init__(self, home: Path, *, sync: bool = True) -> None:
        self.home, self._sync = home, sync

    def held(self, numbers: range) -> dict[int, int]:
        """Sizes in bytes of the blocks that are there, by number."""
        del numbers  # the files say which there are
        paths = [path for path in self.home.glob("*.arrows") if path.stem.isdecimal()]
        return {int(path.stem): path.stat().st_size for path in paths}

    def prepare(self, number: int, block: SealedBlock) -> int:
        """Write a block where no reader sees it. Returns its size in bytes."""
        path = _written_path(self.home, number)
        with pa.OSFile(str(path), "wb") as sink:
            block.write_to(sink)
        if self._sync:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        return path.stat().st_size

    def commit(self, number: int) -> None:
        """Show a prepared block to readers, whole."""
        os.replace(_written_path(self.home, number), _block_path(self.home, number))
        if self._sync:
            _sync_folder(self.home)

    def is_prepared(self, number: int) -> bool:
        """Whether a block was prepared and neither committed nor discarded."""
        return _written_path(self.home, number).exists()

    def discard(self, number: int) -> None:
        """Remove what ``prepare`` left."""
        _written_path(self.home, number).unlink(missing_ok=True)

    def exists(self, number: int) -> bool:
        """Whether readers see the block."""
        return _block_path(self.home, number).exists()

    def read(self, number: int, pool: BufferPool) -> pa.Buffer:
        """The bytes of a block, copied into memory of the pool. Raises FileNotFoundError."""
        with open(_block_path(self.home, number), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            memory, data = pool.take(size)
            came = 0
            while came < size and (part := file.readinto(memory[came:])):
                came += part
            del memory
            return data.slice(0, came)

    def delete(self, number: int) -> None:
        """Remove a block; one that is gone is not an error."""
        _block_path(self.home, number).unlink(missing_ok=True)


# -- the writer's side -------------------------------------------------------------------------------------------------


class FolderSlot(ProducerSlot):
    """One producer's folder, locked for as long as its writer lives."""

    def __init__(self, root: Path, blocks: BlockFiles, *, groups: Sequence[str], limits: BlockLimits) -> None:
        self._root, self._blocks, self._groups, self._limits = root, blocks, groups, limits
        self._home, self._producer = blocks.home, blocks.home.name
        taken = partial(producer_taken, self._producer, self._home)
        self._lock = FileLock(self._home / "lock", taken=taken, tries_s=_LOCK_TRIES_S)
        try:
            self._begin()
        except BaseException:
            self._lock.release()
            raise

    def _begin(self) -> None:
        """Go on where the last writer of this name stood, and remove what it left half done."""
        if _end_of(self._home) == "closed":
            raise producer_closed(self._producer, self._home)
        numbers = _numbers(self._home) or _Numbers()
        self._next, self._void = numbers.next, list(numbers.void)
        sizes = self._blocks.held(range(self._acknowledged(), self._next))
        leans = {number: others for number, others in numbers.leans.items() if number in sizes}
        self.retention = Retention(max_bytes=self._limits.max_bytes, sizes=sizes, leans=leans)
        # the number is stored before the block is committed: a writer that died in between left it prepared
        if self._blocks.is_prepared(self._next - 1):
            self._void.append(self._next - 1)
        self._store_number(self._next)
        for left in self._home.glob(".*.tmp"):
            left.unlink(missing_ok=True)
        (self._home / "end.json").unlink(missing_ok=True)
        if self._limits.sync:
            _sync_folder(self._home)

    def _store_number(self, number: int, leans: Mapping[int, Sequence[int]] = MappingProxyType({})) -> None:
        known = {str(held): list(others) for held, others in {**self.retention.leans, **leans}.items()}
        document = {"next": number, "void": self._void, "leans": known}
        _store(self._home / "number.json", document, sync=self._limits.sync)

    def publish(self, block: SealedBlock) -> BlockName:
        """Store a block; waits for space."""
        number = self._next
        try:
            size = self._prepared(number, block)
            wait_until(
                lambda: self._has_space(size, block.leans),
                self._limits.timeout_s,
                expected=lambda: (
                    f"space for {size} bytes (the groups {list(self._groups)} have not all acknowledged what fills "
                    f"{self._limits.max_bytes})"
                ),
            )
        except OSError as error:
            self._blocks.discard(number)
            raise _full(error, self._home) from error
        self._store_number(number + 1, {} if not block.leans else {number: block.leans})
        self._blocks.commit(number)
        self._next = number + 1
        self.retention.add(number, size, leans=block.leans)
        return BlockName(self._producer, number)

    def _prepared(self, number: int, block: SealedBlock) -> int:
        """Write a block where no reader sees it; on a full disk, what every group acknowledged makes space."""
        while True:
            try:
                return self._blocks.prepare(number, block)
            except OSError as error:
                self._blocks.discard(number)
                if error.errno not in _FULL or not self._delete_one(block.leans):
                    raise

    def _delete_one(self, leans: Sequence[int] | None) -> bool:
        number = self.retention.next_to_delete(below=self._acknowledged(), leans=leans)
        if number is not None:
            self._blocks.delete(number)
            self.retention.drop(number)
        return number is not None

    def _has_space(self, size: int, leans: Sequence[int] | None) -> bool:
        """Whether a block fits, after what may go was deleted."""
        while not self.retention.has_space(size):
            if not self._delete_one(leans):
                return False
        return True

    def _acknowledged(self) -> int:
        """The number of the first block that not every group acknowledged."""
        return min(self._acknowledged_by(group) for group in self._groups)

    def _acknowledged_by(self, group: str) -> int:
        """The number of the first block that a group has not acknowledged; on disk before anything is deleted."""
        home = self._root / "groups" / group
        position = _position(home)
        if position is None:
            return 0
        if self._limits.sync:
            with suppress(FileNotFoundError), open(home / "position.json", "rb") as file:
                os.fsync(file.fileno())
        return position.number(self._producer)

    def end(self, how: Literal["closed", "aborted"]) -> None:
        """State that no further block comes."""
        _store(self._home / "end.json", {"how": how, "blocks": self._next}, sync=self._limits.sync)

    def release(self) -> None:
        """Give the name up."""
        self._lock.release()


# -- the reader's side -------------------------------------------------------------------------------------------------


class FolderStore(BlockStore):
    """The blocks of a folder, for one group, or for none that it would hold. A pickled copy holds no lock."""

    def __init__(self, root: Path, *, group: str | None) -> None:
        document = _load(root / "manifest.json")
        if document is None:
            raise FormatError(f"expected a place, got no manifest @ {root}", kind=ErrorKind.MANIFEST)
        self.manifest = Manifest.from_document(document)
        self._root, self._pool = root, BufferPool()
        self._lock: FileLock | None = None
        if group is not None:
            self.manifest.require_group(group)
            self._home = root / "groups" / group
            self._lock = FileLock(self._home / "lock", taken=partial(group_taken, group, root))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_pool": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "_pool": BufferPool()})

    def producers(self) -> list[str]:
        """The producers that ever opened the place, sorted."""
        return producers_of(self._root)

    def _blocks_of(self, producer: str) -> BlockFiles:
        """Where the bytes of a producer's blocks lie; carriers that keep them elsewhere override this."""
        return BlockFiles(producer_home(self._root, producer))

    def state(self, name: BlockName) -> BlockState:
        """What can be said of a block now; the files are looked at in the order opposite to that of writing them."""
        home = producer_home(self._root, name.producer)
        blocks = self._blocks_of(name.producer)
        if blocks.exists(name.number):
            return "sealed"
        alive = _is_locked(home / "lock")
        end, numbers = _end_of(home), _numbers(home) or _Numbers()
        following = numbers.next
        if blocks.exists(name.number):
            return "sealed"  # sealed since the first look
        if name.number in numbers.void:
            return "void"
        if name.number < following and not self._is_unfinished(name, following, alive=alive):
            return "expired"
        if end is not None:
            return "aborted" if end == "aborted" else "closed"
        return "waiting" if alive or not home.exists() else "vanished"

    def _is_unfinished(self, name: BlockName, following: int, *, alive: bool) -> bool:
        """Whether a number that was stored may have no block yet: between storing it and renaming the block."""
        blocks = self._blocks_of(name.producer)
        return name.number == following - 1 and (alive or blocks.is_prepared(name.number))

    def last_number(self, producer: str) -> int:
        """The number behind the producer's last sealed block."""
        return (_numbers(producer_home(self._root, producer)) or _Numbers()).next

    def read(self, name: BlockName) -> pa.Buffer:
        """The bytes of a block, copied."""
        try:
            return self._blocks_of(name.producer).read(name.number, self._pool)
        except FileNotFoundError as error:
            raise DataError(f"expected block {name}, got none @ {self._root}", kind=ErrorKind.EXPIRED) from error

    def load_position(self) -> Position:
        """What the group acknowledged."""
        position = _position(self._home)
        if position is None:
            return Position(place=self.manifest.place)
        if position.place != self.manifest.place:
            raise FormatError(
                f"expected a position in the place {self.manifest.place}, got one in {position.place} @ {self._home}",
                kind=ErrorKind.MANIFEST,
            )
        return position

    def save_position(self, position: Position) -> None:
        """Store what the group acknowledged."""
        _store(self._home / "position.json", {"position": position.to_json()}, sync=False)

    def release(self) -> None:
        """Give the group up."""
        if self._lock is not None:
            self._lock.release()
