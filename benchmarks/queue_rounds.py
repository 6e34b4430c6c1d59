"""Rounds of one step's records through a place on Ray and through TransferQueue, in one cluster and one process.

Runs in TransferQueue's own environment (``make .venv-transfer-queue/.stamp``); ``bench_carriers`` starts it. A round is
put and get of every record; ours also verifies each. Neither side's start-up is counted. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from statistics import median

import ray
import torch
import transfer_queue
from tensordict import TensorDict

from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.stream import ray as carrier
from routeplane.stream.blocks import BlockLimits
from routeplane.testing.builders import watermarked_record, watermarked_spec

RECORDS, TOKENS, ROUNDS = 32, 1_024, 5
SPEC = watermarked_spec(layers=tuple(range(48)), top_k=8)


def through_ray(writer: object, records: Iterator[RouteRecord], sent: list[RouteRecord]) -> float:
    """Seconds until every record was read, verified, behind the place."""
    start = time.perf_counter()
    for record in sent:
        writer.write(record)  # type: ignore[attr-defined]
    writer.flush()  # type: ignore[attr-defined]
    came = list(islice(records, len(sent)))
    spent = time.perf_counter() - start
    assert [record.checksum for record in came] == [record.checksum for record in sent]
    return spent


def through_queue(names: list[str], fields: TensorDict) -> float:
    """Seconds until every sample was got."""
    start = time.perf_counter()
    transfer_queue.kv_batch_put(names, "train", fields=fields)
    got = transfer_queue.kv_batch_get(names, "train", select_fields=["routes", "token_ids"])
    spent = time.perf_counter() - start
    assert sum(len(part) for part in got["routes"].unbind()) == RECORDS * TOKENS
    transfer_queue.kv_clear(names, "train")
    return spent


def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
    """One tensor a sample."""
    found: torch.Tensor = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return found


def rounds() -> dict[str, list[float]]:
    """Seconds of each round, the first of them not counted."""
    base = [watermarked_record(index, num_tokens=TOKENS, spec=SPEC) for index in range(RECORDS)]
    columns = {name: [torch.tensor(getattr(record, name)) for record in base] for name in ("routes", "token_ids")}
    fields = TensorDict({name: jagged(parts) for name, parts in columns.items()}, batch_size=RECORDS)
    found: dict[str, list[float]] = {"ray": [], "queue": []}
    # a block a step, as the other side's message is
    limits = BlockLimits(block_bytes=2**25)
    with carrier.open_writer("bench", SPEC, run="bench", producer="p", encoding="plain", limits=limits) as writer:
        with carrier.open_reader("bench", producers=1, policy=ReadPolicy(on_alarm="ignore")) as reader:
            records = iter(reader)
            for number in range(ROUNDS + 1):
                sent = [replace(record, sample_id=f"{record.sample_id}-{number}", checksum=None) for record in base]
                found["ray"].append(through_ray(writer, records, sent))
                found["queue"].append(through_queue([record.sample_id for record in sent], fields))
    return {name: spent[1:] for name, spent in found.items()}


def main() -> None:
    """Start both, measure, and end them."""
    # its controller and its storage units each wait for a processor of their own
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    transfer_queue.init()
    try:
        spent = rounds()
    finally:
        transfer_queue.close()
        ray.shutdown()
    ratios = [ours / theirs for ours, theirs in zip(spent["ray"], spent["queue"], strict=True)]
    sys.stdout.write(
        json.dumps({"ratio": median(ratios), **{name: median(each) for name, each in spent.items()}}) + "\n"
    )


if __name__ == "__main__":
    main()
