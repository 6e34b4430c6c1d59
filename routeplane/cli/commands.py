"""The commands that look: ``info``, ``validate``, ``stats``, ``diff``, ``explain``, ``report``, ``audit``, ``probe``.

``cli.main`` adds them to its parser; each loads only what it runs. They pass over damage by default, tell it first, and
then end with status 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeplane.batch.layouts import LAYOUTS
from routeplane.cli.output import Progress, problem_line, show
from routeplane.errors import ErrorKind, MissingExtraError, Problem, check_type, refused
from routeplane.inspect.audit import OWN_LAYOUT, audit_batch, load_batch
from routeplane.inspect.inputs import find_sources
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from routeplane.inspect.inputs import SourceRecords, SourceSet
    from routeplane.inspect.overview import Overview
    from routeplane.record.record import RouteRecord

__all__ = ["add_audit", "add_commands", "add_probe", "require_report", "write_comparison"]

_SOURCE = "a stream, archive, Parquet file, folder of blocks, URL, quoted pattern, or - for stdin"


def add_commands(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the commands to ``argparse``'s subparsers; returns their parsers."""
    info = commands.add_parser("info", help="what a stream or an archive holds")
    info.add_argument("source", metavar="SOURCE", help=_SOURCE)
    info.set_defaults(run=_info)
    validate = commands.add_parser("validate", help="read everything, list every problem")
    validate.add_argument("source", metavar="SOURCE", help=_SOURCE)
    validate.add_argument(
        "--alarms", choices=("report", "fail"), default="report", help="whether alarms fail the check"
    )
    validate.set_defaults(run=_validate)
    stats = commands.add_parser("stats", help="what the routes look like: load, entropy, overlap, drift, coverage")
    stats.add_argument("sources", nargs="+", metavar="SOURCE", help=_SOURCE)
    stats.set_defaults(run=_stats)
    diff = commands.add_parser("diff", help="where two sources choose other experts, and what caused it")
    diff.add_argument("left", metavar="SOURCE", help=_SOURCE)
    diff.add_argument("right", metavar="SOURCE", help="the other side")
    diff.set_defaults(run=_diff)
    explain = commands.add_parser("explain", help="every hop of one token's rows")
    explain.add_argument("source", metavar="SOURCE", help=_SOURCE)
    explain.add_argument("sample", metavar="SAMPLE", help="sample id, or sample/attempt/segment")
    explain.add_argument("token", metavar="TOKEN", type=int, help="absolute position in the record")
    explain.set_defaults(run=_explain)
    report = commands.add_parser("report", help="one HTML file: what is wrong first, charts, the worst samples")
    report.add_argument("sources", nargs="+", metavar="SOURCE", help=f"{_SOURCE}; several are parts of one report")
    report.add_argument("--against", metavar="SOURCE", help="another capture of the same samples, to find causes")
    report.add_argument("--out", type=Path, default=Path("routes.html"), help="the file to write")
    report.add_argument(
        "--attribute", action="store_true", help="with --against: how much of the mismatch each factor makes"
    )
    report.add_argument("--png", type=Path, metavar="FOLDER", help="draw each chart as a PNG file too")
    report.set_defaults(run=_report)
    for command in (stats, diff, explain, report):
        command.add_argument("--layer", type=int, action="append", metavar="ID", help="only this decoder layer; repeat")
        command.add_argument(
            "--on-corrupt", choices=("quarantine", "raise"), default="quarantine", help="pass over damage, or end there"
        )
        command.add_argument(
            "--on-truncated",
            choices=("keep", "raise"),
            default="keep",
            help="take what a cut stream holds, or not",
        )
    for command in (stats, diff, report):
        command.add_argument(
            "--samples", action="append", metavar="SAMPLE", help="only this sample; repeat for more of them"
        )
    for command in (stats, report):
        command.add_argument("--ray", action="store_true", help="count the sources as tasks of a Ray cluster")
    return [info, validate, stats, diff, explain, report]


