"""Videos judged by another process: frames in requests, who judges what, and what is too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Process, batch_of, data_of, fast, hosted, random_images
from torch import Tensor
from toykit import redness, toy

from flowrl.core.abilities import judges_videos
from flowrl.core.errors import ConfigError, DataError, RewardError
from flowrl.core.pixels import round_8bit
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.moving_shapes import TRAIN, paint_video
from rewards.moving_shapes import moving_shapes
from rewards.remote.messages import chunks_of
from rewards.remote.read_request import RequestLimits, RequestRefused, parse
from rewards.remote.request_queue import RequestQueue
from rewards.remote.server import load_rewards

ROOT = Path(__file__).resolve().parents[2]


def videos(count: int, frames: int, size: int = 4) -> Tensor:
    """Return noise [L, T, 3, size, size] of 256 levels."""
    return random_images(count * frames, size).unflatten(0, (count, frames))


def motion(batch: RewardBatch) -> Tensor:
    """Score videos by how much changes from frame to frame."""
    return batch.images.diff(dim=1).abs().mean((1, 2, 3, 4))


motion.judges_videos = True  # type: ignore[attr-defined]


def scenes() -> RewardBatch:
    """Return two drawn videos of each training scene, with noise of three strengths."""
    every = [scene for scene in TRAIN for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    clean = torch.stack([paint_video(scene, generator) for scene in every])
    strength = torch.tensor([0.0, 0.2, 0.6])[torch.arange(len(clean)) % 3].view(-1, 1, 1, 1, 1)
    images = round_8bit(clean + strength * torch.randn(clean.shape, generator=generator))
    records = [scene.record for scene in every]
    group, sigma = torch.arange(len(every)) // 2, torch.zeros(len(every))
    return RewardBatch(images, [scene.prompt for scene in every], group, records, sigma)


@pytest.mark.integration
def test_a_video_reward_in_another_process_equals_the_one_here() -> None:
    """`moving_shapes` of a training config, asked over HTTP and in this process: to the bit."""
    batch = scenes()
    server = Process(ROOT / "assets/moving/awm.yaml", "--port", "0")
    url = server.url()
    local = {"moving": moving_shapes(), "strict": moving_shapes(mode="strict")}
    for name, here in {name: reward(batch) for name, reward in local.items()}.items():
        there = fast(url, reward=name, videos=True, chunk=12, workers=2)
        there.probe()
        there.check_records(batch.meta, ["train.jsonl"] * len(batch.meta))
        assert torch.equal(there(batch), here) and len(here.unique()) > 1
    # what it refuses
    with pytest.raises(DataError, match="line 3.*direction"):
        there.check_record({"class": "cross", "color": "red", "direction": "in"}, "line 3")
    with pytest.raises(ConfigError, match="moving judges videos, got videos=false. Set videos"):
        fast(url, reward="moving").probe()
    with pytest.raises(RewardError, match="256 images or frames .*got 300 .1 videos of 300 frames"):
        there(batch_of(videos(1, 300)))
    code, printed = server.end()
    assert code == 0 and "Traceback" not in printed and "stopped; 80 images" in printed


def test_images_and_videos_do_not_mix(tmp_path: Path) -> None:
    """At load where the server says what it judges, else at the batch, and at the server."""
    both = {"red": redness, "motion": motion}
    with hosted(both) as url:
        film, images = batch_of(videos(3, 5)), batch_of(random_images(3))
        assert torch.equal(fast(url, reward="motion", videos=True)(film), motion(film))
        assert torch.equal(fast(url, reward="red")(images), redness(images))
        with pytest.raises(ConfigError, match="red judges images, got videos=true.*frames: mean"):
            fast(url, reward="red", videos=True).probe()
        with pytest.raises(RewardError, match="red judges images, got videos of 5 frames"):
            fast(url, reward="red", videos=True)(film)
        with pytest.raises(RewardError, match="motion judges videos, got images"):
            fast(url, reward="motion")(images)
        with pytest.raises(DataError, match=r"expected images .*got \[3, 5, 3, 4, 4\].*videos"):
            fast(url, reward="red")(film)
        with pytest.raises(DataError, match=r"expected videos .*got \[3, 3, 4, 4\]"):
            fast(url, reward="motion", videos=True)(images)
    # an image reward whose config says how it judges frames is hosted as one of videos
    reward = load_rewards(toy(tmp_path, "rewards.red.frames=last"))["red"]
    assert judges_videos(reward) and torch.equal(
        reward(film), redness(batch_of(film.images[:, -1]))
    )


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (0, "frames: expected a whole number"),
        (4, "divides the 6 images, got 4"),
        (True, "frames: expected"),
        (2.0, "frames: expected"),
        (6, "prompts: expected a list of 1 texts"),
    ],
)
def test_frames_that_do_not_fit_are_refused(frames: Any, message: str) -> None:
    data = data_of(random_images(6), frames=frames, prompts=["p"] * 3)
    with pytest.raises(RequestRefused, match=message):
        parse(json.dumps(data).encode(), ["motion"], RequestLimits(), ["motion"])


def test_frames_count_as_images() -> None:
    """By hand: 8 images a request are two videos of 3 frames, or one of 20; a prompt's videos stay
    together unless the reward judges singly, and a server joins 6 + 6 frames within 12."""
    batch = batch_of(videos(4, 3, size=1), group=[0, 0, 0, 1])
    assert chunks_of(batch, 8) == [[0, 1, 2], [3]]
    assert chunks_of(batch, 8, apart=True) == [[0, 1], [2, 3]]
    assert chunks_of(batch_of(videos(2, 20, size=1)), 8) == [[0], [1]]
    data = data_of(random_images(6), frames=3, prompts=["a", "b"])
    got = parse(json.dumps(data).encode(), ["red", "motion"], RequestLimits(), ["motion"])
    assert got.names == ("motion",) and got.pixels.shape == (2, 3, 3, 4, 4)
    assert torch.equal(got.pixels.flatten(0, 1).float() / 255, random_images(6))
    seen: list[RewardBatch] = []

    def spy(batch: RewardBatch) -> Tensor:
        seen.append(batch)
        return motion(batch)

    queue = RequestQueue({"motion": spy}, batch=12, max_wait_s=60)
    futures = [queue.submit(got) for _ in range(3)]
    queue.close()  # answers those that wait
    assert [len(one.prompts) for one in seen] == [4, 2]
    assert len({str(future.result()) for future in futures}) == 1
