"""share_prompts: a prompt's rows are carried once where they are the same, and joining gives every record back."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from routeplane.record.prefixes import PromptReport, resolve, share_prompts
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.stream import new_stream, open_stream
from routeplane.testing.builders import watermarked_record, watermarked_spec

SPEC: RouteSpec = watermarked_spec(layers=(1, 4), top_k=2)
PROMPT = 5


def sampled(index: int, *, prompt_of: int = 0, group: str | None = "g", tokens: int = 9) -> RouteRecord:
    """A sample of a prompt: its first rows and tokens are those of sample ``prompt_of``, the rest its own."""
    own = watermarked_record(index, num_tokens=tokens, spec=SPEC, prompt_tokens=PROMPT)
    like = watermarked_record(prompt_of, num_tokens=tokens, spec=SPEC, prompt_tokens=PROMPT)
    return replace(
        own,
        group=group,
        token_ids=np.concatenate([like.token_ids[:PROMPT], own.token_ids[PROMPT:]]),
        routes=np.concatenate([like.routes[:PROMPT], own.routes[PROMPT:]]),
        checksum=None,
    )


def facts(records: Any) -> list[tuple[Any, ...]]:
    """What must come back."""
    return [(record.key, record.checksum, record.compute_checksum()) for record in records]


def test_a_prompt_is_carried_once() -> None:
    """The first of a group holds the rows, the others refer to it; counted, and the same again after a stream."""
    given_ = [sampled(index) for index in range(4)]
    shared = share_prompts(given_)

    assert [0, PROMPT, PROMPT, PROMPT] == [record.routes_start for record in shared.records]
    row = given_[0].routes[0].nbytes
    assert PromptReport(shared=3, own=0, rows=3 * PROMPT, nbytes=3 * PROMPT * row) == shared.report
    sink = io.BytesIO()
    with new_stream(sink, SPEC) as writer:
        for record in shared.records:
            writer.write(record)
    assert facts(given_) == facts(resolve(open_stream(sink.getvalue())))


def test_other_rows_are_kept() -> None:
    """One row in one layer that differs, and a sample keeps its own prompt; others may share that one."""
    odd = sampled(1)
    routes_SLK = odd.routes.copy()
    routes_SLK[2, 1] = routes_SLK[2, 1][::-1]
    odd = replace(odd, routes=routes_SLK, checksum=None)
    twin = replace(sampled(2), routes=np.concatenate([routes_SLK[:PROMPT], sampled(2).routes[PROMPT:]]), checksum=None)
    given_ = [sampled(0), odd, twin, sampled(3)]
    shared = share_prompts(given_)

    assert [None, None, odd.sample_id, "sample-0"] == [
        record.prefix and record.prefix.sample_id for record in shared.records
    ]
    assert (2, 1) == (shared.report.shared, shared.report.own)
    assert facts(given_) == facts(resolve(shared.records))


def test_a_first_record_holds_its_prompt_and_counts_nothing() -> None:
    """A group of one shares nothing; a prompt of one token is shared as any; a record that begins sampled has none."""
    one = watermarked_record(0, num_tokens=4, spec=SPEC, prompt_tokens=1)
    pair = [replace(one, sample_id=name, group="g", checksum=None) for name in ("a", "b")]
    alone, short = share_prompts([sampled(0)]), share_prompts(pair)
    unprompted = [
        replace(each, spans=tuple(replace(span, kind="generation") for span in each.spans), checksum=None)
        for each in pair
    ]

    assert PromptReport() == alone.report
    assert (0, 1) == tuple(record.routes_start for record in short.records)
    assert (1, 0, 1) == (short.report.shared, short.report.own, short.report.rows)
    assert unprompted == list(share_prompts(unprompted).records)


def test_other_tokens_are_kept() -> None:
    """Equal rows under other tokens are no shared prompt."""
    other = sampled(1)
    tokens = other.token_ids.copy()
    tokens[0] += 1
    other = replace(other, token_ids=tokens, checksum=None)

    assert [None, None] == [record.prefix for record in share_prompts([sampled(0), other]).records]


@given(st.lists(st.tuples(st.sampled_from([None, "g", "h"]), st.integers(0, 2), st.integers(7, 10)), max_size=8))
def test_joining_gives_every_record_back(drawn: list[tuple[str | None, int, int]]) -> None:
    """Whatever groups and prompts: resolve undoes it, and as many rows are saved as the report says."""
    given_ = [
        sampled(10 + index, prompt_of=prompt, group=group, tokens=tokens)
        for index, (group, prompt, tokens) in enumerate(drawn)
    ]
    shared = share_prompts(given_)

    assert facts(given_) == facts(resolve(shared.records))
    saved = sum(len(record.routes) for record in given_) - sum(len(record.routes) for record in shared.records)
    assert shared.report.rows == saved
    seen = {(group, prompt) for group, prompt, _ in drawn if group is not None}
    grouped = sum(group is not None for group, _, _ in drawn)
    assert grouped - len(seen) == shared.report.shared


def test_sharing_twice_changes_nothing() -> None:
    """Records that refer already are left as they are."""
    once = share_prompts([sampled(index) for index in range(3)])
    twice = share_prompts(once.records)

    assert facts(once.records) == facts(twice.records)
    assert PromptReport() == twice.report
