"""Routers that were never seen before: five that obey are attached to, five that do not are refused by what they do.

Axes: N token rows, E experts, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from routeplane.errors import ErrorKind, ReplayError
from routeplane.record.spec import RouteSpec
from routeplane.replay import transformers as gates
from routeplane.testing.contracts.replay_contract import rows_batch, unlike_rows

EXPERTS, TOP_K, WIDTH = 8, 2, 16
TOKENS = torch.arange(3, 11)[None]


class Experts(nn.Module):
    """Eight small networks in one tensor, of which each row uses those that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, hidden_NH: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the experts' outputs."""
        inner_NKH = torch.einsum("nh,nkhf->nkf", hidden_NH, self.up[ids_NK]).relu()
        return torch.einsum("nkf,nkfh,nk->nh", inner_NKH, self.down[ids_NK], weights_NK)


class Selector(nn.Module):
    """A linear router; ``choose`` is what a test is about."""

    def __init__(self, choose: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.bias = nn.Buffer(torch.randn(EXPERTS) / 4)
        self.top_k, self.num_experts = TOP_K, EXPERTS
        self.choose = choose

    def forward(self, hidden_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights ``[N, K]``."""
        ids_NK, weights_NK = self.choose(self, self.projection(hidden_NH))
        return ids_NK, weights_NK


class Mixture(nn.Module):
    """One block of experts behind one router."""

    def __init__(self, choose: Callable[..., Any], experts: nn.Module) -> None:
        super().__init__()
        self.selector = Selector(choose)
        self.experts = experts

    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        """Added to what comes."""
        flat_NH = hidden_BSH.flatten(0, 1)
        ids_NK, weights_NK = self.selector(flat_NH)
        added: torch.Tensor = self.experts(flat_NH, ids_NK, weights_NK)
        return hidden_BSH + added.view_as(hidden_BSH)


class Tiny(nn.Module):
    """An embedding and two blocks."""

    def __init__(self, choose: Callable[..., Any], experts: type[nn.Module] = Experts) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Mixture(choose, experts()) for _ in range(2)])

    def forward(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        """Hidden states."""
        hidden: torch.Tensor = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


SPEC = RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=(0, 1), model="tiny")


# ---- five that obey -------------------------------------------------------------------------------------------------


def group_limited(self: Selector, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of the best two of four groups."""
    scores_NE = logits_NE.softmax(-1)
    groups_NGM = scores_NE.view(-1, 4, 2)
    best_N2 = groups_NGM.amax(-1).topk(2, dim=-1).indices
    mask_NG = torch.zeros(len(scores_NE), 4).scatter(1, best_N2, 1.0)
    masked_NE = scores_NE.masked_fill(mask_NG[..., None].expand(-1, -1, 2).reshape(-1, EXPERTS) == 0, 0.0)
    weights_NK, ids_NK = torch.topk(masked_NE, self.top_k, dim=-1)
    return ids_NK, weights_NK


def sigmoid_with_bias(self: Selector, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A bias for the choice; renormalised unbiased weights."""
    scores_NE = logits_NE.sigmoid()
    ids_NK = (scores_NE + self.bias).topk(self.top_k, dim=-1, sorted=False).indices
    weights_NK = scores_NE.gather(1, ids_NK)
    return ids_NK, weights_NK / weights_NK.sum(-1, keepdim=True)


def sparse_mixer(self: Selector, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best, and the best of the others."""
    ids, weights, left_NE = [], [], logits_NE
    for _ in range(self.top_k):
        _, best_N1 = left_NE.max(dim=-1, keepdim=True)
        ids.append(best_N1)
        weights.append(left_NE.softmax(-1).gather(1, best_N1))
        left_NE = left_NE.scatter(1, best_N1, -torch.inf)
    return torch.cat(ids, -1), torch.cat(weights, -1)


def scatter(self: Selector, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense scores that are zero beside the chosen experts; every expert is multiplied by its own."""
    best_NK, ids_NK = torch.topk(logits_NE, self.top_k, dim=1)
    dense_NE = torch.full_like(logits_NE, -torch.inf).scatter(1, ids_NK, best_NK).sigmoid()
    return torch.arange(EXPERTS).expand(len(logits_NE), -1), dense_NE


def softmax_of_chosen(self: Selector, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A softmax over the K."""
    best_NK, ids_NK = logits_NE.topk(self.top_k)
    return ids_NK, best_NK.softmax(-1)


@pytest.mark.parametrize("choose", [group_limited, sigmoid_with_bias, sparse_mixer, scatter, softmax_of_chosen])
def test_a_router_that_obeys_is_attached_to(choose: Callable[..., Any]) -> None:
    """Its own rows change nothing, others are used, and gradients reach it."""
    torch.manual_seed(0)
    model = Tiny(choose)
    live = model(TOKENS)
    with gates.attach(model, SPEC) as handle:
        with handle.recording(None) as recorded:
            assert torch.equal(live, model(TOKENS))
        with handle.replaying(recorded):
            assert torch.equal(live, model(TOKENS))
        with handle.replaying(unlike_rows(SPEC, TOKENS.numel(), seed=5)):
            forced = model(TOKENS)
        torch.autograd.backward(forced.square().sum())
    assert not torch.equal(live, forced)
    for layer in model.layers:
        gradient = layer.get_submodule("selector.projection").get_parameter("weight").grad
        assert gradient is not None
        assert bool(gradient.any())
    ids = {layer: recorded.layer(layer).long() for layer in SPEC.layer_ids}
    assert handle.report().gates[0].forced_rows == 2 * TOKENS.numel()
    assert rows_batch(SPEC, ids).num_rows == TOKENS.numel()


# ---- five that do not -----------------------------------------------------------------------------------------------


class SecondSelection(Experts):
    """Chooses again, by the weights."""

    def forward(self, hidden_NH: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """Of the first expert's view."""
        own_NE = torch.einsum("nh,ehf->nef", hidden_NH, self.up).sum(-1)
        return super().forward(hidden_NH, own_NE.topk(TOP_K).indices, weights_NK)


def ignored_ids(self: Selector, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls topk and uses a sort."""
    logits_NE.topk(self.top_k)
    best_NE, order_NE = logits_NE.sort(dim=-1, descending=True)
    return order_NE[:, : self.top_k], best_NE[:, : self.top_k].softmax(-1)


class Capacity(Experts):
    """Drops what an expert gets beyond four rows."""

    def forward(self, hidden_NH: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """Later rows lose."""
        chosen_NKE = nn.functional.one_hot(ids_NK, EXPERTS)
        place_NE = chosen_NKE.sum(1).cumsum(0)
        fits_NK = place_NE.gather(1, ids_NK) <= 4
        return super().forward(hidden_NH, ids_NK, weights_NK * fits_NK)


def noise_behind(self: Selector, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchanges chosen experts at random."""
    best_NK, ids_NK = logits_NE.topk(self.top_k)
    return torch.where(torch.rand(ids_NK.shape) > 0.5, ids_NK, (ids_NK + 1) % EXPERTS), best_NK.softmax(-1)


def live_weights(self: Selector, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of a sort, ids of topk."""
    ids_NK = logits_NE.topk(self.top_k).indices
    return ids_NK, logits_NE.softmax(-1).sort(dim=-1, descending=True).values[:, : self.top_k]


@pytest.mark.parametrize(
    ("choose", "experts", "observed"),
    [
        (softmax_of_chosen, SecondSelection, "two selections in layer 0"),
        (ignored_ids, Experts, "does not follow forced ids"),
        (softmax_of_chosen, Capacity, "a row that changes when other rows choose the same experts"),
        (noise_behind, Experts, "random numbers behind the selection"),
        (live_weights, Experts, "weights that follow the gate's own ids"),
    ],
    ids=["second selection", "ignored ids", "capacity", "noise", "live weights"],
)
def test_a_router_that_disobeys_is_refused(choose: Callable[..., Any], experts: type[nn.Module], observed: str) -> None:
    """With what was observed, and nothing is left behind."""
    torch.manual_seed(0)
    model = Tiny(choose, experts)
    with pytest.raises(ReplayError, match=observed) as caught:
        gates.attach(model, SPEC)
    assert ErrorKind.NO_SEAM == caught.value.kind
    assert "layers.0" in str(caught.value)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_forwards_over_other_tokens_are_refused() -> None:
    """Where the batch knows its tokens, a forward over others of the same shape does not pass."""
    model = Tiny(softmax_of_chosen)
    batch: Any = unlike_rows(SPEC, TOKENS.numel(), seed=5)
    object.__setattr__(batch, "__dict__", {**vars(batch), "token_ids": TOKENS})
    with gates.attach(model, SPEC) as handle:
        with handle.replaying(batch):
            model(TOKENS)
        for other in (TOKENS + 1, TOKENS[:, :-1]):
            with pytest.raises(ReplayError, match="tokens of the batch") as caught, handle.replaying(batch):
                model(other)
            assert ErrorKind.TOKEN_MISMATCH == caught.value.kind


def test_a_second_forward_over_other_tokens_and_a_critic_are_refused() -> None:
    """The first forward was right, and the geometry is equal: tokens and the model's name tell them apart."""
    model = Tiny(softmax_of_chosen)
    batch: Any = unlike_rows(SPEC, TOKENS.numel(), seed=5)
    object.__setattr__(batch, "__dict__", {**vars(batch), "token_ids": TOKENS})
    with gates.attach(model, SPEC) as handle:
        with pytest.raises(ReplayError, match="tokens of the batch"), handle.replaying(batch):
            assert [model(tokens) for tokens in (TOKENS, TOKENS + 1)]
    with gates.attach(model, replace(SPEC, model="critic")) as handle:
        with pytest.raises(ReplayError, match="model 'tiny' instead of 'critic'"), handle.replaying(batch):
            pytest.fail("the body must not run")


def test_limits_of_shares() -> None:
    """A batch without rows and a batch of other rows are refused by their shares."""
    model = Tiny(softmax_of_chosen)
    limits = gates.ReplayLimits(max_flipped_share=0.3)
    missing: Any = unlike_rows(SPEC, TOKENS.numel(), seed=5, missing=1.1)
    object.__setattr__(missing, "unexplained_missing", TOKENS.numel())
    with gates.attach(model, SPEC, limits=limits) as handle:
        with pytest.raises(ReplayError, match="max_flipped_share") as caught:
            with handle.replaying(unlike_rows(SPEC, TOKENS.numel(), seed=5)):
                model(TOKENS)
        assert ErrorKind.FLIPPED_SHARE == caught.value.kind
        with pytest.raises(ValueError, match="max_live_share"), handle.replaying(missing):
            pytest.fail("the body must not run")
