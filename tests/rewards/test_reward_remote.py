"""The reward that asks servers: right answers to the bit, wrong ones never a score, and servers
that come and go."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
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
from serving import Process, Scripted, batch_of, free_port, hosted, random_images, scores, wait_for
from torch import Tensor
from toykit import redness, toy, write_toy

import flowrl
from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError, DataError, RewardError, RunError
from flowrl.core.pixels import round_8bit
from flowrl.core.types import Reward, RewardBatch
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from flowrl.training.trainer import Trainer
from rewards.remote import remote
from rewards.remote.client import MODES
from rewards.remote.endpoints import Endpoint, Endpoints
from rewards.remote.read_request import Limits
from rewards.remote.wire import chunks_of
from rewards.shapes import shapes

ROOT = Path(__file__).resolve().parents[2]
RIGHT = [
    0.0,
    0.25,
    0.5,
    0.75,
    1.0,
    1.25,
]  # what the scripted server says of six images: their row in quarters
SIX = batch_of(random_images(6), group=[0, 0, 1, 1, 2, 2])


def fast(*urls: str, **options: Any) -> remote:
    """Return a client that does not wait long between tries."""
    return remote(urls=list(urls), **{"backoff": 0.001, **options})


# ------------------------------------------------------------------------------------ right answers


def test_shapes_over_http_equals_shapes_here() -> None:
    """To the bit, for rough images whose scores differ, in chunks that the server joins as it
    likes."""
    records = [record for records in all_records().values() for record in records[::9]]
    images = render(scenes_for(records, np.random.default_rng(0)))
    rough = (
        images + 0.1 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    ).clamp(0, 1)
    n = len(records)
    batch = RewardBatch(
        rough, [r["prompt"] for r in records], torch.arange(n) // 3, records, torch.zeros(n)
    )
    here = shapes()(batch)
    with hosted({"graded": shapes(), "strict": shapes(mode="strict")}, batch=16) as url:
        reward = remote(urls=[url], reward="graded", chunk=5, workers=3)
        reward.probe()
        assert torch.equal(reward(batch), here) and here.unique().numel() > n / 2
        clean = batch._replace(images=images)
        strict = remote(urls=[url], reward="strict")(clean)
        assert torch.equal(strict, shapes(mode="strict")(clean)) and strict.mean() > 0.9
    assert isinstance(reward, Reward)


def test_scores_keep_every_bit_and_nan_stays_nan() -> None:
    """Random bit patterns of float32, among them denormal numbers and NaN; infinity is not a
    score."""
    bits = torch.randint(
        -(2**31), 2**31 - 1, (4000,), generator=torch.Generator().manual_seed(1), dtype=torch.int64
    )
    values = bits.to(torch.int32).view(torch.float32)
    values = torch.where(values.isinf(), torch.nan, values)[:200]
    values[:3] = torch.tensor([1e-45, torch.nan, -torch.finfo(torch.float32).max])
    rows = [{"row": row} for row in range(200)]
    batch = batch_of(random_images(200, size=1))._replace(meta=rows)
    with hosted({"it": lambda b: torch.stack([values[m["row"]] for m in b.meta])}) as url:
        got = remote(urls=[url], chunk=7)(batch)
    assert torch.equal(got.isnan(), values.isnan()) and int(got.isnan().sum()) >= 1
    assert torch.equal(got.nan_to_num().view(torch.int32), values.nan_to_num().view(torch.int32))


def test_a_reward_sees_what_it_would_see_here() -> None:
    """Images (rounded to 8 bits), prompts, records, noise levels; which images belong
    together."""
    seen: list[RewardBatch] = []

    def spy(batch: RewardBatch) -> Tensor:
        seen.append(batch)
        return batch.sigma

    images = torch.rand(4, 3, 5, 7, generator=torch.Generator().manual_seed(0)) * 1.2 - 0.1
    sigma = torch.tensor([0.0, 0.1, 1 / 3, 1.0])
    meta: list[dict[str, Any]] = [
        {"x": [1, None, {"y": "\u00e9\U0001f600"}]},
        {},
        {"f": 0.1},
        {"big": 2**60},
    ]
    sent = RewardBatch(images, ["a", "\u00e9\n", "", "a"], torch.tensor([9, -2, 4, 9]), meta, sigma)
    with hosted({"spy": spy}) as url:
        assert torch.equal(remote(urls=[url])(sent), sigma)
    (got,) = seen
    order = [0, 3, 1, 2]  # a prompt's images go side by side
    assert torch.equal(got.images, round_8bit(images)[order]) and torch.equal(
        got.sigma, sigma[order]
    )
    assert got.prompts == [sent.prompts[i] for i in order] and got.meta == [meta[i] for i in order]
    assert got.group.tolist() == [0, 0, 1, 2]


def test_images_of_a_prompt_are_never_split() -> None:
    """Into chunks of 4: three groups of two, one of five, alternating; evaluation puts all prompts
    into group 0."""
    groups = [0, 1, 0, 1, 2, 2, 3, 3, 3, 3, 3]
    chunks = chunks_of(batch_of(random_images(11, size=1), group=groups), 4)
    assert chunks == [[0, 2, 1, 3], [4, 5], [6, 7, 8, 9, 10]]
    same = batch_of(random_images(4, size=1))._replace(group=torch.zeros(4, dtype=torch.int64))
    assert chunks_of(same, 2) == [[0, 1], [2, 3]]
    assert chunks_of(same._replace(prompts=["p"] * 4), 2) == [[0, 1, 2, 3]]


def test_no_images_need_no_server() -> None:
    assert fast(f"http://127.0.0.1:{free_port()}")(batch_of(random_images(0))).shape == (0,)


def test_it_works_inside_a_running_loop() -> None:
    """As in a notebook."""

    async def cell() -> Tensor:
        return fast(server.url)(SIX)

    with Scripted(scores()) as server:
        assert asyncio.run(cell()).tolist() == RIGHT


def test_work_is_shared_out() -> None:
    """Two servers that answer only once each has a request: the second goes where none is
    outstanding."""
    meet = threading.Barrier(2)

    def both(data: dict[str, Any]) -> Any:
        meet.wait(30)
        return scores()(data)

    with Scripted(both, scores()) as one, Scripted(both, scores()) as two:
        assert fast(one.url, two.url, chunk=2, workers=2)(SIX).tolist() == RIGHT
        assert len(one.asked) + len(two.asked) == 3 and one.asked and two.asked


# ------------------------------------------------------------------------------------ wrong answers


def said(values: Any) -> Any:
    return lambda data: json.dumps({"scores": {"it": values}}).encode()


HTML = b"<!doctype html><html><body>502 Bad Gateway</body></html>"
FAULTS: dict[str, tuple[Any, str]] = {
    "500": (
        lambda data: (500, b'{"error": "CUDA out of memory", "kind": "reward"}'),
        "HTTP 500: CUDA out of memory",
    ),
    "503 in html": (lambda data: (503, HTML), "HTTP 503: '<!doctype"),
    "404 of a proxy": (lambda data: (404, b'{"detail": "no route"}'), "HTTP 404"),
    "redirect": (lambda data: (302, b""), "HTTP 302: nothing"),
    "hung up": (lambda data: None, "RemoteProtocolError"),
    "html": (lambda data: HTML, "expected JSON, got '<!doctype"),
    "empty": (lambda data: b"", "expected JSON, got nothing"),
    "truncated": (lambda data: scores()(data)[:-7], "expected JSON"),  # type: ignore[index]
    "bytes": (lambda data: b"\xff\xfe\x00", "expected JSON"),
    "nested": (lambda data: b"[" * 60_000, "expected JSON"),
    "a list": (lambda data: b"[0, 0, 0, 0, 0, 0]", "expected a JSON object"),
    "no scores": (lambda data: b'{"ok": true}', "expected an object with scores"),
    "scores as a list": (
        lambda data: b'{"scores": [0, 0, 0, 0, 0, 0]}',
        "expected an object with scores",
    ),
    "another reward": (scores("other"), r"expected scores of it, got those of \['other'\]"),
    "one too few": (said(RIGHT[:-1]), "expected a list of 6 scores, got 5"),
    "one too many": (said([*RIGHT, 0.0]), "expected a list of 6 scores, got 7"),
    "a number": (said(0.5), "expected a list of 6 scores, got float"),
    "NaN": (lambda data: b'{"scores": {"it": [0, 0, NaN, 0, 0, 0]}}', "NaN is no number of JSON"),
    "Infinity": (
        lambda data: b'{"scores": {"it": [0, 0, Infinity, 0, 0, 0]}}',
        "Infinity is no number",
    ),
    "1e999": (
        lambda data: b'{"scores": {"it": [0, 0, 1e999, 0, 0, 0]}}',
        "expected a finite number or null",
    ),
    "beyond float32": (said([0, 0, 1e39, 0, 0, 0]), "expected a finite number or null"),
    "a huge whole number": (said([0, 0, 10**400, 0, 0, 0]), "expected a finite number or null"),
    "text": (said(["0.5"] * 6), "expected a finite number or null as a score, got '0.5'"),
    "true": (said([True] * 6), "expected a finite number or null as a score, got 'True'"),
    "nested scores": (said([[0.5]] * 6), "expected a finite number or null"),
    "endless": (lambda data: b" " * 100_000, "an answer of more than"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_answer_is_never_a_score(name: str) -> None:
    """Tried again it is put right by a good answer; for ever it stops the run, or drops the
    images."""
    reply, message = FAULTS[name]
    with Scripted(reply, scores()) as server:
        assert fast(server.url, reward="it")(SIX).tolist() == RIGHT and len(server.asked) == 2
    with Scripted(reply) as server:
        with pytest.raises(RewardError, match=message) as error:
            fast(server.url, reward="it", retries=1)(SIX)
        assert (
            server.url in str(error.value)
            and "tried 2 times" in str(error.value)
            and len(server.asked) == 2
        )
        assert fast(server.url, reward="it", retries=0, on_failure="drop_group")(SIX).isnan().all()


def test_a_slow_answer_is_a_failure() -> None:
    gone = threading.Event()

    def slow(data: dict[str, Any]) -> Any:
        gone.wait(60)

    with Scripted(slow, scores()) as server:
        assert fast(server.url, timeout=0.2)(SIX).tolist() == RIGHT
    with (
        Scripted(slow) as server,
        pytest.raises(RewardError, match=r"no answer within 0\.1 s \(tried 1 times\)"),
    ):
        fast(server.url, timeout=0.1, retries=0)(SIX)
    gone.set()


def test_null_is_not_scored_and_not_tried_again() -> None:
    with Scripted(scores(values=lambda data: [None, 1, 0.5, None, -1e-30, 3])) as server:
        got = fast(server.url)(SIX)
    assert got.isnan().tolist() == [True, False, False, True, False, False]
    assert (
        torch.equal(got[[1, 2, 4, 5]], torch.tensor([1, 0.5, -1e-30, 3])) and len(server.asked) == 1
    )


def test_a_failed_request_is_tried_at_another_server(caplog: pytest.LogCaptureFixture) -> None:
    with Scripted(FAULTS["500"][0]) as bad, Scripted(scores()) as good:
        dead = f"http://127.0.0.1:{free_port()}"
        reward = fast(bad.url, dead, good.url, chunk=2, workers=1, backoff=0.02)
        reward.probe()
        assert reward(SIX).tolist() == RIGHT and len(good.asked) == 3
        reward = fast(bad.url, good.url, retries=1)
        reward._endpoints.all[
            1
        ].sent = 100  # so that the bad one is the first choice for a long time
        assert reward(SIX).tolist() == RIGHT
    assert f"going on without {dead}" in caplog.text


def test_drop_group_drops_whole_groups_only(caplog: pytest.LogCaptureFixture) -> None:
    """One image of group 1 is never scored. Also its neighbours in that group become NaN, and
    nobody else's."""

    def picky(data: dict[str, Any]) -> Any:
        return (500, b"no") if {"row": 3} in data["meta"] else scores()(data)

    batch = batch_of(random_images(6), group=[0, 1, 1, 1, 2, 1])._replace(
        prompts=["a", "b", "b", "b", "c", "another"]
    )
    with Scripted(picky) as server:
        got = fast(
            server.url, chunk=1, workers=1, retries=1, on_failure="drop_group", backoff=0.02
        )(batch)
    assert got.isnan().tolist() == [False, True, True, True, False, True]
    assert got[[0, 4]].tolist() == [0.0, 1.0] and "4 of 6 images are not scored" in caplog.text


