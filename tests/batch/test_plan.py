"""Plans and what they gather, against the plainest reference: one row after another.

Axes: B sequences, N output rows, L layers, K top-k slots.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch.plan import PADDING, Layout, PaddingSide, PlanOptions, TokenPlan, _narrowed
from routeplane.batch.slots import Shard
from routeplane.errors import ErrorKind, UsageError
from routeplane.record.spec import MISSING, RouteSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

Row = tuple[int, int]
PAD: Row = (PADDING, PADDING)

# ----------------------------------------------------------------------------------------------------------------------
# The reference
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """Lengths and options, with the rows that they should give, sequence by sequence."""

    lengths: list[int]
    layout: Layout
    options: PlanOptions

    def plan(self) -> TokenPlan:
        """The plan under test."""
        return self.options.plan(self.lengths, layout=self.layout)

    def kept(self, length: int) -> list[int]:
        """Tokens that truncation leaves."""
        tokens, limit = list(range(length)), self.options.max_length
        if limit is None:
            return tokens
        return tokens[-limit:] if self.options.truncate == "left" else tokens[:limit]

    @property
    def slots(self) -> list[list[Row]]:
        """``(record, token)`` of each row, by sequence."""
        multiple = self.options.pad_to_multiple_of
        kept = [self.kept(length) for length in self.lengths]
        widths = [len(tokens) + (-len(tokens)) % multiple for tokens in kept]
        if self.layout == "padded":
            widths = [self.options.seq_len or max(widths)] * len(widths)
        slots = []
        for record, (kept_tokens, width) in enumerate(zip(kept, widths, strict=True)):
            tokens = [(record, token) for token in kept_tokens]
            pads = [PAD] * (width - len(tokens))
            slots.append(pads + tokens if self.options.padding_side == "left" else tokens + pads)
        return slots

    @property
    def rows(self) -> list[Row]:
        """``(record, token)`` of each row."""
        return [row for slot in self.slots for row in slot]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        return (len(self.slots), len(self.slots[0])) if self.layout == "padded" else (len(self.rows),)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to six short sequences under any legal options."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    multiple = draw(st.integers(1, 5))
    end = draw(st.sampled_from((None, "left", "right")))
    cut: dict[str, Any] = {} if end is None else {"max_length": 4, "truncate": end}
    if draw(st.booleans()):
        return Case(lengths=lengths, layout="packed", options=PlanOptions(pad_to_multiple_of=multiple, **cut))
    longest = max(lengths) + (-max(lengths)) % multiple
    seq_len = draw(st.none() | st.integers(0, 3).map(lambda extra: longest + extra * multiple))
    side: PaddingSide = draw(st.sampled_from(("right", "left")))
    options = PlanOptions(seq_len=seq_len, pad_to_multiple_of=multiple, padding_side=side, **cut)
    return Case(lengths=lengths, layout="padded", options=options)


@st.composite
def any_plans(draw: st.DrawFn) -> TokenPlan:
    """Plans that no constructor makes: rows in any order, repeated, or left out."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    tokens = [(record, token) for record, length in enumerate(lengths) for token in range(length)]
    rows = draw(st.lists(st.sampled_from([PAD, *tokens]), min_size=1, max_size=20))
    table = np.asarray(rows, dtype=np.int64)
    edges = np.zeros(len(lengths) + 1, dtype=np.int32)
    edges[-1] = len(rows)
    return TokenPlan(
        layout="packed",
        shape=(len(rows),),
        record_N=table[:, 0],
        token_N=table[:, 1],
        position_N=np.maximum(table[:, 1], 0),
        sources=np.asarray(lengths),
        lengths=np.asarray(lengths),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        cu_seqlens_padded=edges,
    )


@st.composite
def any_seams(draw: st.DrawFn) -> TokenPlan:
    """Plans with padding on both sides, and sequences without a prompt or a response."""
    parts = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(any), min_size=1, max_size=5))
    prompts, responses = zip(*parts, strict=True)
    return TokenPlan.prompt_response(prompts, responses, prompt_len=3, response_len=4, truncate="outer")


