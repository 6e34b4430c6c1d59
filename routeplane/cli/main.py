"""The command line: thin calls over the library. Data on stdout, complaints on stderr, ``--json`` everywhere.

Exit status: 0 good, 1 data invalid or different, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from routeplane.cli.demo import DemoOptions, format_table, run_demo
from routeplane.cli.inspect import add_commands, require_report, write_comparison
from routeplane.errors import FormatError, Problem, RouteplaneError, refused
from routeplane.inspect.look import ArchiveSummary, StreamCheck, StreamSummary, check, summarise

__all__ = ["main"]

_EPILOG = """examples:
  routeplane info run.arrows              what a stream or archive holds: spec, counts, coverage
  routeplane validate run.arrows --json   every problem with sample, token and layer
  routeplane convert run.arrows run.zarr  copy into an archive, a stream or Parquet; goes on where it stopped
  routeplane stats 'run-*.arrows'         load, entropy, overlap, drift and coverage, layer by layer
  routeplane diff run.arrows other.arrows where the two choose other experts
  routeplane explain run.arrows s-17 96   every hop of one token's rows
  routeplane report run.arrows            one HTML file: what is wrong first, pictures, the worst samples
  routeplane serve --producers 8          carry the routes of eight producers to a trainer
  routeplane demo --engine vllm           record, stream and replay a small MoE's routes
exit status: 0 good, 1 data invalid or different, 2 could not run"""


def main(*, arguments: Sequence[str] | None = None) -> int:
    """Run one command; ``arguments`` defaults to those of the process. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()  # else what cannot be written shows after this returned, as status 120
    except FormatError as error:
        _complain(error)
        return 1
    except (RouteplaneError, OSError) as error:
        _complain(error)
        _give_up_stdout()
        return 2
    return status


def _give_up_stdout() -> None:
    """Where stdout takes no more (a closed pipe, a full disk), let the interpreter's own flush not fail too."""
    if sys.stdout is None:
        return  # closed from the beginning
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="routeplane",
        description="Carry mixture-of-experts routes from rollout engines to trainers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="what a stream or an archive holds")
    info.add_argument("source", metavar="SOURCE", help="a stream, or an archive's folder or URL")
    info.set_defaults(run=_info)
    validate = commands.add_parser("validate", help="read everything, list every problem")
    validate.add_argument("source", metavar="SOURCE", help="a stream, or an archive's folder or URL")
    validate.add_argument(
        "--alarms", choices=("report", "fail"), default="report", help="whether alarms fail the check"
    )
    validate.set_defaults(run=_validate)
    convert = commands.add_parser("convert", help="copy between streams, archives and Parquet")
    # text, since a Path makes ``s3:/bucket`` of ``s3://bucket``
    convert.add_argument("source")
    convert.add_argument("target")
    convert.add_argument(
        "--encoding", choices=("auto", "plain", "narrow"), default="auto", help="of a stream or Parquet file"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    convert.set_defaults(run=_convert)
    demo = commands.add_parser("demo", help="the main job on a small real model")
    demo.add_argument("--engine", choices=("transformers", "vllm", "vllm-scheduler"), default="transformers")
    demo.add_argument("--trainer", choices=("transformers", "automodel", "megatron"), default="transformers")
    demo.add_argument("--trainer-python", help="interpreter of the trainer's own environment")
    demo.add_argument("--transport", choices=("file", "flight", "ray"), default="file")
    demo.add_argument("--fleet", action="store_true", help="all parts as actors of a Ray cluster, rollouts over HTTP")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--out", type=Path, help="keep the model and the streams in this folder")
    demo.add_argument("--report", type=Path, metavar="FILE", help="write what the run's routes look like, as HTML")
    demo.set_defaults(run=_demo)
    serve = _serve_parser(commands)
    for command in (info, validate, convert, demo, serve, *add_commands(commands)):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _serve_parser(commands: Any) -> Any:
    serve = commands.add_parser("serve", help="carry one stream between processes over Arrow Flight")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=0)
    serve.add_argument("--groups", nargs="+", default=["default"], help="consumer groups, each given every record")
    serve.add_argument("--producers", type=int, help="how many end the stream; without it, an action ends it")
    serve.add_argument("--max-bytes", type=int, default=2 * 2**30, help="payload held before producers wait")
    serve.add_argument("--max-message-bytes", type=int, default=256 * 2**20, help="largest block")
    serve.add_argument("--keep", action="store_true", help="acknowledged records stay until room is needed")
    serve.add_argument("--spool", type=Path, help="folder that keeps what was accepted until it was acknowledged")
    serve.add_argument("--token-file", type=Path, help="what clients must present")
    serve.add_argument("--certificate", type=Path, help="PEM file, for TLS")
    serve.add_argument("--private-key", type=Path, help="PEM file, for TLS")
    serve.set_defaults(run=_serve)
    return serve


