"""One ``AsyncLLM`` of the tiny Qwen3-MoE, in a process of its own as vLLM always runs it, for a whole test module.

The engine belongs to the event loop that started it, so tests hand coroutines to ``run``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from tests.capture.vllm_engine import QWEN3_MOE

__all__ = ["AsyncEngine", "running_async_engine", "sampling"]

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncEngine:
    """A running engine, its event loop, its weights' folder and the same weights in Transformers."""

    llm: Any
    loop: asyncio.AbstractEventLoop
    folder: Path
    model: Any

    def run(self, task: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the engine's loop to its end; an engine that hangs ends it after a minute."""
        return self.loop.run_until_complete(asyncio.wait_for(task, 60))


def sampling(**changes: Any) -> SamplingParams:
    """Temperature 1, a seed, log-probabilities of what was sampled, no end but the length."""
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "logprobs": 0, "ignore_eos": True}
    return SamplingParams(detokenize=False, **{**options, **changes})


@contextmanager
def running_async_engine(folder: Path, **options: Any) -> Iterator[AsyncEngine]:
    """An asynchronous engine; ``options`` are further ``AsyncEngineArgs``."""
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE))
    model.eval().save_pretrained(folder)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "skip_tokenizer_init": True,
        "enable_return_routed_experts": True,
        **options,
    }
    loop = asyncio.new_event_loop()

    async def start() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **settings))

    llm = loop.run_until_complete(start())
    try:
        yield AsyncEngine(llm=llm, loop=loop, folder=folder, model=model)
    finally:
        llm.shutdown()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
