"""Stage one of the demo: build the small model, generate in bfloat16, write the route stream.

Run as ``python -m routeplane.cli.demo.rollout OPTIONS_JSON``; figures go to stdout as one line of JSON, progress to
stderr.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from routeplane.capture import transformers as in_process
from routeplane.cli.demo import DemoOptions, engine_writer, open_sink
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from routeplane.record.record import RouteRecord

__all__ = ["PROMPTS", "build_model", "demo_prompts", "main"]

#: Beginnings of texts in the public domain. The model reads bytes, so it needs no tokenizer.
PROMPTS = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money",
    "It was the best of times, it was the worst of times, it was the age of wisdom",
    "In the beginning God created the heaven and the earth. And the earth was without form",
    "Four score and seven years ago our fathers brought forth on this continent a new nation",
    "All happy families are alike; each unhappy family is unhappy in its own way.",
    "Alice was beginning to get very tired of sitting by her sister on the bank",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer",
)


def demo_prompts(count: int, tokens: int) -> list[list[int]]:
    """``count`` prompts of ``tokens`` bytes each."""
    return [list((PROMPTS[index % len(PROMPTS)] * 64).encode()[:tokens]) for index in range(count)]


def build_model(options: DemoOptions) -> None:
    """Save a Qwen3-MoE of some 40 MB with seeded random bfloat16 weights; both programs load these very weights.

    ``initializer_range`` is 0.1: with the default of 0.02 the distributions are too flat for any difference to show
    (measured: 1.2x instead of 5x).
    """
    torch.manual_seed(options.seed)
    settings: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = Qwen3MoeConfig(**settings)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(options.model_dir)


def _generate(options: DemoOptions, prompts: Sequence[Sequence[int]], seconds: dict[str, float]) -> list[RouteRecord]:
    names = [f"sample-{index}" for index in range(len(prompts))]
    common: dict[str, Any] = {"max_tokens": options.max_tokens, "seed": options.seed}
    started = time.perf_counter()
    if options.engine == "vllm":
        # Imported here, since the other engine must run where vLLM is not installed.
        from routeplane.capture import vllm as engine

        llm = engine.start_engine(options.model_dir, dtype="bfloat16", seed=options.seed, max_model_len=512)
        seconds["load"] = time.perf_counter() - started
        started = time.perf_counter()
        records = engine.generate_records(llm, prompts, sample_ids=names, **common)
    else:
        model = Qwen3MoeForCausalLM.from_pretrained(options.model_dir, dtype=torch.bfloat16).train(False)
        spec = RouteSpec.from_hf_config(model.config)
        seconds["load"] = time.perf_counter() - started
        started = time.perf_counter()
        records = in_process.records(model, prompts, spec=spec, sample_ids=names, **common)
    seconds["generate"] = time.perf_counter() - started
    return records


def _write(options: DemoOptions, prompts: Sequence[Sequence[int]], seconds: dict[str, float]) -> int:
    """Generate, and write what came; the number of records."""
    records = _generate(options, prompts, seconds)
    started = time.perf_counter()
    with open_sink(options.stream, records[0].spec, transport=options.transport) as sink:
        for record in records:
            sink.write(record)
    seconds["write"] = time.perf_counter() - started
    return len(records)


#: How the runs of the ablation sample: what a policy is trained at, and what cuts it.
ABLATION_SAMPLING = in_process.Sampling(temperature=0.8, top_p=0.9, logprobs_mode="processed")


def _write_ablation(options: DemoOptions, prompts: Sequence[Sequence[int]]) -> None:
    """Build, sample and write each run of the ablation, with sampling masks."""
    for run in options.ablation_runs():
        build_model(run)
        model = Qwen3MoeForCausalLM.from_pretrained(run.model_dir, dtype=torch.bfloat16).train(False)
        spec = RouteSpec.from_hf_config(model.config)
        records = in_process.records(
            model, prompts, spec=spec, max_tokens=run.max_tokens, seed=run.seed, sampling=ABLATION_SAMPLING
        )
        with open_sink(run.stream, spec, transport=run.transport) as sink:
            for record in records:
                sink.write(record)


def _write_inside(options: DemoOptions, prompts: Sequence[Sequence[int]], seconds: dict[str, float]) -> int:
    """Let the engine's own scheduler write; the number of records. Its time to write is part of generating."""
    from routeplane.capture import vllm as engine

    started = time.perf_counter()
    llm = engine.start_engine(
        options.model_dir,
        dtype="bfloat16",
        seed=options.seed,
        max_model_len=512,
        scheduler_cls="routeplane.capture.vllm.RouteScheduler",
        additional_config={"routeplane": engine_writer(options.stream)},
    )
    seconds["load"] = time.perf_counter() - started
    started = time.perf_counter()
    tickets = engine.generate_tickets(llm, prompts, max_tokens=options.max_tokens, temperature=1.0, seed=options.seed)
    seconds["generate"] = time.perf_counter() - started
    started = time.perf_counter()
    engine.stop_engine(llm)
    seconds["write"] = time.perf_counter() - started
    return len(tickets)


def main(arguments: Sequence[str]) -> None:
    """Run the stage with the options given as JSON."""
    options = DemoOptions(**json.loads(arguments[0]))
    torch.set_num_threads(1)  # matrices this small lose by threads, and one order of sums gives one table per seed
    seconds: dict[str, float] = {}
    with tqdm(total=4, desc=f"engine ({options.engine})", disable=not options.progress, leave=False) as bar:
        started = time.perf_counter()
        build_model(options)
        seconds["build"] = time.perf_counter() - started
        bar.update()
        write = _write_inside if options.engine == "vllm-scheduler" else _write
        prompts = demo_prompts(options.sequences, options.prompt_tokens)
        count = write(options, prompts, seconds)
        bar.update(2)
        started = time.perf_counter()
        _write_ablation(options, prompts)
        seconds["ablation_generate"] = time.perf_counter() - started
        bar.update()
    figures: dict[str, Any] = {"records": count, "seconds": seconds}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
