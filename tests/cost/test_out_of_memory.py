"""Running out of memory: one message, no half-written file, and a run that goes on as if nothing
had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from estimatekit import phases
from tiny import tiny_sd3
from torch import Tensor
from toykit import toy, write_toy

from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import RunError
from flowrl.core.tables import size
from flowrl.core.types import Cond
from flowrl.cost.estimate import estimate
from flowrl.cost.out_of_memory import explain, explained, is_out_of_memory
from flowrl.models.toy import LinearFlow
from flowrl.runs.train import train
from flowrl.training import checkpoint

GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.6 GiB"


def full() -> None:
    raise torch.OutOfMemoryError(GPU)


def truly_full() -> None:
    """Ask the CPU's allocator for more bytes than a processor can address: its own error."""
    torch.empty(2**60, dtype=torch.uint8)


class Failing(LinearFlow):
    """Run out of memory at the call of a number, of those with a gradient or of those without."""

    def __init__(self, *, graded: bool, at: int, how: Callable[[], None] = full) -> None:
        super().__init__(channels=3, seed=0, scale=0.3)
        self.graded, self.left, self.how = graded, at, how

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        if torch.is_grad_enabled() == self.graded:
            self.left -= 1
            if self.left == 0:
                self.how()
        return super().velocity(x, sigma, cond)


def run(
    folder: Path, model: LinearFlow | None, *overrides: str, resume: bool = False
) -> dict[str, Any]:
    config = toy(folder, "checkpoint.every=1", "eval.every=0", *overrides)
    return train(config, folder / "run", resume=resume, quiet=True, model=model)


def message(folder: Path, model: LinearFlow, *overrides: str) -> str:
    with pytest.raises(RunError) as error:
        run(folder, model, *overrides)
    assert is_out_of_memory(error.value.__cause__ or ValueError())
    assert not [item.name for item in folder.rglob("*") if "tmp" in item.name]
    return str(error.value)


def same_files(one: Path, other: Path) -> bool:
    names = ("metrics.jsonl", "eval.jsonl")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.parametrize("how", [full, truly_full])
def test_in_training(tmp_path: Path, how: Callable[[], None]) -> None:
    """24 states in micro-batches of 8: 4 calls per iteration over 2 updates. The 6th is in
    iteration 1, half trained.

    The checkpoint before is whole, and the resumed run ends with the files of one that never
    failed.
    """
    said = message(tmp_path, Failing(graded=True, at=6, how=how))
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None and newest.name == "000001"
    assert "out of memory while training: " in said and "lower train.micro_batch (now 8)" in said
    where = f"stopped in iteration 1; set it in {tmp_path}/run/config.yaml; saved {newest}; "
    assert f"{where}go on with: flowrl train --resume {tmp_path}/run --plugin toykit" in said
    assert "no estimate: latents and parameters of the model toykit.linear are not counted" in said
    run(tmp_path, None, resume=True)
    run(tmp_path / "whole", None)
    assert same_files(tmp_path / "run", tmp_path / "whole" / "run")


def test_in_sampling_the_policy_is_saved(tmp_path: Path) -> None:
    """Two calls without a gradient after those that iteration 0 ends with: in iteration 1."""
    rare = ("checkpoint.every=0", "samples.every=0")
    before = calls_before_training(tmp_path, *rare)
    said = message(tmp_path, Failing(graded=False, at=before + 2), *rare)
    assert "out of memory while sampling: CUDA out of memory" in said
    assert "lower train.rollout_batch (now 8)" in said
    assert f"saved {tmp_path}/run/checkpoints/000001; go on with: flowrl train --resume" in said
    run(tmp_path, None, *rare, resume=True)
    run(tmp_path / "whole", None, *rare)
    assert same_files(tmp_path / "run", tmp_path / "whole" / "run")


NO_PROBE = "monitors.drift=null"  # which would call the network first


