"""Find the routing weights of a live torch model in what its gates return, and say what they are.

``find_weights`` runs the model once and looks at each gate: which tensor of its answer holds a weight for each chosen
expert, and which function of the router's logits that is. The gate is called again with larger hidden states, so that
a softmax and a sigmoid are told apart, and its block with forced weights: own ones must change nothing, and twice the
weights must give twice the experts' output, or the output that twice the input gives (weights that are multiplied
before the expert). A constant factor outside of the gate shows when the attribute that holds it is doubled. What cannot
be told is refused with what was observed. No class is known by name.

Capture reads the weights here, and replay forces them. Knows torch.
Axes: N token rows of one gate call, E experts, K top-k slots, H features of a block's output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from routeplane.capture.gates import copied, default_probe, expert_parameters, left_as_it_was, rows_of
from routeplane.capture.selection import Gate, SelectionMode
from routeplane.errors import ErrorKind, ReplayError
from routeplane.record.validate import Multiplied, Scaling, Score, WeightDtype, WeightsMeaning

__all__ = ["FACTOR_NAME", "WeightSite", "find_weights", "meaning_of"]

#: Standard deviation of the logits under which the functions of them are told apart.
_SPREAD = 1.0
#: How far weights may be from what a function makes of the logits, as a share; by the type that they come in.
_FIT = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
#: How far outputs may be apart that arithmetic makes equal.
_EQUAL = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
_DTYPES: dict[torch.dtype, WeightDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
#: What models call the constant factor on their routed output.
FACTOR_NAME = re.compile("(?:rout|expert|moe).*scal|scal.*factor|route_scale", re.IGNORECASE)
_PRODUCTS = frozenset(
    {
        torch.nn.functional.linear,
        torch.matmul,
        torch.mm,
        torch.addmm,
        torch.bmm,
        torch.einsum,
        torch.Tensor.matmul,
        torch.Tensor.mm,
        torch.Tensor.__matmul__,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where weights stand in what a gate's forward returns.

    ``index``: in a tuple or list; None where the gate returns one tensor. ``dense``: whether that is ``[N, E]`` with
    zeros beside the chosen experts, instead of ``[N, K]`` in the order of the selection.
    """

    index: int | None
    dense: bool
    dtype: torch.dtype

    def read(self, output: Any, ids_NK: torch.Tensor) -> torch.Tensor:
        """The weights of a gate's answer, ``[N, K]`` in the order of the ids; a view or a copy."""
        values = output if self.index is None else output[self.index]
        flat: torch.Tensor = values.reshape(-1, values.shape[-1])
        return flat.gather(1, ids_NK.to(flat.device)) if self.dense else flat

    def write(self, output: Any, ids_NK: torch.Tensor, *, weights_NK: torch.Tensor) -> Any:
        """The gate's answer with other weights, in the gate's type, on its device; the rest is the gate's own."""
        values = output if self.index is None else output[self.index]
        found = weights_NK.to(values.device, values.dtype)
        if self.dense:
            blank = torch.zeros_like(values).reshape(-1, values.shape[-1])
            found = blank.scatter(1, ids_NK.to(values.device), found)
        found = found.reshape(values.shape)
        if self.index is None:
            return found
        parts = list(output)
        parts[self.index] = found
        return tuple(parts) if isinstance(output, tuple) else parts


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSite(_Place):
    """One gate's weights in what its forward returns, and what they are."""

    gate: Gate
    module: nn.Module
    meaning: WeightsMeaning


def meaning_of(sites: Sequence[WeightSite]) -> WeightsMeaning:
    """What the weights of all gates are. Raises ReplayError (NO_SEAM) where they are not the same in all layers."""
    for site in sites:
        if site.meaning != sites[0].meaning:
            raise _untold(
                f"{sites[0].meaning.to_text()} @ layer {sites[0].gate.layer_id} and {site.meaning.to_text()}", site.gate
            )
    return sites[0].meaning


