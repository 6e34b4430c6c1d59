"""What the worker extension keeps of a request whose forwards do not follow each other, against a dictionary by token.

No engine: the runner is the three arrays that the tape reads of it. The engine's own run is in ``test_vllm_worker``.

Axes: N token rows of one forward, R rows, L layers, K top-k slots.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from routeplane.capture.vllm import call_from_workers
from routeplane.capture.vllm.worker import RouteWorkerExtension, _WorkerTape
from routeplane.record.assembly import assemble
from routeplane.testing.builders import watermark, watermarked_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SPEC = watermarked_spec(layers=(1, 4), top_k=3)


def rows_of(start: int, stop: int) -> NDArray[np.int16]:
    """The true rows ``[start, stop)``, ``[R, L, K]``."""
    token, layer, k = np.arange(start, stop), np.asarray(SPEC.layer_ids), np.arange(SPEC.top_k)
    return watermark(0, token[:, None, None], layer=layer[None, :, None], k=k[None, None, :])


def worker_that_ran(pieces: Sequence[tuple[int, int]]) -> RouteWorkerExtension:
    """A worker whose forwards computed these ``[start, stop)`` of one request, each with its true rows."""
    runner: Any = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["r-01234567"]))
    tape = _WorkerTape(runner, SPEC.layer_ids)
    for start, stop in pieces:
        runner.query_start_loc = SimpleNamespace(np=np.asarray([0, stop - start]))
        runner.input_batch.num_computed_tokens_cpu = np.asarray([start])
        for slot, layer in enumerate(SPEC.layer_ids):
            tape.add(layer, torch.from_numpy(rows_of(start, stop)[:, slot].copy()))
    worker = RouteWorkerExtension()
    worker._routeplane_tape = tape
    return worker


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=5))
def test_a_row_that_no_forward_computed_leaves_its_place_empty(pieces: list[tuple[int, int]]) -> None:
    """A request that resumes on another's cached blocks skips tokens: these are absent, and all others stay theirs."""
    intervals = [(start, start + size) for start, size in pieces]
    held = {token for start, stop in intervals for token in range(start, stop)}
    prompt = max(held) + 1
    part = worker_that_ran(intervals).routeplane_take("r")
    call = call_from_workers([part], SPEC, prompt_ids=range(prompt), generation_ids=[7], weights_version=2, call_id="r")
    [record] = assemble([call], SPEC, sample_id="s").records

    expected_SLK = SPEC.missing_rows(prompt + 1)
    for token in held:
        expected_SLK[token] = rows_of(token, token + 1)[0]
    np.testing.assert_array_equal(expected_SLK, record.routes)
    assert len(held) == record.coverage().count("captured")
    assert prompt - len(held) == record.coverage().count("not_captured")
