"""Who may know whom: the stages of the design, and one file per third party.

Reads source text only; nothing of routeplane is imported, so that the check also covers files whose third party is not
installed. Every finding names file and line. The tables below are the contract.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["STAGES", "THIRD_PARTY", "Edge", "find_graph_problems", "module_name", "read_edges"]

# ----------------------------------------------------------------------------------------------------------------------
# The contract
# ----------------------------------------------------------------------------------------------------------------------

#: The folders of the package root, in data order; a module's stage is the folder it lies in.
STAGES = ("record", "capture", "stream", "archive", "batch", "replay", "inspect", "fleet", "testing", "cli")

#: Files of the package root: the public face and the errors. ``py.typed`` stands beside them.
ROOT_FILES = ("__init__", "__main__", "errors")

_PARTS = {"errors", "record", "capture", "stream", "archive", "batch", "replay", "inspect"}

#: Stage -> the stages that it may import. Files within a stage may meet. ``root`` is ``routeplane/__init__.py``.
KNOWS: dict[str, set[str]] = {
    "errors": set(),
    "record": {"errors"},
    "capture": {"errors", "record"},
    "stream": {"errors", "record"},
    "archive": {"errors", "record"},
    "batch": {"errors", "record"},
    "replay": {"errors", "record", "batch"},
    "inspect": {"errors", "record", "stream", "archive"},
    "fleet": _PARTS | {"root"},
    "testing": _PARTS | {"root", "fleet"},
    "cli": _PARTS | {"root", "fleet"},
    # what it loads at top is held light by the third-party rule
    "root": _PARTS,
}

#: Single modules of a stage that another stage may import besides: (importing stage, imported module).
ALSO_KNOWS = {
    ("inspect", "batch.layouts"),
    # ``probe`` runs the checks of the engine's contract, which need no test runner
    ("cli", "testing.contracts.engine_contract"),
    # capture reads the selection of a live gate, replay forces it: one probe finds both
    ("replay", "capture.gates"),
    ("replay", "capture.selection"),
    ("replay", "capture.weights"),
}

# the demo's two processes; `demo` itself starts them, and stays light for the command line
_DEMO = tuple(
    f"cli.demo.{name}"
    for name in ("rollout", "ray_fleet", "scoring", "transformers_trainer", "automodel_trainer", "megatron_trainer")
)
# the contract of replay adapters runs models
_REPLAY_SUITE = ("testing.contracts.replay_contract",)

#: Third party -> the files (or folders) that may import it. Anything that is neither here nor in the standard library
#: is refused.
THIRD_PARTY = {
    "numpy": ("",),
    "pyarrow": (
        "record.schema",
        "record.codec",
        "record.columnar",
        "record.batches",
        "stream",
        "archive",
        "inspect",
        "testing",
    ),
    "xxhash": ("record.spec", "record.checksum", "record.batches", "stream", "archive"),
    "numba": ("record.kernels", "inspect.tally_kernel"),
    "llvmlite": ("record.kernels", "inspect.tally_kernel"),  # comes with numba, which takes its values
    "torch": (
        *(f"batch.{name}" for name in ("batch", "collation", "dataset", "logprobs")),
        "replay",
        "capture.gates",
        "capture.selection",
        "capture.weights",
        "capture.transformers",
        "capture.vllm.forcing",
        "inspect.audit",
        "record.meta_model",
        *_REPLAY_SUITE,
        *_DEMO,
    ),
    "transformers": (
        "capture.transformers",
        "record.meta_model",
        "replay.transformers",
        *(f"cli.demo.{name}" for name in ("rollout", "ray_fleet", "transformers_trainer", "automodel_trainer")),
    ),
    "vllm": ("capture.vllm",),
    "pybase64": ("capture.wire",),
    "mooncake": ("stream.mooncake",),
    "ray": ("stream.ray", "inspect.ray_data", "fleet", "cli.demo.ray_fleet"),
    "obstore": ("archive.objectstore",),
    "google_crc32c": ("archive",),  # this and the next come with zarr
    "numcodecs": ("archive",),
    "vl_convert": ("inspect.charts", "inspect.page", "cli.demo.ray_fleet"),
    "polars": ("inspect.export",),
    "pandas": ("inspect.export",),
    "shtab": ("cli.main",),
    # their adapters read class names and attributes, and import neither
    "nemo_automodel": ("cli.demo.automodel_trainer",),
    "megatron": ("cli.demo.megatron_trainer",),
    "nemo_gym": ("fleet.gym_servers",),
    "omegaconf": ("fleet.gym_servers",),  # comes with nemo_gym, which takes its mappings
    "safetensors": ("cli.demo.automodel_trainer", "cli.demo.megatron_trainer"),
    "jinja2": ("inspect.page",),
    "tqdm": _DEMO,
    "tokenizers": ("cli.demo.ray_fleet",),  # come with transformers
    "uvicorn": ("fleet", "cli.demo.ray_fleet"),
    "hypothesis": ("testing",),
    "pytest": ("testing",),
}

#: Base dependencies: what they cost is paid by every user, so knowing a file that loads them costs nothing more.
BASE_PARTIES = {"numpy", "pyarrow", "xxhash"}

#: Where an import may stand inside a function, and why. An ``__init__.py`` may too: its public names load on first use.
DEFERRED = {
    "record.validate": "the kernels are used where numba is installed",
    "record.geometry": "a model that no table knows is built without weights where Transformers is installed",
    "capture.wire": "the fast codec is used where it is installed",
    "inspect": "compiled loops are used where numba is installed; pictures are drawn where they are asked for",
    "fleet": "vLLM is reached through capture.vllm, in the process that runs it",
    "cli": "a command loads only what it runs",
    "testing.plugin": "it loads in every run of pytest, and hypothesis loads it",
}


# ----------------------------------------------------------------------------------------------------------------------
# The checker
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One import. ``target``: full module name; ``deferred``: inside a function; ``typing``: for annotations only."""

    importer: str
    target: str
    path: str
    line: int
    deferred: bool
    typing: bool

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.path}:{self.line}"

    @property
    def at_load(self) -> bool:
        """Whether importing the importer runs this import."""
        return not self.deferred and not self.typing


