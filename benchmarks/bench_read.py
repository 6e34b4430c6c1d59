"""Reading: from a stream in memory to rows that a trainer's gates can take, against copying the routes once.

Payload: 64 ragged samples of some 4,096 tokens, 48 layers, K=8, int16 (201 MB); without ``full`` of 1,024 (50 MB).
The last row of each is MISSING, as engines leave it. One thread.

Peers are other ways to send the same rows. They do the same work: decode, one xxh3-64 over each sample's rows against
the one sent along, the row rule, and the padded microbatch in the same reused buffer.
"""

from __future__ import annotations

import base64
import io
import pickle
import re
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from benchmarks.bench_rules import EXPERTS, LAYERS, legal_routes
from benchmarks.measure import Result, relative_rates
from routeplane.align import TokenPlan
from routeplane.record import RouteRecord
from routeplane.spans import Capture, Span
from routeplane.spec import MISSING, RouteSpec
from routeplane.stream import new_stream, open_stream
from routeplane.validate import all_legal

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLES, TOP_K = 64, 8
SPEC = RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=tuple(range(LAYERS)))

Rows = Sequence["NDArray[np.int16]"]
RATE = "x np.copyto rate"

# ----------------------------------------------------------------------------------------------------------------------
# The payload
# ----------------------------------------------------------------------------------------------------------------------


def lengths(tokens: int, *, seed: int = 0) -> list[int]:
    """Lengths from three to five quarters of ``tokens``, ``tokens`` on average."""
    short = np.random.default_rng(seed).integers(3 * tokens // 4, tokens, SAMPLES // 2)
    return [*short.tolist(), *(2 * tokens - short).tolist()]


def record(index: int, tokens: int) -> RouteRecord:
    """One sample, half prompt and half generated."""
    routes_SLK = legal_routes(tokens, top_k=TOP_K, seed=index)
    routes_SLK[-1] = MISSING
    half = tokens // 2
    return RouteRecord(
        sample_id=f"sample-{index}",
        token_ids=np.arange(tokens, dtype=np.int32),
        routes=routes_SLK,
        spans=(
            Span(start=0, stop=half, kind="prompt", role="user", call="call", weights_version=None),
            Span(start=half, stop=tokens, kind="generation", role="assistant", call="call", weights_version=1),
        ),
        captures=(
            Capture(start=0, stop=tokens - 1, call="call", weights_version=1, state="captured"),
            Capture(start=tokens - 1, stop=tokens, call="call", weights_version=None, state="not_fed"),
        ),
        spec=SPEC,
    )


def stream_of(records: Iterable[RouteRecord]) -> bytes:
    """The records as an Arrow stream in one batch, so that streams of any payload have as many messages."""
    sink = io.BytesIO()
    with new_stream(sink, SPEC, max_bytes=2**40) as out:
        for each in records:
            out.write(each)
    return sink.getvalue()


# ----------------------------------------------------------------------------------------------------------------------
# The peers
# ----------------------------------------------------------------------------------------------------------------------

_ENVELOPE = re.compile(r"nrlre1:(int8|int16|int32):([0-9]+)x([0-9]+)x([0-9]+):")


def to_envelope(rows: NDArray[np.int16]) -> str:
    """``nrlre1:dtype:SxLxK:base64``."""
    shape = "x".join(map(str, rows.shape))
    return f"nrlre1:{rows.dtype}:{shape}:{base64.b64encode(rows.data).decode('ascii')}"


def from_envelope(text: str) -> NDArray[np.int16]:
    """The rows of an envelope; read-only."""
    head = _ENVELOPE.match(text)
    if head is None:
        raise ValueError(f"expected an nrlre1 envelope, got {text[:40]!r}")
    data = base64.b64decode(text[head.end() :], validate=True)
    return np.frombuffer(data, dtype=head[1]).reshape([int(size) for size in head.groups()[1:]])


def to_npy(rows: NDArray[np.int16]) -> str:
    """A ``.npy`` file in base64, as inference servers return it in JSON."""
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode("ascii")


def from_npy(text: str) -> NDArray[np.int16]:
    """The rows of ``to_npy``."""
    return np.asarray(np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False))


def peers(rows: Rows) -> dict[str, Callable[[], Iterable[NDArray[np.int16]]]]:
    """Name -> decoding what was encoded here; each gives all rows, in order."""
    envelopes = [to_envelope(each) for each in rows]
    files = [to_npy(each) for each in rows]
    pickled = pickle.dumps(list(rows), protocol=5)
    found: dict[str, Callable[[], Iterable[NDArray[np.int16]]]] = {
        "nrlre1 envelope": lambda: map(from_envelope, envelopes),
        "base64 .npy": lambda: map(from_npy, files),
        "pickle 5": lambda: pickle.loads(pickled),
    }
    if find_spec("msgspec") is not None:
        found["msgspec"] = _msgspec(rows)
    return found


def _msgspec(rows: Rows) -> Callable[[], Iterable[NDArray[np.int16]]]:
    msgpack: Any = import_module("msgspec.msgpack")
    data = msgpack.encode([(each.shape, each.data.cast("B")) for each in rows])
    decoder = msgpack.Decoder(list[tuple[tuple[int, int, int], memoryview]])
    return lambda: (np.frombuffer(body, dtype=np.int16).reshape(shape) for shape, body in decoder.decode(data))


