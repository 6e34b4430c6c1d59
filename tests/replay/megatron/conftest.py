"""One process group for all tests here, and a CPU where Megatron asks for CUDA.

Read in Megatron's own environment alone: elsewhere no test of this folder is collected.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_rank() -> Iterator[None]:
    """gloo, one rank. What answers for CUDA stands in the demo's trainer, which needs the same."""
    # not at the top: this file is read in every environment
    import torch

    from routeplane.cli.demo import megatron_trainer as demo_megatron

    with demo_megatron.cpu_stand_ins():
        demo_megatron.one_rank()
        yield
    torch.distributed.destroy_process_group()
