"""One small Ray cluster of its own for a test module: two CPUs, a small object store, no dashboard, no usage report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import ray

__all__ = ["RUNTIME_ENV", "SETTINGS", "local_cluster"]

#: What Ray itself reads at start-up; the library reads none of it. Without the second, Ray warns at every start of a
#: default that will change, which is about accelerators that are not here.
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

#: What a run adds to every worker (``tests.trust.traced``).
RUNTIME_ENV: dict[str, Any] = {}


@contextlib.contextmanager
def local_cluster(*, object_store_bytes: int = 300 * 2**20) -> Iterator[None]:
    """A cluster that is gone afterwards. ``local``: never one that somebody else started on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env=RUNTIME_ENV or None,
            logging_level="error",
        )
        try:
            yield
        finally:
            ray.shutdown()
