"""What the monitors see in the metrics of an iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flowrl.config.sections import (
    DiversityMonitor,
    GradientsMonitor,
    ImagesMonitor,
    MonitorsConfig,
    PromptsMonitor,
    RatioMonitor,
    ZeroStdMonitor,
)
from flowrl.evaluation.reward_metrics import LOOKS
from flowrl.runs.monitors.alarms import Alarm

Metrics = Mapping[str, float]
Memory = dict[str, Any]
FIRST = 3  # iterations that say how a run began
ALARMS = ("diversity", "images", "ratio", "gradients", "zero_std", "prompts")


def look(monitors: MonitorsConfig, metrics: Metrics, memory: Memory) -> dict[str, Alarm | None]:
    """Ask every monitor that is on about an iteration, and remember what it needs later."""
    start = _start(metrics, memory)
    found: dict[str, Alarm | None] = {}
    if monitors.diversity:
        found["diversity"] = diversity(monitors.diversity, metrics, start)
    if monitors.images:
        found["images"] = image_looks(monitors.images, metrics, start)
    if monitors.gradients:
        found["gradients"] = gradients(monitors.gradients, metrics)
    # those that speak after several iterations in a row
    if monitors.ratio:
        alarm = ratio(monitors.ratio, metrics)
        found["ratio"] = _lasting("ratio", alarm, monitors.ratio.patience, memory)
    if monitors.zero_std:
        alarm = zero_std(monitors.zero_std, metrics)
        found["zero_std"] = _lasting("zero_std", alarm, monitors.zero_std.patience, memory)
    if monitors.prompts:
        alarm = prompts(monitors.prompts, metrics)
        found["prompts"] = _lasting("prompts", alarm, monitors.prompts.patience, memory)
    return found


def diversity(options: DiversityMonitor, metrics: Metrics, start: Metrics) -> Alarm | None:
    """Say so if the images of a prompt are much more alike than at the start."""
    now, then = metrics.get("diversity"), start.get("diversity", 0.0)
    if now is None or now >= options.floor * then:
        return None
    return Alarm(
        f"the diversity within prompts fell from {then:.3f} to {now:.3f}, below "
        f"{options.floor:g} of what it was",
        "The policy collapses: add a kl section or raise its beta, lower optimizer.lr, or take "
        "noise_scale up",
    )


def image_looks(options: ImagesMonitor, metrics: Metrics, start: Metrics) -> Alarm | None:
    """Say so if the images do not look as they did at the start."""
    said = []
    for name in LOOKS:
        now, then = metrics.get(name), start.get(name, 0.0)
        most = getattr(options, name)
        if now is None or then <= 0:
            continue
        # less of a grid is no harm
        low = 0.0 if name == "grid" else then / most
        if not low <= now <= then * most:
            said.append(f"{name} from {then:.3f} to {now:.3f}")
    if not said:
        return None
    return Alarm(
        f"the look of the images changed: {', '.join(said)}",
        "Look at the samples: a reward that likes this is being hacked; add what it overlooks, or "
        "a kl section",
    )


def ratio(options: RatioMonitor, metrics: Metrics) -> Alarm | None:
    """Say so if ratios or clipping are far from healthy at some denoising step."""
    said = []
    # before the first update the ratio has to be 1
    gap = metrics.get("on_policy_gap", 0.0)
    if gap > options.gap:
        said.append(f"on_policy_gap {gap:.3g} is more than {options.gap:g}")
    # the worst denoising step counts, since a mean over steps would hide it
    for prefix, most in (("ratio_std/step", options.spread), ("clip_frac/step", options.clip)):
        steps = {name: value for name, value in metrics.items() if name.startswith(prefix)}
        worst = max(steps, key=lambda name: steps[name], default=None)
        if worst is not None and steps[worst] > most:
            said.append(f"{worst} {steps[worst]:.3g} is more than {most:g}")
    if not said:
        return None
    return Alarm(
        "; ".join(said),
        "A gap is a difference between sampling and training: make train.rollout_batch equal to "
        "train.micro_batch, or take float32. Spread and clipping: lower optimizer.lr or "
        "train.updates, and keep noise off the last steps (plan.ode_last)",
    )


def gradients(options: GradientsMonitor, metrics: Metrics) -> Alarm | None:
    """Say so if an optimizer step had a gradient far larger than those before."""
    count = int(metrics.get("grad_outliers", 0.0))
    if not count:
        return None
    made = "left out" if options.action == "skip" else "made all the same"
    return Alarm(
        f"{count} optimizer steps had a gradient norm of more than {options.factor:g} times the "
        f"median before, and were {made}",
        "One is harmless; if they come back, lower optimizer.lr or train.max_grad_norm",
    )


def zero_std(options: ZeroStdMonitor, metrics: Metrics) -> Alarm | None:
    """Say so if most prompts have images that are all equally good."""
    share = metrics.get("zero_std", 0.0)
    if share <= options.share:
        return None
    return Alarm(
        f"the images of {share:.0%} of the prompts are all equally good",
        "Nothing is learnt from them: take harder or easier prompts, a finer reward, a larger "
        "train.group, or more noise",
    )


def prompts(options: PromptsMonitor, metrics: Metrics) -> Alarm | None:
    """Say so if few prompts give all of the gradient."""
    entropy = metrics.get("prompt_entropy", 1.0)
    # where nothing is trained there is nothing to share out
    if entropy >= options.entropy or metrics.get("trained", 1.0) == 0:
        return None
    return Alarm(
        f"few prompts teach: the entropy of their shares is {entropy:.2f} of the largest possible",
        "The others have equal rewards, or one prompt has far larger advantages: divide by the std "
        "of each prompt, or take other prompts",
    )


def _start(metrics: Metrics, memory: Memory) -> dict[str, float]:
    """Remember the first iterations -> the mean of each metric in them."""
    first: dict[str, list[float]] = memory.setdefault("start", {})
    for name in ("diversity", *LOOKS):
        value = metrics.get(name)
        if value is not None and math.isfinite(value) and len(first.get(name, ())) < FIRST:
            first.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in first.items()}


def _lasting(name: str, alarm: Alarm | None, patience: int, memory: Memory) -> Alarm | None:
    """Let an alarm through once it has lasted for `patience` iterations."""
    counts: dict[str, int] = memory.setdefault("lasting", {})
    counts[name] = counts.get(name, 0) + 1 if alarm else 0
    return alarm if counts[name] >= patience else None
