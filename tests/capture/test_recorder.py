"""RouteRecorder against a plain reference: dictionaries by token, filled one row at a time.

Axes: S token positions, R rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.capture.recorder import RouteRecorder, WeightsChange
from routeplane.errors import DataError, ErrorKind, RouteplaneError, UsageError
from routeplane.record.assembly import assemble
from routeplane.testing.builders import watermark, watermarked_spec
from routeplane.testing.strategies import Rollout, rollouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord

SPEC = watermarked_spec(layers=(1, 4), top_k=3)


def rows_of(start: int, stop: int, *, sample: int = 0) -> NDArray[np.int16]:
    """The true rows ``[start, stop)`` of a sample, ``[R, L, K]``."""
    token, layer, k = np.arange(start, stop), np.asarray(SPEC.layer_ids), np.arange(SPEC.top_k)
    return watermark(sample, token[:, None, None], layer=layer[None, :, None], k=k[None, None, :])


# ----------------------------------------------------------------------------------------------------------------------
# Arrival: however rows are cut and repeated, each stands at its token
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A call of ``prompt + generated`` tokens whose rows from ``first_row`` on come in ``pieces`` ``[start, stop)``."""

    prompt: int
    generated: int
    first_row: int
    pieces: tuple[tuple[int, int], ...]


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    """Pieces that follow each other, each beginning anywhere in what came before."""
    prompt, generated = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    first_row = draw(st.integers(0, prompt))
    pieces, at, end = [], first_row, prompt + generated - 1
    while at < end:
        start, stop = draw(st.integers(first_row, at)), draw(st.integers(at + 1, end))
        pieces.append((start, stop))
        at = stop
    return Arrival(prompt=prompt, generated=generated, first_row=first_row, pieces=tuple(pieces))


@given(arrivals(), st.randoms(use_true_random=False))
def test_rows_stand_at_their_token_however_they_come(arrival: Arrival, random: Any) -> None:
    """Pieces with identical overlaps, in any order of ids within a row, give the rows of one whole array."""
    total, tokens = arrival.prompt + arrival.generated, list(range(100, 100 + arrival.prompt + arrival.generated))
    recorder = RouteRecorder(SPEC, sample_id="s")
    recorder.begin(tokens[: arrival.prompt], call_id="c", weights_version=3)
    recorder.add_tokens(tokens[arrival.prompt :], logprobs=[-0.5] * arrival.generated)
    held: dict[int, NDArray[np.int16]] = {}
    repeated = 0
    for start, stop in arrival.pieces:
        piece_RLK = rows_of(start, stop)
        if random.random() < 0.5:
            piece_RLK = piece_RLK[:, :, ::-1]
        for token in range(start, stop):
            repeated += token in held
            held.setdefault(token, piece_RLK[token - start])
        recorder.add_rows(piece_RLK.astype(random.choice(["<i4", "<i2", ">i8"])), first_row=start)
    recorder.end(loss="not_captured" if not held else None)
    [record] = recorder.assembly().records

    missing = np.full(SPEC.row_shape, -1)
    assert [held.get(token, missing).tolist() for token in range(total)] == record.routes.tolist()
    assert repeated == recorder.repeated_rows
    assert tokens == record.token_ids.tolist()


@given(arrivals(), st.data())
def test_a_gap_is_refused_and_changes_nothing(arrival: Arrival, data: st.DataObject) -> None:
    """Rows that begin after what came, or before the first that came, are refused with call and range."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    recorder.begin(range(100), call_id="c", weights_version=None)
    recorder.add_rows(rows_of(10, 20), first_row=10)
    start = data.draw(st.one_of(st.integers(21, 40), st.integers(0, 9)))

    with pytest.raises(DataError, match=rf"rows from token 20 on, .*\[{start}, {start + 2}\) @ call c") as caught:
        recorder.add_rows(rows_of(start, start + 2), first_row=start)
    assert ErrorKind.ROW_COUNT == caught.value.kind
    recorder.add_rows(rows_of(20, 99), first_row=20)
    assert (10, 99) == (recorder.end(loss="not_captured").first_row, recorder.calls[0].rows_stop)


@given(st.integers(0, 9), st.integers(0, 1), st.integers(0, 2))
def test_a_conflict_within_a_call_is_named(token: int, slot: int, k: int) -> None:
    """One other id in a row that came before is an error with the token; the row that came first stays."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    recorder.begin(range(10), call_id="c", weights_version=None)
    recorder.add_rows(rows_of(0, 10), first_row=0)
    other_RLK = rows_of(0, 10).copy()
    other_RLK[token, slot, k] = 32_700

    with pytest.raises(DataError, match=f"call c, token {token}") as caught:
        recorder.add_rows(other_RLK, first_row=0)
    assert ErrorKind.ROW_CONFLICT == caught.value.kind
    np.testing.assert_array_equal(rows_of(0, 10), recorder.end().routes)


