"""What reading holds besides the microbatches themselves, counted by every allocator that takes part.

A path is mapped and its records are views; the bound would break if rows were copied, widened or selected into memory
of their own for more than the microbatch at hand.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest

from routeplane import Capture, RouteRecord, Span, new_stream, open_stream
from routeplane.batch import BatchOptions, microbatches
from routeplane.batch.collation import BatchBuffers
from routeplane.batch.slots import Shard
from routeplane.record.spec import RouteSpec

SPEC = RouteSpec(num_experts=256, top_k=8, layer_ids=tuple(range(24)))
TOKENS, SAMPLES, ROWS = 600, 24, 4_096


def make(sample: int) -> RouteRecord:
    """A record whose rows say sample, token and layer."""
    first_SL = sample + 3 * np.arange(TOKENS)[:, None] + 7 * np.arange(SPEC.num_layers)
    return RouteRecord(
        sample_id=f"sample-{sample}",
        token_ids=np.arange(TOKENS),
        routes=(first_SL[:, :, None] + np.arange(SPEC.top_k)) % 256,
        spans=(Span(start=0, stop=TOKENS, kind="prompt", call="call", weights_version=None),),
        captures=(Capture(start=0, stop=TOKENS, call="call", weights_version=1, state="captured"),),
        spec=SPEC,
    )


def save(path: Path, encoding: Literal["plain", "narrow"]) -> str:
    """A stream of six microbatches."""
    with new_stream(path, SPEC, encoding=encoding) as sink:
        for sample in range(SAMPLES):
            sink.write(make(sample))
    return str(path)


@pytest.mark.parametrize("layers", [None, tuple(range(6, 18))], ids=["whole", "stage"])
@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_reading_holds_little_besides_a_microbatch(
    tmp_path: Path, encoding: Literal["plain", "narrow"], layers: tuple[int, ...] | None
) -> None:
    """Peak memory above the output is at most 1.1 of one microbatch, in either encoding, whole or of a stage."""
    path, pool = save(tmp_path / "routes.arrows", encoding), BatchBuffers()
    shard = None if layers is None else Shard(layers=layers)

    def read() -> int:
        largest = 0
        with open_stream(path) as reader:
            for batch in pool.releasing(
                microbatches(reader, tokens=ROWS, shard=shard, options=BatchOptions(buffers=pool))
            ):
                largest = max(largest, batch.routes.nbytes)
        return largest

    largest = read()  # the pool has its memory now, and kernels are loaded
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    read()
    peak = tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - arrow
    tracemalloc.stop()

    assert largest > 500_000
    assert peak <= 1.1 * largest
