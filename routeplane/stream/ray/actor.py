"""The plane's side: an asyncio actor around a gate. It owns the objects, waits without spinning, and restarts.

With a spool it comes back with what it held; without one it comes back empty, and producers send again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray

from routeplane.errors import DataError, ErrorKind, SpecError, TransportError, refused
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import Encoding
from routeplane.record.spec import RouteSpec
from routeplane.stream.delivery import Block, DeliveryReport, Membership, Session, Taken, Totals
from routeplane.stream.gate import Gate, PlaneOptions
from routeplane.stream.ray.objects import opened, stream_of
from routeplane.stream.selection import Selection

__all__ = ["PlaneActor"]

Answer = TypeVar("Answer")


@dataclass(slots=True)
class _Held:
    """The actor's own object, and the array until it is on disk, where there is a disk to be on."""

    reference: Any
    array: Any = None


class PlaneActor:
    """Methods are what clients call; each returns plain values, or raises the library's own errors.

    All run on one event loop, so nothing here is locked; what takes long runs in a thread and touches no state.
    """

    def __init__(self, options: PlaneOptions) -> None:
        self._leap_s = 0.0
        self._gate = Gate(options, to_bytes=_array_of, load=_loaded, clock=lambda: time.monotonic() + self._leap_s)
        self._changed = asyncio.Event()
        self._spec = self._gate.known()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Wake everybody who waits; whoever comes now waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, attempt: Callable[[], Answer | None], wait_s: float) -> Answer | None:
        """Try now and after every change, for so long; None where it never gave anything."""
        end = time.monotonic() + wait_s
        while True:
            answer = attempt()
            left = end - time.monotonic()
            if answer is not None or left <= 0:
                return answer
            lease = self._gate.until_deadline()
            try:
                await asyncio.wait_for(self._changed.wait(), left if lease is None else min(left, lease))
            except TimeoutError:
                continue

    # -- producers ---------------------------------------------------------------------------------------------------

    async def describe(self, wait_s: float) -> tuple[RouteSpec, Encoding] | None:
        """Spec and encoding, once a producer brought them."""
        return await self._until(lambda: self._spec, wait_s)

    async def attach(
        self, owner: str, producer: str, *, spec: RouteSpec, encoding: Encoding, first: int, before: Totals | None
    ) -> Session:
        """A session."""
        if self._spec is not None and self._spec != (spec, encoding):
            raise SpecError(
                f"expected the stream's spec ({self._spec[0].model!r}) and encoding ({self._spec[1]}), got "
                f"{spec.model!r} in {encoding}",
                kind=ErrorKind.SPEC_MISMATCH,
            )
        session = self._gate.attach_as(owner, producer, first=first, before=before)
        self._gate.note(spec, encoding)
        self._spec = spec, encoding
        self._tell()
        return session

    async def reserve(self, session: Session, block: Block, *, wait_s: float) -> bool:
        """Whether there is room for a block now."""
        return bool(await self._until(lambda: self._gate.reserve(session, block, timeout_s=0.0) or None, wait_s))

    async def put(self, session: Session, block: Block, *, payload: Any) -> Session:
        """A block, room for which was reserved. Its array is put again here, so that this actor owns it."""
        if not isinstance(payload, np.ndarray) or payload.dtype != np.uint8 or payload.nbytes > block.nbytes:
            raise refused(f"a uint8 array of at most {block.nbytes} bytes", f"a {type(payload).__name__}")
        held = _Held(ray.put(payload), payload)
        session = self._gate.put(session, replace(block, payload=held), timeout_s=0.0)
        held.array = None  # a view of the producer's object, which may go now
        self._tell()
        return session

    async def heartbeat(self, session: Session) -> Session:
        """The session as it stands."""
        return self._gate.heartbeat(session)

    async def acknowledged(self, session: Session, *, through: int, wait_s: float) -> Session | None:
        """The session once everything below a number may be forgotten; None where that took too long."""

        def attempt() -> Session | None:
            try:
                return self._gate.wait_acknowledged(session, through=through, timeout_s=0.0)
            except TransportError as error:
                if error.kind != ErrorKind.TIMED_OUT:
                    raise
                return None

        return await self._until(attempt, wait_s)

    async def close(self, session: Session, *, totals: Totals) -> None:
        """End a producer as whole."""
        self._gate.close(session, totals=totals)
        self._tell()

    async def abort(self, session: Session) -> None:
        """End a producer as not whole."""
        self._gate.abort(session)
        self._tell()

    async def disconnect(self, session: Session) -> None:
        """Free a producer's name."""
        self._gate.disconnect(session)
        self._tell()

    async def seal(self) -> None:
        """No further producer will come."""
        self._gate.seal()
        self._tell()

    # -- consumers ---------------------------------------------------------------------------------------------------

    async def join(self, group: str, consumer: str, *, cursor: Mapping[str, int] | None) -> Membership:
        """A membership."""
        member = self._gate.join(group, consumer, cursor=cursor)
        self._tell()
        return member

    async def take(self, member: Membership, *, max_blocks: int, wait_s: float, selection: Selection) -> Taken:
        """The next blocks of a consumer: references to whole ones, or arrays of what was selected."""

        def attempt() -> Taken | None:
            taken = self._gate.take(member, max_blocks=max_blocks, timeout_s=0.0)
            return taken if taken.blocks or taken.progress.ended else None

        taken = await self._until(attempt, wait_s)
        if taken is None:
            return self._gate.take(member, max_blocks=0, timeout_s=0.0)
        given = [await self._given(block, selection) for block in taken.blocks]
        return replace(taken, blocks=tuple(given))

    async def _given(self, block: Block, selection: Selection) -> Block:
        whole = replace(block, payload=block.payload.reference)
        if selection.whole:
            return whole
        array = await block.payload.reference
        try:
            return replace(block, payload=await asyncio.to_thread(_cut, array, selection))
        except DataError:
            return whole  # for the consumer to deal with by its own policy

    async def acknowledge(self, member: Membership, *, producer: str, through: int) -> None:
        """Done with a producer's blocks below a number."""
        self._gate.acknowledge(member, producer=producer, through=through)
        self._tell()

    async def leave(self, member: Membership) -> None:
        """Leave a group."""
        self._gate.leave(member)
        self._tell()

    async def fetch(self, keys: Sequence[RecordKey], selection: Selection) -> list[Any]:
        """Records by key, as arrays: of whole blocks' records those that were asked for, cut."""
        arrays = []
        for block, chosen in self._gate.holding(keys):
            array = await block.payload.reference
            arrays.append(await asyncio.to_thread(_cut, array, selection, keys=frozenset(chosen)))
        return arrays

    # -- the owner ---------------------------------------------------------------------------------------------------

    async def retire(self, below: int) -> int:
        """Let go of blocks of old weights."""
        retired = self._gate.retire(below=below)
        self._tell()
        return retired

    async def checkpoint(self, folder: str) -> int:
        """Save what is not acknowledged as a spool folder. Everybody waits meanwhile."""
        return await asyncio.to_thread(self._gate.checkpoint, Path(folder), self._spec)

    async def stats(self) -> DeliveryReport:
        """What was delivered and is held."""
        return self._gate.report()

    async def leap(self, seconds: float) -> None:
        """Move the plane's clock ahead, as a suspended machine would find it; leases end by it."""
        self._leap_s += seconds
        self._gate.tick()
        self._tell()

    async def node(self) -> str:
        """The node whose object store holds the blocks."""
        return str(ray.get_runtime_context().get_node_id())


def _array_of(held: _Held) -> Any:
    return memoryview(ray.get(held.reference) if held.array is None else held.array)


def _loaded(path: Path) -> _Held:
    return _Held(ray.put(np.fromfile(path, np.uint8)))


def _cut(array: Any, selection: Selection, *, keys: frozenset[RecordKey] | None = None) -> Any:
    """The records of a block that are wanted, cut, as a block of its own. Raises DataError for a bad one."""
    kept: list[RouteRecord] = []
    with opened(array, ReadPolicy(on_alarm="ignore")) as reader:
        header = reader.header
        for record in reader:
            cut = selection.cut(record) if keys is None or record.key in keys else None
            if cut is not None:
                kept.append(cut)
    spec = header.spec if selection.layer_ids is None else header.spec.select(selection.layer_ids)
    return stream_of(kept, spec, encoding=header.encoding)
