"""The `monitors` section: what is watched while a run trains, and what is done about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from flowrl.config.section import Positive, Section

Action = Literal["warn", "stop"]


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
class MonitorsConfig(Section):
    """What is watched while a run trains; null switches a monitor off."""

    key: ClassVar = "monitors"

    plateau: PlateauMonitor | None = field(default_factory=PlateauMonitor)
    """no held-out gain for several evaluations"""
