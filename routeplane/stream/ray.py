"""The carrier ``ray``: sealed blocks as objects of Ray, held by one small actor, the place.

A writer puts a block into the object store of its node and hands the reference to the place. A reference handed over
dies with the process that made it, so the place has a task read the block and return it: what a task returns is owned
by its caller. From then on the block outlives its producer. It is lost with the place's actor, or with the node that
the block lies on. The place also keeps numbers, ends and acknowledged positions, in memory.

Who lives is a question of processes, not of time: writers and readers are known by node, process number and start time.
Readers copy nothing: Ray maps blocks read-only, and an object cannot be changed once it is sealed.

``place`` is a name; its actor is detached, and lives until ``delete_place`` or the end of the cluster. A block is in
the object store when ``flush`` returns, on no disk: ``limits.sync`` means nothing here.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from routeplane.errors import DataError, ErrorKind, RouteplaneError, TransportError
from routeplane.record.interfaces import BlockName, Position
from routeplane.record.record import RouteRecord
from routeplane.record.schema import Encoding
from routeplane.stream import blocks
from routeplane.stream.block_reader import BlockPart, BlockStore, Carrier, cut_block, sealed_cut

__all__ = ["delete_place", "open_reader", "open_writer"]

#: The namespace of places; actors are found in it by the place's name, from every job of the cluster.
NAMESPACE = "routeplane"
#: Seconds that a call of the place may take before it counts as lost.
_CALL_SECONDS = 60.0
#: Seconds that a block may take to come to the place; less, so that others' calls do not count as lost meanwhile.
_OWN_SECONDS = 30.0


def delete_place(place: str) -> None:
    """End a place's actor and free its blocks. A place that is not there is not an error."""
    try:
        actor = ray.get_actor(place, namespace=NAMESPACE)
    except ValueError:
        return
    ray.kill(actor, no_restart=True)


# -- processes ---------------------------------------------------------------------------------------------------------


class _Owner(NamedTuple):
    """A process that holds a name: its node, its number, its start in clock ticks since boot; and which of its ends."""

    node: str
    pid: int
    started: int
    token: str

    @classmethod
    def here(cls) -> _Owner:
        return cls(ray.get_runtime_context().get_node_id(), os.getpid(), _started(os.getpid()), secrets.token_hex(8))

    def is_alive(self) -> bool:
        """Whether the process still runs; asked on its node."""
        if self.node == ray.get_runtime_context().get_node_id():
            return _started(self.pid) == self.started
        place = NodeAffinitySchedulingStrategy(self.node, soft=False)
        try:
            started = ray.get(_started_task.options(scheduling_strategy=place).remote(self.pid), timeout=_CALL_SECONDS)
        except RayError:  # the node is gone
            return False
        return bool(started == self.started)


def _started(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    # the name stands in parentheses and may hold any character; the fields behind it are numbered from 3 (proc(5))
    fields = text.rpartition(")")[2].split()
    return -1 if fields[0] in ("Z", "X") else int(fields[19])


# -- tasks -------------------------------------------------------------------------------------------------------------


def _own(block: Any) -> tuple[Any, bool]:
    """A block, returned to the caller of this task, who owns it then; and a value that says that it came."""
    return block, True


def _cut_block(block: Any, leans: list[tuple[int, Any]], part: str, encoding: Encoding) -> Any:
    others = dict(leans)
    cut = sealed_cut(
        pa.py_buffer(block),
        BlockPart.from_json(part),
        read=lambda number: pa.py_buffer(ray.get(others[number])),
        encoding=encoding,
    )
    return np.frombuffer(cut, dtype=np.uint8)


def _got(reference: Any, what: str) -> Any:
    """The value behind a reference. Raises TransportError (CONNECTION) where it is lost, and errors of ours as such."""
    try:
        return ray.get(reference, timeout=_CALL_SECONDS)
    except GetTimeoutError as error:
        raise TransportError(f"expected {what} within {_CALL_SECONDS} s, got none", kind=ErrorKind.TIMED_OUT) from error
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RouteplaneError):
            raise cause from error
        raise TransportError(
            f"expected {what}, got {type(error).__name__}: its holder or its node is gone ({error})",
            kind=ErrorKind.CONNECTION,
        ) from error


_started_task: Any = ray.remote(num_cpus=0)(_started)
_own_task: Any = ray.remote(num_cpus=0, num_returns=2, max_retries=0)(_own)
_cut_task: Any = ray.remote(num_cpus=0, max_retries=1)(_cut_block)


# -- the place ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Name:
    """A name of the place, and the process that holds it."""

    owner: _Owner | None = None

    def is_held(self) -> bool:
        return self.owner is not None and self.owner.is_alive()


