"""Run diffusers' own pipeline beside the model, and note what its network is asked and says."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowrl.core.types import Source
from flowrl.models.loading import locate
from flowrl.models.qwen_edit import QwenEdit
from flowrl.models.qwen_image import QwenImage
from flowrl.models.square_tokens import pack, unpack
from flowrl.models.unet import UNetModel
from flowrl.models.wan import Wan, first_order
from flowrl.models.z_image import ZImage

# options that have the pipelines' own names
SAME = ("true_cfg_scale", "max_sequence_length", "guidance_rescale", "cfg_normalization")


class PipelineTrace(NamedTuple):
    """What the network was asked and what it said: of every call the time, of the first two the
    rest."""

    times: list[Tensor]
    texts: list[Tensor]
    out: list[Tensor]


class Reference(NamedTuple):
    """What the pipeline made."""

    path: list[Tensor]  # latents [B, C, h, w] after each step, in its own coordinates
    images: Tensor  # [B, 3, H, W], or videos [B, T, 3, H, W], in [0, 1]
    sigmas: Tensor  # [S+1] on the flow path
    seen: PipelineTrace


def reference(
    model: Any,
    x: Tensor,
    texts: list[str],
    steps: int,
    size: tuple[int, int],
    sources: Sequence[Source] = (),
) -> Reference:
    """Run diffusers' own pipeline, with a scheduler read anew, from standard normal x [B,C,h,w],
    and from the prompts' sources where it edits."""
    # a copy, so that the model's own pipeline keeps its scheduler
    pipe = copy.copy(model.pipeline())
    pipe.register_modules(scheduler=_scheduler(model, pipe))
    pipe.set_progress_bar_config(disable=True)
    start = pack(x) if hasattr(pipe, "_unpack_latents") else x
    path: list[Tensor] = []

    def note(_: Any, step: int, time: Any, made: dict[str, Any]) -> dict[str, Any]:
        path.append(as_latents(made["latents"], x.shape).detach().clone())
        return {}

    # the user's own path: nothing but the start and the callback is ours
    with (
        torch.autocast(x.device.type, model.dtype, enabled=model.autocast),
        watched(model.network, x.shape) as seen,
    ):
        made = pipe(
            prompt=[*texts],  # Z-Image's writes into the list
            num_inference_steps=steps,
            height=size[0],
            width=size[1],
            latents=start,
            output_type="pt",
            callback_on_step_end=note,
            callback_on_step_end_tensor_inputs=["latents"],
            **_options(model, pipe, len(texts)),
            **(model.pipeline_sources(sources) if sources else {}),
        )
    # videos are in another field; of a video model that makes images, the one frame
    images = made.images if hasattr(made, "images") else made.frames
    if images.ndim == 5 and model.frames == 1:
        images = images[:, 0]
    if isinstance(model, ZImage) and model.guided:  # the prompts come first in its batch
        read = [torch.cat(t.chunk(2)[::-1]) for t in seen.texts]
        out = [torch.cat(t.chunk(2)[::-1]) for t in seen.out]
        seen = PipelineTrace(seen.times, read, out)
    return Reference(path, images, _sigmas(model, pipe.scheduler), seen)


def as_latents(found: Any, shape: Sequence[int]) -> Tensor:
    """Return latents [B,C,h,w] of what a network or a pipeline has: these, tokens, or Z-Image's
    list of x0 - noise, which becomes a velocity."""
    if isinstance(found, list):
        return -torch.stack(found)[:, :, 0]
    if found.dim() > 3:
        return found  # type: ignore[no-any-return]
    packed = found.shape[-1] != shape[1]
    own = found[:, : shape[2] * shape[3] // (4 if packed else 1)]  # before those of sources
    if packed:
        return unpack(own, shape[2] // 2)
    return own.transpose(1, 2).unflatten(2, tuple(shape[2:]))  # type: ignore[no-any-return]


def _options(model: Any, pipe: Any, count: int) -> dict[str, Any]:
    """Return the model's options under the names that the pipeline has for them."""
    offered, options = inspect.signature(pipe.__call__).parameters, model.options
    given = {"guidance_scale": getattr(options, "guidance", None)}
    given["num_frames"] = getattr(options, "frames", None)
    for name in SAME:
        given[name] = getattr(options, name, None)
    if isinstance(model, QwenImage):
        given["true_cfg_scale"] = given.pop("guidance_scale")
    if isinstance(model, QwenEdit):  # its pipelines cut no prompt
        del given["max_sequence_length"]
    if model.guided and model.negative_prompt is not None:
        given["negative_prompt"] = [model.negative_prompt] * count
    return {name: v for name, v in given.items() if v is not None and name in offered}


def _scheduler(model: Any, pipe: Any) -> Any:
    """Read the scheduler's settings anew, so that one changed in memory is seen. A UNet's is made
    into DDIM by its adapter, and copied."""
    if isinstance(model, UNetModel):
        return copy.deepcopy(pipe.scheduler)
    source, own = locate(model.options.path), {}
    if isinstance(model, Wan) and model.options.flow_shift is not None:
        own = {"flow_shift": model.options.flow_shift, "shift": model.options.flow_shift}
    read = type(pipe.scheduler).from_pretrained(source, subfolder="scheduler", **own)
    return first_order(read) if isinstance(model, Wan) else read


def _sigmas(model: Any, scheduler: Any) -> Tensor:
    """Return the noise levels that a scheduler has just used, on the flow path [S+1]."""
    if not isinstance(model, UNetModel):
        return scheduler.sigmas.detach().cpu().float()
    bar = scheduler.alphas_cumprod.double()[scheduler.timesteps.cpu()]
    bar = torch.cat([bar, torch.as_tensor(scheduler.final_alpha_cumprod).double()[None]])
    alpha, s = bar.sqrt(), (1 - bar).sqrt()
    return (s / (alpha + s)).float()


@contextmanager
def watched(network: torch.nn.Module, shape: Sequence[int] = ()) -> Iterator[PipelineTrace]:
    """Note what a network is asked and says while the block runs, by the shape of its latents."""
    seen = PipelineTrace([], [], [])

    def note(_: Any, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        """Keep the time that a call was given, and what it returned."""
        # some networks are given the time by name, others as the second argument
        time = named["timestep"] if "timestep" in named else args[1]
        seen.times.append(torch.as_tensor(time).detach().cpu().flatten()[:1].clone())
        # of the first two calls only, or the velocities of all steps would stay in memory
        if len(seen.out) < 2:  # both branches, where they are two calls
            text = named.get("encoder_hidden_states")
            text = pad_sequence(args[2], batch_first=True) if text is None else text
            seen.texts.append(text.detach().float().cpu())
            made = as_latents(out[0], shape) if shape else out[0]
            seen.out.append(made.detach().float())

    hook = network.register_forward_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()