def test_what_the_server_refuses_for_good_is_not_tried_again() -> None:
    calls = (
        (
            400,
            {"kind": "request", "error": "images: expected \n a list"},
            RewardError,
            "images: expected a list",
        ),
        (413, {"kind": "size", "error": "send fewer"}, RewardError, "send fewer"),
        (401, {"kind": "token", "error": "expected"}, RewardError, "refuses the token.*token_env"),
        (500, {"kind": "data", "error": "record 3 is wrong"}, DataError, "record 3 is wrong"),
    )
    for status, answer, kind, message in calls:
        for mode in MODES:
            with Scripted(lambda data: (status, json.dumps(answer).encode())) as server:  # noqa: B023 - used at once
                with pytest.raises(kind, match=message) as error:
                    fast(server.url, on_failure=mode)(SIX)
                assert len(server.asked) == 1 and server.url in str(error.value)


def test_what_cannot_be_sent_is_an_error_of_the_data() -> None:
    with Scripted(scores()) as server:
        broken = SIX.images.clone()
        broken[2, 0, 1, 1] = torch.nan
        with pytest.raises(DataError, match="NaN"):
            fast(server.url)(SIX._replace(images=broken))
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


# ------------------------------------------------------------------------------------------ waiting


def test_wait_tries_on_until_there_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    faults = [
        FAULTS[name][0]
        for name in ("500", "html", "truncated", "one too few", "NaN", "1e999", "redirect")
    ]
    with Scripted(*faults, scores()) as server:
        reward = fast(server.url, reward="it", retries=0, on_failure="wait", chunk=6)
        assert reward(SIX).tolist() == RIGHT and len(server.asked) == len(faults) + 1
    said = [record.message for record in caplog.records if "trying on" in record.message]
    assert (
        len(said) == 1 and server.url in said[0] and "HTTP 500" in said[0]
    )  # one message in 10 seconds


