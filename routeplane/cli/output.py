"""How commands talk: one JSON object or lines of text on stdout, complaints on stderr, progress on a terminal.

Text is escaped line by line, since names of samples and models come from outside.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from routeplane.errors import Problem, RouteplaneError

if TYPE_CHECKING:
    import argparse

    from routeplane.inspect.diagnose import Finding

__all__ = [
    "Progress",
    "complain",
    "flush",
    "format_diff",
    "format_explanation",
    "format_findings",
    "format_statistics",
    "format_table",
    "printable",
    "problem_line",
    "rounded",
    "show",
    "show_error",
]

T = TypeVar("T")

#: Seconds after which progress shows, and between two updates.
_PATIENCE, _EVERY = 1.0, 0.2


def show(options: argparse.Namespace, document: Any, *, lines: Sequence[str]) -> None:
    """Print the document under ``--json``, else the lines."""
    text = json.dumps(document, sort_keys=True) if options.json else "\n".join(map(printable, lines))
    print(text)


def show_error(error: RouteplaneError, *, as_json: bool) -> None:
    """Print an error in the data on stdout: it is the finding that was asked for."""
    print(json.dumps({"error": _document(error)}, sort_keys=True) if as_json else printable(f"error: {_text(error)}"))


def complain(error: Exception, *, as_json: bool) -> None:
    """Say on stderr why a command could not run."""
    text = json.dumps({"error": _document(error)}, sort_keys=True) if as_json else f"routeplane: {_text(error)}"
    print(text if as_json else printable(text), file=sys.stderr)


def _text(error: Exception) -> str:
    return f"{error.kind}: {error}" if isinstance(error, RouteplaneError) else str(error)


def _document(error: Exception) -> dict[str, Any]:
    kind = str(error.kind) if isinstance(error, RouteplaneError) else type(error).__name__
    problems = error.problems if isinstance(error, RouteplaneError) else ()
    return {"kind": kind, "message": str(error), "problems": [problem.to_dict() for problem in problems]}


def problem_line(problem: Problem, *, source: str | None = None) -> str:
    """A problem as a line of text."""
    return f"{problem.severity}: {problem.kind}: {problem}" + (f" in {source}" if source is not None else "")


def flush() -> None:
    """Where stdout takes no more (a closed pipe, a full disk), let the interpreter's own flush not fail too."""
    if sys.stdout is None:
        return  # closed from the beginning
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


class Progress:
    """One line on stderr that says how far a command is, once it takes over a second; on a terminal alone."""

    def __init__(self, title: str) -> None:
        self._title = printable(title)
        self._started = self._told = time.monotonic()
        self._shown = False
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def tell(self, done: int, total: int | None) -> None:
        """Say that ``done`` records of ``total`` (None: unknown) are through."""
        now = time.monotonic()
        if not self._terminal or now - self._started < _PATIENCE or now - self._told < _EVERY:
            return
        self._told, self._shown = now, True
        share = f" of {total:,} ({done / total:.0%})" if total else ""
        sys.stderr.write(f"\r\x1b[K{self._title}: {done:,} records{share}, {now - self._started:.0f} s")
        sys.stderr.flush()

    def watch(self, items: Iterable[T]) -> Iterator[T]:
        """The same items, told as they pass."""
        for count, item in enumerate(items, start=1):
            yield item
            self.tell(count, None)