def rows_of(plan: TokenPlan) -> list[Row]:
    """``(record, token)`` of each row of a plan."""
    return list(zip(plan.record_N.tolist(), plan.token_N.tolist(), strict=True))


def marked(lengths: list[int], trailing: tuple[int, ...]) -> list[NDArray[np.int32]]:
    """Arrays ``[length, *trailing]`` in which no value occurs twice, in no sequence."""
    return [
        1_000_000 * (record + 1) + np.arange(length * int(np.prod(trailing)), dtype=np.int32).reshape(length, *trailing)
        for record, length in enumerate(lengths)
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Plans
# ----------------------------------------------------------------------------------------------------------------------


@given(case=cases())
def test_a_plan_names_the_token_of_every_row(case: Case) -> None:
    """Records, tokens, shape, padding and offsets are those of laying out one row after another."""
    plan = case.plan()

    assert case.rows == rows_of(plan)
    assert case.shape == plan.shape
    assert len(case.rows) == plan.num_rows
    assert len(case.lengths) == plan.num_sequences
    assert np.asarray([row == PAD for row in case.rows]).reshape(case.shape).tolist() == plan.padding().tolist()
    kept = [len(case.kept(length)) for length in case.lengths]
    assert case.lengths == plan.sources.tolist()
    assert kept == plan.lengths.tolist() == (plan.sources - plan.dropped).tolist()
    assert np.cumsum([0, *kept]).tolist() == plan.cu_seqlens.tolist()
    assert np.cumsum([0, *map(len, case.slots)]).tolist() == plan.cu_seqlens_padded.tolist()


@given(plan=any_seams() | cases().map(lambda case: case.plan()))
def test_what_a_plan_knows_beforehand_is_what_its_rows_say(plan: TokenPlan) -> None:
    """A plan of slots passes the checks of one made by hand, which finds the same runs by looking at each row."""
    by_hand = TokenPlan(**{item.name: getattr(plan, item.name) for item in fields(plan)})

    assert by_hand._runs == plan._runs


@given(case=cases())
def test_positions_restart_at_each_sequence_and_run_on_through_its_padding(case: Case) -> None:
    """Tokens have their index, padding before them 0, padding after them goes on counting."""
    expected = []
    for slot in case.slots:
        first = next(index for index, row in enumerate(slot) if row != PAD)
        expected += [max(0, index - first) for index in range(len(slot))]

    assert expected == case.plan().positions().reshape(-1).tolist()


@given(plan=any_plans() | cases().map(lambda case: case.plan()))
def test_a_predecessor_is_the_row_before_that_holds_the_token_before(plan: TokenPlan) -> None:
    """A row's predecessor holds the same record's previous token, in the row next to it, or there is none."""
    rows = rows_of(plan)
    expected = [
        index - 1 if index and row != PAD and rows[index - 1] == (row[0], row[1] - 1) else -1
        for index, row in enumerate(rows)
    ]

    assert expected == plan.predecessors().tolist()


@given(case=cases(), length=st.integers(1, 9))
def test_rows_are_counted_before_a_plan_exists(case: Case, length: int) -> None:
    """What ``rows_after`` says of one more sequence is what the plan with it has."""
    options = PlanOptions(
        pad_to_multiple_of=case.options.pad_to_multiple_of,
        padding_side=case.options.padding_side,
        max_length=case.options.max_length,
        truncate=case.options.truncate,
    )
    rows = 0
    for count, each in enumerate([*case.lengths, length]):
        rows = options.rows_after(each, layout=case.layout, rows=rows, count=count)

        assert options.plan([*case.lengths, length][: count + 1], layout=case.layout).num_rows == rows


@given(
    parts=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=5),
    prompt_len=st.integers(1, 8),
    response_len=st.integers(1, 8),
)
def test_prompts_end_where_responses_begin(parts: list[tuple[int, int]], prompt_len: int, response_len: int) -> None:
    """Each side of the seam holds the tokens nearest to it; positions count from the first token that was kept."""
    prompts, responses = [prompt for prompt, _ in parts], [response for _, response in parts]
    expected: list[Row] = []
    positions: list[int] = []
    for record, (prompt, response) in enumerate(parts):
        tokens = range(max(0, prompt - prompt_len), prompt + min(response, response_len))
        first = prompt_len - (prompt - tokens.start)
        after = prompt_len + response_len - first - len(tokens)
        expected += [PAD] * first + [(record, token) for token in tokens] + [PAD] * after
        positions += [0] * first + list(range(prompt_len + response_len - first))

    plan = TokenPlan.prompt_response(
        prompts, responses, prompt_len=prompt_len, response_len=response_len, truncate="outer"
    )

    assert expected == rows_of(plan)
    assert positions == plan.positions().reshape(-1).tolist()
    assert (len(parts), prompt_len + response_len) == plan.shape
    assert [prompt + response for prompt, response in parts] == plan.sources.tolist()


