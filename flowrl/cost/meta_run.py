"""Run a config's network and VAE on the meta device: what sampling, decoding and training take
beyond what is kept.

`network_inputs` is what the adapter of each kind hands its network: names and shapes only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowrl.config.load import Config
from flowrl.core.needs import SNAPSHOTS, needs_of
from flowrl.core.pixels import round_8bit
from flowrl.cost.architecture import (
    NETWORK,
    QWEN,
    VIDEO,
    Architecture,
    TextShape,
    architecture_of,
    build,
    experts_of,
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
from flowrl.models.flow_matching import PATCH
from flowrl.models.flux2 import positions
from flowrl.models.options import Tuning, trained_parameters, tune_network
from flowrl.models.runtime import KERNEL, Runtime, one_pass
from flowrl.training.guidance import guides_reference, is_guided

MANY = 512  # calls of the VAE that are traced one by one
KEPT_RUNS = 8  # the configs of a table ask for the same ones again and again

Inputs = Callable[..., dict[str, Any]]
TOKEN_TIMES = "token_times"  # of Wan 2.2 TI2V-5B: each token has a time of its own
SEEN = 257  # tokens of what CLIP sees in the image that a video of Wan 2.1 starts from


class CallCost(NamedTuple):
    """What one call takes, beyond the weights, their gradients and what was there before."""

    peak: int  # bytes at the worst moment
    # of matrix products, convolutions and attention; a multiplication and an addition are two
    flops: int
    saved: int = 0  # bytes that autograd keeps from the forward to the backward pass


class Workload(NamedTuple):
    """All that the costs depend on; two configs with equal workloads share them."""

    fn: str
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
        shape = (3, *([frames] if frames else []), height, width)
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
        if self.workload.fn not in VIDEO:
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
        latents = torch.empty(
            count, *_vae_latent(self.workload), device="meta", dtype=_vae_dtype(self.workload)
        )
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
        found: Tensor = torch.stack(out) if isinstance(out, list) else out
        return found.float()


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
        fn=config.model.fn,
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
    network = build(workload.architecture, NETWORK[workload.fn])
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
    # tables that are no buffers, such as those of Qwen-Image's positions
    fields = [value for module in network.modules() for value in vars(module).values()]
    tables = [value for value in fields if isinstance(value, Tensor)]
    return [*network.parameters(), *network.buffers(), *gradients, *tables]


def _inputs(workload: Workload, states: int) -> dict[str, Any]:
    """Return what one network call with so many latents is given."""
    fn, architecture, tuning, latent, text, source = workload[:6]
    rows = states * (2 if workload.guided else 1)
    return network_inputs(fn, rows, latent, text, architecture, tuning.dtype, source)


def _vae_latent(workload: Workload) -> tuple[int, ...]:
    """Return the shape of what the VAE decodes to one image."""
    if workload.fn in VIDEO:
        return workload.latent
    channels, height, width = workload.latent
    if workload.fn.startswith("flux2"):
        return channels // PATCH**2, PATCH * height, PATCH * width
    return (channels, 1, height, width) if workload.fn in QWEN else workload.latent


def _vae_dtype(workload: Workload) -> torch.dtype:
    # SDXL's VAE overflows in float16; Wan's stays in float32, as in its model card
    upcast = workload.fn == "sdxl" and workload.tuning.dtype == torch.float16
    wide = upcast or workload.fn in VIDEO
    return torch.float32 if wide else workload.tuning.dtype


def network_inputs(
    fn: str,
    rows: int,
    latent: tuple[int, ...],
    text: TextShape,
    architecture: Architecture,
    dtype: torch.dtype,
    source: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return the inputs of one network call with ``rows`` latents of the shape ``latent``, and of
    as many sources whose latents have these rows and columns."""
    empty = partial(torch.empty, device="meta", dtype=dtype)
    settings = architecture.part("unet" if fn not in _INPUTS else "transformer").settings
    if fn in VIDEO:
        settings = {**settings, TOKEN_TIMES: architecture.part("vae").settings.get("is_residual")}
    given = (empty, rows, latent, text, settings)
    return _INPUTS.get(fn, _unet)(*given) if source is None else _EDITS[fn](*given, source)


def _sd3(empty: Any, rows: int, latent: Any, text: TextShape, _: Any) -> dict[str, Any]:
    return {
        "hidden_states": empty(rows, *latent),
        "timestep": empty(rows, dtype=torch.float32),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
        "pooled_projections": empty(rows, text.pooled),
    }


