"""Reading: from a stream in memory to rows that a trainer's gates can take, against copying the routes once.

Payload: 64 ragged samples of some 4,096 tokens, 48 layers, K=8, int16 (201 MB), which leaves most caches. The last row
of each is MISSING, as engines leave it. One thread. A microbatch is padded and has at most 16,384 rows, in a buffer
that all of them take turns in.

Peers are other ways to send the same rows. They do the same work: decode, one xxh3-64 over each sample's rows against
the one sent along, the row rule, and the same padded microbatches in one reused buffer. ``read`` only reads the bytes:
no check of them can be faster.
"""

from __future__ import annotations

import base64
import io
import pickle
import re
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from benchmarks.bench_rules import EXPERTS, LAYERS, legal_routes
from benchmarks.measure import Result, relative_rates
from routeplane.batch import BatchOptions, RouteBatch, microbatches
from routeplane.batch.collation import BatchBuffers
from routeplane.batch.plan import TokenPlan, budget_groups
from routeplane.batch.slots import Shard
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import all_legal
from routeplane.stream import new_stream, open_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLES, TOKENS, TOP_K = 64, 4_096, 8
#: Rows of a microbatch, padding included, and the layers of a pipeline stage.
ROWS, STAGE = 16_384, tuple(range(12, 24))
SPEC = RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=tuple(range(LAYERS)))

#: Peer -> the share of its time that a microbatch may take.
PEER_BARS = {"nrlre1 envelope": 0.02, "pickle 5": 0.2, "msgspec": 0.5}

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


