"""ModelCall and merge_layers: exact row counts, declared loss, and parts that must agree."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ChecksumError, DataError, ErrorKind
from routeplane.record.calls import FedRows, ModelCall, RowLoss, merge_layers
from routeplane.record.spans import PRESENT_STATES, STATES
from routeplane.testing.builders import watermark
from routeplane.testing.strategies import Rollout, rollouts

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

LAYERS = (1, 4, 6)


def rows(count: int, *, first: int = 0, layers: tuple[int, ...] = LAYERS, top_k: int = 2) -> NDArray[np.int16]:
    """Watermarked rows of tokens ``[first, first + count)``."""
    token_S11 = np.arange(first, first + count)[:, None, None]
    return watermark(0, token_S11, layer=np.asarray(layers)[:, None], k=np.arange(top_k))


def call(prompt: int, generated: int, **fields: Any) -> ModelCall:
    """A call of ``prompt + generated`` tokens; its rows are those of all tokens but the last, unless given."""
    total = prompt + generated
    legal: dict[str, Any] = {"weights_version": 1, "call_id": "call-0"}
    if "routes" not in fields:
        legal["routes"] = rows(total if not generated else total - 1)
    return ModelCall(prompt_ids=np.arange(prompt), generation_ids=np.arange(prompt, total), **{**legal, **fields})


# ----------------------------------------------------------------------------------------------------------------------
# Row counts
# ----------------------------------------------------------------------------------------------------------------------

SMALL = st.integers(0, 6)


@given(
    prompt=SMALL,
    generated=SMALL,
    first=st.integers(0, 8),
    count=SMALL,
    loss=st.sampled_from([None, "lost"]),
    fed=st.sampled_from(["but_last", "all"]),
)
def test_rows_end_at_the_last_token_that_was_fed(
    prompt: int, generated: int, first: int, count: int, loss: RowLoss | None, fed: FedRows
) -> None:
    """n - 1 is one past the last row, n where all were fed; less needs a declared loss, more is never right."""
    total = prompt + generated
    if not total:
        return
    end = first + count
    stop = total - 1 if generated and fed == "but_last" else total
    legal = end == stop or (end <= stop and loss is not None)
    if legal:
        made = call(prompt, generated, routes=rows(count, first=first), first_row=first, loss=loss, rows=fed)
        assert (total, end, stop) == (made.num_tokens, made.rows_stop, made.num_fed)
        assert list(range(total)) == made.token_ids.tolist()
    else:
        with pytest.raises(DataError, match="expected ") as caught:
            call(prompt, generated, routes=rows(count, first=first), first_row=first, loss=loss, rows=fed)
        assert ErrorKind.ROW_COUNT == caught.value.kind


COUNTS: dict[str, tuple[int, int, int, FedRows | None]] = {
    # prompt, generated, rows, under which declaration they are legal
    "row_1_prefill_only_whole": (5, 0, 5, "but_last"),
    "row_1_prefill_only_one_short": (5, 0, 4, None),
    "row_1_one_generated": (5, 1, 5, "but_last"),
    "row_1_three_generated": (5, 3, 7, "but_last"),
    "row_1_three_generated_two_short": (5, 3, 6, None),
    "row_3_prompt_3_gen_2": (3, 2, 4, "but_last"),
    "row_4_seven_tokens_six_rows": (4, 3, 6, "but_last"),
    "row_4_seven_tokens_five_rows": (4, 3, 5, None),
    "row_4_seven_tokens_eight_rows": (4, 3, 8, None),
    "row_9_five_tokens_six_rows": (3, 2, 6, None),
    "row_9_five_tokens_four_rows": (3, 2, 4, "but_last"),
    "row_10_six_tokens_four_rows": (3, 3, 4, None),
    "row_14_prompt_100_gen_50_149": (100, 50, 149, "but_last"),
    "row_14_prompt_100_gen_50_150": (100, 50, 150, "all"),
    "row_14_prompt_100_gen_50_only_50": (100, 50, 50, None),
    "no_rows_at_all": (3, 2, 0, None),
    "one_token_no_row": (0, 1, 0, "but_last"),
}


@pytest.mark.parametrize(("prompt", "generated", "count", "legal"), COUNTS.values(), ids=COUNTS)
def test_row_counts_of_the_field(prompt: int, generated: int, count: int, legal: FedRows | None) -> None:
    """Kind of reports 1, 3, 4, 9, 10, 14: n - 1 rows, n where the reader says that all were fed; all else fails."""
    for fed in get_args(FedRows):
        if fed == legal or (legal and not generated):
            assert count == call(prompt, generated, routes=rows(count), rows=fed).rows_stop
            continue
        with pytest.raises(DataError, match=rf"{prompt} prompt \+ {generated} generated.*got {count} from 0") as caught:
            call(prompt, generated, routes=rows(count), rows=fed)
        assert ErrorKind.ROW_COUNT == caught.value.kind


def test_prompt_rows_and_generated_rows_are_one_array() -> None:
    """Kind of report 8: rows of prompt and generation that came apart make one array whose length must be exact."""
    prompt_rows, generated_rows = rows(3), rows(1, first=3)
    made = call(3, 2, routes=np.concatenate([prompt_rows, generated_rows]))

    assert 4 == made.rows_stop
    with pytest.raises(DataError, match="got 2 from 0"):
        call(3, 2, routes=np.concatenate([prompt_rows[:1], generated_rows]))


def test_a_loss_is_a_state() -> None:
    """What a call may declare of absent rows is what a capture may say of them."""
    assert set(get_args(RowLoss)) == set(STATES) - PRESENT_STATES - {"partial", "not_fed"}


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], ErrorKind]] = {
    "call_id_empty": ({"call_id": ""}, ErrorKind.DTYPE),
    "call_id_null": ({"call_id": None}, ErrorKind.DTYPE),
    "call_id_not_utf8": ({"call_id": "\ud800"}, ErrorKind.DTYPE),
    "no_tokens": ({"prompt_ids": [], "generation_ids": [], "routes": None}, ErrorKind.SHAPE),
    "tokens_floating": ({"prompt_ids": [0.0, 1.0, 2.0]}, ErrorKind.DTYPE),
    "a_bool_among_tokens": ({"prompt_ids": [0, True, 2]}, ErrorKind.DTYPE),
    "tokens_nested": ({"generation_ids": [[3, 4]]}, ErrorKind.SHAPE),
    "token_beyond_int32": ({"generation_ids": [3, 2**31]}, ErrorKind.VALUE_RANGE),
    "version_text": ({"weights_version": "v1"}, ErrorKind.DTYPE),
    "version_bool": ({"weights_version": True}, ErrorKind.DTYPE),
    "version_beyond_int64": ({"weights_version": 2**63}, ErrorKind.DTYPE),
    "rows_floating": ({"routes": rows(4).astype(np.float32)}, ErrorKind.DTYPE),
    "rows_flat": ({"routes": rows(4).reshape(4, -1)}, ErrorKind.SHAPE),
    "rows_beyond_int16": ({"routes": rows(4).astype(np.int32) + 40_000}, ErrorKind.VALUE_RANGE),
    "rows_empty_list": ({"routes": []}, ErrorKind.SHAPE),
    "first_row_negative": ({"first_row": -1}, ErrorKind.DTYPE),
    "first_row_fraction": ({"first_row": 0.0}, ErrorKind.DTYPE),
    "first_row_bool": ({"first_row": False}, ErrorKind.DTYPE),
    "first_row_beyond_the_tokens": ({"routes": None, "first_row": 6}, ErrorKind.ROW_COUNT),
    "cached_beyond_the_rows": ({"cached": 5}, ErrorKind.ROW_COUNT),
    "cached_negative": ({"cached": -1}, ErrorKind.DTYPE),
    "cached_without_rows": ({"routes": None, "cached": 2}, ErrorKind.ROW_COUNT),
    "loss_unknown": ({"loss": "preempted"}, ErrorKind.COVERAGE),
    "loss_of_a_last_token": ({"loss": "not_fed"}, ErrorKind.COVERAGE),
    "layers_of_another_number": ({"layer_ids": (1, 4)}, ErrorKind.LAYERS),
    "layer_fraction": ({"layer_ids": (1.7, 4, 6)}, ErrorKind.DTYPE),
    "layer_negative": ({"layer_ids": (-1, 4, 6)}, ErrorKind.DTYPE),
    "layer_text": ({"layer_ids": "146"}, ErrorKind.DTYPE),
    "media_without_digest": ({"media": ("",)}, ErrorKind.MEDIA),
    "media_null": ({"media": (None,)}, ErrorKind.MEDIA),
    "media_one_text": ({"media": "sha256:00"}, ErrorKind.MEDIA),
    "media_not_utf8": ({"media": ("\ud800",)}, ErrorKind.DTYPE),
    "logprobs_of_all_tokens": ({"logprobs": [-1.0] * 5}, ErrorKind.SHAPE),
    "logprobs_positive": ({"logprobs": [-1.0, 0.1]}, ErrorKind.VALUE_RANGE),
    "column_of_generated_tokens_only": ({"columns": {"x": np.zeros(2)}}, ErrorKind.TOKEN_COLUMN),
    "column_reserved": ({"columns": {"routes": np.zeros(5)}}, ErrorKind.TOKEN_COLUMN),
    "checksum_negative": ({"checksum": -1}, ErrorKind.DTYPE),
    "checksum_text": ({"checksum": "00"}, ErrorKind.DTYPE),
    "checksum_beyond_64_bits": ({"checksum": 2**64}, ErrorKind.DTYPE),
    "first_row_beyond_int32": ({"first_row": 2**31}, ErrorKind.DTYPE),
    "layer_beyond_int32": ({"layer_ids": (1, 4, 2**31)}, ErrorKind.DTYPE),
}


@pytest.mark.parametrize(("change", "kind"), REFUSED.values(), ids=REFUSED)
def test_an_illegal_call_is_refused(change: dict[str, Any], kind: ErrorKind) -> None:
    """Each illegal value is a DataError of its kind, naming expected and got."""
    with pytest.raises(DataError, match=r"expected .*(, got |@ call)") as caught:
        replace(call(3, 2), **{"checksum": None, **change})

    assert kind == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Values
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generated", range(4))
def test_one_version_sampled_all_generated_tokens(generated: int) -> None:
    """One span of them, none where none was generated, and the rows of all tokens."""
    made = replace(call(3, generated), weights_version=7, checksum=None)

    assert made.version_spans() == (((3, 3 + generated, 7),) if generated else ())
    assert ((0, 3 + generated, 7),) == made.row_versions()


@given(prompt=st.integers(0, 3), lengths=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_a_row_comes_from_the_weights_that_sampled_the_token_behind_it(prompt: int, lengths: list[int]) -> None:
    """Token by token; no span is empty, and together they are all tokens."""
    bounds = np.cumsum([prompt, *lengths]).tolist()
    versions = tuple((start, stop, 10 + place) for place, (start, stop) in enumerate(pairwise(bounds)))
    made = replace(call(prompt, sum(lengths)), weights_version=None, versions=versions, checksum=None)
    sampled = {token: version for start, stop, version in versions for token in range(start, stop)}
    expected = [sampled.get(max(token + 1, prompt)) for token in range(bounds[-1])]
    found = made.row_versions()

    assert expected == [version for start, stop, version in found for _ in range(start, stop)]
    assert all(start < stop for start, stop, _ in found)
    assert [0, *(stop for _, stop, _ in found)] == [*(start for start, _, _ in found), bounds[-1]]


@given(rollouts())
def test_a_call_pickles(rollout: Rollout) -> None:
    """Content and checksum cross a process boundary; arrays arrive read-only."""
    for made in rollout.calls:
        again = pickle.loads(pickle.dumps(made))

        assert made.verify().checksum == again.verify().checksum
        assert made.token_ids.tolist() == again.token_ids.tolist()
        assert not again.prompt_ids.flags.writeable


def test_a_call_is_frozen() -> None:
    """Fields, arrays and columns cannot be written; arrays that fit are shared with the caller."""
    routes_RLK = rows(4)
    made = call(3, 2, routes=routes_RLK, columns={"x": np.zeros(5)})

    assert np.shares_memory(routes_RLK, made.routes)
    with pytest.raises(FrozenInstanceError):
        made.first_row = 1  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        made.columns["x"].values[0] = 1
    with pytest.raises(TypeError):
        made.columns["y"] = made.columns["x"]  # type: ignore[index]


def test_a_write_under_a_call_is_caught() -> None:
    """The checksum made at capture finds a later write, and a wrong one that was given."""
    routes_RLK = rows(4)
    made = call(3, 2, routes=routes_RLK).verify()
    wrong = replace(made, checksum=5)
    routes_RLK[3, 2, 1] = 7
    for bad in (made, wrong):
        with pytest.raises(ChecksumError, match="@ call call-0") as caught:
            bad.verify()
        assert ErrorKind.CHECKSUM == caught.value.kind
    assert 5 == wrong.checksum


# ----------------------------------------------------------------------------------------------------------------------
# Layers
# ----------------------------------------------------------------------------------------------------------------------


def _part(whole: ModelCall, slots: list[int], **changes: Any) -> ModelCall:
    """What one pipeline stage captured of a call."""
    assert whole.routes is not None
    layers = tuple(LAYERS[slot] for slot in slots)
    fields = {"routes": whole.routes[:, slots], "layer_ids": layers, "checksum": None, **changes}
    return replace(whole, **fields)


WHOLE = call(
    3, 2, layer_ids=LAYERS, logprobs=np.asarray([-1.0, np.nan]), columns={"x": np.asarray([0, 1, 2, 3, np.nan])}
)


@given(st.permutations(range(3)), st.integers(1, 3), st.data())
def test_stages_merge_to_the_whole(order: list[int], stages: int, data: st.DataObject) -> None:
    """Any partition of the layers, in any order, is the whole call again, to the checksum."""
    cuts = sorted(data.draw(st.sets(st.integers(1, 2), min_size=stages - 1, max_size=stages - 1)))
    groups = [order[start:stop] for start, stop in zip([0, *cuts], [*cuts, 3], strict=True)]
    bearer = data.draw(st.integers(0, stages - 1))
    parts = [
        _part(WHOLE, group) if index == bearer else _part(WHOLE, group, logprobs=None, columns={})
        for index, group in enumerate(groups)
    ]

    assert WHOLE.checksum == merge_layers(iter(parts)).verify().checksum


def _disagree(**changes: Any) -> Callable[[], list[ModelCall]]:
    return lambda: [_part(WHOLE, [0]), _part(WHOLE, [1, 2], **changes)]


BAD_PARTS: dict[str, tuple[Callable[[], list[ModelCall]], str, ErrorKind]] = {
    "none": (list, "at least one call", ErrorKind.LAYERS),
    "layer_twice": (lambda: [_part(WHOLE, [0, 1]), _part(WHOLE, [1, 2])], "layer 4 once", ErrorKind.LAYERS),
    "layers_unnamed": (_disagree(layer_ids=None), "layer_ids in every part", ErrorKind.LAYERS),
    "stage_without_rows": (_disagree(routes=None, first_row=4), "rows_stop|first_row|routes", ErrorKind.LAYERS),
    "other_call": (_disagree(call_id="call-1"), "agree in call_id", ErrorKind.LAYERS),
    "other_prompt": (_disagree(prompt_ids=np.asarray([0, 1, 9])), "agree in prompt_ids", ErrorKind.TOKEN_MISMATCH),
    "other_answer": (_disagree(generation_ids=np.asarray([3, 9])), "in generation_ids", ErrorKind.TOKEN_MISMATCH),
    "other_weights": (_disagree(weights_version=2), "agree in weights_version, got 1 and 2", ErrorKind.LAYERS),
    "one_row_more": (
        _disagree(routes=np.repeat(rows(5, layers=(4,)), 2, axis=1), rows="all"),
        "agree in rows_stop, got 4 and 5",
        ErrorKind.LAYERS,
    ),
    "rows_shifted": (
        lambda: [_part(WHOLE, [0]), _part(WHOLE, [1, 2], first_row=1, rows="all")],
        "agree in first_row, got 0 and 1",
        ErrorKind.LAYERS,
    ),
    "other_cache": (_disagree(cached=2), "agree in cached", ErrorKind.LAYERS),
    "other_loss": (_disagree(loss="lost"), "agree in loss", ErrorKind.LAYERS),
    "other_media": (_disagree(media=("m",)), "agree in media", ErrorKind.LAYERS),
    "other_top_k": (_disagree(routes=rows(4, layers=(4, 6), top_k=3)), "agree in top-k", ErrorKind.SHAPE),
    "other_logprobs": (_disagree(logprobs=np.asarray([-2.0, np.nan])), "equal logprobs", ErrorKind.TOKEN_COLUMN),
    "other_column": (_disagree(columns={"x": np.zeros(5)}), "equal x", ErrorKind.TOKEN_COLUMN),
}


@pytest.mark.parametrize(("build", "message", "kind"), BAD_PARTS.values(), ids=BAD_PARTS)
def test_parts_that_disagree_are_refused(build: Callable[[], list[ModelCall]], message: str, kind: ErrorKind) -> None:
    """Kind of report 48: stages that do not bring the same call, or no rows for a layer, are refused by name."""
    with pytest.raises(DataError, match=message) as caught:
        merge_layers(build())

    assert kind == caught.value.kind


def test_parts_are_verified_first() -> None:
    """A part whose content is not what its checksum says merges with nothing."""
    with pytest.raises(ChecksumError):
        merge_layers([_part(WHOLE, [0]), _part(WHOLE, [1, 2], checksum=5)])


def test_a_row_is_of_the_weights_that_sampled_the_next_token() -> None:
    """Four tokens sampled under two versions: the prompt's rows are the first's, and the last token's are unknown."""
    call = ModelCall(
        prompt_ids=np.asarray([1, 2, 3]),
        generation_ids=np.asarray([4, 5, 6, 7]),
        routes=None,
        weights_version=None,
        versions=((3, 5, 1), (5, 7, 2)),
        call_id="c",
        loss="not_captured",
    )

    assert ((0, 4, 1), (4, 6, 2), (6, 7, None)) == call.row_versions()
    assert ((3, 5, 1), (5, 7, 2)) == call.version_spans()
