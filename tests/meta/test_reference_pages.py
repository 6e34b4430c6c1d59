"""The reference pages say what the code says: errors, reports, command line. And links lead somewhere.

Each page holds tables; a checker compares one page's text with the code and lists what differs, so that it can be tried
on a changed page too. Which errors a kind is raised as is read from the source text.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import routeplane.errors
from benchmarks.results_page import results_page
from routeplane.archive import AddReport, ArchiveCheck, Compaction, Recovery
from routeplane.batch.columns import MaskCounts
from routeplane.batch.loader import PrefetchReport
from routeplane.batch.matching import JoinReport
from routeplane.capture.http import MiddlewareReport, TicketReport
from routeplane.capture.vllm import EngineReport, WritingReport
from routeplane.cli.main import _parser, main
from routeplane.errors import ErrorKind, RouteplaneError
from routeplane.fleet.startup import Timeline
from routeplane.inspect.audit import AuditReport
from routeplane.inspect.compare import RouteDiff
from routeplane.inspect.statistics import collect
from routeplane.record.assembly import AssemblyReport
from routeplane.record.interfaces import Report
from routeplane.record.prefixes import PromptReport
from routeplane.record.spans import Coverage
from routeplane.record.spec import RouteSpec
from routeplane.replay.handle import ReplayReport
from routeplane.stream import StreamReport, new_stream
from routeplane.testing.builders import watermarked_record, watermarked_spec

ROOT = Path(__file__).parents[2]
SPEC = watermarked_spec()

# ----------------------------------------------------------------------------------------------------------------------
# Reading a page
# ----------------------------------------------------------------------------------------------------------------------


def page(name: str) -> str:
    """The text of a reference page."""
    return (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """Heading -> the text below it, up to the next heading; backticks around a heading are dropped."""
    parts = re.split(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    return {heading.replace("`", ""): body for heading, body in zip(parts[1::2], parts[2::2], strict=True)}


def table(text: str) -> list[list[str]]:
    """The cells of the first table of a text, without its header."""
    found = re.search(r"(?:^\|.*\|\n?)+", text, re.MULTILINE)
    lines = found[0].splitlines() if found else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code_in(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


def differences(what: str, expected: object, got: object) -> list[str]:
    """One line where two things are not equal."""
    return [] if expected == got else [f"{what}: the code has {expected}, the page {got}"]


@cache
def sources() -> Mapping[str, str]:
    """Every module of the package: path relative to the repository -> text."""
    paths = sorted((ROOT / "routeplane").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


# ----------------------------------------------------------------------------------------------------------------------
# errors.md
# ----------------------------------------------------------------------------------------------------------------------


def error_classes() -> list[type[RouteplaneError]]:
    """Every error of the library."""
    found = [item for _, item in inspect.getmembers(routeplane.errors, inspect.isclass)]
    return [item for item in found if issubclass(item, RouteplaneError)]


def raised_kinds() -> Iterator[tuple[str, str, str]]:
    """``(kind, class, where)`` of every error that is made with a kind written down beside it."""
    names = {item.__name__ for item in error_classes()}
    for path, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                for keyword in node.keywords:
                    found = re.fullmatch(r"ErrorKind\.(\w+)", ast.unparse(keyword.value))
                    if keyword.arg == "kind" and found:
                        yield ErrorKind[found[1]].value, ast.unparse(node.func), f"{path}:{node.lineno}"


def find_error_problems(text: str) -> list[str]:
    """Where ``errors.md`` differs from the code."""
    parts = sections(text)
    written = {tuple((code_in(cell) or [""])[0] for cell in row[:3]) for row in table(parts["Classes"])}
    true = set()
    for item in error_classes():
        ours = [base.__name__ for base in item.__bases__ if issubclass(base, RouteplaneError)]
        theirs = [base.__name__ for base in item.__bases__ if not issubclass(base, RouteplaneError)]
        true.add((item.__name__, *(ours or [""]), *(theirs or [""])))
    found = [f"classes: {line}" for line in sorted(map(str, true ^ written))]

    kinds = {code_in(kind)[0]: set(code_in(classes)) for kind, classes, _ in table(parts["Kinds"])}
    found += differences("kinds in order", [kind.value for kind in ErrorKind], list(kinds))
    unknown = set().union(*kinds.values()) - {item.__name__ for item in error_classes()}
    found += [f"no such error: {name}" for name in sorted(unknown)]
    for kind, name, where in raised_kinds():
        if name not in kinds.get(kind, {name}):
            found.append(f"{kind}: raised as {name} at {where}")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# reports.md
# ----------------------------------------------------------------------------------------------------------------------

REPORTS: dict[str, Report] = {
    "Coverage": Coverage(),
    "Timeline": Timeline(),
    "AssemblyReport": AssemblyReport(),
    "WritingReport": WritingReport(),
    "EngineReport": EngineReport(),
    "StreamReport": StreamReport(),
    "AddReport": AddReport(),
    "ArchiveCheck": ArchiveCheck(),
    "Recovery": Recovery(),
    "Compaction": Compaction(),
    "PromptReport": PromptReport(),
    "AuditReport": AuditReport(),
    "JoinReport": JoinReport(),
    "MaskCounts": MaskCounts(),
    "PrefetchReport": PrefetchReport(),
    "TicketReport": TicketReport(),
    "MiddlewareReport": MiddlewareReport(),
    "RouteStatistics": collect([], RouteSpec(num_experts=4, top_k=2, layer_ids=(0,))),
    "RouteDiff": RouteDiff.empty(*[RouteSpec(num_experts=4, top_k=2, layer_ids=(0,))] * 2),
    "ReplayReport": ReplayReport(gates=(), microbatches=0),
}


def report_classes() -> set[str]:
    """Every class with ``scalars``, its own or by the base ``Counts``; but for that base and the protocol of them."""
    classes = [
        node for text in sources().values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    ]
    return {
        node.name
        for node in classes
        if node.name != "Counts"
        and "Protocol" not in map(ast.unparse, node.bases)
        and (
            "Counts" in map(ast.unparse, node.bases)
            or any(isinstance(item, ast.FunctionDef) and item.name == "scalars" for item in node.body)
        )
    }


def find_report_problems(text: str) -> list[str]:
    """Where ``reports.md`` differs from the code."""
    parts = sections(text)
    written: dict[str, list[str]] = {}
    for name in REPORTS:
        rows = [row[0] for row in table(parts.get(name, ""))]
        written[name] = [code for row in rows if not row.startswith("all names") for code in code_in(row)]
        for row in rows:
            if row.startswith("all names"):
                other, prefix = code_in(row)
                written[name] += [prefix + one for one in written[other]]
    found = differences("reports", report_classes(), set(REPORTS))
    for name, report in REPORTS.items():
        found += differences(name, sorted(report.scalars(prefix="")), sorted(written[name]))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# cli.md
# ----------------------------------------------------------------------------------------------------------------------


def commands() -> dict[str, argparse.ArgumentParser]:
    """Each command's parser."""
    [choices] = [action.choices for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(choices)


def argument(action: argparse.Action) -> tuple[str, str, tuple[str, ...]]:
    """An argument as the page writes it: its name, its default, its choices."""
    name = (action.option_strings or [action.dest])[-1]
    if not action.option_strings:
        return name, "required", ()
    default = "off" if action.default is False else "" if action.default is None else f"`{action.default}`"
    return name, default, tuple(action.choices or ())


def find_cli_problems(text: str) -> list[str]:
    """Where ``cli.md`` differs from the parser."""
    parts = sections(text)
    found = differences(
        "commands",
        {f"routeplane {name}" for name in commands()},
        {heading for heading in parts if heading.startswith("routeplane ")},
    )
    for name, parser in commands().items():
        expected = [argument(action) for action in parser._actions if action.dest != "help"]
        rows = [(code_in(row[0])[0], *row[1:]) for row in table(parts.get(f"routeplane {name}", ""))]
        found += differences(f"{name}: arguments", sorted(one[0] for one in expected), sorted(row[0] for row in rows))
        written = {row[0]: row[1:] for row in rows}
        for flag, default, choices in expected:
            said, meaning = written.get(flag, (default, ""))
            # what has no value until it is needed is described in words
            if default:
                found += differences(f"{name} {flag}: default", default, said)
            if flag in written and not set(choices) <= set(code_in(meaning)):
                found += differences(f"{name} {flag}: choices", choices, tuple(code_in(meaning)))
    return found


def json_keys(command: str) -> list[str]:
    """The keys that the page names for a command's JSON object, as it names them."""
    text = sections(page("cli"))[f"routeplane {command}"]
    found = re.search(r"^JSON keys: (.*?)\.\n", text, re.MULTILINE | re.DOTALL)
    return code_in(found[1]) if found else []


# ----------------------------------------------------------------------------------------------------------------------
# Links
# ----------------------------------------------------------------------------------------------------------------------


def links_of(path: Path) -> list[Path]:
    """The files that a page links to, without those of other sites and without anchors."""
    without_code = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(([^)#\s]+)[^)]*\)", without_code)
    return [(path.parent / link).resolve() for link in found if "://" not in link]


# ----------------------------------------------------------------------------------------------------------------------
# The pages
# ----------------------------------------------------------------------------------------------------------------------

CHECKERS: dict[str, Callable[[str], list[str]]] = {
    "errors": find_error_problems,
    "reports": find_report_problems,
    "cli": find_cli_problems,
}


@pytest.mark.parametrize("name", CHECKERS)
def test_the_page_says_what_the_code_says(name: str) -> None:
    """Nothing on the page is made up, and nothing of the code is left out."""
    assert [] == CHECKERS[name](page(name))


def test_links_lead_somewhere() -> None:
    """Every link between files of the repository has its file, and the index leads to every page."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert [] == [
        f"{one}: {link}" for one in [*pages, ROOT / "README.md"] for link in links_of(one) if not link.exists()
    ]

    index = ROOT / "docs" / "index.md"
    assert [] == sorted(set(pages) - {index} - set(links_of(index)))


def test_exit_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page lists four statuses; a whole stream, a damaged one, and no stream at all give three of them."""
    whole, cut = tmp_path / "whole.arrows", tmp_path / "cut.arrows"
    with new_stream(whole, SPEC) as sink:
        sink.write(watermarked_record(0, num_tokens=6, spec=SPEC))
    cut.write_bytes(whole.read_bytes()[:-50])
    paths = [whole, cut, tmp_path / "none.arrows"]

    listed = [int(status) for status, _ in table(sections(page("cli"))["Exit status"])]
    for command in ("info", "validate"):
        assert listed[:3] == [main(arguments=[command, str(path)]) for path in paths]
    assert listed[2] == main(arguments=["validate", str(whole), "--alarms", "never"])
    capsys.readouterr()


@pytest.mark.parametrize("command", ["info", "validate"])
def test_json_keys(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The object that a command prints has the keys that the page names, in any order."""
    path = tmp_path / "whole.arrows"
    with new_stream(path, SPEC) as sink:
        sink.write(watermarked_record(0, num_tokens=6, spec=SPEC))
    main(arguments=[command, str(path), "--json"])

    assert sorted(json_keys(command)) == sorted(json.loads(capsys.readouterr().out))


# ----------------------------------------------------------------------------------------------------------------------
# The checkers can fail
# ----------------------------------------------------------------------------------------------------------------------

#: page, what stands there, what stands there instead, part of what must be said
CHANGES: dict[str, tuple[str, str, str, str]] = {
    "a class with another builtin": ("errors", "| `EOFError` |", "| `OSError` |", "TruncatedError"),
    "a class too few": ("errors", "| `SpecError` | `Ro", "| `Spec` | `Ro", "'SpecError'"),
    "a kind too few": ("errors", "| `media` |", "| `medium` |", "kinds in order"),
    "a kind raised otherwise": ("errors", "| `spans` | `DataError` |", "| `spans` | `UsageError` |", "spans: raised"),
    "a class that is none": ("errors", "| `spans` | `DataError` |", "| `spans` | `DataErrors` |", "DataErrors"),
    "a scalar too few": ("reports", "| `stream_batches` |", "| `stream_batch` |", "StreamReport"),
    "a report left out": ("reports", "## `ReplayReport`", "## `Replay`", "ReplayReport"),
    "an option too few": ("cli", "| `--alarms` |", "| `--alarm` |", "validate: arguments"),
    "another default": ("cli", "| `--seed` | `0` |", "| `--seed` | `1` |", "demo --seed: default"),
    "a choice too few": ("cli", "`vllm` or `vllm-scheduler`: who", "`vllm`: who", "demo --engine: choices"),
    "a command that is none": ("cli", "## `routeplane info`", "## `routeplane show`", "commands"),
}


@pytest.mark.parametrize(("name", "old", "new", "said"), CHANGES.values(), ids=CHANGES)
def test_a_difference_is_named(name: str, old: str, new: str, said: str) -> None:
    """One change on a page is found, and said."""
    text = page(name)
    assert 1 <= text.count(old)

    assert any(said in problem for problem in CHECKERS[name](text.replace(old, new)))


def test_links_are_seen(tmp_path: Path) -> None:
    """Links of a page are taken relative to it; code, anchors and other sites are left alone."""
    text = "[a](x.md) [b](../y.md#part) [c](https://example.org) [d](#e)\n```python\nf[0](z)\n```\n"
    (tmp_path / "page.md").write_text(text, encoding="utf-8")

    assert [tmp_path / "x.md", tmp_path.parent / "y.md"] == links_of(tmp_path / "page.md")


def test_a_table_is_read_as_it_stands() -> None:
    """Header and rule are dropped, cells are stripped, a second table is another one's."""
    text = "# A\n\n| a | b |\n|---|---|\n| `x` | y `z` |\n\n| c |\n|---|\n| d |\n## `B`\n"

    assert [["`x`", "y `z`"]] == table(sections(text)["A"])
    assert (["x"], ["z"]) == (code_in("`x`"), code_in("y `z`"))
    assert [] == table(sections(text)["B"])


def test_the_page_of_results_is_made_of_them() -> None:
    """``python -m benchmarks.results_page`` was run after the last measurement."""
    home = ROOT / "benchmarks"
    rows = json.loads((home / "results.json").read_text(encoding="utf-8"))
    assert results_page(rows) == (home / "RESULTS.md").read_text(encoding="utf-8")