@dataclass(kw_only=True)
class _Producer(_Name):
    """What the place knows of one producer."""

    end: Literal["closed", "aborted"] | None = None
    next: int = 0
    references: dict[int, Any] = field(default_factory=dict)
    retention: blocks.Retention = field(default_factory=lambda: blocks.Retention(max_bytes=0))


@dataclass(kw_only=True)
class _Group(_Name):
    """What the place knows of one group."""

    position: Position


class _PlaceActor:
    """The actor of a place. Its calls come one at a time; what it refuses, the caller's call raises."""

    def __init__(self, place: str) -> None:
        self._place = f"place {place!r}"
        self._manifest: blocks.Manifest | None = None
        self._producers: dict[str, _Producer] = {}
        self._groups: dict[str, _Group] = {}

    def manifest(self) -> blocks.Manifest | None:
        return self._manifest

    def open_producer(self, declared: blocks.Manifest, name: str, owner: _Owner) -> blocks.Manifest:
        """Take a producer's name; what the first opener declared is the place's manifest."""
        if self._manifest is None:
            self._manifest, start = declared, Position(place=declared.place)
            self._groups = {group: _Group(position=start) for group in declared.groups}
        self._manifest.require_same(declared)
        held = self._producers.setdefault(name, _Producer())
        if held.is_held():
            raise blocks.producer_taken(name, self._place)
        if held.end == "closed":
            raise blocks.producer_closed(name, self._place)
        held.owner, held.end = owner, None
        return self._manifest

    def open_group(self, name: str, owner: _Owner) -> Position:
        """Take a declared group; what it acknowledged."""
        held = self._groups[name]
        if held.is_held():
            raise blocks.group_taken(name, self._place)
        held.owner = owner
        return held.position

    def release(self, owner: _Owner) -> None:
        """Free what is held."""
        for held in (*self._producers.values(), *self._groups.values()):
            held.owner = None if held.owner == owner else held.owner

    def publish(
        self, name: str, owner: _Owner, block: tuple[Any, int], leans: Sequence[int] | None, limit: int
    ) -> tuple[int, blocks.Retention] | None:
        """Own a block, given by its reference and its size, under the next number; None while it has no space.

        Ray resolves no reference in a tuple.
        """
        producer, (reference, size) = self._producers[name], block
        if producer.owner != owner:
            raise blocks.producer_taken(name, self._place)
        held = producer.retention
        held.max_bytes = limit
        below = min(group.position.number(name) for group in self._groups.values())
        if not held.make_space(size, leans, below=below, delete=producer.references.pop):
            return None
        producer.references[producer.next] = self._owned(reference, producer)
        held.add(producer.next, size, leans=leans)
        producer.next += 1
        return producer.next - 1, held

    def _owned(self, block: Any, producer: _Producer) -> Any:
        """A reference of this process to a block.

        A task whose argument's owner was killed may wait for ever, and with it every call of the place: it is cancelled
        once the producer is dead, or took too long.
        """
        owned, came = _own_task.remote(block)
        end = time.monotonic() + _OWN_SECONDS
        while not ray.wait([came], timeout=1.0)[0]:
            if not producer.is_held() or time.monotonic() >= end:
                ray.cancel(came, force=True)
                raise TransportError(
                    "expected a block of a living producer, got none in time", kind=ErrorKind.TIMED_OUT
                )
        ray.get(came)  # raises where the block is lost
        return owned

    def end(self, name: str, owner: _Owner, how: Literal["closed", "aborted"]) -> None:
        if self._producers[name].owner == owner:
            self._producers[name].end = how

    def producers(self) -> list[str]:
        return sorted(self._producers)

    def look(self, name: str, number: int) -> tuple[blocks.BlockState, list[tuple[int, Any]]]:
        """What can be said of a block; where it is sealed, its reference and behind it those of what it leans on.

        Ray resolves no reference in a list.
        """
        producer = self._producers.get(name)
        if producer is None:
            return "waiting", []
        if number in producer.references:
            numbers = (number, *producer.retention.leans.get(number, ()))
            return "sealed", [(each, producer.references[each]) for each in numbers]
        if number < producer.next:
            return "expired", []
        return producer.end or ("waiting" if producer.is_held() else "vanished"), []

    def last_number(self, name: str) -> int:
        return self._producers.get(name, _Producer()).next

    def save_position(self, name: str, owner: _Owner, position: Position) -> None:
        """Store what a group acknowledged."""
        if self._groups[name].owner != owner:
            raise blocks.group_taken(name, self._place)
        self._groups[name].position = position


