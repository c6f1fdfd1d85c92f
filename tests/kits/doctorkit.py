"""Faults to be put into a run, each with what the doctor has to say of it: shared by the tests and
by scripts/research/doctor.py.

The run is the embedded shapes model with guidance, a KL and three trained steps of four. Functions
whose names a config can take are faults of a plugin; the others are put into flowrl's own code.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flowrl.algorithms.credit.advantages import group_norm
from flowrl.algorithms.losses.policy import ppo_clip
from flowrl.algorithms.transitions import flow_sde
from flowrl.config.load import Config, load_config
from flowrl.core.types import Gaussian, LossInput, RewardBatch, Tree
from rewards.shapes import shapes

Patch = Callable[[pytest.MonkeyPatch, Any], None]
PLUGINS = ("doctorkit", "brokenkit", "toykit")
SOUND = [
    "model.dtype=float32",
    "model.guidance=2.5",
    "plan={fn: full, steps: 4, noise_scale: 0.4, ode_last: 1}",
    "transition={fn: flow_sde}",
    "kl={fn: transition_kl, beta: 0.1}",
    "rewards={shapes: {fn: shapes, mode: graded_angle}}",
    "eval.score=shapes",
    "train={iterations: 100, prompts: 3, group: 4, updates: 2, micro_batch: 8, rollout_batch: 8}",
]
"""Overrides of shapes/flow_grpo that make the run that is broken; nothing is wrong with it."""


def sound(*overrides: str) -> Config:
    """Return the config of the run, with more overrides."""
    return load_config("shapes/flow_grpo", [*SOUND, *overrides], PLUGINS)


class Fault(NamedTuple):
    """One fault: what has to be found, where the doctor has to look, and how it is put in."""

    finding: str
    sections: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    patch: Patch | None = None


# ------------------------------------------------------------------------------ faults of a plugin

_right = shapes(mode="graded_angle")


def constant(batch: RewardBatch) -> Tensor:
    """Like everything alike."""
    return torch.full((len(batch.images),), 0.3)


def _sampled(batch: RewardBatch) -> bool:
    """Say whether images are a group of the model's own; the self-test has two of a prompt."""
    return Counter(batch.prompts).most_common(1)[0][1] > 2


def noisy(batch: RewardBatch) -> Tensor:
    """Add as much chance as there is difference, where the images are the model's own."""
    score = _right(batch)
    return score + torch.rand(len(score)) if _sampled(batch) else score


def flat(batch: RewardBatch) -> Tensor:
    """See no difference between the model's own images."""
    score = _right(batch)
    return 0 * score if _sampled(batch) else score


def broken(batch: RewardBatch) -> Tensor:
    """Fail."""
    raise ValueError("out of ideas")


