"""The carrier of the docs' page on stores of one's own keeps the contract, but for what the page says it does not."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import fakeredis
import pytest

from routeplane.record.interfaces import BlockName
from routeplane.testing.builders import SPEC
from routeplane.testing.contracts import CarrierContract
from tests.stream.streams import flip_in_rows

# the page itself runs on every change; its contract takes half a minute
pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "carry-routes-through-your-own-store.md"


def _page() -> Any:
    """The code of the page's first block, as a module that pickle finds."""
    code = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    module = ModuleType("tests_own_store_page")
    sys.modules[module.__name__] = module
    exec(compile(code, str(PAGE), "exec"), vars(module))
    return module


page = _page()
_SERVER = fakeredis.FakeServer()
_NAMES = itertools.count()


def connect() -> Any:
    """A client of one server."""
    return fakeredis.FakeRedis(server=_SERVER)


class TestRedis(CarrierContract):
    """Keys of Redis."""

    def place(self, tmp_path: Path) -> Any:
        """A prefix of keys."""
        return f"place-{next(_NAMES)}"

    def writer(self, place: Any, **options: Any) -> Any:
        """A writer."""
        return page.open_writer(place, SPEC, connect=connect, **options)

    def reader(self, place: Any, **options: Any) -> Any:
        """A reader."""
        return page.open_reader(place, connect=connect, **options)

    def kill(self, place: Any, writer: Any) -> None:
        """Somebody deletes the key of a name whose process died."""
        writer._slot.release()

    def delete(self, place: Any, name: BlockName) -> None:
        """Remove a block."""
        connect().hdel(f"{place}/{name.producer}/blocks", name.number)

    def damage(self, place: Any, name: BlockName) -> None:
        """Flip one bit of its rows."""
        at = f"{place}/{name.producer}/blocks"
        connect().hset(at, name.number, flip_in_rows(connect().hget(at, name.number)))
