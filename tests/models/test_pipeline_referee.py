"""Each hand-written adapter beside its pipeline's own call: two ways to one velocity, grid, image
and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapterkit import ADAPTERS, GUIDED, Folders
from startkit import STARTS, Starts, size_of, sources
from torch import Tensor

from flowrl.core.abilities import conditioning
from flowrl.models.by_call.model import PipelineCall
from flowrl.models.pipeline import own_call

SIZE = (64, 96)
PROMPTS = ["a red cube", "two green spheres on a table"]
OPTIONS = GUIDED | {
    "flux2": {"guidance": 3.5},
    "qwen_image": {"guidance": 3.0, "negative_prompt": "dull"},
}


def gap(one: Tensor, two: Tensor) -> float:
    return float((one - two).detach().norm() / two.detach().norm().clamp_min(1e-12))


@pytest.fixture(scope="module", params=list(ADAPTERS))
def both(request: pytest.FixtureRequest, folders: Folders) -> tuple[PipelineCall, Any]:
    """The pipeline's own call, with options that the adapter states, and the adapter."""
    adapter = folders.load(request.param, tune="full", **OPTIONS[request.param])
    return own_call(adapter, *SIZE), adapter


def test_the_grids_are_equal(both: tuple[PipelineCall, Any]) -> None:
    by_call, adapter = both
    assert torch.equal(by_call.sigmas(5, *SIZE), adapter.sigmas(5, *SIZE))


def test_velocities_and_gradients_are_equal(both: tuple[PipelineCall, Any]) -> None:
    """At three levels of the grid, of two prompts of unequal lengths, each once."""
    by_call, adapter = both
    inner = by_call.layout(*SIZE).from_latents
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
    for one, two in zip(found, other, strict=True):
        assert (one is None) == (two is None)
    length = torch.stack([g.norm() for g in other if g is not None]).norm()
    for one, two in zip(found, other, strict=True):
        if one is not None and two is not None:
            assert float((one - two).norm()) < 5e-5 * float(length)


def test_both_can_compute_in_another_dtype_for_a_while(both: tuple[PipelineCall, Any]) -> None:
    """As the doctor asks: the network's arithmetic rounds, and is as before afterwards."""
    by_call, adapter = both
    inner = by_call.layout(*SIZE).from_latents
    x = torch.randn(1, *adapter.latent_shape(*SIZE), generator=torch.Generator().manual_seed(2))
    level = by_call.sigmas(5, *SIZE)[2:3]
    for model, start in ((by_call, inner(x)), (adapter, x)):
        words = model.encode(PROMPTS[:1])
        with torch.no_grad():
            exact = model.velocity(start, level, words)
            with model.computing_in(torch.bfloat16):
                rounded = model.velocity(start, level, words)
            assert 1e-4 < gap(rounded, exact) < 0.1
            assert torch.equal(model.velocity(start, level, words), exact)


def test_a_call_has_rows_of_several_levels(both: tuple[PipelineCall, Any]) -> None:
    """Whether they share a call of the pipeline or not."""
    by_call, adapter = both
    inner = by_call.layout(*SIZE).from_latents
    x = torch.randn(2, *adapter.latent_shape(*SIZE), generator=torch.Generator().manual_seed(1))
    levels = by_call.sigmas(5, *SIZE)[[1, 3]]
    v = by_call.velocity(inner(x), levels, by_call.encode(PROMPTS))
    wanted = inner(adapter.velocity(x, levels, adapter.encode(PROMPTS)))
    assert gap(v, wanted) < 3e-6


def test_decoded_images_are_equal(both: tuple[PipelineCall, Any]) -> None:
    by_call, adapter = both
    inner = by_call.layout(*SIZE).from_latents
    x = torch.randn(1, *adapter.latent_shape(*SIZE), generator=torch.Generator().manual_seed(2))
    by_call.latent_shape(*SIZE)
    with torch.no_grad():
        images, wanted = by_call.decode(inner(x)), adapter.decode(x)
    assert images.shape == wanted.shape
    assert float((images - wanted).abs().max()) < 2e-5


def test_the_shape_is_what_the_scheduler_sees(both: tuple[PipelineCall, Any]) -> None:
    by_call, adapter = both
    inner = by_call.layout(*SIZE).from_latents
    own = torch.zeros(1, *adapter.latent_shape(*SIZE))
    assert tuple(inner(own).shape[1:]) == by_call.latent_shape(*SIZE)


# those of STARTS whose options scale sources as the pipeline does, and put them where it does
LIKE = ("kontext", "experts", "i2v", "i2v, experts")


@pytest.mark.parametrize("name", LIKE)
def test_models_that_start_from_images_and_experts(starts: Starts, name: str) -> None:
    """The velocity of every step and the image, of two prompts with sources of their own."""
    adapter = starts.load(name)
    size = size_of(name)
    given = sources(name, 2) if STARTS[name].sources else []
    by_call = own_call(adapter, *size, sources=STARTS[name].sources)
    sigmas, inner = by_call.sigmas(3, *size), by_call.layout(*size).from_latents
    assert torch.equal(sigmas, adapter.sigmas(3, *size))
    x = torch.randn(2, *adapter.latent_shape(*size), generator=torch.Generator().manual_seed(0))
    conds = [conditioning(one, PROMPTS, given) for one in (by_call, adapter)]
    with torch.no_grad():
        for level in sigmas[:-1]:
            v = by_call.velocity(inner(x), level.expand(2), conds[0])
            assert gap(v, inner(adapter.velocity(x, level.expand(2), conds[1]))) < 3e-6
        gaps = by_call.decode(inner(x)) - adapter.decode(x)
    assert float(gaps.abs().max()) < 2e-5