def find_weights(
    model: nn.Module, gates: Sequence[tuple[Gate, nn.Module]], *, probe: Callable[[], object] | None = None
) -> list[WeightSite]:
    """Look at the gates that ``find_gates`` found, in their order; one forward, and the model is left as it was.

    ``probe``: as there. Under FSDP2 every rank must call this.

    Raises ReplayError (NO_SEAM) where a gate's weights are not in its answer, or where what was observed does not say
    what they are.
    """
    parents = {id(child): module for module in model.modules() for child in module.children()}
    looks = {
        id(module): _Look(gate=gate, module=module, block=_block_of(gate, module, parents))
        for gate, module in gates
        if not gate.firing
    }
    with left_as_it_was(model), torch.no_grad():
        with ExitStack() as stack:
            for look in looks.values():
                stack.enter_context(look.inside_forward())
            (probe or partial(default_probe, model))()
    return [replace(looks[id(module)].site(), gate=gate) for gate, module in gates]


def _block_of(gate: Gate, module: nn.Module, parents: Mapping[int, nn.Module]) -> nn.Module:
    """The nearest module around a gate that holds its experts."""
    if expert_parameters(module, module, gate.num_experts):
        raise _untold("a selection in the forward of the whole block, which returns no weights", gate)
    found = parents.get(id(module))
    while found is not None:
        if expert_parameters(found, module, gate.num_experts):
            return found
        found = parents.get(id(found))
    raise _untold("no module around the gate that holds experts", gate)


def _untold(observed: str, gate: Gate) -> ReplayError:
    return ReplayError(
        f"expected a gate whose routing weights can be told, got {observed} @ {gate}", kind=ErrorKind.NO_SEAM
    )


@dataclass(kw_only=True, slots=True)
class _Seen:
    """One call of a gate: its answer, its own or forced ids ``[N, K]``, and what its selection was made of."""

    output: Any
    ids_NK: torch.Tensor
    scores_NE: torch.Tensor
    logits_NE: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    """A function that makes the weights of the logits, up to a constant factor."""

    score: Score
    renormalised: bool
    factor: float


