"""Every reward keeps the contract that configs, training and the server rely on: what its file
says, and what its scores are."""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scorerkit import SCORERS, Scorer

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import Reward

TESTS = Path(__file__).resolve().parents[1]
NAMES = sorted(m.name for m in pkgutil.iter_modules([str(TESTS.parent / "rewards")]))
NAMES = [name for name in NAMES if not name.startswith("_")]
REST = [3, 0, 5, 1, 4, 2]  # another order of six images


# ------------------------------------------------------------------------------ what its scores are


@pytest.fixture(scope="module")
def scorers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scorer]:
    """Make each scorer once, and each reward of it with the same arguments once."""

    def make(name: str) -> Scorer:
        scorer = SCORERS[name](tmp_path_factory.mktemp("scorer"))
        return scorer._replace(make=cache(scorer.make))

    return cache(make)


@pytest.fixture(params=SCORERS)
def scorer(request: pytest.FixtureRequest, scorers: Callable[[str], Scorer]) -> Scorer:
    return scorers(request.param)


def test_every_scorer_is_in_the_battery() -> None:
    asks_others = {"remote", "vlm", "win_rate"}
    assert {name.partition(",")[0] for name in SCORERS} | asks_others == set(NAMES)


def test_a_score_belongs_to_its_image_alone(scorer: Scorer) -> None:
    """In another order, in batches of 1 and 4, alone, and none for none; a number for each."""
    reward = scorer.make()
    assert isinstance(reward, Reward)
    whole = reward(scorer.batch())
    assert whole.shape == (6,) and whole.dtype == torch.float32 and not whole.is_inference()
    assert whole.isfinite().all() and whole.unique().numel() > 1
    close = partial(torch.testing.assert_close, atol=scorer.slack, rtol=0)
    close(reward(scorer.batch(REST)), whole[REST])
    close(reward(scorer.batch([2])), whole[2:3])
    assert reward(scorer.batch([])).shape == (0,)
    if "batch" in inspect.signature(type(reward)).parameters:
        for size in (1, 4):
            close(scorer.make(batch=size)(scorer.batch(REST)), whole[REST])


def test_a_tensor_and_its_png_score_the_same(scorer: Scorer) -> None:
    """A PNG keeps round(255 p); what is rounded away changes no bit of a score."""
    noise = torch.rand(scorer.images.shape, generator=torch.Generator().manual_seed(0))
    rough = (scorer.images + 0.3 * noise / 255).clamp(0, 1)
    reward = scorer.make()
    assert not torch.equal(rough, scorer.images)
    assert torch.equal(reward(scorer.batch(images=rough)), reward(scorer.batch()))


def test_an_image_that_is_not_finite_is_refused(scorer: Scorer) -> None:
    for value in (torch.nan, torch.inf):
        broken = scorer.images.clone()
        broken[2, 0, 0, 0] = value
        with pytest.raises(DataError, match="NaN"):
            scorer.make()(scorer.batch(images=broken))


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"dtype": "int8"}, {"device": "abacus"}], ids=str)
def test_arguments_that_many_share_are_checked_in_each(
    scorer: Scorer, wrong: dict[str, Any]
) -> None:
    (name,) = wrong
    if name in inspect.signature(type(scorer.make())).parameters:
        with pytest.raises(ConfigError, match=name):
            scorer.make(**wrong)


# ------------------------------------------------------------------------------- what its file says


def look(*packages: tuple[str, Path]) -> list[dict[str, list[str]]]:
    """Return {file or folder: what is wrong with it} for each package, from one other process."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, str(TESTS / "kits" / "contractkit.py")]
    command += [str(part) for package in packages for part in package]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """What is said of rewards/, and of files that are right but for one line."""
    folder = tmp_path_factory.mktemp("battery")
    write_bad_files(folder / "kept")
    return look(("rewards", TESTS.parent), ("kept", folder))


@pytest.mark.integration
@pytest.mark.parametrize("name", NAMES)
def test_contract(found: list[dict[str, list[str]]], name: str) -> None:
    wrongs = found[0][name]
    assert not wrongs, "\n".join([f"rewards/{name}:", *(f"- {wrong}" for wrong in wrongs)])


@pytest.mark.integration
def test_every_file_is_looked_at(found: list[dict[str, list[str]]]) -> None:
    assert sorted(found[0]) == NAMES and {"shapes", "vlm", "remote"} <= set(NAMES)


# ------------------------------------------------------------------------------- the battery itself

GOOD = '''"""Score nothing, as in 1234.56789."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.types import RewardBatch


