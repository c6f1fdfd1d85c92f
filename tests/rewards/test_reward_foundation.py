"""Scorers that are made of large models, with random weights in the public layouts: HPSv3 and
VideoAlign against the public forward spelled out over transformers' own classes, V-JEPA 2's
foresight against its whole model and in closed form; and MIND-V's reward on moving shapes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clipkit import PROMPTS, batch_of, pil, random_images
from PIL import Image
from qwenkit import PADS, STATS, save_hpsv3, save_processor, save_videoalign
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import VJEPA2Config, VJEPA2Model, VJEPA2VideoProcessor

from flowrl.config.calls import Call
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_call import fitting
from flowrl.evaluation.suites.moving_shapes import EVERY, SIZE, paint_video
from flowrl.training.trainer import Trainer
from rewards._backbones.qwen2_vl import check_prompt, load_processor, text_of
from rewards.hpsv3 import fitted, hpsv3
from rewards.pfc import pfc, worst_first
from rewards.videoalign import reward as videos
from rewards.videoalign import videoalign
from rewards.videoalign.reward import shown_frames


def asked(processor: Any, kind: str, text: str) -> str:
    content = [{"type": kind}, {"type": "text", "text": text}]
    said: str = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return said


def test_hpsv3_is_the_public_forward(tmp_path: Path) -> None:
    """One image at a time, resized by hand to the reference's sizes; all of them in one batch of
    the reward, so that padding changes nothing."""
    judge, processor, given = save_hpsv3(tmp_path)
    (mark,) = processor.tokenizer.convert_tokens_to_ids(["<|Reward|>"])
    images, prompts = random_images(3, 96, 128), PROMPTS[:3]
    expected = []
    for image, prompt in zip(images, prompts, strict=True):
        text = asked(processor, "image", text_of("hpsv3", prompt))
        assert text.count(prompt) == 1 and text.endswith("END\n<|im_end|>\n<|im_start|>assistant\n")
        seen = pil(image).resize((532, 392), Image.Resampling.BICUBIC)  # 4.04 times, up to 28
        inputs = processor(text=[text], images=[seen], return_tensors="pt")
        expected.append(judge(inputs, [mark])[0, 0, 0])
    scores = hpsv3(**given, device="cpu")(batch_of(images, prompts))
    torch.testing.assert_close(scores, torch.stack(expected), atol=2e-5, rtol=0)
    assert scores.unique().numel() == 3
    # the reference's table of sizes, height x width
    for size, made in {
        (256, 256): (448, 448),
        (720, 720): (448, 448),
        (1024, 1024): (448, 448),
        (768, 1024): (364, 504),
        (1216, 832): (532, 364),
    }.items():
        assert fitted(Image.new("RGB", size[::-1])).size == made[::-1]
    # what is not the public layout, and words that would be read as tokens
    with pytest.raises(DataError, match="token"):
        hpsv3(**given, device="cpu")(batch_of(images[:1], ["a cat <|Reward|>"]))
    # a list with one is refused before any image is made
    with pytest.raises(DataError, match=r"list\.txt:3: the prompt 'a cat <\|Reward\|>' holds"):
        hpsv3(**given, device="cpu").check_record({"prompt": "a cat <|Reward|>"}, "list.txt:3")
    state = load_file(tmp_path / "HPSv3.safetensors")
    for key, value, said in [
        ("model.embed_tokens.weight", torch.zeros(9, 32), "embedding has 9 tokens"),
        ("model.layers.7.mlp.up_proj.weight", torch.zeros(1), "1 unexpected"),
    ]:
        file = tmp_path / "wrong.safetensors"
        save_file({**state, key: value}, file)
        with pytest.raises(ModelError, match=said):
            hpsv3(path=str(file), processor=given["processor"], device="cpu")


@pytest.mark.parametrize("listed", [False, True])
def test_all_of_the_models_own_tokens_are_refused(tmp_path: Path, listed: bool) -> None:
    """Those of the chat, the pads, and the reward's mark: tokens of a tokenizer that lists the pads
    as its additional ones, as the released one does, and of one that does not. The marks come
    behind all that were there, so their ids are the next ones."""
    saved = save_processor(tmp_path)
    if listed:
        saved.tokenizer.add_special_tokens({"additional_special_tokens": PADS})
        saved.save_pretrained(tmp_path)
    marks = ["<|VQ_reward|>", "<|MQ_reward|>"]
    processor, ids = load_processor(str(tmp_path), marks, "it")
    assert ids == [len(saved.tokenizer), len(saved.tokenizer) + 1]
    for token in (*PADS, "<|im_start|>", "<|im_end|>", "<|endoftext|>", *marks):
        with pytest.raises(DataError, match="line 3: the prompt .* holds .*, a token that"):
            check_prompt(f"a cat {token}", processor, "line 3")
    check_prompt("a <cat> | and an image_pad", processor, "line 3")


def public_frames(frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize frames [T, 3, H, W] of bytes in float32, bicubic with the filter, cut to a byte's
    range and rounded: what the public code's torchvision.transforms.functional.resize does."""
    options: dict[str, Any] = {"mode": "bicubic", "align_corners": False, "antialias": True}
    wide = torch.nn.functional.interpolate(frames.float(), (height, width), **options)
    return wide.clamp(0, 255).round().to(torch.uint8)