def test_rows_are_copied_as_they_come() -> None:
    """An engine may overwrite its buffer once ``add_rows`` has returned (vllm-ascend#10717)."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    recorder.begin([1, 2, 3], call_id="c", weights_version=None)
    buffer_RLK = rows_of(0, 3).copy()
    recorder.add_rows(buffer_RLK, first_row=0)
    buffer_RLK[:] = 0

    np.testing.assert_array_equal(rows_of(0, 3), recorder.end().routes)


def test_a_longer_snapshot_replaces_none_of_a_shorter_one() -> None:
    """Of two snapshots the longer one is taken if the shorter is its beginning, and refused if not (vllm#39568)."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    recorder.begin(range(6), call_id="c", weights_version=None)
    recorder.add_rows(rows_of(0, 4), first_row=0)
    with pytest.raises(DataError) as caught:
        recorder.add_rows(rows_of(0, 6, sample=1), first_row=0)
    assert ErrorKind.ROW_CONFLICT == caught.value.kind
    recorder.add_rows(rows_of(0, 6), first_row=0)

    assert (6, 4) == (recorder.end().rows_stop, recorder.repeated_rows)


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
        recorder.begin(prompt, call_id=f"c{number}", weights_version=number)
        recorder.add_rows(rows_of(start, len(tokens) - 1), first_row=start)
        moved += len(tokens) - 1 - start
        recorder.add_tokens(tokens[len(prompt) :])
        recorder.end()
    made = recorder.assembly()

    np.testing.assert_array_equal(rows_of(0, len(tokens) - 1), made.records[0].routes[:-1])
    assert (len(tokens) - 1, 0) == (moved, made.report.overlap_rows)
    assert len(tokens) - 1 == made.records[0].coverage().count("captured")


def test_a_prompt_that_breaks_the_context_starts_another_segment() -> None:
    """A prompt that does not extend the tokens so far needs its rows from 0 on, and the turn after it no more."""
    recorder = RouteRecorder(SPEC, sample_id="s", on_break="split")
    for number, (prompt, start) in enumerate((([1, 2], 0), ([1, 2, 9, 3], 2), ([7, 8, 6], 0), ([7, 8, 6, 9, 5], 3))):
        assert start == recorder.next_row(prompt)
        recorder.begin(prompt, call_id=f"c{number}", weights_version=None)
        recorder.add_tokens([9])
        recorder.add_rows(rows_of(start, len(prompt)), first_row=start)
        recorder.end()

    assert [("s", 0, 0), ("s", 0, 1)] == [record.key for record in recorder.assembly().records]


def test_lost_rows_are_asked_for_again() -> None:
    """After a call whose rows were lost the next one is to bring them."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    recorder.begin([1, 2, 3], call_id="a", weights_version=None)
    recorder.add_tokens([4, 5])
    recorder.end(loss="lost")

    assert 0 == recorder.next_row([1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("media", [("two",), (), ("two", "one")], ids=["another", "none", "another-first"])
def test_the_same_placeholders_with_other_media_need_their_own_rows(media: tuple[str, ...]) -> None:
    """Equal token ids with other media are another context: its rows are asked for from 0 on, and none is lost."""
    recorder = RouteRecorder(SPEC, sample_id="s", on_break="split")
    for number, (prompt, seen) in enumerate((([1, 7, 7], ("one",)), ([1, 7, 7, 9, 2], media))):
        start = recorder.next_row(prompt, media=seen)
        recorder.begin(prompt, call_id=f"c{number}", weights_version=None, media=seen)
        recorder.add_tokens([9])
        recorder.add_rows(rows_of(start, len(prompt), sample=number), first_row=start)
        recorder.end()

    records = recorder.assembly().records
    assert [3, 5] == [record.coverage().count("captured") for record in records]
    np.testing.assert_array_equal(rows_of(0, 5, sample=1), records[1].routes[:-1])


def test_media_that_go_on_need_no_row_twice() -> None:
    """A turn that adds an image behind those so far extends the context."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    recorder.begin([1, 7, 7], call_id="a", weights_version=None, media=("one",))
    recorder.add_rows(rows_of(0, 3), first_row=0)
    recorder.end()

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
        recorder.begin(tokens, call_id=f"c{number}", weights_version=None)
        recorder.add_rows(rows_RLK, first_row=start)
        recorder.end()

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
    recorder.begin([1, 2, 3], call_id="c", weights_version=1)
    recorder.add_rows(rows_of(0, 7), first_row=0)
    recorder.add_tokens([4, 5, 6, 7, 8])
    for change in changes:
        recorder.change_weights(change.weights_version, token=change.token)
    recorder.end()
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


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def fresh(*, begun: bool = True) -> RouteRecorder:
    """A recorder, by default within a call of three prompt tokens."""
    recorder = RouteRecorder(SPEC, sample_id="s")
    if begun:
        recorder.begin([1, 2, 3], call_id="c", weights_version=1)
    return recorder


def tokens_with_and_without_logprobs(recorder: RouteRecorder) -> None:
    """Two tokens, of which only one has a log-probability."""
    recorder.add_tokens([1], logprobs=[-1.0])
    recorder.add_tokens([2])


BAD: dict[str, tuple[Callable[[], object], type[RouteplaneError], ErrorKind]] = {
    "tokens of no call": (lambda: fresh(begun=False).add_tokens([1]), UsageError, ErrorKind.ARGUMENT),
    "rows of no call": (
        lambda: fresh(begun=False).add_rows(rows_of(0, 1), first_row=0),
        UsageError,
        ErrorKind.ARGUMENT,
    ),
    "the end of no call": (lambda: fresh(begun=False).end(), UsageError, ErrorKind.ARGUMENT),
    "a call within a call": (
        lambda: fresh().begin([1], call_id="d", weights_version=None),
        UsageError,
        ErrorKind.ARGUMENT,
    ),
    "records of a call that goes on": (lambda: fresh().assembly(), UsageError, ErrorKind.ARGUMENT),
    "records of nothing": (lambda: fresh(begun=False).assembly(), DataError, ErrorKind.ROUTES_MISSING),
    "log-probabilities of some": (
        lambda: tokens_with_and_without_logprobs(fresh()),
        DataError,
        ErrorKind.SHAPE,
    ),
    "log-probabilities too many": (lambda: fresh().add_tokens([1], logprobs=[-1.0, -2.0]), DataError, ErrorKind.SHAPE),
    "other layers": (lambda: fresh().add_rows(rows_of(0, 3)[:, :1], first_row=0), DataError, ErrorKind.SHAPE),
    "other slots": (lambda: fresh().add_rows(rows_of(0, 3)[:, :, :1], first_row=0), DataError, ErrorKind.SHAPE),
    "ids beyond int16": (
        lambda: fresh().add_rows(rows_of(0, 3).astype(np.int32) + 40_000, first_row=0),
        DataError,
        ErrorKind.VALUE_RANGE,
    ),
    "rows that are missing unsaid": (lambda: fresh().end(), DataError, ErrorKind.ROUTES_MISSING),
    "weights that change back in time": (
        lambda: fresh().change_weights(2, token=1),
        UsageError,
        ErrorKind.ARGUMENT,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_use_is_refused(name: str) -> None:
    """Each misuse has its class and kind."""
    act, error, kind = BAD[name]

    with pytest.raises(error) as caught:
        act()
    assert kind == caught.value.kind


def test_a_call_that_lacks_rows_can_be_ended_with_the_reason() -> None:
    """A refused end leaves the call open; with a loss declared it ends."""
    recorder = fresh()
    recorder.add_tokens([4, 5])
    recorder.add_rows(rows_of(0, 2), first_row=0)
    with pytest.raises(DataError) as caught:
        recorder.end()
    assert ErrorKind.ROW_COUNT == caught.value.kind
    recorder.end(loss="aborted")
    [record] = recorder.assembly().records

    states = [(one.start, one.stop, one.state) for one in record.captures]
    assert [(0, 2, "captured"), (2, 4, "aborted"), (4, 5, "not_fed")] == states
    assert replace(record, checksum=None).checksum == record.checksum
