"""What every engine that returns routes promises: checks over a small client, and the tests to inherit.

An engine is anything that answers an ``EngineRequest`` with an ``EngineAnswer``; ``HttpEngine`` is the client of an
OpenAI-compatible server (all in ``capture.http.openai``). ``check_engine`` asks some hundred short requests and
names what is wrong (``EngineFault``): plain requests first; where their rows are wrong already, nothing further is
asked. Every other check compares rows with a second reading of the same tokens, alone and past the prefix cache, or
with the rows of a reference.

    class TestMyServer(EngineContract):
        engine = HttpEngine("http://127.0.0.1:8000", SPEC)
        spec = SPEC

``routeplane probe`` runs the same checks. Needs base only: no test runner and no client library.

Axes: R rows, S tokens, D layers as the engine counts them, L captured layers, K slots. Rows are compared as sets.
"""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from routeplane.capture.http.openai import Engine, EngineAnswer, EngineChoice, EngineRequest
from routeplane.capture.layers import LayerOrder, orders_of_axis
from routeplane.errors import DataError, ErrorKind, UsageError, refused
from routeplane.record.parse import check_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.capture.layers import LayerAxis
    from routeplane.record.spec import RouteSpec

__all__ = ["CheckOptions", "EngineCheck", "EngineContract", "EngineFault", "EngineFinding", "check_engine"]


