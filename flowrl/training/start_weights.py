"""The weights that a run begins with, where these are not the model's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from flowrl.core.abilities import TakesLora
from flowrl.core.devices import check_wide, kinds_of
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.processes import shared_as, whole
from flowrl.core.shipped_files import resource
from flowrl.training import checkpoint
from flowrl.training.checkpoint_state import KEY, check_meaning, identity_of
from flowrl.training.weights import put_saved, put_weights


def check_start(start: str | Sequence[str], key: str = "train.start") -> None:
    """Raise ConfigError unless a key such as `train.start` is empty, or names weights that are
    there; of a list all of them. Raises CheckpointError for runs of different LoRA alphas."""
    _paths_of(start, key)


def names_of(start: str | Sequence[str]) -> list[str]:
    """List the weights that a key such as `train.start` names: one text, several, or none."""
    if not start:
        return []
    return [start] if isinstance(start, str) else [*start]


def _paths_of(start: str | Sequence[str], key: str) -> list[Path]:
    """Return the files and folders of these weights. Raises as `check_start`."""
    paths = [_file_of(one, key) for one in names_of(start)]
    _check_alike(paths, key)
    return paths


def start_from(
    start: str | Sequence[str],
    params: dict[str, nn.Parameter],
    key: str = "train.start",
    model: Any = None,
) -> None:
    """Put the weights that a key such as `train.start` names into the parameters of a model: a
    safetensors file of them, a checkpoint, or a run's newest one, of which the averaged weights are
    taken if there are any; or a LoRA file of another program, which the model reads. Of several
    the mean, as `mean_weights` says.

    Raises: ConfigError if there is none, CheckpointError if they do not fit the model, or differ
    in their tensors or LoRA's alpha, or are to be averaged and not finite; ModelError for a LoRA
    file that cannot be taken whole.
    """
    paths = _paths_of(start, key)
    for path in paths:
        if _of_lora(path, params, model) is None:
            check_meaning(_state_of(path), identity_of(model), path)
    if len(paths) > 1:
        runs = ((str(path), _tensors(path, params, key, model)) for path in paths)
        put_weights(params, _of_kinds(mean_weights(runs), params), paths[0])
        return
    path, update = paths[0], _of_lora(paths[0], params, model)
    if update is not None:
        _put_lora(update, params)
    elif path.is_dir():
        files, _ = checkpoint.open_checkpoint(path)
        put_saved(params, files, files.averaged)
    else:
        put_weights(params, _of_kinds(_tensors(path, params, key, model), params), path)


@torch.no_grad()
def _put_lora(update: Iterator[tuple[str, Tensor]], params: Mapping[str, nn.Parameter]) -> None:
    """Begin with a LoRA of another program, one parameter after the other."""
    for name, rows in update:
        params[name].copy_(shared_as(rows.to(params[name].dtype), params[name]))


def _of_lora(
    path: Path, params: Mapping[str, nn.Parameter], model: Any
) -> Iterator[tuple[str, Tensor]] | None:
    """Return what a LoRA of another program, or of a run that trained other parameters than these,
    makes of the parameters that it changes; None for other weights. Raises CheckpointError for what
    is no safetensors file."""
    if path.is_file():
        try:
            with safe_open(path, framework="pt") as stored:
                if not params.keys().isdisjoint(stored.keys()):
                    return None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: no safetensors file: {error}") from error
    elif (path / checkpoint.MANIFEST).is_file():
        return None
    # alpha: of a run that trained LoRA, where this one trains whole layers
    if not isinstance(model, TakesLora):
        return None
    return model.from_lora(path, _alpha_of(path))


def _check_alike(paths: Sequence[Path], key: str) -> None:
    """Refuse runs that give LoRA another alpha: what an adapter adds is scaled by alpha / rank. A
    file with no checkpoint around it is taken to be as the others."""
    if len(paths) < 2:
        return
    known = [(path, alpha) for path in paths if (alpha := _alpha_of(path)) is not None]
    for path, alpha in known[1:]:
        first, other = known[0]
        if alpha != other:
            raise CheckpointError(
                f"{key}: {path} has LoRA of alpha {alpha:g}, and {first} of alpha {other:g}; "
                "expected runs of one alpha: train them with the same model.lora, or begin with "
                "one of them"
            )


def _alpha_of(path: Path) -> float | None:
    """Return LoRA's alpha by the checkpoint that a file is in; None where it is in none, or of a
    run without LoRA."""
    kept = _state_of(path).get(KEY)
    alpha = kept.get("model.lora.alpha") if isinstance(kept, Mapping) else None
    return float(alpha) if isinstance(alpha, int | float) else None


def _state_of(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, given its folder or a file in it; {} where there is none,
    or it is damaged."""
    file = (path if path.is_dir() else path.parent) / checkpoint.STATE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _tensors(
    path: Path, params: Mapping[str, nn.Parameter], key: str, model: Any
) -> dict[str, Tensor]:
    """Read a safetensors file, or a checkpoint's weights, whole -> {name: tensor}."""
    update = _of_lora(path, params, model)
    if update is not None:
        return {name: whole(p.detach()).cpu() for name, p in params.items()} | dict(update)
    if path.is_dir():
        files, _ = checkpoint.open_checkpoint(path)
        return files[files.averaged]
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{key}: {path}: no safetensors file: {error}") from error
    check_wide(kinds_of(found), path)
    return found


def _of_kinds(
    tensors: Mapping[str, Tensor], params: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return tensors in the kinds of the parameters of their names; others as they are."""
    return {
        name: rows.to(params[name]) if name in params else rows for name, rows in tensors.items()
    }


def _file_of(start: str, key: str) -> Path:
    """Return the file or checkpoint folder that a key names. Raises ConfigError."""
    try:
        path = resource(start)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    if path.is_file() or (path / checkpoint.MANIFEST).is_file():
        return path
    newest = checkpoint.latest(path)
    if newest is None and any(path.glob("*.safetensors")):
        return path  # of one or two LoRA files: the model sees which
    if newest is None:
        raise ConfigError(
            f"{key}: there are no weights at {start}: expected a .safetensors file, a "
            "checkpoint or a run with one, of the same model and layers, or a folder with a LoRA"
        )
    return newest


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
            elif name in sums:
                sums[name] = rows.float() + sums[name]
            else:
                sums[name] = rows.float()
    found = {name: rows / count for name, rows in sums.items()}
    for name, first_matrices in adapters.items():
        if FIRST in name:
            second = name.replace(FIRST, SECOND)
            found[name], found[second] = low_rank(first_matrices, adapters[second])
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
