"""Our cuts against the functions of verl and SkyRL that slice routes, as pip installs them.

``tests/batch/test_stack_plans.py`` has their arithmetic written out; here their own code runs, with Megatron's answers
for a rank in place of process groups. Their packages import engines and trainers when they are imported: only the
modules that slice are loaded, from the installed files.

Axes: B sequences, S positions of a padded row, L decoder layers, K top-k slots.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state

from routeplane.batch import PlanOptions, RouteBatch, Shard, TokenPlan
from routeplane.testing.builders import watermarked_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.megatron

LAYERS, TOP_K = 3, 2
PACKAGES = {
    "verl": ("utils", "utils.megatron", "workers", "workers.utils", "models", "models.mcore"),
    "skyrl": ("backends", "backends.skyrl_train", "backends.skyrl_train.utils", "backends.skyrl_train.distributed"),
}
Row = tuple[int, int]
PAD: Row = (-1, -1)

lengths = st.lists(st.integers(2, 13), min_size=1, max_size=6)
worlds = st.integers(1, 4)


def stack_module(name: str) -> Any:
    """A module of an installed stack, without running what its packages import."""
    package = name.partition(".")[0]
    root = Path(str(distribution(package).locate_file("")))
    for each in (package, *(f"{package}.{inner}" for inner in PACKAGES[package])):
        if each not in sys.modules:
            shell = ModuleType(each)
            shell.__path__ = [str(root.joinpath(*each.split(".")))]
            sys.modules[each] = shell
    return importlib.import_module(name)


@contextmanager
def rank_of(context: tuple[int, int] = (0, 1), tensor: tuple[int, int] = (0, 1)) -> Iterator[None]:
    """Megatron's answers for one rank of a context-parallel and a tensor-parallel group."""
    answers = {
        "get_context_parallel_rank": context[0],
        "get_context_parallel_world_size": context[1],
        "get_tensor_model_parallel_rank": tensor[0],
        "get_tensor_model_parallel_world_size": tensor[1],
    }
    with mock.patch.multiple(parallel_state, **{name: mock.Mock(return_value=each) for name, each in answers.items()}):
        yield


def marks(sequence: int, length: int) -> torch.Tensor:
    """Rows ``[length, L, K]`` that say which sequence, token and layer they are of; never 0, which is padding."""
    token = torch.arange(length)[:, None, None]
    layer = torch.arange(LAYERS)[None, :, None]
    return (1 + 1_000 * sequence + 50 * layer + token).expand(-1, -1, TOP_K).to(torch.int16)