@pytest.mark.parametrize(
    ("size", "most", "expected"),
    [
        ((240, 416), 240 * 320, (196, 364)),  # made smaller
        ((60, 60), 240 * 320, (336, 336)),  # enlarged to 128 * 28 * 28 pixels and more
    ],
)
def test_frames_are_resized_as_the_public_code_does(
    size: tuple[int, int], most: int, expected: tuple[int, int]
) -> None:
    """To the level, on noise: a kernel for bytes is 20 levels off there. Sizes are those of
    vision_process.py (KwaiVGI/VideoAlign 1140ffd), run on these inputs."""
    noisy = random_images(6, *size).unflatten(0, (2, 3))
    found = videos.fitted(noisy, most)
    assert found.dtype == torch.uint8 and found.shape == (2, 3, 3, *expected)
    for mine, frames in zip(found, (noisy * 255).round().to(torch.uint8), strict=True):
        assert torch.equal(mine, public_frames(frames, *expected))


@pytest.mark.parametrize("split", [False, True])
def test_videoalign_is_the_public_forward_with_peft(tmp_path: Path, split: bool) -> None:
    """12 frames at 4 a second are 6 of 2 a second, enlarged to 100352 pixels; LoRA is peft's
    own; the diagonal and the z-scores by hand."""
    judge, processor, given = save_videoalign(tmp_path, split=split)
    marks = processor.tokenizer.convert_tokens_to_ids(
        ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
    )
    videos = random_images(24, 60, 60).unflatten(0, (2, 12))
    prompts = ["a red circle moves left", "a cat"]
    expected = []
    for video, prompt in zip(videos, prompts, strict=True):
        frames = (video[[0, 2, 4, 7, 9, 11]] * 255).round().to(torch.uint8)
        frames = public_frames(frames, 336, 336)
        text = asked(processor, "video", text_of("videoalign", prompt))
        how = {"do_resize": False, "do_sample_frames": False}
        inputs = processor(text=[text], videos=[frames], return_tensors="pt", **how)
        said = judge(inputs, marks)[0]
        row = []
        for at, name in enumerate(("VQ", "MQ", "TA")):
            row.append((said[at, at] - STATS[f"{name}_mean"]) / STATS[f"{name}_std"])
        expected.append(torch.stack(row))
    reward = videoalign(**given, fps=4.0, device="cpu", vq=1.0, mq=0.5, ta=-2.0)
    found = reward.dimensions(batch_of(videos, prompts))
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=0)
    mixed = found @ torch.tensor([1.0, 0.5, -2.0])
    torch.testing.assert_close(reward(batch_of(videos, prompts)), mixed, atol=1e-4, rtol=0)
    assert reward(batch_of(videos[:0], [])).shape == (0,)
    if split:
        return
    # VQ and MQ stand before the prompt and cannot see it
    other = reward.dimensions(batch_of(videos, ["a dog", "a cat"]))
    torch.testing.assert_close(other[:, :2], found[:, :2], atol=1e-5, rtol=0)
    assert abs(float(other[0, 2] - found[0, 2])) > 1e-4
    with pytest.raises(DataError, match=r"videos \[L, T, 3, H, W\]"):
        reward(batch_of(videos[:, 0], prompts))
    with pytest.raises(ConfigError, match="not all 0"):
        videoalign(**given, vq=0.0, mq=0.0, ta=0.0)
    file = tmp_path / "model_config.json"
    for part, key, value in [
        ("data_config", "prompt_template_type", "simple"),
        ("data_config", "sample_type", "multi_pts"),
        ("model_config", "output_dim", 4),
    ]:
        told = json.loads(file.read_text())
        kept = file.read_text()
        told[part][key] = value
        file.write_text(json.dumps(told))
        with pytest.raises(ModelError, match=key):
            videoalign(**given, device="cpu")
        file.write_text(kept)


