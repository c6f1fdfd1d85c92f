"""What can be seen before anything is loaded: packages, arithmetic, memory, prompts."""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
from collections import Counter

from packaging.requirements import Requirement

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError, DataError, FlowRLError, ModelError
from flowrl.core.installation import DISTRIBUTION, environment, other_package
from flowrl.core.prompts import PromptSet, load_prompts, overlap
from flowrl.core.tables import size
from flowrl.cost.estimate import estimate
from flowrl.cost.fit_card import GIB, card_size, limit_of, verdict, what_helps
from flowrl.cost.report import memory
from flowrl.doctor.findings import ReportSection
from flowrl.training.rehearsal import check_plan


def look_at_environment(config: Config) -> ReportSection:
    """Compare the installed packages with what flowrl needs."""
    section, here = ReportSection("environment"), environment()
    section.figures = here
    gpus = ", ".join(here["gpus"]) or "no GPU"
    versions = f"flowrl {here['flowrl']}, torch {here['torch']}, diffusers {here['diffusers']}"
    section.lines.append(f"{versions}, {here['cpus']} CPUs, {gpus}")
    # another package of this name, and versions
    found = other_package()
    if found:
        section.find("env/package", found)
    for text in _requirements():
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            section.find("env/version", f"{need.name} is missing; flowrl needs {need}")
            continue
        if not need.specifier.contains(version, prereleases=True):
            section.find("env/version", f"{need.name} is {version}; flowrl needs {need}")
    return section


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that was not installed
        return []


def look_at_batch(config: Config) -> ReportSection:
    """Say the arithmetic of an iteration, and find numbers that do not fit together."""
    section, t = ReportSection("batch"), config.train
    try:
        work = check_plan(config).work
    except (ConfigError, DataError) as error:
        section.find("batch/plan", str(error))
        return section
    section.lines += work.lines()
    # units are dealt out in equal parts, the last one has the rest
    steps = math.ceil(work.states / work.per_update)
    last = work.states - (steps - 1) * work.per_update
    section.figures = {
        "images": work.images,
        "states": work.states,
        "per_update": work.per_update,
        "updates": steps,
        "last_update": last,
    }
    if not config.segment and not config.select and work.trains == "draws":
        if steps < t.updates:
            section.find(
                "batch/updates",
                f"train.updates={t.updates}, but {work.states} states in parts of "
                f"{work.per_update} make only {steps}",
            )
        elif 2 * last < work.per_update:
            section.find(
                "batch/updates",
                f"the last of {steps} optimizer steps has {last} states, the others "
                f"{work.per_update}, and all have the same learning rate",
            )
    return section


def look_at_memory(config: Config, card: float | None = None) -> ReportSection:
    """Estimate the memory, compare it with `card` gigabytes or what this machine has, and the
    checkpoints with the disk."""
    section = ReportSection("memory")
    try:
        found = estimate(config)
    except (ConfigError, DataError, ModelError) as error:
        section.skipped = str(error)
        return section
    # what is needed, and what there is
    there = card or card_size() or _ram()
    section.figures = {"gigabytes": there, **{p.name: p.bytes for p in found.phases}}
    if found.largest is None:
        section.skipped = found.note
        return section
    section.lines += memory(found)
    says = verdict(found, gigabytes=round(there, 1))
    section.lines.append(says)
    if found.largest.bytes > limit_of(there):
        helps = what_helps(found, gigabytes=round(there, 1))
        section.find("memory/card", "; ".join([says, *helps.lines]))
    # weights, two moments and each copy, once more while a checkpoint is written
    trained = found.weights.trained if found.weights else 0
    copies = 3 + bool(config.train.ema) + bool(config.kl) + bool(config.old) + bool(config.slow)
    need = 4 * trained * copies * (config.checkpoint.keep + 1)
    free = shutil.disk_usage(os.getcwd()).free
    section.figures |= {"checkpoints": need, "disk": free}
    section.lines.append(f"checkpoints take {size(need)} of the {size(free)} that are free here")
    if need > free:
        section.find("env/disk", f"{size(need)} are needed, {size(free)} are free here")
    return section


def _ram() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB


def look_at_prompts(config: Config) -> ReportSection:
    """Find duplicates, and held-out prompts that are trained on."""
    section, lists = ReportSection("prompts"), dict[str, PromptSet]()
    for key in ("train", "test"):
        try:
            lists[key] = load_prompts(getattr(config.prompts, key))
        except FlowRLError as error:
            section.find("prompts/missing", f"prompts.{key}: {error}")
    if len(lists) < 2:
        return section
    train, test = lists["train"], lists["test"]
    epoch = len(train) / config.train.prompts
    section.lines.append(
        f"{len(train)} to train on ({train.path}), {len(test)} held out ({test.path}); each "
        f"comes once in {epoch:.3g} iterations, {config.train.iterations / epoch:.3g} times in all"
    )
    section.figures = {"train": len(train), "test": len(test)}
    # copies
    known = Counter(" ".join(text.casefold().split()).rstrip(" .") for text in train.texts)
    copies = [text for text, count in known.items() if count > 1]
    section.figures["duplicates"] = len(train) - len(known)
    if copies:
        section.find(
            "prompts/duplicates",
            f"{len(train) - len(known)} of {len(train)} training prompts repeat another one, "
            f"such as {copies[0]!r} ({known[copies[0]]} times)",
        )
    if config.train.prompts > len(known):
        section.find(
            "batch/repeats",
            f"train.prompts={config.train.prompts}, but the list has {len(known)} prompts",
        )
    # leaks; other words for the same thing are said, and are no finding
    shared = overlap(test, train)
    section.figures |= {kind: len(pairs) for kind, pairs in shared._asdict().items()}
    section.lines += shared.lines(len(test))
    # where each prompt learns a noise of its own, only trained ones can be judged
    if shared.same and not config.likelihood.kwargs.get("own"):
        section.find(
            "prompts/leak",
            f"{len(shared.same)} of {len(test)} held-out prompts are training prompts too, such "
            f"as {shared.same[0][0]!r}",
        )
    return section
