"""The row rule: how fast legal rows are checked, against copying the same bytes.

Every reader checks every row, so this bounds them all. Payload: int16 ``[S, L, K]`` with L=48, K=8, E=128.
The peer is what one would write first: sort each row, compare neighbours, compare the ends with the range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.measure import Result, relative_rates
from routeplane.spec import RouteSpec
from routeplane.validate import find_problems

if TYPE_CHECKING:
    from numpy.typing import NDArray

EXPERTS, LAYERS, TOP_K = 128, 48, 8
#: One thread, numpy alone. A kernel has bars of its own.
NUMPY_BAR = 0.18


def legal_routes(tokens: int, *, seed: int = 0) -> NDArray[np.int16]:
    """Legal random rows, owned by the caller: K strictly growing ids less than E apart, taken modulo E."""
    rng = np.random.default_rng(seed)
    # K-1 steps of at most (E-1) // (K-1) stay below E in sum, hence distinct modulo E
    routes_SLK = rng.integers(1, (EXPERTS - 1) // (TOP_K - 1) + 1, (tokens, LAYERS, TOP_K), dtype=np.int16)
    routes_SLK[:, :, 0] = rng.integers(0, EXPERTS, (tokens, LAYERS), dtype=np.int16)
    np.cumsum(routes_SLK, axis=2, out=routes_SLK)
    routes_SLK %= EXPERTS
    return routes_SLK


def sorted_rule(routes_SLK: NDArray[np.int16]) -> bool:
    """The peer: the rule by sorting. Blocks of 4,096 tokens, so that its copies stay small."""
    for start in range(0, len(routes_SLK), 4096):
        ordered = np.sort(routes_SLK[start : start + 4096], axis=2)
        in_range = (ordered[:, :, 0] >= 0) & (ordered[:, :, -1] < EXPERTS)
        distinct = (ordered[:, :, 1:] != ordered[:, :, :-1]).all(axis=2)
        if not ((in_range & distinct) | (ordered == -1).all(axis=2)).all():
            return False
    return True


def main(*, full: bool = False) -> list[Result]:
    """Measure on 25 MB, or on the 201 MB of 262,144 tokens."""
    routes_SLK = legal_routes(262_144 if full else 32_768)
    spec = RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=tuple(range(LAYERS)))
    if find_problems(routes_SLK, spec) or not sorted_rule(routes_SLK):
        raise RuntimeError("expected legal rows to measure on, got illegal ones")
    target = np.empty_like(routes_SLK)
    rates = relative_rates(
        {
            "np.copyto": lambda: np.copyto(target, routes_SLK),
            "find_problems": lambda: find_problems(routes_SLK, spec),
            "np.sort per row": lambda: sorted_rule(routes_SLK),
        },
        yardstick="np.copyto",
    )
    value = rates.pop("find_problems")
    return [Result(name="rules/int16_k8_legal", value=value, unit="x np.copyto rate", bar=NUMPY_BAR, peers=rates)]
