"""The records that travel between the parts of flowrl, and the contracts that parts fulfil."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from flowrl.core.seeds import NodeStreams

Source = tuple[Tensor, ...]
"""The images that a prompt starts from, each [3, h, w] in [0, 1]; empty where there are none."""

Cond = dict[str, Tensor]
"""Text conditioning: name -> [G, ...], one row per prompt (or per sample once repeated)."""


def concatenated(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Put rows {name: [N, ...]} behind each other; the names are those of the first part."""
    out = {}
    for name in parts[0]:
        out[name] = torch.cat([part[name] for part in parts])
    return out


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each number over rows of equal names."""
    out = {}
    for name in rows[0]:
        out[name] = median(row[name] for row in rows)
    return out


class Tree(NamedTuple):
    """Who came from whom. A node with ``std > 0`` is a *decision*: the Gaussian draw that made it.

    Example: one prompt, one sample, three steps of which the second is noisy::

        node    0   1   2   3      noise, before the draw, after the draw, clean
        parent -1   0   1   2
        step    0   1   2   3
        std     0   0   s   0      node 2 is the only decision
    """

    parent: Tensor  # [V] int64  -1 at a root; parent[v] < v (topological order)
    # [V] int64  denoising steps taken: 0 noise ... S clean; a deterministic run is one long edge
    step: Tensor
    std: Tensor  # [V] float32  std of the draw into it; 0 = deterministic edge, never trained
    group: Tensor  # [V] int64  prompt index, unique across ranks


class Rollout(NamedTuple):
    """Everything that one sampling pass leaves behind: a forest, its latents and its log-probs."""

    tree: Tree
    # [V, *]  stored latents; [V - L, *] once leaves, which come last, are decoded and not trained
    x: Tensor
    # [V] float64  of the draw under the sampling policy; 0 where std == 0, but for learned roots
    log_prob: Tensor
    # [V] float32  noise scale handed to the transition that made the node; 0 where std == 0
    noise_scale: Tensor
    leaf: Tensor  # [L] int64  nodes that were decoded and rewarded
    sigmas: Tensor  # [S+1] float32  sigma grid, 1 -> 0
    cond: Cond  # {name: [G, ...]} one row per prompt, in the order of `group_ids`
    group_ids: Tensor  # [G] int64  the group id of each row of cond
    # [V, *]  transition mean of each decision, else x; kept only where a loss needs "old_mean"
    mean: Tensor | None = None
    # [V] int64  the first node with the same latent; None: each node is the only one
    twin: Tensor | None = None
    # [V] int64, ascending  nodes that were made together, prompt after prompt, have one
    block: Tensor | None = None
    # [V] float64  relative change of each trained draw, where the latents are elsewhere
    change: Tensor | None = None


class SigmaGrid(NamedTuple):
    """A sigma grid read off a model's own: its grid of `steps` steps at fractional places,
    interpolated in time.

    ``places`` [0, 1, 2, 4.5, 7] with steps 7 takes two steps of the model's grid and two of 2.5 of
    its steps each.
    """

    steps: int  # of the model's own grid
    places: Tensor  # [S+1] float64, ascending from 0 to `steps`
    shift: float  # the time shift to undo before and redo after interpolating; 1 = none
    first: float = 1.0  # the highest sigma: one above it, as 1 of pure noise, becomes it
    halve_last: bool = False  # the last sigma above 0 becomes half of the one before


class Adams(NamedTuple):
    """SA-Solver's options: the strength of its noise, the sigmas that have it, and its form."""

    noise_scale: float
    low: float
    high: float
    published: bool

    def strength(self, sigma: float) -> float:
        """Return the strength tau of the noise of a step that ends at sigma."""
        return self.noise_scale if self.low <= sigma <= self.high else 0.0


class Plan(NamedTuple):
    """A sampler as data. The first four fields, and `solver`, have one entry per denoising step
    [S]."""

    noise: Tensor  # float32  noise scale handed to the transition; 0 = ODE step
    branch: Tensor  # int64  children drawn per live node at this step
    keep: Tensor  # int64  how many of them go on; 0: the trunk goes on without noise
    # int64  ODE steps of a preview leaf under each child; 0 none, 1 = x0 estimate, S = to the end
    tail: Tensor
    # tails to the end: a leaf for each stride, which takes every stride-th step of the grid
    strides: tuple[int, ...] = (1,)
    baseline: bool = False  # hang a leaf without noise under each root
    share: float = 0.0  # correlation of siblings' noise; each stays standard normal
    stretch: float = 1.0  # noise of forks is multiplied by it, yet scored as if it were not
    sigma_grid: SigmaGrid | None = None  # None: the model's own grid of S steps
    # int64  of steps without noise: 1 = Euler, 2 = DPM-Solver++ 2M; None: Euler
    solver: Tensor | None = None
    adams: Adams | None = None  # all steps by SA-Solver, whose noise is not trained
    # nothing is sampled: the images are those that the prompts' records name, and this judges them
    stored: Literal["labels", "rewards"] | None = None
    every_step: bool = False  # keep the state after each step, also of those without noise
    # each prompt has noise on so many of the noisy steps in a row, drawn from this and its place
    windows: tuple[str, int] | None = None


