"""Log-probabilities and entropies of a batch's tokens, as their policy sampled them or over the whole vocabulary.

One function scores the current, the proximal and the reference policy: divide by the span's temperature, then restrict
the softmax to the ids that sampling kept. Beyond the logits and their gradient no more is allocated than the listed
ids and one chunk. Knows batches and torch; no model.

Axes: N rows of a batch in gate order, M rows that are scored, E listed ids of all of them, V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from routeplane.batch.batch import RouteBatch
from routeplane.batch.columns import CHANGED_LOGITS, NO_LABEL, USES
from routeplane.errors import DataError, ErrorKind, check_type, refused

__all__ = ["VocabShard", "label_logprobs", "token_entropy", "token_logprobs"]

#: Logits that are widened to float32 at a time: 64 MiB.
_CHUNK = 2**24

Masks = Literal["apply", "ignore"]


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabShard:
    """The part of the vocabulary that this rank's logits cover: ids ``[start, start + V)`` of ``group``'s ranks.

    Every rank of the group scores the same rows. ``group``: a ``torch.distributed`` process group.

    >>> VocabShard(start=0, group=None).start  # the default group
    0
    """

    start: int
    group: Any


def token_logprobs(
    logits: torch.Tensor,
    batch: RouteBatch,
    *,
    masks: Masks | None = None,
    vocab: VocabShard | None = None,
    changed_logits: Literal["skip", "applied"] = "skip",
) -> torch.Tensor:
    """Score every token given those before it: float32, shaped like ``batch.token_ids``. Differentiable.

    ``logits``: ``[..., V]`` with the batch's N rows in gate order, as a model answers ``batch.model_inputs()``. NaN at
    first tokens and at padding, as in ``batch.logprobs``, and where the token before is not among the rows though the
    record has it (truncation from the left dropped it, another rank has it; ``label_logprobs`` scores that one too):
    pick with a mask, never multiply by one (0 * NaN is NaN). ``masks``, ``vocab``, ``changed_logits``: as in
    ``label_logprobs``; a batch without labels is scored over the whole vocabulary at temperature 1.

    Raises UsageError (ARGUMENT) for logits of another shape or a vocabulary that lacks a token; DataError as
    ``label_logprobs``.

    >>> import torch
    >>> from routeplane.batch import collate
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> batch = collate([watermarked_record(0, num_tokens=3, spec=spec)], spec)
    >>> found = token_logprobs(torch.zeros(1, 3, 2**16), batch)
    >>> [round(value, 3) for value in found[0].tolist()]
    [nan, -11.09, -11.09]
    """
    _check_arguments(logits, batch)
    before_N = torch.from_numpy(batch.plan.predecessors()).to(logits.device)
    rows = torch.nonzero(before_N >= 0)[:, 0]
    if "labels" in batch.columns:
        scored = label_logprobs(logits, batch, masks=masks, vocab=vocab, changed_logits=changed_logits).reshape(-1)
        found_N = torch.full_like(scored, torch.nan)
        return found_N.index_copy(0, rows, scored[before_N[rows]]).view(batch.token_ids.shape)
    if masks == "apply":
        raise refused("a batch with labels to apply masks to (BatchOptions(labels=True))", "one without")
    flat_NV = _flat(logits, batch)
    targets = batch.token_ids.reshape(-1).to(logits.device)[rows]
    work = _Work(rows=before_N[rows], targets=targets, scale=torch.ones(len(rows), device=logits.device), vocab=vocab)
    _check_targets(work, flat_NV)
    found_N = torch.full((batch.num_rows,), torch.nan, dtype=torch.float32, device=logits.device)
    return found_N.index_copy(0, rows, _logprobs(flat_NV, work)).view(batch.token_ids.shape)


def label_logprobs(
    logits: torch.Tensor,
    batch: RouteBatch,
    *,
    masks: Masks | None = None,
    vocab: VocabShard | None = None,
    changed_logits: Literal["skip", "applied"] = "skip",
) -> torch.Tensor:
    """Score the label of every row, on the rank that has the row's logits: float32 ``[...]``. Differentiable.

    Args:
        logits: ``[..., V]`` of the batch's N rows in gate order; of ``vocab``'s part of the vocabulary.
        batch: One of ``BatchOptions(labels=True)``; ``batch.columns["label_mask"]`` picks the sampled tokens.
        masks: ``apply`` scores sampled tokens as their policy sampled them: logits over the span's temperature, softmax
            over the ids that sampling kept; other tokens get NaN. ``ignore`` scores all tokens over the whole
            vocabulary at temperature 1. Has to be said where the batch's log-probabilities are processed ones.
        vocab: This rank's part of vocabulary-parallel logits; None: all of it.
        changed_logits: Tokens whose logits penalties, biases or processors changed get NaN (``skip``), unless the
            caller applied them to ``logits`` (``applied``).

    Returns:
        NaN where a row has no label, and, under ``apply``, where a token cannot be scored as it was sampled
        (``batch.mask_counts()`` says how many). Raises UsageError (ARGUMENT); DataError (TOKEN_COLUMN) under ``apply``
        for tokens of temperature 0, and for records with raw log-probabilities, which such scores must not be compared
        with.

    >>> import torch
    >>> from routeplane.batch import BatchOptions, collate
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> batch = collate([watermarked_record(0, num_tokens=3, spec=spec)], spec, options=BatchOptions(labels=True))
    >>> found = label_logprobs(torch.zeros(1, 3, 2**16), batch, masks="ignore")
    >>> [round(value, 3) for value in found[0].tolist()]
    [-11.09, -11.09, nan]
    """
    flat_NV = _flat(logits, batch)
    work, rows = _work(batch, flat_NV, masks, vocab, changed_logits)
    _check_targets(work, flat_NV)
    found_N = torch.full((batch.num_rows,), torch.nan, dtype=torch.float32, device=logits.device)
    return found_N.index_copy(0, rows, _logprobs(flat_NV, work)).view(batch.token_ids.shape)


def token_entropy(
    logits: torch.Tensor, batch: RouteBatch, *, masks: Masks | None = None, vocab: VocabShard | None = None
) -> torch.Tensor:
    """Compute the entropy of the distribution that each row's label comes from, in nats: float32 ``[...]``.

    Arguments, NaN and errors as in ``label_logprobs``: under ``masks="apply"`` the distribution is the one that was
    sampled from. Differentiable.

    >>> import torch
    >>> from routeplane.batch import BatchOptions, collate
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> batch = collate([watermarked_record(0, num_tokens=2, spec=spec)], spec, options=BatchOptions(labels=True))
    >>> round(token_entropy(torch.zeros(1, 2, 2**16), batch, masks="ignore")[0, 0].item(), 3)
    11.09
    """
    flat_NV = _flat(logits, batch)
    work, rows = _work(batch, flat_NV, masks, vocab, "skip")
    found_N = torch.full((batch.num_rows,), torch.nan, dtype=torch.float32, device=logits.device)
    return found_N.index_copy(0, rows, _entropy(flat_NV, work)).view(batch.token_ids.shape)


# ----------------------------------------------------------------------------------------------------------------------
# What is scored
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Lists:
    """The positions in M of rows that are scored over a list; all listed ids, and whose each is; int64.

    ``owner``: the position in ``at`` of each of the E ids.
    """

    at: torch.Tensor
    ids: torch.Tensor
    owner: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        """The position in M that each id belongs to: int64 ``[E]``."""
        return self.at[self.owner]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Work:
    """M rows to score: where their logits stand, int64; their tokens, int64; one over their temperature, float32."""

    rows: torch.Tensor
    targets: torch.Tensor
    scale: torch.Tensor
    vocab: VocabShard | None
    lists: _Lists | None = None

    def dense(self) -> torch.Tensor:
        """The positions in M of rows that are scored over the whole vocabulary."""
        every = torch.arange(len(self.rows), device=self.rows.device)
        if self.lists is None:
            return every
        rest = torch.ones(len(every), dtype=torch.bool, device=every.device)
        rest[self.lists.at] = False
        return every[rest]


def _check_arguments(logits: torch.Tensor, batch: RouteBatch) -> None:
    check_type(logits, torch.Tensor, expected="logits as a tensor")
    check_type(batch, RouteBatch, expected="a RouteBatch")


def _flat(logits: torch.Tensor, batch: RouteBatch) -> torch.Tensor:
    _check_arguments(logits, batch)
    shape = [size for size in batch.token_ids.shape if size != 1]
    rows = [size for size in logits.shape[:-1] if size != 1]
    if logits.ndim < 2 or rows not in (shape, [size for size in [batch.num_rows] if size != 1]):
        raise refused(
            f"logits of {batch.num_rows} rows, {[*batch.token_ids.shape, 'V']}", f"shape {list(logits.shape)}"
        )
    return logits.reshape(batch.num_rows, -1)


def _check_targets(work: _Work, flat_NV: torch.Tensor) -> None:
    last = int(work.targets.max()) if work.vocab is None and len(work.targets) else 0
    if work.vocab is None and last >= flat_NV.shape[1]:
        raise refused(f"logits over more than {last} tokens", f"{flat_NV.shape[1]}")


def _work(
    batch: RouteBatch,
    flat_NV: torch.Tensor,
    masks: Masks | None,
    vocab: VocabShard | None,
    changed_logits: str,
) -> tuple[_Work, torch.Tensor]:
    """What is scored, and the rows where it is written."""
    if "labels" not in batch.columns:
        raise refused("a batch with labels (BatchOptions(labels=True))", "one without")
    if masks not in ("apply", "ignore", None) or changed_logits not in ("skip", "applied"):
        raise refused("masks of apply, ignore; changed_logits of skip, applied", f"{masks!r}, {changed_logits!r}")
    device = flat_NV.device
    labels_N = batch.columns["labels"].reshape(-1).to(device)
    if masks is None:
        _check_said(batch)
    if masks != "apply":
        rows = torch.nonzero(labels_N != NO_LABEL)[:, 0]
        return _Work(rows=rows, targets=labels_N[rows], scale=torch.ones(len(rows), device=device), vocab=vocab), rows
    use_N = batch.columns["label_use"].reshape(-1).to(device).long()
    _check_comparable(batch)
    base_N = use_N % CHANGED_LOGITS
    wanted_N = (base_N == USES.index("full")) | (base_N == USES.index("listed"))
    if changed_logits == "skip":
        wanted_N &= use_N < CHANGED_LOGITS
    rows = torch.nonzero(wanted_N)[:, 0]
    scale = 1.0 / batch.columns["label_temperature"].reshape(-1).to(device)[rows]
    lists = _lists(batch, rows, torch.nonzero(base_N[rows] == USES.index("listed"))[:, 0])
    return _Work(rows=rows, targets=labels_N[rows], scale=scale, vocab=vocab, lists=lists), rows


def _lists(batch: RouteBatch, rows: torch.Tensor, listed: torch.Tensor) -> _Lists | None:
    if len(listed) == 0:
        return None
    parts = batch.column_parts["label_sampling_mask"].map(lambda tensor: tensor.to(rows.device))
    taken = parts.take(rows[listed], lambda values: values)
    owner = torch.repeat_interleave(torch.arange(len(listed), device=rows.device), taken.counts())
    return _Lists(at=listed, ids=taken.values.long(), owner=owner)


def _check_said(batch: RouteBatch) -> None:
    """Raise where scores over the whole vocabulary would be compared with processed log-probabilities unsaid."""
    counts = batch.mask_counts()
    if counts.full + counts.listed + counts.unmasked and not bool(torch.isnan(batch.columns["label_logprobs"]).all()):
        raise refused("masks='apply' or masks='ignore' for a batch with processed log-probabilities", "neither")


def _check_comparable(batch: RouteBatch) -> None:
    counts = batch.mask_counts()
    if counts.greedy or counts.raw:
        raise DataError(
            "expected tokens sampled at a temperature above 0, with processed log-probabilities, to apply masks to, "
            f"got {counts.greedy} of temperature 0 and {counts.raw} with raw ones",
            kind=ErrorKind.TOKEN_COLUMN,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Softmax by pieces
# ----------------------------------------------------------------------------------------------------------------------


def _logprobs(flat_NV: torch.Tensor, work: _Work) -> torch.Tensor:
    found: torch.Tensor = _Logprobs.apply(flat_NV, work)  # type: ignore[no-untyped-call]
    return found


def _entropy(flat_NV: torch.Tensor, work: _Work) -> torch.Tensor:
    found: torch.Tensor = _Entropy.apply(flat_NV, work)  # type: ignore[no-untyped-call]
    return found


def _chunks(work: _Work, vocabulary: int) -> Iterator[torch.Tensor]:
    """The positions of rows that are scored densely, so many at a time that their logits fill a chunk."""
    dense = work.dense()
    step = max(1, _CHUNK // max(vocabulary, 1))
    yield from (dense[start : start + step] for start in range(0, len(dense), step))


def _scaled(flat_NV: torch.Tensor, work: _Work, at: torch.Tensor) -> torch.Tensor:
    return flat_NV[work.rows[at]].float().mul_(work.scale[at, None])


def _own_ids(work: _Work, ids: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids as columns of this rank's logits, clamped; and which of them are there."""
    if work.vocab is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    local = ids - work.vocab.start
    return local.clamp(0, vocabulary - 1), (local >= 0) & (local < vocabulary)


