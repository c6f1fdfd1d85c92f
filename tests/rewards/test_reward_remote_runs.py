"""Whole runs with rewards over HTTP: servers that go away, come back or are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from serving import Scripted, batch_of, free_port, hosted, wait_for
from torch import Tensor
from toykit import redness, toy

import flowrl
from flowrl.config.load import Config
from flowrl.core.errors import RewardError, RunError
from flowrl.core.types import RewardBatch
from flowrl.training.trainer import Trainer
from rewards.remote.read_request import RequestLimits, parse

ROOT = Path(__file__).resolve().parents[2]


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
        if len(calls) == 4:  # held-out images, then two iterations were scored
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
