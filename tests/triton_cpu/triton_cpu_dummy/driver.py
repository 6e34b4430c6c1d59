"""The driver that Triton asks a backend for: a CPU that is always there, and launches nothing."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class DummyDriver(DriverBase):  # type: ignore[misc]  # Triton's types are not followed
    """Active, and good for the interpreter alone."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        """Always: there is nothing else."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """As it is."""
        return ty

    def get_current_target(self) -> Any:
        """A CPU."""
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> Any:
        """torch's CPU."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """torch's CPU module."""
        return torch.cpu

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        """None to wait for."""
        return 0

    def get_benchmarker(self) -> Any:
        """Nothing is tuned."""
        return lambda call, **options: [0.0]

    def get_empty_cache_for_benchmark(self) -> Any:
        """Nothing is tuned."""
        return None

    def clear_cache(self, cache: Any) -> None:
        """Nothing is kept."""
