"""Without noise, are samples those of the diffusers pipeline: sigmas, times, texts, velocities,
latents, images."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.core.abilities import conditioning
from flowrl.core.noise_path import per_sample, vp_from_flow
from flowrl.core.seeds import generator
from flowrl.core.types import Source
from flowrl.doctor.examined_run import ExaminedRun
from flowrl.doctor.findings import ReportSection
from flowrl.doctor.network import relative
from flowrl.doctor.pipeline_run import PipelineTrace, Reference, reference, watched
from flowrl.evaluation.sources import sources_of
from flowrl.models.adapter import PipelineModel
from flowrl.models.unet import UNetModel

# largest difference that is rounding, for float32 and for shorter dtypes
SLACK = {"grid": (1e-5, 1e-5), "time": (1e-6, 1e-6), "text": (1e-3, 0.05), "velocity": (2e-3, 0.1)}
SLACK |= {"latents": (5e-3, 0.2), "vae": (2e-3, 0.02)}


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
