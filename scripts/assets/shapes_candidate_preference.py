"""Train a step-aware preference model of candidates on shapes, for shapes/spo_latent and
shapes/drm.

    python scripts/assets/shapes_latent_preference.py --out data/shapes_latent
    python scripts/assets/shapes_candidate_preference.py --start data/shapes_latent

It begins as a judge of finished latents and learns to judge next states that were drawn from one
state, as SPO (2406.04314) compares them: by their x0 estimates. The embedded base model draws
candidates of training prompts and samples each to its end without noise, where the rewards of
shapes say how it ended. Of two candidates of one state the model has to prefer the one that ends
better; where both end alike its share should be one half, so that it is sure only where there is
something to see. With

    python scripts/assets/shapes_candidate_preference.py --states --out data/shapes_states

it is shown the candidates themselves, at their own noise levels, and not their estimates: as DRM
(2605.25661) and LPO (2502.01051) judge them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from shapes_latent_preference import fit
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from flowrl.algorithms.forest import first_below_draw
from flowrl.config.load import load_config
from flowrl.core.noise_path import interpolate, x0_from
from flowrl.core.shipped_files import resource
from flowrl.core.types import Cond, RewardBatch
from flowrl.training.rollout import sample_forest
from flowrl.training.trainer import Trainer
from rewards.latent_preference import (
    SHAPE,
    WEIGHTS,
    LatentJudge,
    load_transformer,
    save_judge,
)

ROUNDS, STEPS, BATCH = 14, 500, 48  # of drawing, of training, and pairs of a step
SIGMA = 0.4  # at which estimates are shown, as the reward does
GAP = 0.15  # of graded plus strict: below it two images are as good as each other
LR = 5e-4
TIES = 0.3  # share of a batch's pairs that end alike


class Seen(NamedTuple):
    """Candidates of one iteration."""

    estimate: Tensor  # [N, *]  x0 estimate of the candidate, or with `level` the candidate itself
    cond: Cond  # {name: [N, ...]}
    state: Tensor  # [N] int64  the state that it was drawn from
    step: Tensor  # [N] int64  that was taken
    end: Tensor  # [N] float64  graded plus strict of the image that it ends in
    level: Tensor | None = None  # [N]  sigma of the candidates, where they are shown themselves


class Candidates:
    """Candidates of the base model, each sampled to its end; `states`: they are shown themselves,
    and not their estimates."""

    def __init__(self, name: str, prompts: int, *, seed: int, states: bool = False) -> None:
        self.states = states
        other = {"train": "validation", "validation": "train"}[name]
        options = [f"prompts.train=assets/shapes/{name}.jsonl", f"train.prompts={prompts}"]
        options += [f"prompts.test=assets/shapes/{other}.jsonl", f"seed={seed}"]
        options += ["train.balance=tag", "plan.last=2", "train.group=13"]
        self.run = Trainer(load_config("shapes/spo_finished", options))

    @torch.no_grad()
    def draw(self, iteration: int) -> Seen:
        """Draw those of an iteration, as training would."""
        run = self.run
        run.state.iteration = iteration
        rows = run.rows()
        made = sample_forest(run, rows)
        tree = made.tree
        # the first leaf below each candidate is where it ends; the chain's own is a second one
        leaf = made.leaf[first_below_draw(tree, made.leaf)]
        above = tree.parent[leaf]
        group, sigma = tree.group[leaf], made.sigmas[tree.step[above]]
        records = [run.train_set.records[rows[g]] for g in group.tolist()]
        words = [record["prompt"] for record in records]
        images = run.model.decode(made.x[leaf].float())
        judged = RewardBatch(images, words, group, records, torch.zeros(len(words)))
        ends = [run.rewards[name](judged).double() for name in ("shapes", "strict")]
        x, cond = made.x[above].float(), run.model.encode(words)
        state, step, end = tree.parent[above], tree.step[above], ends[0] + ends[1]
        if self.states:
            return Seen(x, cond, state, step, end, sigma)
        estimate = x0_from(x, run.model.velocity(x, sigma, cond), sigma)
        return Seen(estimate, cond, state, step, end)


class Pairs(NamedTuple):
    """Pairs of candidates of one state, the better end first, and pairs that end alike."""

    unlike: Tensor  # [P, 2] int64
    alike: Tensor  # [Q, 2] int64

    def batch(self, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw pairs -> [count, 2], and the share that the first should have [count]."""
        ties = int(TIES * count)
        drawn = [
            rows[torch.randint(len(rows), (many,), generator=rng)]
            for rows, many in ((self.unlike, count - ties), (self.alike, ties))
        ]
        return torch.cat(drawn), torch.tensor([1.0] * (count - ties) + [0.5] * ties)


