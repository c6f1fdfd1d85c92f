"""The adapters on tiny pipelines of the real diffusers classes, with random weights, saved once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
)
from modelkit import edit, noise
from tiny import (
    NOISE,
    tiny_flux,
    tiny_flux2,
    tiny_klein,
    tiny_qwen_image,
    tiny_sd3,
    tiny_sd15,
    tiny_sdxl,
    tiny_ti2v,
    tiny_wan,
    tiny_z_image,
)
from torch import Tensor

from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.transitions import cps
from flowrl.core.types import Rollout
from flowrl.models.adapter import first_order, pack, unpack
from flowrl.models.flux import flux
from flowrl.models.flux2 import flux2
from flowrl.models.flux2_klein import flux2_klein
from flowrl.models.qwen_image import qwen_image
from flowrl.models.sd3 import sd3
from flowrl.models.sd15 import sd15
from flowrl.models.sdxl import sdxl
from flowrl.models.wan import wan
from flowrl.models.z_image import z_image

PROMPTS = ["a red square", "two small blue circles left of a green triangle on white", "a cat"]
# of T5 or a language model, so that no prompt is cut: the tiny tokenizers know letters only
TOKENS = 64
FRAMES = 5  # of a video
ADAPTERS: dict[str, Callable[..., Any]] = {
    "sd3": sd3,
    "flux": flux,
    "sd15": sd15,
    "sdxl": sdxl,
    "wan": wan,
    "qwen_image": qwen_image,
    "z_image": z_image,
    "flux2": flux2,
    "flux2_klein": flux2_klein,
}
TEMPLATE = {"flux2": 64}  # tokens of the system's message
UNETS = ("sd15", "sdxl")
PACKED = ("flux", "qwen_image")  # whose pipelines take and return tokens
GUIDED: dict[str, dict[str, Any]] = {
    "sd3": {"guidance": 3.0},
    "flux": {"true_cfg_scale": 3.0},
    "sd15": {"guidance": 3.0},
    "sdxl": {"guidance": 3.0},
    "wan": {"guidance": 3.0},
    "qwen_image": {"guidance": 3.0},
    "z_image": {"guidance": 2.0},
    "flux2": {},  # the network has none but its input
    "flux2_klein": {"guidance": 3.0},
}
V = {"prediction_type": "v_prediction", "clip_sample": False}
ZERO = {"set_alpha_to_one": True, "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
# half of the signal is left at the last timestep
MILD = {"beta_start": 1e-4, "beta_end": 2e-3, "clip_sample": False, "steps_offset": 1}
XL_ZERO = NOISE | V | {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
SHIFTS: dict[str, Any] = {
    "base_shift": 0.2,
    "max_shift": 2.0,
    "base_image_seq_len": 4,
    "max_image_seq_len": 1024,
}


def flux_of_flow_sigmas(folder: Path) -> Path:
    """Make a FLUX whose scheduler's config has a leftover that FluxPipeline obeys."""
    tiny_flux(folder, seed=6, use_dynamic_shifting=False, shift=2.0)
    edit("scheduler/scheduler_config.json", use_flow_sigmas=True)(folder)
    return folder


def qwen_of_flow_sigmas(folder: Path) -> Path:
    """Make a Qwen-Image with the same leftover, which its pipeline does not read."""
    tiny_qwen_image(folder)
    edit("scheduler/scheduler_config.json", use_flow_sigmas=True)(folder)
    return folder


MAKE: dict[str, Callable[[Path], Path]] = {
    "sd3": tiny_sd3,
    "sd3.5": partial(tiny_sd3, t5=True, dual=True, seed=1),
    "sd3 dynamic": partial(tiny_sd3, dynamic_shift=True, seed=2),
    "sd3 long": partial(tiny_sd3, layers=4, dual=True),
    "sd3 short": partial(tiny_sd3, layers=1),
    "flux": tiny_flux,
    "flux schnell": partial(tiny_flux, guidance_embeds=False, seed=1),
    "flux shifts": partial(tiny_flux, seed=2, **SHIFTS),
    "flux linear": partial(tiny_flux, seed=3, time_shift_type="linear", shift_terminal=0.1),
    "flux static": partial(tiny_flux, seed=4, use_dynamic_shifting=False, shift=3.0),
    "flux plain": partial(tiny_flux, seed=5, guidance_embeds=False, use_dynamic_shifting=True),
    "flux table": flux_of_flow_sigmas,
    "sd15": tiny_sd15,
    "sd15 mild": partial(tiny_sd15, seed=1, scheduler=DDIMScheduler(**MILD)),
    "sd15 v": partial(tiny_sd15, seed=2, scheduler=DDIMScheduler(**NOISE, **V)),
    "sd15 zero": partial(tiny_sd15, seed=3, scheduler=DDIMScheduler(**(NOISE | ZERO | V))),
    "qwen_image": tiny_qwen_image,
    "qwen_image table": qwen_of_flow_sigmas,
    "z_image": tiny_z_image,
    "z_image turbo": partial(tiny_z_image, seed=1, shift=3.0),
    "flux2": tiny_flux2,
    "flux2_klein": tiny_klein,
    "flux2_klein distilled": partial(tiny_klein, seed=1, distilled=True),
    "sdxl": tiny_sdxl,
    "wan": tiny_wan,
    "wan ti2v": tiny_ti2v,
    "wan euler": partial(tiny_wan, seed=2, scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0)),
    "sdxl zero": partial(tiny_sdxl, seed=1, scheduler=DDIMScheduler(**XL_ZERO), force_zeros=False),
}


