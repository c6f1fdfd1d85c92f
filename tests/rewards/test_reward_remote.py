"""The reward that asks servers: scores right to the bit, what it sends, its token, videos, and
whole runs."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from serving import (
    RIGHT,
    SIX,
    Scripted,
    batch_of,
    data_of,
    fast,
    free_port,
    hosted,
    random_images,
    scores,
    wait_for,
)
from torch import Tensor
from toykit import redness, toy

import flowrl
from flowrl.config.load import Config, load_config
from flowrl.core.abilities import judges_videos
from flowrl.core.errors import ConfigError, DataError, RewardError, RunError
from flowrl.core.pixels import round_8bit
from flowrl.core.prompts import PromptSet, check_records
from flowrl.core.types import Reward, RewardBatch
from flowrl.evaluation.suites.moving_shapes import TRAIN, paint_video
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from flowrl.training.trainer import Trainer
from rewards.moving_shapes import moving_shapes
from rewards.remote import remote
from rewards.remote.messages import chunks_of
from rewards.remote.read_request import RequestLimits, RequestRefused, parse
from rewards.remote.request_queue import RequestQueue
from rewards.remote.server import load_rewards
from rewards.shapes import shapes


def test_shapes_over_http_equals_shapes_here() -> None:
    """To the bit, for rough images whose scores differ, in chunks that the server joins."""
    records = [record for records in all_records().values() for record in records[::9]]
    images = render(scenes_for(records, np.random.default_rng(0)))
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    n, prompts = len(records), [record["prompt"] for record in records]
    clean = RewardBatch(images, prompts, torch.arange(n) // 3, records, torch.zeros(n))
    rough = clean._replace(images=(images + 0.1 * noise).clamp(0, 1))
    here = shapes()(rough)
    with hosted({"graded": shapes(), "strict": shapes(mode="strict")}, batch=16) as url:
        reward = remote(urls=[url], reward="graded", chunk=5, workers=3)
        reward.probe()
        assert torch.equal(reward(rough), here) and here.unique().numel() > n / 2
        strict = remote(urls=[url], reward="strict")(clean)
        assert torch.equal(strict, shapes(mode="strict")(clean)) and strict.mean() > 0.9
    assert isinstance(reward, Reward)


def test_scores_keep_every_bit_and_nan_stays_nan() -> None:
    """Random bit patterns of float32, denormal numbers and NaN among them, as doubles."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (200,), generator=generator, dtype=torch.int64)
    values = bits.to(torch.int32).view(torch.float32)
    values = torch.where(values.isinf(), torch.nan, values)  # infinity is not a score
    values[:3] = torch.tensor([1e-45, torch.nan, -torch.finfo(torch.float32).max])

    def drawn(batch: RewardBatch) -> Tensor:
        return values[[record["row"] for record in batch.meta]].double()

    with hosted({"it": drawn}) as url:
        got = remote(urls=[url], chunk=7)(batch_of(random_images(200, size=1)))
    assert torch.equal(got.isnan(), values.isnan())
    assert torch.equal(got.nan_to_num().view(torch.int32), values.nan_to_num().view(torch.int32))


def test_a_reward_sees_what_it_would_see_here() -> None:
    """Images (rounded to 8 bits), prompts, records, noise levels; which images belong together."""
    seen: list[RewardBatch] = []

    def spy(batch: RewardBatch) -> Tensor:
        seen.append(batch)
        return batch.sigma

    images = torch.rand(4, 3, 5, 7, generator=torch.Generator().manual_seed(0)) * 1.2 - 0.1
    sigma = torch.tensor([0.0, 0.1, 1 / 3, 1.0])
    meta: list[dict[str, Any]] = [{"x": [1, None, {"y": "\u00e9\U0001f600"}]}, {}]
    meta += [{"f": 0.1}, {"big": 2**60}]
    sent = RewardBatch(images, ["a", "\u00e9\n", "", "a"], torch.tensor([9, -2, 4, 9]), meta, sigma)
    with hosted({"spy": spy}) as url:
        assert torch.equal(remote(urls=[url])(sent), sigma)
    (got,) = seen
    order = [0, 3, 1, 2]  # a prompt's images go side by side
    assert torch.equal(got.images, round_8bit(images)[order])
    assert torch.equal(got.sigma, sigma[order]) and got.group.tolist() == [0, 0, 1, 2]
    assert got.prompts == [sent.prompts[i] for i in order]
    assert got.meta == [meta[i] for i in order]


