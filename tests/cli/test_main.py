"""The command line, command by command: exit status, data on stdout, complaints on stderr, and what it accepts.

Commands run in this process; one test starts the installed program. What is found in a stream is ``tests/inspect``'s.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeplane.archive import save_archive
from routeplane.cli import main as cli
from routeplane.cli.demo import DemoOptions
from routeplane.errors import ErrorKind, RouteplaneError
from routeplane.record.record import RouteRecord
from routeplane.stream import new_stream
from routeplane.testing.builders import watermark, watermarked_record, watermarked_spec

SPEC = watermarked_spec()
RECORDS = tuple(watermarked_record(sample, num_tokens=size, spec=SPEC) for sample, size in enumerate((5, 40, 7)))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run of the program left."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON object that is all of stdout."""
        assert 1 == self.out.count("\n")
        found: dict[str, Any] = json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        return found


class Program:
    """The program, as somebody types it."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Outcome:
        """Run one command."""
        self._capsys.readouterr()
        try:
            status = cli.main(arguments=[str(argument) for argument in arguments])
        except SystemExit as left:  # argparse leaves so
            status = int(left.code or 0)
        out, err = self._capsys.readouterr()
        return Outcome(status=status, out=out, err=err)


@pytest.fixture
def routeplane(capsys: pytest.CaptureFixture[str]) -> Program:
    """The program."""
    return Program(capsys)


def written(path: Path, records: Sequence[RouteRecord] = RECORDS) -> Path:
    """A stream file."""
    with new_stream(path, SPEC) as sink:
        for record in records:
            sink.write(record)
    return path


def row(sample: int, token: int, layer: int) -> bytes:
    """A watermarked row as it stands in the file."""
    return watermark(sample, token, layer=layer, k=np.arange(SPEC.top_k)).tobytes()


def ids(*values: int) -> bytes:
    """A row of one's own making."""
    return np.array(values, dtype="<i2").tobytes()


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A whole stream."""
    return written(tmp_path / "good.arrows")


@pytest.fixture
def corrupt(good: Path) -> Path:
    """Three illegal rows in two records."""
    data = good.read_bytes()
    for old, new in (
        (row(1, 3, 2), ids(7, 7, 8, 9)),
        (row(1, 4, 1), ids(1, 2, 3, 32_760)),
        (row(2, 0, 5), ids(-1, 2, 3, 4)),
    ):
        data = data.replace(old, new)
    path = good.with_name("corrupt.arrows")
    path.write_bytes(data)
    return path


@pytest.fixture
def alarming(tmp_path: Path) -> Path:
    """A legal stream with a run of 33 equal rows in all layers."""
    routes_SLK = RECORDS[1].routes.copy()
    routes_SLK[3:36] = routes_SLK[3]
    return written(tmp_path / "alarming.arrows", [RECORDS[0], replace(RECORDS[1], routes=routes_SLK, checksum=None)])


#: Files whose bytes are no whole stream of this version, and the kind of their one problem.
BROKEN: dict[str, tuple[Any, ErrorKind]] = {
    "empty": (lambda data: b"", ErrorKind.TRUNCATED),
    "text": (lambda data: b"not a stream", ErrorKind.NOT_ARROW),
    "cut_in_the_schema": (lambda data: data[:100], ErrorKind.TRUNCATED),
    "cut_in_the_body": (lambda data: data[: len(data) // 2], ErrorKind.TRUNCATED),
    "without_an_end": (lambda data: data[:-8], ErrorKind.TRUNCATED),
    "more_after_the_end": (lambda data: data + b"\0", ErrorKind.TRAILER),
    "of_the_next_version": (
        lambda data: data.replace(b"\x03\x00\x00\x001.1\x00", b"\x03\x00\x00\x002.0\x00"),
        ErrorKind.VERSION,
    ),
}


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, good: Path) -> tuple[Path, ErrorKind]:
    """A file of each kind."""
    change, kind = BROKEN[request.param]
    path = good.with_name("broken.arrows")
    path.write_bytes(change(good.read_bytes()))
    return path, kind


# ---- the program ----------------------------------------------------------------------------------------------------

SALVAGE = {"--on-corrupt", "--on-truncated"}
OPTIONS = {
    "info": {"--help", "--json"},
    "validate": {"--help", "--json", "--alarms"},
    "stats": {"--help", "--json", "--layer", "--samples", "--ray", *SALVAGE},
    "diff": {"--help", "--json", "--layer", "--samples", *SALVAGE},
    "explain": {"--help", "--json", "--layer", *SALVAGE},
    "report": {
        *("--help", "--json", "--layer", "--samples", "--ray", "--against", "--attribute", "--out", "--png"),
        *SALVAGE,
    },
    "audit": {"--against", "--captured", "--decoder-layers", "--help", "--json", "--layout", "--model"},
    "probe": {
        *("--help", "--json", "--model", "--layers", "--experts", "--top-k", "--vocabulary", "--served-model"),
        *("--axis", "--header", "--at-once", "--max-flipped", "--seed"),
    },
    "convert": {"--help", "--json", "--encoding", "--overwrite", "--flat", "--nested", *SALVAGE},
    "archive": {"--help", "--json", "--group", "--producers", "--follow", "--blocks-per-run"},
    "demo": {
        *("--help", "--json", "--engine", "--fleet", "--compare", "--trainer", "--trainer-python", "--transport"),
        *("--seed", "--out", "--report"),
    },
}


@pytest.mark.parametrize("command", OPTIONS)
def test_the_options_of_a_command_are_these(routeplane: Program, command: str) -> None:
    """A new option is a decision: it changes this list, and the documentation with it."""
    shown = routeplane(command, "--help")
    assert (0, "") == (shown.status, shown.err)
    assert OPTIONS[command] == set(re.findall(r"(?<!-)--[a-z][a-z-]*", shown.out))


def test_the_commands_are_these(routeplane: Program) -> None:
    """Help names every command and the exit status, on stdout."""
    shown = routeplane("--help")
    assert (0, "") == (shown.status, shown.err)
    assert [*OPTIONS, "completion"] == re.findall(r"^    ([a-z]+)(?:  |$)", shown.out, re.MULTILINE)
    assert "exit status: 0 good, 1 data invalid or different, 2 could not run, 130 interrupted" in shown.out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["info"],
        ["validate"],
        ["validate", "a", "b"],
        ["validate", "a", "--alarms", "never"],
        ["info", "a", "--verbose"],
        ["demo", "--engine", "sglang"],
        ["demo", "--seed", "x"],
        ["demo", "--transport", "smoke"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_understood_is_status_2(routeplane: Program, arguments: list[str]) -> None:
    """Usage goes to stderr, and nothing to stdout."""
    found = routeplane(*arguments)
    assert (2, "") == (found.status, found.out)
    assert "usage: routeplane" in found.err


def test_the_installed_program_is_light(corrupt: Path) -> None:
    """The entry point exits with the status, prints no more than its data, and loads no torch to look at a stream."""
    (entry,) = [item for item in metadata.entry_points(group="console_scripts") if item.name == "routeplane"]
    assert "routeplane.cli.main:main" == entry.value
    script = (
        "import sys; from routeplane.cli.main import main; status = main(); "
        "print(sorted({'torch', 'transformers', 'vllm', 'hypothesis'} & set(sys.modules)), file=sys.stderr); "
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "validate", str(corrupt), "--json"], capture_output=True, text=True, check=False
    )
    assert (1, "[]\n") == (done.returncode, done.stderr)
    assert 3 == len(json.loads(done.stdout)["problems"])


# ---- info -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_reader_that_left_is_status_2(good: Path, unbuffered: str) -> None:
    """A closed pipe: one line on stderr, and no status or trace of the interpreter's own."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; from routeplane.cli.main import main; sys.exit(main())",
                "info",
                str(good),
            ],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    finally:
        os.close(writing)
    assert (2, 1) == (done.returncode, done.stderr.count("\n"))
    assert "Broken pipe" in done.stderr


