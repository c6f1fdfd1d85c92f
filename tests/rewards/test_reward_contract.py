"""Every reward keeps the contract that configs, training and the server rely on."""

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
from weightkit import Weights

from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.types import Reward
from rewards.aesthetic import aesthetic
from rewards.clip import clip
from rewards.dino import dino
from rewards.hpsv2 import hpsv2
from rewards.pickscore import pickscore

TESTS = Path(__file__).resolve().parents[1]
NAMES = sorted(m.name for m in pkgutil.iter_modules([str(TESTS.parent / "rewards")]))
NAMES = [name for name in NAMES if not name.startswith("_")]
REST = [3, 0, 5, 1, 4, 2]  # another order of six images
READS_PROMPTS = ("clip", "pickscore", "hpsv2", "hpsv3", "image_reward")
NEEDS_RECORDS = ("dino", "clip_reference", "geneval", "t2i_compbench", "shapes", "soft_shapes")


# ------------------------------------------------------------------------------ what its scores are


@pytest.fixture(scope="module")
def scorers(weights: Weights) -> Callable[[str], Scorer]:
    """Make each scorer once, and each reward of it with the same arguments once."""

    def make(name: str) -> Scorer:
        scorer = SCORERS[name](weights)
        return scorer._replace(make=cache(scorer.make))

    return cache(make)


@pytest.fixture(params=SCORERS)
def scorer(request: pytest.FixtureRequest, scorers: Callable[[str], Scorer]) -> Scorer:
    return scorers(request.param)


def test_every_scorer_is_in_the_battery() -> None:
    # or compare images, or judge videos
    asks_others = {
        "remote",
        "vlm",
        "questions",
        "win_rate",
        "novelty",
        "votes",
        "moving_shapes",
        "shapes_edit",
        "latent_preference",
        "videoalign",
        "pfc",
        "consistency",
        "edit_verifier",
        "rubric",
    }
    assert {name.partition(",")[0] for name in SCORERS} | asks_others == set(NAMES)


def test_a_score_belongs_to_its_image_alone(scorer: Scorer) -> None:
    """In another order, in batches of 4, alone, and none for none; a number for each."""
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
        close(scorer.make(batch=4)(scorer.batch(REST)), whole[REST])


def test_a_tensor_and_its_png_score_the_same(scorer: Scorer) -> None:
    """A PNG keeps round(255 p); what is rounded away changes no bit of a score."""
    noise = torch.rand(scorer.images.shape, generator=torch.Generator().manual_seed(0))
    rough = (scorer.images + 0.3 * noise / 255).clamp(0, 1)
    reward = scorer.make()
    assert not torch.equal(rough, scorer.images)
    assert torch.equal(reward(scorer.batch(images=rough)), reward(scorer.batch()))


def test_bfloat16_computes_float32_scores(scorer: Scorer) -> None:
    if scorer.half:
        whole, half = (scorer.make(**how)(scorer.batch()) for how in ({}, {"dtype": "bfloat16"}))
        assert half.dtype == torch.float32 and not torch.equal(half, whole)
        torch.testing.assert_close(half, whole, atol=scorer.half, rtol=0)


