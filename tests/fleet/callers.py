"""Callers that ask one URL over and over, and count how they were answered."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

__all__ = ["Callers"]


class Callers:
    """Threads that GET a URL, each time over a connection of its own, while ``with`` is open.

    ``answers``: status codes, ``"refused"`` for a connection that nothing accepted, and ``"cut"`` for one that was
    accepted and ended without an answer, as by a server that is killed.
    """

    def __init__(self, url: str, *, count: int = 4, pause: float = 0.02) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = str(parts.hostname), parts.port, f"{parts.path}/models"
        self.answers: Counter[int | str] = Counter()
        self._pause = pause
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._call, name="routeplane-caller") for _ in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        while not self._over.wait(self._pause):
            answer = self._ask()
            with self._lock:
                self.answers[answer] += 1

    def _ask(self) -> int | str:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=60)
        try:
            connection.request("GET", self._path)
            response = connection.getresponse()
            response.read()
            return response.status
        except ConnectionRefusedError:
            return "refused"
        except (ConnectionError, http.client.HTTPException):
            return "cut"
        finally:
            connection.close()