# ----------------------------------------------------------------------------------------------------------------------
# One place
# ----------------------------------------------------------------------------------------------------------------------


def _info(options: argparse.Namespace) -> int:
    from routeplane.inspect.look import summarise

    found = summarise(options.source)
    documents = [summary.to_dict() for summary in found]
    lines: list[str] = []
    for document in documents:
        lines += [*([""] if lines else []), *(f"{name:<14} {value}" for name, value in document.items())]
    show(options, documents[0] if len(documents) == 1 else {"sources": documents}, lines=lines)
    return 0 if all(summary.complete for summary in found) else 1


def _validate(options: argparse.Namespace) -> int:
    from routeplane.inspect.look import check

    found = check(options.source)
    coverage = ", ".join(f"{state} {count:,}" for state, count in found.coverage.rows.items() if count)
    lines = [problem_line(problem) for problem in found.problems]
    counts = f"{found.records:,} records, {found.tokens:,} tokens ({coverage or 'no rows'})"
    show(options, found.to_dict(), lines=[*lines, f"{counts}: {found.verdict}"])
    failing = [problem for problem in found.problems if problem.severity == "error" or options.alarms == "fail"]
    return 1 if failing else 0


def _explain(options: argparse.Namespace) -> int:
    from routeplane.cli.output import format_explanation
    from routeplane.inspect.look import explain

    record = _sources([options.source], options).find(options.sample)
    found = explain(record, options.token, layer_ids=tuple(options.layer) if options.layer else None)
    show(options, found.to_dict(), lines=format_explanation(found.to_dict()))
    return 0 if found.intact else 1


# ----------------------------------------------------------------------------------------------------------------------
# Counting
# ----------------------------------------------------------------------------------------------------------------------


def _stats(options: argparse.Namespace) -> int:
    from routeplane.cli.output import format_findings, format_statistics
    from routeplane.inspect.diagnose import find_findings
    from routeplane.inspect.statistics import collect

    count_on_ray = _ray() if options.ray else None
    sources = _sources(options.sources, options)
    damage: Sequence[tuple[str, Problem]] = ()
    if count_on_ray is not None:
        found = count_on_ray(sources, options)
    else:
        records = sources.records(layer_ids=options.layer, samples=options.samples)
        with Progress("stats") as progress:
            found = collect(progress.watch(records), _spec(sources, options))
        damage = records.damage
    _require_samples(found.coverage.records, options)
    findings = find_findings(found)
    document = {
        **found.to_dict(),
        "findings": [finding.to_dict() for finding in findings],
        "damage": _damage_documents(damage),
    }
    lines = [*_damage_lines(damage), *format_findings(findings), *format_statistics(found.to_dict())]
    show(options, document, lines=lines)
    return 1 if damage else 0


def _diff(options: argparse.Namespace) -> int:
    from routeplane.cli.output import format_diff, format_findings
    from routeplane.inspect.compare import RouteDiff, compare
    from routeplane.inspect.diagnose import Examiner, differences, order_findings

    left, right = _sources([options.left], options), _sources([options.right], options)
    specs = _spec(left, options), _spec(right, options)
    examiner = Examiner(layer_ids=RouteDiff.empty(*specs).layer_ids)
    mine = left.records(layer_ids=options.layer, samples=options.samples)
    theirs = right.records(layer_ids=options.layer, samples=options.samples)
    lookup = right.lookup() if not (options.layer or options.samples) else None
    with Progress("diff") as progress:
        found = compare(progress.watch(mine), theirs if lookup is None else lookup, specs=specs, watch=examiner.add)
    _require_samples(found.samples + found.left_only + found.right_only, options)
    damage = [*mine.damage, *theirs.damage]
    findings = order_findings([*examiner.findings(), *differences(found)])
    document = {
        **found.to_dict(),
        "findings": [finding.to_dict() for finding in findings],
        "damage": _damage_documents(damage),
    }
    lines = [*_damage_lines(damage), *format_findings(findings), *format_diff(found.to_dict())]
    show(options, document, lines=lines)
    return 0 if found.same and not damage else 1


