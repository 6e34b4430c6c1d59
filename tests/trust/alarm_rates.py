"""How often alarms are raised over honest records of tiny random models: ``python -m tests.trust.alarm_rates``.

Models of several Transformers families at random weights, whose routers collapse far more often than trained ones do;
prompts of random tokens over a wide and a narrow vocabulary (511 and 7 tokens), counted apart. A record counts once per
kind. Faults are planted in records of the wide vocabulary with 128 tokens or more.

``--engine vllm`` (with the engine's environment, as ``make test`` sets it) takes the rows from vLLM: short and long
prompts and generations, sampled twice at temperature 1 and once greedily. Each width has a process of its own.
"""

# ruff: noqa: T201  it prints a table
from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
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
from routeplane.errors import CaptureError, ErrorKind
from routeplane.record.alarms import find_alarms
from routeplane.record.record import RouteRecord
from routeplane.record.spec import MISSING, RouteSpec

__all__ = ["engine_records", "honest_records", "measure", "planted"]

KINDS = (ErrorKind.IDENTICAL_ROWS, ErrorKind.CONSTANT_LAYER, ErrorKind.ENTROPY_COLLAPSE, ErrorKind.UNUSED_EXPERTS)
#: What is planted. The last three look like any other record: no alarm can find them, and none does.
FAULTS = (
    "stale buffer",
    "arange runs",
    "constant layer",
    "zero layer",
    "collapsed layer",
    "half the experts",
    "another request's rows",
    "an earlier attempt's rows",
    "an older version's rows",
)
FAMILIES = ("Qwen3-MoE", "Mixtral", "OLMoE")
#: number of experts, top-k
WIDTHS = ((8, 1), (16, 1), (8, 2), (16, 2), (16, 4), (32, 4), (60, 4), (64, 8), (128, 8))
LENGTHS = (32, 64, 128, 256)
#: what an engine is asked for: prompt tokens, generated tokens
SHAPES = ((8, 24), (48, 16), (16, 112), (200, 56))
ENGINE_WIDTHS = ((8, 1), (16, 2), (32, 4), (128, 8))
WORDS = (512, 8)

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

#: the engine has no kernel for heads of 16, and OLMoE takes their size from these
_FOR_ENGINE: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Record = tuple[RouteSpec, NDArray[np.int16], NDArray[np.int32]]
#: fault -> rows of the same length that may stand in the place of a record's
Others = Mapping[str, NDArray[np.int16]]


def _model(family: str, experts: int, top_k: int, *, seed: int, **settings: Any) -> Any:
    torch.manual_seed(seed)
    more: dict[str, Any] = {**_COMMON, "num_experts_per_tok": top_k, "initializer_range": 0.1 if seed % 2 else 0.02}
    more |= settings
    made: Any
    if family == "Mixtral":
        made = MixtralForCausalLM(MixtralConfig(**more, num_local_experts=experts))
    elif family == "OLMoE":
        made = OlmoeForCausalLM(OlmoeConfig(**more, num_experts=experts))
    else:
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**more, num_experts=experts, moe_intermediate_size=32))
    return made.eval()


def honest_records(*, seeds: int, repeats: int = 4) -> Iterator[tuple[str, Record | None, Others]]:
    """The family and vocabulary; a record's spec, rows and tokens; and the rows of the record before."""
    for family in FAMILIES:
        for experts, top_k in WIDTHS:
            for seed in range(seeds):
                model = _model(family, experts, top_k, seed=seed)
                spec = RouteSpec.from_model(model)
                ids: list[tuple[str, NDArray[np.int32]]] = []
                with taping(model, spec) as tape, torch.no_grad():
                    for length in LENGTHS:
                        for words in WORDS:
                            for _ in range(repeats):
                                tokens = torch.randint(1, words, (1, length))
                                ids.append((f"{family}, {words - 1} tokens", tokens[0].numpy().astype(np.int32)))
                                model(input_ids=tokens, use_cache=False)
                before_SLK = np.empty((0, *spec.row_shape), dtype=np.int16)
                for (name, tokens_S), routes in zip(ids, tape.forwards(), strict=True):
                    rows_SLK = routes.astype(np.int16)
                    alike = len(before_SLK) == len(rows_SLK)
                    yield name, (spec, rows_SLK, tokens_S), {"another request's rows": before_SLK} if alike else {}
                    before_SLK = rows_SLK


