"""Every command over every kind of place: exit status as the reference says; and what holds for all commands."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from routeplane import __version__
from routeplane.cli import main as cli
from routeplane.cli.convert import convert
from routeplane.inspect.statistics import Collector
from tests.cli.test_main import Program
from tests.inspect.containers import archived, streamed
from tests.inspect.runs import run

RECORDS = run(4)
SAMPLE = RECORDS[0].sample_id


@pytest.fixture
def routeplane(capsys: pytest.CaptureFixture[str]) -> Program:
    """The program."""
    return Program(capsys)


# ----------------------------------------------------------------------------------------------------------------------
# Commands x places
# ----------------------------------------------------------------------------------------------------------------------


def _stream(folder: Path) -> str:
    return streamed(folder / "a.arrows", RECORDS)


def _archive(folder: Path) -> str:
    return archived(folder / "a.zarr", RECORDS)


def _parquet(folder: Path) -> str:
    convert(_stream(folder), folder / "a.parquet")
    return str(folder / "a.parquet")


def _blocks(folder: Path) -> str:
    (folder / "blocks").mkdir()
    streamed(folder / "blocks" / "0.arrows", RECORDS[:2])
    streamed(folder / "blocks" / "1.arrows", RECORDS[2:])
    return str(folder / "blocks")


def _pattern(folder: Path) -> str:
    _blocks(folder)
    return str(folder / "blocks" / "*.arrows")


def _url(folder: Path) -> str:
    return Path(_stream(folder)).as_uri()


def _cut(folder: Path) -> str:
    path = Path(_stream(folder))
    path.write_bytes(path.read_bytes()[:-8])
    return str(path)


def _corrupt(folder: Path) -> str:
    """One row of the first record says an expert twice."""
    path = Path(_stream(folder))
    data, row = bytearray(path.read_bytes()), RECORDS[0].routes[3, 0]
    at = data.index(row.astype("<i2").tobytes())
    data[at + 2 : at + 4] = data[at : at + 2]
    path.write_bytes(data)
    return str(path)


def _text(folder: Path) -> str:
    (folder / "a.arrows").write_text("no stream")
    return str(folder / "a.arrows")


def _absent(folder: Path) -> str:
    return str(folder / "absent.arrows")


def _empty(folder: Path) -> str:
    (folder / "empty").mkdir()
    return str(folder / "empty")


#: What lies at a place, and the status that commands end with there: those that look, and ``convert``.
PLACES: dict[str, tuple[Callable[[Path], str], int, int]] = {
    "stream": (_stream, 0, 0),
    "archive": (_archive, 0, 0),
    "parquet": (_parquet, 0, 0),
    "blocks": (_blocks, 0, 0),
    "pattern": (_pattern, 0, 0),
    "url": (_url, 0, 0),
    "cut": (_cut, 1, 1),
    "corrupt": (_corrupt, 1, 1),
    "text": (_text, 1, 1),
    "absent": (_absent, 2, 2),
    "empty": (_empty, 2, 2),
}
#: A command -> its arguments behind the place.
COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "info": lambda folder: [],
    "validate": lambda folder: [],
    "stats": lambda folder: [],
    "diff": lambda folder: [streamed(folder / "other.arrows", RECORDS)],
    "explain": lambda folder: [RECORDS[1].sample_id, "3"],
    "report": lambda folder: ["--out", str(folder / "page.html")],
    "convert": lambda folder: [str(folder / "copy.arrows")],
}
#: Where a command has less to say than the others: one sample that is intact, counts that need no row.
LENIENT = {("explain", "cut"): 0, ("explain", "corrupt"): 0, ("info", "corrupt"): 0}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_at_a_place_ends_as_documented(routeplane: Program, tmp_path: Path, command: str, place: str) -> None:
    """0 for good, 1 for damage of any kind, 2 where there is nothing to read; JSON either way."""
    make, looking, converting = PLACES[place]
    (tmp_path / "at").mkdir()
    found = routeplane(command, make(tmp_path / "at"), *COMMANDS[command](tmp_path), "--json")
    expected = LENIENT.get((command, place), converting if command == "convert" else looking)
    assert expected == found.status, found.out + found.err
    assert json.loads(found.out if expected < 2 else found.err)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "convert"])
def test_a_command_reads_stdin(
    routeplane: Program, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``-`` is a place like the others, read twice where that is needed."""
    data = Path(_stream(tmp_path)).read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    assert 0 == routeplane(command, "-", *COMMANDS[command](tmp_path), "--json").status


