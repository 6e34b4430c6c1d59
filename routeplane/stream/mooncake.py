"""The carrier ``mooncake``: sealed blocks as objects of a Mooncake store, control data in a folder.

A Mooncake store holds bytes under keys, and nothing that can be replaced atomically. So the manifest, numbers, ends,
locks and positions stay where the carrier ``folder`` keeps them, in a small folder that all processes share; only the
bytes of blocks move. Objects are put with a hard pin: without it a store under pressure evicts what was not read yet.

A block is lost with the memory segment that it lies in, which belongs to the client that mounted it. Let store nodes
mount segments, and give producers ``global_segment_size=0``, so that blocks outlive producers.

``place`` is that folder, some hundred bytes a block; ``limits.sync`` is for control data. Besides, ``store`` gives the
settings of Mooncake's own ``setup``: ``local_hostname``, ``metadata_server``, ``global_segment_size`` (bytes that this
client gives to the store), ``local_buffer_size`` (at least one block), ``protocol``, ``rdma_devices``,
``master_server_addr``. Where no segment has space for a block, its writer raises StoreError (NO_SPACE).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from routeplane.errors import ErrorKind, StoreError, TransportError, refused
from routeplane.record.interfaces import BlockName
from routeplane.stream import blocks
from routeplane.stream.block_reader import Carrier
from routeplane.stream.folder import BlockFiles, FolderSlot, FolderStore, found_store

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


class BlockObjects(BlockFiles):
    """The blocks of a place as objects. A prepared block leaves an empty file beside the control data."""

    def __init__(self, root: Path, place: str, *, client: Client, sync: bool = True) -> None:
        super().__init__(root, place, sync=sync)
        self._client = client
        self._data = pa.py_buffer(b"")  # of the prepared block

    def key(self, name: BlockName) -> str:
        """The key of a block's object."""
        return f"{self._place}/{name.producer}/{name.number:09d}"

    def held(self, producer: str, numbers: range) -> dict[int, int]:
        names = [BlockName(producer, number) for number in numbers]
        sizes = {name.number: int(self._client.store.get_size(self.key(name))) for name in names}
        return {number: size for number, size in sizes.items() if size > 0}

    def prepare(self, name: BlockName, block: blocks.SealedBlock) -> int:
        """Encode a block, and note that its object may come."""
        self._data = block.to_buffer()
        self.prepared(name).touch()
        return int(self._data.size)

    def commit(self, name: BlockName) -> None:
        """Put the object. Raises StoreError (NO_SPACE), TransportError; a key that exists already is an error."""
        key, data = self.key(name), self._data
        # a second put of a key answers success and keeps the old object
        if self.exists(name):
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
        self.prepared(name).unlink(missing_ok=True)

    def exists(self, name: BlockName) -> bool:
        """Whether the object is there. Raises TransportError where the store does not answer."""
        code = self._client.store.is_exist(self.key(name))
        if code < 0 and code != _NOT_FOUND:
            raise TransportError(f"expected an answer of the store, got code {code}", kind=ErrorKind.CONNECTION)
        return bool(code == 1)

    def read(self, name: BlockName) -> pa.Buffer:
        """The bytes of the object, copied. An empty answer is an error: FileNotFoundError."""
        data = self._client.store.get(self.key(name))
        if not data:
            raise FileNotFoundError(self.key(name))
        return pa.py_buffer(data)

    def delete(self, name: BlockName) -> None:
        """Remove the object, pinned or not. Raises TransportError where it is still there."""
        key = self.key(name)
        code = self._client.store.remove(key, True)
        if code not in (0, _NOT_FOUND) or self.exists(name):
            raise TransportError(f"expected object {key} to be removed, got code {code}", kind=ErrorKind.CONNECTION)

    def close(self) -> None:
        self._client.close()


def _slot(
    place: str | os.PathLike[str], declared: blocks.Manifest, *, store: Mapping[str, Any], **how: Any
) -> FolderSlot:
    return FolderSlot(place, declared, files=partial(BlockObjects, client=Client(store)), **how)


def _store(place: str | os.PathLike[str], *, store: Mapping[str, Any], **how: Any) -> FolderStore:
    return found_store(place, files=partial(BlockObjects, client=Client(store)), **how)


_CARRIER = Carrier(slot=_slot, store=_store)
open_writer, open_reader = _CARRIER.open_writer, _CARRIER.open_reader
