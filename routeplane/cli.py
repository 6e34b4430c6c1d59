"""The command line: thin calls over the library. Data on stdout, complaints on stderr, ``--json`` everywhere.

Exit status: 0 good, 1 data invalid, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routeplane.demo import DemoOptions, format_table, run_demo
from routeplane.errors import FormatError, Problem, RouteplaneError
from routeplane.inspect.check import StreamCheck, StreamSummary, check_stream, summarise_stream

__all__ = ["main"]

_EPILOG = """examples:
  routeplane info run.arrows              what a stream holds: spec, counts, coverage
  routeplane validate run.arrows --json   every problem with sample, token and layer
  routeplane demo --engine vllm           record, stream and replay a small MoE's routes
exit status: 0 good, 1 data invalid, 2 could not run"""


def main(*, arguments: Sequence[str] | None = None) -> int:
    """Run one command; ``arguments`` defaults to those of the process. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except FormatError as error:
        _complain(error)
        return 1
    except (RouteplaneError, OSError) as error:
        _complain(error)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="routeplane",
        description="Carry mixture-of-experts routes from rollout engines to trainers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="what a stream holds")
    info.add_argument("stream", type=Path)
    info.set_defaults(run=_info)
    validate = commands.add_parser("validate", help="read everything, list every problem")
    validate.add_argument("stream", type=Path)
    validate.add_argument(
        "--alarms", choices=("report", "fail"), default="report", help="whether alarms fail the check"
    )
    validate.set_defaults(run=_validate)
    demo = commands.add_parser("demo", help="the main job on a small real model")
    demo.add_argument("--engine", choices=("transformers", "vllm", "vllm-scheduler"), default="transformers")
    demo.add_argument("--trainer", choices=("transformers",), default="transformers")
    demo.add_argument("--transport", choices=("file",), default="file")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--out", type=Path, help="keep the model and the stream in this folder")
    demo.set_defaults(run=_demo)
    for command in (info, validate, demo):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _info(options: argparse.Namespace) -> int:
    summary = summarise_stream(options.stream)
    _print(options, summary.to_dict(), _info_text(summary))
    return 0 if summary.complete else 1


def _info_text(summary: StreamSummary) -> str:
    return "\n".join(f"{name:<14} {value}" for name, value in summary.to_dict().items())


def _validate(options: argparse.Namespace) -> int:
    check = check_stream(options.stream)
    _print(options, check.to_dict(), _validate_text(check))
    failing = [problem for problem in check.problems if problem.severity == "error" or options.alarms == "fail"]
    return 1 if failing else 0


def _validate_text(check: StreamCheck) -> str:
    lines = [_problem_text(problem) for problem in check.problems]
    coverage = ", ".join(f"{state} {count}" for state, count in check.coverage.rows.items() if count)
    return "\n".join(
        [*lines, f"{check.records} records, {check.tokens} tokens ({coverage or 'no rows'}): {check.verdict}"]
    )


def _problem_text(problem: Problem) -> str:
    return f"{problem.severity}: {problem.kind}: {problem}"


def _demo(options: argparse.Namespace) -> int:
    def run(folder: str) -> dict[str, Any]:
        return run_demo(
            DemoOptions(
                out=folder,
                engine=options.engine,
                trainer=options.trainer,
                transport=options.transport,
                seed=options.seed,
                progress=sys.stderr.isatty(),
            )
        )

    if options.out is not None:
        figures = run(str(options.out))
    else:
        with tempfile.TemporaryDirectory(prefix="routeplane-demo-") as folder:
            figures = run(folder)
    _print(options, figures, format_table(figures))
    return 0


def _print(options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    print(json.dumps(document, sort_keys=True) if options.json else text)


def _complain(error: Exception) -> None:
    kind = f"{error.kind}: " if isinstance(error, RouteplaneError) else ""
    print(f"routeplane: {kind}{error}", file=sys.stderr)
