"""The routing geometry of a model, read from its configuration or counted in its modules.

Owns which family a foreign configuration belongs to, how its counts become a geometry, and what a live gate looks like.
The families and their layer rules are ``families``; what a geometry is good for is ``spec``. No model library is
imported here: configurations are mappings or have ``to_dict``, models have ``named_modules``.

Axes: E experts (a router's width).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from routeplane.errors import ErrorKind, SpecError, UsageError, refused
from routeplane.record.families import FAMILIES, MOST, NEUTRAL, Config, Family, find, pick, refusal, whole

__all__ = ["Geometry", "gate_paths", "geometry_from_hf_config", "geometry_from_model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """What a model's routers look like, before it is checked and becomes a RouteSpec.

    ``num_experts``: the router's width E, or one per layer where layers differ. ``top_k``: experts chosen per token.
    ``layer_ids``: 0-based decoder layers with a router, ascending; draft (MTP) layers never. ``model``:
    ``architectures[0]``, else ``model_type``, of the text model.
    """

    num_experts: int | tuple[int, ...]
    top_k: int
    layer_ids: tuple[int, ...]
    model: str


# ---- from a configuration ----

_TASKS = (
    *("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification", "ForTokenClassification"),
    *("ForQuestionAnswering", "Model"),
)


def geometry_from_hf_config(config: object) -> Geometry:
    """Read the geometry of a Hugging Face configuration: a mapping (config.json), or an object with ``to_dict``.

    A multimodal model's ``text_config`` is followed. An architecture that the table of families does not hold is built
    without weights, where the installed Transformers knows it, and its gates are counted. Raises SpecError:
    DENSE_MODEL, UNKNOWN_ARCHITECTURE, or UNSUPPORTED_GEOMETRY with the key that is missing, contradictory or not
    understood. Raises UsageError for anything that is not a configuration.

    >>> config = {"model_type": "olmoe", "num_hidden_layers": 2, "num_experts": 64, "num_experts_per_tok": 8}
    >>> geometry_from_hf_config(config).layer_ids
    (0, 1)
    """
    document = _mapping(config)
    if document is None:
        raise refused("a configuration (a mapping, or an object with to_dict)", type(config).__name__)
    try:
        return _from_table(document)
    except SpecError as error:
        counted = _counted(config) if error.kind == ErrorKind.UNKNOWN_ARCHITECTURE else None
        if counted is None:
            raise
        return counted


def _counted(config: object) -> Geometry | None:
    """The gates of the model that Transformers builds; None where it is not installed or does not know it."""
    try:
        from routeplane.record.meta_model import build_without_weights
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        return None
    model = build_without_weights(config)
    try:
        return None if model is None else geometry_from_model(model)
    except SpecError as error:
        if error.kind != ErrorKind.DENSE_MODEL:
            raise
        return None  # a file that borrows the model_type of a dense model is not dense for that


def _from_table(document: Config) -> Geometry:
    text = _text_level(document)
    family = _family(document, text)
    if _loop(text) is not None:
        raise refusal("each layer once in a forward in this family", "loop_num_passes above 1")
    _require_agreement(document, text, family)
    if family.refused:
        raise refusal("one router per layer", f"{_named(text) or _named(document)}: {family.refused}")
    name = _name(document)
    if _declares_dense(text, family):
        raise _dense(f"{name}: {' or '.join(family.experts)} is null, 0 or 1")
    _require_neutral(text, family)
    layer_ids = family.rule.ids(text)
    if not layer_ids:
        raise _dense(f"{name}, none of whose layers has a router")
    return _assembled(text, family, layer_ids, name=name)


def _assembled(text: Config, family: Family, layer_ids: tuple[int, ...], *, name: str) -> Geometry:
    more = sum(whole(text, key) for key in family.wider_by) + family.extra_width
    widths = [count + more for count in _per_layer(text, family.experts, layer_ids, family=family, least=2)]
    chosen = _per_layer(text, family.top_k, layer_ids, family=family, least=1)
    if len(set(chosen)) > 1:
        raise refusal(f"one value of {family.top_k[0]} for all layers", f"{sorted(set(chosen))}")
    if chosen[0] > min(widths):
        raise refusal(f"{' or '.join(family.top_k)} of at most {min(widths)} experts", f"{chosen[0]}")
    return Geometry(num_experts=_folded(widths), top_k=chosen[0], layer_ids=layer_ids, model=name)


def _per_layer(
    text: Config, keys: tuple[str, ...], layer_ids: tuple[int, ...], *, family: Family, least: int
) -> list[int]:
    """The count under a key for each routing layer, whether the file gives one number or a list over all layers."""
    key, value = pick(text, keys)
    if not (family.per_layer and isinstance(value, list | tuple)):
        return [whole(text, key, least=least)] * len(layer_ids)
    num_layers = whole(text, "num_hidden_layers")
    if len(value) != num_layers:
        raise refusal(f"{key} of length num_hidden_layers={num_layers}", f"{len(value)} entries")
    return [whole({key: value[layer]}, key, least=least) for layer in layer_ids]


def _family(document: Config, text: Config) -> Family:
    # both levels are looked up: a wrapper that was never seen may do with its text model what it likes
    outer = _family_named(document)
    family = outer if text is document else _family_named(text) or outer
    if family is None:
        raise _unknown("a configuration with neither architectures nor model_type")
    return family


def _family_named(config: Config) -> Family | None:
    """The family that one level of a configuration names; None where it names none.

    ``architectures[0]`` decides where there is one, since some files borrow a ``model_type``. Where the table does not
    hold it the other key is not tried: what derives from a known model (a draft head, a pruned variant) keeps its
    ``model_type`` and not its geometry.
    """
    first = _architecture(config)
    model_type = config.get("model_type")
    if first:
        stem = next((first.removesuffix(task) for task in _TASKS if first.endswith(task)), first)
        found = [family for family in FAMILIES if stem in family.architectures or first in family.architectures]
    elif model_type:
        found = [family for family in FAMILIES if model_type in family.model_types]
    else:
        return None
    if not found:
        raise _unknown(_named(config))
    return found[0]


def _architecture(config: Config) -> str:
    architectures = config.get("architectures")
    if architectures is None or architectures == []:
        return ""
    if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
        raise refusal("architectures as a list of names", repr(architectures))
    return str(architectures[0])


def _named(config: Config) -> str:
    if _architecture(config):
        return f"architectures[0]={_architecture(config)!r}"
    return f"model_type={config['model_type']!r}" if config.get("model_type") else ""


def _name(document: Config) -> str:
    """``architectures[0]``, else ``model_type``: of the text model, so that it is one with and without its wrapper."""
    for level in (_text_level(document), document):
        if name := _architecture(level) or level.get("model_type"):
            return str(name)
    return ""


def _mapping(config: object) -> Config | None:
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    written = to_dict() if callable(to_dict) else None
    return written if isinstance(written, Mapping) else None


def _text_level(document: Config) -> Config:
    nested = document.get("text_config")
    if nested is None:
        return document
    text = _mapping(nested)
    if text is None:
        raise refusal("text_config as a mapping", type(nested).__name__)
    return text


def _require_agreement(document: Config, text: Config, family: Family) -> None:
    """Refuse a wrapper that repeats a count of its text model with another value."""
    for key in (*family.experts, *family.top_k) if text is not document else ():
        values = find(document, key), find(text, key)
        if None not in values and values[0] != values[1]:
            raise refusal(f"{key} and text_config.{key} to agree", f"{values[0]!r} and {values[1]!r}")


_PASSES = re.compile("loop_num_passes|num_loops|n_loops|num_recurrences|num_passes")
#: What to do where a configuration does not say which layers are looped.
_PROBED = "the forward numbers such layers: with routeplane.replay.transformers.record(model) as handle: handle.spec"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loop:
    """Decoder layers ``[start, stop)`` run ``passes`` times, one whole pass after the other."""

    start: int
    stop: int
    passes: int

    def unrolled(self, depth: int) -> list[int]:
        """The decoder layers in the order in which they run."""
        return [*range(self.start), *[*range(self.start, self.stop)] * self.passes, *range(self.stop, depth)]


def _loop(text: Config) -> _Loop | None:
    """The looped layers of a configuration; None where each layer runs once. Refuses a loop of unknown layers."""
    for key, value in text.items():
        if isinstance(key, str) and _PASSES.fullmatch(key) and type(value) is int and value > 1:
            start, stop = (find(text, f"loop_layer_index_{end}") for end in ("start", "end"))
            if key != "loop_num_passes" or type(start) is not int or type(stop) is not int or not 0 <= start < stop:
                raise refusal(f"each layer once in a forward ({key}=1)", f"{value}; {_PROBED}")
            return _Loop(start=start, stop=stop, passes=value)
    return None


def _require_neutral(text: Config, family: Family) -> None:
    """Refuse a key that would change which layers route, and that the family's rule does not read."""
    for key, neutral in NEUTRAL:
        value = find(text, key)
        if key not in family.rule.reads and value is not None and value != neutral:
            raise refusal(f"{key} absent or {neutral!r} in this family", f"{value!r}")


