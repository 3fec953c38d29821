"""Expert load balancing (EPLB): from the tokens that each expert got, a placement with equal work for all ranks.

1. The spare slots go to the experts with the most tokens per replica, one after the other.
2. The replicas go to ranks, the heaviest first, each to the least loaded rank that has room.

Step 2 leaves an expert on its rank where that costs little, and a layer that would gain little stays as it is: every
move costs the bytes of an expert. All layers are computed at once. Every rank computes the same result from the same
loads.

Letters: L layers, E experts, R ranks, S slots of a rank, I = R * S replicas.
"""

import numpy as np

from millrace_serve.model.eplb.placement import ExpertPlacement

SLACK = 0.02  # of a rank's mean load: an expert stays on its rank for this much more than the least loaded one has
LEAST_GAIN = 0.02  # of the imbalance: a layer that gains less is not worth its moves


def imbalance(loads: np.ndarray, placement: ExpertPlacement) -> np.ndarray:
    """Tokens of the busiest rank, over the mean: float64 [L], 1 for a layer without tokens.

    Args:
        loads: tokens [L, E]; the replicas of an expert share them equally.
    """
    held = placement.experts.reshape(len(loads), -1)
    replicas = np.stack([np.bincount(experts, minlength=placement.num_experts) for experts in held])  # [L, E]
    shares = np.take_along_axis(loads / replicas, held, axis=1)
    of_rank = shares.reshape(placement.experts.shape).sum(axis=2)
    mean = of_rank.mean(axis=1)
    return np.divide(of_rank.max(axis=1), mean, out=np.ones(len(loads)), where=mean > 0)


def rebalance(loads: np.ndarray, before: ExpertPlacement) -> ExpertPlacement:
    """A placement whose `imbalance` is in no layer above that of `before`, with as many slots.

    Args:
        loads: tokens [L, E] since the last rebalance
    """
    (num_layers, num_ranks, num_slots), num_experts = before.experts.shape, before.num_experts
    replicas, weights = _replicas(loads, num_ranks, num_slots)
    home = np.zeros((num_layers, num_ranks, num_experts), dtype=bool)
    np.put_along_axis(home, before.experts, True, axis=2)
    order = _pack(weights, replicas, home, num_slots).argsort(axis=1, kind="stable")
    after = np.take_along_axis(replicas, order, axis=1)
    placed = _in_place(before.experts, after.reshape(before.experts.shape))
    better = imbalance(loads, ExpertPlacement(placed, num_experts)) < imbalance(loads, before) * (1 - LEAST_GAIN)
    return ExpertPlacement(np.where(better[:, None, None], placed, before.experts).astype(np.int32), num_experts)


def _replicas(loads: np.ndarray, num_ranks: int, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Every expert, and the one with the most tokens per replica again and again: int64 [L, I]; and the tokens of each
    replica, falling, float64 [L, I].

    More replicas of an expert than ranks would be of no use.
    """
    num_layers, num_experts = loads.shape
    counts, rows = np.ones(loads.shape, np.int64), np.arange(num_layers)
    chosen = [np.broadcast_to(np.arange(num_experts), loads.shape)]
    for _ in range(num_ranks * num_slots - num_experts):
        most = np.where(counts < num_ranks, loads / counts, -1).argmax(axis=1)
        counts[rows, most] += 1
        chosen.append(most[:, None])
    items = np.concatenate(chosen, axis=1)
    weights = np.take_along_axis(loads / counts, items, axis=1)
    order = (-weights).argsort(axis=1, kind="stable")
    return np.take_along_axis(items, order, axis=1), np.take_along_axis(weights, order, axis=1)


def _pack(weights: np.ndarray, replicas: np.ndarray, home: np.ndarray, num_slots: int) -> np.ndarray:
    """The rank of each replica, int64 [L, I]; a rank gets an expert twice only if no other rank has room.

    Args:
        weights: [L, I], falling; replicas: their experts [L, I]; home: bool [L, R, E], where an expert is now.
    """
    num_layers, num_ranks, _ = home.shape
    rows, load = np.arange(num_layers), np.zeros((num_layers, num_ranks))
    left, has = np.full(load.shape, num_slots), np.zeros(home.shape, dtype=bool)
    slack = SLACK * weights.sum(axis=1, keepdims=True) / num_ranks
    ranks = np.empty(replicas.shape, np.int64)
    for i, expert in enumerate(replicas.T):
        twice = has[rows, :, expert]
        cost = np.where(left > 0, load, np.inf)
        new = np.where(twice, np.inf, cost)
        cost = np.where(np.isinf(new).all(axis=1, keepdims=True), cost, new)
        least = cost.min(axis=1, keepdims=True)
        stays = home[rows, :, expert] & (cost <= least + slack)
        cost = np.where(stays.any(axis=1, keepdims=True) & ~stays, np.inf, cost)
        ranks[:, i] = best = cost.argmin(axis=1)
        load[rows, best] += weights[:, i]
        left[rows, best] -= 1
        has[rows, best, expert] = True
    return ranks


def _in_place(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """`after` [L, R, S] with the slots of each rank in another order: what a rank has already keeps its slot."""
    out = np.full_like(before, -1)
    for layer, rank in np.ndindex(before.shape[:2]):
        wanted = after[layer, rank].tolist()
        for slot, expert in enumerate(before[layer, rank].tolist()):
            if expert in wanted:
                wanted.remove(expert)
                out[layer, rank, slot] = expert
        out[layer, rank, out[layer, rank] < 0] = wanted
    return out
