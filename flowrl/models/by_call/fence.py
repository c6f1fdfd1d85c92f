"""The fence: what a pipeline without adapter must show before anything is trained with it.

The pipeline's public ``__call__`` runs once, with its own scheduler, for the run's own number of
steps; what it handed to its scheduler is compared with what `PipelineCall` makes of the same
states. What does not hold is refused by name, with the figure and the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.core.seeds import generator
from flowrl.models.by_call.layout import Layout, handed
from flowrl.models.by_call.model import PROMPTS, Asked, Grid, PipelineCall, flat, in_unit
from flowrl.models.by_call.texts import Unequal

SAME_LENGTH = "a tan cone"  # as long as the first of PROMPTS, in letters and in words
# largest relative difference that is rounding, in float32 and in shorter dtypes
LIMITS = {
    "sample": (0.0, 0.0),
    "velocity": (1e-5, 2e-2),
    "step": (1e-3, 5e-2),
    "images": (1e-4, 2e-2),
    "rows": (1e-5, 2e-2),
}
MEMORY = (
    "what it makes of a state depends on the steps before, as guidance with a momentum does, so "
    "there is no velocity at a state; set the argument in model.call that turns this off"
)
OTHER = "its call does not depend on the state, the time and the number of the step alone"


class Check(NamedTuple):
    """One comparison."""

    name: str
    figure: float
    limit: float
    says: str = ""

    @property
    def line(self) -> str:
        """Return it in words."""
        line = f"{self.name} {self.figure:.1e} of {self.limit:.0e}"
        if self.says:
            line += f" ({self.says})"
        return line


class Fence(NamedTuple):
    """What a pipeline has shown, with the version of diffusers that it was shown under."""

    pipeline: str
    version: str
    steps: int
    size: tuple[int, int]
    checks: list[Check]
    rows: str  # what may share a call
    indexed: bool  # the number of a step counts

    @property
    def lines(self) -> list[str]:
        """Return it in words."""
        height, width = self.size
        head = f"{self.pipeline} by its own call, diffusers {self.version}: {self.steps} steps"
        shared = {
            "one": "one row a call",
            "prompt": "rows of one prompt and level share a call",
            "prompts": "rows of one level share a call",
            "sigmas": "all rows share a call",
        }
        head += f" at {height} x {width} pixels; {shared[self.rows]}"
        if self.indexed:
            head += "; conditions depend on the number of the step"
        return [head, *(check.line for check in self.checks)]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        plain = self._asdict()
        plain["checks"] = [check._asdict() for check in self.checks]
        return plain


class Public(NamedTuple):
    """What the pipeline's public call did."""

    x: list[Tensor]  # the sample at each step
    out: list[Tensor]  # the output at each step
    after: list[Tensor]  # the sample after each step
    images: Any


def fence(
    model: PipelineCall, steps: int, height: int, width: int, *, training: bool = True
) -> Fence:
    """Compare a model with its pipeline's public call for a run of ``steps``, and set what may
    share a call of it. ``training``: also see that gradients reach what is trained. Raise
    ModelError with the figure for what does not hold."""
    short = model.dtype != torch.float32
    layout = model.layout(height, width)
    grid = model.grid(steps, height, width)
    asked = model.asked(PROMPTS[0], layout)
    theirs = public_run(model, asked, grid)
    let_through(model, asked, theirs.x[0], grid.sigmas[0])
    checks = [_sample(model, theirs, grid)]
    checks.append(_velocities(model, asked, theirs, grid, LIMITS["velocity"][short]))
    checks.append(_first_step(model, theirs, grid, LIMITS["step"][short]))
    checks.append(_images(model, theirs, grid, LIMITS["images"][short]))
    _find_rows(model, theirs, grid, LIMITS["rows"][short])
    if training and model.trainable():
        checks.append(_gradients(model, asked, theirs, grid))
    return Fence(
        model.name,
        diffusers.__version__,
        steps,
        (height, width),
        checks,
        model.rows,
        model.indexed,
    )


