"""What a stranger sends to a reward server, and what a server of a stranger answers."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from serving import (
    SIX,
    WAIT,
    Held,
    Scripted,
    batch_of,
    data_of,
    fast,
    hosted,
    png,
    random_images,
    scores,
    served,
    wait_for,
)
from starlette.testclient import TestClient
from toykit import redness

from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError, FlowRLError, RewardError, printable
from flowrl.core.version import __version__
from rewards.remote.http import make_app
from rewards.remote.messages import read_fault, refusal
from rewards.remote.read_request import (
    Decoded,
    RequestLimits,
    RequestRefused,
    parse,
    parse_records,
)
from rewards.remote.request_queue import RequestQueue
from rewards.remote.server import settings_of

HERE = "http://localhost"
JSON = {"Content-Type": "application/json"}


def edit_request(times: int, images: int = 1, side: int = 64) -> bytes:
    """Ask about small images that start from one source, named so many times."""
    blank = png(torch.zeros(3, side, side))
    data = data_of(torch.zeros(images, 3, 4, 4), sources=[blank], source=[[0] * times] * images)
    return json.dumps(data).encode()


def test_a_source_counts_as_often_as_it_is_named() -> None:
    """64 x 64 pixels a thousand times are 4.1 million, from a request of 4 kB."""
    limits = RequestLimits(all_pixels=2**20)
    assert len(edit_request(1000)) < 5000
    with pytest.raises(RequestRefused, match="named 1000 times") as caught:
        parse(edit_request(1000), ("red",), RequestLimits(images=32, all_pixels=2**20))
    assert caught.value.status == 413
    with pytest.raises(RequestRefused, match="as often as they are named, got 4096000; send"):
        parse(edit_request(1000), ("red",), limits)
    # 16 images that start from one source, as a group of an editing run does
    found = parse(edit_request(1, images=16), ("red",), limits)
    assert [len(source) for source in found.source] == [1] * 16
    assert found.source[0] is found.source[15]


@pytest.mark.parametrize("of", ["[]", "{}", "1"])
def test_many_small_values_are_refused_before_they_are_made(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MB of empty lists would be 90 MB; the limit is of any request, also of records."""
    monkeypatch.setattr("rewards.remote.read_request.parse_json", None)
    body = b'{"meta": [' + f"{of},".encode() * 2**20 + b'1], "images": [], "prompts": []}'
    for read in (lambda: parse(body, ("a",), RequestLimits()), lambda: parse_records(body, "a")):
        with pytest.raises(RequestRefused, match="at most 1048576 commas and brackets") as caught:
            read()
        assert (caught.value.status, caught.value.kind) == (413, "size")


def test_a_key_that_stands_twice_is_refused() -> None:
    twice = edit_request(1)[:-1] + b', "prompts": ["another"]}'
    with pytest.raises(RequestRefused, match="the key 'prompts' stands twice"):
        parse(twice, ("red",), RequestLimits())
    with pytest.raises(Exception, match="the key 'fault' stands twice"):
        read_fault(b'{"fault": null, "fault": "no"}')


def test_web_pages_are_refused() -> None:
    queue = RequestQueue({"red": redness}, max_wait_s=0)
    with TestClient(make_app(queue, RequestLimits()), base_url=HERE) as client:
        for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            assert client.get("/health", headers=headers).status_code == 403
            asked = client.post("/score", json=data_of(random_images(1)), headers=headers)
            assert asked.status_code == 403 and asked.json()["kind"] == "request"
        assert client.get("/health").status_code == 200
    queue.close()


# what a terminal obeys: a title, a cleared screen, text from right to left
WORDS = "\x1b]0;owned\x07\x1b[2J\u202edeggod\r\x9b31m"


def test_words_of_a_server_are_no_commands_to_a_terminal() -> None:
    error = json.dumps({"error": WORDS, "kind": "data"}).encode()
    texts = [str(refusal(500, error, "http://x")), str(refusal(500, error[:-1], "http://x"))]
    texts.append(str(read_fault(json.dumps({"fault": WORDS}).encode())))
    for text in texts:
        assert text.replace("\\", "").isprintable() and "owned" in text, text
    assert printable("two\n\tlines, ü 日本") == "two\n\tlines, ü 日本"
    with Scripted(lambda data: (500, error)) as server, pytest.raises(DataError) as caught:
        fast(server.url, reward="it")(SIX)
    assert "\x1b" not in str(caught.value)


def test_messages_of_the_command_line_are_printable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> int:
        raise FlowRLError(f"a file says {WORDS}")

    monkeypatch.setattr("flowrl.cli.main._run", fail)
    assert main(["configs"]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\\x1b]0;owned\\x07" in said and "\\u202e" in said


def app_of(settings: dict[str, Any], queue: RequestQueue) -> Any:
    return make_app(queue, RequestLimits(), b"", settings)


def test_another_version_is_said(caplog: pytest.LogCaptureFixture) -> None:
    told = {"rewards": ["it"], "flowrl": "0.0.9\x1b[2J"}
    with Scripted(scores()) as server:
        server.health = json.dumps(told).encode()
        reward = fast(server.url, reward="it")
        with caplog.at_level(logging.WARNING):
            reward.probe()
            reward.probe()
    [record] = caplog.records
    assert f"runs flowrl 0.0.9\\x1b[2J, here it is {__version__}" in record.getMessage()


