"""What a record's parts refuse when they are made: the type of the error, its kind, and what it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from routeplane.errors import DataError, ErrorKind, RouteplaneError, UsageError
from routeplane.record.aligned import (
    AlignedColumn,
    ColumnType,
    concatenate_columns,
    join_layers,
    read_column,
)
from routeplane.record.assembly import UnfedTokens, assemble
from routeplane.record.calls import ModelCall, merge_layers
from routeplane.record.interfaces import KeyMemory
from routeplane.record.parse import as_array
from routeplane.record.policy import QuarantineOptions, ReadPolicy
from routeplane.record.prefixes import as_delta
from routeplane.record.schema import check_version, choose_encoding
from routeplane.record.spans import Sampling, Span
from routeplane.record.spec import RouteSpec
from routeplane.testing.builders import turns_of, watermark, watermarked_record, watermarked_spec

SPEC = watermarked_spec(layers=(1, 4), top_k=2)
DECLARED: dict[str, Any] = ColumnType(dtype="int32", aligned="fed").to_document()
SPAN: dict[str, Any] = {"start": 0, "stop": 2, "kind": "prompt", "call": "c", "weights_version": 7}
WIDE = RouteSpec(num_experts=300, top_k=2, layer_ids=(0,))
DEEP = replace(WIDE, decoder_layers=4)


def call(**changes: Any) -> ModelCall:
    """Three tokens, of which two were fed."""
    rows = watermark(0, np.arange(2)[:, None, None], layer=np.asarray([[1], [4]]), k=np.arange(2))
    given: dict[str, Any] = {"prompt_ids": [1, 2], "generation_ids": [3], "routes": rows, "weights_version": 1}
    return ModelCall(call_id="c", **{**given, **changes})


def part(layer: int, *, weights: int | None) -> ModelCall:
    """One layer of a call, with a column over so many layers."""
    rows = watermark(0, np.arange(2)[:, None, None], layer=np.asarray([[layer]]), k=np.arange(2))
    shape = (3, weights or 1, 2)
    over = AlignedColumn.of(np.zeros(shape, np.float32), aligned="fed", axes=("layers", "topk"))
    return call(routes=rows, layer_ids=(layer,), columns={} if weights is None else {"w": over})


def with_columns(**columns: AlignedColumn) -> Any:
    """A record of four tokens that carries columns."""
    return replace(watermarked_record(0, num_tokens=4, spec=SPEC), columns=columns, checksum=None)


def delta() -> Any:
    """A record whose first rows stand in another."""
    first, second = turns_of(2, tokens=8)
    return as_delta(second, first)


LISTS = AlignedColumn.of_lists([[1], [], [2], []], dtype="int32", aligned="sampled")
NUMBERS = AlignedColumn.of(np.arange(4), aligned="sampled")
CODES = AlignedColumn.of(np.zeros(4, np.uint8), aligned="sampled")
LAYERED = AlignedColumn.of(np.zeros((2, 1), np.int32), aligned="fed", axes=("layers",))

#: What is done -> the error's class and kind, and a part of its message.
REFUSED: dict[str, tuple[Callable[[], object], type[RouteplaneError], ErrorKind, str]] = {
    "a declaration's shape that is a number": (
        lambda: ColumnType.from_document({**DECLARED, "shape": 3}),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "axes and shape as lists",
    ),
    "a declaration that is aligned with nothing": (
        lambda: ColumnType.from_document({**DECLARED, "aligned": "both"}),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "aligned and dtype as names",
    ),
    "an unknown list where none may be": (
        lambda: AlignedColumn.of_lists([[1], None], dtype="int32", aligned="fed"),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "nullable=True",
    ),
    "lists of fractions as integers": (
        lambda: AlignedColumn.of_lists([[0.5]], dtype="int32", aligned="fed"),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "lists of int32, got float64",
    ),
    "a list's value that the type does not hold": (
        lambda: AlignedColumn.of_lists([[300]], dtype="uint8", aligned="fed"),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "values that uint8 holds",
    ),
    "validity of another length": (
        lambda: AlignedColumn.of(np.arange(3), aligned="fed", valid=np.ones(2, dtype=np.bool_)),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "as bool [3]",
    ),
    "offsets that go back": (
        lambda: read_column(LISTS.type, LISTS.values, offsets=np.asarray([0, 2, 1, 2]), valid=None, name="m"),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "offsets of m",
    ),
    "lists as one array": (
        lambda: np.asarray(LISTS),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "entries of one shape",
    ),
    "every second entry": (lambda: NUMBERS[::2], DataError, ErrorKind.TOKEN_COLUMN, "neighbouring tokens"),
    "parts of two types": (
        lambda: concatenate_columns([NUMBERS, LISTS], name="m", where="call c"),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "@ call c",
    ),
    "layers of two types": (
        lambda: join_layers([LAYERED, replace(LAYERED, type=replace(LAYERED.type, aligned="sampled"))], name="w"),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "expected w of one type in all layers",
    ),
    "integers of some layers": (
        lambda: LAYERED.place_layers([0], 2, name="w"),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "all layers of 'w'",
    ),
    "a loss mask of lists": (
        lambda: with_columns(loss_mask=LISTS),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "loss_mask with a number per token",
    ),
    "a mask without its states": (
        lambda: with_columns(sampling_mask=LISTS),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "sampling_mask_state beside it",
    ),
    "a mask of numbers": (
        lambda: with_columns(sampling_mask=NUMBERS, sampling_mask_state=CODES),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "lists of int32",
    ),
    "states of a wide type": (
        lambda: with_columns(sampling_mask=LISTS, sampling_mask_state=NUMBERS),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "sampling_mask_state with uint8",
    ),
    "a negative prompt id": (
        lambda: call(prompt_ids=[1, -200]),
        DataError,
        ErrorKind.VALUE_RANGE,
        "prompt_ids of at least 0, got -200 @ call c, token 1",
    ),
    "a negative sampled id": (
        lambda: call(generation_ids=[-1], media=("d",)),
        DataError,
        ErrorKind.VALUE_RANGE,
        "generation_ids of at least 0, got -1 @ call c, token 2",
    ),
    "a sampled token that cannot be": (
        lambda: call(logprobs=[-np.inf]),
        DataError,
        ErrorKind.VALUE_RANGE,
        "got -inf @ call c, token 2",
    ),
    "a log-probability above 0": (
        lambda: call(logprobs=[0.25]),
        DataError,
        ErrorKind.VALUE_RANGE,
        "got 0.25 at entry 0",
    ),
    "a dict among calls": (
        lambda: assemble([call(), {}], SPEC, sample_id="s"),  # type: ignore[list-item]
        UsageError,
        ErrorKind.ARGUMENT,
        "expected ModelCalls, got ModelCall, dict",
    ),
    "no token that was not fed": (
        lambda: UnfedTokens(token_ids=np.arange(0), call_id="o"),
        DataError,
        ErrorKind.SHAPE,
        "at least one token",
    ),
    "tokens that were not fed before a call": (
        lambda: assemble([UnfedTokens(token_ids=np.arange(1), call_id="o"), call()], SPEC, sample_id="s"),
        DataError,
        ErrorKind.CONTEXT_BREAK,
        "behind the last call",
    ),
    "rows of unknown tokens": (
        lambda: call(rows="some"),
        DataError,
        ErrorKind.ROW_COUNT,
        "got 'some'",
    ),
    "a call's sampling as a mapping": (
        lambda: call(sampling={"temperature": 1.0}),
        DataError,
        ErrorKind.SPANS,
        "@ call c",
    ),
    "a part without a column of the others": (
        lambda: merge_layers([part(1, weights=1), part(4, weights=None)]),
        DataError,
        ErrorKind.TOKEN_COLUMN,
        "@ call c",
    ),
    "keys that are cut": (lambda: KeyMemory(b"x" * 17), UsageError, ErrorKind.ARGUMENT, "got 17 bytes"),
    "a jagged tensor": (
        lambda: as_array(torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), what="token_ids"),
        DataError,
        ErrorKind.SHAPE,
        "token_ids as one array",
    ),
    "a quarantine of fewer than no bytes": (
        lambda: QuarantineOptions(max_bytes=-1),
        UsageError,
        ErrorKind.ARGUMENT,
        "max_bytes",
    ),
    "a policy that is none": (
        lambda: ReadPolicy(on_corrupt="skip"),  # type: ignore[arg-type]
        UsageError,
        ErrorKind.ARGUMENT,
        "on_corrupt",
    ),
    "a share above 1": (lambda: ReadPolicy(max_missing=1.5), UsageError, ErrorKind.ARGUMENT, "max_missing"),
    "a quarantine without its policy": (
        lambda: ReadPolicy(quarantine=QuarantineOptions()),
        UsageError,
        ErrorKind.ARGUMENT,
        "quarantine",
    ),
    "a delta of a delta": (lambda: as_delta(delta(), delta()), DataError, ErrorKind.PREFIX, "expected whole records"),
    "a stored base that is another record": (
        lambda: as_delta(turns_of(3)[2], turns_of(3)[1], stored=turns_of(3)[0]),
        DataError,
        ErrorKind.PREFIX,
        "as it is stored",
    ),
    "a narrow encoding of wide ids": (
        lambda: choose_encoding("narrow", WIDE),
        UsageError,
        ErrorKind.ENCODING,
        "got 300",
    ),
    "an unknown encoding": (lambda: choose_encoding("zip", WIDE), UsageError, ErrorKind.ENCODING, "got 'zip'"),
    "an unknown version": (
        lambda: check_version("2.0", spec=WIDE),
        UsageError,
        ErrorKind.VERSION,
        "got '2.0'",
    ),
    "a depth in format 1.0": (
        lambda: check_version("1.0", spec=DEEP),
        UsageError,
        ErrorKind.VERSION,
        "decoder_layers=4",
    ),
    "a temperature that is not finite": (
        lambda: Sampling(temperature=float("nan")),
        DataError,
        ErrorKind.DTYPE,
        "Sampling.temperature",
    ),
    "processors in a list": (
        lambda: Sampling(processors=["a"]),  # type: ignore[arg-type]
        DataError,
        ErrorKind.DTYPE,
        "Sampling.processors as a tuple",
    ),
    "sampling parameters of a prompt": (
        lambda: Span(**SPAN, sampling=Sampling(temperature=1.0)),
        DataError,
        ErrorKind.SPANS,
        "at generated tokens alone",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_its_kind_and_place(what: str) -> None:
    """Each has the class that a handler looks for, its kind, and a message that names what was wrong."""
    work, error, kind, text = REFUSED[what]
    with pytest.raises(error) as caught:
        work()

    assert kind == caught.value.kind
    assert text in str(caught.value)


def test_weights_of_some_layers_are_unknown_in_the_others() -> None:
    """Floats and bfloat16 bits of two layers stand in their slots of three; NaN stands in the third."""
    values = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    floats = AlignedColumn.of(values, aligned="fed", axes=("layers", "topk"))
    bits = AlignedColumn.of((values.view(np.uint32) >> 16).astype(np.uint16), aligned="fed", axes=("layers", "topk"))
    placed = floats.place_layers([2, 0], 3, name="route_weights")
    placed_bits = bits.place_layers([2, 0], 3, name="route_weights")

    assert (2, 3, 2) == placed.values.shape
    assert np.array_equal(values, placed.values[:, [2, 0]])
    assert np.isnan(placed.values[:, 1]).all()
    assert np.array_equal(bits.values, placed_bits.values[:, [2, 0]])
    assert np.isnan((placed_bits.values[:, 1].astype(np.uint32) << 16).view(np.float32)).all()


def test_what_calls_may_hold_that_looks_wrong() -> None:
    """A placeholder of media that have digests, no log-probability, and a scored token that could not be sampled."""
    rows = watermark(0, np.arange(3)[:, None, None], layer=np.asarray([[1], [4]]), k=np.arange(2))
    placed, scored = call(prompt_ids=[1, -200], media=("d",)), call(routes=rows, rows="all", logprobs=[-np.inf])

    assert [1, -200] == placed.prompt_ids.tolist()
    assert [-np.inf] == scored.logprobs.tolist()  # type: ignore[union-attr]
    assert np.isnan(call(logprobs=[np.nan]).logprobs).all()  # type: ignore[arg-type]
