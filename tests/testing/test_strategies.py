"""The strategies are library code: what they draw is valid, corruptions are illegal as said, everything can come."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from routeplane import assemble, resolve
from routeplane.errors import DataError, FormatError
from routeplane.record.aligned import MASK_STATES
from routeplane.record.record import RouteRecord
from routeplane.record.spans import STATES, Capture, Span
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import check_routes
from routeplane.stream import new_stream, open_stream
from routeplane.testing.strategies import (
    CORRUPTIONS,
    Block,
    Conversation,
    Corruption,
    Rollout,
    aligned_columns,
    blocks,
    conversations,
    corruptions,
    names,
    records,
    rollouts,
    routes,
    sampling_masks,
    specs,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# `find` fails where no example shows the feature; the first one will do, however large.
_SEARCH = settings(
    max_examples=1_000,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def _comes(strategy: st.SearchStrategy[Any], condition: Callable[[Any], bool]) -> bool:
    return condition(find(strategy, condition, settings=_SEARCH))


# ----------------------------------------------------------------------------------------------------------------------
# Specs, routes, names
# ----------------------------------------------------------------------------------------------------------------------


@given(specs(min_layers=2, max_layers=4, min_top_k=2, max_top_k=3, min_experts=5, max_experts=256))
def test_specs_keep_their_bounds(spec: RouteSpec) -> None:
    """Every bound given to ``specs`` holds for what it draws."""
    assert 2 <= spec.num_layers <= 4
    assert 2 <= spec.top_k <= 3
    assert all(5 <= width <= 256 for width in spec.experts_per_layer)


SPEC_FEATURES: dict[str, Callable[[RouteSpec], bool]] = {
    "one_layer": lambda spec: spec.num_layers == 1,
    "a_gap_between_layers": lambda spec: spec.layer_ids[-1] - spec.layer_ids[0] >= spec.num_layers,
    "a_width_per_layer": lambda spec: isinstance(spec.num_experts, tuple),
    "one_slot": lambda spec: spec.top_k == 1,
    "as_wide_as_its_slots": lambda spec: spec.num_experts == spec.top_k,
    "the_widest_router": lambda spec: spec.num_experts == 32_767,
    "the_last_narrow_width": lambda spec: spec.num_experts == 256,
}


@pytest.mark.parametrize("feature", SPEC_FEATURES.values(), ids=SPEC_FEATURES)
def test_every_kind_of_spec_comes(feature: Callable[[RouteSpec], bool]) -> None:
    """Geometries at the edges of the format are reachable."""
    assert _comes(specs(), feature)


@given(st.data())
def test_routes_are_legal(data: st.DataObject) -> None:
    """What ``routes`` draws passes the validator, and holds no MISSING row where none was asked for."""
    spec = data.draw(specs())
    routes_SLK = data.draw(routes(spec))
    whole_SLK = data.draw(routes(spec, tokens=st.just(3), missing=False))

    check_routes(routes_SLK, spec)
    check_routes(whole_SLK, spec)
    assert np.int16 == routes_SLK.dtype
    assert routes_SLK.flags.writeable
    assert (3, *spec.row_shape) == whole_SLK.shape
    assert not (whole_SLK == MISSING).any()


@pytest.mark.parametrize("ids", [[0, 1], [1, 0], [3, 1], [2, 3], [-1, -1]], ids=str)
def test_every_row_comes(ids: list[int]) -> None:
    """Any legal row can be drawn: every set of ids, in more than one order, and MISSING."""
    spec = RouteSpec(num_experts=4, top_k=2, layer_ids=(0,))

    assert _comes(routes(spec, tokens=st.just(1)), lambda routes_SLK: routes_SLK[0, 0].tolist() == ids)


@given(names())
def test_names_are_text(name: str) -> None:
    """Names are not empty and encode."""
    assert name.encode().decode() == name
    assert name


# ----------------------------------------------------------------------------------------------------------------------
# Corruptions
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORRUPTIONS)
@settings(max_examples=settings().max_examples // 3)
@given(data=st.data())
def test_corruptions_are_illegal_as_said(name: str, data: st.DataObject) -> None:
    """A corruption is found with its kind and at its place, and nothing else is found."""
    bad: Corruption = data.draw(corruptions(which=(name,)))
    with pytest.raises(DataError) as caught:
        check_routes(bad.routes, bad.spec)

    assert name == bad.name
    assert [(bad.kind, bad.token, bad.layer)] == [
        (problem.kind, problem.token, problem.layer) for problem in caught.value.problems
    ]


@given(corruptions())
def test_corruptions_are_illegal_by_the_plain_rule(bad: Corruption) -> None:
    """Where a corruption names a row, that row and no other breaks the rule as it is written in the format."""
    if bad.token is None or bad.layer is None:
        return
    slot = bad.spec.layer_ids.index(bad.layer)
    for token in range(len(bad.routes)):
        for at in range(bad.spec.num_layers):
            ids = bad.routes[token, at].tolist()
            in_range = all(0 <= expert < bad.spec.experts_per_layer[at] for expert in ids)
            legal = ids == [MISSING] * bad.spec.top_k or (in_range and len(set(ids)) == len(ids))
            assert ((token, at) != (bad.token, slot)) == legal


# ----------------------------------------------------------------------------------------------------------------------
# Records
# ----------------------------------------------------------------------------------------------------------------------


@given(records(max_tokens=4))
def test_records_are_valid(record: RouteRecord) -> None:
    """A drawn record verifies, keeps its bound, and may be built again from its own parts."""
    again = RouteRecord(**{name: getattr(record, name) for name in record.__dataclass_fields__})

    assert 1 <= record.num_tokens <= 4
    assert record.verify() is record
    assert again.verify().equals(record)


@given(records(prefixes=False))
def test_records_without_prefixes_are_whole(record: RouteRecord) -> None:
    """``prefixes=False`` draws records that hold all their rows."""
    assert record.prefix is None
    assert record.num_tokens == len(record.routes)


@pytest.mark.parametrize("state", STATES)
def test_every_capture_state_comes(state: str) -> None:
    """Each state of a capture is reachable."""
    assert _comes(records(), lambda record: any(capture.state == state for capture in record.captures))


RECORD_FEATURES: dict[str, Callable[[RouteRecord], bool]] = {
    "a_delta": lambda record: 0 < record.routes_start < record.num_tokens,
    "a_delta_without_rows": lambda record: record.routes_start == record.num_tokens,
    "both_kinds_of_span": lambda record: {"prompt", "generation"} == {span.kind for span in record.spans},
    "a_role": lambda record: any(span.role for span in record.spans),
    "a_known_version": lambda record: any(span.weights_version is not None for span in record.spans),
    "nan_and_a_value": lambda record: record.logprobs is not None and len(set(np.isnan(record.logprobs))) == 2,
    "minus_infinity": lambda record: record.logprobs is not None and bool(np.isneginf(record.logprobs).any()),
    "an_attribute": lambda record: bool(record.attributes),
    "a_bool_column": lambda record: any(values.dtype == np.bool_ for values in record.columns.values()),
    "a_float16_column": lambda record: any(values.dtype == np.float16 for values in record.columns.values()),
    "a_plain_column": lambda record: any(column.type.plain for column in record.columns.values()),
    "a_list_with_a_null": lambda record: any(
        column.type.ragged and None in column.tolist() and len(column.values) > 0 for column in record.columns.values()
    ),
    "an_array_with_a_null": lambda record: any(
        column.type.axes == ("y", "x") and None in column.tolist() for column in record.columns.values()
    ),
    "a_column_of_rows": lambda record: any(
        column.type.axes == ("layers", "topk") for column in record.columns.values()
    ),
    "a_group": lambda record: record.group is not None,
    "a_name_beyond_ascii": lambda record: not record.sample_id.isascii(),
}


@pytest.mark.parametrize("feature", RECORD_FEATURES.values(), ids=RECORD_FEATURES)
def test_every_part_of_a_record_comes(feature: Callable[[RouteRecord], bool]) -> None:
    """Each optional part of a record is reachable."""
    assert _comes(records(), feature)


@given(st.data())
def test_columns_fit_their_record(data: st.DataObject) -> None:
    """Columns have an entry per token, go with any record of the spec, and come back from a stream."""
    spec = data.draw(specs())
    columns = data.draw(aligned_columns(spec, 4))
    content = data.draw(records(spec=spec, max_tokens=4, prefixes=False).filter(lambda record: record.num_tokens == 4))
    record = replace(content, columns=columns, checksum=None)
    stream = io.BytesIO()
    with new_stream(stream, spec) as sink:
        sink.write(record)

    assert {4} >= {len(column) for column in columns.values()}
    [back] = open_stream(stream.getvalue())
    assert back.equals(record)
    assert all(back.columns[name].equals(column) for name, column in columns.items())


@given(records(format="1.0"))
def test_records_of_1_0_are_written_as_1_0(record: RouteRecord) -> None:
    """``format="1.0"`` draws what that version can say."""
    with new_stream(io.BytesIO(), record.spec, format="1.0") as sink:
        sink.write(record)


# ----------------------------------------------------------------------------------------------------------------------
# Rollouts
# ----------------------------------------------------------------------------------------------------------------------


@given(rollouts())
def test_rollouts_carry_their_truth(rollout: Rollout) -> None:
    """A call's rows are those its forward computed, at the places said; its tokens are those of its segment."""
    for turn in rollout.turns:
        call, token_ids = turn.call, rollout.token_ids[turn.segment]
        placed_SLK = rollout.spec.missing_rows(call.num_tokens)
        if call.routes is not None:
            slots = [rollout.spec.slot(layer) for layer in call.layer_ids or rollout.spec.layer_ids]
            placed_SLK[call.first_row : call.rows_stop, slots] = call.routes

        np.testing.assert_array_equal(np.where(turn.brought_SL[:, :, None], turn.rows_SLK, MISSING), placed_SLK)
        np.testing.assert_array_equal(token_ids[: call.num_tokens], call.token_ids)
        check_routes(turn.rows_SLK, rollout.spec)


