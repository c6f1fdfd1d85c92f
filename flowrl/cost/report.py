"""An estimate in words and as plain data; and the plan of a dry run: what a config would do, before
any weight is read, and which files that it names are not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.prompt_files import on_hub
from flowrl.core.prompts import prompts_if_there
from flowrl.core.shipped_files import find_resource
from flowrl.core.tables import flop, indented_table, parameter_count, size
from flowrl.cost.architecture import facts_of, find_folder, released, released_parts
from flowrl.cost.estimate import Estimate, estimate
from flowrl.cost.memory import MemoryPart, RewardNetwork, reward_networks
from flowrl.cost.time_shares import time_lines, times_as_json
from flowrl.evaluation.needs import WRITTEN, unmet
from flowrl.evaluation.sources import check_sources
from flowrl.evaluation.statistics import decided_by
from flowrl.models.options import Facts
from flowrl.training.method import COMPANIONS, TRAINED_CALLS, method_of
from flowrl.training.parts.teachers import teachers_of
from flowrl.training.run import told_overlap
from flowrl.training.start_weights import check_start, names_of

_INDENT = 11  # columns of the word that a line begins with


def estimate_text(found: Estimate, *, gigabytes: float, width: int | None = None) -> str:
    """Say an estimate in words, times on the cards of so many gigabytes; tables of `width` columns,
    None: of any number."""
    config = found.config
    lines = [
        f"{config.name}: {config.model.kwargs.get('path', config.model.fn)}",
        *_parameters(found),
    ]
    lines += [*found.forecast.work.lines(), *calls(found)]
    lines += time_lines(found, gigabytes=gigabytes, width=width)
    lines += memory(found, width)
    return "\n".join(lines)


def calls(found: Estimate) -> list[str]:
    """Say how many network calls an iteration makes, and their floating-point work."""
    forecast = found.forecast
    work, total = forecast.work, forecast.calls
    # what multiplies a call: other weights, and guidance
    method = method_of(found.config)
    others = method.others(0, [])  # weights that it is evaluated under, too
    each: float = TRAINED_CALLS
    if "reward" in method.needs:  # through the sampler, partly without a gradient, partly anew
        each = (total - work.nfe) / forecast.states
    also, double = "", ""
    if others:
        also = f", and 1 under each of {', '.join(others)}"
    if method.graphs > 1:
        also += f", and {TRAINED_CALLS} on a real image"
    if work.guided:
        double = ", each with and without the prompt"
    # how many calls, and below them their work where it was counted
    lines = [
        f"calls      {total:,} of the network per iteration, counted per latent: "
        f"{work.nfe:,} while sampling, "
        f"{total - work.nfe:,} while training ({each:.3g} per "
        f"state{also}){double}; "
        f"{total / work.images:.1f} per image"
    ]
    if found.flops:
        parts = ", ".join(f"{name} {flop(count)}" for name, count in found.flops.items())
        lines.append(f"work       {flop(sum(found.flops.values()))} per iteration: {parts}")
    return lines


def memory(found: Estimate, width: int | None = None) -> list[str]:
    """Say what is kept, part by part, and the peak of each phase; tables of `width` columns, None:
    of any number."""
    lines = ["memory     kept, without the rewards' networks"]
    kept = _sizes("part", found.parts)
    kept.append(["together", size(sum(part.bytes for part in found.parts)), ""])
    lines += _table(kept, width)
    if found.note:
        return [*lines, f"           {found.note}"]
    # phases do not overlap, so a card has to hold the largest of them, not their sum
    lines.append("peak       kept + what comes and goes at the worst moment")
    peaks = [["phase", "bytes", "of which"]]
    for phase in found.phases:
        sums = f"{size(phase.kept)} + {size(phase.extra)} for {phase.what}"
        peaks.append([phase.name, size(phase.bytes), sums])
    lines += _table(peaks, width)
    lines.append(f"           of a micro-batch, {size(found.saved)} wait for the backward pass")
    if "reward" in method_of(found.config).needs:
        lines.append("           not counted: the backward pass through decoder and rewards")
    return [*lines, *rewards(found, width)]


def rewards(found: Estimate, width: int | None = None) -> list[str]:
    """Say what the rewards' networks take besides, and the peak with those that stay."""
    networks, unknown = reward_networks(found.config)
    names = f"not counted: {', '.join(unknown)} (their networks, if they have any)"
    if not networks and not unknown:
        return []
    if not networks:
        return [f"rewards    {names}"]
    lines = ["rewards    their networks, besides the above"]
    lines += _table(_sizes("reward", networks), width)
    if found.largest is not None:
        lines.append(f"           with them the worst moment takes {size(found.largest.bytes)}")
    if unknown:
        lines.append(f"           {names}")
    return lines