class {name}:
    """Score images [L, 3, H, W] -> [L]."""

    def __init__(
        self, *, url: str, mode: Literal["a", "b"] = "a", options: dict[str, Any] | None = None,
        sides: list[int] | None = None, device: str = "auto", batch: int = 32,
    ) -> None:
        self.mode = mode

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image."""
        return torch.zeros(len(batch.images))

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Accept every record."""
'''
# file -> (what of GOOD is replaced, by what, what the battery says)
BAD = {
    "heavy": (
        "import torch\n",
        "import safetensors\nimport torch\n",
        "importing it imports safetensors: move",
    ),
    "again": (
        "import torch\n",
        "import safetensors.torch\nimport torch\n",
        "imports safetensors: move",
    ),
    "broken": (
        "import torch\n",
        "import a_package_that_nobody_has\n",
        "cannot be imported: ModuleNotFoundError",
    ),
    "misnamed": ("class misnamed", "class other", "has no class misnamed of its own"),
    "borrowed": (
        "class borrowed",
        "from fractions import Fraction as borrowed\nclass it",
        "has no class borrowed of its own",
    ),
    "positional": ("self, *, url", "self, url", "arguments that are not keyword-only: url, mode"),
    "starred": (
        "batch: int = 32,",
        "batch: int = 32, **more: int",
        "arguments that are not keyword-only: **more",
    ),
    "untyped": ("url: str", "url", "cannot hold the type of the argument url: none is given"),
    "tensor": ("url: str", "url: Tensor", "cannot hold the type of the argument url"),
    "unknown": ("url: str", "url: Missing", "annotations of __init__ cannot be evaluated"),
    "reserved": (
        "url: str",
        "weight: float",
        "the parameter 'weight' has another meaning in a config",
    ),
    "mistyped": (
        'mode: Literal["a", "b"] = "a"',
        "mode: float = float('nan')",
        "does not reach the arguments mode",
    ),
    "placed": ('"auto"', '"cuda"', "the default of device is 'cuda', not 'auto'"),
    "silent": ('"""Score each image."""', "", "__call__ has no docstring"),
    "vague": ("[L, 3, H, W] -> [L]", "", "the class docstring names neither shapes nor a range"),
    "sourceless": ("1234.56789", "said", "no docstring names a source"),
    "loose": ("batch: RewardBatch", "batch: Any", "__call__ is not annotated"),
    "record": (
        "record: dict[str, Any], where: str",
        "record: dict[str, Any]",
        "check_record takes (record), the loop",
    ),
    "learner": (
        "def check_record(self, record: dict[str, Any], where: str)",
        "def update(self, batch: RewardBatch)",
        "needs all of",
    ),
}


def write_bad_files(package: Path) -> None:
    """Write a good file, and one for each row of BAD."""
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_helper.py").write_text("not Python")
    (package / "good.py").write_text(GOOD.format(name="good"))
    for name, (old, new, _) in BAD.items():
        text = GOOD.replace("{name}", name)
        assert old in text, name
        (package / f"{name}.py").write_text(text.replace(old, new))


@pytest.mark.integration
def test_the_battery_finds_each_fault_alone(found: list[dict[str, list[str]]]) -> None:
    """Files that are right but for one line: one complaint each. A library is found in both files
    that import it."""
    assert sorted(found[1]) == sorted(["good", *BAD]) and found[1]["good"] == []
    for name, (*_, message) in BAD.items():
        assert len(found[1][name]) == 1 and message in found[1][name][0], name