def _report(options: argparse.Namespace) -> int:
    pictures, damage, overview = _write_report(options)
    document = {
        "report": str(options.out),
        "bytes": options.out.stat().st_size,
        "pictures": list(map(str, pictures)),
        "findings": [finding.to_dict() for finding in overview.findings],
        "attribution": None if overview.attribution is None else overview.attribution.to_dict(),
        "damage": _damage_documents(damage),
    }
    from routeplane.cli.output import format_findings

    lines = [*_damage_lines(damage), *format_findings(overview.findings)]
    lines += [] if overview.attribution is None else overview.attribution.lines()
    show(options, document, lines=[*lines, f"wrote {options.out}"])
    return 1 if damage else 0


def write_comparison(source: str, against: str, *, out: Path) -> None:
    """``routeplane report SOURCE --against AGAINST --out OUT``, for a run that ends with one. Makes the folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _write_report(
        argparse.Namespace(
            sources=[source],
            against=against,
            attribute=False,
            out=out,
            png=None,
            layer=None,
            samples=None,
            ray=False,
            on_corrupt="raise",
            on_truncated="raise",
        )
    )


def require_report() -> Any:
    """The module that writes reports. Raises MissingExtraError, before anything is read."""
    try:
        from routeplane.inspect import page as report
    except MissingExtraError:
        raise
    except ImportError as error:
        raise _missing("report", error) from error
    return report


def _write_report(options: argparse.Namespace) -> tuple[list[Path], list[tuple[str, Problem]], Overview]:
    from routeplane.inspect.overview import Overview

    if options.attribute and options.against is None:
        raise refused("--against with --attribute, the side that scored with and without", "none")
    report = require_report()
    count_on_ray = _ray() if options.ray else None
    sources = _sources(options.sources, options)
    against = _sources([options.against], options) if options.against else None
    damage: list[tuple[str, Problem]] = []
    if count_on_ray is not None and against is None:
        overview = Overview.of(count_on_ray(sources, options))
    else:
        overview, damage = _survey(sources, against, options)
    _require_samples(overview.statistics.coverage.records, options)
    page = report.render_report(
        overview,
        title=f"routes of {sources.spec.model or 'a run'}",
        notes=[
            f"from {_few(sources.paths)}",
            *([f"against {_few(against.paths)}"] if against else []),
            *([] if overview.attribution is None else overview.attribution.lines()),
        ],
        damage=_damage_lines(damage),
    )
    report.write_report(options.out, page)
    pictures = list(report.write_charts(options.png, overview)) if options.png else []
    return pictures, damage, overview


def _survey(
    sources: SourceSet, against: SourceSet | None, options: argparse.Namespace
) -> tuple[Overview, list[tuple[str, Problem]]]:
    from routeplane.inspect.overview import survey

    read: list[SourceRecords] = []

    def records(of: SourceSet) -> SourceRecords:
        read.append(of.records(layer_ids=options.layer, samples=options.samples))
        return read[-1]

    with Progress("report") as progress:

        def parts() -> Iterator[tuple[str, Iterator[RouteRecord]]]:
            for name, source in zip(_part_names(sources.paths), sources.sources, strict=True):
                yield name, progress.watch(records(replace(sources, sources=(source,))))

        lookup = against.lookup() if against is not None and not (options.layer or options.samples) else None
        overview = survey(
            parts(),
            _spec(sources, options),
            against=None if against is None else lookup if lookup is not None else records(against),
            against_spec=None if against is None else _spec(against, options),
            attribute=options.attribute,
        )
    return overview, [entry for part in read for entry in part.damage]


def _part_names(paths: Sequence[str]) -> list[str]:
    """The last parts of the paths, where these tell them apart."""
    short = [Path(path.rstrip("/")).name for path in paths]
    return short if len(set(short)) == len(short) else list(paths)


# ----------------------------------------------------------------------------------------------------------------------
# Shared
# ----------------------------------------------------------------------------------------------------------------------


def _sources(places: Sequence[str], options: argparse.Namespace) -> SourceSet:
    from routeplane.inspect.inputs import find_sources
    from routeplane.record.policy import ReadPolicy

    policy = ReadPolicy(on_truncated=options.on_truncated, on_corrupt=options.on_corrupt, on_alarm="ignore")
    return find_sources(places, policy=policy)


def _spec(sources: SourceSet, options: argparse.Namespace) -> RouteSpec:
    return sources.spec.select(options.layer) if options.layer else sources.spec


def _ray() -> Any:
    """What counts on a cluster; asked for before anything is read. Raises MissingExtraError."""
    try:
        from routeplane.inspect.ray_data import collect_on_ray, joined_cluster
    except MissingExtraError:
        raise
    except ImportError as error:
        raise _missing("ray", error) from error

    def count(sources: SourceSet, options: argparse.Namespace) -> Any:
        with joined_cluster():
            return collect_on_ray(sources, layer_ids=options.layer, samples=options.samples)

    return count


def _require_samples(records: int, options: argparse.Namespace) -> None:
    """Of samples that are nowhere, every number is 0 and nothing differs: a mistyped name is not that."""
    if options.samples and not records:
        raise refused(f"a record of sample {' or '.join(map(repr, options.samples))}", "none")


def _damage_lines(damage: Sequence[tuple[str, Problem]]) -> list[str]:
    return [problem_line(problem, source=source) for source, problem in damage]


def _damage_documents(damage: Sequence[tuple[str, Problem]]) -> list[dict[str, Any]]:
    return [{"source": source, **problem.to_dict()} for source, problem in damage]


def _few(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:4])
    return f"{shown} and {len(paths) - 4} more" if len(paths) > 4 else shown


def _missing(extra: str, error: ImportError) -> MissingExtraError:
    return MissingExtraError(f"expected the extra routeplane[{extra}], got: {error}", kind=ErrorKind.MISSING_EXTRA)


def add_audit(commands: Any) -> Any:
    """Add the command to a parser's subcommands; returns its parser."""
    audit = commands.add_parser("audit", help="what is wrong with the routes of a trainer's own batch")
    audit.add_argument("batch", type=Path, metavar="BATCH", help="a .pt, .npz, .parquet or .arrows file")
    audit.add_argument("--layout", required=True, choices=(*LAYOUTS, OWN_LAYOUT.name), help="whose batch it is")
    audit.add_argument(
        "--model", type=Path, metavar="CONFIG", help="the model's config.json; default: the records' spec"
    )
    audit.add_argument("--against", nargs="+", metavar="SOURCE", help="the records that the routes came from")
    audit.add_argument("--decoder-layers", type=int, help="depth of the model, to refuse another layer axis")
    audit.add_argument("--captured", metavar="FIELD", help="the batch's field with each sequence's captured rows")
    audit.set_defaults(run=_audit)
    return audit


