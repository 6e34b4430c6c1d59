"""vLLM's OpenAI server as an ASGI application around an engine of this process; the caller brings the socket.

Holds the arguments that make capture and serving agree. Knows no port, no process and no Ray: ``fleet`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from routeplane.capture.vllm.engines import SETTINGS
from routeplane.capture.vllm.interface import require_moe, spec_from_vllm
from routeplane.capture.vllm.probing import ProbeReport, probe_async
from routeplane.errors import CaptureError, ErrorKind, refused
from routeplane.record.spec import RouteSpec

__all__ = ["ServedEngine", "load_engine"]


class ServedEngine:
    """An ``AsyncLLM`` of this process's event loop, and vLLM's server around it.

    Owns the engine until ``shutdown``.

    Example, inside a coroutine::

        served = await load_engine("path/to/model", spec=spec, served_name="policy")
        app = await served.build_app()  # for a server on a socket of your own
    """

    def __init__(self, engine: Any, spec: RouteSpec | None, *, arguments: Any) -> None:
        self.engine = engine
        #: what its routes mean; None for an engine that captures none
        self.spec = spec
        self._arguments = arguments

    async def probe(self, *, min_agreement: float = 0.5) -> ProbeReport | None:
        """Generate a few tokens to show that routes come back; None for an engine without capture."""
        return None if self.spec is None else await probe_async(self.engine, self.spec, min_agreement=min_agreement)

    async def build_app(self) -> Any:
        """Build vLLM's OpenAI server around the engine: an ASGI application; nothing listens yet."""
        tasks = await self.engine.get_supported_tasks()
        app = build_app(self._arguments, tasks, self.engine.model_config)
        await init_app_state(self.engine, app.state, self._arguments, tasks)
        return app

    def unfinished(self) -> int:
        """Count the requests in flight."""
        return len(self.engine.output_processor.request_states)

    def shutdown(self) -> None:
        """End the engine and its processes. Idempotent."""
        self.engine.shutdown()


async def load_engine(
    model: str, *, spec: RouteSpec | None, served_name: str, options: Mapping[str, Any] | None = None
) -> ServedEngine:
    """Load an engine to be served, which returns routes as ``spec`` promises.

    Args:
        model: A folder as ``save_pretrained`` writes it.
        spec: What the routes must mean; None loads an engine without capture.
        served_name: The model's name in requests.
        options: Further arguments of vLLM's server by name (``max_model_len=...``), which override the settings made
            here.

    Returns:
        An engine that belongs to the caller's event loop, which is blocked for as long as weights load.

    Raises:
        SpecError: A dense model, before any weight is loaded; another geometry than the spec's (SPEC_MISMATCH).
        CaptureError: ``options`` turn capture off that the spec asks for (CAPTURE_OFF).
        UsageError: An option that vLLM does not have (ARGUMENT).

    Example:
        ``served = await load_engine("path/to/model", spec=spec, served_name="policy")``
    """
    given = dict(options or {})
    if spec is not None and not given.setdefault("enable_return_routed_experts", True):
        raise CaptureError(
            "expected capture to be on, as a spec asks for it, got enable_return_routed_experts=False",
            kind=ErrorKind.CAPTURE_OFF,
        )
    arguments = _server_arguments({**SETTINGS, **given, "model": model, "served_model_name": [served_name]})
    engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
    if spec is not None:
        require_moe(engine_arguments.create_model_config())
    config = engine_arguments.create_engine_config()
    if spec is not None:
        spec.require_same_geometry(spec_from_vllm(config), where=f"the engine of {model}")
    return ServedEngine(AsyncLLM.from_vllm_config(config, disable_log_stats=True), spec, arguments=arguments)


def _server_arguments(values: Mapping[str, Any]) -> Any:
    """The server's arguments as its command line would give them, with some values set."""
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    unknown = sorted(set(values) - set(vars(arguments)) - {each.name for each in fields(AsyncEngineArgs)})
    if unknown:
        raise refused("arguments of vLLM's server", ", ".join(unknown))
    for name, value in values.items():
        setattr(arguments, name, value)
    return arguments