def _kept(flat_NV: torch.Tensor, work: _Work, lists: _Lists) -> tuple[torch.Tensor, torch.Tensor]:
    """The scaled logits of all listed ids ``[E]``, -inf where another rank has them; and their columns."""
    columns, here = _own_ids(work, lists.ids, flat_NV.shape[1])
    values = flat_NV[work.rows[lists.positions], columns].float() * work.scale[lists.positions]
    return values.masked_fill(~here, -torch.inf), columns


def _log_sum_exp(flat_NV: torch.Tensor, work: _Work) -> torch.Tensor:
    """``[M]``, over all ranks of the vocabulary."""
    found = torch.empty(len(work.rows), dtype=torch.float32, device=flat_NV.device)
    for at in _chunks(work, flat_NV.shape[1]):
        found[at] = _scaled(flat_NV, work, at).logsumexp(dim=1)
    if work.lists is not None:
        owner = work.lists.owner
        values, _ = _kept(flat_NV, work, work.lists)
        top = torch.full((len(work.lists.at),), -torch.inf, device=flat_NV.device)
        top = top.scatter_reduce(0, owner, values, "amax")
        shift = torch.where(top.isinf(), 0.0, top)  # no id of the list is on this rank
        sums = torch.zeros_like(top).index_add_(0, owner, (values - shift[owner]).exp())
        found[work.lists.at] = sums.log() + shift
    if work.vocab is None:
        return found
    top = _reduced(found.clone(), work.vocab, dist.ReduceOp.MAX)
    return _reduced((found - top).exp(), work.vocab, dist.ReduceOp.SUM).log() + top