class EngineFault(StrEnum):
    """How an engine's rows can be wrong. A value keeps its meaning.

    >>> EngineFault.ROWS_SHIFTED.value
    'rows_shifted'
    """

    # every request
    NO_ROUTES = "no_routes"
    UNREADABLE = "unreadable"  # not in the form that it claims
    ROW_MISSING = "row_missing"  # fewer than prompt + generated - 1
    ROW_EXTRA = "row_extra"
    LAYER_COUNT = "layer_count"
    LAYERS_SHIFTED = "layers_shifted"
    LAYERS_REVERSED = "layers_reversed"
    LAYERS_OTHER = "layers_other"  # a layer without a router has ids
    IDS_WRAPPED = "ids_wrapped"  # below 0, or above the last expert
    IDS_REPEATED = "ids_repeated"  # one expert twice in a row
    ROWS_UNWRITTEN = "rows_unwritten"  # zeros in a layer with a router
    ROWS_CONSTANT = "rows_constant"  # one row for all tokens
    ROWS_SHIFTED = "rows_shifted"  # a row of the token before or behind
    ROWS_STALE = "rows_stale"  # one row again and again
    ROWS_FOREIGN = "rows_foreign"  # rows of another request
    ROWS_OTHER = "rows_other"  # a token generated and the same token read have other rows
    # what a request asks besides
    CACHE_ROWS = "cache_rows"
    CHOICE_ROWS = "choice_rows"
    STOP_ROWS = "stop_rows"
    STREAM_ROWS = "stream_rows"
    ABORT_ROWS = "abort_rows"
    TRIM_ROWS = "trim_rows"
    CONCURRENT_ROWS = "concurrent_rows"
    STALE_WEIGHTS = "stale_weights"  # rows, or a version, of the weights before an update


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFinding:
    """One thing that is wrong. ``check``: which of the checks saw it; ``token``: the first row that is wrong.

    >>> found = EngineFinding(kind=EngineFault.ROW_MISSING, check="rows", message="expected 14 rows, got 13")
    >>> str(found)
    'row_missing: expected 14 rows, got 13 @ check rows'
    """

    kind: EngineFault
    check: str
    message: str
    token: int | None = None

    def __str__(self) -> str:
        where = f"check {self.check}" + (f", token {self.token}" if self.token is not None else "")
        return f"{self.kind}: {self.message} @ {where}"


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How an engine is asked.

    Args:
        vocabulary: Token ids to draw prompts from; all below the model's own number.
        requests: Plain requests, and pairs of prompts that differ in one token.
        at_once: Requests in flight where they are many.
        cache_tokens: Tokens of the prompt that is asked twice: several blocks of the prefix cache.
        max_flipped: Largest share of an answer's rows that may be other experts than when the tokens are read again.
        min_overlap: How much of a row's experts, over all layers, must be the same for it not to count as such: 0 is
            what chance gives, 1 all. Take less where a row has few slots in all (top-1, few layers).
        axis: What the engine's layer axis counts.
        seed: Of prompts and sampling.

    >>> CheckOptions(vocabulary=512).requests
    6
    """

    vocabulary: int = 256
    requests: int = 6
    at_once: int = 8
    cache_tokens: int = 80
    max_flipped: float = 0.02
    min_overlap: float = 0.75
    axis: LayerAxis = "decoder"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("vocabulary", 64), ("requests", 1), ("at_once", 2), ("cache_tokens", 16)):
            if check_count(getattr(self, name), name, below=2**31) < least:
                raise refused(f"{name} of {least} or more", str(getattr(self, name)))
        for name in ("max_flipped", "min_overlap"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise refused(f"{name} in [0, 1]", repr(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class EngineCheck:
    """What the checks saw.

    Attributes:
        findings: What is wrong.
        checks: Every check with ``held``, ``found``, ``left out`` (plain requests were wrong already) or why it could
            not be made.
        requests: How many were asked.
        rows: How many rows were compared.
        flipped: How many of them were other experts than when read again.

    >>> EngineCheck(findings=(), checks={"rows": "held"}, requests=1, rows=14, flipped=0).to_dict()["holds"]
    True
    """

    findings: tuple[EngineFinding, ...]
    checks: Mapping[str, str]
    requests: int
    rows: int
    flipped: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        findings = [
            {"kind": str(one.kind), "check": one.check, "message": one.message, "token": one.token}
            for one in self.findings
        ]
        figures = {"requests": self.requests, "rows": self.rows, "flipped": self.flipped}
        return {"holds": not findings, "findings": findings, "checks": dict(self.checks), **figures}


def check_engine(engine: Engine, spec: RouteSpec, *, options: CheckOptions | None = None) -> EngineCheck:
    """Ask an engine some hundred short requests, and say what is wrong with its routes.

    Args:
        engine: Who is asked; ``update`` is called once, at the end.
        spec: What its rows must mean.
        options: How it is asked.

    Returns:
        The findings, and what became of each check. Raises TransportError where the engine does not answer.

    Example:
        ``check_engine(HttpEngine("http://127.0.0.1:8000", spec), spec).findings``
    """
    session = _Session(engine, spec, options or CheckOptions())
    findings: list[EngineFinding] = []
    checks: dict[str, str] = {}
    wrong = False
    for name, (check, kind) in _CHECKS.items():
        if wrong:
            checks[name] = "left out"
            continue
        try:
            found = [replace(one, check=name) for one in check(session)]
            checks[name] = "found" if found else session.not_offered or "held"
        except UsageError as error:
            found, checks[name] = [], f"not offered: {error.message}"
        except DataError as error:
            found, checks[name] = [_finding(kind or EngineFault.UNREADABLE, error.message, name)], "found"
        findings += found
        wrong, session.not_offered = bool(found) and kind is None, ""
    return EngineCheck(
        findings=tuple(findings), checks=checks, requests=session.requests, rows=session.rows, flipped=session.flipped
    )


# ----------------------------------------------------------------------------------------------------------------------
# Rows, and what explains wrong ones
# ----------------------------------------------------------------------------------------------------------------------


def _finding(kind: EngineFault, message: str, check: str = "", token: int | None = None) -> EngineFinding:
    return EngineFinding(kind=kind, message=message, check=check, token=token)


@dataclass(kw_only=True, eq=False)
class _Answer:
    """One choice of a request: its tokens, and its rows as they came and in the spec's layers, sorted."""

    token_ids: tuple[int, ...]
    prompt: int
    raw_RDK: NDArray[Any] | None
    rows_RLK: NDArray[np.int64]
    choice: EngineChoice
    cached: int | None = None

    @property
    def expected(self) -> int:
        return len(self.token_ids) - bool(self.choice.generation_ids)


