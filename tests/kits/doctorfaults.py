"""Faults to be put into the run of doctorkit, each with what the doctor has to say of it: shared by
the tests and by scripts/bench/doctor.py."""

from __future__ import annotations

from typing import NamedTuple

from doctorpatches import (
    Patch,
    alias,
    any_seed,
    copied,
    dropout,
    function,
    just_below_1,
    late,
    never,
    no_lr,
    one_seed,
    other_scale,
    other_texts,
    several,
    short,
    short_when_graded,
    sigmas,
    steep_at_the_end,
    stretched,
    stronger,
    swapped,
    swapped_texts,
    times,
    times_per_row,
    unscaled,
    velocity,
    when_graded,
    wide_score,
)
from torch import Tensor


class Fault(NamedTuple):
    """One fault: what has to be found, where the doctor has to look, and how it is put in."""

    finding: str
    sections: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    patch: Patch | None = None


STREAMS, ENGINE = "flowrl.training.run", "flowrl.algorithms.rollout.engine"
WEIGHTS = "flowrl.training.weights"
GUIDED = "flowrl.models.adapter:guided"
NOISE, NETWORK, PARITY = ("noise",), ("network",), ("parity",)
RATIO = ("noise", "network", "ratio")
REWARD, CREDIT = ("rewards",), ("credit",)
GRADIENT, UPDATE = ("gradient", "update"), ("update",)
FIVE = ("plan.steps=5",)  # of four, every time is a number of bfloat16
LAST = "plan={fn: full, steps: 4, noise_scale: 0.4, ode_last: 0}"


def _reward(name: str) -> tuple[str, ...]:
    return (f"rewards={{shapes: {{fn: {name}}}}}",)