class _Place:
    """A place's actor from outside: calls that raise errors of ours. Pickles."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self.name = actor, name

    @classmethod
    def start(cls, name: str) -> _Place:
        """The place of a name, started where there is none."""
        options = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
        actor = ray.remote(_PlaceActor).options(num_cpus=0, max_restarts=0, max_task_retries=0, **options).remote(name)
        return cls(actor, name)

    @classmethod
    def found(cls, name: str, timeout_s: float | None) -> _Place:
        """The place of a name, once it is there and declared. Raises TransportError (TIMED_OUT)."""

        def look() -> _Place | None:
            try:
                place = cls(ray.get_actor(name, namespace=NAMESPACE), name)
            except ValueError:
                return None
            return None if place.call("manifest") is None else place

        return blocks.wait_until(
            look, timeout_s, expected=lambda: f"the place {name!r}", warn_after_s=blocks.WARN_AFTER_S
        )

    def __str__(self) -> str:
        return f"place {self.name!r}"

    def call(self, method: str, *arguments: Any) -> Any:
        """The answer of the actor."""
        return _got(getattr(self._actor, method).remote(*arguments), f"an answer of the {self}")


# -- writers and readers -----------------------------------------------------------------------------------------------


class _Slot(blocks.ProducerSlot):
    """One producer's name in a place, held by this process."""

    def __init__(self, place: str, declared: blocks.Manifest, *, producer: str, limits: blocks.BlockLimits) -> None:
        self._place, self._owner, self._producer, self._limits = _Place.start(place), _Owner.here(), producer, limits
        self.retention = blocks.Retention(max_bytes=limits.max_bytes)
        self.manifest = self._place.call("open_producer", declared, producer, self._owner)

    def publish(self, block: blocks.SealedBlock) -> BlockName:
        data = np.frombuffer(block.to_buffer(), dtype=np.uint8)
        held = (ray.put(data), data.nbytes)
        number, self.retention = blocks.wait_until(
            lambda: self._place.call("publish", self._producer, self._owner, held, block.leans, self._limits.max_bytes),
            self._limits.timeout_s,
            expected=lambda: blocks.space_for(data.nbytes, groups=self.manifest.groups, limits=self._limits),
        )
        return BlockName(self._producer, number)

    def end(self, how: Literal["closed", "aborted"]) -> None:
        self._place.call("end", self._producer, self._owner, how)

    def release(self) -> None:
        self._place.call("release", self._owner)


class _Store(BlockStore):
    """The blocks of a place, for one group."""

    def __init__(self, place: str, *, group: str, timeout_s: float | None) -> None:
        self._place, self._group = _Place.found(place, timeout_s), group
        self._owner: _Owner | None = _Owner.here()
        self._seen: tuple[BlockName, list[tuple[int, Any]]] | None = None  # what ``state`` saw last
        self.manifest = self._place.call("manifest")
        self.manifest.require_group(group)
        self._position: Position = self._place.call("open_group", group, self._owner)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_owner": None, "_seen": None}

    def producers(self) -> list[str]:
        return list(self._place.call("producers"))

    def state(self, name: BlockName) -> blocks.BlockState:
        state: blocks.BlockState
        state, held = self._place.call("look", *name)
        self._seen = (name, held)
        return state

    def last_number(self, producer: str) -> int:
        return int(self._place.call("last_number", producer))

    def _references(self, name: BlockName) -> list[tuple[int, Any]]:
        """Those of a block and of what it leans on; what was seen serves one read, without a further call."""
        seen, self._seen = self._seen, None
        held: list[tuple[int, Any]] = seen[1] if seen and seen[0] == name else self._place.call("look", *name)[1]
        if not held:
            raise DataError(f"expected block {name}, got none", kind=ErrorKind.EXPIRED)
        return held

    def read(self, name: BlockName) -> pa.Buffer:
        """Mapped read-only from the object store of this node."""
        return pa.py_buffer(_got(self._references(name)[0][1], f"block {name}"))

    def cut(self, name: BlockName, part: BlockPart) -> list[RouteRecord]:
        """A task on the node where the block lies verifies it whole, and sends what is asked for under new checksums,
        which are verified here: that alone crosses the network, and comes into this process.
        """
        (_, block), *leans = self._references(name)
        cut = _cut_task.remote(block, leans, part.to_json(), self.manifest.encoding)
        data = pa.py_buffer(_got(cut, f"the cut of block {name}"))
        return cut_block(data, BlockPart(keys=part.keys), read=self.reads(name))

    def load_position(self) -> Position:
        return self._position

    def save_position(self, position: Position) -> None:
        self._place.call("save_position", self._group, self._owner, position)

    def release(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            self._place.call("release", owner)


_CARRIER = Carrier(slot=_Slot, store=_Store)
open_writer, open_reader = _CARRIER.open_writer, _CARRIER.open_reader
