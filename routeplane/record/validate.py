"""The rule for rows, as pure functions of an array and a spec. No IO, no records, no Arrow.

``find_problems`` returns findings, ``check_routes`` raises with them, ``all_legal`` is the fast verdict both stand on:
it skips locating, never computes another rule. Where numba is installed, ``kernels`` gives the verdict on large arrays;
numpy locates, and decides where there is none. Statistics of legal rows are ``alarms``. ``WeightsMeaning`` is what
routing weights of a row's slots declare, and ``illegal_weights`` holds them against it.

Axes: S tokens, L captured layers, K top-k slots, N = S*L rows of a block.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from routeplane.errors import DataError, ErrorKind, Problem, UsageError, refused
from routeplane.record.spec import MISSING, NARROW_MISSING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = [
    "WeightsMeaning",
    "all_legal",
    "as_float32",
    "check_routes",
    "find_problems",
    "illegal_weights",
    "kernels_for",
    "kernels_for_bytes",
    "missing_rows",
]

# Rows per block: K int16 columns of 32k rows stay inside a second-level cache.
_BLOCK_ROWS = 32_768
# Bytes from which the kernel is asked (256 KiB: 340 tokens of 48 layers and 8 slots). Loading it costs a process some
# 0.3 s once, and 0.15 s more where nothing is cached yet; so it is left to those that hold sequences of real models,
# for whom numpy's 1 ms per MiB add up. Tests, demos and probes stay below.
_KERNEL_BYTES = 2**18
# of ``kernels``, repeated since asking there would load it
_KERNEL_TOP_K = 32
_KERNEL_TYPES = (np.dtype(np.int16), np.dtype(np.uint8))


def find_problems(
    routes: NDArray[Any], spec: RouteSpec, *, limit: int = 16, first_token: int = 0, sample: str | None = None
) -> list[Problem]:
    """Every way in which ``routes`` breaks the row rule, at most ``limit`` findings, in token order.

    ``routes``: integer array ``[S, L, K]`` of any width; ``first_token`` is the absolute position of its first row.
    A row is legal iff all K ids are -1, or all lie in ``[0, E)`` of its layer and are pairwise distinct.
    An array of the wrong shape or of no integer type is one problem. Nothing is modified, nothing is repaired.
    Raises UsageError (ARGUMENT) for what is not a numpy array (a tensor: ``routes.numpy()``).

    >>> from routeplane import RouteSpec
    >>> rows = np.asarray([[[3, 5]], [[3, 3]]], dtype=np.int16)
    >>> [str(each.kind) for each in find_problems(rows, RouteSpec(num_experts=8, top_k=2, layer_ids=(0,)))]
    ['duplicate_id']
    """
    if limit < 1:
        raise refused("a limit of at least 1", f"{limit}: no findings must mean legal")
    shape_problem = _shape_problem(routes, spec, sample)
    if shape_problem is not None:
        return [shape_problem]
    if _kernel_says_legal(routes, spec):
        return []
    found: list[Problem] = []
    for start, block_SLK in _blocks(routes):
        if _block_is_legal(block_SLK, spec):
            continue
        for token, slot in np.argwhere(~_legal_rows(block_SLK, spec)):
            if len(found) >= limit:
                return found
            row_K = block_SLK[token, slot]
            found.append(
                _row_problem(row_K, spec, slot=int(slot), token=first_token + start + int(token), sample=sample)
            )
    return found


def check_routes(routes: NDArray[Any], spec: RouteSpec, *, first_token: int = 0, sample: str | None = None) -> None:
    """Raise DataError, with the findings of ``find_problems`` attached, unless every row is legal; arguments as there.

    >>> from routeplane import RouteSpec
    >>> check_routes(np.zeros((1, 1, 2), np.int16), RouteSpec(num_experts=8, top_k=2, layer_ids=(3,)), sample="s")
    Traceback (most recent call last):
    ...
    routeplane.errors.DataError: illegal routes: expected pairwise distinct ids, got [0, 0] @ sample s, token 0, layer 3
    """
    found = find_problems(routes, spec, first_token=first_token, sample=sample)
    if found:
        raise DataError.from_problems(found, what="illegal routes")


def all_legal(routes: NDArray[Any], spec: RouteSpec) -> bool:
    """Whether every row of ``routes`` ``[S, L, K]`` is legal; the verdict of ``find_problems`` without locating."""
    if _shape_problem(routes, spec, None) is not None:
        return False
    return _kernel_says_legal(routes, spec) or all(_block_is_legal(block_SLK, spec) for _, block_SLK in _blocks(routes))


def missing_rows(routes: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows of legal ``routes`` ``[S, L, K]`` are MISSING, as a fresh bool array ``[S, L]``.

    One slot decides: in a legal row either all ids are -1 or none is. Of bytes as the ``narrow`` encoding stores them
    two do: in a legal row one 0xFF may be expert 255, and two are MISSING (K = 1 has no such expert).
    """
    if routes.dtype == np.uint8:
        return np.asarray((routes[:, :, :2] == NARROW_MISSING).all(axis=2))
    return np.asarray(routes[:, :, 0] == MISSING)


