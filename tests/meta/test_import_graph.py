"""The package keeps the import rule, and the checker of the rule can fail."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.meta.import_graph import THIRD_PARTY, find_graph_problems

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]

# ----------------------------------------------------------------------------------------------------------------------
# The package
# ----------------------------------------------------------------------------------------------------------------------


def package_sources() -> dict[str, str]:
    """The text of every file of the package."""
    files = sorted((ROOT / "routeplane").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def test_the_package_keeps_the_import_rule() -> None:
    """No file of the package knows a later stage, another file's third party, or itself by a detour."""
    sources = package_sources()

    assert {"routeplane/__init__.py", "routeplane/errors.py", "routeplane/record/spec.py"} <= set(sources)
    assert [] == find_graph_problems(sources)


# ----------------------------------------------------------------------------------------------------------------------
# The checker can fail
# ----------------------------------------------------------------------------------------------------------------------


def _changed(path: str, text: str) -> Callable[[dict[str, str]], dict[str, str]]:
    return lambda sources: {**sources, path: text}


LEGAL = {
    "routeplane/__init__.py": "def __getattr__(name):\n    import routeplane.stream.ray\n",
    "routeplane/errors.py": "from enum import StrEnum\n",
    "routeplane/record/spec.py": "import numpy as np, xxhash\nfrom routeplane.errors import A\n",
    "routeplane/record/schema.py": "import pyarrow as pa\nfrom routeplane.record import spec\n",
    "routeplane/record/kernels/vectors.py": "import numba\n",
    "routeplane/record/kernels/__init__.py": "from routeplane.record.kernels import vectors\n",
    "routeplane/record/validate.py": "def kernel():\n    from routeplane.record import kernels\n",
    "routeplane/capture/__init__.py": "",
    "routeplane/capture/vllm.py": "import vllm\nfrom routeplane.record.spec import B\n",
    "routeplane/stream/__init__.py": "def open_stream():\n    from routeplane.stream import ray\n",
    "routeplane/stream/ray.py": "import ray\nfrom routeplane.record.schema import C\n",
    "routeplane/batch/layouts.py": "import routeplane.record.spec\n",
    "routeplane/batch/collation.py": "import torch.nn\nfrom routeplane.batch.layouts import D\n",
    "routeplane/replay/__init__.py": "",
    "routeplane/replay/gate.py": "from routeplane.batch.collation import E\n",
    "routeplane/replay/transformers.py": "import transformers\nfrom routeplane.replay.gate import F\n",
    "routeplane/inspect/__init__.py": "from routeplane.batch.layouts import D\n",
    "routeplane/cli/demo/__init__.py": "from routeplane import __version__\n",
    "routeplane/cli/demo/transformers_trainer.py": "import torch\nfrom routeplane.replay import transformers\n",
    "routeplane/cli/main.py": "def main():\n    from routeplane.cli import demo\n    import routeplane.capture.vllm\n",
}

