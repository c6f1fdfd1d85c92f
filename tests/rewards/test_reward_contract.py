"""Every reward keeps the contract that configs, training and the server rely on."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from clipkit import PROMPTS, batch_of, check_no_waits, check_slope, random_images
from scorerkit import SCORERS, Scorer
from torch import Tensor
from weightkit import Weights

from flowrl.core.abilities import differentiable
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.types import Reward
from rewards._common.http_client import read_secret
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


@pytest.fixture(scope="module")
def scored(scorers: Callable[[str], Scorer]) -> Callable[[str], Tensor]:
    """Return how to get the scores of a scorer's own batch, which is scored once."""
    return cache(lambda name: scorers(name).make()(scorers(name).batch()))


@pytest.fixture
def whole(
    request: pytest.FixtureRequest, scorer: Scorer, scored: Callable[[str], Tensor]
) -> Tensor:
    return scored(request.node.callspec.params["scorer"])


def test_every_scorer_is_in_the_battery() -> None:
    asks_others = {"remote", "vlm", "questions", "win_rate", "votes", "rubric"}
    compares = {"novelty", "consistency", "edit_verifier", "shapes_edit"}
    sees_more = {"moving_shapes", "videoalign", "pfc", "latent_preference"}  # videos, latents
    rest = asks_others | compares | sees_more
    assert {name.partition(",")[0] for name in SCORERS} | rest == set(NAMES)


def test_a_score_belongs_to_its_image_alone(scorer: Scorer, whole: Tensor) -> None:
    """In another order, in batches of 4, alone, and none for none; a number for each."""
    reward = scorer.make()
    assert isinstance(reward, Reward)
    assert whole.shape == (6,) and whole.dtype == torch.float32 and not whole.is_inference()
    assert whole.isfinite().all() and whole.unique().numel() > 1
    close = partial(torch.testing.assert_close, atol=scorer.slack, rtol=0)
    close(reward(scorer.batch(REST)), whole[REST])
    close(reward(scorer.batch([2])), whole[2:3])
    assert reward(scorer.batch([])).shape == (0,)
    if "batch" in inspect.signature(type(reward)).parameters:
        close(scorer.make(batch=4)(scorer.batch(REST)), whole[REST])


def test_a_tensor_and_its_png_score_the_same(scorer: Scorer, whole: Tensor) -> None:
    """A PNG keeps round(255 p); what is rounded away changes no bit of a score."""
    noise = torch.rand(scorer.images.shape, generator=torch.Generator().manual_seed(0))
    rough = (scorer.images + 0.3 * noise / 255).clamp(0, 1)
    assert not torch.equal(rough, scorer.images)
    assert torch.equal(scorer.make()(scorer.batch(images=rough)), whole)


def test_bfloat16_computes_float32_scores(scorer: Scorer, whole: Tensor) -> None:
    if scorer.half:
        half = scorer.make(dtype="bfloat16")(scorer.batch())
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
        with pytest.raises(DataError, match="line 3"):
            reward.check_record({"prompt": "a"}, "line 3")


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


# ------------------------------------------------------------------------------------ its gradient


class Followed(NamedTuple):
    """A reward that can be followed through its own scores."""

    make: Callable[..., Any]
    reads: int  # of `follow`: how many lists of prompts
    least: float  # length of the gradient of an image, at least
    gain: float  # of a step of 0.5 along it, at least


@pytest.fixture(params=["aesthetic", "hpsv2"])
def followed(request: pytest.FixtureRequest, weights: Weights) -> Followed:
    if request.param == "hpsv2":
        return Followed(partial(hpsv2, **weights.hps), 1, 1e-4, 0.0)
    return Followed(partial(aesthetic, **weights.aesthetic), 0, 1e-3, 0.01)


def test_the_gradient_is_that_of_finite_differences(followed: Followed) -> None:
    """A score itself is rounded to float32, so this sees what is computed before, in float64."""
    reward, words = followed.make(gradient=True), [PROMPTS[:2]] * followed.reads
    reward.towers.model.double()
    check_slope(lambda images: reward.follow(images, *words), followed.least)


