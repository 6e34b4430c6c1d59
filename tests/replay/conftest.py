"""``--replay-results FOLDER``: keep which features were seen to work, for the page ``docs/reference/replay.md``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay.feature_table import FeatureRun, feature_of


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known to runs that name a folder or file below this one."""
    parser.addoption("--replay-results", type=Path, metavar="FOLDER", help="write what contract tests came to")


def pytest_configure(config: pytest.Config) -> None:
    """Watch the run, in the process that sees all workers' reports."""
    folder = config.getoption("--replay-results", None)
    if folder is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FeatureRun(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have reports say what their tests show."""
    for item in items:
        found = feature_of(item)
        if found is not None:
            item.user_properties.append(("replay_feature", found))