def test_images_of_a_prompt_are_never_split() -> None:
    """Into chunks of 4: three groups of two, one of five; evaluation has group 0 alone."""
    groups = [0, 1, 0, 1, 2, 2, 3, 3, 3, 3, 3]
    chunks = chunks_of(batch_of(random_images(11, size=1), group=groups), 4)
    assert chunks == [[0, 2, 1, 3], [4, 5], [6, 7, 8, 9, 10]]
    same = batch_of(random_images(4, size=1))._replace(group=torch.zeros(4, dtype=torch.int64))
    assert chunks_of(same, 2) == [[0, 1], [2, 3]]
    assert chunks_of(same._replace(prompts=["p"] * 4), 2) == [[0, 1, 2, 3]]


def test_it_works_inside_a_running_loop_and_without_images() -> None:
    async def notebook() -> Tensor:
        return fast(server.url)(SIX)

    with Scripted(scores()) as server:
        assert asyncio.run(notebook()).tolist() == RIGHT
        assert fast(server.url)(batch_of(random_images(0))).shape == (0,)
        assert len(server.asked) == 1


def test_work_is_shared_out() -> None:
    """Two servers that answer once each has a request: the second goes where none is."""
    meet = threading.Barrier(2)

    def both(data: dict[str, Any]) -> Any:
        meet.wait(30)
        return scores()(data)

    with Scripted(both, scores()) as one, Scripted(both, scores()) as two:
        assert fast(one.url, two.url, chunk=2, workers=2)(SIX).tolist() == RIGHT
        assert len(one.asked) + len(two.asked) == 3 and one.asked and two.asked


def test_what_cannot_be_sent_is_an_error_of_the_data() -> None:
    with Scripted(scores()) as server:
        with pytest.raises(DataError, match="NaN"):
            fast(server.url)(SIX._replace(images=SIX.images * math.nan))
        for value in (torch.zeros(1), math.nan):
            with pytest.raises(DataError, match="cannot be sent"):
                fast(server.url)(SIX._replace(meta=[{"row": value}] * 6))
        assert server.asked == []


def test_several_rewards_need_a_name() -> None:
    with hosted({"red": redness, "blue": redness}) as url:
        for call in (lambda: remote(urls=[url])(SIX), remote(urls=[url]).probe):
            with pytest.raises(ConfigError, match="red, blue; name one"):
                call()
        with pytest.raises(ConfigError, match=r"hosts no 'green' \(there is: red, blue\)"):
            remote(urls=[url], reward="green").probe()
        assert torch.equal(remote(urls=[url], reward="red")(SIX), redness(SIX))


def test_probe_says_what_is_wrong_and_can_wait() -> None:
    url, html = f"http://127.0.0.1:{free_port()}", b"<!doctype html>"
    with pytest.raises(RewardError, match=f"no server answers: {url}: ConnectError.*serve-rewards"):
        fast(url, retries=1).probe()
    answers: list[tuple[Any, str]] = [(html, "expected JSON"), (b"{}", "health of a reward server")]
    with Scripted(scores()) as server, ThreadPoolExecutor(1) as pool:
        for health, message in (*answers, ((503, html), "HTTP 503")):
            server.health = health
            with pytest.raises(RewardError, match=message):
                fast(server.url, retries=0).probe()
            probed = pool.submit(fast(server.url, on_failure="wait", retries=0).probe)
            server.health = b'{"rewards": ["it"]}'
            probed.result(60)
    with hosted({"it": redness}, limits=RequestLimits(images=31)) as url:
        with pytest.raises(ConfigError, match="at most 31 images per request, got 32"):
            fast(url).probe()
        fast(url, chunk=31).probe()


