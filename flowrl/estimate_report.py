"""An estimate in words and as plain data."""

from __future__ import annotations

from typing import Any

from flowrl.advice import verdict
from flowrl.estimate import Estimate
from flowrl.feasible import TRAINED_CALLS
from flowrl.memory import size


def text(found: Estimate, *, gigabytes: float) -> str:
    """Say an estimate in words, with the verdict for a card of so many gigabytes last."""
    config = found.config
    lines = [f"{config.name}: {config.model.kwargs.get('path', config.model.fn)}", *_parameters(found)]
    lines += [*found.forecast.work.lines(), *calls(found), *memory(found)]
    return "\n".join([*lines, "", *verdict(found, gigabytes=gigabytes)])


def calls(found: Estimate) -> list[str]:
    """Say how many network calls an iteration makes, and their floating-point work."""
    forecast, beta = found.forecast, found.config.kl_beta
    work, total = forecast.work, forecast.calls
    reference = " and 1 of the KL's reference" if beta else ""
    double = ", each with and without the prompt" if work.guided else ""
    lines = [
        f"calls      {total:,} of the network per iteration, counted per latent: {work.evaluations:,} while sampling, "
        f"{total - work.evaluations:,} while training ({TRAINED_CALLS} per state{reference}){double}; "
        f"{total / work.images:.1f} per picture"
    ]
    if found.flops:
        parts = ", ".join(f"{name} {flop(count)}" for name, count in found.flops.items())
        lines.append(f"work       {flop(sum(found.flops.values()))} per iteration: {parts}")
    return lines


def memory(found: Estimate) -> list[str]:
    """Say what is kept, part by part, and the peak of each phase."""
    width = max(len(part.name) for part in found.parts)
    lines = ["memory     kept, without the rewards' networks"]
    lines += [f"           {part.name:<{width}}  {size(part.bytes):>11}  {part.what}" for part in found.parts]
    lines.append(f"           {'together':<{width}}  {size(sum(part.bytes for part in found.parts)):>11}")
    if found.note:
        return [*lines, f"           {found.note}"]
    lines.append("peak       kept + what comes and goes at the worst moment")
    for phase in found.phases:
        sums = f"{size(phase.kept)} + {size(phase.extra)} for {phase.what}"
        lines.append(f"           {phase.name:<{width}}  {size(phase.bytes):>11}  {sums}")
    return [*lines, f"           of a micro-batch, {size(found.saved)} wait for the backward pass"]


def numbers(count: int) -> str:
    """Write a number of parameters as a person reads it: 2.24 B, 84 M, 512."""
    for unit, power in (("B", 9), ("M", 6), ("K", 3)):
        if count >= 10**power:
            value = count / 10**power
            return (
                f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
            )
    return str(count)


def flop(count: int) -> str:
    """Write floating-point operations: 2.5 TFLOP, 12.0 PFLOP."""
    for unit, power in (("EFLOP", 18), ("PFLOP", 15), ("TFLOP", 12)):
        if count >= 10**power:
            return f"{count / 10**power:,.1f} {unit}"
    return f"{count / 1e9:,.3g} GFLOP"


def as_json(found: Estimate) -> dict[str, Any]:
    """Return an estimate as plain data; bytes and numbers are whole."""
    work, counted = found.forecast.work, found.sizes
    named = {} if counted is None else {"network": counted.network, "trained": counted.trained, **counted.others}
    return {
        "config": found.config.name,
        "model": str(found.config.model.kwargs.get("path", found.config.model.fn)),
        "parameters": named,
        "calls": {
            "sampling": work.evaluations,
            "training": found.forecast.calls - work.evaluations,
            "per_picture": found.forecast.calls / work.images,
            "guided": work.guided,
        },
        "flops": found.flops,
        "activations": found.saved,
        "kept": {part.name: part.bytes for part in found.parts},
        "peak": {phase.name: phase.bytes for phase in found.phases},
        "note": found.note,
    }


def _parameters(found: Estimate) -> list[str]:
    counted = found.sizes
    if counted is None:
        return []
    others = ", ".join(f"{name} {numbers(count)}" for name, count in counted.others.items())
    return [
        f"parameters {numbers(counted.network)} of the network, {numbers(counted.trained)} trained; {others}",
        f"           from the settings of {found.origin}",
    ]
