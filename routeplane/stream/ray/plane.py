"""The users' side: a plane is made, found by name, written to and read from. ``actor`` is the other side."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import ray.exceptions

from routeplane.errors import ErrorKind, RouteplaneError, TransportError, refused
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import choose_encoding
from routeplane.record.spec import RouteSpec
from routeplane.stream.addresses import yes_or_no
from routeplane.stream.brokered import BrokeredReader, BrokeredWriter
from routeplane.stream.delivery import Block, DeliveryReport, Membership, Session, Taken, Totals
from routeplane.stream.gate import PlaneOptions
from routeplane.stream.ray.actor import PlaneActor
from routeplane.stream.ray.objects import ObjectCodec, opened
from routeplane.stream.selection import Selection

if TYPE_CHECKING:
    from typing import Self

    from routeplane.record.interfaces import RouteTicket
    from routeplane.record.schema import Encoding
    from routeplane.stream.addresses import Address, SinkOptions, SourceOptions

__all__ = ["RayPlane", "RayReader", "RayWriter", "connect", "transport"]

# How long the plane is asked to wait at a time.
_ASK_S = 2.0
# How often a producer takes the way to the plane again, and how long it waits in between at first.
_RETRIES, _FIRST_RETRIES, _FIRST_PAUSE_S = 8, 3, 0.1
# Calls that wait count as calls: as many producers and consumers as this may wait at once.
_MAX_WAITING = 100_000


def connect(address: str, *, object_store_bytes: int | None = None) -> str:
    """Join a cluster, unless this process is in one; the address under which others join it.

    ``local`` starts one on this machine, without a dashboard, which ends with this process; ``object_store_bytes`` is
    its size.
    """
    if not ray.is_initialized():
        own = {"include_dashboard": False, "object_store_memory": object_store_bytes} if address == "local" else {}
        ray.init(address=address, log_to_driver=False, logging_level="error", **own)
    return str(ray.get_runtime_context().gcs_address)


def transport(address: Address) -> RayPlane:
    """``ray://name?namespace=...``: a plane that was made under that name. ``address=host:port`` joins that cluster
    first; ``linger=false`` is for a writer whose ``close`` does not wait. Raises UsageError, TransportError."""
    if set(address.query) - {"namespace", "address", "linger"} or address.port is not None or address.path.strip("/"):
        raise refused("ray://name with namespace=, address= and linger=", str(address))
    if "address" in address.query:
        connect(address.query["address"])
    plane = RayPlane.find(address.host, namespace=address.query.get("namespace"))
    return plane.lingering(yes_or_no(address, "linger"))


class RayPlane:
    """A handle on a plane, for ``new_stream`` and ``open_stream``; pickles, so that tasks and actors can be given it.

    Needs ``ray.init()``. ``linger``: a writer's ``close`` returns when nothing can be lost any more: at once with a
    spool, otherwise when every group acknowledged all of it.
    """

    def __init__(self, actor: Any, *, linger: bool = True) -> None:
        self._actor, self._linger = actor, linger

    @classmethod
    def create(
        cls, options: PlaneOptions, *, name: str | None = None, namespace: str | None = None, detached: bool = False
    ) -> RayPlane:
        """Start a plane on this node's cluster; it restarts where it dies.

        It lives as long as this handle, or, ``detached``, until ``stop``. Raises ValueError for a name that is taken.
        """
        settings: dict[str, Any] = {"num_cpus": 0, "max_concurrency": _MAX_WAITING, "max_restarts": -1}
        if name is not None:
            settings |= {"name": name, "namespace": namespace}
        if detached:
            settings["lifetime"] = "detached"
        return cls(ray.remote(PlaneActor).options(**settings).remote(options))

    @classmethod
    def find(cls, name: str, *, namespace: str | None = None) -> RayPlane:
        """The plane of a name. Raises TransportError where there is none."""
        try:
            return cls(ray.get_actor(name, namespace=namespace))
        except ValueError as error:
            raise TransportError(
                f"expected a plane named {name!r} in namespace {namespace!r}, got none ({error})",
                kind=ErrorKind.CONNECTION,
            ) from None

    def lingering(self, linger: bool) -> RayPlane:
        """The same plane, whose writers do or do not wait in ``close``."""
        return RayPlane(self._actor, linger=linger)

    def new_sink(self, spec: RouteSpec, options: SinkOptions) -> RayWriter:
        """A producer's end. Raises UsageError where one of its name is there; TransportError."""
        encoding = choose_encoding(options.encoding or "auto", spec)
        return RayWriter(
            _Port(self._actor, spec=spec, encoding=encoding),
            spec,
            codec=ObjectCodec(encoding),
            producer=options.producer or uuid.uuid4().hex,
            block_bytes=options.max_bytes,
            timeout_s=options.timeout_s,
            retries=_RETRIES,
            linger=self._linger,
        )

    def open_source(self, policy: ReadPolicy, options: SourceOptions) -> RayReader:
        """A consumer's end; waits for the first producer. Raises TransportError."""
        port = _Port(self._actor)
        spec, encoding = port.describe(options.timeout_s)
        return RayReader(port, spec, codec=ObjectCodec(encoding), policy=policy, options=options)

    def fetch(
        self,
        keys: Iterable[RecordKey],
        *,
        layer_ids: Sequence[int] | None = None,
        tokens: tuple[int, int] | None = None,
        policy: ReadPolicy | None = None,
    ) -> list[RouteRecord]:
        """Records that the plane holds, by key, cut there; in no order, and acknowledged by nobody.

        Raises DataError (ROUTES_MISSING) where one never came or has left: see ``PlaneOptions.keep``.
        """
        selection = Selection(layer_ids=None if layer_ids is None else tuple(layer_ids), tokens=tokens)
        arrays = _got(self._actor.fetch.remote(list(keys), selection))
        return [record for array in arrays for record in opened(array, policy or ReadPolicy())]

    def redeem(self, ticket: RouteTicket) -> RouteRecord:
        """The rows that a ticket names, as a record of these tokens. Raises as ``fetch``."""
        [record] = self.fetch([ticket.key], tokens=(ticket.start, ticket.stop))
        return record

    def checkpoint(self, folder: str | os.PathLike[str]) -> int:
        """Save what is not acknowledged, rows and all, as a spool folder on the plane's node; how many blocks.

        ``create(PlaneOptions(spool=folder))`` goes on from there. Raises UsageError for a folder that is there already.
        """
        return int(_got(self._actor.checkpoint.remote(os.path.abspath(folder))))

    def retire(self, *, below: int) -> int:
        """Let go of every block whose newest weights are below a version, acknowledged or not; how many."""
        return int(_got(self._actor.retire.remote(below)))

    def seal(self) -> None:
        """No further producer will come."""
        _got(self._actor.seal.remote())

    def stats(self) -> DeliveryReport:
        """What was delivered and is held."""
        report: DeliveryReport = _got(self._actor.stats.remote())
        return report

    def stop(self) -> None:
        """End the plane for good; what it held without a spool is gone."""
        ray.kill(self._actor, no_restart=True)


