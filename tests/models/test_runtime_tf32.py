"""The option that lets float32 products be short on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flowrl.models.runtime import Runtime, set_up


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("asked", [False, True])
def test_products_are_short_only_if_asked(asked: bool) -> None:
    cpu = torch.device("cpu")
    set_up(nn.Linear(2, 2), Runtime(tf32=asked), dtype=torch.float32, device=cpu, trains=True)
    assert torch.backends.cuda.matmul.allow_tf32 is asked
