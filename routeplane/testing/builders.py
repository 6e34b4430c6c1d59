"""Records whose every value says which sample, token and layer it belongs to, so that misplacement shows.

Plain numpy and base; needs no test framework. A record made here is valid like any other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from routeplane.errors import RouteplaneError
from routeplane.record.aligned import AlignedColumn
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import MISSING, RouteSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spans import CaptureState

__all__ = [
    "PATIENCE_S",
    "SPEC",
    "WATERMARK_EXPERTS",
    "beforehand",
    "beside",
    "damaged",
    "facts",
    "group_of",
    "sample",
    "turns_of",
    "watermark",
    "watermarked_columns",
    "watermarked_record",
    "watermarked_spec",
]

#: Router width of a watermarked spec: the largest prime an id may stay below, so that strides never share a factor.
WATERMARK_EXPERTS = 32_749


def watermark(sample: Any, token: Any, *, layer: Any, k: Any) -> NDArray[np.int16]:
    """Expert ids that name their place: int16, by broadcasting four whole numbers or integer arrays.

    Slot ``k`` is ``(start + k * stride) mod WATERMARK_EXPERTS``, so the ids of a row are distinct. Start and stride
    together are unique for up to 64 samples of 509 tokens and any layer (K >= 2); the start alone (K = 1) is for up to
    7 samples of 64 tokens with layers below 64.
    """
    start = np.asarray(layer, dtype=np.int64) + 64 * np.asarray(token) + 4_096 * np.asarray(sample)
    stride = 1 + (np.asarray(token, dtype=np.int64) + 509 * np.asarray(sample)) % (WATERMARK_EXPERTS - 1)
    return np.asarray((start + np.asarray(k) * stride) % WATERMARK_EXPERTS, dtype=np.int16)


def watermarked_spec(*, layers: Sequence[int] = (1, 2, 5), top_k: int = 4) -> RouteSpec:
    """A spec wide enough for ``watermark``."""
    return RouteSpec(num_experts=WATERMARK_EXPERTS, top_k=top_k, layer_ids=tuple(layers), model="watermarked")


def watermarked_record(
    sample_index: int,
    *,
    num_tokens: int,
    spec: RouteSpec,
    prompt_tokens: int | None = None,
    missing: Iterable[int | tuple[int, int]] = (),
    token_ids: Sequence[int] | None = None,
    last_token_fed: bool = False,
    columns: Mapping[str, Any] | None = None,
) -> RouteRecord:
    """A one-call record of sample ``sample-<sample_index>`` with watermarked rows.

    ``prompt_tokens``: default half of the tokens, at least one. ``missing``: tokens whose rows were lost, or
    ``(token, layer id)`` where only that layer's was; their captures say ``lost`` and ``partial``. The last token is
    not fed, as engines leave it, unless ``last_token_fed``. ``token_ids``: default ``1000 * sample_index + token + 1``.
    ``columns``: such as ``watermarked_columns`` makes.
    Log-probabilities of generated tokens are ``-(1 + sample_index + token / 1024)``, NaN for the prompt.
    """
    prompt = max(1, num_tokens // 2) if prompt_tokens is None else prompt_tokens
    token_S = np.arange(num_tokens)
    layer_L1 = np.asarray(spec.layer_ids)[:, None]
    routes_SLK = watermark(sample_index, token_S[:, None, None], layer=layer_L1, k=np.arange(spec.top_k))
    for place in missing:
        token, slot = (place, slice(None)) if isinstance(place, int) else (place[0], spec.slot(place[1]))
        routes_SLK[token, slot] = MISSING
    if not last_token_fed:
        routes_SLK[-1] = MISSING
    return RouteRecord(
        sample_id=f"sample-{sample_index}",
        token_ids=np.asarray(1_000 * sample_index + token_S + 1 if token_ids is None else token_ids),
        routes=routes_SLK,
        spans=_spans(prompt, num_tokens),
        captures=_captures(routes_SLK, last_token_fed=last_token_fed),
        spec=spec,
        logprobs=np.where(token_S < prompt, np.nan, -(1 + sample_index + token_S / 1024)).astype(np.float32),
        columns=columns or {},
    )


def watermarked_columns(sample_index: int, *, num_tokens: int, spec: RouteSpec) -> dict[str, AlignedColumn]:
    """A column of each form (format 1.1), whose values name sample and token as those of ``watermarked_record`` do.

    ``scalar``: float64, sampled. ``fixed``: float32 ``[S, L, K]`` over ``layers`` and ``topk``, fed: the watermarks as
    floats. ``ragged``: int32, sampled: token t has t modulo 3 entries. ``nullable``: int64, fed: every third entry is
    unknown.

    >>> spec = watermarked_spec()
    >>> columns = watermarked_columns(2, num_tokens=4, spec=spec)
    >>> columns["ragged"].tolist(), columns["nullable"].tolist()
    ([[], [2002], [2003, 2003], []], [2001, None, 2003, 2004])
    """
    token_S = np.arange(num_tokens)
    name_S = 1_000 * sample_index + token_S + 1
    layer_L1, slot_K = np.asarray(spec.layer_ids)[:, None], np.arange(spec.top_k)
    marks_SLK = watermark(sample_index, token_S[:, None, None], layer=layer_L1, k=slot_K)
    lists = [[int(name)] * (token % 3) for token, name in enumerate(name_S)]
    return {
        "fixed": AlignedColumn.of(marks_SLK.astype(np.float32), aligned="fed", axes=("layers", "topk")),
        "nullable": AlignedColumn.of(name_S, aligned="fed", valid=token_S % 3 != 1),
        "ragged": AlignedColumn.of_lists(lists, dtype="int32", aligned="sampled"),
        "scalar": AlignedColumn.of(name_S.astype(np.float64), aligned="sampled"),
    }


def _spans(prompt: int, num_tokens: int) -> tuple[Span, ...]:
    spans = []
    if prompt:
        spans.append(Span(start=0, stop=prompt, kind="prompt", role="user", call="call-0", weights_version=None))
    if prompt < num_tokens:
        spans.append(
            Span(start=prompt, stop=num_tokens, kind="generation", role="assistant", call="call-0", weights_version=1)
        )
    return tuple(spans)


def _captures(routes_SLK: NDArray[np.int16], *, last_token_fed: bool) -> tuple[Capture, ...]:
    missing_SL = routes_SLK[:, :, 0] == MISSING
    states: list[CaptureState] = [
        "lost" if row_L.all() else "partial" if row_L.any() else "captured" for row_L in missing_SL
    ]
    if not last_token_fed:
        states[-1] = "not_fed"
    captures: list[Capture] = []
    for state, run in groupby(range(len(states)), key=states.__getitem__):
        tokens = list(run)
        version = 1 if state in ("captured", "partial") else None
        captures.append(
            Capture(start=tokens[0], stop=tokens[-1] + 1, call="call-0", weights_version=version, state=state)
        )
    return tuple(captures)


#: Narrow enough for either encoding.
SPEC = RouteSpec(num_experts=64, top_k=2, layer_ids=(1, 4, 7), model="contract")

#: Far beyond what a waiting thread needs; a deadlock shows as a failure, not as a run without an end.
PATIENCE_S = 60.0


def sample(index: int, *, tokens: int = 6, spec: RouteSpec = SPEC, **changes: Any) -> RouteRecord:
    """A record whose ids name sample, token and layer; the last token was not fed."""
    token_S11 = np.arange(tokens)[:, None, None]
    layer_L1 = np.asarray(spec.layer_ids)[:, None]
    routes_SLK = (13 * index + 3 * token_S11 + 7 * layer_L1 + np.arange(spec.top_k)) % min(spec.experts_per_layer)
    routes_SLK[-1] = -1
    whole: dict[str, Any] = {
        "sample_id": f"sample-{index}",
        "token_ids": 1_000 * index + np.arange(tokens),
        "routes": routes_SLK.astype(np.int16),
        "spans": (Span(start=0, stop=tokens, kind="generation", role="assistant", call="c", weights_version=3),),
        "captures": (
            Capture(start=0, stop=tokens - 1, call="c", weights_version=3, state="captured"),
            Capture(start=tokens - 1, stop=tokens, call="c", weights_version=None, state="not_fed"),
        ),
        "spec": spec,
    }
    return RouteRecord(**{**whole, **changes})


def group_of(count: int, *, prompt: int = 4) -> list[RouteRecord]:
    """Records of one prompt; all but the first carry its rows by reference."""
    first = sample(0, tokens=prompt + 3, group="g")
    shared = Prefix(sample_id=first.sample_id, stop=prompt, checksum=first.checksum)
    others = []
    for index in range(1, count):
        whole = sample(index, tokens=prompt + 3, group="g")
        token_ids = np.concatenate([first.token_ids[:prompt], whole.token_ids[prompt:]])
        others.append(
            replace(
                whole,
                token_ids=token_ids,
                routes=whole.routes[prompt:],
                routes_start=prompt,
                prefix=shared,
                checksum=None,
            )
        )
    return [first, *others]


def turns_of(count: int, *, tokens: int = 100) -> list[RouteRecord]:
    """One rollout recorded after each turn: each record begins with the rows of the one before, in one group."""
    last = sample(0, tokens=tokens * count)
    return [
        replace(last.slice(0, tokens * (at + 1)), sample_id=f"turn-{at}", group="rollout", attributes={}, checksum=None)
        for at in range(count)
    ]


class _UncheckedRecord(RouteRecord):
    """A record whose first ``verify``, which the writer calls, accepts any content."""

    def verify(self) -> Self:
        """Accept the first call, which is the writer's; compare the checksum in every later one."""
        if not hasattr(self, "_seen"):
            object.__setattr__(self, "_seen", True)
            return self
        return super().verify()


def damaged(record: RouteRecord, *, noticed: bool) -> RouteRecord:
    """The same record with one row's ids in another order: legal, under the old checksum.

    ``noticed``: by a writer; otherwise it slips through, as what breaks on the way would.
    """
    content = {item.name: getattr(record, item.name) for item in fields(record)}
    routes_SLK = record.routes.copy()
    routes_SLK[0, 0] = routes_SLK[0, 0][::-1]
    return (RouteRecord if noticed else _UncheckedRecord)(**{**content, "routes": routes_SLK})


@contextlib.contextmanager
def beside(work: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Run ``work`` in a thread meanwhile; what it raised. Fails where it does not end."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except RouteplaneError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield raised
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "expected the other side to end, got one that waits"


def facts(records: Sequence[RouteRecord]) -> list[str]:
    """What must arrive as it left, short enough to read where it did not: keys, and checksums as said and as found."""
    return [f"{record.key} {record.checksum:016x} {record.compute_checksum():016x}" for record in records]


@contextlib.contextmanager
def beforehand(work: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Run ``work`` first, where the reader cannot be there meanwhile."""
    work()
    yield []
