"""Which replay feature was seen to work for which family: results of runs, kept as JSON, and the page made of them.

A run with ``--replay-results FOLDER`` (see ``conftest.py`` beside) writes one file for each adapter that it tested,
named by adapter and version, since adapters run in environments of their own. ``python -m tests.replay.feature_table``
makes ``docs/reference/replay.md`` of all files; ``make replay-table`` does both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

__all__ = ["DATA", "PAGE", "FeatureRun", "Run", "load", "render"]

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "replay"
PAGE = ROOT / "docs" / "reference" / "replay.md"

#: adapter -> the distribution whose version names a run
DISTRIBUTIONS = {
    "transformers": "transformers",
    "families": "transformers",
    "automodel": "nemo-automodel",
    "megatron": "megatron-core",
}
TITLES = {
    "transformers": "Transformers",
    "families": "Every family of Transformers",
    "automodel": "NeMo Automodel",
    "megatron": "Megatron-Core",
}

#: what stands above a table
NOTES = {
    "families": """Of 68 families that stand in `tests/replay/families.py`, tiny configurations of those that follow.
The reference is forced by hand: `torch.topk` and `torch.max` themselves are replaced for its forward.
Not here: `doge`, which is refused with what the probe observed, "experts [1, 2, 3, ...] at work where [7, 9] are
forced": it combines two selections over halves of a key, and what it selects last is a place in that table.""",
}

