"""routeplane: carry mixture-of-experts routing decisions safely from rollout engines to trainers.

    capture  ->  record  ->  stream / archive  ->  batch  ->  replay

The names below need numpy, pyarrow and xxhash only. Stages with heavier needs are imported by module:
``routeplane.batch`` (torch), ``routeplane.replay.transformers``, ``routeplane.capture.vllm``, ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routeplane.errors import ErrorKind, Problem, RouteplaneError
    from routeplane.record.alarms import find_alarms
    from routeplane.record.aligned import AlignedColumn
    from routeplane.record.assembly import Assembly, AssemblyReport, UnfedTokens, assemble
    from routeplane.record.calls import ModelCall, merge_layers
    from routeplane.record.counts import metrics_text
    from routeplane.record.interfaces import RouteSink, RouteSource, RouteTicket
    from routeplane.record.prefixes import as_delta, resolve, share_prompts
    from routeplane.record.record import Prefix, RecordKey, RouteRecord
    from routeplane.record.schema import FORMAT_VERSION
    from routeplane.record.spans import Capture, Coverage, Sampling, Span
    from routeplane.record.spec import MISSING, RouteSpec
    from routeplane.record.validate import check_routes, find_problems
    from routeplane.stream import MemoryStream, new_stream, open_stream

__version__ = "0.1.0"

__all__ = [
    "FORMAT_VERSION",
    "MISSING",
    "AlignedColumn",
    "Assembly",
    "AssemblyReport",
    "Capture",
    "Coverage",
    "ErrorKind",
    "MemoryStream",
    "ModelCall",
    "Prefix",
    "Problem",
    "RecordKey",
    "RouteRecord",
    "RouteSink",
    "RouteSource",
    "RouteSpec",
    "RouteTicket",
    "RouteplaneError",
    "Sampling",
    "Span",
    "UnfedTokens",
    "__version__",
    "as_delta",
    "assemble",
    "check_routes",
    "find_alarms",
    "find_problems",
    "merge_layers",
    "metrics_text",
    "new_stream",
    "open_stream",
    "resolve",
    "share_prompts",
]

#: Module -> the public names that it defines; loaded on first use, so that the pytest plugin costs nothing.
_MODULES = {
    "errors": ("ErrorKind", "Problem", "RouteplaneError"),
    "record.alarms": ("find_alarms",),
    "record.aligned": ("AlignedColumn",),
    "record.assembly": ("Assembly", "AssemblyReport", "UnfedTokens", "assemble"),
    "record.calls": ("ModelCall", "merge_layers"),
    "record.counts": ("metrics_text",),
    "record.interfaces": ("RouteSink", "RouteSource", "RouteTicket"),
    "record.prefixes": ("as_delta", "resolve", "share_prompts"),
    "record.record": ("Prefix", "RecordKey", "RouteRecord"),
    "record.schema": ("FORMAT_VERSION",),
    "record.spans": ("Capture", "Coverage", "Sampling", "Span"),
    "record.spec": ("MISSING", "RouteSpec"),
    "record.validate": ("check_routes", "find_problems"),
    "stream": ("MemoryStream", "new_stream", "open_stream"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"routeplane.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