def rows_of(routes: torch.Tensor) -> list[Row]:
    """``(sequence, token)`` of each row of ``[N, L, K]``, where every layer says the same."""
    found = []
    for row in routes.reshape(-1, LAYERS, TOP_K).tolist():
        values = [value - 1 - 50 * layer for layer, slots in enumerate(row) for value in slots]
        if not any(value for slots in row for value in slots):
            found.append(PAD)
            continue
        assert 1 == len(set(values)), row
        found.append((values[0] // 1_000, values[0] % 1_000))
    return found


def plan_rows(plan: TokenPlan) -> list[Row]:
    """``(sequence, token)`` of each row of a plan."""
    return list(zip(plan.record_N.tolist(), plan.token_N.tolist(), strict=True))


def left_padded(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Marks ``[B, S, L, K]`` with zeros at the left, and the mask ``[B, S]`` of the tokens."""
    routes = torch.zeros(len(lengths), width, LAYERS, TOP_K, dtype=torch.int16)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for at, length in enumerate(lengths):
        routes[at, width - length :] = marks(at, length)
        mask[at, width - length :] = True
    return routes, mask


def part_of(routes: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """A rank's rows under sequence parallelism, as both stacks take them: equal parts of axis 1."""
    size = routes.shape[1] // world
    return routes[:, rank * size : (rank + 1) * size]


@given(lengths=lengths, worlds=st.tuples(worlds, worlds), data=st.data())
def test_skyrl_packs_as_we_do(lengths: list[int], worlds: tuple[int, int], data: st.DataObject) -> None:
    """SkyRL without microbatch padding: its pack, cut by context and then by sequence, holds our rows in our order."""
    replay = stack_module("skyrl.backends.skyrl_train.utils.replay_utils")
    context, tensor = worlds
    rank, own = data.draw(st.integers(0, context - 1)), data.draw(st.integers(0, tensor - 1))
    routes, mask = left_padded(lengths, 16)
    with rank_of((rank, context), (own, tensor)):
        theirs = part_of(replay._pack_replay_indices(routes, mask), own, tensor)

    shard = Shard(context_parallel=(rank, context), sequence_parallel=(own, tensor))
    unit = tensor * (2 * context if context > 1 else 1)
    ours = PlanOptions(pad_to_multiple_of=unit).plan(lengths, layout="packed", shard=shard)

    assert plan_rows(ours) == rows_of(theirs)


@given(lengths=lengths, tensor=worlds, data=st.data())
def test_skyrl_pads_as_we_do(lengths: list[int], tensor: int, data: st.DataObject) -> None:
    """SkyRL with microbatch padding: left padding moved to the right, each row cut by sequence parallelism."""
    replay = stack_module("skyrl.backends.skyrl_train.utils.replay_utils")
    own = data.draw(st.integers(0, tensor - 1))
    routes, mask = left_padded(lengths, 16)
    with rank_of(tensor=(own, tensor)):
        theirs = part_of(replay._remove_left_padding_from_indices(routes, mask), own, tensor)

    plan = PlanOptions(pad_to_multiple_of=tensor).plan(lengths, layout="padded")
    ours = plan.cut(Shard(sequence_parallel=(own, tensor))) if tensor > 1 else plan

    assert plan_rows(ours) == rows_of(theirs)


@given(lengths=lengths, worlds=st.tuples(worlds, worlds), nested=st.booleans(), data=st.data())
def test_verl_cuts_zigzag_as_we_do(
    lengths: list[int], worlds: tuple[int, int], nested: bool, data: st.DataObject
) -> None:
    """verl's packs of padded and of nested routes: two chunks of every sequence for a context-parallel rank."""
    packing = stack_module("verl.models.mcore.util")
    context, tensor = worlds
    rank, own = data.draw(st.integers(0, context - 1)), data.draw(st.integers(0, tensor - 1))
    routes, mask = left_padded(lengths, 16)
    parts = [marks(at, length) for at, length in enumerate(lengths)]
    with rank_of((rank, context), (own, tensor)):
        theirs = (
            packing.preprocess_thd_engine(torch.nested.as_nested_tensor(parts, layout=torch.jagged))[0]
            if nested
            else packing.preprocess_packed_seqs(routes, mask)[0]
        )

    shard = Shard(context_parallel=(rank, context), sequence_parallel=(own, tensor))
    unit = tensor * (2 * context if context > 1 else 1)
    ours = PlanOptions(pad_to_multiple_of=unit).plan(lengths, layout="packed", shard=shard)

    assert plan_rows(ours) == rows_of(part_of(theirs, own, tensor))


@given(lengths=lengths, worlds=st.tuples(worlds, worlds), data=st.data())
def test_verl_cuts_chunks_of_the_pack_as_we_do(
    lengths: list[int], worlds: tuple[int, int], data: st.DataObject
) -> None:
    """verl for DeepSeek-V4's attention: one interval of the whole padded pack for a context-parallel rank."""
    packing = stack_module("verl.models.mcore.util")
    context, tensor = worlds
    rank = data.draw(st.integers(0, context - 1))
    parts = [marks(at, length) for at, length in enumerate(lengths)]
    # the installed Megatron-Core cannot name this cut to its kernels; the rows are made before that
    named: dict[str, Any] = {"_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE": True, "PackedSeqParams": mock.Mock()}
    with rank_of((rank, context), (0, tensor)), mock.patch.multiple(packing, **named):
        theirs = packing.preprocess_thd_engine(
            torch.nested.as_nested_tensor(parts, layout=torch.jagged), cp_layout="contiguous"
        )[0]

    shard = Shard(context_parallel=(rank, context), context_layout="pack_contiguous")
    options = PlanOptions(pad_to_multiple_of=tensor * context).for_shard(shard)

    assert plan_rows(options.plan(lengths, layout="packed", shard=shard)) == rows_of(theirs)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=5), seed=st.integers(0, 99)
)
def test_verl_takes_padding_away_as_we_do(shapes: list[tuple[int, int]], seed: int) -> None:
    """verl's own step from padded to nested columns, read by ``from_tensors`` before and after: the same routes."""
    tensordict = importlib.import_module("tensordict")
    padding = stack_module("verl.workers.utils.padding")
    spec = watermarked_spec(layers=tuple(range(LAYERS)), top_k=TOP_K)
    left, right = (max(shape[side] for shape in shapes) for side in (0, 1))
    random = np.random.default_rng(seed)
    ids = torch.zeros(len(shapes), left + right, dtype=torch.long)
    mask = torch.zeros(len(shapes), left + right, dtype=torch.long)
    answer = torch.zeros(len(shapes), right, dtype=torch.long)
    routes = torch.zeros(len(shapes), left + right, LAYERS, TOP_K, dtype=torch.int16)
    for at, (prompt, response) in enumerate(shapes):
        first, length = left - prompt, prompt + response
        ids[at, first : first + length] = torch.from_numpy(random.integers(1, 60, length))
        mask[at, first : first + length], answer[at, :response] = 1, 1
        drawn = random.random((length - 1, LAYERS, 256)).argsort(-1)[..., :TOP_K]
        routes[at, first : first + length - 1] = torch.from_numpy(drawn.astype(np.int16))
    captured = mask.sum(1) - 1

    padded = RouteBatch.from_tensors(routes, ids, spec=spec, pad_mask=mask == 0, captured=captured)
    columns = {"input_ids": ids, "attention_mask": mask, "response_mask": answer, "routed_experts": routes}
    columns["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    nested = padding.left_right_2_no_padding(tensordict.TensorDict(columns, batch_size=len(shapes)))
    packed = RouteBatch.from_tensors(nested["routed_experts"], nested["input_ids"], spec=spec, captured=captured)

    real = ~padded.pad_mask
    assert torch.equal(padded.routes[real], packed.routes)
    assert torch.equal(padded.token_ids[real], packed.token_ids)
    assert padded.coverage() == packed.coverage()
