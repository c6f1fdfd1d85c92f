"""Run a config's network and VAE on the meta device: what sampling, decoding and training take beyond what is kept."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowrl.blueprint import NETWORK, PATCH, Blueprint, Text, blueprint, build, latent_shape, text_shape, tuning_of
from flowrl.config import Config
from flowrl.evaluate import as_uint8
from flowrl.feasible import is_guided
from flowrl.models.flow_pipeline import pictures
from flowrl.models.runtime import Runtime
from flowrl.models.tuning import Tuning, trained, tune_network
from flowrl.tracing import Meter, Rules, saved_for_backward

SHADOWS = 8  # kept: the configs of a table ask for the same ones again and again


class Trace(NamedTuple):
    """What one call takes, beyond the weights, their gradients and what was there before."""

    peak: int  # bytes at the worst moment
    flops: int  # of matrix products, convolutions and attention; a multiplication and an addition are two
    saved: int = 0  # bytes that autograd keeps from the forward to the backward pass


class Task(NamedTuple):
    """All that a trace depends on; two configs with equal tasks share their traces."""

    fn: str
    plan: Blueprint
    tuning: Tuning
    latent: tuple[int, int, int]
    text: Text
    guided: bool  # each velocity evaluates the network with and without the prompt
    reference: bool  # a KL asks the base weights too
    device: str  # whose autocast: "cuda" or "cpu"


class Shadow:
    """The network and the VAE of a task without numbers; every trace is made once."""

    def __init__(self, task: Task) -> None:
        """Make the network. Raises ModelError if its settings or the tuning do not fit it."""
        self.task, self.network = task, _network(task)
        if task.tuning.runtime.checkpointing:
            self.network.enable_gradient_checkpointing(self._again)  # type: ignore[operator]
        self._known: dict[tuple[str, int], Trace] = {}

    def velocity(self, states: int) -> Trace:
        """Trace a network call of so many latents in sampling; a compiled network keeps its activations there, too."""
        return self._once("velocity", states, self._velocity)

    def training(self, states: int) -> Trace:
        """Trace the forward and the backward pass of one micro-batch whose gradients are added to those before it.

        With a KL the reference's forward pass runs in between, while the activations wait.
        """
        return self._once("training", states, self._training)

    def step(self) -> Trace:
        """Trace what AdamW takes for its step, beyond gradients and moments."""
        return self._once("step", 0, self._step)

    def decoding(self, count: int, *, batch: int, height: int, width: int) -> Trace:
        """Trace decoding so many latents, `batch` at a time, into 8-bit steps; its peak includes the pictures."""
        size = min(count, batch)
        one = self._once("vae", size, self._vae)
        processor = VaeImageProcessor(vae_scale_factor=height // self.task.latent[1])
        with torch.no_grad(), Meter() as meter:
            vae = _StandIn(meter, one.peak // size, (3, height, width), _vae_dtype(self.task))
            x0 = torch.empty(count, *self.task.latent, device="meta")
            latents = x0.to(vae.dtype) / 2 + 1  # any scale and shift
            as_uint8(pictures(SimpleNamespace(vae=vae, image_processor=processor), latents, decode_batch=batch))
        return Trace(meter.peak, one.flops * count // size)

    def _once(self, what: str, size: int, make: Any) -> Trace:
        if (what, size) not in self._known:
            self._known[what, size] = make(size)
        return self._known[what, size]

    def _velocity(self, states: int) -> Trace:
        with (
            torch.set_grad_enabled(self.task.tuning.runtime.compile),
            self._rules(),
            Meter(_held(self.network)) as meter,
        ):
            self._call(states)
        return Trace(meter.peak, meter.flops)

    def _training(self, states: int) -> Trace:
        if not trained(self.network):
            return self.velocity(states)
        held = _held(self.network)
        with self._rules() as rules, Meter(held) as meter:
            with saved_for_backward(held) as saved:
                v = self._call(states)
            kept = saved.bytes
            rules.leave()
            if self.task.reference:
                with torch.no_grad():
                    self._call(states)
                rules.leave()
            v.sum().backward()
        return Trace(meter.peak, meter.flops, kept)

    def _step(self, _: int) -> Trace:
        if not trained(self.network):
            return Trace(0, 0)
        optimizer = torch.optim.AdamW(trained(self.network).values(), foreach=True)
        optimizer.step()  # the first one makes the moments
        moments = [value for state in optimizer.state.values() for value in state.values()]
        with Meter([*_held(self.network), *moments]) as meter:
            optimizer.step()
        return Trace(meter.peak, 0)

    def _vae(self, count: int) -> Trace:
        vae = build(self.task.plan, "vae")
        nn.Module.to(vae, _vae_dtype(self.task))
        latents = torch.empty(count, *self.task.latent, device="meta", dtype=_vae_dtype(self.task))
        with torch.no_grad(), Rules(), Meter([*_held(vae), latents]) as meter:
            vae.decode(latents, return_dict=False)  # type: ignore[operator]
        return Trace(meter.peak, meter.flops)

    def _rules(self) -> Rules:
        return Rules(self.task.tuning.dtype if self.task.tuning.autocast else None, device=self.task.device)

    def _again(self, block: nn.Module, *args: Any) -> Any:
        """Run a block as diffusers' gradient checkpointing does, what is computed anew under the same rules."""
        return checkpoint(block.__call__, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), self._rules()))

    def _call(self, states: int) -> Tensor:
        out: Tensor = self.network(**_inputs(self.task, states), return_dict=False)[0]
        return out.float()


