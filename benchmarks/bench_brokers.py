"""Planes between processes: Ray against TransferQueue, Flight against plain Flight, a thousand producers, and growth.

Payload of the first two: that of ``bench_read`` (64 ragged samples, 48 layers, K=8, int16: 201 MB with ``full``, else
50 MB). A peer is given the rows alone and checks nothing; ours are encoded, carried, and every record is verified.

TransferQueue needs an environment of its own: ``python -m venv .venv-transferqueue`` and in it
``pip install TransferQueue==0.1.11 numpy``. Where that is absent its recorded cost stands in, and the result's name
says so.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from benchmarks.bench_read import SPEC, lengths, record
from benchmarks.measure import Result
from routeplane.record.codec import write_batch
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import RouteSpec
from routeplane.stream import new_stream, open_stream
from routeplane.stream.flight import FlightPlane
from routeplane.stream.flight_service import FlightService, ServiceOptions

TRANSFER_QUEUE = Path(__file__).parents[1] / ".venv-transferqueue" / "bin" / "python"
#: Put plus get of TransferQueue 0.1.11 over copying the same 201 MB, as it was measured once (two cores, AVX-512).
RECORDED_PEER = (91 + 728) / 29
#: What Ray reads at start-up; of the benchmark's own process.
RAY_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
ROUNDS = 3

_SPAWN = multiprocessing.get_context("spawn")


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = perf_counter()
    work()
    return perf_counter() - start


def copying(records: Sequence[RouteRecord]) -> Callable[[], None]:
    """The yardstick: all rows into memory that was touched before."""
    source = np.concatenate([each.routes for each in records])
    target = np.zeros_like(source)
    return lambda: np.copyto(target, source)


# ----------------------------------------------------------------------------------------------------------------------
# Ray and TransferQueue
# ----------------------------------------------------------------------------------------------------------------------

_PEER = """
import json, sys, time
import numpy as np, ray, torch, transfer_queue as tq
from tensordict import TensorDict
lengths, rounds = json.loads(sys.argv[1]), int(sys.argv[2])
ray.init(address="local", num_cpus=8, object_store_memory=700 * 2**20, include_dashboard=False, log_to_driver=False,
         runtime_env={"env_vars": {"PYTHONPATH": ":".join(path for path in sys.path if path)}})
tq.init()
rows = [torch.from_numpy(np.ones((length, 48, 8), dtype=np.int16)) for length in lengths]
source = torch.cat(rows).numpy()
target = np.zeros_like(source)
keys = [f"sample-{index}" for index in range(len(rows))]
for turn in range(rounds + 1):
    start = time.perf_counter(); np.copyto(target, source); copied = time.perf_counter() - start
    start = time.perf_counter()
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    tq.kv_batch_put(keys=keys, partition_id=f"p{turn}", fields=TensorDict({"routes": nested}, batch_size=len(rows)))
    tq.kv_batch_get(keys=keys, partition_id=f"p{turn}")["routes"][0].sum()
    print("RESULT", json.dumps([copied, time.perf_counter() - start]), flush=True)
    tq.kv_clear(keys=keys, partition_id=f"p{turn}")
"""


def peer_seconds(records: Sequence[RouteRecord]) -> list[float] | None:
    """Put plus get of TransferQueue, round by round; None where it is not there."""
    if not TRANSFER_QUEUE.exists():
        return None
    command = [str(TRANSFER_QUEUE), "-c", _PEER, json.dumps([each.num_tokens for each in records]), str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **RAY_SETTINGS})
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if len(found) != ROUNDS + 1:
        raise RuntimeError(f"expected {ROUNDS + 1} rounds of TransferQueue, got {len(found)}: {done.stderr[-500:]}")
    return [spent for _, spent in found[1:]]


def ray_plane(records: Sequence[RouteRecord]) -> list[Result]:
    """Put, get and verify through a plane, against put and get through TransferQueue."""
    os.environ.update(RAY_SETTINGS)
    # Ray is loaded here, so that the other benchmarks run where it is not installed
    import ray

    from routeplane.stream.ray import PlaneOptions, RayPlane

    theirs = peer_seconds(records)
    copy = copying(records)
    copies, puts, gets = [], [], []
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=1200 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    for _ in range(ROUNDS + 1):
        plane = RayPlane.create(PlaneOptions(groups=("g",))).lingering(False)
        plane.stats()
        copies.append(seconds(copy))
        puts.append(seconds(partial(send, plane, records)))
        gets.append(seconds(partial(receive, plane, len(records), "g")))
        plane.stop()
    ray.shutdown()
    ours = [put + get for put, get in zip(puts, gets, strict=True)][1:]
    copied = median(copies[1:])
    peer = median(theirs) if theirs is not None else RECORDED_PEER * copied
    name = "brokers/ray_over_transferqueue" + ("" if theirs is not None else "_as_recorded")
    return [
        Result(
            name=name,
            value=round(median(ours) / peer, 4),
            unit="put + get + verify, x the time of TransferQueue's put + get",
            bar=0.1,
            higher_is_better=False,
            peers={
                "ours, x np.copyto": round(median(ours) / copied, 2),
                "our put, x np.copyto": round(median(puts[1:]) / copied, 2),
                "our get and verify, x np.copyto": round(median(gets[1:]) / copied, 2),
                "TransferQueue, x np.copyto": round(peer / copied, 2),
            },
        )
    ]


def send(plane: Any, records: Sequence[RouteRecord]) -> None:
    """Write all records in blocks of 16 MiB of rows."""
    with new_stream(plane, records[0].spec, max_bytes=16 * 2**20) as sink:
        for each in records:
            sink.write(each)


def receive(plane: Any, count: int, group: str = "default") -> None:
    """Read and verify all records; alarms are left out, as the peers have none."""
    with open_stream(plane, group=group, on_alarm="ignore") as source:
        found = sum(1 for each in source if each.num_tokens)
    if found != count:
        raise RuntimeError(f"expected {count} records, got {found}")


# ----------------------------------------------------------------------------------------------------------------------
# Flight
# ----------------------------------------------------------------------------------------------------------------------


class _Plain(fl.FlightServerBase):  # type: ignore[misc]  # pyarrow ships no types
    """What pyarrow gives: batches are kept as they come, and given as they are."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._batches: list[Any] = []
        self._schema: Any = None

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Keep."""
        self._schema = reader.schema
        self._batches = [chunk.data for chunk in reader]
        writer.write(b"kept")

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Give."""
        return fl.GeneratorStream(self._schema, iter(self._batches))


