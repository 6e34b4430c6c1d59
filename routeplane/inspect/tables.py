"""Numbers as text for people: tables on a terminal, plain aligned text in a pipe.

The one importer of rich here; decides how values look, never what they are.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from routeplane.inspect.explain import Explanation

__all__ = ["format_diff", "format_explanation", "format_statistics"]

#: Width of what goes into a pipe: tables are never wrapped there.
_PIPE_WIDTH = 200


def format_statistics(document: Mapping[str, Any], *, terminal_width: int | None = None) -> str:
    """``RouteStatistics.to_dict()`` as text; styled where ``terminal_width`` is given."""
    coverage = ", ".join(f"{state} {count:,}" for state, count in document["coverage"].items())
    lines = [
        f"{document['records']:,} records, {document['tokens']:,} tokens ({coverage or 'no rows'})",
        f"missing {document['missing_share']:.3%} of fed rows; weights versions {_versions(document)}",
        *(f"{kind}: {_counts(states)}" for kind, states in document["by_kind"].items()),
    ]
    longest = document["equal_rows"]["longest"]
    if longest:
        place = f"sample {longest['sample']}, token {longest['token']}"
        lines.append(f"longest run of equal rows: {longest['length']} tokens, {place}")
    lines += [
        f"drift {step['before']} -> {step['after']}: mean {step['mean']:.4f}, "
        f"max {step['max']:.4f} (layer {step['layer']})"
        for step in document["drift"]
    ]
    lines += [
        f"missing rows: sample {'/'.join(map(str, worst['key']))}: {worst['missing']} of {worst['tokens']} tokens"
        for worst in document["worst"]
    ]
    return _render([*lines, _table(document["layers"])], terminal_width)


def format_diff(document: Mapping[str, Any], *, terminal_width: int | None = None) -> str:
    """``RouteDiff.to_dict()`` as text."""
    lines = [
        f"{document['samples']:,} samples on both sides, {document['equal_samples']:,} equal; "
        f"{document['left_only']:,} here only, {document['right_only']:,} there only",
        f"{document['compared_rows']:,} rows compared: {document['flipped_share']:.4%} flipped; "
        f"{document['one_sided_rows']:,} rows on one side only; "
        f"{document['token_mismatches']:,} samples of other tokens",
    ]
    for side in ("left", "right"):
        if document[f"layers_{side}_only"]:
            lines.append(f"layers on the {side} only: {', '.join(map(str, document[f'layers_{side}_only']))}")
    lines += [_divergence(worst) for worst in document["worst"]]
    return _render([*lines, _table(document["layers"])], terminal_width)


def format_explanation(found: Explanation, *, terminal_width: int | None = None) -> str:
    """An Explanation as text: the hops of one token, then its rows with their neighbours."""
    document = found.to_dict()
    sampled, captured = document["sampled"], document["captured"]
    lines = [
        f"sample {'/'.join(map(str, document['key']))}, group {document['group']}",
        f"token {document['token']} of {document['tokens']}, id {document['token_id']}, logprob {document['logprob']}",
        f"sampled:  {sampled['kind']}, role {sampled['role']}, call {sampled['call']}, "
        f"weights version {sampled['weights_version']}, span {sampled['span']}",
        f"captured: {captured['state']}, call {captured['call']}, weights version {captured['weights_version']}, "
        f"capture {captured['capture']}",
        f"stored:   {document['where']}; checksum {document['checksum']} "
        f"{'agrees' if document['intact'] else 'DOES NOT AGREE'}",
        *(f"column {name}: {value}" for name, value in document["columns"].items()),
        *(f"attribute {name}: {value}" for name, value in document["attributes"].items()),
    ]
    rows = [{**row, **{name: _ids(row[name]) for name in ("before", "row", "after")}} for row in document["layers"]]
    return _render([*lines, _table(rows)], terminal_width)


def _divergence(worst: Mapping[str, Any]) -> str:
    name = "/".join(map(str, worst["key"]))
    said = [f"{worst['flipped']} of {worst['compared']} rows flipped"]
    if worst["token"] is not None:
        said.append(f"the first at token {worst['token']}, layer {worst['layer']}")
    if worst["token_mismatch"] is not None:
        said.append(f"other tokens from {worst['token_mismatch']} on")
    return f"sample {name}: {', '.join(said)}"


def _counts(states: Mapping[str, int]) -> str:
    return ", ".join(f"{state} {count:,}" for state, count in states.items())


def _versions(document: Mapping[str, Any]) -> str:
    versions = document["weights_versions"]
    return f"{versions[0]} to {versions[-1]} ({len(versions)})" if versions else "unknown"


def _ids(row: Sequence[int] | None) -> str:
    return "MISSING" if row is None else " ".join(map(str, row))


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0] if rows else ():
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def _render(parts: Sequence[str | Table], terminal_width: int | None) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=terminal_width or _PIPE_WIDTH,
        force_terminal=terminal_width is not None,
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    for part in parts:
        console.print(part)
    return out.getvalue().rstrip("\n")
