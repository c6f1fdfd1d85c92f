"""The reward that asks servers: a bad answer is never a score, and servers that come and go."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from serving import RIGHT, SIX, Scripted, batch_of, fast, free_port, random_images, scores

from flowrl.core.errors import DataError, RewardError
from rewards.remote.client import MODES
from rewards.remote.endpoints import Endpoint, Endpoints

HTML = b"<!doctype html><html><body>502 Bad Gateway</body></html>"


def said(values: Any) -> bytes:
    return json.dumps({"scores": {"it": values}}).encode()


OUT_OF_MEMORY = (500, b'{"error": "CUDA out of memory", "kind": "reward"}')
SIX_OF = "expected a list of 6 scores, got"
NO_NUMBER = "expected a finite number or null"
# name -> (body, or status and body, or None: no answer; what the error says)
FAULTS: dict[str, tuple[Any, str]] = {
    "500": (OUT_OF_MEMORY, "HTTP 500: CUDA out of memory"),
    "503 in html": ((503, HTML), "HTTP 503: '<!doctype"),
    "404 of a proxy": ((404, b'{"detail": "no route"}'), "HTTP 404"),
    "redirect": ((302, b""), "HTTP 302: nothing"),
    "hung up": (None, "RemoteProtocolError"),
    "html": (HTML, "expected JSON, got '<!doctype"),
    "empty": (b"", "expected JSON, got nothing"),
    "truncated": (said(RIGHT)[:-7], "expected JSON"),
    "bytes": (b"\xff\xfe\x00", "expected JSON"),
    "nested": (b"[" * 60_000, "expected JSON"),
    "a list": (b"[0, 0, 0, 0, 0, 0]", "expected a JSON object"),
    "no scores": (b'{"ok": true}', "expected an object with scores"),
    "scores as a list": (b'{"scores": [0, 0, 0, 0, 0, 0]}', "expected an object with scores"),
    "another reward": (b'{"scores": {"other": []}}', r"scores of it, got those of \['other'\]"),
    "one too few": (said(RIGHT[:-1]), f"{SIX_OF} 5"),
    "one too many": (said([*RIGHT, 0.0]), f"{SIX_OF} 7"),
    "a number": (said(0.5), f"{SIX_OF} float"),
    "NaN": (b'{"scores": {"it": [0, 0, NaN, 0, 0, 0]}}', "NaN is no number of JSON"),
    "Infinity": (b'{"scores": {"it": [0, 0, Infinity, 0, 0, 0]}}', "Infinity is no number"),
    "1e999": (b'{"scores": {"it": [0, 0, 1e999, 0, 0, 0]}}', NO_NUMBER),
    "beyond float32": (said([0, 0, 1e39, 0, 0, 0]), NO_NUMBER),
    "a huge whole number": (said([0, 0, 10**400, 0, 0, 0]), NO_NUMBER),
    "text": (said(["0.5"] * 6), f"{NO_NUMBER} as a score, got '0.5'"),
    "true": (said([True] * 6), f"{NO_NUMBER} as a score, got 'True'"),
    "nested scores": (said([[0.5]] * 6), NO_NUMBER),
    "endless": (b" " * 100_000, "an answer of more than"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_answer_is_never_a_score(name: str) -> None:
    """Tried again it is put right; for ever it stops the run, or drops the images."""
    reply, message = FAULTS[name]
    with Scripted(lambda data: reply, scores()) as server:
        assert fast(server.url, reward="it")(SIX).tolist() == RIGHT and len(server.asked) == 2
    with Scripted(lambda data: reply) as server:
        with pytest.raises(RewardError, match=message) as error:
            fast(server.url, reward="it", retries=1)(SIX)
        assert server.url in str(error.value) and "tried 2 times" in str(error.value)
        assert len(server.asked) == 2
        assert fast(server.url, reward="it", retries=0, on_failure="drop_group")(SIX).isnan().all()


def test_a_slow_answer_is_a_failure() -> None:
    gone = threading.Event()

    def slow(data: dict[str, Any]) -> Any:
        gone.wait(60)

    with Scripted(slow, scores()) as server:
        assert fast(server.url, timeout=0.2)(SIX).tolist() == RIGHT
    late = r"no answer within 0\.1 s \(tried 1 times\)"
    with Scripted(slow) as server, pytest.raises(RewardError, match=late):
        fast(server.url, timeout=0.1, retries=0)(SIX)
    gone.set()


def test_null_is_not_scored_and_not_tried_again() -> None:
    with Scripted(scores(values=lambda data: [None, 1, 0.5, None, -1e-30, 3])) as server:
        got = fast(server.url)(SIX)
        assert len(server.asked) == 1
    assert got.isnan().tolist() == [True, False, False, True, False, False]
    assert torch.equal(got[[1, 2, 4, 5]], torch.tensor([1, 0.5, -1e-30, 3]))


def test_a_failed_request_is_tried_at_another_server(caplog: pytest.LogCaptureFixture) -> None:
    with Scripted(lambda data: OUT_OF_MEMORY) as bad, Scripted(scores()) as good:
        dead = f"http://127.0.0.1:{free_port()}"
        reward = fast(bad.url, dead, good.url, chunk=2, workers=1, backoff=0.02)
        reward.probe()
        assert reward(SIX).tolist() == RIGHT and len(good.asked) == 3
        reward = fast(bad.url, good.url, retries=1)
        reward._endpoints.all[1].sent = 100  # the bad one is the first choice for a long time
        assert reward(SIX).tolist() == RIGHT
    assert f"going on without {dead}" in caplog.text


def test_drop_group_drops_whole_groups_only(caplog: pytest.LogCaptureFixture) -> None:
    """One image of group 1 is never scored: its neighbours become NaN, and nobody else's."""

    def picky(data: dict[str, Any]) -> Any:
        return (500, b"no") if {"row": 3} in data["meta"] else scores()(data)

    batch = batch_of(random_images(6), group=[0, 1, 1, 1, 2, 1])
    batch = batch._replace(prompts=["a", "b", "b", "b", "c", "another"])
    options: dict[str, Any] = {"chunk": 1, "workers": 1, "retries": 1, "backoff": 0.02}
    with Scripted(picky) as server:
        got = fast(server.url, on_failure="drop_group", **options)(batch)
    assert got.isnan().tolist() == [False, True, True, True, False, True]
    assert got[[0, 4]].tolist() == [0.0, 1.0] and "4 of 6 images are not scored" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_what_the_server_refuses_for_good_is_not_tried_again(mode: str) -> None:
    for status, kind, words, error, message in (
        (400, "request", "images: expected \n a list", RewardError, "images: expected a list"),
        (413, "size", "send fewer", RewardError, "send fewer"),
        (401, "token", "expected", RewardError, "refuses the token.*token_env"),
        (500, "data", "record 3 is wrong", DataError, "record 3 is wrong"),
    ):
        answer = (status, json.dumps({"kind": kind, "error": words}).encode())
        with Scripted(lambda data: answer) as server:  # noqa: B023 - used at once
            with pytest.raises(error, match=message) as raised:
                fast(server.url, on_failure=mode)(SIX)
            assert len(server.asked) == 1 and server.url in str(raised.value)


