"""Training on a pretend device: nothing is mixed up, and inner loops never wait for it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pretendkit import DeviceTensor, Seen, pretend_cuda
from processkit import pair
from synckit import check_sync
from torch import Tensor
from toykit import axes, linear, toy
from toyscale import SETTING, TOY_SCALE

from flowrl.core.devices import checked_later, on_host, refuse_if, repeated
from flowrl.runs.evaluate import evaluate
from flowrl.training import learn
from flowrl.training.parts.companions import Companions
from flowrl.training.trainer import Trainer

SMALL = [*SETTING, "train.micro_batch=16", "train.ema=0.9"]
# one for each kind of plan, likelihood, loss and credit, and those that once failed here
METHODS = {
    "chain": "flow_grpo_full",
    "tree": "branch_grpo",
    "window": "mix_grpo",
    "forward process": "diffusion_nft",
    "preference": "diffusion_dpo",
    "whole groups": "dgpo",
    "weighted images": "rwr",
    "through the sampler": "align_prop",
    "through its last step": "draft_lv",
    "learned noise": "find",
    "the best leaf": "dynamic_treerpo",
    "models trained along": "tdm_r1",
    "scouted noise": "sol_rl",
    "segments": "chunk_grpo",
    "means of the old policy": "grpo_guard",
}


@pytest.fixture
def seen() -> Any:
    with pretend_cuda() as made:
        yield made


def trainer_of(folder: Path, name: str, device: str) -> Trainer:
    overrides = [*SMALL, *axes(name), *TOY_SCALE.get(name, [])]
    return Trainer(toy(folder, *overrides), model=linear(channels=2).to(device))


def without_waits(seen: Seen, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Let every wait inside of a function raise."""

    def watched(*args: Any, **options: Any) -> Any:
        seen.set_sync_debug_mode("error")
        try:
            return plain(*args, **options)
        finally:
            seen.set_sync_debug_mode("default")

    return watched