def test_broken_batches_are_refused(scorer: Scorer, request: pytest.FixtureRequest) -> None:
    """An image that is not finite, and another number of prompts or records than of images."""
    reward, whole = scorer.make(), scorer.batch()
    for value in (torch.nan, torch.inf):
        broken = scorer.images.clone()
        broken[2, 0, 0, 0] = value
        with pytest.raises(DataError, match="NaN"):
            reward(scorer.batch(images=broken))
    name = request.node.callspec.params["scorer"].partition(",")[0]
    if name in READS_PROMPTS:
        with pytest.raises(DataError, match="5 for 6"):
            reward(whole._replace(prompts=whole.prompts[:5]))
    if name in NEEDS_RECORDS:
        with pytest.raises(DataError, match="record"):
            reward(whole._replace(meta=whole.meta[:5]))


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"dtype": "int8"}, {"device": "abacus"}], ids=str)
def test_arguments_that_many_share_are_checked_in_each(
    scorer: Scorer, wrong: dict[str, Any]
) -> None:
    (name,) = wrong
    if name in inspect.signature(type(scorer.make())).parameters:
        with pytest.raises(ConfigError, match=name):
            scorer.make(**wrong)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (hpsv2, "xswu/HPSv2"),
        (pickscore, "yuvalkirstain/PickScore_v1"),
        (aesthetic, "camenduru/improved-aesthetic-predictor"),
        (partial(clip, path="nobody/nothing"), "nobody/nothing"),
        (partial(clip, path="nobody/nothing", backend="open_clip"), "nobody/nothing"),
        (partial(dino, path="no/such-model"), "no/such-model"),
    ],
    ids=str,
)
def test_weights_that_cannot_be_fetched_are_named(make: Callable[[], Any], where: str) -> None:
    with pytest.raises(ModelError, match=where):
        make()


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
def test_every_file_keeps_the_contract(found: list[dict[str, list[str]]]) -> None:
    assert sorted(found[0]) == NAMES and {"shapes", "vlm", "remote"} <= set(NAMES)
    assert found[0] == {name: [] for name in NAMES}


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
IMPORT, BORROWED = "import torch\n", "from fractions import Fraction as borrowed\nclass it"
CHECK, MODE = "record: dict[str, Any], where: str", 'mode: Literal["a", "b"] = "a"'
# file -> (what of GOOD is replaced, by what, what the battery says)
BAD = {
    "heavy": (IMPORT, f"import safetensors\n{IMPORT}", "importing it imports safetensors: move"),
    "again": (IMPORT, f"import safetensors.torch\n{IMPORT}", "imports safetensors: move"),
    "broken": (IMPORT, "import nobody_has_it\n", "cannot be imported: ModuleNotFoundError"),
    "misnamed": ("class misnamed", "class other", "has no class misnamed of its own"),
    "borrowed": ("class borrowed", BORROWED, "has no class borrowed of its own"),
    "positional": ("self, *, url", "self, url", "arguments that are not keyword-only: url, mode"),
    "starred": ("batch: int = 32,", "**more: int", "arguments that are not keyword-only: **more"),
    "untyped": ("url: str", "url", "cannot hold the type of the argument url: none is given"),
    "tensor": ("url: str", "url: Tensor", "cannot hold the type of the argument url"),
    "unknown": ("url: str", "url: Missing", "annotations of __init__ cannot be evaluated"),
    "reserved": ("url: str", "weight: float", "the parameter 'weight' has another meaning"),
    "mistyped": (MODE, "mode: float = float('nan')", "does not reach the arguments mode"),
    "placed": ('"auto"', '"cuda"', "the default of device is 'cuda', not 'auto'"),
    "silent": ('"""Score each image."""', "", "__call__ has no docstring"),
    "vague": ("[L, 3, H, W] -> [L]", "", "the class docstring names neither shapes nor a range"),
    "sourceless": ("1234.56789", "said", "no docstring names a source"),
    "loose": ("batch: RewardBatch", "batch: Any", "__call__ is not annotated"),
    "record": (CHECK, "record: dict[str, Any]", "check_record takes (record), the loop"),
    "learner": (f"check_record(self, {CHECK})", "update(self, batch: RewardBatch)", "needs all of"),
}


def write_bad_files(package: Path) -> None:
    """Write a good file, and one for each row of BAD."""
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_helper.py").write_text("not Python")
    (package / "good.py").write_text(GOOD.replace("{name}", "good"))
    for name, (old, new, _) in BAD.items():
        text = GOOD.replace("{name}", name)
        assert old in text, name
        (package / f"{name}.py").write_text(text.replace(old, new))


@pytest.mark.integration
def test_the_battery_finds_each_fault_alone(found: list[dict[str, list[str]]]) -> None:
    """One complaint each; a library is found in both files that import it."""
    assert sorted(found[1]) == sorted(["good", *BAD]) and found[1]["good"] == []
    for name, (*_, message) in BAD.items():
        assert len(found[1][name]) == 1 and message in found[1][name][0], name
