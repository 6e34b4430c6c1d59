"""The base of every report: fields that are counted, merged over steps and ranks, and given to a metrics logger.

A report is a frozen dataclass whose fields say how they merge and what a logger calls them; ``merge`` and ``scalars``
follow. Knows no report. ``html_table`` is how these and other values show themselves in a notebook, and
``metrics_text`` how Prometheus reads them.
"""

from __future__ import annotations

import html
import operator
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

from routeplane.errors import check_type, refused

__all__ = ["Counts", "add_by_key", "first_of", "html_table", "metrics_text", "rule"]

Merge = Callable[[Any, Any], Any]


def rule(*, scalar: str | None = "", merge: Merge = operator.add) -> dict[str, Any]:
    """Say how a field of a report merges and what a logger calls it, as the ``metadata`` of ``dataclasses.field``.

    Args:
        scalar: The name in ``scalars``; an empty string stands for the field's name, None leaves the field out. A
            tuple is logged as its length, a mapping as the sum of its values.
        merge: The two values into one: ``operator.add``, ``max``, ``operator.or_``, ``add_by_key``, ``first_of(n)``.

    Returns:
        Metadata that ``Counts`` reads.

    >>> from dataclasses import dataclass, field
    >>> @dataclass(frozen=True, kw_only=True, slots=True)
    ... class QueueReport(Counts):
    ...     SCOPE: ClassVar[str] = "queue_"
    ...     blocks: int = 0
    ...     peak_bytes: int = field(default=0, metadata=rule(merge=max))
    >>> QueueReport(blocks=2, peak_bytes=7).merge(QueueReport(blocks=1, peak_bytes=5)).scalars()
    {'routeplane/queue_blocks': 3.0, 'routeplane/queue_peak_bytes': 7.0}
    """
    return {"scalar": scalar, "merge": merge}


def add_by_key(left: Mapping[str, int], right: Mapping[str, int]) -> Mapping[str, int]:
    """Add two mappings of counts key by key.

    Args:
        left: Counts by name.
        right: More of them; its new keys come behind those of ``left``.

    Returns:
        A read-only mapping that owns its memory.

    >>> dict(add_by_key({"lost": 1}, {"lost": 2, "late": 4}))
    {'lost': 3, 'late': 4}
    """
    return MappingProxyType({key: left.get(key, 0) + right.get(key, 0) for key in {**left, **right}})


def first_of(limit: int) -> Merge:
    """Keep the first entries of two tuples.

    Args:
        limit: How many entries a merged report keeps.

    Returns:
        A function of two tuples.

    >>> first_of(3)(("a", "b"), ("c", "d"))
    ('a', 'b', 'c')
    """

    def joined(left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*left, *right)[:limit]

    return joined


def html_table(title: str, facts: Mapping[str, object]) -> str:
    """Lay out facts as an HTML table of two columns, for ``_repr_html_``.

    Args:
        title: What stands above them.
        facts: Values by name; numbers are rounded for people, everything is escaped.

    Returns:
        HTML without scripts and styles.

    >>> html_table("<run>", {"tokens": 12_000})
    '<table><caption>&lt;run&gt;</caption><tr><th>tokens</th><td>12,000</td></tr></table>'
    """
    cells = ((html.escape(name), html.escape(_shown(value))) for name, value in facts.items())
    rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells)
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def metrics_text(scalars: Mapping[str, float]) -> str:
    """Write counts in Prometheus' text format, for a page that it scrapes.

    Args:
        scalars: Counts by name, as the ``scalars`` of any report gives them. A name may end in labels, and names that
            differ in these alone follow one another.

    Returns:
        A gauge for each.

    >>> metrics_text({"routeplane/engine_lost": 2.0})
    '# TYPE routeplane_engine_lost gauge\\nrouteplane_engine_lost 2.0\\n'
    >>> print(metrics_text({'routeplane/lost{engine="0"}': 2.0, 'routeplane/lost{engine="1"}': 0.0}), end="")
    # TYPE routeplane_lost gauge
    routeplane_lost{engine="0"} 2.0
    routeplane_lost{engine="1"} 0.0
    """
    check_type(scalars, Mapping, expected="counts by name (a report's scalars())")
    lines, before = [], ""
    for name, value in scalars.items():
        gauge, brace, labels = name.partition("{")
        gauge = gauge.replace("/", "_")
        if gauge != before:
            lines.append(f"# TYPE {gauge} gauge\n")
        before = gauge
        lines.append(f"{gauge}{brace}{labels} {value}\n")
    return "".join(lines)


