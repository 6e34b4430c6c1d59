"""Old readers and new writers, and the reverse: what the last reader of 1.0 alone said of every checked-in file.

``schemas/v1/old-reader.json`` holds its answers, file by file, with the xxh3-64 of the bytes that it read. The writer
of today makes the same bytes of the same records, so the old reader reads what today's writer makes as 1.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from routeplane.stream import open_stream
from tests.format.documents import SCHEMAS, load
from tests.format.independent_reader import read_stream
from tests.format.test_golden import GOLDENS, decoded, write_golden

OLD: dict[str, Any] = load(SCHEMAS / "old-reader.json")["files"]
READ = sorted(name for name, said in OLD.items() if "records" in said)
REFUSED = sorted(name for name, said in OLD.items() if "refused" in said)


def digest(path: Path) -> str:
    """Of a file's bytes."""
    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def test_the_old_reader_was_shown_every_file_as_it_is() -> None:
    """A golden file that changed, or is new, has to be shown to the old reader again."""
    paths = {
        path.relative_to(SCHEMAS).as_posix(): path for folder in GOLDENS.values() for path in folder.glob("*.arrows")
    }
    assert {name: said["xxh3"] for name, said in OLD.items()} == {name: digest(path) for name, path in paths.items()}
    assert {name.split("/")[0] for name in READ} == {"golden"}
    assert {name.split("/")[0] for name in REFUSED} == {"golden-1.1"}


@pytest.mark.parametrize("name", READ)
def test_the_new_reader_reads_what_the_old_one_read(name: str) -> None:
    """The same records, by their checksums, with and without a verification."""
    for verify in (True, False):
        found = [f"{record.checksum:016x}" for record in open_stream(SCHEMAS / name, verify=verify)]
        assert OLD[name]["records"] == found


def test_the_old_reader_reads_what_the_new_writer_makes_as_1_0(tmp_path: Path) -> None:
    """Byte for byte the files that the old reader read; in the layout of another pyarrow, by value."""
    write_golden(tmp_path, "1.0")
    for name in READ:
        made = tmp_path / name.split("/")[1]
        same_layout = pa.__version__.split(".")[0] == "26"
        assert OLD[name]["xxh3"] == digest(made) or (not same_layout and decoded(SCHEMAS / name) == decoded(made))


@pytest.mark.parametrize("name", REFUSED)
def test_an_old_reader_refuses_1_1(name: str) -> None:
    """The library's by the schema, before any record; a reader by the specification, by the minor version."""
    assert ("FormatError", "schema") == (OLD[name]["refused"], OLD[name]["kind"])
    with pytest.raises(ValueError, match=r"format 1\.0, got 1\.1"):
        read_stream(SCHEMAS / name, versions=("1.0",))


@pytest.mark.parametrize("name", READ)
def test_a_reader_of_1_0_alone_agrees(name: str) -> None:
    """By the specification, of the files that the old reader read."""
    found = read_stream(SCHEMAS / name, versions=("1.0",))
    assert OLD[name]["records"] == [record["checksum"] for record in found["records"]]