def test_info_tells_what_a_stream_holds(routeplane: Program, good: Path) -> None:
    """The same names and values as text and as JSON."""
    text, found = routeplane("info", good), routeplane("info", good, "--json")
    assert (0, "", 0, "") == (text.status, text.err, found.status, found.err)
    expected = {
        "path": str(good),
        "bytes": good.stat().st_size,
        "format": "1.1",
        "encoding": "plain",
        "model": "watermarked",
        "num_experts": SPEC.num_experts,
        "top_k": 4,
        "layers": 3,
        "layer_ids": [1, 2, 5],
        "token_columns": [],
        "batches": 1,
        "records": 3,
        "tokens": 52,
        "coverage": {"captured": 49, "not_fed": 3},
        "missing_share": 0.0,
        "quarantined": 0,
        "damage": "",
        "complete": True,
    }
    assert expected == found.document
    assert {name: str(value) for name, value in expected.items() if value != ""} == dict(
        line.split(maxsplit=1) for line in text.out.splitlines() if not line.startswith("damage")
    )


def test_info_of_a_cut_stream_is_status_1(routeplane: Program, good: Path) -> None:
    """What came is shown, and that it is not whole."""
    good.write_bytes(good.read_bytes()[:-8])
    found = routeplane("info", good, "--json")
    assert (1, False, 3) == (found.status, found.document["complete"], found.document["records"])
    assert 1 == routeplane("info", good).status


