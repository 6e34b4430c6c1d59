"""Plain misuse: a first argument of another type is refused by a typed error, at every public function."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from routeplane import MemoryStream, new_stream
from routeplane.archive import open_archive, save_archive
from routeplane.capture import RouteRecorder
from routeplane.errors import RouteplaneError, UsageError
from routeplane.inspect import Collector
from routeplane.replay import transformers as gates
from routeplane.stream import ReadOptions
from routeplane.testing.builders import SPEC, sample
from tests.replay.tiny_models import FAMILIES

FACES = (
    "routeplane",
    "routeplane.archive",
    "routeplane.batch",
    "routeplane.capture",
    "routeplane.capture.http",
    "routeplane.capture.http.openai",
    "routeplane.capture.sglang",
    "routeplane.capture.transformers",
    "routeplane.capture.wire",
    "routeplane.inspect",
    "routeplane.replay.transformers",
    "routeplane.stream",
    "routeplane.stream.flight",
    "routeplane.stream.folder",
)
#: Functions that read one value of a document, inside of what reads the whole, whose errors are theirs.
INNER = {"finish_reason", "has_no_mark", "refuse_server_error"}
WRONG = {"none": None, "list": [object()], "dict": {"a": 1}, "text": "x", "number": 7}

#: What a function needs besides its first argument, by name; a spec where nothing is said.
BESIDE: dict[str, Any] = {
    "layout": "padded",
    "max_tokens": 2,
    "num_layers": 4,
    "options": ReadOptions(timeout_s=0.0),
    "pipeline_parallel": 2,
    "prompts": [[1, 2]],
    "producer": "p",
    "producers": 1,
    "reduce": max,
    "right": [],
    "run": "r",
    "sample_id": "s",
    "specs": (SPEC, SPEC),
    "store": "there-is-none.zarr",
    "stream": "s",
    "text": "",
    "title": "t",
    "token": 0,
    "tokens": 64,
    "weights_version": None,
    "what": "x",
}


def _functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for face in FACES:
        module = importlib.import_module(face)
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isroutine(found) and found.__module__.startswith("routeplane") and name not in INNER:
                yield f"{face}.{name}", found


FUNCTIONS = dict(_functions())


def _call(function: Callable[..., Any], wrong: Any) -> None:
    """Call, and use what comes: a generator and a context manager do nothing before."""
    first, *others = inspect.signature(function).parameters.values()
    given = {
        each.name: BESIDE.get(each.name, SPEC)
        for each in others
        if each.default is each.empty or (each.name == "options" and function.__name__ == "open_reader")
    }
    came = function(**{first.name: wrong}, **given) if first.kind is first.KEYWORD_ONLY else function(wrong, **given)
    if isinstance(came, AbstractContextManager) and hasattr(came, "gen"):
        with came:
            pass
    elif isinstance(came, Iterator):
        next(came, None)
    elif hasattr(came, "abort"):
        came.abort()


def _refusal(function: Callable[..., Any], wrong: Any) -> Exception | None:
    """What is raised on purpose; anything else passes through."""
    try:
        _call(function, wrong)
    except (RouteplaneError, TypeError, OSError) as error:
        return error
    return None


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_first_argument_is_refused_by_type(
    name: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is served where it means something; otherwise a typed error, or the built-in one that says it."""
    monkeypatch.chdir(tmp_path)
    error = _refusal(FUNCTIONS[name], wrong)

    if isinstance(error, OSError) and not isinstance(error, RouteplaneError):
        assert isinstance(wrong, str | dict)  # names that are not there
    elif error is not None:
        assert any(said in str(error) for said in ("expected", "is required", "not iterable", "non-iterable"))


def test_methods_refuse_what_they_do_not_take(tmp_path: Path) -> None:
    """Records to sinks, calls to recorders, batches to handles, keys to archives."""
    save_archive([sample(0)], tmp_path / "a.zarr", spec=SPEC)
    archive, recorder = open_archive(tmp_path / "a.zarr"), RouteRecorder(SPEC, sample_id="s")
    handle = gates.record(FAMILIES[0].build())
    methods: dict[str, Callable[[Any], Any]] = {
        "add_call": recorder.add_call,
        "archive[...]": archive.__getitem__,
        "collector.add": Collector(SPEC).add,
        "handle.recording": lambda batch: handle.recording(batch).__enter__(),
        "handle.replaying": lambda batch: handle.replaying(batch).__enter__(),
        "sink.write": new_stream(MemoryStream(), SPEC).write,
    }
    for name, method in methods.items():
        for wrong in ([sample(0)], {"a": 1}, "x"):
            with pytest.raises(UsageError, match=r"expected .*, got "):
                pytest.fail(f"{name} took {wrong}: {method(wrong)}")
    handle.detach()
