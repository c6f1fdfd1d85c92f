"""The `monitors` section: what is watched while a run trains, and what is done about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Interval

from flowrl.config.section import Positive, Section, Share

Action = Literal["warn", "stop", "rollback", "raise_kl", "lower_lr"]
Factor = Annotated[float, Gt(1)]


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
