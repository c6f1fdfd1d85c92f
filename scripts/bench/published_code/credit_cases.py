"""Published advantages and the loss of a group beside ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gaps import SHAPE, Gaps, forest, gap
from torch import Tensor

from flowrl.algorithms.credit.advantages import depth_norm, group_norm
from flowrl.algorithms.credit.baselines import history_norm
from flowrl.algorithms.losses.comparisons import dgpo
from flowrl.algorithms.plans.solvers import ode
from flowrl.algorithms.plans.trees import tree as tree_plan
from flowrl.algorithms.reward_mix.aggregate import advantage_sum
from flowrl.algorithms.transitions import dance_sde, flow_sde
from flowrl.core.types import Batch, Eval, LossInput, Rollout, Scores

BETA = 5.0  # of DGPO's loss: leaves the weights of random groups between 0.1 and 0.9


def prompt_statistics(code: dict[str, Any]) -> Gaps:
    """Flow-GRPO's advantages, by the std of a prompt and of all, with a group of equal rewards."""
    _, made = forest(ode(0, steps=2), flow_sde, prompts=5, group=6)
    prompt = made.tree.group[made.leaf]
    reward = torch.randn(30, generator=torch.Generator().manual_seed(0))
    reward[prompt == 2] = 0.5
    gaps: Gaps = {}
    for std in ("group", "global"):
        tracker = code["PerPromptStatTracker"](global_std=std == "global")
        theirs = tracker.update([str(int(p)) for p in prompt], reward.numpy())
        ours = group_norm(reward, made.leaf, made.tree, std=std, eps=1e-4)  # type: ignore[arg-type]
        gaps[f"advantage, std of {std}"] = gap(ours[made.leaf], torch.from_numpy(theirs))
    return gaps


def branch_advantages(code: dict[str, Any]) -> Gaps:
    """BranchGRPO's values and advantages on a tree of ours, in both fusions."""
    plan = tree_plan(0, steps=6, noise_scale=0.3, splits=[0, 1, 3], ode_last=1)
    _, made = forest(plan, dance_sde, prompts=1, group=1)  # one root, eight leaves
    reward = torch.randn(len(made.leaf), generator=torch.Generator().manual_seed(0))
    gaps: Gaps = {}
    for fusion in ("mean", "softmax"):
        nodes = _nodes(code["TreeNode"], made)
        leaves = [nodes[int(v)] for v in made.leaf]
        _, by_depth = code["compute_node_rewards_from_leaves"](
            nodes[0], reward, leaves, fusion == "softmax"
        )
        found = code["compute_hierarchical_advantages_by_depth"](by_depth)
        theirs = torch.stack([found[str(v)].reshape(()) for v in range(len(nodes))])
        ours = depth_norm(
            reward, made.leaf, made.tree, fusion=fusion,  # type: ignore[arg-type]
            eps=1e-8, ddof=1, log_prob=made.log_prob,
        )  # fmt: skip
        drawn = made.tree.std > 0
        gaps[f"advantage, fusion {fusion}"] = gap(ours[drawn], theirs[drawn])
    return gaps


def _nodes(kind: Any, made: Rollout) -> list[Any]:
    """Set a forest of one tree as theirs."""
    nodes: list[Any] = []
    for v, parent in enumerate(made.tree.parent.tolist()):
        above = None if parent < 0 else nodes[parent]
        node = kind(str(v), torch.zeros(1), parent=above, step=int(made.tree.step[v]))
        node.log_prob = made.log_prob[v].float()
        if above is not None:
            above.add_child(node)
        nodes.append(node)
    return nodes


def prompt_history(code: dict[str, Any]) -> Gaps:
    """DDPO's advantages by a prompt's own history, over six iterations: at first there are too few
    rewards of it, and later more than are kept."""
    _, made = forest(ode(0, steps=2), flow_sde, prompts=5, group=6)
    prompts = [f"prompt {int(p)}" for p in made.tree.group[made.leaf]]
    tracker = code["PerPromptStatTracker"](16, 10)
    credit = history_norm(buffer=16, least=10)
    credit.start(prompts)
    draw = torch.Generator().manual_seed(0)
    ours, theirs = [], []
    for _ in range(6):
        reward = torch.randn(30, generator=draw)
        theirs.append(torch.from_numpy(tracker.update(prompts, reward.numpy())))
        found = credit(reward, made.leaf, made.tree, prompts=prompts)
        credit.update(reward, made.leaf, made.tree, prompts=prompts)
        ours.append(found[made.leaf])
    return {"advantage": gap(torch.stack(ours), torch.stack(theirs))}


def summed_advantages(code: dict[str, Any]) -> Gaps:
    """PaCo-RL's sum of the advantages of two rewards, by the std of a prompt and of all."""
    _, made = forest(ode(0, steps=2), flow_sde, prompts=5, group=6)
    draw, weights = torch.Generator().manual_seed(0), {"a": 0.7, "b": 0.3}
    values = {name: torch.randn(30, generator=draw) for name in weights}
    prompt = made.tree.group[made.leaf]
    gaps: Gaps = {}
    for std in ("group", "global"):
        mixed = advantage_sum(
            Scores(values, weights, made.leaf, made.tree),
            lambda reward, std=std: group_norm(  # type: ignore[misc]
                reward, made.leaf, made.tree, std=std, eps=1e-12
            ),
        )
        called = code["weighted_advantage_sum_aggregate_fn"](std == "global", weights)
        split = {
            name: {int(p): value[prompt == p].numpy() for p in prompt.unique()}
            for name, value in values.items()
        }
        found = called(**split)
        theirs = np.concatenate([found[int(p)] for p in prompt.unique()])
        gaps[f"advantage, std of {std}"] = gap(mixed.advantage[made.leaf], torch.from_numpy(theirs))
    return gaps


def dgpo_loss(code: dict[str, Any]) -> Gaps:
    """DGPO's loss of four groups of six, and its gradient by the velocity. The clipping, which is
    outside of the published function, is left out."""
    draw = torch.Generator().manual_seed(0)
    now, ref, target = torch.randn(3, 24, *SHAPE, generator=draw)
    advantage, group = torch.randn(24, generator=draw), torch.arange(4).repeat_interleave(6)
    info = {"local_group_indices": group, "num_groups": 4}

    def theirs(v: Tensor) -> Tensor:
        function = code["compute_group_dgpo_loss_allreduce"]
        loss: Tensor = function(v, ref, target, advantage, info, None, BETA, group_size=6)
        return loss

    def ours(v: Tensor) -> Tensor:
        """Return the mean loss of the same rows."""
        zero, rows = torch.zeros(24), torch.arange(24)
        batch = Batch(
            x=ref, sigma=zero + 0.5, sigma_next=zero + 0.5, noise_scale=zero, target=target,
            old_log_prob=zero, advantage=advantage, node=rows, parent=rows, step=0 * rows, cond={},
        )  # fmt: skip
        seen = [Eval(zero.double(), mean, zero, mean) for mean in (v, ref)]
        under = {"ref": seen[1], "old": seen[1]}
        data = LossInput(batch, seen[0], zero, under=under, segment=group, siblings=0 * rows + 6)
        return dgpo(data, beta=BETA, clip=1e9)[0].mean()

    losses, slopes = [], []
    for called in (ours, theirs):
        v = now.clone().requires_grad_()
        loss = called(v)
        loss.backward()
        losses.append(loss.reshape(1))
        slopes.append(v.grad)
    return {"loss": gap(*losses), "its gradient": gap(*slopes)}
