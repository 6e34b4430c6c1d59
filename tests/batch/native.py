"""Batches of other stacks, built as their own code builds them from what an engine returned: no layout of ours in here.

The samples are real: tokens and routes that small Transformers models of several families chose, and vLLM's answers.

Axes: S tokens of a sample, D decoder layers, K top-k slots.
"""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from routeplane import Capture, RouteRecord, RouteSpec, Span
from routeplane.capture import transformers as engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["BUILDERS", "DEPTH", "FAMILIES", "Sample", "engine_samples", "families", "record_of", "vary"]

#: Decoder layers of every model here.
DEPTH = 4
DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample: ids, tokens of the prompt, what of the response was sampled, and the rows that an engine returned."""

    name: str
    tokens: NDArray[np.int64]
    prompt: int
    mask: NDArray[np.int64]
    rows: NDArray[np.int16]

    @property
    def fed(self) -> int:
        """Tokens before the last sampled one."""
        sampled = np.flatnonzero(self.mask)
        return self.prompt + int(sampled[-1]) if len(sampled) else len(self.tokens) - 1


def _model(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]


def _base(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }


@cache
def families() -> dict[str, tuple[RouteSpec, Any]]:
    """Models by name: all layers routed, dense layers first, and a top-1 router."""
    configs = {
        "olmoe": transformers.OlmoeConfig(**_base(num_experts=8, num_experts_per_tok=2)),
        "qwen3_dense_first": transformers.Qwen3MoeConfig(
            **_base(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=16, mlp_only_layers=[0], head_dim=8)
        ),
        "qwen3_top1": transformers.Qwen3MoeConfig(
            **_base(num_experts=8, num_experts_per_tok=1, moe_intermediate_size=16, mlp_only_layers=[2], head_dim=8)
        ),
        "mixtral": transformers.MixtralConfig(**_base(num_local_experts=8, num_experts_per_tok=2)),
    }
    found: dict[str, tuple[RouteSpec, Any]] = {
        name: (RouteSpec.from_hf_config(config), _model(config)) for name, config in configs.items()
    }
    for version in ("0.30", "0.32"):
        found[f"vllm_{version}"] = RouteSpec.from_hf_config(_vllm(version)["model"]), None
    return found


def _vllm(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"vllm-{version}-http.json").read_text(encoding="utf-8"))
    return found


def _vllm_samples(version: str) -> tuple[Sample, ...]:
    """The whole answers that a vLLM server gave, of at least five tokens."""
    found: list[Sample] = []
    for case in _vllm(version)["cases"]:
        response = case["response"]
        for choice in response.get("choices", ()) if isinstance(response, dict) else ():
            prompt = choice.get("prompt_token_ids") or response.get("prompt_token_ids") or []
            answer = choice.get("token_ids") or []
            if not choice.get("routed_experts") or not prompt or len(answer) < 5:
                continue
            rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))).astype(np.int16)
            if len(rows) == len(prompt) + len(answer) - 1:
                mask, tokens = np.ones(len(answer), dtype=np.int64), np.asarray([*prompt, *answer])
                found.append(Sample(name=f"s{len(found)}", tokens=tokens, prompt=len(prompt), mask=mask, rows=rows))
    return tuple(found)


#: Where samples come from: families of models, and what a vLLM server answered.
FAMILIES = ("olmoe", "qwen3_dense_first", "qwen3_top1", "mixtral", "vllm_0.30", "vllm_0.32")


@cache
def engine_samples(name: str) -> tuple[Sample, ...]:
    """What the model of a family generated: 24 samples; dense layers hold zeros, as engines return them."""
    if name.startswith("vllm_"):
        return _vllm_samples(name.removeprefix("vllm_"))
    spec, model = families()[name]
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, 64, rng.integers(2, 9)).tolist() for _ in range(24)]
    found = []
    for at, record in enumerate(engine.records(model, prompts, spec=spec, max_tokens=14, seed=1)):
        rows = np.zeros((record.num_tokens - 1, DEPTH, spec.top_k), dtype=np.int16)
        rows[:, list(spec.layer_ids)] = record.routes[:-1]
        prompt = len(prompts[at])
        mask = np.ones(record.num_tokens - prompt, dtype=np.int64)
        tokens = record.token_ids.astype(np.int64)
        found.append(Sample(name=f"s{at}", tokens=tokens, prompt=prompt, mask=mask, rows=rows))
    return tuple(found)


def vary(sample: Sample, rng: np.random.Generator, *, name: str) -> Sample:
    """The sample as a trainer may have it: truncated, with a tool's answer inside, or with one at its end."""
    how = rng.integers(0, 4)
    mask, response = sample.mask.copy(), len(sample.mask)
    if how == 1:  # the engine went on: the row of the last token that is kept is there
        keep = int(rng.integers(2, response))
        stop = sample.prompt + keep
        return replace(sample, name=name, tokens=sample.tokens[:stop], mask=mask[:keep], rows=sample.rows[:stop])
    if how == 2:
        mask[response // 2 : response // 2 + 2] = 0
    if how == 3:  # what a tool answered last was never fed
        mask[-3:] = 0
        sample = replace(sample, rows=sample.rows[: sample.prompt + response - 4])
    return replace(sample, name=name, mask=mask)


def record_of(sample: Sample, spec: RouteSpec) -> RouteRecord:
    """What was captured for a sample."""
    routes = spec.missing_rows(len(sample.tokens))
    routes[: len(sample.rows)] = sample.rows[:, list(spec.layer_ids)]
    kinds = np.concatenate([np.zeros(sample.prompt, dtype=bool), sample.mask != 0])
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    stop = len(sample.rows)
    captures = [Capture(start=0, stop=stop, call="c", weights_version=1, state="captured")]
    if stop < len(kinds) - 1:
        captures.append(Capture(start=stop, stop=len(kinds) - 1, call="c", weights_version=None, state="not_captured"))
    if stop < len(kinds):
        last = max(stop, len(kinds) - 1)
        captures.append(Capture(start=last, stop=len(kinds), call="c", weights_version=None, state="not_fed"))
    return RouteRecord(
        sample_id=sample.name,
        token_ids=sample.tokens,
        routes=routes,
        spans=tuple(
            Span(
                start=a,
                stop=b,
                kind="generation" if kinds[a] else "prompt",
                call="c",
                weights_version=1 if kinds[a] else None,
            )
            for a, b in pairwise(edges)
        ),
        captures=tuple(captures),
        spec=spec,
    )


# ---- one builder a stack ---------------------------------------------------------------------------------------------


def verl(samples: list[Sample], spec: RouteSpec) -> dict[str, Any]:
    """Prompts padded left, responses right, zeros where nothing is."""
    left, right = max(each.prompt for each in samples), max(len(each.mask) for each in samples)
    count, width, top_k = len(samples), left + right, spec.top_k
    batch: dict[str, Any] = {
        "input_ids": torch.zeros(count, width, dtype=torch.long),
        "attention_mask": torch.zeros(count, width, dtype=torch.long),
        "response_mask": torch.zeros(count, right, dtype=torch.long),
        "routed_experts": torch.zeros(count, width, DEPTH, top_k, dtype=torch.int16),
        "uid": [each.name for each in samples],
    }
    for at, each in enumerate(samples):
        start = left - each.prompt
        batch["input_ids"][at, start : start + len(each.tokens)] = torch.from_numpy(each.tokens)
        batch["attention_mask"][at, start : start + len(each.tokens)] = 1
        batch["response_mask"][at, : len(each.mask)] = torch.from_numpy(each.mask)
        batch["routed_experts"][at, start : start + len(each.rows)] = torch.from_numpy(each.rows)
    return batch


def _whole(each: Sample, length: int, dtype: Any) -> NDArray[Any]:
    rows = np.zeros((length, *each.rows.shape[1:]), dtype=dtype)
    rows[: len(each.rows)] = each.rows[:length]
    return rows


def _slime(field: str, *, text: bool) -> Callable[[list[Sample], RouteSpec], list[dict[str, Any]]]:
    def build(samples: list[Sample], spec: RouteSpec) -> list[dict[str, Any]]:
        found = []
        for each in samples:
            routes: Any = _whole(each, len(each.tokens) - 1, np.int32 if text else np.uint8)
            sample = {
                "index": each.name,
                "tokens": each.tokens.tolist(),
                "response_length": len(each.mask),
                "loss_mask": each.mask.tolist(),
                field: base64.b64encode(routes.tobytes()).decode() if text else routes,
            }
            found.append({**sample, "top_k": spec.top_k} if text else sample)
        return found

    return build


def prime_rl(samples: list[Sample], spec: RouteSpec) -> dict[str, Any]:
    """One pack, its padding counted to the last sequence."""
    lengths = [len(each.tokens) for each in samples]
    rest = -sum(lengths) % 16
    routes = np.concatenate([_whole(each, len(each.tokens), np.uint8) for each in samples])
    routes = np.concatenate([routes, np.zeros((rest, *routes.shape[1:]), dtype=np.uint8)])
    masks = [np.concatenate([np.zeros(each.prompt, dtype=np.int64), each.mask]) for each in samples]
    return {
        "input_ids": np.concatenate([*(each.tokens for each in samples), np.zeros(rest, dtype=np.int64)]),
        "loss_mask": np.concatenate([*masks, np.zeros(rest, dtype=np.int64)]) != 0,
        "sequence_lengths": [*lengths[:-1], lengths[-1] + rest],
        "routed_experts": {"data": routes.tobytes(), "shape": list(routes.shape), "dtype": "uint8"},
    }


def ms_swift(samples: list[Sample], spec: RouteSpec) -> dict[str, Any]:
    """One padding-free batch of one row: labels of -100 where nothing was sampled, zeros where nothing is, int64."""
    lengths = [len(each.tokens) for each in samples]
    rest = -sum(lengths) % 16
    ids = [*(each.tokens for each in samples), np.zeros(rest, dtype=np.int64)]
    labels = [
        np.concatenate([np.full(each.prompt, -100), np.where(each.mask, each.tokens[each.prompt :], -100)])
        for each in samples
    ]
    routes = np.concatenate([_whole(each, len(each.tokens), np.int64) for each in samples])
    routes = np.concatenate([routes, np.zeros((rest, *routes.shape[1:]), dtype=np.int64)])
    positions = [*(np.arange(length) for length in lengths), np.zeros(rest, dtype=np.int64)]
    return {
        "input_ids": torch.from_numpy(np.concatenate(ids))[None],
        "labels": torch.from_numpy(np.concatenate([*labels, np.full(rest, -100)]))[None],
        "position_ids": torch.from_numpy(np.concatenate(positions))[None],
        "seq_lens": lengths,
        "routed_experts": torch.from_numpy(routes)[None],
    }


def skyrl(samples: list[Sample], spec: RouteSpec) -> dict[str, Any]:
    """Left padded; arange wherever no route was captured, dense layers included; the narrowest type."""
    width, right = max(len(each.tokens) for each in samples), max(len(each.mask) for each in samples)
    count, filler = len(samples), np.arange(spec.top_k)
    routes = np.broadcast_to(filler, (count, width, DEPTH, spec.top_k)).astype(np.uint8).copy()
    ids, real = np.zeros((count, width), dtype=np.int64), np.zeros((count, width), dtype=np.int64)
    sampled = np.zeros((count, right), dtype=np.int64)
    for at, each in enumerate(samples):
        start = width - len(each.tokens)
        ids[at, start:], real[at, start:] = each.tokens, 1
        sampled[at, right - len(each.mask) :] = each.mask
        for layer in spec.layer_ids:
            routes[at, start : start + each.fed, layer] = each.rows[: each.fed, layer]
    return {
        "sequences": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(real),
        "loss_mask": torch.from_numpy(sampled),
        "rollout_expert_indices": torch.from_numpy(routes),
        "router_padding_mask": torch.from_numpy(real == 0),
    }


def _nemo_rows(each: Sample, spec: RouteSpec) -> NDArray[np.int16]:
    rows = np.broadcast_to(np.arange(spec.top_k), (len(each.tokens), *spec.row_shape)).astype(np.int16).copy()
    rows[: each.fed] = each.rows[: each.fed][:, list(spec.layer_ids)]
    return rows


def _nemo(padding: str) -> Callable[[list[Sample], RouteSpec], dict[str, Any]]:
    def build(samples: list[Sample], spec: RouteSpec) -> dict[str, Any]:
        width, count = max(len(each.tokens) for each in samples), len(samples)
        routes = np.zeros((count, width, *spec.row_shape), dtype=np.int16)
        if padding == "arange":
            routes[...] = np.arange(spec.top_k)
        ids, sampled = np.zeros((count, width), dtype=np.int64), np.zeros((count, width), dtype=np.int64)
        for at, each in enumerate(samples):
            ids[at, : len(each.tokens)] = each.tokens
            sampled[at, each.prompt : len(each.tokens)] = each.mask
            routes[at, : len(each.tokens)] = _nemo_rows(each, spec)
        return {
            "input_ids": torch.from_numpy(ids),
            "input_lengths": torch.tensor([len(each.tokens) for each in samples]),
            "token_mask": torch.from_numpy(sampled),
            "routed_experts": torch.from_numpy(routes),
            "sample_ids": [each.name for each in samples],
        }

    return build


def nemo_rl_tq(samples: list[Sample], spec: RouteSpec) -> dict[str, Any]:
    """Jagged columns, one tensor a sample."""

    def nested(parts: list[NDArray[Any]]) -> torch.Tensor:
        found: torch.Tensor = torch.nested.nested_tensor(
            [torch.from_numpy(part) for part in parts], layout=torch.jagged
        )
        return found

    return {
        "input_ids": nested([each.tokens for each in samples]),
        "token_mask": nested([np.concatenate([np.zeros(each.prompt, np.int64), each.mask]) for each in samples]),
        "routed_experts": nested([_nemo_rows(each, spec) for each in samples]),
        "input_lengths": torch.tensor([len(each.tokens) for each in samples]),
        "sample_ids": [each.name for each in samples],
    }


def tunix(samples: list[Sample], spec: RouteSpec) -> dict[str, Any]:
    """Prompts padded left, completions right; -1 wherever the trainer must not replay."""
    left, right = max(each.prompt for each in samples), max(len(each.mask) for each in samples)
    count, width = len(samples), left + right
    routes = np.full((count, width, *spec.row_shape), -1, dtype=np.int32)
    ids, real = np.zeros((count, width), dtype=np.int64), np.zeros((count, width), dtype=np.int64)
    sampled = np.zeros((count, right), dtype=np.int64)
    for at, each in enumerate(samples):
        start = left - each.prompt
        rows = slice(start, start + len(each.tokens))
        ids[at, rows], real[at, rows], sampled[at, : len(each.mask)] = each.tokens, 1, each.mask
        routes[at, start : start + len(each.rows)] = each.rows[:, list(spec.layer_ids)]
    return {
        "input_ids": ids,
        "input_mask": real,
        "completion_mask": sampled,
        "forced_routed_experts": routes,
    }


BUILDERS: dict[str, Callable[[list[Sample], RouteSpec], Any]] = {
    "verl": verl,
    "slime": _slime("rollout_routed_experts", text=True),
    "miles": _slime("rollout_routed_experts", text=True),
    "sglang": _slime("routed_experts", text=True),
    "vllm": _slime("routed_experts", text=False),
    "prime_rl": prime_rl,
    "ms_swift": ms_swift,
    "skyrl": skyrl,
    "nemo_rl": _nemo("zeros"),
    "nemo_rl_repaired": _nemo("arange"),
    "nemo_rl_tq": nemo_rl_tq,
    "tunix": tunix,
}
