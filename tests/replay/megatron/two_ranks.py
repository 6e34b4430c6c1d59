"""One of two ranks of a real parallel run; ``test_megatron_parallel`` starts both and reads what they found.

Run as ``main(MODE, RANK, FOLDER)``: figures go to stdout as one line of JSON. Ranks
meet over gloo, through a file in the folder.

Axes: B sequences, S positions, N token rows, K top-k slots.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random as tensor_random

from routeplane.batch import BatchOptions, collate
from routeplane.cli.demo.megatron_trainer import cpu_stand_ins
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.replay import megatron as gates
from routeplane.replay.handle import ReplayHandle
from routeplane.testing.builders import watermarked_record, watermarked_spec
from routeplane.testing.contracts.replay_contract import unlike_rows
from tests.replay.megatron.tiny_megatron import EXPERTS, TOP_K, Inputs, TokenBatch, build, inputs_of, recorded

LAYERS, MICROBATCHES = 4, 4
#: tokens of two records, in rows of eight
LENGTHS = (8, 5)
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


# ---- sequence parallelism -------------------------------------------------------------------------------------------


def mark(sample: int, token: int, layer: int) -> list[int]:
    """The ids, of 32, that name a place of ``LENGTHS``."""
    return sorted((16 * layer + 8 * sample + token + slot) % 32 for slot in range(TOP_K))


def marked_record(sample: int, length: int, spec: RouteSpec) -> RouteRecord:
    """A record whose every token was fed, and whose rows are marks."""
    routes = [[mark(sample, token, layer) for layer in spec.layer_ids] for token in range(length)]
    wide = watermarked_spec(layers=spec.layer_ids, top_k=spec.top_k)
    record = watermarked_record(sample, num_tokens=length, spec=wide, last_token_fed=True)
    tokens = record.token_ids % 64
    return replace(record, routes=np.array(routes, dtype=np.int16), token_ids=tokens, spec=spec, checksum=None)


def sequence(rank: int) -> dict[str, Any]:
    """Tensor parallelism of two with sequence parallelism."""
    return _marked({"tensor_model_parallel_size": 2, "sequence_parallel": True})


def tensor(rank: int) -> dict[str, Any]:
    """Tensor parallelism of two: each rank's routers see every token. Megatron itself refuses to train so."""
    return _marked({"tensor_model_parallel_size": 2}, train=False)


def _marked(options: Mapping[str, Any], *, train: bool = True) -> dict[str, Any]:
    """The ids that each router used, by sequence and position."""
    spec = RouteSpec(num_experts=32, top_k=TOP_K, layer_ids=(0, 1), model="tiny")
    model = build({**options, "num_moe_experts": spec.num_experts}).train(train)
    records = [marked_record(sample, length, spec) for sample, length in enumerate(LENGTHS)]
    batch = collate(
        records, spec, layout="padded", shard=gates.rank_shard(model, spec), options=BatchOptions(seq_len=8)
    )
    whole = collate(records, spec, layout="padded", options=BatchOptions(seq_len=8))
    with gates.attach(model, spec) as handle, recorded(model) as seen, handle.replaying(batch):
        output = model(*Inputs(tokens=whole.token_ids).arguments())
        if train:
            torch.autograd.backward(output.square().mean())
    return {
        "shape": list(batch.token_ids.shape),
        "ids": {layer: [sorted(row) for row in fired[0].ids_NK.tolist()] for layer, fired in seen.items()},
        "forced": [gate.forced_rows for gate in handle.report().gates],
    }


# ---- expert parallelism ---------------------------------------------------------------------------------------------


def expert(rank: int) -> dict[str, Any]:
    """Experts on two ranks, a batch for each, full recomputation: the worst difference from one process of all experts.

    Gradients of a rank's experts are those of both batches, all others those of its own.
    """
    spec = RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=(0, 1), model="tiny")
    own = build({**RECOMPUTE, "expert_model_parallel_size": 2})
    # the groups of the reference are those of a process by itself
    with mock.patch.multiple(parallel_state, **_alone(rank)):
        whole = build({})
        _take_experts(own, whole, rank)
        expected = [_rank_step(whole, spec, batch) for batch in range(2)]
    found = _rank_step(own, spec, rank)
    worst = float((found["output"] - expected[rank]["output"]).abs().max())
    for name, gradient in found.items():
        at_whole = _expert_name(name, rank)
        both = [each[at_whole] for each in expected]
        wanted = both[0] + both[1] if "local_experts" in name else both[rank]
        worst = max(worst, float((gradient - wanted).abs().max()))
    return {"worst": worst, "experts": len(own.decoder.layers[0].mlp.experts.local_experts)}


def _alone(rank: int) -> dict[str, Any]:
    """What Megatron asks for the expert-parallel groups, answered for one rank."""
    groups = [torch.distributed.new_group([each], backend="gloo") for each in range(2)]
    names = [name for name in dir(parallel_state) if re.fullmatch("get_expert_.*group", name)]
    return {name: lambda *args, **options: groups[rank] for name in names}


