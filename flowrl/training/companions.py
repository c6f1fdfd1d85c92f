"""The models that learn along with the policy (`flowrl.algorithms.companions`): their optimizers,
and what a checkpoint keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowrl.core.errors import CheckpointError
from flowrl.training.checkpoint_files import CheckpointTensors
from flowrl.training.method import TRAINED_CALLS
from flowrl.training.optimizer_state import (
    Tensors,
    check_settings,
    optimizer_from_tensors,
    optimizer_to_tensors,
)

PREFIX = "optimizer-"


class Companions:
    """The companions of a run, by name."""

    def __init__(self, roles: dict[str, Any], params: list[nn.Parameter]) -> None:
        """params: of the policy; a companion is stepped while its copy is in their place."""
        self.roles = roles
        self.optimizers = {
            name: torch.optim.AdamW(params, foreach=True, **role.adamw)
            for name, role in roles.items()
        }

    def trains_policy(self, iteration: int) -> bool:
        """Say whether all let the policy learn in an iteration, counted from 0."""
        return all(role.trains_policy(iteration) for role in self.roles.values())

    def files(self) -> tuple[dict[str, Tensors], dict[str, Any]]:
        """Return what a checkpoint keeps of the optimizers: tensors by file, and plain JSON."""
        files, state = {}, {}
        for name, optimizer in self.optimizers.items():
            files[PREFIX + name], state[name] = optimizer_to_tensors(optimizer)
        return files, state

    def check(self, state: dict[str, Any], folder: Path) -> None:
        """Raise CheckpointError if a checkpoint has other companions, or ones that were trained
        with other settings than the config's; the learning rates may change."""
        if state.keys() != self.roles.keys():
            raise CheckpointError(
                f"{folder}: holds the optimizers of the models {sorted(state)} that learn along, "
                f"this config needs {sorted(self.roles)}; go on with the run's own config"
            )
        for name, optimizer in self.optimizers.items():
            settings = {key: optimizer.defaults[key] for key in ("betas", "eps", "weight_decay")}
            check_settings(settings, state[name], f"{folder}", name)

    def load(self, files: CheckpointTensors, state: dict[str, Any], folder: Path) -> None:
        """Take the optimizers' files out of a checkpoint's, and put them back; the learning rates
        stay those of the config."""
        for name, optimizer in self.optimizers.items():
            where = f"{folder}: companions.{name}"
            optimizer_from_tensors(optimizer, files.pop(PREFIX + name), state[name], where)
            for group in optimizer.param_groups:
                group["lr"] = self.roles[name].adamw["lr"]


def slow(name: str) -> str:
    """Name the copy that follows a companion."""
    return f"{name}-slow"


def copies_of(companions: dict[str, Any]) -> list[str]:
    """Name the copies of the weights that companions are, and those that follow them."""
    names = [*companions]
    return names + [slow(name) for name, role in companions.items() if "slow" in role.looks_at]


def calls_of(role: Any) -> int:
    """Return the network calls that training one row of a companion counts as."""
    return TRAINED_CALLS + len(role.looks_at)
