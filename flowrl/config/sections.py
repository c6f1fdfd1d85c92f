"""The plain sections of a config: one dataclass a section, one field a key.

The text below a field is what docs/config.md and the JSON schema say of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Interval
from pydantic import Field

from flowrl.config.section import Count, Positive, Section, Seed, Share, Steps

Listed = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)
]
Drawn = Annotated[int, Interval(ge=1, le=10_000)]  # images of one prompt

Action = Literal["warn", "stop", "rollback", "raise_kl", "lower_lr"]
Factor = Annotated[float, Gt(1)]


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
    run's rank and alpha; penalties still measure from the model without them. Also a LoRA file, or
    the folder of one, of diffusers, peft, kohya, ComfyUI or OneTrainer, which is taken whole or
    refused"""
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


@dataclass(frozen=True)
class PlateauMonitor(Section):
    """No gain of the held-out score for several evaluations."""

    key: ClassVar = "monitors.plateau"

    patience: Positive = 5
    """evaluations in a row without a gain over the best one; fewer stop sooner, and sometimes on a
    dip"""
    min_gain: Annotated[float, Ge(0)] = 0.0
    """what counts as a gain: more than this above the best score; raise it to the noise of an
    evaluation"""
    action: Action = "warn"
    """`stop` ends the run as if it were done; its best checkpoint is there either way"""


@dataclass(frozen=True)
class HackingMonitor(Section):
    """The training reward rises while the held-out score falls."""

    key: ClassVar = "monitors.hacking"

    drop: Annotated[float, Gt(0)] = 0.02
    """how far the held-out score may fall below its best while the training reward is higher than
    it was then; lower it to hear sooner, raise it to the noise of an evaluation"""
    action: Action = "warn"
    """`rollback` goes back to the best checkpoint, `raise_kl` holds the policy nearer to the base
    model"""


@dataclass(frozen=True)
class DiversityMonitor(Section):
    """The images of a prompt become alike."""

    key: ClassVar = "monitors.diversity"

    floor: Share = 0.5
    """smallest share of the `diversity` of the first iterations; raise it where variety matters"""
    action: Action = "warn"
    """`raise_kl` slows the collapse"""


@dataclass(frozen=True)
class ImagesMonitor(Section):
    """The look of the images leaves what it was in the first iterations."""

    key: ClassVar = "monitors.images"

    saturation: Factor = 2.0
    """how many times stronger or weaker colours may become"""
    sharpness: Factor = 2.0
    """how many times sharper or more blurred images may become"""
    grid: Factor = 3.0
    """how many times the energy of a grid of 8 pixels may grow"""
    action: Action = "warn"
    """what is done when one of them is left"""


@dataclass(frozen=True)
class DriftMonitor(Section):
    """The velocity moves away from that of the base model."""

    key: ClassVar = "monitors.drift"

    limit: Annotated[float, Gt(0)] = 0.5
    """largest size of the change as a share of the base model's velocity; lower it to stay near"""
    action: Action = "warn"
    """`raise_kl` pulls back"""


@dataclass(frozen=True)
class RatioMonitor(Section):
    """Ratios and clipping, by denoising step."""

    key: ClassVar = "monitors.ratio"

    gap: Annotated[float, Gt(0)] = 0.1
    """largest `on_policy_gap`: more is a difference between sampling and training"""
    spread: Annotated[float, Gt(0)] = 1.0
    """largest `ratio_std` of a denoising step"""
    clip: Share = 0.9
    """largest share of a denoising step's decisions that the clip stops"""
    patience: Positive = 3
    """iterations in a row"""
    action: Action = "warn"
    """`lower_lr` makes updates smaller"""


@dataclass(frozen=True)
class GradientsMonitor(Section):
    """Gradients that are far larger than those before."""

    key: ClassVar = "monitors.gradients"

    factor: Factor = 10.0
    """an optimizer step whose gradient norm is more than this many times the median of the last
    ones, and above `train.max_grad_norm` where that is finite, is an outlier; only steps with an
    advantage other than 0 count; lower it against sudden collapse"""
    history: Annotated[int, Interval(ge=2, le=1000)] = 50
    """optimizer steps that the median is of; nothing is an outlier before there are 20 of them, or
    `history` if that is less"""
    action: Literal["skip", "warn", "stop", "rollback", "raise_kl", "lower_lr"] = "skip"
    """`skip` leaves the optimizer step out and counts it; the others make it"""


