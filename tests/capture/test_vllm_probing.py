"""The probe against a real engine whose rows are changed on their way.

Axes: R rows, D decoder layers, K top-k slots.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllm import LLM, RequestOutput

from routeplane.capture.vllm import probe
from routeplane.errors import CaptureError, ErrorKind, UsageError
from tests.capture.vllm_engine import SPEC, Engine

pytestmark = pytest.mark.vllm


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


def shifted_throughout(rows_RDK: NDArray[Any], prompt: int) -> NDArray[Any]:
    """Every row is that of the token before, whether it is generated or read."""
    return np.concatenate([rows_RDK[:1], rows_RDK[:-1]])


def shifted_back(rows_RDK: NDArray[Any], prompt: int) -> NDArray[Any]:
    """Every row is that of the token behind."""
    return np.concatenate([rows_RDK[1:], rows_RDK[-1:]])


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
    "all rows of the token before": (shifted_throughout, ErrorKind.ROW_CONFLICT),
    "all rows of the token behind": (shifted_back, ErrorKind.ROW_CONFLICT),
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

    assert (39, 1.0) == (report.rows, report.agreement)
    with pytest.raises(UsageError):
        probe(engine.llm, SPEC, min_agreement=2.0)