def test_the_longest_parts_need_no_widths() -> None:
    """Without widths, prompts and responses are as wide as their longest."""
    assert (2, 7) == TokenPlan.prompt_response([2, 4], [3, 1]).shape


def test_the_two_constructors_are_the_options_by_name() -> None:
    """``padded`` and ``packed`` give the plans that the same options give."""
    padded = TokenPlan.padded([3, 1], options=PlanOptions(seq_len=8, pad_to_multiple_of=4, padding_side="left"))
    packed = TokenPlan.packed([3, 1], options=PlanOptions(pad_to_multiple_of=2))

    assert (2, 8) == padded.shape
    assert [PAD] * 5 + [(0, 0), (0, 1), (0, 2)] + [PAD] * 7 + [(1, 0)] == rows_of(padded)
    assert [(0, 0), (0, 1), (0, 2), PAD, (1, 0), PAD] == rows_of(packed)


def test_a_plan_cannot_be_written_to() -> None:
    """What several tensors are cut by stays what it was, and does not follow the caller's array."""
    lengths = np.asarray([3, 1])
    plan = TokenPlan.padded(lengths)
    lengths[0] = 2

    assert [3, 1] == plan.lengths.tolist()
    for array in (plan.record_N, plan.token_N, plan.lengths, plan.cu_seqlens, plan.cu_seqlens_padded):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_plan_pickles() -> None:
    """A plan that crossed a process gathers the same."""
    plan = TokenPlan.packed([3, 1], options=PlanOptions(pad_to_multiple_of=2))
    columns = marked([3, 1], (2,))
    expected = plan.gather(columns, fill=0)

    assert expected.tolist() == pickle.loads(pickle.dumps(plan)).gather(columns, fill=0).tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Gathering
# ----------------------------------------------------------------------------------------------------------------------


@given(
    plan=any_plans() | cases().map(lambda case: case.plan()),
    trailing=st.sampled_from(((), (3,), (4, 2))),
    data=st.data(),
)
def test_gathering_equals_copying_row_by_row(plan: TokenPlan, trailing: tuple[int, ...], data: st.DataObject) -> None:
    """Runs and slots skip work: the result is that of fetching each row by itself, also in a reused buffer."""
    columns = marked(plan.sources.tolist(), trailing)
    slots = data.draw(st.none() | st.lists(st.integers(0, trailing[0] - 1), min_size=1)) if trailing else None
    picked = columns if slots is None else [column[:, slots] for column in columns]
    padding = np.full(picked[0].shape[1:], -7)
    rows = [padding if row == PAD else picked[row[0]][row[1]] for row in rows_of(plan)]
    expected = np.stack(rows).reshape(*plan.shape, *picked[0].shape[1:])
    out = np.full(expected.shape, 99, dtype=np.int64)

    found = plan.gather(columns, fill=-7, slots=slots)
    reused = plan.gather(columns, fill=-7, slots=slots, dtype=np.int64, out=out)

    assert np.array_equal(expected, found)
    assert np.dtype(np.int32) == found.dtype
    assert reused is out
    assert np.array_equal(expected, out)