def test_info_counts_records_that_were_set_aside(routeplane: Program, corrupt: Path) -> None:
    """Whatever its verdict, it does not count corrupt records among the good."""
    found = routeplane("info", corrupt, "--json").document
    assert (2, {"captured": 4, "lost": 45, "not_fed": 3}) == (found["quarantined"], found["coverage"])


def test_info_reports_a_broken_stream(routeplane: Program, broken: tuple[Path, ErrorKind]) -> None:
    """Status 1, and on stdout either a summary that says it is incomplete or the error with its kind."""
    path, kind = broken
    found = routeplane("info", path, "--json")
    assert (1, "") == (found.status, found.err)
    if "error" in found.document:
        assert str(kind) == found.document["error"]["kind"]
        assert routeplane("info", path).out.startswith(f"error: {kind}: expected ")
    else:
        assert found.document["complete"] is False


# ---- validate -------------------------------------------------------------------------------------------------------


def test_a_good_stream_is_status_0(routeplane: Program, good: Path) -> None:
    """One line of text; one object of JSON without problems."""
    text = routeplane("validate", good)
    assert (0, "3 records, 52 tokens (captured 49, not_fed 3): valid\n", "") == (text.status, text.out, text.err)
    found = routeplane("validate", good, "--json")
    assert (0, "") == (found.status, found.err)
    coverage = {"captured": 49, "not_fed": 3}
    assert {"valid": True, "records": 3, "tokens": 52, "coverage": coverage, "problems": []} == found.document


def test_every_problem_has_sample_token_and_layer(routeplane: Program, corrupt: Path) -> None:
    """A corrupt stream is status 1; its problems are data, so they stand on stdout."""
    found = routeplane("validate", corrupt, "--json")
    assert (1, "", False) == (found.status, found.err, found.document["valid"])
    assert [
        ("error", "duplicate_id", "sample-1", 3, 2),
        ("error", "id_out_of_range", "sample-1", 4, 1),
        ("error", "partial_row", "sample-2", 0, 5),
    ] == [
        tuple(problem[name] for name in ("severity", "kind", "sample", "token", "layer"))
        for problem in found.document["problems"]
    ]
    text = routeplane("validate", corrupt)
    assert (1, "") == (text.status, text.err)
    assert [
        "error: duplicate_id: expected pairwise distinct ids, got [7, 7, 8, 9] @ sample sample-1, token 3, layer 2",
        "error: id_out_of_range: expected ids in [0, 32749), got [1, 2, 3, 32760] @ sample sample-1, token 4, layer 1",
        "error: partial_row: expected all ids -1 or none negative, got [-1, 2, 3, 4] @ sample sample-2, token 0, "
        "layer 5",
        "3 records, 52 tokens (captured 4, not_fed 3, lost 45): 3 errors, 0 alarms",
    ] == text.out.splitlines()


def test_a_changed_expert_is_status_1(routeplane: Program, good: Path) -> None:
    """A legal row that is not the captured one is a checksum's finding."""
    good.write_bytes(good.read_bytes().replace(row(1, 3, 2), ids(4, 3, 2, 1)))
    found = routeplane("validate", good, "--json")
    assert (1, [("checksum", "sample-1")]) == (
        found.status,
        [(problem["kind"], problem["sample"]) for problem in found.document["problems"]],
    )