def _reduced(values: torch.Tensor, vocab: VocabShard, how: Any) -> torch.Tensor:
    dist.all_reduce(values, op=how, group=vocab.group)
    return values


class _Logprobs(torch.autograd.Function):
    """``[M]`` log-probabilities of ``work.targets``; one gradient of the logits, made by pieces."""

    @staticmethod
    def forward(ctx: Any, flat_NV: torch.Tensor, work: _Work) -> torch.Tensor:
        total = _log_sum_exp(flat_NV, work)
        columns, here = _own_ids(work, work.targets, flat_NV.shape[1])
        picked = torch.where(here, flat_NV[work.rows, columns].float() * work.scale, 0.0)
        if work.vocab is not None:
            picked = _reduced(picked, work.vocab, dist.ReduceOp.SUM)
        ctx.save_for_backward(flat_NV, total)
        ctx.work = work
        return picked - total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        flat_NV, total = ctx.saved_tensors
        work: _Work = ctx.work
        out = torch.zeros_like(flat_NV)
        grad = grad * work.scale
        for at in _chunks(work, flat_NV.shape[1]):
            share = _scaled(flat_NV, work, at).sub_(total[at, None]).exp_()
            out[work.rows[at]] = share.mul_(-grad[at, None]).to(out.dtype)
        if work.lists is not None:
            at = work.lists.positions
            values, columns = _kept(flat_NV, work, work.lists)
            share = (values - total[at]).exp() * -grad[at]
            out.index_put_((work.rows[at], columns), share.to(out.dtype), accumulate=True)
        columns, here = _own_ids(work, work.targets, flat_NV.shape[1])
        out.index_put_((work.rows, columns), torch.where(here, grad, 0.0).to(out.dtype), accumulate=True)
        return out, None