def test_which_frames_are_shown() -> None:
    """smart_nframes of qwen-vl-utils by hand: 2 a second, even, from 4 to all."""
    assert len(shown_frames(81, 16.0, fps=2.0, frames=None)) == 10  # 10.125
    assert shown_frames(5, 16.0, fps=2.0, frames=None) == [0, 1, 3, 4]
    assert shown_frames(9, 16.0, fps=2.0, frames=3) == [0, 3, 5, 8]  # 1.5 pairs are 2
    with pytest.raises(DataError, match="at least 2 frames"):
        shown_frames(1, 16.0, fps=2.0, frames=None)


# ------------------------------------------------------------------------------- physical foresight


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


# ----------------------------------------------------------------------- foresight of moving shapes


CONFIG = load_config("shapes/mind_v")


def judged(name: str, moving_videos: Tensor) -> Tensor:
    """Score videos [L, T, 3, H, W], one of each scene, by a reward as the config has it."""
    meta: list[dict[str, Any]] = [scene.record for scene in EVERY]
    prompts = [scene.prompt for scene in EVERY]
    count = len(EVERY)
    batch = RewardBatch(moving_videos, prompts, torch.arange(count), meta, torch.zeros(count))
    scores: Tensor = CONFIG.call(f"rewards.{name}")()(batch)
    return scores


@pytest.fixture(scope="module")
def moving_videos() -> dict[str, Tensor]:
    """Right films of all scenes, and what is broken about them: a frame of a film from elsewhere, a
    film that stands still, one without an object."""
    draw = torch.Generator().manual_seed(3)
    right = torch.stack([paint_video(scene, draw, anywhere=True) for scene in EVERY])
    other = torch.stack([paint_video(scene, draw, anywhere=True) for scene in EVERY])
    cut = right.clone()
    cut[:, 3] = other[:, 0]
    still = right[:, :1].expand_as(right).contiguous()
    empty = right[:, :, :, :1, :1].expand(-1, -1, -1, SIZE, SIZE).contiguous()
    return {"right": right, "cut": cut, "still": still, "empty": empty}


def test_what_moves_on_is_foreseen_and_a_cut_is_not(moving_videos: dict[str, Tensor]) -> None:
    """Measured: .03 on average, and in every scene."""
    right, cut = judged("physics", moving_videos["right"]), judged("physics", moving_videos["cut"])
    assert float(right.mean()) > float(cut.mean()) + 0.02
    assert float((right > cut).double().mean()) > 0.9


def test_a_still_video_does_not_win(moving_videos: dict[str, Tensor]) -> None:
    """It is foreseen as well as one that moves, which is the trap; in the sum of both rewards, with
    the config's weights, the right film is ahead of the still and of the empty one in every
    scene."""
    physics = {name: judged("physics", some) for name, some in moving_videos.items()}
    assert float(physics["still"].mean()) > float(physics["right"].mean()) - 0.02
    weights = {name: CONFIG.to_dict()["rewards"][name]["weight"] for name in ("moving", "physics")}
    total = {}
    for name, some in moving_videos.items():
        total[name] = weights["moving"] * judged("moving", some)
        total[name] += weights["physics"] * physics[name]
    for name in ("still", "empty"):
        assert bool((total["right"] > total[name]).all()), name


@pytest.mark.integration
def test_one_iteration_on_the_video_model() -> None:
    """The ratio is 1 before the first update, both rewards are there, and the weights move."""
    trainer = Trainer(load_config("shapes/mind_v", ["train.prompts=2", "train.warmup=0"]))
    before = {name: p.detach().clone() for name, p in trainer.params.items()}
    metrics = trainer.step()
    assert metrics["on_policy_gap"] < 1e-5 and metrics["grad_norm"] > 0
    assert -1 <= metrics["reward/physics"] <= 1 and 0 <= metrics["reward/moving"] <= 1
    assert any(not torch.equal(p, before[name]) for name, p in trainer.params.items())
