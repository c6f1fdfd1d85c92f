"""Find out from the config alone whether its plan can be trained at every iteration, and what that
costs.

An iteration is rehearsed without a model: latents of one number that never move, rewards by chance.
So segments, selections and credits that do not fit their plan are found before any weight is read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.nodes import states_of, trained_nodes
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.rollout.own_windows import windows_of
from flowrl.algorithms.rollout.plan_steps import steps_of
from flowrl.config.calls import Call
from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.noise_path import linear_grid
from flowrl.core.seeds import generator
from flowrl.core.types import FlowModel, Plan, Rollout, SelectInput
from flowrl.training.combinations import (
    check_alike,
    check_guidance,
    check_scout,
    check_segment,
    check_together,
)
from flowrl.training.companions import calls_of
from flowrl.training.guidance import guides_reference, is_guided, samples_guided
from flowrl.training.iteration_cost import IterationCost, iteration_cost
from flowrl.training.method import Method, method_of, unrolled_calls
from flowrl.training.rehearse_loss import MotionlessModel, rehearse_loss

MOST_ITERATIONS = 10_000  # plans looked at: windows move and are drawn anew
SHIFT = 3.0  # of the grid that stands for the model's: whether a std is 0 does not depend on it
LEAST_STD = 1e-6  # rounding makes sin(pi) 1e-7
# more than all of the predicted noise cannot be replaced
MOST_NOISE_SCALE = {"cps": 1.0, "ddim": 1.0, "stepwise_sde": 1.0}


class RehearsedIteration(NamedTuple):
    """What one iteration will cost and leave behind, over all prompts."""

    work: IterationCost
    nodes: int  # latents that are stored
    # that are trained; where `select` goes by chance or rewards, as one rehearsed prompt has it
    decisions: int
    states: int  # rows of the network that these take
    # of the network per latent: sampling, 3 per trained state, 1 more for each other weights that
    # loss or KL evaluate; guidance doubles them. In the first iteration "old" may be the current
    # weights and cost none; counted are the later ones
    calls: int


def cost_of(config: Config, iteration: int = 0) -> IterationCost:
    """Count what one iteration of a config costs. Raises ConfigError as `iteration_cost` and
    the plan do."""
    return _count(config, config.call("plan")(iteration))


def check_plan(config: Config) -> RehearsedIteration:
    """Refuse a config whose plan cannot be trained at some iteration -> what the first iteration
    will cost.

    Raises: ConfigError that names the numbers: a group that the leaves do not divide, fewer states
    than updates, no noise on a step that is trained, a transition that turns noise into a std of 0,
    segments, a selection or a credit that do not fit the plan, or anything that fails.
    """
    method, first, known = method_of(config), None, set()
    for iteration in range(min(config.train.iterations, MOST_ITERATIONS)):
        where = (config.source or "config") + (f", iteration {iteration}" if iteration else "")
        try:
            whole, rehearsed = method.plan(iteration), []
            for plan in windows_of(whole):
                # most iterations have a plan that was looked at before
                key = repr([row.tolist() if isinstance(row, Tensor) else row for row in plan])
                if key in known:
                    continue
                known.add(key)
                if method.likelihood.trains == "draws":
                    _check_noise(config, plan)
                rehearsed.append(_rehearse(config, method, plan, iteration, _count(config, whole)))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ConfigError(
                f"{where}: plan, credit, select, likelihood, loss and kl were tried out without a "
                f"model and failed with {reason}; is one of their numbers out of range?"
            ) from error
        # where prompts have windows of their own: the one that stores most
        first = first or max(rehearsed, key=lambda one: one.nodes, default=None)
    assert first is not None  # train.iterations is at least 1
    return first


def _rehearse(
    config: Config, method: Method, plan: Plan, iteration: int, work: IterationCost
) -> RehearsedIteration:
    """Sample one prompt's forest, give it credit and choose what to train, as the trainer will;
    work: of all prompts."""
    check_together(config, method, plan)
    check_scout(config, plan, work)
    check_guidance(config, method, plan)
    # one prompt, latents of one number
    model: FlowModel = MotionlessModel()  # type: ignore[assignment]
    made = rollout(
        model,
        {"row": torch.zeros(1, 1)},
        plan,
        method.transition,
        sigmas=linear_grid(len(plan.noise), SHIFT),
        shape=(1,),
        group_size=work.roots,
        same_noise=config.train.same_noise,
        generators=[generator(config.seed, "rehearsal", iteration)],
    )
    check_alike(config, made)
    # rewards by chance
    advantage = _credit(config, method, made)
    segment = _segment(config, method, made)
    check_segment(config, method, segment, trained_nodes(made, method.likelihood.trains))
    nodes = _chosen(config, method, made, advantage, segment, iteration)
    _check_signal(config, method, advantage[nodes], work)
    read = [config.likelihood, config.loss, *([config.kl] if config.kl else [])]
    batch = None
    if all(_ours(call) for call in read) and (segment is not None or config.segment is None):
        batch = rehearse_loss(config, method, made, advantage, nodes, segment)
    # what that makes for all prompts
    unique = torch.unique(states_of(made, nodes, method.likelihood.trains))
    states = work.prompts * len(unique) * method.rows
    if batch is not None and batch.unrolled is not None:
        trained = work.prompts * unrolled_calls(batch.unrolled)[0]
    else:
        first, last = min(states, work.per_update), [config.train.iterations * work.updates]
        trained = first * method.trained_calls(0, last)
        trained += (states - first) * method.trained_calls(1, last)
    trained += work.prompts * _along(method, made, config.train.iterations - 1)
    if "moved" in needs_of(method.credit):  # what was drawn at the last visit, of one image
        trained += work.prompts * len(trained_nodes(made, method.likelihood.trains)) // work.roots
    calls = work.nfe + trained
    return RehearsedIteration(
        work, work.prompts * len(made.x), work.prompts * len(nodes), states, calls
    )


def _along(method: Method, made: Rollout, iteration: int) -> int:
    """Count the calls in which one prompt trains the models that learn along in an iteration."""
    nodes, rng = trained_nodes(made, method.likelihood.trains), torch.Generator()
    roles = [role for role in method.companions.values() if role.learns(iteration)]
    return sum(len(r.rows(made, nodes, rng)) * r.updates * calls_of(r) for r in roles)


def _check_signal(config: Config, method: Method, advantage: Tensor, work: IterationCost) -> None:
    """Raise ConfigError if rewards by chance, all different, leave everything without any
    advantage."""
    if bool((advantage != 0).any()) or "zero_advantage" in method.needs:
        return
    raise ConfigError(
        f"credit {config.credit.fn} gives every decision the advantage 0, whatever the rewards: "
        f"the {work.images // work.prompts} images of a prompt (train.group={config.train.group}) "
        "have nothing that they could be compared with; take a larger train.group, or a plan with "
        "more branches"
    )


def _credit(config: Config, method: Method, made: Rollout) -> Tensor:
    reward = torch.rand(len(made.leaf), generator=torch.Generator().manual_seed(0))
    if "sigma_rewards" in needs_of(method.credit):  # sure of every pair
        reward = reward * 1e6
    # what remembers prompts has met none yet
    if not _ours(config.credit) or needs_of(method.credit) & {"prompts", "state"}:
        return torch.ones(len(made.x))
    wanted = {"log_prob": made.log_prob} if "log_prob" in needs_of(method.credit) else {}
    return method.credit(reward, made.leaf, made.tree, **wanted)


def _segment(config: Config, method: Method, made: Rollout) -> Tensor | None:
    if config.segment is None or method.segment is None or not _ours(config.segment):
        return None
    return method.segment(made)


def _chosen(
    config: Config,
    method: Method,
    made: Rollout,
    advantage: Tensor,
    segment: Tensor | None,
    iteration: int,
) -> Tensor:
    """Return the nodes that are trained. Raises ConfigError if a selection leaves none."""
    # the selections that bear a rehearsal
    rng = generator(config.seed, "select", iteration)
    data = SelectInput(made, advantage, segment, iteration, rng, method.transition)
    kept = torch.ones_like(advantage)
    for call, select in zip(config.select, method.select, strict=True):
        if _ours(call):
            kept = kept * select(data._replace(factor=kept))
    nodes = trained_nodes(made, method.likelihood.trains)
    chosen = nodes[kept[nodes] > 0]
    if not len(chosen):
        names = " and ".join(call.fn for call in config.select)
        raise ConfigError(
            f"select: {names} left none of the {len(nodes)} decisions of a prompt to train"
        )
    return chosen


def _ours(call: Call) -> bool:
    """Say whether a function can be trusted to bear a rehearsal; a plugin's may expect real
    images."""
    return call.path.startswith("flowrl.")


def _count(config: Config, plan: Plan) -> IterationCost:
    t, likelihood = config.train, config.likelihood.make()
    # all that decides how many calls an iteration makes
    return iteration_cost(
        plan,
        prompts=t.prompts,
        group=t.group,
        updates=t.updates,
        micro_batch=t.micro_batch,
        rollout_batch=t.rollout_batch,
        guided=is_guided(config),
        samples_guided=samples_guided(config),
        guides_reference=guides_reference(config),
        same_noise=t.same_noise,
        trains=likelihood.trains,
        rows=max(1, likelihood.rows_per_state),
        previews=(config.scout.images, config.scout.steps),
    )


def _check_noise(config: Config, plan: Plan) -> None:
    """Raise ConfigError unless some step but the last has noise, and the transition gives each of
    these a std."""
    name, noise_scales = f"plan {config.plan.fn}", [step.noise_scale for step in steps_of(plan)]
    noisy = [k for k, noise_scale in enumerate(noise_scales) if noise_scale > 0]
    last = len(noise_scales) - 1
    # without noise there is no probability to raise
    if not noisy:
        raise ConfigError(
            f"{name}: no step has noise, so every std is 0 and nothing can be trained; got "
            "noise_scale "
            f"{config.plan.kwargs.get('noise_scale', 0.0)}, give it one above 0"
        )
    # some transitions have a largest noise scale
    most = MOST_NOISE_SCALE.get(config.transition.fn, math.inf)
    if max(noise_scales) > most:
        raise ConfigError(
            f"{name}: {config.transition.fn} takes noise scales from 0 to {most:g}, got "
            f"{max(noise_scales):g} at step "
            f"{noise_scales.index(max(noise_scales))} of {len(noise_scales)} (counted from 0); "
            "lower plan.noise_scale or its growth"
        )
    # the last step's noise stays in the image, so it is never trained
    if noisy == [last]:
        raise ConfigError(
            f"{name}: the only noise is on step {last}, the last of {len(noise_scales)} (counted "
            "from 0), which is never "
            "trained: its std is 0 (cps) or stays in the image. Put noise on an earlier step"
        )
    # at a fork the std makes images differ, and a decision's log-probability divides by it
    stds = _stds(config, noise_scales)
    for k in noisy:
        if plan.branch[k] > 1 and not stds[k] > LEAST_STD:
            raise ConfigError(
                f"{name}: step {k} of {len(noise_scales)} (counted from 0) forks into "
                f"{int(plan.branch[k])}, but "
                f"{config.transition.fn} has a std of {stds[k]:.3g} there, so all of them would be "
                "one image; fork "
                "at an earlier step"
            )
        if k < last and not LEAST_STD < stds[k] < float("inf"):
            raise ConfigError(
                f"{name}: step {k} of {len(noise_scales)} (counted from 0) is to be trained, but "
                f"{config.transition.fn} "
                f"makes a std of {stds[k]:.3g} of noise scale {noise_scales[k]:g}; a draw needs a "
                "std above 0, so change "
                "plan.noise_scale, or the transition"
            )


def _stds(config: Config, noise_scales: list[float]) -> list[float]:
    """Ask the transition for the std of every step, on a grid of its own -> [S]."""
    grid = linear_grid(len(noise_scales), SHIFT).float()
    x = torch.zeros(len(noise_scales), 1)
    made = config.call("transition")(x, x, grid[:-1], grid[1:], torch.tensor(noise_scales))
    stds: list[float] = made.std.tolist()
    return stds