@given(rollouts())
def test_the_first_forward_of_a_segment_is_the_truth(rollout: Rollout) -> None:
    """New tokens' rows are the true rows of the segment; what differs is a re-prefill of tokens known before."""
    for index in range(len(rollout.token_ids)):
        known = 0
        for turn in rollout.segment(index):
            np.testing.assert_array_equal(rollout.true_rows(index)[known : len(turn.rows_SLK)], turn.rows_SLK[known:])
            known = len(turn.rows_SLK)


@given(rollouts(breaks=False))
def test_rollouts_without_breaks_extend(rollout: Rollout) -> None:
    """``breaks=False``: one segment, and every prompt begins with all tokens before it, media too."""
    assert 1 == len(rollout.token_ids)
    for before, after in zip(rollout.calls, rollout.calls[1:], strict=False):
        assert before.token_ids.tolist() == after.prompt_ids[: before.num_tokens].tolist()
        assert before.media == after.media[: len(before.media)]


def _overlaps(rollout: Rollout, *, drifting: bool) -> bool:
    for before, after in zip(rollout.turns, rollout.turns[1:], strict=False):
        if before.segment != after.segment:
            continue
        both_SL = before.brought_SL & after.brought_SL[: len(before.brought_SL)]
        ours_SLK, theirs_SLK = before.rows_SLK, after.rows_SLK[: len(before.rows_SLK)]
        differs_SL = (np.sort(ours_SLK, axis=2) != np.sort(theirs_SLK, axis=2)).any(axis=2)
        moved_SL = (ours_SLK != theirs_SLK).any(axis=2) & ~differs_SL
        if (both_SL & (differs_SL if drifting else moved_SL)).any():
            return True
    return False


