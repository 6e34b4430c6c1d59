"""Whatever is done to a record with every kind of column equals the same done to plain Python lists.

A rollout is assembled, then cut, selected, stored as a delta, sent as a stream, sharded, in any order; the oracle knows
lists and slices alone. Both encodings, and both formats for what format 1.0 can say.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.ipc import open_stream as open_reader

from routeplane import ModelCall, RouteRecord, RouteSpec, assemble, new_stream, open_stream
from routeplane.batch import collate
from routeplane.batch.slots import Shard
from routeplane.record.assembly import UnfedTokens
from routeplane.record.prefixes import as_delta, resolve
from routeplane.record.spec import MISSING
from tests.plain_columns import KINDS, NARROW, WIDE, column, entry, lists_of

FED = ("maybe", "layers")
ABSENT = [[MISSING, MISSING]] * 2


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A record as lists: tokens, rows by layer, entries by column; ``layers``: the ids on the layer axis."""

    tokens: list[int]
    rows: list[list[list[int]]]
    columns: dict[str, list[Any]]
    layers: tuple[int, ...] = (1, 4)

    def slice(self, start: int, stop: int) -> Plain:
        """Some neighbouring tokens."""
        columns = {name: entries[start:stop] for name, entries in self.columns.items()}
        return replace(self, tokens=self.tokens[start:stop], rows=self.rows[start:stop], columns=columns)

    def select(self, layer: int) -> Plain:
        """One layer."""
        slot = self.layers.index(layer)
        columns = {
            name: [one[slot : slot + 1] for one in entries] if name == "layers" else entries
            for name, entries in self.columns.items()
        }
        rows = [row[slot : slot + 1] for row in self.rows]
        return Plain(tokens=self.tokens, rows=rows, columns=columns, layers=(layer,))


def row(call: int, token: int) -> list[list[int]]:
    """What a call's forward chose for a token, a list a layer; legal under both specs."""
    return [[(31 * call + 7 * token + layer) % 100, 100 + (13 * call + 3 * token + layer) % 100] for layer in (1, 4)]


def compare(expected: Plain, record: RouteRecord) -> None:
    """Tokens, rows and entries; and the checksum is that of what is there."""
    assert expected.tokens == record.token_ids.tolist()
    assert expected.rows == record.routes.tolist()
    assert expected.columns == lists_of(record)
    assert expected.layers == record.spec.layer_ids
    record.verify()


