"""Ranks whose batches are cut where the data lies: what comes into a rank's process, and what the relay holds.

A relay is one process a node. It reads each block once and runs ``microbatches(shard=)`` for every rank; a rank is sent
its batches alone. Here the relay is a process behind a pipe, over a folder; ``tests/stream/test_mooncake.py`` has one
over Mooncake, and ``docs/how-to/read-in-a-trainer.md`` shows one on Ray.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import pickle
import resource
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from routeplane.batch import BatchOptions, RouteBatch, Shard, collate, microbatches
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.stream import flight, folder, mooncake
from routeplane.stream.blocks import ReadOptions
from routeplane.testing.builders import watermarked_record, watermarked_spec

LAYERS, TOP_K, TOKENS = 48, 8, 8_192
SPEC: RouteSpec = watermarked_spec(layers=tuple(range(LAYERS)), top_k=TOP_K)
CP, PP, DP = 2, 4, 8


def records() -> list[RouteRecord]:
    """One step: a record for every data-parallel rank."""
    return [watermarked_record(index, num_tokens=3_200 + 8 * index, spec=SPEC) for index in range(DP)]


def shards() -> Iterator[Shard]:
    """What each of the 64 ranks takes."""
    for context, stage, data in itertools.product(range(CP), range(PP), range(DP)):
        width = LAYERS // PP
        layers = SPEC.layer_ids[width * stage : width * (stage + 1)]
        yield Shard(data_parallel=(data, DP), context_parallel=(context, CP), layers=layers)


def relay(pipe: Any, place: str, store: Mapping[str, Any] | None) -> None:
    """Read the place once, then cut for each rank that asks; None: say how much memory that took at most, and end."""
    options = ReadOptions(acknowledge="call")
    with (
        folder.open_reader(place, producers=1, options=options)
        if store is None
        else mooncake.open_reader(place, store=store, producers=1, options=options)
    ) as reader:
        held = list(reader)
    pipe.send("ready")
    while (shard := pipe.recv()) is not None:
        batches = list(microbatches(held, spec=SPEC, tokens=TOKENS, shard=shard))
        pipe.send_bytes(pickle.dumps(batches, protocol=5))
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A place that holds one step."""
    path = str(tmp_path_factory.mktemp("ranks") / "place")
    with folder.open_writer(path, SPEC, run="run", producer="p") as writer:
        for record in records():
            writer.write(record)
    return path


@functools.cache
def served(place: str, count: int) -> tuple[list[bytes], int]:
    """What a relay over a folder sends to the first ranks, and the most memory that it took, in kB."""
    return sent_by_relay(place, count)


def sent_by_relay(place: str, count: int, store: Mapping[str, Any] | None = None) -> tuple[list[bytes], int]:
    """What a relay sends to the first ranks, and the most memory that it took, in kB; ``store``: over Mooncake."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=relay, args=(theirs, place, store))
    process.start()
    assert "ready" == ours.recv()
    sent = []
    for shard in list(shards())[:count]:
        ours.send(shard)
        sent.append(ours.recv_bytes())
    ours.send(None)
    peak = int(ours.recv())
    process.join(30)
    return sent, peak


def trained_on(batch: RouteBatch) -> int:
    """Bytes of a batch's tensors."""
    return sum(value.nbytes for value in vars(batch).values() if isinstance(value, torch.Tensor))


def test_a_rank_is_sent_what_it_trains_on(place: str) -> None:
    """At CP2 x PP4 x DP8 at most 1.1x of its tensors' bytes; they are those of a cut of the whole."""
    sent, _ = served(place, CP * PP * DP)
    require_own_parts(sent)


def require_own_parts(sent: list[bytes]) -> None:
    """Every rank was sent its own rows, and little else."""
    wanted = list(shards())
    assert CP * PP * DP == len(sent)
    for data in sent:
        batches: list[RouteBatch] = pickle.loads(data)
        assert len(data) <= 1.1 * sum(map(trained_on, batches))
    for shard, data in list(zip(wanted, sent, strict=True))[::21]:
        (batch,) = pickle.loads(data)
        assert shard.data_parallel is not None
        mine = records()[shard.data_parallel[0] :: DP]
        cut = Shard(context_parallel=shard.context_parallel, layers=shard.layers)
        expected = collate(mine, SPEC, layout="packed", shard=cut, options=BatchOptions())
        assert torch.equal(expected.routes, batch.routes)
        assert torch.equal(expected.token_ids, batch.token_ids)
        assert expected.plan.token_N.tolist() == batch.plan.token_N.tolist()


def test_a_relay_holds_no_more_for_more_ranks(place: str) -> None:
    """Its memory is the step's, whether 4 ranks ask or 64."""
    few, many = (served(place, count)[1] for count in (4, CP * PP * DP))
    assert many <= 1.05 * few + 4 * 1024


def test_a_fetch_through_a_server_brings_the_cut_alone(place: str) -> None:
    """Over Flight, a stage's layers of its own records: at most 1.1x of their bytes, besides a block's frame."""
    width = LAYERS // PP
    with flight.Server(place) as server, flight.open_reader(server.place, producers=1) as reader:
        name = next(reader.names())
        store: Any = reader._store
        came: list[int] = []
        received = store._received

        def counted(*arguments: Any) -> Any:
            data = received(*arguments)
            came.append(data.size)
            return data

        store._received = counted
        key = reader.fetch(name)[0].key
        mine = next(record for record in records() if record.key == key)
        came.clear()
        found = reader.fetch(name, keys=[key], layer_ids=SPEC.layer_ids[:width], tokens=(0, 256))
    assert [mine.slice(0, 256).select(SPEC.layer_ids[:width]).checksum] == [record.checksum for record in found]
    assert sum(came) <= 1.1 * found[0].nbytes + 16_384
