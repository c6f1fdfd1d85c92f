"""Find out from the config alone whether its plan can be trained at every iteration, and what that
costs.

An iteration is rehearsed without a model: latents of one number that never move, rewards by chance.
So segments, selections, credits, losses and parts that do not fit their plan are found before any
weight is read.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowrl.algorithms.forest import best_below, count_trained, states_of, trained_nodes
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.rollout.plan_steps import key_of, steps_of, windows_of
from flowrl.config.calls import Call
from flowrl.config.load import Config
from flowrl.core.abilities import ExtendsModel
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.noise_path import linear_grid
from flowrl.core.seeds import NodeStreams, generator
from flowrl.core.types import (
    Batch,
    Cond,
    Eval,
    FlowModel,
    LossInput,
    Plan,
    RealRows,
    Rollout,
    SelectInput,
)
from flowrl.training.checks import check_ahead
from flowrl.training.method import Method, check_names, method_of, unrolled_calls
from flowrl.training.parts import parts_of
from flowrl.training.task import IterationCost, Task

MOST_ITERATIONS = 10_000  # plans looked at: windows move and are drawn anew
SHIFT = 3.0  # of the grid that stands for the model's: whether a std is 0 does not depend on it
LEAST_STD = 1e-6  # rounding makes sin(pi) 1e-7
# more than all of the predicted noise cannot be replaced
MOST_NOISE_SCALE = {"cps": 1.0, "ddim": 1.0, "stepwise_sde": 1.0}
ALONE_PENALTY = "flowrl.algorithms.losses.policy.penalty_alone"


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


def check_plan(config: Config, task: Task | None = None) -> RehearsedIteration:
    """Refuse a config whose plan cannot be trained at some iteration -> what the first iteration
    will cost.

    Raises: ConfigError that names the numbers: a group that the leaves do not divide, fewer states
    than updates, no noise on a step that is trained, a transition that turns noise into a std of 0,
    segments, a selection or a credit that do not fit the plan, or anything that fails.
    """
    if task is None:
        method = method_of(config)
        task = Task(config=config, method=method, parts=parts_of(config, method))
    method, first, known = task.method, None, set()
    check_ahead(config, method)
    for iteration in range(min(config.train.iterations, MOST_ITERATIONS)):
        where = (config.source or "config") + (f", iteration {iteration}" if iteration else "")
        try:
            whole, rehearsed = method.plan(iteration), []
            for plan in windows_of(whole):
                # most iterations have a plan that was looked at before
                key = key_of(plan)
                if key in known:
                    continue
                known.add(key)
                if method.likelihood.trains == "draws":
                    _check_noise(config, plan)
                rehearsed.append(_rehearse(task, plan, iteration, task.work(whole)))
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


def _rehearse(task: Task, plan: Plan, iteration: int, work: IterationCost) -> RehearsedIteration:
    """Sample one prompt's forest, give it credit and choose what to train, as the trainer will;
    work: of all prompts."""
    config, method = task.config, task.method
    check_together(config, method, plan)
    task.parts.ask("check", task, plan)
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
        trained = first * task.trained_calls(0, last)
        trained += (states - first) * task.trained_calls(1, last)
    for part in task.parts.at("calls"):
        trained += work.prompts * part.calls(task, made, config.train.iterations - 1)
    calls = work.nfe + trained
    return RehearsedIteration(
        work, work.prompts * len(made.x), work.prompts * len(nodes), states, calls
    )


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


def check_together(config: Config, method: Method, plan: Plan) -> None:
    """Raise ConfigError for a likelihood that does not go with plan, noise, penalty or loss."""
    # what is trained decides what the plan has to offer: noise that differs, or every step
    trains = method.likelihood.trains
    if config.train.same_noise and trains == "roots":
        raise ConfigError(
            f"train.same_noise: likelihood {config.likelihood.fn} trains the initial noise, and "
            "images that start from one have none to compare; set it to false"
        )
    if trains == "steps" and not plan.every_step:
        raise ConfigError(
            f"plan {config.plan.fn}: likelihood {config.likelihood.fn} trains every step of a "
            "few-step sampler, and this plan does not keep them; take plan: {fn: few_step, steps: "
            "4}"
        )
    # the KL compares two policies on the same states, which a likelihood with a judge has not
    if hasattr(method.likelihood, "judge") and method.kl is not None:
        raise ConfigError(
            f"kl: likelihood {config.likelihood.fn} asks other weights about other states than the "
            "policy's, so their distance is none; leave the section kl out"
        )
    # without a segment the loss itself says what is missing first
    alike = config.segment is None or getattr(method.likelihood, "shared", True)
    if "shared_noise" in method.needs and not alike:
        raise ConfigError(
            f"loss {config.loss.fn}: all images of a prompt must have the same time and noise; set "
            "likelihood.shared=true"
        )
    if config.loss.path == ALONE_PENALTY and method.kl is None:
        raise ConfigError(
            f"loss {config.loss.fn}: learns from the section kl alone, and there is none with a "
            "beta above 0; add one, such as kl: {fn: data_velocity, beta: 1.0}"
        )


def check_alike(config: Config, made: Rollout) -> None:
    """Raise ConfigError if all images of a prompt are one: they start from the same noise, and no
    step of the plan adds any. `made`: one prompt's forest, by any model."""
    images = made.x[made.leaf]
    if not config.train.same_noise or len(images) < 2 or bool((images != images[0]).any()):
        return
    raise ConfigError(
        f"train.same_noise: all images of a prompt start from one noise, and plan {config.plan.fn} "
        "adds none on the way, so they would be the same image and nothing could be learnt from "
        "comparing them; set it to false, or take a plan whose steps have noise"
    )


