"""The command ``audit``: what is wrong with the routes of a trainer's own batch, with sample, token and layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeplane.batch.layouts import LAYOUTS
from routeplane.cli.output import show
from routeplane.errors import refused
from routeplane.inspect.audit import OWN_LAYOUT, audit_batch, load_batch
from routeplane.inspect.inputs import find_sources
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    import argparse

__all__ = ["add_audit"]


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