def test_validating_a_broken_stream_is_status_1(routeplane: Program, broken: tuple[Path, ErrorKind]) -> None:
    """The verdict has its usual form, in text and in JSON, however little could be read."""
    path, kind = broken
    found = routeplane("validate", path, "--json")
    assert (1, False, [str(kind)]) == (
        found.status,
        found.document["valid"],
        [problem["kind"] for problem in found.document["problems"]],
    )
    text = routeplane("validate", path)
    assert (1, 2) == (text.status, len(text.out.splitlines()))
    assert text.out.startswith(f"error: {kind}: expected ")


def test_alarms_fail_by_choice(routeplane: Program, alarming: Path) -> None:
    """They are listed either way; the status follows ``--alarms``."""
    for arguments, status in (([], 0), (["--alarms", "report"], 0), (["--alarms", "fail"], 1)):
        found = routeplane("validate", alarming, "--json", *arguments)
        assert (status, True) == (found.status, found.document["valid"])
        assert [("alarm", "identical_rows", "sample-1", 3)] == [
            tuple(problem[name] for name in ("severity", "kind", "sample", "token"))
            for problem in found.document["problems"]
        ]
    assert routeplane("validate", alarming).out.startswith("alarm: identical_rows: expected ")


@pytest.mark.parametrize("alarms", ["report", "fail"])
def test_errors_fail_whatever_alarms_do(routeplane: Program, corrupt: Path, alarms: str) -> None:
    """``--alarms report`` forgives no error."""
    assert 1 == routeplane("validate", corrupt, "--alarms", alarms).status


@pytest.mark.parametrize("command", ["info", "validate"])
def test_a_file_that_is_not_there_is_status_2(routeplane: Program, tmp_path: Path, command: str) -> None:
    """As is a folder: no verdict on data, nothing on stdout, one line that names the path on stderr."""
    for path in (tmp_path / "absent.arrows", tmp_path):
        for form in ([], ["--json"]):
            found = routeplane(command, path, *form)
            assert (2, "") == (found.status, found.out)
            if form:
                assert str(path) in json.loads(found.err)["error"]["message"]
            else:
                assert re.fullmatch(rf"routeplane: .*{re.escape(str(path))}.*\n", found.err)


