"""The mean of several runs' weights: of tensors, and of what low-rank adapters add."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from flowrl.core.errors import CheckpointError

FIRST, SECOND = ".lora_A.", ".lora_B."
"""What peft calls the two matrices of an adapter: it adds ``scale B A``."""


def mean_weights(runs: Iterable[tuple[str, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Average the weights of several runs, (where from, {name: tensor}) -> {name: tensor}.

    Tensors are averaged, in float32 at least, but the matrices of LoRA, A [r, in] and B [out, r],
    are not: the mean of the products ``B A`` is, and `low_rank` makes adapters of rank r of it.
    What scales a product, alpha / r, has to be one number in all runs, which tensors do not say:
    `start_from` compares what it knows of it.

    Flow-OPD's cold start (2605.08063). **Differs:** its code averages the matrices of the teachers'
    LoRA, and the product of two means is not the mean of the products.

    Raises: CheckpointError for runs whose tensors differ in names or shapes, or are not finite.
    """
    first, sums, count = "", dict[str, Tensor](), 0
    adapters: dict[str, list[Tensor]] = {}
    for where, tensors in runs:
        shapes = {name: tuple(rows.shape) for name, rows in tensors.items()}
        if not count:
            first, known = where, shapes
        elif shapes != known:
            strange = {name for name, _ in shapes.items() ^ known.items()}
            raise CheckpointError(
                f"train.start: {where} and {first} have different tensors, {len(strange)} in name "
                f"or shape (first: {min(strange)}); runs are averaged that trained the same layers "
                "of the same model, by the same LoRA setting"
            )
        count += 1
        for name, rows in tensors.items():
            if not bool(rows.isfinite().all()):
                raise CheckpointError(
                    f"train.start: {where}: {name}: expected finite numbers, got NaN or infinity; "
                    "a mean of it would be none: leave this run out, or take an earlier checkpoint"
                )
            if FIRST in name or SECOND in name:
                adapters.setdefault(name, []).append(rows)
            else:
                sums[name] = rows.float() + sums[name] if name in sums else rows.float()
    found = {name: rows / count for name, rows in sums.items()}
    for name in [name for name in adapters if FIRST in name]:
        second = name.replace(FIRST, SECOND)
        found[name], found[second] = low_rank(adapters[name], adapters[second])
    return found


def low_rank(a: list[Tensor], b: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return A [r, in] and B [out, r], float32, whose product is nearest to the mean of n products
    of `b`, n of [out, r], and `a`, n of [r, in]; of convolutions A is [r, in, k, k] and B is
    [out, r, 1, 1], and so is what is returned.

    The nearest in the sum of squares is that of the r largest singular values (Eckart and Young,
    1936). The rows of A are orthogonal and of the length that the rows of `a` have on average, and
    B has the singular values: training goes on as it would with a drawn A, ours.
    """
    rank = len(a[0])
    down = torch.cat([rows.flatten(1) for rows in a]).double()
    up = torch.cat([rows.flatten(1) for rows in b], dim=1).double() / len(a)
    # of the thin product alone: B = Q_b R_b, A' = Q_a R_a, so that B A = Q_b (R_b R_a') Q_a'
    q_up, r_up = torch.linalg.qr(up)
    q_down, r_down = torch.linalg.qr(down.T)
    left, size, right = torch.linalg.svd(r_up @ r_down.T)
    kept = min(rank, len(size))
    length = down.norm(dim=1).mean().clamp_min(torch.finfo(torch.float32).tiny)
    new_a, new_b = down.new_zeros(rank, down.shape[1]), up.new_zeros(len(up), rank)
    new_a[:kept] = length * (q_down @ right[:kept].T).T
    new_b[:, :kept] = (q_up @ left[:, :kept]) * size[:kept] / length
    return new_a.float().reshape(a[0].shape), new_b.float().reshape(b[0].shape)
