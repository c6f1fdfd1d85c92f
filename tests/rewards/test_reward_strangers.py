"""What a stranger sends to a reward server, and what a server of a stranger answers."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from serving import (
    SIX,
    Scripted,
    batch_of,
    data_of,
    fast,
    hosted,
    png,
    random_images,
    scores,
    served,
)
from starlette.testclient import TestClient
from toykit import redness

from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError, FlowRLError, printable
from flowrl.core.version import __version__
from rewards.remote.http import make_app
from rewards.remote.messages import read_fault, refusal
from rewards.remote.read_request import RequestLimits, RequestRefused, parse
from rewards.remote.request_queue import RequestQueue
from rewards.remote.server import settings_of

HERE = "http://localhost"


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
