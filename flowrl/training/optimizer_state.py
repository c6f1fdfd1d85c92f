"""The state of an optimizer as tensors and JSON, without pickle, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import CheckpointError
from flowrl.core.processes import shared_as

Tensors = dict[str, Tensor]


def optimizer_to_tensors(optimizer: torch.optim.Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Split the state of an AdamW-like optimizer into ({"<index>.<key>": tensor}, JSON state),
    without pickle.

    Parameters are numbered in the order of the optimizer's groups.
    """
    tensors: Tensors = {}
    scalars: dict[str, Any] = {}
    for index, parameter in _parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value.detach()
            else:
                scalars[f"{index}.{key}"] = value
    state = {"scalars": scalars, "groups": _groups(optimizer)}
    plain_json(state)
    return tensors, state


def optimizer_from_tensors(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    json_state: dict[str, Any],
    where: str = "the optimizer",
) -> None:
    """Put back what `optimizer_to_tensors` took, bit for bit, hyper-parameters included: `tensors`
    {"<parameter>.<key>": tensor}, mostly of the parameter's shape.

    The state is set directly: `Optimizer.load_state_dict` would cast float32 moments of bfloat16
    weights. Raises CheckpointError, which begins with `where`, if groups, numbers of parameters,
    kinds of settings, names or shapes differ; the optimizer is then unchanged.
    """
    # the same groups with as many parameters each, or it is another model's state
    saved = json_state["groups"]
    have = _groups(optimizer)
    if list(map(_outline, saved)) != list(map(_outline, have)):
        raise CheckpointError(
            f"{where} does not fit: expected groups of "
            f"{[group['params'] for group in saved]} parameters "
            f"with the saved settings, got {[group['params'] for group in have]}"
        )
    for place, (group, old) in enumerate(zip(have, saved, strict=True)):
        _check_kinds(group, old, f"{where}.groups[{place}]")
    # sort the state by parameter; names are "<index>.<key>", as in "0.exp_avg"
    state: dict[int, dict[str, Any]] = {index: {} for index, _ in _parameters(optimizer)}
    for name, value in {**json_state["scalars"], **tensors}.items():
        index, _, key = name.partition(".")
        if not index.isdecimal() or int(index) not in state:
            raise CheckpointError(
                f"{where} does not fit: it has no parameter for the saved state {name!r}"
            )
        state[int(index)][key] = value
    # check names and shapes before anything is changed
    for index, kept in state.items():
        _check_whole(optimizer, kept, f"{where}, parameter {index}")
    placed = [
        (parameter, _placed(index, parameter, state[index], optimizer, where))
        for index, parameter in _parameters(optimizer)
    ]
    # now change it, but for what follows from the machine; JSON turned tuples into lists
    for group, old in zip(optimizer.param_groups, saved, strict=True):
        for key, value in old.items():
            if isinstance(value, list):
                value = tuple(value)
            if key not in ("params", *FREE):
                group[key] = value
    for parameter, values in placed:
        optimizer.state.pop(parameter, None)
        if values:
            optimizer.state[parameter] = values


def check_settings(
    settings: Mapping[str, Any],
    json_state: Mapping[str, Any],
    where: str = "the checkpoint",
    section: str = "optimizer",
) -> None:
    """Raise CheckpointError if a config's section has another value than the saved groups were
    trained with; the learning rate may change."""
    for name, value in settings.items():
        now = list(value) if isinstance(value, tuple) else value
        for group in json_state["groups"]:
            if name != "lr" and name in group and group[name] != now:
                raise CheckpointError(
                    f"{section}.{name}: the config says {now!r}, and {where} was trained "
                    f"with {group[name]!r}; a run that goes on keeps it, so set it back, or begin "
                    "another run from these weights with train.start"
                )


FREE = ("foreach", "fused", "capturable")  # switches that follow from the machine
# switches that no step changes; others may be an optimizer's own memory, as of schedule-free ones
FIXED = ("maximize", "amsgrad", "nesterov", "decoupled_weight_decay", "differentiable")
MOMENTS: dict[Any, set[str]] = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"}}
SCALES = ("qmap", "absmax")  # of moments of 8 bits: they have shapes of their own


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
    yield from enumerate(
        parameter for group in optimizer.param_groups for parameter in group["params"]
    )


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups' settings, with the number of parameters in the parameters' place."""
    return [{**group, "params": len(group["params"])} for group in optimizer.param_groups]


def _outline(group: Mapping[str, Any]) -> tuple[list[str], int]:
    return sorted(group), group["params"]


def _check_kinds(group: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for a saved setting of another kind than an optimizer's, or one of
    `FIXED` that stands otherwise, such as that from descent to ascent."""
    for name, value in group.items():
        alike = _kind(saved[name]) == _kind(value)
        same = name not in FIXED or saved[name] == value
        if name != "params" and not (alike and same):
            raise CheckpointError(
                f"{where}.{name}: expected {value!r}, or a value like it, got {saved[name]!r}: it "
                "is not what a run saves; go on from another checkpoint"
            )


def _kind(value: Any) -> Any:
    """Return what a setting is: a switch, a text, a number, or so many of them."""
    if isinstance(value, list | tuple):
        return len(value)
    if value is None or isinstance(value, bool):
        return "switch"
    return "text" if isinstance(value, str) else "number"


def _check_whole(optimizer: torch.optim.Optimizer, kept: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError where an AdamW has only a part of a parameter's state, which it would
    fail on at its next step."""
    wanted = MOMENTS.get(type(optimizer), set())
    lacks = sorted(wanted - {name for name, value in kept.items() if isinstance(value, Tensor)})
    if kept and lacks:
        raise CheckpointError(
            f"{where}: expected tensors {', '.join(sorted(wanted))}, got only "
            f"{', '.join(sorted(kept))}: it is not what a run saves; go on from another checkpoint"
        )


def _group_of(parameter: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(each is parameter for each in group["params"]):
            return group
    raise KeyError("the optimizer has no such parameter")


def _placed(
    index: int,
    parameter: Tensor,
    values: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    where: str,
) -> dict[str, Any]:
    group = _group_of(parameter, optimizer)
    # otherwise torch keeps `step` on the CPU
    on_device = bool(group.get("fused") or group.get("capturable"))
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            if value.dim() and value.shape != parameter.shape and not key.startswith(SCALES):
                raise CheckpointError(
                    f"{where} does not fit: {key} of parameter {index} has shape "
                    f"{list(value.shape)}, "
                    f"expected {list(parameter.shape)}"
                )
            value = shared_as(value, parameter)
            place = parameter.device
            if key == "step" and not on_device:
                place = torch.device("cpu")
            value = value.to(place, copy=True)
        out[key] = value
    return out


def plain_json(state: dict[str, Any]) -> str:
    """Write plain JSON values with text keys; raise CheckpointError that names anything else."""

    # the path goes along, so that the message can say which entry is wrong
    def check(value: Any, where: str) -> None:
        """Raise CheckpointError for what JSON would not give back, at any depth."""
        if isinstance(value, dict):
            for key, child in value.items():
                if not isinstance(key, str):
                    raise CheckpointError(
                        f"{where}: expected text keys, got {key!r}, which JSON would turn into text"
                    )
                check(child, f"{where}.{key}")
        elif isinstance(value, list | tuple):
            for number, child in enumerate(value):
                check(child, f"{where}[{number}]")
        elif type(value) not in (str, int, float, bool, type(None)):
            raise CheckpointError(
                f"{where}: expected a plain JSON value (tensors have their own files), got "
                f"{type(value)}"
            )

    check(state, "state")
    return json.dumps(state, indent=1)