def test_wait_ends() -> None:
    with (
        Scripted(FAULTS["500"][0]) as server,
        pytest.raises(RewardError, match=r"HTTP 500.*\(waited 0\.3 s\)"),
    ):
        fast(server.url, on_failure="wait", wait_s=0.3)(SIX)
    assert len(server.asked) > 3


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


def test_probe_says_what_is_wrong_and_can_wait() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RewardError, match=f"no server answers: {url}: ConnectError.*serve-rewards"):
        fast(url, retries=1).probe()
    with Scripted(scores()) as server:
        for health, message in (
            (HTML, "expected JSON"),
            (b"{}", "health of a reward server"),
            ((503, HTML), "HTTP 503"),
        ):
            server.health = health
            with pytest.raises(RewardError, match=message):
                fast(server.url, retries=0).probe()
            with ThreadPoolExecutor(1) as pool:
                probed = pool.submit(fast(server.url, on_failure="wait", retries=0).probe)
                server.health = json.dumps({"rewards": ["it"]}).encode()
                probed.result(60)
    with hosted({"it": redness}, limits=Limits(images=31)) as url:
        with pytest.raises(ConfigError, match="at most 31 images per request, got 32"):
            fast(url).probe()
        fast(url, chunk=31).probe()


# -------------------------------------------------------------------------------------- the breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def failed(pool: Endpoints, *only: str) -> Endpoint:
    one = pool.take()
    assert one is not None and (not only or one.url in only)
    pool.give_failed(one, "down")
    return one