def public_run(
    model: PipelineCall, asked: Asked, grid: Grid, *, start: Tensor | None = None
) -> Public:
    """Run the public ``__call__`` from noise, or from ``start`` [1, *], and note what its scheduler
    is handed. Raise ModelError if it fails."""
    made = Public([], [], [], None)
    layout = grid.layout
    twin = model.twin()
    scheduler = copy.deepcopy(model.scheduler)
    step = scheduler.step

    def noting(out: Tensor, time: Any, x: Tensor, *args: Any, **named: Any) -> Any:
        made.out.append(out.detach().clone())
        made.x.append(x.detach().clone())
        found = step(out, time, x, *args, **named)
        after = found[0] if isinstance(found, tuple) else found.prev_sample
        made.after.append(after.detach().clone())
        return found

    vars(scheduler)["step"] = noting
    vars(twin)["scheduler"] = scheduler
    steps = len(grid.times)
    given = model.arguments([asked], layout, steps)
    if start is None:
        start = noise(layout)
    x = start.to(model.device)
    with model.reading(twin), handed(twin, layout, x) as entry:
        try:
            images = type(twin).__call__(twin, **given, **entry)[0]
        except Exception as error:  # pipelines raise every kind
            raise ModelError(
                f"{model.name}: its own call fails: {type(error).__name__}: {error}"
            ) from error
    if len(made.x) != steps:
        raise ModelError(
            f"{model.name}: its own call takes {len(made.x)} steps of its scheduler where {steps} "
            "were asked for: loops in pieces have no one velocity; it needs an adapter"
        )
    return made._replace(images=images)


def noise(layout: Layout, place: int = 0) -> Tensor:
    """Return x [1, *] of a standard normal, from a seed."""
    return torch.randn((1, *layout.inner), generator=generator(0, "fence", place))


def relative(one: Tensor, two: Tensor) -> float:
    """Return the length of the difference over that of the second; infinite for other shapes."""
    if one.shape != two.shape:
        return float("inf")
    one, two = one.detach().double().cpu(), two.detach().double().cpu()
    figure = float((one - two).norm() / two.norm().clamp_min(1e-12))
    if figure != figure:
        return float("inf")
    return figure


def _sample(model: PipelineCall, theirs: Public, grid: Grid) -> Check:
    """See that `step` gets the state that was put in."""
    x = noise(grid.layout).to(model.device)
    noted = model.step_at(x, grid.sigmas[:1], [model.asked(PROMPTS[0], grid.layout)])
    gap = relative(noted.x, x.to(noted.x.dtype))
    first = relative(theirs.x[0], x.to(theirs.x[0].dtype))
    if gap or first:
        raise ModelError(
            f"{model.name}: the first step of its call sees latents that differ by "
            f"{max(gap, first):.1e} from those that it is given: scaled or mixed latents are not "
            "served without an adapter"
        )
    # and each further step what the step before has made
    for place, x in enumerate(theirs.x[1:]):
        gap = relative(x, theirs.after[place].to(x.dtype))
        if gap:
            raise ModelError(
                f"{model.name}: step {place + 2} of its call sees latents that differ by {gap:.1e} "
                "from those that the step before made: its loop changes them in between, which "
                "this sampler does not; it needs an adapter"
            )
    return Check("sample", 0.0, 0.0)


def _velocities(
    model: PipelineCall, asked: Asked, theirs: Public, grid: Grid, limit: float
) -> Check:
    """Compare every step; where the times alone do not tell, give the number of the step, too."""
    gaps = _gaps(model, asked, theirs, grid)
    if max(gaps) > limit and not model.indexed:
        alone, model.indexed = gaps, True
        gaps = _gaps(model, asked, theirs, grid)
        if max(gaps) > limit:
            model.indexed = False
            gaps = min(gaps, alone, key=max)
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    if gaps[worst] > limit:
        reason = MEMORY if gaps[0] <= limit else OTHER
        raise ModelError(
            f"{model.name}: the velocity at step {worst + 1} of {len(gaps)} differs by "
            f"{gaps[worst]:.1e} (at most {limit:.0e}) from that of its own run: {reason}"
        )
    return Check("velocity", gaps[worst], limit, f"all {len(gaps)} steps")