def stream_of(records: Iterable[RouteRecord], *, encoding: Literal["plain", "narrow"], max_bytes: int = 2**40) -> bytes:
    """The records as an Arrow stream; in one batch, so that streams of any payload have as many messages."""
    sink = io.BytesIO()
    with new_stream(sink, SPEC, encoding=encoding, max_bytes=max_bytes) as out:
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


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What every way has to make: padded groups of neighbours, each by its plan."""

    groups: list[tuple[int, ...]]
    plans: list[TokenPlan]

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Rounds:
        """As ``microbatches`` groups them."""
        groups = budget_groups(sizes, tokens=ROWS, layout="padded")
        return cls(groups=groups, plans=[TokenPlan.padded([sizes[index] for index in group]) for group in groups])

    def buffer(self) -> NDArray[np.int16]:
        """Memory, touched, for the largest of them."""
        rows = max(plan.num_rows for plan in self.plans)
        return np.full((rows, LAYERS, TOP_K), MISSING, dtype=np.int16)


def peer_microbatches(
    decoded: Iterable[NDArray[np.int16]], hashes: Sequence[int], rounds: Rounds, out: NDArray[np.int16]
) -> Iterator[NDArray[np.int16]]:
    """The work of every peer besides decoding, group by group."""
    arriving = iter(decoded)
    for group, plan in zip(rounds.groups, rounds.plans, strict=True):
        rows = [next(arriving) for _ in group]
        for each, expected in zip(rows, (hashes[index] for index in group), strict=True):
            if xxhash.xxh3_64_intdigest(each.data) != expected or not all_legal(each, SPEC):
                raise RuntimeError("expected the rows that were sent, got others")
        here = out[: plan.num_rows].reshape(*plan.shape, LAYERS, TOP_K)
        yield plan.gather(rows, fill=MISSING, out=here)


# ----------------------------------------------------------------------------------------------------------------------
# What is measured
# ----------------------------------------------------------------------------------------------------------------------


def read(stream: bytes, *, verify: bool = True, on_alarm: Literal["count", "raise", "ignore"] = "count") -> Rows:
    """The rows of all records: views of the stream, each record checked; by default as ``open_stream`` does it."""
    with open_stream(stream, on_alarm=on_alarm, verify=verify) as source:
        return [each.routes for each in source]


def batches_of(
    stream: bytes, pool: BatchBuffers, *, layers: tuple[int, ...] | None = None, verify: bool = True
) -> Iterator[RouteBatch]:
    """From the stream to microbatches; of a pipeline stage, or of all layers.

    A stage is cut where its rank would cut it. With ``verify`` records are whole, and the batch selects the layers.
    Without it the reader selects the layers before it looks at a row.
    """
    source = open_stream(stream, verify=verify)
    if layers is not None and not verify:
        source = source.select(layer_ids=layers)
    shard = None if layers is None else Shard(layers=layers)
    return pool.releasing(
        microbatches(source, tokens=ROWS, layout="padded", shard=shard, options=BatchOptions(buffers=pool))
    )


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


def reading(streams: Mapping[str, bytes], rows: Rows, *, rounds: int) -> list[Result]:
    """Rates of a verified open, and of the whole way to padded microbatches."""
    stream, pool = streams["plain"], BatchBuffers()
    source, target = np.concatenate(rows), np.zeros((sum(map(len, rows)), LAYERS, TOP_K), dtype=np.int16)
    hashes = [xxhash.xxh3_64_intdigest(each.data) for each in rows]
    work = Rounds.of([len(each) for each in rows])
    out = work.buffer()
    ours: dict[str, Callable[[], Iterable[Any]]] = {
        "microbatch": lambda: batches_of(stream, pool),
        "microbatch narrow": lambda: batches_of(streams["narrow"], pool),
    }
    theirs: dict[str, Callable[[], Iterable[Any]]] = {
        name: partial(lambda decode: peer_microbatches(decode(), hashes, work, out), decode)
        for name, decode in peers(rows).items()
    }
    for name, batches in {**ours, **theirs}.items():
        _require_equal(batches(), rows, work, name)
    ways: dict[str, Callable[[], object]] = {
        "np.copyto": lambda: np.copyto(target, source),
        "read": lambda: source.view(np.uint16).max(),
        "checked": lambda: read(stream, verify=False, on_alarm="ignore"),
        "quiet": lambda: read(stream, on_alarm="ignore"),
        "row rule": lambda: _require_legal(source),
        "xxh3-64": lambda: [xxhash.xxh3_64_intdigest(each.data) for each in rows],
        "verified": lambda: read(stream),
        **{name: partial(_exhaust, batches) for name, batches in {**ours, **theirs}.items()},
    }
    rates = relative_rates(ways, yardstick="np.copyto", rounds=rounds)
    others = {name: rates[name] for name in ("np.copyto", "read", *theirs)}
    # a batch is written once behind the checks
    limit = 1 / (1 / rates["row rule"] + 1 / rates["xxh3-64"] + 1)
    return [
        Result(
            name="read/verified_open",
            value=rates["verified"],
            unit=RATE,
            peers={
                "without alarms": rates["quiet"],
                "without alarms and checksums (rows are checked)": rates["checked"],
                "read": rates["read"],
            },
        ),
        Result(
            name="read/padded_microbatch",
            value=round(rates["microbatch"] / limit, 3),
            unit="share of 1 / (1 / rule + 1 / xxh3 + 1 / copy)",
            bar=0.6,
            peers={f"{name}, {RATE}": rate for name, rate in {**rates, "limit": round(limit, 4)}.items()},
        ),
        Result(name="read/padded_microbatch_narrow", value=rates["microbatch narrow"], unit=RATE, peers=others),
        *(
            Result(
                name=f"read/against_{name.replace(' ', '_')}",
                value=round(rates[name] / rates["microbatch"], 4),
                unit=f"x time of {name} given the same checks, to the same microbatch",
                bar=bar,
                higher_is_better=False,
                # what rule, hash and one copy alone would be
                peers={"limit": round(rates[name] / limit, 4)},
            )
            for name, bar in PEER_BARS.items()
            if name in rates
        ),
    ]


def of_the_limit(tokens: int, count: int, *, bar: float, rounds: int) -> Result:
    """A verified read of ``count`` records against what must be done: the row rule and xxh3-64, one after the other."""
    records = [record(index, tokens) for index in range(count)]
    stream = stream_of(records, encoding="plain")
    rows = [each.routes for each in records]
    source = np.concatenate(rows)
    target = np.zeros_like(source)
    rates = relative_rates(
        {
            "np.copyto": lambda: np.copyto(target, source),
            "row rule": lambda: _require_legal(source),
            "xxh3-64": lambda: [xxhash.xxh3_64_intdigest(each.data) for each in rows],
            "verified": lambda: read(stream),
        },
        yardstick="np.copyto",
        rounds=rounds,
    )
    limit = 1 / (1 / rates["row rule"] + 1 / rates["xxh3-64"])
    return Result(
        name=f"read/verified_{tokens}_of_limit",
        value=round(rates["verified"] / limit, 3),
        unit=f"share of 1 / (1 / rule + 1 / xxh3), {tokens}-token records",
        bar=bar,
        peers={f"{name}, {RATE}": rate for name, rate in {**rates, "limit": round(limit, 4)}.items()},
    )


def _require_legal(rows_SLK: NDArray[np.int16]) -> None:
    if not all_legal(rows_SLK, SPEC):
        raise RuntimeError("expected legal rows, got others")


def _exhaust(batches: Callable[[], Iterable[object]]) -> None:
    for _ in batches():
        pass


def _require_equal(batches: Iterable[Any], rows: Rows, work: Rounds, name: str) -> None:
    """Every way gives the same microbatches."""
    for batch, group, plan in zip(batches, work.groups, work.plans, strict=True):
        found = batch.routes.numpy() if isinstance(batch, RouteBatch) else batch
        if not np.array_equal(found, plan.gather([rows[index] for index in group], fill=MISSING)):
            raise RuntimeError(f"expected every way to give the same microbatches, got others from {name}")


def stages(stream: bytes, rows: Rows, *, rounds: int) -> list[Result]:
    """What a quarter of the layers costs, against all of them.

    Rows of a token lie together, so that numpy's copy of the quarter, which checks nothing, touches every page too.
    What a verified read cannot leave out are the rule and the hash of all layers.
    """
    source, stage = np.concatenate(rows), slice(STAGE[0], STAGE[-1] + 1)
    target, quarter = np.zeros_like(source), np.zeros((len(source), len(STAGE), TOP_K), dtype=np.int16)
    pools = [BatchBuffers() for _ in range(4)]
    ways: dict[str, Callable[[], object]] = {
        "np.copyto": lambda: np.copyto(target, source),
        "np.copyto of the quarter": lambda: np.copyto(quarter, source[:, stage]),
        "row rule": lambda: _require_legal(source),
        "xxh3-64": lambda: [xxhash.xxh3_64_intdigest(each.data) for each in rows],
    }
    for verify, (whole, part) in ((True, pools[:2]), (False, pools[2:])):
        found = dict(zip(("all", "stage"), _staged(stream, whole, part, verify=verify), strict=True))
        ways |= {f"{name}, {'verified' if verify else 'unverified'}": work for name, work in found.items()}
    rates = relative_rates(ways, yardstick="np.copyto", rounds=rounds, clock=process_time)
    time_of = {name: 1 / rate for name, rate in rates.items()}
    rule, both = time_of["row rule"], time_of["row rule"] + time_of["xxh3-64"]
    strided, parts = time_of["np.copyto of the quarter"], f"{len(STAGE)} of {LAYERS} layers over all"
    results = []
    for name, read_all, read_stage, bar in (("verified", both, both, 0.60), ("unverified", rule, 0.0, 0.35)):
        results.append(
            Result(
                name=f"read/pipeline_stage{'' if name == 'verified' else '_unverified'}",
                value=round(time_of[f"stage, {name}"] / time_of[f"all, {name}"], 3),
                unit=f"CPU time, {parts}, {name.replace('un', 'not ')}",
                bar=bar,
                higher_is_better=False,
                peers={
                    "limit by np.copyto": round((read_stage + strided) / (read_all + 1), 3),
                    **{f"{each}, x np.copyto time": round(spent, 3) for each, spent in time_of.items()},
                },
            )
        )
    return results


def _staged(
    stream: bytes, whole: BatchBuffers, part: BatchBuffers, *, verify: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Batches of all layers and of a stage."""
    return (
        lambda: _exhaust(lambda: batches_of(stream, whole, verify=verify)),
        lambda: _exhaust(lambda: batches_of(stream, part, layers=STAGE, verify=verify)),
    )


