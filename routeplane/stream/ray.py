"""The carrier ``ray``: sealed blocks as objects of Ray, held by one small actor, the place.

A writer puts a block into the object store of its node and hands the reference to the place. A reference handed over
dies with the process that made it, so the place has a task read the block and return it: what a task returns is owned
by its caller. From then on the block outlives its producer. It is lost with the place's actor, or with the node that
the block lies on. The place also keeps numbers, ends and acknowledged positions, in memory.

Who lives is a question of processes, not of time: writers and readers are known by node, process number and start time.
Readers copy nothing: Ray maps blocks read-only, and an object cannot be changed once it is sealed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from routeplane.errors import DataError, ErrorKind, TransportError, UsageError
from routeplane.record.interfaces import BlockName, Position
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.schema import Encoding
from routeplane.record.spec import RouteSpec
from routeplane.stream import blocks
from routeplane.stream.block_reader import BlockPart, BlockReader, BlockStore, cut_block, sealed_cut

__all__ = ["delete_place", "open_reader", "open_writer"]

#: The namespace of places; actors are found in it by the place's name, from every job of the cluster.
NAMESPACE = "routeplane"
#: Seconds that a call of the place may take before it counts as lost.
_CALL_SECONDS = 60.0
#: Seconds that a block may take to come to the place; less, so that others' calls do not count as lost meanwhile.
_OWN_SECONDS = 30.0


def open_writer(
    place: str,
    spec: RouteSpec,
    *,
    run: str,
    producer: str,
    groups: Sequence[str] = (blocks.DEFAULT_GROUP,),
    encoding: Literal["plain", "narrow", "auto"] = "auto",
    limits: blocks.BlockLimits = blocks.DEFAULT_LIMITS,
) -> blocks.BlockWriter:
    """Open a place as one of its producers; the first opener starts its actor.

    Args:
        place: name of the place; its actor is detached, and lives until ``delete_place`` or the end of the cluster.
        run, producer, groups, encoding, limits: as ``stream.folder.open_writer``. A block is in the object store when
            ``flush`` returns, on no disk: ``limits.sync`` means nothing here.

    Returns a RouteSink that the caller closes. Raises UsageError (PRODUCER_TAKEN for a name that is in use), SpecError
    for a place of another geometry, TransportError where the place's actor is gone.
    """
    declared = blocks.Manifest.of(spec, run=run, groups=groups, encoding=encoding)
    blocks.check_name(producer, "producer")
    actor = _Place.start(place)
    found = blocks.Manifest.from_document(actor.call("declare", declared.to_document()))
    found.require_same(declared)
    return blocks.BlockWriter(_Slot(actor, producer, limits=limits, groups=found.groups), found, limits=limits)


def open_reader(
    place: str,
    *,
    producers: int | Sequence[str],
    group: str = blocks.DEFAULT_GROUP,
    follow: bool = True,
    policy: ReadPolicy = blocks.DEFAULT_POLICY,
    options: blocks.ReadOptions = blocks.DEFAULT_OPTIONS,
) -> BlockReader:
    """Open a place as the one reader of a group; waits for the place where it follows.

    Args: as ``stream.folder.open_reader``; ``place`` is the name.

    Returns a RouteSource and BlockSource that the caller closes. Raises UsageError (GROUP_TAKEN for a group that has a
    living reader), TransportError (TIMED_OUT; CONNECTION where the actor is gone).
    """
    store = _Store(_Place.found(place, options.timeout_s if follow else 0.0), group=group)
    return BlockReader(store, producers=producers, follow=follow, policy=policy, options=options)


def delete_place(place: str) -> None:
    """End a place's actor and free its blocks. A place that is not there is not an error."""
    try:
        actor = ray.get_actor(place, namespace=NAMESPACE)
    except ValueError:
        return
    ray.kill(actor, no_restart=True)


# -- processes ---------------------------------------------------------------------------------------------------------


class _Owner(NamedTuple):
    """A process that holds a name: its node, its number, and its start in clock ticks since boot."""

    node: str
    pid: int
    started: int

    @classmethod
    def here(cls) -> _Owner:
        return cls(ray.get_runtime_context().get_node_id(), os.getpid(), _started(os.getpid()))

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


def _own(block: Any) -> tuple[Any, int]:
    """A block, returned to the caller of this task, who owns it then; and its size, which says that it came."""
    return block, len(block)


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
        if isinstance(cause, DataError | UsageError | TransportError):
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
    """A name of the place, the process that holds it, and how it ended."""

    owner: _Owner | None = None
    token: str = ""
    end: Literal["closed", "aborted"] | None = None

    def is_held(self) -> bool:
        return self.owner is not None and self.owner.is_alive()


@dataclass(kw_only=True)
class _Producer(_Name):
    """What the place knows of one producer."""

    next: int = 0
    references: dict[int, Any] = field(default_factory=dict)
    retention: blocks.Retention = field(default_factory=lambda: blocks.Retention(max_bytes=0))


@dataclass(kw_only=True)
class _Group(_Name):
    """What the place knows of one group."""

    position: str | None = None

    def acknowledged(self, producer: str) -> int:
        return 0 if self.position is None else Position.from_json(self.position).number(producer)