class _StandIn:
    """Stand in for a VAE: its memory of `peak` bytes per picture was measured, and its pictures have no numbers."""

    def __init__(self, meter: Meter, peak: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.meter, self.peak, self.shape, self.dtype = meter, peak, shape, dtype

    def decode(self, latents: Tensor, *, return_dict: bool) -> tuple[Tensor]:
        self.meter.spike(self.peak * len(latents))
        return (torch.empty(len(latents), *self.shape, device="meta", dtype=self.dtype),)


_shadows: dict[str, Shadow] = {}


def shadow(task: Task) -> Shadow:
    """Return the shadow of a task, made once for equal tasks. Raises ModelError."""
    key = json.dumps(task, default=str)
    if key not in _shadows:
        while len(_shadows) >= SHADOWS:
            _shadows.pop(next(iter(_shadows)))
        _shadows[key] = Shadow(task)
    return _shadows[key]


def task_of(config: Config, *, device: str = "cuda") -> Task:
    """Return the task of a config with a model of diffusers. Raises ModelError and ConfigError if it is wrong."""
    plan, tuning = blueprint(config), tuning_of(config)
    matters = Runtime(checkpointing=tuning.runtime.checkpointing, compile=tuning.runtime.compile)
    return Task(
        fn=config.model.fn,
        plan=plan,
        tuning=tuning._replace(device=torch.device("meta"), runtime=matters),
        latent=latent_shape(config, plan),
        text=text_shape(config, plan),
        guided=is_guided(config),
        reference=config.kl_beta > 0,
        device=device,
    )


def _network(task: Task) -> nn.Module:
    """Make the network on the meta device, frozen and trained as the tuning says."""
    network = build(task.plan, NETWORK[task.fn])
    tuning = task.tuning
    nn.Module.to(network, tuning.masters("it").get("it", tuning.dtype))  # diffusers' own `to` warns, of nothing here
    network.requires_grad_(False)
    tune_network(network, tuning)
    for parameter in trained(network).values():
        parameter.grad = torch.empty_like(parameter)
    return network


def _held(network: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    return [*network.parameters(), *network.buffers(), *gradients]


def _vae_dtype(task: Task) -> torch.dtype:
    upcast = task.fn == "sdxl" and task.tuning.dtype == torch.float16  # its VAE overflows there
    return torch.float32 if upcast else task.tuning.dtype


def _inputs(task: Task, states: int) -> dict[str, Any]:
    """Return what the adapter of this kind hands its network; names and shapes only."""
    rows, (channels, height, width), text = states * (2 if task.guided else 1), task.latent, task.text
    empty = partial(torch.empty, device="meta", dtype=task.tuning.dtype)
    embeds, pooled = empty(rows, text.tokens, text.width), empty(rows, text.pooled)
    if task.fn == "sd3":
        given = {"hidden_states": empty(rows, channels, height, width), "timestep": empty(rows, dtype=torch.float32)}
        return {**given, "encoder_hidden_states": embeds, "pooled_projections": pooled}
    if task.fn == "flux":
        tokens = (height // PATCH) * (width // PATCH)
        told = task.plan.piece("transformer").settings.get("guidance_embeds", False)
        return {
            "hidden_states": empty(rows, tokens, PATCH**2 * channels),
            "timestep": empty(rows),
            "guidance": empty(rows, dtype=torch.float32) if told else None,
            "encoder_hidden_states": embeds,
            "pooled_projections": pooled,
            "txt_ids": empty(text.tokens, 3, dtype=torch.float32),
            "img_ids": empty(tokens, 3, dtype=torch.float32),
        }
    sample, time = empty(rows, channels, height, width), empty(rows, dtype=torch.int64)
    added = {"text_embeds": pooled, "time_ids": empty(rows, 6)} if text.pooled else None
    return {"sample": sample, "timestep": time, "encoder_hidden_states": embeds, "added_cond_kwargs": added}
