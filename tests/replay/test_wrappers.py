"""Replay on models in the wrappers that people train them in: PEFT, Accelerate, DDP, a wrapping module, copies.

The expected answer is that of the bare model under the same rows: a fresh LoRA adapter adds nothing.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig

from routeplane.capture import transformers as capture
from routeplane.errors import ErrorKind, ReplayError
from routeplane.record.spec import RouteSpec
from routeplane.replay import transformers as gates
from routeplane.testing.contracts.replay_contract import unlike_rows
from tests.replay.plain_batch import random_routes
from tests.replay.tiny_models import BY_NAME, NUM_ROWS, token_ids

QWEN3 = BY_NAME["qwen3_moe"]
ROWS = random_routes(QWEN3.spec, NUM_ROWS, seed=5, missing=0.2)


def forced(model: Any, run: Any = None) -> torch.Tensor:
    """Logits under the rows, attached to ``model``; ``run``: what is called, where that is another object."""
    with gates.attach(model, QWEN3.spec) as handle, handle.replaying(ROWS):
        logits: torch.Tensor = (run or model)(input_ids=token_ids(1)).logits
    assert all(gate.flipped_rows > 0 for gate in handle.report().gates)
    return logits


# ---- PEFT -----------------------------------------------------------------------------------------------------------

ADAPTERS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "router": {"target_parameters": ["mlp.gate.weight"]},
    "experts": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "whole gate": {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_lora_follows(options: dict[str, Any]) -> None:
    """The bare model's answer, and gradients in every adapter that the forward uses."""
    expected = forced(QWEN3.build())
    model: Any = get_peft_model(QWEN3.build(), LoraConfig(r=2, lora_alpha=4, **options))
    found = forced(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.autograd.backward(found.square().mean())
    learnt = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert learnt
    reached = [name for name, weight in learnt.items() if weight.grad is not None and bool(weight.grad.any())]
    # A of a fresh adapter has none, since B is zero
    assert {name for name in learnt if "lora_A" not in name} <= {*reached}


@pytest.mark.filterwarnings("ignore")
def test_actor_and_critic_in_one_wrapper() -> None:
    """Two adapters with a gate each: the one in use follows, and a switch under a handle is an error, not a no-op."""
    options: dict[str, Any] = ADAPTERS["whole gate"]
    model: Any = get_peft_model(QWEN3.build(), LoraConfig(r=2, **options))
    model.add_adapter("critic", LoraConfig(r=2, **options))
    expected = forced(QWEN3.build())
    for name in ("default", "critic"):
        model.set_adapter(name)
        torch.testing.assert_close(forced(model), expected, rtol=1e-5, atol=1e-6)
    with gates.attach(model, QWEN3.spec) as handle:
        model.set_adapter("default")
        with pytest.raises(ReplayError) as caught, handle.replaying(ROWS):
            model(input_ids=token_ids(1))
    assert ErrorKind.GATE_NOT_CONSUMED == caught.value.kind


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_records_of_a_lora_model(options: dict[str, Any]) -> None:
    """``generate`` of the wrapper runs the model inside; what is recorded is what the bare model records."""
    prompts = [[5, 9, 3], [17, 33, 21, 8]]
    sampled: dict[str, Any] = {"spec": QWEN3.spec, "max_tokens": 4}
    expected = capture.records(QWEN3.build().eval(), prompts, **sampled)
    model: Any = get_peft_model(QWEN3.build(), LoraConfig(r=2, **options)).eval()
    found = capture.records(model, prompts, **sampled)
    assert [(each.token_ids.tolist(), each.routes.tolist()) for each in expected] == [
        (each.token_ids.tolist(), each.routes.tolist()) for each in found
    ]


# ---- other wrappers -------------------------------------------------------------------------------------------------


class Engine(nn.Module):
    """A wrapper as DeepSpeed's: the model is ``module``, and the forward hands on what it is given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("attach_to", ["wrapper", "model"])
def test_a_wrapping_module(attach_to: str) -> None:
    """Attached to either, and called through the wrapper."""
    engine = Engine(QWEN3.build())
    found = forced(engine if attach_to == "wrapper" else engine.module, engine)
    assert torch.equal(forced(QWEN3.build()), found)


def test_accelerate_with_gradient_accumulation() -> None:
    """Two accumulated microbatches: the gradients of the bare model."""

    def gradients(model: Any, accelerator: Any = None) -> list[torch.Tensor]:
        with gates.attach(model, QWEN3.spec) as handle:
            for seed in (0, 1):
                with handle.replaying(random_routes(QWEN3.spec, NUM_ROWS, seed=seed)):
                    loss = model(input_ids=token_ids(seed)).logits.square().mean()
                    (accelerator.backward if accelerator else torch.autograd.backward)(loss)
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(QWEN3.build())
    for expected, found in zip(gradients(QWEN3.build()), gradients(prepared, accelerator), strict=True):
        assert torch.equal(expected, found)


def test_ddp(tmp_path: Path) -> None:
    """One rank: the bare model's answer, attached to the wrapper."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(QWEN3.build(), find_unused_parameters=True)
        found = forced(model)
        torch.autograd.backward(found.square().mean())
        assert all(weight.grad is not None for name, weight in model.named_parameters() if "gate.weight" in name)
    finally:
        dist.destroy_process_group()
    assert torch.equal(forced(QWEN3.build()), found)


# ---- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_an_attached_model_is_bare(how: str, compiled: bool) -> None:
    """It stays live while the first one follows, has the same weights, and can be attached to itself."""
    model = QWEN3.build()
    live, keys = model(input_ids=token_ids(1)).logits, list(model.state_dict())
    with gates.attach(model, QWEN3.spec, mode="compiled" if compiled else "force", aux="live") as handle:
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        assert keys == list(model.state_dict()) == list(twin.state_dict())
        with handle.replaying(ROWS):
            assert torch.equal(live, twin(input_ids=token_ids(1)).logits)
            expected = model(input_ids=token_ids(1)).logits
        assert torch.equal(expected, forced(twin))
        with torch.no_grad():
            twin.model.layers[1].mlp.gate.weight.zero_()
            assert not torch.equal(live, twin(input_ids=token_ids(1)).logits)
        assert torch.equal(live, model(input_ids=token_ids(1)).logits)
    torch.testing.assert_close(forced(pickle.loads(pickle.dumps(model))), expected, rtol=0, atol=0)


def test_two_models_at_once() -> None:
    """Each follows its own rows, entered one in the other."""
    first, second = QWEN3.build(), QWEN3.build(seed=1)
    expected = forced(first), forced(second)
    with gates.attach(first, QWEN3.spec) as one, gates.attach(second, QWEN3.spec) as two:
        with one.replaying(ROWS), two.replaying(ROWS):
            found = [model(input_ids=token_ids(1)).logits for model in (first, second)]
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])


