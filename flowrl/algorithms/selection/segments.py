"""Which draws move as one action: ``(rollout) -> [V] int64``, an id for each trained draw, -1 at
all other nodes. `prompt` alone gives one to every node, and `siblings` joins draws from one state.

The steps at which something is drawn, draws into the last step left out, are cut into chunks from
noisy to clean. On a chain without forks the draws of one chunk are one segment. In a forest a
segment is an unbranched run inside one chunk: a draw goes on with the segment of the draw above it
(the nearest one, over nodes without noise) if that was made at the trained step just before, in the
same chunk, and has no other draw below it at which the paths part. Otherwise it heads a segment of
its own. Leaves and previews that hang beside it do not count as forks. The id is the head's node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.forest import climb
from flowrl.algorithms.selection._change import drawn_at, relative_change, trained_draws
from flowrl.core.errors import ConfigError
from flowrl.core.types import Rollout


def prompt(rollout: Rollout) -> Tensor:
    """Join all nodes of a prompt -> its group id for every node [V] int64.

    For losses that compare images of a prompt, which must then be in one network call.
    """
    return rollout.tree.group


def siblings(rollout: Rollout) -> Tensor:
    """Join the draws from one state -> the state's node for every draw that is trained, -1 for all
    other nodes [V] int64.

    For losses that compare next states, which must then be in one network call.
    """
    return torch.where(trained_draws(rollout), rollout.tree.parent, -1)


def fixed(rollout: Rollout, *, sizes: list[int]) -> Tensor:
    """Cut the trained steps into chunks of these sizes, from noisy to clean -> segment ids [V]
    int64.

    Chunk-GRPO (2510.21583); its code has [2, 3, 4, 7] for 16 trained steps. **Differs:** the code
    knows chains only; the rule for forks is flowrl's.

    Raises: ConfigError for a size below 1, or sizes that do not add up to the number of trained
    steps.
    """
    steps = _steps(rollout)
    if sum(sizes) != len(steps) or min(sizes, default=0) < 1:
        raise ConfigError(
            f"segment fixed: sizes={sizes} add up to {sum(sizes)} steps, but {len(steps)} "
            "denoising steps are trained "
            "(noise on the last step is not); each size must be at least 1, and together they must "
            "be all of them"
        )
    return _segments(rollout, steps, sizes)


def adaptive(rollout: Rollout, *, chunks: int = 4) -> Tensor:
    """Cut the trained steps where the relative change rho(k) of the latents turns -> segment ids
    [V] int64.

    Chunk-GRPO (2510.21583) v3: boundaries where successive differences of rho change sign,
    recursively, a midpoint split where the sign is uniform. Reconstruction, the rest is ours: the
    longest chunk is cut next (of equal ones the noisiest), at its sharpest turn, which begins the
    later part, until there are `chunks`. rho is averaged over the batch, so the cuts are the same
    for all samples and may move from iteration to iteration.

    Raises: ConfigError for fewer than 1 chunk or more than there are trained steps.
    """
    steps = _steps(rollout)
    if not 1 <= chunks <= len(steps):
        raise ConfigError(
            f"segment adaptive: chunks={chunks} must be from 1 to the number of trained denoising "
            f"steps, {len(steps)}"
        )
    return _segments(rollout, steps, _cut(relative_change(rollout)[steps].tolist(), chunks))


def _cut(rho: list[float], chunks: int) -> list[int]:
    parts = [(0, len(rho))]
    while len(parts) < chunks:
        first, end = max(parts, key=lambda part: (part[1] - part[0], -part[0]))
        middle = _turn(rho, first, end)
        parts = [part for part in parts if part != (first, end)] + [(first, middle), (middle, end)]
    return [end - first for first, end in sorted(parts)]


def _turn(rho: list[float], first: int, end: int) -> int:
    """Return the place strictly inside [first, end) where rho turns most sharply; its middle if it
    never does."""
    rise = {k: rho[k + 1] - rho[k] for k in range(first, end - 1)}
    turns = [k for k in range(first + 1, end - 1) if rise[k - 1] * rise[k] < 0]
    return max(turns, key=lambda k: abs(rise[k] - rise[k - 1]), default=(first + end) // 2)


def _steps(rollout: Rollout) -> Tensor:
    """List the denoising steps at which a trained draw was made -> [n] int64, noisiest first."""
    return torch.unique(drawn_at(rollout.tree)[trained_draws(rollout)])


def _segments(rollout: Rollout, steps: Tensor, sizes: list[int]) -> Tensor:
    parent, mine = rollout.tree.parent, trained_draws(rollout)
    count, depth = len(parent), len(rollout.sigmas) - 1
    node = torch.arange(count, device=parent.device)
    nearest = climb(torch.where(mine | (parent < 0), node, parent), depth)[
        parent.clamp_min(0)
    ]  # draw above, or root
    # which of the trained steps a draw was made at, -1 for all other nodes
    place = torch.full((depth,), -1, device=parent.device)
    place[steps] = torch.arange(len(steps), device=parent.device)
    place = torch.where(mine, place[drawn_at(rollout.tree)], -1)
    # a draw right below another one; where a draw has two such, the paths part
    below = mine & mine[nearest] & (parent >= 0)
    fork = torch.zeros(count, device=parent.device).index_add(0, nearest, below.float()) > 1
    sizes_of = torch.tensor(sizes, device=parent.device)
    # a draw points to the one above as long as the segment goes on: who climbs finds the head
    chunk = torch.repeat_interleave(torch.arange(len(sizes), device=parent.device), sizes_of)[
        place
    ]  # -1 is not read
    goes_on = below & (place == place[nearest] + 1) & (chunk == chunk[nearest]) & ~fork[nearest]
    return torch.where(mine, climb(torch.where(goes_on, nearest, node), depth), -1)
