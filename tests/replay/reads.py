"""A probe: which reads of device values a piece of work makes, be it forward or backward, whatever the framework.

A read is any operation that brings a value of a tensor, or a size that depends on values, to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["reads_of"]

aten = torch.ops.aten
#: what stops the host until the device has come that far
READS = {
    aten._local_scalar_dense.default,  # item(), tolist(), bool(), int()
    aten.nonzero.default,
    aten.masked_select.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
}


#: ... and what reads without an operation, where the values are on the host already
DIRECT = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}


class CountDirect(TorchFunctionMode):
    """Counts calls of ``DIRECT``."""

    def __init__(self, reads: Counter[str], /) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count, and go on."""
        if func in DIRECT:
            self.reads[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class CountReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that read; sees what runs in backward passes of the same thread too."""

    def __init__(self, reads: Counter[str], /) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = reads

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count, and go on. An index by a boolean mask is a nonzero."""
        masks = func is aten.index.Tensor and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if func in READS or masks:
            self.reads[str(func)] += 1
        return func(*args, **(kwargs or {}))


def reads_of(work: Callable[[], object]) -> Counter[str]:
    """What a piece of work reads."""
    reads: Counter[str] = Counter()
    with CountReads(reads), CountDirect(reads):
        work()
    return reads