def _serve(options: argparse.Namespace) -> int:
    from routeplane.stream.flight_service import FlightService, ServiceOptions

    if not 0 <= options.port < 2**16:
        raise refused("a port of 0 to 65535", f"{options.port}")
    service = ServiceOptions(
        max_bytes=options.max_bytes,
        max_message_bytes=options.max_message_bytes,
        groups=tuple(options.groups),
        producers=options.producers,
        keep=options.keep,
        spool=None if options.spool is None else str(options.spool),
        token=None if options.token_file is None else options.token_file.read_text().strip(),
        certificate=None if options.certificate is None else options.certificate.read_bytes(),
        private_key=None if options.private_key is None else options.private_key.read_bytes(),
    )
    # blocked before any thread starts, so that all of them leave the two to this one
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    with FlightService(service, host=options.host, port=options.port) as running:
        _print(options, {"location": running.location}, f"serving {running.location}")
        sys.stdout.flush()
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


def _info(options: argparse.Namespace) -> int:
    summary = summarise(options.source)
    _print(options, summary.to_dict(), _info_text(summary))
    return 0 if summary.complete else 1


def _info_text(summary: StreamSummary | ArchiveSummary) -> str:
    return "\n".join(f"{name:<14} {value}" for name, value in summary.to_dict().items())


def _validate(options: argparse.Namespace) -> int:
    found = check(options.source)
    _print(options, found.to_dict(), _validate_text(found))
    failing = [problem for problem in found.problems if problem.severity == "error" or options.alarms == "fail"]
    return 1 if failing else 0


def _validate_text(found: StreamCheck) -> str:
    lines = [_problem_text(problem) for problem in found.problems]
    coverage = ", ".join(f"{state} {count}" for state, count in found.coverage.rows.items() if count)
    return "\n".join(
        [*lines, f"{found.records} records, {found.tokens} tokens ({coverage or 'no rows'}): {found.verdict}"]
    )


def _problem_text(problem: Problem) -> str:
    return f"{problem.severity}: {problem.kind}: {problem}"


def _convert(options: argparse.Namespace) -> int:
    from routeplane.cli.convert import convert

    with _progress(" -> ".join(Path(place).name for place in (options.source, options.target))) as tell:
        done = convert(
            options.source, options.target, encoding=options.encoding, overwrite=options.overwrite, progress=tell
        )
    figures = {"records": done.records, "resumed": done.resumed, "bytes": done.bytes}
    _print(options, figures, f"{done.records} records ({done.resumed} of an earlier call), {done.bytes} bytes")
    return 0


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int | None], object] | None]:
    """A bar on a terminal, where rich is installed; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield None
        return
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _demo(options: argparse.Namespace) -> int:
    def run(folder: str) -> dict[str, Any]:
        chosen = DemoOptions(
            out=folder,
            engine=options.engine,
            trainer=options.trainer,
            trainer_python=options.trainer_python or "",
            transport=options.transport,
            fleet=options.fleet,
            seed=options.seed,
            progress=sys.stderr.isatty(),
        )
        figures = run_demo(chosen)
        if options.report is None:
            return figures
        write_comparison(chosen.kept_stream, chosen.trainer_stream, out=options.report)
        return {**figures, "report": str(options.report)}

    if options.report is not None:
        require_report()  # before the run, not after

    if options.out is not None:
        figures = run(str(options.out))
    else:
        with tempfile.TemporaryDirectory(prefix="routeplane-demo-") as folder:
            figures = run(folder)
    shown = f"\n  report {figures['report']}" if options.report is not None else ""
    _print(options, figures, format_table(figures) + shown)
    return 0


def _print(options: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    print(json.dumps(document, sort_keys=True) if options.json else text)


def _complain(error: Exception) -> None:
    kind = f"{error.kind}: " if isinstance(error, RouteplaneError) else ""
    print(f"routeplane: {kind}{error}", file=sys.stderr)
