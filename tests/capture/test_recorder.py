"""RouteRecorder: what the next call must bring, and which weights sampled and routed each token.

Axes: S token positions, R rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.capture.recorder import RouteRecorder, WeightsChange
from routeplane.errors import DataError, ErrorKind
from routeplane.record.assembly import assemble
from routeplane.record.calls import ModelCall
from routeplane.testing.builders import watermark, watermarked_spec
from routeplane.testing.strategies import Rollout, rollouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord

SPEC = watermarked_spec(layers=(1, 4), top_k=3)


def rows_of(start: int, stop: int, *, sample: int = 0) -> NDArray[np.int16]:
    """The true rows ``[start, stop)`` of a sample, ``[R, L, K]``."""
    token, layer, k = np.arange(start, stop), np.asarray(SPEC.layer_ids), np.arange(SPEC.top_k)
    return watermark(sample, token[:, None, None], layer=layer[None, :, None], k=k[None, None, :])


def call_of(
    prompt: Sequence[int], generated: Sequence[int] = (), *, rows: NDArray[Any] | None, **given: Any
) -> ModelCall:
    """A call of these tokens; ``first_row`` and what else a call takes are given by name."""
    how = {"call_id": "c", "weights_version": None, "layer_ids": SPEC.layer_ids, **given}
    return ModelCall(
        prompt_ids=np.asarray(prompt), generation_ids=np.asarray(generated, dtype=np.int64), routes=rows, **how
    )


# ----------------------------------------------------------------------------------------------------------------------
# Calls: what lies between them is assemble's to decide
# ----------------------------------------------------------------------------------------------------------------------


@given(rollouts(), st.sampled_from(["keep_first", "keep_last"]))
def test_calls_are_assembled_as_ever(rollout: Rollout, overlap: Literal["keep_first", "keep_last"]) -> None:
    """Whatever rollout: its calls through a recorder are its calls through ``assemble``, overlaps counted alike."""
    recorder = RouteRecorder(rollout.spec, sample_id="s", overlap=overlap, on_break="split")
    for call in rollout.calls:
        recorder.add_call(call)
    found = recorder.assembly()
    expected = assemble(rollout.calls, rollout.spec, sample_id="s", overlap=overlap, on_break="split")

    assert expected.report == found.report
    assert [record.checksum for record in expected.records] == [record.checksum for record in found.records]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=8))
def test_a_conversation_needs_each_row_once(turns: list[tuple[int, int]]) -> None:
    """With every call trimmed to ``next_row`` the rows that come are as many as the tokens but the last."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    tokens: list[int] = []
    moved = 0
    for number, (said, answered) in enumerate(turns):
        prompt = [*tokens, *range(len(tokens), len(tokens) + said)]
        tokens = list(range(len(prompt) + answered))
        start = recorder.next_row(prompt)
        rows_RLK = rows_of(start, len(tokens) - 1)
        moved += len(rows_RLK)
        recorder.add_call(call_of(prompt, tokens[len(prompt) :], rows=rows_RLK, first_row=start, call_id=f"c{number}"))
    made = recorder.assembly()

    np.testing.assert_array_equal(rows_of(0, len(tokens) - 1), made.records[0].routes[:-1])
    assert (len(tokens) - 1, 0) == (moved, made.report.overlap_rows)
    assert len(tokens) - 1 == made.records[0].coverage().count("captured")


def test_a_prompt_that_breaks_the_context_starts_another_segment() -> None:
    """A prompt that does not extend the tokens so far needs its rows from 0 on, and the turn after it no more."""
    recorder = RouteRecorder(SPEC, sample_id="s", on_break="split")
    for number, (prompt, start) in enumerate((([1, 2], 0), ([1, 2, 9, 3], 2), ([7, 8, 6], 0), ([7, 8, 6, 9, 5], 3))):
        assert start == recorder.next_row(prompt)
        rows_RLK = rows_of(start, len(prompt))
        recorder.add_call(call_of(prompt, [9], rows=rows_RLK, first_row=start, call_id=f"c{number}"))

    assert [("s", 0, 0), ("s", 0, 1)] == [record.key for record in recorder.assembly().records]


