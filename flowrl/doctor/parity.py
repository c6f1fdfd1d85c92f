"""Without noise, are samples those of the diffusers pipeline: sigmas, times, texts, velocities,
latents, images.

diffusers' own pipeline runs beside the model, and what its network is asked and says is noted.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.core.abilities import PassesFence, conditioning
from flowrl.core.noise_path import per_sample, vp_from_flow
from flowrl.core.seeds import generator
from flowrl.core.types import Source
from flowrl.doctor.examined_run import ExaminedRun
from flowrl.doctor.findings import ReportSection
from flowrl.doctor.network import relative
from flowrl.evaluation.sources import sources_of
from flowrl.models.adapter import PipelineModel
from flowrl.models.flow_matching import pack, unpack
from flowrl.models.loading import locate
from flowrl.models.qwen_edit import QwenEdit
from flowrl.models.qwen_image import QwenImage
from flowrl.models.unet import UNetModel
from flowrl.models.wan import Wan, first_order
from flowrl.models.z_image import ZImage

# largest difference that is rounding, for float32 and for shorter dtypes
SLACK = {"grid": (1e-5, 1e-5), "time": (1e-6, 1e-6), "text": (1e-3, 0.05), "velocity": (2e-3, 0.1)}
SLACK |= {"latents": (5e-3, 0.2), "vae": (2e-3, 0.02)}

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


class Sides(NamedTuple):
    """Both sides of a comparison."""

    model: Any
    sigmas: Tensor  # [S+1]
    seen: PipelineTrace
    theirs: Reference
    x: Tensor  # [B, C, h, w]  where both start
    v: Tensor  # [B, C, h, w]  the first velocity
    v_ref: Tensor  # likewise, of the pipeline


def look_at_parity(examined: ExaminedRun) -> ReportSection:
    """Sample the prompts by the engine and by diffusers' own pipeline, from the same noise."""
    section, model = ReportSection("parity"), examined.model
    if isinstance(model, PassesFence):
        return _look_at_fence(section, examined)
    if not isinstance(model, PipelineModel):
        section.skipped = f"{examined.config.model.fn} is no pipeline of diffusers"
        return section
    if model.options.how.offload:
        section.skipped = "not with model.runtime.offload: the pipeline expects its parts together"
        return section
    if examined.has("ratio/random"):
        section.skipped = "the network does not answer the same twice"
        return section
    unlike = getattr(model, "unlike_pipeline", None)
    if unlike is not None:
        section.skipped = unlike
        return section
    # the same noise for both
    texts, steps = examined.texts, _steps(model, len(examined.rollout.sigmas) - 1)
    if getattr(model, "takes_one", False) and any(_sources(examined, model)):
        texts = texts[:1]
    size = (examined.config.image.height, examined.config.image.width)
    shape = model.latent_shape(*size)
    noise = [_noise(shape, i) for i in range(len(texts))]
    x = torch.cat(noise).to(model.device)
    # theirs, then ours
    with torch.no_grad():
        sources = _sources(examined, model)[: len(texts)]
        theirs = reference(model, x, texts, steps, size, sources)
        cond, sigmas = conditioning(model, texts, sources), model.sigmas(steps, *size)
        drawn = {"shape": shape, "group_size": 1, "generators": _streams(len(texts))}
        with watched(model.network, x.shape) as seen:
            end = sample_ode(model, cond, sigmas=sigmas, **drawn)  # type: ignore[arg-type]
        start = x * torch.hypot(1 - sigmas[0], sigmas[0])
        v = model.velocity(start, sigmas[:1].expand(len(x)), cond).float()
        two = Sides(model, sigmas, seen, theirs, start, v, _their_velocity(model, x, theirs))
        _compare(section, two, end)
    if examined.has("text/swapped"):  # said already
        section.findings = [f for f in section.findings if f.id != "parity/text"]
    section.lines.append(
        f"{steps} steps without noise of {len(x)} prompts, beside {type(model.pipeline()).__name__}"
    )
    return section


