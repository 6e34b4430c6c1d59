"""What `stats` and `report` say of a demo that ran: of the engine's side alone, and of both sides."""

from __future__ import annotations

from routeplane.cli.demo import DemoOptions
from routeplane.inspect import collect, find_findings, find_sources, survey

__all__ = ["severities"]


def severities(options: DemoOptions) -> set[str]:
    """How bad the findings are."""
    engine, trainer = find_sources([options.kept_stream]), find_sources([options.trainer_stream])
    alone = find_findings(collect(engine.records(), engine.spec))
    both = survey([("demo", engine.records())], engine.spec, against=trainer.records()).findings
    return {finding.severity for finding in (*alone, *both)}
