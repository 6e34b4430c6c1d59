"""The scheduler of an engine process that ships routes: rows leave where they are made, and never reach the front end.

``--scheduler-cls routeplane.capture.vllm.RouteScheduler``. A subclass of vLLM's own: after each step it takes the rows
of every output before the output is serialised, and at a sequence's end it writes a record to the stream that
``additional_config`` names and leaves a ticket in ``kv_transfer_params``. 0.22 to 0.30 and 0.31 on keep rows in
different places, but hand them to the scheduler's outputs alike. Decides nothing about records: see ``engine_writer``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import RequestStatus

from routeplane.capture.vllm.engine_writer import EngineReport, EngineWriter, Flight, WriterConfig
from routeplane.capture.vllm.model_config import captures_routes, spec_from_vllm
from routeplane.errors import CaptureError, ErrorKind

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["RouteScheduler"]


class RouteScheduler(AsyncScheduler):  # type: ignore[misc]  # vLLM's types are not followed
    """vLLM's scheduler, and the writer of the routes that pass through it.

    The engine's process owns it and ends the stream with ``shutdown``. Raises CaptureError or SpecError at start-up
    where this engine does not capture, UsageError for a bad configuration.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _require_capture(self.vllm_config)
        self._writer = EngineWriter(
            spec_from_vllm(self.vllm_config),
            WriterConfig.from_additional(self.vllm_config.additional_config),
            rank=self.vllm_config.parallel_config.data_parallel_rank,
            logprobs_mode=self.vllm_config.model_config.logprobs_mode,
        )

    def routes_report(self) -> EngineReport:
        """What the writer did so far."""
        return self._writer.report()

    def add_request(self, request: Request) -> None:
        """A request enters; what it wants shipped stands in its ``extra_args``."""
        known = request.request_id in self.requests
        super().add_request(request)
        sampling = request.sampling_params
        if sampling is None or known or request.request_id not in self.requests:
            return  # pooling, or a further piece of a streamed prompt
        self._writer.open(
            request.request_id,
            None if request.resumable or request.prompt_embeds is not None else request.prompt_token_ids,
            extra_args=sampling.extra_args,
            first_row=sampling.routed_experts_prompt_start or 0,
            media=tuple(feature.identifier for feature in request.mm_features),
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own, and then every output gives up its rows."""
        made = super().update_from_output(scheduler_output, model_runner_output)
        flights, inline = self._writer.flights, self._writer.inline
        for client in made.values():
            for output in client.outputs:
                request_id = output.request_id
                flight = flights.get(request_id)
                if flight is not None:
                    _take(output, flight)
                if request_id not in inline:
                    output.routed_experts = None
                if output.finish_reason is not None:
                    found = self._writer.finish(request_id, str(output.finish_reason))
                    if found:
                        output.kv_transfer_params = {**(output.kv_transfer_params or {}), **found}
        return made

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """Requests end from outside: aborts, and stop strings, which the front end finds."""
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            reason = RequestStatus.get_finished_reason(finished_status)
            self._writer.finish(request.request_id, str(reason))
        return ended

    def set_pause_state(self, pause_state: Any) -> None:
        """A pause is when weights change; sequences that go on after one have two versions."""
        paused = self.pause_state != PauseState.UNPAUSED
        super().set_pause_state(pause_state)
        if paused and pause_state == PauseState.UNPAUSED:
            self._writer.weights_may_have_changed()

    def shutdown(self) -> None:
        """End the stream, so that its readers see it whole."""
        self._writer.close()
        super().shutdown()


def _take(output: Any, flight: Flight) -> None:
    flight.add(output.new_token_ids, output.routed_experts)
    if output.new_logprobs is not None:
        # the sampled token's stands first (v1/outputs.py); a copy, or it keeps the whole step's array
        flight.logprobs.append(output.new_logprobs.logprobs[:, 0].copy())
    if output.prefill_stats is not None:
        flight.cached = output.prefill_stats.num_cached_tokens


def _require_capture(config: Any) -> None:
    """Refuse what could never bring rows: at start-up, not with the first answer."""
    if "routed_experts" not in EngineCoreOutput.__struct_fields__:
        raise CaptureError(
            "expected a vLLM whose scheduler hands out routed_experts (0.22 and later), got one without",
            kind=ErrorKind.CAPTURE_OFF,
        )
    if not captures_routes(config):
        raise CaptureError(
            "expected enable_return_routed_experts=True (--enable-return-routed-experts), got an engine without",
            kind=ErrorKind.CAPTURE_OFF,
        )