def one_group(reward: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
    """Compare all images as if they were of one prompt."""
    return group_norm(reward, leaf, tree._replace(group=0 * tree.group))


def worse(reward: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
    """Take the wrong sign."""
    return -group_norm(reward, leaf, tree)


def drifting(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, noise_scale: Tensor
) -> Gaussian:
    """Move the mean at any noise scale."""
    mean, std = flow_sde(x, v, sigma, sigma_next, noise_scale)
    return Gaussian(mean + 0.01, std)


def descending(data: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Take the wrong sign."""
    loss, metrics = ppo_clip(data, clip_low=0.05, clip_high=0.05)
    return -loss, metrics


def infinite(data: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Overflow."""
    loss, metrics = ppo_clip(data, clip_low=0.05, clip_high=0.05)
    return loss * torch.inf, metrics


# ------------------------------------------------------------------------- faults of flowrl's code


def _velocity(change: Callable[[Tensor], Tensor]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        right = model.velocity
        monkeypatch.setattr(model, "velocity", lambda *args: change(right(*args)), raising=False)

    return patch


def _sigmas(change: Callable[[Tensor], Tensor]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        right = model.sigmas
        monkeypatch.setattr(model, "sigmas", lambda *args: change(right(*args)), raising=False)

    return patch


def _just_below_1(sigmas: Tensor) -> Tensor:
    return sigmas.clamp_max(0.999999)


def _short(time: Tensor) -> Tensor:
    return time.bfloat16().float()


def _short_when_graded(time: Tensor) -> Tensor:
    return _short(time) if torch.is_grad_enabled() else time


def _times(change: Callable[[Tensor], Tensor]) -> Patch:
    """Change the network's time where flowrl calls it."""

    def patch(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        right = model._tuned.call

        def call(*inputs: Any, named: dict[str, Any]) -> Tensor:
            time = change(named["timestep"])
            return right(*inputs, named={**named, "timestep": time})

        monkeypatch.setattr(model._tuned, "call", call, raising=False)

    return patch


def _function(place: str, make: Callable[[Any], Any]) -> Patch:
    """Put another function in the place of "module:name", or of "module:class.name"."""

    def patch(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        module, _, name = place.partition(":")
        owner: Any = importlib.import_module(module)
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        last = name.split(".")[-1]
        monkeypatch.setattr(owner, last, make(getattr(owner, last)))

    return patch


def _several(*patches: Patch) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        for one in patches:
            one(monkeypatch, model)

    return patch


def _dropout(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    layer = model.network.context_embedder
    left_on = torch.nn.Sequential(layer, torch.nn.Dropout(0.2))
    monkeypatch.setitem(model.network._modules, "context_embedder", left_on)


def _swapped_texts(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    right = model.encode

    def encode(prompts: list[str]) -> dict[str, Tensor]:
        return {name: rows.flip(0) for name, rows in right(prompts).items()}

    monkeypatch.setattr(model, "encode", encode, raising=False)


def _other_texts(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    right = model.encode

    def encode(prompts: list[str]) -> dict[str, Tensor]:
        return {name: 1.1 * rows for name, rows in right(prompts).items()}

    monkeypatch.setattr(model, "encode", encode, raising=False)


def _unscaled(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    vae = model._pipeline.vae
    monkeypatch.setattr(model, "_decode", lambda x0: model._images(x0.to(vae.dtype)), raising=False)


def _swapped(right: Any) -> Any:
    return lambda network, scale, *rest, **more: right(network, 1 - scale, *rest, **more)


def _stronger(right: Any) -> Any:
    return lambda network, scale, *rest, **more: right(network, scale + 1, *rest, **more)


def _wide_score(right: Any) -> Any:
    return lambda x_next, mean, std: right(x_next, mean, 1.2 * std)


def _alias(right: Any) -> Any:
    def snapshot(self: Any, name: str) -> None:
        right(self, name)
        if name == "ref":
            self._snapshots[name] = {key: p.data for key, p in self._params.items()}

    return snapshot


def _no_lr(right: Any) -> Any:
    def set_lr(run: Any, update: int) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0

    return set_lr


def _copied(right: Any) -> Any:
    def make(call: Any, params: list[Any], **more: Any) -> Any:
        return right(call, [torch.nn.Parameter(p.detach().clone()) for p in params], **more)

    return make


def _stretched(right: Any) -> Any:
    return lambda gaussian, noise: right(gaussian, 1.3 * noise)


def _late(right: Any) -> Any:
    return lambda run, x, v, k, k_next: right(run, x, v, k, k_next) + 0.05


def _other_scale(right: Any) -> Any:
    def batch(self: Any, *args: Any) -> Any:
        made = right(self, *args)
        return made._replace(noise_scale=1.1 * made.noise_scale)

    return batch


def _one_seed(*keys: Any) -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _any_seed(*keys: Any) -> torch.Generator:
    made = torch.Generator()
    made.seed()
    return made


def _times_per_row(v: Tensor) -> Tensor:
    return v * (1 + 1e-4 * len(v))


def _steep_at_the_end(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Give the clean steps a gradient of 1e5 times their own."""
    right = model.velocity

    def velocity(x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        v = right(x, sigma, cond)
        steep = 1e5 * (sigma < 0.5).to(v)[:, None, None, None]
        return v + steep * (v - v.detach())

    monkeypatch.setattr(model, "velocity", velocity, raising=False)


def _never(name: str) -> Callable[[Any], Any]:
    def make(right: Any) -> Any:
        def lerp(self: Any, what: str, decay: float) -> None:
            if what != name:
                right(self, what, decay)

        return lerp

    return make


def _when_graded(v: Tensor) -> Tensor:
    return v * 1.01 if torch.is_grad_enabled() else v


def prompts_with(folder: Path, change: str) -> str:
    """Write a training list with copies, or with a prompt that no encoder reads to its end."""
    lines = Path("assets/shapes/train.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    if change == "copies":
        lines += lines[:2]
    else:
        record = json.loads(lines[0])
        lines[0] = json.dumps(record | {"prompt": record["prompt"] + " on white" * 20})
    file = folder / f"{change}.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    return f"prompts.train={file}"


COLLECT, ENGINE = "flowrl.training.collect", "flowrl.algorithms.rollout.engine"
WEIGHTS = "flowrl.training.weights"
GUIDED = "flowrl.models.flow_matching:guided"
NOISE, NETWORK, PARITY = ("noise",), ("network",), ("parity",)
RATIO = ("noise", "network", "ratio")
REWARD, CREDIT = ("rewards",), ("credit",)
GRADIENT, UPDATE = ("gradient", "update"), ("update",)
FIVE = ("plan.steps=5",)  # of four, every time is a number of bfloat16
LAST = "plan={fn: full, steps: 4, noise_scale: 0.4, ode_last: 0}"


def _reward(name: str) -> tuple[str, ...]:
    return (f"rewards={{shapes: {{fn: {name}}}}}",)


FAULTS: dict[str, Fault] = {
    "wrong shift": Fault("parity.shift", PARITY, patch=_sigmas(lambda s: 2 * s / (1 + s))),
    "other grid": Fault("parity.grid", PARITY, patch=_sigmas(lambda s: s.square())),
    "time rounding in bfloat16": Fault("parity.time-rounding", PARITY, FIVE, patch=_times(_short)),
    "times that are late": Fault("parity.time", PARITY, patch=_times(lambda time: time + 3)),
    "other text embeddings": Fault("parity.text", PARITY, patch=_other_texts),
    "velocity with the other sign": Fault("parity.sign", PARITY, patch=_velocity(lambda v: -v)),
    "swapped guidance branches": Fault(
        "parity.guidance-swapped", PARITY, patch=_function(GUIDED, _swapped)
    ),
    "guidance of another scale": Fault(
        "parity.guidance", PARITY, patch=_function(GUIDED, _stronger)
    ),
    "velocity a little too long": Fault(
        "parity.velocity", PARITY, patch=_velocity(lambda v: 1.05 * v)
    ),
    "Euler steps that drift": Fault(
        "parity.latents", PARITY, patch=_function(f"{ENGINE}:euler_step", _late)
    ),
    "VAE without its scaling": Fault("parity.vae", PARITY, patch=_unscaled),
    "texts of other prompts": Fault("text.swapped", ("texts", "parity"), patch=_swapped_texts),
    "first sigma .999999": Fault("grid.first-sigma", NOISE, patch=_sigmas(_just_below_1)),
    "noise on the last step": Fault("std.last", NOISE, (LAST,)),
    "too much noise": Fault("std.huge", NOISE, ("plan.noise_scale=8",)),
    "a mean that drifts without noise": Fault(
        "transition.euler", NOISE, ("transition={fn: doctorkit.drifting}",)
    ),
    "log-prob with a wrong std": Fault(
        "logprob.std",
        RATIO,
        patch=_several(
            _function("flowrl.algorithms.rollout.frontier:gaussian_log_prob", _wide_score),
            _function("flowrl.algorithms.likelihoods.reverse:gaussian_log_prob", _wide_score),
        ),
    ),
    "draws wider than scored": Fault(
        "std.draws", NOISE, patch=_function(f"{ENGINE}:draw", _stretched)
    ),
    "one seed for all": Fault(
        "seeds.same", NOISE, patch=_function(f"{COLLECT}:generator", lambda right: _one_seed)
    ),
    "seeds ignored": Fault(
        "seeds.random", NOISE, patch=_function(f"{COLLECT}:generator", lambda right: _any_seed)
    ),
    "dropout left on": Fault("ratio.random", (*NETWORK, "parity"), patch=_dropout),
    "a kernel that depends on the batch": Fault(
        "ratio.batch-shape", NETWORK, patch=_velocity(_times_per_row)
    ),
    "a network that minds gradients": Fault(
        "ratio.grad-mode", NETWORK, patch=_velocity(_when_graded)
    ),
    "training at rounded times": Fault(
        "ratio.time", (*NETWORK, "parity"), FIVE, patch=_times(_short_when_graded)
    ),
    "replay with another noise scale": Fault(
        "ratio.off",
        RATIO,
        patch=_function("flowrl.algorithms.likelihoods.reverse:reverse.batch", _other_scale),
    ),
    "reward that ignores the image": Fault("reward.blind", REWARD, _reward("brokenkit.blind")),
    "reward that ignores the prompt": Fault("reward.prompt", REWARD, _reward("brokenkit.sharp")),
    "reward that reads and forgets": Fault("reward.prompt", REWARD, _reward("brokenkit.deaf")),
    "reward NaN": Fault("reward.nan", REWARD, _reward("brokenkit.half")),
    "reward constant": Fault("reward.constant", REWARD, _reward("doctorkit.constant")),
    "reward with its sign flipped": Fault("reward.reversed", REWARD, _reward("brokenkit.hostile")),
    "reward of the batch": Fault("reward.company", REWARD, _reward("brokenkit.centred")),
    "reward mostly chance": Fault("reward.noise", REWARD, _reward("doctorkit.noisy")),
    "reward that sees no difference": Fault("reward.flat", REWARD, _reward("doctorkit.flat")),
    "reward that fails": Fault("reward.fails", REWARD, _reward("doctorkit.broken")),
    "groups mixed up": Fault("credit.groups", CREDIT, ("credit={fn: doctorkit.one_group}",)),
    "advantage with the other sign": Fault(
        "credit.sign", CREDIT, ("credit={fn: doctorkit.worse}",)
    ),
    "loss with the other sign": Fault(
        "gradient.direction", GRADIENT, ("loss={fn: doctorkit.descending}",)
    ),
    "loss that overflows": Fault("gradient.broken", GRADIENT, ("loss={fn: doctorkit.infinite}",)),
    "velocity detached": Fault("gradient.zero", GRADIENT, patch=_velocity(Tensor.detach)),
    "learning rate 0": Fault(
        "update.lr", UPDATE, patch=_function("flowrl.training.learn:_set_lr", _no_lr)
    ),
    "optimizer of other weights": Fault(
        "update.nothing", UPDATE, patch=_function("flowrl.training.setup:make_optimizer", _copied)
    ),
    "reference not frozen": Fault(
        "weights.reference",
        UPDATE,
        patch=_function(f"{WEIGHTS}:Weights.snapshot", _alias),
    ),
    "one step with all of the gradient": Fault(
        "gradient.outlier", GRADIENT, patch=_steep_at_the_end
    ),
    "EMA never updated": Fault(
        "weights.ema", UPDATE, patch=_function(f"{WEIGHTS}:Weights.lerp", _never("ema"))
    ),
    "sampling policy never updated": Fault(
        "weights.copies",
        UPDATE,
        ("old={fn: ramp, slope: 0.1, limit: 0.5}",),
        _function(f"{WEIGHTS}:Weights.lerp", _never("old")),
    ),
    "held-out prompts trained on": Fault(
        "prompts.leak", ("prompts",), ("prompts.test=assets/shapes/train.jsonl",)
    ),
    "no prompts": Fault("prompts.missing", ("prompts",), ("prompts.test=nowhere.txt",)),
    "more prompts than there are": Fault("batch.repeats", ("prompts",), ("train.prompts=300",)),
    "updates that do not divide": Fault("batch.updates", ("batch",), ("train.updates=7",)),
    "a plan without noise": Fault("batch.plan", ("batch",), ("plan.noise_scale=0",)),
    "a server that is down": Fault(
        "start.fails", ("texts",), _reward("toykit.moody, ready: false")
    ),
}
"""What is wrong -> the fault. Lists of prompts with faults are in `prompts_with`."""
