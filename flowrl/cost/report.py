"""An estimate in words and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrl.core.tables import flop, parameter_count, size, text_table
from flowrl.cost.estimate import Estimate
from flowrl.cost.memory import reward_networks
from flowrl.cost.time_shares import time_lines, times_as_json
from flowrl.training.method import TRAINED_CALLS, method_of

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
    also = f", and 1 under each of {', '.join(others)}" if others else ""
    also += f", and {TRAINED_CALLS} on a real image" * (method.graphs > 1)
    double = ", each with and without the prompt" if work.guided else ""
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
    kept = [[part.name, size(part.bytes), part.what] for part in found.parts]
    kept.append(["together", size(sum(part.bytes for part in found.parts)), ""])
    lines += _table([["part", "bytes", "what it is"], *kept], width)
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
    if not networks:
        return [f"rewards    {names}"] if unknown else []
    lines = ["rewards    their networks, besides the above"]
    taken = [[one.name, size(one.bytes), one.what] for one in networks]
    lines += _table([["reward", "bytes", "what it is"], *taken], width)
    if found.largest is not None:
        lines.append(f"           with them the worst moment takes {size(found.largest.bytes)}")
    return [*lines, f"           {names}"] if unknown else lines


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
    inner = None if width is None else max(width - _INDENT, 20)
    drawn = text_table(rows, left=(0, 2), width=inner)
    return [" " * _INDENT + line for line in drawn.splitlines()]


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
