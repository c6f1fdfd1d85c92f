"""Find out from the config alone whether its plan can be trained at every iteration, and what that costs.

An iteration is rehearsed without a model: latents of one number that never move, rewards by chance. So segments,
selections and credits that do not fit their plan are found before any weight is read.
"""

from __future__ import annotations

import inspect
import math
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.batches import decision_nodes, states_of
from flowrl.budget import Budget, budget
from flowrl.config import Call, Config
from flowrl.errors import ConfigError
from flowrl.flow import linear_grid
from flowrl.samplers.rollout import rollout
from flowrl.samplers.steps import steps_of
from flowrl.seeds import generator
from flowrl.types import Choice, Cond, Plan, Rollout

MOST_ITERATIONS = 10_000  # plans looked at: windows move and are drawn anew
TRAINED_CALLS = 3  # network calls that training one state costs: one forward, and a backward of twice its work
SHIFT = 3.0  # of the grid that stands for the model's: whether a std is 0 does not depend on it
LEAST_STD = 1e-6  # rounding makes sin(pi) 1e-7
MOST_LEVEL = {"cps": 1.0, "ddim": 1.0}  # more than all of the predicted noise cannot be replaced


class Forecast(NamedTuple):
    """What one iteration will cost and leave behind, over all prompts."""

    work: Budget
    nodes: int  # latents that are stored
    decisions: int  # that are trained; where `select` goes by chance or rewards, as one rehearsed prompt has it
    states: int  # that these were drawn from
    calls: int  # of the network per latent: sampling, 3 per trained state, 1 more under a KL; guidance doubles them


def budget_of(config: Config, iteration: int = 0) -> Budget:
    """Count what one iteration of a config costs. Raises ConfigError as `budget` and the plan do."""
    return _count(config, config.call("plan")(iteration))


def check_plan(config: Config) -> Forecast:
    """Refuse a config whose plan cannot be trained at some iteration -> what the first iteration will cost.

    Raises: ConfigError that names the numbers: a group that the leaves do not divide, fewer states than updates, no
    noise on a step that is trained, a transition that turns noise into a std of 0, segments, a selection or a credit
    that do not fit the plan.
    """
    first, known = None, set()
    for iteration in range(min(config.train.iterations, MOST_ITERATIONS)):
        where = (config.source or "config") + (f", iteration {iteration}" if iteration else "")
        try:
            plan = config.call("plan")(iteration)
            key = repr([field.tolist() if isinstance(field, Tensor) else field for field in plan])
            if key in known:
                continue
            known.add(key)
            _check_noise(config, plan)
            forecast = _rehearse(config, plan, iteration)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        first = first or forecast
    assert first is not None  # train.iterations is at least 1
    return first


def trained_calls(config: Config) -> int:
    """Return the network calls that training one state counts as; a KL adds the reference's forward pass."""
    return TRAINED_CALLS + (config.kl_beta > 0)


def is_guided(config: Config) -> bool:
    """Say whether each velocity evaluates the network with and without the prompt."""
    scale = config.model.kwargs.get("true_cfg_scale", config.model.kwargs.get("guidance"))
    return isinstance(scale, int | float) and scale > 1


class _Still:
    """A model that goes nowhere."""

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return torch.zeros_like(x)


def _rehearse(config: Config, plan: Plan, iteration: int) -> Forecast:
    """Sample one prompt's forest, give it credit and choose what to train, as the loop will."""
    work = _count(config, plan)
    made = rollout(
        _Still(),  # type: ignore[arg-type]
        {"row": torch.zeros(1, 1)},
        plan,
        config.call("transition"),
        sigmas=linear_grid(len(plan.noise), SHIFT),
        shape=(1,),
        group_size=work.roots,
        same_noise=config.train.same_noise,
        generators=[generator(config.seed, "rehearsal", iteration)],
    )
    weight = _credit(config, made)
    nodes = _chosen(config, made, weight, iteration)
    _check_signal(config, weight[nodes], work)
    decisions, states = len(nodes), len(torch.unique(states_of(made, nodes)))
    calls = work.evaluations + work.prompts * states * trained_calls(config)
    return Forecast(work, work.prompts * len(made.x), work.prompts * decisions, work.prompts * states, calls)


