"""Archives of version 1.0, as the release before wrote them: read, verified, appended to, converted.

``golden/archive-1.0.zarr`` was written by the last version whose layout was 1.0: ``rich_records()`` as run ``first``
with attributes, and ``sized([600, 5], first=8)`` as run ``second`` in shards of 512 rows.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from routeplane.archive import compact, delete, open_archive, save_archive, verify
from routeplane.cli.convert import convert
from routeplane.errors import ErrorKind, FormatError
from routeplane.stream import open_stream
from tests.archive.archives import SPEC, flip, rich_records, sized
from tests.stream.streams import content, contents

GOLDEN = Path(__file__).parent / "golden" / "archive-1.0.zarr"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the golden archive."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "old.zarr"))


def test_an_old_archive_reads_as_it_was_saved(old: Path) -> None:
    """Records, ranges, attributes, columns; nothing is written."""
    records = [*rich_records(), *sized([600, 5], first=8)]
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    archive = open_archive(old)

    assert contents(records) == contents(archive.values())
    assert content(records[3].slice(400, 590).select([4])) == content(
        archive.read(records[3].key, tokens=(400, 590), layer_ids=[4])
    )
    assert ({"policy": "1"}, 2) == (archive.attributes("first"), archive.commit)
    assert 5 == archive.table().num_rows
    assert () == verify(old).problems
    assert before == {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}


def test_damage_of_an_old_archive_is_found(old: Path) -> None:
    """Its manifest has no checksums of indices; chunks and indices have their own."""
    flip(old / "runs" / "second" / "routes" / "c" / "0" / "0" / "0", 40)
    with pytest.raises(FormatError) as caught:
        list(open_archive(old).values())
    assert ErrorKind.CORRUPT_CHUNK == caught.value.kind
    assert not verify(old).intact


def test_an_old_archive_goes_on(old: Path) -> None:
    """Runs are added, records deleted and removed; what is left of it is of the layout of today."""
    records = [*rich_records(), *sized([600, 5], first=8), *sized([7], first=20)]
    save_archive(records[5:], old, spec=SPEC)
    assert contents(records) == contents(open_archive(old).values())
    delete(old, keys=[records[1].key, records[3].key])
    compact(old)

    assert contents([records[0], records[2], *records[4:]]) == contents(open_archive(old).values())
    assert () == verify(old).problems
    assert not (old / "runs" / "first").exists()


def test_an_old_archive_converts(old: Path, tmp_path: Path) -> None:
    """Into a new archive and into a stream; the records of one have the same columns, so the first run is left out."""
    delete(old, runs=["first"])
    expected = contents(open_archive(old).values())
    convert(str(old), str(tmp_path / "new.zarr"))
    convert(str(old), str(tmp_path / "new.arrows"))
    assert expected == contents(open_archive(tmp_path / "new.zarr").values())
    with open_stream(tmp_path / "new.arrows") as reader:
        assert expected == contents(reader)