def engine_records(*, seeds: int, repeats: int = 3) -> Iterator[tuple[str, Record | None, Others]]:
    """The same from vLLM; other rows are of another prompt, another attempt, and the weights before an update."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        wanted = [(*each, seeds, repeats) for each in product(FAMILIES, ENGINE_WIDTHS)]
        for records in processes.map(_records_of_engine, *zip(*wanted, strict=True)):
            yield from records


def _records_of_engine(
    family: str, width: tuple[int, int], seeds: int, repeats: int
) -> list[tuple[str, Record | None, dict[str, NDArray[np.int16]]]]:
    """Everything of one engine, into which the weights of one seed after another are loaded."""
    from routeplane.capture.vllm import start_engine  # which only this process has to load

    with tempfile.TemporaryDirectory() as name, torch.compiler.set_stance("force_eager"):
        folders = [Path(name) / str(seed) for seed in range(seeds)]
        models = [_model(family, *width, seed=seed, **_FOR_ENGINE) for seed in range(seeds)]
        for model, folder in zip(models, folders, strict=True):
            model.save_pretrained(folder)
        llm = start_engine(str(folders[0]), dtype="float32", max_model_len=264, max_num_batched_tokens=512)
        found: list[tuple[str, Record | None, dict[str, NDArray[np.int16]]]] = []
        for seed, (model, folder) in enumerate(zip(models, folders, strict=True)):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            older = _older(model)
            rng = np.random.default_rng(seed)
            for prompt, generated in SHAPES:
                words = [each for each in WORDS for _ in range(repeats)]
                prompts = [rng.integers(1, word, size=prompt).tolist() for word in words]
                sampled = [
                    _sampled(llm, prompts, max_tokens=generated, temperature=heat, seed=first)
                    for heat, first in ((1.0, 0), (1.0, 1_000), (0.0, 0))
                ]
                for attempt, records in enumerate(sampled):
                    for index, (word, record) in enumerate(zip(words, records, strict=True)):
                        label = f"{family}, {word - 1} tokens"
                        if record is None:
                            found.append((label, None, {}))
                            continue
                        another, earlier = records[index - 1], sampled[attempt - 1][index]
                        others = {"an older version's rows": _rows(older, record.spec, record.token_ids)}
                        others |= {} if another is None else {"another request's rows": another.routes}
                        others |= {} if earlier is None else {"an earlier attempt's rows": earlier.routes}
                        found.append((label, (record.spec, record.routes, record.token_ids), others))
    return found


def _sampled(llm: Any, prompts: list[list[int]], *, seed: int, **how: Any) -> list[RouteRecord | None]:
    """A record for each prompt; None where capture took an honest layer for one that was never written (K = 1)."""
    from routeplane.capture.vllm import generate_records

    try:
        return [*generate_records(llm, prompts, seed=seed, **how)]
    except CaptureError as error:
        if error.kind != ErrorKind.UNCAPTURED_SLOT:
            raise
        if len(prompts) == 1:
            return [None]
    return [one for at, prompt in enumerate(prompts) for one in _sampled(llm, [prompt], seed=seed + at, **how)]


def _older(model: Any) -> Any:
    """The weights before a small update."""
    older = type(model)(model.config).eval()
    with torch.no_grad():
        for new, old in zip(model.parameters(), older.parameters(), strict=True):
            old.copy_(new + 0.05 * new.std(correction=0) * torch.randn_like(new))
    return older


def _rows(model: Any, spec: RouteSpec, token_ids: NDArray[np.int32]) -> NDArray[np.int16]:
    """The rows of a forward; none for the last token, as in an engine's record."""
    with taping(model, spec) as tape, torch.no_grad():
        model(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None], use_cache=False)
    [routes] = tape.forwards()
    rows_SLK = np.asarray(routes, dtype=np.int16)
    rows_SLK[-1] = MISSING
    return rows_SLK


def planted(record: Record, kind: str, others: Others, rng: np.random.Generator) -> NDArray[np.int16]:
    """The rows with a broken capture planted; those of ``others`` by their name."""
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
    else:
        out = others[kind]
    return out


def faults_of(spec: RouteSpec, others: Others) -> tuple[str, ...]:
    """The faults that can be planted under a spec: with K = 1 an honest layer may be constant, unless it is zeros."""
    only = spec.top_k == 1
    return tuple(
        fault
        for fault in FAULTS
        if {"zero layer": only, "constant layer": not only, "collapsed layer": not only}.get(fault, True)
        and (fault in others or not fault.endswith("'s rows"))
    )


def measure(records: Iterable[tuple[str, Record | None, Others]]) -> tuple[Counter[Any], Counter[Any]]:
    """Alarms over honest records, ``[family, kind]`` with ``[family, "records"]``; and planted faults, found or not."""
    honest, found, rng = Counter[Any](), Counter[Any](), np.random.default_rng(0)
    for family, record, others in records:
        if record is None:
            for name in (family, f"K = 1, {family.split(', ')[1]}", "all"):
                honest[name, "records"] += 1
                honest[name, "refused"] += 1
            continue
        spec, rows_SLK, ids_S = record
        for name in (family, f"K = 1, {family.split(', ')[1]}" if spec.top_k == 1 else "", "all"):
            honest[name, "records"] += 1
            alarms = {problem.kind for problem in find_alarms(rows_SLK, spec, token_ids=ids_S)}
            honest[name, "any"] += bool(alarms)
            for kind in alarms:
                honest[name, kind] += 1
        if len(rows_SLK) >= 128 and family.endswith(" 511 tokens"):
            for fault in faults_of(spec, others):
                broken = planted(record, fault, others, rng)
                found[fault, "planted"] += 1
                found[fault, "found"] += bool(find_alarms(broken, spec, token_ids=ids_S))
    return honest, found


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="models of each family and width")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    options = parser.parse_args()
    source = engine_records if options.engine == "vllm" else honest_records
    honest, found = measure(source(seeds=options.seeds))
    print("| family | records | refused | any | " + " | ".join(kind.value for kind in KINDS) + " |")
    for family in sorted({name for name, _ in honest if name}):
        counts = [
            honest[family, "records"],
            honest[family, "refused"],
            honest[family, "any"],
            *(honest[family, kind] for kind in KINDS),
        ]
        print(f"| {family} | " + " | ".join(map(str, counts)) + " |")
    for fault in FAULTS:
        print(f"{fault}: {found[fault, 'found']} of {found[fault, 'planted']} found")


if __name__ == "__main__":
    main()