class RayWriter(BrokeredWriter):
    """The RouteSink of a producer."""


class RayReader(BrokeredReader):
    """The RouteSource of a consumer. On another node than the plane's, what is selected is cut by the plane."""

    def __init__(
        self, port: _Port, spec: RouteSpec, *, codec: ObjectCodec, policy: ReadPolicy, options: SourceOptions
    ) -> None:
        super().__init__(port, spec, codec=codec, policy=policy, options=options)
        self._plane = port
        self._is_cut = False

    def select(self, *, layer_ids: Sequence[int] | None = None, tokens: tuple[int, int] | None = None) -> Self:
        """See ``RouteSource.select``."""
        super().select(layer_ids=layer_ids, tokens=tokens)
        if not self._plane.is_near():
            self._plane.selection = Selection(layer_ids=self._layer_ids, tokens=self._tokens)
        return self

    def _records(self, block: Block) -> Iterator[RouteRecord]:
        self._is_cut = isinstance(block.payload, np.ndarray)
        count = self._counts.records
        yield from super()._records(block)
        if self._is_cut:
            outside = len(block.keys) - (self._counts.records - count)
            self._report = replace(self._report, outside=self._report.outside + outside)

    def _cut(self, record: RouteRecord) -> RouteRecord | None:
        return record if self._is_cut else super()._cut(record)


