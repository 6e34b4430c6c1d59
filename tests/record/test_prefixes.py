"""resolve: shared rows come from the record that was named, or nothing comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from routeplane.errors import ChecksumError, DataError, ErrorKind, SpecError
from routeplane.record.prefixes import as_delta, resolve
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spans import Capture
from routeplane.testing.builders import watermarked_record, watermarked_spec
from routeplane.testing.strategies import records

SPEC = watermarked_spec(layers=(1, 4), top_k=2)


def delta_of(whole: RouteRecord, holder: RouteRecord, *, start: int) -> RouteRecord:
    """``whole`` with its first rows left to ``holder``."""
    prefix = Prefix(
        sample_id=holder.sample_id,
        attempt=holder.attempt,
        segment=holder.segment,
        stop=start,
        checksum=holder.checksum,
    )
    return replace(whole, routes=whole.routes[start:], routes_start=start, prefix=prefix, checksum=None)


# ----------------------------------------------------------------------------------------------------------------------
# Joining
# ----------------------------------------------------------------------------------------------------------------------


@given(records(prefixes=False), st.data())
def test_a_delta_resolves_to_the_whole(whole: RouteRecord, data: st.DataObject) -> None:
    """A record cut into a holder and a delta comes back, to the checksum; the holder is handed on as it is."""
    assume(whole.num_tokens > 1)
    start = data.draw(st.integers(1, whole.num_tokens))
    held = data.draw(st.integers(start, whole.num_tokens))
    holder = replace(whole.slice(0, held), sample_id=f"holder of {whole.sample_id}", checksum=None)
    delta = delta_of(whole, holder, start=start)
    given_records = data.draw(st.permutations([holder, delta]))
    resolved = resolve(iter(given_records))

    assert [record.key for record in given_records] == [record.key for record in resolved]
    by_key = {record.key: record for record in resolved}
    assert by_key[holder.key] is holder
    assert by_key[whole.key].equals(whole)
    assert whole.checksum == by_key[whole.key].verify().checksum


@given(st.permutations(range(4)))
def test_a_chain_resolves_in_any_order(order: list[int]) -> None:
    """A turn that stands on a turn that stands on a turn: each comes back whole, wherever it stands in the list."""
    wholes = [
        replace(watermarked_record(3, num_tokens=3 + 2 * turn, spec=SPEC), attempt=turn, checksum=None)
        for turn in range(4)
    ]
    chain = [wholes[0]]
    for turn in range(1, 4):
        chain.append(delta_of(wholes[turn], chain[turn - 1], start=2 * turn))
    resolved = resolve([chain[turn] for turn in order])

    assert [wholes[turn].checksum for turn in order] == [record.checksum for record in resolved]


def test_a_long_chain_resolves() -> None:
    """A thousand turns in the least convenient order: depth is not limited."""
    last = 1_100
    whole = watermarked_record(3, num_tokens=last, spec=watermarked_spec(layers=(1,), top_k=1), last_token_fed=True)
    chain = [replace(whole.slice(0, 1), attributes={}, checksum=None)]
    for turn in range(1, last):
        part = replace(whole.slice(0, turn + 1), attempt=turn, attributes={}, checksum=None)
        chain.append(delta_of(part, chain[-1], start=turn))
    resolved = resolve(reversed(chain))

    np.testing.assert_array_equal(whole.routes, resolved[0].routes)


def test_one_holder_serves_a_group() -> None:
    """Four samples of one prompt name the same holder; nothing of the holder is modified."""
    prompt = watermarked_record(1, num_tokens=10, prompt_tokens=10, spec=SPEC, last_token_fed=True)
    wholes = [
        replace(watermarked_record(1, num_tokens=15, prompt_tokens=10, spec=SPEC), attempt=attempt, checksum=None)
        for attempt in range(1, 5)
    ]
    deltas = [delta_of(whole, prompt, start=10) for whole in wholes]

    assert 10 + 4 * 5 == len(prompt.routes) + sum(len(delta.routes) for delta in deltas)
    assert [whole.checksum for whole in wholes] == [record.checksum for record in resolve([*deltas, prompt])[:4]]
    assert prompt.verify() is prompt


def test_whole_records_are_handed_on() -> None:
    """Nothing to resolve: the same objects; nothing given: nothing."""
    whole = [watermarked_record(index, num_tokens=3, spec=SPEC) for index in range(3)]

    assert all(ours is theirs for ours, theirs in zip(whole, resolve(whole), strict=True))
    assert [] == resolve([])


def test_the_name_of_a_model_is_not_compared() -> None:
    """A holder captured under another name of the same geometry serves; the delta keeps its own spec."""
    whole = watermarked_record(1, num_tokens=6, spec=SPEC)
    other = replace(whole, sample_id="h", spec=replace(SPEC, model="renamed"), checksum=None)
    (resolved, _) = resolve([delta_of(whole, other, start=3), other])

    assert resolved.equals(whole)


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------

WHOLE = watermarked_record(1, num_tokens=6, prompt_tokens=4, spec=SPEC)
HOLDER = replace(WHOLE.slice(0, 4), sample_id="holder", checksum=None)


def _absent() -> list[RouteRecord]:
    return [delta_of(WHOLE, HOLDER, start=3)]


def _another_attempt() -> list[RouteRecord]:
    return [delta_of(WHOLE, HOLDER, start=3), replace(HOLDER, attempt=1, checksum=None)]


def _another_content() -> list[RouteRecord]:
    """Same key and tokens, rows of a later capture."""
    return [delta_of(WHOLE, HOLDER, start=3), replace(HOLDER, routes=HOLDER.routes[:, :, ::-1], checksum=None)]


def _other_tokens() -> list[RouteRecord]:
    changed = replace(WHOLE, token_ids=np.asarray([9, *WHOLE.token_ids[1:]]), checksum=None)
    return [delta_of(changed, HOLDER, start=3), HOLDER]


def _too_short() -> list[RouteRecord]:
    return [delta_of(WHOLE, HOLDER, start=5), HOLDER]


def _itself() -> list[RouteRecord]:
    return [delta_of(WHOLE, WHOLE, start=3)]


def _rows_lost() -> list[RouteRecord]:
    """The holder's rows were quarantined, and the delta still declares them captured."""
    bare = HOLDER.without_routes()
    return [delta_of(WHOLE, bare, start=3), bare]


