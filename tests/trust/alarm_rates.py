"""How often alarms are raised over honest records of tiny random models: ``python -m tests.trust.alarm_rates``.

Models of several Transformers families at random weights, whose routers collapse far more often than trained ones do;
prompts of random tokens over a wide and a narrow vocabulary (511 and 7 tokens), counted apart. A record counts once per
kind. Faults are planted in records of the wide vocabulary with 128 tokens or more.
"""

# ruff: noqa: T201  it prints a table
from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from routeplane.capture.transformers import taping
from routeplane.errors import ErrorKind
from routeplane.record.alarms import find_alarms
from routeplane.record.spec import RouteSpec

__all__ = ["honest_records", "measure", "planted"]

KINDS = (ErrorKind.IDENTICAL_ROWS, ErrorKind.CONSTANT_LAYER, ErrorKind.ENTROPY_COLLAPSE, ErrorKind.UNUSED_EXPERTS)
#: What is planted. The last looks like any other record: no alarm can find it, and none does.
FAULTS = (
    "stale buffer",
    "arange runs",
    "constant layer",
    "zero layer",
    "collapsed layer",
    "half the experts",
    "another request's rows",
)
FAMILIES = ("Qwen3-MoE", "Mixtral", "OLMoE")
#: number of experts, top-k
WIDTHS = ((8, 1), (16, 1), (8, 2), (16, 2), (16, 4), (32, 4), (60, 4), (64, 8), (128, 8))
LENGTHS = (32, 64, 128, 256)

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}

Record = tuple[RouteSpec, NDArray[np.int16], NDArray[np.int32]]


def _model(family: str, experts: int, top_k: int, *, seed: int) -> Any:
    torch.manual_seed(seed)
    more: dict[str, Any] = {**_COMMON, "num_experts_per_tok": top_k, "initializer_range": 0.1 if seed % 2 else 0.02}
    made: Any
    if family == "Mixtral":
        made = MixtralForCausalLM(MixtralConfig(**more, num_local_experts=experts))
    elif family == "OLMoE":
        made = OlmoeForCausalLM(OlmoeConfig(**more, num_experts=experts))
    else:
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**more, num_experts=experts, moe_intermediate_size=32))
    return made.eval()


def honest_records(*, seeds: int, repeats: int = 4) -> Iterator[tuple[str, Record]]:
    """The family and vocabulary, and a record's spec, rows and tokens."""
    for family in FAMILIES:
        for experts, top_k in WIDTHS:
            for seed in range(seeds):
                model = _model(family, experts, top_k, seed=seed)
                spec = RouteSpec.from_model(model)
                ids: list[tuple[str, NDArray[np.int32]]] = []
                with taping(model, spec) as tape, torch.no_grad():
                    for length in LENGTHS:
                        for words in (512, 8):
                            for _ in range(repeats):
                                tokens = torch.randint(1, words, (1, length))
                                ids.append((f"{family}, {words - 1} tokens", tokens[0].numpy().astype(np.int32)))
                                model(input_ids=tokens, use_cache=False)
                for (name, tokens_S), rows_SLK in zip(ids, tape.forwards(), strict=True):
                    yield name, (spec, rows_SLK.astype(np.int16), tokens_S)


def planted(record: Record, kind: str, other: NDArray[np.int16], rng: np.random.Generator) -> NDArray[np.int16]:
    """The rows with a broken capture planted. ``other``: rows of another record of the same model and length."""
    spec, rows_SLK, _ = record
    out = rows_SLK.copy()
    layer, width = int(rng.integers(spec.num_layers)), max(spec.experts_per_layer)
    if kind == "stale buffer":
        start = int(rng.integers(0, max(1, len(out) - 48)))
        out[start : start + 48] = out[start]
    elif kind == "arange runs":
        out[len(out) // 4 :] = np.arange(spec.top_k)
    elif kind == "constant layer":
        out[:, layer] = out[0, layer]
    elif kind == "zero layer":  # legal for K = 1 alone
        out[:, layer] = 0
    elif kind == "collapsed layer":
        odd_S = rng.random(len(out)) < 0.01
        out[:, layer] = np.where(odd_S[:, None], out[:, layer], out[0, layer])
    elif kind == "half the experts":
        scores_SLE = rng.gumbel(size=(1, spec.num_layers, width // 2)) + rng.gumbel(
            size=(len(out), spec.num_layers, width // 2)
        )
        out = np.argsort(-scores_SLE, axis=2)[:, :, : spec.top_k].astype(np.int16)
    elif kind == "another request's rows":
        out = other
    return out


def faults_of(spec: RouteSpec) -> tuple[str, ...]:
    """The faults that can be planted under a spec: with K = 1 an honest layer may be constant, unless it is zeros."""
    only = spec.top_k == 1
    return tuple(
        fault
        for fault in FAULTS
        if {"zero layer": only, "constant layer": not only, "collapsed layer": not only}.get(fault, True)
    )


def measure(*, seeds: int) -> tuple[Counter[Any], Counter[Any]]:
    """Alarms over honest records, ``[family, kind]`` with ``[family, "records"]``; and planted faults, found or not."""
    honest, found, rng = Counter[Any](), Counter[Any](), np.random.default_rng(0)
    before: tuple[RouteSpec, NDArray[np.int16]] | None = None
    for family, record in honest_records(seeds=seeds):
        spec, rows_SLK, ids_S = record
        for name in (family, f"K = 1, {family.split(', ')[1]}" if spec.top_k == 1 else "", "all"):
            honest[name, "records"] += 1
            alarms = {problem.kind for problem in find_alarms(rows_SLK, spec, token_ids=ids_S)}
            honest[name, "any"] += bool(alarms)
            for kind in alarms:
                honest[name, kind] += 1
        if len(rows_SLK) >= 128 and family.endswith(" 511 tokens"):
            other = before[1] if before is not None and before[0] == spec else None
            for fault in faults_of(spec):
                if other is not None and len(other) == len(rows_SLK):
                    broken = planted(record, fault, other, rng)
                    found[fault, "planted"] += 1
                    found[fault, "found"] += bool(find_alarms(broken, spec, token_ids=ids_S))
            before = (spec, rows_SLK)
    return honest, found


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="models of each family and width")
    honest, found = measure(seeds=parser.parse_args().seeds)
    print("| family | records | any | " + " | ".join(kind.value for kind in KINDS) + " |")
    for family in sorted({name for name, _ in honest if name}):
        counts = [honest[family, "records"], honest[family, "any"], *(honest[family, kind] for kind in KINDS)]
        print(f"| {family} | " + " | ".join(map(str, counts)) + " |")
    for fault in FAULTS:
        print(f"{fault}: {found[fault, 'found']} of {found[fault, 'planted']} found")


if __name__ == "__main__":
    main()
