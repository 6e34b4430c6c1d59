"""Statistics counted token by token in plain Python: what the tables are compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from routeplane.inspect.statistics import OVERLAP_EVERY
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span


@dataclass
class Plain:
    """Counts by readable keys."""

    load: Counter[tuple[str, int | None, int, int]] = field(default_factory=Counter)
    shared: Counter[int] = field(default_factory=Counter)
    neighbours: Counter[int] = field(default_factory=Counter)
    runs: Counter[int] = field(default_factory=Counter)
    states: Counter[tuple[str, str]] = field(default_factory=Counter)
    positions: Counter[tuple[int, bool]] = field(default_factory=Counter)


def at(intervals: Sequence[Span] | Sequence[Capture], token: int) -> Span | Capture:
    """The interval that holds a token."""
    return next(item for item in intervals if item.start <= token < item.stop)


def count_plainly(records: Sequence[RouteRecord], *, position_bin: int) -> Plain:
    """Look at every id by itself."""
    plain = Plain()
    for record in records:
        run = 1
        for token in range(record.routes_start, record.num_tokens):
            span, capture = at(record.spans, token), at(record.captures, token)
            assert isinstance(span, Span)
            assert isinstance(capture, Capture)
            plain.states[span.kind, capture.state] += 1
            if capture.state != "not_fed":
                plain.positions[token // position_bin, capture.state in ("captured", "cached")] += 1
            rows = record.routes[token - record.routes_start].tolist()
            before = record.routes[token - record.routes_start - 1].tolist() if token > record.routes_start else None
            equal = before is not None
            for layer, row in enumerate(rows):
                present = row[0] >= 0
                if present:
                    for expert in row:
                        plain.load[span.kind, capture.weights_version, layer, expert] += 1
                if before is not None and present and before[layer][0] >= 0:
                    if token % OVERLAP_EVERY == 0:
                        plain.neighbours[layer] += 1
                        plain.shared[layer] += len(set(row) & set(before[layer]))
                    equal &= set(row) == set(before[layer])
                else:
                    equal = False
            if equal and record.token_ids[token] != record.token_ids[token - 1]:
                run += 1
            else:
                plain.runs[run] += run > 1
                run = 1
        plain.runs[run] += run > 1
    return plain
