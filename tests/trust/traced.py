"""What ``make coverage`` adds to a run, so that code in threads and processes that are not Python's own is seen too.

Flight's server calls from threads of gRPC, which know of no tracer; a Ray worker is killed, and writes nothing at its
end. A pytest plugin: ``-p tests.trust.traced``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_SAVE_SECONDS = 0.5
_CALLS = ("do_put", "do_exchange", "do_action", "do_get", "list_flights")


def pytest_configure(config: pytest.Config) -> None:
    """Trace the calls of Flight's server, and write what Ray's workers ran while they live."""
    # a worker imports this file too, and has to load neither
    from routeplane.stream import flight
    from tests import ray_cluster

    for owner, names in ((flight.Server, _CALLS), (flight._Roles, ("start_call",))):
        for name in names:
            setattr(owner, name, _traced(getattr(owner, name)))
    ray_cluster.RUNTIME_ENV["worker_process_setup_hook"] = save_often


def _traced(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any) -> Any:
        _trace_this_thread()
        found = call(*args)
        return _steps(found) if inspect.isgenerator(found) else found

    return run


def _steps(found: Iterator[Any]) -> Iterator[Any]:
    """The same values, each made in a thread that is traced."""
    end = object()
    while True:
        _trace_this_thread()
        value = next(found, end)
        if value is end:
            return
        yield value


def _trace_this_thread() -> None:
    if sys.gettrace() is None:
        sys.settrace(threading.gettrace())


def save_often() -> None:
    """In a worker: write what was seen twice a second."""
    current = import_module("coverage").Coverage.current()
    if current is not None:
        threading.Thread(target=_save, args=(current,), daemon=True).start()


def _save(current: Any) -> None:
    while True:
        time.sleep(_SAVE_SECONDS)
        current.save()
