"""The carrier ``mooncake``: sealed blocks as objects of a Mooncake store, control data in a folder.

A Mooncake store holds bytes under keys, and nothing that can be replaced atomically. So the manifest, numbers, ends,
locks and positions stay where the carrier ``folder`` keeps them, in a small folder that all processes share; only the
bytes of blocks move. Objects are put with a hard pin: without it a store under pressure evicts what was not read yet.

A block is lost with the memory segment that it lies in, which belongs to the client that mounted it. Let store nodes
mount segments, and give producers ``global_segment_size=0``, so that blocks outlive producers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from routeplane.errors import ErrorKind, StoreError, TransportError, refused
from routeplane.record.policy import ReadPolicy
from routeplane.record.spec import RouteSpec
from routeplane.stream.block_reader import BlockReader
from routeplane.stream.blocks import (
    DEFAULT_GROUP,
    DEFAULT_LIMITS,
    DEFAULT_OPTIONS,
    DEFAULT_POLICY,
    BlockLimits,
    BlockWriter,
    Manifest,
    ReadOptions,
    SealedBlock,
)
from routeplane.stream.files import BufferPool
from routeplane.stream.folder import BlockFiles, FolderSlot, FolderStore, declare_place, found_place, producer_home

__all__ = ["Client", "open_reader", "open_writer"]

#: What the store answers where no segment has space (mooncake 0.3).
_NO_SPACE = -200
#: What the store answers for a key that is not there.
_NOT_FOUND = -704


class Client:
    """A client of a store, connected on first use in each process; pickles as its settings."""

    #: The positional arguments of Mooncake's own ``setup``, in order.
    NAMES = (
        "local_hostname",
        "metadata_server",
        "global_segment_size",
        "local_buffer_size",
        "protocol",
        "rdma_devices",
        "master_server_addr",
    )

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if set(settings) != set(self.NAMES):
            raise refused(
                f"settings of a store with the keys {', '.join(self.NAMES)}", f"{', '.join(sorted(settings))}"
            )
        self._settings = dict(settings)
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_settings": self._settings, "_client": None}

    @property
    def store(self) -> Any:
        """The connected client. Raises TransportError (CONNECTION) where the master does not answer."""
        if self._client is None:
            client = MooncakeDistributedStore()
            code = client.setup(*(self._settings[name] for name in self.NAMES))
            if code != 0:
                address = self._settings["master_server_addr"]
                raise TransportError(
                    f"expected a Mooncake store at {address}, got code {code}", kind=ErrorKind.CONNECTION
                )
            self._client = client
        return self._client

    def close(self) -> None:
        """Disconnect; objects in memory that this client gave to the store are gone. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


def open_writer(
    place: str | os.PathLike[str],
    spec: RouteSpec,
    *,
    store: Mapping[str, Any],
    run: str,
    producer: str,
    groups: Sequence[str] = (DEFAULT_GROUP,),
    encoding: Literal["plain", "narrow", "auto"] = "auto",
    limits: BlockLimits = DEFAULT_LIMITS,
) -> BlockWriter:
    """Open a place as one of its producers; the first opener creates it.

    Args:
        place: a folder that all processes share, for control data; some hundred bytes a block.
        store: settings of Mooncake's own ``setup``: ``local_hostname``, ``metadata_server``, ``global_segment_size``
            (bytes that this client gives to the store), ``local_buffer_size`` (at least one block), ``protocol``,
            ``rdma_devices``, ``master_server_addr``. The writer owns the client that it makes of them.
        run, producer, groups, encoding, limits: as ``stream.folder.open_writer``; ``limits.sync`` is for control data.

    Returns a RouteSink that the caller closes. Raises as ``stream.folder.open_writer``; StoreError (NO_SPACE) where no
    segment has space for a block.
    """
    root, found = declare_place(place, Manifest.of(spec, run=run, groups=groups, encoding=encoding))
    client = Client(store)
    home = producer_home(root, producer)
    blocks = BlockObjects(home, client, prefix=f"{found.place}/{producer}", sync=limits.sync)
    slot = MooncakeSlot(root, blocks, groups=found.groups, limits=limits, client=client)
    return BlockWriter(slot, found, limits=limits)


def open_reader(
    place: str | os.PathLike[str],
    *,
    store: Mapping[str, Any],
    producers: int | Sequence[str],
    group: str = DEFAULT_GROUP,
    follow: bool = True,
    policy: ReadPolicy = DEFAULT_POLICY,
    options: ReadOptions = DEFAULT_OPTIONS,
) -> BlockReader:
    """Open a place as the one reader of a group; waits for the place to be created.

    Args: ``store``: as ``open_writer``; the others as ``stream.folder.open_reader``.

    Returns a RouteSource and BlockSource that the caller closes; a pickled copy connects in its own process.
    """
    blocks = MooncakeStore(found_place(place, options.timeout_s if follow else 0.0), Client(store), group=group)
    return BlockReader(blocks, producers=producers, follow=follow, policy=policy, options=options)


