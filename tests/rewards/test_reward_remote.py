"""The reward that asks servers: scores right to the bit, what it sends, its token."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import (
    RIGHT,
    SIX,
    Scripted,
    batch_of,
    fast,
    free_port,
    hosted,
    random_images,
    scores,
)
from torch import Tensor
from toykit import redness, toy

from flowrl.core.errors import ConfigError, DataError, RewardError
from flowrl.core.pixels import round_8bit
from flowrl.core.prompts import PromptSet, check_records
from flowrl.core.types import Reward, RewardBatch
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from rewards.remote import remote
from rewards.remote.messages import chunks_of
from rewards.remote.read_request import RequestLimits
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