def calls_before_training(folder: Path, *overrides: str) -> int:
    """Count the calls without a gradient up to the first one with: those that come before it in
    every run."""
    seen: list[bool] = []

    class Counting(Failing):
        def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
            seen.append(not torch.is_grad_enabled())
            return super().velocity(x, sigma, cond)

    message(folder / "count", Counting(graded=True, at=1), *overrides)
    return sum(seen)


def test_in_the_first_iteration(tmp_path: Path) -> None:
    said = message(tmp_path, Failing(graded=True, at=1), "train.micro_batch=1")
    assert "train.micro_batch is 1 already" in said
    assert f"saved {tmp_path}/run/checkpoints/000000; go on with: flowrl train --resume" in said


def test_in_an_evaluation(tmp_path: Path) -> None:
    said = message(tmp_path, Failing(graded=False, at=1), "eval.batch=6", NO_PROBE)
    assert "out of memory while judging held-out images: " in said
    assert "lower eval.batch (now 6)" in said
    assert f"saved {tmp_path}/run/checkpoints/000000" in said
    run(tmp_path, None, "eval.batch=2", NO_PROBE, resume=True)
    assert (tmp_path / "run" / "summary.json").exists()


def test_other_errors_are_left_alone(tmp_path: Path) -> None:
    def wrong() -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run(tmp_path, Failing(graded=True, at=1, how=wrong))
    with pytest.raises(RuntimeError, match="shapes"), explained(toy(tmp_path), "eval"):
        wrong()


def test_what_counts_as_out_of_memory() -> None:
    """Texts as PyTorch 2 raises them; the CPU's comes from its allocator."""
    with pytest.raises(RuntimeError) as error:
        truly_full()
    blas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    found = [error.value, torch.OutOfMemoryError(GPU), MemoryError(), RuntimeError(GPU)]
    for each in (*found, RuntimeError(blas)):
        assert is_out_of_memory(each), each
    for other in (RuntimeError("expected scalar type Half"), ValueError(GPU)):
        assert not is_out_of_memory(other), other


def test_the_estimate_is_that_of_the_config(tmp_path: Path) -> None:
    """Each number in the message against `flowrl estimate`'s."""
    model = f"{{fn: sd3, path: {tiny_sd3(tmp_path / 'm')}, tune: full}}"
    config = toy(tmp_path / "toy", f"model={model}", "image={height: 64, width: 64}")
    said = explain(torch.OutOfMemoryError(GPU), config, "train")
    there = phases(estimate(config))["training"]
    counted = f"{size(there.bytes)}, of which {size(there.kept)} are kept"
    assert f"the estimate for training: {counted}" in said and len(said.splitlines()) == 3
    assert "lower train.micro_batch (now 8); or turn on model.runtime.checkpointing; " in said
    assert "tune by LoRA" in said
    less = "lower model.decode_batch (now 64); or turn on model.runtime.offload; or tune by LoRA "
    less += "(model.tune)\n"
    assert less in explain(MemoryError(), config, "decode")
    assert "\nuse a smaller model" in explain(MemoryError(), toy(tmp_path / "toy"), "load")


@pytest.mark.parametrize("command", ["eval", "sample"])
def test_commands(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    """One message, exit code 2, no file."""
    monkeypatch.setattr(LinearFlow, "velocity", lambda *_: full())
    monkeypatch.chdir(tmp_path)
    words = ["a red dot"] if command == "sample" else ["--json", f"{tmp_path}/report.json"]
    config = write_toy(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main([command, str(config), *words, "--plugin", "toykit"]) == 2
    error = capsys.readouterr().err
    assert "out of memory while" in error and "lower eval.batch (now 256)" in error
    assert "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_while_loading(tmp_path: Path) -> None:
    config = load_config(write_toy(tmp_path), ["model.fn=toykit.linear"], ("toykit",))
    with (
        pytest.raises(RunError, match="out of memory while loading the model"),
        explained(config, "load"),
    ):
        raise MemoryError
