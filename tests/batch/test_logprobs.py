"""Scores of a batch's tokens against plain softmax over what sampling kept, whole and in shards, with gradients.

Axes: B sequences, S positions, N rows, V vocabulary.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from routeplane import AlignedColumn, RouteRecord, Sampling, Span
from routeplane.batch import (
    BatchOptions,
    MaskCounts,
    RouteBatch,
    Shard,
    collate,
    label_logprobs,
    logprobs,
    microbatches,
    token_entropy,
    token_logprobs,
)
from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.testing.builders import watermarked_record, watermarked_spec

ROOT = Path(__file__).parents[2]
SPEC = watermarked_spec(layers=(0, 2), top_k=2)
VOCAB = 61
LABELS = BatchOptions(labels=True)
STATE = {"unknown": 0, "listed": 1, "full": 2, "capped": 3}


def sampling(**changes: Any) -> Sampling:
    """Of a request with every filter."""
    return Sampling(
        **{"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "logprobs_mode": "processed", **changes}
    )


def rollout(
    index: int,
    prompt: int,
    generated: int,
    *,
    parameters: Sampling | None = None,
    states: tuple[str, ...] = ("listed",),
) -> RouteRecord:
    """A record with sampling masks; the states of its generated tokens go round."""
    rng = np.random.default_rng(index)
    tokens = prompt + generated
    token_ids = rng.integers(0, VOCAB, tokens)
    cycle = [states[at % len(states)] for at in range(generated)]
    lists = [np.empty(0, np.int32)] * prompt
    for at, state in enumerate(cycle):
        others = rng.choice(VOCAB, size=rng.integers(1, 9), replace=False)
        kept = np.union1d(others, token_ids[prompt + at])
        lists.append(kept.astype(np.int32) if state in ("listed", "capped") else np.empty(0, np.int32))
    codes = np.array([0] * prompt + [STATE[state] for state in cycle], dtype=np.uint8)
    made = watermarked_record(index, num_tokens=tokens, spec=SPEC)
    return replace(
        made,
        token_ids=token_ids,
        spans=(
            Span(start=0, stop=prompt, kind="prompt", call="c", weights_version=None),
            Span(
                start=prompt,
                stop=tokens,
                kind="generation",
                call="c",
                weights_version=1,
                sampling=sampling() if parameters is None else parameters,
            ),
        ),
        logprobs=np.where(np.arange(tokens) < prompt, np.nan, -1.5).astype(np.float32),
        columns={
            "sampling_mask": AlignedColumn.of_lists(lists, dtype="int32", aligned="sampled"),
            "sampling_mask_state": AlignedColumn.of(codes, aligned="sampled"),
        },
        checksum=None,
    )


def logits_of(batch: RouteBatch, *, seed: int = 0) -> torch.Tensor:
    """Logits that are a function of sequence and token, so that shards have those of the whole."""
    rows = []
    for record, token in zip(batch.plan.record_N.tolist(), batch.plan.token_N.tolist(), strict=True):
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + 10_007 * (record + 1) + token + 1)
        rows.append(torch.randn(VOCAB, generator=generator, dtype=torch.float64) * 3)
    return torch.stack(rows).float().view(*batch.token_ids.shape, VOCAB)


def states_of(record: RouteRecord) -> np.ndarray[Any, Any]:
    """Code of each token's list."""
    return np.asarray(record.columns["sampling_mask_state"].values)