# ----------------------------------------------------------------------------------------------------------------------
# All commands
# ----------------------------------------------------------------------------------------------------------------------


def test_names_from_the_data_cannot_forge_output(routeplane: Program, tmp_path: Path) -> None:
    """Escape sequences and line breaks in a sample's name are printed as text."""
    hostile = "a\x1b[2J\nrouteplane: all is well\u202e"
    records = [
        replace(record, sample_id=f"{hostile}{index}", checksum=None) for index, record in enumerate(run(3, lost=9))
    ]
    left = streamed(tmp_path / "left.arrows", records)
    right = streamed(tmp_path / "right.arrows", records[1:])
    for arguments in (
        ["stats", left],
        ["diff", left, right],
        ["validate", left],
        ["explain", left, f"{hostile}1/0/0", 3],
    ):
        shown = routeplane(*arguments)
        assert "\x1b" not in shown.out + shown.err
        assert "\u202e" not in shown.out + shown.err
        assert not any(line.startswith("routeplane: all") for line in shown.out.splitlines())
    assert "\\x1b[2J\\n" in routeplane("stats", left).out


def test_ctrl_c_leaves_one_line_and_status_130(
    routeplane: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trace; ``convert`` into an archive says that it can go on."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    place = _stream(tmp_path)
    monkeypatch.setattr(Collector, "add", interrupted)
    shown = routeplane("stats", place)
    assert (130, "", "routeplane: interrupted\n") == (shown.status, shown.out, shown.err)
    monkeypatch.setattr("routeplane.cli.convert.convert", interrupted)
    shown = routeplane("convert", place, tmp_path / "b.zarr")
    assert (130, "routeplane: interrupted; the same command goes on where it stopped\n") == (shown.status, shown.err)


def test_the_base_install_runs_all_commands_but_the_report(tmp_path: Path) -> None:
    """Without rich, jinja2, vl-convert, numba and ray; the report names its extra before it reads."""
    place = _stream(tmp_path)
    program = (
        "import sys\n"
        "for name in ('rich', 'jinja2', 'vl_convert', 'numba', 'ray', 'torch', 'polars', 'zarr'):\n"
        "    sys.modules[name] = None\n"
        "from routeplane.cli.main import main\n"
        f"place = {place!r}\n"
        "for arguments in (['info', place], ['validate', place], ['stats', place], ['diff', place, place],\n"
        f"                  ['explain', place, {SAMPLE!r}, '3'], ['convert', place, place + '.parquet']):\n"
        "    assert main(arguments=arguments) == 0, arguments\n"
        "sys.exit(main(arguments=['report', 'nowhere.arrows']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert 2 == done.returncode, done.stderr
    assert "routeplane[report]" in done.stderr


def test_the_module_runs_as_the_program() -> None:
    """``python -m routeplane --version``."""
    done = subprocess.run([sys.executable, "-m", "routeplane", "--version"], capture_output=True, text=True, check=True)
    assert f"routeplane {__version__}\n" == done.stdout


@pytest.mark.parametrize("command", ["info", "validate", "stats"])
def test_of_several_streams_the_damaged_one_is_named(routeplane: Program, tmp_path: Path, command: str) -> None:
    """In text and as JSON."""
    streamed(tmp_path / "good.arrows", RECORDS)
    _text(tmp_path)

    assert "a.arrows" in routeplane(command, str(tmp_path / "*.arrows")).out
    assert "a.arrows" in routeplane(command, str(tmp_path / "*.arrows"), "--json").out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_is_printed_for_a_shell(routeplane: Program, shell: str) -> None:
    """A script that knows the commands."""
    shown = routeplane("completion", shell)
    assert (0, True) == (shown.status, "validate" in shown.out)


def test_usage_errors_are_json_under_json(routeplane: Program) -> None:
    """As all others that keep a command from running."""
    shown = routeplane("validate", "a", "--alarms", "never", "--json")
    assert (2, "", "argument") == (shown.status, shown.out, json.loads(shown.err)["error"]["kind"])
    assert "\\n" not in routeplane("report").err  # the usage is one line


def test_progress_stays_silent_where_stderr_is_not_a_terminal(
    routeplane: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log file gets no carriage returns."""
    monkeypatch.setattr("routeplane.cli.output._PATIENCE", 0.0)
    assert "" == routeplane("stats", _stream(tmp_path)).err
    assert cli.main(arguments=["info", _stream(tmp_path)]) == 0