# ---- what happens between -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_a_forward_leaves_nothing_open(error: type[BaseException]) -> None:
    """The next batch is replayed as if the first had not been."""
    model = QWEN3.build()
    expected = forced(model)

    def fail(*_: object) -> None:
        raise error

    with gates.attach(model, QWEN3.spec) as handle:
        hook = model.model.layers[1].mlp.experts.register_forward_pre_hook(fail)
        with pytest.raises(error), handle.replaying(ROWS):
            model(input_ids=token_ids(1))
        hook.remove()
        with handle.replaying(ROWS):
            assert torch.equal(expected, model(input_ids=token_ids(1)).logits)
    assert 1 == handle.report().microbatches


def test_generate_under_a_handle() -> None:
    """Between batches it is live; inside one it has other rows than the batch, which is an error."""
    model = QWEN3.build().eval()
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(token_ids(1), **settings)
    with gates.attach(model, QWEN3.spec) as handle:
        assert torch.equal(expected, model.generate(token_ids(1), **settings))
        with pytest.raises(ReplayError) as caught, handle.replaying(ROWS):
            model.generate(token_ids(1), **settings)
    assert ErrorKind.ROW_COUNT == caught.value.kind


# ---- images ---------------------------------------------------------------------------------------------------------

IMAGE, START, END = 61, 62, 63


def vision_model() -> Any:
    """A tiny Qwen3-VL-MoE: images of 4 x 4 patches, which are four tokens each."""
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "pad_token_id": 0,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=60,
    )
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).eval()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_a_vision_language_model(images: bool) -> None:
    """Rows are those of the expanded positions, image tokens among them; gradients reach gates and image."""
    model = vision_model()
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1, 2), model="qwen3_vl_moe")
    tokens = [5, 9, START, IMAGE, IMAGE, IMAGE, IMAGE, END, 17, 4] if images else [5, 9, 17, 4]
    inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens])}
    pixels = torch.randn(16, 1536, generator=torch.Generator().manual_seed(1)).requires_grad_()
    if images:
        inputs |= {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
        inputs |= {"mm_token_type_ids": (inputs["input_ids"] == IMAGE).int()}
    live = model(**inputs).logits
    with gates.attach(model, spec) as handle:
        with handle.recording(None) as own:
            model(**inputs)
        with handle.replaying(own):
            assert torch.equal(live, model(**inputs).logits)
        with handle.replaying(unlike_rows(spec, len(tokens), seed=5)):
            forced_logits = model(**inputs).logits
    torch.autograd.backward(forced_logits.square().mean())
    assert not torch.equal(live, forced_logits)
    assert [2 * len(tokens)] * 3 == [gate.forced_rows for gate in handle.report().gates]
    weights = dict(model.named_parameters())
    gradients = [weights[f"{gate.name}.weight"].grad for gate in handle.report().gates]
    assert all(each is not None and bool(each.any()) for each in gradients)
    assert images == (pixels.grad is not None and bool(pixels.grad.any()))