class Gaussian(NamedTuple):
    """A diagonal Gaussian transition: ``x_next = mean + std * z``."""

    mean: Tensor  # [B, *] float32
    std: Tensor  # [B] float32


class StateRows(NamedTuple):
    """Which rows of a batch the network is asked about: those of one state share one row."""

    first: Tensor  # [S] int64  the first row of each state
    state: Tensor  # [B] int64  which of these states each row belongs to


class Unrolled(NamedTuple):
    """How the rows of a batch run through the sampler again, for gradients that go through it."""

    sigmas: Tensor  # [S+1]  the grid
    open: Tensor  # [B, S] bool, on the host  the velocity of this step carries a gradient
    # [B] int64, on the host  the step that jumps to the end of the grid, by the x0 estimate
    last: Tensor
    again: bool  # the backward pass evaluates the network once more, instead of storing it


class Batch(NamedTuple):
    """B decisions (reverse likelihood), noised leaves (forward), roots (prior) or steps
    (generated), ready for one network call."""

    x: Tensor  # [B, *]
    sigma: Tensor  # [B]
    sigma_next: Tensor  # [B]
    noise_scale: Tensor  # [B]  of the transition
    target: Tensor  # [B, *]  x_next (reverse), eps - x0 (forward), x_1 (prior)
    old_log_prob: Tensor  # [B]  as the rollout kept it; 0 where the likelihood keeps none
    advantage: Tensor  # [B]  what the draw is worth
    node: Tensor  # [B] int64  the node in the rollout's tree
    parent: Tensor  # [B] int64  rows with one id share x, sigma and cond, and one network row
    step: Tensor  # [B] int64  denoising step (reverse), or number of the draw; 0 the noisiest
    cond: Cond  # {name: [B, ...]}
    # where rows share states, counted ahead of the call; None: from `parent`, and the host waits
    rows: StateRows | None = None
    unrolled: Unrolled | None = None  # of likelihoods that sample anew
    query: Tensor | None = None  # [B]  level where it is judged; of `direct_align` its step's place


class Eval(NamedTuple):
    """What a likelihood says of a batch under the weights that are in the model."""

    log_prob: Tensor  # [B] float64  mean over latent dimensions (Flow-GRPO's convention)
    mean: Tensor  # [B, *]  transition mean (reverse) or v (forward)
    std: Tensor  # [B]  transition std (reverse); 0 where the likelihood has none
    v: Tensor | None = None  # [B, *]  velocity, for losses that look at it
    images: Tensor | None = None  # [B, 3, H, W]  of likelihoods that sample anew


class RealRows(NamedTuple):
    """A noised real image of the prompt of each row of a batch, and the velocity there."""

    v: Tensor  # [B, *]  velocity under the current weights, with its gradient
    target: Tensor  # [B, *]  eps - x0: that of the straight path to the image
    sigma: Tensor  # [B]  noise level of the image, in (0, 1]


class LossInput(NamedTuple):
    """What a loss or a penalty sees. The fields that may be None are made for those that ask for
    them with `flowrl.core.needs.needs`."""

    batch: Batch
    now: Eval  # under the current weights; the only part with a gradient
    old_log_prob: Tensor  # [B]  under the weights that sampled
    old_mean: Tensor | None = None  # [B, *]  likewise
    under: dict[str, Eval] = {}  # the same batch under other weights: "old", "ref" ...
    teachers: tuple[tuple[Eval, Tensor], ...] = ()  # under teachers, each with a weight per row [B]
    segment: Tensor | None = None  # [B] int64  rows with one id move as one action
    best_x0: Tensor | None = None  # [B, *]  latent of the best leaf below the row's state
    best_advantage: Tensor | None = None  # [B]  its advantage
    siblings: Tensor | None = None  # [B] int64  trained nodes of the row's prompt, in all
    scored: Tensor | None = None  # [B] bool  rows that the rewards judged; None = all
    reward: Tensor | None = None  # [B]  of `now`'s images, with its gradient; NaN = not scored
    rewards: dict[str, Tensor] = {}  # {name: [B]}  whose weighted sum it is
    data: RealRows | None = None  # real images of the rows' prompts, noised
    extra: dict[str, Any] = {}  # what parts of a user provide, by name


