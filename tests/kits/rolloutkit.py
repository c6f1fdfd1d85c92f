"""Small rollouts, and what must be true of any: shared by the tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.forest import decision_nodes
from flowrl.algorithms.likelihoods.reverse import reverse
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.rollout.plan_steps import read_sigma_grid
from flowrl.algorithms.transitions import dance_sde
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import Batch, Cond, FlowModel, Plan, Rollout, Transition
from flowrl.models.toy import LinearFlow

SHAPE = (3, 2, 2)
PROMPTS = ["a red square", "a blue circle", "two dots"]


class Counting:
    """A model that counts network calls and evaluated nodes."""

    def __init__(self, model: FlowModel) -> None:
        self.model, self.calls, self.nodes = model, 0, 0

    def encode(self, prompts: list[str]) -> Cond:
        return self.model.encode(prompts)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        self.calls, self.nodes = self.calls + 1, self.nodes + len(x)
        assert sigma.shape == (len(x),) and all(len(value) == len(x) for value in cond.values())
        return self.model.velocity(x, sigma, cond)


score_draws = reverse().evaluate


def decisions(ro: Rollout, advantage: Tensor, *, nodes: Tensor | None = None) -> Batch:
    """Collect draws, or those that made `nodes`, into a batch."""
    node = decision_nodes(ro) if nodes is None else nodes
    return reverse().batch(ro, advantage, node)


def ratio_gap(model: FlowModel, ro: Rollout, nodes: Tensor, transition: Transition) -> float:
    """Score the draws that made `nodes` in one call, with a gradient -> the largest |ratio - 1|."""
    batch = decisions(ro, torch.zeros(len(ro.x)), nodes=nodes)
    log_prob = score_draws(model, batch, transition).log_prob
    assert log_prob.requires_grad
    return float(((log_prob - batch.old_log_prob).exp() - 1).detach().abs().max())


def take(batch: Batch, index: Tensor) -> Batch:
    """Pick rows of a batch by index [N] int64 (or bool [B]), conditioning included."""
    kept = [name for name in Batch._fields if name not in ("cond", "rows", "unrolled", "query")]
    fields = {name: getattr(batch, name)[index] for name in kept}
    return Batch(**fields, cond={name: value[index] for name, value in batch.cond.items()})


def seeds(*numbers: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(n) for n in numbers]


def sigmas_of(plan: Plan) -> Tensor:
    """Return the sigmas of a plan on a linear grid of time shift 3."""
    if plan.sigma_grid is None:
        return linear_grid(len(plan.noise), 3.0)
    return read_sigma_grid(linear_grid(plan.sigma_grid.steps, 3.0), plan.sigma_grid)


def run(
    plan: Plan,
    transition: Transition = dance_sde,
    *,
    model: Any = None,
    **options: Any,
) -> Rollout:
    """Sample two images of three prompts, of latents 3 x 2 x 2, or as the options say."""
    model = model or LinearFlow()
    prompts = options.pop("prompts", PROMPTS)
    cond = options.pop("cond", None) or model.encode(prompts)
    filled: dict[str, Any] = {
        "group_size": 2,
        "generators": seeds(*range(len(prompts))),
        "sigmas": sigmas_of(plan),
        "shape": SHAPE,
        **options,
    }
    return rollout(model, cond, plan, transition, **filled)


def counted(
    plan: Plan, transition: Transition = dance_sde, **options: Any
) -> tuple[Rollout, Counting]:
    """Sample as `run` does, and count network calls and rows."""
    counting = Counting(LinearFlow())
    return run(plan, transition, model=counting, **options), counting


def euler_walk(x: Tensor, places: Sequence[int], sigmas: Tensor, prompt: int) -> Tensor:
    """Take Euler steps of one latent between places of a grid, written out."""
    model = LinearFlow()
    cond = {name: value[prompt : prompt + 1] for name, value in model.encode(PROMPTS).items()}
    x = x[None]
    for here, there in zip(places, places[1:], strict=False):
        with torch.no_grad():
            v = model.velocity(x, sigmas[here].expand(1), cond)
        x = x + (sigmas[there] - sigmas[here]) * v
    return x[0]


def check_forest(ro: Rollout) -> None:
    parent, step, std, group = ro.tree
    inner = parent >= 0
    ids = torch.arange(len(parent))
    assert bool((parent < ids).all())
    assert bool((step[parent[inner]] < step[inner]).all()) and bool((step[~inner] == 0).all())
    assert bool((group[parent[inner]] == group[inner]).all())
    drawn = std > 0
    assert bool((step[drawn] == step[parent[drawn]] + 1).all())
    assert bool(ro.log_prob.isfinite().all()) and bool((ro.log_prob[~drawn] == 0).all())
    assert torch.equal(ro.noise_scale > 0, drawn)
    assert len(ro.leaf.unique()) == len(ro.leaf) and bool(
        (step[ro.leaf] == len(ro.sigmas) - 1).all()
    )
    assert not bool(torch.isin(ro.leaf, parent).any())


def ratios(
    model: FlowModel, ro: Rollout, transition: Transition, chunk: int | None = None
) -> Tensor:
    batch = decisions(
        ro, torch.zeros(len(ro.x), device=ro.x.device), nodes=ro.tree.std.nonzero().flatten()
    )
    parts = torch.arange(len(batch.x)).split(chunk or max(1, len(batch.x)))
    with torch.no_grad():
        pieces = [take(batch, index) for index in parts]
        return torch.cat(
            [(score_draws(model, b, transition).log_prob - b.old_log_prob).exp() for b in pieces]
        )
