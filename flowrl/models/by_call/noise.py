"""Pipelines that predict noise or v, by their own ``__call__`` through the variance-preserving map
of `flowrl.models.unet`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.noise_path import vp_from_flow
from flowrl.models.by_call.layout import Layout
from flowrl.models.by_call.model import EditingPipelineCall, Grid, PipelineCall
from flowrl.models.unet import Schedule


class NoiseCall(PipelineCall):
    """A FlowModel around a pipeline whose network knows ``x_vp = alpha x0 + s eps`` at whole
    timesteps, and whose scheduler became DDIM.

    x is the pipeline's latent over ``alpha + s``, as of `flowrl.models.unet.UNetModel`.
    """

    # it knows the noise levels of its training timesteps, and none in between
    discrete_levels = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._schedule = Schedule(self.scheduler, self.device)

    def velocity_of(self, out: Tensor, x: Tensor, levels: list[float]) -> Tensor:
        """Return the velocity of what the pipeline hands to its scheduler at x [B, *]."""
        rows = torch.tensor(levels, device=x.device)
        return self._schedule.velocity(x.float(), out.float(), rows)

    def flow_of(self, inner: Tensor, level: float) -> Tensor:
        """Return a state of the pipeline as x."""
        one = torch.ones(1, device=inner.device)
        return inner.float() / vp_from_flow(one, one * level)

    def inner_of(self, x: Tensor, levels: list[float]) -> Tensor:
        """Return x [B, *] as the pipeline has it. Raise ModelError for a level in between."""
        rows = torch.tensor(levels, device=self._schedule.sigma.device)
        known = self._schedule.timesteps(rows)[1]
        final = (rows - self._schedule.end).abs() <= 0
        if not bool((known | final).all()):
            raise ModelError(
                f"{self.name}: expected noise levels of its {len(self._schedule.sigma)} training "
                f"timesteps, as `sigmas` gives them, got {float(rows[~known][0])}: its network "
                "knows no time in between"
            )
        return vp_from_flow(x.float(), rows.to(x.device))

    def first_end(self, grid: Grid) -> float:
        """Return the level at which DDIM's first step ends: T // steps timesteps on, which is not
        the next of the grid where the steps do not divide T."""
        levels = self._schedule.sigma
        place = int(grid.times[0]) - len(levels) // len(grid.times)
        return float(levels[place]) if place >= 0 else self.final_level()

    def final_level(self) -> float:
        """Return where the last step ends."""
        return float(self._schedule.end)

    def _time(self, level: float, layout: Layout) -> Tensor:
        found = self._schedule.timesteps(torch.tensor([level]))[0]
        return found.cpu()

    def _learned_grid(self, steps: int, height: int, width: int) -> Grid:
        layout = self.layout(height, width)
        levels = self._schedule.grid(steps).cpu()
        times = self._schedule.timesteps(levels[:-1])[0].cpu()
        return Grid(levels.tolist(), times, levels, layout)


class EditingNoiseCall(EditingPipelineCall, NoiseCall):
    """The same of a pipeline that starts from images, such as InstructPix2Pix."""
