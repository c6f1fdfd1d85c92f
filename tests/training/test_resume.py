"""Exact resumes: a run in two halves is the run in one, to the bit."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from adapterkit import Folders
from modelkit import perturb
from trainkit import KL, files_of, flat, halves, same_files, trainer_for, unchanged, weights_of

from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.training.trainer import Trainer


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ((), {"ema"}),
        ((KL, "train.warmup=5", "train.decay=6"), {"ema", "ref"}),
        (("train.ema=0", "eval.weights=current"), set()),
    ],
)
def test_resume_is_bit_for_bit(tmp_path: Path, options: tuple[str, ...], copies: set[str]) -> None:
    """3 + 3 iterations in two trainers against 6 in one: metrics and all that is kept."""
    make = partial(trainer_for, tmp_path, *options)
    start = flat(make().params.values())
    # model.seed: other weights, to be replaced
    whole, second, _ = halves(make, tmp_path, 3, 3, "model.seed=8")
    mine, theirs = files_of(whole, tmp_path / "a"), files_of(second, tmp_path / "b")
    assert mine.keys() == {"current", "optimizer", *copies} and same_files(mine, theirs)
    states = [json.loads((tmp_path / name / "state.json").read_text()) for name in ("a", "b")]
    assert states[0].pop("config") != states[1].pop("config") and states[0] == states[1]
    assert float((flat(whole.params.values()) - start).abs().max()) > 1e-3


def network_trainer(folder: Path, folders: Folders, tune: str, dtype: str) -> Trainer:
    """Return a trainer of a tiny SD3 that was moved away from its start."""
    model = folders.load("sd3", tune=tune, dtype=dtype)
    perturb(model, 0.05)
    size = ("image={height: 32, width: 32}", "train.group=2", "train.rollout_batch=4")
    return trainer_for(folder, *size, "transition.fn=cps", "train.updates=1", model=model)


@pytest.mark.parametrize(("tune", "dtype"), [("lora", "float32"), ("full", "bfloat16")])
def test_resume_of_a_real_network(tmp_path: Path, folders: Folders, tune: str, dtype: str) -> None:
    """1 + 1 iterations against 2, with a new process's empty prompt cache in between."""
    make = partial(network_trainer, tmp_path, folders, tune, dtype)
    whole, second, _ = halves(make, tmp_path, 1, 1)
    mine, theirs = files_of(whole, tmp_path / "a"), files_of(second, tmp_path / "b")
    assert mine.keys() == {"current", "ema", "optimizer"} and same_files(mine, theirs)


def test_one_seed_gives_one_run(tmp_path: Path) -> None:
    one, same, other = (trainer_for(tmp_path, f"seed={seed}") for seed in (3, 3, 4))
    rows = [trainer.rows() for trainer in (one, same, other)]
    assert rows[0] == rows[1] != rows[2]
    for _ in range(2):
        first, second, third = one.step(), same.step(), other.step()
        assert first == second != third
    assert same_files(files_of(one, tmp_path / "a"), files_of(same, tmp_path / "b"))
    assert not torch.equal(one.params["mix"], other.params["mix"])


# 64 x 64 numbers: from 4096 on, moments have 8 bits
WIDE = "model={fn: toykit.linear, channels: 64, scale: 0.02}"


def test_adamw_of_8_bits_is_near_adamw_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """bitsandbytes' AdamW8bit; near: AdamW's first step moves every weight by about the rate."""
    pytest.importorskip("bitsandbytes")
    moved = []
    for name in ("adamw", "adamw8bit"):
        trainer = trainer_for(tmp_path, WIDE, f"optimizer.fn={name}")
        start = weights_of(trainer)["mix"]
        trainer.step()
        moved.append((weights_of(trainer)["mix"] - start).flatten())
    assert float(torch.nn.functional.cosine_similarity(moved[0], moved[1], dim=0)) > 0.98
    dtypes = {row["state1"].dtype for row in trainer.optimizer.state.values()}
    assert torch.uint8 in dtypes, "no moment has 8 bits, so nothing was tested"
    trainer.save(tmp_path / "middle")
    again = trainer_for(tmp_path, WIDE, "optimizer.fn=adamw8bit")
    again.load(tmp_path / "middle")
    assert trainer.step() == again.step() and unchanged(again, weights_of(trainer))
    with pytest.raises(CheckpointError):
        trainer_for(tmp_path, WIDE).load(tmp_path / "middle")


def test_adamw_of_8_bits_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[quant\]" in a checkout'):
        trainer_for(tmp_path, "optimizer.fn=adamw8bit")
