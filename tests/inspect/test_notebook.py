"""In a notebook: values show themselves in a line or a small table, escaped; archives and folders are indexed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from routeplane.archive import open_archive, save_archive
from routeplane.batch import collate
from routeplane.inspect import collect, compare, find_sources
from routeplane.record.spec import RouteSpec
from routeplane.stream import open_stream
from tests.inspect.containers import streamed
from tests.inspect.runs import SPEC, run

RECORDS = run(3, lost=5)
HOSTILE = "<script>alert(1)</script>"


def _archive(folder: Path) -> Any:
    save_archive(RECORDS, folder / "a.zarr", spec=SPEC, run="step-1")
    return open_archive(folder / "a.zarr")


#: What a notebook shows -> how it is made, and what its line must say.
VALUES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "record": (lambda _: RECORDS[0], f"RouteRecord({RECORDS[0].sample_id}/0/0: {RECORDS[0].num_tokens} tokens"),
    "spec": (lambda _: SPEC, "RouteSpec(num_experts="),
    "batch": (lambda _: collate(RECORDS, SPEC), "RouteBatch(3 records, "),
    "reader": (lambda folder: open_stream(streamed(folder / "a.arrows", RECORDS)), "IpcReader("),
    "archive": (_archive, "commit 1: 3 records"),
    "sources": (lambda folder: find_sources([streamed(folder / "a.arrows", RECORDS)]), "SourceSet("),
    "coverage": (lambda _: RECORDS[0].coverage(), "Coverage("),
    "statistics": (lambda _: collect(RECORDS, SPEC), "RouteStatistics("),
    "difference": (lambda _: compare(RECORDS, RECORDS, specs=(SPEC, SPEC)), "RouteDiff("),
}


class Cells(HTMLParser):
    """The tags of a page, and whether they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open."""
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost."""
        assert tag == self.open.pop()


@pytest.mark.parametrize("name", VALUES)
def test_a_value_shows_itself(tmp_path: Path, name: str) -> None:
    """A table of plain cells; a line without arrays."""
    make, said = VALUES[name]
    value = make(tmp_path)
    cells = Cells(value._repr_html_())
    assert ({"table", "caption", "tr", "th", "td"}, []) == (cells.tags, cells.open)
    assert said in repr(value)
    assert len(repr(value)) < 400
    if hasattr(value, "close"):
        value.close()


def test_names_from_the_data_are_text() -> None:
    """A hostile sample or attribute stays what it is."""
    record = replace(RECORDS[0], sample_id=HOSTILE, attributes={HOSTILE: HOSTILE}, checksum=None)
    assert "script" not in Cells(record._repr_html_()).tags
    assert "script" not in Cells(replace(SPEC, model=HOSTILE)._repr_html_()).tags


@pytest.mark.parametrize("layers", [(0, 3), tuple(range(48))], ids=["few", "a range"])
def test_a_spec_shows_what_makes_it_again(layers: tuple[int, ...]) -> None:
    """Short also for many layers."""
    for spec in (
        RouteSpec(num_experts=8, top_k=2, layer_ids=layers, model="m"),
        RouteSpec(num_experts=tuple(range(8, 8 + len(layers))), top_k=2, layer_ids=layers, decoder_layers=60),
    ):
        assert spec == eval(repr(spec), {"RouteSpec": RouteSpec})


def test_a_folder_and_an_archive_are_indexed(tmp_path: Path) -> None:
    """An archive by key; a folder of streams by number, each stream a set of its own."""
    for index, record in enumerate(RECORDS):
        streamed(tmp_path / f"{index}.arrows", [record])
    folder = find_sources([tmp_path])
    assert (3, [1, 1, 1]) == (len(folder), [len(list(one.records())) for one in folder])
    assert [RECORDS[1].key] == [record.key for record in folder[1].records()]
    assert [record.key for record in RECORDS[1:]] == [record.key for record in folder[1:].records()]
    assert RECORDS[2].key == folder.find(RECORDS[2].sample_id).key

    archive: Mapping[Any, Any] = _archive(tmp_path)
    assert (3, [record.key for record in RECORDS]) == (len(archive), list(archive))
    assert RECORDS[1].equals(archive[RECORDS[1].key])