def module_name(path: str) -> str:
    """``routeplane/stream/__init__.py`` -> ``routeplane.stream``."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_edges(sources: Mapping[str, str]) -> Iterator[Edge]:
    """Every import of every file; ``sources`` maps a path relative to the repository to its text."""
    modules = {module_name(path) for path in sources}
    for path, text in sources.items():
        importer = module_name(path)
        for node, deferred, typing in _walk(ast.parse(text, path), deferred=False, typing=False):
            for target in _targets(node, modules):
                yield Edge(
                    importer=importer, target=target, path=path, line=node.lineno, deferred=deferred, typing=typing
                )


def _walk(node: ast.AST, *, deferred: bool, typing: bool) -> Iterator[tuple[ast.stmt | ast.expr, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom | ast.Call):
            yield child, deferred, typing
        inside = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and ast.unparse(child.test).removeprefix("typing.") == "TYPE_CHECKING":
            for statement in child.body:
                yield from _walk(ast.Module(body=[statement], type_ignores=[]), deferred=inside, typing=True)
            for statement in child.orelse:
                yield from _walk(ast.Module(body=[statement], type_ignores=[]), deferred=inside, typing=typing)
        else:
            yield from _walk(child, deferred=inside, typing=typing)


def _targets(node: ast.AST, modules: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        source = "." * node.level + (node.module or "")
        # `from package import name` reaches the module `package.name` where there is one
        full = [f"{source}.{alias.name}" for alias in node.names]
        return [name if name in modules else source for name in full]
    # import_module("literal") is an import too; a name made at run time (a user's factory) is none of ours
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "importlib.import_module",
        "import_module",
        "__import__",
    ):
        return [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


def stage(module: str) -> str | None:
    """The stage of a routeplane module; None where the contract does not place it."""
    _, _, below = module.partition(".")
    first = below.split(".")[0]
    if not below:
        return "root"
    if below == "__main__":
        return "cli"  # ``python -m routeplane`` is the command line
    return first if first in STAGES or below == "errors" else None


def may_import(module: str, party: str) -> bool:
    """Whether the contract lets this file import this third party."""
    below = module.partition(".")[2]
    return any(place in ("", below) or below.startswith(f"{place}.") for place in THIRD_PARTY.get(party, ()))


def find_graph_problems(sources: Mapping[str, str]) -> list[str]:
    """Every edge that the contract does not allow, as ``file:line: what is wrong``."""
    edges = list(read_edges(sources))
    found = [
        f"{path}:1: {module_name(path)} is in no stage; move it into one of the folders of STAGES"
        for path in sources
        if stage(module_name(path)) is None
    ]
    for edge in edges:
        found += [f"{edge.where}: {problem}" for problem in _edge_problems(edge)]
    found += _loaded_party_problems(edges, sources)
    # an import for annotations alone closes a cycle too; one inside a function is listed in DEFERRED and does not
    found += _cycles([edge for edge in edges if not edge.deferred and _internal(edge.target)])
    return sorted(set(found))


def _internal(module: str) -> bool:
    return module.split(".")[0] == "routeplane"


def _edge_problems(edge: Edge) -> Iterator[str]:
    if edge.target.startswith("."):
        yield f"relative import of {edge.target}"
        return
    party = edge.target.split(".")[0]
    if party in sys.stdlib_module_names:
        return
    below = edge.importer.partition(".")[2]
    if edge.deferred and not edge.path.endswith("__init__.py") and not {below, below.split(".")[0]} & DEFERRED.keys():
        yield f"{edge.importer} imports {edge.target} inside a function"
    if not _internal(edge.target):
        if not may_import(edge.importer, party):
            yield f"{edge.importer} may not import {party}; {THIRD_PARTY.get(party) or 'no module'} may"
        return
    ours, theirs = stage(edge.importer), stage(edge.target)
    if (ours, edge.target.partition(".")[2]) in ALSO_KNOWS:
        return
    if ours is not None and ours != theirs and theirs not in KNOWS[ours]:
        yield f"{edge.importer} ({ours}) may not know {edge.target} ({theirs})"


def _loaded_party_problems(edges: list[Edge], sources: Mapping[str, str]) -> Iterator[str]:
    """A file that plainly imports an extra is imported only by files that may import that extra themselves."""
    direct: dict[str, list[Edge]] = {module_name(path): [] for path in sources}
    for edge in edges:
        if edge.at_load:
            direct[edge.importer].append(edge)
    loads = _closure(direct)
    for edge in edges:
        if edge.at_load and _internal(edge.target):
            for party in sorted(loads.get(edge.target, set()) - BASE_PARTIES):
                if not may_import(edge.importer, party):
                    yield f"{edge.where}: {edge.importer} loads {party} by importing {edge.target}"


def _closure(direct: Mapping[str, list[Edge]]) -> dict[str, set[str]]:
    """Module -> the third parties that importing it loads. A module loads its parent packages too."""
    loads = {
        module: {
            party
            for edge in edges
            if not _internal(edge.target) and (party := edge.target.split(".")[0]) not in sys.stdlib_module_names
        }
        for module, edges in direct.items()
    }
    reach = {
        module: {edge.target for edge in edges if _internal(edge.target)} | {module.rpartition(".")[0]}
        for module, edges in direct.items()
    }
    changed = True
    while changed:
        before = sum(len(parties) for parties in loads.values())
        for module, targets in reach.items():
            loads[module] = loads[module].union(*(loads.get(target, set()) for target in targets))
        changed = before != sum(len(parties) for parties in loads.values())
    return loads


def _cycles(edges: list[Edge]) -> list[str]:
    """The edges on cycles: those left when every module that imports nothing is taken away, again and again."""
    left = [edge for edge in edges if edge.importer != edge.target]
    while True:
        importers, targets = {edge.importer for edge in left}, {edge.target for edge in left}
        kept = [edge for edge in left if edge.target in importers and edge.importer in targets]
        if len(kept) == len(left):
            break
        left = kept
    return [f"{edge.where}: import cycle: {edge.importer} -> {edge.target}" for edge in left]
