"""The row rule: how fast legal rows are checked, against copying the same bytes.

Every reader checks every row, so this bounds them all. Payload: int16 ``[S, L, K]`` with L=48, E=128; 25 MB per K, or
201 MB, which leaves every cache. One thread.

Peers: what one would write first (sort each row, compare neighbours, compare the ends with the range), what decides
where numba is not installed, and ``np.max``, which only reads: no check can be faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.measure import Result, relative_rates
from routeplane.record.kernels import rows_are_legal
from routeplane.record.spec import RouteSpec
from routeplane.record.validate import all_legal, find_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

EXPERTS, LAYERS = 128, 48
#: K -> what the kernel must reach.
KERNEL_BARS = {4: 0.8, 8: 1.3, 10: 0.8, 22: 0.3}
#: Where the rule is as fast as memory is read: a share of ``np.max``, which only reads.
LIMITED_BY_READING = 4
NUMPY_BAR = 0.18


def legal_routes(tokens: int, *, top_k: int = 8, seed: int = 0) -> NDArray[np.int16]:
    """Legal random rows ``[tokens, 48, top_k]``, owned by the caller: growing ids less than E apart, modulo E."""
    rng = np.random.default_rng(seed)
    # K-1 steps of at most (E-1) // (K-1) stay below E in sum, hence distinct modulo E
    largest = (EXPERTS - 1) // max(1, top_k - 1)
    routes_SLK = rng.integers(1, largest + 1, (tokens, LAYERS, top_k), dtype=np.int16)
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


def numpy_rule(routes_SLK: NDArray[np.int16], spec: RouteSpec) -> bool:
    """The verdict without the kernel, which is not asked about pieces as small as these."""
    step = (2**18 - 1) // routes_SLK[0].nbytes
    return all(all_legal(routes_SLK[start : start + step], spec) for start in range(0, len(routes_SLK), step))


def measure(top_k: int, *, megabytes: int) -> list[Result]:
    """The kernel's result for one K, and for K=8 that of numpy alone."""
    routes_SLK = legal_routes(megabytes * 10**6 // (LAYERS * top_k * 2), top_k=top_k)
    spec = RouteSpec(num_experts=EXPERTS, top_k=top_k, layer_ids=tuple(range(LAYERS)))
    found = find_problems(routes_SLK, spec)
    verdicts = {rows_are_legal(routes_SLK, spec.experts_per_layer), sorted_rule(routes_SLK), not found}
    if verdicts != {True} or not numpy_rule(routes_SLK, spec):
        raise RuntimeError("expected legal rows to measure on, got illegal ones")
    target = np.empty_like(routes_SLK)
    ways: dict[str, Callable[[], object]] = {
        "np.copyto": lambda: np.copyto(target, routes_SLK),
        "find_problems": lambda: find_problems(routes_SLK, spec),
        "numpy alone": lambda: numpy_rule(routes_SLK, spec),
        "np.max (reads only)": lambda: routes_SLK.max(),
    }
    rates = relative_rates(ways, yardstick="np.copyto")
    if top_k == 8:
        # a hundred times as slow, so once is enough, and apart: what runs after it finds nothing in the caches
        slow = {"np.copyto": ways["np.copyto"], "np.sort per row": lambda: sorted_rule(routes_SLK)}
        rates["np.sort per row"] = relative_rates(slow, yardstick="np.copyto", rounds=3)["np.sort per row"]
    value, unit, name = rates.pop("find_problems"), "x np.copyto rate", f"rules/int16_k{top_k}_legal"
    if top_k == LIMITED_BY_READING:
        rates["x np.copyto rate"] = value
        value, unit = round(value / rates["np.max (reads only)"], 4), "x rate of np.max, which only reads"
    results = [Result(name=name, value=value, unit=unit, bar=KERNEL_BARS[top_k], peers=rates)]
    if top_k == 8:
        results.append(Result(name=f"{name}_numpy", value=rates["numpy alone"], unit=unit, bar=NUMPY_BAR))
    return results


def main(*, full: bool = False) -> Iterator[Result]:
    """Measure every K that has a bar."""
    for top_k in KERNEL_BARS:
        yield from measure(top_k, megabytes=201 if full else 25)
