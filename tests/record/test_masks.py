"""Sampling masks of a call: the two columns against a plain reference, and what is refused."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch import BatchOptions, collate
from routeplane.capture.recorder import record_of_call
from routeplane.errors import DataError, UsageError
from routeplane.record.aligned import MASK_STATES, AlignedColumn, ColumnType, mask_columns
from routeplane.record.assembly import assemble
from routeplane.record.calls import ModelCall
from routeplane.record.codec import write_batch
from routeplane.record.parse import frozen_view
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Sampling
from routeplane.record.spec import RouteSpec
from routeplane.stream import new_stream, open_stream

SPEC = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,), model="m")
HOW = Sampling(temperature=0.8, top_p=0.9, logprobs_mode="processed")
VOCABULARY = 12


def call_of(kept: Any, ids: Any, *, prompt: int = 2, call_id: str = "c", head: Any = None, **more: Any) -> ModelCall:
    """A call of ``prompt`` tokens and the sampled ``ids``, with masks."""
    ids_G = np.asarray(ids, dtype=np.int32)
    prompt_P = np.arange(prompt, dtype=np.int32) if head is None else np.asarray(head, dtype=np.int32)
    columns = mask_columns(kept, ids_G, prompt=len(prompt_P), sampling=HOW, call=call_id, vocab_size=VOCABULARY, **more)
    rows = np.tile(np.asarray([[1, 3]], dtype=np.int16), (len(prompt_P) + len(ids_G) - 1, 1, 1))
    return ModelCall(
        prompt_ids=prompt_P,
        generation_ids=ids_G,
        routes=rows,
        weights_version=1,
        call_id=call_id,
        columns=columns,
        sampling=HOW,
    )


def record_of(call: ModelCall) -> RouteRecord:
    """The call as a record."""
    return record_of_call(call, SPEC, sample_id=call.call_id, attributes={"logprobs_mode": "processed"})


@st.composite
def entries(draw: st.DrawFn) -> tuple[list[list[int] | None], list[int], list[bool]]:
    """Kept ids in any order, or None; the sampled ids; which lists the engine cut short."""
    count = draw(st.integers(1, 6))
    kept: list[list[int] | None] = []
    ids = []
    for _ in range(count):
        sets = st.sets(st.integers(0, VOCABULARY - 1), min_size=1)
        found = draw(st.permutations(sorted(draw(sets))))
        ids.append(draw(st.sampled_from(found)))
        kept.append(None if draw(st.booleans()) and draw(st.booleans()) else list(found))
    return kept, ids, draw(st.lists(st.booleans(), min_size=count, max_size=count))


@given(entries(), st.integers(1, 3))
def test_columns_are_those_of_the_plain_reference(given_entries: Any, prompt: int) -> None:
    """Lists ascend at sampled tokens alone; all ids are full and stored as none; the record's own rules hold."""
    kept, ids, capped = given_entries
    made = call_of(kept, ids, prompt=prompt, capped=capped)
    expected: list[tuple[str, list[int]]] = [("unknown", [])] * prompt
    for found, cut in zip(kept, capped, strict=True):
        if found is None:
            expected.append(("unknown", []))
        elif len(found) == VOCABULARY:
            expected.append(("full", []))
        else:
            expected.append(("capped" if cut else "listed", sorted(found)))
    states = [MASK_STATES[code] for code in made.columns["sampling_mask_state"].tolist()]
    assert expected == list(zip(states, made.columns["sampling_mask"].tolist(), strict=True))

    record = record_of(made).verify()
    names = [state for state, _ in expected[prompt:]]
    counts = collate([record], SPEC, options=BatchOptions(labels=True)).mask_counts()
    assert (names.count("listed"), names.count("full")) == (counts.listed, counts.full)
    assert names.count("unknown") + names.count("capped") == counts.unmasked


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another id than the sampled one": ({"kept": [[1, 2]]}, "the sampled id 5 inside, got .1, 2. of 2"),
    "an id twice": ({"kept": [[5, 6, 6]]}, "each id once, got .6. again"),
    "an id beyond the vocabulary": ({"kept": [[5, 12]]}, "ids from 0 on below 12"),
    "a negative id": ({"kept": [[-1, 5]]}, "ids from 0 on"),
    "no id": ({"kept": [[]]}, "ids from 0 on"),
    "a list too many": ({"kept": [[5], [6]]}, "one list for each of 1 sampled tokens, got 2"),
    "ids that are text": ({"kept": [["5"]]}, "integer type"),
}


