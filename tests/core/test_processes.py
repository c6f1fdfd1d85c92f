"""Several processes against one: the same prompts, noise, advantages, gradients and updates (gloo,
on the CPU)."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_sd3
from torch import Tensor
from toykit import toy, write_toy

from flowrl.core.errors import ConfigError
from flowrl.core.processes import World, sharded
from flowrl.models.sd3 import sd3
from flowrl.training.trainer import Trainer

HERE = Path(__file__).parents[1] / "kits"
ALL = ("train.prompts=4", "train.max_grad_norm=.inf")
CHAIN = ("plan={fn: full, steps: 4, noise_scale: 0.5, ode_last: 1}", "train.group=4")
TREE = (
    "plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [0, 2], ode_last: 1}",
    "credit={fn: depth_norm}",
)


def run_all(
    count: int, *command: str, env: dict[str, str] | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command in `count` processes that know of each other, as `torchrun` would start
    them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, **(env or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}",
    }
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    done = []
    for process in started:
        out, err = process.communicate(timeout=120)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


def _worked(processes: list[subprocess.CompletedProcess[str]]) -> None:
    said = "\n".join(
        f"--- process {n}, {p.returncode}\n{p.stderr}"
        for n, p in enumerate(processes)
        if p.returncode
    )
    assert not said, said


def trained(
    folder: Path, count: int, *overrides: str
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    result = folder / f"of{count}"
    command = (str(HERE / "process.py"), str(folder / str(count)), "3", str(result), *overrides)
    _worked(run_all(count, *command))
    return load_file(f"{result}.safetensors"), json.loads(result.with_suffix(".json").read_text())


@pytest.mark.integration
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            (*CHAIN, "train.updates=2", "credit={fn: group_norm, std: global}"),
            id="global-std-two-updates",
        ),
        pytest.param(
            (*CHAIN, "train.same_noise=true", "select={fn: fraction, share: 0.5}"),
            id="same-noise-fraction",
        ),
        pytest.param(
            (*CHAIN, "segment={fn: fixed, sizes: [1, 2]}", "train.prompts=5"),
            id="segments-uneven-shares",
        ),
        pytest.param(
            (*TREE, "kl={fn: transition_kl, beta: 0.1}", "train.parts=2"), id="tree-kl-parts"
        ),
        pytest.param((*CHAIN, "rewards.red={fn: toykit.apprentice}"), id="learned-reward"),
        pytest.param(
            (
                *CHAIN,
                "plan.steps=6",
                "segment={fn: adaptive, chunks: 3}",
                "select={fn: chunks, share: 0.5, weighted: l1, corrected: true}",
            ),
            id="chunks-by-change",
        ),
        pytest.param(
            (*CHAIN, "loss={fn: guard, clip_low: 0.002, clip_high: 0.002}", "train.updates=2"),
            id="guard",
        ),
    ],
)
def test_two_processes_make_the_updates_of_one(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Noise, advantages and selections are equal; sums run in another order, hence 1e-6 and not
    bits."""
    one, a = trained(tmp_path, 1, *ALL, *overrides)
    two, b = trained(tmp_path, 2, *ALL, *overrides)
    moved = max(
        (one[name] - start).abs().max().item()
        for name, start in _start(tmp_path, overrides).items()
    )
    assert moved > 1e-3, "nothing was trained, so equality would say nothing"
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-6)
    assert [row.keys() for row in a] == [row.keys() for row in b]
    for first, second in zip(a, b, strict=True):
        for name in first:
            assert math.isclose(first[name], second[name], rel_tol=1e-4, abs_tol=2e-6), name
    assert all(
        first["reward"] == second["reward"] for first, second in zip(a[:1], b[:1], strict=True)
    )


def _start(folder: Path, overrides: tuple[str, ...]) -> dict[str, Tensor]:
    (folder / "start").mkdir()
    trainer = Trainer(toy(folder / "start", *ALL, *overrides))
    return {name: p.detach().clone() for name, p in trainer.params.items()}