def _with_sources(inputs: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Make the inputs of a network whose sources stand behind the noisy tokens, as if the latent
    were taller."""

    def made(
        empty: Any,
        rows: int,
        latent: Any,
        text: TextShape,
        settings: dict[str, Any],
        source: tuple[int, int],
    ) -> dict[str, Any]:
        """Return the inputs with the height of both."""
        channels, height, width = latent
        return inputs(empty, rows, (channels, height + source[0], width), text, settings)

    return made


def _flux(
    empty: Any, rows: int, latent: Any, text: TextShape, settings: dict[str, Any]
) -> dict[str, Any]:
    channels, height, width = latent
    tokens = (height // PATCH) * (width // PATCH)
    return {
        "hidden_states": empty(rows, tokens, PATCH**2 * channels),
        "timestep": empty(rows),
        "guidance": _guidance(empty, rows, settings),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
        "pooled_projections": empty(rows, text.pooled),
        "txt_ids": empty(text.tokens, 3, dtype=torch.float32),
        "img_ids": empty(tokens, 3, dtype=torch.float32),
    }


def _guidance(empty: Any, rows: int, settings: dict[str, Any]) -> Tensor | None:
    """Return the guidance number of a network that has an input for it."""
    guided = settings.get("guidance_embeds", False)
    return empty(rows, dtype=torch.float32) if guided else None


def _qwen_image(empty: Any, rows: int, latent: Any, text: TextShape, _: Any) -> dict[str, Any]:
    channels, height, width = latent
    sides = height // PATCH, width // PATCH
    return {
        "hidden_states": empty(rows, sides[0] * sides[1], PATCH**2 * channels),
        "timestep": empty(rows, dtype=torch.float32),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
        "encoder_hidden_states_mask": empty(rows, text.tokens, dtype=torch.int64),
        "img_shapes": [[(1, *sides)]] * rows,
    }


def _qwen_edit(
    empty: Any,
    rows: int,
    latent: Any,
    text: TextShape,
    settings: dict[str, Any],
    source: tuple[int, int],
) -> dict[str, Any]:
    found = _qwen_image(empty, rows, latent, text, settings)
    sides = source[0] // PATCH, source[1] // PATCH
    more = empty(rows, sides[0] * sides[1], PATCH**2 * latent[0])
    found["hidden_states"] = torch.cat([found["hidden_states"], more], 1)
    found["img_shapes"] = [[*shapes, (1, *sides)] for shapes in found["img_shapes"]]
    return found


def _z_image(empty: Any, rows: int, latent: Any, text: TextShape, _: Any) -> dict[str, Any]:
    channels, height, width = latent
    return {
        "x": list(empty(rows, channels, 1, height, width).unbind()),
        "t": empty(rows, dtype=torch.float32),
        "cap_feats": list(empty(rows, text.tokens, text.width).unbind()),
    }


def _flux2(
    empty: Any, rows: int, latent: Any, text: TextShape, settings: dict[str, Any]
) -> dict[str, Any]:
    channels, height, width = latent
    meta = torch.device("meta")
    return {
        "hidden_states": empty(rows, height * width, channels),
        "timestep": empty(rows),
        "guidance": _guidance(empty, rows, settings),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
        "txt_ids": positions(1, 1, text.tokens, meta),
        "img_ids": positions(height, width, 1, meta),
    }


def _wan(
    empty: Any, rows: int, latent: Any, text: TextShape, settings: dict[str, Any]
) -> dict[str, Any]:
    # image to video: the network takes what is given of the frames, too
    channels, (moments, height, width) = settings.get("in_channels") or latent[0], latent[1:]
    tokens = moments * (height // PATCH) * (width // PATCH)
    own = settings[TOKEN_TIMES]
    found = {
        "hidden_states": empty(rows, channels, *latent[1:]),
        "timestep": empty(*((rows, tokens) if own else (rows,)), dtype=torch.float32),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
    }
    if settings.get("image_dim"):
        found["encoder_hidden_states_image"] = empty(rows, SEEN, settings["image_dim"])
    return found


def _unet(empty: Any, rows: int, latent: Any, text: TextShape, _: Any) -> dict[str, Any]:
    added = {"text_embeds": empty(rows, text.pooled), "time_ids": empty(rows, 6)}
    return {
        "sample": empty(rows, *latent),
        "timestep": empty(rows, dtype=torch.int64),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
        "added_cond_kwargs": added if text.pooled else None,
    }


_INPUTS: dict[str, Inputs] = {
    "sd3": _sd3,
    "flux": _flux,
    "flux_kontext": _flux,
    "qwen_image": _qwen_image,
    "qwen_edit": _qwen_image,
    "qwen_edit_plus": _qwen_image,
    "z_image": _z_image,
    "flux2": _flux2,
    "flux2_klein": _flux2,
    "wan": _wan,
    "wan_i2v": _wan,
}
_EDITS: dict[str, Inputs] = {
    "flux_kontext": _with_sources(_flux),
    "flux2": _with_sources(_flux2),
    "flux2_klein": _with_sources(_flux2),
    "qwen_edit": _qwen_edit,
    "qwen_edit_plus": _qwen_edit,
}