@pytest.mark.parametrize("case", BAD)
def test_lists_of_other_tokens_are_refused(case: str) -> None:
    """Each by what is wrong, with the call's name."""
    change, message = BAD[case]
    with pytest.raises(DataError, match=message):
        call_of(**{"kept": [[5]], "ids": [5], **change})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "greedy": ({"sampling": replace(HOW, temperature=0.0)}, "a temperature above 0 .* got 0.0 @ call c"),
    "a temperature that is not known": ({"sampling": replace(HOW, temperature=None)}, "a temperature above 0"),
    "no parameters": ({"sampling": None}, "a temperature above 0 .* got none"),
    "raw": ({"sampling": replace(HOW, logprobs_mode="raw")}, "logprobs_mode 'processed' .* got 'raw'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parameters_that_no_mask_describes_are_refused(case: str) -> None:
    """Before any list is looked at."""
    change, message = REFUSED[case]
    options = {"prompt": 1, "sampling": HOW, "call": "c", **change}
    with pytest.raises(UsageError, match=message):
        mask_columns([[5]], np.asarray([5], dtype=np.int32), **options)


def test_turns_keep_the_masks_of_the_call_that_sampled() -> None:
    """A later prompt repeats what was sampled, with no entry; the joined record has the first call's."""
    first = call_of([[5, 6], None], [5, 7], head=[0, 1], call_id="turn-0")
    second = call_of([[3, 9]], [9], head=[0, 1, 5, 7, 2], call_id="turn-1")
    [record] = assemble([first, second], SPEC, sample_id="chat").records
    assert [0, 0, 1, 0, 0, 1] == record.columns["sampling_mask_state"].tolist()
    assert [[], [], [5, 6], [], [], [3, 9]] == record.columns["sampling_mask"].tolist()
    counts = collate([record], SPEC, options=BatchOptions(labels=True)).mask_counts()
    assert (2, 1) == (counts.listed, counts.unmasked)


# ----------------------------------------------------------------------------------------------------------------------
# What masks cost, and how many fit
# ----------------------------------------------------------------------------------------------------------------------


def masked_record(number: int, *, tokens: int, ids: int) -> RouteRecord:
    """A record whose masks hold ``ids`` ids at most, in lists of 1 to 80 as far as they go."""
    rng = np.random.default_rng(number)
    kept: list[list[int] | None] = []
    sampled_G = rng.integers(0, 50_000, tokens - 2)
    for own in sampled_G.tolist():
        size = min(int(rng.integers(0, 80)), ids)
        kept.append(sorted({own, *rng.integers(0, 50_000, size).tolist()}) if size else None)
        ids -= size
    columns = mask_columns(kept, sampled_G.astype(np.int32), prompt=2, sampling=HOW, call="c", vocab_size=50_000)
    call = replace(
        call_of([None] * (tokens - 2), [0] * (tokens - 2), call_id=f"sample-{number}"),
        generation_ids=sampled_G,
        columns=columns,
        checksum=None,
    )
    return record_of(call)


@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_a_mask_costs_four_bytes_an_id_and_five_a_token(tmp_path: Any, encoding: Any) -> None:
    """The bytes of two real files, with and without masks: beyond the bar stand 16 bytes a record, and the schema's."""
    records = [masked_record(number, tokens=700, ids=10_000) for number in range(12)]
    bare = [replace(record, columns={}, checksum=None) for record in records]
    sizes: list[int] = []
    for found in (records, bare):
        path = tmp_path / f"{len(sizes)}.arrows"
        with new_stream(path, SPEC, encoding=encoding) as sink:
            for record in found:
                sink.write(record)
        assert [record.checksum for record in found] == [record.checksum for record in open_stream(path)]
        sizes.append(path.stat().st_size)
    ids = sum(len(record.columns["sampling_mask"].values) for record in records)
    tokens = sum(record.num_tokens for record in records)
    assert ids > 5 * tokens
    beyond = sizes[0] - sizes[1] - 4 * ids - 5 * tokens
    # int64 ends of 12 records in two columns; names and declarations of these in the schema, padding of the buffers
    assert 16 * len(records) < beyond < 16 * len(records) + 2_000


def test_lists_are_split_over_batches_before_an_end_passes_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends before its lists hold more values than an end can say; all records come back."""
    monkeypatch.setattr("routeplane.record.batches.MAX_BATCH_VALUES", 700)
    records = [masked_record(number, tokens=40, ids=300) for number in range(5)]
    held = [len(record.columns["sampling_mask"].values) for record in records]
    file = io.BytesIO()
    with new_stream(file, SPEC) as sink:
        for record in records:
            sink.write(record)
    with pa.ipc.open_stream(file.getvalue()) as reader:
        counts = [len(batch.column("sampling_mask").flatten().flatten()) for batch in reader]
    assert (sum(held), 700) == (sum(counts), max(max(counts), 700))
    assert len(counts) > 3
    assert [record.checksum for record in records] == [record.checksum for record in open_stream(file.getvalue())]


def test_lists_beyond_int32_are_refused() -> None:
    """One record, and two in one batch, whose lists have more values than an end can say: by name, before a copy."""
    base = record_of(call_of([[7]], [7]))
    kind = ColumnType(dtype="int8", ragged=True, aligned="fed", axes=("entries",))

    def lists(values: int) -> RouteRecord:
        # pages that are only read stay one page of zeros
        offsets_S1 = frozen_view(np.asarray([0, 0, 0, values], dtype=np.int64))
        huge = AlignedColumn(type=kind, values=frozen_view(np.zeros(values, dtype=np.int8)), offsets=offsets_S1)
        return replace(base, columns={"huge": huge}, checksum=None)

    sink = new_stream(io.BytesIO(), SPEC)
    with pytest.raises(DataError, match="at most 2147483647 values in the lists of 'huge', got 2147483648 @ sample"):
        sink.write(lists(2**31))
    sink.abort()
    with pytest.raises(DataError, match="of column 'huge' of one batch, got 2147483648"):
        write_batch([lists(2**30), lists(2**30)], SPEC, encoding="plain")
