"""Gates that Automodel's own replay does not reach: whole models of their architectures, found and followed by probing.

Axes: N token rows, E experts, K top-k slots.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from nemo_automodel.components.models.inkling.configuration import (
    InklingAudioConfig,
    InklingConfig,
    InklingTextConfig,
    InklingVisionConfig,
)
from nemo_automodel.components.models.inkling.model import InklingForConditionalGeneration
from nemo_automodel.components.models.kimi_k3.config import KimiK3TextConfig
from nemo_automodel.components.models.kimi_k3.model import KimiK3ForCausalLM
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.layers import FakeBalancedGate
from torch import nn

from routeplane.batch import collate
from routeplane.errors import ErrorKind, ReplayError
from routeplane.record.spec import RouteSpec
from routeplane.replay import automodel as gates
from routeplane.replay.transformers import Probe
from routeplane.testing.builders import watermarked_record, watermarked_spec
from routeplane.testing.contracts.replay_contract import unlike_rows
from tests.replay.automodel.tiny_automodel import (
    EXPERTS,
    FAMILIES,
    HIDDEN,
    NUM_ROWS,
    TOP_K,
    Family,
    backend,
    drawn,
    gate_modules,
    tokens_of,
)

pytestmark = pytest.mark.automodel

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
_LATENT: dict[str, Any] = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "routed_expert_hidden_size"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
}


def deepseek_v4_module() -> Any:
    """Its module imports an image library, which models of text do not use and the environment lacks."""
    stand_ins = {name: ModuleType(name) for name in ("PIL", "PIL.Image", "PIL.ImageOps")}
    stand_ins["PIL"].__dict__.update(Image=stand_ins["PIL.Image"], ImageOps=stand_ins["PIL.ImageOps"])
    stand_ins["PIL.Image"].__dict__["Image"] = object
    with mock.patch.dict(sys.modules, {} if "PIL" in sys.modules else stand_ins):
        from nemo_automodel.components.models.deepseek_v4 import model
    return model


def deepseek_v4(*, hash_layers: int) -> Any:
    """Layers below ``hash_layers`` look experts up by token id."""
    module = deepseek_v4_module()
    config = module.DeepseekV4Config(
        **_SIZES,
        **dict.fromkeys(("q_lora_rank", "o_lora_rank", "head_dim"), 16),
        qk_rope_head_dim=8,
        o_groups=2,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_hash_layers=hash_layers,
        num_nextn_predict_layers=0,
        compress_ratios=[0, 0, 0],
    )
    return module.DeepseekV4ForCausalLM(config, backend=backend())


def deepseek_v4_vision() -> Any:
    """The gates of the vision checkpoint; the first layer looks text tokens up."""
    module, model = deepseek_v4_module(), deepseek_v4(hash_layers=1)
    for name, layer in model.model.layers.items():
        layer.mlp.gate = module.DeepseekV4VisionGate(
            model.config, model.model.moe_config, gate_precision=torch.float32, hash_routing=name == "0"
        )
    return model


def kimi_k3() -> Any:
    """A dense layer, then two with experts behind a latent projection."""
    full = {"full_attn_layers": [1, 2, 3], "kda_layers": [], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
    config = KimiK3TextConfig(
        **_SIZES,
        **_LATENT,
        intermediate_size=24,
        num_experts=EXPERTS,
        num_experts_per_token=TOP_K,
        num_shared_experts=1,
        linear_attn_config=full,
    )
    return KimiK3ForCausalLM(config, backend=backend())


def inkling() -> Any:
    """Shared experts in the router's softmax; towers for sounds and images beside."""
    sizes = {**_SIZES, "dtype": "float32"}
    del sizes["torch_dtype"]
    text = InklingTextConfig(
        **sizes,
        **dict.fromkeys(("head_dim", "d_rel"), 8),
        **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
        **dict.fromkeys(("sliding_window_size", "rel_extent"), 16),
        swa_num_attention_heads=4,
        intermediate_size=24,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_shared_experts=1,
    )
    config = InklingConfig(
        text_config=text,
        vision_config=InklingVisionConfig(
            text_hidden_size=HIDDEN, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
        ),
        audio_config=InklingAudioConfig(text_hidden_size=HIDDEN, n_mel_bins=4, mel_vocab_size=8),
        image_token_id=60,
        audio_token_id=61,
        image_bos_token_id=62,
        audio_bos_token_id=63,
    )
    return InklingForConditionalGeneration(config, backend=backend())


def built(make: Callable[[], Any]) -> Any:
    """Single precision on the CPU, random weights, in training mode."""
    with mock.patch.object(torch.cuda, "current_device", return_value=0):
        model = make()
    for module in model.modules():
        if isinstance(vars(module).get("device"), torch.device):
            module.device = torch.device("cpu")
    return drawn(model.float()).train()