def check_segment(config: Config, method: Method, segment: Tensor | None, nodes: Tensor) -> None:
    """Raise ConfigError for a segment [V] that has no id for what is trained, nodes [N]: it would
    join the images of all prompts."""
    if segment is None or config.segment is None or not bool((segment[nodes] < 0).any()):
        return
    raise ConfigError(
        f"segment {config.segment.fn}: joins draws, and likelihood {config.likelihood.fn} trains "
        f"{method.likelihood.trains}, which are in none of its segments; set segment={{fn: "
        "prompt} for a loss that compares the images of a prompt, else leave the section out"
    )


class MotionlessModel:
    """A model of one weight, whose velocity is 0 everywhere and whose images are black: they know
    the weight, so that a gradient reaches it. `named` is the conditioning that it has."""

    def __init__(self, named: str = "row") -> None:
        self.weight, self.named = nn.Parameter(torch.zeros(())), named

    def encode(self, prompts: list[str]) -> Cond:
        """Return an empty vector for each prompt."""
        return {self.named: torch.zeros(len(prompts), 1)}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return zeros [B, *]."""
        return torch.zeros_like(x) + self.weight

    def decode(self, x0: Tensor) -> Tensor:
        """Return black images of one pixel [B, 3, 1, 1] of latents [B, 1]."""
        return (0 * x0)[:, :, None, None].expand(-1, 3, 1, 1)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the weight."""
        return {"weight": self.weight}


@torch.enable_grad()
def rehearse_loss(
    config: Config,
    method: Method,
    made: Rollout,
    advantage: Tensor,
    nodes: Tensor,
    segment: Tensor | None,
) -> Batch:
    """Make the batch of nodes [N] of a rollout, evaluate it with a stand-in for the model, and call
    what looks at it -> the batch. Raises ConfigError as they do, and for a loss that does not
    depend on what is trained.

    On policy: all weights that the loss asks for give the same evaluation.
    """
    likelihood = method.likelihood
    stand_in: Any = MotionlessModel(getattr(likelihood, "reads", "") or "row")
    model: FlowModel = stand_in
    if isinstance(likelihood, ExtendsModel):
        model = likelihood.extend(model, (1,), [""], config.seed)
        made = made._replace(cond={**made.cond, **model.encode([""])})
    # the batch, as every set of weights evaluates it
    streams = NodeStreams(made.tree.group, "rehearsal")
    batch = likelihood.batch(made, advantage, nodes, streams)
    now = likelihood.evaluate(model, batch, method.transition)
    # what loss and penalty see: of other weights there is no gradient
    other = _without_gradient(now)
    under = dict.fromkeys(method.snapshots, other)
    data = LossInput(batch, now, other.log_prob, other.mean, under)
    if "teacher" in method.needs:
        data = data._replace(teachers=((other, torch.ones(len(batch.node))),))
    if segment is not None:
        data = data._replace(segment=segment[batch.node])
    if "best" in method.needs:
        draws = likelihood.trains == "draws"
        above = made.tree.parent[batch.node] if draws else batch.node
        best = best_below(made, advantage)[above]
        data = data._replace(best_x0=made.x[best], best_advantage=advantage[best])
    if "siblings" in method.needs:
        data = data._replace(siblings=count_trained(made, likelihood.trains, batch.node))
    if "data" in method.needs and now.v is not None:
        seen = model.velocity(batch.x, batch.sigma, batch.cond)
        data = data._replace(data=RealRows(seen, torch.zeros_like(seen), batch.sigma))
    if now.images is not None:
        value = now.images.flatten(1).mean(1)
        counting = [name for name, weight in config.reward_weights.items() if weight]
        data = data._replace(reward=value, rewards=dict.fromkeys(counting, value))
    loss, metrics = method.loss(data)
    check_names(metrics)
    _check_depends(config, loss, now)
    _rehearse_companions(config, method, made, advantage, streams, model, segment)
    if method.kl is not None:
        method.kl(data)
    return batch


def _rehearse_companions(
    config: Config,
    method: Method,
    made: Rollout,
    advantage: Tensor,
    streams: NodeStreams,
    model: FlowModel,
    segment: Tensor | None,
) -> None:
    generates: Any = method.likelihood  # of models that are trained along alone, it has queries
    # a selection of what the policy learns from is not theirs
    nodes = trained_nodes(made, method.likelihood.trains)
    for role in method.companions.values():
        mine = role.rows(made, nodes, generator(config.seed, role.name, "rehearsal"))
        rows = role.batch(made, advantage, mine, streams, generates.queries)
        seen = role.evaluate(model, rows)
        found = LossInput(rows, seen, rows.old_log_prob, under=dict.fromkeys(role.looks_at, seen))
        if segment is not None:
            counted = count_trained(made, "leaves", rows.node)
            found = found._replace(segment=segment[rows.node], siblings=counted)
        role.loss(found)


def _without_gradient(now: Eval) -> Eval:
    parts: list[Any] = [part if part is None else part.detach() for part in now]
    return Eval(*parts)


def _check_depends(config: Config, loss: Tensor, now: Eval) -> None:
    """Raise ConfigError for a loss [B] that is the same whatever is trained."""
    if loss.requires_grad:
        return
    fits = "another loss"
    if now.images is not None:
        fits = "loss reward_ascent, which follows the reward through the images"
    elif config.likelihood.fn == "generated":
        fits = "a loss of what a step generates, such as tdm or tdm_r1"
    why = "" if now.log_prob.requires_grad else ", which has no log-prob,"
    raise ConfigError(
        f"loss {config.loss.fn}: does not depend on what likelihood {config.likelihood.fn}{why} "
        "trains, so there is no gradient and nothing would be learnt; take a likelihood with a "
        f"log-prob (reverse, forward, prior), or {fits}"
    )
