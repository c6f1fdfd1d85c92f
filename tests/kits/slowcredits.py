"""Credits written out in plain Python, node by node: what the fast ones are held against."""

from __future__ import annotations

import math
from collections.abc import Hashable
from statistics import fmean, pstdev, stdev
from typing import Any, NamedTuple

import torch
from forests import Forest
from torch import Tensor

from flowrl.core.types import Tree

Rows = dict[Hashable, dict[int, float]]  # what is compared -> {node: value}


class Sample(NamedTuple):
    """The chain of one initial noise."""

    group: int
    draws: list[int]
    path: list[float]  # R_0 without noise, then finished after each draw; NaN where no image is


def up(node: int, tree: Tree) -> list[int]:
    """List the nodes from `node` to its root."""
    out = [node]
    while tree.parent[out[-1]] >= 0:
        out.append(int(tree.parent[out[-1]]))
    return out


def samples(forest: Forest, reward: Tensor) -> list[Sample]:
    """Read the chains of a comb by walking up from every leaf; of two images the later counts."""
    tree, leaf = forest
    draws: dict[int, set[int]] = {}
    images: dict[int, dict[int, tuple[int, float]]] = {}
    for place, node in enumerate(leaf.tolist()):
        way = up(node, tree)
        noisy = [v for v in way if tree.std[v] > 0]
        draws.setdefault(way[-1], set()).update(noisy)
        mine = images.setdefault(way[-1], {})
        here = (node, float(reward[place]))
        mine[len(noisy)] = max(mine.get(len(noisy), here), here)
    out = []
    for root in sorted(draws):
        path = [images[root].get(t, (0, math.nan))[1] for t in range(len(draws[root]) + 1)]
        out.append(Sample(int(tree.group[root]), sorted(draws[root]), path))
    return out


def standard(rows: Rows, eps: float, ddof: int, std: str = "group") -> dict[int, float]:
    """Z-score each row; a NaN counts in no mean and gets 0 -> {node: z}. std "global": by the
    spread of all rows together."""
    out = {}
    everything = [value for row in rows.values() for value in row.values()]
    for row in rows.values():
        known = [value for value in row.values() if not math.isnan(value)]
        wide = [v for v in everything if not math.isnan(v)] if std == "global" else known
        spread = (stdev(wide) if ddof else pstdev(wide)) if len(wide) > ddof else 0.0
        for node, value in row.items():
            gap = 0.0 if math.isnan(value) else value - fmean(known)
            out[node] = gap / (spread + eps) if gap else 0.0
    return out


def handed_down(weight: dict[int, float], tree: Tree) -> list[float]:
    """Give every node the weight of the last draw on its way; 0 where there is none."""
    given = []
    for v in range(len(tree.parent)):
        noisy = [u for u in up(v, tree) if tree.std[u] > 0]
        given.append(weight[noisy[0]] if noisy else 0.0)
    return given


# ------------------------------------------------------------------------------ values of nodes


def mean_below(forest: Forest, value: Tensor) -> list[float]:
    """Average the leaves at or under each node."""
    tree, leaf = forest
    below: list[list[float]] = [[] for _ in tree.parent]
    for node, one in zip(leaf.tolist(), value.tolist(), strict=True):
        for v in up(node, tree) if not math.isnan(one) else []:
            below[v].append(one)
    return [fmean(row) if row else math.nan for row in below]


def fused_below(forest: Forest, value: Tensor, log_prob: Tensor, temperature: float) -> list[float]:
    """Fuse each node's children, weighted by exp(log_prob / temperature), by recursion."""
    tree, leaf = forest
    worth = dict(zip(leaf.tolist(), value.tolist(), strict=True))

    def at(v: int) -> float:
        if v in worth:
            return worth[v]
        top = bottom = 0.0
        for u in (tree.parent == v).nonzero().flatten().tolist():
            share = math.exp(float(log_prob[u]) / temperature)
            if not math.isnan(at(u)):
                top, bottom = top + share * at(u), bottom + share
        return top / bottom if bottom else math.nan

    return [at(v) for v in range(len(tree.parent))]


# -------------------------------------------------------------------------------------- credits


def slow_group(
    forest: Forest, reward: Tensor, *, eps: float, ddof: int, std: str = "group"
) -> list[float]:
    """Z-score a prompt's images; a node has the mean of its leaves."""
    tree, leaf = forest
    rows: Rows = {}
    for node, value in zip(leaf.tolist(), reward.tolist(), strict=True):
        rows.setdefault(int(tree.group[node]), {})[node] = value
    z = standard(rows, eps, ddof, std)
    scored = reward.double()
    for place, node in enumerate(leaf.tolist()):
        scored[place] = math.nan if math.isnan(scored[place]) else z[node]
    return [0.0 if math.isnan(value) else value for value in mean_below(forest, scored)]


def slow_best_worst(forest: Forest, reward: Tensor) -> list[float]:
    """Diffusion-DPO: 1 for a prompt's first best image and -1 for its first worst, if they differ;
    a node has the mean of its leaves."""
    tree, leaf = forest
    sign, scores = [0.0] * len(leaf), reward.tolist()
    for g in set(tree.group.tolist()):
        mine = [i for i, node in enumerate(leaf.tolist()) if tree.group[node] == g]
        mine = [i for i in mine if not math.isnan(scores[i])]
        best, worst = (f(mine, key=scores.__getitem__, default=0) for f in (max, min))
        if mine and scores[best] > scores[worst]:
            sign[best], sign[worst] = 1.0, -1.0
    return mean_below(forest, torch.tensor(sign))


