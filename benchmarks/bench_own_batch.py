"""A trainer's own batch: checked, read from the layout of its stack, and written back, against copying the same rows.

Payload: sequences of some 2,200 tokens, 48 layers (three of them dense), K=8: 48 of them (75 MiB), or 64 with
``--full``; the row of each last token is absent. One thread, CPU time. Each number says how many times as long the
work takes as ``copy``: the real rows copied once into memory of their own, which all this work needs as well. Both are
larger than the 64 MiB of freed memory that malloc keeps to hand out again: pages are fresh on both sides. ``warm``:
into memory that is already there; the difference is the system's, which hands out pages.

What is written holds more than the real rows: dense layers and padding (verl: 1.7 times as much here), and ids of 4
(tunix) or 8 bytes (ms_swift). ``copy_int32``, ``copy_int64``: the real rows copied into such ids; ``fill_tunix``,
``fill_ms_swift``: memory of the size of the stack's array filled with one id, and no row read: the limits of these.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.bench_rules import EXPERTS, LAYERS, legal_routes
from benchmarks.measure import Result, relative_rates
from routeplane.batch import LAYOUTS, LayoutBatch, RouteBatch, from_layout, to_layout
from routeplane.record.spec import MISSING, RouteSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOP_K, DENSE, PROMPT, RESPONSE = 8, 3, 512, 3_584
SPEC = RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=tuple(range(DENSE, LAYERS)))
#: Layouts whose batches are measured: padded on both sides, on one, packed, jagged; int16, narrow and wide ids.
STACKS = ("verl", "nemo_rl", "nemo_rl_tq", "skyrl", "prime_rl", "ms_swift", "tunix")
UNIT = "x of copying the rows"


def payload(sequences: int) -> LayoutBatch:
    """Sequences with legal rows, all but the last token of each captured."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(100, PROMPT, sequences)
    lengths = prompts + rng.integers(RESPONSE // 4, RESPONSE, sequences)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    routes = np.ascontiguousarray(legal_routes(int(offsets[-1]), top_k=TOP_K)[:, DENSE:])
    routes[offsets[1:] - 1] = MISSING
    generated = np.zeros(int(offsets[-1]), dtype=np.bool_)
    for start, prompt, stop in zip(offsets.tolist(), prompts.tolist(), offsets[1:].tolist(), strict=False):
        generated[start + prompt : stop] = True
    return LayoutBatch(
        spec=SPEC,
        names=tuple(f"sample-{at}" for at in range(sequences)),
        token_ids=rng.integers(5, 1_000, int(offsets[-1])).astype(np.int32),
        generated=generated,
        routes=routes,
        offsets=offsets,
        captured=lengths - 1,
    )


def as_batch(laid: LayoutBatch) -> RouteBatch:
    """A layout's rows as a checked batch."""
    return RouteBatch.from_tensors(
        torch.from_numpy(laid.routes),
        torch.from_numpy(laid.token_ids),
        spec=SPEC,
        cu_seqlens=laid.offsets,
        captured=laid.captured,
    )


def write(laid: LayoutBatch, layout: str) -> Any:
    """The batch as the stack has it."""
    depth = LAYERS if LAYOUTS[layout].axis == "decoder" else None
    return to_layout(laid, layout=layout, decoder_layers=depth).content


def read(native: Any, layout: str) -> LayoutBatch:
    """What the stack's batch means."""
    return from_layout(native, SPEC, layout=layout)


def main(*, full: bool) -> Iterator[Result]:
    """Check, read and write; each against copying the rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _measure(payload(64 if full else 48))
    finally:
        torch.set_num_threads(threads)


def _measure(laid: LayoutBatch) -> list[Result]:
    natives = {layout: write(laid, layout) for layout in STACKS}
    for layout, native in natives.items():
        again = read(native, layout)
        if not np.array_equal(again.routes, laid.routes):
            raise AssertionError(f"expected the rows back from {layout}")
    warm = np.empty_like(laid.routes)
    base: dict[str, Callable[[], object]] = {
        "copy": laid.routes.copy,
        "warm": lambda: np.copyto(warm, laid.routes),
    }
    times = _times({**base, "check": lambda: as_batch(laid)})
    found = [_result("check", times["check"], 2.0, {"warm": times["warm"]})]
    readers = {name: partial(read, natives[name], name) for name in STACKS}
    found += _both("into", _times({**base, **readers}), 4.0)
    whole = _times({**base, "verl": lambda: RouteBatch.from_layout(natives["verl"], SPEC, layout="verl")})
    found.append(_result("into_batch", whole["verl"], 4.0, {"warm": whole["warm"]}))
    writers: dict[str, Callable[[], object]] = {name: partial(write, laid, name) for name in STACKS}
    writers["copy_int32"] = lambda: laid.routes.astype(np.int32)
    writers["copy_int64"] = lambda: laid.routes.astype(np.int64)
    for name in ("tunix", "ms_swift"):
        array = np.asarray(natives[name][LAYOUTS[name].routes])
        writers[f"fill_{name}"] = partial(np.full, array.shape, MISSING, array.dtype)
    return found + _both("out", _times({**base, **writers}), 3.0)


def _times(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    rates = relative_rates(ways, yardstick="copy", clock=time.process_time)
    return {name: round(1 / rate, 3) for name, rate in rates.items()}


def _both(what: str, times: dict[str, float], bar: float) -> list[Result]:
    """verl's number with its bar, the other stacks beside it."""
    return [_result(what, times["verl"], bar, {name: each for name, each in times.items() if name != "verl"})]


def _result(what: str, value: float, bar: float, peers: dict[str, float]) -> Result:
    return Result(name=f"own/{what}", value=value, unit=UNIT, bar=bar, higher_is_better=False, peers=peers)
