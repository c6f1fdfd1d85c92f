"""Say what a config would do, before any weight is read: its numbers, its cost, its prompts and its memory."""

from __future__ import annotations

from flowrl.config import Config
from flowrl.errors import ConfigError
from flowrl.feasible import TRAINED_CALLS, Forecast, check_plan
from flowrl.memory import Part, estimate
from flowrl.prompts import PromptSet, load_prompts


def dry_run(config: Config) -> str:
    """Check a config and return its plan in plain English.

    Prompt files are read where they exist; rewards and model are bound to their arguments, not made. Raises ConfigError
    for a plan that cannot be, DataError for a broken prompt file, ModelError for a model folder that does not fit.
    """
    forecast = check_plan(config)
    parts, note = estimate(config, forecast)
    trained = [part.what.partition(" x ")[0] for part in parts if part.name == "trained weights"]
    counted = "".join(f", {what.replace('numbers', 'trained numbers')}" for what in trained)
    t = config.train
    rewards = ", ".join(f"{name} x {weight:g}" for name, weight in config.reward_weights.items())
    lines = [
        f"{t.iterations} iterations{counted}, lr {t.lr:g}, seed {config.seed}",
        *forecast.work.lines(),
        *_calls(config, forecast),
        *_prompts(config),
        f"rewards    {rewards} (not loaded)",
        *_memory(parts, note),
    ]
    return "\n".join(lines)


def size(count: int) -> str:
    """Write bytes as a person reads them: 1.5 GiB, 12.0 MiB."""
    unit, power = ("GiB", 30) if count >= 2**30 else ("MiB", 20) if count >= 2**20 else ("KiB", 10)
    return f"{count / 2**power:,.1f} {unit}"


def _calls(config: Config, forecast: Forecast) -> list[str]:
    work, total = forecast.work, forecast.calls
    states = f"from {forecast.states:,} states"
    chosen = f"select     {forecast.decisions:,} of {work.decisions:,} decisions are trained, {states}"
    reference = " and 1 of the KL's reference" if config.kl_beta else ""
    double = ", each with and without the prompt" if work.guided else ""
    return ([chosen] if config.select else []) + [
        f"calls      {total:,} of the network per iteration, counted per latent: {work.evaluations:,} while sampling, "
        f"{total - work.evaluations:,} while training ({TRAINED_CALLS} per state{reference}){double}; "
        f"{total / work.images:.1f} per picture"
    ]


def _prompts(config: Config) -> list[str]:
    train, test = _read(config.prompts.train), _read(config.prompts.test)
    there = [
        f"{len(train)} to train on ({train.path})" if train else "",
        f"{len(test)} held out ({test.path}), {config.eval.images} pictures each to judge" if test else "",
    ]
    lines = ["prompts    " + ", ".join(text for text in there if text)] if train or test else []
    absent = {"train": None if train else config.prompts.train, "test": None if test else config.prompts.test}
    return lines + [
        f"prompts    {path} is not here: put your own file there, or set prompts.{key}"
        for key, path in absent.items()
        if path
    ]


def _read(path: str) -> PromptSet | None:
    try:
        return load_prompts(path)
    except ConfigError:  # no such file
        return None


def _memory(parts: list[Part], note: str) -> list[str]:
    width = max(len(part.name) for part in parts)
    lines = ["memory     kept during an iteration, without activations and the rewards' networks"]
    lines += [f"           {part.name:<{width}}  {size(part.bytes):>11}  {part.what}" for part in parts]
    lines.append(f"           {'together':<{width}}  {size(sum(part.bytes for part in parts)):>11}")
    return lines + ([f"           {note}"] if note else [])
