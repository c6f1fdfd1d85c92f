"""Rewards laid out as the images of prompts, for tests of credits that compare these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import Tree


def drawn(rewards: list[list[float]]) -> tuple[Tensor, Tensor, Tree]:
    """Lay rewards out as draws, each below an initial noise of its own."""
    sizes = torch.tensor([len(row) for row in rewards])
    count = int(sizes.sum())
    noise, group = torch.arange(count), torch.arange(len(sizes)).repeat_interleave(sizes)
    parent = torch.cat([torch.full_like(noise, -1), noise])
    step = torch.arange(2).repeat_interleave(count)
    tree = Tree(parent, step, step.float(), group.repeat(2))
    return torch.tensor(sum(rewards, [])), noise + count, tree


def images(credit: Callable[..., Tensor], *laid: Any, **options: Any) -> list[float]:
    found: list[float] = credit(*laid, **options)[laid[1]].tolist()
    return found


def batch(rewards: list[float], prompts: str) -> tuple[Tensor, Tensor, Tree, list[str]]:
    """Lay rewards out as leaves without anything above them; a letter names each prompt."""
    leaf = torch.arange(len(rewards))
    group = torch.tensor([ord(letter) for letter in prompts])
    tree = Tree(torch.full_like(leaf, -1), torch.zeros_like(leaf), torch.zeros(len(leaf)), group)
    return torch.tensor(rewards), leaf, tree, list(prompts)


def visit(credit: Any, rewards: list[float], prompts: str) -> list[float]:
    """Give credit for a visit of prompts, and let it be remembered."""
    *rest, texts = batch(rewards, prompts)
    found: list[float] = credit(*rest, prompts=texts).tolist()
    assert credit(*rest, prompts=texts).tolist() == found  # a call changes nothing
    credit.update(*rest, prompts=texts)
    return found
