"""Engines of this process that the tests of several files share: each start costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.capture.vllm_engine import Engine


@pytest.fixture(scope="session")
def engines_of_process() -> Iterator[list[Any]]:
    """Engines to end, behind the last test: ending one ends what all engines of a process share."""
    started: list[Any] = []
    yield started
    for llm in started[:1]:
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory, engines_of_process: list[Any]) -> Iterator[Engine]:
    """One engine that captures, for all tests that need no other."""
    from tests.capture.vllm_engine import running_engine  # a file without engine tests does not load vLLM

    with running_engine(tmp_path_factory.mktemp("qwen3_moe")) as running:
        engines_of_process.append(running.llm)
        yield running
