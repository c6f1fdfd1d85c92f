"""What a loss may want to know of the nodes of a forest: the best leaf below, how many siblings are
trained, how long the velocity is."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.forest import best_below, count_trained
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import length_ratio
from flowrl.core.part import Part
from flowrl.core.types import LossInput, Plan, Rollout
from flowrl.training.learn import CallRows
from flowrl.training.run import Run
from flowrl.training.task import Task

NONZERO = "flowrl.algorithms.selection.select.nonzero"


class BestLeaf(Part):
    """The best leaf below each state, and its advantage (`best`)."""

    name = "best leaf"
    when = ("needs.best",)

    def node_facts(self, run: Run, ro: Rollout, advantage: Tensor) -> dict[str, Tensor]:
        """Number the best leaf below each node."""
        return {"best": best_below(ro, advantage)}

    def provide(self, run: Run, rows: CallRows, data: LossInput) -> LossInput:
        """Look up the leaf's latent: below the state that a draw came from."""
        local, nodes = rows.local, rows.batch.node
        draws = run.method.likelihood.trains == "draws"
        above = local.rollout.tree.parent[nodes] if draws else nodes
        best = local.table.facts["best"][above]
        x0, advantage = local.rollout.x[best], local.table.advantage[best]
        return data._replace(best_x0=x0, best_advantage=advantage)


class Siblings(Part):
    """How many trained nodes a row's prompt has in all, and which rows were scored (`siblings`)."""

    name = "siblings"
    when = ("needs.siblings",)

    def check(self, task: Task, plan: Plan) -> None:
        """Refuse a selection that tears a prompt's images apart: rewards decide which it drops, so
        no rehearsal would find it."""
        config = task.config
        if any(call.path == NONZERO for call in config.select):
            raise ConfigError(
                f"select nonzero: leaves out images of advantage 0, and loss {config.loss.fn} "
                "compares all images of a prompt, whose group would be torn; leave this selection "
                "out"
            )

    def node_facts(self, run: Run, ro: Rollout, advantage: Tensor) -> dict[str, Tensor]:
        """Count once for all network calls, since the host waits for it."""
        everyone = torch.arange(len(advantage), device=advantage.device)
        facts = {"siblings": count_trained(ro, run.method.likelihood.trains, everyone)}
        scored = run.reward_set.scored
        return facts if scored is None else {**facts, "scored": scored}

    def provide(self, run: Run, rows: CallRows, data: LossInput) -> LossInput:
        """Look up the rows' counts."""
        known = "scored" in rows.local.table.facts
        scored = rows.fact("scored") if known else None
        return data._replace(siblings=rows.fact("siblings"), scored=scored)


class VelocityLength(Part):
    """How long the velocity is beside that of the weights from before training.

    What NormGuard (2606.27771) watches: some losses make velocities 5 to 15 % longer. Nothing is
    read on the host.
    """

    name = "velocity length"
    when = ("needs.ref",)

    def measure(self, run: Run, data: LossInput) -> dict[str, Tensor]:
        """Return {"velocity_length": |v| / |v_ref| [B]}, where both are there; a likelihood with
        `judge` has others see another state than its own."""
        ref = data.under["ref"].v if "ref" in data.under else None
        v = data.now.v
        if v is None or ref is None or hasattr(run.method.likelihood, "judge"):
            return {}
        return {"velocity_length": length_ratio(v.detach(), ref.detach())}