class _Entropy(torch.autograd.Function):
    """``[M]`` entropies: the log of the sum, less the expectation of the scaled logits."""

    @staticmethod
    def forward(ctx: Any, flat_NV: torch.Tensor, work: _Work) -> torch.Tensor:
        total = _log_sum_exp(flat_NV, work)
        mean = torch.zeros_like(total)
        for at in _chunks(work, flat_NV.shape[1]):
            values = _scaled(flat_NV, work, at)
            mean[at] = ((values - total[at, None]).exp() * values).sum(dim=1)
        if work.lists is not None:
            at = work.lists.positions
            values, _ = _kept(flat_NV, work, work.lists)
            mean.index_add_(0, at, (values - total[at]).exp() * values.masked_fill(values.isinf(), 0.0))
        if work.vocab is not None:
            mean = _reduced(mean, work.vocab, dist.ReduceOp.SUM)
        ctx.save_for_backward(flat_NV, total, mean)
        ctx.work = work
        return total - mean

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        flat_NV, total, mean = ctx.saved_tensors
        work: _Work = ctx.work
        out = torch.zeros_like(flat_NV)
        grad = grad * work.scale
        for at in _chunks(work, flat_NV.shape[1]):
            values = _scaled(flat_NV, work, at)
            share = (values - total[at, None]).exp()
            out[work.rows[at]] = (share * (mean[at, None] - values) * grad[at, None]).to(out.dtype)
        if work.lists is not None:
            at = work.lists.positions
            values, columns = _kept(flat_NV, work, work.lists)
            share = (values - total[at]).exp() * (mean[at] - values.masked_fill(values.isinf(), 0.0)) * grad[at]
            out.index_put_((work.rows[at], columns), share.to(out.dtype), accumulate=True)
        return out, None
