"""Rows from inside the worker, where the engine refuses or lacks its own flag: pipeline stages, KV connectors, forks.

``worker_extension_cls="routeplane.capture.vllm.RouteWorkerExtension"``, then ``collective_rpc``. Routers tell their
choices to a callback; which request a row belongs to stands in the runner's batch. What a forward never computed
(blocks from the cache) is not seen here: such rows are absent, and a call made of the rest says so. Python callbacks do
not run inside CUDA graphs, so ``enforce_eager`` is required.

Axes: N token rows of one forward, R rows of a request, L layers of this worker, K slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.errors import CaptureError, ErrorKind
from routeplane.record.calls import ModelCall, RowLoss, merge_layers
from routeplane.record.spec import MISSING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["RouteWorkerExtension", "call_from_workers"]


class _WorkerTape:
    """The rows of the requests that this worker has seen, by the engine's request id and by position."""

    def __init__(self, runner: Any, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self._runner = runner
        self._forward: dict[int, NDArray[Any]] = {}
        self._rows: dict[str, dict[int, NDArray[np.int16]]] = {}

    def add(self, layer_id: int, topk_ids: Any) -> None:
        """One router's choice; the forward is filed when the last layer has spoken."""
        self._forward[layer_id] = topk_ids.detach().to("cpu").numpy()
        if layer_id == self.layer_ids[-1]:
            forward, self._forward = self._forward, {}
            if len(forward) == len(self.layer_ids):  # a warm-up may run layers of its own
                self._file(np.stack([forward[layer] for layer in self.layer_ids], axis=1))

    def _file(self, chosen_NLK: NDArray[Any]) -> None:
        """Give each request its rows. One that is computed again (preemption, a rejected draft) replaces the first:
        the last is the one whose keys and values are used."""
        batch = self._runner.input_batch
        bounds = self._runner.query_start_loc.np
        for index, request_id in enumerate(batch.req_ids):
            start, stop = int(bounds[index]), int(bounds[index + 1])
            if stop > len(chosen_NLK):
                return  # a dummy batch: its requests are none
            at = int(batch.num_computed_tokens_cpu[index])
            held = self._rows.setdefault(request_id, {})
            for offset, row_LK in enumerate(chosen_NLK[start:stop]):
                held[at + offset] = row_LK.astype(np.int16)

    def take(self, request_id: str) -> dict[str, Any]:
        """The rows of one request, which are forgotten here; see ``RouteWorkerExtension.routeplane_take``."""
        # the engine runs a request under its id and eight hexadecimal digits (v1/engine/input_processor.py)
        names = [name for name in self._rows if name == request_id or name[:-9] == request_id]
        if len(names) != 1:
            return {"layer_ids": list(self.layer_ids), "first_row": 0, "shape": [0], "rows": b""}
        held = self._rows.pop(names[0])
        first, stop = min(held), max(held) + 1
        rows_RLK = np.full((stop - first, *held[first].shape), MISSING, dtype=np.int16)
        # Tokens may be skipped: a request that was preempted goes on behind blocks that another one has filled since.
        for at, row_LK in held.items():
            rows_RLK[at - first] = row_LK
        return {
            "layer_ids": list(self.layer_ids),
            "first_row": first,
            "shape": list(rows_RLK.shape),
            "rows": rows_RLK.tobytes(),
        }

    def forget(self) -> None:
        self._rows.clear()


class RouteWorkerExtension:
    """Mixed into vLLM's worker by vLLM itself; its methods are called by ``collective_rpc`` on every worker."""

    def routeplane_start(self) -> list[int]:
        """Listen to this worker's routers; returns their decoder layers. Raises CaptureError where nothing can be
        heard."""
        runner = getattr(self, "model_runner", None)
        if not all(hasattr(runner, name) for name in ("input_batch", "query_start_loc", "get_model")):
            raise CaptureError(
                "expected a model runner with input_batch and query_start_loc (vLLM's V1 runner), got "
                f"{type(runner).__name__}",
                kind=ErrorKind.CAPTURE_OFF,
            )
        config: Any = self.vllm_config  # type: ignore[attr-defined]  # the worker's
        if not config.model_config.enforce_eager:
            raise CaptureError(
                "expected enforce_eager=True: callbacks do not run inside CUDA graphs", kind=ErrorKind.CAPTURE_OFF
            )
        routers = _routers(runner)
        if not routers:
            raise CaptureError("expected routers that tell their choices, got none", kind=ErrorKind.CAPTURE_OFF)
        tape = _WorkerTape(runner, sorted(routers))
        for layer_id, router in routers.items():
            router.set_capture_fn(partial(tape.add, layer_id))
        self._routeplane_tape = tape
        return list(tape.layer_ids)

    def routeplane_take(self, request_id: str) -> dict[str, Any]:
        """The rows of a request by the id that its caller gave it, for ``call_from_workers``; forgotten here."""
        return self._routeplane_tape.take(request_id)

    def routeplane_stop(self) -> None:
        """Stop listening and forget all rows."""
        for router in _routers(self.model_runner).values():  # type: ignore[attr-defined]  # the worker's
            router.set_capture_fn(None)
        self._routeplane_tape.forget()


def _routers(runner: Any) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for module in runner.get_model().modules():
        router = getattr(module, "router", None)
        if hasattr(router, "set_capture_fn") and hasattr(module, "layer_id"):
            found[int(module.layer_id)] = router
    return found


def call_from_workers(
    taken: Sequence[Mapping[str, Any]],
    spec: RouteSpec,
    *,
    prompt_ids: Sequence[int],
    generation_ids: Sequence[int],
    weights_version: int | None,
    call_id: str,
    loss: RowLoss | None = None,
) -> ModelCall:
    """The call of one request out of what ``collective_rpc("routeplane_take", ...)`` returned, one part per worker.

    Workers of one pipeline stage hold the same layers, and the first of them speaks; the stages are merged. Rows of a
    cached prefix are absent, so ``first_row`` is where computing began, and assembling marks what is before it as not
    captured; rows that a preempted request skipped are MISSING, and marked alike. Raises CaptureError where no worker
    saw the request or a layer of the spec is nobody's, DataError where rows are not those of the tokens.
    """
    stages: dict[tuple[int, ...], ModelCall] = {}
    for part in taken:
        layers = tuple(int(layer) for layer in part["layer_ids"])
        if not part["rows"] or layers in stages:
            continue
        rows_RLK = np.frombuffer(part["rows"], dtype=np.int16).reshape(part["shape"])
        stages[layers] = ModelCall(
            prompt_ids=np.asarray(prompt_ids, dtype=np.int64),
            generation_ids=np.asarray(generation_ids, dtype=np.int64),
            routes=rows_RLK[: len(prompt_ids) + len(generation_ids) - 1 - int(part["first_row"])],
            first_row=int(part["first_row"]),
            layer_ids=layers,
            weights_version=weights_version,
            call_id=call_id,
            loss=loss,
        )
    if not stages:
        raise CaptureError(f"expected a worker that saw call {call_id}, got none", kind=ErrorKind.CAPTURE_OFF)
    call = merge_layers(stages.values()) if len(stages) > 1 else next(iter(stages.values()))
    if call.layer_ids != spec.layer_ids:
        raise CaptureError(
            f"expected layers {list(spec.layer_ids)} from the workers, got {list(call.layer_ids or ())} "
            f"@ call {call_id}",
            kind=ErrorKind.LAYERS,
        )
    return call