ROLLOUT_FEATURES: dict[str, Callable[[Rollout], bool]] = {
    "five_turns": lambda rollout: len(rollout.turns) == 5,
    "a_context_break": lambda rollout: len(rollout.token_ids) == 2,
    "no_tokens_generated": lambda rollout: any(not len(call.generation_ids) for call in rollout.calls),
    "no_prompt": lambda rollout: any(not len(call.prompt_ids) for call in rollout.calls),
    "no_routes": lambda rollout: any(call.routes is None for call in rollout.calls),
    "trimmed": lambda rollout: any(
        call.first_row > 0 and not call.rows_stop < call.num_tokens - 1 for call in rollout.calls
    ),
    "last_token_fed": lambda rollout: any(
        len(call.generation_ids) and call.rows_stop == call.num_tokens for call in rollout.calls
    ),
    "a_declared_loss": lambda rollout: any(
        call.rows_stop < call.num_tokens - 1 and call.loss for call in rollout.calls
    ),
    "some_layers": lambda rollout: any(
        (turn.brought_SL.any(1) & ~turn.brought_SL.all(1)).any() for turn in rollout.turns
    ),
    "layers_out_of_order": lambda rollout: any(
        list(call.layer_ids or ()) != sorted(call.layer_ids or ()) for call in rollout.calls
    ),
    "a_prefix_cache": lambda rollout: any(call.cached for call in rollout.calls),
    "a_drifting_prefill": lambda rollout: _overlaps(rollout, drifting=True),
    "a_reordered_prefill": lambda rollout: _overlaps(rollout, drifting=False),
    "media": lambda rollout: any(call.media for call in rollout.calls),
    "columns": lambda rollout: any(call.columns for call in rollout.calls),
    "unknown_weights": lambda rollout: any(call.weights_version is None for call in rollout.calls),
}