def test_wait_tries_on_until_there_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    names = ["500", "html", "truncated", "one too few", "NaN", "1e999", "redirect"]
    replies = iter([FAULTS[name][0] for name in names])
    with Scripted(*[lambda data: next(replies)] * 7, scores()) as server:
        reward = fast(server.url, reward="it", retries=0, on_failure="wait", chunk=6)
        assert reward(SIX).tolist() == RIGHT and len(server.asked) == 8
    told = [record.message for record in caplog.records if "trying on" in record.message]
    assert len(told) == 1  # in 10 seconds
    assert server.url in told[0] and "HTTP 500" in told[0]


def test_wait_ends() -> None:
    ends = pytest.raises(RewardError, match=r"HTTP 500.*\(waited 0\.3 s\)")
    with Scripted(lambda data: OUT_OF_MEMORY) as server, ends:
        fast(server.url, on_failure="wait", wait_s=0.3)(SIX)
    assert len(server.asked) > 3


# -------------------------------------------------------------------------------------- the breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def taken(pool: Endpoints, avoid: Endpoint | None = None) -> Endpoint:
    one = pool.take(avoid)
    assert one is not None
    return one


def test_the_breaker_opens_after_three_failures_and_closes_after_an_answer() -> None:
    """Rests of 1, 2, 4, 8, at most 10 seconds, each ended by one request that tries."""
    clock = Clock()
    pool = Endpoints(["a"], rest=1.0, clock=clock)
    for _ in range(2):
        pool.give_failed(taken(pool), "down")
    pool.give_answered(taken(pool))  # so the count begins anew
    for rest in (1, 2, 4, 8, 10, 10):
        for _ in range(3 if rest == 1 else 1):
            pool.give_failed(taken(pool), "down")
        assert pool.take() is None and pool.reasons() == "a: down"
        assert pool.soonest() == pytest.approx(rest)
        clock.now += rest - 0.01
        assert pool.take() is None
        clock.now += 0.02
        trial = taken(pool)
        assert pool.take() is None  # one only
        pool.give(trial)  # cancelled: nothing learnt
    # an answer ends the trouble
    trial = taken(pool)
    pool.give_answered(trial)
    assert pool.reasons() == "" and [pool.take() for _ in range(3)] == [trial] * 3
    # the first rest is short again
    for _ in range(3):
        pool.give_failed(trial, "down")
    assert pool.take() is None
    clock.now += 1.01
    assert pool.take() is trial


def test_failures_under_way_do_not_prolong_a_rest() -> None:
    clock = Clock()
    pool = Endpoints(["a"], rest=1.0, clock=clock)
    for one in [taken(pool) for _ in range(6)]:
        pool.give_failed(one, "down")
    clock.now += 1.01
    assert pool.take() is not None


def test_the_least_busy_server_is_taken() -> None:
    pool = Endpoints(["a", "b", "c"])
    first = [taken(pool) for _ in range(6)]
    assert [one.url for one in first] == ["a", "b", "c", "a", "b", "c"]
    b = first[1]
    assert first[4] is b
    pool.give_answered(b)
    pool.give_answered(b)
    assert pool.take() is b and pool.take(avoid=b) is not b
    for _ in range(3):
        pool.give_failed(taken(pool), "down")
    assert {taken(pool).url for _ in range(4)} == {"a", "c"}
    alone = Endpoints(["a"])
    only = taken(alone)
    assert alone.take(avoid=only) is only


def test_a_resting_server_is_not_asked() -> None:
    """Six chunks: the bad server gets three requests, then the good one all."""
    batch = batch_of(random_images(12), group=[row // 2 for row in range(12)])
    with Scripted(lambda data: OUT_OF_MEMORY) as bad, Scripted(scores()) as good:
        reward = fast(bad.url, good.url, chunk=2, workers=1)
        reward._endpoints = Endpoints(reward.urls, rest=1e6)
        assert reward(batch).tolist() == [row / 4 for row in range(12)]
        assert len(bad.asked) == 3 and len(good.asked) == 6