def _gaps(model: PipelineCall, asked: Asked, theirs: Public, grid: Grid) -> list[float]:
    found = []
    with torch.no_grad():
        for level, x, out in zip(grid.sigmas[:-1], theirs.x, theirs.out, strict=True):
            noted = model.step_at(x, [level], [asked])
            found.append(relative(noted.out, out))
    return found


def _first_step(model: PipelineCall, theirs: Public, grid: Grid, limit: float) -> Check:
    """See that the scheduler's first step is x + (sigma' - sigma) v, but for what latents of its
    dtype are rounded by."""
    first, second = grid.sigmas[0], model.first_end(grid)
    x = model.flow_of(theirs.x[0], first)
    after = model.flow_of(theirs.after[0], second)
    wanted = ((second - first) * model.velocity_of(theirs.out[0], x, [first])).double()
    gap = relative(after.double() - x.double(), wanted)
    rounded = torch.finfo(theirs.after[0].dtype).eps / 2 * float(after.double().norm())
    gap = max(0.0, gap - rounded / max(1e-12, float(wanted.norm())))
    if gap > limit:
        raise ModelError(
            f"{model.name}: the first step of its {type(model.scheduler).__name__} differs by "
            f"{gap:.1e} (at most {limit:.0e}) from an Euler step of its network's output: a "
            "scheduler that draws noise, or an output that is no velocity"
        )
    return Check("step", gap, limit)


def _images(model: PipelineCall, theirs: Public, grid: Grid, limit: float) -> Check:
    images = torch.as_tensor(theirs.images).float()
    with torch.no_grad():
        images = flat(_in_unit(model, theirs, images, limit))
        ours = model.decode(model.flow_of(theirs.after[-1], grid.sigmas[-1]))
    if images.dim() == 5 and ours.dim() == 4:
        images = images[:, 0]
    gap = float("inf")
    if images.shape == ours.shape:
        gap = float((ours.cpu() - images.cpu()).abs().mean())
    if not gap <= limit:
        raise ModelError(
            f"{model.name}: decoded images differ by {gap:.1e} on average (at most {limit:.0e}) "
            "from those of its own run"
        )
    return Check("images", gap, limit, "shown by a call without steps" * model.passes_empty)


def _in_unit(model: PipelineCall, theirs: Public, images: Tensor, limit: float) -> Tensor:
    """Return images in [0, 1]; of a pipeline whose tensors of images are in [-1, 1], which its
    images for people tell, the model is told so."""
    low, high = float(images.min()), float(images.max())
    if low >= -1e-3 and high <= 1 + 1e-3:
        return images
    model.raw_images = True
    made = in_unit(images)
    gap = float((model.shown(theirs.after[-1]).cpu() - made.cpu()).abs().mean())
    if not gap <= limit:
        raise ModelError(
            f"{model.name}: its images as tensors lie in {low:.2g} to {high:.2g}; expected 0 to 1, "
            f"or -1 to 1 (these differ by {gap:.1e} from those for people)"
        )
    return made