def plain(logits_NV: torch.Tensor, batch: RouteBatch, records: list[RouteRecord]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies by torch's own softmax over kept logits: what the functions must give."""
    found, entropies = [], []
    for row, (index, token) in enumerate(zip(batch.plan.record_N.tolist(), batch.plan.token_N.tolist(), strict=True)):
        record = None if index < 0 else records[index]
        state = 0 if record is None or token + 1 >= record.num_tokens else int(states_of(record)[token + 1])
        if record is None or state not in (STATE["listed"], STATE["full"]):
            found.append(logits_NV.new_tensor(torch.nan))
            entropies.append(logits_NV.new_tensor(torch.nan))
            continue
        column = record.columns["sampling_mask"]
        assert column.offsets is not None
        kept = column.values[column.offsets[token + 1] : column.offsets[token + 2]]
        scaled = logits_NV[row].double() / 0.8
        if state == STATE["listed"]:
            outside = torch.ones(VOCAB, dtype=torch.bool)
            outside[torch.from_numpy(kept.astype(np.int64))] = False
            scaled = scaled.masked_fill(outside, -torch.inf)
        scores = scaled.log_softmax(0)
        found.append(scores[int(record.token_ids[token + 1])])
        entropies.append(-(scores.exp() * scores.masked_fill(scores.isinf(), 0.0)).sum())
    return torch.stack(found).float(), torch.stack(entropies).float()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to 1e-5, NaN where NaN."""
    torch.testing.assert_close(found.reshape(-1), expected.reshape(-1), rtol=1e-5, atol=1e-5, equal_nan=True)


# ----------------------------------------------------------------------------------------------------------------------
# Scores
# ----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4),
    layout=st.sampled_from(["padded", "packed"]),
    states=st.lists(st.sampled_from(["listed", "full", "unknown", "capped"]), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_scores_and_gradients_are_those_of_a_plain_softmax(
    lengths: list[tuple[int, int]], layout: Any, states: list[str], seed: int
) -> None:
    """Whatever is listed, full or not usable, in either layout."""
    records = [rollout(seed + index, *each, states=tuple(states)) for index, each in enumerate(lengths)]
    batch = collate(records, SPEC, layout=layout, options=replace(LABELS, pad_to_multiple_of=4))
    logits = logits_of(batch, seed=seed).requires_grad_()
    scores, entropies = plain(logits.view(-1, VOCAB), batch, records)
    usable = ~scores.isnan()
    for function, expected in ((label_logprobs, scores), (token_entropy, entropies)):
        found = function(logits, batch, masks="apply").view(-1)
        close(found.detach(), expected.detach())
        if usable.any():
            weights = torch.rand(int(usable.sum()), generator=torch.Generator().manual_seed(seed))
            (own,) = torch.autograd.grad((found[usable] * weights).sum(), logits, retain_graph=True)
            (wanted,) = torch.autograd.grad((expected[usable] * weights).sum(), logits, retain_graph=True)
            close(own, wanted)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at a time, all at once."""
    records = [rollout(index, 3, 9, states=("listed", "full")) for index in range(3)]
    batch = collate(records, SPEC, options=LABELS)
    logits = logits_of(batch).requires_grad_()
    found = []
    for chunk in (1, 3 * VOCAB, 2**24):
        monkeypatch.setattr(logprobs, "_CHUNK", chunk)
        scores = label_logprobs(logits, batch, masks="apply")
        (grad,) = torch.autograd.grad(scores.nansum(), logits)
        found.append((scores.detach(), grad))
    for scores, grad in found[1:]:
        close(scores, found[0][0])
        close(grad, found[0][1])


def test_ignoring_masks_scores_every_token_at_temperature_1() -> None:
    """Prompt tokens too; ``token_logprobs`` is the same moved to the token's own row."""
    records = [rollout(index, 3, 5) for index in range(2)]
    batch = collate(records, SPEC, layout="packed", options=LABELS)
    logits = logits_of(batch)
    found = label_logprobs(logits, batch, masks="ignore")
    plain_NV = logits.log_softmax(-1)
    expected = [
        plain_NV[row, int(batch.token_ids[row + 1])] if row not in (7, 15) else torch.tensor(torch.nan)
        for row in range(16)
    ]
    close(found, torch.stack(expected))
    moved = token_logprobs(logits, batch, masks="ignore")
    close(moved[1:], torch.where(batch.position_ids[1:] > 0, found[:-1], torch.nan))
    without = collate(records, SPEC, layout="packed")
    close(token_logprobs(logits, without), moved)


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and "view" not in str(func):
            self.largest = max(self.largest, out.numel())
        return out


def test_no_tensor_is_larger_than_a_chunk_or_the_listed_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the logits' own gradient."""
    records = [rollout(index, 2, 60, states=("listed", "full")) for index in range(4)]
    batch = collate(records, SPEC, layout="packed", options=LABELS)
    logits = logits_of(batch)
    monkeypatch.setattr(logprobs, "_CHUNK", 4 * VOCAB)
    listed = len(batch.column_parts["label_sampling_mask"].values)
    with _Sizes() as sizes:  # type: ignore[no-untyped-call]
        label_logprobs(logits, batch, masks="apply")
    assert sizes.largest <= max(4 * VOCAB, listed, batch.num_rows)


# ----------------------------------------------------------------------------------------------------------------------
# Controls: what a wrong use would give
# ----------------------------------------------------------------------------------------------------------------------


def _k3(logratio: torch.Tensor) -> float:
    return float((logratio.exp() - 1 - logratio).mean())


@pytest.mark.parametrize("control", ["mask one position late", "temperature ignored", "penalty ignored", "raw scores"])
def test_each_wrong_use_raises_the_mismatch_tenfold(control: str) -> None:
    """Against engine scores made from the same logits, every sampled token is within 1e-4; the control is not."""
    penalty = control == "penalty ignored"
    parameters = sampling(presence_penalty=1.5) if penalty else sampling()
    records = [rollout(index, 4, 40, parameters=parameters) for index in range(8)]
    batch = collate(records, SPEC, options=LABELS)
    logits = logits_of(batch)
    engine_logits = logits
    if penalty:
        engine_logits = logits.clone()
        engine_logits[..., ::3] -= 1.5
    engine, _ = plain(engine_logits.view(-1, VOCAB), batch, records)
    sampled = batch.columns["label_mask"].view(-1)
    right = label_logprobs(engine_logits, batch, masks="apply", changed_logits="applied").view(-1)
    assert (right - engine)[sampled].abs().max() <= 1e-4
    if control == "mask one position late":
        late = batch.column_parts["label_sampling_mask"]
        offsets = late.offsets
        assert offsets is not None
        rolled = torch.cat([offsets[:1], offsets])[: len(offsets)].clone()
        moved = replace(late, offsets=rolled)
        wrong_batch = replace(batch, column_parts={**batch.column_parts, "label_sampling_mask": moved})
        wrong = label_logprobs(logits, wrong_batch, masks="apply").view(-1)
    elif control == "temperature ignored":
        ones = {**batch.columns, "label_temperature": torch.ones_like(batch.columns["label_temperature"])}
        wrong = label_logprobs(logits, replace(batch, columns=ones), masks="apply").view(-1)
    elif penalty:
        assert label_logprobs(logits, batch, masks="apply").isnan().all()  # not scored unless applied
        wrong = label_logprobs(logits, batch, masks="apply", changed_logits="applied").view(-1)
    else:
        wrong = label_logprobs(logits, batch, masks="ignore").view(-1)
    finite = sampled & wrong.isfinite()
    assert _k3((wrong - engine)[finite]) >= 10 * max(_k3((right - engine)[sampled]), 1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused and counted
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (sampling(), MaskCounts(listed=2, full=1, unmasked=2)),
        (sampling(temperature=None), MaskCounts(unknown=5)),
        (sampling(temperature=0.0), MaskCounts(greedy=5)),
        (sampling(logprobs_mode="raw"), MaskCounts(raw=5)),
        (sampling(top_p=1.0, top_k=0), MaskCounts(full=5)),
        (sampling(repetition_penalty=1.1), MaskCounts(listed=2, full=1, unmasked=2, changed=5)),
        (sampling(logit_bias="d1"), MaskCounts(listed=2, full=1, unmasked=2, changed=5)),
        (sampling(processors=("grammar",)), MaskCounts(listed=2, full=1, unmasked=2, changed=5)),
    ],
    ids=["as sampled", "no temperature", "greedy", "raw", "nothing filtered", "penalty", "bias", "processor"],
)
def test_tokens_are_counted_by_how_they_can_be_scored(parameters: Sampling, expected: MaskCounts) -> None:
    """Each sampled token once."""
    record = rollout(0, 3, 5, parameters=parameters, states=("listed", "full", "unknown", "capped", "listed"))
    batch = collate([record], SPEC, options=LABELS)
    assert expected == batch.mask_counts()
    refused = expected.greedy or expected.raw
    if refused:
        with pytest.raises(DataError) as caught:
            label_logprobs(logits_of(batch), batch, masks="apply")
        assert ErrorKind.TOKEN_COLUMN == caught.value.kind
    else:
        scored = int((~label_logprobs(logits_of(batch), batch, masks="apply").isnan()).sum())
        assert scored == (0 if expected.changed else expected.full + expected.listed)


