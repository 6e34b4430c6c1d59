"""Message logs out of records and back: what NeMo RL keeps of a conversation, with its conformance facts.

Axes: S tokens, M tokens of a message, L captured layers, K top-k slots.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from routeplane.capture.http.messages import message_log
from routeplane.capture.layers import rows_without_filler
from routeplane.errors import CaptureError, DataError, ErrorKind, RouteplaneError, UsageError
from routeplane.record.assembly import assemble
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.testing.builders import watermarked_record, watermarked_spec
from routeplane.testing.strategies import Rollout, rollouts
from tests.capture.reading import gym_calls, log_record
from tests.capture.test_gym import FILLER, SPEC, TWO_TURNS, only, row

NOTHING = [[MISSING] * 2] * 2


def log_of(*messages: tuple[str, list[int], list[Any] | None]) -> list[dict[str, Any]]:
    """Messages of (role, tokens, rows)."""
    return [
        {
            "role": role,
            "content": "text",
            "token_ids": np.asarray(tokens, dtype=np.int64),
            **({} if rows is None else {"routed_experts": np.asarray(rows, dtype=np.int16).reshape(-1, 2, 2)}),
            **({"generation_logprobs": np.full(len(tokens), -0.5, np.float32)} if role == "assistant" else {}),
        }
        for role, tokens, rows in messages
    ]


def read(log: list[Any], **options: Any) -> RouteRecord:
    """The record of a log."""
    return log_record(log, SPEC, **{"sample_id": "s", "weights_version": 4, **options})


# ----------------------------------------------------------------------------------------------------------------------
# Both directions
# ----------------------------------------------------------------------------------------------------------------------


@given(rollouts(breaks=False))
def test_a_log_gives_back_its_record(made: Rollout) -> None:
    """Tokens, rows, log-probabilities, token columns, roles and spans survive the way out and back; only who captured a
    row is no longer known, and whether the last row of a generation is one that a harness made up, where the message
    behind it has none."""
    [record] = assemble(made.calls, made.spec, sample_id="s").records
    log = message_log(record)

    # filler by place: a row of the last generated token, or of tokens behind it, is not taken
    generated = [span for span in record.spans if span.kind == "generation"]
    fed = generated[-1].stop - 1 if generated else record.num_tokens
    back = log_record(log, made.spec, sample_id="s", weights_version=1, absent="not_captured")

    np.testing.assert_array_equal(record.token_ids, back.token_ids)
    expected_SLK = record.routes.copy()
    expected_SLK[fed:] = MISSING
    for span, behind in itertools.pairwise(record.spans):
        if span.kind == "generation" and (record.routes[behind.start : behind.stop] == MISSING).all():
            expected_SLK[span.stop - 1] = MISSING
    np.testing.assert_array_equal(expected_SLK, back.routes)
    assert [(one.start, one.stop, one.kind) for one in record.spans] == [
        (one.start, one.stop, one.kind) for one in back.spans
    ]
    assert record.columns.keys() == back.columns.keys()
    for name, values in record.columns.items():
        np.testing.assert_array_equal(values, back.columns[name])
    if record.logprobs is not None:
        expected = [record.logprobs[one.start : one.stop] for one in generated]
        assert back.logprobs is not None or not expected
        for span, values in zip(generated, expected, strict=True):
            np.testing.assert_array_equal(values, back.logprobs[span.start : span.stop])  # type: ignore[index]


def test_no_array_of_a_log_is_of_another_type() -> None:
    """Integers are integers, also in a message without tokens, where upstream has floats (fact C-042), and every
    message has rows of the full shape."""
    second = {
        "prompt_token_ids": [1, 2, 3],
        "generation_token_ids": [4],
        "routed_experts": [row(10), row(12), row(30), FILLER],
    }
    log = message_log(only([TWO_TURNS[0], second]))

    assert ["user", "assistant", "user", "assistant"] == [message["role"] for message in log]
    assert [[1, 2], [3], [], [4]] == [message["token_ids"].tolist() for message in log]
    assert {np.dtype(np.int64)} == {message["token_ids"].dtype for message in log}
    assert {np.dtype(np.int16)} == {message["routed_experts"].dtype for message in log}
    assert [2, 1, 0, 1] == [len(message["routed_experts"]) for message in log]
    joined = torch.cat([torch.from_numpy(message["token_ids"]) for message in log])
    assert torch.int64 == joined.dtype


def test_c031_slices_of_a_log() -> None:
    """Fact C-031: the rows of each message are those of its tokens, the repaired one with the message it belongs to."""
    log = message_log(only(TWO_TURNS))

    assert [[1, 2], [3], [4, 5], [6, 7]] == [message["token_ids"].tolist() for message in log]
    expected = [[row(2), row(4)], [row(30)], [row(14), row(16)], [row(18), NOTHING]]
    assert expected == [message["routed_experts"].tolist() for message in log]
    assert [None, [-0.5], None, [-0.5, -0.5]] == [
        None if message.get("generation_logprobs") is None else message["generation_logprobs"].tolist()
        for message in log
    ]


def test_the_arrays_of_a_log_are_the_callers() -> None:
    """Writing into a message changes no record."""
    record = only(TWO_TURNS)
    for message in message_log(record):
        message["routed_experts"][:] = 0
        message["token_ids"][:] = 0

    assert record is record.verify()


def test_tensors_are_read_as_they_are() -> None:
    """A log of torch tensors, as NeMo RL keeps it, gives the record that arrays give; token ids of an empty message may
    be floats."""
    log = message_log(only(TWO_TURNS))
    tensors: list[dict[str, Any]] = [
        {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in message.items()}
        for message in log
    ]
    tensors.insert(2, {"role": "user", "content": "", "token_ids": torch.tensor([])})

    assert read(log).checksum == read(tensors).checksum


def test_a_record_that_stands_on_another_is_refused() -> None:
    """Rows that are elsewhere are not made up."""
    spec = watermarked_spec()
    whole = watermarked_record(0, num_tokens=6, spec=spec)
    delta = RouteRecord(
        sample_id="d",
        token_ids=whole.token_ids,
        routes=whole.routes[2:],
        routes_start=2,
        prefix=Prefix(sample_id="p", stop=2, checksum=1),
        spans=whole.spans,
        captures=whole.captures,
        spec=spec,
    )
    with pytest.raises(UsageError) as caught:
        message_log(delta)
    assert ErrorKind.PREFIX == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Filler
# ----------------------------------------------------------------------------------------------------------------------


@given(st.data())
def test_filler_is_known_by_its_place(data: st.DataObject) -> None:
    """Rows outside the captured intervals are MISSING whatever they hold; inside, arange(K) is a route like any
    other."""
    spec = RouteSpec(num_experts=9, top_k=2, layer_ids=(0, 2))
    size = data.draw(st.integers(0, 8))
    edges = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    captured = list(zip(edges[::2], edges[1::2], strict=False))
    inside = {at for start, stop in captured for at in range(start, stop)}
    junk = st.lists(st.integers(-9, 99), min_size=6, max_size=6)
    rows = [
        [0, 1, 0, 0, 0, 1]
        if at in inside and data.draw(st.booleans())
        else [3, 4, 0, 0, 5, 6]
        if at in inside
        else data.draw(junk)
        for at in range(size)
    ]
    rows_SDK = np.asarray(rows, dtype=np.int64).reshape(size, 3, 2)

    cleaned_SLK = rows_without_filler(rows_SDK, spec, captured=captured)

    expected = [rows_SDK[at, [0, 2]].tolist() if at in inside else [[MISSING] * 2] * 2 for at in range(size)]
    assert expected == cleaned_SLK.tolist()


@pytest.mark.parametrize("captured", [[(2, 1)], [(0, 9)], [(-1, 2)], [(1, 3), (2, 4)]])
def test_intervals_must_be_intervals(captured: list[tuple[int, int]]) -> None:
    """Turned, outside or overlapping ones are refused."""
    with pytest.raises(UsageError):
        rows_without_filler(np.zeros((4, 2, 2), np.int16), SPEC, captured=captured)


def test_c051_c052_rows_behind_the_last_generation_are_filler() -> None:
    """Facts C-051 and C-052: a system message, a user's, an assistant's with a dummy last row, an observation of
    dummies: the dummies become MISSING and are counted; arange(K) at a fed token stays."""
    log = log_of(
        ("system", [10], [row(10)]),
        ("user", [11, 12], [FILLER, row(12)]),
        ("assistant", [13, 14], [row(14), FILLER]),
        ("environment", [15, 16], [FILLER, FILLER]),
    )
    record = read(log)

    assert [row(10), FILLER, row(12), row(14), NOTHING, NOTHING, NOTHING] == record.routes.tolist()
    assert ["system", "user", "assistant", "environment"] == [span.role for span in record.spans]
    # the last token of all ends the context; the other two were fed by no call that is known
    assert 3 == record.coverage().total - record.coverage().count("captured")


@pytest.mark.parametrize("behind", [None, [NOTHING] * 2], ids=["route-less", "back-filled"])
@pytest.mark.parametrize("filler", [FILLER, [[0, 0]] * 2], ids=["arange", "zeros"])
def test_c039_a_last_row_that_no_turn_repaired_is_filler(behind: Any, filler: Any) -> None:
    """Fact C-039: a turn with rows before one without keeps the dummy of its last token, as no prompt repaired it. It
    becomes MISSING by its place, also once upstream has written -1 into the messages behind it; a turn whose prompt
    brought rows keeps its repaired one."""
    first = ("user", [1, 2], [row(2), row(4)])
    cut = log_of(first, ("assistant", [3], [filler]), ("user", [4, 5], behind), ("assistant", [6, 7], behind))
    whole = log_of(first, ("assistant", [3], [FILLER]), ("user", [4], [row(6)]), ("assistant", [5], [filler]))
    record = read(cut, absent="not_captured")

    assert [row(2), row(4), *[NOTHING] * 5] == record.routes.tolist()
    assert (4, 1) == (record.coverage().count("not_captured"), record.coverage().count("not_fed"))
    assert [row(2), row(4), FILLER, row(6), NOTHING] == read(whole).routes.tolist()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), min_size=1, max_size=5), st.booleans())
def test_a_log_as_upstream_keeps_it_holds_no_filler(turns: list[tuple[int, int, bool]], back_filled: bool) -> None:
    """Logs made by section 2.1's rules (a row per token, the last one a dummy until the next turn's prompt repairs it,
    turns without routes, -1 written behind them or not): of each token the row that was captured, or none."""
    log: list[dict[str, Any]] = []
    truth: list[Any] = []
    for added, generated, routed in turns:
        known, prompt = len(truth), len(truth) + (added if truth else added + 1)
        total = prompt + generated
        true_SLK = np.asarray([row(at % 30 * 2) for at in range(total)], dtype=np.int16)
        if routed and log and "routed_experts" in log[-1]:
            log[-1]["routed_experts"][-1] = true_SLK[known - 1]
            truth[-1] = true_SLK[known - 1].tolist()
        made_SLK = np.concatenate([true_SLK[:-1], np.asarray([FILLER])])
        for role, start, stop in (("user", known, prompt), ("assistant", prompt, total)):
            rows: Any = made_SLK[start:stop].copy() if routed else None
            log += log_of((role, list(range(start, stop)), rows))
        truth += [*true_SLK[known:-1].tolist(), NOTHING] if routed else [NOTHING] * (total - known)
    if back_filled:
        for message in log:
            message.setdefault("routed_experts", np.full((len(message["token_ids"]), 2, 2), -1, np.int16))

    assert truth == read(log, absent="not_captured").routes.tolist()


def test_c053_earlier_rows_are_not_replaced_by_later_ones() -> None:
    """Fact C-053: upstream overwrites the rows of earlier turns with the newest capture; a log here is read as it
    stands, and assembling keeps the first capture unless told otherwise."""
    record = only(TWO_TURNS)
    calls = gym_calls(TWO_TURNS, SPEC, weights_version=4, cached=0)
    [last] = assemble(calls, SPEC, sample_id="s", overlap="keep_last").records

    assert [row(2), row(4)] == record.routes[:2].tolist()
    assert [row(10), row(12)] == last.routes[:2].tolist()


def test_decoder_layers_are_read_where_they_are_said() -> None:
    """A log with a slot for every decoder layer, dummies in dense slots too, gives the rows of the spec's layers."""
    spec = RouteSpec(num_experts=64, top_k=2, layer_ids=(0, 2))
    rows = [[[3, 4], [0, 0], [5, 6]], [[7, 8], [0, 0], [9, 10]], [[0, 1]] * 3]
    log: list[dict[str, Any]] = [
        {"role": "user", "token_ids": [1, 2], "routed_experts": rows[:2]},
        {"role": "assistant", "token_ids": [3], "routed_experts": rows[2:]},
    ]
    record = log_record(log, spec, sample_id="s", weights_version=1, axis="decoder")

    assert [[[3, 4], [5, 6]], [[7, 8], [9, 10]], NOTHING] == record.routes.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------