def test_the_token_is_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "correct horse")
    caplog.set_level(logging.DEBUG)
    # a server that checks it
    with hosted({"red": redness}, token=b"correct horse") as url:
        right = fast(url, token_env="REWARD_TOKEN")
        right.probe()
        assert torch.equal(right(SIX), redness(SIX))
        monkeypatch.setenv("REWARD_TOKEN", "wrong horse!")
        for reward in (fast(url), fast(url, token_env="REWARD_TOKEN")):
            for call in (reward.probe, lambda: reward(SIX)):  # noqa: B023 - called at once
                with pytest.raises(RewardError, match="refuses the token") as error:
                    call()
                assert "horse" not in str(error.value)
    # a server that repeats it
    monkeypatch.setenv("REWARD_TOKEN", "correct horse")
    echo = b"you said correct horse"
    for reply in ((500, echo), echo):
        said = pytest.raises(RewardError, match=r"you said \*\*\*")
        with Scripted(lambda _: reply) as server, said:  # noqa: B023 - called at once
            fast(server.url, token_env="REWARD_TOKEN", retries=0)(SIX)
        assert server.headers[0]["authorization"] == "Bearer correct horse"
    assert "horse" not in caplog.text
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(ConfigError, match="environment variable REWARD_TOKEN"):
        fast(url, token_env="REWARD_TOKEN")


def test_a_config_can_name_it(tmp_path: Path) -> None:
    call = "fn: remote, urls: ['http://h:1/', 'https://g/x']"
    config = toy(tmp_path, f"rewards.red={{{call}, on_failure: wait, wait_s: 5}}")
    reward = config.rewards["red"].make()
    assert reward.urls == ["http://h:1", "https://g/x"]
    assert (reward.on_failure, reward.wait_s) == ("wait", 5.0)
    with pytest.raises(ConfigError, match="on_failure"):
        toy(tmp_path, f"rewards.red={{{call}, on_failure: zero}}")


