"""The commands that look at routes: ``stats``, ``diff``, ``explain``, ``report``. Thin calls over ``inspect``.

``cli`` adds them to its parser; each loads only what it runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeplane.errors import ErrorKind, MissingExtraError, refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from routeplane.inspect.compare import RouteDiff
    from routeplane.inspect.inputs import SourceSet
    from routeplane.inspect.report import SampleView
    from routeplane.inspect.statistics import RouteStatistics
    from routeplane.record.spec import RouteSpec

__all__ = ["add_commands", "require_report", "write_comparison"]

#: Samples that a report shows token by token.
SHOWN_SAMPLES = 4


def add_commands(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the commands to ``argparse``'s subparsers; returns their parsers."""
    stats = commands.add_parser("stats", help="what the routes look like: load, entropy, overlap, drift, coverage")
    stats.add_argument("sources", nargs="+", metavar="SOURCE", help="streams, archives, or quoted patterns")
    stats.set_defaults(run=_stats)
    diff = commands.add_parser("diff", help="where two sources choose other experts")
    diff.add_argument("left", metavar="SOURCE")
    diff.add_argument("right", metavar="SOURCE")
    diff.set_defaults(run=_diff)
    explain = commands.add_parser("explain", help="every hop of one token's rows")
    explain.add_argument("source", metavar="SOURCE")
    explain.add_argument("sample", metavar="SAMPLE", help="sample id, or sample/attempt/segment")
    explain.add_argument("token", metavar="TOKEN", type=int, help="absolute position in the record")
    explain.set_defaults(run=_explain)
    report = commands.add_parser("report", help="one HTML file: what is wrong first, pictures, the worst samples")
    report.add_argument("sources", nargs="+", metavar="SOURCE", help="streams, archives, or quoted patterns")
    report.add_argument("--against", metavar="SOURCE", help="another capture of the same samples, to show flips")
    report.add_argument("--out", type=Path, default=Path("routes.html"), help="the file to write")
    report.add_argument("--png", type=Path, metavar="FOLDER", help="write each picture as a PNG file too")
    report.set_defaults(run=_report)
    for command in (stats, diff, explain, report):
        command.add_argument("--layer", type=int, action="append", metavar="ID", help="only this decoder layer; repeat")
    for command in (stats, diff, report):
        command.add_argument(
            "--samples", action="append", metavar="SAMPLE", help="only this sample; repeat for more of them"
        )
    for command in (stats, report):
        command.add_argument("--ray", action="store_true", help="count the sources as tasks of a Ray cluster")
    return [stats, diff, explain, report]


def _stats(options: argparse.Namespace) -> int:
    from routeplane.inspect.inputs import find_sources

    found = _collect(find_sources(options.sources), options)
    document = found.to_dict()
    _show(options, document, lambda: _tables().format_statistics(document, terminal_width=_terminal_width()))
    return 0


def _diff(options: argparse.Namespace) -> int:
    from routeplane.inspect.inputs import find_sources

    found = _compare(find_sources([options.left]), find_sources([options.right]), options)
    document = found.to_dict()
    _show(options, document, lambda: _tables().format_diff(document, terminal_width=_terminal_width()))
    return 0 if found.same else 1


def _explain(options: argparse.Namespace) -> int:
    from routeplane.inspect.explain import explain
    from routeplane.inspect.inputs import find_sources

    record = find_sources([options.source]).find(options.sample)
    found = explain(record, options.token, layer_ids=tuple(options.layer) if options.layer else None)
    _show(options, found.to_dict(), lambda: _tables().format_explanation(found, terminal_width=_terminal_width()))
    return 0 if found.intact else 1


def _report(options: argparse.Namespace) -> int:
    pictures = _write_report(options)
    document = {"report": str(options.out), "bytes": options.out.stat().st_size, "pictures": list(map(str, pictures))}
    _show(options, document, lambda: f"wrote {options.out}")
    return 0


