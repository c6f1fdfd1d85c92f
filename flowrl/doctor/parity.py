"""Does a model compute what its own pipeline does: sigmas, texts, velocities, latents, images.

Two ways lead to one velocity: the adapter, and the pipeline's own ``__call__``
(`flowrl.models.by_call`). The second passes its fence first, then both are asked at the same
states; the inputs of the network are noted by the names that its own ``forward`` gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.core.abilities import PassesFence, conditioning
from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.seeds import generator
from flowrl.core.types import Cond, Source
from flowrl.doctor.examined_run import ExaminedRun
from flowrl.doctor.findings import ReportSection
from flowrl.doctor.network import Inputs, cosine, noted, relative
from flowrl.evaluation.sources import sources_of
from flowrl.models.adapter import PipelineModel, first_order
from flowrl.models.by_call.fence import Fence, public_run
from flowrl.models.by_call.layout import Layout
from flowrl.models.by_call.model import Asked, PipelineCall
from flowrl.models.pipeline import own_call

# largest difference that is rounding, for float32 and for shorter dtypes
SLACK = {"grid": (1e-5, 1e-5), "time": (1e-6, 1e-6), "text": (1e-3, 0.05), "velocity": (2e-3, 0.1)}
SLACK |= {"latents": (5e-3, 0.2), "vae": (2e-3, 0.02)}
TEXTS = ("encoder_hidden_states", "pooled_projections", "cap_feats", "text_embeds")  # and texts


class Sides(NamedTuple):
    """Both sides of a comparison."""

    model: Any
    beside: PipelineCall  # the pipeline's own call
    layout: Layout
    sigmas: Tensor  # [S+1] of the model
    grid: Tensor  # [S+1] of the pipeline
    given: Inputs  # to the network by the model, at the states of all steps
    given_beside: Inputs
    x: Tensor  # [B, *]  where both start
    v: Tensor  # [B, *]  the velocities there, as the scheduler sees them
    v_beside: Tensor
    gap: float  # the largest relative difference of the velocities of all steps
    cond: Cond  # of the pipeline's own call


def look_at_parity(examined: ExaminedRun) -> ReportSection:
    """Ask the model and its pipeline's own call for the same velocities, then sample and decode
    beside the pipeline."""
    section, model = ReportSection("parity"), examined.model
    size = (examined.config.image.height, examined.config.image.width)
    if isinstance(model, PassesFence):
        steps = len(examined.rollout.sigmas) - 1
        asked: Any = model
        _show(section, asked.pass_fence(steps, *examined.trainer.size, training=False))
        return section
    section.skipped = _not_comparable(examined)
    if section.skipped:
        return section
    try:
        sources = _sources(examined)
        beside = own_call(model, *size, sources=max(map(len, sources), default=0))
        fence = beside.pass_fence(
            _steps(model, len(examined.rollout.sigmas) - 1), *size, training=False
        )
    except (ConfigError, ModelError) as error:
        section.skipped = f"the pipeline's own call: {error}"
        return section
    _show(section, fence, "own ")
    with torch.no_grad():
        conds = [conditioning(one, examined.texts, sources) for one in (model, beside)]
        two = _both(model, beside, conds, fence, len(examined.texts))
        _compare(section, two, *_ends(two, conds[0], fence, examined.texts, sources))
    return section


def _not_comparable(examined: ExaminedRun) -> str:
    """Say why a model is not compared; "" where it is."""
    model = examined.model
    if not isinstance(model, PipelineModel):
        return f"{examined.config.model.fn} is no pipeline of diffusers"
    if model.options.how.offload:
        return "not with model.runtime.offload: the pipeline expects its parts together"
    if examined.has("ratio/random"):
        return "the network does not answer the same twice"
    if examined.has("text/swapped"):
        return "prompts get the texts of others"
    return getattr(model, "unlike_pipeline", None) or ""


def _show(section: ReportSection, fence: Fence, before: str = "") -> None:
    """Show what a pipeline's own call has shown, under names with a word ``before`` them; one that
    differs is refused."""
    section.lines += fence.lines[:1]
    section.table += [["", "differs by", "at most", ""]]
    for check in fence.checks:
        row = [before + check.name, f"{check.figure:.1e}", f"{check.limit:.0e}", check.says]
        section.table.append(row)
        section.figures[before + check.name] = check.figure


def _steps(model: Any, steps: int) -> int:
    """Return how many steps are compared: with trailing timesteps only a number that divides the
    training timesteps makes diffusers' DDIM end a step where it asks the network next."""
    config = model.pipeline().scheduler.config
    trailing = config.get("timestep_spacing") == "trailing"
    if getattr(model, "discrete_levels", False) and trailing:
        while config.num_train_timesteps % steps:
            steps -= 1
    return steps