class Likelihood(Protocol):
    """What "probability" means: which nodes are trained, as which batch, and how it is scored."""

    @property
    def trains(self) -> Literal["draws", "leaves", "roots", "steps"]: ...  # the nodes

    @property
    def rows_per_state(self) -> int: ...  # of the network; 0 for a root that the model never sees

    @property
    def keeps(self) -> frozenset[str]: ...  # what the rollout has: "old_log_prob", "old_mean"

    # advantage [V], nodes [N] -> rows_per_state * N rows, or N; streams: for noise of its own
    def batch(
        self, rollout: Rollout, advantage: Tensor, nodes: Tensor, streams: NodeStreams
    ) -> Batch: ...

    # transition: the run's, as it sampled
    def evaluate(self, model: FlowModel, batch: Batch, transition: Transition) -> Eval: ...


class Latents(NamedTuple):
    """What the images of a batch were decoded from, for rewards that judge latents."""

    x0: Tensor  # [L, *]  at the sigma that the leaf was left at, on the model's device
    cond: Cond  # {name: [L, ...]}  the generator's own conditioning of each
    states: Tensor | None = None  # [L, *]  what x0 estimates are of, else x0; None = all finished


class RewardBatch(NamedTuple):
    """What a reward sees: images and words; latents where one asks for them."""

    # [L, 3, H, W], a video's [L, T, 3, H, W], float in [0, 1]; in training on the host, 256 levels
    images: Tensor
    prompts: list[str]  # [L]
    group: Tensor  # [L] int64
    meta: list[dict[str, Any]]  # [L]  the prompt's own record (GenEval schema, references, ...)
    sigma: Tensor  # [L]  of the state that it is the x0 estimate of; 0 = finished
    # [L]  what each image started from, in a run fitted to its size; [] where no prompt has any
    source: list[Source] = []
    latents: Latents | None = None  # in training, for rewards that say `sees_latents = True`


def sources_at(sources: Sequence[Source], rows: Sequence[int]) -> list[Source]:
    """Return what images `rows` [L] started from -> [L] sources; [] where no prompt has any."""
    if not sources:
        return []
    return [sources[row] for row in rows]


class Scores(NamedTuple):
    """What all rewards of a run said of the leaves, before they are made one."""

    # {name: [L]} float32; NaN = not scored, and then by every reward that counts
    values: dict[str, Tensor]
    weights: dict[str, float]  # {name: mixing weight}; 0 = watched only
    leaf: Tensor  # [L] int64
    tree: Tree
    meta: Sequence[dict[str, Any]] = ()  # [L]  the prompt's own record of each leaf


class Mixed(NamedTuple):
    """What an aggregator makes of `Scores`."""

    advantage: Tensor  # [V] float32  of every node; 0 where nothing was scored
    # {name: [L]}  what each reward brought to it, for the shares in the log
    parts: dict[str, Tensor]
    metrics: dict[str, float]
    gate: Tensor | None = None  # [V] float32  factor of the penalty `kl`; None = 1


class SelectInput(NamedTuple):
    """What a `select` function sees of an iteration whose advantages are given."""

    rollout: Rollout
    advantage: Tensor  # [V] float32
    segment: Tensor | None  # [V] int64  decisions with one id move as one action; -1 = none
    iteration: int
    generator: torch.Generator  # on the CPU, seeded by (seed, iteration)
    transition: Transition | None = None  # the run's, as it sampled
    factor: Tensor | None = None  # [V] float32  of the functions before it in the list; None = 1
    reward: Tensor | None = None  # [L]  weighted sum; NaN = not scored; None in a rehearsal


Credit = Callable[[Tensor], Tensor]
"""The run's credit with leaf and tree filled in: reward [L] -> advantage [V]."""

Transition = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Gaussian]
"""``transition(x, v, sigma, sigma_next, noise_scale) -> Gaussian``; [B,*], [B,*], [B], [B], [B]."""


@runtime_checkable
class Reward(Protocol):
    """Score images. NaN means *not scored*: advantage 0, never counted as a reward of 0."""

    def __call__(self, batch: RewardBatch) -> Tensor: ...  # [L] float32


@runtime_checkable
class FlowModel(Protocol):
    """A velocity field on the path; ``v = eps - x0``. Guidance happens inside."""

    def sigmas(self, steps: int, height: int, width: int) -> Tensor: ...  # [S+1], as diffusers'

    def encode(self, prompts: list[str]) -> Cond: ...  # {name: [G, ...]}

    # [B, *], [B], {name: [B, ...]} -> [B, *]
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor: ...

    # [B, *] -> [B, 3, H, W] in [0, 1]; a model with `frames` above 1: [B, frames, 3, H, W]
    def decode(self, x0: Tensor) -> Tensor: ...

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]: ...

    def trainable(self) -> dict[str, nn.Parameter]: ...  # by name, in a fixed order