def test_it_can_be_differentiated_in_that_mode_alone(followed: Followed) -> None:
    """An ascent along the gradient raises the score, of a batch in parts too; the usual mode rounds
    images and says so. The weights get no gradient."""
    reward, usual = followed.make(gradient=True, batch=2), followed.make()
    images = random_images(3, 64, 64).requires_grad_()
    batch = batch_of(images, PROMPTS[:3])
    before = reward(batch)
    (gradient,) = torch.autograd.grad(before.sum(), images)
    unit = gradient / gradient.flatten(1).norm(dim=1)[:, None, None, None]
    with torch.no_grad():
        after = reward(batch_of(images + 0.5 * unit, PROMPTS[:3]))
    assert differentiable(reward) and (after > before + followed.gain).all()
    assert not any(weight.requires_grad for weight in reward.towers.model.parameters())
    assert not differentiable(usual) and not usual(batch).requires_grad
    spoilt = images.detach().clone()
    spoilt[1, 0, 3, 4] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        reward(batch_of(spoilt, PROMPTS[:3]))
    if followed.reads:
        with pytest.raises(DataError, match="one prompt per image"):
            reward(batch._replace(prompts=PROMPTS[:2]))


def test_a_training_call_does_not_wait_for_the_device(followed: Followed) -> None:
    check_no_waits(partial(followed.make, gradient=True, batch=2))


# ------------------------------------------------------------------------- arguments of each reward

Row = tuple[dict[str, Any], str]  # arguments, and what the message says


def each(**values: list[Any]) -> list[Row]:
    """Return a row for each value, whose message names the argument."""
    return [({name: value}, name) for name, some in values.items() for value in some]


