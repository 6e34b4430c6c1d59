"""What every test run shares: hypothesis profiles, engine files left unread where deselected, and the field-row check.

Knows nothing of routeplane. The profile is chosen by ``--hypothesis-profile`` or, where that is absent, by the
variable ``HYPOTHESIS_PROFILE``; the library itself reads no environment.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No profile has a deadline, and none complains of slow data: the speed of a shared machine is no property of the code.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

#: while writing code: fresh examples every time, failures remembered
settings.register_profile("dev", _UNTIMED, max_examples=50)
#: `make test`: the same examples every time, so that a change is judged by what it changes
settings.register_profile("ci", _UNTIMED, max_examples=100, derandomize=True, database=None, print_blob=True)
#: `make trust`
settings.register_profile("trust", _UNTIMED, max_examples=3_000, print_blob=True)

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

_ENGINE_FILE = re.compile(r"^pytestmark = .*\bmark\.vllm\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files marked ``vllm`` as a whole unread where ``-m`` deselects them.

    Importing the engine takes seconds and a gigabyte in each worker, and fails where it is not installed.
    """
    if "not vllm" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return True if _ENGINE_FILE.search(collection_path.read_text(encoding="utf-8")) else None


# ----------------------------------------------------------------------------------------------------------------------
# Field rows: each named test ran
# ----------------------------------------------------------------------------------------------------------------------

FIELD_ROWS = Path(__file__).with_name("field_rows.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--field-rows``: fail the run unless the tests that ``field_rows.json`` names ran in it and passed.

    Tests in engine files belong to the run that reads them, all others to the one that does not.
    """
    parser.addoption("--field-rows", action="store_true", help="each test named in field_rows.json must have passed")


def pytest_configure(config: pytest.Config) -> None:
    """Watch the run, in the process that sees all workers' reports."""
    if config.getoption("--field-rows") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FieldRows(engine="not vllm" not in config.option.markexpr))


class _FieldRows:
    def __init__(self, *, engine: bool) -> None:
        named = {test for row in json.loads(FIELD_ROWS.read_text())["rows"] for test in row.get("tests", ())}
        self._wanted = {test for test in named if _is_engine_test(test) == engine}
        self._failed: set[str] = set()
        self._passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("[")[0]
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


def _is_engine_test(test: str) -> bool:
    path = Path(__file__).parents[1] / test.partition("::")[0]
    return path.exists() and _ENGINE_FILE.search(path.read_text(encoding="utf-8")) is not None
