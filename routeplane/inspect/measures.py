"""What loads say: entropy, effective and dead experts, imbalance, distance. Pure formulas over counts.

Natural logarithms; shares are of the counts given. Axes: L captured layers, E experts. Layers of fewer experts than the
widest are padded with experts that do not exist: ``experts_L`` says how many do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["dead_experts", "divergence", "effective_experts", "entropy", "gini", "imbalance", "shares"]


def shares(load_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each expert's share of its layer's load; zeros for a layer without any."""
    total_L1 = load_LE.sum(axis=-1, keepdims=True)
    return np.asarray(load_LE / np.where(total_L1 > 0, total_L1, 1))


def entropy(load_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Entropy of each layer's load in nats; 0.0 for a layer without any."""
    share_LE = shares(load_LE)
    return np.asarray(-(share_LE * np.log(np.where(share_LE > 0, share_LE, 1.0))).sum(axis=-1))


def effective_experts(load_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """``exp(entropy)``: how many equally used experts would have it. 0.0 for a layer without any load."""
    return np.asarray(np.where(load_LE.sum(axis=-1) > 0, np.exp(entropy(load_LE)), 0.0))


def dead_experts(load_LE: NDArray[np.int64], experts_L: NDArray[np.int64]) -> NDArray[np.int64]:
    """Experts of each layer that were never chosen; 0 for a layer without any load, of which nothing is known."""
    used_L = (load_LE > 0).sum(axis=-1)
    return np.asarray(np.where(used_L > 0, experts_L - used_L, 0))


def imbalance(load_LE: NDArray[np.int64], experts_L: NDArray[np.int64]) -> NDArray[np.float64]:
    """Largest load over the mean load of each layer; 1.0 is balance, and what a layer without any load has."""
    mean_L = load_LE.sum(axis=-1) / experts_L
    return np.asarray(np.where(mean_L > 0, load_LE.max(axis=-1) / np.where(mean_L > 0, mean_L, 1.0), 1.0))


def gini(load_LE: NDArray[np.int64], experts_L: NDArray[np.int64]) -> NDArray[np.float64]:
    """Gini coefficient of each layer's load: 0.0 where all experts have the same, near 1.0 where one has all."""
    ascending_LE = np.sort(load_LE, axis=-1)
    padding_L = load_LE.shape[-1] - experts_L  # they sort to the front, with a load of 0
    rank_LE = np.arange(1, load_LE.shape[-1] + 1) - padding_L[:, None]
    total_L = load_LE.sum(axis=-1)
    weighted_L = (np.where(rank_LE > 0, rank_LE, 0) * ascending_LE).sum(axis=-1)
    return np.asarray(
        np.where(
            total_L > 0,
            2 * weighted_L / (experts_L * np.where(total_L > 0, total_L, 1)) - (experts_L + 1) / experts_L,
            0.0,
        )
    )


def divergence(load_LE: NDArray[np.int64], other_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Jensen-Shannon divergence of two loads, layer by layer, in nats: 0.0 for equal shares, log 2 for disjoint ones.

    0.0 where either has no load: nothing is known of it.
    """
    left_LE, right_LE = shares(load_LE), shares(other_LE)
    middle_LE = (left_LE + right_LE) / 2
    known_L = (load_LE.sum(axis=-1) > 0) & (other_LE.sum(axis=-1) > 0)
    parts = [
        (share_LE * np.log(np.where(share_LE > 0, share_LE, 1.0) / np.where(middle_LE > 0, middle_LE, 1.0))).sum(
            axis=-1
        )
        for share_LE in (left_LE, right_LE)
    ]
    return np.asarray(np.where(known_L, np.maximum((parts[0] + parts[1]) / 2, 0.0), 0.0))
