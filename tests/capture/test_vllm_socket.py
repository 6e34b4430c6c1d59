"""What crosses the socket between a real engine process and its front end, counted as it is received."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from routeplane.capture.vllm import request_args
from tests.capture.async_engine import AsyncEngine, running_async_engine, sampling
from tests.capture.block_files import records_of
from tests.capture.vllm_engine import LONG, assert_equals_reference

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

#: rows, decoder layers, slots; a byte each
ROUTE_BYTES = (len(LONG) + 40 - 1) * 4 * 4


class Counter:
    """Stands before the decoder of what the engine process sends: counts bytes, and routes among what they say."""

    def __init__(self, decode: Any) -> None:
        self._decode = decode
        self.bytes = self.routes = 0

    def __call__(self, frames: Any) -> Any:
        """Decode, and count."""
        self.bytes += sum(memoryview(frame).nbytes for frame in frames)
        made = self._decode(frames)
        self.routes += sum(
            one.routed_experts.nbytes for one in made.outputs if getattr(one, "routed_experts", None) is not None
        )
        return made


async def crossed(engine: AsyncEngine, counter: Counter, **shipping: Any) -> tuple[int, int]:
    """``(bytes, route bytes)`` of one request's answer."""
    before = counter.bytes, counter.routes
    options = sampling(max_tokens=40, logprobs=None, extra_args=request_args(**shipping))
    outputs = [one async for one in engine.llm.generate({"prompt_token_ids": LONG}, options, "r")]
    assert 40 == len(outputs[-1].outputs[0].token_ids)
    return counter.bytes - before[0], counter.routes - before[1]


def test_no_route_byte_crosses_with_the_writer_inside(tmp_path: Path) -> None:
    """A recorded request sends what one without capture sends, and a ticket; the engine's end ends the stream."""
    place = tmp_path / "routes"
    place.mkdir()
    config = {"routeplane": {"place": str(place), "run": "r", "carrier": "tests.capture.block_files.open_writer"}}
    with running_async_engine(
        tmp_path / "model",
        scheduler_cls="routeplane.capture.vllm.RouteScheduler",
        additional_config=config,
        enable_prefix_caching=False,
        disable_log_stats=True,
    ) as engine:
        decoder = engine.llm.engine_core.decoder
        counter = decoder.decode = Counter(decoder.decode)
        engine.run(crossed(engine, counter, capture=False))
        bare = engine.run(crossed(engine, counter, capture=False))
        inline = engine.run(crossed(engine, counter, inline=True))
        written = engine.run(crossed(engine, counter, sample_id="written"))
        engine.run(crossed(engine, counter, sample_id="again"))
        model = engine.model

    assert (0, ROUTE_BYTES, 0) == (bare[1], inline[1], written[1])
    assert inline[0] - bare[0] >= ROUTE_BYTES
    assert 0 < written[0] - bare[0] < 512 < ROUTE_BYTES
    records = records_of(place)
    assert ["written", "again"] == list(records)
    for record in records.values():
        assert_equals_reference(record, model)