ILLEGAL = {
    "record_knows_a_stage": (
        _changed("routeplane/record/spec.py", "\nfrom routeplane.batch.collation import E\n"),
        "routeplane/record/spec.py:2: routeplane.record.spec (record) may not know routeplane.batch.collation (batch)",
    ),
    "even_for_annotations": (
        _changed("routeplane/record/spec.py", "if TYPE_CHECKING:\n    from routeplane.batch.collation import E\n"),
        "routeplane/record/spec.py:2: routeplane.record.spec (record) may not know routeplane.batch.collation (batch)",
    ),
    "stream_knows_capture": (
        _changed("routeplane/stream/ipc.py", "from routeplane import capture\n"),
        "routeplane/stream/ipc.py:1: routeplane.stream.ipc (stream) may not know routeplane.capture (capture)",
    ),
    "inspect_knows_batch": (
        _changed("routeplane/inspect/__init__.py", "import routeplane.batch.collation\n"),
        "routeplane/inspect/__init__.py:1: "
        "routeplane.inspect (inspect) may not know routeplane.batch.collation (batch)",
    ),
    "a_stage_knows_the_root": (
        _changed("routeplane/batch/layouts.py", "from routeplane import __version__\n"),
        "routeplane/batch/layouts.py:1: routeplane.batch.layouts (batch) may not know routeplane (root)",
    ),
    "cli_knows_testing": (
        _changed("routeplane/cli/main.py", "def main():\n    import routeplane.testing\n"),
        "routeplane/cli/main.py:2: routeplane.cli.main (cli) may not know routeplane.testing (testing)",
    ),
    "cycle_through_an_annotation": (
        _changed("routeplane/errors.py", "if TYPE_CHECKING:\n    from routeplane.record.spec import B\n"),
        "routeplane/errors.py:2: import cycle: routeplane.errors -> routeplane.record.spec",
    ),
    "cycle_within_a_stage": (
        _changed("routeplane/replay/gate.py", "from routeplane.replay import transformers\n"),
        "routeplane/replay/gate.py:1: import cycle: routeplane.replay.gate -> routeplane.replay.transformers",
    ),
    "another_file_s_third_party": (
        _changed("routeplane/capture/wire.py", "\n\nimport vllm.outputs\n"),
        "routeplane/capture/wire.py:3: routeplane.capture.wire may not import vllm; ('capture.vllm',) may",
    ),
    "unknown_third_party": (
        _changed("routeplane/batch/collation.py", "from scipy import DataFrame\n"),
        "routeplane/batch/collation.py:1: routeplane.batch.collation may not import scipy; no module may",
    ),
    "third_party_inside_a_function": (
        _changed("routeplane/record/validate.py", "def check():\n    import torch\n"),
        f"routeplane/record/validate.py:2: routeplane.record.validate may not import torch; {THIRD_PARTY['torch']} may",
    ),
    "third_party_by_name": (
        _changed("routeplane/record/validate.py", "import importlib\ntorch = importlib.import_module('torch')\n"),
        f"routeplane/record/validate.py:2: routeplane.record.validate may not import torch; {THIRD_PARTY['torch']} may",
    ),
    "third_party_by_a_detour": (
        _changed("routeplane/cli/main.py", "import routeplane.capture.vllm\n"),
        "routeplane/cli/main.py:1: routeplane.cli.main loads vllm by importing routeplane.capture.vllm",
    ),
    "an_init_loads_an_extra": (
        _changed("routeplane/__init__.py", "from routeplane.replay import gate\n"),
        "routeplane/__init__.py:1: routeplane loads torch by importing routeplane.replay.gate",
    ),
    "a_package_loads_an_extra": (
        _changed("routeplane/stream/__init__.py", "from routeplane.stream import ray\n"),
        "routeplane/stream/__init__.py:1: routeplane.stream loads ray by importing routeplane.stream.ray",
    ),
    "deferred_import": (
        _changed("routeplane/batch/layouts.py", "def plan():\n    from routeplane.record import spec\n"),
        "routeplane/batch/layouts.py:2: routeplane.batch.layouts imports routeplane.record.spec inside a function",
    ),
    "relative_import": (
        _changed("routeplane/stream/ipc.py", "from .ray import G\n"),
        "routeplane/stream/ipc.py:1: relative import of .ray",
    ),
    "unplaced_module": (
        _changed("routeplane/surprise.py", ""),
        "routeplane/surprise.py:1: routeplane.surprise is in no stage; move it into one of the folders of STAGES",
    ),
}


def test_a_legal_graph_has_no_problem() -> None:
    """The rule allows what the design allows: downward edges, late loads where listed, one file per third party."""
    assert [] == find_graph_problems(LEGAL)


@pytest.mark.parametrize(("change", "problem"), ILLEGAL.values(), ids=ILLEGAL)
def test_an_illegal_edge_is_named(change: Callable[[dict[str, str]], dict[str, str]], problem: str) -> None:
    """Each way to break the rule is reported with file, line and both ends."""
    assert problem in find_graph_problems(change(LEGAL))