#: feature -> what its tests show; the order is the page's. Contract tests and others name theirs with ``feature``.
FEATURES = {
    "attach": "gates are found by what they do; weights, buffers, flags, hooks and random state stay as they were",
    "self-replay": "a model's own routes, forced, change no bit of its output",
    "forced rows": "recorded ids are used, and weights are the family's own, of live scores",
    "missing rows": "MISSING rows are what the gate chooses; a batch of them alone is the live model",
    "gradients": "they reach every gate and match finite differences",
    "recompute": "activation checkpointing repeats the choices of its forward",
    "two in flight": "two microbatches, their backward passes in any order, under recomputation",
    "packing": "packed sequences give what padded ones give; refused: the model mixes them, and `replaying` says so",
    "observe": 'changes no bit and counts what forcing would change (`mode="observe"`)',
    "consumption": "forced, live and flipped rows are counted; a gate that did not fire, or fired twice, is named",
    "refusals": "rows or specs of another count, type, width or geometry raise, and name the gate",
    "reference model": "copies of the model and other models stay live",
    "detach": "leaves no hook, no attribute and no bit behind",
    "recording": "the trainer's own forward, recorded and replayed (R2)",
    "auxiliary loss": 'counts the forced ids (`aux="forced"`) or the gate\'s own (`"live"`)',
    "bfloat16": "self-replay in bfloat16",
    "experts kernels": "eager, grouped_mm and batched_mm experts",
    "compile": "whole graphs under torch.compile, one for all batches of a size",
    "FSDP2": "gradients on two ranks are those of one process",
    "pipeline": "an interleaved schedule with virtual stages, on two ranks: the gradients of one process, bit for bit",
    "sequence parallel": "on two ranks, each router uses the ids of its own rows",
    "tensor parallel": "on two ranks, each router uses the ids of every token",
    "expert parallel": "experts on two ranks, a batch for each: output and gradients of one process",
    "context parallel": "a rank's rows are those that the framework's own slices take",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One environment's results: ``families`` maps family and feature to ``passed``, ``refused`` or ``failed``."""

    adapter: str
    version: str
    families: Mapping[str, Mapping[str, str]]

    @property
    def path(self) -> str:
        """The name of its file."""
        return f"{self.adapter}-{self.version}.json"


class FeatureRun:
    """A pytest plugin: collects what tests with a feature came to, and writes it."""

    def __init__(self, folder: Path, /) -> None:
        self.folder = folder
        self.found: dict[str, dict[str, dict[str, set[str]]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Every phase of every test, of all workers."""
        properties: dict[str, Any] = dict(report.user_properties)
        if "replay_feature" not in properties or (report.passed and report.when != "call"):
            return
        adapter, family, name = properties["replay_feature"]
        outcome = str(properties.get("replay_outcome", "passed")) if report.passed else report.outcome
        self.found.setdefault(adapter, {}).setdefault(family, {}).setdefault(name, set()).add(outcome)
        self._save()

    def _save(self) -> None:
        """One file for each adapter, complete after every test: a sweep that is cut keeps what it has seen.

        What an earlier part left there is kept, and a failure stays one.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for adapter, families in self.found.items():
            run = Run(adapter=adapter, version=version(DISTRIBUTIONS[adapter]), families={})
            for family, cells in _earlier(self.folder / run.path).items():
                for name, outcome in cells.items():
                    families.setdefault(family, {}).setdefault(name, set()).add(outcome)
            worst = {
                family: {name: _worst(outcomes) for name, outcomes in sorted(cells.items())}
                for family, cells in sorted(families.items())
            }
            text = json.dumps({"adapter": adapter, "version": run.version, "families": worst}, indent=1)
            (self.folder / run.path).write_text(text + "\n", encoding="utf-8")


def _earlier(path: Path) -> Mapping[str, Mapping[str, str]]:
    if not path.exists():
        return {}
    families: Mapping[str, Mapping[str, str]] = json.loads(path.read_text(encoding="utf-8"))["families"]
    return families


def _worst(outcomes: set[str]) -> str:
    return next((each for each in ("failed", "skipped", "refused") if each in outcomes), "passed")


def feature_of(item: pytest.Item) -> tuple[str, str, str] | None:
    """Adapter, family and feature that a test shows: of its class, or of its parameter ``family``."""
    name = getattr(getattr(item, "function", None), "replay_feature", None)
    if name is None:
        return None
    owner = getattr(item, "cls", None)
    if owner is not None:
        return owner.adapter, owner.family, name
    parameters: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    family = parameters["family"]
    return getattr(family, "adapter", "transformers"), family.name, name


def load(folder: Path = DATA) -> list[Run]:
    """Every kept run, by adapter as the page has them and version."""
    runs = [Run(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    return sorted(runs, key=_place)


def _place(run: Run) -> tuple[int, list[int]]:
    return list(TITLES).index(run.adapter), [int(part) for part in run.version.split(".")]


# ----------------------------------------------------------------------------------------------------------------------
# The page
# ----------------------------------------------------------------------------------------------------------------------

_HEAD = """# What replays

Made by `make replay-table` of the tests that ran; do not edit.
Every family here is a tiny model with random weights, on a CPU.
Adapters inherit one suite, [`ReplayContract`](../../routeplane/testing/contracts/replay_contract.py), which is public:
a router of your own can be held to it too.

**yes**: all tests of the feature passed, in every version named.
**refused**: the family has no such thing, and asking for it is an error that says so.
An empty cell: no test.
"""


def render(runs: Iterable[Run]) -> str:
    """The page."""
    by_adapter: dict[str, list[Run]] = {}
    for run in runs:
        by_adapter.setdefault(run.adapter, []).append(run)
    parts = [_HEAD, "## Features", _table(["feature", "its tests show"], [list(each) for each in FEATURES.items()])]
    for adapter, found in by_adapter.items():
        versions = " and ".join(run.version for run in found)
        features = [name for name in FEATURES if any(name in each for run in found for each in run.families.values())]
        families = sorted({family for run in found for family in run.families})
        rows = [[f"`{family}`", *(_cell(found, family, name) for name in features)] for family in families]
        parts += [f"## {TITLES[adapter]} {versions}", NOTES.get(adapter, ""), _table(["family", *features], rows)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _cell(runs: list[Run], family: str, feature: str) -> str:
    outcomes = {run.version: run.families.get(family, {}).get(feature, "") for run in runs}
    words = {"passed": "yes"}
    if len(set(outcomes.values())) == 1:
        [outcome] = set(outcomes.values())
        return words.get(outcome, outcome)
    return ", ".join(f"{words.get(outcome, outcome)} ({name})" for name, outcome in outcomes.items() if outcome)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(render(load()), encoding="utf-8")
