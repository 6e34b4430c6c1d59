"""What wrong routes do: a tiny Qwen3-MoE learns to sort digits, with its engine's routes live, replayed or shifted.

Run from the repository's root::

    python examples/grpo_replay/run.py --out examples/grpo_replay/results.json

Every seed starts from a model of its own that supervised steps taught to sort about a third of the lists. A bfloat16
copy samples, the float32 model trains by GRPO: advantages within a group, the ratio to the engine's log-probabilities,
clipped. Four runs per seed differ in one thing, what the trainer's gates follow:

* ``live``: their own choice;
* ``replay``: the engine's rows;
* ``shifted``: the engine's rows, each moved to the next token: right shape, every id legal;
* ``guarded``: as shifted, under ``max_flipped_share``.

Finished runs are kept in ``--out`` and not repeated. Axes: B sequences, S positions, G generated tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from routeplane import RouteSpec
from routeplane.batch import collate, token_logprobs
from routeplane.capture import transformers as capture
from routeplane.errors import ReplayError
from routeplane.replay import transformers as gates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routeplane import RouteRecord
    from routeplane.replay import ReplayHandle

MODES = ("live", "replay", "shifted", "guarded")
#: Ids 0 to 9 are the digits.
SEPARATOR, BEGIN, PAD = 10, 11, 13


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of the experiment; the defaults are those of the page."""

    digits: int = 8
    prompts: int = 24
    group: int = 8
    steps: int = 15
    minibatches: int = 2
    learning_rate: float = 3e-4
    clip: float = 0.2
    layers: int = 4
    experts: int = 32
    hidden: int = 64
    #: share of sampled lists that the supervised model sorts before GRPO starts
    start_share: float = 0.3
    supervised_steps: int = 6000
    max_flipped_share: float = 0.2


def make_model(settings: Settings, seed: int) -> Any:
    """A Qwen3-MoE with random weights, of float32."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=settings.hidden,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=settings.hidden // 4,
        num_experts=settings.experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.08,
        router_aux_loss_coef=0.01,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    return Qwen3MoeForCausalLM(config)


def prompts_of(digits_BG: NDArray[np.int64]) -> NDArray[np.int64]:
    """Token ids of the prompts: begin, the digits, the separator."""
    ones = np.ones((len(digits_BG), 1), dtype=np.int64)
    return np.concatenate([BEGIN * ones, digits_BG, SEPARATOR * ones], axis=1)


def supervise(settings: Settings, seed: int) -> dict[str, torch.Tensor]:
    """Teach a model to sort until ``start_share`` of its samples are right; its weights."""
    model = make_model(settings, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.0)
    rng = np.random.default_rng(seed)
    for step in range(1, settings.supervised_steps + 1):
        digits = rng.integers(0, 10, (64, settings.digits))
        tokens = torch.tensor(np.concatenate([prompts_of(digits), np.sort(digits, axis=1)], axis=1))
        output = model.train()(input_ids=tokens, use_cache=False, output_router_logits=True)
        logits = output.logits[:, settings.digits + 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, settings.digits + 2 :].flatten())
        _update(model, optimizer, loss + 0.01 * output.aux_loss)
        if step % 20 == 0 and sorted_share(model, settings) >= settings.start_share:
            break
    return dict(model.state_dict())


def sorted_share(model: Any, settings: Settings, *, lists: int = 256) -> float:
    """Share of held-out lists that one sample each sorts."""
    digits = np.random.default_rng(12345).integers(0, 10, (lists, settings.digits))
    tokens = torch.tensor(prompts_of(digits))
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(12345)
        output = model.eval().generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=settings.digits,
            do_sample=True,
            top_k=0,
            pad_token_id=PAD,
        )
    return float((output[:, tokens.shape[1] :].numpy() == np.sort(digits, axis=1)).all(axis=1).mean())


def _update(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def shifted(record: RouteRecord) -> RouteRecord:
    """The record with each row one token late, under a valid checksum: only the meaning is wrong."""
    routes = np.array(record.routes)
    routes[:-1] = np.roll(routes[:-1], 1, axis=0)
    return replace(record, routes=routes, checksum=None)


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What one step trains on: records, the reward of each, the advantage of each."""

    records: Sequence[RouteRecord]
    rewards_B: NDArray[np.float32]
    advantages_B: torch.Tensor


