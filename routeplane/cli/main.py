"""The command line: thin calls over the library. Data on stdout, complaints on stderr, ``--json`` everywhere.

Exit status: 0 good, 1 data invalid or different, 2 could not run, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from routeplane import __version__
from routeplane.cli.commands import add_audit, add_commands, add_probe, require_report, write_comparison
from routeplane.cli.demo import DemoOptions, format_table, run_demo
from routeplane.cli.output import Progress, complain, flush, show, show_error
from routeplane.errors import DataError, ErrorKind, FormatError, MissingExtraError, RouteplaneError, UsageError, refused

__all__ = ["main"]

_EPILOG = """examples:
  routeplane info run.arrows              what a stream or archive holds: spec, counts, coverage
  routeplane validate run.arrows --json   every problem with sample, token and layer
  routeplane audit step-7.pt --layout verl --against run.arrows   what is wrong with a trainer's batch
  routeplane stats 'run-*.arrows'         load, entropy, overlap, drift and coverage, layer by layer
  routeplane diff run.arrows other.arrows what differs, where, and what most likely caused it
  routeplane explain run.arrows s-17 96   every hop of one token's rows
  routeplane report run.arrows            one interactive HTML file: what is wrong first
  routeplane convert run.arrows run.zarr  copy into an archive, a stream or Parquet
  routeplane archive add blocks run.zarr  take the sealed blocks of a folder, each record once
  routeplane probe http://127.0.0.1:8000 --model config.json   whether a server's rows are those of its tokens
  routeplane demo --engine vllm           record, stream and replay a small MoE's routes