def _sources(examined: ExaminedRun) -> list[Source]:
    """Return what the prompts start from, as large as the images; [] where they do not."""
    if not hasattr(examined.model, "encode_with_sources"):
        return []
    size = (examined.config.image.height, examined.config.image.width)
    return sources_of(examined.trainer.train_set, examined.rows, size)


def _noise(shape: tuple[int, ...], place: int) -> Tensor:
    return torch.randn((1, *shape), generator=generator(0, "parity", place))


def _both(
    model: Any, beside: PipelineCall, conds: Sequence[Cond], fence: Fence, count: int
) -> Sides:
    """Ask both for the velocities of all steps, from the same noise of each prompt."""
    layout, steps, size = beside.layout(*fence.size), fence.steps, fence.size
    grid, sigmas = beside.sigmas(steps, *size), model.sigmas(steps, *size)
    shape = model.latent_shape(*size)
    x = torch.cat([_noise(shape, i) for i in range(count)]).to(model.device)
    first = x = x * torch.hypot(1 - grid[0], grid[0])
    states, found, pairs = [x], list[Tensor](), list[tuple[Tensor, Tensor]]()
    with noted(beside.networks.values()) as ours:
        for here, there in zip(grid[:-1], grid[1:], strict=True):
            found.append(model.velocity(x, here.expand(count), conds[0]).float())
            x = x + (there - here) * found[-1]
            states.append(x)
    with noted(beside.networks.values()) as theirs:
        for x, here, v in zip(states, grid[:-1], found, strict=False):
            w = beside.velocity(layout.from_latents(x), here.expand(count), conds[1])
            pairs.append((layout.from_latents(v), w))
    gap = max(relative(*pair) for pair in pairs)
    return Sides(model, beside, layout, sigmas, grid, ours, theirs, first, *pairs[0], gap, conds[1])


def _ends(
    two: Sides, cond: Cond, fence: Fence, texts: Sequence[str], sources: Sequence[Source]
) -> tuple[Tensor, Tensor]:
    """Sample the prompts by the engine, and by the pipeline's own steps, those of Euler where its
    scheduler has others -> the model's last latents, and the pipeline's as the scheduler sees
    them."""
    model, beside, layout = two.model, two.beside, two.layout
    streams = [generator(0, "parity", place) for place in range(len(texts))]
    shape = model.latent_shape(*fence.size)
    end = sample_ode(model, cond, sigmas=two.sigmas, shape=shape, group_size=1, generators=streams)
    beside.scheduler = first_order(beside.scheduler)
    grid, found = beside.grid(fence.steps, *fence.size), []
    for place, text in enumerate(texts):
        start = layout.from_latents(_noise(shape, place))
        asked = Asked(text, sources[place] if sources else ())
        made = public_run(beside, asked, grid, start=start)
        found.append(beside.flow_of(made.after[-1], grid.sigmas[-1]))
    return end, torch.cat(found)


def _compare(section: ReportSection, two: Sides, end: Tensor, last: Tensor) -> None:
    """Find the first thing that differs; decoding is judged by itself."""
    short = int(two.model.dtype != torch.float32)
    images = two.model.decode(end), two.beside.decode(two.layout.from_latents(end))
    gaps = {
        "grid": float((two.sigmas - two.grid).abs().max()),
        "time": _time_gap(two),
        "text": max(_row_gaps(two, TEXTS).values(), default=0.0),
        "velocity": two.gap,
        "latents": relative(two.layout.from_latents(end).float(), last),
        "vae": float((images[0] - images[1]).abs().mean()),
    }
    section.figures |= gaps
    wrong = []
    for name, gap in gaps.items():
        limit, says = SLACK[name][short], ""
        if not gap <= limit:
            wrong.append(name)
            says = "differs"
        section.table.append([name, f"{gap:.1e}", f"{limit:.0e}", says])
    # the first is the cause of those behind it
    if wrong and wrong[0] != "vae":
        _TELL[wrong[0]](section, two)
    if "vae" in wrong:
        section.find("parity/vae", f"pixels differ by {gaps['vae']:.3g} on average")


