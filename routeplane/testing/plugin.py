"""The pytest plugin and the hypothesis profiles that come with routeplane; both are entry points of the package.

It loads in every run of pytest where routeplane is installed, so it imports no other part of the library until a test
asks: options that point at a running server, and a fixture that makes its client. Registers nothing else.

    pytest --routeplane-engine http://127.0.0.1:8000 --routeplane-model path/to/config.json
    pytest --hypothesis-profile=routeplane-nightly
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from routeplane.capture.http.openai import HttpEngine

__all__ = ["pytest_addoption", "register_profiles", "routeplane_engine"]


def register_profiles() -> None:
    """Register the hypothesis profiles; hypothesis calls it where it is imported.

    ``routeplane-ci``: the same examples every time. ``routeplane-nightly``: fresh and many of them. Neither has a
    deadline, and neither is the default: ``--hypothesis-profile`` or ``settings.load_profile`` chooses.
    """
    from hypothesis import HealthCheck, settings

    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
    settings.register_profile("routeplane-ci", untimed, max_examples=100, derandomize=True, database=None)
    # said aloud: hypothesis' own default is "the same every time" where it sees a CI's variables
    settings.register_profile("routeplane-nightly", untimed, max_examples=2_000, derandomize=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that point ``EngineContract`` at a server."""
    group = parser.getgroup("routeplane", "routeplane: the server that routeplane_engine asks")
    group.addoption("--routeplane-engine", metavar="URL", help="an OpenAI-compatible server, without a path")
    group.addoption("--routeplane-model", metavar="CONFIG", help="its model's config.json")


@pytest.fixture(scope="session")
def routeplane_engine(pytestconfig: pytest.Config) -> HttpEngine:
    """The client of the server that the options name, with its ``spec``; skips where they name none.

    Example::

        class TestOurs(EngineContract):
            @pytest.fixture(autouse=True)
            def pointed(self, routeplane_engine):
                type(self).engine, type(self).spec = routeplane_engine, routeplane_engine.spec
    """
    url, model = pytestconfig.getoption("--routeplane-engine"), pytestconfig.getoption("--routeplane-model")
    if url is None or model is None:
        pytest.skip("--routeplane-engine and --routeplane-model name no server")
    from routeplane.capture.http.openai import HttpEngine
    from routeplane.record.spec import RouteSpec

    return HttpEngine(url, RouteSpec.from_hf_config(json.loads(Path(model).read_text(encoding="utf-8"))))