exit status: 0 good, 1 data invalid or different, 2 could not run, 130 interrupted"""

_INTERRUPTED = 130


def main(*, arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: Those of the command; by default the process's own.

    Returns:
        0 good, 1 data invalid or different, 2 could not run, 130 interrupted.

    >>> main(arguments=["explain", "nowhere.arrows", "sample", "0"])
    2
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    try:
        options = _parser().parse_args(given)
        status: int = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()  # else what cannot be written shows after this returned, as status 120
    except (FormatError, DataError) as error:
        show_error(error, as_json=as_json)
        return 1
    except (RouteplaneError, OSError) as error:
        complain(error, as_json=as_json)
        flush()
        return 2
    except KeyboardInterrupt:
        adds = given[:1] == ["archive"] or (given[:1] == ["convert"] and any(".zarr" in place for place in given[2:]))
        again = "; the same command goes on where it stopped" if adds else ""
        print(f"routeplane: interrupted{again}", file=sys.stderr)
        return _INTERRUPTED
    return status


class _Parser(argparse.ArgumentParser):
    """Usage errors as the library's own, so that they are told like all others."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split())
        raise UsageError(f"{message.removeprefix('argument ')} ({usage})", kind=ErrorKind.ARGUMENT)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="routeplane",
        description="Carry mixture-of-experts routes from rollout engines to trainers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"routeplane {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    made = [*add_commands(commands), add_audit(commands), add_probe(commands)]
    made += [_convert_parser(commands), _archive_parser(commands), _demo_parser(commands)]
    for command in made:
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    completion = commands.add_parser("completion", help="print the shell's completion script")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(run=_completion)
    return parser


# ----------------------------------------------------------------------------------------------------------------------
# Commands that move data
# ----------------------------------------------------------------------------------------------------------------------


def _convert_parser(commands: Any) -> argparse.ArgumentParser:
    convert = commands.add_parser("convert", help="copy between streams, archives and Parquet")
    # text, since a Path makes ``s3:/bucket`` of ``s3://bucket``
    convert.add_argument("source", help="anything that holds records")
    convert.add_argument("target", help="a stream (.arrows), an archive (.zarr) or Parquet (.parquet)")
    convert.add_argument(
        "--encoding", choices=("auto", "plain", "narrow"), default="auto", help="of a stream or Parquet file"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    convert.add_argument(
        "--on-corrupt", choices=("raise", "quarantine"), default="raise", help="whether damaged records end it"
    )
    convert.add_argument("--on-truncated", choices=("raise", "keep"), default="raise", help="whether a cut ends it")
    convert.add_argument("--flat", action="store_true", help="Parquet for analysis: one row a token and layer")
    convert.add_argument(
        "--nested", action="store_true", help="Parquet for analysis: one row a record, plain lists, null for MISSING"
    )
    convert.set_defaults(run=_convert)
    return convert  # type: ignore[no-any-return]


def _convert(options: argparse.Namespace) -> int:
    from routeplane.cli.convert import convert, export

    title = " -> ".join(Path(place).name for place in (options.source, options.target))
    with Progress(title) as progress:
        if options.flat or options.nested:
            done = export(
                options.source,
                options.target,
                form="flat" if options.flat else "nested",
                overwrite=options.overwrite,
                progress=progress.tell,
            )
        else:
            done = convert(
                options.source,
                options.target,
                encoding=options.encoding,
                overwrite=options.overwrite,
                on_corrupt=options.on_corrupt,
                on_truncated=options.on_truncated,
                progress=progress.tell,
            )
    figures = {"records": done.records, "resumed": done.resumed, "bytes": done.bytes, "damaged": done.damaged}
    damage = f", {done.damaged} damaged" if done.damaged else ""
    show(
        options,
        figures,
        lines=[f"{done.records:,} records ({done.resumed:,} of an earlier call{damage}), {done.bytes:,} bytes"],
    )
    return 1 if done.damaged else 0


def _archive_parser(commands: Any) -> argparse.ArgumentParser:
    archive = commands.add_parser("archive", help="take the blocks of a folder into an archive")
    archive.add_argument("action", choices=("add",), help="add: take what is sealed, acknowledge what is committed")
    archive.add_argument("place", help="the folder of blocks that producers write")
    archive.add_argument("store", help="the archive: a path or a URL; made where there is none")
    archive.add_argument("--group", default="archive", help="the place's group that is read")
    archive.add_argument(
        "--producers", type=int, metavar="N", help="how many producers are expected; default: those that are there"
    )
    archive.add_argument("--follow", action="store_true", help="wait for blocks until all N producers closed")
    archive.add_argument("--blocks-per-run", type=int, default=16, metavar="N", help="blocks of one commit")
    archive.set_defaults(run=_archive)
    return archive  # type: ignore[no-any-return]


def _archive(options: argparse.Namespace) -> int:
    from routeplane.archive import add_blocks
    from routeplane.stream import folder

    if options.follow and options.producers is None:
        raise refused("--producers with --follow, to know when all have closed", "none")
    producers = options.producers or folder.producers_of(options.place)
    with (
        folder.open_reader(options.place, producers=producers, group=options.group, follow=options.follow) as reader,
        Progress("archive add") as progress,
    ):
        done = add_blocks(reader, options.store, blocks_per_run=options.blocks_per_run, progress=progress.tell)
    figures = {name: getattr(done, name) for name in ("runs", "blocks", "records", "repeats")}
    line = (
        f"{done.records:,} records of {done.blocks:,} blocks in {done.runs:,} runs, {done.repeats:,} repeats left out"
    )
    show(options, figures, lines=[line])
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# The demo, and completion
# ----------------------------------------------------------------------------------------------------------------------


def _demo_parser(commands: Any) -> argparse.ArgumentParser:
    demo = commands.add_parser("demo", help="the main job on a small real model")
    demo.add_argument("--engine", choices=("transformers", "vllm", "vllm-scheduler"), default="transformers")
    demo.add_argument("--trainer", choices=("transformers", "automodel", "megatron"), default="transformers")
    demo.add_argument("--trainer-python", help="interpreter of the trainer's own environment")
    demo.add_argument("--transport", choices=("file", "folder"), default="file")
    demo.add_argument("--fleet", action="store_true", help="all parts as actors of a Ray cluster, rollouts over HTTP")
    demo.add_argument("--compare", action="store_true", help="with --fleet: start it also with one task after another")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--out", type=Path, help="keep the model and the streams in this folder")
    demo.add_argument("--report", type=Path, metavar="FILE", help="write what the run's routes look like, as HTML")
    demo.set_defaults(run=_demo)
    return demo  # type: ignore[no-any-return]


def _demo(options: argparse.Namespace) -> int:
    def run(folder: str) -> dict[str, Any]:
        chosen = DemoOptions(
            out=folder,
            engine=options.engine,
            trainer=options.trainer,
            trainer_python=options.trainer_python or "",
            transport=options.transport,
            fleet=options.fleet,
            compare=options.compare,
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
    shown = [f"  report {figures['report']}"] if options.report is not None else []
    show(options, figures, lines=[*format_table(figures).splitlines(), *shown])
    return 0


def _completion(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise MissingExtraError(
            f"expected the extra routeplane[completion], got: {error}", kind=ErrorKind.MISSING_EXTRA
        ) from error
    print(shtab.complete(_parser(), shell=options.shell))
    return 0