def _find_rows(model: PipelineCall, theirs: Public, grid: Grid, limit: float) -> None:
    """Set what may share a call: what is equal to a row alone."""
    model.rows = "one"
    if model.options.sources:
        return
    layout = grid.layout
    first, last = grid.sigmas[0], grid.sigmas[len(grid.sigmas) // 2]
    states = [theirs.x[0], noise(layout, 1).to(theirs.x[0])]
    one = model.asked(PROMPTS[0], layout)
    others = [model.asked(text, layout) for text in (PROMPTS[1], SAME_LENGTH)]
    if not _share(model, states, [first, first], [one, one], limit):
        return
    model.rows = "prompt"
    if not all(_share(model, states, [first, first], [one, other], limit) for other in others):
        return
    model.rows = "prompts"
    if model.indexed or len(grid.times) < 2:
        return
    if all(_share(model, states, [first, last], [one, other], limit) for other in (one, *others)):
        model.rows = "sigmas"


def _share(
    model: PipelineCall,
    states: Sequence[Tensor],
    levels: list[float],
    asked: Sequence[Asked],
    limit: float,
) -> bool:
    """Tell whether rows in one call are equal to each alone; prompts of other lengths, which are
    never in one call, are."""
    with torch.no_grad():
        alone = []
        for x, level, one in zip(states, levels, asked, strict=True):
            alone.append(model.step_at(x, [level], [one]).out)
        try:
            together = model.step_at(torch.cat([*states]), levels, asked).out
        except Unequal:
            return True
        except Exception:  # of a pipeline whose loop takes one time
            return False
    return relative(together, torch.cat(alone)) <= limit


def _gradients(model: PipelineCall, asked: Asked, theirs: Public, grid: Grid) -> Check:
    """See that a gradient reaches what is trained. What has none must have no effect either."""
    params = model.trainable()
    reached: set[str] = set()
    for place in dict.fromkeys((0, len(grid.times) - 1)):
        with torch.enable_grad():
            out = model.step_at(theirs.x[place], [grid.sigmas[place]], [asked]).out
            if not out.requires_grad:
                raise ModelError(
                    f"{model.name}: its velocity has no gradient: the pipeline or the network "
                    "switches it off; it needs an adapter"
                )
            grads = torch.autograd.grad(
                out.float().square().sum(), [*params.values()], allow_unused=True
            )
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                reached.add(name)
    rest = [name for name in params if name not in reached]
    if rest and _matters(model, asked, theirs, grid, rest):
        raise ModelError(
            f"{model.name}: no gradient reaches {len(rest)} of {len(params)} trained parameters "
            f"that change its velocity, such as {rest[0]}: the pipeline detaches them; train other "
            "layers (model.lora.targets, model.layers), or write an adapter"
        )
    says = f"reaches {len(reached)} of {len(params)}"
    if rest:
        says += f", {len(rest)} have no effect"
    return Check("gradient", 0.0, 0.0, says)


def _matters(
    model: PipelineCall, asked: Asked, theirs: Public, grid: Grid, names: Sequence[str]
) -> bool:
    """Tell whether parameters change the velocity."""
    with torch.no_grad(), _moved(model, names):
        gaps = []
        for place in (0, len(grid.times) - 1):
            noted = model.step_at(theirs.x[place], [grid.sigmas[place]], [asked])
            gaps.append(relative(noted.out, theirs.out[place]))
    return max(gaps) > LIMITS["velocity"][model.dtype != torch.float32]


@contextmanager
def _moved(model: PipelineCall, names: Sequence[str]) -> Iterator[None]:
    """Add 1 to parameters for a while."""
    kept = {name: model.trainable()[name].detach().clone() for name in names}
    try:
        for name in names:
            model.trainable()[name].data += 1.0
        yield
    finally:
        for name, value in kept.items():
            model.trainable()[name].data.copy_(value)


# ------------------------------------------- parts that switch gradients off at rest, as experts do


def let_through(model: Any, asked: Any, x: Tensor, level: float) -> None:
    """Let gradients through what switches them off inside a network: the module around it computes
    as in training, and what is within as before. Raise ModelError where that does not help."""
    around = {module for _, module in _blind(model, asked, x, level)}
    for module in around:
        module.training = True
    left = [name for name, _ in _blind(model, asked, x, level)] if around else []
    if left:
        raise ModelError(
            f"{model.name}: {left[0]} works without gradients inside the network, so that training "
            "would miss a part of them; it needs an adapter"
        )


def _blind(model: Any, asked: Any, x: Tensor, level: float) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with parameters that is called without gradients, by its name, with the
    innermost module around it that is called with them."""
    called: dict[nn.Module, bool] = {}  # whether with gradients

    def note(module: nn.Module, *_: Any) -> None:
        called[module] = called.get(module, True) and torch.is_grad_enabled()

    networks = [*model.networks.values()]
    hooks = [one.register_forward_pre_hook(note) for net in networks for one in net.modules()]
    try:
        with torch.enable_grad():
            model.step_at(x, [level], [asked])
    finally:
        for hook in hooks:
            hook.remove()
    for network in networks:
        names = dict(network.named_modules())
        for name, module in names.items():
            if called.get(module, True) or not [*module.parameters()]:
                continue
            while name and not called.get(names[name], False):
                name = name.rpartition(".")[0]
            if called.get(names[name], False):
                yield type(module).__name__, names[name]
