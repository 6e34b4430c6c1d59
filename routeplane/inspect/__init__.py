"""Look at recorded routes: what a run holds, whether it is healthy, and where it is not.

``summarise`` and ``check`` look at one source, ``collect`` counts, ``compare`` sets two sources side by side,
``explain`` follows one token, ``diagnose`` names causes, ``write_report`` makes one page of all. Names that need an
extra load on first use: the report (``routeplane[report]``) and the Ray Data set (``routeplane[ray]``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from routeplane.inspect.audit import AuditReport, audit_batch, load_batch
from routeplane.inspect.compare import Divergence, RouteDiff, compare, compare_records
from routeplane.inspect.diagnose import Examiner, Finding, find_findings
from routeplane.inspect.export import to_arrow, to_pandas, to_polars
from routeplane.inspect.inputs import SALVAGE, SourceSet, find_sources
from routeplane.inspect.look import ArchiveSummary, Explanation, StreamCheck, StreamSummary, check, explain, summarise
from routeplane.inspect.overview import Overview, survey
from routeplane.inspect.statistics import Collector, RouteStatistics, collect

if TYPE_CHECKING:
    from routeplane.inspect.page import render_report, view_sample, write_report
    from routeplane.inspect.ray_data import collect_on_ray, dataset, filter_batches, records_of

__all__ = [
    "SALVAGE",
    "ArchiveSummary",
    "AuditReport",
    "Collector",
    "Divergence",
    "Examiner",
    "Explanation",
    "Finding",
    "Overview",
    "RouteDiff",
    "RouteStatistics",
    "SourceSet",
    "StreamCheck",
    "StreamSummary",
    "audit_batch",
    "check",
    "collect",
    "collect_on_ray",
    "compare",
    "compare_records",
    "dataset",
    "explain",
    "filter_batches",
    "find_findings",
    "find_sources",
    "load_batch",
    "records_of",
    "render_report",
    "summarise",
    "survey",
    "to_arrow",
    "to_pandas",
    "to_polars",
    "view_sample",
    "write_report",
]

#: Names that load an extra, and their module.
_ON_FIRST_USE = {
    **dict.fromkeys(("collect_on_ray", "dataset", "filter_batches", "records_of"), "routeplane.inspect.ray_data"),
    **dict.fromkeys(("render_report", "view_sample", "write_report"), "routeplane.inspect.page"),
}


def __getattr__(name: str) -> Any:
    """Load a name that needs an extra. Raises MissingExtraError (an ImportError) where that is not installed."""
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
