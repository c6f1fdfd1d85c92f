"""A ``state.json`` that was changed and sealed again: one message that names file and key."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toykit import axes, toy

from flowrl.core.errors import CheckpointError
from flowrl.runs.open_run import load_run
from flowrl.training import checkpoint
from flowrl.training.checkpoint_state import checked_memory
from flowrl.training.trainer import Trainer

# a method with models that learn along, so that there are three optimizers
SETTING = (*axes("shapes/tdm_r1"), "surrogate.alone=0", "train.ema=0", "eval.weights=current")
WRONG: tuple[Any, ...] = (None, "x", [None], -1, math.nan, 10**400, True, {"a": 1})
# what the config, the machine or nothing says, so that the saved value is not used
FINE = [(("config",), "x"), (("parts", "copies", "state"), {"a": 1})]
UNUSED = {"lr", "foreach", "fused", "capturable"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """Return a trainer, and the checkpoint that it wrote after one iteration."""
    home = tmp_path_factory.mktemp("state")
    trainer = Trainer(toy(home, *SETTING))
    trainer.step()
    trainer.save(home / "saved")
    return trainer, home / "saved"


def keys(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield (*above, key)
        if isinstance(value[key], dict | list):
            yield from keys(value[key], (*above, key))


def with_value(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with another value at a path."""
    found = copy.deepcopy(state)
    node = found
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return found


def sealed(folder: Path, state: Any) -> None:
    """Write a state, and a manifest that fits."""
    (folder / checkpoint.STATE).write_text(json.dumps(state))
    (folder / checkpoint.MANIFEST).unlink(missing_ok=True)
    checkpoint._seal(folder)


def test_every_key_of_the_state(saved: tuple[Trainer, Path]) -> None:
    """Each key, with each wrong value: a message that names the folder and the key, or what is
    below the key and fits nothing."""
    trainer, folder = saved
    state = json.loads((folder / checkpoint.STATE).read_text())
    count = 0
    for path in keys(state):
        key = path[-1] if isinstance(path[-1], str) else path[-2]
        if path[0] == "monitors" or (key in UNUSED and path[0] != "iteration"):
            continue
        for value in WRONG:
            if json.dumps(value) == json.dumps(_at(state, path)) or (path, value) in FINE:
                continue
            sealed(folder, with_value(state, path, value))
            with pytest.raises(CheckpointError) as raised:
                trainer.load(folder)
            said = str(raised.value)
            named = str(key) in said or (value == {"a": 1} and "'a'" in said)
            named = named or (key == "files" and "holds the weights" in said)
            assert str(folder) in said and named, (path, value, said)
            assert "Error:" not in said, (path, value, said)
            count += 1
    # three optimizers of two parts and eleven settings each, and what is above them
    assert count > 3 * 11 * len(WRONG) / 2
    sealed(folder, state)
    trainer.load(folder)


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state


@pytest.mark.parametrize("value", ["x", [], -1, 1.5, None, 2**80])
def test_an_iteration_of_another_kind(
    saved: tuple[Trainer, Path], tmp_path: Path, value: Any
) -> None:
    """Under its own name, where the folder's is compared, and where a run is opened."""
    trainer, folder = saved
    there = checkpoint.checkpoint_folder(tmp_path, 1)
    trainer.save(there)
    state = json.loads((there / checkpoint.STATE).read_text())
    sealed(there, {**state, "iteration": value})
    (tmp_path / "config.yaml").write_text(trainer.config.dump())
    said = r"state\.json: iteration: expected a whole number from 0 to|after 1 iterations, got"
    with pytest.raises(CheckpointError, match=said):
        trainer.load(there)
    with pytest.raises(CheckpointError, match=said):
        load_run(there, plugins=["toykit"])


@pytest.mark.parametrize("text", ["[1]", "null", "[" * 100_000, "{"])
def test_a_state_that_is_no_object(saved: tuple[Trainer, Path], tmp_path: Path, text: str) -> None:
    trainer = saved[0]
    trainer.save(tmp_path / "c")
    (tmp_path / "c" / checkpoint.STATE).write_text(text)
    (tmp_path / "c" / checkpoint.MANIFEST).unlink()
    checkpoint._seal(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"state\.json: (expected an object|cannot be read)"):
        trainer.load(tmp_path / "c")


def test_a_part_of_a_moment_is_refused(saved: tuple[Trainer, Path], tmp_path: Path) -> None:
    """A number in place of tensors, which AdamW would fail on at its next step."""
    trainer = Trainer(saved[0].config)
    trainer.save(tmp_path / "first")
    state = json.loads((tmp_path / "first" / checkpoint.STATE).read_text())
    state["optimizer"]["scalars"] = {"0.exp_avg": 1.0}
    sealed(tmp_path / "first", state)
    with pytest.raises(CheckpointError, match="parameter 0: expected tensors exp_avg, exp_avg_sq"):
        trainer.load(tmp_path / "first")


# ----------------------------------------------------------------------------- the monitors' memory


def test_a_memory_as_runs_write_it() -> None:
    found = {"rewards": {"0": 0.5}, "judged": -1, "told": ["drift"], "norms": [1.0], "own": {}}
    assert checked_memory({**found, "stopped": None}) == {**found, "stopped": None}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kl_factor", "x"),
        ("norms", 3),
        ("start", {"diversity": 1.0}),
        ("lasting", []),
        ("rewards", {"0": "x"}),
        ("judged", "x"),
        ("firing", {"drift": 1.5}),
        ("findings", 1.5),
        ("stopped", ["drift"]),
        ("stopped", {"monitor": ["drift"]}),
        ("kl_factor", -1.0),
        ("lr_factor", 1e300),
        ("norms", [-1.0]),
        ("rest", {"drift": -1}),
        ("refreshed", {"slow": 1.5}),
    ],
)
def test_a_wrong_kind_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"monitors\.{key}"):
        checked_memory({key: value})
    with pytest.raises(ValueError, match="monitors: expected an object"):
        checked_memory([key])