@pytest.mark.parametrize("feature", ROLLOUT_FEATURES.values(), ids=ROLLOUT_FEATURES)
def test_every_event_of_a_rollout_comes(feature: Callable[[Rollout], bool]) -> None:
    """Everything that can happen to a rollout is reachable."""
    assert _comes(rollouts(), feature)


# ----------------------------------------------------------------------------------------------------------------------
# Conversations, blocks, sampling masks
# ----------------------------------------------------------------------------------------------------------------------

# What `find` ends at is the simplest example that shows the feature.
_SHRINK = settings(max_examples=500, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


@given(conversations())
def test_conversations_assemble_to_their_truth(conversation: Conversation) -> None:
    """One record, with every token, the true row of all that were fed, and a generated span for each answer."""
    found = assemble(conversation.calls, conversation.spec, sample_id="s", on_missing="raise")
    [record] = found.records

    assert list(conversation.token_ids) == record.token_ids.tolist()
    np.testing.assert_array_equal(conversation.routes[:-1], record.routes[:-1])
    assert [len(ids) for role, ids in conversation.messages if role == "assistant"] == [
        span.stop - span.start for span in record.spans if span.kind == "generation"
    ]


CONVERSATION_FEATURES: dict[str, Callable[[Conversation], bool]] = {
    "a system prompt": lambda one: one.messages[0][0] == "system",
    "a tool": lambda one: any(role == "tool" for role, _ in one.messages),
    "three answers": lambda one: len(one.calls) == 3,
    "rows left out": lambda one: any(call.first_row for call in one.calls),
    "new weights": lambda one: len({call.weights_version for call in one.calls}) > 1,
}


@pytest.mark.parametrize("feature", CONVERSATION_FEATURES.values(), ids=CONVERSATION_FEATURES)
def test_every_kind_of_conversation_comes(feature: Callable[[Conversation], bool]) -> None:
    """Each choice is reachable."""
    assert _comes(conversations(), feature)


def test_conversations_shrink() -> None:
    """A question and an answer of one token each; with a tool, a second pair and nothing else."""
    least = find(conversations(), lambda one: True, settings=_SHRINK)
    with_tool = find(conversations(), lambda one: any(role == "tool" for role, _ in one.messages), settings=_SHRINK)

    assert (("user", (0,)), ("assistant", (0,))) == least.messages
    assert ["user", "assistant", "tool", "assistant"] == [role for role, _ in with_tool.messages]


@settings(max_examples=settings().max_examples // 4)
@given(blocks(), st.data())
def test_blocks_are_whole_streams(block: Block, data: st.DataObject) -> None:
    """They read as what they store, resolve to what they mean, and are refused without their last bytes."""
    sealed = block.sealed()
    stored = list(open_stream(sealed))
    cut = data.draw(st.integers(0, len(sealed) - 9))  # the last eight bytes end Arrow's stream behind our trailer

    assert all(one.equals(other) for one, other in zip(block.stored, stored, strict=True))
    assert all(one.equals(other) for one, other in zip(block.whole, resolve(stored), strict=True))
    with pytest.raises(FormatError):
        list(open_stream(sealed[:cut]))


BLOCK_FEATURES: dict[str, Callable[[Block], bool]] = {
    "a delta": lambda block: any(one.prefix is not None for one in block.stored),
    "a delta of a delta": lambda block: any(
        one.prefix is not None and two.prefix is not None
        for one, two in zip(block.stored, block.stored[1:], strict=False)
    ),
    "two rollouts": lambda block: len({one.sample_id for one in block.stored}) == 2,
    "a column": lambda block: any(one.columns for one in block.stored),
}


@pytest.mark.parametrize("feature", BLOCK_FEATURES.values(), ids=BLOCK_FEATURES)
def test_every_kind_of_block_comes(feature: Callable[[Block], bool]) -> None:
    """Each choice is reachable."""
    assert _comes(blocks(), feature)


@pytest.mark.slow
def test_blocks_shrink() -> None:
    """One record of one token; with a delta, the record before it as well."""
    drawn = blocks(spec=RouteSpec(num_experts=4, top_k=2, layer_ids=(0,)), max_rollouts=1)
    least = find(drawn, lambda block: True, settings=_SHRINK)
    with_delta = find(drawn, BLOCK_FEATURES["a delta"], settings=_SHRINK)

    assert [1] == [one.num_tokens for one in least.stored]
    assert [1, 2] == [one.num_tokens for one in with_delta.stored]


def _masked(token_ids: list[int], prompt: int, columns: dict[str, Any]) -> RouteRecord:
    size = len(token_ids)
    spans = [Span(start=0, stop=prompt, kind="prompt", call="c", weights_version=1)] if prompt else []
    spans += [Span(start=prompt, stop=size, kind="generation", call="c", weights_version=1)] if prompt < size else []
    spec = RouteSpec(num_experts=4, top_k=2, layer_ids=(0,))
    lost = Capture(start=0, stop=size, call="c", weights_version=None, state="lost")
    return RouteRecord(
        sample_id="s",
        token_ids=np.asarray(token_ids),
        routes=spec.missing_rows(size),
        spans=tuple(spans),
        captures=(lost,),
        spec=spec,
        columns=columns,
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.data())
def test_sampling_masks_fit_their_tokens(token_ids: list[int], data: st.DataObject) -> None:
    """A record takes them, and they have no list in the prompt."""
    prompt = data.draw(st.integers(0, len(token_ids)))
    columns = data.draw(sampling_masks(token_ids, prompt=prompt, vocab_size=10))
    record = _masked(token_ids, prompt, columns).verify()

    assert [[]] * prompt == record.columns["sampling_mask"].tolist()[:prompt]
    assert all(ids == [] or max(ids) < 10 for ids in record.columns["sampling_mask"].tolist())


@pytest.mark.parametrize("state", MASK_STATES)
def test_every_state_of_a_mask_comes(state: str) -> None:
    """Each state is reachable, and a list shrinks to the sampled id."""
    code = MASK_STATES.index(state)
    shown = find(
        sampling_masks([7]), lambda columns: columns["sampling_mask_state"].tolist() == [code], settings=_SHRINK
    )

    assert [[7] if state in ("listed", "capped") else []] == shown["sampling_mask"].tolist()