def _twice() -> list[RouteRecord]:
    return [HOLDER, replace(HOLDER, token_ids=HOLDER.token_ids + 1, checksum=None)]


BAD: dict[str, tuple[Callable[[], list[RouteRecord]], ErrorKind]] = {
    "absent": (_absent, ErrorKind.PREFIX),
    "another_attempt": (_another_attempt, ErrorKind.PREFIX),
    "another_content": (_another_content, ErrorKind.PREFIX),
    "other_tokens": (_other_tokens, ErrorKind.PREFIX),
    "holder_too_short": (_too_short, ErrorKind.PREFIX),
    "itself": (_itself, ErrorKind.PREFIX),
    "rows_lost": (_rows_lost, ErrorKind.COVERAGE),
    "one_key_twice": (_twice, ErrorKind.DUPLICATE_KEY),
}


@pytest.mark.parametrize(("build", "kind"), BAD.values(), ids=BAD)
def test_a_wrong_prefix_is_refused(build: Callable[[], list[RouteRecord]], kind: ErrorKind) -> None:
    """Rows of another record, another capture or another key never stand in for those named."""
    with pytest.raises(DataError, match=r"expected .*, got |expected .* @ sample") as caught:
        resolve(build())

    assert kind == caught.value.kind


def test_another_geometry_is_refused() -> None:
    """A holder of other layers cannot hold these rows."""
    spec = watermarked_spec(layers=(1, 5), top_k=2)
    other = replace(watermarked_record(1, num_tokens=6, spec=spec), sample_id="h", checksum=None)
    with pytest.raises(SpecError, match=r"prefix of sample sample-1: .*layer_ids: \(1, 4\) against \(1, 5\)"):
        resolve([delta_of(WHOLE, other, start=3), other])


