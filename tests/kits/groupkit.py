"""Rewards laid out as the images of prompts, for tests of credits that compare these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import Tree


def drawn(rewards: list[list[float]], noises: int | None = None) -> tuple[Tensor, Tensor, Tree]:
    """Lay rewards out as draws below initial noises, `noises` for each prompt; None: one each."""
    sizes = [len(row) for row in rewards]
    per = sizes if noises is None else [noises] * len(sizes)
    roots = sum(per)
    parent, group, first = [-1] * roots, [], 0
    for place, (size, count) in enumerate(zip(sizes, per, strict=True)):
        group += [place] * count
        parent += [first + n * count // size for n in range(size)]
        first += count
    of = group + [group[up] for up in parent[roots:]]
    step = torch.tensor([0] * roots + [1] * sum(sizes))
    tree = Tree(torch.tensor(parent), step, step.float(), torch.tensor(of))
    return torch.tensor(sum(rewards, [])), torch.arange(roots, len(parent)), tree


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
