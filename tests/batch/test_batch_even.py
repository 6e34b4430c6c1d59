"""Equal numbers of microbatches on all data-parallel ranks: counted from lengths, made up with padding, over gloo too.

The ranks of the property tests run one after another in this process; two of them run as processes and meet in a
collective for every microbatch, which hangs or fails where their numbers differ.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from routeplane import new_stream, open_stream
from routeplane.batch import BatchOptions, RouteBatch, microbatches
from routeplane.batch.collation import BatchBuffers
from routeplane.batch.dataset import RecordDataset
from routeplane.batch.plan import RankCounts, budget_groups
from routeplane.batch.slots import Shard
from routeplane.errors import ErrorKind, UsageError
from routeplane.record.record import RouteRecord
from routeplane.testing.builders import watermarked_record, watermarked_spec
from tests.batch.laid_out import laid_out
from tests.batch.test_batch_ranks import make as model_record

ROOT = Path(__file__).parents[2]
SPEC = watermarked_spec(layers=(1, 2, 5), top_k=3)
LAYOUTS: list[dict[str, Any]] = [
    {"layout": "packed"},
    {"layout": "packed", "pad_to_multiple_of": 4},
    {"layout": "padded"},
    {"layout": "padded", "padding_side": "left", "seq_len": 16},
]


def make(*lengths: int, turn: bool = False) -> list[RouteRecord]:
    """Watermarked records of these lengths, perhaps with a token column."""
    found = [watermarked_record(sample, num_tokens=length, spec=SPEC) for sample, length in enumerate(lengths)]
    if not turn:
        return found
    return [
        RouteRecord(
            sample_id=each.sample_id,
            token_ids=each.token_ids,
            routes=each.routes,
            spans=each.spans,
            captures=each.captures,
            spec=SPEC,
            columns={"turn": np.ones(each.num_tokens, dtype=np.int8), "gain": np.ones(each.num_tokens, np.float32)},
        )
        for each in found
    ]


def keys_of(batches: list[RouteBatch]) -> list[str]:
    """Sample ids in order; batches of padding have none."""
    return [key.sample_id for batch in batches for key in batch.keys]


# ----------------------------------------------------------------------------------------------------------------------
# The count
# ----------------------------------------------------------------------------------------------------------------------


@given(
    dealt=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 16)), max_size=40),
    options=st.sampled_from(LAYOUTS),
    held=st.sampled_from((1, 2, 5)),
)
def test_the_count_is_that_of_the_groups(dealt: list[tuple[int, int]], options: dict[str, Any], held: int) -> None:
    """The fullest rank's number of groups, made rank by rank with ``budget_groups``, at every moment."""
    plain: dict[str, Any] = {"layout": options["layout"], "options": laid_out(options)["options"]}
    counts = RankCounts(3, tokens=32, held=held, **plain)
    lengths: list[list[int]] = [[], [], []]
    for rank, length in dealt:
        counts.add(rank, length)
        lengths[rank].append(length)
        expected = []
        for own in lengths:
            windows = [own] if held == 1 else [own[at : at + held] for at in range(0, len(own), held)]
            groups = [budget_groups(each, tokens=32, sort=held > 1, **plain) for each in windows if each]
            expected.append(sum(map(len, groups)))

        assert max(expected) == counts.most()


# ----------------------------------------------------------------------------------------------------------------------
# The batches
# ----------------------------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 16), max_size=14),
    options=st.sampled_from(LAYOUTS),
    world=st.integers(1, 4),
    held=st.sampled_from((1, 3)),
)
def test_every_rank_makes_as_many_batches(lengths: list[int], options: dict[str, Any], world: int, held: int) -> None:
    """Any number of records over any number of ranks: each rank's records in its batches, as without; equal numbers of
    batches; and the last ones of some are padding alone."""
    records = make(*lengths)
    ranks = []
    for rank in range(world):
        shard = Shard(data_parallel=(rank, world))
        common: dict[str, Any] = {"tokens": 32, "spec": SPEC, "sort_within": held, **options}
        ranks.append(list(microbatches(records, batches="even", shard=shard, **laid_out(common))))
        alone = list(microbatches(records[rank::world], **laid_out(common)))
        made = ranks[-1][: len(alone)]

        assert [batch.keys for batch in alone] == [batch.keys for batch in made]
        assert all(torch.equal(ours.routes, theirs.routes) for ours, theirs in zip(alone, made, strict=True))
        assert all(batch.keys == () and bool(batch.pad_mask.all()) for batch in ranks[-1][len(alone) :])

    assert 1 == len({len(batches) for batches in ranks})
    assert any(all(batch.keys for batch in batches) for batches in ranks)