@dataclass(kw_only=True)
class _Look:
    """Calls one gate and its block again inside a forward of the model."""

    gate: Gate
    module: nn.Module
    block: nn.Module
    gate_call: tuple[tuple[Any, ...], dict[str, Any]] = field(default_factory=lambda: ((), {}))
    block_call: tuple[tuple[Any, ...], dict[str, Any]] = field(default_factory=lambda: ((), {}))
    found: WeightSite | None = None
    looking: bool = False
    observed: str = "no call of its block in the probing forward"

    def site(self) -> WeightSite:
        """What was found; raises ReplayError with what was observed instead."""
        if self.found is None:
            raise _untold(self.observed, self.gate)
        return self.found

    @contextmanager
    def inside_forward(self) -> Iterator[None]:
        """Look during the next forward: under FSDP2 weights are gathered only there."""

        def of_gate(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.looking:
                self.gate_call = copied(args), copied(kwargs)

        def of_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.block_call = copied(args), copied(kwargs)

        def after(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            if not self.looking:
                self.look()

        handles = (
            self.module.register_forward_pre_hook(of_gate, with_kwargs=True),
            self.block.register_forward_pre_hook(of_block, with_kwargs=True),
            self.block.register_forward_hook(after, with_kwargs=True, prepend=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def look(self) -> None:
        """Find the weights among what the gate returns."""
        self.looking = True
        seen = self.call_gate(1.0)
        wide = self.call_gate(_spread(seen))
        answer = _shown(seen.output)
        sites: list[WeightSite] = []
        observed: list[str] = []
        for place in _places(seen, self.gate):
            told = self.tell(place, seen, wide)
            if isinstance(told, WeightSite):
                sites.append(told)
            else:
                observed.append(told)
        self.found = sites[0] if len(sites) == 1 else None
        if len(sites) > 1:
            observed = [f"{len(sites)} tensors that are weights"]
        self.observed = f"{'; '.join(observed) or 'no tensor of a weight for each choice'}, in an answer of {answer}"

    def tell(self, place: _Place, seen: _Seen, wide: _Seen) -> WeightSite | str:
        """The weights at a place with their meaning, or why they have none."""
        forced = _Forced(place=place, ids_NK=seen.ids_NK, weights_NK=place.read(seen.output, seen.ids_NK))
        if observed := self.disobeys(forced):
            return observed
        fit = _fit(place, wide)
        if isinstance(fit, str):
            return fit
        multiplied = self.multiplied(forced)
        if multiplied is None:
            return "an output that is not a multiple of the weights and not what larger inputs give"
        scaling = self.scaling(forced, fit)
        if isinstance(scaling, str):
            return scaling
        meaning = WeightsMeaning(
            score=fit.score,
            renormalised=fit.renormalised,
            scaling=scaling[0],
            factor=scaling[1],
            multiplied=multiplied,
            dtype=_DTYPES[place.dtype],
        )
        return WeightSite(
            index=place.index,
            dense=place.dense,
            dtype=place.dtype,
            gate=self.gate,
            module=self.module,
            meaning=meaning,
        )

    def disobeys(self, forced: _Forced) -> str:
        """What was observed that forced weights must not do; empty where the block follows them."""
        live_NH, again_NH, own_NH = self.run(None), self.run(None), self.run(forced)
        if torch.equal(live_NH, again_NH) and not torch.equal(live_NH, own_NH):
            return f"another output (by {_apart(own_NH, live_NH):.2g}) when its own weights are forced"
        if _apart(self.run(forced.times(0.0)), own_NH) == 0:
            return "an output that does not follow forced weights"
        return ""

    def multiplied(self, forced: _Forced) -> Multiplied | None:
        """Whether weights meet the experts' output or their input; None where neither holds."""
        # large weights, so that the routed part stands out of what else a block adds
        none_NH, once_NH, twice_NH = (self.run(forced.times(factor)) for factor in (0.0, 4.0, 8.0))
        equal = _EQUAL.get(none_NH.dtype, _EQUAL[torch.float32])
        if _apart(twice_NH - none_NH, 2 * (once_NH - none_NH)) <= equal:
            return "after"
        beside_NH, larger_NH = (self.run(forced.times(factor), inputs=2.0) for factor in (0.0, 4.0))
        return "before" if _apart(twice_NH - none_NH, larger_NH - beside_NH) <= equal else None

    def scaling(self, forced: _Forced, fit: _Fit) -> tuple[Scaling, float] | str:
        """Where the model's constant factor is applied, and what it is; or why that cannot be told."""
        holders = list(_factors(self.module, self.block))
        outside = sorted({value for owner, name, value in holders if self.acts(forced, owner, name)})
        if abs(fit.factor - 1) <= _FIT[forced.place.dtype]:
            if len(outside) > 1:
                return f"several factors behind the gate: {outside}"
            return ("out", outside[0]) if outside else ("none", 1.0)
        inside = {value for _, _, value in holders if abs(fit.factor / value - 1) <= _FIT[forced.place.dtype]}
        if outside or len(inside) != 1:
            return (
                f"weights that are {fit.factor:.6g} times the {fit.score} of their logits, factors {outside} behind "
                f"the gate and {sorted({value for _, _, value in holders})} in attributes"
            )
        return "in", inside.pop()

    def acts(self, forced: _Forced, owner: Any, name: str) -> bool:
        """Whether twice the factor is twice the routed output, under one set of weights."""
        before = self.run(forced.times(4.0)) - self.run(forced.times(0.0))
        kept = getattr(owner, name)
        setattr(owner, name, 2 * kept)
        try:
            after = self.run(forced.times(4.0)) - self.run(forced.times(0.0))
        finally:
            setattr(owner, name, kept)
        return _apart(after, 2 * before) <= _EQUAL.get(after.dtype, _EQUAL[torch.float32])

    def call_gate(self, inputs: float) -> _Seen:
        """The gate's forward over ``inputs`` times its hidden states."""
        mode, products = _Chooser(self.gate, None), _Products(self.gate)
        args, kwargs = _times(self.gate_call, inputs)
        torch.manual_seed(0)
        with mode.mode, products:
            output = self.module.forward(*args, **kwargs)
        if mode.ids_NK is None or mode.scores_NE is None:
            raise _untold("no selection when it was called again", self.gate)
        return _Seen(output=output, ids_NK=mode.ids_NK, scores_NE=mode.scores_NE, logits_NE=products.first_NE)

    def run(self, forced: _Forced | None, *, inputs: float = 1.0) -> torch.Tensor:
        """The block's output ``[N, H]`` over ``inputs`` times its hidden states; None leaves the gate live."""
        choosing = _Chooser(self.gate, None if forced is None else forced.ids_NK)

        def enter(module: nn.Module, args: object) -> None:
            choosing.mode.__enter__()  # type: ignore[no-untyped-call]

        def leave(module: nn.Module, args: object, output: Any) -> Any:
            choosing.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            return None if forced is None else forced.within(output)

        args, kwargs = _times(self.block_call, inputs)
        torch.manual_seed(0)
        handles = (self.module.register_forward_pre_hook(enter), self.module.register_forward_hook(leave))
        try:
            output = self.block.forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        if choosing.ids_NK is None:
            raise _untold("no selection when its block was called again", self.gate)
        return rows_of(output, choosing.ids_NK.shape[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Forced:
    """Ids and weights that a gate is given, ``[N, K]`` each."""

    place: _Place
    ids_NK: torch.Tensor
    weights_NK: torch.Tensor

    def times(self, factor: float) -> _Forced:
        """The same ids with other weights."""
        return replace(self, weights_NK=self.weights_NK * factor)

    def within(self, output: Any) -> Any:
        """A gate's answer with these weights."""
        return self.place.write(output, self.ids_NK, weights_NK=self.weights_NK)


class _Chooser:
    """A mode that forces ids, or notes the gate's own, with the scores that they were chosen by."""

    def __init__(self, gate: Gate, ids_NK: torch.Tensor | None) -> None:
        self.forced_NK = ids_NK
        self.ids_NK: torch.Tensor | None = None
        self.scores_NE: torch.Tensor | None = None
        self.mode = SelectionMode(gate, self.choose)

    def choose(self, scores_NE: torch.Tensor, live: Callable[[], torch.Tensor]) -> torch.Tensor:
        """As ``SelectionMode`` asks."""
        self.ids_NK = live().detach().clone() if self.forced_NK is None else self.forced_NK
        self.scores_NE = scores_NE.detach().clone()
        return self.ids_NK


class _Products(TorchFunctionMode):
    """Keeps the first product of matrices with a number for each row and expert: the router's logits."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self.first_NE: torch.Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Every torch call of the gate comes by here and goes on unchanged."""
        result = func(*args, **(kwargs or {}))
        if (
            self.first_NE is None
            and func in _PRODUCTS
            and isinstance(result, torch.Tensor)
            and result.shape[-1:] == (self.gate.num_experts,)
        ):
            self.first_NE = result.detach().clone().reshape(-1, self.gate.num_experts)
        return result


def _places(seen: _Seen, gate: Gate) -> Iterator[_Place]:
    """Tensors with a number for each choice, or with zeros for all other experts."""
    parts = seen.output if isinstance(seen.output, tuple | list) else (seen.output,)
    rows = seen.ids_NK.shape[0]
    for at, part in enumerate(parts):
        if not isinstance(part, torch.Tensor) or part.dtype not in _DTYPES or part.dim() < 2:
            continue
        index = at if isinstance(seen.output, tuple | list) else None
        if part.shape[-1] == gate.top_k and part.numel() == rows * gate.top_k:
            yield _Place(index=index, dense=False, dtype=part.dtype)
        if part.shape[-1] == gate.num_experts and part.numel() == rows * gate.num_experts:
            others_NE = part.reshape(rows, -1).scatter(1, seen.ids_NK.to(part.device), 0)
            if not bool(others_NE.any()):
                yield _Place(index=index, dense=True, dtype=part.dtype)


def _spread(seen: _Seen) -> float:
    """What to multiply hidden states by, so that the functions of the logits come far apart."""
    found = 0.0 if seen.logits_NE is None else float(seen.logits_NE.float().std())
    return _SPREAD / found if found > 0 else 1.0


def _fit(place: _Place, wide: _Seen) -> _Fit | str:
    """The one function of the logits that the weights are a constant multiple of, or what was observed."""
    if wide.logits_NE is None or wide.logits_NE.shape[0] != wide.ids_NK.shape[0]:
        return "weights without logits that a product of matrices made in the gate"
    logits_NE = wide.logits_NE.double()
    ids_NK = wide.ids_NK.to(logits_NE.device)
    weights_NK = place.read(wide.output, wide.ids_NK).double().to(logits_NE.device)
    fits = []
    functions: tuple[tuple[Score, torch.Tensor], ...] = (
        ("softmax", logits_NE.softmax(-1)),
        ("sigmoid", logits_NE.sigmoid()),
    )
    for score, scores_NE in functions:
        picked_NK = scores_NE.gather(1, ids_NK)
        for renormalised in (False, True):
            made_NK = picked_NK / picked_NK.sum(-1, keepdim=True) if renormalised else picked_NK
            factor = float(weights_NK.sum() / made_NK.sum())
            apart_NK = (weights_NK - factor * made_NK).abs() / (factor * made_NK.amax(-1, keepdim=True))
            if factor > 0 and float(apart_NK.max()) <= _FIT[place.dtype]:
                fits.append(_Fit(score=score, renormalised=renormalised, factor=factor))
    if len({fit.score for fit in fits}) > 1:  # one expert of weight 1, whatever its score
        chosen_by = _score_of(wide, logits_NE)
        fits = [fit for fit in fits if fit.score == chosen_by]
    if len(fits) != 1:
        named = [f"{fit.score}, renormalised {fit.renormalised}" for fit in fits]
        return f"weights that are {named or 'no softmax and no sigmoid'} of the logits"
    return fits[0]


def _score_of(wide: _Seen, logits_NE: torch.Tensor) -> str:
    """Which function of the logits the selection was made by; empty for another."""
    scores_NE = wide.scores_NE.double().to(logits_NE.device)
    for name, made_NE in (("softmax", logits_NE.softmax(-1)), ("sigmoid", logits_NE.sigmoid())):
        if float((scores_NE - made_NE).abs().max()) <= _FIT[torch.bfloat16]:
            return name
    return ""


def _factors(gate: nn.Module, block: nn.Module) -> Iterator[tuple[Any, str, float]]:
    """Numbers other than 1 that attributes of a block, its modules or its configuration hold under a factor's name."""
    owners: dict[int, Any] = {id(module): module for module in (gate, *block.modules())}
    owners |= {id(config): config for module in list(owners.values()) if (config := getattr(module, "config", None))}
    for owner in owners.values():
        for name, value in list(vars(owner).items()):
            if FACTOR_NAME.search(name) and type(value) in (int, float) and value not in (0, 1):
                yield owner, name, float(value)


def _times(call: tuple[tuple[Any, ...], dict[str, Any]], factor: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A copy of a call's arguments, with the first floating tensor multiplied."""
    args, kwargs = list(copied(call[0])), copied(call[1])
    if factor == 1.0:
        return tuple(args), kwargs
    for holder, key in (*((args, at) for at in range(len(args))), *((kwargs, key) for key in kwargs)):
        if isinstance(holder[key], torch.Tensor) and holder[key].is_floating_point():
            holder[key] = holder[key] * factor
            break
    return tuple(args), kwargs


def _shown(output: Any) -> str:
    parts = output if isinstance(output, tuple | list) else (output,)
    return ", ".join(
        f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
        if isinstance(part, torch.Tensor)
        else type(part).__name__
        for part in parts
    )


def _apart(found_NH: torch.Tensor, expected_NH: torch.Tensor) -> float:
    """The relative difference of two outputs."""
    scale = float(expected_NH.float().norm()) or 1.0
    return float((found_NH.float() - expected_NH.float()).norm()) / scale