class BlockObjects(BlockFiles):
    """One producer's blocks as objects. A prepared block leaves an empty file beside the control data."""

    def __init__(self, home: Path, client: Client, *, prefix: str, sync: bool = True) -> None:
        super().__init__(home, sync=sync)
        self._client, self._prefix = client, prefix
        self._prepared: dict[int, pa.Buffer] = {}

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number:09d}"

    def _marker(self, number: int) -> Path:
        return self.home / f".{number:09d}.tmp"

    def held(self, numbers: range) -> dict[int, int]:
        """Sizes in bytes of the objects among these numbers that are there."""
        sizes = {number: int(self._client.store.get_size(self._key(number))) for number in numbers}
        return {number: size for number, size in sizes.items() if size > 0}

    def prepare(self, number: int, block: SealedBlock) -> int:
        """Encode a block, and note that its object may come."""
        self._prepared[number] = data = block.to_buffer()
        self._marker(number).touch()
        return int(data.size)

    def commit(self, number: int) -> None:
        """Put the object. Raises StoreError (NO_SPACE), TransportError; a key that exists already is an error."""
        key, data = self._key(number), self._prepared.pop(number)
        # a second put of a key answers success and keeps the old object
        if self._client.store.is_exist(key) != 0:
            raise StoreError(f"expected no object {key}, got one", kind=ErrorKind.WRITER)
        config = ReplicateConfig()
        config.with_hard_pin = True
        code = self._client.store.put(key, data, config)
        if code == _NO_SPACE:
            raise StoreError(f"expected space for {data.size} bytes, got none @ {key}", kind=ErrorKind.NO_SPACE)
        came = self._client.store.get_size(key)
        if code != 0 or came != data.size:
            raise TransportError(
                f"expected {data.size} bytes to be put, got code {code} and {came} bytes @ {key}",
                kind=ErrorKind.CONNECTION,
            )
        self._marker(number).unlink(missing_ok=True)

    def is_prepared(self, number: int) -> bool:
        """Whether the object may not have come."""
        return self._marker(number).exists() and not self.exists(number)

    def discard(self, number: int) -> None:
        """Forget a prepared block."""
        self._prepared.pop(number, None)
        self._marker(number).unlink(missing_ok=True)

    def exists(self, number: int) -> bool:
        """Whether the object is there. Raises TransportError where the store does not answer."""
        code = self._client.store.is_exist(self._key(number))
        if code < 0 and code != _NOT_FOUND:
            raise TransportError(f"expected an answer of the store, got code {code}", kind=ErrorKind.CONNECTION)
        return bool(code == 1)

    def read(self, number: int, pool: BufferPool) -> pa.Buffer:
        """The bytes of the object, copied. An empty answer is an error: FileNotFoundError."""
        del pool  # the client returns memory of its own
        data = self._client.store.get(self._key(number))
        if not data:
            raise FileNotFoundError(self._key(number))
        return pa.py_buffer(data)

    def delete(self, number: int) -> None:
        """Remove the object, pinned or not. Raises TransportError where it is still there."""
        key = self._key(number)
        code = self._client.store.remove(key, True)
        if code not in (0, _NOT_FOUND) or self._client.store.is_exist(key) == 1:
            raise TransportError(f"expected object {key} to be removed, got code {code}", kind=ErrorKind.CONNECTION)


class MooncakeSlot(FolderSlot):
    """One producer's name in the folder, and its client of the store."""

    def __init__(
        self, root: Path, blocks: BlockFiles, *, groups: Sequence[str], limits: BlockLimits, client: Client
    ) -> None:
        self._client = client
        super().__init__(root, blocks, groups=groups, limits=limits)

    def release(self) -> None:
        """Give the name up, and disconnect."""
        super().release()
        self._client.close()


class MooncakeStore(FolderStore):
    """Blocks in a Mooncake store, control data in a folder, for one group."""

    def __init__(self, root: Path, client: Client, *, group: str) -> None:
        super().__init__(root, group=group)
        self._client = client

    def _blocks_of(self, producer: str) -> BlockFiles:
        prefix = f"{self.manifest.place}/{producer}"
        return BlockObjects(producer_home(self._root, producer), self._client, prefix=prefix)

    def release(self) -> None:
        """Give the group up, and disconnect."""
        super().release()
        self._client.close()