class _Session:
    """One run of the checks: asks, reads tokens again, and remembers every row with its token and its request."""

    def __init__(self, engine: Engine, spec: RouteSpec, options: CheckOptions) -> None:
        self.engine, self.spec, self.options = engine, spec, options
        self.requests = self.rows = self.flipped = 0
        self.not_offered = ""
        self.cache_is_wrong = False
        self._random = np.random.default_rng(options.seed)
        self._readings: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self._seen: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self.plain: list[_Answer] = []
        chance = float(np.mean([spec.top_k / width for width in spec.experts_per_layer]))
        self.enough = chance + options.min_overlap * (1.0 - chance)

    def prompt(self, size: int) -> tuple[int, ...]:
        """Different tokens from all over the vocabulary, but its first ids, which are special ones."""
        lowest = min(32, self.options.vocabulary // 8)
        drawn = self._random.choice(np.arange(lowest, self.options.vocabulary), size, replace=False)
        return tuple(drawn.tolist())

    def number(self, low: int, high: int) -> int:
        """A number in ``[low, high)``."""
        return int(self._random.integers(low, high))

    def request(self, prompt: Sequence[int], **fields: Any) -> EngineRequest:
        """A request with a salt and a seed of its own."""
        self.requests += 1
        named = {"salt": f"routeplane-{self.options.seed}-{self.requests}", "seed": self.requests}
        return EngineRequest(prompt_ids=tuple(prompt), **{**named, **fields})

    def ask(self, request: EngineRequest) -> list[_Answer]:
        """The choices of an answer."""
        answer = self.engine.ask(request)
        return [
            _Answer(
                token_ids=(*answer.prompt_ids, *choice.generation_ids),
                prompt=len(answer.prompt_ids),
                raw_RDK=choice.routes,
                rows_RLK=self._captured(choice.routes),
                choice=choice,
                cached=answer.cached,
            )
            for choice in answer.choices
        ]

    def ask_one(self, prompt: Sequence[int], **fields: Any) -> _Answer:
        """The first choice of an answer to a request of one's own."""
        answers = self.ask(self.request(prompt, **fields))
        if not answers:
            raise DataError("expected an answer with choices, got none", kind=ErrorKind.SHAPE)
        return answers[0]

    def read(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """The rows of these tokens as a prompt ``[S, L, K]``, sorted: the reference's, else the engine's own."""
        key = tuple(token_ids)
        if key not in self._readings:
            known = self.engine.reference(key)
            rows = self.ask_one(key).rows_RLK if known is None else np.sort(np.asarray(known, dtype=np.int64), axis=2)
            self._readings[key] = rows
            self.remember(key, rows)
        return self._readings[key]

    def forget(self) -> None:
        """Other weights have other rows."""
        self._readings.clear()

    def remember(self, token_ids: Sequence[int], rows_RLK: NDArray[np.int64]) -> None:
        """Keep the rows of a request, to know them where they come again."""
        count = min(len(token_ids), len(rows_RLK))
        self._seen.append((np.asarray(token_ids[:count]), rows_RLK[:count]))

    def same(self, left_RLK: NDArray[np.int64], right_RLK: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether rows are those of one token, ``[R]``."""
        same_R: NDArray[np.bool_] = self.overlap(left_RLK, right_RLK).mean(axis=1) >= self.enough
        return same_R

    def overlap(self, left_RLK: NDArray[np.int64], right_RLK: NDArray[np.int64]) -> NDArray[np.float64]:
        """The share of ids in common, ``[R, L]``."""
        both = (left_RLK[..., :, None] == right_RLK[..., None, :]).any(axis=-1)
        share_RL: NDArray[np.float64] = both.mean(axis=-1)
        return share_RL

    def wrong(self, answer: _Answer, want_RLK: NDArray[np.int64], *, first_row: int = 0) -> NDArray[np.int64]:
        """Which rows of an answer are not those wanted; none where they are fewer than the limit allows."""
        got_RLK = answer.rows_RLK
        count = min(len(got_RLK), len(want_RLK) - first_row)
        wrong_R = np.flatnonzero(~self.same(got_RLK[:count], want_RLK[first_row : first_row + count]))
        self.rows, self.flipped = self.rows + count, self.flipped + len(wrong_R)
        return wrong_R if len(wrong_R) > self.options.max_flipped * count else wrong_R[:0]

    def is_foreign(
        self, answer: _Answer, want_RLK: NDArray[np.int64], wrong_R: NDArray[np.int64], *, first_row: int = 0
    ) -> bool:
        """Whether rows that differ are, on either side, mostly those of other tokens of another request."""
        own_S = np.asarray(answer.token_ids)
        others = [
            (tokens, rows)
            for tokens, rows in self._seen
            if len(rows) and (tokens[:9] != own_S[: len(tokens)][:9]).any()
        ]
        if not others:
            return False
        tokens_N, rows_NLK = (np.concatenate(parts) for parts in zip(*others, strict=True))
        found = 0
        for row in wrong_R:
            elsewhere_N = tokens_N != own_S[first_row + row]
            sides = (answer.rows_RLK[row], want_RLK[first_row + row])
            found += any((self.same(rows_NLK, side_LK[None]) & elsewhere_N).any() for side_LK in sides)
        return found > len(wrong_R) / 2

    def _captured(self, routes: NDArray[Any] | None) -> NDArray[np.int64]:
        if routes is None or routes.ndim != 3 or routes.shape[2] != self.spec.top_k:
            return np.zeros((0, *self.spec.row_shape), dtype=np.int64)
        if max(self.slots) >= routes.shape[1]:
            return np.zeros((0, *self.spec.row_shape), dtype=np.int64)
        return np.sort(routes[:, self.slots].astype(np.int64), axis=2)

    @property
    def slots(self) -> list[int]:
        """Where the captured layers stand on the engine's axis."""
        return list(range(self.spec.num_layers)) if self.options.axis == "captured" else list(self.spec.layer_ids)


# Fewer tokens together than the smallest block of a prefix cache, for engines that know no salt.
_PROMPT, _GENERATED = 9, 6
_Findings = Iterator[EngineFinding]


def _check_routes(session: _Session) -> _Findings:
    """Plain requests bring arrays of the spec's layers and slots."""
    for _ in range(session.options.requests):
        session.plain.append(session.ask_one(session.prompt(_PROMPT), max_tokens=_GENERATED))
    spec, deepest = session.spec, max(session.slots)
    for answer in session.plain:
        if answer.raw_RDK is None or not len(answer.raw_RDK):
            yield _finding(EngineFault.NO_ROUTES, f"expected routes of {len(answer.token_ids)} tokens, got none")
            return
        _, depth, slots = answer.raw_RDK.shape
        exact = spec.num_layers if session.options.axis == "captured" else spec.decoder_layers
        if depth <= deepest or exact not in (None, depth) or slots != spec.top_k:
            wanted = f"{exact or f'{deepest + 1} or more'} layers of {spec.top_k} slots"
            yield _finding(EngineFault.LAYER_COUNT, f"expected {wanted}, got {depth} of {slots}")
            return


def _check_rows(session: _Session) -> _Findings:
    """A row for each token that was fed: all but the last one."""
    for answer in session.plain:
        count = len(answer.rows_RLK)
        if count != answer.expected:
            kind = EngineFault.ROW_MISSING if count < answer.expected else EngineFault.ROW_EXTRA
            tokens = f"{answer.prompt} prompt and {len(answer.token_ids) - answer.prompt} generated tokens"
            yield _finding(kind, f"expected {answer.expected} rows of {tokens}, got {count}", "", count)
            return


def _check_layers(session: _Session) -> _Findings:
    """Routers' layers hold K different experts in every row, others hold nothing, and tokens differ."""
    raw_NDK = np.concatenate([np.asarray(answer.raw_RDK, dtype=np.int64) for answer in session.plain])
    found = _misplaced_layers(session, raw_NDK) or _bad_ids(session, raw_NDK[:, session.slots])
    if found is not None:
        yield found


def _bad_ids(session: _Session, rows_NLK: NDArray[np.int64]) -> EngineFinding | None:
    spec = session.spec
    sorted_NLK = np.sort(rows_NLK, axis=2)
    outside_NL = (sorted_NLK[..., 0] < 0) | (sorted_NLK[..., -1] >= np.asarray(spec.experts_per_layer))
    zero_NL = ~rows_NLK.any(axis=2)
    # of one slot a zero is expert 0; a layer of nothing else is not
    empty_L = zero_NL.all(axis=0) & (spec.top_k > 1 or len(rows_NLK) > 32)
    unwritten_NL = np.asarray(zero_NL & empty_L if spec.top_k == 1 else zero_NL)
    repeated_NL = (np.diff(sorted_NLK, axis=2) == 0).any(axis=2)
    constant_L = (sorted_NLK == sorted_NLK[:1]).all(axis=(0, 2)) & (
        np.asarray(spec.experts_per_layer) >= 2 * spec.top_k
    )
    rules: tuple[tuple[EngineFault, NDArray[np.bool_], str], ...] = (
        (EngineFault.IDS_WRAPPED, outside_NL, "ids of the router's experts"),
        (EngineFault.ROWS_UNWRITTEN, unwritten_NL, f"{spec.top_k} chosen experts"),
        (EngineFault.IDS_REPEATED, repeated_NL, "different experts in a row"),
        (EngineFault.ROWS_CONSTANT, np.broadcast_to(constant_L, zero_NL.shape), "rows that differ with their tokens"),
    )
    for kind, flags_NL, what in rules:
        if flags_NL.any():
            row, slot = np.argwhere(flags_NL)[0]
            share = f"{flags_NL.any(axis=1).mean():.0%} of the rows"
            ids = f"{rows_NLK[row, slot].tolist()[:8]} in layer {spec.layer_ids[slot]}"
            return _finding(kind, f"expected {what}, got {ids}, and so in {share}")
    return None


def _kind_of(order: LayerOrder) -> EngineFault:
    return EngineFault.LAYERS_REVERSED if order.by is None else EngineFault.LAYERS_SHIFTED


def _misplaced_layers(session: _Session, raw_NDK: NDArray[np.int64]) -> EngineFinding | None:
    """Layers without a router that hold ids, or an order in which the rows are the reference's."""
    depth = raw_NDK.shape[1]
    routing_D = np.isin(np.arange(depth), session.slots)
    filled_D = raw_NDK.any(axis=2).mean(axis=0)
    orders = orders_of_axis(depth)
    known = [session.engine.reference(answer.token_ids) for answer in session.plain]
    if all(rows is not None for rows in known):
        return _order_of_reference(session, orders, known)
    if not filled_D[~routing_D].any():
        return None
    fitting = [order for order in orders if ((filled_D[list(order.source)] > 0.5) == routing_D).all()]
    filled = np.flatnonzero(~routing_D & (filled_D > 0)).tolist()
    if not fitting:
        message = f"expected no ids in layers without a router, got some in slots {filled}"
        return _finding(EngineFault.LAYERS_OTHER, message)
    order = min(fitting, key=_depth_trend(session)) if len(fitting) > 1 else fitting[0]
    return _finding(_kind_of(order), f"expected no ids in layers without a router, got some in slots {filled}: {order}")


def _order_of_reference(session: _Session, orders: Sequence[LayerOrder], known: Sequence[Any]) -> EngineFinding | None:
    def agreement(source: Sequence[int]) -> float:
        slots = [source[slot] for slot in session.slots]
        shares = []
        for answer, rows in zip(session.plain, known, strict=True):
            got_RLK = np.sort(np.asarray(answer.raw_RDK)[:, slots].astype(np.int64), axis=2)
            count = min(len(got_RLK), len(rows))
            shares.append(session.same(got_RLK[:count], np.sort(np.asarray(rows)[:count], axis=2)).mean())
        return float(np.mean(shares))

    depth = np.asarray(session.plain[0].raw_RDK).shape[1]
    if agreement(range(depth)) >= 0.5:
        return None
    best = max(orders, key=lambda order: agreement(order.source))
    share = agreement(best.source)
    return _finding(_kind_of(best), f"expected the reference's rows, got {best}") if share >= 0.5 else None


def _depth_trend(session: _Session) -> Callable[[LayerOrder], float]:
    """How an order goes with depth: the deeper a layer, the more its choice depends on the tokens before."""
    shares = []
    for _ in range(session.options.requests):
        tail = session.prompt(6)
        left, right = (session.ask_one((*session.prompt(8), *tail)).raw_RDK for _ in range(2))
        if left is not None and right is not None:
            both = (left[-5:, :, :, None] == right[-5:, :, None, :]).any(axis=-1).mean(axis=(0, 2))
            shares.append(both)
    mean_D = np.mean(shares, axis=0)

    def trend(order: LayerOrder) -> float:
        kept_L = mean_D[[order.source[slot] for slot in session.slots]]
        return float(np.polyfit(np.arange(len(kept_L)), kept_L, 1)[0]) if len(kept_L) > 1 else 0.0

    return trend


def _check_offset(session: _Session) -> _Findings:
    """A row belongs to its token: generated or read it is the same, and it changes where the token changes."""
    for answer in session.plain:
        session.remember(answer.token_ids, answer.rows_RLK)
        session.read(answer.token_ids)
    found: list[EngineFinding] = []
    for answer in session.plain:
        want_RLK = session.read(answer.token_ids)
        wrong_R = session.wrong(answer, want_RLK)
        if len(wrong_R):
            kind, said = _explain(session, answer, want_RLK, wrong_R)
            message = f"expected the rows that the tokens have when read, got {said} in {len(wrong_R)} rows"
            found.append(_finding(kind, message, "", int(wrong_R[0])))
    if all(one.kind == EngineFault.ROWS_OTHER for one in found):
        found += _changed_token(session)
    if found:
        yield min(found, key=lambda one: one.kind == EngineFault.ROWS_OTHER)


def _explain(
    session: _Session, answer: _Answer, want_RLK: NDArray[np.int64], wrong_R: NDArray[np.int64]
) -> tuple[EngineFault, str]:
    got_RLK = answer.rows_RLK
    for by in (1, -1, 2, -2):
        source_R = wrong_R - by
        there_R = (source_R >= 0) & (source_R < len(want_RLK))
        same = session.same(got_RLK[wrong_R[there_R]], want_RLK[source_R[there_R]])
        if np.count_nonzero(same) > len(wrong_R) / 2:
            return EngineFault.ROWS_SHIFTED, f"those of {abs(by)} token {'before' if by > 0 else 'behind'}"
    before_R = wrong_R[wrong_R > 0]
    if len(before_R) > 1 and session.same(got_RLK[before_R], got_RLK[before_R - 1]).mean() > 0.5:
        return EngineFault.ROWS_STALE, "the same row again"
    if session.is_foreign(answer, want_RLK, wrong_R):
        return EngineFault.ROWS_FOREIGN, "those of another request"
    return EngineFault.ROWS_OTHER, "others"


def _changed_token(session: _Session) -> _Findings:
    size, reach = 14, 3
    changes = []
    for _ in range(session.options.requests):
        drawn, at = session.prompt(size + 1), session.number(reach, size - reach)
        left, right = (
            session.ask_one(tokens).rows_RLK
            for tokens in (drawn[:size], (*drawn[:at], drawn[size], *drawn[at + 1 : size]))
        )
        if min(len(left), len(right)) > at + reach:
            near = slice(at - reach, at + reach + 1)
            changes.append(1.0 - session.overlap(left[near], right[near]))
    mean_OL = np.mean(changes, axis=0) if changes else np.zeros((2 * reach + 1, 1))
    most_L = mean_OL.max(axis=0)
    first_L = (mean_OL >= most_L / 2).argmax(axis=0) - reach
    weak_L = (mean_OL[reach] < most_L / 4) | (first_L < 0)
    moved_L = weak_L & (most_L >= 0.25)
    if moved_L.any():
        by = int(np.median(first_L[moved_L]))
        layers = [session.spec.layer_ids[slot] for slot in np.flatnonzero(moved_L)]
        message = f"expected the row of a token to change with it, got the row {by:+d} from it in layers {layers[:8]}"
        yield _finding(EngineFault.ROWS_SHIFTED, message)
    elif most_L.max() < 0.05:
        yield _finding(EngineFault.ROWS_OTHER, "expected the row of a token to change with it, got rows that do not")


# ----------------------------------------------------------------------------------------------------------------------
# Requests that ask for more
# ----------------------------------------------------------------------------------------------------------------------


def _judge(session: _Session, answer: _Answer, kind: EngineFault, *, first_row: int = 0, spare: int = 0) -> _Findings:
    """Compare an answer's rows with a second reading of its tokens. ``spare``: rows that may come beyond."""
    expected, count = answer.expected - first_row, len(answer.rows_RLK)
    if not expected <= count <= expected + spare:
        yield _finding(kind, f"expected {expected} rows of {len(answer.token_ids)} tokens, got {count}")
        return
    want_RLK = session.read(answer.token_ids)
    wrong_R = session.wrong(answer, want_RLK, first_row=first_row)
    if not len(wrong_R):
        return
    row = int(wrong_R[0])
    if kind not in _OWN and session.is_foreign(answer, want_RLK, wrong_R, first_row=first_row):
        kind = EngineFault.ROWS_FOREIGN
    said = "zeros" if not answer.rows_RLK[row].any() else "others"
    message = f"expected the rows that the tokens have when read alone, got {said} in {len(wrong_R)} of {count} rows"
    yield _finding(kind, message, "", first_row + row)


# these bring rows of other requests by their own fault
_OWN = (EngineFault.CACHE_ROWS, EngineFault.ABORT_ROWS, EngineFault.CONCURRENT_ROWS, EngineFault.STALE_WEIGHTS)


def _first(*parts: _Findings) -> _Findings:
    yield from itertools.islice(itertools.chain(*parts), 1)


def _check_cache(session: _Session) -> _Findings:
    """A prompt that is asked again, and one that goes on from it, have the rows that they have without a cache."""
    prompt = session.prompt(session.options.cache_tokens)
    session.ask_one(prompt, salt=None, max_tokens=2)
    again = session.ask_one(prompt, salt=None, max_tokens=2)
    longer = session.ask_one((*prompt, *session.prompt(5)), salt=None, max_tokens=2)
    if again.cached == 0 and longer.cached == 0:
        session.not_offered = "not offered: no token came from a prefix cache"
    for finding in _first(*(_judge(session, answer, EngineFault.CACHE_ROWS) for answer in (again, longer))):
        session.cache_is_wrong = True
        yield finding


def _check_choices(session: _Session) -> _Findings:
    """Each choice has the rows of its own tokens."""
    answers = session.ask(session.request(session.prompt(_PROMPT), choices=3, max_tokens=8))
    if len({answer.token_ids for answer in answers}) < 2:
        raise refused("several choices that differ", f"{len(answers)}")
    yield from _first(*(_judge(session, answer, EngineFault.CHOICE_ROWS) for answer in answers))


def _check_stop(session: _Session) -> _Findings:
    """What a stop string or a stop token ends has the rows of the tokens that it holds."""
    prompt, seed = session.prompt(_PROMPT), session.requests
    whole = session.ask_one(prompt, seed=seed, max_tokens=12).choice
    words = whole.text.split()
    stops: list[dict[str, Any]] = [{"stop": words[len(words) // 2]}] if words else []
    stops += [{"stop_ids": (whole.generation_ids[5],)}] if len(whole.generation_ids) > 5 else []
    answers = [session.ask_one(prompt, seed=seed, max_tokens=12, **stop) for stop in stops]
    stopped = [answer for answer in answers if answer.choice.finish_reason == "stop"]
    if not stopped:
        raise refused("an answer that a stop string or token ends", "none")
    # an engine that leaves out the tokens of a stop string has fed the last one that it left
    yield from _first(*(_judge(session, answer, EngineFault.STOP_ROWS, spare=1) for answer in stopped))


def _check_stream(session: _Session) -> _Findings:
    """The chunks of a stream bring the rows of the whole."""
    answers = [session.ask_one(session.prompt(_PROMPT), stream=True, max_tokens=8) for _ in range(2)]
    if all(answer.raw_RDK is None for answer in answers):
        raise refused("routes in a stream", "chunks without them")
    yield from _first(*(_judge(session, answer, EngineFault.STREAM_ROWS) for answer in answers))


def _check_abort(session: _Session) -> _Findings:
    """What an aborted request brought is right so far, and the requests behind it have their own rows."""
    left = session.ask_one(session.prompt(_PROMPT), stream=True, hang_up_after=3, max_tokens=40)
    behind = [session.ask_one(session.prompt(_PROMPT), max_tokens=_GENERATED) for _ in range(2)]
    for answer in behind:
        yield from _judge(session, answer, EngineFault.ABORT_ROWS)
    if 0 < len(left.rows_RLK) <= len(left.token_ids):
        wrong_R = session.wrong(left, session.read(left.token_ids))
        if len(wrong_R):
            message = "expected the rows of the tokens so far, got others"
            yield _finding(EngineFault.ABORT_ROWS, message, "", int(wrong_R[0]))


def _check_trims(session: _Session) -> _Findings:
    """One token, rows from a token on, and a prompt that is cut have the rows of the tokens that are left."""
    yield from _judge(session, session.ask_one(session.prompt(_PROMPT), max_tokens=1), EngineFault.TRIM_ROWS)
    refusals = []
    for trim, size in (("first_row", 5), ("keep_prompt", 7)):
        try:
            answer = session.ask_one(session.prompt(12), max_tokens=4, **{trim: size})
        except UsageError:
            refusals.append(trim)
            continue
        whole = len(answer.rows_RLK) == answer.expected and answer.prompt == 12
        refusals += [trim] if whole else []  # a server that does not know the field
        yield from _judge(
            session, answer, EngineFault.TRIM_ROWS, first_row=size if trim == "first_row" and not whole else 0
        )
    session.not_offered = f"held, without {' and '.join(refusals)}" if refusals else ""


def _check_concurrency(session: _Session) -> _Findings:
    """Requests at once have the rows that they have alone."""
    many = session.options.at_once
    asked = [session.request(session.prompt(_PROMPT), max_tokens=8) for _ in range(2 * many)]
    with ThreadPoolExecutor(many) as pool:
        answers = list(itertools.chain.from_iterable(pool.map(session.ask, asked)))
    yield from _first(*(_judge(session, answer, EngineFault.CONCURRENT_ROWS) for answer in answers))


def _check_update(session: _Session) -> _Findings:
    """Behind an update, version and rows are those of the new weights, also for a prompt that was cached before."""
    prompt = session.prompt(48)
    cached: dict[str, Any] = {} if session.cache_is_wrong else {"salt": None}
    before = session.ask_one(prompt, max_tokens=2, **cached)
    version = session.engine.update()
    if version is None:
        raise refused("an engine whose weights can be updated", "one without update()")
    session.forget()
    after = session.ask_one(prompt, max_tokens=2, **cached)
    said = after.choice.weights_version
    if said is not None and str(said) != str(version):
        yield _finding(EngineFault.STALE_WEIGHTS, f"expected version {version}, got {said}")
        return
    fresh = session.read(prompt)
    count = min(map(len, (fresh, before.rows_RLK)))
    if session.same(fresh[:count], before.rows_RLK[:count]).all():
        yield _finding(EngineFault.STALE_WEIGHTS, "expected rows of other weights, got those before the update")
    yield from _judge(session, after, EngineFault.STALE_WEIGHTS)
    session.not_offered = "held, but answers name no version" if said is None else ""


#: Each check, in order, and the fault that an unreadable answer to it is. Those without one are plain requests.
_CHECKS: Mapping[str, tuple[Callable[[_Session], _Findings], EngineFault | None]] = {
    "routes": (_check_routes, None),
    "rows": (_check_rows, None),
    "layers": (_check_layers, None),
    "offset": (_check_offset, None),
    "cache": (_check_cache, EngineFault.CACHE_ROWS),
    "choices": (_check_choices, EngineFault.CHOICE_ROWS),
    "stop": (_check_stop, EngineFault.STOP_ROWS),
    "stream": (_check_stream, EngineFault.STREAM_ROWS),
    "abort": (_check_abort, EngineFault.ABORT_ROWS),
    "trims": (_check_trims, EngineFault.TRIM_ROWS),
    "concurrency": (_check_concurrency, EngineFault.CONCURRENT_ROWS),
    "update": (_check_update, EngineFault.STALE_WEIGHTS),
}


class EngineContract:
    """One engine, asked once for all tests of the class. A check that it does not offer is skipped.

    Set ``spec``, and ``engine`` or ``ask``; ``update`` and ``reference`` where there are such.

    Example::

        class TestMyServer(EngineContract):
            spec = SPEC
            engine = HttpEngine("http://127.0.0.1:8000", SPEC)
    """

    #: What the rows must mean.
    spec: ClassVar[RouteSpec]
    #: The client; by default the methods below are it.
    engine: Engine | None = None
    #: How it is asked.
    options: ClassVar[CheckOptions] = CheckOptions()

    def ask(self, request: EngineRequest) -> EngineAnswer:
        """Answer one request; by default ``engine`` does."""
        if self.engine is None:
            raise refused("an engine, or ask()", "neither")
        return self.engine.ask(request)

    def update(self) -> object:
        """Load other weights and return their version; None: cannot be tried."""
        return None if self.engine is None else self.engine.update()

    def reference(self, token_ids: Sequence[int]) -> NDArray[Any] | None:
        """The true rows ``[S, L, K]``, of a trainer's own forward for example; None: the engine's own are compared."""
        return None if self.engine is None else self.engine.reference(token_ids)

    def result(self) -> EngineCheck:
        """What the checks saw; made once for each class."""
        if "_result" not in vars(type(self)):
            type(self)._result = check_engine(self, self.spec, options=self.options)
        return type(self)._result

    _result: ClassVar[EngineCheck]

    def _require(self, *checks: str) -> None:
        result = self.result()
        said = {name: result.checks[name] for name in checks}
        found = [str(one) for one in result.findings if one.check in checks]
        assert not found, "; ".join(found)
        unasked = [f"{name}: {what}" for name, what in said.items() if not what.startswith("held")]
        if unasked:
            raise unittest.SkipTest("; ".join(unasked))

    def test_routes_come_in_the_layers_of_the_spec(self) -> None:
        """Every plain request brings rows of all layers and slots, with legal ids where a router is."""
        self._require("routes", "layers")

    def test_rows_are_those_of_prompt_and_generation(self) -> None:
        """P prompt and G generated tokens have P + G - 1 rows."""
        self._require("rows")

    def test_a_row_belongs_to_its_token(self) -> None:
        """A token generated and the same token read have one row, which changes with the token."""
        self._require("offset")

    def test_cached_prefixes_keep_their_rows(self) -> None:
        """With the prefix cache and without it, rows and their number are the same."""
        self._require("cache")

    def test_choices_have_rows_of_their_own(self) -> None:
        """Several choices of a request each have the rows of their tokens."""
        self._require("choices")

    def test_stops_keep_rows_and_tokens_aligned(self) -> None:
        """What a stop string or token ends has the rows of what is left."""
        self._require("stop")

    def test_a_stream_brings_the_rows_of_the_whole(self) -> None:
        """The chunks together are the whole."""
        self._require("stream")

    def test_an_abort_leaves_no_rows_behind(self) -> None:
        """The request behind an aborted one has its own rows."""
        self._require("abort")

    def test_trims_leave_the_rows_of_what_is_left(self) -> None:
        """One token, a first row, a prompt that is cut."""
        self._require("trims")

    def test_requests_at_once_keep_their_rows_apart(self) -> None:
        """Requests in flight together have the rows that they have alone."""
        self._require("concurrency")

    def test_an_update_is_seen_in_version_and_rows(self) -> None:
        """Behind an update there are no rows of the weights before."""
        self._require("update")