def _expert_name(name: str, rank: int) -> str:
    """An expert's parameter by its number in the whole model; any other's name."""
    return re.sub(r"(?<=local_experts\.)\d+", lambda found: str(int(found.group()) + rank * EXPERTS // 2), name)


def _take_experts(own: Any, whole: Any, rank: int) -> None:
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        for name, weight in own.named_parameters():
            weight.copy_(weights[_expert_name(name, rank)])


def _rank_step(model: Any, spec: RouteSpec, index: int) -> dict[str, torch.Tensor]:
    """The output and the gradients of one microbatch under replay."""
    inputs, batch = _microbatch(index, spec)
    with gates.attach(model, spec) as handle:
        with handle.replaying(batch):
            output = model(*inputs.arguments())
        torch.autograd.backward(output.square().mean())
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return {"output": output.detach(), **found}


# ---- an interleaved pipeline ----------------------------------------------------------------------------------------


def pipeline(rank: int) -> dict[str, Any]:
    """Two ranks, two virtual stages each, four microbatches: the worst difference of any gradient from one process."""
    spec = RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=tuple(range(LAYERS)), model="tiny")
    options = {
        **RECOMPUTE,
        "moe_layer_freq": [1] * LAYERS,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_dtype": torch.float32,
        # with two ranks the next one is the one before: only these calls tell them apart
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }
    chunks = []
    for stage in range(2):
        first, last = rank == 0 and stage == 0, rank == 1 and stage == 1
        chunks.append(build(options, vp_stage=stage, pre_process=first, post_process=last))
    reference = build({"moe_layer_freq": [1] * LAYERS})
    for chunk in chunks:
        _copy_weights(reference, chunk)
    handles = [gates.attach(chunk, _own(chunk, spec)) for chunk in chunks]
    _run_schedule(chunks, handles, spec)
    expected = _reference_gradients(reference, spec)
    worst = 0.0
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            difference = (weight.grad - expected[_whole_name(name, chunk)]).abs().max() / expected["scale"]
            worst = max(worst, float(difference))
    return {
        "worst": worst,
        "layers": [list(handle.spec.layer_ids) for handle in handles],
        "consumed": [[gate.consumed for gate in handle.report().gates] for handle in handles],
    }


def _own(chunk: Any, spec: RouteSpec) -> RouteSpec:
    own = gates.local_spec(chunk, spec)
    if own is None:
        raise RuntimeError("every chunk routes here")
    return own


def _microbatch(index: int, spec: RouteSpec) -> tuple[Inputs, TokenBatch]:
    inputs = inputs_of(index)
    rows = unlike_rows(spec, inputs.tokens.numel(), seed=100 + index, missing=0.2)
    return inputs, TokenBatch(rows=rows, token_ids=inputs.tokens)


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return output.square().mean(), {}


def _run_schedule(chunks: Sequence[Any], handles: Sequence[ReplayHandle], spec: RouteSpec) -> None:
    """Megatron's own interleaved schedule; each forward step enters the handle of the chunk that it is given."""
    handle_of = {id(chunk): handle for chunk, handle in zip(chunks, handles, strict=True)}

    def forward_step(data: Iterator[int], chunk: Any) -> tuple[torch.Tensor, Any]:
        handle = handle_of[id(chunk)]
        inputs, whole = _microbatch(next(data), spec)
        batch = TokenBatch(rows=_select(whole, handle.spec), token_ids=whole.token_ids)
        with handle.replaying(batch):
            output = chunk(*inputs.arguments())
        return output, _loss

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(MICROBATCHES)) for _ in chunks],
        model=list(chunks),
        num_microbatches=MICROBATCHES,
        seq_length=6,
        micro_batch_size=2,
        forward_only=False,
    )


def _select(batch: TokenBatch, spec: RouteSpec) -> Any:
    slots = [batch.spec.slot(layer) for layer in spec.layer_ids]
    return type(batch.rows)(spec=spec, routes_NLK=batch.rows.routes_NLK[:, slots])


def _whole_name(name: str, chunk: Any) -> str:
    """A parameter of a chunk by its name in the whole model."""
    for index, layer in enumerate(chunk.decoder.layers):
        name = name.replace(f"decoder.layers.{index}.", f"decoder.whole.{layer.layer_number - 1}.")
    return name.replace("decoder.whole.", "decoder.layers.")


def _copy_weights(reference: Any, chunk: Any) -> None:
    whole = dict(reference.named_parameters())
    with torch.no_grad():
        for name, weight in chunk.named_parameters():
            weight.copy_(whole[_whole_name(name, chunk)])


def _reference_gradients(reference: Any, spec: RouteSpec) -> Mapping[str, Any]:
    """Of the same microbatches one after another, without recomputation."""
    with gates.attach(reference, spec) as handle:
        for index in range(MICROBATCHES):
            inputs, batch = _microbatch(index, spec)
            with handle.replaying(batch):
                loss = _loss(reference(*inputs.arguments()))[0] / MICROBATCHES
            torch.autograd.backward(loss)
    found = {name: weight.grad for name, weight in reference.named_parameters()}
    return {**found, "scale": max(float(gradient.abs().max()) for gradient in found.values())}


# ---- the process ----------------------------------------------------------------------------------------------------

MODES = {
    "sequence": (sequence, {"tensor_model_parallel_size": 2}),
    "tensor": (tensor, {"tensor_model_parallel_size": 2}),
    "expert": (expert, {"expert_model_parallel_size": 2}),
    "pipeline": (
        pipeline,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
}


def _zeros_on_cpu(zeros: Any, *args: Any, **options: Any) -> torch.Tensor:
    found: torch.Tensor = zeros(*args, **{**options, "device": "cpu"})
    return found


def main(mode: str, rank: int, folder: str) -> None:
    """Join the other rank, run, print."""
    run, sizes = MODES[mode]
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(Path(folder) / "store"), 2)  # type: ignore[attr-defined]
    # the schedules make a counter on "cuda" by that name
    zeros = mock.patch.object(torch, "zeros", partial(_zeros_on_cpu, torch.zeros))
    with cpu_stand_ins(), zeros:
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        parallel_state.initialize_model_parallel(**sizes)
        tensor_random.get_cuda_rng_tracker().add("model-parallel-rng", 0)
        figures = run(rank)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    sys.stdout.write(json.dumps(figures) + "\n")