def test_tokens_are_counted_on_the_host_before_a_batch_moves() -> None:
    """A device without memory cannot be asked: nothing is copied from it to count."""
    batch = collate([rollout(0, 4, 4, states=("listed", "unknown"))], SPEC, options=LABELS)
    assert batch.to("meta").mask_counts() == batch.mask_counts()
    assert batch.shard(context_parallel=(1, 2)).mask_counts() != batch.mask_counts()


def test_a_share_without_masks_is_refused() -> None:
    """By the bound that the caller names."""
    counts = collate([rollout(0, 3, 4, states=("listed", "unknown"))], SPEC, options=LABELS).mask_counts()
    counts.require(max_unmasked=0.5)
    with pytest.raises(DataError, match=r"50\.00%"):
        counts.require(max_unmasked=0.4)
    assert counts.scalars(prefix="")["mask_unmasked_share"] == 0.5


def test_processed_scores_ask_for_a_choice() -> None:
    """Scores over the whole vocabulary are not compared with processed ones by default."""
    batch = collate([rollout(0, 3, 4)], SPEC, options=LABELS)
    with pytest.raises(UsageError, match="masks='apply'"):
        label_logprobs(logits_of(batch), batch)
    with pytest.raises(UsageError, match="labels=True"):
        label_logprobs(logits_of(batch), collate([rollout(0, 3, 4)], SPEC), masks="apply")
    with pytest.raises(UsageError, match="labels=True"):
        token_logprobs(logits_of(batch), collate([rollout(0, 3, 4)], SPEC), masks="apply")


