"""Several processes that compute each sample together: diffusers' context parallelism.

By Ulysses (DeepSpeed-Ulysses, 2309.14509): each process has a part of the tokens, and within
attention all tokens of a part of the heads. Ring attention is not offered: in diffusers 0.42
torch's own attention, the only back end that was proven here, refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import ContextParallelConfig, WanTransformer3DModel

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.processes import context_mesh, world
from flowrl.models.quiet_libraries import quiet
from flowrl.models.runtime import Runtime


def context_size(runtime: Runtime) -> int:
    """Return how many processes compute each sample together; 1 where this one is alone."""
    return 1 if world().alone else runtime.context_parallel


def share_context(network: Any, runtime: Runtime, device: torch.device) -> None:
    """Let processes compute each sample of a network together; its weights are whole in each.

    Each process' gradients are those of its tokens: their sum is the gradient. Raises ConfigError,
    ModelError.
    """
    # what was proven
    degree = context_size(runtime)
    where = f"runtime.context_parallel={degree}"
    if not isinstance(network, WanTransformer3DModel):
        kind = type(network).__name__
        raise ConfigError(f"{where}: is for Wan's videos, got a {kind}; leave it out")
    if runtime.compile:
        raise ConfigError(f"{where}: does not go with compile; leave one of them out")
    heads = int(network.config.num_attention_heads)
    if heads % degree:
        raise ModelError(f"{where}: expected a divisor of the network's {heads} heads")
    # diffusers' own
    config = ContextParallelConfig(ulysses_degree=degree, mesh=context_mesh(degree, device.type))
    try:
        with quiet(), _a_device():
            network.enable_parallelism(config=config)
    except ValueError as error:  # an attention back end that cannot
        raise ModelError(f"{where}: {error}") from error


@contextmanager
def _a_device() -> Iterator[None]:
    """Let diffusers divide by the number of accelerators where there is none."""
    count = torch.accelerator.device_count
    if count() == 0:
        torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = count