class Counts:
    """Base of the reports: frozen dataclasses of counts.

    Integer fields add up and are logged under ``SCOPE`` and their name; fields that are reports themselves merge as
    such, and their scalars come under this report's scope; ``rule`` declares everything else. ``derived`` adds scalars
    that follow from several fields, such as shares. Reports pickle, also with read-only mappings.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True, slots=True)
    ... class RetryReport(Counts):
    ...     SCOPE: ClassVar[str] = "retry_"
    ...     tries: int = 0
    ...     failed: int = 0
    ...     def derived(self) -> dict[str, float]:
    ...         return {"failed_share": self.failed / self.tries if self.tries else 0.0}
    >>> RetryReport(tries=4, failed=1).scalars(prefix="")
    {'retry_tries': 4.0, 'retry_failed': 1.0, 'retry_failed_share': 0.25}
    """

    __slots__ = ()
    #: What stands between a logger's prefix and the name of each scalar.
    SCOPE: ClassVar[str] = ""

    def merge(self, other: Self) -> Self:
        """Merge the counts of two steps or ranks.

        Args:
            other: A report of the same class.

        Returns:
            A new report. Raises UsageError (ARGUMENT) for a report of another class.
        """
        if type(other) is not type(self):
            raise refused(f"another {type(self).__name__} to merge", type(other).__name__)
        values = {item.name: item.merge(getattr(self, item.name), getattr(other, item.name)) for item in self._items()}
        return type(self)(**values)

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """List the counts for a metrics logger.

        Args:
            prefix: What each name begins with.

        Returns:
            A flat dict of floats with stable names.
        """
        scope = prefix + self.SCOPE
        found: dict[str, float] = {}
        for item in self._items():
            value = getattr(self, item.name)
            if isinstance(value, Counts):
                found.update(value.scalars(prefix=scope))
            elif item.scalar is not None:
                found[scope + item.scalar] = _number(value)
        return found | {scope + name: value for name, value in self.derived().items()}

    def derived(self) -> dict[str, float]:
        """Scalars that follow from several fields, by name without prefix and scope."""
        return {}

    def _repr_html_(self) -> str:
        counts = {name: int(value) if value.is_integer() else value for name, value in self.scalars(prefix="").items()}
        return html_table(type(self).__name__, counts)

    def _items(self) -> tuple[_Item, ...]:
        return _plan(type(self))  # type: ignore[arg-type]  # mypy takes classes for unhashable

    def __reduce__(self) -> tuple[object, ...]:
        # a read-only mapping does not pickle, and reports cross processes
        values = {item.name: getattr(self, item.name) for item in self._items()}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        return _rebuild, (type(self), plain)


def _rebuild(kind: type[Counts], values: dict[str, Any]) -> Counts:
    return kind(
        **{name: MappingProxyType(value) if isinstance(value, dict) else value for name, value in values.items()}
    )


def _number(value: Any) -> float:
    if isinstance(value, Mapping):
        return float(sum(value.values()))
    return float(len(value)) if isinstance(value, tuple) else float(value)


class _Item(NamedTuple):
    name: str
    scalar: str | None
    merge: Merge


@lru_cache(maxsize=128)
def _plan(kind: Any) -> tuple[_Item, ...]:
    """How the fields of a report are merged and named, in their order."""
    return tuple(_item(declared) for declared in fields(kind))


def _item(declared: Any) -> _Item:
    scalar, merge = declared.metadata.get("scalar", ""), declared.metadata.get("merge", operator.add)
    factory = declared.default_factory
    if isinstance(factory, type) and issubclass(factory, Counts):
        merge = factory.merge
    return _Item(declared.name, declared.name if scalar == "" else scalar, merge)