@given(
    plan=any_plans() | any_seams() | cases().map(lambda case: case.plan()),
    narrow=st.booleans(),
    slots=st.none() | st.lists(st.integers(0, 2), min_size=1),
)
def test_gathered_routes_are_the_rows_copied_one_by_one(plan: TokenPlan, narrow: bool, slots: list[int] | None) -> None:
    """Of any number of sequences, in either stored form: int16, MISSING at padding, also in a reused buffer."""
    spec = RouteSpec(num_experts=200, top_k=2, layer_ids=(0, 3, 4))
    columns = [1 + column % 199 for column in marked(plan.sources.tolist(), (3, 2))]
    stored = [column.astype(np.uint8 if narrow else np.int16) for column in columns]
    picked = [0, 1, 2] if slots is None else slots
    padding = np.full((len(picked), 2), MISSING)
    expected = [padding if row == PAD else columns[row[0]][row[1]][picked] for row in rows_of(plan)]
    shape = (*plan.shape, len(picked), 2)
    out = np.full(shape, 99, dtype=np.int16)

    found = plan.gather_routes(stored, spec=spec, slots=slots)
    reused = plan.gather_routes(stored, spec=spec, slots=slots, out=out)

    assert (np.dtype(np.int16), shape) == (found.dtype, found.shape)
    assert np.array_equal(np.stack(expected).reshape(shape), found)
    assert reused is out
    assert np.array_equal(found, out)
    refused: tuple[Any, ...] = (
        out[..., :1],
        out.astype(np.int32),
        np.zeros((*shape[:-1], 4), dtype=np.int16)[..., ::2],
    )
    for wrong in refused:
        with pytest.raises(UsageError, match="out as C-contiguous int16"):
            plan.gather_routes(stored, spec=spec, slots=slots, out=wrong)


def test_gathering_reads_foreign_and_frozen_arrays() -> None:
    """Read-only, big-endian and strided sources come out in native order, in memory of their own."""
    source = np.arange(12, dtype=">i2").reshape(3, 4)[:, ::2]
    source.flags.writeable = False

    plan = TokenPlan.padded([3])
    strided = source.astype(np.int16, order="F")

    found = plan.gather([source], fill=0)

    assert source.tolist() == found[0].tolist()
    assert source[:, ::-1].tolist() == plan.gather([source], fill=0, slots=[1, 0])[0].tolist()
    assert source[:, ::-1].tolist() == plan.gather([strided], fill=0, slots=[1, 0])[0].tolist()
    assert found.dtype.isnative
    assert found.flags.writeable
    assert not np.shares_memory(source, found)


@pytest.mark.parametrize(("fill", "dtype"), [(np.nan, np.float32), (False, np.bool_), (-1, np.int16), (255, np.uint8)])
def test_a_fill_that_fits_is_kept(fill: float, dtype: type[np.generic]) -> None:
    """Padding holds the fill itself."""
    found = TokenPlan.padded([1], options=PlanOptions(seq_len=2)).gather([np.ones(1, dtype=dtype)], fill=fill)

    np.testing.assert_array_equal([[1, fill]], found)


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------

