"""The preflight: look at each part of a config in turn, from what costs nothing to one optimizer
step."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError, FlowRLError, RewardError, unknown
from flowrl.core.types import FlowModel
from flowrl.cost.phases import PHASES
from flowrl.doctor.before_loading import (
    look_at_batch,
    look_at_environment,
    look_at_memory,
    look_at_prompts,
)
from flowrl.doctor.draws import look_at_draws, look_at_ratio
from flowrl.doctor.examined_run import ExaminedRun, admit
from flowrl.doctor.findings import CATALOGUE, Checkup, ReportSection
from flowrl.doctor.learning import look_at_credit, look_at_gradient, look_at_update
from flowrl.doctor.network import look_at_network, look_at_texts
from flowrl.doctor.parity import look_at_parity
from flowrl.doctor.rewards import look_at_rewards

BEFORE = ("environment", "batch", "memory", "prompts")


def look_at_time(examined: ExaminedRun) -> ReportSection:
    """Scale the seconds of two prompts to those of an iteration. The first calls are slow, so this
    is an upper estimate."""
    section, t = ReportSection("time"), examined.config.train
    factor = t.prompts / len(examined.rows)
    seconds = {name: examined.clock.seconds[name] * factor for name in PHASES}
    whole = sum(seconds.values())
    section.figures = {**seconds, "iteration": whole, "hours": whole * t.iterations / 3600}
    parts = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    section.lines.append(
        f"an iteration takes about {whole:.3g} s ({parts}), {t.iterations} iterations about "
        f"{whole * t.iterations / 3600:.3g} h, without evaluations"
    )
    return section


LOADED: dict[str, Callable[[ExaminedRun], ReportSection]] = {
    "texts": look_at_texts,
    "network": look_at_network,
    "parity": look_at_parity,
    "noise": look_at_draws,
    "ratio": look_at_ratio,
    "rewards": look_at_rewards,
    "credit": look_at_credit,
    "gradient": look_at_gradient,
    "update": look_at_update,
    "time": look_at_time,
}
SECTIONS = (*BEFORE, *LOADED)


def examine(
    config: Config,
    *,
    model: FlowModel | None = None,
    only: Collection[str] = (),
    known: Sequence[str] = (),
    card: float | None = None,
    progress: Callable[[str], object] = lambda name: None,
) -> Checkup:
    """Examine a config as it would be trained, two prompts at a time -> what was seen.

    Args:
        model: instead of the one that the config names; its weights are put back afterwards.
        only: names of `SECTIONS`; all without any.
        known: ids of findings that are meant so, and are not reported.
        card: gigabytes of memory to fit; without it those of this machine.
        progress: gets the name of each section as it begins.

    Raises ConfigError for an unknown section or finding. What a run would raise is a finding.
    """
    for names, there, kind in ((only, SECTIONS, "section"), (known, CATALOGUE, "finding")):
        for name in names:
            if name not in there:
                raise ConfigError(f"doctor {unknown(name, there, kind)}")
    wanted = [name for name in SECTIONS if not only or name in only]
    free: dict[str, Callable[[], ReportSection]] = {
        "environment": partial(look_at_environment, config),
        "batch": partial(look_at_batch, config),
        "memory": partial(look_at_memory, config, card),
        "prompts": partial(look_at_prompts, config),
    }
    sections = []
    for name in wanted:
        if name in free:
            progress(name)
            sections.append(_timed(name, free[name]))
    checkup = Checkup(config.name, sections, tuple(known))
    # what cannot start has been said already, as far as it was seen
    fatal = {"batch/plan", "prompts/missing"} & {finding.id for finding in checkup.findings}
    if not fatal and any(name in LOADED for name in wanted):
        _loaded(config, model, wanted, sections, progress)
    return checkup


def _loaded(
    config: Config,
    model: FlowModel | None,
    wanted: Sequence[str],
    sections: list[ReportSection],
    progress: Callable[[str], object],
) -> None:
    """Load, sample and score; then look at it."""
    progress("loading, sampling and scoring two prompts")
    start, began = ReportSection("start"), time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            examined = admit(config, model)
    except RewardError as error:
        start.find("reward/fails", str(error))
    except FlowRLError as error:
        start.find("start/fails", str(error))
    except torch.OutOfMemoryError as error:
        start.find("memory/card", str(error))
    start.seconds = time.perf_counter() - began
    sections.append(start)
    if start.findings:
        return
    # warnings of the run; what is said of prompts has its own place
    ours = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    start.lines = [text for text in ours if "flowrl" in text or "prompt" in text]
    try:
        for name in wanted:
            if name in LOADED:
                progress(name)
                sections.append(_timed(name, partial(LOADED[name], examined)))
                examined.known |= {finding.id for finding in sections[-1].findings}
    finally:
        examined.heal()


def _timed(name: str, look: Callable[[], ReportSection]) -> ReportSection:
    """Look, and take the time; an error of a run that shows here is a finding."""
    began = time.perf_counter()
    try:
        with torch.enable_grad():
            section = look()
    except FlowRLError as error:
        section = ReportSection(name)
        section.find("start/fails", f"{name}: {error}")
    except torch.OutOfMemoryError as error:
        section = ReportSection(name)
        section.find("memory/card", f"{name}: {error}")
    section.seconds = time.perf_counter() - began
    return section