def test_the_breaker_opens_after_three_failures_and_closes_after_an_answer() -> None:
    """By the clock of the test: rests of 1, 2, 4, 8, at most 10 seconds, each ended by one request
    that tries."""
    clock = Clock()
    pool = Endpoints(["a"], rest=1.0, clock=clock)
    for _ in range(2):
        failed(pool)
    good = pool.take()
    assert good is not None
    pool.give_answered(good)  # so the count begins anew
    for rest in (1, 2, 4, 8, 10, 10):
        for _ in range(3 if rest == 1 else 1):
            failed(pool)
        assert (
            pool.take() is None
            and pool.reasons() == "a: down"
            and pool.soonest() == pytest.approx(rest)
        )
        clock.now += rest - 0.01
        assert pool.take() is None
        clock.now += 0.02
        trial = pool.take()
        assert trial is not None and pool.take() is None  # one only
        pool.give(trial)  # cancelled: nothing learnt
    trial = pool.take()
    assert trial is not None
    pool.give_answered(trial)
    assert pool.reasons() == "" and [pool.take() for _ in range(3)] == [trial] * 3
    for _ in range(3):
        pool.give_failed(trial, "down")
    assert pool.take() is None
    clock.now += 1.01
    assert pool.take() is trial  # the first rest is short again