@pytest.mark.parametrize("which", ["holder", "delta"])
def test_inputs_are_verified_first(which: str) -> None:
    """A record whose content is not what its checksum says joins nothing."""
    pair: dict[str, Any] = {"holder": HOLDER, "delta": delta_of(WHOLE, HOLDER, start=3)}
    pair[which] = replace(pair[which], attributes={"edited": "yes"}, checksum=pair[which].checksum)
    with pytest.raises(ChecksumError):
        resolve(pair.values())


def test_captures_before_the_start_are_the_deltas_own() -> None:
    """What a delta declares of the shared rows is checked against the rows when they arrive."""
    captures = (
        Capture(start=0, stop=2, call="call-0", weights_version=None, state="lost"),
        Capture(start=2, stop=5, call="call-0", weights_version=1, state="captured"),
        Capture(start=5, stop=6, call="call-0", weights_version=None, state="not_fed"),
    )
    delta = replace(delta_of(WHOLE, HOLDER, start=3), captures=captures, checksum=None)
    with pytest.raises(DataError, match="no ids where the capture says lost") as caught:
        resolve([delta, HOLDER])

    assert [0] == [problem.token for problem in caught.value.problems]


@pytest.mark.parametrize("at", [4, 6])
def test_a_log_probability_that_differs_ends_what_is_shared(at: int) -> None:
    """Equal tokens and rows are not enough: a delta begins at the first other number."""
    base = watermarked_record(0, num_tokens=8, spec=SPEC)
    assert base.logprobs is not None
    logprobs = base.logprobs.copy()
    logprobs[at] = -0.5

    assert at == as_delta(replace(base, sample_id="other", logprobs=logprobs, checksum=None), base).routes_start


def test_a_delta_with_columns_that_its_holder_lacks_is_refused() -> None:
    """Its first entries stand nowhere: an error that names both records, not a column shorter than the tokens."""
    whole = watermarked_record(0, num_tokens=6, spec=SPEC)
    holder = replace(whole.slice(0, 4), sample_id="holder", attributes={}, checksum=None)
    delta = as_delta(whole, holder)
    assert 4 == delta.tokens_start
    further = replace(delta, columns={"score": np.zeros(2, dtype=np.float32)}, checksum=None)

    assert [holder.key, whole.key] == [record.key for record in resolve([holder, delta])]
    with pytest.raises(DataError, match="with the columns of its delta") as caught:
        list(resolve([holder, further]))
    assert ErrorKind.PREFIX == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Making deltas
# ----------------------------------------------------------------------------------------------------------------------


def test_a_record_of_another_spec_shares_nothing() -> None:
    """Rows of other layers are not those of the base: the record stays whole."""
    base = watermarked_record(0, num_tokens=5, prompt_tokens=2, spec=SPEC)
    longer = watermarked_record(0, num_tokens=8, prompt_tokens=2, spec=watermarked_spec(layers=(1, 5), top_k=2))

    assert longer is as_delta(longer, base)


OTHER_TYPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base has a column more": ({"columns": {"x": np.zeros(5, np.int8)}}, {}),
    "base has a column less": ({}, {"columns": {"x": np.zeros(8, np.int8)}}),
    "another dtype": ({"columns": {"x": np.zeros(5, np.int8)}}, {"columns": {"x": np.zeros(8, np.int16)}}),
    "base has no log-probabilities": ({"logprobs": None}, {}),
    "base alone has log-probabilities": ({}, {"logprobs": None}),
    "another model": ({"spec": replace(SPEC, model="other")}, {}),
}


@pytest.mark.parametrize(("base", "longer"), OTHER_TYPES.values(), ids=OTHER_TYPES)
def test_records_of_other_columns_share_nothing(base: dict[str, Any], longer: dict[str, Any]) -> None:
    """Equal tokens and rows do not make a delta where what stands beside them is of another kind."""
    short, long = (watermarked_record(0, num_tokens=count, prompt_tokens=2, spec=SPEC) for count in (5, 8))
    record = replace(long, **longer, checksum=None)

    assert 4 == as_delta(long, short).tokens_start
    assert record is as_delta(record, replace(short, **base, checksum=None))