@pytest.mark.parametrize("cut", [{}, {"context_parallel": (1, 2)}, {"sequence_parallel": (0, 2), "layers": (2, 5)}])
@pytest.mark.parametrize("options", LAYOUTS, ids=["packed", "packed_to_multiple", "right", "left"])
def test_a_batch_of_padding_is_like_the_others(options: dict[str, Any], cut: dict[str, Any]) -> None:
    """Its tensors are those of a batch with records, by name, type and further axes; its rows MISSING, and as few as
    the cut allows; it counts nothing."""
    shard = Shard(**cut)
    records = make(5, 9, turn=True)
    first, empty = microbatches(records, tokens=64, spec=SPEC, batches=2, shard=shard, **laid_out(options))

    for name in ("routes", "token_ids", "position_ids", "pad_mask", "generation_mask", "states"):
        ours, theirs = getattr(empty, name), getattr(first, name)
        assert (theirs.dtype, theirs.ndim) == (ours.dtype, ours.ndim), name
        assert tuple(empty.plan.shape) == tuple(ours.shape[: len(empty.plan.shape)])
    assert empty.spec == first.spec
    assert {"turn": torch.int8, "gain": torch.float32} == {name: each.dtype for name, each in empty.columns.items()}
    assert bool(empty.columns["gain"].isnan().all())
    assert (first.logprobs is None) == (empty.logprobs is None)
    assert [0] == empty.lengths.tolist()
    assert [0, 0] == empty.cu_seqlens.tolist()
    whole = options.get("seq_len") or np.lcm(options.get("pad_to_multiple_of", 1), shard.multiple)
    assert [0, whole] == empty.cu_seqlens_padded.tolist()
    assert bool((empty.routes == -1).all())
    assert (0, 0, 0) == (empty.counts.records, empty.counts.total, empty.unexplained_missing)


def test_a_batch_of_padding_is_filled_and_pooled_like_the_others() -> None:
    """Balanced filler stands in it, and a pool takes it back."""
    pool = BatchBuffers()
    source = microbatches(
        make(4),
        tokens=8,
        spec=SPEC,
        batches=3,
        options=BatchOptions(fill="balanced", buffers=pool, pad_to_multiple_of=4),
    )
    seen = [(len(batch.keys), int(batch.routes.min())) for batch in pool.releasing(source)]

    assert [1, 0, 0] == [keys for keys, _ in seen]
    assert all(least >= 0 for _, least in seen[1:])


def test_more_records_than_batches_are_refused() -> None:
    """A number that the records do not fit into is an error when its last batch was made, and no record is dropped."""
    source = microbatches(make(8, 8, 8), tokens=8, spec=SPEC, batches=2)

    assert ["sample-0", "sample-1"] == keys_of([next(source), next(source)])
    with pytest.raises(UsageError, match="batches=2"):
        next(source)


def test_a_record_that_no_batch_can_hold_is_refused_on_every_rank() -> None:
    """Its own rank and the others fail alike, so that none waits for it in a collective."""
    for rank in range(2):
        with pytest.raises(UsageError) as failure:
            list(microbatches(make(4, 9), tokens=8, spec=SPEC, batches="even", shard=Shard(data_parallel=(rank, 2))))

        assert failure.value.kind is ErrorKind.TOO_LONG
        assert "sample-1" in str(failure.value)


# ----------------------------------------------------------------------------------------------------------------------
# Datasets
# ----------------------------------------------------------------------------------------------------------------------


