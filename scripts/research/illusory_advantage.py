"""Do win rates keep tiny noise from becoming large advantages? Pref-GRPO's claim, in numbers.

    python scripts/research/illusory_advantage.py

Two parts, both without images. **Groups**: qualities of eight images with a spread that goes from
nothing to ten times the noise of the judges; what is left of the truth in the advantages. **A
policy** of two numbers, a quality that is full at 1 and a habit that the scorer likes by a
hundredth and that does harm from 1 on: where it ends up under each reward. Rewards, verdicts,
tournament and credit are flowrl's own. Writes assets/results/illusory-advantage.json, one minute;
`python scripts/research/tables.py` makes the tables of docs/methods/pref_grpo.md from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.credit.advantages import group_norm, mean_centred
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.tables import markdown_table
from flowrl.core.types import Tree
from rewards._common.pairs import all_pairs, tournament, verdict, win_rates

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "assets" / "results" / "illusory-advantage.json"
PAGE = ROOT / "docs" / "methods" / "pref_grpo.md"
SIZE, GROUPS = 8, 400  # images of a group; groups of each spread
NOISE = 0.01  # std of a score, and of a judge's look at an image
SPREADS = (0.0, 0.003, 0.01, 0.03, 0.1)  # std of the quality in a group
HABIT, HARM = 0.01, 1.0  # what the scorer pays for the habit; where it begins to do harm
ITERATIONS, RATE, WIDTH, SEEDS = 300, 0.02, 0.3, 5


class Arm(NamedTuple):
    """A reward with its credit."""

    name: str
    reward: Callable[[Tensor, torch.Generator], Tensor]  # quality [N, G] as it is seen -> [N, G]
    credit: dict[str, Any] | None  # of `group_norm`
    calls: int  # of a judge of pairs, per group


def scores(seen: Tensor, draw: torch.Generator) -> Tensor:
    """Score each image by itself, with noise."""
    return seen + NOISE * torch.randn(seen.shape, generator=draw)


def rates(tie: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Return win rates of noisy scores: the noise is the image's own, the same in every pair."""

    def reward(seen: Tensor, draw: torch.Generator) -> Tensor:
        """Return the win rates of scores, in the shape of what is seen."""
        group, (first, second) = pairs(seen)
        flat = scores(seen, draw).flatten()
        won = verdict(flat[first], flat[second], tie)
        return win_rates(won, first, second, len(group)).view_as(seen)

    return reward


def judged(tie: float, knock_out: bool = False) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Return win rates of a judge who looks anew at both images of each pair, or the places of its
    tournament."""

    def reward(seen: Tensor, draw: torch.Generator) -> Tensor:
        """Return the win rates, or the tournament's places, in the shape of what is seen."""
        flat = seen.flatten()

        def ask(first: Tensor, second: Tensor) -> Tensor:
            looks = NOISE * torch.randn(2, len(first), generator=draw)
            return verdict(flat[first] + looks[0], flat[second] + looks[1], tie)

        group, (first, second) = pairs(seen)
        if knock_out:
            images = torch.rand(len(group), 3, 1, 1, generator=draw)
            return tournament(group, images, 0, ask).view_as(seen)
        return win_rates(ask(first, second), first, second, len(group)).view_as(seen)

    return reward