def microbatch(decoded: Iterable[NDArray[np.int16]], hashes: Sequence[int], plan: TokenPlan, out: Any) -> None:
    """The work of every peer once its rows are decoded."""
    rows = list(decoded)
    for each, expected in zip(rows, hashes, strict=True):
        if xxhash.xxh3_64_intdigest(each.data) != expected or not all_legal(each, SPEC):
            raise RuntimeError("expected the rows that were sent, got others")
    plan.gather(rows, fill=MISSING, out=out)


# ----------------------------------------------------------------------------------------------------------------------
# What is measured
# ----------------------------------------------------------------------------------------------------------------------


def read(stream: bytes, *, verify: bool = True, on_alarm: Literal["count", "raise", "ignore"] = "count") -> Rows:
    """The rows of all records: views of the stream, each record checked; by default as ``open_stream`` does it."""
    with open_stream(stream, on_alarm=on_alarm, verify=verify) as source:
        return [each.routes for each in source]


def microbatch_of(stream: bytes, plan: TokenPlan, out: Any) -> None:
    """From the stream to the padded buffer."""
    plan.gather(read(stream), fill=MISSING, out=out)


def opening(small: bytes, large: bytes) -> list[Result]:
    """What it costs to open a stream, which should not depend on how much it holds."""
    seconds: dict[int, list[float]] = {len(small): [], len(large): []}
    for _ in range(200):
        for stream in (small, large):
            start = perf_counter()
            open_stream(stream).close()
            seconds[len(stream)].append(perf_counter() - start)
    ratio = median(seconds[len(large)]) / median(seconds[len(small)])
    size = f"time, {len(large) / len(small):.0f}x the payload over 1x"
    return [
        Result(name="read/open", value=round(ratio, 3), unit=size, bar=1.5, higher_is_better=False),
        Result(
            name="read/open_allocates",
            value=max(0, _peak(lambda: open_stream(large).close()) - _peak(lambda: open_stream(small).close())),
            unit="bytes at most, more than for a tenth of the payload",
            bar=0.0,
            higher_is_better=False,
        ),
        Result(
            name="read/records_allocate",
            value=round(_peak(lambda: read(large)) / len(large), 5),
            unit="bytes held at most, per byte of payload (records are views)",
            bar=0.01,
            higher_is_better=False,
        ),
    ]


def _peak(work: Callable[[], object]) -> int:
    """Most bytes that Python, numpy and Arrow held at once beyond what they held before."""
    work()
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return int(peak) + int(pa.total_allocated_bytes()) - int(arrow)


def reading(stream: bytes, rows: Rows) -> list[Result]:
    """Rates of a verified open, and of the whole way to a padded microbatch."""
    plan = TokenPlan.padded([len(each) for each in rows])
    out = np.full((*plan.shape, LAYERS, TOP_K), MISSING, dtype=np.int16)
    source, target = np.concatenate(rows), np.empty((sum(map(len, rows)), LAYERS, TOP_K), dtype=np.int16)
    hashes = [xxhash.xxh3_64_intdigest(each.data) for each in rows]
    wanted = plan.gather(rows, fill=MISSING)
    decoders = peers(rows)
    ours: dict[str, Callable[[], object]] = {
        "checked": lambda: read(stream, verify=False, on_alarm="ignore"),
        "quiet": lambda: read(stream, on_alarm="ignore"),
        "verified": lambda: read(stream),
        "microbatch": lambda: microbatch_of(stream, plan, out),
    }
    theirs: dict[str, Callable[[], object]] = {
        name: partial(lambda decode: microbatch(decode(), hashes, plan, out), decode)
        for name, decode in decoders.items()
    }
    for name in ("microbatch", *theirs):
        out.fill(0)
        {**ours, **theirs}[name]()
        if not np.array_equal(out, wanted):
            raise RuntimeError(f"expected every way to give the same microbatch, got another from {name}")
    rates = relative_rates(
        {"np.copyto": lambda: np.copyto(target, source), **ours, **theirs}, yardstick="np.copyto", rounds=7
    )
    others = {name: rates[name] for name in ("np.copyto", *theirs)}
    return [
        Result(
            name="read/verified_open",
            value=rates["verified"],
            unit=RATE,
            bar=2.0,
            peers={
                "without alarms": rates["quiet"],
                "without alarms and checksums (rows are checked)": rates["checked"],
            },
        ),
        Result(name="read/padded_microbatch", value=rates["microbatch"], unit=RATE, bar=0.45, peers=others),
    ]


def main(*, full: bool = False) -> list[Result]:
    """Measure on 201 MB, or on 50 MB."""
    tokens = 4_096 if full else 1_024
    records = [record(index, length) for index, length in enumerate(lengths(tokens))]
    tenth = [record(index, max(2, length // 10)) for index, length in enumerate(lengths(tokens))]
    stream = stream_of(records)
    return opening(stream_of(tenth), stream) + reading(stream, [each.routes for each in records])
