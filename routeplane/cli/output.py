"""How commands talk: one JSON object or lines of text on stdout, complaints on stderr, progress on a terminal.

Text is escaped line by line, since names of samples and models come from outside.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from routeplane.errors import Problem, RouteplaneError
from routeplane.inspect.tables import printable

if TYPE_CHECKING:
    import argparse

__all__ = ["Progress", "complain", "flush", "problem_document", "problem_line", "show", "show_error"]

T = TypeVar("T")

#: Seconds after which progress shows, and between two updates.
_PATIENCE, _EVERY = 1.0, 0.2


def show(options: argparse.Namespace, document: Any, lines: Sequence[str]) -> None:
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
    return {"kind": kind, "message": str(error), "problems": [problem_document(problem) for problem in problems]}


def problem_document(problem: Problem) -> dict[str, Any]:
    """A problem as JSON."""
    return {
        "severity": problem.severity,
        "kind": str(problem.kind),
        "message": problem.message,
        "sample": problem.sample,
        "token": problem.token,
        "layer": problem.layer,
    }


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