def slow_nodes(
    forest: Forest,
    reward: Tensor,
    *,
    family: str,
    eps: float,
    ddof: int,
    log_prob: Tensor | None = None,
    temperature: float = 1.0,
    **_: Any,
) -> list[float]:
    """Z-score the values of nodes among those of one prompt, of one family, and drawn or not."""
    tree = forest[0]
    if log_prob is None:
        value = mean_below(forest, reward)
    else:
        value = fused_below(forest, reward, log_prob, temperature)
    rows: Rows = {}
    for v, one in enumerate(value):
        key = (int(tree.group[v]), int(getattr(tree, family)[v]), bool(tree.std[v] > 0))
        rows.setdefault(key, {})[v] = one
    z = standard(rows, eps, ddof)
    return [z[v] for v in range(len(value))]


def slow_granular(forest: Forest, reward: Tensor, *, eps: float, ddof: int) -> list[float]:
    """G2RPO: z-score each draw's images stride by stride, and add."""
    tree, leaf = forest
    scored = dict(zip(leaf.tolist(), reward.tolist(), strict=True))
    draws = [v for v in range(len(tree.std)) if tree.std[v] > 0]
    below = {
        v: sorted(set(scored) & set((tree.parent == v).nonzero()[:, 0].tolist())) for v in draws
    }
    strides = max([1, *map(len, below.values())])
    by_stride: list[Rows] = [{} for _ in range(strides)]
    for v in draws:
        values = [scored[u] for u in below[v] or [v] * strides]
        known = not any(map(math.isnan, values))
        for rows, value in zip(by_stride, values, strict=True):
            row = rows.setdefault((int(tree.group[v]), int(tree.step[v])), {})
            row[v] = value if known else math.nan
    scores = [standard(rows, eps, ddof) for rows in by_stride]
    total = dict.fromkeys(draws, 0.0)
    for z in scores:
        total = {v: total[v] + z[v] for v in draws}
    return handed_down(total, tree)


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


def turns(path: list[float], t: int, strict: bool) -> bool:
    """Say whether draw t = 1 .. w of one sample is a turning point."""
    gain = [math.nan] + [path[i] - path[i - 1] for i in range(1, len(path))]
    trend = [sign(d) * sign(path[-1] - path[0]) for d in gain]
    on = sign(gain[t]) * sign(path[-1] - path[t]) > 0
    return on if t == 1 else trend[t - 1] < 0 < trend[t] and (on or not strict)


def slow_turning(
    forest: Forest, reward: Tensor, *, strict: bool, balance: bool, eps: float, ddof: int
) -> list[float]:
    """TP-GRPO: the reference's rules one sample at a time, then z-scores per prompt and step."""
    found = samples(forest, reward)
    known, points = [], []
    for i, (_, draws, path) in enumerate(found):
        for t in range(1, len(draws) + 1):
            read = {0, len(draws), t, t - 1, max(t - 2, 0)}
            if not any(math.isnan(path[j]) for j in read):
                known.append((i, t))
                points += [(path[-1] - path[0], i, t)] if turns(path, t, strict) else []
    rising = sorted((p for p in points if p[0] > 0), key=lambda p: -abs(p[0]))
    falling = sorted((p for p in points if p[0] < 0), key=lambda p: -abs(p[0]))
    count = min(len(rising), len(falling)) if balance else 0
    kept = {p[1:] for p in rising[: count or None] + falling[: count or None]}
    rows: Rows = {}
    for i, (group, draws, path) in enumerate(found):
        for t, node in enumerate(draws, start=1):
            since = path[t - 1]
            value = path[-1] - since if (i, t) in kept else path[t] - since
            row = rows.setdefault((group, t), {})
            row[node] = value if (i, t) in known else math.nan
    return handed_down(standard(rows, eps, ddof), forest[0])


def slow_anchored(
    forest: Forest,
    reward: Tensor,
    *,
    gamma: float,
    k: float,
    anchored_steps: int,
    direction: str,
    eps: float,
    ddof: int,
) -> list[float]:
    """VGPO: discounted sums along the chain, their z-scores and anchor, times their shares."""
    tree, worth = forest[0], {}
    rows: Rows = {}
    for group, draws, (_, *r) in samples(forest, reward):
        for t, node in enumerate(draws):
            ahead = range(t, len(r)) if direction == "future" else range(t + 1)
            q = sum(gamma ** abs(j - t) * r[j] for j in ahead)
            rows.setdefault((group, t), {})[node] = math.nan if math.isnan(sum(r)) else q
            worth[node] = q
    z, out = standard(rows, eps, ddof), {}
    for _, draws, (_, *r) in samples(forest, reward):
        whole = fmean([worth[node] for node in draws]) if draws else 0.0
        for node in draws:
            share = worth[node] / whole if whole else 1.0
            anchor = k * worth[node] if tree.step[node] <= anchored_steps else 0.0
            out[node] = 0.0 if math.isnan(sum(r)) else share * (z[node] + anchor)
    return handed_down(out, tree)
