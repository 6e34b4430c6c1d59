"""Runs with one fault of a known kind at a known place, made by a seed: two sides of the same rollouts.

The right side is the trainer's, under slightly other scores, so that near-ties flip; the left side is the engine's and
has the fault. Axes: S tokens, L captured layers, E experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import RouteSpec

__all__ = ["FAULTS", "SPEC", "Place", "Planted", "healthy", "planted"]

EXPERTS = 32
SPEC = RouteSpec(num_experts=EXPERTS, top_k=4, layer_ids=(1, 2, 3, 5, 6, 7), model="planted")
SAMPLES = 6
#: Noise of scores between the two sides: some 5% of the rows are other sets.
NEAR = 0.03


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a fault is: tokens ``[token, stop)`` of a sample, in ``layers`` (empty: all, or the whole run)."""

    sample: str | None
    token: int | None
    stop: int | None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Planted:
    """The two sides, and what was done to the left one."""

    left: list[RouteRecord]
    right: list[RouteRecord]
    kind: str
    place: Place


def healthy(seed: int, *, samples: int = SAMPLES) -> tuple[list[RouteRecord], list[RouteRecord]]:
    """Two sides that differ by near-ties alone."""
    rng = np.random.default_rng(seed)
    preference_LE = rng.normal(0, 1.0, (SPEC.num_layers, EXPERTS))
    left, right = [], []
    for index in range(samples):
        scores = _scores(rng, preference_LE, int(rng.integers(200, 320)))
        near = scores + rng.normal(0, NEAR, scores.shape)
        boundary = int(rng.integers(40, 100))
        tokens = rng.integers(0, 30_000, len(scores))
        left.append(_record(index, tokens, _rows(scores), boundary))
        right.append(_record(index, tokens, _rows(near), boundary))
    return left, right


def planted(kind: str, seed: int, *, least: int = 64, most: int = 100) -> Planted:
    """A healthy run with one fault of ``least`` to ``most`` tokens, at a place that the seed draws."""
    left, right = healthy(seed)
    rng = np.random.default_rng((seed, sorted(FAULTS).index(kind)))
    return FAULTS[kind](rng, left, right, int(rng.integers(least, most + 1)))


def _scores(rng: np.random.Generator, preference_LE: np.ndarray, tokens: int) -> np.ndarray:
    return preference_LE + rng.gumbel(size=(tokens, *preference_LE.shape))


def _rows(scores_SLE: np.ndarray) -> np.ndarray:
    routes = np.argsort(-scores_SLE, axis=2)[:, :, : SPEC.top_k].astype(np.int16)
    routes[-1] = -1
    return routes


def _record(index: int, tokens: np.ndarray, routes: np.ndarray, boundary: int) -> RouteRecord:
    end = len(tokens)
    return RouteRecord(
        sample_id=f"rollout-{index}",
        token_ids=tokens,
        routes=routes,
        spec=SPEC,
        spans=(
            Span(start=0, stop=16, kind="prompt", role="user", call="turn-1", weights_version=None),
            Span(start=16, stop=boundary, kind="generation", role="assistant", call="turn-1", weights_version=12),
            Span(start=boundary, stop=end, kind="generation", role="assistant", call="turn-2", weights_version=12),
        ),
        captures=(
            Capture(start=0, stop=boundary, call="turn-1", weights_version=12, state="captured"),
            Capture(start=boundary, stop=end - 1, call="turn-2", weights_version=12, state="captured"),
            Capture(start=end - 1, stop=end, call="turn-2", weights_version=None, state="not_fed"),
        ),
    )


def _with(record: RouteRecord, routes: np.ndarray, **changes: object) -> RouteRecord:
    return replace(record, routes=routes, checksum=None, **changes)  # type: ignore[arg-type]


def _draw(rng: np.random.Generator, left: list[RouteRecord], length: int, *, margin: int = 8) -> tuple[int, int, int]:
    """A sample, and ``length`` of its tokens away from its ends and from its call boundary."""
    index = int(rng.integers(len(left)))
    record = left[index]
    boundary = record.captures[1].start
    while True:
        token = int(rng.integers(margin, record.num_tokens - 1 - length - margin))
        if abs(token - boundary) > 2:
            return index, token, token + length


def _changed(
    kind: str, left: list[RouteRecord], right: list[RouteRecord], index: int, routes: np.ndarray, place: Place
) -> Planted:
    records = list(left)
    records[index] = _with(left[index], routes)
    return Planted(left=records, right=right, kind=kind, place=place)


def _at(left: list[RouteRecord], index: int, token: int, stop: int, layers: tuple[int, ...] = ()) -> Place:
    return Place(sample=left[index].sample_id, token=token, stop=stop, layers=layers)


def _token_late(rng, left, right, length):  # type: ignore[no-untyped-def]
    index, token, stop = _draw(rng, left, length)
    routes = left[index].routes.copy()
    distance = int(rng.integers(1, 4))
    routes[token:stop] = left[index].routes[token - distance : stop - distance]
    return _changed("token_shift", left, right, index, routes, _at(left, index, token, stop))


def _token_early(rng, left, right, length):  # type: ignore[no-untyped-def]
    index, token, stop = _draw(rng, left, length)
    routes = left[index].routes.copy()
    routes[token:stop] = left[index].routes[token + 1 : stop + 1]
    return _changed("token_shift", left, right, index, routes, _at(left, index, token, stop))