def test_failures_under_way_do_not_prolong_a_rest() -> None:
    clock = Clock()
    pool = Endpoints(["a"], rest=1.0, clock=clock)
    taken = [pool.take() for _ in range(6)]
    for one in taken:
        assert one is not None
        pool.give_failed(one, "down")
    clock.now += 1.01
    assert pool.take() is not None


def test_the_least_busy_server_is_taken() -> None:
    pool = Endpoints(["a", "b", "c"])
    taken = [pool.take() for _ in range(6)]
    assert [one.url for one in taken if one] == ["a", "b", "c", "a", "b", "c"]
    assert taken[1] is not None and taken[4] is taken[1]
    pool.give_answered(taken[1])
    pool.give_answered(taken[1])
    assert pool.take() is taken[1] and pool.take(avoid=taken[1]) is not taken[1]
    for _ in range(3):
        failed(pool, "b")
    assert {one.url for one in (pool.take() for _ in range(4)) if one} == {"a", "c"}
    alone = Endpoints(["a"])
    first = alone.take()
    assert alone.take(avoid=first) is first


def test_a_resting_server_is_not_asked() -> None:
    """Six chunks, one after the other: the bad server gets three requests, then the good one
    all."""
    batch = batch_of(random_images(12), group=[row // 2 for row in range(12)])
    with Scripted(FAULTS["500"][0]) as bad, Scripted(scores()) as good:
        reward = fast(bad.url, good.url, chunk=2, workers=1)
        reward._endpoints = Endpoints(reward.urls, rest=1e6)
        got = reward(batch)
    assert (
        got.tolist() == [row / 4 for row in range(12)]
        and len(bad.asked) == 3
        and len(good.asked) == 6
    )


# ----------------------------------------------------------------------------- tokens and arguments


def test_the_token_is_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "correct horse")
    caplog.set_level(logging.DEBUG)
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
    monkeypatch.setenv("REWARD_TOKEN", "correct horse")
    for echo in (
        lambda data: (500, b"you said correct horse"),
        lambda data: b"you said correct horse",
    ):
        with Scripted(echo) as server, pytest.raises(RewardError, match=r"you said \*\*\*"):
            fast(server.url, token_env="REWARD_TOKEN", retries=0)(SIX)
        assert server.headers[0]["authorization"] == "Bearer correct horse"
    assert "horse" not in caplog.text
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(ConfigError, match="environment variable REWARD_TOKEN"):
        fast(url, token_env="REWARD_TOKEN")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "urls: expected one address or more"),
        ({"urls": ["http://a", "http://a/"]}, "each once"),
        ({"urls": ["10.0.0.5:8321"]}, "urls: expected addresses like"),
        ({"urls": ["ftp://a"]}, "urls"),
        ({"urls": ["http://a:x"]}, "urls"),
        ({"urls": ["http://a/score?x=1"]}, "urls"),
        ({"urls": ["http://me:secret@a"]}, "token_env"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": math.nan}, "timeout"),
        ({"retries": -1}, "retries"),
        ({"backoff": -0.1}, "backoff"),
        ({"workers": 0}, "workers"),
        ({"chunk": 0}, "chunk"),
        ({"wait_s": -1.0}, "wait_s"),
        ({"on_failure": "zero"}, "on_failure: expected one of wait, drop_group, stop"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        remote(**{"urls": ["http://localhost:1"], **options})
    assert "secret" not in str(error.value)


def test_a_config_can_name_it(tmp_path: Path) -> None:
    config = toy(
        tmp_path,
        "rewards.red={fn: remote, urls: ['http://h:1/', 'https://g/x'], on_failure: wait, wait_s: "
        "5}",
    )
    reward = config.rewards["red"].make()
    assert (reward.urls, reward.on_failure, reward.wait_s) == (
        ["http://h:1", "https://g/x"],
        "wait",
        5.0,
    )
    with pytest.raises(ConfigError, match="on_failure"):
        toy(tmp_path, "rewards.red={fn: remote, urls: ['http://h:1'], on_failure: zero}")


# --------------------------------------------------------------------------------------- whole runs


def asking(url: str, **options: Any) -> str:
    call = {"fn": "remote", "urls": [url], "reward": "red", "backoff": 0.05, **options}
    return f"rewards.red={json.dumps(call)}"


def unbroken(config: Config) -> Trainer:
    """Train all iterations in memory, without evaluations and reports -> the trainer."""
    trainer = Trainer(config)
    for _ in range(config.train.iterations):
        trainer.step()
    return trainer


@pytest.mark.integration
def test_a_run_outlives_its_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed while it scores, in mid-run, and started again: the run ends as one that
    scored itself."""
    monkeypatch.setattr("rewards.remote.client.LONGEST", 0.2)  # so that the test need not wait
    monkeypatch.setattr("rewards.remote.endpoints.LONGEST", 0.2)
    config, gate, port = write_toy(tmp_path / "toy"), tmp_path / "gate", free_port()
    gate.touch()
    argv = (config, "--plugin", "toykit", "--port", str(port), "--batch", "1")
    first = Process(*argv, f"rewards={{red: {{fn: toykit.gate, file: {gate}, call: 3}}}}")

    def kill_and_restart() -> None:
        wait_for(gate.with_suffix(".reached").exists)  # two iterations are scored
        first.end(signal.SIGKILL)
        wait_for(lambda: "trying on" in caplog.text)
        again.enter_context(hosted({"red": redness}, port=port))

    url = first.url()
    with ExitStack() as again, ThreadPoolExecutor(1) as pool:
        killer = pool.submit(kill_and_restart)
        there = unbroken(
            load_config(config, [asking(url, on_failure="wait", wait_s=120.0)], ("toykit",))
        )
        killer.result(60)
    here = unbroken(load_config(config, [], ("toykit",)))
    assert {name: p.tolist() for name, p in there.params.items()} == {
        n: p.tolist() for n, p in here.params.items()
    }


@pytest.mark.integration
def test_a_run_stops_without_a_score_and_goes_on_later(tmp_path: Path) -> None:
    """`stop`: the error names address and reason, a checkpoint is written, and the resumed run is
    the unbroken one."""
    calls = []

    def fails_once(batch: RewardBatch) -> Tensor:
        calls.append(len(batch.prompts))
        if len(calls) == 4:  # held-out images, then two iterations were scored
            raise RuntimeError("the device is gone")
        return redness(batch)

    run = tmp_path / "run"
    with hosted({"red": fails_once}, batch=1) as url:
        there = toy(tmp_path / "toy", asking(url, retries=0))
        with pytest.raises(
            RunError, match=f"{url}: HTTP 500: RuntimeError: the device is gone"
        ) as error:
            flowrl.train(there, run, quiet=True)
        assert "saved" in str(error.value) and "--resume" in str(error.value)
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
        flowrl.train(there, run, resume=True, quiet=True)
    saved = load_file(run / "checkpoints/000004/current.safetensors")
    here = unbroken(toy(tmp_path / "toy"))
    assert {name: p.tolist() for name, p in saved.items()} == {
        n: p.tolist() for n, p in here.params.items()
    }


def test_a_missing_server_is_found_before_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    config = toy(tmp_path / "toy", asking(url, retries=0), "model.scale=0.3")
    monkeypatch.setattr("toykit.LinearFlow", lambda **_: pytest.fail("loaded"))
    with pytest.raises(RewardError, match=f"no server answers: {url}"):
        flowrl.train(config, tmp_path / "run", quiet=True)
