"""Find the chains of a comb and the draws of a rake, as tables that credit functions can calculate
with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree


class Ancestry(NamedTuple):
    """What lies above each node."""

    root: Tensor  # [V] int64
    depth: Tensor  # [V] int64  decisions on the path from the root, the node itself included
    decision: Tensor  # [V] int64  the last of them; -1 where there is none


class Comb(NamedTuple):
    """C chains of w decisions, noisiest first."""

    decision: Tensor  # [C, w] int64
    seen: Tensor  # [C, w] int64  places in `leaf` of the images that follow the decisions
    start: Tensor  # [C] int64  places in `leaf` of the images without noise; -1 where there is none
    # [V] int64  place in `decision`, flattened, of the last decision at or above a node; -1 for
    # none
    owner: Tensor


class Rake(NamedTuple):
    """D decisions on a trunk without noise."""

    decision: Tensor  # [D] int64
    seen: Tensor  # [D, strides] int64  places in `leaf`, in the order of the strides
    owner: Tensor  # [V] int64  place in `decision` of the decision at or above a node; -1 for none


def spread_to_nodes(advantage: Tensor, owner: Tensor) -> Tensor:
    """Give every node the advantage of its `owner` among [C, w] or [D]; NaN and no owner give 0 ->
    [V] float32."""
    return torch.cat([advantage.flatten(), advantage.new_zeros(1)])[owner].nan_to_num().float()


def ancestry(tree: Tree) -> Ancestry:
    """Walk down the forest, one pass per denoising step."""
    noisy, parent = tree.std > 0, tree.parent.clamp_min(0)
    root = torch.arange(len(parent), device=parent.device)
    depth, decision = noisy.long(), torch.where(noisy, root, -1)
    for step in range(1, int(tree.step.max()) + 1):
        here = tree.step == step
        root = torch.where(here, root[parent], root)
        depth = torch.where(here, depth[parent] + noisy, depth)
        decision = torch.where(here & ~noisy, decision[parent], decision)
    return Ancestry(root, depth, decision)


def comb_of(name: str, leaf: Tensor, tree: Tree, *, baseline: bool) -> Comb:
    """Read one chain of w decisions per root, a leaf for each decision, and with `baseline` one for
    the root.

    `leaf` [L] are node ids. A leaf belongs to the last decision at or above it. The end of a chain
    may have two, a preview and the finished sample, which is the younger.

    Raises: ConfigError in the name of the credit `name`, saying what is missing.
    """
    above = ancestry(tree)
    # which chain each node is of [V], and the place [V] of its decision among those of all chains
    chain = torch.unique(above.root, return_inverse=True)[1]
    chains, length = int(chain.max()) + 1, int(above.depth.max())
    owner = torch.where(above.depth > 0, chain * length + above.depth - 1, -1)
    # in order, the places must be 0, 1, 2, ...: every chain has all its decisions, none forks
    nodes = (tree.std > 0).nonzero()[:, 0]
    order = owner[nodes].argsort()
    if length == 0 or not torch.equal(
        owner[nodes][order], torch.arange(chains * length, device=leaf.device)
    ):
        found = f"{len(nodes)} draws under {chains} initial noises, at most {length} in a row"
        raise _not_a_comb(name, found, baseline)
    # a leaf's place in a table [C, w + 1]: column 0 is the root's, column i the i-th decision's
    slot = chain[leaf] * (length + 1) + above.depth[leaf]
    _check_leaves(
        name,
        torch.bincount(slot, minlength=chains * (length + 1)).view(chains, length + 1),
        baseline,
    )
    # of two leaves in one place the younger node is the finished sample
    youngest = torch.full((chains * (length + 1),), -1, device=leaf.device).scatter_reduce(
        0, slot, leaf, "amax"
    )
    place = torch.full(
        (len(chain) + 1,), -1, device=leaf.device
    )  # one more entry, read by slots without a leaf
    place[leaf] = torch.arange(len(leaf), device=leaf.device)
    seen = place[youngest].view(chains, length + 1)
    return Comb(nodes[order].view(chains, length), seen[:, 1:], seen[:, 0], owner)


def rake_of(name: str, leaf: Tensor, tree: Tree) -> Rake:
    """Read decisions that have no decision above, and their leaves [L], node ids; a decision that
    is a leaf is seen by every stride.

    Raises: ConfigError in the name of the credit `name`.
    """
    above = ancestry(tree)
    nodes = (tree.std > 0).nonzero()[:, 0]
    index = torch.full_like(above.decision, -1)
    index[nodes] = torch.arange(len(nodes), device=leaf.device)
    owner = torch.where(above.decision >= 0, index[above.decision], -1)
    place = leaf.argsort()
    place = place[
        owner[leaf[place]].argsort(stable=True)
    ]  # decision by decision, in the order of node ids
    count = torch.bincount(owner[leaf] + 1, minlength=len(nodes) + 1)
    strides = int(count[1:].max()) if len(nodes) else 0
    _check_rake(name, nodes, leaf, count, int(above.depth.max()))
    count = count[1:]
    column = torch.minimum(torch.arange(strides, device=leaf.device), count[:, None] - 1)
    return Rake(nodes, place[(count.cumsum(0) - count)[:, None] + column], owner)


def _check_leaves(name: str, count: Tensor, baseline: bool) -> None:
    """Check the leaves of each place of each chain [C, w + 1]; the first column is the
    baseline's."""
    inner, end = count[:, 1:-1], count[:, -1]
    wrong = {
        "no image without noise under some initial noises": baseline
        and bool((count[:, 0] != 1).any()),
        "no preview under some draws": bool((inner < 1).any()),
        "several previews under some draws": bool((inner > 1).any()) or bool((end > 2).any()),
        "no finished image at the end of some chains": bool((end < 1).any()),
    }
    found = [what for what, is_so in wrong.items() if is_so]
    if found:
        raise _not_a_comb(name, " and ".join(found), baseline)


def _not_a_comb(name: str, found: str, baseline: bool) -> ConfigError:
    more, option = (
        (", and one image without any noise", ", baseline: true") if baseline else ("", "")
    )
    return ConfigError(
        f"{name}: expected one chain of draws per initial noise, equally long and without forks, "
        "with a leaf under "
        f"each draw{more}; got {found}. Use plan: {{fn: comb{option}, ...}}, or another credit"
    )


def _check_rake(name: str, nodes: Tensor, leaf: Tensor, count: Tensor, depth: int) -> None:
    """Check leaves per decision, [D + 1]; the first entry counts leaves without one."""
    bare, mine = int(count[0]), count[1:]
    wrong = mine != (mine.max() if len(mine) else 0)
    wrong &= ~(torch.isin(nodes, leaf) & (mine == 1))
    if depth != 1 or bare or bool(wrong.any()):
        raise ConfigError(
            f"{name}: expected draws on a trunk without noise, none below another, with one leaf "
            "per stride each, and "
            f"no other leaves; got {len(nodes)} draws, at most {depth} in a row, with "
            f"{mine.tolist()[:8]} leaves, and "
            f"{bare} leaves without a draw. Use plan: {{fn: rake, ...}}, or another credit"
        )