@dataclass(frozen=True, kw_only=True)
class Case:
    """``layers`` follow; ``live`` names the routers that cannot, ``observed`` is what is said of them."""

    name: str
    make: Callable[[], Any]
    layers: tuple[int, ...]
    live: tuple[str, ...] = ()
    observed: str = ""

    @property
    def spec(self) -> RouteSpec:
        """The geometry, written down by hand."""
        return RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=self.layers, model=self.name)

    @property
    def probe(self) -> Probe:
        """Leaves the others live."""
        return Probe(leave_live=self.live)


#: What Automodel 0.7's own replay does not reach, and what probing says.
CASES = (
    Case(name="kimi_k3", make=kimi_k3, layers=(1, 2)),
    Case(name="inkling", make=inkling, layers=(0, 1, 2)),
    Case(name="deepseek_v4", make=lambda: deepseek_v4(hash_layers=0), layers=(0, 1, 2)),
    Case(
        name="deepseek_v4, hash layer",
        make=lambda: deepseek_v4(hash_layers=1),
        layers=(1, 2),
        live=("model.layers.0.*",),
        observed=r"experts, and no selection by topk or max over them @ model\.layers\.0\.mlp",
    ),
    Case(
        name="deepseek_v4 vision, hash layer",
        make=deepseek_v4_vision,
        layers=(1, 2),
        live=("model.layers.0.*",),
        observed=r"an output that does not follow forced ids @ model\.layers\.0\.mlp\.gate",
    ),
)


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def logits_of(model: Any) -> torch.Tensor:
    """Of fixed tokens."""
    found: torch.Tensor = model(tokens_of(1)).logits
    return found


@each_case
def test_a_gate_without_a_handle_follows(case: Case) -> None:
    """Its own rows change nothing; others are used, reach its weights, and leave MISSING rows and hash layers alone."""
    model = built(case.make)
    rows = unlike_rows(case.spec, NUM_ROWS, seed=5, missing=0.3)
    with gates.attach(model, case.spec, probe=case.probe) as handle:
        with handle.recording(None) as own:
            live = logits_of(model)
        with handle.replaying(own):
            assert torch.equal(live, logits_of(model))
        used: dict[int, torch.Tensor] = {}
        hooks = [
            module.register_forward_hook(lambda _, args, output, layer=layer: used.update({layer: output[1]}))
            for layer, module in gate_modules(model).items()
        ]
        with handle.replaying(rows):
            forced = logits_of(model)
        torch.autograd.backward(forced.square().mean())
        for hook in hooks:
            hook.remove()
    assert not torch.equal(live, forced)
    for layer in case.layers:
        routes_NK = rows.layer(layer).long()
        is_forced = routes_NK[:, 0] >= 0
        assert routes_NK[is_forced].sort().values.tolist() == used[layer][is_forced].sort().values.tolist()
        assert bool(gate_modules(model)[layer].weight.grad.any())
    assert list(case.layers) == [gate.layer_id for gate in handle.report().gates]
    assert case.live == handle.report().left_live


@each_case
def test_probing_leaves_no_trace(case: Case) -> None:
    """State, gradients, what modules keep beside (loads of experts), and the random state are byte-equal."""
    model = built(case.make)
    for gate in gate_modules(model).values():
        gate._track_load_balance = True
    torch.autograd.backward(logits_of(model).square().mean())

    def traces() -> dict[str, object]:
        found: dict[str, object] = {"random": torch.random.get_rng_state().tolist()}
        for name, tensor in model.state_dict().items():
            found[name] = tensor.numpy().tobytes()
        for name, weight in model.named_parameters():
            found[f"{name} grad"] = None if weight.grad is None else weight.grad.numpy().tobytes()
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                plain = value.tolist() if isinstance(value, torch.Tensor) else value
                if plain is None or isinstance(plain, bool | int | float | list):
                    found[f"{path} {name}"] = plain
            found[f"{path} hooks"] = len(module._forward_hooks) + len(module._forward_pre_hooks)
        return found

    before = traces()
    gates.find_gates(model, probe=case.probe)
    assert before == traces()


@pytest.mark.parametrize("case", [case for case in CASES if case.observed], ids=lambda case: case.name)
def test_what_cannot_follow_is_refused_with_what_was_observed(case: Case) -> None:
    """Unless it is left live by name."""
    model = built(case.make)
    with pytest.raises(ReplayError, match=case.observed) as caught:
        gates.attach(model, case.spec)
    assert ErrorKind.NO_SEAM == caught.value.kind