def _times(two: Sides) -> tuple[Tensor, Tensor]:
    """Return the times that were asked about; a pipeline may call its network once per branch and
    per prompt."""
    ours = torch.stack([time[0] for time in two.given.times])
    other = torch.stack([time[0] for time in two.given_beside.times])
    return ours, other[:: max(1, len(other) // len(ours))]


def _time_gap(two: Sides) -> float:
    ours, other = _times(two)
    return float((ours - other).abs().max() / other.abs().max())


def _row_gaps(two: Sides, names: Sequence[str]) -> dict[str, float]:
    """Return by how much rows of the network's inputs differ from the nearest of the other side,
    whose branches may come in another order, at the first step."""
    found = {}
    for name, rows in two.given.rows.items():
        others = two.given_beside.rows.get(name, [])
        if name.split(".")[-1] in names and others:
            found[name] = max(_nearest(row, others) for row in rows)
    return found


def _nearest(row: Tensor, others: Sequence[Tensor]) -> float:
    return min(_row_gap(row, other) for other in others)


def _row_gap(one: Tensor, two: Tensor) -> float:
    """Return the relative difference of two rows, filled up with zeros to equal sizes: a pipeline
    may cut what is masked."""
    if one.dim() != two.dim():
        return float("inf")
    sizes = list(map(max, one.shape, two.shape))
    return relative(_filled(one, sizes), _filled(two, sizes))


def _filled(row: Tensor, sizes: Sequence[int]) -> Tensor:
    missing: list[int] = []
    for size, there in zip(reversed(sizes), reversed(row.shape), strict=True):
        missing += [0, size - there]
    return pad(row, missing)


# ------------------------------------------------------------------------------------------ causes


def _grid(section: ReportSection, two: Sides) -> None:
    ours, other = two.sigmas.cpu().double(), two.grid.cpu().double()
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
    cause = "parity/time"
    if torch.equal(ours, other.bfloat16().float()):
        cause = "parity/time-rounding"
    section.find(cause, found)


def _text(section: ReportSection, two: Sides) -> None:
    name, gap = max(_row_gaps(two, TEXTS).items(), key=itemgetter(1))
    shapes = [list(side.rows[name][0].shape) for side in (two.given, two.given_beside)]
    section.find(
        "parity/text",
        f"the network's {name} {shapes[0]} and the pipeline's {shapes[1]} differ by {gap:.2g}",
    )


def _velocity(section: ReportSection, two: Sides) -> None:
    """Tell a flipped sign and wrong guidance from other differences."""
    if cosine(two.v, two.v_beside) < -0.99:
        section.find("parity/sign", "the first velocity is minus the pipeline's")
        return
    scale = _guidance(two)
    if scale is None:
        gap = section.figures["velocity"]
        section.find("parity/velocity", f"a velocity differs by {gap:.2g}")
        return
    asked = two.model.options.cfg_scale
    found = f"guidance acts like {scale:.3g}, asked for is {asked:g}"
    cause = "parity/guidance"
    if abs(scale - (1 - asked)) < 0.05 * asked:
        cause = "parity/guidance-swapped"
    section.find(cause, found)


def _guidance(two: Sides) -> float | None:
    """Return the scale with which guidance acts, if that is all that is wrong: velocities are
    linear in it."""
    if not two.model.guided or two.beside.options.cfg_scale == 1:
        return None
    asked, own = two.model.options.cfg_scale, two.beside.options.cfg_scale
    x, level = two.layout.from_latents(two.x), two.grid[:1].expand(len(two.x))
    with two.beside.guiding(own + 1):
        more = two.beside.velocity(x, level, two.cond)
    spread, gap = more - two.v_beside, two.v - two.v_beside
    if cosine(gap, spread) ** 2 < 0.95:
        return None
    return float(asked + (gap * spread).sum() / spread.square().sum())


def _latents(section: ReportSection, two: Sides) -> None:
    section.find("parity/latents", f"the last latents differ by {section.figures['latents']:.2g}")


_TELL = {
    "grid": _grid,
    "time": _time,
    "text": _text,
    "velocity": _velocity,
    "latents": _latents,
}