def kernels_for(rows: NDArray[Any], spec: RouteSpec) -> ModuleType | None:
    """The module ``kernels``, for rows ``[S, L, K]`` that it takes and that are enough to load it for; else None.

    Rows it takes are C-contiguous int16, or narrow bytes, with a top-k that a vector holds.
    """
    if rows.dtype not in _KERNEL_TYPES or not rows.flags.c_contiguous:
        return None
    return kernels_for_bytes(rows.nbytes, spec)


def kernels_for_bytes(nbytes: int, spec: RouteSpec) -> ModuleType | None:
    """The module ``kernels`` where so many bytes of rows are enough to load it for, and a vector holds their top-k."""
    return None if nbytes < _KERNEL_BYTES or spec.top_k > _KERNEL_TOP_K else _kernels()


def _kernel_says_legal(routes_SLK: NDArray[Any], spec: RouteSpec) -> bool:
    """Whether the kernel was asked and found every row legal. False says nothing: numpy has the last word."""
    if routes_SLK.dtype != np.int16:
        return False
    kernels = kernels_for(routes_SLK, spec)
    return kernels is not None and kernels.rows_are_legal(routes_SLK, spec.experts_per_layer)


@cache
def _kernels() -> ModuleType | None:
    """The kernels, loaded when first asked for; None where numba is not installed, or does not work here."""
    try:
        from routeplane.record import kernels
    except ImportError:
        return None
    return kernels


def _shape_problem(routes: NDArray[Any], spec: RouteSpec, sample: str | None) -> Problem | None:
    if not isinstance(routes, np.ndarray):
        raise UsageError(f"expected routes as a numpy array, got {type(routes).__name__}", kind=ErrorKind.ARGUMENT)
    if routes.dtype.kind not in "iu":
        return Problem(
            kind=ErrorKind.DTYPE, message=f"expected routes of an integer type, got {routes.dtype}", sample=sample
        )
    if routes.ndim != 3 or routes.shape[1:] != spec.row_shape:
        layers, top_k = spec.row_shape
        return Problem(
            kind=ErrorKind.SHAPE,
            message=f"expected routes [tokens, {layers} layers, {top_k} top-k], got {list(routes.shape)}",
            sample=sample,
        )
    return None


