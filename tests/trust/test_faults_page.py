"""docs/reference/faults.md has every fault, none of which read as other content, with what trying it gives today."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.trust.faults import FAULTS, HARMLESS, PAGE, page_of, tried

ROWS = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.read_text(encoding="utf-8").splitlines()[6:]}
#: Those with few inputs.
QUICK = [name for name in FAULTS if not name.startswith("one bit") and "cut" not in name and "10^6" not in name]


def again(name: str) -> str:
    """The row as it is made today, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return page_of({name: pool.submit(tried, name).result()}).splitlines()[-1]


def test_every_fault_has_its_row() -> None:
    """In order, with inputs, none of which read as other content; a harmless fault changes nothing."""
    assert list(FAULTS) == [name for name in ROWS if name in FAULTS]
    for name in FAULTS:
        count, same, refused, other = map(int, ROWS[name].split(" | ")[1:5])
        assert (count, 0) == (same + refused, other), name
        assert count > 0
        assert (refused == 0) == (name in HARMLESS), name


@pytest.mark.parametrize("name", QUICK)
def test_a_row_is_what_happens(name: str) -> None:
    """Trying a fault gives the row."""
    assert ROWS[name] == page_of({name: tried(name)}).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in QUICK])
def test_a_long_row_is_what_happens(name: str) -> None:
    """The same for those with thousands of inputs, whose number may differ: identifiers are random."""
    count, _, _, other = map(int, again(name).split(" | ")[1:5])
    assert (0, True) == (other, count > 0)