@given(
    tokens=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    scores=st.integers(0, 2),
    others=st.lists(
        st.tuples(st.sampled_from(["token", "row", "logprob", "score 0", "score 1"]), st.integers(0, 8)), max_size=3
    ),
)
def test_what_is_shared_is_what_a_look_at_each_token_finds(
    tokens: tuple[int, int], scores: int, others: list[tuple[str, int]]
) -> None:
    """A delta begins at the first token that differs in anything, has a token of its own, and resolves to the whole."""
    columns = {f"score {index}": np.arange(9, dtype=np.float32) + index for index in range(scores)}

    def made(sample: str, count: int, changes: list[tuple[str, int]]) -> RouteRecord:
        record = watermarked_record(0, num_tokens=count, prompt_tokens=1, spec=SPEC, last_token_fed=True)
        assert record.logprobs is not None
        token_ids, routes_SLK, logprobs = record.token_ids.copy(), record.routes.copy(), record.logprobs.copy()
        own = {name: values[:count].copy() for name, values in columns.items()}
        for kind, at in ((kind, at) for kind, at in changes if at < count):
            if kind == "token":
                token_ids[at] += 1
            elif kind == "row":
                routes_SLK[at, 1] = routes_SLK[at, 1][::-1]
            elif kind == "logprob":
                logprobs[at] = -0.25 if at else np.nan
            elif kind in own:
                own[kind][at] = -1
        changed: dict[str, object] = {"token_ids": token_ids, "routes": routes_SLK, "logprobs": logprobs}
        return replace(record, sample_id=sample, columns=own, checksum=None, **changed)  # type: ignore[arg-type]

    base, record = made("base", tokens[0], []), made("record", tokens[1], others)
    changed = [at for kind, at in others if kind in {"token", "row", *columns} or (kind == "logprob" and at)]
    shared = min([*tokens, tokens[1] - 1, *changed])
    delta = as_delta(record, base)

    assert shared == delta.tokens_start == delta.routes_start
    assert delta.num_tokens == record.num_tokens
    assert (delta is record) == (shared == 0)
    assert record.equals(resolve([base, delta])[1])


@pytest.mark.parametrize("other", range(1, 5))
def test_what_is_shared_ends_at_the_first_other_entry_of_a_column(other: int) -> None:
    """Tokens, rows and log-probabilities are those of the base, and one score of a column is not."""
    scores = np.arange(8, dtype=np.float32)
    base = replace(
        watermarked_record(0, num_tokens=5, prompt_tokens=2, spec=SPEC, last_token_fed=True),
        columns={"score": scores[:5]},
        checksum=None,
    )
    longer = watermarked_record(0, num_tokens=8, prompt_tokens=2, spec=SPEC, last_token_fed=True)
    changed = np.where(np.arange(8) == other, -1, scores).astype(np.float32)
    longer = replace(longer, segment=1, columns={"score": changed}, checksum=None)
    delta = as_delta(longer, base)

    assert other == delta.tokens_start
    assert longer.equals(resolve([base, delta])[1])


def test_a_delta_of_some_layers_says_nothing_new_of_rows_it_does_not_hold() -> None:
    """Tokens 2 to 5 lack layer 1. Without it, those of the delta are whole; those of the holder stay partial."""
    whole = watermarked_record(0, num_tokens=8, spec=SPEC, missing=[(token, 1) for token in range(2, 6)])
    delta = delta_of(whole, replace(whole.slice(0, 5), segment=1, checksum=None), start=4).select([4])

    assert [(0, 2, "captured"), (2, 4, "partial"), (4, 6, "captured"), (6, 7, "captured"), (7, 8, "not_fed")] == [
        (one.start, one.stop, one.state) for one in delta.captures
    ]


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (0, 6), (4, 8), (5, 7), (6, 8)])
def test_a_delta_is_cut_as_its_whole_is(start: int, stop: int) -> None:
    """From the first token on it refers to the same rows still; from a row of its own on it refers to none."""
    base, whole = (watermarked_record(0, num_tokens=count, prompt_tokens=2, spec=SPEC) for count in (5, 8))
    base = replace(base, sample_id="base", checksum=None)
    part = as_delta(whole, base).slice(start, stop)

    assert (4 if start == 0 else 0) == part.tokens_start == part.routes_start
    assert (start == 0) == (part.prefix is not None)
    assert whole.slice(start, stop).equals(resolve([base, part])[1])
