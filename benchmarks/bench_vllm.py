"""Writing routes of a real vLLM engine: CPU time per engine step, against the same step with its routes thrown away.

64 concurrent sequences, in two geometries. ``tiny`` has steps of some 12 ms and sequences of 48 tokens: a record costs
half a millisecond of Python objects however small it is, so that the writer's share is as large as it can get, and it
has no bar. ``serving`` has steps of 25 ms and more, as large models on GPUs have, and sequences of 128 tokens: still
short, for a rollout. Ways are interleaved, a ratio is taken within its round, and a bar is judged by the upper end of
the 95% interval of the mean ratio. The rounds run in processes of their own (``vllm_rounds``).

CPU time of a whole process varies by several percent from round to round, more than the bar on the writer. It is judged
by what the clocks of threads say in the same rounds: the writer's thread, and what its scheduler takes of the engine's
thread more than one that throws rows away. The ratio of whole processes stands beside it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.measure import Result
from routeplane import RouteSpec
from routeplane.capture.vllm.engine_writer import EngineWriter
from routeplane.capture.vllm.interface import WriterConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What the Makefile gives engines: one process, so that its CPU time is all of engine, front end and writer.
_SETTINGS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING=0",
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_CPU_OMP_THREADS_BIND=nobind",
    "VLLM_NO_USAGE_STATS=1",
    "HF_HUB_OFFLINE=1",
    "TORCHDYNAMO_DISABLE=1",
    "OMP_NUM_THREADS=1",
)
UNIT = "x CPU time per step"


def main(*, full: bool) -> Iterator[Result]:
    """What a finish takes from the engine's step; with an engine, both writers and what vLLM's own capture costs."""
    yield _finish_stall(tokens=32_768 if full else 8_192)
    yield from _ticket_latency(rounds=12 if full else 6)
    yield from _engine_rounds(full=full)


def _engine_rounds(*, full: bool) -> list[Result]:
    """vLLM's own capture carries rows into its outputs; "discarded" throws them away where the writer takes them."""
    if find_spec("vllm") is None:
        print("  left out: vllm is not installed", flush=True)
        return []
    serving = _spent("serving", rounds=24 if full else 8)
    tiny = _spent("tiny", rounds=40 if full else 12)
    return [
        _ratio("vllm_writer_inside_over_capture", _with_writer(serving), serving["discarded beside"], bar=1.03),
        _ratio(
            "vllm_writer_inside_over_capture/whole", serving["written inside"], serving["discarded beside"], bar=None
        ),
        _ratio("vllm_writer_inside_over_capture/tiny", _with_writer(tiny), tiny["discarded beside"], bar=None),
        _ratio(
            "vllm_writer_inside_over_capture/tiny/whole", tiny["written inside"], tiny["discarded beside"], bar=None
        ),
        _ratio("vllm_writer_beside", tiny["written beside"], tiny["discarded beside"], bar=1.07),
        _ratio("vllm_capture_itself", tiny["discarded inside"], tiny["capture off"], bar=None),
    ]


def _with_writer(spent: Mapping[str, Sequence[float]]) -> list[float]:
    """Steps of vLLM's own capture, with what the clocks of threads say of the writer on top."""
    names = ("discarded beside", "thread", "scheduler, writing", "scheduler, discarding")
    columns = (spent[name] for name in names)
    return [step + thread + writing - discarding for step, thread, writing, discarding in zip(*columns, strict=True)]


def _spent(geometry: str, *, rounds: int) -> dict[str, list[float]]:
    command = ["env", *_SETTINGS, sys.executable, "-m", "benchmarks.vllm_rounds", str(rounds), geometry]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"expected rounds from {command}, got:\n{done.stderr[-2000:]}")
    spent: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return spent


def _finish_stall(*, tokens: int) -> Result:
    """How long the end of a long sequence holds up the engine's thread, against copying its rows once.

    48 layers, 8 of 128 experts; the rows of a prompt, then one step after the other. Each repetition measures both.
    """
    rows_RDK = _rows(tokens)
    spec = RouteSpec(num_experts=128, top_k=8, layer_ids=tuple(range(48)), model="m")
    stalls, copies, pauses = [], [], []
    with tempfile.TemporaryDirectory(prefix="routeplane-bench-") as place:
        config = WriterConfig(place=place, run="bench")
        writer = EngineWriter(spec, config, rank=0, logprobs_mode="raw_logprobs")
        for number in range(10):
            name = str(number)
            writer.open(name, range(tokens - 256), extra_args=None)
            sequence = writer.sequences[name]
            sequence.add([1], rows_RDK[: tokens - 256])
            for at in range(tokens - 256, tokens - 1):
                sequence.add([2], rows_RDK[at : at + 1])
            sequence.cached = 0
            started = time.perf_counter()
            rows_RDK.copy()
            copied = time.perf_counter()
            writer.finish(name, "length")
            stalls.append(time.perf_counter() - copied)
            copies.append(copied - started)
            if number < 7:
                _require_ticket(writer.take_answers(wait_s=60.0))
            else:
                pauses.append(_longest_pause(writer))
        writer.close()
    value = median(mine / yours for mine, yours in zip(stalls[1:7], copies[1:7], strict=True))
    return Result(
        name="vllm_finish_stall",
        value=round(value, 4),
        unit=f"x copying the rows of {tokens} tokens once",
        bar=2.0,
        higher_is_better=False,
        peers={
            "milliseconds": round(1e3 * median(stalls), 4),
            "copy, milliseconds": round(1e3 * median(copies), 3),
            # of a thread that never waits, while the record is made: the interpreter's lock goes to and fro
            "longest pause meanwhile, milliseconds": round(1e3 * median(pauses), 3),
        },
    )