def _check_signal(config: Config, weight: Tensor, work: Budget) -> None:
    """Raise ConfigError if rewards by chance, all different, leave every decision without any weight."""
    if not bool((weight != 0).any()) and config.kl_beta == 0:
        raise ConfigError(
            f"credit {config.credit.fn} gives every decision the weight 0, whatever the rewards: the "
            f"{work.images // work.prompts} pictures of a prompt (train.group={config.train.group}) have nothing that "
            "they could be compared with; take a larger train.group, or a plan with more branches"
        )


def _credit(config: Config, made: Rollout) -> Tensor:
    reward = torch.rand(len(made.leaf), generator=torch.Generator().manual_seed(0))
    if not _ours(config.credit):
        return torch.ones(len(made.x))
    asks = {"log_prob": made.log_prob} if "log_prob" in inspect.signature(config.credit.function).parameters else {}
    weight: Tensor = config.credit.partial()(reward, made.leaf, made.tree, **asks)
    return weight


def _chosen(config: Config, made: Rollout, weight: Tensor, iteration: int) -> Tensor:
    """Return the decisions that are trained. Raises ConfigError if a selection leaves none."""
    segment = config.segment.partial()(made) if config.segment and _ours(config.segment) else None
    choice = Choice(made, weight, segment, iteration, generator(config.seed, "select", iteration))
    nodes = decision_nodes(made)
    kept = torch.ones_like(weight)
    for call in filter(_ours, config.select):
        kept = kept * call.partial()(choice)
    chosen = nodes[kept[nodes] > 0]
    if not len(chosen):
        names = " and ".join(call.fn for call in config.select)
        raise ConfigError(f"select: {names} left none of the {len(nodes)} decisions of a prompt to train")
    return chosen


def _ours(call: Call) -> bool:
    """Say whether a function can be trusted to bear a rehearsal; a plugin's may expect real pictures."""
    return call.path.startswith("flowrl.")


def _count(config: Config, plan: Plan) -> Budget:
    t = config.train
    return budget(
        plan,
        prompts=t.prompts,
        group=t.group,
        updates=t.updates,
        micro_batch=t.micro_batch,
        rollout_batch=t.rollout_batch,
        guided=is_guided(config),
        same_noise=t.same_noise,
    )


def _check_noise(config: Config, plan: Plan) -> None:
    """Raise ConfigError unless some step but the last has noise, and the transition gives each of these a std."""
    name, levels = f"plan {config.plan.fn}", [step.level for step in steps_of(plan)]
    noisy = [k for k, level in enumerate(levels) if level > 0]
    last = len(levels) - 1
    if not noisy:
        raise ConfigError(
            f"{name}: no step has noise, so every std is 0 and nothing can be trained; got level "
            f"{config.plan.kwargs.get('level', 0.0)}, give it one above 0"
        )
    most = MOST_LEVEL.get(config.transition.fn, math.inf)
    if max(levels) > most:
        raise ConfigError(
            f"{name}: {config.transition.fn} takes levels from 0 to {most:g}, got {max(levels):g} at step "
            f"{levels.index(max(levels))} of {len(levels)} (counted from 0); lower plan.level or its growth"
        )
    if noisy == [last]:
        raise ConfigError(
            f"{name}: the only noise is on step {last}, the last of {len(levels)} (counted from 0), which is never "
            "trained: its std is 0 (cps) or stays in the picture. Put noise on an earlier step"
        )
    stds = _stds(config, levels)
    for k in noisy:
        if plan.branch[k] > 1 and not stds[k] > LEAST_STD:
            raise ConfigError(
                f"{name}: step {k} of {len(levels)} (counted from 0) forks into {int(plan.branch[k])}, but "
                f"{config.transition.fn} has a std of {stds[k]:.3g} there, so all of them would be one picture; fork "
                "at an earlier step"
            )
        if k < last and not LEAST_STD < stds[k] < float("inf"):
            raise ConfigError(
                f"{name}: step {k} of {len(levels)} (counted from 0) is to be trained, but {config.transition.fn} "
                f"makes a std of {stds[k]:.3g} of level {levels[k]:g}; a draw needs a std above 0, so change "
                "plan.level, or the transition"
            )


def _stds(config: Config, levels: list[float]) -> list[float]:
    """Ask the transition for the std of every step, on a grid of its own -> [S]."""
    grid = linear_grid(len(levels), SHIFT).float()
    x = torch.zeros(len(levels), 1)
    made = config.call("transition")(x, x, grid[:-1], grid[1:], torch.tensor(levels))
    stds: list[float] = made.std.tolist()
    return stds
