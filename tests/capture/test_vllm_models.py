"""Other families in the real engine: rows of every layer against ``capture.transformers`` over the same weights.

float32 rows are equal as sets, where the two compute the same attention. bfloat16 flips near ties (the mismatch that
replay exists for). The share is a property of the test in its report (``--junit-xml``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from routeplane.capture.transformers import taping
from routeplane.capture.vllm import generate_records, probe, spec_from_vllm, start_engine
from routeplane.errors import ErrorKind, SpecError
from routeplane.record.spec import RouteSpec
from tests.capture.vllm_engine import FAMILY_SIZES, PLAIN_ROPE

pytestmark = pytest.mark.vllm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A tiny configuration, and the geometry that it has."""

    name: str
    settings: dict[str, Any]
    experts: int
    top_k: int
    layers: tuple[int, ...]
    dtype: str = "float32"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: share of rows that must be Transformers'
    equal: float = 1.0

    def build(self, folder: Path) -> Any:
        """Seeded weights in a folder; returns the model."""
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**{**FAMILY_SIZES, **self.settings})
        model = getattr(transformers, f"{self.name}ForCausalLM")(config).to(getattr(torch, self.dtype)).eval()
        model.save_pretrained(folder)
        return model


FAMILIES: tuple[Family, ...] = (
    Family(
        name="Mixtral",
        settings={"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 32},
        experts=8,
        top_k=2,
        layers=(0, 1, 2),
    ),
    Family(
        name="Olmoe",
        settings={"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4, "hidden_size": 128},
        experts=8,
        top_k=3,
        layers=(0, 1, 2),
    ),
    Family(
        name="GptOss",
        settings={"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 64},
        experts=8,
        top_k=2,
        layers=(0, 1, 2),
        dtype="bfloat16",  # the CPU engine has no float32 kernel for it
        equal=0.9,
    ),
    Family(
        name="DeepseekV2",
        settings={
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "num_key_value_heads": 4,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "initializer_range": 0.3,  # or all tokens choose the same experts, which the engine refuses
        },
        experts=8,
        top_k=2,
        layers=(1, 2),
        # vLLM warns that its attention may be wrong without; no prompt here is long enough to be cut
        options={"enable_chunked_prefill": True, **PLAIN_ROPE},
    ),
)
PROMPTS = [[11 + (37 * position) % 480 for position in range(start, start + 24)] for start in (0, 50, 90)]


FAMILIES += (dataclasses.replace(FAMILIES[0], dtype="bfloat16", equal=0.9),)


def forward_rows(model: Any, spec: RouteSpec, token_ids: Any) -> NDArray[np.int32]:
    """The experts that Transformers' own gates choose for every token, ``[S, L, K]``, each row sorted."""
    with taping(model, spec) as tape, torch.no_grad():
        model(torch.tensor([list(map(int, token_ids))]))
    [rows_SLK] = tape.forwards()
    return np.sort(rows_SLK, axis=2)


# each starts an engine; the family of all other files is enough on every change
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=[f"{one.name}-{one.dtype}" for one in FAMILIES])
def test_rows_of_a_family_are_those_of_transformers(
    family: Family, tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """The engine's spec, and every row of three sampled sequences at temperature 1."""
    model = family.build(tmp_path)
    llm = start_engine(str(tmp_path), dtype=family.dtype, max_model_len=128, max_num_seqs=8, **family.options)
    spec = spec_from_vllm(llm)
    records = generate_records(llm, PROMPTS, max_tokens=24)

    assert (family.experts, family.top_k, family.layers) == (spec.num_experts, spec.top_k, spec.layer_ids)
    same = []
    for record in records:
        expected_SLK = forward_rows(model, spec, record.token_ids)[:-1]
        same.append((expected_SLK == np.sort(record.routes[:-1], axis=2)).all(axis=2))
    share = float(np.concatenate(same).mean())
    record_testsuite_property(f"equal rows, {family.name} {family.dtype}", f"{share:.2%}")
    assert family.equal <= share
    # the engine against itself, token generated and token read
    assert (0.5 if family.equal < 1.0 else 1.0) <= probe(llm, spec).agreement


class Wrong:
    """A vLLM configuration of a Mixtral whose sizes are others than its Hugging Face configuration says."""

    def __init__(self, **sizes: int) -> None:
        self.hf_config = transformers.MixtralConfig(
            **{**FAMILY_SIZES, "num_local_experts": 8, "num_experts_per_tok": 2}
        )
        self.hf_config.architectures = ["MixtralForCausalLM"]
        self.model, self.is_moe = "wrong", True
        self._sizes = {"depth": 3, "experts": 8, "top_k": 2, **sizes}

    def get_total_num_hidden_layers(self) -> int:
        """Decoder layers."""
        return self._sizes["depth"]

    def get_num_experts(self) -> int:
        """Experts with weights."""
        return self._sizes["experts"]

    def get_num_experts_per_tok(self) -> int:
        """Top-k."""
        return self._sizes["top_k"]


@pytest.mark.parametrize("sizes", [{"depth": 2}, {"experts": 16}, {"top_k": 4}], ids=["depth", "experts", "top_k"])
def test_an_engine_of_other_sizes_than_its_model_is_refused(sizes: dict[str, int]) -> None:
    """What vLLM sizes its capture by must be what the configuration says."""
    assert 8 == spec_from_vllm(Wrong()).num_experts
    with pytest.raises(SpecError) as caught:
        spec_from_vllm(Wrong(**sizes))
    assert ErrorKind.SPEC_MISMATCH == caught.value.kind