BAD_PLANS: dict[str, tuple[Callable[[], object], ErrorKind, str]] = {
    "empty": (lambda: TokenPlan.padded([]), ErrorKind.ARGUMENT, "at least one sequence, got an empty batch"),
    "empty_packed": (lambda: TokenPlan.packed([]), ErrorKind.ARGUMENT, "at least one sequence, got an empty batch"),
    "no_tokens": (lambda: TokenPlan.packed([2, 0]), ErrorKind.ARGUMENT, "at least one token, got 0 @ sequence 1"),
    "negative": (lambda: TokenPlan.packed([2, -1]), ErrorKind.ARGUMENT, "at least one token, got -1 @ sequence 1"),
    "float": (lambda: TokenPlan.packed(np.ones(2)), ErrorKind.ARGUMENT, "whole numbers"),  # type: ignore[arg-type]
    "rank": (lambda: TokenPlan.packed(np.ones((2, 1), dtype=int)), ErrorKind.ARGUMENT, "whole numbers"),
    "long": (
        lambda: TokenPlan.padded([2, 5], options=PlanOptions(seq_len=4)),
        ErrorKind.TOO_LONG,
        "at most 4 tokens, got 5 @ sequence 1",
    ),
    "beyond_int32": (lambda: TokenPlan.packed([2**31]), ErrorKind.TOO_LONG, "2147483647 tokens, got 2147483648"),
    "beyond_int32_in_all": (lambda: TokenPlan.packed([2**30, 2**30]), ErrorKind.TOO_LONG, "2147483647 rows in all"),
    "beyond_int32_by_padding": (
        lambda: TokenPlan.padded([2**30, 1, 1]),
        ErrorKind.TOO_LONG,
        r"shape \[3, 1073741824\]",
    ),
    "beyond_int64": (
        lambda: TokenPlan.padded([1] * 4, options=PlanOptions(seq_len=2**62)),
        ErrorKind.TOO_LONG,
        "2147483647 rows in all",
    ),
    "no_multiple": (
        lambda: TokenPlan.packed([1], options=PlanOptions(pad_to_multiple_of=0)),
        ErrorKind.ARGUMENT,
        "pad_to_multiple_of",
    ),
    "bool_multiple": (
        lambda: TokenPlan.packed([1], options=PlanOptions(pad_to_multiple_of=True)),
        ErrorKind.ARGUMENT,
        "got True",
    ),
    "no_seq_len": (
        lambda: TokenPlan.padded([1], options=PlanOptions(seq_len=-1)),
        ErrorKind.ARGUMENT,
        "seq_len as a positive",
    ),
    "odd_seq_len": (
        lambda: TokenPlan.padded([1], options=PlanOptions(seq_len=6, pad_to_multiple_of=4)),
        ErrorKind.ARGUMENT,
        "seq_len as a multiple of 4, got 6",
    ),
    "side": (lambda: TokenPlan.padded([1], options=PlanOptions(padding_side="top")), ErrorKind.ARGUMENT, "got 'top'"),  # type: ignore[arg-type]
    "layout": (lambda: PlanOptions().plan([1], layout="ragged"), ErrorKind.ARGUMENT, "got 'ragged'"),  # type: ignore[arg-type]
    "packed_seq_len": (lambda: TokenPlan.packed([1], options=PlanOptions(seq_len=4)), ErrorKind.ARGUMENT, "no seq_len"),
    "truncate": (
        lambda: TokenPlan.padded([1], options=PlanOptions(truncate="middle")),  # type: ignore[arg-type]
        ErrorKind.ARGUMENT,
        "got 'middle'",
    ),
    "truncate_to": (
        lambda: TokenPlan.packed([1], options=PlanOptions(truncate="left")),
        ErrorKind.ARGUMENT,
        "max_length or seq_len",
    ),
    "max_length": (
        lambda: TokenPlan.packed([1], options=PlanOptions(max_length=0)),
        ErrorKind.ARGUMENT,
        "max_length as a positive",
    ),
    "packed_long": (
        lambda: TokenPlan.packed([5], options=PlanOptions(max_length=4)),
        ErrorKind.TOO_LONG,
        "4 tokens, got 5 @ sequence 0",
    ),
    "prompt_long": (
        lambda: TokenPlan.prompt_response([1, 3], [1, 1], prompt_len=2),
        ErrorKind.TOO_LONG,
        "prompts of at most 2 tokens, got 3 @ sequence 1",
    ),
    "response_long": (
        lambda: TokenPlan.prompt_response([1], [3], response_len=2),
        ErrorKind.TOO_LONG,
        "responses of at most 2 tokens, got 3",
    ),
    "responses": (lambda: TokenPlan.prompt_response([1], [3, 1]), ErrorKind.ARGUMENT, "each of 1 prompts, got 2"),
    "neither_part": (lambda: TokenPlan.prompt_response([0], [0]), ErrorKind.ARGUMENT, "at least one token, got 0"),
    "negative_part": (lambda: TokenPlan.prompt_response([-1], [3]), ErrorKind.ARGUMENT, "at least 0 tokens, got -1"),
    "outer": (
        lambda: TokenPlan.prompt_response([1], [1], truncate="left"),  # type: ignore[arg-type]
        ErrorKind.ARGUMENT,
        "'outer'",
    ),
    "packed_left": (
        lambda: TokenPlan.packed([1], options=PlanOptions(padding_side="left")),
        ErrorKind.ARGUMENT,
        "'right'",
    ),
}