class Folders:
    """The folder of each pipeline of MAKE, saved when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[str, Path] = {}

    def __getitem__(self, name: str) -> Path:
        if name not in self._made:
            self._made[name] = MAKE[name](self.root / name.replace(" ", "-"))
        return self._made[name]

    def load(self, name: str, **options: Any) -> Any:
        """Load a pipeline by its adapter, on the CPU."""
        return load_folder(name, self[name], **options)


def adapter_of(name: str) -> str:
    """Return "sd3" for "sd3 dynamic" and "sd3.5"."""
    return name.split()[0].removesuffix(".5")


def load_folder(name: str, folder: Path, **options: Any) -> Any:
    """Load a folder by the adapter of a name."""
    fn = adapter_of(name)
    tokens = {} if fn in UNETS else {"max_sequence_length": TEMPLATE.get(fn, 0) + TOKENS}
    if fn == "wan":
        tokens["frames"] = FRAMES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # test_flux.py looks at the warning of distilled models
        return ADAPTERS[fn](str(folder), **{"device": "cpu", **tokens, **options})


def name_of(model: Any) -> str:
    """Return the name of a model's adapter."""
    return str(type(model).__module__.rpartition(".")[2])


def tiny_name(fn: str) -> str:
    """Name the tiny pipeline that shows most of an adapter: SD3's has T5 and, in its first block,
    SD3.5's second attention."""
    return "sd3.5" if fn == "sd3" else fn


def with_lora(folders: Folders, fn: str, **options: Any) -> Any:
    """Load the tiny pipeline of an adapter, with LoRA of rank 2 unless told otherwise."""
    lora = {"lora": {"rank": 2}} if options.get("tune", "lora") == "lora" else {}
    return folders.load(tiny_name(fn), **lora, **options)


def diffusers_images(
    folder: Path, model: Any, x: Tensor, prompts: list[str], *, steps: int, **more: Any
) -> Tensor:
    """Return what diffusers' own pipeline makes of standard normal latents x [B,C,h,w], with the
    model's weights: images, or what ``output_type`` says."""
    options, pipeline = model.options, model.pipeline()
    fn = name_of(model)
    call: dict[str, Any] = {"latents": pack(x) if fn in PACKED else x, "output_type": "pt"}

    # UNets: the folder is loaded anew with DDIM, as diffusers' documentation shows.
    if fn in UNETS:
        checker = {"safety_checker": None} if fn == "sd15" else {}
        pipeline = DiffusionPipeline.from_pretrained(folder, **checker)
        spacing = {"timestep_spacing": options.spacing} if options.spacing else {}
        config = pipeline.scheduler.config
        pipeline.scheduler = DDIMScheduler.from_config(config, clip_sample=False, **spacing)
        pipeline.unet = model.network
    # Wan: the same grid and times, without UniPC's second order.
    if fn == "wan":
        pipeline = copy.copy(pipeline)
        pipeline.register_modules(scheduler=first_order(pipeline.scheduler))

    unit = 16 if fn.startswith("flux2") else 8
    if fn == "wan":
        unit = pipeline.vae_scale_factor_spatial
    height, width = (unit * side for side in x.shape[-2:])
    # the options by the pipeline's own names
    given = {name: getattr(options, name) for name in options.__dataclass_fields__}
    call |= model.facts.arguments(given, height, width)
    if "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"]] * len(prompts)
    pipeline.set_progress_bar_config(disable=True)
    found = pipeline(
        prompt=[*prompts],  # Z-Image's writes into the list
        num_inference_steps=steps,
        height=height,
        width=width,
        **(call | more),
    )
    made = found.frames if fn == "wan" else found.images
    if more.get("output_type") != "latent":
        return made
    if fn in PACKED:
        return unpack(made, x.shape[2] // 2)
    if fn == "flux2":
        return made.transpose(1, 2).reshape(x.shape)
    if fn == "flux2_klein":  # which returns what its VAE decodes
        return model._from_vae(made)
    return made


def seeds(count: int) -> list[torch.Generator]:
    """Return a generator for each of `count` prompts."""
    return [torch.Generator().manual_seed(i) for i in range(count)]


def sampled(model: Any, *, steps: int = 4, size: tuple[int, int] = (32, 32), **how: Any) -> Rollout:
    """Roll out two images of each of two prompts, with noise on every step, in calls of four."""
    return rollout(
        model,
        model.encode(PROMPTS[:2]),
        full(0, steps=steps, noise_scale=how.get("noise_scale", 0.7)),
        how.get("transition", cps),
        sigmas=model.sigmas(steps, *size),
        shape=model.latent_shape(*size),
        group_size=2,
        generators=seeds(2),
        micro_batch=4,
    )


def velocity(model: Any, count: int = 2, height: int = 32, width: int = 32) -> Tensor:
    """Ask for the velocity of `count` latents, the second half at a later noise level."""
    x, sigmas = noise(model, count, height, width), model.sigmas(4, height, width)
    cond = model.encode([PROMPTS[i % 2] for i in range(count)])
    return model.velocity(x, sigmas[1 + torch.arange(count) * 2 // count], cond)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of what is expected."""
    return float(((found - expected).norm() / expected.norm()).detach())


def parts_of(model: Any) -> list[torch.nn.Module]:
    """Return the networks of a model's pipeline."""
    parts = model.pipeline().components.values()
    return [part for part in parts if isinstance(part, torch.nn.Module)]