def test_lost_rows_are_asked_for_again() -> None:
    """After a call whose rows were lost the next one is to bring them."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    recorder.add_call(call_of([1, 2, 3], [4, 5], rows=None, loss="lost"))

    assert 0 == recorder.next_row([1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("media", [("two",), (), ("two", "one")], ids=["another", "none", "another-first"])
def test_the_same_placeholders_with_other_media_need_their_own_rows(media: tuple[str, ...]) -> None:
    """Equal token ids with other media are another context: its rows are asked for from 0 on, and none is lost."""
    recorder = RouteRecorder(SPEC, sample_id="s", on_break="split")
    for number, (prompt, seen) in enumerate((([1, 7, 7], ("one",)), ([1, 7, 7, 9, 2], media))):
        start = recorder.next_row(prompt, media=seen)
        rows_RLK = rows_of(start, len(prompt), sample=number)
        recorder.add_call(call_of(prompt, [9], rows=rows_RLK, first_row=start, call_id=f"c{number}", media=seen))

    records = recorder.assembly().records
    assert [3, 5] == [record.coverage().count("captured") for record in records]
    np.testing.assert_array_equal(rows_of(0, 5, sample=1), records[1].routes[:-1])


def test_media_that_go_on_need_no_row_twice() -> None:
    """A turn that adds an image behind those so far extends the context."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    recorder.add_call(call_of([1, 7, 7], rows=rows_of(0, 3), media=("one",)))

    assert 3 == recorder.next_row([1, 7, 7, 8], media=("one", "two"))


@given(st.data())
def test_a_row_that_came_without_its_ids_is_asked_for_again(data: st.DataObject) -> None:
    """The next call begins at the first token that has no row in some layer, wherever earlier calls left it."""
    recorder = RouteRecorder(SPEC, sample_id="s", on_missing="raise")
    tokens = list(range(12))
    whole: set[int] = set()
    for number in range(2):
        start = recorder.next_row(tokens)
        assert start == min(set(tokens) - whole)
        rows_RLK = rows_of(start, 12).copy()
        for token in data.draw(st.sets(st.integers(start, 11), min_size=1)) if number == 0 else ():
            rows_RLK[token - start, data.draw(st.integers(0, 1))] = -1
        whole |= {start + row for row in range(len(rows_RLK)) if (rows_RLK[row] >= 0).all()}
        recorder.add_call(call_of(tokens, rows=rows_RLK, first_row=start, call_id=f"c{number}"))

    np.testing.assert_array_equal(rows_of(0, 12), recorder.assembly().records[0].routes)


# ----------------------------------------------------------------------------------------------------------------------
# Weights that change under way
# ----------------------------------------------------------------------------------------------------------------------


def versions(record: RouteRecord, of: str) -> list[tuple[int, int, int | None]]:
    """``(start, stop, weights_version)`` of the spans or captures."""
    return [(one.start, one.stop, one.weights_version) for one in getattr(record, of)]


def call_with_changes(*changes: WeightsChange) -> RouteRecord:
    """3 prompt and 5 generated tokens, sampled from version 1 on, with rows for all but the last."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    recorder.add_call(call_of([1, 2, 3], [4, 5, 6, 7, 8], rows=rows_of(0, 7), weights_version=1), changes=changes)
    return recorder.assembly().records[0]


@st.composite
def weights_changes(draw: st.DrawFn) -> list[WeightsChange]:
    """Changes at tokens after the first generated one, in order; several may fall on one token."""
    tokens = sorted(draw(st.lists(st.integers(4, 8), max_size=4)))
    version = st.one_of(st.none(), st.integers(0, 3))
    return [WeightsChange(token=token, weights_version=draw(version)) for token in tokens]


@given(weights_changes())
def test_versions_are_those_of_every_token(changes: list[WeightsChange]) -> None:
    """Token by token, the span says the weights that sampled it and the capture those that sampled the next one."""
    record = call_with_changes(*changes)

    def version(token: int) -> int | None:
        found: int | None = 1
        for change in changes:
            found = change.weights_version if change.token <= token else found
        return found

    def flat(of: str) -> list[int | None]:
        return [known for start, stop, known in versions(record, of) for _ in range(start, stop)]

    assert [None, None, None, *(version(token) for token in range(3, 8))] == flat("spans")
    assert [*(version(token + 1) for token in range(2, 7))] == flat("captures")[2:7]
    assert ([1, 1], None) == (flat("captures")[:2], flat("captures")[7])
    assert record is record.verify()


def test_weights_that_change_before_the_first_token_leave_the_prompt_unknown() -> None:
    """A prefill that an update interrupts was routed by both weights."""
    record = call_with_changes(WeightsChange(token=3, weights_version=2))

    assert [(0, 3, None), (3, 8, 2)] == versions(record, "spans")
    assert [(0, 3, None), (3, 7, 2), (7, 8, None)] == versions(record, "captures")


def test_records_of_nothing_are_refused() -> None:
    """A sample has a call."""
    with pytest.raises(DataError) as caught:
        RouteRecorder(SPEC, sample_id="s").assembly()
    assert ErrorKind.ROUTES_MISSING == caught.value.kind