def _call_boundary(rng, left, right, length):  # type: ignore[no-untyped-def]
    index = int(rng.integers(len(left)))
    record = left[index]
    start, stop = record.captures[1].start, record.captures[1].stop
    routes = record.routes.copy()
    routes[start:stop] = record.routes[start - 1 : stop - 1]
    return _changed("call_boundary", left, right, index, routes, _at(left, index, start, stop))


def _layer_shift(rng, left, right, length):  # type: ignore[no-untyped-def]
    index, token, stop = _draw(rng, left, length)
    routes = left[index].routes.copy()
    routes[token:stop] = np.roll(routes[token:stop], 1, axis=1)
    return _changed("layer_shift", left, right, index, routes, _at(left, index, token, stop, SPEC.layer_ids))


def _slot_order(rng, left, right, length):  # type: ignore[no-untyped-def]
    index, token, stop = _draw(rng, left, length)
    routes = left[index].routes.copy()
    routes[token:stop] = routes[token:stop, :, ::-1]
    return _changed("slot_order", left, right, index, routes, _at(left, index, token, stop))


def _stale_buffer(rng, left, right, length):  # type: ignore[no-untyped-def]
    while True:
        index, token, stop = _draw(rng, left, length)
        if index and left[index - 1].num_tokens - 1 > stop:
            break
    routes = left[index].routes.copy()
    routes[token:stop] = left[index - 1].routes[token:stop]
    return _changed("stale_buffer", left, right, index, routes, _at(left, index, token, stop))


def _swapped_samples(rng, left, right, length):  # type: ignore[no-untyped-def]
    one, two = sorted(rng.choice(len(left), 2, replace=False).tolist())
    records = list(left)
    shortest = min(left[one].num_tokens, left[two].num_tokens) - 1
    for here, there in ((one, two), (two, one)):
        routes = left[here].routes.copy()
        routes[:shortest] = left[there].routes[:shortest]
        records[here] = _with(left[here], routes)
    return Planted(
        left=records, right=right, kind="swapped_samples", place=Place(sample=left[one].sample_id, token=0, stop=None)
    )


def _repeated_rows(rng, left, right, length):  # type: ignore[no-untyped-def]
    index, token, stop = _draw(rng, left, length)
    routes = left[index].routes.copy()
    routes[token:stop] = routes[token - 1]
    return _changed("repeated_rows", left, right, index, routes, _at(left, index, token, stop))


def _mixed_versions(rng, left, right, length):  # type: ignore[no-untyped-def]
    """The router of other weights: each row keeps about half of its experts."""
    index, token, stop = _draw(rng, left, length)
    routes = left[index].routes.copy()
    for row in routes[token:stop].reshape(-1, SPEC.top_k):
        kept = int(rng.integers(1, 4))
        others = [expert for expert in rng.permutation(EXPERTS) if expert not in row]
        row[kept:] = others[: SPEC.top_k - kept]
    return _changed("mixed_versions", left, right, index, routes, _at(left, index, token, stop))


def _expert_count(rng, left, right, length):  # type: ignore[no-untyped-def]
    """A router of 16 experts under a spec of 32: both sides see the same model."""
    half = EXPERTS // 2
    sides = []
    for records in (left, right):
        changed = []
        for number, record in enumerate(records):
            draw = np.random.default_rng((number, length))
            rows = np.argsort(draw.random((record.num_tokens, SPEC.num_layers, half)), axis=2)
            routes = rows[:, :, : SPEC.top_k].astype(np.int16)
            routes[-1] = -1
            changed.append(_with(record, routes))
        sides.append(changed)
    place = Place(sample=None, token=None, stop=None, layers=SPEC.layer_ids)
    return Planted(left=sides[0], right=sides[1], kind="expert_count", place=place)


def _frozen_layer(rng, left, right, length):  # type: ignore[no-untyped-def]
    index, token, stop = _draw(rng, left, length)
    slot = int(rng.integers(SPEC.num_layers))
    routes = left[index].routes.copy()
    routes[token:stop, slot] = routes[token - 1, slot]
    place = _at(left, index, token, stop, (SPEC.layer_ids[slot],))
    return _changed("frozen_layer", left, right, index, routes, place)


def _missing_rows(rng, left, right, length):  # type: ignore[no-untyped-def]
    index, token, stop = _draw(rng, left, length)
    record = left[index]
    routes = record.routes.copy()
    routes[token:stop] = -1
    captures: list[Capture] = []
    for capture in record.captures:
        inside = {edge for edge in (token, stop) if capture.start < edge < capture.stop}
        for start, end in itertools.pairwise(sorted({capture.start, *inside, capture.stop})):
            lost = token <= start < stop and capture.state == "captured"
            captures.append(
                replace(
                    capture,
                    start=start,
                    stop=end,
                    state="lost" if lost else capture.state,
                    weights_version=None if lost else capture.weights_version,
                )
            )
    records = list(left)
    records[index] = _with(record, routes, captures=tuple(captures))
    return Planted(left=records, right=right, kind="missing_rows", place=_at(left, index, token, stop))


#: Name of a fault -> what plants it.
FAULTS: dict[str, Callable[..., Planted]] = {
    "token_late": _token_late,
    "token_early": _token_early,
    "call_boundary": _call_boundary,
    "layer_shift": _layer_shift,
    "slot_order": _slot_order,
    "stale_buffer": _stale_buffer,
    "swapped_samples": _swapped_samples,
    "repeated_rows": _repeated_rows,
    "mixed_versions": _mixed_versions,
    "expert_count": _expert_count,
    "frozen_layer": _frozen_layer,
    "missing_rows": _missing_rows,
}
