from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import Tensor, nn

from flowrl.core.errors import CheckpointError, RunError
from flowrl.training.checkpoint import (
    checkpoint_folder,
    latest,
    load,
    prune,
    save,
    verify,
)
from flowrl.training.optimizer_state import optimizer_from_tensors, optimizer_to_tensors

TENSORS = {
    "weights": {
        "a": torch.arange(6.0).reshape(2, 3),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
    },
    "rng": {"torch": torch.get_rng_state(), "step": torch.tensor(7)},
    "empty": {},
}
STATE: dict[str, Any] = {
    "iteration": 20,
    "lr": 0.1 + 0.2,
    "none": None,
    "list": [1, "ü"],
    "big": 2**80,
}


def same(left: dict[str, dict[str, Tensor]], right: dict[str, dict[str, Tensor]]) -> bool:
    return left.keys() == right.keys() and all(
        left[file].keys() == right[file].keys()
        and all(
            t.dtype == right[file][n].dtype and torch.equal(t, right[file][n])
            for n, t in left[file].items()
        )
        for file in left
    )


def test_round_trip_and_nothing_else_in_the_folder(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path, 20)
    save(folder, TENSORS, STATE)
    tensors, state = load(folder)
    assert same(tensors, TENSORS) and state == STATE
    assert folder == tmp_path / "checkpoints" / "000020"
    assert [item.name for item in folder.parent.iterdir()] == ["000020"]


def test_shared_and_strided_tensors_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tied = {
        "w": {
            "base": base,
            "same": base,
            "row": base[1],
            "turned": base.T,
            "grad": nn.Parameter(base),
        }
    }
    save(tmp_path / "c", tied, {})
    assert same(
        load(tmp_path / "c")[0],
        {"w": {name: tensor.detach() for name, tensor in tied["w"].items()}},
    )


def test_saving_twice_replaces(tmp_path: Path) -> None:
    save(tmp_path / "c", TENSORS, {"n": 1})
    save(tmp_path / "c", {}, {"n": 2})
    assert load(tmp_path / "c") == ({}, {"n": 2})
    assert [item.name for item in tmp_path.iterdir()] == ["c"]


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk_in_rust(*_: Any, **__: Any) -> None:
    raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("training.checkpoint.save_file", full_disk),
        ("training.checkpoint.save_file", full_disk_in_rust),
        ("training.checkpoint._seal", full_disk),
        ("core.files._flush", full_disk),
        ("core.files.os.replace", full_disk),
    ],
)
def test_full_disk_leaves_what_was_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    fault: Callable[..., None],
    there: bool,
) -> None:
    folder = tmp_path / "c"
    if there:
        save(folder, {}, {"n": 1})
    monkeypatch.setattr(f"flowrl.{target}", fault)
    with pytest.raises(RunError, match="No space left on device") as caught:
        save(folder, TENSORS, {"n": 2})
    assert str(folder) in str(caught.value)
    assert [item.name for item in tmp_path.iterdir()] == ["c"] * there
    assert not there or load(folder)[1] == {"n": 1}


def test_failing_second_rename_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", {}, {"n": 1})
    replace, calls = os.replace, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            full_disk()
        replace(source, target)

    monkeypatch.setattr("flowrl.core.files.os.replace", second_fails)
    with pytest.raises(RunError):
        save(tmp_path / "c", {}, {"n": 2})
    assert load(tmp_path / "c")[1] == {"n": 1} and [item.name for item in tmp_path.iterdir()] == [
        "c"
    ]


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # a file where a folder is needed fails for root too
    with pytest.raises(RunError, match="Not a directory|File exists"):
        save(tmp_path / "file" / "c", {}, {})


@pytest.mark.parametrize(
    "state", [{"t": torch.ones(1)}, {1: 2}, {"a": {"b": [{3: 4}]}}, {"s": {1, 2}}, {"x": b"bytes"}]
)
def test_state_that_json_would_change_is_refused(tmp_path: Path, state: dict[Any, Any]) -> None:
    with pytest.raises(CheckpointError, match="state"):
        save(tmp_path / "c", {}, state)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a.safetensors"])
def test_file_names_are_plain(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="without an ending"):
        save(tmp_path / "c", {name: {}}, {})


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize(
    "damage", [flip, lambda file: file.write_bytes(file.read_bytes()[:-3]), Path.unlink]
)
def test_damage_names_the_file(tmp_path: Path, name: str, damage: Callable[[Path], Any]) -> None:
    save(tmp_path / "c", TENSORS, STATE)
    damage(tmp_path / "c" / name)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path / "c")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_altered_byte_is_found(
    tmp_path_factory: pytest.TempPathFactory, position: int, change: int
) -> None:
    folder = tmp_path_factory.mktemp("any") / "c"
    save(folder, {"w": {"a": torch.arange(3.0)}}, {"n": 1})
    files = [folder / "w.safetensors", folder / "state.json"]
    file = files[position % 2]
    data = bytearray(file.read_bytes())
    data[position % len(data)] ^= change
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=file.name):
        verify(folder)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[]", "torn or altered"),
        ('{"format": 99, "files": {}}', "expected format 1, got 99"),
        (
            '{"format": 1, "files": {"../../x": {"size": 1, "sha256": ""}, '
            '"state.json": {"size": 1, "sha256": ""}}}',
            "altered",
        ),
        ('{"format": 1, "files": {}}', "altered"),
    ],
)
def test_strange_manifests(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=part):
        load(tmp_path)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load(tmp_path / "none")
    assert latest(tmp_path) is None and latest(tmp_path / "none") is None