def _ticket_latency(*, rounds: int) -> list[Result]:
    """From a sequence's last token to a ticket that can be redeemed, against making its rows durable by hand.

    Sequences of 1,024 tokens, 48 layers, 8 of 128 experts end every 20 ms, and the engine's loop takes answers. The
    yardstick writes the same bytes into a file, syncs it, renames it and syncs the folder: what a promise costs at
    least. Both in each round, one after the other.
    """
    rows_RDK = _rows(1_024)
    spec = RouteSpec(num_experts=128, top_k=8, layer_ids=tuple(range(48)), model="m")
    tickets: list[float] = []
    by_hand: list[float] = []
    with tempfile.TemporaryDirectory(prefix="routeplane-bench-") as place:
        config = WriterConfig(place=f"{place}/blocks", run="bench")
        writer = EngineWriter(spec, config, rank=0, logprobs_mode="raw_logprobs")
        for number in range(rounds + 1):
            tickets += _ticket_round(writer, rows_RDK, stem=f"{number}-")
            by_hand += [_durable(Path(place), rows_RDK.tobytes()) for _ in range(50)]
            if number == 0:
                tickets, by_hand = [], []
        writer.close()
    p99, least = float(np.percentile(tickets, 99)), float(np.percentile(by_hand, 99))
    return [
        Result(
            name="vllm_ticket_latency",
            value=round(1e3 * p99, 2),
            unit="ms p99 from the last token to a ticket",
            bar=50.0,
            higher_is_better=False,
            peers={
                "median": round(1e3 * median(tickets), 2),
                "by hand, p99": round(1e3 * least, 2),
                "by hand, median": round(1e3 * median(by_hand), 2),
                "tickets": float(len(tickets)),
            },
        ),
        Result(
            name="vllm_ticket_latency/by_hand",
            value=round(p99 / least, 3),
            unit="x p99 of write, fsync, rename, fsync of the folder",
            bar=None,
            higher_is_better=False,
            peers={"median": round(median(tickets) / median(by_hand), 3)},
        ),
    ]


def _ticket_round(writer: EngineWriter, rows_RDK: NDArray[np.uint8], *, stem: str) -> list[float]:
    """Seconds until each of 50 tickets is there."""
    ended: dict[str, float] = {}
    spent: list[float] = []
    begin = time.perf_counter()
    while len(spent) < 50:
        if len(ended) < 50 and time.perf_counter() >= begin + 0.02 * len(ended):
            name = f"{stem}{len(ended)}"
            writer.open(name, range(len(rows_RDK)), extra_args=None)
            sequence = writer.sequences[name]
            sequence.cached = 0
            sequence.add([1], rows_RDK)
            ended[name] = time.perf_counter()
            writer.finish(name, "length")
        for name, said in writer.take_answers(wait_s=0.001):
            _require_ticket([(name, said)])
            spent.append(time.perf_counter() - ended[name])
    return spent


def _durable(place: Path, content: bytes) -> float:
    """Seconds to make a file durable under its name."""
    started = time.perf_counter()
    with (place / "by-hand.tmp").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    (place / "by-hand.tmp").rename(place / "by-hand")
    folder = os.open(place, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    return time.perf_counter() - started


def _rows(tokens: int) -> NDArray[np.uint8]:
    keys_RLE = np.random.default_rng(0).random((min(tokens, 1024), 48, 128), dtype=np.float32)
    some_RLK = np.argsort(keys_RLE, axis=-1)[..., :8].astype(np.uint8)
    return np.concatenate([some_RLK] * (tokens // len(some_RLK)))


def _longest_pause(writer: EngineWriter) -> float:
    """Seconds that the engine's thread loses at most while the writer's thread makes the record."""
    longest, before = 0.0, time.perf_counter()
    while not (found := writer.take_answers()):
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    _require_ticket(found)
    return longest


def _require_ticket(found: Sequence[tuple[str, Mapping[str, object]]]) -> None:
    if [list(said) for _, said in found] != [["routeplane"]]:
        raise RuntimeError(f"expected a ticket, got {found}")


def _ratio(name: str, ours: Sequence[float], theirs: Sequence[float], *, bar: float | None) -> Result:
    ratios = [mine / yours for mine, yours in zip(ours, theirs, strict=True)]
    mean, half = fmean(ratios), 1.96 * stdev(ratios) / math.sqrt(len(ratios))
    return Result(
        name=name,
        value=round(mean + half, 4),
        unit=UNIT,
        bar=bar,
        higher_is_better=False,
        peers={
            "mean": round(mean, 4),
            "lower end": round(mean - half, 4),
            "milliseconds": round(1e3 * fmean(ours), 3),
            "rounds": len(ratios),
        },
    )