def pairs_of(seen: Seen, first: int) -> Pairs:
    """Pair the candidates of each state; `first` is added to their places."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for state in seen.state.unique():
        mine = (seen.state == state).nonzero().flatten()
        more = seen.end[mine][:, None] - seen.end[mine][None]
        for rows, where in zip(found, (more > GAP, (more.abs() <= GAP).triu(1)), strict=True):
            one, other = where.nonzero(as_tuple=True)
            rows.append(torch.stack([mine[one], mine[other]], 1) + first)
    return Pairs(*(torch.cat(rows) for rows in found))


def collect(source: Candidates) -> tuple[Seen, Pairs]:
    """Draw candidates of some iterations and pair them."""
    parts, pairs, first = list[Seen](), list[Pairs](), 0
    for k in range(ROUNDS):
        parts.append(source.draw(k))
        pairs.append(pairs_of(parts[-1], first))
        first += len(parts[-1].end)
        print(f"round {k + 1}: {first} candidates", flush=True)
    # one after the other
    cond = {}
    for name in parts[0].cond:
        cond[name] = torch.cat([part.cond[name] for part in parts])
    levels = [part.level for part in parts if part.level is not None]
    seen = Seen(
        torch.cat([part.estimate for part in parts]),
        cond,
        torch.cat([part.state for part in parts]),
        torch.cat([part.step for part in parts]),
        torch.cat([part.end for part in parts]),
        torch.cat(levels) if levels else None,
    )
    unlike, alike = (torch.cat(rows) for rows in zip(*pairs, strict=True))
    return seen, Pairs(unlike, alike)


def seen_by_judge(seen: Seen, places: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the judge sees of candidates [B], and its noise level [B]: estimates are noised
    by `noise` [B, *], candidates themselves are noisy already."""
    x = seen.estimate[places]
    if seen.level is not None:
        return x, seen.level[places]
    sigma = torch.full((len(x),), SIGMA)
    return interpolate(x, noise, sigma), sigma


def train(judge: LatentJudge, seen: Seen, pairs: Pairs) -> None:
    """Train the head; of its pairs those that end alike tell nothing of what it judged right."""
    rng = torch.Generator().manual_seed(0)

    def asked() -> tuple[Tensor, Tensor]:
        both, wanted = pairs.batch(BATCH, rng)
        # both estimates of a pair get the same noise
        noise = torch.randn(seen.estimate[both[:, 0]].shape, generator=rng)
        one, other = (
            judge(
                *seen_by_judge(seen, places, noise),
                embeds=seen.cond["embeds"][places].float(),
                pooled=seen.cond["pooled"][places].float(),
            )
            for places in both.T
        )
        loss = binary_cross_entropy_with_logits(one - other, wanted)
        return loss, (one > other)[wanted == 1]

    fit(judge, STEPS, LR, asked)


def main() -> None:
    """Train, and write the folder that reward `latent_preference` takes as its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", type=Path, default=Path("data/shapes_latent"))
    parser.add_argument("--out", type=Path, default=Path("data/shapes_candidates"))
    parser.add_argument("--prompts", type=int, default=96, help="of a round")
    parser.add_argument("--states", action="store_true", help="judge candidates, not estimates")
    given = parser.parse_args()
    torch.manual_seed(0)
    shape: dict[str, Any] = json.loads((given.start / SHAPE).read_text(encoding="utf-8"))
    judge = LatentJudge(load_transformer(str(resource("assets/shapes-sd3"))), **shape)
    judge.load_state_dict(load_file(given.start / WEIGHTS))
    source = Candidates("train", given.prompts, seed=7, states=given.states)
    seen, pairs = collect(source)
    train(judge, seen, pairs)
    save_judge(judge, shape, given.out)
    drm = f"shapes/drm rewards.latent.path={given.out} rewards.latent.estimates=false"
    drm += " rewards.latent.states=true"
    print(f"{given.out}; now flowrl train {drm if given.states else 'shapes/spo_latent'}")


if __name__ == "__main__":
    main()
