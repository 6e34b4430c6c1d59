"""The carrier ``folder``: sealed blocks as files, in a place that several processes and hosts may share.

A place is a folder, on a file system that has flock:

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import pyarrow as pa
import xxhash

from routeplane.errors import DataError, ErrorKind, FormatError, StoreError, UsageError
from routeplane.record.interfaces import BlockName, Position
from routeplane.record.parse import check_count
from routeplane.stream import blocks
from routeplane.stream.block_reader import BlockStore, Carrier
from routeplane.stream.files import BufferPool, fsync

__all__ = ["open_reader", "open_writer", "producers_of"]

# A reader that looks whether a producer lives holds its lock for a moment; a writer tries again for so long.
_LOCK_TRIES_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ENDS: Mapping[str, Literal["closed", "aborted"]] = {"closed": "closed", "aborted": "aborted"}

_Document = TypeVar("_Document")


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
    return sorted(path.name for path in Path(place).glob("producers/*/"))


# -- files -------------------------------------------------------------------------------------------------------------


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _load(path: Path, parse: Callable[[dict[str, Any]], _Document]) -> _Document | None:
    """What a JSON file of ours says; None where there is none.

    Raises FormatError (MANIFEST) for a damaged file, and for another content: a checksum can be right by chance, or by
    intent.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(text)
        if document.pop("checksum") != _digest(document):
            raise ValueError("a wrong checksum")
        return parse(document)
    except FormatError:
        raise
    except (AttributeError, DataError, KeyError, RecursionError, TypeError, UsageError, ValueError) as error:
        raise FormatError(f"expected a file of a place, got another ({error}) @ {path}", kind=ErrorKind.MANIFEST) from (
            None
        )


class _Numbers(NamedTuple):
    """What a producer used: its next number, the first that may have a block, those without, and what each leans on."""

    next: int = 0
    first: int = 0
    void: tuple[int, ...] = ()
    leans: Mapping[int, tuple[int, ...]] = MappingProxyType({})

    @classmethod
    def of(cls, home: Path) -> _Numbers:
        """Those of a producer's folder. Raises FormatError."""
        return _load(home / "number.json", cls._parse) or cls()

    @classmethod
    def _parse(cls, document: dict[str, Any]) -> _Numbers:
        number = partial(check_count, name="a number of a block", below=2**63)
        leans = {int(name): tuple(map(number, others)) for name, others in document["leans"].items()}
        first = number(document.get("first", 0))  # places of earlier writers do not say
        return cls(number(document["next"]), first, tuple(map(number, document["void"])), leans)


def _position(home: Path) -> Position | None:
    """What a group acknowledged; None before the first. Raises FormatError."""
    return _load(home / "position.json", lambda document: Position.from_json(document["position"]))


def _end_of(home: Path) -> Literal["closed", "aborted"] | None:
    """How a producer ended; None where it has not. Raises FormatError."""
    return _load(home / "end.json", lambda document: _ENDS[document["how"]])


def _store(path: Path, document: Mapping[str, Any], *, sync: bool) -> None:
    """Replace a JSON file by rename."""
    data = json.dumps({**document, "checksum": _digest(document)}, separators=(",", ":")).encode()
    written = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        written.write_bytes(data)
        if sync:
            fsync(written)
        os.replace(written, path)
    except OSError as error:
        written.unlink(missing_ok=True)
        raise _full(error, path) from error
    if sync:
        fsync(path.parent)


def _full(error: OSError, path: Path) -> OSError:
    if error.errno in _FULL:
        return StoreError(f"expected space for {path}, got {error.strerror}", kind=ErrorKind.NO_SPACE)
    return error


def declare_place(root: Path, manifest: blocks.Manifest) -> blocks.Manifest:
    """The manifest of a place, which is created where there is none; one of several openers at once wins."""
    path = root / "manifest.json"
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f".manifest.{secrets.token_hex(4)}.tmp")
        _store(written, manifest.to_document(), sync=True)
        with suppress(FileExistsError):
            os.link(written, path)  # unlike a rename, never replaces another opener's
        written.unlink()
        fsync(root)
    found = manifest_of(root)
    found.require_same(manifest)
    for group in found.groups:
        (root / "groups" / group).mkdir(parents=True, exist_ok=True)
    return found