@pytest.mark.parametrize("turn", [lambda found: found.transpose(0, 1), lambda found: found.numpy()])
def test_logits_in_another_order_are_refused(turn: Any) -> None:
    """Sequences in the second axis have as many rows, and belong to other tokens."""
    batch = collate([rollout(0, 3, 4), rollout(1, 3, 4)], SPEC)
    with pytest.raises(UsageError, match="expected logits"):
        token_logprobs(turn(torch.zeros(*batch.token_ids.shape, 99)), batch)


def test_a_column_of_a_label_s_name_is_refused() -> None:
    """It would be overwritten."""
    record = rollout(0, 3, 4)
    taken = replace(record, columns={**record.columns, "labels": np.zeros(7, np.int64)}, checksum=None)
    with pytest.raises(DataError, match="labels"):
        collate([taken], SPEC, options=LABELS)


# ----------------------------------------------------------------------------------------------------------------------
# Cuts
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context_layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_context_parallel_ranks_score_every_token_once(layout: Any, context_layout: Any) -> None:
    """The tokens at the edges of chunks too, cut from records or from the whole batch."""
    records = [rollout(index, 3, 4 + 5 * index) for index in range(3)]
    whole = collate(records, SPEC, layout=layout, options=replace(LABELS, pad_to_multiple_of=8))
    expected = label_logprobs(logits_of(whole), whole, masks="apply").view(-1)
    by_token = dict(zip(zip(whole.plan.record_N, whole.plan.token_N, strict=True), expected.tolist(), strict=True))
    for made in ("from records", "from the batch"):
        found = {}
        for rank in range(2):
            shard = Shard(context_parallel=(rank, 2), context_layout=context_layout)
            if made == "from records":
                part = collate(records, SPEC, layout=layout, options=replace(LABELS, pad_to_multiple_of=8), shard=shard)
            else:
                part = whole.shard(context_parallel=(rank, 2), context_layout=context_layout)
            scores = label_logprobs(logits_of(part), part, masks="apply").view(-1)
            places = zip(part.plan.record_N, part.plan.token_N, strict=True)
            for place, score in zip(places, scores.tolist(), strict=True):
                if not np.isnan(score):
                    assert place not in found
                    found[place] = score
        wanted = {place: score for place, score in by_token.items() if not np.isnan(score)}
        assert len(wanted) == sum(record.num_tokens - 3 for record in records)
        assert wanted.keys() == found.keys()
        assert all(abs(wanted[place] - found[place]) < 1e-5 for place in wanted)


