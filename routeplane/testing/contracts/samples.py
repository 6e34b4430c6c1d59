"""What the suites of transports share: small records, damage, two sides at once, and what counts as the same.

Axes: S tokens, L layers, K slots.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Self

import numpy as np

from routeplane.errors import RouteplaneError
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import RouteSpec

__all__ = ["PATIENCE_S", "SPEC", "beforehand", "beside", "damaged", "facts", "group_of", "sample", "turns_of"]

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