def _declares_dense(text: Config, family: Family) -> bool:
    """Whether an expert count is written down, and every one of them says null, 0 or 1: nothing to choose."""
    counts: list[object] = []
    for key in family.experts:
        parent, _, leaf = key.rpartition(".")
        scope = find(text, parent) if parent else text
        if isinstance(scope, Mapping) and leaf in scope:
            value = scope[leaf]
            counts.extend(value if isinstance(value, list | tuple) else [value])
    return bool(counts) and all(count is None or (type(count) is int and 0 <= count <= 1) for count in counts)


def _folded(widths: list[int]) -> int | tuple[int, ...]:
    return widths[0] if len(set(widths)) == 1 else tuple(widths)


def _dense(got: str) -> SpecError:
    return SpecError(f"expected a mixture-of-experts model, got {got}", kind=ErrorKind.DENSE_MODEL)


def _unknown(got: str) -> SpecError:
    return SpecError(
        f"expected an architecture that routeplane knows, got {got}. A geometry is never guessed: build the model and "
        "use RouteSpec.from_model(model), or write the RouteSpec by hand",
        kind=ErrorKind.UNKNOWN_ARCHITECTURE,
    )


# ---- from a model ----

_TOP_K_NAMES = (
    *("top_k", "topk", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_tok", "top_k_experts"),
    *("num_experts_per_token", "num_experts_per_topk"),
)
_COUNT_NAMES = (
    *("num_experts", "n_routed_experts", "num_local_experts", "n_experts", "moe_num_experts"),
    # Zaya's name for its experts and the class that skips the layer
    "num_router_classes",
)
_ZERO_NAMES = ("zero_expert_num", "num_zero_experts")
_SHARED_NAMES = ("n_shared_experts", "num_shared_experts")
_ROUTER = re.compile(r"Router$|Gate$|TopK")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?=\.|$)")
_DRAFT = re.compile(r"mtp|nextn", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gate:
    """A module that says how many of how many experts it chooses. ``width`` is None where no weight bears it out."""

    path: str
    top_k: int
    width: int | None


def geometry_from_model(model: object) -> Geometry:
    """Count the gates of a live model: a ``torch.nn.Module``, or anything with its ``named_modules``.

    A gate is a module with an integer top-k and an integer expert count that its own weight, or that of a linear layer
    inside, bears out with its first dimension; identity experts count, shared experts do not. Its layer is the number
    after ``layers.`` in its path; where the configuration says which layers are looped, layers are numbered in the
    order in which they run, and a looped layer has a number for each pass. Weights are not read, so meta tensors will
    do; a pipeline stage gives its own layers only. Raises SpecError: no gate, two in a layer, a path without a layer, a
    width that cannot be told, or top-k that differs. Raises UsageError for anything that is not a model.

    >>> geometry_from_model(object())
    Traceback (most recent call last):
    routeplane.errors.UsageError: expected a model with named_modules(), got object
    """
    modules = _named_modules(model)
    config = next((found for _, module in modules if (found := _mapping(getattr(module, "config", None)))), None)
    loop = None if config is None else _loop(_text_level(config))
    gates = _gates_by_layer(modules)
    if not gates:
        raise _gateless(model, modules)
    _require_one_place(model, gates.values())
    chosen = {gate.top_k for gate in gates.values()}
    if len(chosen) > 1:
        raise _odd("one top-k for all layers", ", ".join(f"{gate.top_k} at {gate.path}" for gate in gates.values()))
    layer_ids = tuple(sorted(gates))
    _require_decoder_layers(layer_ids, config)
    order = range(layer_ids[-1] + 1) if loop is None else loop.unrolled(max(layer_ids[-1] + 1, loop.stop))
    layer_ids = tuple(at for at, layer in enumerate(order) if layer in gates)
    widths = [width for layer in order if layer in gates and (width := gates[layer].width) is not None]
    name = _name(config) if config else ""
    return Geometry(
        num_experts=_folded(widths), top_k=chosen.pop(), layer_ids=layer_ids, model=name or type(model).__name__
    )


def _require_one_place(model: object, gates: Iterable[_Gate]) -> None:
    """Refuse a layer that stands at several places of a model: it runs several times in one forward."""
    walk = getattr(model, "named_modules", None)
    try:
        found = walk(remove_duplicate=False) if callable(walk) else ()
    except TypeError:
        return  # of another class than torch's
    places = [(id(module), str(path)) for path, module in found]
    own = {path: identity for identity, path in places}
    for gate in gates:
        others = [path for identity, path in places if identity == own[gate.path] and path != gate.path]
        if others:
            expected = "each layer once in a model"
            raise refusal(expected, f"the gate {gate.path} at {', '.join(others[:4])} too; {_PROBED}")


def gate_paths(model: object) -> dict[int, str]:
    """The module path of each gate by decoder layer, ascending; as ``geometry_from_model`` counts them.

    Empty for a dense model. Raises as ``geometry_from_model`` does.
    """
    gates = _gates_by_layer(_named_modules(model))
    return {layer: gates[layer].path for layer in sorted(gates)}


def _named_modules(model: object) -> list[tuple[str, object]]:
    walk = getattr(model, "named_modules", None)
    found = walk() if callable(walk) else None
    if not isinstance(found, Iterable):
        raise UsageError(f"expected a model with named_modules(), got {type(model).__name__}", kind=ErrorKind.ARGUMENT)
    return [(str(path), module) for path, module in found]


def _gates_by_layer(modules: list[tuple[str, object]]) -> dict[int, _Gate]:
    inside = [(path, module) for path, module in modules if path and not _DRAFT.search(path)]
    candidates = [gate for path, module in inside if (gate := _candidate(path, module)) is not None]
    proper = [gate for gate in candidates if gate.width is not None]
    # a MoE block repeats the numbers of the gate that it holds, and a whole model those of all: the innermost counts
    gates = [gate for gate in proper if not any(other.path.startswith(f"{gate.path}.") for other in proper)]
    by_layer: dict[int, _Gate] = {}
    for gate in gates:
        layer = _layer_of(gate.path)
        if layer is None:
            expected = "a gate's path to hold one layers.<index>, since a row has a slot for each decoder layer"
            raise _odd(expected, gate.path)
        if layer in by_layer:
            raise _clash(layer, by_layer[layer].path, gate.path)
        by_layer[layer] = gate
    for gate in candidates:
        if gate.width is None and (layer := _layer_of(gate.path)) is not None and layer not in by_layer:
            raise _odd(f"a weight in {gate.path} with a row for each expert", "none")
    return by_layer


def _clash(layer: int, first: str, second: str) -> SpecError:
    """Two gates under one number: of one layer, or of two decoders in one model."""
    towers = [_LAYER.split(path, maxsplit=1)[0] for path in (first, second)]
    if towers[0] == towers[1]:
        return _odd(f"one gate in layer {layer}", f"{first} and {second}")
    part = towers[0] or towers[1]
    return refusal(
        "one decoder with gates",
        f"two that each have a layer {layer} ({first} and {second}): a record has the routes of one, so give the part "
        f"that is trained alone, as in RouteSpec.from_model(model.{part})",
    )


def _candidate(path: str, module: object) -> _Gate | None:
    chosen = _integers(module, _TOP_K_NAMES)
    counts = _integers(module, _COUNT_NAMES) if chosen else set()
    if chosen and not counts:
        # Dbrx: the block knows how many to choose, and only its experts how many there are
        parts = [part for name, part in _named_modules(module)[1:] if "." not in name]
        counts = {count for part in parts for count in _integers(part, _COUNT_NAMES)}
    if not counts:
        return None
    if len(chosen) > 1:
        raise _odd(f"one top-k at {path}", f"{sorted(chosen)}")
    # Megatron numbers its layers from 1 over all pipeline stages, its paths from 0 in each
    number = getattr(module, "layer_number", None)
    if isinstance(number, int) and _layer_of(path) not in (None, number - 1):
        raise _odd(f"{path} to be layer_number {_layer_of(path)} + 1", f"{number}, as in a later pipeline stage")
    return _Gate(path=path, top_k=chosen.pop(), width=_width(module, counts))


def _integers(module: object, names: tuple[str, ...]) -> set[int]:
    values = [getattr(module, name, None) for name in names]
    if _ROUTER.search(type(module).__name__):
        # a router that keeps its numbers in its configuration alone (Gemma-4)
        config = getattr(module, "config", None)
        values += [getattr(config, name, None) for name in names] if not any(values) else []
    return {value for value in values if type(value) is int and 0 < value <= MOST}


def _width(module: object, counts: set[int]) -> int | None:
    """How many ids the gate may give, borne out by the first dimension of a weight; None where no weight does.

    A weight may have more rows than the module counts experts: for zero-computation experts, which are legal ids, or
    for shared experts scored along (Inkling), which never are. Rows that neither explains are no answer.
    """
    own = _rows(module)
    parts = [part for _, part in _named_modules(module)[1:]] if own is None else []
    rows = {own} if own is not None else {found for part in parts if (found := _rows(part)) is not None}
    # a gate may hold other matrices, and a smaller count that one of them fits by chance
    if named := counts & rows:
        return max(named)
    most = max(counts)
    if wider := {most + zero for zero in _integers(module, _ZERO_NAMES)} & rows:
        return max(wider)
    return most if {most + shared for shared in _integers(module, _SHARED_NAMES)} & rows else None


def _rows(module: object) -> int | None:
    shape = tuple(getattr(getattr(module, "weight", None), "shape", ()))
    return int(shape[0]) if len(shape) == 2 else None


def _layer_of(path: str) -> int | None:
    found = _LAYER.findall(path)
    return int(found[0]) if len(found) == 1 else None


def _require_decoder_layers(layer_ids: tuple[int, ...], config: Config | None) -> None:
    # DeepSeek's draft layers are appended to the decoder's and bear no name of their own
    depth = _text_level(config).get("num_hidden_layers") if config else None
    if isinstance(depth, int) and layer_ids[-1] >= depth:
        raise _odd(f"gates in the num_hidden_layers={depth} decoder layers", f"one in layer {layer_ids[-1]}")


def _gateless(model: object, modules: list[tuple[str, object]]) -> SpecError:
    suspect = next((path for path, _ in modules if re.search("expert|moe|router", path, re.IGNORECASE)), None)
    if suspect is None:
        return _dense(f"{type(model).__name__}, which has no gate")
    return _odd("gates with a top-k, an expert count and a weight", f"none in {type(model).__name__}, but {suspect}")


def _odd(expected: str, got: str) -> SpecError:
    return refusal(expected, f"{got}; write the RouteSpec by hand")
