"""Run a config's network and VAE on the meta device: what sampling, decoding and training take
beyond what is kept. What a network call is given, the adapter's facts say.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowrl.config.load import Config
from flowrl.core.needs import SNAPSHOTS, needs_of
from flowrl.core.pixels import round_8bit
from flowrl.cost.architecture import (
    Architecture,
    architecture_of,
    build,
    experts_of,
    known_facts,
    latent_shape,
    source_shape,
    text_shape,
    tuning_of,
)
from flowrl.cost.meter import (
    DeviceRules,
    Meter,
    MeteredVAE,
    decode_rounded_images,
    decode_videos,
    saved_for_backward,
)
from flowrl.models.options import Empty, Facts, Sizes, TextShape
from flowrl.models.runtime import KERNEL, Runtime, one_pass
from flowrl.models.tuning import Tuning, trained_parameters, tune_network
from flowrl.training.guidance import guides_reference, is_guided

MANY = 512  # calls of the VAE that are traced one by one
KEPT_RUNS = 8  # the configs of a table ask for the same ones again and again


class CallCost(NamedTuple):
    """What one call takes, beyond the weights, their gradients and what was there before."""

    peak: int  # bytes at the worst moment
    # of matrix products, convolutions and attention; a multiplication and an addition are two
    flops: int
    saved: int = 0  # bytes that autograd keeps from the forward to the backward pass


class Workload(NamedTuple):
    """All that the costs depend on; two configs with equal workloads share them."""

    facts: Facts
    architecture: Architecture
    tuning: Tuning
    latent: tuple[int, ...]
    text: TextShape
    source: tuple[int, int] | None  # of an editing model: rows and columns of its latents
    guided: bool  # each velocity evaluates the network with and without the prompt
    # rows that the base weights are asked about, for one of the policy: 2 if they alone are guided,
    # 0 if nothing asks them
    reference: int
    device: str  # whose autocast and norms: "cuda" or "cpu"


class MetaRun:
    """The network and the VAE of a workload without numbers; every cost is worked out once."""

    def __init__(self, workload: Workload) -> None:
        """Make the network. Raises ModelError if its settings or the tuning do not fit it."""
        self.workload, self.network = workload, _network(workload)
        if workload.tuning.runtime.checkpointing:
            self.network.enable_gradient_checkpointing(self._again)  # type: ignore[operator]
        self._known: dict[tuple[str, int], CallCost] = {}

    def velocity(self, states: int) -> CallCost:
        """Trace a network call of so many latents in sampling; a compiled network keeps its
        activations there, too."""
        return self._once("velocity", states, self._velocity)

    def training(self, states: int) -> CallCost:
        """Trace the forward and the backward pass of one micro-batch whose gradients are added to
        those before it.

        With a KL the reference's forward pass runs in between, while the activations wait.
        """
        return self._once("training", states, self._training)

    def step(self) -> CallCost:
        """Trace what AdamW takes for its step, beyond gradients and moments; one step has the
        weights of both experts."""
        one = self._once("step", 0, self._step)
        return one._replace(peak=one.peak * experts_of(self.workload.architecture))

    def decoding(self, count: int, *, batch: int, height: int, width: int) -> CallCost:
        """Trace decoding so many latents, `batch` at a time, into 8-bit steps; its peak includes
        the images. From `MANY` calls on it grows by as much with every further call."""
        size = min(count, batch)
        # many calls: their peak from two shorter runs, which differ by MANY / 2 calls
        more = count // size - MANY
        if more > 0:
            near = count - more * size
            here, less = (
                self.decoding(n, batch=batch, height=height, width=width)
                for n in (near, near - size * MANY // 2)
            )
            peak = here.peak + more * (here.peak - less.peak) * 2 // MANY
            return CallCost(peak, self._once("vae", size, self._vae).flops * count // size)
        # one call is measured; in the run it is a stand-in that takes as much
        one = self._once("vae", size, self._vae)
        frames = self._frames()
        shape: tuple[int, ...] = (3, height, width)
        if frames:
            shape = (3, frames, height, width)
        # the adapters' own way from latents to bytes, around the stand-in
        with torch.no_grad(), Meter() as meter:
            vae = MeteredVAE(meter, one.peak // size, shape, _vae_dtype(self.workload))
            x0 = torch.empty(count, *self.workload.latent, device="meta")
            if frames:
                round_8bit(decode_videos(vae, x0, batch))
            else:
                decode_rounded_images(vae, x0, batch, height // self.workload.latent[1])
        return CallCost(meter.peak, one.flops * count // size)

    def _frames(self) -> int:
        """Return how many frames a video has; 0: the model makes images."""
        if not self.workload.facts.video:
            return 0
        time = self.workload.architecture.part("vae").settings.get("scale_factor_temporal", 4)
        return (self.workload.latent[1] - 1) * int(time) + 1

    def _once(self, what: str, size: int, make: Any) -> CallCost:
        if (what, size) not in self._known:
            self._known[what, size] = make(size)
        return self._known[what, size]

    def _velocity(self, states: int) -> CallCost:
        with (
            torch.set_grad_enabled(self.workload.tuning.runtime.compile),
            self._rules(),
            Meter(_held(self.network)) as meter,
        ):
            self._call(states)
        return CallCost(meter.peak, meter.flops)

    def _training(self, states: int) -> CallCost:
        if not trained_parameters(self.network):
            return self.velocity(states)
        held = _held(self.network)
        with self._rules() as rules, Meter(held) as meter:
            with saved_for_backward(held) as saved:
                v = self._call(states)
            kept = saved.bytes
            rules.leave()
            if self.workload.reference:
                with torch.no_grad():
                    self._call(self.workload.reference * states)
                rules.leave()
            v.sum().backward()
        return CallCost(meter.peak, meter.flops, kept)

    def _step(self, _: int) -> CallCost:
        if not trained_parameters(self.network):
            return CallCost(0, 0)
        optimizer = torch.optim.AdamW(trained_parameters(self.network).values(), foreach=True)
        optimizer.step()  # the first one makes the moments
        moments = [value for state in optimizer.state.values() for value in state.values()]
        with Meter([*_held(self.network), *moments]) as meter:
            optimizer.step()
        return CallCost(meter.peak, 0)

    def _vae(self, count: int) -> CallCost:
        vae = build(self.workload.architecture, "vae")
        nn.Module.to(vae, _vae_dtype(self.workload))
        one = self.workload.facts.vae_latent(self.workload.latent)
        latents = torch.empty(count, *one, device="meta", dtype=_vae_dtype(self.workload))
        with torch.no_grad(), DeviceRules(), Meter([*_held(vae), latents]) as meter:
            vae.decode(latents, return_dict=False)  # type: ignore[operator]
        return CallCost(meter.peak, meter.flops)

    def _rules(self) -> DeviceRules:
        return DeviceRules(
            self.workload.tuning.dtype if self.workload.tuning.autocast else None,
            device=self.workload.device,
            one_pass_norms=KERNEL and not self.workload.tuning.runtime.compile,
        )

    def _again(self, block: nn.Module, *args: Any) -> Any:
        """Run a block as diffusers' gradient checkpointing does, what is computed anew under the
        same rules."""
        return checkpoint(
            block.__call__,
            *args,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), self._rules()),
        )

    def _call(self, states: int) -> Tensor:
        out = self.network(**_inputs(self.workload, states), return_dict=False)[0]
        if isinstance(out, list):
            out = torch.stack(out)
        found: Tensor = out.float()
        return found


_meta_runs: dict[str, MetaRun] = {}


def meta_run(workload: Workload) -> MetaRun:
    """Return the meta run of a workload, made once for equal ones. Raises ModelError."""
    key = json.dumps(workload, default=str)
    if key not in _meta_runs:
        while len(_meta_runs) >= KEPT_RUNS:
            _meta_runs.pop(next(iter(_meta_runs)))
        _meta_runs[key] = MetaRun(workload)
    return _meta_runs[key]


def workload_of(config: Config, *, device: str = "cuda") -> Workload:
    """Return the workload of a config with a model of diffusers. Raises ModelError, ConfigError if
    it is wrong."""
    architecture, tuning = architecture_of(config), tuning_of(config)
    latent = latent_shape(config, architecture)
    names = ("checkpointing", "compile", "one_pass_norms")
    matters = Runtime(**{name: getattr(tuning.runtime, name) for name in names})
    return Workload(
        facts=known_facts(config),
        architecture=architecture,
        tuning=tuning._replace(device=torch.device("meta"), runtime=matters),
        latent=latent,
        source=source_shape(config, latent),
        text=text_shape(config, architecture),
        guided=is_guided(config),
        reference=2 if guides_reference(config) else int(_asks_others(config)),
        device=device,
    )


def _asks_others(config: Config) -> bool:
    """Say whether the penalty asks other weights about each row: one on real images asks none."""
    wanted = needs_of(config.kl.function) if config.kl else frozenset[str]()
    return config.kl_beta > 0 and ("data" not in wanted or bool(wanted & {*SNAPSHOTS}))


def _network(workload: Workload) -> nn.Module:
    """Make the network on the meta device, frozen and trained as the tuning says."""
    network = build(workload.architecture, workload.facts.network)
    tuning = workload.tuning
    nn.Module.to(network, tuning.network_dtype)  # diffusers' own `to` warns, of nothing here
    network.requires_grad_(False)
    tune_network(network, tuning)
    if tuning.runtime.fuses_norms(workload.device):
        one_pass(network)
    for parameter in trained_parameters(network).values():
        parameter.grad = torch.empty_like(parameter)
    return network


def _held(network: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    # tables that are no buffers, such as those of positions
    fields = [value for module in network.modules() for value in vars(module).values()]
    tables = [value for value in fields if isinstance(value, Tensor)]
    return [*network.parameters(), *network.buffers(), *gradients, *tables]


def _vae_dtype(workload: Workload) -> torch.dtype:
    return workload.facts.vae_dtype(workload.tuning.dtype)


def _inputs(workload: Workload, states: int) -> dict[str, Any]:
    """Return what one network call with so many latents is given."""
    rows = states * (2 if workload.guided else 1)
    sizes = Sizes(workload.latent, workload.text, workload.source)
    empty = Empty(rows, workload.tuning.dtype)
    return workload.facts.inputs(empty, sizes, workload.architecture.settings)