GOOD = log_of(("user", [1, 2], [row(2), row(4)]), ("assistant", [3, 4], [row(6), FILLER]))

MASKED: Any = np.ma  # typed in some releases, untyped in others
BAD: dict[str, tuple[dict[str, Any], type[RouteplaneError], ErrorKind]] = {
    "no rows": ({"routed_experts": None}, CaptureError, ErrorKind.CAPTURE_OFF),
    "a row more": ({"routed_experts": np.asarray([row(2)] * 3)}, DataError, ErrorKind.ROW_COUNT),
    "a row less": ({"routed_experts": np.asarray([row(2)])}, DataError, ErrorKind.ROW_COUNT),
    "floats": ({"routed_experts": np.asarray([row(2)] * 2, np.float32)}, DataError, ErrorKind.DTYPE),
    "a batch axis": ({"routed_experts": np.asarray([[row(2)] * 2])}, DataError, ErrorKind.SHAPE),
    "tokens as floats": ({"token_ids": np.asarray([1.0, 2.0])}, DataError, ErrorKind.DTYPE),
    "no tokens": ({"token_ids": None}, DataError, ErrorKind.TOKEN_MISMATCH),
    "no role": ({"role": None}, DataError, ErrorKind.DTYPE),
    "a column of another length": ({"mask": np.ones(3)}, DataError, ErrorKind.TOKEN_COLUMN),
    "a column in one message alone": ({"mask": np.ones(2)}, DataError, ErrorKind.TOKEN_COLUMN),
    "rows of other lengths": ({"routed_experts": [row(2), row(4)[:1]]}, DataError, ErrorKind.SHAPE),
    "a bool among ids": ({"routed_experts": [[[True, 2], [3, 4]], row(4)]}, DataError, ErrorKind.DTYPE),
    "rows behind a mask": (
        {"routed_experts": MASKED.masked_equal(np.asarray([row(2)] * 2), 3)},
        DataError,
        ErrorKind.DTYPE,
    ),
    "one token": ({"token_ids": 1}, DataError, ErrorKind.SHAPE),
    "a column numpy has no type for": ({"mask": torch.ones(2, dtype=torch.bfloat16)}, DataError, ErrorKind.DTYPE),
    "images": ({"pixel_values": np.ones((2, 3, 3))}, DataError, ErrorKind.TOKEN_COLUMN),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    """Rows that are not those of the tokens, floats, columns that would not be cut alike: each by its name."""
    change, error, kind = BAD[name]

    with pytest.raises(error) as caught:
        read([{**GOOD[0], **change}, GOOD[1]])
    assert kind == caught.value.kind


@pytest.mark.parametrize("other", [np.float32, np.uint64, np.bool_])
def test_columns_of_two_types_are_refused(other: Any) -> None:
    """Joined, integers beside floats (or int64 beside uint64) would become floats, and large ones other numbers."""
    columns = [np.asarray([2**62 + 1, 1], np.int64), np.ones(2, other)]
    log = [{**message, "mask": values} for message, values in zip(GOOD, columns, strict=True)]

    with pytest.raises(DataError, match="int64") as caught:
        read(log)
    assert ErrorKind.TOKEN_COLUMN == caught.value.kind


@pytest.mark.parametrize(
    ("kind", "role"), [("generation", "model"), ("prompt", "assistant")], ids=["no assistant", "no policy"]
)
def test_a_log_never_says_that_other_tokens_were_sampled(kind: str, role: str) -> None:
    """Readers train what the assistant says: a prompt's span of that role, or a generated one of another, is refused
    on the way out, where it would come back as the other kind."""
    record = only(TWO_TURNS)
    spans = tuple(replace(span, role=role) if span.kind == kind else span for span in record.spans)

    with pytest.raises(UsageError, match=f"{role!r} at {kind} tokens"):
        message_log(replace(record, spans=spans, checksum=None))


def test_columns_may_be_left_out_by_name() -> None:
    """A column that ``ignore`` names is left out of the record."""
    log = [{**GOOD[0], "pixel_values": np.ones((2, 3, 3))}, GOOD[1]]

    assert read(GOOD).checksum == read(log, ignore=["pixel_values"]).checksum


def test_c056_a_failed_member_is_all_missing() -> None:
    """Fact C-056: a prompt without any rows is a record of MISSING rows, where routes are not required; counted."""
    record = read(log_of(("user", [1, 2], None)), absent="not_captured")

    assert [NOTHING] * 2 == record.routes.tolist()
    assert 1.0 == record.coverage().missing_share
    with pytest.raises(DataError):
        read([])


@given(st.integers(1, 4), st.data())
def test_missing_messages_are_counted(turns: int, data: st.DataObject) -> None:
    """Each fed token of a message without rows is not captured, nor the last one of a generation before it, which only
    such a message's call would have fed; no other row moves."""
    has = data.draw(st.lists(st.booleans(), min_size=2 * turns, max_size=2 * turns))
    assume(any(has))
    messages, at = [], 0
    for index, present in enumerate(has):
        tokens = [at, at + 1]
        messages.append(
            (
                "assistant" if index % 2 else "user",
                tokens,
                [row(at % 30 * 2), row(at % 30 * 2 + 1)] if present else None,
            )
        )
        at += 2
    record = read(log_of(*messages), absent="not_captured")

    there = [has[token // 2] and (token % 4 < 3 or has[token // 2 + 1]) for token in range(at - 1)]
    for token, kept in enumerate(there):
        expected = row((token // 2 * 2) % 30 * 2 + token % 2) if kept else NOTHING
        assert expected == record.routes[token].tolist()
    assert there.count(False) == record.coverage().missing


@pytest.mark.parametrize("rows", [True, False], ids=["filler_behind", "nothing_behind"])
def test_an_observation_behind_the_last_call_is_not_missing(rows: bool) -> None:
    """A native log of 3 prompt, 4 generated and 5 observation tokens: 6 tokens were fed, and all of these have rows."""
    prompt, generated = (
        ("user", [1, 2, 3], [row(2), row(4), row(6)]),
        ("assistant", [4, 5, 6, 7], [row(8)] * 3 + [FILLER]),
    )
    behind = ("tool", [8, 9, 10, 11, 12], [FILLER] * 5 if rows else None)
    record = read(log_of(prompt, generated, behind), absent="not_captured")
    coverage = record.coverage()

    assert (12, 6, 6, 0.0) == (coverage.total, coverage.fed, coverage.count("not_fed"), coverage.missing_share)
    assert ["user", "assistant", "tool"] == [span.role for span in record.spans]
