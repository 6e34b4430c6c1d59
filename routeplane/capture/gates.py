"""Find the gates of a live torch model by what they do.

``find_gates`` runs the model once on a few tokens, sees in which module each choice is made (``selection``), and then
runs one MoE block of each kind again, with and without forced ids: the choice must obey, the weights must belong to the
forced ids, no expert beside them may compute, no row may depend on the others. What does not behave so is refused with
what was observed. No class is known by name.

A gate may fire several times in a forward, as of looped layers. Each firing is then a gate of its own, and layers are
numbered as in the unrolled model: in the order in which they run.

The model is left as it was: buffers, gradients, flags and random state are restored, hooks are taken off. Knows torch.
Axes: N token rows of one gate call, E experts, K top-k slots, H features of a block's output.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from routeplane.capture.selection import Gate, SelectionMode, largest, ranked
from routeplane.errors import ErrorKind, ReplayError

__all__ = ["find_gates", "left_as_it_was", "probe_tokens"]

#: tokens of the probing forward
PROBE_ROWS = 7
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?=\.|$)")
_MTP_NAME = re.compile(r"(?:^|\.)(?:mtp|nextn)[^.]*(?=\.|$)", re.IGNORECASE)
_MTP_CLASS = re.compile(r"Mtp|MTP|NextN")
#: what wrappers put into paths
_WRAPPER = re.compile(r"(?:_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")
_INACTIVE = re.compile(r"\.(?:original_module|modules_to_save)(?:\.|$)")  # what PEFT keeps beside the module in use
_ROUTER_CLASS = re.compile(r"(?:Router|Gate|Gating)$")


# ---- look -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Choice:
    """One selection that was seen: where, over how many experts, how many were chosen.

    ``calls``: the numbers of the running calls, of the module that selects and of those ``above`` it.
    """

    path: str
    above: tuple[str, ...]
    calls: tuple[int, ...]
    num_experts: int
    top_k: int
    axes: int
    mixed: bool = False


class _Watch(TorchFunctionMode):
    """Notes every selection-like call, with the innermost module that runs."""

    def __init__(self) -> None:
        super().__init__()
        #: paths of the modules that run, each with the number of its call
        self.stack: list[tuple[str, int]] = []
        self.rows = 0
        self.calls = 0
        #: calls of decoder layers, in order
        self.layers: list[tuple[str, int]] = []
        self.seen: list[_Choice] = []

    def enter(self, path: str) -> None:
        """A module's forward begins."""
        self.calls += 1
        self.stack.append((path, self.calls))
        if _is_layer(path):
            self.layers.append(self.stack[-1])

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = ranked(func, args, kwargs=kwargs)
        scores = found[0] if found is not None else largest(func, args, kwargs=kwargs)
        if scores is not None and len(self.stack) > 1 and scores.numel() == self.rows * scores.shape[-1]:
            (path, *above), calls = zip(*reversed(self.stack), strict=True)
            self.seen.append(
                _Choice(
                    path=path,
                    above=tuple(above),
                    calls=calls,
                    num_experts=int(scores.shape[-1]),
                    top_k=1 if found is None else found[1],
                    axes=scores.dim(),
                    mixed=found is None,
                )
            )
        return func(*args, **kwargs)


def find_gates(
    model: nn.Module,
    *,
    leave_live: Sequence[str] = (),
    probe: Callable[[], object] | None = None,
) -> list[tuple[Gate, nn.Module]]:
    """Probe the model and return its gates with their modules, in module order; MTP left out.

    A module that fires several times in a forward stands there once for each firing.

    ``leave_live``: module paths (or patterns, as of ``fnmatch``) of routers that are not gates to follow. ``probe``:
    runs one forward of at least two different tokens; default: the model is called with ``input_ids`` of 7 tokens.
    Under FSDP2 every rank must call this, since the forward is collective.

    Raises ReplayError (NO_SEAM) for a model without gates, for a router whose selection is not seen or does not obey,
    and where two gates stand in one layer; the message says what was observed.
    """
    modules = dict(_without_mtp(model))
    run = probe or partial(default_probe, model)
    with left_as_it_was(model):
        watch = _watch(model, run)
        gates = _gates_of(modules, watch, leave_live)
        _refuse_unseen(modules, gates, leave_live)
        if not gates:
            observed = f"expected a mixture-of-experts model, got {type(model).__name__} without a single gate"
            raise ReplayError(observed, kind=ErrorKind.NO_SEAM)
        _verify_kinds(modules, gates, run, watch.rows)
    named = [(replace(found.gate, name=_WRAPPER.sub("", found.gate.name)), modules[found.gate.name]) for found in gates]
    order = {id(module): at for at, module in enumerate(modules.values())}
    return sorted(named, key=lambda found: (order[id(found[1])], found[0].firing))