def write_comparison(source: str, against: str, *, out: Path) -> None:
    """``routeplane report SOURCE --against AGAINST --out OUT``, for a run that ends with one. Makes the folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _write_report(
        argparse.Namespace(sources=[source], against=against, out=out, png=None, layer=None, samples=None, ray=False)
    )


def require_report() -> Any:
    """The module that writes reports. Raises MissingExtraError."""
    try:
        from routeplane.inspect import report
    except ImportError as error:
        raise _missing("report", error) from error
    return report


def _write_report(options: argparse.Namespace) -> list[Path]:
    from routeplane.inspect.inputs import find_sources

    report = require_report()
    sources = find_sources(options.sources)
    against = find_sources([options.against]) if options.against else None
    statistics = _collect(sources, options)
    diff = None if against is None else _compare(sources, against, options)
    page = report.render_report(
        statistics,
        title=f"routes of {statistics.spec.model or 'a run'}",
        diff=diff,
        samples=_worst_samples(sources, against, statistics=statistics, diff=diff, options=options),
        notes=[f"from {', '.join(sources.paths)}", *([f"against {', '.join(against.paths)}"] if against else [])],
    )
    report.write_report(options.out, page)
    return list(report.write_pictures(options.png, statistics, diff=diff)) if options.png else []


def _worst_samples(
    sources: SourceSet,
    against: SourceSet | None,
    *,
    statistics: RouteStatistics,
    diff: RouteDiff | None,
    options: argparse.Namespace,
) -> list[SampleView]:
    """The samples with the most missing and the most flipped rows, in turn, each once."""
    from routeplane.inspect.report import view_sample

    ranked = [[worst.key for worst in statistics.worst], [worst.key for worst in diff.worst] if diff else []]
    turns = [key for rank in range(SHOWN_SAMPLES) for keys in ranked if rank < len(keys) for key in [keys[rank]]]
    chosen = list(dict.fromkeys(turns))[:SHOWN_SAMPLES]
    names = ["/".join(map(str, key)) for key in chosen]
    if not names:
        return []
    mine = {record.key: record for record in sources.records(layer_ids=options.layer, samples=names)}
    theirs = {record.key: record for record in against.records(samples=names)} if against is not None else {}
    return [view_sample(mine[key], against=theirs.get(key)) for key in chosen if key in mine]


def _collect(sources: SourceSet, options: argparse.Namespace) -> RouteStatistics:
    spec = sources.spec.select(options.layer) if options.layer else sources.spec
    found = _counted(sources, spec, options)
    _require_samples(found.coverage.records, options)
    return found


def _counted(sources: SourceSet, spec: RouteSpec, options: argparse.Namespace) -> RouteStatistics:
    from routeplane.inspect.statistics import collect

    if options.ray:
        try:
            from routeplane.inspect.ray_data import collect_on_ray, joined_cluster
        except ImportError as error:
            raise _missing("ray", error) from error
        with joined_cluster():
            return collect_on_ray(sources, layer_ids=options.layer, samples=options.samples)
    return collect(sources.records(layer_ids=options.layer, samples=options.samples), spec)


def _compare(left: SourceSet, right: SourceSet, options: argparse.Namespace) -> RouteDiff:
    from routeplane.inspect.compare import compare

    def read(sources: SourceSet) -> Any:
        return sources.records(layer_ids=options.layer, samples=options.samples)

    specs = tuple(side.spec.select(options.layer) if options.layer else side.spec for side in (left, right))
    lookup = right.lookup() if not (options.layer or options.samples) else None
    found = compare(read(left), lookup if lookup is not None else read(right), specs=(specs[0], specs[1]))
    _require_samples(found.samples + found.left_only + found.right_only, options)
    return found


def _require_samples(records: int, options: argparse.Namespace) -> None:
    """Of samples that are nowhere, every number is 0 and nothing differs: a mistyped name is not that."""
    if options.samples and not records:
        raise refused(f"a record of sample {' or '.join(map(repr, options.samples))}", "none")


def _show(options: argparse.Namespace, document: dict[str, Any], text: Callable[[], str]) -> None:
    """One JSON object, or text, whose making may need an extra that JSON does without."""
    print(json.dumps(document, sort_keys=True) if options.json else text())


def _tables() -> Any:
    try:
        from routeplane.inspect import tables
    except ImportError as error:
        raise _missing("report", error) from error
    return tables


def _missing(extra: str, error: ImportError) -> MissingExtraError:
    return MissingExtraError(f"expected the extra routeplane[{extra}], got: {error}", kind=ErrorKind.MISSING_EXTRA)


def _terminal_width() -> int | None:
    """The width of the terminal; None in a pipe, where text is plain."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
