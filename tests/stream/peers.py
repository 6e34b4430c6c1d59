"""The other side in a process of its own: producers and consumers that a test kills, and a wire that it cuts.

Functions are top-level, so that ``spawn`` finds them. Record ``i`` is ``sample(i)`` of the contract.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from routeplane.stream import new_stream, open_stream
from routeplane.testing.contracts.samples import SPEC, sample

__all__ = ["CuttingWire", "consume", "killed", "produce", "start"]

_SPAWN = multiprocessing.get_context("spawn")


def start(work: Callable[..., None], *args: Any, **options: Any) -> Any:
    """A process that runs ``work``; joined by the caller."""
    process = _SPAWN.Process(target=work, args=args, kwargs=options, daemon=True)
    process.start()
    return process


def killed(process: Any) -> bool:
    """Whether a process ended by SIGKILL; waits for its end."""
    process.join(60)
    return bool(process.exitcode == -signal.SIGKILL)


def produce(place: Any, indices: Sequence[int], *, producer: str, die_before: int | None = None) -> None:
    """Write records, two to a block; SIGKILL before record ``die_before`` is written, whatever is held then."""
    with new_stream(place, SPEC, producer=producer, max_bytes=2 * sample(0).nbytes) as sink:
        for index in indices:
            if index == die_before:
                os.kill(os.getpid(), signal.SIGKILL)
            sink.write(sample(index))


def consume(place: Any, log: Path, *, consumer: str, acknowledge_after: int, die_after: int) -> None:
    """Read records, each noted in ``log`` once it is acknowledged; SIGKILL after ``die_after`` were read."""
    held: list[str] = []
    opened: Any = open_stream(place, consumer=consumer, acknowledge="manual")
    with opened as reader:
        for count, record in enumerate(reader, 1):
            held.append(record.sample_id)
            if count == acknowledge_after:
                # the last one's block may not be all read, and then is not acknowledged
                reader.acknowledge()
                log.write_text("\n".join(held[:-1]))
            if count == die_after:
                os.kill(os.getpid(), signal.SIGKILL)


# RFC 9113: what a client says first, and the head of a frame, which begins with the length of the rest.
_PREFACE_BYTES, _FRAME_HEAD_BYTES = 24, 9


class CuttingWire:
    """A TCP proxy on loopback that cuts its connections: the i-th after ``cuts[i]`` bytes in either direction;
    later ones never.

    ``frames``: whose HTTP/2 frames are counted instead of bytes, ``client`` or ``server``, so that a cut falls between
    two messages. ``counted``: how many frames the first connection had from there.
    """

    def __init__(self, port: int, cuts: Sequence[int], *, frames: str | None = None) -> None:
        self._to, self._cuts, self._frames = port, list(cuts), frames
        self.counted = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.made = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                limit = self._cuts[self.made] if self.made < len(self._cuts) else None
                self.made += 1
                server = socket.create_connection(("127.0.0.1", self._to))
                self._open += [client, server]
                for name, source, target in (("client", client, server), ("server", server, client)):
                    if self._frames is None:
                        pump, bound = self._pump, limit
                    elif self._frames == name:
                        pump, bound = self._pump_frames, limit
                    else:
                        pump, bound = self._pump, None
                    threading.Thread(target=pump, args=(source, target, bound), daemon=True).start()

    def _pump_frames(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        first, passed = self.made == 1, 0
        with contextlib.suppress(OSError), source.makefile("rb") as said:
            if self._frames == "client":
                target.sendall(said.read(_PREFACE_BYTES))
            while limit is None or passed < limit:
                head = said.read(_FRAME_HEAD_BYTES)
                if len(head) < _FRAME_HEAD_BYTES:
                    break
                target.sendall(head + said.read(int.from_bytes(head[:3], "big")))
                passed += 1
                if first:
                    self.counted = passed
        self._hang_up(source, target)

    def _pump(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        left = limit
        with contextlib.suppress(OSError):
            while left is None or left > 0:
                data = source.recv(65_536 if left is None else min(left, 65_536))
                if not data:
                    break
                target.sendall(data)
                left = None if left is None else left - len(data)
        self._hang_up(source, target)

    @staticmethod
    def _hang_up(*ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        """Cut everything and stop listening."""
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> CuttingWire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
