"""A tiny Qwen3-MoE in the real vLLM engine and in Transformers, for the tests that need both.

float32, so that no near tie flips; temperature 1, since greedy decoding of random weights repeats one token and would
hide rows that are off by one.

Axes: S token positions, L captured layers, K top-k slots.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, RequestOutput, SamplingParams

from routeplane.capture.vllm import start_engine
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec

__all__ = [
    "FAMILY_SIZES",
    "LONG",
    "PLAIN_ROPE",
    "SHORT",
    "SPEC",
    "VOCABULARY",
    "Engine",
    "assert_equals_reference",
    "reference_logprobs",
    "reference_rows",
    "running_engine",
    "states",
]

SPEC = RouteSpec(num_experts=16, top_k=4, layer_ids=(0, 2, 3), model="Qwen3MoeForCausalLM")
VOCABULARY = 512
#: longer than two blocks of the KV cache
LONG = [11 + (37 * position) % 480 for position in range(75)]
SHORT = [10, 11, 12, 13, 14, 20, 21, 22, 300, 301]

#: sizes that tiny models of several families share
FAMILY_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}

#: Options of an engine with latent attention on a CPU. vLLM's compiled rotary embedding takes the heads of a view for
#: dense ones there, and turns other values than it was given; the same embedding in PyTorch is right.
PLAIN_ROPE: dict[str, Any] = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}

QWEN3_MOE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """A running engine, the folder of its weights, and the same weights in Transformers."""

    llm: LLM
    folder: Path
    model: Any

    def ask(self, *prompts: list[int], **sampling: Any) -> list[RequestOutput]:
        """Generate at temperature 1 with the log-probabilities of what was sampled."""
        options = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "logprobs": 0, "ignore_eos": True}
        params = SamplingParams(detokenize=False, **{**options, **sampling})
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: list[RequestOutput] = self.llm.generate(inputs, params, use_tqdm=False)
        return outputs


@contextmanager
def running_engine(folder: Path, **options: Any) -> Iterator[Engine]:
    """An engine whose steps take 256 tokens; the second of four layers is dense. ``options``: ``start_engine``'s.

    It is not shut down here, which would end what all engines of the process share (``engines_of_process``).
    """
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        **options,
    }
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE))
    model.eval().save_pretrained(folder)
    # An engine that is collected while another starts takes the process groups of both with it (seen on 0.32).
    gc.collect()
    # vLLM compiles two small functions of its sampler again for every batch size, which takes longer than all the rest.
    with torch.compiler.set_stance("force_eager"):
        yield Engine(llm=start_engine(str(folder), **settings), folder=folder, model=model)


def reference_rows(model: Any, token_ids: Any) -> list[list[list[int]]]:
    """The experts that Transformers chooses for every token, ``[S][L]``, each row sorted."""
    with torch.no_grad():
        logits = model(torch.tensor([list(map(int, token_ids))]), output_router_logits=True).router_logits
    chosen_LSK = torch.stack([layer.topk(SPEC.top_k, dim=-1).indices.sort(dim=-1).values for layer in logits])
    rows: list[list[list[int]]] = chosen_LSK.transpose(0, 1).tolist()
    return rows


def reference_logprobs(model: Any, token_ids: Any) -> NDArray[Any]:
    """log p(token t | tokens before t), ``[S]``; NaN for the first."""
    ids = torch.tensor([list(map(int, token_ids))])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
    picked = logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()
    return np.concatenate([[np.nan], picked])


def assert_equals_reference(record: RouteRecord, model: Any, *, first_row: int = 0) -> None:
    """Every fed row from ``first_row`` on is the reference's as a set; what was not fed or not asked for is MISSING."""
    fed = slice(first_row, record.num_tokens - 1)
    assert reference_rows(model, record.token_ids)[fed] == np.sort(record.routes[fed], axis=2).tolist()
    assert (record.routes[:first_row] == -1).all()
    assert (record.routes[-1] == -1).all()
    assert record is record.verify()


def states(record: RouteRecord) -> list[tuple[int, int, str, int | None]]:
    """The captures, shortly."""
    return [(one.start, one.stop, one.state, one.weights_version) for one in record.captures]
