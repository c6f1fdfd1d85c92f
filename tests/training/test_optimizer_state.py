"""The optimizer's state in a checkpoint: a resumed one steps as one that was never stopped."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainkit import same_files

from flowrl.core.errors import CheckpointError
from flowrl.training.checkpoint import load, save
from flowrl.training.optimizer_state import optimizer_from_tensors, optimizer_to_tensors


def training(kind: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    first, second = model[0].parameters(), model[1].parameters()
    return model, kind([{"params": first, "lr": 0.03}, {"params": second}], lr=0.01, **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for n in range(start, stop):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_resumed_optimizer_equals_uninterrupted(
    tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    whole, optimizer = training(kind, **options)
    steps(whole, optimizer, 0, 7)
    # 4 steps, through a checkpoint, and 3 more
    first, optimizer = training(kind, **options)
    steps(first, optimizer, 0, 4)
    tensors, state = optimizer_to_tensors(optimizer)
    files = {"optimizer": tensors, "model": dict(first.state_dict())}
    save(tmp_path / "c", files, {"optimizer": state})
    files, state = load(tmp_path / "c")
    second, optimizer = training(kind, **options)
    second.load_state_dict(files["model"])
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.5  # both must come back from the checkpoint
    optimizer_from_tensors(optimizer, files["optimizer"], state["optimizer"])
    assert all(isinstance(group.get("betas", ()), tuple) for group in optimizer.param_groups)
    steps(second, optimizer, 4, 7)
    assert same_files({"model": dict(whole.state_dict())}, {"model": dict(second.state_dict())})


def test_float32_moments_of_bfloat16_weights_stay_float32() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    one, other = torch.optim.AdamW([weight]), torch.optim.AdamW([weight])
    moment = torch.tensor([1.0001, 2.0001])  # not representable in bfloat16
    kept = {"step": torch.tensor(3.0), "exp_avg": moment.clone(), "exp_avg_sq": moment.clone()}
    one.state[weight] = kept
    tensors, state = optimizer_to_tensors(one)
    optimizer_from_tensors(other, tensors, json.loads(json.dumps(state)))
    assert same_files({"it": other.state[weight]}, {"it": kept})


def test_optimizer_of_another_model_is_refused_and_unchanged() -> None:
    model, optimizer = training(torch.optim.AdamW)
    steps(model, optimizer, 0, 2)
    tensors, state = optimizer_to_tensors(optimizer)
    other = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(CheckpointError, match=r"groups of \[2, 2\] parameters.*got \[1\]"):
        optimizer_from_tensors(other, tensors, state)
    wide = [nn.Parameter(torch.zeros(9)) for _ in range(4)]
    other = torch.optim.AdamW([{"params": wide[:2]}, {"params": wide[2:]}], lr=0.5)
    message = r"exp_avg of parameter 0 has shape \[4, 3\], expected \[9\]"
    with pytest.raises(CheckpointError, match=message):
        optimizer_from_tensors(other, tensors, state)
    with pytest.raises(CheckpointError, match="no parameter for the saved state '9.x'"):
        optimizer_from_tensors(optimizer, {"9.x": torch.zeros(1)}, state)
    assert other.param_groups[0]["lr"] == 0.5 and not other.state


def test_optimizer_before_its_first_step() -> None:
    _, optimizer = training(torch.optim.AdamW)
    tensors, state = optimizer_to_tensors(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer_from_tensors(optimizer, tensors, state)
    assert tensors == {} and not optimizer.state


def test_settings_of_other_kinds_come_back() -> None:
    """What `plain_json` lets a run save: a text (of Muon), null within a list (of Adafactor), and a
    switch that the optimizer itself turned, as schedule-free ones do."""
    from flowrl.training.checkpoint_state import checked_state

    weight = nn.Parameter(torch.ones(2, 2))
    one = torch.optim.Muon([weight], adjust_lr_fn="match_rms_adamw")
    one.param_groups[0] |= {"bounds": (None, 1e-3), "train_mode": True, "drift": -0.5}
    weight.grad = torch.ones(2, 2)
    one.step()
    one.state[weight] |= {"seen": True, "shift": -1.0}
    tensors, state = optimizer_to_tensors(one)
    written = json.loads(json.dumps({"iteration": 1, "optimizer": state, "parts": {}}))
    read = checked_state(written, Path("state.json")).optimizer
    other = torch.optim.Muon([weight], adjust_lr_fn="match_rms_adamw")
    other.param_groups[0] |= {"bounds": (None, 1e-3), "train_mode": False, "drift": 0.0}
    optimizer_from_tensors(other, tensors, read)
    kept = other.param_groups[0]
    assert kept["adjust_lr_fn"] == "match_rms_adamw" and kept["bounds"] == (None, 1e-3)
    assert kept["train_mode"] is True and kept["drift"] == -0.5
    assert other.state[weight]["seen"] is True and other.state[weight]["shift"] == -1.0
    # a number in the place of a text is another's
    read["groups"][0]["adjust_lr_fn"] = 3
    with pytest.raises(CheckpointError, match=r"groups\[0\].adjust_lr_fn: expected"):
        optimizer_from_tensors(other, tensors, read)
