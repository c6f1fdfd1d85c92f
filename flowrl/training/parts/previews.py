"""Look at many noises cheaply, and sample images from those that tell most (Sol-RL, 2604.06916)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.algorithms.plans.solvers import ode
from flowrl.algorithms.rollout.engine import noise_std, rollout
from flowrl.core.abilities import sees_latents
from flowrl.core.errors import ConfigError
from flowrl.core.part import Part
from flowrl.core.pixels import from_bytes
from flowrl.core.types import Plan
from flowrl.evaluation.reward_set import total_reward
from flowrl.evaluation.sources import encode_rows
from flowrl.training.rollout import ImageBuffer, prompted
from flowrl.training.run import Prepared, Run
from flowrl.training.task import IterationCost, Task


class Previews(Part):
    """Preview many noises of each prompt in a few steps, and keep those that tell most."""

    name = "previews"
    rank = 45
    when = ("config.scout.images",)

    def check(self, task: Task, plan: Plan) -> None:
        """Refuse a scout section that does not go with the method."""
        config, work = task.config, task.work(plan)
        # looking at more noises than are kept is the point: the best ones go on
        if config.scout.images <= work.roots:
            raise ConfigError(
                f"scout.images={config.scout.images}: it looks at more noises than are kept, which "
                f"are {work.roots} of a prompt; take more, or 0 to switch it off"
            )
        # there has to be a free choice of initial noises
        reason = ""
        if config.train.same_noise:
            reason = "train.same_noise has one noise for all images of a prompt"
        elif plan.stored is not None:
            reason = f"plan {config.plan.fn} samples nothing"
        elif work.trains == "roots":
            reason = f"likelihood {config.likelihood.fn} trains what noises are drawn from"
        if reason:
            raise ConfigError(f"scout: {reason}; leave the section out")

    def work(self, task: Task, plan: Plan, cost: IterationCost) -> IterationCost:
        """Count the previews."""
        scout = task.config.scout
        looks = cost.prompts * scout.images * scout.steps * (2 if "sampling" in cost.twice else 1)
        line = f"scouting   {cost.prompts} prompts x {scout.images} noises, {scout.steps} steps"
        return replace(cost, nfe=cost.nfe + looks, before=(*cost.before, line))

    def begin(self, prepared: Prepared) -> None:
        """Refuse a reward that judges latents: previews have images alone."""
        for name, reward in prepared.rewards.items():
            if sees_latents(reward):
                raise ConfigError(
                    f"scout: rewards.{name} ({prepared.config.rewards[name].fn}) judges latents, "
                    "but the previews of scout are scored as images alone; leave the section scout "
                    "out, or this reward"
                )

    def noise(self, run: Run, rows: list[int], places: Sequence[int], attempt: int) -> Tensor:
        """Choose the initial noises of training prompts `rows`, which stand at `places` in the
        iteration -> noise of std 1 [R * roots, *], prompt by prompt.

        From each of ``scout.images`` noises an image is sampled in ``scout.steps`` steps without
        noise and scored; `chosen` says which are kept, in the order in which they were drawn.
        Noises are those that the rollout would have drawn with so large a group, at its `attempt`.
        """
        c, size = run.config, run.size
        made = rollout(
            run.model,
            encode_rows(run.model, run.train_set, rows, size),
            ode(0, steps=c.scout.steps),
            run.method.transition,
            sigmas=run.model.sigmas(c.scout.steps, *size),
            shape=run.model.latent_shape(*size),
            group_size=c.scout.images,
            generators=[run.stream("rollout", place, attempt) for place in places],
            micro_batch=c.train.rollout_batch,
        )
        # what the rewards say of the previews, as bytes like any image
        images = ImageBuffer(len(rows))
        place = images.decode(run, made, rows, first=0)
        group = made.tree.group[made.leaf]
        batch = prompted(
            run, from_bytes(images.of(place)), group, [rows[g] for g in group.tolist()]
        )
        values = run.reward_set.score(batch, f"iteration {run.iteration}, scouting")
        total = total_reward(values, c.reward_weights).cpu().reshape(len(rows), -1)
        # the noises of those that are kept; their grid may begin elsewhere than the rollout's
        noise = made.x[made.tree.parent < 0].reshape(len(rows), c.scout.images, *made.x.shape[1:])
        kept = []
        for k, (at, scores) in enumerate(zip(places, total, strict=True)):
            rng = run.stream("scout", at, attempt)
            mine = chosen(scores, run.cost.roots, c.scout.keep, rng)
            kept.append(noise[k, mine.to(noise.device)])
        return torch.cat(kept) / noise_std(made.sigmas[:1].tolist())


def chosen(scores: Tensor, keep: int, how: str, rng: torch.Generator) -> Tensor:
    """Choose `keep` of a prompt's scores [N] -> their places, ascending.

    extremes: the ``keep // 2`` best, and the worst; far: those farthest from the mean; half: the
    ``keep // 4`` best, as many as make half with the worst, and the rest by chance; random: by
    chance. NaN = not scored is chosen last. Equal ones: the earlier. Source: Sol-RL's code
    (NVlabs/Sana 06af561), which has "best_worst" and these three beside it.
    """
    known = scores.double()
    order = known.nan_to_num(nan=0.0).argsort(descending=True, stable=True)
    lost = known.isnan()
    order = torch.cat([order[~lost[order]], order[lost[order]]])
    scored = int((~lost).sum())
    by_chance = order[torch.randperm(len(order), generator=rng)]
    if how == "random":
        return by_chance[:keep].sort().values
    if how == "far":
        gap = (known - known[~lost].mean()).abs().nan_to_num(nan=-1.0)
        return gap.argsort(descending=True, stable=True)[:keep].sort().values
    sure = keep if how == "extremes" else keep // 2
    best = order[: sure // 2]
    rest = order[sure // 2 : scored]
    worst = rest[max(0, len(rest) - (sure - sure // 2)) :]
    taken = torch.cat([best, worst])
    # what is missing: by chance, or of those that were not scored
    fill = by_chance if how == "half" else order
    fill = fill[~torch.isin(fill, taken)]
    return torch.cat([taken, fill[: keep - len(taken)]]).sort().values