@dataclass(frozen=True)
class ZeroStdMonitor(Section):
    """Prompts whose images are all equally good teach nothing."""

    key: ClassVar = "monitors.zero_std"

    share: Share = 0.9
    """largest share of such prompts"""
    patience: Positive = 3
    """iterations in a row"""
    action: Action = "warn"
    """what is done"""


@dataclass(frozen=True)
class PromptsMonitor(Section):
    """A few prompts give all of the gradient."""

    key: ClassVar = "monitors.prompts"

    entropy: Share = 0.5
    """smallest `prompt_entropy`: 1 where all prompts of an iteration teach alike, 0 where one
    does"""
    patience: Positive = 3
    """iterations in a row"""
    action: Action = "warn"
    """what is done"""


@dataclass(frozen=True)
class AdaptiveKl(Section):
    """Move the weight of the `kl` section so that the penalty stays near a target."""

    key: ClassVar = "monitors.adaptive_kl"

    target: Annotated[float, Gt(0)]
    """of the metric `kl`; the weight grows where it is more than `band` times as large, and shrinks
    where it is as much smaller"""
    band: Factor = 1.5
    """how far from the target nothing is done"""
    step: Factor = 1.2
    """how many times the weight grows or shrinks per iteration"""


@dataclass(frozen=True)
class Actions(Section):
    """How strong the actions are."""

    key: ClassVar = "monitors.actions"

    lower_lr: Annotated[float, Interval(gt=0, lt=1)] = 0.5
    """factor of the learning rate, each time; `rollback` lowers it, too"""
    raise_kl: Factor = 2.0
    """factor of the weight of the `kl` section, each time"""
    rollbacks: Positive = 3
    """how often a run goes back before it stops instead"""


@dataclass(frozen=True)
class MonitorsConfig(Section):
    """What is watched while a run trains; null switches a monitor off."""

    key: ClassVar = "monitors"

    plateau: PlateauMonitor | None = field(default_factory=PlateauMonitor)
    """no held-out gain for several evaluations"""
    hacking: HackingMonitor | None = field(default_factory=HackingMonitor)
    """training reward up, held-out score down"""
    diversity: DiversityMonitor | None = field(default_factory=DiversityMonitor)
    """images of a prompt become alike"""
    images: ImagesMonitor | None = field(default_factory=ImagesMonitor)
    """saturation, sharpness and grid energy"""
    drift: DriftMonitor | None = field(default_factory=DriftMonitor)
    """distance from the base model's velocity"""
    ratio: RatioMonitor | None = field(default_factory=RatioMonitor)
    """ratios and clipping by denoising step"""
    gradients: GradientsMonitor | None = field(default_factory=GradientsMonitor)
    """gradient outliers"""
    zero_std: ZeroStdMonitor | None = field(default_factory=ZeroStdMonitor)
    """prompts that teach nothing"""
    prompts: PromptsMonitor | None = field(default_factory=PromptsMonitor)
    """entropy of the prompts that teach"""
    adaptive_kl: AdaptiveKl | None = None
    """a weight of the `kl` section that follows a target; off by default"""
    actions: Actions = field(default_factory=Actions)
    """how strong the actions are"""

    def action_of(self, name: str) -> str:
        """Return what a monitor does; "warn" for one that is off."""
        return str(getattr(getattr(self, name, None), "action", "warn"))

    def asks_for(self, action: str) -> list[str]:
        """Name the monitors with an action."""
        return [name for name in self.inner() if self.action_of(name) == action]


SECTIONS: dict[str, type[Section]] = {
    "prompts": PromptsConfig,
    "image": ImageConfig,
    "train": TrainConfig,
    "scout": ScoutConfig,
    "eval": EvalConfig,
    "checkpoint": CheckpointConfig,
    "samples": SamplesConfig,
    "monitors": MonitorsConfig,
}