@pytest.mark.parametrize(
    ("noise", "observed"),
    [(0.0, "experts, and no selection by topk or max"), (0.5, "got .* @ model.layers.1.mlp.gate")],
    ids=["by position", "at random"],
)
def test_a_gate_for_benchmarks_is_refused(noise: float, observed: str) -> None:
    """Its weights are not the model's scores."""
    model = FAMILIES[0].build()
    config = MoEConfig(
        **{
            **dict.fromkeys(("n_shared_experts", "n_expert_groups", "n_limited_groups", "gate_bias_update_factor"), 0),
            **dict.fromkeys(("inter_dim", "moe_inter_dim"), 16),
            "dim": HIDDEN,
            "n_routed_experts": EXPERTS,
            "n_activated_experts": TOP_K,
            "train_gate": True,
            "score_func": "softmax",
            "route_scale": 1.0,
            "aux_loss_coeff": 0.0,
            "norm_topk_prob": True,
        }
    )
    model.model.layers["1"].mlp.gate = FakeBalancedGate(config, noise=noise)
    with pytest.raises(ReplayError, match=observed) as caught:
        gates.attach(model, FAMILIES[0].spec)
    assert ErrorKind.NO_SEAM == caught.value.kind


def test_a_dense_model_has_no_gates() -> None:
    """A model without experts, run with a forward of the test's."""
    dense = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 8))
    with pytest.raises(ReplayError, match="a mixture-of-experts model, got Sequential without a single gate"):
        gates.find_gates(dense, probe=Probe(forward=lambda: dense(tokens_of(1))))


# ---- packed sequences ------------------------------------------------------------------------------------------------

LENGTHS = (9, 12, 8)


def batches_of(spec: RouteSpec) -> dict[str, Any]:
    """One set of records, padded and packed; rows are drawn, a row for each token but the last."""
    generator = torch.Generator().manual_seed(7)
    records = []
    for sample, length in enumerate(LENGTHS):
        routes = torch.rand(length, spec.num_layers, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]
        routes[-1] = -1
        wide = watermarked_record(sample, num_tokens=length, spec=watermarked_spec(layers=(0, 1), top_k=2))
        rows, tokens = routes.short().numpy(), torch.randint(3, 58, (length,), generator=generator)
        records.append(replace(wide, routes=rows, spec=spec, token_ids=tokens.int().numpy(), checksum=None))
    return {layout: collate(records, spec, layout=layout) for layout in ("padded", "packed")}


def with_sequences(model: Any) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Kimi-K3's own argument: the number of the sequence that a token belongs to, from 1."""
    return lambda ids, positions: model(
        ids, position_ids=positions, attention_mask=(positions == 0).cumsum(dim=-1), use_cache=False
    )


def test_packed_sequences_that_are_kept_apart_equal_padded_ones() -> None:
    """Kimi-K3 takes packed input on a CPU: logits of each sequence are those of its own row."""
    case = CASES[0]
    model = built(case.make)
    batches = batches_of(case.spec)
    forward = with_sequences(model)
    with gates.attach(model, case.spec, probe=Probe(packed=forward)) as handle, torch.no_grad():
        with handle.replaying(batches["packed"]):
            output: Any = forward(batches["packed"].token_ids[None], batches["packed"].position_ids[None])
        with handle.replaying(batches["padded"]):
            padded = model(batches["padded"].token_ids, padding_mask=batches["padded"].pad_mask).logits
    packed = output.logits.reshape(sum(LENGTHS), -1).split(LENGTHS)
    for sequence, (found, length) in enumerate(zip(packed, LENGTHS, strict=True)):
        torch.testing.assert_close(found, padded[sequence, :length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[2]], ids=lambda case: case.name)
def test_packed_sequences_that_are_mixed_are_refused(case: Case) -> None:
    """Positions that begin again do not say to these models where a sequence does; no forward of the batch runs."""
    model = built(case.make)
    batches = batches_of(case.spec)
    with gates.attach(model, case.spec) as handle:
        with pytest.raises(ReplayError, match="with the tokens of the sequence before") as caught:
            with handle.replaying(batches["packed"]):
                pytest.fail("the body must not run")
        assert ErrorKind.PACKING == caught.value.kind


@pytest.mark.parametrize("family", FAMILIES[:1] + FAMILIES[-1:], ids=lambda family: family.name)
def test_plain_attention_does_not_know_packed_sequences(family: Family) -> None:
    """Of Qwen3-MoE and GLM-4: Transformer Engine's would, which has no CPU build."""
    model = family.build()
    batches = batches_of(family.spec)
    with gates.attach(model, family.spec) as handle:
        with pytest.raises(ReplayError, match="with the tokens of the sequence before"):
            with handle.replaying(batches["packed"]):
                pytest.fail("the body must not run")
        with handle.replaying(batches["padded"]):
            model(batches["padded"].token_ids, padding_mask=batches["padded"].pad_mask)
