"""The worker extension in a real engine whose own capture is off, and the probe against engines whose capture lies.

Axes: R rows, D decoder layers, L captured layers, K top-k slots.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllm import LLM, RequestOutput

from routeplane.capture.vllm import call_from_workers, probe
from routeplane.errors import CaptureError, ErrorKind, UsageError
from routeplane.record.assembly import assemble
from routeplane.record.spec import RouteSpec
from tests.capture.vllm_engine import LONG, SHORT, SPEC, Engine, assert_equals_reference, running_engine, states

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine with capture on, and a second of the same weights without it, for all tests here."""
    with running_engine(tmp_path_factory.mktemp("qwen3_moe")) as running:
        yield running


@pytest.fixture(scope="module")
def bare(engine: Engine) -> Iterator[Engine]:
    """The same weights in an engine without capture, whose worker listens to its routers."""
    llm = LLM(
        str(engine.folder),
        dtype="float32",
        block_size=32,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_batched_tokens=256,
        enable_chunked_prefill=False,
        worker_extension_cls="routeplane.capture.vllm.RouteWorkerExtension",
    )
    assert [[0, 2, 3]] == llm.collective_rpc("routeplane_start")
    yield dataclasses.replace(engine, llm=llm)
    llm.collective_rpc("routeplane_stop")


def call_of(bare: Engine, output: RequestOutput, *, spec: RouteSpec = SPEC) -> Any:
    """The call of a finished request, from the worker's rows."""
    return call_from_workers(
        bare.llm.collective_rpc("routeplane_take", args=(output.request_id,)),
        spec,
        prompt_ids=output.prompt_token_ids,
        generation_ids=output.outputs[0].token_ids,
        weights_version=6,
        call_id=output.request_id,
    )


def test_the_worker_has_the_rows_that_the_engine_does_not_return(bare: Engine) -> None:
    """Concurrent requests at temperature 1: every row of every layer, without the engine's own flag."""
    bare.llm.reset_prefix_cache()
    for output in bare.ask(LONG, SHORT, SHORT[:3]):
        assert output.outputs[0].routed_experts is None
        [record] = assemble([call_of(bare, output)], SPEC, sample_id="s").records
        fed = record.num_tokens - 1
        assert [(0, fed, "captured", 6), (fed, fed + 1, "not_fed", None)] == states(record)
        assert_equals_reference(record, bare.model)


def test_cached_rows_are_missing_and_say_so(bare: Engine) -> None:
    """A prefix from the cache is never computed, so the worker cannot see it: not captured, never zeros."""
    bare.llm.reset_prefix_cache()
    bare.ask(LONG)
    [output] = bare.ask([*LONG[:70], 400, 401])
    [record] = assemble([call_of(bare, output)], SPEC, sample_id="s").records

    assert [(0, 64, "not_captured", None), (64, 83, "captured", 6), (83, 84, "not_fed", None)] == states(record)
    assert_equals_reference(record, bare.model, first_row=64)


def test_rows_are_taken_once_and_by_their_own_spec(bare: Engine) -> None:
    """A request that no worker saw, or whose layers are others, is refused."""
    [output] = bare.ask(SHORT)
    other = RouteSpec(num_experts=16, top_k=4, layer_ids=(0, 1, 2))
    with pytest.raises(CaptureError) as caught:
        call_of(bare, output, spec=other)
    assert ErrorKind.LAYERS == caught.value.kind
    with pytest.raises(CaptureError) as caught:
        call_of(bare, output)
    assert ErrorKind.CAPTURE_OFF == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# The probe
# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lying:
    """A real engine whose rows are changed on their way: ``change(rows_RDK, prompt)``."""

    llm: LLM
    change: Callable[[NDArray[Any], int], NDArray[Any] | None]

    @property
    def model_config(self) -> Any:
        """The engine's."""
        return self.llm.model_config

    def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        """The engine's, with other rows."""
        outputs: list[RequestOutput] = self.llm.generate(*args, **kwargs)
        for output in outputs:
            choice = output.outputs[0]
            rows_RDK = choice.routed_experts.copy()
            changed = self.change(rows_RDK, len(output.prompt_token_ids))
            output.outputs = [dataclasses.replace(copy.copy(choice), routed_experts=changed)]
        return outputs


def everywhere(layer: int, ids: int | list[int]) -> Callable[[NDArray[Any], int], NDArray[Any]]:
    """All rows of one layer have these ids."""

    def change(rows_RDK: NDArray[Any], prompt: int) -> NDArray[Any]:
        rows_RDK[:, layer] = ids
        return rows_RDK

    return change


def drafted(rows_RDK: NDArray[Any], prompt: int) -> NDArray[Any]:
    """Another model's choices stand where generated tokens were decoded (ids in range, distinct)."""
    rows_RDK[prompt:, [0, 2, 3]] = (rows_RDK[prompt:, [0, 2, 3]] + 5) % 16
    return rows_RDK


def stale(rows_RDK: NDArray[Any], prompt: int) -> NDArray[Any]:
    """A buffer that is not refreshed while decoding."""
    rows_RDK[prompt:] = rows_RDK[prompt - 1]
    return rows_RDK


def shifted(rows_RDK: NDArray[Any], prompt: int) -> NDArray[Any]:
    """Decoded rows are those of the token before."""
    rows_RDK[prompt:] = rows_RDK[prompt - 1 : -1].copy()
    return rows_RDK


LIES: dict[str, tuple[Callable[[NDArray[Any], int], NDArray[Any] | None], ErrorKind]] = {
    "no routes": (lambda rows_RDK, prompt: None, ErrorKind.CAPTURE_OFF),
    "all zero": (lambda rows_RDK, prompt: np.zeros_like(rows_RDK), ErrorKind.UNCAPTURED_SLOT),
    "a kernel that writes nothing": (everywhere(2, 0), ErrorKind.UNCAPTURED_SLOT),
    "layers one further": (lambda rows_RDK, prompt: np.roll(rows_RDK, 1, axis=1), ErrorKind.DENSE_SLOT),
    "physical ids": (everywhere(3, [1, 2, 3, 17]), ErrorKind.ID_OUT_OF_RANGE),
    "one row for all tokens": (everywhere(3, [1, 2, 3, 4]), ErrorKind.CONSTANT_LAYER),
    "a draft model's rows": (drafted, ErrorKind.ROW_CONFLICT),
    "a stale buffer": (stale, ErrorKind.ROW_CONFLICT),
    "rows of the token before": (shifted, ErrorKind.ROW_CONFLICT),
}


@pytest.mark.parametrize("name", LIES)
def test_a_capture_that_lies_is_found(engine: Engine, name: str) -> None:
    """Each known way of being wrong has its kind, at start-up."""
    change, kind = LIES[name]

    with pytest.raises(CaptureError) as caught:
        probe(Lying(engine.llm, change), SPEC)
    assert kind == caught.value.kind


def test_an_honest_capture_passes(engine: Engine) -> None:
    """In float32 every row of a generated token is the row of the token read."""
    report = probe(engine.llm, SPEC)

    assert (29, 1.0, None) == (report.rows, report.agreement, report.deltas_keep_rows)
    with pytest.raises(UsageError):
        probe(engine.llm, SPEC, min_agreement=2.0)
