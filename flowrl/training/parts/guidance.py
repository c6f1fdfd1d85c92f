"""Guidance that is not the model's own: of the images that are trained on (`train.guidance`), and
of the base model that losses and penalties measure from (`train.reference_guidance`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.part import Part
from flowrl.core.types import LossInput, Plan
from flowrl.training.guidance import KEYS, check_guides, guides_reference, guiding
from flowrl.training.learn import CallRows
from flowrl.training.method import Method
from flowrl.training.run import Prepared, Run
from flowrl.training.task import IterationCost, Task


class Guidance(Part):
    """Let the model compute with another guidance where the config says so."""

    name = "guidance"
    rank = 15  # inside the copy of the weights that samples
    when = ("config.train.guidance", "config.train.reference_guidance")

    def check(self, task: Task, plan: Plan) -> None:
        """Refuse a guidance that the method or model has no use for."""
        config, method = task.config, task.method
        for name, why in ((KEYS[0], _unsampled), (KEYS[1], _unmeasured)):
            scale: float = getattr(config.train, name)
            if not scale:
                continue
            reason = why(config, method, plan)
            if reason:
                raise ConfigError(f"train.{name}={scale:g}: {reason}; leave it out")
            options = getattr(config.model.function, "options", None)
            if options is not None:  # of a pipeline of diffusers
                options(**config.model.kwargs).guided_by(scale)
        # a credit that reads the log-prob of a sampler with another guidance than what is trained
        read = {"moved", "log_prob"} & needs_of(method.credit)
        if read and config.train.guidance and getattr(method.likelihood, "rescores", False):
            raise ConfigError(
                f"credit {config.credit.fn}: reads the sampler's log-prob, which with "
                f"train.guidance={config.train.guidance:g} is that of a guided step, and "
                f"likelihood {config.likelihood.fn} trains without guidance; take another credit, "
                "or set train.guidance to 0"
            )

    def work(self, task: Task, plan: Plan, cost: IterationCost) -> IterationCost:
        """Count sampling twice where it alone is guided, and say whether the base model is."""
        if task.guided:
            return cost
        if task.config.train.guidance:
            said = " latents, each with and without the prompt (train.guidance)"
            twice = cost.twice | {"sampling"}
            cost = replace(cost, nfe=2 * cost.nfe, twice=twice, evaluated=said)
        if task.config.train.reference_guidance:
            line = (
                "           the base model with and without the prompt (train.reference_guidance)"
            )
            cost = replace(cost, twice=cost.twice | {"reference"}, after=(*cost.after, line))
        return cost

    def row_calls(self, task: Task) -> int:
        """Count the base model's second call."""
        return int(guides_reference(task.config) and "ref" in task.method.snapshots)

    def check_model(self, prepared: Prepared, model: Any, frames: int) -> None:
        """Refuse a model that cannot have the guidance."""
        for name in KEYS:
            scale: float = getattr(prepared.config.train, name)
            if scale:
                check_guides(prepared.config, model, f"train.{name}", scale)

    def encoding(self, run: Run) -> AbstractContextManager[None]:
        """Encode what sampling or training computes with: the negative prompt, too."""
        t = run.config.train
        return guiding(run.model, t.guidance or t.reference_guidance)

    def sampling(self, run: Run) -> AbstractContextManager[None]:
        """Sample with ``train.guidance``, if that is given."""
        return guiding(run.model, run.config.train.guidance)

    def provide(self, run: Run, rows: CallRows, data: LossInput) -> LossInput:
        """Count the base model's second call."""
        if not run.guided and run.config.train.reference_guidance:
            rows.asked.append((rows.batch.parent, 1))
        return data

    def under(self, run: Run, name: str) -> AbstractContextManager[None]:
        """Ask the base model with ``train.reference_guidance``, if that is given."""
        scale = run.config.train.reference_guidance
        return guiding(run.model, scale) if name == "ref" else nullcontext()


def _unsampled(config: Config, method: Method, plan: Plan) -> str:
    """Say why a guidance of sampling alone plays no part or does harm; empty: it may be."""
    if plan.stored is not None:
        return f"plan {config.plan.fn} samples nothing"
    rescores = getattr(method.likelihood, "rescores", False)
    if method.likelihood.trains != "leaves" and not rescores:
        return (
            f"likelihood {config.likelihood.fn} trains what the sampler drew, by the model's own "
            "guidance; take model.guidance, which is that of both, likelihood reverse_unguided, or "
            "a likelihood of finished images, such as forward"
        )
    return ""


def _unmeasured(config: Config, method: Method, plan: Plan) -> str:
    """Say why a guidance of the reference plays no part; empty: it plays one."""
    if "ref" in method.snapshots:
        return ""
    if not config.kl:
        return f"loss {config.loss.fn} measures from no base model, which it would guide"
    return (
        f"loss {config.loss.fn} and kl {config.kl.fn} measure from no base model, which it would "
        "guide"
    )