def test_validate_reads_a_pipe(routeplane: Program, good: Path) -> None:
    """A path that is not a regular file is read in one pass."""
    with subprocess.Popen(["cat", str(good)], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        found = routeplane("validate", f"/dev/fd/{cat.stdout.fileno()}", "--json")
    assert (0, 3) == (found.status, found.document["records"])


# ---- archives -------------------------------------------------------------------------------------------------------


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """The records of ``good`` as an archive."""
    save_archive(RECORDS, tmp_path / "good.zarr", spec=SPEC, run="step-1")
    return tmp_path / "good.zarr"


def test_info_and_validate_take_archives(routeplane: Program, archive: Path) -> None:
    """Found by what stands at the path; text and JSON say the same."""
    text, found = routeplane("info", archive), routeplane("info", archive, "--json")
    assert (0, "", 0, "") == (text.status, text.err, found.status, found.err)
    assert {"commit": 1, "runs": {"step-1": 3}, "records": 3, "tokens": 52}.items() <= found.document.items()
    assert {name: str(value) for name, value in found.document.items()} == dict(
        line.split(maxsplit=1) for line in text.out.splitlines()
    )
    text = routeplane("validate", archive)
    assert (0, "3 records, 52 tokens (captured 49, not_fed 3): valid\n", "") == (text.status, text.out, text.err)


def test_a_damaged_archive_is_status_1(routeplane: Program, archive: Path) -> None:
    """``validate`` lists the damage on stdout; ``info`` complains where it cannot open it."""
    (run,) = archive.glob("runs/step-1-*")
    (run / "token_ids/c/0").unlink()
    found = routeplane("validate", archive, "--json")
    assert (1, "", False) == (found.status, found.err, found.document["valid"])
    assert {("lost_file", f"sample-{index}") for index in range(3)} == {
        (problem["kind"], problem["sample"]) for problem in found.document["problems"]
    }
    (run / "records/manifest.json").write_text("{}")
    shown = routeplane("info", archive)
    assert (1, "") == (shown.status, shown.err)
    assert shown.out.startswith("error: corrupt_chunk: expected ")


# ---- demo -----------------------------------------------------------------------------------------------------------

FIGURES: dict[str, Any] = {
    "engine": "transformers",
    "trainer": "transformers",
    "transport": "file",
    "seed": 5,
    "tokens": 100,
    "rows": 396,
    "coverage": {"captured": 99, "cached": 0, "not_fed": 1, "missing": 0},
    "flipped_share": 0.125,
    "stream_bytes": 12_345,
    "seconds": {"total": 1.5},
    **{
        f"{figure}_{column}": 0.5
        for figure in ("mean_abs_diff", "max_abs_diff", "kl")
        for column in ("live", "replay", "shift_token", "shift_layer")
    },
}


class Demo:
    """Stands in for the real run: keeps what it was asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[DemoOptions] = []
        self.error = error

    def __call__(self, options: DemoOptions) -> dict[str, Any]:
        """Answer with the figures, or fail."""
        self.asked.append(options)
        if self.error is not None:
            raise self.error
        (Path(options.out) / "left").write_text("by the run", encoding="utf-8")
        return FIGURES


def test_demo_prints_figures_or_a_table(routeplane: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``--json`` gives the object as it is; the options reach the run; ``--out`` keeps its files."""
    demo = Demo()
    monkeypatch.setattr(cli, "run_demo", demo)
    found = routeplane("demo", "--json", "--engine", "vllm", "--seed", "5", "--out", tmp_path)
    assert (0, "", FIGURES) == (found.status, found.err, found.document)
    expected = DemoOptions(out=str(tmp_path), engine="vllm", seed=5, progress=False)
    assert [expected] == demo.asked
    assert (tmp_path / "left").exists()
    table = routeplane("demo", "--out", tmp_path)
    assert (0, "") == (table.status, table.err)
    assert "12.5%" in table.out
    assert "12345 bytes" in table.out


def test_demo_writes_a_report_of_its_streams(
    routeplane: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the engine's routes against the trainer's own, into a folder that is made; the table says where."""

    def run(options: DemoOptions) -> dict[str, Any]:
        written(Path(options.kept_stream))
        written(Path(options.trainer_stream))
        return FIGURES

    monkeypatch.setattr(cli, "run_demo", run)
    page = tmp_path / "made" / "report.html"
    found = routeplane("demo", "--json", "--report", page)
    assert (0, {**FIGURES, "report": str(page)}) == (found.status, found.document)
    assert "routes of watermarked" in page.read_text(encoding="utf-8")
    assert f"report {page}" in routeplane("demo", "--report", page).out


def test_demo_without_out_leaves_nothing(routeplane: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in a folder of its own that is gone afterwards, with the defaults otherwise."""
    demo = Demo()
    monkeypatch.setattr(cli, "run_demo", demo)
    assert 0 == routeplane("demo", "--json").status
    (asked,) = demo.asked
    assert DemoOptions(out=asked.out, progress=False) == asked
    assert not Path(asked.out).exists()


@pytest.mark.parametrize(
    "error", [RouteplaneError("a stage died", kind=ErrorKind.CHILD_FAILED), OSError("a stage died")]
)
def test_a_demo_that_fails_is_status_2(
    routeplane: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    """No figures on stdout; the reason on stderr."""
    monkeypatch.setattr(cli, "run_demo", Demo(error))
    for form in ([], ["--json"]):
        found = routeplane("demo", "--out", tmp_path, *form)
        assert (2, "") == (found.status, found.out)
        assert "a stage died" in found.err
        assert found.err.startswith('{"error": ' if form else "routeplane: ")


def test_a_demo_into_a_file_is_status_2(routeplane: Program, good: Path) -> None:
    """``--out`` that is not a folder fails before any model is built, and leaves the file alone."""
    before = good.read_bytes()
    found = routeplane("demo", "--out", good)
    assert (2, "", before) == (found.status, found.out, good.read_bytes())
    assert str(good) in found.err