@pytest.mark.parametrize(("make", "kind", "message"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_a_plan_that_cannot_be_is_refused(make: Callable[[], object], kind: ErrorKind, message: str) -> None:
    """Every refusal is a UsageError of its kind that says what was wanted; none needs the memory of the plan."""
    with pytest.raises(UsageError, match=message) as caught:
        make()

    assert kind == caught.value.kind


def test_rows_beyond_the_limit_are_refused_where_padding_makes_them() -> None:
    """Rounding up may not pass the limit that the lengths kept."""
    with pytest.raises(UsageError, match="rows in all") as caught:
        TokenPlan.packed([2**31 - 1], options=PlanOptions(pad_to_multiple_of=2))

    assert ErrorKind.TOO_LONG == caught.value.kind


BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"shape": (3,)}, r"each row of shape \[3\], got 2"),
    "rows": ({"token_N": np.zeros(3, dtype=np.int64)}, "each row"),
    "offsets": ({"cu_seqlens": np.zeros(1, dtype=np.int32)}, "2 offsets for 1 sequences"),
    "token": ({"token_N": np.asarray([0, 2])}, "tokens that their sequences have"),
    "padding": ({"record_N": np.asarray([0, PADDING])}, "padding rows without a token"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_plan_made_by_hand_is_checked(changes: dict[str, Any], message: str) -> None:
    """No plan exists whose rows point outside its sequences."""
    good = TokenPlan.packed([2])
    names = [item.name for item in fields(TokenPlan)]

    with pytest.raises(UsageError, match=message):
        TokenPlan(**{**{name: getattr(good, name) for name in names}, **changes})


_TWO = np.zeros((2, 3), dtype=np.int32)
_ONE = np.zeros((1, 3), dtype=np.int32)

BAD_GATHERS: dict[str, tuple[list[NDArray[Any]], dict[str, Any], str]] = {
    "too_few": ([_TWO], {}, "one array per sequence, 2 in all, got 1"),
    "length": ([_TWO, _TWO], {}, r"\[1, 3\], got int32 \[2, 3\] @ sequence 1"),
    "further_axes": ([_TWO, _ONE[:, :2]], {}, r"\[1, 3\], got int32 \[1, 2\] @ sequence 1"),
    "dtype_of_one": ([_TWO, _ONE.astype(np.int64)], {}, "int32 .* got int64 .* @ sequence 1"),
    "no_axis": ([np.asarray(1), np.asarray(1)], {}, r"got int64 \[\] @ sequence 0"),
    "narrower": ([_TWO, _ONE], {"dtype": np.int16}, "a dtype that holds every int32, got int16"),
    "slot": ([_TWO, _ONE], {"slots": [0, 3]}, "slots of axis 1"),
    "negative_slot": ([_TWO, _ONE], {"slots": [-1]}, "slots of axis 1"),
    "no_slots": ([_TWO, _ONE], {"slots": []}, "slots of axis 1"),
    "slots_of_nothing": ([_TWO[:, 0], _ONE[:, 0]], {"slots": [0]}, "slots of axis 1"),
    "fill_too_large": ([_TWO, _ONE], {"fill": 2**31}, "a fill that int32 holds"),
    "fill_nan": ([_TWO, _ONE], {"fill": np.nan}, "a fill that int32 holds"),
    "fill_fraction": ([_TWO, _ONE], {"fill": 0.5}, "a fill that int32 holds"),
    "out_shape": ([_TWO, _ONE], {"out": np.zeros((2, 2), dtype=np.int32)}, r"C-contiguous int32 \[2, 2, 3\]"),
    "out_dtype": ([_TWO, _ONE], {"out": np.zeros((2, 2, 3))}, r"got float64 \[2, 2, 3\]"),
    "out_order": ([_TWO, _ONE], {"out": np.zeros((2, 2, 3), dtype=np.int32, order="F")}, "C-contiguous"),
}


@pytest.mark.parametrize(("columns", "options", "message"), BAD_GATHERS.values(), ids=BAD_GATHERS)
def test_a_gather_that_does_not_fit_is_refused(
    columns: list[NDArray[Any]], options: dict[str, Any], message: str
) -> None:
    """Arrays that disagree with the plan, or with what is asked, raise a UsageError (ARGUMENT)."""
    with pytest.raises(UsageError, match=message) as caught:
        TokenPlan.padded([2, 1]).gather(columns, **{"fill": 0, **options})

    assert ErrorKind.ARGUMENT == caught.value.kind


def test_a_refused_gather_leaves_the_buffer_alone() -> None:
    """A reused buffer is written only once everything was checked."""
    out = np.full((2, 2, 3), 7, dtype=np.int32)

    with pytest.raises(UsageError):
        TokenPlan.padded([2, 1]).gather([_TWO, _TWO], fill=0, out=out)

    assert (out == 7).all()


def test_row_numbers_are_narrowed_where_they_fit() -> None:
    """int32 up to its largest value, int64 from the next on; no rows at all are narrow."""
    assert [np.int32, np.int64] == [_narrowed(np.asarray([row])).dtype for row in (2**31 - 1, 2**31)]
    assert np.int32 == _narrowed(np.empty(0, dtype=np.int64)).dtype


# ----------------------------------------------------------------------------------------------------------------------
# Sequences without tokens, and memory that was used before
# ----------------------------------------------------------------------------------------------------------------------


def test_a_mask_says_its_layout() -> None:
    """Two axes are padded rows; one axis is a pack, with the edges of its sequences."""
    mask = np.array([[False, True, True], [True, True, False]])
    padded = TokenPlan.from_mask(mask)
    packed = TokenPlan.from_mask(mask.reshape(-1), edges=np.array([0, 3, 6]))

    assert ("padded", (2, 3)) == (padded.layout, padded.shape)
    assert ("packed", (6,)) == (packed.layout, packed.shape)
    assert padded.record_N.tolist() == packed.record_N.tolist() == [-1, 0, 0, 1, 1, -1]


def test_a_shard_is_known_by_its_rows() -> None:
    """One rank of two, whose rows are more than all sequences but the last have."""
    whole = PlanOptions(pad_to_multiple_of=4).plan([1, 12], layout="packed")

    assert (False, True) == (whole.is_shard, whole.cut(Shard(context_parallel=(0, 2))).is_shard)


def test_lists_of_some_sequences_fill_memory_that_was_used_before() -> None:
    """Sequences without tokens bring no lists; every offset is written, the first one too."""
    plan = TokenPlan.from_cu_seqlens([0, 1, 1, 3])
    values = [np.array([5, 6]), np.array([7, 8, 9])]
    offsets = [np.array([0, 2]), np.array([0, 0, 3])]

    def used(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.full(shape, 77, dtype=dtype)

    flat, edges = plan.gather_lists(values, offsets, allocate=used)
    assert ([5, 6, 7, 8, 9], [0, 2, 2, 5]) == (flat.tolist(), edges.tolist())


def test_the_one_sequence_with_tokens_is_enough() -> None:
    """One array, for the one sequence that has tokens."""
    plan = TokenPlan.from_cu_seqlens([0, 0, 2])

    assert [4, 5] == plan.gather([np.array([4, 5])], fill=-1).tolist()


def test_sequences_without_any_token_have_no_array() -> None:
    """A pack of padding alone names no type to gather: a usage error, with the number of sequences."""
    with pytest.raises(UsageError, match="one array per sequence, 2 in all, got 0"):
        TokenPlan.from_cu_seqlens([0, 0, 0]).gather([], fill=0)