def pairs(seen: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the group of each image, and the places of all pairs within groups."""
    group = torch.arange(len(seen)).repeat_interleave(seen.shape[1])
    first, second = all_pairs(torch.zeros(seen.shape[1]))
    start = seen.shape[1] * torch.arange(len(seen))[:, None]
    return group, ((start + first).flatten(), (start + second).flatten())


GROUP, ALL, ADDED = (
    {"std": std, "eps": eps, "ddof": 1}
    for std, eps in (("group", 1e-8), ("global", 1e-8), ("group", 0.03))
)
EVERY, FEW = SIZE * (SIZE - 1) // 2, 2 * (SIZE - 1)
ARMS = (
    Arm("scores", scores, GROUP, 0),
    Arm("scores, std of all groups", scores, ALL, 0),
    Arm("scores, 0.03 added to the std", scores, ADDED, 0),
    Arm("rates of the scores, no ties", rates(0.0), GROUP, 0),
    Arm("rates of the scores, ties to 0.03", rates(0.03), GROUP, 0),
    Arm("rates of the scores, ties to 0.06", rates(0.06), GROUP, 0),
    Arm("judge of pairs, no ties", judged(0.0), GROUP, EVERY),
    Arm("judge of pairs, ties to 0.03", judged(0.03), GROUP, EVERY),
    Arm("judge of pairs, ties to 0.06", judged(0.06), GROUP, EVERY),
    Arm("judge of pairs, ties to 0.06, no std", judged(0.06), None, EVERY),
    Arm("tournament, ties to 0.06", judged(0.06, True), GROUP, FEW),
)


def advantages(arm: Arm, seen: Tensor, draw: torch.Generator) -> Tensor:
    """Score groups [N, G] and give credit -> advantages [N, G]. Without a std rates are centred and
    tripled: about the size of divided ones where all images differ."""
    reward = arm.reward(seen, draw).flatten()
    leaf = torch.arange(len(reward))
    group = leaf // seen.shape[1]
    tree = Tree(torch.full_like(leaf, -1), 0 * leaf, torch.zeros(len(leaf)), group)
    if arm.credit is None:
        return 3 * mean_centred(reward, leaf, tree).view_as(seen)
    return group_norm(reward, leaf, tree, **arm.credit).view_as(seen)


def groups(arm: Arm) -> list[dict[str, float | None]]:
    """Compare advantages with the truth, for each spread of the quality. All spreads are in one
    batch, as prompts of an iteration are."""
    # the same drawn quality at every spread: [spreads, groups, size]
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(len(SPREADS), GROUPS, SIZE, generator=draw)
    quality = truth * torch.tensor(SPREADS)[:, None, None]
    found = advantages(arm, quality.flatten(0, 1), draw).view_as(truth)
    rows: list[dict[str, float | None]] = []
    # the truth as group-wise z-scores is what an advantage should be like
    for spread, a, z in zip(SPREADS, found, truth, strict=True):
        centred = (z - z.mean(1, keepdim=True)) / z.std(1, keepdim=True)
        told = a.abs() > 1e-6
        size = a.square().mean().sqrt().item()
        row: dict[str, float | None] = {"spread": spread, "size": round(size, 3)}
        row["agreement"] = row["wrong_sign"] = None
        # agreement: the cosine of both; wrong signs only where there is an advantage
        if spread and bool(told.any()):
            both = (a * centred).mean() / (centred.square().mean() * a.square().mean()).sqrt()
            row["agreement"] = round(both.item(), 3)
            wrong = (a * centred < 0)[told].float().mean().item()
            row["wrong_sign"] = round(wrong, 3)
        rows.append(row)
    return rows


def trained(arm: Arm, seed: int) -> dict[str, float]:
    """Train the policy ``x ~ N(theta, WIDTH^2)`` by the gradient of its log-density times the
    advantage, 16 groups an iteration -> where it ends up, and its best true quality on the way."""
    draw = torch.Generator().manual_seed(seed)
    theta, best = torch.zeros(2), -float("inf")
    for _ in range(ITERATIONS):
        noise = torch.randn(16, SIZE, 2, generator=draw)
        x = theta + WIDTH * noise
        good = x[..., 0].clamp_max(1)
        best = max(best, worth(x))
        a = advantages(arm, good + HABIT * x[..., 1], draw)
        theta = theta + RATE * (a[..., None] * noise).mean((0, 1)) / WIDTH
    x = theta + WIDTH * torch.randn(4096, 2, generator=draw)
    return {"quality": theta[0].item(), "habit": theta[1].item(), "true": worth(x), "best": best}


def worth(x: Tensor) -> float:
    """Return the mean true quality of samples [..., 2]: full at 1, less with a strong habit."""
    harm = (x[..., 1].abs() - HARM).clamp_min(0)
    return (x[..., 0].clamp_max(1) - harm).mean().item()


def measure(arm: Arm) -> dict[str, Any]:
    """Run both parts for one arm."""
    runs = [trained(arm, seed) for seed in range(SEEDS)]
    ends: dict[str, Any] = {}
    for key in runs[0]:
        values = [run[key] for run in runs]
        ends[key] = [round(value, 3) for value in (mean(values), min(values), max(values))]
    row: dict[str, Any] = {
        "arm": arm.name,
        "calls": arm.calls,
        "groups": groups(arm),
        "policy": ends,
    }
    print(arm.name, [part["size"] for part in row["groups"]], ends, flush=True)
    return row


def page(text: str) -> str:
    """Fill the place between the marks of the page."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    spreads = [f"{spread:g}" for spread in found["spreads"]]
    head = ["reward", "questions", *(f"spread {spread}" for spread in spreads)]
    table = [head]
    ends = [["reward", "quality", "habit", "true quality", "its best on the way"]]
    for row in found["arms"]:
        cells = [_cell(part) for part in row["groups"]]
        table.append([row["arm"], str(row["calls"] or "none"), *cells])
        policy = row["policy"]
        ranges = [f"{a:.2f} ({b:.2f} to {c:.2f})" for a, b, c in policy.values()]
        ends.append([row["arm"], *ranges])
    new = [markdown_table(table), "", markdown_table(ends)]
    marks = "<!-- illusory: tables -->\n.*?<!-- illusory: end -->"
    filled = "\n".join(["<!-- illusory: tables -->", *new, "<!-- illusory: end -->"])
    return re.sub(marks, lambda _: filled, text, flags=re.DOTALL)


def _cell(part: dict[str, float | None]) -> str:
    if part["agreement"] is None:
        return f"{part['size']:.2f}"
    return f"{part['size']:.2f}, {part['agreement']:.2f}"


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the tables of docs/methods/pref_grpo.md."""
    return [(PAGE, page)]


def main() -> None:
    """Measure every arm and write the file."""
    torch.set_num_threads(1)
    result = {
        "environment": environment(),
        "command": "python scripts/research/illusory_advantage.py",
        "group": SIZE,
        "groups": GROUPS,
        "noise": NOISE,
        "habit": HABIT,
        "spreads": SPREADS,
        "iterations": ITERATIONS,
        "seeds": SEEDS,
        "arms": [measure(arm) for arm in ARMS],
    }
    write_json(RESULT, result)


if __name__ == "__main__":
    main()