@pytest.mark.parametrize("kind", METHODS)
def test_no_inner_loop_waits_and_the_numbers_are_the_hosts(
    kind: str, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling between two network calls and each training call: 0 waits. Two iterations with an
    evaluation and a checkpoint between them end with the bits of a run on the host: the device
    computes as the CPU does, so only what is put elsewhere could make a difference."""
    name = f"shapes/{METHODS[kind]}"
    ends = []
    for device in ("cpu", "cuda"):
        run = trainer_of(tmp_path, name, device)
        if device == "cuda":
            if kind != "scouted noise":  # its two passes have the rewards between them
                assert check_sync(run, switch=seen.set_sync_debug_mode) >= 4
            monkeypatch.setattr(learn, "backward", without_waits(seen, learn.backward))
            along = without_waits(seen, Companions._backward)
            monkeypatch.setattr(Companions, "_backward", along)
        first = run.step()
        scores = evaluate(run.model, run.config, trainer=run)
        run.save(tmp_path / device)
        again = trainer_of(tmp_path, name, device)
        again.load(tmp_path / device)
        metrics = again.step()
        weights = {key: p.detach().cpu() for key, p in again.params.items()}
        ends.append((first, scores, metrics, weights))
    assert all(p.device.type == "cuda" for p in again.params.values())
    (first, scores, metrics, weights), *others = ends
    assert others[0][:3] == (first, scores, metrics)
    for key, value in weights.items():
        assert torch.equal(others[0][3][key], value)


@pytest.mark.integration
def test_two_processes_talk_as_nccl_wants_it(tmp_path: Path) -> None:
    """Collectives on the device only, and no tensor of a device in what is pickled. Both processes
    report the same rewards; each method has several collectives an iteration."""
    methods = ["flow_grpo_full", "branch_grpo", "diffusion_nft", "dgpo", "find", "tdm_r1"]
    job = {"call": "pretendkit.nccl.trained", "args": [str(tmp_path), methods]}
    first, second = pair({"train": job}, tmp_path)["train"]
    assert first == second and first.keys() > {*methods}
    assert "device type cpu" in first["refused"] and first["calls"] > 10 * len(methods)


def test_a_device_tensor_computes_and_differentiates(seen: Seen) -> None:
    """d/dw sum(w x) = sum of the rows of x."""
    x = torch.arange(6.0).reshape(2, 3)
    layer = torch.nn.Linear(3, 1, bias=False).to("cuda")
    layer(x.to("cuda")).sum().backward()
    assert isinstance(layer.weight, DeviceTensor) and layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[3.0, 5.0, 7.0]]
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(x.to("cuda")).dtype == torch.bfloat16
    torch.ones(3, device="cuda")[1:].add_(1)


WAITS = [torch.unique, Tensor.item, torch.nonzero, lambda x: x[x > 0], Tensor.cpu, bool]
WAITS += [lambda x: x[torch.zeros(1).long()], lambda x: x.tolist(), lambda x: x + x.new_tensor(1)]
WAITS += [lambda x: x + torch.tensor([1.0], device="cuda"), torch.bincount, lambda x: x.equal(x)]
FREE = [lambda x: x + torch.tensor(1.0), lambda x: x.cumsum(0), lambda x: x.sort(), torch.clone]
FREE += [lambda x: x.to("cuda"), lambda x: x.masked_fill(x > 0, 2), lambda x: x.double()]
FREE += [lambda x: torch.ones(2).to("cuda", non_blocking=True), lambda x: x.index_add(0, x, x)]


@pytest.mark.parametrize("number", range(len(WAITS)))
def test_what_waits_is_seen(number: int, seen: Seen) -> None:
    """Those that `torch.cuda.set_sync_debug_mode("error")` refuses, by torch's source."""
    x = torch.ones(1, dtype=torch.int64).to("cuda", non_blocking=True)
    WAITS[number](x)
    assert seen.waits.total() == 1


@pytest.mark.parametrize("number", range(len(FREE)))
def test_what_does_not_wait_is_not(number: int, seen: Seen) -> None:
    FREE[number](torch.zeros(1, dtype=torch.int64).to("cuda", non_blocking=True))
    assert not seen.waits


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda x: x + torch.ones(2), "same device"),
        (lambda x: torch.cat([x, torch.ones(2)]), "same device"),
        (lambda x: torch.ones(2)[x.long()], "indices should be"),
        (lambda x: x.index_add(0, torch.zeros(2).long(), x), "same device"),
        (lambda x: torch.randn(2, generator=torch.Generator(), device="cuda"), "generator"),
        (lambda x: x.normal_(generator=torch.Generator()), "generator"),
        (lambda x: x.numpy(), "Use Tensor.cpu"),
        (pickle.dumps, "pickled"),
        (lambda x: x.cpu() if x.to("cpu", non_blocking=True) is None else x, "arrived"),
        (lambda x: x.long() @ x.long(), "not implemented"),
    ],
)
def test_what_cuda_refuses_is_refused(refused: Any, message: str, seen: Seen) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        refused(torch.ones(2, device="cuda"))


def test_a_copy_on_the_host_is_made_once(seen: Seen) -> None:
    """One wait for the first of three reads; another after the tensor was changed."""
    nodes = torch.arange(3).to("cuda", non_blocking=True)
    for _ in range(3):
        assert on_host(nodes).tolist() == [0, 1, 2]
    assert seen.waits.total() == 1
    assert on_host(repeated(nodes, 2)).tolist() == [0, 0, 1, 1, 2, 2] and seen.waits.total() == 1
    nodes.add_(1)
    assert on_host(nodes).tolist() == [1, 2, 3] and seen.waits.total() == 2


def test_checks_are_read_at_once(seen: Seen) -> None:
    """Three checks cost one wait, and the first that fails raises; without `checked_later` each is
    read where it stands."""
    flags = [torch.full((), n > 0, device="cuda") for n in range(3)]
    with pytest.raises(ValueError, match="^1$"), checked_later():
        for n, flag in enumerate(flags):
            refuse_if(flag, partial(ValueError, str(n)))
    assert seen.waits.total() == 1
    with pytest.raises(KeyError):
        refuse_if(flags[1], lambda: KeyError())
    with pytest.raises(RuntimeError, match="broken"), checked_later():
        refuse_if(flags[1], lambda: KeyError())
        raise RuntimeError("broken")