def test_shares_cover_all_places_once_and_differ_by_one_at_most() -> None:
    for count in range(12):
        for size in range(1, 6):
            shares = [World(rank, size).share(count) for rank in range(size)]
            assert [place for share in shares for place in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_process_gathers_and_sums_nothing() -> None:
    alone, tensor = World(), torch.ones(3)
    alone.sum_([tensor])
    assert (
        alone.gather(7) == [7]
        and tensor.tolist() == [1, 1, 1]
        and alone.main
        and not alone.any(False)
    )
    with pytest.raises(ZeroDivisionError):
        alone.together(lambda: 1 // 0)


def run_train(
    count: int, run: Path, *more: str, env: dict[str, str] | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Do what ``torchrun --nproc_per_node COUNT -m flowrl train`` does."""
    place = () if "--resume" in more else ("--run", str(run))
    return run_all(count, "-m", "flowrl", "train", *more, *place, env=env)


def whole(folder: Path) -> tuple[str, ...]:
    return (str(write_toy(folder)), "--plugin", "toykit", "--quiet", *ALL, "train.iterations=4")


@pytest.mark.integration
def test_a_run_of_two_processes_writes_what_one_writes(tmp_path: Path) -> None:
    """Also after a stop: two processes go on from a checkpoint of one, and end where one ends."""
    command = whole(tmp_path)
    _worked(run_train(1, tmp_path / "one", *command) + run_train(2, tmp_path / "two", *command))
    one, two = (
        {f.relative_to(tmp_path / n).as_posix() for f in (tmp_path / n).rglob("*")}
        for n in ("one", "two")
    )
    assert {name for name in one if "tfevents" not in name} == {
        name for name in two if "tfevents" not in name
    }
    for file in ("metrics.jsonl", "eval.jsonl"):
        rows = [
            [json.loads(line) for line in (tmp_path / n / file).read_text().splitlines()]
            for n in ("one", "two")
        ]
        _same(rows[0], rows[1], file)
    environment = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert environment["processes"] == 2
    later = tmp_path / "two" / "checkpoints" / "000004"
    end = load_file(later / "current.safetensors")
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "000004")
    _worked(
        run_train(
            2, tmp_path / "one", "--resume", str(tmp_path / "one"), "--plugin", "toykit", "--quiet"
        )
    )
    for name, value in load_file(
        tmp_path / "one" / "checkpoints" / "000004" / "current.safetensors"
    ).items():
        torch.testing.assert_close(value, end[name], rtol=1e-5, atol=1e-6)


def _same(one: Any, two: Any, where: str, near: float = 2e-6) -> None:
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            _same(one[key], two[key], f"{where}/{key}", near)
    elif isinstance(one, list):
        assert len(one) == len(two), where
        for n, (a, b) in enumerate(zip(one, two, strict=True)):
            _same(a, b, f"{where}/{n}", near)
    elif isinstance(one, float):
        assert math.isclose(one, two, rel_tol=1e-4, abs_tol=near), (where, one, two)
    else:
        assert one == two, where


@pytest.mark.integration
@pytest.mark.parametrize("rank", [0, 1])
def test_a_reward_that_fails_in_one_process_stops_all_with_a_checkpoint(
    tmp_path: Path, rank: int
) -> None:
    command = (*whole(tmp_path), f"rewards.red={{fn: toykit.one_sided, rank: {rank}}}")
    done = run_train(2, tmp_path / "run", *command)
    for process in done:
        assert process.returncode == 2, (process.returncode, process.stderr)
        assert "the server is down" in process.stderr and "saved" in process.stderr
    assert f"process {rank} of 2" in done[1 - rank].stderr
    assert (tmp_path / "run" / "checkpoints" / "000001" / "manifest.json").exists()


@pytest.mark.integration
def test_more_processes_than_prompts_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    command = (*whole(tmp_path), "train.prompts=1")
    for process in run_train(2, tmp_path / "run", *command):
        assert process.returncode == 2 and "train.prompts=1" in process.stderr, process.stderr
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["gpus", "nodes", "fsdp"])
def test_launcher_configs_are_what_accelerate_reads(name: str) -> None:
    """Its own parser refuses keys that it does not know."""
    from accelerate.commands.config.config_args import load_config_from_file

    read = load_config_from_file(str(HERE.parents[1] / "configs" / "accelerate" / f"{name}.yaml"))
    assert (
        read.distributed_type == ("FSDP" if name == "fsdp" else "MULTI_GPU")
        and read.num_processes % (8 * read.num_machines) == 0
    )
    assert read.mixed_precision == "no"


FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
}  # what `accelerate launch` sets for fsdp.yaml


@pytest.mark.integration
@pytest.mark.parametrize("tune", ["lora", "full"])
def test_fsdp_makes_the_updates_of_one_process(tmp_path: Path, tune: str) -> None:
    """A tiny SD3: weights, averages and evaluations of two sharded processes, also after a stop and
    a resume.

    AdamW divides by the root of a mean square that starts near 0, so a difference in the last bit
    of a gradient shows at the scale of the rate: weights are compared at a hundredth of it. A KL
    needs the weights from before training, a process of two has a decision less than the other in
    some updates, and of three held-out prompts one has one.
    """
    options = f"t5: false, max_sequence_length: 1, tune: {tune}"
    model = f"model={{fn: sd3, path: {tiny_sd3(tmp_path / 'sd3')}, {options}}}"
    settings: tuple[str, ...] = (
        "image={height: 32, width: 32}",
        "kl={fn: transition_kl, beta: 0.1}",
        "optimizer.lr=1e-3",
        "train.prompts=2",
    )
    settings += (
        "train.micro_batch=2",
        "select={fn: fraction, share: 0.5}",
        "train.iterations=2",
        "checkpoint.every=1",
    )
    command = (*whole(tmp_path), model, *settings)
    test = tmp_path / "test.jsonl"
    test.write_text("".join(line + "\n" for line in test.read_text().splitlines()[:3]))
    _worked(
        run_train(1, tmp_path / "one", *command)
        + run_train(2, tmp_path / "two", *command, env=FSDP)
    )
    _alike(tmp_path / "one", tmp_path / "two")
    if tune == "full":
        return
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "000002")
    resume = ("--resume", str(tmp_path / "two"), "--plugin", "toykit", "--quiet")
    _worked(run_train(2, tmp_path / "two", *resume, env=FSDP))
    _alike(tmp_path / "one", tmp_path / "two")


def _alike(one: Path, two: Path) -> None:
    for name in ("current", "ema", "ref"):
        a, b = (
            load_file(run / "checkpoints" / "000002" / f"{name}.safetensors") for run in (one, two)
        )
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(b[key], a[key], rtol=0, atol=1e-5)
    ref, current = (
        load_file(one / "checkpoints" / "000002" / f"{name}.safetensors")
        for name in ("ref", "current")
    )
    assert max((current[key] - ref[key]).abs().max().item() for key in ref) > 1e-3
    rows = [
        [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
        for run in (one, two)
    ]
    _same(rows[0], rows[1], "eval.jsonl", near=1e-4)


def test_what_fsdp_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**FSDP, "FSDP_VERSION": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("flowrl.core.processes.world", lambda: World(0, 2))
    with pytest.raises(ConfigError, match="fsdp_version: expected 2"):
        sharded()
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert sharded()
    monkeypatch.setattr("flowrl.training.setup.world", lambda: World(0, 2))
    with pytest.raises(ConfigError, match=r"train.prompts=3: under FSDP.* multiple of 2"):
        Trainer(toy(tmp_path, "train.prompts=3"))
    folder = str(tiny_sd3(tmp_path / "sd3"))
    with pytest.raises(ConfigError, match="do not go with FSDP"):
        sd3(folder, t5=False, max_sequence_length=1, device="cpu", runtime={"compile": True})
