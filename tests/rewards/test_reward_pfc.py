"""Physical foresight coherence on a random V-JEPA 2, and on a stand-in that is known in closed
form."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clipkit import random_images
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import VJEPA2Config, VJEPA2Model, VJEPA2VideoProcessor

from flowrl.config.calls import Call
from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_call import fitting
from rewards.pfc import pfc, worst_first


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"crop_size": 32, "patch_size": 16, "frames_per_clip": 8}
    sizes |= {"hidden_size": 36, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {"pred_hidden_size": 36, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 2}
    model = VJEPA2Model(VJEPA2Config(**sizes))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    path = tmp_path_factory.mktemp("vjepa")
    model.save_pretrained(path, safe_serialization=True)
    VJEPA2VideoProcessor(crop_size=32).save_pretrained(path)
    return path


def batch_of(videos: Tensor) -> RewardBatch:
    count = len(videos)
    rows: list[dict[str, Any]] = [{}] * count
    return RewardBatch(videos, [""] * count, torch.arange(count), rows, torch.zeros(count))


def test_the_softmin_fixture() -> None:
    """The reference's numbers (B 1.12), and both limits."""
    s = torch.tensor([[0.9, 0.5, 0.8]], dtype=torch.float64)
    assert float(worst_first(s, 0.1)) == pytest.approx(0.5208429, abs=1e-7)
    assert float(worst_first(s, 1e6)) == pytest.approx(s.mean().item(), abs=1e-6)
    assert float(worst_first(s, 1e-4)) == pytest.approx(0.5)


@pytest.mark.parametrize("seen", ["alone", "window"])
def test_windows_are_foreseen_by_the_librarys_model(folder: Path, seen: Any) -> None:
    """Three windows of 4 + 2 frames, by transformers' whole model: the tokens that it is asked to
    predict are those after the context; two videos alone and together."""
    model: Any = VJEPA2Model.from_pretrained(folder).eval()
    processor = VJEPA2VideoProcessor.from_pretrained(folder)
    videos = random_images(20, 40, 50).unflatten(0, (2, 10))
    expected = []
    with torch.no_grad():
        for video in videos:
            row = []
            for start in (0, 2, 4):
                levels = (video[start : start + 6] * 255).round().to(torch.uint8)
                pixels = processor(levels, return_tensors="pt")["pixel_values_videos"]
                first, later = torch.arange(8)[None], torch.arange(8, 12)[None]
                known = model.get_vision_features(pixels[:, :4])
                said = model.predictor(known, [first], [later]).last_hidden_state
                real = model.get_vision_features(pixels if seen == "window" else pixels[:, 4:])
                row.append(cosine_similarity(said, real[:, -4:], dim=-1).mean())
            expected.append(worst_first(torch.stack(row)[None], 0.2)[0])
    given: dict[str, Any] = {"path": str(folder), "context": 4, "target": 2, "stride": 2}
    reward = pfc(**given, tau=0.2, seen=seen, device="cpu")
    scores = reward(batch_of(videos))
    torch.testing.assert_close(scores, torch.stack(expected), atol=1e-5, rtol=0)
    assert scores.unique().numel() == 2
    torch.testing.assert_close(reward(batch_of(videos[1:])), scores[1:], atol=1e-5, rtol=0)
    assert reward(batch_of(videos[:0])).shape == (0,)


class Same(nn.Module):
    """Features are a pair of frames' mean colours; what is foreseen is the last that was seen. The
    stand-in of the reference (addendum 3.4): s_i is a cosine of frames, of a still video 1."""

    def encoder(self, pixel_values_videos: Tensor) -> Any:
        pairs = pixel_values_videos.unflatten(1, (-1, 2)).mean(2)
        return SimpleNamespace(last_hidden_state=pairs.mean((-2, -1)))

    def predictor(self, known: Tensor, context: list[Tensor], target: list[Tensor]) -> Any:
        assert context[0][0].tolist() == [0, 1] and target[0][0].tolist() == [2]
        return SimpleNamespace(last_hidden_state=known[:, -1:])


def test_a_still_video_is_foreseen_and_a_cut_is_not(folder: Path) -> None:
    reward = pfc(path=str(folder), context=4, target=2, stride=2, tau=1e-3, device="cpu")
    reward.network = Same()
    still = random_images(1, 32, 32)[:, None].expand(-1, 8, -1, -1, -1).clone()
    cut = still.clone()
    cut[:, 6:] = 1 - cut[:, 6:]  # in the second of two windows
    levels = [(video * 255).round().to(torch.uint8) for video in (still[0], cut[0])]
    colours = reward.processor(levels, return_tensors="pt")["pixel_values_videos"]
    a, b = colours[0, 5].mean((-2, -1)), colours[1, 6:].mean((0, -2, -1))
    expected = torch.stack([torch.tensor(1.0), cosine_similarity(a, b, dim=0)])
    found = reward(batch_of(torch.cat([still, cut])))
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
    assert expected[1] < 0.9


def test_what_it_cannot_take(folder: Path) -> None:
    with pytest.raises(ConfigError, match="context: expected a multiple of the network's 2 frames"):
        pfc(path=str(folder), context=3)
    reward = pfc(path=str(folder), context=4, target=2, device="cpu")
    with pytest.raises(DataError, match="at least context . target = 6 frames, got 5"):
        reward(batch_of(torch.zeros(1, 5, 3, 32, 32)))
    call = Call("rewards.physics", "pfc", "", {})
    message = "rewards.physics: pfc judges videos of at least 6 frames as it is set, .* makes 5;"
    with pytest.raises(ConfigError, match=message):  # before the first video is made
        fitting(call, reward, 5)
    assert fitting(call, reward, 6) is reward
    with pytest.raises(DataError, match="NaN"):
        reward(batch_of(torch.full((1, 6, 3, 32, 32), torch.nan)))