def test_servers_have_to_serve_one_reward() -> None:
    queue = RequestQueue({"red": redness}, max_wait_s=0)
    strict = {"red": {"fn": "shapes", "mode": "strict"}}
    loose = {"red": {"fn": "shapes", "mode": "graded"}}
    with served(app_of(strict, queue)) as one, served(app_of(loose, queue)) as two:
        fast(one, reward="red").probe()
        with pytest.raises(
            ConfigError, match="serve different rewards: mode: '(strict|graded)' and"
        ):
            fast(one, two, reward="red").probe()
        fast(one, reward="red", settings={"mode": "strict"}).probe()
        with pytest.raises(
            ConfigError, match="expected here and told by .*: mode: 'x' and 'strict'"
        ):
            fast(one, reward="red", settings={"mode": "x"}).probe()
    queue.close()


def test_a_server_that_was_started_again_with_another_reward() -> None:
    """At the same address, in the middle of a run: its scores are not taken. The same reward on
    another device is the same."""
    queue = RequestQueue({"red": redness}, max_wait_s=0)
    told = {"red": {"fn": "shapes", "mode": "strict"}}
    with served(app_of(told, queue)) as url:
        reward = fast(url, reward="red")
        reward.probe()
        assert reward(batch_of(random_images(2))).shape == (2,)
    other = {"red": {"fn": "shapes", "mode": "graded"}}
    with served(app_of(other, queue), int(url.rpartition(":")[2])):
        for asked in (reward, fast(url)):  # by its name, or as the only one
            asked._told = reward._told
            with pytest.raises(ConfigError, match="before and now serve different .*'strict' and"):
                asked(batch_of(random_images(2)))
    queue.close()


def test_settings_are_those_that_scores_depend_on() -> None:
    call = "{fn: toykit.redness, weight: 0.5, transform: {fn: threshold, at: 0.5}}"
    config = load_config(
        "shapes/flow_grpo", [f"rewards={{red: {call}}}", "eval.score=red"], ("toykit",)
    )
    assert settings_of(config) == {"red": {"fn": "toykit.redness"}}


def test_a_server_that_says_nothing_of_its_settings() -> None:
    """One of an earlier version is taken, unless settings are asked for."""
    with hosted({"red": redness}) as url:
        fast(url, reward="red").probe()
        assert fast(url, reward="red")(batch_of(random_images(2))).shape == (2,)
        with pytest.raises(ConfigError, match="settings: expected here .*: fn: 'shapes' and None"):
            fast(url, reward="red", settings={"fn": "shapes"}).probe()


# ---------------------------------------------------------------------- what all requests hold


def size_of(side: int, count: int = 1) -> int:
    """Return the bytes of decoded images: three a pixel."""
    return 3 * side * side * count


def test_decoded_pixels_of_all_requests_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of 48 KiB each, where 72 are allowed: the second is told when to come again, and
    nothing of it was decoded. One that never fits is refused for good."""
    held, images = Held(), random_images(1, size=128)
    limits = RequestLimits(held=size_of(128) * 3 // 2)
    with (
        closing(RequestQueue({"it": held}, batch=1, max_wait_s=0)) as queue,
        TestClient(make_app(queue, limits), base_url=HERE) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(client.post, "/score", json=data_of(images))
        held.reached.wait(WAIT)
        with monkeypatch.context() as patch:
            patch.setattr("rewards.remote.read_request._decode", None)
            full = client.post("/score", json=data_of(images))
        assert full.status_code == 503 and full.headers["retry-after"] == "1"
        assert full.json()["kind"] == "busy" and "--max-held-mb" in full.json()["error"]
        assert f"flowrl_held_bytes {size_of(128)}" in client.get("/metrics").text
        # what starts from a picture holds it as floats, four times as much
        edit = client.post("/score", content=edit_request(1, side=128), headers=JSON)
        assert edit.status_code == 413 and "take at most 0.1 MiB" in edit.json()["error"]
        held.go.set()
        assert first.result().status_code == 200
        assert client.post("/score", json=data_of(images)).status_code == 200
        assert "flowrl_held_bytes 0" in client.get("/metrics").text


def test_a_request_that_is_refused_or_given_up_holds_nothing() -> None:
    memory = Decoded(100)
    with pytest.raises(ValueError, match="broken"), memory.share() as take:
        take(60)
        with memory.share() as other, pytest.raises(RequestRefused) as caught:
            other(41)
        assert caught.value.status == 503 and memory.held == 60
        take(40)
        raise ValueError("broken")
    assert memory.held == 0
    # its thread may go on reading after the client has gone
    with pytest.raises(RequestRefused):
        take(1)
    assert memory.held == 0
    # and in the queue nothing waits for nobody
    held, one = Held(), parse(edit_request(1), ("it",), RequestLimits())
    with closing(RequestQueue({"it": held}, batch=1, max_wait_s=0)) as queue:
        queue.submit(one)
        held.reached.wait(WAIT)
        later = queue.submit(one)
        assert queue.waiting() == (1, 1)
        later.cancel()
        assert queue.waiting() == (0, 0)
        held.go.set()


def test_a_client_waits_for_a_server_that_is_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes again when it was told to, which is no try; after `timeout` seconds it is one."""
    monkeypatch.setattr("rewards.remote.http.HEADERS", {503: {"Retry-After": "0.05"}})
    held, batch = Held(), batch_of(random_images(1, size=128))
    limits = RequestLimits(held=size_of(128))
    with hosted({"it": held}, limits=limits) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(fast(url, retries=0), batch)
        held.reached.wait(WAIT)
        with pytest.raises(RewardError, match=r"HTTP 503: the decoded .*\(tried 1 times\)"):
            fast(url, retries=0, timeout=0.2)(batch)
        second = pool.submit(fast(url, retries=0), batch)
        wait_for(lambda: "asking again after 0.1 s" in caplog.text)
        held.go.set()
        assert torch.equal(first.result(), second.result())
    assert len(held.seen) == 2