def _sizes(what: str, parts: Sequence[MemoryPart | RewardNetwork]) -> list[list[str]]:
    rows = [[what, "bytes", "what it is"]]
    for part in parts:
        rows.append([part.name, size(part.bytes), part.what])
    return rows


def estimate_as_json(found: Estimate) -> dict[str, Any]:
    """Return an estimate as plain data; bytes and numbers are whole. `peak` is without the rewards'
    networks, and `rewards.peak` the worst moment with those that are counted."""
    # a model that could not be counted has no parameters to name
    work, counted = found.forecast.work, found.weights
    named = {}
    if counted is not None:
        named = {"network": counted.network, "trained": counted.trained, **counted.others}
    return {
        "config": found.config.name,
        "model": str(found.config.model.kwargs.get("path", found.config.model.fn)),
        "parameters": named,
        "calls": {
            "sampling": work.nfe,
            "training": found.forecast.calls - work.nfe,
            "per_image": found.forecast.calls / work.images,
            "guided": work.guided,
            "guided_alone": sorted(work.twice),
        },
        "flops": found.flops,
        "time_of_1000_iterations": times_as_json(found),
        "activations": found.saved,
        "kept": {part.name: part.bytes for part in found.parts},
        "peak": {phase.name: phase.bytes for phase in found.phases},
        "rewards": _rewards_as_json(found),
        "note": found.note,
    }


def _rewards_as_json(found: Estimate) -> dict[str, Any]:
    """Return what the networks of an estimate's rewards take; a model that could not be counted has
    no peak."""
    networks, unknown = reward_networks(found.config)
    sizes = {one.name: {"bytes": one.bytes, "always": one.always} for one in networks}
    peak = None if found.largest is None else found.largest.bytes
    return {"networks": sizes, "not_counted": unknown, "peak": peak}


