"""What training knows of the nodes of a forest before the first network call."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.nodes import best_below, count_trained, states_of, trained_nodes
from flowrl.core.errors import RunError
from flowrl.core.seeds import generator
from flowrl.core.types import Rollout, SelectInput
from flowrl.training.minibatches import Minibatch
from flowrl.training.setup import Setup
from flowrl.training.shared_forest import NodeTable


def node_table(run: Setup, ro: Rollout, advantage: Tensor) -> NodeTable:
    """Say of each node [V] what training needs besides the rollout. Raises RunError if nothing is
    left to train."""
    method = run.method
    segment = method.segment(ro) if method.segment else None
    # how much each node counts
    factor = torch.ones_like(advantage)
    rng = generator(run.config.seed, "select", run.iteration)
    data = SelectInput(ro, advantage, segment, run.iteration, rng, method.transition)
    data = data._replace(reward=run.reward_set.total)
    for select in method.select:
        factor = factor * select(data._replace(factor=factor)).to(factor)
    nodes = trained_nodes(ro, method.likelihood.trains)
    if not bool((factor[nodes] > 0).any()):
        raise RunError(
            f"iteration {run.iteration}: `select` left none of {len(nodes)} {_name(run)} to train"
        )
    best = best_below(ro, advantage) if "best" in method.needs else None
    variance = run.reward_set.variance if "reward_variance" in method.needs else None
    # counted once, since the host waits for it
    everyone = torch.arange(len(advantage), device=advantage.device)
    wanted = "siblings" in method.needs
    count = count_trained(ro, method.likelihood.trains, everyone) if wanted else None
    scored = run.reward_set.scored if wanted or method.companions else None
    return NodeTable(advantage, factor, segment, best, run.reward_set.gate, variance, count, scored)


def units(run: Setup, ro: Rollout, table: NodeTable) -> tuple[Tensor, Tensor]:
    """List the nodes that are trained -> them [N] and the unit of each [N]: nodes of one unit stay
    together in optimizer steps and network calls."""
    nodes = trained_nodes(ro, run.method.likelihood.trains)
    if run.method.select:
        nodes = nodes[table.factor[nodes] > 0]
    return nodes, _unit_of(run, ro, table, nodes)


def first_unit(run: Setup, ro: Rollout, table: NodeTable) -> Minibatch:
    """Return one unit whole, since losses refuse a part of one: the first that is trained, or of
    the first node where a selection took all."""
    nodes, unit = units(run, ro, table)
    if not len(nodes):
        nodes = trained_nodes(ro, run.method.likelihood.trains)
        unit = _unit_of(run, ro, table, nodes)
    first = nodes[unit == unit[0]]
    return Minibatch(first, torch.zeros_like(first))


def _unit_of(run: Setup, ro: Rollout, table: NodeTable, nodes: Tensor) -> Tensor:
    if table.segment is not None:
        return table.segment[nodes]
    return states_of(ro, nodes, run.method.likelihood.trains)


def _name(run: Setup) -> str:
    trains = run.method.likelihood.trains
    return "decisions" if trains == "draws" else trains