def save(folder: Path, *lengths: int) -> str:
    """A stream of such records."""
    with new_stream(folder / "routes.arrows", SPEC) as sink:
        for record in make(*lengths):
            sink.write(record)
    return str(folder / "routes.arrows")


def test_a_dataset_counts_for_all_its_ranks(tmp_path: Path) -> None:
    """A dataset that deals records to ranks is as even as a shard that does; what it handed out counts as ever."""
    path = save(tmp_path, 8, 2, 8, 2, 8)
    for rank, expected in ((0, ["sample-0", "sample-2", "sample-4"]), (1, ["sample-1", "sample-3"])):
        dataset = RecordDataset(path, open_stream, rank=rank, world_size=2)
        batches = list(microbatches(dataset, tokens=8, batches="even"))

        assert 3 == len(batches)
        assert expected == keys_of(batches)
        assert len(expected) == dataset.state_dict()["taken"]
        assert 1 == dataset.state_dict(consumed=1)["taken"]


def test_a_dataset_that_cannot_see_other_ranks_is_refused(tmp_path: Path) -> None:
    """Loader workers drop the records of other ranks, a loaded state says nothing of them, and records are dealt
    once."""
    dataset = RecordDataset(save(tmp_path, 3, 4), open_stream, rank=0, world_size=2)
    loader = DataLoader(dataset, batch_size=None)
    with pytest.raises(UsageError, match="batches='even'"):
        microbatches(dataset.through(loader), tokens=8, batches="even")
    with pytest.raises(UsageError, match="dealt to ranks once"):
        microbatches(dataset, tokens=8, batches="even", shard=Shard(data_parallel=(0, 2)))
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(UsageError, match="at its beginning"):
        list(microbatches(dataset, tokens=8, batches="even"))


@pytest.mark.parametrize("batches", [0, -1, "odd", True, 1.5])
def test_other_numbers_of_batches_are_refused(batches: Any) -> None:
    """Before anything is read."""
    with pytest.raises(UsageError, match="batches"):
        microbatches(make(3), tokens=8, spec=SPEC, batches=batches)


# ----------------------------------------------------------------------------------------------------------------------
# A model, and two ranks
# ----------------------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import OlmoeConfig, OlmoeForCausalLM

from routeplane import open_stream
from routeplane.batch import microbatches
from routeplane.replay import transformers as gates
from routeplane.batch.slots import Shard

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
torch.manual_seed(0)
config = OlmoeConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
model = OlmoeForCausalLM(config)
answer = []
with open_stream(f"{folder}/routes.arrows") as reader, gates.attach(model, reader.spec) as replay:
    shard = Shard(data_parallel=(rank, 2))
    for batch in microbatches(reader, tokens=16, layout=sys.argv[3], batches="even", shard=shard):
        with replay.replaying(batch):
            logits = model(**batch.model_inputs()).logits
            logits.view(batch.num_rows, -1)[~batch.pad_mask.view(-1)].sum().backward()
        for weight in model.parameters():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad)  # what a data-parallel trainer does after each microbatch
        answer.append(len(batch.keys))
finite = all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
print(json.dumps([answer, finite, float(model.lm_head.weight.grad.abs().sum())]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_two_ranks_take_as_many_steps(tmp_path: Path, layout: str) -> None:
    """Five records over two ranks: one collective per weight and microbatch on both, the same summed gradients, and
    nothing in them that is not a number."""
    spec = model_record(0, 3).spec
    with new_stream(tmp_path / "routes.arrows", spec) as sink:
        for sample, length in enumerate((15, 5, 16, 6, 14)):
            sink.write(model_record(sample, length))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path), layout],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=300) for child in children]
    finally:
        for child in children:
            child.kill()  # does nothing to one that has ended
    assert [0, 0] == [child.returncode for child in children], outputs
    zero, one = (out.splitlines()[-1] for out, _ in outputs)

    assert zero.startswith("[[1, 1, 1], true")
    assert one.startswith("[[2, 0, 0], true")
    assert zero.rpartition(",")[2] == one.rpartition(",")[2]