def _look_at_fence(section: ReportSection, examined: ExaminedRun) -> ReportSection:
    """Show what a pipeline without adapter has shown; one that differs was refused while it was
    loaded."""
    steps, size = len(examined.rollout.sigmas) - 1, examined.trainer.size
    fence = examined.model.pass_fence(steps, *size, training=False)  # type: ignore[attr-defined]
    section.lines += fence.lines[:1]
    section.table += [["", "differs by", "at most", ""]]
    for check in fence.checks:
        row = [check.name, f"{check.figure:.1e}", f"{check.limit:.0e}", check.says]
        section.table.append(row)
        section.figures[check.name] = check.figure
    return section


def _steps(model: Any, steps: int) -> int:
    """Return how many steps are compared: with trailing timesteps only a number that divides the
    training timesteps makes diffusers' DDIM end a step where it asks the network next."""
    if isinstance(model, UNetModel):
        config = model.pipeline().scheduler.config
        while config.timestep_spacing == "trailing" and config.num_train_timesteps % steps:
            steps -= 1
    return steps


def _sources(examined: ExaminedRun, model: Any) -> list[Source]:
    """Return what the prompts start from, as large as the images; [] where they do not."""
    if not hasattr(model, "encode_with_sources"):
        return []
    size = (examined.config.image.height, examined.config.image.width)
    return sources_of(examined.trainer.train_set, examined.rows, size)


def _noise(shape: tuple[int, ...], place: int) -> Tensor:
    return torch.randn((1, *shape), generator=generator(0, "parity", place))


def _streams(count: int) -> list[torch.Generator]:
    return [generator(0, "parity", place) for place in range(count)]


def _compare(section: ReportSection, two: Sides, end: Tensor) -> None:
    """Find the first thing that differs; decoding is judged by itself."""
    theirs, vp = two.theirs, isinstance(two.model, UNetModel)
    short = int(two.model.dtype != torch.float32)
    section.table = [["compared", "difference", "rounding", ""]]
    # all of them
    last = vp_from_flow(end, two.sigmas[-1:]) if vp else end
    final = theirs.path[-1].float()
    images = two.model.decode(_flow(final, theirs.sigmas[-1:].to(final)) if vp else final)
    gaps = {
        "grid": float((two.sigmas.cpu() - theirs.sigmas).abs().max()),
        "time": _time_gap(two),
        "text": _text_gap(two),
        "velocity": relative(two.v, two.v_ref),
        "latents": relative(last.float(), final),
        "vae": float((images - theirs.images.float()).abs().mean()),
    }
    section.figures = {**gaps}
    wrong = [name for name, gap in gaps.items() if not gap <= SLACK[name][short]]
    for name, gap in gaps.items():
        says = "differs" if name in wrong else ""
        section.table.append([name, f"{gap:.1e}", f"{SLACK[name][short]:.0e}", says])
    # the first is the cause of those behind it
    if wrong and wrong[0] != "vae":
        _TELL[wrong[0]](section, two)
    if "vae" in wrong:
        section.find("parity/vae", f"pixels differ by {gaps['vae']:.3g} on average")


def _their_velocity(model: Any, x: Tensor, theirs: Reference) -> Tensor:
    """Return the velocity [B, C, h, w] that the pipeline's first step amounts to on the flow
    path."""
    here, there = theirs.sigmas[:1].to(x), theirs.sigmas[1:2].to(x)
    one, two = x.float(), theirs.path[0].float()
    if isinstance(model, UNetModel):
        one, two = _flow(one, here), _flow(two, there)
    return (two - one) / (there - here)


def _flow(x_vp: Tensor, sigma: Tensor) -> Tensor:
    sigma = sigma.expand(len(x_vp))
    return x_vp.float() * per_sample(torch.hypot(1 - sigma, sigma), x_vp.float())