def memory(streams: Mapping[str, bytes]) -> list[Result]:
    """The most that reading holds besides the microbatches themselves, which have their memory already."""
    results = []
    for encoding, stream in streams.items():
        pool = BatchBuffers()
        _exhaust(lambda pool=pool, stream=stream: batches_of(stream, pool))  # type: ignore[misc]
        peak = _peak(lambda pool=pool, stream=stream: _exhaust(lambda: batches_of(stream, pool)))  # type: ignore[misc]
        largest = max(plan.num_rows for plan in Rounds.of(lengths(TOKENS)).plans) * LAYERS * TOP_K * 2
        results.append(
            Result(
                name=f"read/peak_memory_{encoding}",
                value=round(peak / largest, 4),
                unit="bytes held at most besides the output, per byte of the largest microbatch",
                bar=1.1,
                higher_is_better=False,
            )
        )
    return results


def main(*, full: bool = False) -> Iterator[Result]:
    """Measure, with more rounds where ``full``."""
    rounds = 15 if full else 5
    records = [record(index, length) for index, length in enumerate(lengths(TOKENS))]
    tenth = [record(index, max(2, length // 10)) for index, length in enumerate(lengths(TOKENS))]
    streams = {encoding: stream_of(records, encoding=encoding) for encoding in ("plain", "narrow")}
    rows = [each.routes for each in records]
    yield from opening(stream_of(tenth, encoding="plain"), streams["plain"])
    yield from reading(streams, rows, rounds=rounds)
    yield of_the_limit(2_048, 64, bar=0.8, rounds=3 * rounds)
    yield of_the_limit(128, 1_024, bar=0.4, rounds=3 * rounds)
    yield from stages(streams["plain"], rows, rounds=rounds)
    yield from memory(streams)