def _blocks(routes_SLK: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    step = max(1, _BLOCK_ROWS // routes_SLK.shape[1])
    for start in range(0, routes_SLK.shape[0], step):
        yield start, routes_SLK[start : start + step]


def _block_is_legal(block_SLK: NDArray[Any], spec: RouteSpec) -> bool:
    """One verdict for a block, by counting.

    In a legal block the only equal pairs are those inside MISSING rows, K(K-1)/2 each; any duplicate adds one.
    So with ranges in order, the count of equal pairs decides, and no per-row reduction over pairs is needed.
    """
    columns_KN = _columns(block_SLK)
    top_k = columns_KN.shape[0]
    low_N, high_N = columns_KN.min(axis=0), columns_KN.max(axis=0)
    missing_N = (low_N == MISSING) & (high_N == MISSING)
    in_range_N = (low_N >= 0) & _below_width(high_N, spec)
    if not np.all(missing_N | in_range_N):
        return False
    equal_pairs = sum(np.count_nonzero(columns_KN[shift:] == columns_KN[:-shift]) for shift in range(1, top_k))
    return bool(equal_pairs == np.count_nonzero(missing_N) * (top_k * (top_k - 1) // 2))


def _legal_rows(block_SLK: NDArray[Any], spec: RouteSpec) -> NDArray[np.bool_]:
    """The rule itself, per row: bool ``[S, L]``."""
    columns_KN = _columns(block_SLK)
    low_N, high_N = columns_KN.min(axis=0), columns_KN.max(axis=0)
    duplicate_N = np.zeros(columns_KN.shape[1], dtype=np.bool_)
    for shift in range(1, columns_KN.shape[0]):
        duplicate_N |= (columns_KN[shift:] == columns_KN[:-shift]).any(axis=0)
    missing_N = (low_N == MISSING) & (high_N == MISSING)
    legal_N = missing_N | ((low_N >= 0) & _below_width(high_N, spec) & ~duplicate_N)
    return np.asarray(legal_N.reshape(block_SLK.shape[:2]))


def _columns(block_SLK: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(block_SLK.reshape(-1, block_SLK.shape[2]).T)


def _below_width(high_N: NDArray[Any], spec: RouteSpec) -> NDArray[np.bool_]:
    if isinstance(spec.num_experts, int):
        return np.asarray(high_N < spec.num_experts)
    widths_L = np.asarray(spec.num_experts, dtype=np.int64)
    return np.asarray(high_N.reshape(-1, widths_L.size) < widths_L).reshape(-1)


def _row_problem(row_K: NDArray[Any], spec: RouteSpec, *, slot: int, token: int, sample: str | None) -> Problem:
    width = spec.experts_per_layer[slot]
    ids = [int(expert) for expert in row_K]
    if any(expert >= width for expert in ids):
        kind, message = ErrorKind.ID_OUT_OF_RANGE, f"expected ids in [0, {width}), got {ids}"
    elif any(expert < 0 for expert in ids):
        kind, message = ErrorKind.PARTIAL_ROW, f"expected all ids -1 or none negative, got {ids}"
    else:
        kind, message = ErrorKind.DUPLICATE_ID, f"expected pairwise distinct ids, got {ids}"
    return Problem(kind=kind, message=message, sample=sample, token=token, layer=spec.layer_ids[slot])


# ----------------------------------------------------------------------------------------------------------------------
# Routing weights: what they declare, and whether they are that
# ----------------------------------------------------------------------------------------------------------------------

Score = Literal["softmax", "sigmoid"]
Scaling = Literal["none", "in", "out"]
Multiplied = Literal["before", "after"]
WeightDtype = Literal["float32", "bfloat16", "float16"]
_CHOICES = {"score": Score, "scaling": Scaling, "multiplied": Multiplied, "dtype": WeightDtype}
# What the sum of K weights may be off by, as a share: of arithmetic in float32, and of weights that were rounded to 8
# or 11 bits of mantissa.
_SUM_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsMeaning:
    """What the numbers of a column ``route_weights`` are: ``attributes["weights_meaning"]``, as text.

    A bias that only selects is in no weight. Raises DataError (TOKEN_COLUMN) for values that do not exist.

    Attributes:
        score: the function of the router's logits: ``softmax`` over the experts, or ``sigmoid`` of each.
        renormalised: whether the weights were divided by the sum of the K chosen ones. A softmax over the K chosen
            logits is the same as a renormalised softmax over all.
        scaling: whether the model's constant factor on the routed output is ``in`` the weights, or ``out`` of them and
            applied elsewhere; ``none`` where the model has none.
        factor: that constant; 1 where ``scaling`` is ``none``.
        multiplied: ``after`` the expert, with its output, or ``before`` it, with its input (Llama 4).
        dtype: the type that the router computed the weights in, whatever they are stored in.

    >>> meaning = WeightsMeaning(
    ...     score="sigmoid", renormalised=True, scaling="in", factor=2.5, multiplied="after", dtype="float32"
    ... )
    >>> WeightsMeaning.from_text(meaning.to_text()) == meaning
    True
    """

    score: Score
    renormalised: bool
    scaling: Scaling
    factor: float = 1.0
    multiplied: Multiplied
    dtype: WeightDtype

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise _other_meaning(f"{name} of {get_args(choices)}", repr(getattr(self, name)))
        if type(self.renormalised) is not bool:
            raise _other_meaning("renormalised as true or false", repr(self.renormalised))
        if type(self.factor) is not float or not 0 < self.factor < 1e6:
            raise _other_meaning("factor as a float above 0", repr(self.factor))
        if self.scaling == "none" and self.factor != 1.0:
            raise _other_meaning("factor 1.0 where scaling is 'none'", repr(self.factor))

    def to_text(self) -> str:
        """The canonical text: a JSON object with sorted keys and no spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str | None) -> WeightsMeaning:
        """Parse what ``to_text`` wrote. Raises DataError (TOKEN_COLUMN) for anything else, with what was expected."""
        keys = sorted(item.name for item in fields(cls))
        try:
            found = json.loads(text or "null")
        except ValueError:
            found = None
        if not isinstance(found, dict) or sorted(found) != keys:
            raise _other_meaning(f"a JSON object with the keys {keys}", repr(text))
        meaning = cls(**found)
        if meaning.to_text() != text:
            raise _other_meaning(f"the canonical text {meaning.to_text()}", repr(text))
        return meaning

    @property
    def ceiling(self) -> float:
        """The largest weight that is possible, and the sum of a row's weights where they are renormalised."""
        return self.factor if self.scaling == "in" else 1.0

    def tolerance(self, stored: str) -> float:
        """How far a sum of weights may be from the ceiling, for weights that are stored as this type."""
        return self.ceiling * max(_SUM_TOLERANCE[stored], _SUM_TOLERANCE[self.dtype])

    def steps_to(self, other: WeightsMeaning) -> tuple[bool, float]:
        """How weights of this meaning become those of another: whether to renormalise them, then what to multiply by.

        Raises DataError (TOKEN_COLUMN) where no arithmetic leads there: another score function, weights that were
        renormalised already, another place of the product, another factor. The dtype is not looked at.

        >>> plain = WeightsMeaning(
        ...     score="sigmoid", renormalised=False, scaling="out", factor=2.5, multiplied="after", dtype="float32"
        ... )
        >>> from dataclasses import replace
        >>> plain.steps_to(replace(plain, renormalised=True, scaling="in"))
        (True, 2.5)
        """
        apart = [name for name in ("score", "multiplied", "factor") if getattr(self, name) != getattr(other, name)]
        apart += ["renormalised"] if self.renormalised and not other.renormalised else []
        if apart:
            raise _other_meaning(f"{other.to_text()}, or what converts to it (apart: {apart})", self.to_text())
        renormalise = other.renormalised and not self.renormalised
        return renormalise, other.ceiling / (1.0 if renormalise else self.ceiling)


def _other_meaning(expected: str, got: str) -> DataError:
    return DataError(f"expected weights_meaning with {expected}, got {got}", kind=ErrorKind.TOKEN_COLUMN)


def as_float32(weights: NDArray[Any]) -> NDArray[np.float32]:
    """Routing weights as float32: themselves, or the values whose bfloat16 bits these uint16 are."""
    if weights.dtype != np.uint16:
        return weights
    return (weights.astype(np.uint32) << 16).view(np.float32)


def illegal_weights(
    weights_SLK: NDArray[Any], missing_SL: NDArray[np.bool_], *, meaning: WeightsMeaning
) -> NDArray[np.bool_]:
    """Which rows' weights are not what they declare: bool ``[S, L]``.

    Legal are NaN in every slot where the row is MISSING, and elsewhere numbers in ``[0, meaning.ceiling]``, whose sum
    is the ceiling where they are renormalised, and at most that where a softmax made them.

    >>> meaning = WeightsMeaning(
    ...     score="softmax", renormalised=True, scaling="none", multiplied="after", dtype="float32"
    ... )
    >>> weights = np.asarray([[[0.75, 0.25]], [[0.75, 0.75]]], dtype=np.float32)
    >>> illegal_weights(weights, np.zeros((2, 1), dtype=bool), meaning=meaning).tolist()
    [[False], [True]]
    """
    values_SLK = as_float32(weights_SLK)
    tolerance = meaning.tolerance("bfloat16" if weights_SLK.dtype == np.uint16 else "float32")
    nan_SLK = np.isnan(values_SLK)
    with np.errstate(invalid="ignore", over="ignore"):
        least_SL, most_SL, sum_SL = values_SLK.min(axis=2), values_SLK.max(axis=2), values_SLK.sum(axis=2)
        fits_SL = (least_SL >= 0) & (most_SL <= meaning.ceiling + tolerance)
        if meaning.renormalised or meaning.score == "softmax":
            fits_SL &= sum_SL <= meaning.ceiling + tolerance
        if meaning.renormalised:
            fits_SL &= sum_SL >= meaning.ceiling - tolerance
    return np.where(missing_SL, ~nan_SLK.all(axis=2), ~fits_SL)
