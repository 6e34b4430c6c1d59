"""The scheduler of an engine process that records routes: rows are taken where they are made, before the front end.

``--scheduler-cls routeplane.capture.vllm.RouteScheduler``. A subclass of vLLM's own: after each step it takes the rows
of every output before the output is serialised; when a sequence ends it hands it to the writer's thread, and holds the
last output back until the record is sealed, so that the ticket in ``kv_transfer_params`` names a record that can be
read. 0.26 to 0.30 and 0.31 on keep rows in different places, but hand them to the scheduler's outputs alike. Decides
nothing about records: see ``engine_writer``.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.request import RequestStatus

from routeplane.capture.vllm.engine_writer import EngineReport, EngineWriter, RunningSequence
from routeplane.capture.vllm.interface import (
    NAMES,
    WriterConfig,
    captures_routes,
    ids_of,
    record_weights,
    require_running,
    spec_from_vllm,
)
from routeplane.capture.vllm.probing import SelfCheck
from routeplane.errors import CaptureError, ErrorKind, UsageError, refused
from routeplane.record.validate import WeightsMeaning

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["RouteScheduler"]

# An engine that has nothing to do but wait for a block to be sealed looks this often for new requests.
_IDLE_WAIT_S = 0.005
# How long an engine that is told to stop waits for its last block; vLLM kills it five seconds after asking.
_STOP_WAIT_S = 3.0
# Calls into the workers that leave weights as they are; any other may have changed them.
_HARMLESS = ("check_", "determine_", "execute_dummy", "get_", "init_", "initialize_", "is_", "list_", "pin_", "profile",
             "report_", "reset_", "routeplane_follow", "save_", "supported_", "synchronize_", "take_")  # fmt: skip
#: What a caller may ask of the writer: ``collective_rpc("routeplane_set_version", args=(12,))``.
_COMMANDS = (
    "routeplane_set_version",
    "routeplane_report",
    "routeplane_tickets",
    "routeplane_flush",
    "routeplane_close",
)


class RouteScheduler(AsyncScheduler):  # type: ignore[misc]  # vLLM's types are not followed
    """vLLM's scheduler, and the writer of the routes that pass through it.

    Before the engine takes its first request, it generates a few tokens and compares their rows with those of a second
    pass (``probing``). ``shutdown`` seals what is there. Four calls reach it through ``collective_rpc`` of an
    ``LLM``, an ``AsyncLLM`` or a server: ``routeplane_set_version`` (the version of the weights that run now),
    ``routeplane_report`` (counts), ``routeplane_tickets`` (those of a request's id), ``routeplane_flush``.

    Raises CaptureError or SpecError at start where this engine does not capture or its rows are not those of its
    tokens, UsageError for a bad configuration.

    Example, of an operator::

        vllm serve MODEL --scheduler-cls routeplane.capture.vllm.scheduler.RouteScheduler ...
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_running(NAMES)
        _require_capture(self.vllm_config)
        config = WriterConfig.from_additional(self.vllm_config.additional_config)
        spec = spec_from_vllm(self.vllm_config)
        self._core = _constructing_core()
        self._held: dict[str, tuple[int, Any]] = {}  # request id -> client, last output
        self._detokenizers: dict[str, Any] = {}
        self._stopped: set[str] = set()  # ended by a stop string
        self._rows_dtype: np.dtype[Any] | None = None  # of ids with weights beside them
        meaning = None if config.route_weights is None else self._record_weights(config.route_weights)
        self._check = SelfCheck(
            spec,
            vocabulary=self.vllm_config.model_config.get_vocab_size(),
            weights=None if meaning is None else WeightsMeaning.from_text(meaning),
        )
        self._check_every, self._last_check = config.probe_every_s, time.monotonic()
        self._check_at_start()
        self._writer = EngineWriter(
            spec,
            config,
            rank=self.vllm_config.parallel_config.data_parallel_rank,
            logprobs_mode=self.vllm_config.model_config.logprobs_mode,
            log=init_logger("vllm.routeplane").warning,
            weights_meaning=meaning,
        )
        self._hook_core()

    def routes_report(self) -> EngineReport:
        """Count what the writer did so far."""
        return self._writer.report()

    def set_version(self, version: int) -> None:
        """Say which weights run now; call it when they are loaded, before the engine goes on.

        Args:
            version: Sequences in flight have it from here on, silent requests from their beginning.
        """
        if isinstance(version, bool) or not isinstance(version, int):
            raise refused("a version as an integer", repr(version))
        self._writer.versions.tell(version, self._writer.sequences, paused=self.pause_state != PauseState.UNPAUSED)

    # ---- requests -------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """A request enters; what it wants recorded stands in its ``extra_args``."""
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
        if sampling.stop and request.request_id in self._writer.sequences:
            tokenizer = self.structured_output_manager.tokenizer if self._has_tokenizer() else None
            if tokenizer is not None:
                self._detokenizers[request.request_id] = IncrementalDetokenizer.from_new_request(tokenizer, request)
        self._check_again()

    def _has_tokenizer(self) -> bool:
        return not self.vllm_config.model_config.skip_tokenizer_init

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        """Look for stop strings here too: the front end would find them, and answer before a ticket is there.

        The request ends by its length: the front end, which looks at the same tokens, then says ``stop``; told ``stop``
        it would take the last token for a stop token and leave it out of the text.
        """
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        detokenizer = self._detokenizers.get(request.request_id)
        if detokenizer is not None and not stopped and detokenizer.update(new_token_ids, False) is not None:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            self._stopped.add(request.request_id)
            stopped = True
        return new_token_ids, stopped

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own; then every output gives up its rows, and the last one waits for its ticket."""
        made = self._update(scheduler_output, model_runner_output)
        for client, outputs in made.items():
            outputs.outputs = [output for output in outputs.outputs if not self._holds(client, output)]
        if self._check.running:
            self._continue_check()
        self._writer.require_health()
        idle = scheduler_output.total_num_scheduled_tokens == 0
        for request_id, said in self._writer.take_answers(wait_s=_IDLE_WAIT_S if idle else 0.0):
            self._release(request_id, said, made)
        return made

    def _holds(self, client: int, output: Any) -> bool:
        """Take an output's rows; whether it stays here until its record is sealed."""
        request_id = output.request_id
        if self._check.takes(output):
            return True
        sequence = self._writer.sequences.get(request_id)
        if sequence is not None:
            _take(output, sequence)
        if request_id not in self._writer.inline:
            output.routed_experts = None
        elif output.routed_experts is not None:
            output.routed_experts = np.ascontiguousarray(ids_of(output.routed_experts))
        if output.finish_reason is None:
            return False
        self._detokenizers.pop(request_id, None)
        reason = "stop" if request_id in self._stopped else str(output.finish_reason)
        self._stopped.discard(request_id)
        if not self._writer.finish(request_id, reason):
            return False
        self._held[request_id] = client, output
        return True

    def _release(self, request_id: str, said: dict[str, Any], made: dict[int, Any]) -> None:
        held = self._held.pop(request_id, None)
        if held is None:
            return
        client, output = held
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), **said}
        if client not in made:
            made[client] = EngineCoreOutputs(outputs=[])
        made[client].outputs.append(output)

    def has_requests(self) -> bool:
        """Also while an answer waits for its ticket: the engine must go on stepping for it to leave."""
        return bool(self._held) or super().has_requests()

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """Requests end from outside: aborts, and all of them when the engine stops."""
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._detokenizers.pop(request.request_id, None)
            self._check.forget(request.request_id)
            reason = RequestStatus.get_finished_reason(finished_status)
            self._writer.finish(request.request_id, str(reason), answered=False)
        if request_ids is None:
            self._writer.flush(timeout_s=_STOP_WAIT_S)
        return ended

    def shutdown(self) -> None:
        """Seal what is there. The producer has not ended: an engine that is started again goes on under its name."""
        self._writer.close(end=False)
        super().shutdown()

    # ---- weights --------------------------------------------------------------------------------------------------

    def set_pause_state(self, pause_state: Any) -> None:
        """A pause is when weights change; sequences that go on after one have two versions."""
        paused = self.pause_state != PauseState.UNPAUSED
        super().set_pause_state(pause_state)
        if paused and pause_state == PauseState.UNPAUSED:
            self._weights_changed("pause")

    def _weights_changed(self, kind: str) -> None:
        in_flight = {
            request_id: _tokens_in_flight(self.requests[request_id])
            for request_id in self._writer.sequences
            if request_id in self.requests
        }
        self._writer.versions.changed(kind, self._writer.sequences, in_flight)

    def _hook_core(self) -> None:
        """Listen at the calls of the engine core that is being made: on this instance, for as long as it lives."""
        call_workers, name_weights = self._core.collective_rpc, getattr(self._core, "set_weight_version", None)

        def collective_rpc(method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
            if method in _COMMANDS:
                return [self._command(method, *args, **(kwargs or {}))]
            if isinstance(method, str) and method.startswith(_HARMLESS):
                return call_workers(method, timeout, args, kwargs)
            self._weights_changed("update")
            return call_workers(method, timeout, args, kwargs)

        def set_weight_version(weight_version: str) -> None:
            if name_weights is not None:
                name_weights(weight_version)
            if weight_version.isascii() and weight_version.isdigit():
                self.set_version(int(weight_version))

        self._core.collective_rpc = collective_rpc
        if name_weights is not None:
            self._core.set_weight_version = set_weight_version

    def _command(self, name: str, *args: Any, **kwargs: Any) -> Any:
        match name:
            case "routeplane_set_version":
                return self.set_version(*args, **kwargs)
            case "routeplane_report":
                return self._writer.report().scalars(*args, **kwargs)
            case "routeplane_tickets":
                return self._writer.tickets_of(*args, **kwargs)
            case "routeplane_flush":
                return self._writer.flush(*args, **kwargs)
            case _:
                return self._writer.close(*args, **kwargs)

    # ---- routing weights --------------------------------------------------------------------------------------------

    def _record_weights(self, kept: str) -> str:
        """Have the workers send weights beside ids, and keep both by KV slot; says what the weights are."""
        manager = getattr(self, "routed_experts_mgr", None)
        if manager is None:
            raise CaptureError(
                "expected a vLLM that keeps rows by slot of the KV cache (0.30), got another",
                kind=ErrorKind.CAPTURE_OFF,
            )
        said = set(self._core.model_executor.collective_rpc(record_weights, args=(kept,)))
        if len(said) != 1:
            raise CaptureError(
                f"expected workers that agree on weights, got {sorted(said)}", kind=ErrorKind.CAPTURE_OFF
            )
        ids = manager.routed_experts_by_slot
        self._rows_dtype = np.dtype([("ids", ids.dtype), ("weights", np.float32 if kept == "float32" else np.uint16)])
        # vLLM's own code keeps, cuts and hands out entries of any type
        manager.routed_experts_by_slot = np.zeros(ids.shape, dtype=self._rows_dtype)
        return str(said.pop())

    def _update(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own, over rows of ids with their weights where these are recorded."""
        given = model_runner_output.routed_experts
        if self._rows_dtype is not None and given is not None:
            both_TDX = given.routing_data
            top_k = both_TDX.shape[2] // 2
            rows_TDK = np.empty((*both_TDX.shape[:2], top_k), dtype=self._rows_dtype)
            rows_TDK["ids"] = both_TDX[..., :top_k]
            # bits in the upper slots: of float32 in all of a slot, of bfloat16 in its lower half
            bits_TDK = both_TDX[..., top_k:]
            float32 = self._rows_dtype["weights"] == np.float32
            rows_TDK["weights"] = bits_TDK.view(np.float32) if float32 else bits_TDK.view(np.uint32) & 0xFFFF
            model_runner_output.routed_experts = given._replace(routing_data=rows_TDK)
        return super().update_from_output(scheduler_output, model_runner_output)

    # ---- the engine's own rows, against themselves ------------------------------------------------------------------

    def _check_at_start(self) -> None:
        """Run a few tokens through this engine, alone, and compare their rows with those of a second pass."""
        for request in self._check.begin():
            super().add_request(request)
        while self._check.running:
            step = self.schedule()
            model_output = self._core.model_executor.execute_model(step, non_block=True).result()
            if model_output is None:
                model_output = self._core.model_executor.sample_tokens(self.get_grammar_bitmask(step))
            made = self._update(step, model_output)
            for output in [output for outputs in made.values() for output in outputs.outputs]:
                self._check.takes(output)
            self._continue_check()

    def _continue_check(self) -> None:
        for request in self._check.next_requests():
            super().add_request(request)
        if self._check.done:
            self._check.require()

    def _check_again(self) -> None:
        """Begin another check where one is due; its requests run among the others."""
        now = time.monotonic()
        if self._check_every is None or self._check.running or now - self._last_check < self._check_every:
            return
        self._last_check = now
        for request in self._check.begin():
            super().add_request(request)


def _take(output: Any, sequence: RunningSequence) -> None:
    sequence.add(output.new_token_ids, output.routed_experts)
    if output.new_logprobs is not None:
        # the sampled token's stands first (v1/outputs.py); a copy, or it keeps the whole step's array
        sequence.logprobs.append(output.new_logprobs.logprobs[:, 0].copy())
    if output.prefill_stats is not None:
        sequence.cached = output.prefill_stats.num_cached_tokens


def _tokens_in_flight(request: Any) -> int | None:
    """Tokens that were sampled and not taken yet; None for a request of which nothing was computed."""
    if request.num_computed_tokens == 0 and not request.num_output_tokens:
        return None
    return int(request.num_output_placeholders)


def _constructing_core() -> Any:
    """The engine core whose constructor is at work: vLLM hands its scheduler no reference to it."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, EngineCore):
            return found
        frame = frame.f_back
    raise UsageError("expected a scheduler that vLLM's engine core makes, got another caller", kind=ErrorKind.ARGUMENT)


def _require_capture(config: Any) -> None:
    """Refuse what could never bring rows, or would bring something else: at start, not with the first answer."""
    if not captures_routes(config):
        raise CaptureError(
            "expected enable_return_routed_experts=True (--enable-return-routed-experts), got an engine without",
            kind=ErrorKind.CAPTURE_OFF,
        )
    mode = config.model_config.logprobs_mode
    if not str(mode).endswith("_logprobs"):
        raise refused(
            "logprobs_mode of ('raw_logprobs', 'processed_logprobs')",
            f"{mode!r}: logits would be stored as log-probabilities",
        )
