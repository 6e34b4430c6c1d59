"""Replay under Megatron's own parallelism: real schedules and scatters on two gloo ranks, real slices on one.

Axes: B sequences, S positions.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import get_batch_on_this_cp_rank

from routeplane.batch import BatchOptions, collate
from routeplane.replay import megatron as gates
from routeplane.testing.builders import watermarked_record, watermarked_spec
from routeplane.testing.contracts.replay_contract import feature
from tests.replay.megatron.tiny_megatron import FAMILIES, build
from tests.replay.megatron.two_ranks import LENGTHS, mark

pytestmark = pytest.mark.megatron

ROOT = Path(__file__).parents[3]
PLAIN = FAMILIES[0]


#: verl's wheel, in the same environment, has a package ``tests`` of its own, which hides ours from ``python -m``.
START = (
    "import sys, types; tests = types.ModuleType('tests'); tests.__path__ = ['tests']; sys.modules['tests'] = tests; "
    "from tests.replay.megatron.two_ranks import main; main(sys.argv[1], int(sys.argv[2]), sys.argv[3])"
)


def two_ranks(mode: str, folder: Path) -> list[dict[str, Any]]:
    """Both processes of ``two_ranks``, and what each printed."""
    command = [sys.executable, "-W", "ignore", "-c", START, mode]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [0, 0] == [rank.returncode for rank in ranks]
    return [json.loads(text.splitlines()[-1]) for text in printed]


class TestTwoRanks:
    """Both processes run Megatron's own code over gloo."""

    adapter, family = "megatron", PLAIN.name

    @feature("pipeline")
    def test_an_interleaved_schedule_is_exact(self, tmp_path: Path) -> None:
        """Two ranks of two virtual stages, four microbatches in flight as Megatron has it, all layers recomputed:

        every gradient is that of one process without any of this, to the last bit.
        """
        first, second = two_ranks("pipeline", tmp_path)
        assert [[[0], [2]], [[1], [3]]] == [first["layers"], second["layers"]]
        assert [[[4], [4]]] * 2 == [first["consumed"], second["consumed"]]
        assert [0.0, 0.0] == [first["worst"], second["worst"]]

    @feature("sequence parallel")
    def test_sequence_parallel_ranks_follow_their_own_rows(self, tmp_path: Path) -> None:
        """With tensor parallelism of two, each rank's routers see half of every sequence, and use its ids."""
        for rank, found in enumerate(two_ranks("sequence", tmp_path)):
            assert [2, 4] == found["shape"]
            places = [(sample, 4 * rank + token) for sample in range(2) for token in range(4)]
            fed = [(sample, token) for sample, token in places if token < LENGTHS[sample]]
            for layer in (0, 1):
                used = dict(zip(places, found["ids"][str(layer)], strict=True))
                assert {place: mark(*place, layer) for place in fed} == {place: used[place] for place in fed}
            assert [len(fed)] * 2 == found["forced"]

    @feature("tensor parallel")
    def test_tensor_parallel_ranks_follow_every_row(self, tmp_path: Path) -> None:
        """Without sequence parallelism both ranks' routers see all tokens, and use the same ids."""
        for found in two_ranks("tensor", tmp_path):
            assert [2, 8] == found["shape"]
            fed = [(sample, token) for sample in range(2) for token in range(LENGTHS[sample])]
            places = [(sample, token) for sample in range(2) for token in range(8)]
            for layer in (0, 1):
                used = dict(zip(places, found["ids"][str(layer)], strict=True))
                assert {place: mark(*place, layer) for place in fed} == {place: used[place] for place in fed}
            assert [len(fed)] * 2 == found["forced"]

    @feature("expert parallel")
    def test_expert_parallel_ranks_are_exact(self, tmp_path: Path) -> None:
        """Half of the experts on each rank, another batch on each, all layers recomputed: as in one process."""
        for found in two_ranks("expert", tmp_path):
            assert 4 == found["experts"]
            assert found["worst"] < 1e-6


class Group:
    """A process group's rank and size."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """This rank's number."""
        return self._rank

    def size(self) -> int:
        """How many there are."""
        return self._size


class TestOneRank:
    """What a rank takes, against Megatron's own slices and stages."""

    adapter, family = "megatron", PLAIN.name

    @pytest.mark.parametrize("world", [1, 2, 4])
    @feature("context parallel")
    def test_context_parallel_slices_are_megatrons(self, world: int) -> None:
        """What ``rank_shard`` cuts of token ids and routes is what Megatron's own function cuts of the same tensors."""
        spec = watermarked_spec(layers=(0, 1), top_k=3)
        records = [watermarked_record(sample, num_tokens=length, spec=spec) for sample, length in enumerate((16, 11))]
        whole = collate(records, spec, layout="padded", options=BatchOptions(seq_len=16))
        model = build(PLAIN.options)
        for rank in range(world):
            for _, router in gates.find_gates(model):
                router.cp_group = Group(rank, world)  # type: ignore[assignment]
            shard = gates.rank_shard(model, spec)
            cut = {"tokens": whole.token_ids, "routes": whole.routes.flatten(2)}
            expected = get_batch_on_this_cp_rank(dict(cut), cp_group=Group(rank, world))
            found = collate(records, spec, layout="padded", shard=shard, options=BatchOptions(seq_len=16))
            assert torch.equal(expected["tokens"], found.token_ids)
            assert torch.equal(expected["routes"], found.routes.flatten(2))

    @feature("pipeline")
    def test_a_stage_takes_its_own_layers(self) -> None:
        """A virtual stage's layers bear their numbers in the whole model; one without routers takes none."""
        options = {
            "moe_layer_freq": [1, 1, 0, 1],
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "pipeline_dtype": torch.float32,
        }
        spec = watermarked_spec(layers=(0, 1, 3), top_k=3)
        stages = [build(options, vp_stage=stage, pre_process=stage == 0, post_process=False) for stage in range(2)]
        first = gates.local_spec(stages[0], spec)
        assert first is not None
        assert (0,) == first.layer_ids
        assert (0,) == gates.rank_shard(stages[0], spec).layers
        assert gates.local_spec(stages[1], spec) is None
