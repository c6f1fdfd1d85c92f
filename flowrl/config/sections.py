"""The plain sections of a config: one dataclass a section, one field a key.

The text below a field is what docs/config.md and the JSON schema say of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt, Interval
from pydantic import Field

from flowrl.config.monitors import MonitorsConfig
from flowrl.config.section import Count, Positive, Section, Seed, Share, Steps

Listed = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)
]
Drawn = Annotated[int, Interval(ge=1, le=10_000)]  # images of one prompt


@dataclass(frozen=True)
class PromptsConfig(Section):
    """The lists of prompts, in any format that `flowrl.core.prompts.load_prompts` reads."""

    key: ClassVar = "prompts"

    train: str
    """file with the prompts to train on"""
    test: str
    """file with held-out prompts for evaluation and samples: none of them should be in `train`"""


@dataclass(frozen=True)
class ImageConfig(Section):
    """The size of the images."""

    key: ClassVar = "image"

    height: Positive
    """pixels; the model says which sizes it takes"""
    width: Positive
    """as `height`"""


@dataclass(frozen=True)
class TrainConfig(Section):
    """The training loop."""

    key: ClassVar = "train"

    iterations: Positive
    """rollouts, each followed by `updates` optimizer steps; more until the held-out score stops
    rising"""
    prompts: Positive
    """prompts per iteration, over all processes; more gives a steadier gradient and takes longer"""
    group: Positive
    """images per prompt; at least 2, or there is nothing to compare; a multiple of the images that
    the plan makes of one initial noise"""
    balance: str | None = None
    """key of the prompts' records, `tag` for GenEval's tasks: each of its values gets as many
    prompts of an iteration; without it each prompt comes equally often"""
    refill: Count = 0
    """second draws of an iteration: prompts whose images all got one reward are replaced by others,
    up to so often; each new image costs its network calls (DAPO's dynamic sampling)"""
    refill_spread: Annotated[float, Interval(ge=0)] = 1e-8
    """std of a prompt's rewards up to which `refill` counts them as one reward; for continuous
    rewards about a thousandth of their scale"""
    updates: Positive = 1
    """optimizer steps per iteration; 1 is fully on-policy, more uses each rollout again and makes
    clipping matter"""
    order: Literal["random", "step"] = "random"
    """which decisions go into which optimizer step: mixed, or the noisiest steps first; with `step`
    and as many `updates` as trained steps each update is one step's, as in G2RPO"""
    micro_batch: Positive = 64
    """states per network call in training (decisions drawn from one state share its row); lower it
    when memory runs out, the gradient stays the same up to rounding; a segment stays in one call,
    however large it is"""
    rollout_batch: Positive = 256
    """images per network call in sampling; lower it when memory runs out; equal to `micro_batch` it
    keeps `on_policy_gap` smallest"""
    warmup: Count = 0
    """optimizer steps of linear warm-up; a few help AdamW's first steps"""
    decay: Count = 0
    """optimizer steps, after the warm-up, over which the learning rate falls along half a cosine to
    its share `decay_to`, where it stays; 0 = it is constant"""
    decay_to: Share = 1 / 3
    """what `decay` ends at, as a share of `optimizer.lr`; AWM's code: a third"""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """the gradient is clipped to this norm; lower it against sudden collapse, `.inf` never clips"""
    ema: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    """decay of the averaged weights per iteration, warmed up as min(`ema`, (1 + n) / (10 + n));
    0 = off, then `eval.weights` must be `current`"""
    max_unscored: Share = 0.0
    """share of an iteration's images, or of an evaluation's, that a reward may leave unscored (NaN)
    before the run stops"""
    parts: Positive = 1
    """turns in which an iteration's prompts are sampled and scored; with more of them, slow rewards
    overlap with sampling"""
    overlap: bool = True
    """with several parts: score one in a thread while the next is sampled; false gives the same
    numbers later"""
    start: str | Listed = ""
    """trained weights to begin with, of the same model and layers: a checkpoint, its .safetensors
    file or a run; of a list the mean, with LoRA that of what the adapters add, of adapters of this
    run's rank and alpha; penalties still measure from the model without them. A LoRA file of
    diffusers or kohya has other names and is refused: merge it into the base model first"""
    guidance: Annotated[float, Interval(ge=0)] = 0.0
    """guidance of the images that are trained on, while the model is trained and evaluated with its
    own, as RAM's code does; 0 = sample with its own; for likelihoods of finished images and
    `reverse_unguided`; it stands for the option that samples with and without the prompt, of FLUX
    `true_cfg_scale`; FLUX.2-dev has none"""
    reference_guidance: Annotated[float, Interval(ge=0)] = 0.0
    """guidance of the base model that losses and penalties measure from, while the model is trained
    with its own, as CRD's and DGPO's code does; 0 = that of the model"""
    empty_prompts: Share = 0.0
    """share of an iteration's prompts whose images are trained on without the prompt (with the
    negative prompt, by default none), which keeps the model fit for guidance; Diffusion-DPO's code:
    0.2; for likelihoods of finished images"""
    same_noise: bool = False
    """start all images of a prompt from the same noise, as DanceGRPO and MixGRPO do; what comes
    before the first draw is then computed once"""
    threads: Annotated[int, Interval(ge=0, le=1024)] = 0
    """CPU threads; 0 leaves them as they are; another number can change the last bits"""


@dataclass(frozen=True)
class ScoutConfig(Section):
    """Cheap previews of many noises, of which the most telling are sampled and trained on."""

    key: ClassVar = "scout"

    images: Count = 0
    """previews per prompt, of which as many are kept as a group has noises; 0 = off (Sol-RL: 96, of
    which 24)"""
    steps: Steps = 6
    """denoising steps of a preview, without noise"""
    keep: Literal["extremes", "far", "half", "random"] = "extremes"
    """which are kept: the best and the worst half, those far from the mean, half of it extremes and
    half by chance, or all by chance"""


@dataclass(frozen=True)
class EvalConfig(Section):
    """Held-out evaluation, always sampled without noise in the transitions."""

    key: ClassVar = "eval"

    steps: Steps = 10
    """denoising steps; use as many as the model is used with"""
    every: Count = 0
    """iterations between evaluations; 0 = before and after training only"""
    images: Drawn = 4
    """images per prompt; more makes intervals narrower"""
    batch: Positive = 256
    """images per network call"""
    seed: Seed = 1234
    """of the initial noise, the same at every evaluation"""
    weights: Literal["ema", "current"] = "ema"
    """which weights are evaluated and drawn in image grids"""
    height: Count = 0
    """pixels of evaluated images and image grids; 0 = as in training; a model can be trained on
    small images and judged on large ones (PaCo-RL), if it makes both sizes"""
    width: Count = 0
    """as `height`"""
    tuned: Share = 1.0
    """hybrid inference: the share of steps, from the noisy end, that these weights take; the base
    model takes the rest, which reduces reward hacking (MixGRPO: 0.6)"""
    score: str = ""
    """name of the reward that is the headline; empty = the first in `rewards`"""
    best_of: Drawn = 1
    """best-of-n: draw so many for each of `images`, and judge the one that `best_by` puts first; it
    costs n times the sampling, so beside it stands what that cost buys without training"""
    best_by: str = ""
    """name of the reward that chooses; empty = the headline, which then knows the answer"""


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """When to save, and how many checkpoints to keep."""

    key: ClassVar = "checkpoint"

    every: Count = 20
    """iterations between checkpoints; 0 = only at the end"""
    keep: Positive = 3
    """newest ones kept; the best by held-out score is kept as well"""


@dataclass(frozen=True)
class SamplesConfig(Section):
    """Image grids of a few held-out prompts, for the eye."""

    key: ClassVar = "samples"

    every: Count = 20
    """iterations between image grids; 0 = before and after training only"""
    prompts: Positive = 8
    """prompts in an image grid, taken from the tasks in turn"""
    seed: Seed = 7
    """of the initial noise, the same in every image grid"""


SECTIONS: dict[str, type[Section]] = {
    section.key: section
    for section in (
        PromptsConfig,
        ImageConfig,
        TrainConfig,
        ScoutConfig,
        EvalConfig,
        CheckpointConfig,
        SamplesConfig,
        MonitorsConfig,
    )
}
