"""Each hand-written adapter beside its pipeline's own call: two ways to one velocity, grid, image
and gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_flux, tiny_sd3, tiny_sd15, tiny_sdxl
from tinylm import tiny_flux2, tiny_klein, tiny_qwen_image, tiny_z_image
from tinywan import tiny_wan
from torch import Tensor

from flowrl.models.by_call.model import PipelineCall
from flowrl.models.flow_matching import pack
from flowrl.models.flux import flux
from flowrl.models.flux2 import flux2
from flowrl.models.flux2_klein import flux2_klein
from flowrl.models.pipeline import pipeline
from flowrl.models.qwen_image import qwen_image
from flowrl.models.sd3 import sd3
from flowrl.models.sd15 import sd15
from flowrl.models.sdxl import sdxl
from flowrl.models.wan import wan
from flowrl.models.z_image import z_image

SIZE = (64, 96)
PROMPTS = ["a red cube", "two green spheres on a table"]


def same(x: Tensor) -> Tensor:
    return x


def rows(x: Tensor) -> Tensor:
    """FLUX.2's tokens [B, h w, C] of latents [B, C, h, w]."""
    return x.flatten(2).transpose(1, 2)


Case = tuple[Callable[..., Path], Callable[..., Any], dict[str, Any], dict[str, Any], Any]
CASES: dict[str, Case] = {
    "sd3": (tiny_sd3, sd3, {"guidance": 3.0}, {"call": {"guidance_scale": 3.0}}, same),
    # these predict noise
    "sd15": (tiny_sd15, sd15, {"guidance": 3.0}, {"call": {"guidance_scale": 3.0}}, same),
    "sdxl": (tiny_sdxl, sdxl, {"guidance": 3.0}, {"call": {"guidance_scale": 3.0}}, same),
    "flux": (tiny_flux, flux, {"guidance": 3.5}, {"call": {"guidance_scale": 3.5}}, pack),
    "flux2": (tiny_flux2, flux2, {"guidance": 3.5}, {"call": {"guidance_scale": 3.5}}, rows),
    "flux2_klein": (
        tiny_klein,
        flux2_klein,
        {"guidance": 3.0},
        {"call": {"guidance_scale": 3.0}},
        rows,
    ),
    "qwen_image": (
        tiny_qwen_image,
        qwen_image,
        {"guidance": 3.0, "negative_prompt": "dull", "max_sequence_length": 64},
        {"call": {"true_cfg_scale": 3.0, "max_sequence_length": 64}, "negative_prompt": "dull"},
        pack,
    ),
    "z_image": (tiny_z_image, z_image, {"guidance": 3.0}, {"call": {"guidance_scale": 3.0}}, same),
    "wan": (
        tiny_wan,
        wan,
        {"guidance": 3.0, "frames": 5, "max_sequence_length": 64},
        {"call": {"guidance_scale": 3.0, "max_sequence_length": 64}, "frames": 5},
        same,
    ),
}


def gap(one: Tensor, two: Tensor) -> float:
    return float((one - two).detach().norm() / two.detach().norm().clamp_min(1e-12))


@pytest.fixture(scope="module", params=list(CASES))
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PipelineCall, Any, Any]:
    make, adapter, mine, theirs, inner = CASES[request.param]
    folder = make(tmp_path_factory.mktemp(request.param))
    by_call = pipeline(path=str(folder), tune="full", **theirs)
    return by_call, adapter(str(folder), tune="full", **mine), inner


def test_the_grids_are_equal(both: tuple[PipelineCall, Any, Any]) -> None:
    by_call, adapter, _ = both
    assert torch.equal(by_call.sigmas(5, *SIZE), adapter.sigmas(5, *SIZE))


def test_velocities_and_gradients_are_equal(both: tuple[PipelineCall, Any, Any]) -> None:
    """At three levels of the grid, of two prompts of unequal lengths, each once."""
    by_call, adapter, inner = both
    x = torch.randn(2, *adapter.latent_shape(*SIZE), generator=torch.Generator().manual_seed(0))
    sigmas = by_call.sigmas(5, *SIZE)
    for level in sigmas[[0, 2, 4]]:
        levels = level.expand(2)
        v = by_call.velocity(inner(x), levels, by_call.encode(PROMPTS))
        wanted = inner(adapter.velocity(x, levels, adapter.encode(PROMPTS)))
        assert v.dtype == torch.float32
        assert gap(v, wanted) < 3e-6
    # all parameters, by name
    found = torch.autograd.grad(
        v.square().sum(), [*by_call.trainable().values()], allow_unused=True
    )
    other = torch.autograd.grad(
        wanted.square().sum(), [*adapter.trainable().values()], allow_unused=True
    )
    assert by_call.trainable().keys() == adapter.trainable().keys()
    for one, two in zip(found, other, strict=True):
        assert (one is None) == (two is None)
    length = torch.stack([g.norm() for g in other if g is not None]).norm()
    for one, two in zip(found, other, strict=True):
        if one is not None and two is not None:
            assert float((one - two).norm()) < 5e-5 * float(length)


def test_a_call_has_rows_of_several_levels(both: tuple[PipelineCall, Any, Any]) -> None:
    """Whether they share a call of the pipeline or not."""
    by_call, adapter, inner = both
    x = torch.randn(2, *adapter.latent_shape(*SIZE), generator=torch.Generator().manual_seed(1))
    levels = by_call.sigmas(5, *SIZE)[[1, 3]]
    v = by_call.velocity(inner(x), levels, by_call.encode(PROMPTS))
    wanted = inner(adapter.velocity(x, levels, adapter.encode(PROMPTS)))
    assert gap(v, wanted) < 3e-6


def test_decoded_images_are_equal(both: tuple[PipelineCall, Any, Any]) -> None:
    by_call, adapter, inner = both
    x = torch.randn(1, *adapter.latent_shape(*SIZE), generator=torch.Generator().manual_seed(2))
    by_call.latent_shape(*SIZE)
    with torch.no_grad():
        images, wanted = by_call.decode(inner(x)), adapter.decode(x)
    assert images.shape == wanted.shape
    assert float((images - wanted).abs().max()) < 2e-5


def test_the_shape_is_what_the_scheduler_sees(both: tuple[PipelineCall, Any, Any]) -> None:
    by_call, adapter, inner = both
    own = torch.zeros(1, *adapter.latent_shape(*SIZE))
    assert tuple(inner(own).shape[1:]) == by_call.latent_shape(*SIZE)
