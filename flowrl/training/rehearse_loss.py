"""Call the loss and the penalty of a config once, on a rehearsed rollout: so what they refuse, such
as a clip range of 0 or a segment that is missing, is found before any weight is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flowrl.algorithms.nodes import best_below, count_trained, trained_nodes
from flowrl.config.load import Config
from flowrl.core.abilities import ExtendsModel
from flowrl.core.errors import ConfigError
from flowrl.core.seeds import NodeStreams, generator
from flowrl.core.types import Batch, Cond, Eval, FlowModel, LossInput, RealRows, Rollout
from flowrl.training.method import Method
from flowrl.training.metrics import check_names


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
    if "reward_variance" in method.needs:
        data = data._replace(reward_variance=advantage.new_zeros(len(batch.node)))
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
