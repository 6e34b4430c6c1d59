"""A second implementation of format v1 reads what the library reads, in both versions, and refuses what is damaged."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from tests.format import independent_reader
from tests.format.documents import SCHEMAS
from tests.format.independent_reader import read_stream
from tests.format.test_golden import GOLDENS, decoded

PATHS = [
    path.relative_to(SCHEMAS).as_posix() for folder in GOLDENS.values() for path in sorted(folder.glob("*.arrows"))
]


@pytest.mark.parametrize("name", PATHS)
def test_both_readers_agree(name: str) -> None:
    """Format, spec, encoding, trailer, and every value and checksum of every record are the same."""
    assert decoded(SCHEMAS / name) == read_stream(SCHEMAS / name)


def test_the_reader_is_independent() -> None:
    """It imports pyarrow, xxhash and the standard library: nothing of routeplane, of the tests or of numpy."""
    tree = ast.parse(Path(independent_reader.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert {"pyarrow", "xxhash"} == {name.split(".")[0] for name in names} - sys.stdlib_module_names


@pytest.mark.parametrize(
    "name", ["golden/narrow-256.arrows", "golden-1.1/aligned-plain.arrows", "golden-1.1/lean.arrows"]
)
def test_no_flipped_bit_is_read_as_another_value(name: str, tmp_path: Path) -> None:
    """Behind the schema, a bit is refused, or it is one that means nothing (padding) and all values are as before."""
    data = (SCHEMAS / name).read_bytes()
    whole, path = read_stream(SCHEMAS / name), tmp_path / "changed.arrows"
    schema_ends = 8 + int.from_bytes(data[4:8], "little")
    refused = 0
    for place in range(schema_ends, len(data), 61):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        path.write_bytes(bytes(changed))
        try:
            found = read_stream(path)
        except (ValueError, KeyError, OSError):
            refused += 1
            continue
        assert whole == found, place
    assert refused


@pytest.mark.parametrize("name", ["golden/plain.arrows", "golden-1.1/lean-columns.arrows"])
def test_a_cut_is_refused(name: str, tmp_path: Path) -> None:
    """A stream without its end mark, and an Arrow stream of the same batches without the trailer, are not whole."""
    data, path = (SCHEMAS / name).read_bytes(), tmp_path / "cut.arrows"
    path.write_bytes(data[:-8])
    with pytest.raises(ValueError, match="end-of-stream"):
        read_stream(path)

    with pa.ipc.open_stream(data) as reader, pa.ipc.new_stream(path, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
    with pytest.raises(ValueError, match="trailer"):
        read_stream(path)
