"""A program for TransferQueue's own environment: our columns through its controller and storage, and back.

``python queue_client.py STREAM`` writes the stream's records as NeMo RL's jagged payload, puts them under their sample
ids, gets them in another order, and prints as JSON what came back. Run by ``test_transfer_queue.py``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from tensordict import TensorDict

from routeplane import RouteSpec, open_stream
from routeplane.batch import LayoutBatch, RouteBatch, from_layout, to_layout
from routeplane.inspect import audit_batch

FIELDS = ("input_ids", "token_mask", "routed_experts", "input_lengths")


def jagged(parts: list[Any]) -> torch.Tensor:
    """One tensor a sample, as a nested tensor."""
    found: torch.Tensor = torch.nested.nested_tensor([torch.from_numpy(part) for part in parts], layout=torch.jagged)
    return found


def carried(native: dict[str, Any], keys: list[str]) -> Any:
    """The payload after it went through the queue, samples in the order of ``keys``."""
    names = native["sample_ids"]
    columns = {name: jagged(native[name]) for name in FIELDS[:3]}
    lengths = torch.from_numpy(native["input_lengths"])
    fields = TensorDict({**columns, "input_lengths": lengths}, batch_size=len(names))
    transfer_queue.kv_batch_put(names, "train", fields=fields)
    return transfer_queue.kv_batch_get(keys, "train", select_fields=list(FIELDS))


def same_rows(laid: LayoutBatch, again: LayoutBatch) -> bool:
    """Whether each sample has its tokens, mask and routes, wherever it stands."""
    found = []
    for at, name in enumerate(again.names):
        mine = laid.names.index(name)
        ours, theirs = (slice(*batch.offsets[at : at + 2].tolist()) for batch, at in ((laid, mine), (again, at)))
        pairs = [(getattr(laid, name)[ours], getattr(again, name)[theirs]) for name in ("routes", "token_ids")]
        found += [a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs]
    return all(found)


def exchange(path: str, spec: RouteSpec) -> dict[str, Any]:
    """What came back of the stream's records."""
    with open_stream(path) as reader:
        records = list(reader)
    laid = LayoutBatch.from_records(records, spec)
    native = to_layout(laid, layout="nemo_rl_tq").content
    keys = list(reversed(laid.names))
    got = carried(native, keys)
    payload = {**{name: got[name] for name in FIELDS}, "sample_ids": keys}
    again = from_layout(payload, spec, layout="nemo_rl_tq")
    batch = RouteBatch.from_tensors(got["routed_experts"], got["input_ids"], spec=spec, captured=again.captured)
    swapped = {**payload, "sample_ids": [keys[1], keys[0], *keys[2:]]}
    found = audit_batch(swapped, spec, layout="nemo_rl_tq", against=records).problems
    return {
        "dtype": str(got["routed_experts"].dtype),
        "order": list(again.names) == keys,
        "same": same_rows(laid, again),
        "rows": len(again.routes),
        "replayed": int((batch.routes[..., 0, 0] >= 0).sum()),
        "clean": [str(each) for each in audit_batch(payload, spec, layout="nemo_rl_tq", against=records).problems],
        "swapped": sorted({str(each.sample) for each in found}),
    }


def main() -> None:
    """Start the queue, exchange, and end it."""
    with open_stream(sys.argv[1]) as reader:
        spec = reader.spec
    # its controller and its storage units each wait for a processor of their own
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    try:
        sys.stdout.write(json.dumps(exchange(sys.argv[1], spec)) + "\n")
    finally:
        transfer_queue.close()
        ray.shutdown()


if __name__ == "__main__":
    main()