def _audit(options: argparse.Namespace) -> int:
    sources = None if options.against is None else find_sources(options.against)
    if options.model is not None:
        spec = RouteSpec.from_hf_config(json.loads(options.model.read_text(encoding="utf-8")))
    elif sources is not None:
        spec = sources.spec
    else:
        raise refused("--model or --against, which say the geometry", "neither")
    batch = load_batch(options.batch)
    layout = OWN_LAYOUT if options.layout == OWN_LAYOUT.name else options.layout
    captured = None if options.captured is None else _captured(batch, options.captured)
    report = audit_batch(
        batch,
        spec,
        layout=layout,
        decoder_layers=options.decoder_layers,
        captured=captured,
        against=() if sources is None else sources.records(),
    )
    lines = [f"{problem.kind}: {problem}" for problem in report.problems]
    lines += [f"note: {each}" for each in report.advice]
    verdict = f"{len(report.problems)} problems" if report.problems else "no problem"
    lines.append(f"{report.samples} samples, {report.tokens} tokens, {report.rows} rows: {verdict}")
    show(options, report.to_dict(), lines=lines)
    return 1 if report.problems else 0


def _captured(batch: Any, field: str) -> list[int]:
    values = [sample[field] for sample in batch] if isinstance(batch, list) else batch[field]
    return [int(value) for value in values]