# ----------------------------------------------------------------------------------------------------------------------
# Rollouts, and what is done to their records
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One call: tokens that the environment added, tokens that were sampled, rows that it brings again."""

    added: int
    sampled: int
    again: int


turns = st.lists(
    st.builds(Turn, added=st.integers(1, 3), sampled=st.integers(1, 3), again=st.integers(0, 3)), min_size=1, max_size=3
)


def rollout(made: list[Turn], kinds: tuple[str, ...], *, tail: int) -> tuple[list[ModelCall | UnfedTokens], int]:
    """The calls of a rollout, and how many tokens they have; call n has the entries of seed n."""
    calls: list[ModelCall | UnfedTokens] = []
    total = 0
    for seed, turn in enumerate(made):
        first = max(0, total - 1 - turn.again)
        prompt, total = total + turn.added, total + turn.added + turn.sampled
        calls.append(
            ModelCall(
                prompt_ids=np.arange(prompt),
                generation_ids=np.arange(prompt, total),
                routes=np.asarray([row(seed, token) for token in range(first, total - 1)], dtype=np.int16).reshape(
                    -1, 2, 2
                ),
                first_row=first,
                weights_version=1,
                call_id=f"c{seed}",
                columns={kind: column(seed, kind, range(total)) for kind in kinds},
            )
        )
    if tail:
        behind = {kind: column(9, kind, range(total, total + tail)) for kind in kinds}
        calls.append(UnfedTokens(token_ids=np.arange(total, total + tail), call_id="seen", columns=behind))
    return calls, total


def oracle(made: list[Turn], kinds: tuple[str, ...], *, tail: int, keep: str) -> Plain:
    """The same by lists: a row and a fed entry are of one of the calls that brought the row, the rest of the first."""
    ends: list[int] = []
    firsts: list[int] = []
    for turn in made:
        before = ends[-1] if ends else 0
        firsts.append(max(0, before - 1 - turn.again))
        ends.append(before + turn.added + turn.sampled)
    total = ends[-1]
    sampled = [next(seed for seed, end in enumerate(ends) if token < end) for token in range(total)] + [9] * tail
    brought = [
        [seed for seed, end in enumerate(ends) if firsts[seed] <= token < end - 1] for token in range(total + tail)
    ]
    chosen = [(calls[0] if keep == "keep_first" else calls[-1]) if calls else None for calls in brought]
    fed = [sampled[token] if seed is None else seed for token, seed in enumerate(chosen)]
    return Plain(
        tokens=list(range(total + tail)),
        rows=[ABSENT if seed is None else row(seed, token) for token, seed in enumerate(chosen)],
        columns={
            kind: [entry(seed, kind, token) for token, seed in enumerate(fed if kind in FED else sampled)]
            for kind in kinds
        },
    )


def sent(record: RouteRecord, *, encoding: Literal["plain", "narrow"], format: Literal["1.0", "1.1"]) -> RouteRecord:
    """The record through a stream."""
    sink = io.BytesIO()
    with new_stream(sink, record.spec, encoding=encoding, format=format) as writer:
        writer.write(record)
    (found,) = open_stream(sink.getvalue())
    assert record.checksum == found.checksum
    assert format == open_reader(sink.getvalue()).schema.metadata[b"routeplane.format"].decode()
    return found


def stored(record: RouteRecord, shared: int) -> RouteRecord:
    """The record as a delta of its first tokens, and joined with them again."""
    base = replace(record.slice(0, shared), sample_id="base", checksum=None)
    (_, whole) = resolve([base, as_delta(record, base)])
    assert record.checksum == whole.checksum
    return whole


ENCODED: list[tuple[RouteSpec, Literal["plain", "narrow"]]] = [(NARROW, "narrow"), (NARROW, "plain"), (WIDE, "plain")]
FORMATS: list[Literal["1.0", "1.1"]] = ["1.1", "1.0"]
steps = st.sampled_from(["slice", "select", "stream", "delta", "pickle"])


@given(turns, st.integers(0, 2), st.sampled_from(["keep_first", "keep_last"]), st.lists(steps, max_size=4), st.data())
def test_any_history_of_a_record_is_that_of_lists(
    made: list[Turn], tail: int, keep: Any, history: list[str], data: st.DataObject
) -> None:
    """Assembled, then cut, selected, sent and stored as drawn, and sharded at the end."""
    spec, encoding = data.draw(st.sampled_from(ENCODED))
    format = data.draw(st.sampled_from(FORMATS))
    kinds = KINDS if format == "1.1" else ()
    tail = tail if format == "1.1" else 0
    calls, _ = rollout(made, kinds, tail=tail)
    (record,) = assemble(calls, spec, sample_id="s", overlap=keep).records
    if format == "1.0":
        record = replace(record, columns={"turn": record.token_ids}, checksum=None)
    expected = oracle(made, kinds, tail=tail, keep=keep)
    if format == "1.0":
        expected = replace(expected, columns={"turn": expected.tokens})
    compare(expected, record)

    for step in history:
        size = record.num_tokens
        if step == "slice":
            start = data.draw(st.integers(0, size - 1))
            stop = data.draw(st.integers(start + 1, size))
            record, expected = record.slice(start, stop), expected.slice(start, stop)
        elif step == "select":
            layer = data.draw(st.sampled_from(expected.layers))
            record, expected = record.select([layer]), expected.select(layer)
        elif step == "stream":
            record = sent(record, encoding=encoding, format=format)
        elif step == "delta":
            record = stored(record, data.draw(st.integers(1, size)))
        else:
            record = pickle.loads(pickle.dumps(record))
        compare(expected, record)
    _compare_shard(expected, record, data.draw(st.sampled_from(["packed", "padded"])), data.draw(st.integers(0, 3)))


def _compare_shard(expected: Plain, record: RouteRecord, layout: Any, rank: int) -> None:
    """A zigzag rank of two, and a sequence-parallel one of two, hold the rows of their tokens."""
    shard = Shard(context_parallel=(rank % 2, 2), sequence_parallel=(rank // 2, 2))
    batch = collate([record], record.spec, layout=layout, shard=shard)
    width = -(-len(expected.tokens) // shard.multiple) * shard.multiple
    quarters = np.split(np.arange(width), 4)
    local = np.concatenate([quarters[rank % 2], quarters[3 - rank % 2]])
    for number, token in enumerate(np.split(local, 2)[rank // 2].tolist()):
        if token >= len(expected.tokens):
            assert bool(batch.pad_mask.reshape(-1)[number])
            continue
        assert expected.rows[token] == batch.routes.reshape(-1, *record.spec.row_shape)[number].tolist()
        for name, entries in expected.columns.items():
            parts = batch.column_parts.get(name)
            if parts is not None:
                found = parts.row(number)
            else:
                values = batch.columns[name]
                found = values.reshape(batch.num_rows, *values.shape[len(batch.plan.shape) :])[number]
            assert entries[token] == (None if found is None else found.tolist()), name