def roll_out(engine: Any, spec: RouteSpec, settings: Settings, *, digits: NDArray[np.int64], seed: int) -> Rollouts:
    """Sample a group of answers per prompt; the reward is 1 for a sorted list, else 0."""
    repeated = np.repeat(digits, settings.group, axis=0)
    prompts = prompts_of(repeated)
    sampling = capture.Sampling(pad_token_id=PAD)
    records = capture.records(
        engine, prompts.tolist(), spec=spec, max_tokens=settings.digits, seed=seed, sampling=sampling
    )
    answers = np.stack([record.token_ids[prompts.shape[1] :] for record in records])
    rewards = (answers == np.sort(repeated, axis=1)).all(axis=1).astype(np.float32)
    groups = rewards.reshape(len(digits), settings.group)
    advantages = (groups - groups.mean(axis=1, keepdims=True)) / (groups.std(axis=1, keepdims=True) + 1e-4)
    return Rollouts(records=records, rewards_B=rewards, advantages_B=torch.tensor(advantages.reshape(-1)))


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    handle: ReplayHandle | None,
    rollouts: Rollouts,
    *,
    spec: RouteSpec,
    settings: Settings,
    order: NDArray[np.int64],
) -> dict[str, float]:
    """Update on each minibatch; the divergence from the engine is that of the first, before any update."""
    first, clipped = dict[str, float](), []
    for part in np.array_split(order, settings.minibatches):
        micro = collate([rollouts.records[index] for index in part], spec, layout="padded")
        with contextlib.nullcontext() if handle is None else handle.replaying(micro):
            trainer = token_logprobs(model.train()(**micro.model_inputs()).logits, micro)[micro.generation_mask]
        engine = micro.logprobs[micro.generation_mask]
        ratio = torch.exp(trainer - engine)
        advantages = rollouts.advantages_B[part][:, None].expand_as(micro.generation_mask)[micro.generation_mask]
        limited = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        clipped.append(float((limited != ratio).float().mean()))
        first = first or divergence(trainer.detach().double(), engine.double())
        _update(model, optimizer, -torch.minimum(ratio * advantages, limited * advantages).mean())
    return {**first, "clip_fraction": float(np.mean(clipped))}


def divergence(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, float]:
    """KL (k3), mean difference, and the effective sample size over the number of tokens."""
    log_ratio = trainer - engine
    weights = torch.exp(log_ratio)
    return {
        "kl": float((weights - 1 - log_ratio).mean()),
        "mean_abs_diff": float(log_ratio.abs().mean()),
        "effective_share": float(weights.sum() ** 2 / (weights**2).sum() / len(weights)),
    }


def run(settings: Settings, *, seed: int, mode: str, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One run: figures of every step, and why it stopped."""
    model = make_model(settings, seed)
    model.load_state_dict(weights)
    engine = copy.deepcopy(model).bfloat16().eval()
    spec = RouteSpec.from_hf_config(model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    limits = gates.ReplayLimits(max_flipped_share=settings.max_flipped_share if mode == "guarded" else None)
    handle = None if mode == "live" else gates.attach(model, spec, limits=limits)
    rng, steps, stopped = np.random.default_rng(1000 + seed), list[dict[str, float]](), None
    for step in range(settings.steps):
        engine.load_state_dict(model.state_dict())
        digits = rng.integers(0, 10, (settings.prompts, settings.digits))
        rollouts = roll_out(engine, spec, settings, digits=digits, seed=seed * 100_003 + step)
        order = rng.permutation(len(rollouts.records))
        if mode in ("shifted", "guarded"):
            rollouts = replace(rollouts, records=[shifted(record) for record in rollouts.records])
        before = None if handle is None else handle.report()
        try:
            figures = train_step(model, optimizer, handle, rollouts, spec=spec, settings=settings, order=order)
        except ReplayError as error:
            stopped = {"step": step + 1, "kind": str(error.kind), "message": str(error)}
            break
        if handle is not None:
            figures["flipped_share"] = handle.report(since=before).scalars()["routeplane/replay_flipped_share"]
        steps.append({"reward": float(rollouts.rewards_B.mean()), **figures})
    if handle is not None:
        handle.detach()
    return {"seed": seed, "mode": mode, "stopped": stopped, "steps": steps}


def summary(runs: Sequence[dict[str, Any]]) -> str:
    """One line per mode: means over seeds and steps; the rewards of the first step and of the last ten."""
    head = ("mode", "KL (k3)", "clipped", "effective", "flipped", "first", "last")
    lines = [("{:9}" + "{:>11}" * 6).format(*head)]
    for mode in MODES:
        mine = [one for one in runs if one["mode"] == mode]
        steps = [step for one in mine for step in one["steps"]]
        if steps:
            names = ("kl", "clip_fraction", "effective_share", "flipped_share")
            cells = [f"{np.mean([step[name] for step in steps]):.5f}" if name in steps[0] else "" for name in names]
            cells.append(f"{np.mean([one['steps'][0]['reward'] for one in mine]):.3f}")
            cells.append(f"{np.mean([step['reward'] for one in mine for step in one['steps'][-10:]]):.3f}")
            lines.append(f"{mode:9}" + "".join(f"{cell:>11}" for cell in cells))
        for one in mine:
            if one["stopped"]:
                lines.append(
                    f"{mode:9}  seed {one['seed']} stopped at step {one['stopped']['step']}: {one['stopped']['kind']}"
                )
    return "\n".join(lines)


def main() -> None:
    """Run what ``--out`` does not have yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the runs; those that it has are kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(steps=arguments.steps)
    runs = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []
    for seed in range(arguments.seeds):
        todo = [mode for mode in MODES if (seed, mode) not in {(one["seed"], one["mode"]) for one in runs}]
        weights = supervise(settings, seed) if todo else {}
        for mode in todo:
            began = time.process_time()
            runs.append(run(settings, seed=seed, mode=mode, weights=weights))
            arguments.out.write_text(json.dumps({"settings": asdict(settings), "runs": runs}, indent=1) + "\n")
            print(f"seed {seed} {mode}: {time.process_time() - began:.0f} CPU seconds", flush=True)
    print(summary(runs))


if __name__ == "__main__":
    main()
