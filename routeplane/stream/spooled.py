"""A stream that outlives its process: a local stream whose blocks, acknowledgements and ends are on disk.

Also what services take: a ledger over a folder. The folder itself is ``spool``.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from routeplane.errors import ErrorKind, FormatError
from routeplane.record.schema import Encoding, choose_encoding
from routeplane.record.spec import RouteSpec
from routeplane.stream.addresses import SinkOptions
from routeplane.stream.blocks import IpcCodec
from routeplane.stream.broker import Broker
from routeplane.stream.brokered import Codec
from routeplane.stream.delivery import DEFAULT_GROUP
from routeplane.stream.files import PublishedPath
from routeplane.stream.journal import no_room
from routeplane.stream.ledger import Ledger
from routeplane.stream.memory import LocalStream
from routeplane.stream.spool import Spool

__all__ = ["SpoolStream", "load_spec", "save_spec", "spooled_ledger"]


def spooled_ledger(
    spool: Spool,
    *,
    max_bytes: int,
    groups: Sequence[str] = (DEFAULT_GROUP,),
    producers: int | None = 1,
    lease_s: float = 60.0,
    keep: bool = False,
    clock: Callable[[], float] = time.monotonic,
    load: Callable[[Path], Any] | None = None,
) -> Ledger:
    """A ledger that goes on where the folder stands, for a broker with the folder as its store. The arguments are
    ``Ledger``'s.

    ``load``: from a block's file to the payload that the ledger shall hold; by default the path itself.
    """
    ledger = Ledger(
        max_bytes=max_bytes,
        groups=groups,
        producers=producers,
        lease_s=lease_s,
        keep=keep,
        durability="spool",
        first_epoch=secrets.randbits(62),
        clock=clock,
    )
    for group in groups:
        spool.joined(group)
    found = spool.recover()
    blocks = found.blocks if load is None else tuple(replace(each, payload=load(each.payload)) for each in found.blocks)
    ledger.restore(found.state, blocks)
    return ledger


def save_spec(folder: Path, spec: RouteSpec, *, encoding: Encoding) -> None:
    """Note what a folder's stream is of, where that is not known yet. Raises TransportError (NO_ROOM)."""
    path = folder / "spec.json"
    if path.exists():
        return
    target = PublishedPath(path)
    try:
        target.file.write(f"{encoding}\n{spec.to_json()}".encode())
        target.publish()
    except OSError as error:
        target.discard()
        raise no_room(path, error) from error


def load_spec(folder: Path) -> tuple[RouteSpec, Encoding] | None:
    """What ``save_spec`` noted, if anything. Raises FormatError."""
    path = folder / "spec.json"
    if not path.exists():
        return None
    text, _, document = path.read_text(encoding="utf-8").partition("\n")
    encoding: Encoding | None = "plain" if text == "plain" else "narrow" if text == "narrow" else None
    if encoding is None:
        raise FormatError(f"expected an encoding, got {text!r} @ {folder}", kind=ErrorKind.ENCODING)
    return RouteSpec.from_json(document), encoding


class SpoolStream(LocalStream):
    """A MemoryStream whose records are in a folder: ``write`` returns when they are on disk, and a process that is
    started after another was killed goes on where that one stood.

    ``max_bytes``: what the folder may hold before ``write`` waits. ``block_bytes``: payload that is gathered, written
    and synced at once; ``flush`` does not wait for more. Records that a reader yields are views of the files, and
    outlive them. ``encoding`` is that of the first writer ever. Close it, or leave ``with``, to let go of the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int = 2**40,
        block_bytes: int = 1,
        groups: Sequence[str] = (DEFAULT_GROUP,),
        producers: int | None = 1,
        lease_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(producers=producers, alone=False)
        self._folder, self._gathered = Path(folder), block_bytes
        self._spool = Spool(folder)
        try:
            ledger = spooled_ledger(
                self._spool,
                max_bytes=max_bytes,
                groups=groups,
                producers=producers,
                lease_s=lease_s,
                clock=clock,
            )
            self._broker = Broker(ledger, store=self._spool)
            known = load_spec(self._folder)
            if known is not None:
                self._made = self._made_of(*known)
        except BaseException:
            self._spool.close()
            raise

    def _made_of(self, spec: RouteSpec, encoding: Encoding) -> tuple[Broker, RouteSpec, Codec]:
        return self._broker, spec, IpcCodec(spec, encoding=encoding)

    def _make(self, spec: RouteSpec, options: SinkOptions) -> tuple[Broker, RouteSpec, Codec]:
        chosen = choose_encoding(options.encoding or "plain", spec)
        save_spec(self._folder, spec, encoding=chosen)
        return self._made_of(spec, chosen)

    def _block_bytes(self, options: SinkOptions) -> int:
        return min(self._gathered, options.max_bytes)

    def close(self) -> None:
        """Let go of the folder; what it holds stays, for the next."""
        self._broker.shut("closed")
        self._spool.close()

    def __enter__(self) -> SpoolStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
