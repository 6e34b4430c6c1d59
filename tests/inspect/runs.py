"""Small runs that look like real ones: skewed routers, versions, missing rows; and the same with some rows flipped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, CaptureState, Span
from routeplane.record.spec import RouteSpec

SPEC = RouteSpec(num_experts=16, top_k=4, layer_ids=(1, 2, 5), model="small")


def run(count: int = 6, *, seed: int = 0, lost: int = 0) -> list[RouteRecord]:
    """Records ``step-VERSION/INDEX`` under three weights versions; the first lacks the rows of ``lost`` tokens."""
    rng = np.random.default_rng(seed)
    popularity_VLE = rng.normal(0, 1.0, (3, SPEC.num_layers, 16))
    return [_record(rng, popularity_VLE, index, lost=lost if index == 0 else 0) for index in range(count)]


def _record(rng: np.random.Generator, popularity_VLE: np.ndarray, index: int, *, lost: int) -> RouteRecord:
    version = index % 3
    tokens = int(rng.integers(60, 120))
    scores = popularity_VLE[version] + rng.gumbel(size=(tokens, SPEC.num_layers, 16))
    routes_SLK = np.argsort(-scores, axis=2)[:, :, : SPEC.top_k].astype(np.int16)
    routes_SLK[20 : 20 + lost] = -1
    routes_SLK[-1] = -1
    edges = [0, 20, 20 + lost, tokens - 1, tokens] if lost else [0, tokens - 1, tokens]
    states: list[CaptureState] = ["captured", "lost", "captured", "not_fed"] if lost else ["captured", "not_fed"]
    return RouteRecord(
        sample_id=f"step-{version}/{index}",
        token_ids=rng.integers(0, 30_000, tokens),
        routes=routes_SLK,
        spans=(
            Span(start=0, stop=16, kind="prompt", role="user", call="c", weights_version=None),
            Span(start=16, stop=tokens, kind="generation", role="assistant", call="c", weights_version=version),
        ),
        captures=tuple(
            Capture(
                start=start,
                stop=stop,
                call="c",
                weights_version=version if state == "captured" else None,
                state=state,
            )
            for start, stop, state in zip(edges, edges[1:], states, strict=False)
        ),
        spec=SPEC,
    )


def flipped(record: RouteRecord, *, every: int = 7) -> RouteRecord:
    """One expert exchanged in every ``every``-th row that is there."""
    routes_SLK = record.routes.copy()
    for token, slot in np.argwhere(routes_SLK[:, :, 0] >= 0)[::every]:
        row = set(routes_SLK[token, slot].tolist())
        routes_SLK[token, slot, 0] = next(expert for expert in range(16) if expert not in row)
    return replace(record, routes=routes_SLK, checksum=None)
