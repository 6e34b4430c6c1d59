"""vLLM's OpenAI server as an ASGI application around an engine of this process; whoever serves it brings the socket.

Owns the arguments that make capture and serving agree. Knows no port, no process and no Ray: ``fleet`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from routeplane.capture.vllm.geometry import require_moe, spec_from_vllm
from routeplane.capture.vllm.probing import ProbeReport, probe_async
from routeplane.errors import CaptureError, ErrorKind
from routeplane.record.spec import RouteSpec

__all__ = ["LoadedEngine", "load_engine"]

# settings that also work without a GPU, as in ``offline.start_engine``
_SETTINGS: Mapping[str, Any] = {"block_size": 32, "enforce_eager": True, "enable_chunked_prefill": False}


class LoadedEngine:
    """An ``AsyncLLM`` of this process's event loop, and what is served of it. Owns the engine until ``shutdown``."""

    def __init__(self, engine: Any, spec: RouteSpec | None, *, arguments: Any) -> None:
        self.engine = engine
        #: what its routes mean; None for an engine that captures none
        self.spec = spec
        self._arguments = arguments

    async def probe(self, *, min_agreement: float = 0.5) -> ProbeReport | None:
        """A few tokens that show that routes really come back; None for an engine without capture. As ``probing``."""
        return None if self.spec is None else await probe_async(self.engine, self.spec, min_agreement=min_agreement)

    async def build_app(self) -> Any:
        """vLLM's OpenAI server around the engine: an ASGI application, nothing listening yet."""
        tasks = await self.engine.get_supported_tasks()
        app = build_app(self._arguments, tasks, self.engine.model_config)
        await init_app_state(self.engine, app.state, self._arguments, tasks)
        return app

    def unfinished(self) -> int:
        """Requests in flight."""
        return len(self.engine.output_processor.request_states)

    def shutdown(self) -> None:
        """End the engine and its processes. Idempotent."""
        self.engine.shutdown()


async def load_engine(
    model: str,
    *,
    spec: RouteSpec | None,
    served_name: str,
    options: Mapping[str, Any] | None = None,
) -> LoadedEngine:
    """Load an engine that returns routes as ``spec`` promises, or, with None, one without capture.

    ``model``: a folder as ``save_pretrained`` writes it. ``served_name``: the model's name in requests. ``options``:
    further arguments of vLLM's server by name (``max_model_len=...``), which override the settings made here. Runs in
    the caller's event loop, to which the engine then belongs; blocks it for as long as weights load.

    Raises SpecError for a dense model before any weight is loaded, and where the engine's geometry is not ``spec``'s
    (SPEC_MISMATCH); CaptureError (CAPTURE_OFF) where ``options`` turn capture off that the spec asks for.
    """
    given = dict(options or {})
    if spec is not None and not given.setdefault("enable_return_routed_experts", True):
        raise CaptureError(
            "expected capture to be on, as a spec asks for it, got enable_return_routed_experts=False",
            kind=ErrorKind.CAPTURE_OFF,
        )
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in {**_SETTINGS, **given, "model": model, "served_model_name": [served_name]}.items():
        setattr(arguments, name, value)
    engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
    if spec is not None:
        require_moe(engine_arguments.create_model_config())
    config = engine_arguments.create_engine_config()
    if spec is not None:
        spec.require_same_geometry(spec_from_vllm(config), where=f"the engine of {model}")
    engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    return LoadedEngine(engine, spec, arguments=arguments)
