"""The short campaign of every change: each decoder, a few hundred inputs, none silent, untyped or hung."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from routeplane.errors import DataError, ErrorKind, RouteplaneError
from routeplane.inspect.audit import load_batch
from routeplane.record.aligned import ColumnType
from routeplane.record.interfaces import Position, RouteTicket
from routeplane.stream import folder
from routeplane.stream.blocks import LEANS_KEY, BlockLimits, Manifest, ReadOptions
from routeplane.testing.builders import SPEC, sample, turns_of
from tests.trust.decoders import CONTROL, PAYLOAD
from tests.trust.measure import BOUNDS, MORE_BYTES, SECONDS, measured


def test_every_decoder_is_tried() -> None:
    """The shares of a thousand inputs add up, of payloads and of control data."""
    assert (1_000, 1_000) == tuple(sum(share for _, share in table.values()) for table in (PAYLOAD, CONTROL))
    assert BOUNDS == f"memory <= 2x input + {MORE_BYTES // 2**20} MB, <= {SECONDS:g} s of processor time"


def test_a_short_campaign() -> None:
    """300 inputs of payloads, 300 of control data: the same, or an error of ours, within bounds."""
    rows = list(measured(300, seed=1))

    assert [] == [(row.name, row.findings, row.memory) for row in rows if not row.holds]
    assert {*PAYLOAD, *CONTROL} == {row.name for row in rows}
    assert all(row.refused for row in rows)


@pytest.mark.slow
def test_a_longer_campaign() -> None:
    """3,000 of each."""
    assert [] == [(row.name, row.findings, row.memory) for row in measured(3_000, seed=2) if not row.holds]


# ----------------------------------------------------------------------------------------------------------------------
# What campaigns found, as cases
# ----------------------------------------------------------------------------------------------------------------------

COLUMN = {"aligned": "fed", "axes": [["layers"], "topk"], "dtype": "float32", "null": None, "shape": [2, 2]}
MANIFEST = Manifest.of(SPEC, run="run", groups=("default",), encoding="auto").to_document()

CASES: dict[str, Callable[[], object]] = {
    "an axis that is a list": lambda: ColumnType.from_document(COLUMN),
    "a position that is a number": lambda: Position.from_json(5),  # type: ignore[arg-type]
    "a position that is an object": lambda: Position.from_json({}),  # type: ignore[arg-type]
    "a ticket that is a number": lambda: RouteTicket.from_json(1.5),  # type: ignore[arg-type]
    "a manifest that is a list": lambda: Manifest.from_document([[]]),  # type: ignore[arg-type]
    "a manifest of another encoding": lambda: Manifest.from_document({**MANIFEST, "encoding": []}),
    "a manifest whose groups are text": lambda: Manifest.from_document({**MANIFEST, "groups": "ab"}),
}


@pytest.mark.parametrize("name", CASES)
def test_documents_of_another_shape(name: str) -> None:
    """Each is an error of ours."""
    with pytest.raises(RouteplaneError):
        CASES[name]()


FILES: dict[str, tuple[str, Any]] = {
    "a position that is absent": ("groups/default/position.json", {}),
    "a position that is a number": ("groups/default/position.json", {"position": 1.5}),
    "an end without its kind": ("producers/p/end.json", {"blocks": 1}),
    "numbers that are text": ("producers/p/number.json", {"next": "x", "void": [], "leans": {}}),
    "numbers below 0": ("producers/p/number.json", {"next": -1, "void": [], "leans": {}}),
    "leans that are a list": ("producers/p/number.json", {"next": 1, "void": [], "leans": []}),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_a_place_under_right_checksums(tmp_path: Path, name: str) -> None:
    """Reader and writer refuse a control file that no writer makes, whatever its checksum says."""
    place, (path, document) = tmp_path / "place", FILES[name]
    writer = folder.open_writer(place, SPEC, run="run", producer="p")
    writer.write(sample(0))
    writer.flush()
    writer._slot.release()
    (place / path).write_text(json.dumps({**document, "checksum": folder._digest(document)}), encoding="utf-8")
    with (
        pytest.raises(RouteplaneError),
        folder.open_reader(
            place, producers=["p"], follow=False, options=ReadOptions(timeout_s=1.0, grace_s=0.0)
        ) as reader,
    ):
        list(reader)
    with pytest.raises(RouteplaneError):
        folder.open_writer(place, SPEC, run="run", producer="p")


def test_a_strange_file_among_blocks(tmp_path: Path) -> None:
    """A file that is not a block is not counted: the writer goes on beside it."""
    place = tmp_path / "place"
    with folder.open_writer(place, SPEC, run="run", producer="p") as writer:
        writer.write(sample(0))
    (place / "producers" / "p" / "end.json").unlink()
    (place / "producers" / "p" / "copy of 000000000.arrows").write_bytes(b"")
    with folder.open_writer(place, SPEC, run="run", producer="p") as writer:
        writer.write(sample(1))
    with folder.open_reader(place, producers=1) as reader:
        assert 2 == len(list(reader))


@pytest.mark.parametrize("name", ["batch.npz", "batch.pt", "batch.parquet"])
@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x02}", bytes(64)], ids=["empty", "zip", "pickle", "zeros"])
def test_batches_that_are_damaged(tmp_path: Path, name: str, data: bytes) -> None:
    """What zipfile, numpy, torch and Parquet raise for a damaged file becomes one error of ours."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RouteplaneError, match="expected a whole"):
        load_batch(tmp_path / name)


def test_a_trailer_that_lost_its_leans(tmp_path: Path) -> None:
    """A delta whose block names no others any more (a bit of the key's name) is refused, never read as it is."""
    place, turns = tmp_path / "place", turns_of(3, tokens=30)
    limits = BlockLimits(block_bytes=1, sync=False)
    with folder.open_writer(place, turns[0].spec, run="run", producer="p", limits=limits) as writer:
        for record in turns:
            writer.write(record)
    last = sorted((place / "producers" / "p").glob("*.arrows"))[-1]
    assert LEANS_KEY.encode() in last.read_bytes()
    last.write_bytes(last.read_bytes().replace(LEANS_KEY.encode(), LEANS_KEY.replace("leans", "lfans").encode()))
    with folder.open_reader(place, producers=1) as reader, pytest.raises(DataError) as caught:
        list(reader)
    assert ErrorKind.PREFIX is caught.value.kind