def test_latest_skips_torn_ones_with_a_warning(tmp_path: Path) -> None:
    for iteration in (5, 20, 100):
        save(checkpoint_folder(tmp_path, iteration), {}, {"n": iteration})
    (tmp_path / "checkpoints" / "000200.tmp-1-ab").mkdir()
    assert latest(tmp_path) == checkpoint_folder(tmp_path, 100)
    flip(checkpoint_folder(tmp_path, 100) / "state.json")
    with pytest.warns(UserWarning, match="000100.*state.json"):
        assert latest(tmp_path) == checkpoint_folder(tmp_path, 20)


def names(run: Path) -> list[str]:
    return sorted(item.name for item in (run / "checkpoints").iterdir())


def test_prune_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4, 1_000_000):
        save(checkpoint_folder(tmp_path, iteration), {}, {})
    (checkpoint_folder(tmp_path, 1_000_000) / "state.json").unlink()
    (tmp_path / "checkpoints" / "000009.tmp-1-ab").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    prune(tmp_path, 2)
    assert names(tmp_path) == ["000003", "000004", "1000000", "notes"]
    prune(tmp_path, 5)
    assert names(tmp_path) == ["000003", "000004", "1000000", "notes"]
    with pytest.raises(CheckpointError, match="at least 1"):
        prune(tmp_path, 0)


def test_prune_warns_where_it_cannot_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (1, 2):
        save(checkpoint_folder(tmp_path, iteration), {}, {})
    monkeypatch.setattr("flowrl.training.checkpoint.shutil.rmtree", full_disk)
    with pytest.warns(UserWarning, match="cannot delete.*000001"):
        prune(tmp_path, 1)


def training(
    optimizer_class: type[torch.optim.Optimizer], **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 0.03},
        {"params": model[1].parameters()},
    ]
    return model, optimizer_class(groups, lr=0.01, **settings)  # type: ignore[call-arg]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for n in range(start, stop):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_resumed_optimizer_equals_uninterrupted(
    tmp_path: Path, optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    whole, optimizer = training(optimizer_class, **options)
    steps(whole, optimizer, 0, 7)

    first, optimizer = training(optimizer_class, **options)
    steps(first, optimizer, 0, 4)
    tensors, state = optimizer_to_tensors(optimizer)
    save(
        tmp_path / "c",
        {"optimizer": tensors, "model": dict(first.state_dict())},
        {"optimizer": state},
    )

    files, state = load(tmp_path / "c")
    second, optimizer = training(optimizer_class, **options)
    second.load_state_dict(files["model"])
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.5  # both must come back from the checkpoint
    optimizer_from_tensors(optimizer, files["optimizer"], state["optimizer"])
    assert all(isinstance(group.get("betas", ()), tuple) for group in optimizer.param_groups)
    steps(second, optimizer, 4, 7)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


def test_float32_moments_of_bfloat16_weights_stay_float32() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight])
    moment = torch.tensor([1.0001, 2.0001])  # not representable in bfloat16
    optimizer.state[weight] = {
        "step": torch.tensor(3.0),
        "exp_avg": moment.clone(),
        "exp_avg_sq": moment.clone(),
    }
    tensors, state = optimizer_to_tensors(optimizer)
    other = torch.optim.AdamW([weight])
    optimizer_from_tensors(other, tensors, json.loads(json.dumps(state)))
    assert (
        torch.equal(other.state[weight]["exp_avg"], moment)
        and other.state[weight]["exp_avg"].dtype == torch.float32
    )


def test_optimizer_of_another_model_is_refused_and_unchanged() -> None:
    model, optimizer = training(torch.optim.AdamW)
    steps(model, optimizer, 0, 2)
    tensors, state = optimizer_to_tensors(optimizer)
    narrow = nn.Parameter(torch.zeros(1))
    other = torch.optim.AdamW([narrow], lr=0.5)
    with pytest.raises(CheckpointError, match=r"groups of \[2, 2\] parameters.*got \[1\]"):
        optimizer_from_tensors(other, tensors, state)
    shapes = [nn.Parameter(torch.zeros(9)) for _ in range(4)]
    other = torch.optim.AdamW([{"params": shapes[:2]}, {"params": shapes[2:]}], lr=0.5)
    with pytest.raises(
        CheckpointError, match=r"exp_avg of parameter 0 has shape \[4, 3\], expected \[9\]"
    ):
        optimizer_from_tensors(other, tensors, state)
    with pytest.raises(CheckpointError, match="no parameter for the saved state '9.x'"):
        optimizer_from_tensors(optimizer, {"9.x": torch.zeros(1)}, state)
    assert other.param_groups[0]["lr"] == 0.5 and not other.state


def test_optimizer_before_its_first_step() -> None:
    _, optimizer = training(torch.optim.AdamW)
    tensors, state = optimizer_to_tensors(optimizer)
    assert tensors == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer_from_tensors(optimizer, tensors, state)
    assert not optimizer.state
