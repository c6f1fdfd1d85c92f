"""What a reward leaves changed in the process is put back and said; what would end the process does
not."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from torch import Tensor
from toykit import redness, toy
from trainkit import weights_of

from flowrl.core.errors import RewardError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_call import ask
from flowrl.evaluation.reward_guard import SETTINGS
from flowrl.training.trainer import Trainer


def batch_of(count: int = 2) -> RewardBatch:
    images = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    prompts = [f"prompt {i}" for i in range(count)]
    records: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    return RewardBatch(images, prompts, torch.arange(count), records, torch.zeros(count))


def autocast() -> None:
    torch.autocast("cpu", torch.bfloat16).__enter__()


def inference() -> None:
    KEPT.append(torch.inference_mode())
    KEPT[-1].__enter__()


def device_mode() -> None:
    torch.device("meta").__enter__()


def fewer_threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


def closed() -> None:
    os.close(1)


def exchanged() -> None:
    sys.stdout = io.StringIO()


KEPT: list[Any] = []
CHANGES: dict[str, tuple[Callable[[], object], str]] = {
    "autocast": (autocast, "torch.autocast of cpu"),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
    "device": (lambda: torch.set_default_device("meta"), "the default device"),
    "device mode": (device_mode, "a mode of torch functions"),
    "inference": (inference, "inference mode"),
    "grad": (lambda: torch.set_grad_enabled(False), "grad mode"),
    "deterministic": (lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms"),
    "threads": (fewer_threads, "the number of torch's threads"),
    "precision": (lambda: torch.set_float32_matmul_precision("medium"), "the precision of matrix"),
    "cudnn": (lambda: setattr(torch.backends.cudnn, "benchmark", True), "cudnn.benchmark"),
    "anomaly": (lambda: torch.set_anomaly_enabled(True), "anomaly detection"),
    "folder": (lambda: os.chdir("/"), "the working folder"),
    "signals": (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "the handlers of signals"),
    "closed": (closed, "stdout"),
    "exchanged": (exchanged, "sys.stdout"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_reward_leaves_changed_is_put_back_and_said(name: str) -> None:
    """Also where it fails after the change."""
    change, said = CHANGES[name]
    before, streams = [each.now() for each in SETTINGS], (sys.stdout, os.fstat(1))

    def sloppy(batch: RewardBatch) -> Tensor:
        values = redness(batch)
        change()
        return values

    def failing(batch: RewardBatch) -> Tensor:
        change()
        raise ValueError("no idea")

    for reward in (sloppy, failing):
        with pytest.warns(UserWarning, match=f"reward 'mine' changed .*{said}") as told:
            try:
                values = ask("mine", reward, batch_of(), "here")
            except RewardError as error:
                assert reward is failing and "ValueError: no idea" in str(error)
            else:
                assert torch.equal(values, redness(batch_of()))
        assert len(told) == 1
        assert [each.now() for each in SETTINGS] == before
        assert sys.stdout is streams[0] and os.path.samestat(os.fstat(1), streams[1])
        assert torch.empty(1).device.type == "cpu" and not torch.empty(1).is_inference()


def test_a_reward_that_leaves_nothing_changed_is_told_nothing() -> None:
    """What is entered and left inside is its own affair."""

    def neat(batch: RewardBatch) -> Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return redness(batch).clone()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ask("neat", neat, batch_of(), "here").shape == (2,)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["autocast", "dtype", "grad", "inference", "random"])
def test_training_is_the_same_beside_a_sloppy_reward(tmp_path: Path, name: str) -> None:
    """Two iterations: the weights of a run whose reward leaves nothing behind, bit for bit."""

    def seeds() -> None:
        torch.manual_seed(0)
        random.seed(0)

    change = seeds if name == "random" else CHANGES[name][0]
    plain, beside = Trainer(toy(tmp_path)), Trainer(toy(tmp_path))

    def sloppy(batch: RewardBatch) -> Tensor:
        values = redness(batch)
        change()
        return values

    beside.rewards["red"] = sloppy
    for _ in range(2):
        plain.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            beside.step()
    expected, found = weights_of(plain), weights_of(beside)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Cancelled(BaseException):
    """As of asyncio: no Exception."""


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: os._exit(0), r"reward 'mine' failed with os._exit\(0\), which would have ended"),
        (lambda: sys.exit(0), "reward 'mine' failed with SystemExit: 0"),
        (lambda: _raise(Cancelled("away")), "reward 'mine' failed with Cancelled: away"),
    ],
)
def test_what_would_end_the_process_is_an_error_of_the_reward(
    act: Callable[[], object], said: str
) -> None:
    def ending(batch: RewardBatch) -> Tensor:
        act()
        return redness(batch)

    with pytest.raises(RewardError, match=said):
        ask("mine", ending, batch_of(), "here")
    assert os._exit.__module__ == "posix"


def test_a_reward_in_a_thread_leaves_the_main_ones_settings_alone() -> None:
    """As under `train.overlap`: what the main thread changes meanwhile stays; what the reward left
    changed goes, and ``os._exit`` of the main thread is not refused."""
    before = torch.backends.cudnn.benchmark
    inside, left = threading.Event(), threading.Event()

    def sloppy(batch: RewardBatch) -> Tensor:
        inside.set()
        left.wait(10)
        torch.set_default_dtype(torch.float64)
        return redness(batch)

    with ThreadPoolExecutor(1) as pool, pytest.warns(UserWarning, match="the default dtype and"):
        answer = pool.submit(ask, "mine", sloppy, batch_of(), "here")
        assert inside.wait(10)
        torch.backends.cudnn.benchmark = not before
        child = os.fork()
        if not child:
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        left.set()
        answer.result()
    try:
        assert torch.backends.cudnn.benchmark is not before
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.backends.cudnn.benchmark = before


def _raise(error: BaseException) -> None:
    raise error


def test_ctrl_c_in_a_reward_is_the_users() -> None:
    with pytest.raises(KeyboardInterrupt):
        ask("mine", lambda batch: _raise(KeyboardInterrupt()), batch_of(), "here")


FORKS = """
import os, sys, torch
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_call import ask
def forking(images, prompts):
    os.fork()
    return images.mean((1, 2, 3))
images = torch.full((2, 3, 4, 4), 0.5)
batch = RewardBatch(images, ["a", "b"], torch.arange(2), [{}, {}], torch.zeros(2))
print(ask("mine", forking, batch, "here").tolist(), flush=True)
"""


@pytest.mark.integration
def test_a_forked_child_does_not_come_back_as_a_second_run(tmp_path: Path) -> None:
    """One line is printed: by the parent; the child says why it ends."""
    (tmp_path / "forks.py").write_text(FORKS)
    code, said = warm.run([f"{tmp_path}/forks.py"], tmp_path / "log")
    assert code == 0 and said.count("[0.5, 0.5]\n") == 1
    assert "reward 'mine' called os.fork, and its child came back: it ends here" in said


def test_children_that_end_by_themselves_are_left_alone() -> None:
    """As those of multiprocessing, which end by os._exit."""

    def forking(batch: RewardBatch) -> Tensor:
        child = os.fork()
        if not child:
            os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return torch.full((len(batch.images),), float(status))

    assert ask("mine", forking, batch_of(), "here").tolist() == [7.0, 7.0]
