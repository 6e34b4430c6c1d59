"""Layers selected before their rows are looked at, as a reader without ``verify`` does, against cutting afterwards.

Axes: S tokens, L layers, K slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch import BatchOptions, collate
from routeplane.errors import DataError, ErrorKind
from routeplane.record.record import RouteRecord
from routeplane.stream import open_stream
from routeplane.testing.strategies import records, specs
from tests.stream.streams import SPEC, Encoding, record, stream_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

encodings = pytest.mark.parametrize("encoding", ["plain", "narrow"])


def damaged(layer_slot: int, encoding: Encoding) -> bytes:
    """A stream of two records; in the first, token 2 has an illegal row in one layer."""
    data = bytearray(stream_of([record(0), record(1)], encoding=encoding))
    row: NDArray[np.generic] = record(0).routes[2].astype(np.uint8 if encoding == "narrow" else np.int16)
    at = data.find(row.tobytes())
    width = row.nbytes // len(row)
    assert at > 0
    assert data.count(row.tobytes()) == 1
    slot_bytes = width // SPEC.top_k
    first = at + layer_slot * width
    data[first + slot_bytes : first + 2 * slot_bytes] = data[first : first + slot_bytes]  # a duplicate id
    return bytes(data)


@encodings
@given(data=st.data())
def test_layers_cut_before_are_those_cut_after(encoding: Encoding, data: st.DataObject) -> None:
    """Any records, any layers: the same records as selecting from whole ones, partial rows settled alike."""
    spec = data.draw(specs(max_experts=64, min_layers=2).filter(lambda spec: spec.narrow_allowed))
    found: list[RouteRecord] = data.draw(
        st.lists(records(spec=spec), max_size=3, unique_by=lambda each: each.key).filter(
            lambda found: (
                len({tuple(each.columns) for each in found}) <= 1
                and len({tuple(values.dtype for values in each.columns.values()) for each in found}) <= 1
            )
        )
    )
    layers = sorted(data.draw(st.sets(st.sampled_from(spec.layer_ids), min_size=1)))
    stream = stream_of(found, spec=spec, encoding=encoding)
    before = list(open_stream(stream, verify=False).select(layer_ids=layers))
    after = list(open_stream(stream).select(layer_ids=layers))

    assert len(found) == len(before) == len(after)
    for ours, theirs, whole in zip(before, after, found, strict=True):
        assert theirs.equals(ours)
        assert whole.select(layers).checksum == ours.checksum == theirs.checksum == ours.compute_checksum()
        assert whole.select(layers).captures == ours.captures


@encodings
def test_other_layers_are_not_looked_at(encoding: Encoding) -> None:
    """Only readers that verify or select a layer find an illegal row in it."""
    stream = damaged(1, encoding)

    came = list(open_stream(stream, verify=False).select(layer_ids=[1]))
    assert [record(0).select([1]).checksum, record(1).select([1]).checksum] == [each.checksum for each in came]
    for layers, verify in (([4], False), ([1, 4], False), ([1], True)):
        with pytest.raises(DataError) as failure:
            list(open_stream(stream, verify=verify).select(layer_ids=layers))

        assert failure.value.kind is ErrorKind.DUPLICATE_ID


@encodings
def test_a_bad_record_is_set_aside_under_the_selected_layers(encoding: Encoding) -> None:
    """Quarantine stands in with MISSING rows of the layers that are read."""
    reader = open_stream(damaged(0, encoding), verify=False, on_corrupt="quarantine").select(layer_ids=[1])
    first, second = reader

    assert (-1, -1) == (int(first.routes.min()), int(first.routes.max()))
    assert first.spec == second.spec == SPEC.select([1])
    assert 1 == len(reader.report().quarantined)


def test_a_batch_of_narrow_records_is_that_of_plain_ones() -> None:
    """Widened on the way, all layers or some, and no record widens its rows for it; mixed with plain ones too."""
    found = [record(sample, tokens) for sample, tokens in enumerate((5, 9, 1))]
    narrow = list(open_stream(stream_of(found, encoding="narrow")))
    for spec in (SPEC, SPEC.select([4])):
        expected = collate(found, spec, layout="padded", options=BatchOptions(pad_to_multiple_of=4))
        batch = collate(narrow, spec, layout="padded", options=BatchOptions(pad_to_multiple_of=4))

        assert np.array_equal(expected.routes.numpy(), batch.routes.numpy())
        assert not any("routes" in vars(each) for each in narrow)
    mixed = collate([found[0], *narrow[1:]], SPEC)
    assert np.array_equal(collate(found, SPEC).routes.numpy(), mixed.routes.numpy())