# ----------------------------------------------------------------------------------------------------------------------
# A running engine
# ----------------------------------------------------------------------------------------------------------------------


def add_probe(commands: Any) -> Any:
    """Add the command to a parser's subcommands; returns its parser."""
    probe = commands.add_parser("probe", help="ask a running server whether its rows are those of its tokens")
    probe.add_argument("url", metavar="URL", help="an OpenAI-compatible server, without a path")
    probe.add_argument("--model", type=Path, metavar="CONFIG", help="the model's config.json, or the folder it is in")
    probe.add_argument("--layers", metavar="IDS", help="without --model: decoder layers with a router, such as 0,2,3")
    probe.add_argument("--experts", type=int, metavar="N", help="without --model: the router's width")
    probe.add_argument("--top-k", type=int, metavar="K", help="without --model: experts of a row")
    probe.add_argument("--vocabulary", type=int, metavar="N", help="token ids to draw prompts from")
    probe.add_argument("--served-model", metavar="NAME", help="the name that the server knows; default: its first one")
    probe.add_argument(
        "--axis", choices=("decoder", "captured"), default="decoder", help="what the server's layer axis counts"
    )
    probe.add_argument(
        "--header", action="append", metavar="NAME:VALUE", help="sent with every request; repeat for more of them"
    )
    probe.add_argument("--at-once", type=int, default=8, metavar="N", help="requests in flight where they are many")
    probe.add_argument("--max-flipped", type=float, default=0.02, help="share of rows that may be other experts")
    probe.add_argument("--seed", type=int, default=0, help="of prompts and sampling")
    probe.set_defaults(run=_probe)
    return probe


def _probe(options: argparse.Namespace) -> int:
    from routeplane.capture.http.openai import HttpEngine
    from routeplane.testing.contracts.engine_contract import CheckOptions, check_engine

    config = _model_config(options.model) if options.model is not None else {}
    spec = RouteSpec.from_hf_config(config) if config else _spec_of_options(options)
    vocabulary = options.vocabulary or config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    pairs = [text.partition(":") for text in options.header or ()]
    headers = {name.strip(): value.strip() for name, _, value in pairs}
    engine = HttpEngine(options.url, spec, model=options.served_model, axis=options.axis, headers=headers)
    chosen = CheckOptions(
        vocabulary=vocabulary or 256,
        at_once=options.at_once,
        max_flipped=options.max_flipped,
        axis=options.axis,
        seed=options.seed,
    )
    found = check_engine(engine, spec, options=chosen)
    lines = [str(one) for one in found.findings]
    lines += [f"{name:<12} {became}" for name, became in found.checks.items()]
    verdict = f"findings: {len(found.findings)}" if found.findings else "no finding"
    lines.append(f"{found.requests} requests, {found.rows} rows compared, {found.flipped} flipped: {verdict}")
    show(options, found.to_dict(), lines=lines)
    return 1 if found.findings else 0


def _model_config(place: Path) -> dict[str, Any]:
    path = place / "config.json" if place.is_dir() else place
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    check_type(found, dict, expected="a config.json with an object")
    return found


def _spec_of_options(options: argparse.Namespace) -> RouteSpec:
    if options.layers is None or options.experts is None or options.top_k is None:
        raise refused("--model, or --layers, --experts and --top-k, which say the geometry", "neither")
    try:
        layer_ids = tuple(int(text) for text in options.layers.split(","))
    except ValueError:
        raise refused("--layers as numbers with commas between", repr(options.layers)) from None
    return RouteSpec(num_experts=options.experts, top_k=options.top_k, layer_ids=layer_ids)