def _without_mtp(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    skipped: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") for outer in skipped):
            continue
        if path and (_MTP_NAME.search(path) or _MTP_CLASS.search(type(module).__name__)):
            skipped.append(path)
            continue
        yield path, module


def default_probe(model: nn.Module) -> object:
    with warnings.catch_warnings():  # a reentrant checkpoint warns of inputs without gradients
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        return model(input_ids=probe_tokens(model, PROBE_ROWS)[None], use_cache=False)


def probe_tokens(model: nn.Module, count: int) -> torch.Tensor:
    """Up to ``count`` different token ids without a special meaning, int64, on the device of the model's weights."""
    config = next((each.config for each in model.modules() if hasattr(each, "config")), None)
    levels = [vars(level) for level in (config, getattr(config, "text_config", None)) if level is not None]
    named = [pair for level in levels for pair in level.items() if isinstance(pair[1], int)]
    reserved = {value for name, value in named if name.endswith(("token_id", "token_index"))}
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = [value for name, value in named if name == "vocab_size"] or tables
    usable = [token for token in range(3, max(sizes, default=64)) if token not in reserved][:count]
    return torch.tensor(usable, device=next(iter(model.parameters())).device)


def _watch(model: nn.Module, run: Callable[[], object]) -> _Watch:
    """One forward without gradients: its token rows, layers, and all selections inside modules."""
    names = {id(module): path for path, module in model.named_modules()}

    def enter(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        watch.enter(names[id(module)])
        watch.rows = watch.rows or _count_rows(args, kwargs)

    def leave(module: nn.Module, args: object, output: object) -> None:
        watch.stack.pop()

    watch = _Watch()
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with torch.no_grad(), watch:
            run()
    except ReplayError:
        raise
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError, AssertionError) as error:
        raise ReplayError(
            f"expected a model that runs the probing forward, got {type(error).__name__}: {error} (pass probe=, a call "
            f"of your own that runs one forward) @ {type(model).__name__}",
            kind=ErrorKind.NO_SEAM,
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return watch


def _count_rows(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int:
    values = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim() >= 2]
    ids = [each.numel() for each in values if each.dim() == 2 and not each.is_floating_point()]
    return int((ids or [each.numel() // each.shape[-1] for each in values] or [0])[0])


def _is_left(path: str, leave_live: Sequence[str]) -> bool:
    name = _WRAPPER.sub("", path)
    return any(fnmatchcase(name, pattern) for pattern in leave_live)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A gate under its path, the path of its block, and how often the gate fires in one call of that block."""

    gate: Gate
    block: str
    hits: int = 1


def _gates_of(modules: Mapping[str, nn.Module], watch: _Watch, leave_live: Sequence[str]) -> list[_Found]:
    """A gate for each firing of a module that selects over a matrix with a row in its block for each expert."""
    by_path: dict[str, dict[int, list[_Choice]]] = {}
    for each in watch.seen:
        within = each.path in modules and _LAYER.search(each.path)
        if within and _has_rows(modules[each.above[0]], each.num_experts):
            by_path.setdefault(each.path, {}).setdefault(each.calls[0], []).append(each)
    layer_ids = _layer_ids(by_path, watch.layers)
    gates: list[_Found] = []
    for path, calls in by_path.items():
        if not _is_left(path, leave_live):
            found = [_gate_of(path, choices, modules) for choices in calls.values()]
            gates += _firings([each for each in found if each is not None], list(calls.values()), layer_ids)
    layers: dict[int, Gate] = {}
    for gate in (found.gate for found in gates):
        other = layers.setdefault(gate.layer_id, gate)
        if other is not gate:
            raise _refused(
                f"two selections in layer {gate.layer_id}, at {other.name} and {gate.name}: name one of them in "
                "leave_live, or the second repeats what the first has chosen",
                gate.name,
            )
    return gates


def _gate_of(path: str, choices: Sequence[_Choice], modules: Mapping[str, nn.Module]) -> _Found | None:
    """The gate that these selections of one call make; None where they are no gate's."""
    ranking = [each for each in choices if not each.mixed]
    if ranking:
        width = max(each.num_experts for each in ranking)  # group selection is over fewer
        widest = [each for each in ranking if each.num_experts == width]
        # the best two of a single group are taken over [N, 1, E]
        axes = min(each.axes for each in widest)
        chosen = [each for each in widest if each.axes == axes]
        count, top_k, rounds = len(chosen), chosen[-1].top_k, 0
    else:
        width = choices[0].num_experts
        top_k = getattr(modules[path], "top_k", 0)
        if not isinstance(top_k, int) or not top_k or len(choices) % top_k:
            return None
        count, rounds, axes = len(choices) // top_k, top_k, 2
    if count != 1:
        raise _refused(f"{count} selections over {width} experts in one call", path)
    gate = Gate(name=path, layer_id=-1, num_experts=width, top_k=top_k, rounds=rounds, axes=axes)
    inside = [each for each in choices[0].above if _LAYER.search(each)]  # a wrapper of the gate alone holds no expert
    holding = (each for each in inside if expert_parameters(modules[each], modules[path], width))
    return _Found(gate=gate, block=next(holding, choices[0].above[0]))


def _firings(
    found: Sequence[_Found], calls: Sequence[Sequence[_Choice]], layer_ids: Mapping[int, int]
) -> Iterator[_Found]:
    """One module's firings in order, each with its layer."""
    if len(found) != len(calls):
        return  # not a gate's
    blocks = [dict(zip(each[0].above, each[0].calls[1:], strict=True)) for each in calls]
    for at, (each, choices) in enumerate(zip(found, calls, strict=True)):
        gate = replace(each.gate, firing=at, firings=len(calls), layer_id=layer_ids[choices[0].calls[0]])
        if replace(found[0].gate, firing=at, firings=len(calls), layer_id=gate.layer_id) != gate:
            raise _refused(f"another number of experts or choices in firing {at + 1} of a forward", gate.name)
        hits = sum(call.get(each.block) == blocks[at][each.block] for call in blocks)
        yield replace(each, gate=gate, hits=hits)


def _layer_ids(
    by_path: Mapping[str, Mapping[int, Sequence[_Choice]]], layers: Sequence[tuple[str, int]]
) -> dict[int, int]:
    """The layer of every gate's call: the number in its path, or that of the unrolled model where a gate is looped.

    There, layers are counted in the order of their calls, from the number of the first. Where a gate fires several
    times in one call of its layer, each firing is a layer.
    """
    found: dict[int, int] = {}
    stacks = {path: _place(path)[0] for path in by_path}
    looped = {stacks[path] for path, calls in by_path.items() if len(calls) > 1}
    first: dict[int, int] = {}  # number of the layer's call -> its first number in the unrolled model
    inside: dict[tuple[str, int], list[int]] = {}  # path of a gate, call of its layer -> the gate's calls
    for path, calls in by_path.items():
        for call, choices in calls.items():
            running = zip((path, *choices[0].above), choices[0].calls, strict=True)
            layer = next((at for above, at in running if _is_layer(above)), -1)
            if layer < 0 and stacks[path] in looped:
                raise _refused(f"{len(calls)} firings in one forward, and no call of a layer around them", path)
            inside.setdefault((path, layer), []).append(call)
    for stack in looped:
        number: int | None = None
        for path, call in layers:
            if _place(path)[0] == stack:
                number = _place(path)[1] if number is None else number
                first[call] = number
                number += max((len(firings) for (_, layer), firings in inside.items() if layer == call), default=1)
    for (path, layer), firings in inside.items():
        own = _place(path)[1]
        found |= {call: first.get(layer, own) + at for at, call in enumerate(firings)}
    return found


def _place(path: str) -> tuple[str, int]:
    """The list of layers that a path passes by, and the number there."""
    found = _LAYER.search(path)
    return ("", -1) if found is None else (path[: found.start(1)], int(found[1]))


def _is_layer(path: str) -> bool:
    """Whether this is a decoder layer itself, not a part of one."""
    found = _LAYER.search(path)
    return found is not None and found.end() == len(path)


def _has_rows(block: nn.Module, count: int) -> bool:
    """Whether a block holds a matrix with a row for each expert; an attention's selection over tokens has none."""
    if any(isinstance(each, nn.ModuleList) and len(each) == count for each in block.modules()):
        return True
    return any(each.dim() >= 2 and count in each.shape[:2] for each in block.parameters())


def _refuse_unseen(modules: Mapping[str, nn.Module], found: Sequence[_Found], leave_live: Sequence[str]) -> None:
    gates = {each.gate.name for each in found}
    seen = gates | {each.block for each in found}
    for path, module in modules.items():
        if (
            _INACTIVE.search(path)
            or _is_left(path, leave_live)
            or any(name == path or name.startswith(f"{path}.") for name in seen)
        ):
            continue
        experts, beside = getattr(module, "experts", None), path.rpartition(".")[0]
        left = any(_is_left(f"{path}.{name}", leave_live) for name, _ in module.named_children())
        followed = any(name.startswith(f"{beside}.") for name in gates)
        if isinstance(experts, nn.Module) and not left and not followed:
            raise _refused("experts, and no selection by topk or max over them", path, module)
        inner = any(path.startswith(f"{name}.") for name in gates)
        if _ROUTER_CLASS.search(type(module).__name__) and hasattr(module, "top_k") and not inner:
            raise _refused("a router that ran without a selection by topk or max", path, module)


def _refused(observed: str, path: str, module: nn.Module | None = None) -> ReplayError:
    where = (_WRAPPER.sub("", path) or "the model") + ("" if module is None else f" ({type(module).__name__})")
    return ReplayError(f"expected a gate whose selection obeys, got {observed} @ {where}", kind=ErrorKind.NO_SEAM)


# ---- leave no trace -------------------------------------------------------------------------------------------------


#: modules and their instance attributes; tensors among these (token counters) with a copy of their values
_State = list[tuple[nn.Module, dict[str, tuple[object, torch.Tensor | None]]]]
#: what torch keeps in a module; other names with an underscore are a library's own (a call's token ids, loads)
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no autocast of compiled code, and everything that a forward may change put back."""
    state = _plain_state(model)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = list(range(torch.accelerator.device_count()))
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
        try:
            for module, _ in state:
                module.training = False
            yield
        finally:
            for buffer, kept in buffers:
                _put_back(buffer, kept)
            _restore(state)


def _plain_state(root: nn.Module) -> _State:
    def kept(value: object) -> tuple[object, torch.Tensor | None]:
        return value, value.detach().clone() if isinstance(value, torch.Tensor) else None

    def plain(found: dict[str, object]) -> Iterator[tuple[str, object]]:
        for name, value in found.items():
            if name[0] != "_" or (isinstance(value, torch.Tensor | int | float | None) and name not in _TORCHS_OWN):
                yield name, value

    return [(each, {name: kept(value) for name, value in plain(vars(each))}) for each in root.modules()]


def _restore(state: _State) -> None:
    for module, values in state:
        own = vars(module)
        for name in [name for name in own if not name.startswith("_") and name not in values]:
            del own[name]
        for name, (value, kept) in values.items():
            own[name] = value
            if kept is not None and isinstance(value, torch.Tensor):
                _put_back(value, kept)


@torch.no_grad()
def _put_back(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    if not torch.equal(tensor, kept):
        tensor.copy_(kept)


# ---- verify ---------------------------------------------------------------------------------------------------------


def _verify_kinds(
    modules: Mapping[str, nn.Module], gates: Sequence[_Found], run: Callable[[], object], rows: int
) -> None:
    """Check one block of each kind, inside a second forward: its weights may be gathered only there (FSDP2)."""
    kinds: dict[object, _Trial] = {}
    for found in gates:
        gate = found.gate
        trial = _Trial(gate=gate, scope=modules[gate.name], block=modules[found.block], rows=rows, hits=found.hits)
        kinds.setdefault(trial.kind, trial)
    with ExitStack() as stack, torch.no_grad():
        for trial in kinds.values():
            stack.enter_context(trial.inside_forward())
        run()
    for trial in kinds.values():
        if trial.observed:
            raise _refused(trial.observed, trial.gate.name, trial.scope)


@dataclass(kw_only=True, slots=True)
class _Outcome:
    """One run of a block: its output ``[N, H]``, and what was seen at the selection.

    ``own``: the gate's own ids ``[N, K]`` of each firing; scores and logits are those of the first.
    """

    output_NH: torch.Tensor
    scores_NE: torch.Tensor
    own: list[torch.Tensor]
    logits_NE: torch.Tensor | None

    @property
    def live_NK(self) -> torch.Tensor:
        """The gate's own ids in its first firing."""
        return self.own[0]


@dataclass(kw_only=True)
class _Trial:
    """Runs one MoE block with and without forced ids."""

    gate: Gate
    scope: nn.Module
    block: nn.Module
    rows: int
    #: firings of the gate in one call of the block
    hits: int = 1
    observed: str = ""
    called: tuple[tuple[Any, ...], dict[str, Any]] = field(default_factory=lambda: ((), {}))
    #: attributes of the block's modules when it was called: what a model tells a gate beside its arguments (token ids)
    told: _State = field(default_factory=list)
    done: bool = False

    @property
    def kind(self) -> object:
        """Blocks of one kind behave alike."""
        settings = tuple(
            (name, value)
            for name, value in sorted(vars(self.scope).items())
            if isinstance(value, int | float | str | bool) and not re.search("layer", name)
        )
        return type(self.block), type(self.scope), self.gate.num_experts, self.gate.top_k, self.hits, settings

    @contextmanager
    def inside_forward(self) -> Iterator[None]:
        """Check the block during its next forward."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.called = copied(args), copied(kwargs)
            self.told = _plain_state(module)

        def after(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            if not self.done:
                self.done = True
                self.observed = self.check()

        handles = (
            self.block.register_forward_pre_hook(before, with_kwargs=True),
            self.block.register_forward_hook(after, with_kwargs=True, prepend=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run(self, *ids: torch.Tensor, seed: int = 0) -> _Outcome:
        """The block's forward under ids ``[N, K]`` of each firing, or one for all; none leave the gate live."""
        seen = _Sight(self.gate, ids)
        args, kwargs = copied(self.called[0]), copied(self.called[1])
        _restore(self.told)
        torch.manual_seed(seed)
        with seen.within(self.scope, whole=self.scope is self.block):
            output = self.block.forward(*args, **kwargs)
        if seen.scores_NE is None:
            raise _refused("no selection when its block was called again", self.gate.name, self.scope)
        return _Outcome(
            output_NH=rows_of(output, self.rows),
            scores_NE=seen.scores_NE,
            own=seen.own,
            logits_NE=seen.logits_NE,
        )

    def check(self) -> str:
        """What was observed that a gate must not do; empty where it behaves."""
        live = self.run()
        for observe in (self._noise, self._own, self._obeys, self._alone):
            if found := observe(live):
                return found
        with torch.enable_grad(), _requiring_grad(self.block):
            return self._weights(live) or self._experts(live)

    def _noise(self, live: _Outcome) -> str:
        forced = [self.run(*live.own, seed=seed) for seed in (1, 2)]
        if len(live.own) != self.hits:
            return f"{len(live.own)} selections in one call"
        same = torch.equal(forced[0].scores_NE, forced[1].scores_NE)
        noisy = same and not _close(forced[0].output_NH, forced[1].output_NH)
        return "random numbers behind the selection: two calls with the same forced ids differ" if noisy else ""

    def _own(self, live: _Outcome) -> str:
        forced, again = self.run(*live.own), self.run()
        if torch.equal(live.output_NH, again.output_NH) and not torch.equal(live.output_NH, forced.output_NH):
            apart = (live.output_NH - forced.output_NH).abs().max().item()
            return f"another output (by {apart:.2g}) when its own ids are forced"
        return "" if _close(live.output_NH, forced.output_NH) else "another output when its own ids are forced"

    def _obeys(self, live: _Outcome) -> str:
        forced = self.run(self.other(live))
        return "an output that does not follow forced ids" if torch.equal(live.output_NH, forced.output_NH) else ""

    def _alone(self, live: _Outcome) -> str:
        other = self.other(live)
        crowd = other[-1:].expand_as(other).contiguous()
        mixed = live.live_NK.clone()
        mixed[-1] = other[-1]
        alone = _close(self.run(crowd).output_NH[-1], self.run(mixed).output_NH[-1])
        return "" if alone else "a row that changes when other rows choose the same experts (an expert capacity)"

    def _weights(self, live: _Outcome) -> str:
        other = self.other(live)
        own, forced = self._gradients(live.live_NK), self._gradients(other)
        if own is None or forced is None:
            return "weights that no gradient links to the gate's scores"
        if float(own.abs().max()) <= 1e-7:
            return ""  # constant by the family's own rule, as of one expert with weight 1
        if float(forced.abs().max()) <= 1e-7:
            return "weights of forced ids that no gradient reaches"
        is_live = torch.zeros(forced.shape[:2], dtype=torch.bool).scatter_(1, live.live_NK.cpu(), value=True)
        is_forced = torch.zeros_like(is_live).scatter_(1, other.cpu(), value=True)
        is_beside = ~is_live & ~is_forced
        along_NE, rest_NE = _beyond_common(forced, is_beside)
        outside, inside = rest_NE[is_live & ~is_forced], rest_NE[is_forced & ~is_live]
        if len(outside) and float(rest_NE.max()) > 1e-3 * float(forced.abs().max()):
            wrong = bool(outside.mean() > 0.25 * inside.mean())
        else:
            # one expert: every logit moves its weight alone, its own one against all the others
            beside = (along_NE * is_beside).sum(-1).sign()
            against = [((along_NE * mask).sum(-1).sign() * beside < 0).sum() for mask in (is_live, is_forced)]
            wrong = self.gate.top_k == 1 and bool(against[0] > against[1])
        return "weights that follow the gate's own ids where others are forced" if wrong else ""

    def _gradients(self, ids_NK: torch.Tensor) -> torch.Tensor | None:
        """How each expert's logit moves a row's output along four directions, ``[N, E, 4]``; None without a graph."""
        outcome = self.run(ids_NK)
        if outcome.logits_NE is None or not outcome.output_NH.requires_grad:
            return None
        generator = torch.Generator().manual_seed(0)
        gradients = []
        for _ in range(4):
            direction = torch.randn(outcome.output_NH.shape, generator=generator).to(outcome.output_NH)
            (found,) = torch.autograd.grad(
                outcome.output_NH, outcome.logits_NE, direction, retain_graph=True, allow_unused=True
            )
            found = torch.zeros_like(outcome.logits_NE) if found is None else found
            gradients.append(found.detach().reshape(ids_NK.shape[0], -1).double().cpu())
        return torch.stack(gradients, dim=-1)

    def _experts(self, live: _Outcome) -> str:
        other = self.other(live)
        crowd = other[-1:].expand_as(other).contiguous()
        stacked = expert_parameters(self.block, self.scope, self.gate.num_experts)
        if not stacked:
            return ""
        output = self.run(crowd).output_NH
        generator = torch.Generator().manual_seed(1)
        direction = torch.randn(output.shape, generator=generator).to(output)
        gradients = torch.autograd.grad(output, [each for each, _ in stacked], direction, allow_unused=True)
        used: set[int] = set()
        for (_, index), gradient in zip(stacked, gradients, strict=True):
            if gradient is None:
                continue
            if index is not None:
                used |= {index} if bool(gradient.any()) else set()
            else:
                used |= set(gradient.flatten(1).any(dim=1).nonzero()[:, 0].tolist())
        beside = sorted(used - set(crowd[0].tolist()))
        if beside:
            return f"experts {beside[:8]} at work where {sorted(crowd[0].tolist())} are forced"
        return ""

    def other(self, live: _Outcome) -> torch.Tensor:
        """Ids for each row, int64 ``[N, K]``, as far from the gate's own as E allows."""
        order = torch.arange(self.gate.num_experts, device=live.live_NK.device)
        rows = torch.arange(live.live_NK.shape[0], device=live.live_NK.device)
        weight = torch.zeros(live.live_NK.shape[0], self.gate.num_experts, device=live.live_NK.device)
        weight = weight.scatter_(1, live.live_NK, -1e6) - (order + rows[:, None]) * 7 % 13
        return torch.argsort(weight, dim=1, descending=True, stable=True)[:, : self.gate.top_k].contiguous()


class _Sight:
    """What one run of a block shows at its gate; forces ids where some are given."""

    def __init__(self, gate: Gate, ids: Sequence[torch.Tensor]) -> None:
        self.ids = ids
        self.gate = gate
        self.own: list[torch.Tensor] = []
        self.scores_NE: torch.Tensor | None = None
        self.logits_NE: torch.Tensor | None = None

    def choose(self, scores_NE: torch.Tensor, live: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As ``SelectionMode`` asks."""
        self.own.append(live().detach().clone())
        if self.scores_NE is None:
            self.scores_NE = scores_NE.detach().clone()
        return self.ids[min(len(self.own), len(self.ids)) - 1] if self.ids else self.own[-1]

    @contextmanager
    def within(self, scope: nn.Module, *, whole: bool) -> Iterator[None]:
        """Watch the forward of a module; ``whole``: of what runs in the body."""
        modes = (SelectionMode(self.gate, self.choose), _FirstLogits(self))
        inside = ExitStack()

        def enter(*_: object) -> None:
            for mode in modes:
                inside.enter_context(mode)

        def leave(*_: object) -> None:
            inside.close()

        hooks = (scope.register_forward_pre_hook(enter), scope.register_forward_hook(leave, always_call=True))
        try:
            if whole:  # its body alone runs, no hook
                enter()
            yield
        finally:
            leave()
            for hook in hooks:
                hook.remove()


class _FirstLogits(TorchFunctionMode):
    """Keeps the first tensor of ``N * E`` numbers that a gate's forward makes with a gradient."""

    def __init__(self, seen: _Sight) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            self.seen.logits_NE is None
            and isinstance(result, torch.Tensor)
            and result.dim() >= 2
            and result.shape[-1] == self.seen.gate.num_experts
            and result.grad_fn is not None
            and result.numel() > self.seen.gate.num_experts
        ):
            self.seen.logits_NE = result
        return result


def _beyond_common(gradients_NEP: torch.Tensor, beside_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each expert's gradient along the direction that experts ``beside`` share, and the rest of it, ``[N, E]`` each.

    A softmax over all experts moves every weight by one common factor; an expert that computes moves its own besides.
    """
    masked = gradients_NEP * beside_NE[..., None]
    common_NP = torch.linalg.svd(masked, full_matrices=False).Vh[:, 0]
    common_NP = common_NP * (masked.abs().amax(dim=(1, 2)) > 0)[:, None]
    along_NE = (gradients_NEP * common_NP[:, None]).sum(-1)
    return along_NE, (gradients_NEP - along_NE[..., None] * common_NP[:, None]).norm(dim=-1)


@contextmanager
def _requiring_grad(block: nn.Module) -> Iterator[None]:
    flags = [(each, each.requires_grad) for each in block.parameters() if each.is_floating_point()]
    for each, _ in flags:
        each.requires_grad_(True)
    try:
        yield
    finally:
        for each, flag in flags:
            each.requires_grad_(flag)


def expert_parameters(block: nn.Module, scope: nn.Module, num_experts: int) -> list[tuple[nn.Parameter, int | None]]:
    """Weights with a leading axis of experts, rows of an embedding too (index None), or those of a module in a list."""
    gate = {id(each) for each in scope.parameters()} if scope is not block else set()
    found: list[tuple[nn.Parameter, int | None]] = []
    for each in block.parameters():
        if each.dim() == 3 and each.shape[0] == num_experts and id(each) not in gate and each.is_floating_point():
            found.append((each, None))
    for module in block.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == num_experts:
            found += [(each, None) for each in module.parameters()]
        if isinstance(module, nn.ModuleList) and len(module) == num_experts:
            found += [
                (each, index) for index, expert in enumerate(module) for each in expert.parameters() if each.dim() == 2
            ]
    return found


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(copied(each) for each in value)
    if isinstance(value, dict) and type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    return value


def rows_of(output: Any, rows: int) -> torch.Tensor:
    """The first floating tensor among a block's outputs with a whole number of features for each row."""
    parts = output if isinstance(output, tuple | list) else (output,)
    for part in parts:
        if isinstance(part, torch.Tensor) and part.is_floating_point() and part.numel() % rows == 0:
            return part.reshape(rows, -1)
    raise ReplayError(f"expected a block that returns hidden states, got {type(output)}", kind=ErrorKind.NO_SEAM)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    scale = float(one.detach().abs().max()) or 1.0
    tolerance = 2e-2 if one.dtype in (torch.bfloat16, torch.float16) else 1e-4
    return float((one - other).detach().abs().max()) <= tolerance * scale