def _times(two: Sides) -> tuple[Tensor, Tensor]:
    """Return the times that were asked about; a pipeline may call its network once per branch."""
    ours, other = torch.cat(two.seen.times).float(), torch.cat(two.theirs.seen.times).float()
    return ours, other[:: max(1, len(other) // len(ours))]


def _time_gap(two: Sides) -> float:
    ours, other = _times(two)
    return float((ours - other).abs().max() / other.abs().max())


def _text_gap(two: Sides) -> float:
    ours, other = two.seen.texts[0], two.theirs.seen.texts[0]
    if len(other) < len(ours) and len(two.theirs.seen.texts) > 1:  # with the prompt, then without
        other = torch.cat(_filled(*two.theirs.seen.texts[1::-1]))
    ours, other = _filled(ours, other)
    return relative(ours, other) if ours.shape == other.shape else float("inf")


def _filled(*texts: Tensor) -> list[Tensor]:
    """Fill texts [B,T,D] up with zeros to equal length: a pipeline may cut what is masked."""
    longest = max(text.shape[1] for text in texts)
    return [pad(text, (0, 0, 0, longest - text.shape[1])) for text in texts]


# ------------------------------------------------------------------------------------------ causes


def _grid(section: ReportSection, two: Sides) -> None:
    ours, other = two.sigmas.cpu().double(), two.theirs.sigmas.double()
    inner = (other > 0) & (other < 1) & (ours > 0) & (ours < 1)
    odds = (ours / (1 - ours))[inner] / (other / (1 - other))[inner]
    worst = int((ours - other).abs().argmax())
    found = f"sigma {worst} is {float(ours[worst]):.5g}, the pipeline's {float(other[worst]):.5g}"
    rest = float((ours - other)[1:].abs().max())
    # a shift multiplies sigma / (1 - sigma); a scheduler that spreads a table bends that a little
    if 0.99 < float(ours[0]) < 1 and rest <= SLACK["grid"][0]:
        section.find("grid/first-sigma", f"{found}; the others are equal")
    elif len(odds) and float(odds.max() / odds.min()) < 1.2:
        found += f": the shift is {float(odds.median()):.3g} times the pipeline's"
        section.find("parity/shift", found)
    else:
        section.find("parity/grid", found)


def _time(section: ReportSection, two: Sides) -> None:
    ours, other = _times(two)
    worst = int((ours - other).abs().argmax())
    found = f"step {worst}: {float(ours[worst]):.6g}, in the pipeline {float(other[worst]):.6g}"
    rounded = torch.equal(ours, other.bfloat16().float())
    section.find("parity/time-rounding" if rounded else "parity/time", found)


def _text(section: ReportSection, two: Sides) -> None:
    shapes = [list(side.texts[0].shape) for side in (two.seen, two.theirs.seen)]
    gap = section.figures["text"]
    section.find(
        "parity/text",
        f"the network's embeddings {shapes[0]} and the pipeline's {shapes[1]} differ by {gap:.2g}",
    )


def _velocity(section: ReportSection, two: Sides) -> None:
    """Tell a flipped sign and wrong guidance from other differences."""
    if _cosine(two.v, two.v_ref) < -0.99:
        section.find("parity/sign", "the first velocity is minus the pipeline's")
        return
    scale = _guidance(two)
    if scale is None:
        gap = section.figures["velocity"]
        section.find("parity/velocity", f"the first velocity differs by {gap:.2g}")
        return
    asked = two.model.options.cfg_scale
    found = f"guidance acts like {scale:.3g}, asked for is {asked:g}"
    swapped = abs(scale - (1 - asked)) < 0.05 * asked
    section.find("parity/guidance-swapped" if swapped else "parity/guidance", found)


def _guidance(two: Sides) -> float | None:
    """Return the scale with which guidance acts, if that is all that is wrong."""
    if not two.model.guided:
        return None
    out = two.theirs.seen.out[0]
    both = out if len(out) == 2 * len(two.v) else torch.cat(two.theirs.seen.out[1::-1])
    u, c = both.chunk(2)
    asked, spread, gap = two.model.options.cfg_scale, c - u, two.v - two.v_ref
    if _cosine(gap, spread) ** 2 < 0.95:
        return None
    # how a change of the network's output moves the velocity: v = b out + a x
    b = torch.tensor(1.0)
    if isinstance(two.model, UNetModel):
        columns = torch.stack([(u + asked * spread).flatten(), two.x.float().flatten()], 1)
        b = torch.linalg.lstsq(columns, two.v_ref.flatten()[:, None]).solution[0, 0]
    return float(asked + (gap * spread).sum() / spread.square().sum() / b)


def _latents(section: ReportSection, two: Sides) -> None:
    section.find("parity/latents", f"the last latents differ by {section.figures['latents']:.2g}")


_TELL = {
    "grid": _grid,
    "time": _time,
    "text": _text,
    "velocity": _velocity,
    "latents": _latents,
}


def _cosine(one: Tensor, two: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten(), two.flatten(), dim=0))


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
