"""The rows of the queue for a GPU, and the processes in which they are measured."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from queuekit import tiny_config
from scriptkit import script_module

from flowrl.config.load import load_config


@pytest.mark.integration
def test_a_process_that_waits_measures_when_it_is_its_turn(tmp_path: Path) -> None:
    """A real one: nothing is written while it waits. One that is stopped leaves nothing."""
    words = [str(tiny_config(tmp_path)), "--iterations", "1"]
    module = script_module("queue_process")
    stopped, waiting = (
        module.Process("performance.py", words, "--json", waits=True) for _ in range(2)
    )
    time.sleep(1)
    assert waiting.process.poll() is None and not waiting.out.exists()
    stopped.end()
    assert stopped.process.poll() is not None
    seconds, failed = waiting.finish(120)
    assert failed == "" and 0 < seconds < 120
    assert json.loads(waiting.out.read_text())["seconds"]["train"] > 0


def test_why_a_process_ended() -> None:
    """The line that names the error; CUDA's are followed by advice. Lines as torch prints them."""
    reason = script_module("queue_process").reason
    advice = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    cuda = "Traceback:\n  File x\ntorch.AcceleratorError: CUDA error: invalid argument" + advice
    assert reason(cuda) == "torch.AcceleratorError: CUDA error: invalid argument"
    assert reason("performance: no such config\n") == "performance: no such config"
    assert reason("") == ""


def test_every_row_is_a_config_that_can_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are told apart, and each setting is one that the loader takes."""
    script = script_module("performance_queue")
    names = [row.name for row in script.QUEUE]
    assert len(names) == len(set(names))
    for row in script.QUEUE:
        if row.model:
            config, *overrides = script.MODELS[row.model]
            load_config(config, [*overrides, *row.settings])
    assert {row.model for row in script.QUEUE} == {*script.MODELS, ""}


def test_checks_for_waits_are_of_one_attention() -> None:
    """Models are compared by them: all use torch's own kernels."""
    queue = script_module("performance_queue").QUEUE
    rows = [row for row in queue if "--sync-check" in row.options]
    assert [row.model for row in rows] == ["sd3", "flux", "wan"]
    for row in rows:
        assert "model.runtime.attention=native" in row.settings