def manifest_of(root: Path) -> blocks.Manifest:
    """What a place declares. Raises FormatError."""
    found = _load(root / "manifest.json", blocks.Manifest.from_document)
    if found is None:
        raise FormatError(f"expected a place, got no manifest @ {root}", kind=ErrorKind.MANIFEST)
    return found


# -- locks -------------------------------------------------------------------------------------------------------------


def _hold(holder: object, path: Path, *, taken: Callable[[], UsageError], tries_s: float = 0.0) -> Callable[[], object]:
    """Take a lock file until the answer is called, or the holder or this process is gone; no forked child holds it.

    ``taken`` makes the error where another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + tries_s
    while (descriptor := _locked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)) is None:
        if time.monotonic() >= end:
            raise taken()
        time.sleep(0.005)
    release = weakref.finalize(holder, os.close, descriptor)
    # a child's copy of the descriptor would hold the lock for as long as the child lives
    os.register_at_fork(after_in_child=release)
    if not is_locked(path):
        raise _no_locks("one without", path)
    return release


def _no_locks(got: str, path: Path) -> StoreError:
    return StoreError(f"expected a file system with locks (flock), got {got} @ {path}", kind=ErrorKind.WRITER)


def _locked(path: Path, flags: int, mode: int) -> int | None:
    """A descriptor that holds the lock of a file; None where another one does."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # still the file of that name
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(descriptor)
        raise _no_locks(f"{error.strerror}", path) from error
    os.close(descriptor)
    return None


