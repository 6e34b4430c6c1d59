"""Exchanges with real vLLM servers, as recorded, each with the routes of an independent forward of the same weights.

Axes: S tokens, L captured layers, K top-k slots.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from routeplane.record.spec import RouteSpec

__all__ = ["DATA", "GENERATIONS", "Exchange", "exchange", "exchanges"]

DATA = Path(__file__).parents[1] / "data"
#: the two capture generations of vLLM
GENERATIONS = ("0.30", "0.32")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One request, its response (a list of chunks where it was streamed), and what is true of each choice."""

    name: str
    spec: RouteSpec
    request: dict[str, Any]
    response: Any
    sequences: list[dict[str, Any]]

    @property
    def first_row(self) -> int | None:
        """What the request left out."""
        return self.request.get("routed_experts_prompt_start")

    @property
    def prompt_ids(self) -> list[int] | None:
        """Of a request whose response does not repeat them."""
        return self.request.get("token_ids")

    def reference(self, index: int, *, first_row: int = 0) -> list[list[list[int]]]:
        """``[S][L][K]``, each row sorted, of the tokens that were fed."""
        sequence = self.sequences[index]
        by_layer = sequence["reference_sorted_by_layer"]
        return [
            [by_layer[str(layer)][token] for layer in self.spec.layer_ids]
            for token in range(first_row, len(sequence["token_ids"]) - 1)
        ]


@cache
def exchanges(generation: str) -> tuple[Exchange, ...]:
    """Every recorded exchange of one generation."""
    document = json.loads((DATA / f"vllm-{generation}-http.json").read_text(encoding="utf-8"))
    spec = RouteSpec.from_hf_config(document["model"])
    return tuple(
        Exchange(
            name=case["name"],
            spec=spec,
            request=case["request"],
            response=case["response"],
            sequences=case["sequences"],
        )
        for case in document["cases"]
    )


def exchange(generation: str, name: str) -> Exchange:
    """The exchange of a name."""
    [found] = [one for one in exchanges(generation) if one.name == name]
    return found