FAULTS: dict[str, Fault] = {
    "wrong shift": Fault("parity/shift", PARITY, patch=sigmas(lambda s: 2 * s / (1 + s))),
    "other grid": Fault("parity/grid", PARITY, patch=sigmas(lambda s: s.square())),
    "time rounding in bfloat16": Fault("parity/time-rounding", PARITY, FIVE, patch=times(short)),
    "times that are late": Fault("parity/time", PARITY, patch=times(lambda time: time + 3)),
    "other text embeddings": Fault("parity/text", PARITY, patch=other_texts),
    "velocity with the other sign": Fault("parity/sign", PARITY, patch=velocity(lambda v: -v)),
    "swapped guidance branches": Fault(
        "parity/guidance-swapped", PARITY, patch=function(GUIDED, swapped)
    ),
    "guidance of another scale": Fault("parity/guidance", PARITY, patch=function(GUIDED, stronger)),
    "velocity a little too long": Fault(
        "parity/velocity", PARITY, patch=velocity(lambda v: 1.05 * v)
    ),
    "Euler steps that drift": Fault(
        "parity/latents", PARITY, patch=function(f"{ENGINE}:euler_step", late)
    ),
    "VAE without its scaling": Fault("parity/vae", PARITY, patch=unscaled),
    "texts of other prompts": Fault("text/swapped", ("texts", "parity"), patch=swapped_texts),
    "first sigma .9998": Fault("grid/first-sigma", PARITY + NOISE, patch=sigmas(just_below_1)),
    "noise on the last step": Fault("std/last", NOISE, (LAST,)),
    "too much noise": Fault("std/huge", NOISE, ("plan.noise_scale=8",)),
    "a mean that drifts without noise": Fault(
        "transition/euler", NOISE, ("transition={fn: doctorkit.drifting}",)
    ),
    "log-prob with a wrong std": Fault(
        "logprob/std",
        RATIO,
        patch=several(
            function("flowrl.algorithms.rollout.engine:gaussian_log_prob", wide_score),
            function("flowrl.algorithms.likelihoods.reverse:gaussian_log_prob", wide_score),
        ),
    ),
    "draws wider than scored": Fault(
        "std/draws", NOISE, patch=function(f"{ENGINE}:draw", stretched)
    ),
    "one seed for all": Fault(
        "seeds/same", NOISE, patch=function(f"{STREAMS}:generator", lambda right: one_seed)
    ),
    "seeds ignored": Fault(
        "seeds/random", NOISE, patch=function(f"{STREAMS}:generator", lambda right: any_seed)
    ),
    "dropout left on": Fault("ratio/random", (*NETWORK, "parity"), patch=dropout),
    "a kernel that depends on the batch": Fault(
        "ratio/batch-shape", NETWORK, patch=velocity(times_per_row)
    ),
    "a network that minds gradients": Fault(
        "ratio/grad-mode", NETWORK, patch=velocity(when_graded)
    ),
    "training at rounded times": Fault(
        "ratio/time", (*NETWORK, "parity"), FIVE, patch=times(short_when_graded)
    ),
    "replay with another noise scale": Fault(
        "ratio/off",
        RATIO,
        patch=function("flowrl.algorithms.likelihoods.reverse:reverse.batch", other_scale),
    ),
    "reward that ignores the image": Fault("reward/blind", REWARD, _reward("brokenkit.blind")),
    "reward that ignores the prompt": Fault("reward/prompt", REWARD, _reward("brokenkit.sharp")),
    "reward that reads and forgets": Fault("reward/prompt", REWARD, _reward("brokenkit.deaf")),
    "reward NaN": Fault("reward/nan", REWARD, _reward("brokenkit.half")),
    "reward constant": Fault("reward/constant", REWARD, _reward("doctorkit.constant")),
    "reward with its sign flipped": Fault("reward/reversed", REWARD, _reward("brokenkit.hostile")),
    "reward of the batch": Fault("reward/company", REWARD, _reward("brokenkit.centred")),
    "reward mostly chance": Fault("reward/noise", REWARD, _reward("doctorkit.noisy")),
    "reward that sees no difference": Fault("reward/flat", REWARD, _reward("doctorkit.flat")),
    "reward that fails": Fault("reward/fails", REWARD, _reward("doctorkit.broken")),
    "groups mixed up": Fault("credit/groups", CREDIT, ("credit={fn: doctorkit.one_group}",)),
    "advantage with the other sign": Fault(
        "credit/sign", CREDIT, ("credit={fn: doctorkit.worse}",)
    ),
    "loss with the other sign": Fault(
        "gradient/direction", GRADIENT, ("loss={fn: doctorkit.descending}",)
    ),
    "loss that overflows": Fault("gradient/broken", GRADIENT, ("loss={fn: doctorkit.infinite}",)),
    "velocity detached": Fault("gradient/zero", GRADIENT, patch=velocity(Tensor.detach)),
    "learning rate 0": Fault(
        "update/lr", UPDATE, patch=function("flowrl.training.learn:_set_lr", no_lr)
    ),
    "optimizer of other weights": Fault(
        "update/nothing", UPDATE, patch=function("flowrl.training.run:make_optimizer", copied)
    ),
    "reference not frozen": Fault(
        "weights/reference",
        UPDATE,
        patch=function(f"{WEIGHTS}:Weights.snapshot", alias),
    ),
    "one step with all of the gradient": Fault(
        "gradient/outlier", GRADIENT, patch=steep_at_the_end
    ),
    "EMA never updated": Fault(
        "weights/ema", UPDATE, patch=function(f"{WEIGHTS}:Weights.lerp", never("ema"))
    ),
    "sampling policy never updated": Fault(
        "weights/copies",
        UPDATE,
        ("old={fn: ramp, slope: 0.1, limit: 0.5}",),
        function(f"{WEIGHTS}:Weights.lerp", never("old")),
    ),
    "held-out prompts trained on": Fault(
        "prompts/leak", ("prompts",), ("prompts.test=assets/shapes/train.jsonl",)
    ),
    "no prompts": Fault("prompts/missing", ("prompts",), ("prompts.test=nowhere.txt",)),
    "more prompts than there are": Fault("batch/repeats", ("prompts",), ("train.prompts=300",)),
    "updates that do not divide": Fault("batch/updates", ("batch",), ("train.updates=7",)),
    "a plan without noise": Fault("batch/plan", ("batch",), ("plan.noise_scale=0",)),
    "a server that is down": Fault(
        "start/fails", ("texts",), _reward("toykit.moody, ready: false")
    ),
}
"""What is wrong -> the fault. Lists of prompts with faults are in `prompts_with`."""