def is_locked(path: Path) -> bool:
    """Whether a living process holds a lock file."""
    try:
        descriptor = _locked(path, os.O_RDONLY, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


# -- where the bytes lie -----------------------------------------------------------------------------------------------


class BlockFiles:
    """The blocks of a place as files beside its control data. Another carrier keeps the bytes elsewhere: ``mooncake``.

    A block is prepared, then committed. One that was prepared and not committed leaves a file that says so.
    """

    def __init__(self, root: Path, place: str, *, sync: bool = True) -> None:
        self.root, self._place, self._sync, self._pool = root, place, sync, BufferPool()

    def home(self, producer: str) -> Path:
        """Where a producer's control data lies."""
        return self.root / "producers" / blocks.check_name(producer, "producer")

    def prepared(self, name: BlockName) -> Path:
        """Where a block is written before readers may see it."""
        return self.home(name.producer) / f".{name.number:09d}.tmp"

    def _path(self, name: BlockName) -> Path:
        return self.home(name.producer) / f"{name.number:09d}.arrows"

    def held(self, producer: str, numbers: range) -> dict[int, int]:
        """Sizes in bytes of the blocks that are there, by number; ``numbers``: those that may be."""
        del numbers  # the files say which there are
        paths = [path for path in self.home(producer).glob("*.arrows") if path.stem.isdecimal()]
        return {int(path.stem): path.stat().st_size for path in paths}

    def prepare(self, name: BlockName, block: blocks.SealedBlock) -> int:
        """Write a block where no reader sees it. Returns its size in bytes."""
        path = self.prepared(name)
        with pa.OSFile(str(path), "wb") as sink:
            block.write_to(sink)
        if self._sync:
            fsync(path)
        return path.stat().st_size

    def commit(self, name: BlockName) -> None:
        """Show a prepared block to readers, whole."""
        os.replace(self.prepared(name), self._path(name))
        if self._sync:
            fsync(self.home(name.producer))

    def is_unfinished(self, name: BlockName) -> bool:
        """Whether a block was prepared and neither committed nor discarded."""
        return self.prepared(name).exists() and not self.exists(name)

    def exists(self, name: BlockName) -> bool:
        """Whether readers see the block."""
        return self._path(name).exists()

    def read(self, name: BlockName) -> pa.Buffer:
        """The bytes of a block, copied into memory of a pool. Raises FileNotFoundError."""
        with open(self._path(name), "rb", buffering=0) as file:
            memory, data = self._pool.take(os.fstat(file.fileno()).st_size)
            came = 0
            while part := file.readinto(memory[came:]):
                came += part
            return data.slice(0, came)

    def delete(self, name: BlockName) -> None:
        """Remove a block; one that is gone is not an error."""
        self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Close what the bytes are reached by."""


# -- the writer's side -------------------------------------------------------------------------------------------------


class FolderSlot(blocks.ProducerSlot):
    """One producer's folder, locked for as long as its writer lives. ``files`` opens what holds the bytes."""

    def __init__(
        self,
        place: str | os.PathLike[str],
        declared: blocks.Manifest,
        *,
        producer: str,
        limits: blocks.BlockLimits,
        files: Callable[..., BlockFiles] = BlockFiles,
    ) -> None:
        root = Path(place)
        self.manifest = declare_place(root, declared)
        self._files = files(root, self.manifest.place, sync=limits.sync)
        self._producer, self._limits, self._home = producer, limits, self._files.home(producer)
        taken = partial(blocks.producer_taken, producer, self._home)
        self._unlock = _hold(self, self._home / "lock", taken=taken, tries_s=_LOCK_TRIES_S)
        try:
            self._begin()
        except BaseException:
            self.release()
            raise

    def _name(self, number: int) -> BlockName:
        return BlockName(self._producer, number)

    def _begin(self) -> None:
        """Go on where the last writer of this name stood, and remove what it left half done."""
        if _end_of(self._home) == "closed":
            raise blocks.producer_closed(self._producer, self._home)
        numbers = _Numbers.of(self._home)
        self._next, self._void = numbers.next, list(numbers.void)
        self._acknowledged()  # a damaged position is refused here, not when space is needed
        sizes = self._files.held(self._producer, range(numbers.first, self._next))
        leans = {number: others for number, others in numbers.leans.items() if number in sizes}
        self.retention = blocks.Retention(max_bytes=self._limits.max_bytes, sizes=sizes, leans=leans)
        # the number is stored before the block is committed: a writer that died in between left it prepared
        if self._next and self._files.is_unfinished(self._name(self._next - 1)):
            self._void.append(self._next - 1)
        self._store_number()
        for left in self._home.glob(".*.tmp"):
            left.unlink(missing_ok=True)
        (self._home / "end.json").unlink(missing_ok=True)
        if self._limits.sync:
            fsync(self._home)

    def _store_number(self) -> None:
        leans = {str(number): others for number, others in self.retention.leans.items()}
        first = min(self.retention.sizes, default=self._next)
        document = {"next": self._next, "first": first, "void": self._void, "leans": leans}
        _store(self._home / "number.json", document, sync=self._limits.sync)

    def publish(self, block: blocks.SealedBlock) -> BlockName:
        name = self._name(self._next)
        try:
            size = self._prepared(name, block)
            blocks.wait_until(
                lambda: self._has_space(size, block.leans),
                self._limits.timeout_s,
                expected=lambda: blocks.space_for(size, groups=self.manifest.groups, limits=self._limits),
            )
        except OSError as error:
            self._files.prepared(name).unlink(missing_ok=True)
            raise _full(error, self._home) from error
        self.retention.add(name.number, size, leans=block.leans)
        self._next += 1
        self._store_number()  # before readers see the block: the number is never used again
        self._files.commit(name)
        return name

    def _prepared(self, name: BlockName, block: blocks.SealedBlock) -> int:
        """Write a block where no reader sees it; on a full disk, what every group acknowledged makes space."""
        while True:
            count = len(self.retention.sizes)
            try:
                return self._files.prepare(name, block)
            except OSError as error:
                self._files.prepared(name).unlink(missing_ok=True)
                self._has_space(self._limits.max_bytes, block.leans)
                if error.errno not in _FULL or len(self.retention.sizes) == count:
                    raise

    def _has_space(self, size: int, leans: Sequence[int] | None) -> bool:
        """Whether a block fits, after what may go was deleted."""
        return self.retention.has_space(size) or self.retention.make_space(
            size, leans, below=self._acknowledged(), delete=lambda number: self._files.delete(self._name(number))
        )

    def _acknowledged(self) -> int:
        """The number of the first block that not every group acknowledged; on disk before anything is deleted."""
        numbers = []
        for home in (self._files.root / "groups" / group for group in self.manifest.groups):
            position = _position(home)
            if position is not None and self._limits.sync:
                with suppress(FileNotFoundError):
                    fsync(home / "position.json")
            numbers.append(0 if position is None else position.number(self._producer))
        return min(numbers)

    def end(self, how: Literal["closed", "aborted"]) -> None:
        _store(self._home / "end.json", {"how": how, "blocks": self._next}, sync=self._limits.sync)

    def release(self) -> None:
        self._unlock()
        self._files.close()


# -- the reader's side -------------------------------------------------------------------------------------------------


class FolderStore(BlockStore):
    """The blocks of a folder, for one group, or for none that it would hold. A pickled copy holds no lock."""

    def __init__(
        self, place: str | os.PathLike[str], *, group: str | None, files: Callable[..., BlockFiles] = BlockFiles
    ) -> None:
        self._root = root = Path(place)
        self.manifest = manifest_of(root)
        self._files = files(root, self.manifest.place)
        self._unlock: Callable[[], object] | None = None
        if group is not None:
            self.manifest.require_group(group)
            self._home = root / "groups" / group
            self._unlock = _hold(self, self._home / "lock", taken=partial(blocks.group_taken, group, root))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_unlock": None}

    def producers(self) -> list[str]:
        return producers_of(self._root)

    def state(self, name: BlockName) -> blocks.BlockState:
        """What can be said of a block now; the files are looked at in the order opposite to that of writing them."""
        if self._files.exists(name):
            return "sealed"
        home = self._files.home(name.producer)
        alive = is_locked(home / "lock")
        end, numbers = _end_of(home), _Numbers.of(home)
        if self._files.exists(name):
            return "sealed"  # sealed since the first look
        if name.number in numbers.void:
            return "void"
        # between storing a number and showing its block, the last number has none yet
        unfinished = name.number == numbers.next - 1 and (alive or self._files.is_unfinished(name))
        if name.number < numbers.next and not unfinished:
            return "expired"
        return end or ("waiting" if alive or not home.exists() else "vanished")

    def last_number(self, producer: str) -> int:
        return _Numbers.of(self._files.home(producer)).next

    def read(self, name: BlockName) -> pa.Buffer:
        try:
            return self._files.read(name)
        except FileNotFoundError as error:
            raise DataError(f"expected block {name}, got none @ {self._root}", kind=ErrorKind.EXPIRED) from error

    def load_position(self) -> Position:
        position, place = _position(self._home), self.manifest.place
        if position is not None and position.place != place:
            raise FormatError(
                f"expected a position in the place {place}, got one in {position.place} @ {self._home}",
                kind=ErrorKind.MANIFEST,
            )
        return position or Position(place=place)

    def save_position(self, position: Position) -> None:
        _store(self._home / "position.json", {"position": position.to_json()}, sync=False)

    def release(self) -> None:
        if self._unlock is not None:
            self._unlock()
        self._files.close()


def found_store(place: str | os.PathLike[str], *, timeout_s: float | None, **how: Any) -> FolderStore:
    """A place's FolderStore, once the place is there; a wait is logged. Raises TransportError (TIMED_OUT)."""
    path = Path(place).absolute() / "manifest.json"

    def expected() -> str:
        there = next(folder for folder in path.parents if folder.is_dir())
        found = "which holds no place" if there == path.parent else f"of which {there} exists"
        return f"the place {path.parent}, {found}"

    blocks.wait_until(path.exists, timeout_s, expected=expected, warn_after_s=blocks.WARN_AFTER_S)
    return FolderStore(place, **how)


_CARRIER = Carrier(slot=FolderSlot, store=found_store)
open_writer, open_reader = _CARRIER.open_writer, _CARRIER.open_reader
