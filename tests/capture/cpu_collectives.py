"""What vLLM's CPU communicator lacks for data-parallel experts, so that a test can run two ranks without a GPU.

``--worker-extension-cls tests.capture.cpu_collectives.WorkerExtension``: vLLM imports it in each worker before the
model is loaded. Gathers and scatters of parts of unequal length, which CUDA's communicator has, over gloo.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

__all__ = ["WorkerExtension"]


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if not isinstance(input_, torch.Tensor):
        return [_all_gatherv(self, one, dim, sizes) for one in input_]
    assert dim == 0
    lengths = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(lengths), *input_.shape[1:]))
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in lengths]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    assert dim == 0
    lengths = sizes or [len(input_) // self.world_size] * self.world_size
    whole = input_.clone()
    torch.distributed.all_reduce(whole, group=self.device_group)
    start = sum(lengths[: self.rank_in_group])
    return whole[start : start + lengths[self.rank_in_group]].contiguous()


CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv


class WorkerExtension:
    """Adds nothing to the worker: the module is what vLLM imports for it."""