def test_truncation_takes_the_label_off_the_last_kept_token() -> None:
    """Its next token is not in the batch."""
    batch = collate([rollout(0, 3, 6)], SPEC, options=BatchOptions(labels=True, max_length=5, truncate="right"))
    assert batch.columns["labels"][0].tolist() == [*rollout(0, 3, 6).token_ids[1:5].tolist(), -100]
    assert batch.columns["label_mask"][0].tolist() == [False, False, True, True, False]
    assert 2 == batch.mask_counts().listed


def test_batches_of_padding_have_labels_too() -> None:
    """None of them is scored."""
    records = [rollout(0, 3, 4)]
    first, padding = microbatches(records, tokens=16, spec=SPEC, batches=2, options=LABELS)
    assert {*first.columns, *first.column_parts} == {*padding.columns, *padding.column_parts}
    assert sorted(set(padding.columns["labels"].view(-1).tolist())) == [-100]
    assert label_logprobs(logits_of(padding), padding, masks="apply").isnan().all()
    (alone,) = microbatches([], tokens=16, spec=SPEC, batches=1, options=LABELS)
    assert label_logprobs(logits_of(alone), alone, masks="ignore").isnan().all()


TWO_RANKS = """
import sys
import torch
import torch.distributed as dist
from dataclasses import replace
from routeplane.batch import Shard, VocabShard, collate, label_logprobs, token_entropy
from tests.batch.test_logprobs import LABELS, SPEC, VOCAB, logits_of, rollout

rank, where = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{where}/ranks", rank=rank, world_size=2)


def compare():
    records = [rollout(index, 3, 9, states=("listed", "full")) for index in range(3)]
    batch = collate(records, SPEC, options=LABELS)
    whole = logits_of(batch).requires_grad_()
    cut = 23
    own = slice(0, cut) if rank == 0 else slice(cut, VOCAB)
    part = whole.detach()[..., own].clone().requires_grad_()
    vocab = VocabShard(start=own.start, group=dist.group.WORLD)
    for function in (label_logprobs, token_entropy):
        expected, found = function(whole, batch, masks="apply"), function(part, batch, masks="apply", vocab=vocab)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert int((~found.isnan()).sum()) == 27
        (wanted,) = torch.autograd.grad(expected.nansum(), whole)
        (grad,) = torch.autograd.grad(found.nansum(), part)
        torch.testing.assert_close(grad, wanted[..., own], rtol=1e-5, atol=1e-5)

    # context parallel: each rank scores the rows that it has; together they are all tokens, each once
    options = replace(LABELS, pad_to_multiple_of=8)
    packed = collate(records, SPEC, layout="packed", options=options)
    expected = label_logprobs(logits_of(packed), packed, masks="apply")
    own = collate(records, SPEC, layout="packed", options=options, shard=Shard(context_parallel=(rank, 2)))
    scores = label_logprobs(logits_of(own), own, masks="apply")
    placed = torch.zeros(3, 16, dtype=torch.float64)
    counts = torch.zeros(3, 16, dtype=torch.int64)
    for record, token, score in zip(own.plan.record_N, own.plan.token_N, scores.tolist(), strict=True):
        if score == score:
            placed[record, token] += score
            counts[record, token] += 1
    dist.all_reduce(placed)
    dist.all_reduce(counts)
    assert int(counts.max()) == 1 and int(counts.sum()) == 27
    for record, token, score in zip(packed.plan.record_N, packed.plan.token_N, expected.tolist(), strict=True):
        if score == score:
            assert abs(score - placed[record, token]) < 1e-5


compare()  # what it leaves behind would hold the group, and its threads, until the process ends
dist.destroy_process_group()
"""


def test_two_ranks_of_the_vocabulary_and_of_the_context_score_as_one(tmp_path: Path) -> None:
    """Over gloo: vocabulary-parallel with gradients, where a list may lie on one rank alone; and zigzag chunks."""
    command = [sys.executable, "-c", TWO_RANKS]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=120)
        assert 0 == rank.returncode, said