class _Port:
    """What ``BrokeredWriter`` and ``BrokeredReader`` ask of a broker, asked of an actor."""

    def __init__(self, actor: Any, *, spec: RouteSpec | None = None, encoding: Encoding = "plain") -> None:
        self._actor, self._spec, self._encoding = actor, spec, encoding
        self._owner, self._attached = uuid.uuid4().hex, False
        # The put that is under way: the next block is encoded meanwhile, and what it raises comes with the next call.
        self._under_way: Any = None
        self.selection = Selection()

    # -- producers ---------------------------------------------------------------------------------------------------

    def attach(self, producer: str, *, first: int = 0, before: Totals | None = None) -> Session:
        attempts = _RETRIES if self._attached else _FIRST_RETRIES
        self._attached, self._under_way = True, None
        session: Session = _patiently(
            lambda: self._actor.attach.remote(
                self._owner, producer, spec=self._spec, encoding=self._encoding, first=first, before=before
            ),
            attempts,
        )
        return session

    def put(self, session: Session, block: Block, *, timeout_s: float | None = None) -> Session:
        bare = replace(block, payload=None)  # which travels as an argument of its own, resolved by Ray
        session = self._arrived(session)
        self._ask_until(lambda wait_s: self._actor.reserve.remote(session, bare, wait_s=wait_s), "room", timeout_s)
        self._under_way = self._actor.put.remote(session, bare, payload=block.payload)
        return replace(session, next_sequence=max(session.next_sequence, block.sequence + 1))

    def _arrived(self, session: Session) -> Session:
        """The session once the put that is under way was answered."""
        if self._under_way is not None:
            answer, self._under_way = self._under_way, None
            session = _got(answer)
        return session

    def heartbeat(self, session: Session) -> Session:
        now: Session = _got(self._actor.heartbeat.remote(session))
        return now

    def wait_acknowledged(self, session: Session, *, through: int, timeout_s: float | None = None) -> Session:
        session = self._arrived(session)
        now: Session = self._ask_until(
            lambda wait_s: self._actor.acknowledged.remote(session, through=through, wait_s=wait_s),
            "acknowledgements",
            timeout_s,
        )
        return now

    def close(self, session: Session, *, totals: Totals) -> None:
        _got(self._actor.close.remote(self._arrived(session), totals=totals))

    def abort(self, session: Session) -> None:
        _got(self._actor.abort.remote(session))

    def disconnect(self, session: Session) -> None:
        _got(self._actor.disconnect.remote(session))

    def _ask_until(self, ask: Any, wanted: str, timeout_s: float | None) -> Any:
        """Ask again and again, the plane waiting each time, until it gives something."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            answer = _got(ask(min(_ASK_S, max(left, 0.0))))
            if answer:
                return answer
            if left <= 0:
                raise TransportError(f"expected {wanted} within {timeout_s} s, got none", kind=ErrorKind.TIMED_OUT)

    # -- consumers ---------------------------------------------------------------------------------------------------

    def describe(self, timeout_s: float | None) -> tuple[RouteSpec, Encoding]:
        """Spec and encoding of the stream, once a producer brought them."""
        _patiently(lambda: self._actor.describe.remote(0.0), _RETRIES)  # it may be restarting
        spec, encoding = self._ask_until(lambda wait_s: self._actor.describe.remote(wait_s), "a producer", timeout_s)
        return spec, encoding

    def is_near(self) -> bool:
        """Whether the plane's objects lie on this node, where reading a part of one reads no more than that part."""
        return bool(_got(self._actor.node.remote()) == ray.get_runtime_context().get_node_id())

    def join(self, group: str, consumer: str, *, cursor: Mapping[str, int] | None = None) -> Membership:
        member: Membership = _got(self._actor.join.remote(group, consumer, cursor=cursor))
        return member

    def take(self, member: Membership, *, max_blocks: int = 1, timeout_s: float | None = None) -> Taken:
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            taken: Taken = _got(
                self._actor.take.remote(
                    member, max_blocks=max_blocks, wait_s=min(_ASK_S, max(left, 0.0)), selection=self.selection
                )
            )
            if taken.blocks or taken.progress.ended or left <= 0:
                return taken

    def acknowledge(self, member: Membership, *, producer: str, through: int) -> None:
        _got(self._actor.acknowledge.remote(member, producer=producer, through=through))

    def leave(self, member: Membership) -> None:
        _got(self._actor.leave.remote(member))


def _patiently(ask: Callable[[], Any], attempts: int) -> Any:
    """The answer of a call that may be made again; a plane takes a moment to restart."""
    for attempt in range(attempts - 1):
        try:
            return _got(ask())
        except TransportError as error:
            if error.kind != ErrorKind.CONNECTION:
                raise
            time.sleep(_FIRST_PAUSE_S * 2**attempt)
    return _got(ask())


def _got(answer: Any) -> Any:
    """The answer of a call: what the plane raised is raised here as it was; a plane that died is a TransportError."""
    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RouteplaneError):
            raise error.cause from None
        raise
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
        raise TransportError(
            f"expected the plane to answer, got {str(error)[:200]!r}: it died, and restarts unless it was stopped. "
            "Open the stream again under the same name; what was not acknowledged is sent again",
            kind=ErrorKind.CONNECTION,
        ) from error
