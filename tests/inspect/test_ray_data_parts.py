"""Parts of streams and archives: together they are the source, each is about its share, and none trusts an old look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.archive import open_archive, save_archive
from routeplane.errors import DataError, ErrorKind, RouteplaneError, SpecError, TruncatedError, UsageError
from routeplane.inspect.ray_data import Cut, Divisible, divide, examine, read_part, require_alike
from routeplane.record.record import RouteRecord
from routeplane.testing.builders import watermarked_record, watermarked_spec
from tests.inspect.containers import PLACINGS, archived, streamed

SPEC = watermarked_spec()
RECORDS = [watermarked_record(index, num_tokens=6 + index, spec=SPEC) for index in range(7)]


def with_mask(record: RouteRecord) -> RouteRecord:
    """The record with a token column."""
    return replace(record, columns={"mask": np.ones(record.num_tokens, dtype=bool)}, checksum=None)


def read_all(sources: Sequence[Divisible], parts: int, cut: Cut) -> list[int]:
    """The checksums of all parts' records, in order."""
    return [record.checksum for part in divide(sources, parts) for record in read_part(part, cut).records]


# ---- dividing -------------------------------------------------------------------------------------------------------


@given(
    shapes=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10_000)), min_size=1, max_size=5),
    parts=st.integers(1, 40),
)
def test_parts_cover_each_source_once_in_order(shapes: list[tuple[int, int]], parts: int) -> None:
    """Without a hole, an overlap or an empty part; about as many as asked for, and never more than units."""
    sources = [
        Divisible(path=str(index), spec=SPEC, columns=(), units=units, nbytes=nbytes)
        for index, (units, nbytes) in enumerate(shapes)
    ]
    found = divide(sources, parts)
    for source in sources:
        covered = [unit for part in found if part.source == source for unit in range(part.start, part.stop)]
        assert list(range(source.units)) == covered
    assert all(part.start < part.stop for part in found)
    assert len(found) <= parts + len(sources)


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3, 100])
@pytest.mark.parametrize("placing", PLACINGS)
def test_all_parts_together_are_the_source(tmp_path: Path, placing: str, parts: int) -> None:
    """Every record once, whole, however finely it was cut."""
    sources = [examine(place) for place in PLACINGS[placing](tmp_path, RECORDS)]
    require_alike(sources)
    assert [record.checksum for record in RECORDS] == read_all(sources, parts, Cut())


@pytest.mark.parametrize("placing", PLACINGS)
def test_a_part_is_cut_as_records_are(tmp_path: Path, placing: str) -> None:
    """Layers and tokens; records outside are left out, and the spec says which layers there are."""
    sources = [examine(place) for place in PLACINGS[placing](tmp_path, RECORDS)]
    cut = Cut(layer_ids=(5,), tokens=(8, 20))
    expected = [record.select([5]).slice(8, record.num_tokens) for record in RECORDS if record.num_tokens > 8]
    found = [record for part in divide(sources, 3) for record in read_part(part, cut).records]
    assert [record.key for record in expected] == [record.key for record in found]
    assert [record.routes.tolist() for record in expected] == [record.routes.tolist() for record in found]
    assert (5,) == read_part(divide(sources, 1)[0], cut).spec.layer_ids


@pytest.mark.parametrize("make", [streamed, archived], ids=["stream", "archive"])
def test_token_columns_are_known_before_reading(tmp_path: Path, make: Callable[..., str]) -> None:
    """By name and type, and the same of both containers."""
    found = examine(make(tmp_path / "run", [with_mask(record) for record in RECORDS]))
    assert [("mask", "bool")] == [(name, kind.dtype) for name, kind in found.columns]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placing", ["stream", "archive"])
def test_a_source_that_became_shorter_is_refused(tmp_path: Path, placing: str) -> None:
    """Parts of what was there are not parts of what is."""
    for name in ("then", "now"):
        (tmp_path / name).mkdir()
    [then] = PLACINGS[placing](tmp_path / "then", RECORDS)
    [now] = PLACINGS[placing](tmp_path / "now", RECORDS[:2])
    *_, last = divide([examine(then)], 100)
    with pytest.raises(TruncatedError) as caught:
        read_part(replace(last, source=examine(now)), Cut())
    assert ErrorKind.TRUNCATED == caught.value.kind


def test_sources_without_a_common_table_are_refused(tmp_path: Path) -> None:
    """Another spec, other token columns, and an archive whose runs differ in these; an empty one fits all columns."""
    plain = examine(streamed(tmp_path / "plain", RECORDS))
    masked = [with_mask(record) for record in RECORDS]
    mixed = archived(tmp_path / "mixed", RECORDS[:2])
    save_archive(masked[2:], mixed, spec=SPEC)
    with pytest.raises(DataError) as runs:
        examine(mixed)
    with pytest.raises(DataError) as columns:
        require_alike([plain, examine(archived(tmp_path / "masked", masked))])
    with pytest.raises(SpecError) as spec:
        require_alike([plain, examine(archived(tmp_path / "few", [record.select([5]) for record in RECORDS]))])
    kinds = [error.value.kind for error in (runs, columns, spec)]
    assert [ErrorKind.TOKEN_COLUMN, ErrorKind.TOKEN_COLUMN, ErrorKind.SPEC_MISMATCH] == kinds
    save_archive([], tmp_path / "empty", spec=SPEC)
    require_alike([examine(str(tmp_path / "empty")), examine(str(tmp_path / "masked"))])


def test_records_outside_an_archive_are_refused(tmp_path: Path) -> None:
    """A range of record numbers is one of those that are there."""
    archive = open_archive(archived(tmp_path / "run.zarr", RECORDS))
    assert [RECORDS[2].checksum] == [record.checksum for record in archive.select(records=(2, 3))]
    for records in ((-1, 2), (0, 8)):
        with pytest.raises(UsageError):
            archive.select(records=records)


def test_paths_without_records_are_refused(tmp_path: Path) -> None:
    """A path that is not there, a folder that is not an archive."""
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises((RouteplaneError, FileNotFoundError)):
            examine(path)