class _PlaceActor:
    """The actor of a place. Every answer is plain values; refusals come as answers, so that callers word the errors."""

    def __init__(self) -> None:
        self._manifest: Mapping[str, Any] | None = None
        self._producers: dict[str, _Producer] = {}
        self._groups: dict[str, _Group] = {}

    def declare(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """The manifest of the first opener."""
        if self._manifest is None:
            self._manifest = document
            self._groups = {group: _Group() for group in document["groups"]}
        return self._manifest

    def manifest(self) -> Mapping[str, Any] | None:
        return self._manifest

    def _name(self, kind: Literal["producer", "group"], name: str) -> _Name:
        return self._producers.setdefault(name, _Producer()) if kind == "producer" else self._groups[name]

    def open(self, kind: Literal["producer", "group"], name: str, owner: _Owner, token: str) -> str:
        """Take a name: ``open``, ``taken`` or ``closed``."""
        held = self._name(kind, name)
        if held.is_held():
            return "taken"
        if held.end == "closed":
            return "closed"
        held.owner, held.token, held.end = owner, token, None
        return "open"

    def release(self, kind: Literal["producer", "group"], name: str, token: str) -> None:
        held = self._name(kind, name)
        if held.token == token:
            held.owner, held.token = None, ""

    def publish(
        self, name: str, token: str, holder: list[Any], leans: Sequence[int] | None, limit: int
    ) -> tuple[int, blocks.Retention] | None:
        """Own a block under the next number; None while the producer's bytes are above the limit, -1 for a stranger."""
        producer = self._producers[name]
        held = producer.retention
        if producer.token != token:
            return -1, held
        (owned, size), held.max_bytes = self._owned(holder[0], producer), limit
        below = min(group.acknowledged(name) for group in self._groups.values())
        if not held.make_space(size, leans, below=below, delete=producer.references.pop):
            return None
        producer.references[producer.next] = owned
        held.add(producer.next, size, leans=leans)
        producer.next += 1
        return producer.next - 1, held

    def _owned(self, block: Any, producer: _Producer) -> tuple[Any, int]:
        """A reference of this process to a block, and its size.

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
        return owned, int(ray.get(came))

    def end(self, name: str, token: str, how: Literal["closed", "aborted"]) -> None:
        if self._producers[name].token == token:
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

    def load_position(self, name: str) -> str | None:
        return self._groups[name].position

    def save_position(self, name: str, token: str, position: str) -> bool:
        """Store what a group acknowledged; False for a reader that does not hold the group."""
        group = self._groups[name]
        if group.token == token:
            group.position = position
        return group.token == token


class _Place:
    """A place's actor from outside: calls that raise errors of ours. Pickles."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self.name = actor, name

    @classmethod
    def start(cls, name: str) -> _Place:
        """The place of a name, started where there is none."""
        options = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
        actor = ray.remote(_PlaceActor).options(num_cpus=0, max_restarts=0, max_task_retries=0, **options).remote()
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

    def __init__(self, place: _Place, producer: str, *, limits: blocks.BlockLimits, groups: Sequence[str]) -> None:
        self._place, self._producer, self._limits, self._groups = place, producer, limits, groups
        self._token = secrets.token_hex(8)
        self.retention = blocks.Retention(max_bytes=limits.max_bytes)
        answer = place.call("open", "producer", producer, _Owner.here(), self._token)
        if answer != "open":
            raise (blocks.producer_taken if answer == "taken" else blocks.producer_closed)(producer, place)

    def publish(self, block: blocks.SealedBlock) -> BlockName:
        data = np.frombuffer(block.to_buffer(), dtype=np.uint8)
        arguments = (self._producer, self._token, [ray.put(data)], block.leans, self._limits.max_bytes)
        number, self.retention = blocks.wait_until(
            lambda: self._place.call("publish", *arguments),
            self._limits.timeout_s,
            expected=lambda: blocks.space_for(data.nbytes, groups=self._groups, limits=self._limits),
        )
        if number < 0:
            raise blocks.producer_taken(self._producer, self._place)
        return BlockName(self._producer, number)

    def end(self, how: Literal["closed", "aborted"]) -> None:
        self._place.call("end", self._producer, self._token, how)

    def release(self) -> None:
        self._place.call("release", "producer", self._producer, self._token)


class _Store(BlockStore):
    """The blocks of a place, for one group."""

    def __init__(self, place: _Place, *, group: str) -> None:
        self._place, self._group = place, group
        self._token: str | None = secrets.token_hex(8)
        self._seen: tuple[BlockName, list[tuple[int, Any]]] | None = None  # what ``state`` saw last
        self.manifest = blocks.Manifest.from_document(place.call("manifest"))
        self.manifest.require_group(group)
        if place.call("open", "group", group, _Owner.here(), self._token) != "open":
            raise blocks.group_taken(group, place)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_token": None, "_seen": None}

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
        text = self._place.call("load_position", self._group)
        return Position(place=self.manifest.place) if text is None else Position.from_json(text)

    def save_position(self, position: Position) -> None:
        if not self._place.call("save_position", self._group, self._token, position.to_json()):
            raise blocks.group_taken(self._group, self._place)

    def release(self) -> None:
        if self._token is not None:
            self._place.call("release", "group", self._group, self._token)
            self._token = None