def test_the_hosted_reward_sees_the_records_before_the_first_image(tmp_path: Path) -> None:
    """The server's reward refuses with the client's own file and line; good records pass, a server
    that names no checks is not asked, and a list longer than a request is cut."""
    good = [record for rows in all_records().values() for record in rows[:2]]
    lines = [f"train.jsonl, line {i + 1}" for i in range(len(good))]
    with hosted({"graded": shapes(), "it": redness}) as url:
        reward = remote(urls=[url], reward="graded")
        reward.check_records(good, lines)
        many = [*good] * (600 // len(good) + 1)
        many[590] = {"prompt": "p", "include": [{"class": "hexagon", "count": 1}]}
        with pytest.raises(DataError, match="train.jsonl, line 591, .*hexagon"):
            reward.check_records(many, [f"train.jsonl, line {i + 1}" for i in range(len(many))])
        prompts = PromptSet(["p"], [many[590]], "train.jsonl", "", ["train.jsonl, line 1"])
        with pytest.raises(DataError, match="train.jsonl, line 1, .*hexagon"):
            check_records(prompts, {"shapes": reward})
        remote(urls=[url], reward="it").check_record({"anything": 1}, "x")
        with pytest.raises(DataError, match="line 1 or later: .*cannot be sent"):
            reward.check_records([{"prompt": torch.zeros(1)}], lines[:1])


# ------------------------------------------------------------------------------------------- videos


ROOT = Path(__file__).resolve().parents[2]


def videos(count: int, frames: int, size: int = 4) -> Tensor:
    """Return noise [L, T, 3, size, size] of 256 levels."""
    return random_images(count * frames, size).unflatten(0, (count, frames))


def motion(batch: RewardBatch) -> Tensor:
    """Score videos by how much changes from frame to frame."""
    return batch.images.diff(dim=1).abs().mean((1, 2, 3, 4))


motion.judges_videos = True  # type: ignore[attr-defined]


def scenes() -> RewardBatch:
    """Return two drawn videos of each third training scene, with noise of three strengths."""
    every = [scene for scene in TRAIN[::3] for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    clean = torch.stack([paint_video(scene, generator) for scene in every])
    strength = torch.tensor([0.0, 0.2, 0.6])[torch.arange(len(clean)) % 3].view(-1, 1, 1, 1, 1)
    images = round_8bit(clean + strength * torch.randn(clean.shape, generator=generator))
    records = [scene.record for scene in every]
    group, sigma = torch.arange(len(every)) // 2, torch.zeros(len(every))
    return RewardBatch(images, [scene.prompt for scene in every], group, records, sigma)


def test_a_video_reward_behind_a_server_equals_the_one_here() -> None:
    """`moving_shapes` of a training config, asked over HTTP and directly: to the bit."""
    batch = scenes()
    local = {"moving": moving_shapes(), "strict": moving_shapes(mode="strict")}
    with hosted(load_rewards(load_config(ROOT / "assets/moving/awm.yaml"))) as url:
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
        with pytest.raises(RewardError, match="256 images or .*got 300 .1 videos of 300 frames"):
            there(batch_of(videos(1, 300)))


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


def test_frames_that_do_not_fit_are_refused() -> None:
    for frames, message in (
        (0, "frames: expected a whole number"),
        (4, "divides the 6 images, got 4"),
        (True, "frames: expected"),
        (2.0, "frames: expected"),
        (6, "prompts: expected a list of 1 texts"),
    ):
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


# --------------------------------------------------------------------------------------- whole runs


def asking(url: str, **options: Any) -> str:
    call = {"fn": "remote", "urls": [url], "backoff": 0.05, **options}
    return f"rewards.red={json.dumps(call)}"


def trained(config: Config) -> dict[str, Any]:
    """Train all iterations in memory -> the weights."""
    trainer = Trainer(config)
    for _ in range(config.train.iterations):
        trainer.step()
    return {name: p.tolist() for name, p in trainer.params.items()}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the weights of the unbroken run that scores by itself."""
    return trained(toy(tmp_path_factory.mktemp("toy")))


@pytest.mark.integration
def test_a_run_outlives_its_server(
    here: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server breaks off while it scores, is gone for a while and comes back."""
    monkeypatch.setattr("rewards.remote.client.LONGEST", 0.2)  # so that the test need not wait
    monkeypatch.setattr("rewards.remote.endpoints.LONGEST", 0.2)

    def red(data: dict[str, Any]) -> bytes:
        pixels = parse(json.dumps(data).encode(), ["it"], RequestLimits()).pixels
        return json.dumps({"scores": {"it": redness(batch_of(pixels / 255)).tolist()}}).encode()

    def breaks_off(data: dict[str, Any]) -> None:
        first.__exit__()  # takes no new connections, and leaves this request unanswered

    def come_back() -> None:
        wait_for(lambda: "trying on" in caplog.text)
        again.enter_context(hosted({"it": redness}, port=first.server.server_address[1]))

    first = Scripted(red, red, breaks_off)
    with ExitStack() as again, ThreadPoolExecutor(1) as pool:
        back = pool.submit(come_back)
        run = toy(tmp_path, asking(first.url, on_failure="wait", wait_s=120.0))
        assert trained(run) == here
        back.result(60)


@pytest.mark.integration
def test_a_run_stops_without_a_score_and_goes_on_later(
    here: dict[str, Any], tmp_path: Path
) -> None:
    """The error names address and reason; the resumed run is the unbroken one."""
    calls = []

    def fails_once(batch: RewardBatch) -> Tensor:
        calls.append(len(batch.prompts))
        if len(calls) == 5:  # two random images, held-out ones, two iterations
            raise RuntimeError("the device is gone")
        return redness(batch)

    run = tmp_path / "run"
    with hosted({"red": fails_once}, batch=1) as url:
        there = toy(tmp_path / "toy", asking(url, retries=0))
        said = f"{url}: HTTP 500: RuntimeError: the device is gone"
        with pytest.raises(RunError, match=said) as error:
            flowrl.train(there, run, quiet=True)
        assert "saved" in str(error.value) and "--resume" in str(error.value)
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
        flowrl.train(there, run, resume=True, quiet=True)
    saved = load_file(run / "checkpoints/000004/current.safetensors")
    assert {name: p.tolist() for name, p in saved.items()} == here


def test_a_missing_server_is_found_before_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    config = toy(tmp_path / "toy", asking(url, retries=0), "model.scale=0.3")
    monkeypatch.setattr("toykit.LinearFlow", lambda **_: pytest.fail("loaded"))
    with pytest.raises(RewardError, match=f"no server answers: {url}"):
        flowrl.train(config, tmp_path / "run", quiet=True)


@pytest.mark.integration
def test_waiting_does_not_hold_up_the_end_of_the_program() -> None:
    """Scores are asked for in a thread, for ten minutes; the program wants to end before."""
    code = f"""
import torch
from concurrent.futures import ThreadPoolExecutor
from flowrl.core.types import RewardBatch
from rewards.remote import remote
batch = RewardBatch(torch.zeros(1, 3, 2, 2), ["p"], torch.zeros(1), [{{}}], torch.zeros(1))
reward = remote(urls=["http://127.0.0.1:{free_port()}"], on_failure="wait", wait_s=600.0)
ThreadPoolExecutor(1).submit(reward, batch)
raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 3
