"""A broker whose callers may not hear from it: requests that are lost, answers that are, services that are killed.

One thread, no wire: a call is lost by its number, before or after it took effect, and a kill falls between two lines of
the journal. What a kill leaves is a copy of the folder at that line.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from routeplane.errors import ErrorKind, TransportError
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.stream import open_stream
from routeplane.stream.addresses import SinkOptions, SourceOptions
from routeplane.stream.blocks import IpcCodec
from routeplane.stream.brokered import BrokeredReader, BrokeredWriter
from routeplane.stream.delivery import Block, Membership, Session, Taken, Totals
from routeplane.stream.gate import Gate, PlaneOptions
from routeplane.testing.contracts.samples import SPEC, sample

__all__ = ["Loss", "LossyPlane", "read_all"]

Result = TypeVar("Result")

#: What is lost of a call: it never came, its answer never came, or the service was killed before it gave one.
Loss = Literal["request", "answer", "service"]

# A break at every call of this many in a row is more than a writer has to endure.
_RETRIES = 8


class _Killed(BaseException):
    """The service is gone; nothing of it may handle this."""


class LossyPlane:
    """A Transport over a folder, or without one. ``losses``: number of a call -> what is lost of it. ``kills``: numbers
    of journal lines after which the service is killed; the next call finds another one over what was left.

    ``calls``, ``lines``: how many there were. ``while_waiting``: what others do before a producer asks whether it was
    acknowledged. ``close`` it.
    """

    def __init__(
        self, folder: Path | None, *, losses: Mapping[int, Loss] | None = None, kills: frozenset[int] = frozenset()
    ) -> None:
        self._folder, self._losses, self._kills = folder, losses or {}, kills
        self.while_waiting: Callable[[], None] = lambda: None
        self.calls = self.lines = 0
        self.gate = self._started(folder)

    def _started(self, folder: Path | None) -> Gate:
        options = PlaneOptions(groups=("default", "audit"), spool=None if folder is None else str(folder))
        gate = Gate(options, to_bytes=memoryview, load=lambda path: path)
        if folder is None:
            return gate
        journal: Any = gate._spool._journal  # type: ignore[union-attr]
        append = journal.append

        def appending(entry: Mapping[str, Any]) -> None:
            append(entry)
            self.lines += 1
            if self.lines - 1 in self._kills:
                self._leave()
                raise _Killed

        journal.append = appending
        return gate

    def _leave(self) -> None:
        assert self._folder is not None
        left = self._folder.with_name(f"{self._folder.name}+")
        shutil.copytree(self._folder, left)
        self._folder = left

    def _restart(self) -> None:
        self.gate.close_spool()
        self.gate = self._started(self._folder)

    def call(self, work: Callable[[Gate], Result]) -> Result:
        """A call over the wire. Raises TransportError where it is lost."""
        lost = self._losses.get(self.calls)
        self.calls += 1
        if lost == "request":
            raise _cut()
        try:
            result = work(self.gate)
        except _Killed:
            self._restart()
            raise _cut() from None
        if lost == "service":
            self._restart()
        if lost is not None:
            raise _cut()
        return result

    def new_sink(self, spec: RouteSpec, options: SinkOptions) -> BrokeredWriter:
        """A producer's end, two records of a sample's size to a block."""
        return BrokeredWriter(
            _Port(self),
            spec,
            codec=IpcCodec(spec, encoding="plain"),
            producer=options.producer or "p",
            block_bytes=2 * sample(0).nbytes,
            timeout_s=0.0,
            retries=_RETRIES,
            linger=True,
        )

    def open_source(self, policy: ReadPolicy, options: SourceOptions) -> BrokeredReader:
        """A consumer's end."""
        return BrokeredReader(_Port(self), SPEC, policy=policy, codec=IpcCodec(SPEC, encoding="plain"), options=options)

    def close(self) -> None:
        """Let go of the folder."""
        self.gate.close_spool()


def _cut() -> TransportError:
    return TransportError("expected an answer, got none", kind=ErrorKind.CONNECTION)


class _Port:
    """What ``BrokeredWriter`` and ``BrokeredReader`` ask of a broker, asked over the wire."""

    def __init__(self, plane: LossyPlane) -> None:
        self._call, self._wait, self._owner = plane.call, plane.while_waiting, f"writer-{id(self)}"

    def attach(self, producer: str, *, first: int = 0, before: Totals | None = None) -> Session:
        for _ in range(_RETRIES):
            try:
                return self._call(lambda gate: gate.attach_as(self._owner, producer, first=first, before=before))
            except TransportError:
                continue
        raise _cut()

    def put(self, session: Session, block: Block, *, timeout_s: float | None = None) -> Session:
        bare = replace(block, payload=None)
        assert self._call(lambda gate: gate.reserve(session, bare, timeout_s=timeout_s))
        return self._call(lambda gate: gate.put(session, block, timeout_s=timeout_s))

    def heartbeat(self, session: Session) -> Session:
        return self._call(lambda gate: gate.heartbeat(session))

    def wait_acknowledged(self, session: Session, *, through: int, timeout_s: float | None = None) -> Session:
        for _ in range(64):
            self._wait()
            try:
                return self._call(lambda gate: gate.wait_acknowledged(session, through=through, timeout_s=0.0))
            except TransportError as error:
                if error.kind is not ErrorKind.TIMED_OUT:
                    raise
        raise AssertionError("expected an acknowledgement within 64 questions")

    def close(self, session: Session, *, totals: Totals) -> None:
        self._call(lambda gate: gate.close(session, totals=totals))

    def abort(self, session: Session) -> None:
        self._call(lambda gate: gate.abort(session))

    def disconnect(self, session: Session) -> None:
        self._call(lambda gate: gate.disconnect(session))

    def join(self, group: str, consumer: str, *, cursor: Mapping[str, int] | None = None) -> Membership:
        return self._call(lambda gate: gate.join(group, consumer, cursor=cursor))

    def take(self, member: Membership, *, max_blocks: int = 1, timeout_s: float | None = None) -> Taken:
        return self._call(lambda gate: gate.take(member, max_blocks=max_blocks, timeout_s=timeout_s))

    def acknowledge(self, member: Membership, *, producer: str, through: int) -> None:
        self._call(lambda gate: gate.acknowledge(member, producer=producer, through=through))

    def leave(self, member: Membership) -> None:
        self._call(lambda gate: gate.leave(member))


def read_all(plane: LossyPlane, group: str) -> tuple[list[RouteRecord], int]:
    """All records of producer ``p``, as a consumer that keeps whole blocks, and says so when it comes back; and how
    often it had to. Raises what came after the end."""
    came: list[RouteRecord] = []
    for times in range(64):
        del came[len(came) // 2 * 2 :]  # half of a block comes again
        ended = False
        try:
            cursor = {"p": len(came) // 2}
            with open_stream(plane, group=group, consumer="c", cursor=cursor, timeout_s=0.0) as reader:
                came.extend(reader)
                ended = reader.report().complete
            return came, times
        except TransportError as error:
            if ended or error.kind is not ErrorKind.CONNECTION:
                raise
    raise AssertionError("expected an end within 64 connections")