def _serve_plain(pipe: Any) -> None:
    with _Plain() as server:
        pipe.send(f"grpc://127.0.0.1:{server.port}")
        pipe.recv()


def _serve_ours(pipe: Any, options: ServiceOptions) -> None:
    with FlightService(options) as service:
        # what loading the benchmark's own modules took is none of the service's
        spent, idle = process_time(), _peak_resident()
        pipe.send(service.location)
        pipe.recv()
        report = service.report()
        pipe.send((process_time() - spent, _peak_resident() - idle, report.records, report.peak_bytes))


def _peak_resident() -> int:
    usage = Path("/proc/self/status").read_text()
    peak = next(line for line in usage.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


@contextlib.contextmanager
def served(work: Callable[..., None], *args: Any) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """A service in a process of its own: its address, and what it says at its end."""
    here, there = _SPAWN.Pipe()
    process = _SPAWN.Process(target=work, args=(there, *args), daemon=True)
    process.start()

    def ended() -> Any:
        here.send("end")
        return here.recv()

    yield here.recv(), ended
    if process.is_alive():
        with contextlib.suppress(OSError):
            here.send("end")
        process.join(30)


def plain_flight(location: str, batches: Sequence[pa.RecordBatch]) -> None:
    """Put and get of batches that were encoded before."""
    client = fl.connect(location)
    writer, answers = client.do_put(fl.FlightDescriptor.for_path("x"), batches[0].schema)
    for batch in batches:
        writer.write_batch(batch)
    writer.done_writing()
    answers.read()
    writer.close()
    if sum(chunk.data.num_rows for chunk in client.do_get(fl.Ticket(b"x"))) != sum(map(len, batches)):
        raise RuntimeError("expected as many rows as were put")
    client.close()


def blocks_of(records: Sequence[RouteRecord], max_bytes: int) -> Iterator[list[RouteRecord]]:
    """Records as the writer gathers them."""
    held: list[RouteRecord] = []
    for each in records:
        held.append(each)
        if sum(one.nbytes for one in held) >= max_bytes:
            yield held
            held = []
    if held:
        yield held


def flight(records: Sequence[RouteRecord]) -> list[Result]:
    """Put, get and verify through the service, against plain Flight with the very batches.

    Both services run over all rounds, of which the first does not count: fresh memory costs more than what is measured.
    """
    results = []
    for encoding in ("narrow", "plain"):
        batches = [write_batch(held, SPEC, encoding=encoding) for held in blocks_of(records, 16 * 2**20)]
        ours, theirs = [], []
        options = ServiceOptions(producers=None)
        with served(_serve_plain) as (plain, _), served(_serve_ours, options) as (location, _):
            plane = FlightPlane(location, linger=False)
            new_stream(plane, SPEC, encoding=encoding).close()  # which says what the stream is of
            with open_stream(plane, on_alarm="ignore") as source:
                arriving = iter(source)
                for attempt in range(ROUNDS + 1):
                    sent = [replace(each, attempt=attempt, checksum=None) for each in records]
                    theirs.append(seconds(partial(plain_flight, plain, batches)))
                    ours.append(seconds(partial(_through, plane, sent, arriving, encoding=encoding)))
        ratios = [plain / own for plain, own in zip(theirs[1:], ours[1:], strict=True)]
        results.append(
            Result(
                name=f"brokers/flight_{encoding}",
                value=round(median(ratios), 3),
                unit="x plain pyarrow Flight's rate for put + get of the same batches",
                bar=0.8,
            )
        )
    return results


def _through(
    plane: FlightPlane, records: Sequence[RouteRecord], arriving: Iterator[RouteRecord], *, encoding: Any
) -> None:
    with new_stream(plane, SPEC, encoding=encoding, max_bytes=16 * 2**20) as sink:
        for each in records:
            sink.write(each)
    for each in records:
        if next(arriving).key != each.key:
            raise RuntimeError(f"expected {each.key}, got another")


# ----------------------------------------------------------------------------------------------------------------------
# A thousand producers
# ----------------------------------------------------------------------------------------------------------------------

SMALL = RouteSpec(num_experts=64, top_k=4, layer_ids=tuple(range(8)))


def small_records(first: int, count: int, *, tokens: int = 16) -> list[RouteRecord]:
    """Records of one call."""
    routes_SLK = np.broadcast_to(np.arange(4, dtype=np.int16), (tokens, 8, 4))
    return [
        RouteRecord(
            sample_id=f"s{index}",
            token_ids=np.arange(tokens, dtype=np.int32),
            routes=routes_SLK,
            spans=(Span(start=0, stop=tokens, kind="generation", call="c", weights_version=1),),
            captures=(Capture(start=0, stop=tokens, call="c", weights_version=1, state="captured"),),
            spec=SMALL,
        )
        for index in range(first, first + count)
    ]


def _produce(plane: FlightPlane, first: int, producers: int, each: int) -> None:
    """Producers of one process: all are there at once, and take turns to write a block."""
    sinks = [new_stream(plane, SMALL, producer=f"p{first + at}") for at in range(producers)]
    for at, sink in enumerate(sinks):
        for item in small_records((first + at) * each, each):
            sink.write(item)
        sink.close()


def thousand_producers(*, producers: int, each: int) -> list[Result]:
    """Records per second of the service's own processor time, for put, take and acknowledge; and its memory."""
    bound = 16 * 2**20
    options = ServiceOptions(producers=producers, max_bytes=bound)
    with served(_serve_ours, options) as (location, ended):
        plane = FlightPlane(location, linger=False)
        share = producers // 4
        workers = [_SPAWN.Process(target=_produce, args=(plane, at * share, share, each)) for at in range(4)]
        for worker in workers:
            worker.start()
        reader = open_stream(plane, on_alarm="ignore", verify=False)
        with reader:
            found = sum(1 for _ in reader)
        for worker in workers:
            worker.join()
        spent, peak, taken, held = ended()
    if not found == taken == producers * each:
        raise RuntimeError(f"expected {producers * each} records, got {found} of {taken}")
    return [
        Result(
            name="brokers/thousand_producers",
            value=round(taken / spent),
            unit=f"records/s per core of the service ({producers} producers in 4 processes, {each} records a block)",
            bar=20_000.0,
        ),
        Result(
            name="brokers/thousand_producers_held",
            value=round(held / bound, 3),
            unit="of max_bytes, at most held",
            bar=1.0,
            higher_is_better=False,
            peers={"peak resident bytes of the service above an idle one": float(peak), "bound": float(bound)},
        ),
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Growth
# ----------------------------------------------------------------------------------------------------------------------


def growth(*, full: bool) -> list[Result]:
    """The exponent of time in the number of records, and in their bytes, over two decades: 1 is linear."""
    counts = [100, 1_000, 10_000]
    sizes = [160, 1_600, 16_000]
    found = {
        "records": _exponent([(count, small_records(0, count)) for count in counts]),
        "bytes": _exponent([(size, small_records(0, 40 if full else 20, tokens=size)) for size in sizes]),
    }
    return [
        Result(
            name=f"brokers/growth_in_{name}",
            value=round(exponent, 3),
            unit="exponent of put + get + verify over two decades",
            bar=1.1,
            higher_is_better=False,
            peers={f"seconds for {amount:g} {name}": spent for amount, spent in points},
        )
        for name, (exponent, points) in found.items()
    ]


def _exponent(cases: Sequence[tuple[int, list[RouteRecord]]]) -> tuple[float, list[tuple[int, float]]]:
    points = []
    for amount, records in cases:
        rounds = []
        for _ in range(ROUNDS):
            with FlightService(ServiceOptions()) as service:
                rounds.append(seconds(partial(_at_once, FlightPlane(service.location, linger=False), records)))
        points.append((amount, round(min(rounds), 4)))
    (few, first), (many, last) = points[0], points[-1]
    return math.log(last / first) / math.log(many / few), points


def _at_once(plane: FlightPlane, records: Sequence[RouteRecord]) -> None:
    """A producer and a consumer side by side, in blocks of a hundred records."""

    def produce() -> None:
        with new_stream(plane, SMALL, max_bytes=100 * records[0].nbytes) as sink:
            for each in records:
                sink.write(each)

    producer = threading.Thread(target=produce)
    producer.start()
    receive(plane, len(records))
    producer.join()


def main(*, full: bool = False) -> list[Result]:
    """Measure on 201 MB, or on 50 MB."""
    records = [record(index, length) for index, length in enumerate(lengths(4_096 if full else 1_024))]
    return [
        *ray_plane(records),
        *flight(records),
        *thousand_producers(producers=1_000 if full else 200, each=100),
        *growth(full=full),
    ]


if __name__ == "__main__":
    for result in main(full="--full" in sys.argv):
        print(result)
