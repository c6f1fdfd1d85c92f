"""`flowrl serve-rewards`: what it refuses to start with, and a process that is stopped."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import toykit
from serving import WAIT, Process, batch_of, data_of, random_images, wait_for
from torch import Tensor
from toykit import apprentice, redness, toy, write_toy

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.core.local_server import read_token
from flowrl.core.types import RewardBatch
from rewards.remote.server import load_rewards, serve

TOKEN = "correct horse"
ROOT = Path(__file__).resolve().parents[2]


def test_a_reward_that_learns_is_refused(tmp_path: Path) -> None:
    config = toy(tmp_path)
    object.__setattr__(config.rewards["red"], "function", apprentice)
    with pytest.raises(ConfigError, match="rewards.red: toykit.redness learns"):
        load_rewards(config)


def test_a_reward_that_judges_latents_is_refused(tmp_path: Path) -> None:
    """They are not sent, so it could never score."""

    class OfLatents:
        sees_latents = True

        def __call__(self, batch: RewardBatch) -> Tensor:
            raise AssertionError("never asked")

    config = toy(tmp_path)
    object.__setattr__(config.rewards["red"], "function", OfLatents)
    object.__setattr__(config.rewards["red"], "kwargs", {})
    with pytest.raises(ConfigError, match="rewards.red: toykit.redness judges latents"):
        load_rewards(config)


def test_a_reward_of_long_videos_is_hosted(tmp_path: Path) -> None:
    """How long the videos are that will be sent is not known: it is not asked."""

    class OfLongVideos:
        judges_videos, least_frames = True, 13

        def __call__(self, batch: RewardBatch) -> Tensor:
            raise AssertionError("never asked")

    config = toy(tmp_path)
    object.__setattr__(config.rewards["red"], "function", OfLongVideos)
    object.__setattr__(config.rewards["red"], "kwargs", {})
    assert isinstance(load_rewards(config)["red"], OfLongVideos)


class Unmade:
    """A user's reward whose weights are not there."""

    def __init__(self, **_: object) -> None:
        raise FileNotFoundError("no weights")


class Unready:
    """A user's reward that says by leaving that it could not answer."""

    def __init__(self, **_: object) -> None:
        pass

    def __call__(self, batch: RewardBatch) -> Tensor:
        return redness(batch)

    def probe(self) -> None:
        sys.exit("no licence")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (Unmade, "making reward 'red' failed with FileNotFoundError: no weights"),
        (Unready, "the probe of reward 'red' failed with SystemExit: no licence"),
    ],
)
def test_a_reward_that_does_not_start_is_one_message(
    tmp_path: Path,
    reward: type,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What `flowrl train` says of such a reward, with the line of the user's file; no traceback."""
    monkeypatch.setattr(reward, "__module__", "toykit")  # as if it were of a plugin
    monkeypatch.setattr(toykit, "redness", reward)
    argv = ["serve-rewards", str(write_toy(tmp_path)), "--plugin", "toykit", "--port", "0"]
    assert main(argv) == 2
    printed = capsys.readouterr().err
    assert f"{said} ({Path(__file__).name}, line " in printed and "Traceback" not in printed


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_other_machines_need_a_token(
    tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded or listens."""
    monkeypatch.setattr("rewards.remote.server.load_rewards", lambda config: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="--token-env"):
        serve(toy(tmp_path), host=host, port=0)


def test_which_tokens_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    odd = ["", "short", "tab\tinside it", "gr\u00fcn gr\u00fcn gr\u00fcn", " correct horse"]
    for value in (None, *odd):
        if value is not None:
            monkeypatch.setenv("REWARD_TOKEN", value)
        with pytest.raises(ConfigError, match="REWARD_TOKEN should hold") as error:
            read_token("127.0.0.1", "REWARD_TOKEN")
        assert not value or value not in str(error.value)
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    for address in ("0.0.0.0", "127.0.0.1"):
        assert read_token(address, "REWARD_TOKEN") == TOKEN.encode()
    assert read_token("127.0.0.1", "") == read_token("::1", "") == b""


def test_arguments_that_make_no_sense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy(tmp_path)
    wrong: list[dict[str, Any]] = [{"max_mb": 0}, {"max_images": 0}, {"batch": 0}]
    for options in (*wrong, {"max_wait_ms": -1.0}, {"port": 70_000}):
        with pytest.raises(ConfigError, match=f"serve: {next(iter(options))}"):
            serve(config, **options)
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[serve\]" in a checkout'):
        serve(config)


@pytest.mark.integration
def test_a_server_answers_what_is_in_flight_and_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM comes while an image is being scored: its client still gets the score."""
    config, gate = write_toy(tmp_path / "toy"), tmp_path / "gate"
    gate.touch()
    reward = f"rewards={{red: {{fn: toykit.gate, file: {gate}, call: 1}}}}"
    argv = [str(config), "--plugin", "toykit", "--port"]
    facts = tmp_path / "server.json"
    server = Process(*argv, "0", reward, "--token-env", "TOKEN", "--json", facts, TOKEN=TOKEN)
    url = server.url()
    assert json.loads(facts.read_text()) == {"url": url, "token": True, "rewards": ["red"]}
    # what cannot be started beside it
    assert main(["serve-rewards", *argv, url.rpartition(":")[2]]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err
    assert main(["serve-rewards", *argv, "0", "--host", "0.0.0.0"]) == 2
    assert "--token-env" in capsys.readouterr().err
    # stopped while a request is in flight
    headers, images = {"Authorization": f"Bearer {TOKEN}"}, random_images(3)
    with (
        ThreadPoolExecutor(1) as pool,
        httpx2.Client(trust_env=False, headers=headers, timeout=WAIT) as http,
    ):
        future = pool.submit(http.post, f"{url}/score", json=data_of(images))
        wait_for(gate.with_suffix(".reached").exists)
        assert http.get(f"{url}/health").json()["rewards"] == ["red"]  # while the reward is busy
        server.process.terminate()
        with pytest.raises(httpx2.TransportError):  # it takes no new connections from now on
            wait_for(lambda: not httpx2.get(f"{url}/health", headers=headers, trust_env=False))
        gate.unlink()
        scores = torch.tensor(future.result(WAIT).json()["scores"]["red"])
    assert torch.equal(scores, redness(batch_of(images)))
    # how it ended
    code, printed = server.end()
    assert code == 0 and "(token needed)" in printed and "stopped; 3 images were scored" in printed
    assert TOKEN not in printed and "Traceback" not in printed
