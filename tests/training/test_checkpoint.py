"""Checkpoints on disk: whole or not at all, found again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import nn
from trainkit import same_files

from flowrl.core.errors import CheckpointError, RunError
from flowrl.training.checkpoint import checkpoint_folder, latest, load, prune, save, verify

HALF = torch.tensor([1.5], dtype=torch.bfloat16)
TENSORS = {
    "weights": {"a": torch.arange(6.0).reshape(2, 3), "half": HALF},
    "rng": {"torch": torch.get_rng_state(), "step": torch.tensor(7)},
    "empty": {},
}
STATE: dict[str, Any] = {"iteration": 20, "lr": 0.3, "none": None, "list": [1, "ü"], "big": 2**80}


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_round_trip_and_nothing_else_in_the_folder(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path, 20)
    assert folder == tmp_path / "checkpoints" / "000020"
    save(folder, TENSORS, STATE)
    tensors, state = load(folder)
    assert same_files(tensors, TENSORS) and state == STATE
    save(folder, {}, {"n": 2})  # replaces
    assert load(folder) == ({}, {"n": 2}) and names(folder.parent) == ["000020"]


def test_shared_and_strided_tensors_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tied = {"base": base, "same": base, "row": base[1], "turned": base.T}
    save(tmp_path / "c", {"w": tied | {"grad": nn.Parameter(base)}}, {})
    assert same_files(load(tmp_path / "c")[0], {"w": tied | {"grad": base}})


# -------------------------------------------------------------------------------- whole or nothing


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk_in_rust(*_: Any, **__: Any) -> None:
    raise SafetensorError("I/O error: No space left on device (os error 28)")


def full_disk_at_the_second_call() -> Callable[..., None]:
    replace, calls = os.replace, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            full_disk()
        replace(source, target)

    return second_fails


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("training.checkpoint.save_file", full_disk),
        ("training.checkpoint.save_file", full_disk_in_rust),
        ("training.checkpoint._seal", full_disk),
        ("core.files._flush", full_disk),
        ("core.files.os.replace", full_disk),
        ("core.files.os.replace", None),  # the second: the old one is put back
    ],
)
def test_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, fault: Any, there: bool
) -> None:
    folder = tmp_path / "c"
    if there:
        save(folder, {}, {"n": 1})
    elif fault is None:
        return  # there is no second rename
    monkeypatch.setattr(f"flowrl.{target}", fault or full_disk_at_the_second_call())
    with pytest.raises(RunError, match="No space left on device") as caught:
        save(folder, TENSORS, {"n": 2})
    assert str(folder) in str(caught.value)
    assert names(tmp_path) == ["c"] * there
    assert not there or load(folder)[1] == {"n": 1}


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


# ------------------------------------------------------------------------------------------ damage


def flip(file: Path, at: int = -1, change: int = 1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= change
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_damage_names_the_file(tmp_path: Path, name: str, damage: Callable[[Path], Any]) -> None:
    save(tmp_path / "c", TENSORS, STATE)
    damage(tmp_path / "c" / name)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path / "c")


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["w.safetensors", "state.json"]), st.integers(0, 10**6), st.integers(1, 255))
def test_any_altered_byte_is_found(
    tmp_path_factory: pytest.TempPathFactory, name: str, position: int, change: int
) -> None:
    folder = tmp_path_factory.mktemp("any") / "c"
    save(folder, {"w": {"a": torch.arange(3.0)}}, {"n": 1})
    flip(folder / name, position % (folder / name).stat().st_size, change)
    with pytest.raises(CheckpointError, match=name):
        verify(folder)


OUTSIDE = '"../../x": {"size": 1, "sha256": ""}, "state.json": {"size": 1, "sha256": ""}'


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[]", "torn or altered"),
        ('{"format": 99, "files": {}}', "expected format 3 or 4, got 99"),
        (f'{{"format": 3, "files": {{{OUTSIDE}}}}}', "altered"),
        ('{"format": 3, "files": {}}', "altered"),
        (None, "no such checkpoint"),
    ],
)
def test_strange_manifests(tmp_path: Path, text: str | None, part: str) -> None:
    folder = tmp_path / "c"
    if text is not None:
        folder.mkdir()
        (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=part):
        load(folder)


# --------------------------------------------------------------------------------- which are there


def test_latest_skips_torn_ones_with_a_warning(tmp_path: Path) -> None:
    assert latest(tmp_path) is None and latest(tmp_path / "none") is None
    for iteration in (5, 20, 100):
        save(checkpoint_folder(tmp_path, iteration), {}, {"n": iteration})
    (tmp_path / "checkpoints" / "000200.tmp-1-ab").mkdir()
    assert latest(tmp_path) == checkpoint_folder(tmp_path, 100)
    flip(checkpoint_folder(tmp_path, 100) / "state.json")
    with pytest.warns(UserWarning, match="000100.*state.json"):
        assert latest(tmp_path) == checkpoint_folder(tmp_path, 20)


def test_latest_skips_one_under_another_name(tmp_path: Path) -> None:
    """Two whole checkpoints whose folders were swapped: neither is what its name says."""
    places = {n: checkpoint_folder(tmp_path, n) for n in (1, 2, 3)}
    for iteration, place in places.items():
        save(place, {}, {"iteration": iteration})
    places[3].rename(tmp_path / "aside")
    places[2].rename(places[3])
    (tmp_path / "aside").rename(places[2])
    with pytest.warns(UserWarning, match=r"000003: expected .* after 3 iterations, .* after 2"):
        assert latest(tmp_path) == places[1]


def test_prune_keeps_the_newest_complete_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (1, 2, 3, 4, 1_000_000):
        save(checkpoint_folder(tmp_path, iteration), {}, {})
    (checkpoint_folder(tmp_path, 1_000_000) / "state.json").unlink()
    (tmp_path / "checkpoints" / "000009.tmp-1-ab").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    for keep in (2, 5):
        prune(tmp_path, keep)
        assert names(tmp_path / "checkpoints") == ["000003", "000004", "1000000", "notes"]
    with pytest.raises(CheckpointError, match="at least 1"):
        prune(tmp_path, 0)
    monkeypatch.setattr("flowrl.training.checkpoint.shutil.rmtree", full_disk)
    with pytest.warns(UserWarning, match="cannot delete.*000003"):
        prune(tmp_path, 1)