URL = "expected one like http"
ACS = {"template": "acs", "alignment": 0.0, "coherence": 0.0}
GEL = {"backend": "open_clip", "architecture": "ViT-L-14-quickgel"}
INFINITE = [0.0, -500.0, math.inf, math.nan]
WRONG: dict[str, list[Row]] = {
    "clip": [
        ({"backend": "jax"}, "transformers, open_clip"),
        ({"architecture": "ViT-L-14"}, "belong to backend 'open_clip'"),
        ({"resize": "squash"}, "belong to backend 'open_clip'"),
        ({"backend": "open_clip", "resize": "longest"}, "shortest, squash"),
        (GEL, "did you mean 'ViT-L-14-quickgelu'"),
        ({"backend": "open_clip", "architecture": "ViT-B-16-SigLIP"}, "no plain CLIP"),
        ({"backend": "open_clip", "architecture": "RN50"}, "no plain CLIP"),
        ({"scale": 0.0}, "scale: expected a finite number above 0"),
        *each(divide=[math.inf]),
    ],
    "pickscore": each(divide=[0.0], scale=[-1.0]),
    "hpsv2": each(version=["v3"], architecture=["ViT-H-15"], words=[[], [""], ["Real", 3], "Real"]),
    "jpeg": each(goal=["small"], quality=[0, 101], scale=INFINITE),
    "ocr": each(confidence=[-0.1, 1.0], threads=[-1]),
    "shapes": [({"mode": "lenient"}, "lenient")],
    "soft_shapes": [({"form": "square"}, 'form must be "linear" or "gaussian"'), *each(width=[0])],
    "geneval": [
        ({"mode": "loose"}, "mode: expected one of strict"),
        ({"detector": "yolo"}, "detector: expected one of mask2former"),
        *each(threshold=[1.0], max_objects=[0], max_overlap=[0.0]),
    ],
    "t2i_compbench": each(detector=["eyes"], parser=["nltk"], threshold=[1.0]),
    "dino": [({"size": 519}, "patch size 14, got 519"), *each(mode=["mean"], cache_mb=[-1])],
    "adversarial": each(
        patches=[0], d_steps=[0], policy_every=[0], hidden=[0], cls_weight=[1.5], lr=[0.0]
    ),
    "adversarial_layers": each(layers=[[], [2]], top=[0.0], temperature=[0.0], d_steps=[0]),
    "adversarial_pickscore": each(tune_layers=[0, 3], lr=[0.0], divide=[-1.0], dtype=["float16"]),
    "novelty": [({"most": 0}, "most >= 1 or null, got")],
    "votes": each(pairs=[0], each=[0], patience=[-1.0], look=[0.0]),
    "win_rate": [({"judge": {"fn": "jpeg"}, "max_pairs": 0}, "max_pairs")],
    "remote": [
        ({"urls": []}, "urls: expected one address or more"),
        ({"urls": ["http://a", "http://a/"]}, "each once"),
        ({"urls": ["10.0.0.5:8321"]}, "urls: expected addresses like"),
        *each(urls=[["ftp://a"], ["http://a:x"], ["http://a/score?x=1"]]),
        ({"urls": ["http://me:secret@a"]}, "token_env"),
        *each(timeout=[0.0, math.nan], retries=[-1], backoff=[-0.1], workers=[0], chunk=[0]),
        *each(wait_s=[-1.0]),
        ({"on_failure": "zero"}, "on_failure: expected one of wait, drop_group, stop"),
    ],
    "vlm": [
        *[({"url": url}, URL) for url in ("localhost:8080", "ftp://me:secret@a", "http://[::1")],
        *[({"url": url}, URL) for url in ("http://a:99999", "http://a/v1?key=1")],
        ({"url": "http://me:secret@host"}, "url"),
        ({"template": "essay"}, "template: expected one of pair_rank, point"),
        ({"timeout": 0.0}, "timeout: expected seconds > 0, got 0.0"),
        *each(timeout=[math.nan], backoff=[-1.0], max_tokens=[0]),
        ({"retries": -1}, "retries: expected 0 or more"),
        ({"workers": 0}, "workers: expected 1 or more"),
        ({"max_failed": 1.5}, "max_failed: expected a share"),
        ({**ACS, "style": 0.0}, "not all 0"),
        ({"template": "acs", "style": -1.0}, "weights >= 0"),
        ({"template": "flex", "w_overall": 0.0, "w_dims": 0.0}, "not both 0"),
        ({"template": "rating", "low": 5.0}, "expected low < high"),
        ({"template": "rating", "pattern": "("}, "pattern: expected a regular expression"),
        ({"template": "rating", "pattern": "score"}, "expected one group in 'score'"),
        ({"template": "point", "w_dims": 2.0}, "the template point makes no use of w_dims"),
        ({"template": "point", "style": 2.0}, "makes no use of alignment, coherence, style"),
        ({"template": "acs", "variants": True}, "makes no use of variants"),
        ({"extra": {"temperature": 1}}, "temperature cannot be given here"),
        ({"template_sha256": "9f"}, "needs a template_file"),
        ({"template_file": "/nowhere.txt"}, "cannot read it"),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str, weights: Weights) -> None:
    needed: dict[str, Any] = {"remote": {"urls": ["http://localhost:1"]}, "hpsv2": weights.hps}
    needed |= dict.fromkeys(("dino", "adversarial", "adversarial_layers"), {"path": weights.dino})
    needed |= {"adversarial_pickscore": weights.clip.parts, "votes": {"folder": "nowhere"}}
    needed["geneval"] = {"detector": "shapes"}
    reward = getattr(importlib.import_module(f"rewards.{name}"), name)
    for arguments, message in WRONG[name]:
        with pytest.raises(ConfigError) as error:
            reward(**{**needed.get(name, {}), **arguments})
        assert message in str(error.value), arguments
        assert "secret" not in str(error.value)


def test_a_config_cannot_send_any_secret_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that are not meant for rewards are refused, and are not shown, unless whoever
    starts the run lists them."""
    monkeypatch.setenv("CLOUD_SECRET_KEY", "not-for-judges")
    with pytest.raises(ConfigError, match="begins with FLOWRL_, REWARD_, JUDGE_") as error:
        read_secret("CLOUD_SECRET_KEY", "rewards.vlm: api_key_env")
    assert "not-for-judges" not in str(error.value)
    monkeypatch.setenv("FLOWRL_SECRETS", "OTHER, CLOUD_SECRET_KEY")
    assert read_secret("CLOUD_SECRET_KEY", "rewards.vlm: api_key_env") == "not-for-judges"


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
