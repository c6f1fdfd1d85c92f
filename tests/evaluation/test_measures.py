"""Measures of sets of images against closed forms, scipy, torchmetrics and the reference's
fixtures."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from scipy.linalg import sqrtm
from weightkit import Weights

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.measures.features import (
    distance,
    encoder,
    fid,
    inception,
    inception_score,
    kid,
    lpips,
    vendi,
)
from flowrl.evaluation.measures.of_images import Tools, check_measures, measure_images
from flowrl.evaluation.statistics import mmhm
from flowrl.evaluation.suites.catalogue import SUITES
from rewards.clip import clip

CPU = torch.device("cpu")


def test_vendi_and_distance_in_closed_form() -> None:
    """n orthogonal images are n, equal ones 1; of two directions at cosine c the eigenvalues are
    (1 +- c) / 2; the distance is the mean of all pairs, one by one."""
    assert vendi(torch.eye(5)) == pytest.approx(5) and distance(torch.eye(5)) == pytest.approx(1)
    same = torch.ones(7, 3) * torch.arange(1, 8)[:, None]
    assert vendi(same) == pytest.approx(1) and distance(same) == pytest.approx(0, abs=1e-12)
    pair = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    assert vendi(pair) == pytest.approx(math.exp(-0.8 * math.log(0.8) - 0.2 * math.log(0.2)))
    assert distance(pair) == pytest.approx(0.4)
    # wide and tall: both Gram matrices have the same eigenvalues
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).double()
    rows = x / x.norm(dim=1, keepdim=True)
    shares = torch.linalg.eigvalsh(rows @ rows.T / 6)
    assert vendi(x) == pytest.approx(float((-(shares * shares.log()).sum()).exp()))
    doubled = torch.cat([x, x])  # twice the same images are no more different images
    assert vendi(doubled) == pytest.approx(vendi(x))
    gaps = [1 - float(rows[i] @ rows[j]) for i in range(6) for j in range(i)]
    assert distance(x) == pytest.approx(sum(gaps) / 15)
    for wrong in (torch.zeros(3, 2), torch.full((3, 2), math.nan), torch.ones(0, 2)):
        with pytest.raises(DataError):
            vendi(wrong)


def test_fid_kid_and_inception_score_in_closed_form() -> None:
    """FID by scipy's matrix root; KID of two whole sets by its definition, a cubic kernel without
    the diagonals; IS of images that are sure and all different is their number."""
    random = np.random.default_rng(0)
    a = random.normal(size=(60, 4)) @ random.normal(size=(4, 4))
    b = random.normal(size=(50, 4)) + 0.5
    ours, others = torch.from_numpy(a), torch.from_numpy(b)
    s, t = np.cov(a.T), np.cov(b.T)
    gap = ((a.mean(0) - b.mean(0)) ** 2).sum()
    expected = gap + np.trace(s + t - 2 * sqrtm(s @ t).real)
    assert fid(ours, others) == pytest.approx(expected, rel=1e-6)
    assert fid(ours, ours) == pytest.approx(0, abs=1e-6)
    b = random.normal(size=(60, 4)) + 0.5

    def kernel(x: Any, y: Any) -> Any:
        return (x @ y.T / 4 + 1) ** 3

    inner = [(kernel(x, x).sum() - np.trace(kernel(x, x))) / (60 * 59) for x in (a, b)]
    found = kid(ours.float(), torch.from_numpy(b).float())
    assert found["value"] == pytest.approx(sum(inner) - 2 * kernel(a, b).mean(), rel=1e-3)
    assert found["subset"] == 60 and found["std"] == pytest.approx(0, abs=1e-3)
    # 10 parts of 3 images, each sure of a class of its own that no other image of its part has
    sure = 60 * torch.eye(30)
    assert inception_score(sure)["value"] == pytest.approx(3, rel=1e-4)
    assert inception_score(torch.zeros(30, 5))["value"] == pytest.approx(1)
    # two images a part at least: each sure of a class of its own scores 2, and not 1
    assert inception_score(sure[:10])["value"] == pytest.approx(2, rel=1e-4)
    # torch.chunk deals 11 images out as 3, 3, 3, 2
    assert [inception_score(sure[:n])["splits"] for n in (2, 3, 10, 11, 30)] == [1, 1, 5, 4, 10]
    with pytest.raises(DataError, match="fid: expected at least 2"):
        fid(ours[:1], others)


def test_mmhm_fixtures_of_the_reference() -> None:
    """The published code run on these numbers."""
    columns = {
        "fid": [10.0, 20.0, 30.0],
        "inception": [100.0, 200.0, 150.0],
        "clip": [0.30, 0.28, 0.32],
        "pick": [21.0, 22.0, 21.5],
    }
    assert mmhm(columns) == pytest.approx([0.00199701, 0.00398409, 0.00398014], abs=5e-9)
    assert mmhm({"x": [2.0, 2.0]}) == pytest.approx([1.001, 1.001])
    with pytest.raises(DataError, match="one value for each setting"):
        mmhm({"fid": [1.0], "clip": [1.0, 2.0]})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_mmhm_refuses_what_is_no_number(bad: float) -> None:
    """With it the result would depend on the order: min(1, NaN) is 1 and min(NaN, 1) NaN."""
    for column in ([1.0, bad, 2.0], [bad, 1.0, 2.0]):
        place = column.index(bad) + 1
        with pytest.raises(DataError, match=f"mmhm: fid, setting {place} of 3: expected a finite"):
            mmhm({"clip": [1.0, 2.0, 3.0], "fid": column})


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random Inception in the layout of FID's file."""
    from torch_fidelity import feature_extractor_inceptionv3 as library

    kind = library.FeatureExtractorInceptionV3
    with (
        patch.object(library, "load_state_dict_from_url", return_value={}),
        patch.object(kind, "load_state_dict"),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(0)
        network = kind("inception-v3-compat", ["2048"])
    file = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(network.state_dict(), file)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two prompts with two images each, the second prompt's alike."""
    levels = np.random.default_rng(1).integers(0, 256, (3, 48, 40, 3), dtype=np.uint8)
    for place, image in enumerate([0, 1, 2, 2]):
        file = tmp_path / "suite" / f"{place // 2:05}" / "samples" / f"{place % 2:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(levels[image]).save(file)
    return tmp_path / "suite"


def test_inception_is_torchmetrics_own(inception_file: Path, tmp_path: Path) -> None:
    """Features of random weights against torchmetrics' own extractor; a file with code in it is
    refused and not run."""
    from torchmetrics.image.fid import NoTrainInceptionV3

    images = torch.randint(0, 256, (2, 3, 40, 48), dtype=torch.uint8)
    seen = inception(str(inception_file), CPU)(images)
    for kind, ours in (("2048", seen.features), ("logits_unbiased", seen.logits)):
        theirs = NoTrainInceptionV3(
            "inception-v3-compat", [kind], str(inception_file), antialias=False
        )
        assert torch.allclose(theirs(images), ours, atol=1e-5)
    ran = tmp_path / "ran"
    bad = tmp_path / "bad.pth"
    bad.write_bytes(pickle.dumps(_Touch(ran)))
    with pytest.raises(ModelError, match=r"bad.pth: expected the weights of FID"):
        inception(str(bad), CPU)
    assert not ran.exists()


class _Touch:
    """A pickle that makes a file where it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


def test_lpips_is_torchmetrics_own(tmp_path: Path) -> None:
    """A random AlexNet by path against torchmetrics with the same network in the place of the
    download."""
    from torchmetrics.functional.image import lpips as library
    from torchvision.models import alexnet

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = alexnet(weights=None).features
    file = tmp_path / "alexnet.pth"
    torch.save({f"features.{k}": v for k, v in network.state_dict().items()}, file)
    one, two = torch.rand(2, 3, 3, 64, 64).unbind()
    with patch.object(library, "_get_tv_model_features", return_value=network):
        theirs = library._NoTrainLpips(net="alex")(one * 2 - 1, two * 2 - 1).flatten()
    ours = lpips(str(file), CPU)(one, two)
    assert torch.allclose(ours, theirs, atol=1e-6) and bool((ours > 0).all())
    torch.save({"features.0.weight": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match="expected torchvision's AlexNet, got a file without"):
        lpips(str(file), CPU)


def test_the_command(
    folder: Path, inception_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder against itself: FID 0; the prompt with equal images is at distance 0, so the mean
    over prompts is half of the other's."""
    argv = ["measure", str(folder), "--measure", "vendi", "--measure", "distance"]
    assert main([*argv, "--encoder", "assets/shapes-dino"]) == 0
    assert "4 images, 2 prompts" in capsys.readouterr().out
    # of a suite: with what its images were made
    setting = {"guidance": 2.5, "steps": 4, "prompts": "p", "count": 2, "prompts_hash": "ab"}
    (folder / "setting.json").write_text(json.dumps(setting))
    assert main([*argv, "--encoder", "assets/shapes-dino"]) == 0
    told = capsys.readouterr().out
    assert "setting: guidance 2.5, steps 4, prompts p (2, hash ab)" in told
    found = measure_images(folder, ["vendi", "distance"], Tools(encoder="assets/shapes-dino"))
    assert 1 < found["vendi"]["value"] < 1.5 and found["vendi"]["prompts"] == 2
    low, high = found["distance"]["interval"]
    assert low < 0 < found["distance"]["value"] < high and found["distance"]["all"] > 0
    tools = Tools(folder, inception=str(inception_file), batch=3)
    found = measure_images(folder, ["kid", "inception_score"], tools)
    assert found["kid"]["reference_images"] == 4 == found["kid"]["subset"]
    assert found["inception_score"]["value"] >= 1 and found["inception_score"]["splits"] == 2


@pytest.mark.parametrize(
    ("names", "more", "said"),
    [
        (["fdi"], {}, "no measure 'fdi'; did you mean 'fid'"),
        (["fid"], {"inception": "x"}, "fid: needs --reference"),
        (["vendi", "distance"], {}, "vendi and distance: needs --encoder"),
        (["lpips"], {"alexnet": "gone.pth"}, "--alexnet: there is no gone.pth"),
        ([], {"batch": 0}, "--batch: expected at least 1"),
    ],
)
def test_what_is_missing_is_said_first(names: list[str], more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_measures(names, Tools(**more))


def test_images_without_pairs(folder: Path) -> None:
    for file in folder.rglob("0001.png"):
        file.unlink()
    with pytest.raises(DataError, match="several images of one prompt"):
        measure_images(folder, ["distance"], Tools(encoder="assets/shapes-dino"))


def test_clip_score_is_torchmetrics_own(weights: Weights) -> None:
    """The suite's reward on a random CLIP against torchmetrics with the same network, which wants
    embeddings as transformers 4 returned them; it averages, and cuts the mean at 0."""
    from torchmetrics.multimodal.clip_score import CLIPScore
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

    folder = str(weights.clip.folder)
    reward = clip(path=folder, scale=SUITES["clip_score"].rewards["clip_score"]["scale"])
    images = (torch.rand(3, 3, 40, 40) * 255).round()
    prompts = ["a red circle", "two blue squares", "a cat"]
    batch = RewardBatch(images / 255, prompts, torch.arange(3), [{}] * 3, torch.zeros(3))
    processor = CLIPProcessor(
        CLIPImageProcessorPil.from_pretrained(folder),
        CLIPTokenizer.from_pretrained(folder),
    )

    class Older(CLIPModel):  # type: ignore[misc]
        def get_image_features(self, *given: Any, **named: Any) -> Any:
            return super().get_image_features(*given, **named).pooler_output

        def get_text_features(self, *given: Any, **named: Any) -> Any:
            return super().get_text_features(*given, **named).pooler_output

    metric = CLIPScore(lambda: (Older.from_pretrained(folder), processor))
    expected = metric(list(images.to(torch.uint8)), prompts)
    assert max(float(reward(batch).mean()), 0) == pytest.approx(expected.item(), abs=1e-3)


@pytest.mark.parametrize(("kind", "name"), [("missing", "kept"), ("mismatched", "cut")])
def test_an_encoder_that_lacks_weights_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    """One tensor is left out of the file, or cut: transformers would make it random. A tensor more
    does no harm."""
    shutil.copytree("assets/shapes-dino", tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("*.safetensors")
    state = load_file(file)
    save_file({**state, "head.weight": torch.zeros(2)}, file, {"format": "pt"})
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    whole = encoder("assets/shapes-dino", CPU)(images)
    assert torch.equal(encoder(str(tmp_path), CPU)(images), whole)
    victim = next(key for key in sorted(state) if key.endswith("mlp.fc1.weight"))
    cut = state.pop(victim)[:1].contiguous()
    save_file(state if name == "kept" else {**state, victim: cut}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"expected all weights of .*, got 1 {kind} .*fc1.weight"):
        encoder(str(tmp_path), CPU)