# ----------------------------------------------------------------------------------------------------------------------
# Tables of at most 60 columns
# ----------------------------------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    r"""Escape what a terminal would act on: control characters, line breaks, changes of direction.

    Args:
        text: One line.

    Returns:
        The line; each such character as ``\xNN``, ``\uNNNN`` or ``\n``.

    >>> printable("sample\x1b[2J\nok")
    'sample\\x1b[2J\\nok'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def rounded(value: object) -> str:
    """Write a value for people: three significant digits, thousands apart.

    >>> rounded(0.123456), rounded(1234567), rounded(None)
    ('0.123', '1,234,567', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def format_table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Lay out rows of the same keys as right-aligned columns under a head.

    >>> format_table([{"layer": 1, "peak": 2.0}, {"layer": 12, "peak": 1.5}])
    ['layer  peak', '    1     2', '   12   1.5']
    """
    if not rows:
        return []
    cells = [
        [name.replace("_", " ") for name in rows[0]],
        *([rounded(value) for value in row.values()] for row in rows),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """What stands out, one paragraph each: severity and title, the place, the detail and how sure it is."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.severity}: {finding.title}")
        lines += [f"  {text}" for text in (finding.where, finding.detail, finding.confidence) if text]
    return lines


def format_statistics(document: Mapping[str, Any]) -> list[str]:
    """``RouteStatistics.to_dict()`` as text."""
    coverage = ", ".join(f"{state} {count:,}" for state, count in document["coverage"].items())
    lines = [
        f"{document['records']:,} records, {document['tokens']:,} tokens ({coverage or 'no rows'})",
        f"missing {document['missing_share']:.2%} of fed rows; weights versions {_versions(document)}",
        *(f"{kind}: {_counts(states)}" for kind, states in document["by_kind"].items()),
    ]
    longest = document["equal_rows"]["longest"]
    if longest:
        place = f"sample {longest['sample']}, token {longest['token']}"
        lines.append(f"longest run of equal rows: {longest['length']} tokens, {place}")
    lines += [
        f"drift {step['before']} -> {step['after']}: mean {step['mean']:.3f}, "
        f"max {step['max']:.3f} (layer {step['layer']})"
        for step in document["drift"]
    ]
    lines += [
        f"missing rows: sample {_name(worst['key'])}: {worst['missing']} of {worst['tokens']} tokens, "
        f"the first at {worst['token']}"
        for worst in document["worst"]
    ]
    return [*lines, *format_table([_layer(row) for row in document["layers"]])]


def _layer(row: Mapping[str, Any]) -> dict[str, object]:
    return {
        "layer": row["layer"],
        "rows": row["rows"],
        "used": f"{row['experts'] - row['dead'] if row['rows'] else 0}/{row['experts']}",
        "effective": row["effective"],
        "peak": row["imbalance"],
        "gini": row["gini"],
        "overlap": row["overlap"],
    }


def format_diff(document: Mapping[str, Any]) -> list[str]:
    """``RouteDiff.to_dict()`` as text."""
    lines = [
        f"{document['samples']:,} samples on both sides, {document['equal_samples']:,} equal; "
        f"{document['left_only']:,} here only, {document['right_only']:,} there only",
        f"{document['compared_rows']:,} rows compared: {document['flipped_share']:.2%} flipped; "
        f"{document['one_sided_rows']:,} rows on one side only; "
        f"{document['token_mismatches']:,} samples of other tokens",
    ]
    for side in ("left", "right"):
        if document[f"layers_{side}_only"]:
            lines.append(f"layers on the {side} only: {', '.join(map(str, document[f'layers_{side}_only']))}")
    lines += [_divergence(worst) for worst in document["worst"]]
    return [*lines, *format_table(document["layers"])]


def format_explanation(document: Mapping[str, Any]) -> list[str]:
    """``Explanation.to_dict()`` as text: the hops of one token, then its rows with their neighbours."""
    sampled, captured = document["sampled"], document["captured"]
    rows = [
        {
            "layer": row["layer"],
            **{name: _ids(row[name]) for name in ("before", "row", "after")},
            "kept": row["kept_from_before"],
        }
        for row in document["layers"]
    ]
    return [
        f"sample {_name(document['key'])}, group {document['group']}",
        f"token {document['token']} of {document['tokens']}, id {document['token_id']}, "
        f"logprob {rounded(document['logprob']) or 'none'}",
        f"sampled:  {sampled['kind']}, role {sampled['role']}, call {sampled['call']}, "
        f"weights version {sampled['weights_version']}, span {sampled['span']}",
        f"captured: {captured['state']}, call {captured['call']}, weights version {captured['weights_version']}, "
        f"capture {captured['capture']}",
        f"stored:   {document['where']}; checksum {document['checksum']} "
        f"{'agrees' if document['intact'] else 'DOES NOT AGREE'}",
        *(f"column {name}: {value}" for name, value in document["columns"].items()),
        *(f"attribute {name}: {value}" for name, value in document["attributes"].items()),
        *format_table(
            [{name.replace("kept_from_before", "kept"): value for name, value in row.items()} for row in rows]
        ),
    ]


def _divergence(worst: Mapping[str, Any]) -> str:
    said = [f"{worst['flipped']} of {worst['compared']} rows flipped"]
    if worst["token"] is not None:
        said.append(f"the first at token {worst['token']}, layer {worst['layer']}")
    if worst["token_mismatch"] is not None:
        said.append(f"other tokens from {worst['token_mismatch']} on")
    return f"sample {_name(worst['key'])}: {', '.join(said)}"


def _name(key: Sequence[object]) -> str:
    return "/".join(map(str, key))


def _counts(states: Mapping[str, int]) -> str:
    return ", ".join(f"{state} {count:,}" for state, count in states.items())


def _versions(document: Mapping[str, Any]) -> str:
    versions = document["weights_versions"]
    return f"{versions[0]} to {versions[-1]} ({len(versions)})" if versions else "unknown"


def _ids(row: Sequence[int] | None) -> str:
    return "MISSING" if row is None else " ".join(map(str, row))