def _table(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Draw a table of names, figures and texts below a line's first word."""
    return indented_table(rows, _INDENT, left=(0, 2), width=width)


def _parameters(found: Estimate) -> list[str]:
    counted = found.weights
    if counted is None:
        return []
    others = ", ".join(f"{name} {parameter_count(count)}" for name, count in counted.others.items())
    return [
        f"parameters {parameter_count(counted.network)} of the network, "
        f"{parameter_count(counted.trained)} trained; {others}",
        f"           from the settings of {found.origin}",
    ]


class Absent(NamedTuple):
    """A file or folder that is not here."""

    part: str  # of the config, as the plan's lines begin
    said: str  # what it is, and what to do
    downloaded: bool = False  # a run fetches it by itself

    @property
    def line(self) -> str:
        """Return it as a line of the plan."""
        return f"{self.part:<11}{self.said}"


MISSING = "missing    "  # how the plan's lines begin that name what no run downloads


def dry_run(config: Config) -> str:
    """Check a config and return its plan in plain English.

    Prompt files are read where they exist, and the images that their prompts start from are looked
    at; rewards and model are bound to their arguments, not made. The last lines name what is not
    here and no run downloads. Raises ConfigError for a plan that cannot be and for start weights
    that nothing would bring, DataError for a broken prompt file or such an image that is missing,
    broken, not RGB or of another shape, ModelError for a model folder that does not fit.
    """
    absent = absent_files(config)
    found, t = estimate(config), config.train
    counted = ""
    if found.weights is not None:
        counted = f", {found.weights.trained:,} trained numbers"
    rewards = ", ".join(f"{name} x {weight:g}" for name, weight in config.reward_weights.items())
    prompts, lists = _prompts(config)
    lines = [
        f"{t.iterations} iterations{counted}, lr {config.lr:g}, seed {config.seed}",
        *found.forecast.work.lines(),
        *_selected(found),
        *calls(found),
        *prompts,
        f"rewards    {rewards} (not loaded)",
        *(each.line for each in absent),
        *memory(found),
    ]
    for each in (*lists, *absent):
        if not each.downloaded:
            lines.append(f"{MISSING}{each.said}")
    return "\n".join(lines)


def _selected(found: Estimate) -> list[str]:
    if not found.config.select:
        return []
    forecast = found.forecast
    chosen = f"{forecast.decisions:,} of {forecast.work.decisions:,} decisions are trained"
    return [f"select     {chosen}, from {forecast.states:,} states"]


def prompt_lines(config: Config) -> list[str]:
    """Say how many prompts there are, and which files have to be put there. Raises DataError for an
    image that a prompt starts from, as `check_sources` does."""
    return _prompts(config)[0]


def _prompts(config: Config) -> tuple[list[str], list[Absent]]:
    """Return the lines of `prompt_lines`, and the lists that are not here."""
    train, test = prompts_if_there(config.prompts.train), prompts_if_there(config.prompts.test)
    trained = (config.image.height, config.image.width)
    for listed, sides in ((train, trained), (test, config.eval_size)):
        if listed is not None:
            check_sources(listed, sides)
    # both lists in one line, and a line for each that is not here
    there, lines = [], []
    if train:
        there.append(f"{len(train)} to train on ({train.path})")
    if test:
        said = f"{len(test)} held out ({test.path}), {config.eval.images} images each to judge"
        there.append(said)
    if there:
        lines.append("prompts    " + ", ".join(there))
    if test:
        lines.append(f"test       {decided_by(len(test) * config.eval.images)}")
    if train is not None and len(train) < config.train.prompts:
        lines.append(
            f"prompts    train.prompts={config.train.prompts} of {len(train)}: an iteration takes "
            "some of them more than once"
        )
    if train and test and (said := told_overlap(train, test)):
        lines.append(f"prompts    {said}")
    absent = []
    for key, listed in (("train", train), ("test", test)):
        path = getattr(config.prompts, key)
        if path and not listed:
            found = _absent(path, key)
            absent.append(found)
            lines.append(found.line)
    return lines, absent


def _absent(path: str, key: str) -> Absent:
    if on_hub(path):
        return Absent("prompts", f"{path} is read from the hub when the run starts", True)
    mend = f"put your own file there, or set prompts.{key}"
    return Absent("prompts", f"{path} is not here: {mend}")


def absent_files(config: Config) -> list[Absent]:
    """Return the files of rewards, the teachers and the start weights that are not here.

    Raises ConfigError, as the run would, for start weights that are not here and do not lie where
    scripts and runs write: nothing would bring them.
    """
    return [
        *_unknown_model(config),
        *_of_rewards(config),
        *_teachers(config),
        *_start_weights(config),
    ]


def _unknown_model(config: Config) -> Iterator[Absent]:
    """Warn of a repository of the hub of which nobody here knows what kind of model it holds."""
    adapter, path = config.model.fn, str(config.model.kwargs.get("path", ""))
    facts = facts_of(config)
    if facts is None or path in released() or find_folder(path) is not None:
        return
    own = ", ".join(name for name in released() if adapter_reads(facts, name))
    yield Absent(
        "model",
        f"{path} is not in the cache, and it is none of the models that {adapter} is known to "
        f"read ({own}): the sizes below are those of {adapter}'s own, and the run refuses "
        "another kind of model after its download",
        True,
    )


def adapter_reads(facts: Facts, path: str) -> bool:
    """Say whether a released model has the network that an adapter reads."""
    part = released_parts(path).get(facts.network)
    return part is not None and part.kind == facts.kind


def _of_rewards(config: Config) -> Iterator[Absent]:
    for name, call in config.rewards.items():
        for need in unmet(call, name):
            if need.on_hub:
                why = "the run downloads it from the hub"
                yield Absent("rewards", f"{name}: {need.path} is not in the cache: {why}", True)
            else:
                why = "make it or put it there first"
                yield Absent("rewards", f"{name}: {need.path} is not here: {why}")


def _teachers(config: Config) -> Iterator[Absent]:
    for run in dict.fromkeys(chain.from_iterable(teachers_of(config).values())):
        if find_resource(run.run) is None:
            yield Absent("teacher", f"{run.run} is not here: train it first")


def _start_weights(config: Config) -> Iterator[Absent]:
    starts: dict[str, str | Sequence[str]] = {"train.start": config.train.start}
    for name in COMPANIONS:
        if getattr(config, name):
            starts[f"{name}.begin"] = getattr(config, name).make().begin
    for key, listed in starts.items():
        for start in names_of(listed):
            try:
                check_start(start, key)
            except ConfigError:
                if not start.startswith(WRITTEN) or find_resource(start) is not None:
                    raise
                what = "train" if start.startswith("runs/") else "make"
                yield Absent("start", f"{key}: {start} is not here: {what} it first")
