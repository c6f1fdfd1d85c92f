"""Settings that say what saved weights mean, and change no shape: a checkpoint keeps them, and
whoever reads it under others is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from adapterkit import Folders
from modelkit import edit
from safetensors.torch import load_file, save_file
from toykit import axes, toy

from flowrl.core.errors import CheckpointError
from flowrl.models.files.weights import fingerprint
from flowrl.runs.open_run import load_run
from flowrl.training.start_weights import start_from
from flowrl.training.trainer import Trainer

ALPHA = r"model\.lora\.alpha: the config says 15.0, and .* was trained with 14.0"
SMALL = ["image={height: 32, width: 32}", "train.group=2", "train.ema=0.5", "eval.weights=ema"]


def model(base: Path, **more: Any) -> str:
    given = {"fn": "sd3", "path": str(base), "lora": {"rank": 4, "alpha": 14}}
    return f"model={json.dumps(given | {'max_sequence_length': 8} | more)}"


class Kept:
    """A run of a tiny SD3 with one checkpoint, before its first iteration."""

    def __init__(self, home: Path, base: Path) -> None:
        self.home, self.base = home, base
        self.run = home / "run"
        self.folder = self.run / "checkpoints/000000"
        trainer = Trainer(toy(home, model(base), *SMALL))
        trainer.save(self.folder)
        (self.run / "config.yaml").write_text(trainer.config.dump())

    def again(self, *changes: str, **options: Any) -> Trainer:
        """Make the run anew, with changes of its config."""
        base = options.pop("base", self.base)
        return Trainer(toy(self.home, model(base, **options), *SMALL, *changes))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, folders: Folders) -> Kept:
    home = tmp_path_factory.mktemp("meaning")
    return Kept(home, copytree(folders["sd3.5"], home / "base"))


def test_what_may_change(kept: Kept, tmp_path: Path) -> None:
    """Where the model is, how it computes, how fast it learns."""
    moved = copytree(kept.base, tmp_path / "moved")
    run = kept.again("optimizer.lr=0.5", base=moved, decode_batch=2, dtype="bfloat16")
    run.load(kept.folder)
    start_from(str(kept.run), dict(run.params), model=run.model)
    overrides = [f"model.path={moved}"]
    assert load_run(kept.run, overrides=overrides, plugins=("toykit",)).iteration == 0


CONFIG: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "alpha": ({"lora": {"rank": 4, "alpha": 15}}, [], "model.lora.alpha"),
    "guidance": ({"guidance": 3.0}, [], "model.guidance"),
    "prompts": ({"max_sequence_length": 9}, [], "model.max_sequence_length"),
    "text encoder": ({"t5": False}, [], "model.t5"),
    "a copy's decay": ({}, ["train.ema=0.9"], "train.ema"),
}


@pytest.mark.parametrize("label", CONFIG)
def test_a_config_that_changed_before_a_resume(kept: Kept, label: str) -> None:
    options, changes, key = CONFIG[label]
    run = kept.again(*changes, **options)
    before = {name: p.detach().clone() for name, p in run.params.items()}
    with pytest.raises(
        CheckpointError, match=rf"{key}: the config says .*trained with .*set it ba"
    ):
        run.load(kept.folder)
    assert all(torch.equal(p, before[name]) for name, p in run.params.items())


def heads(folder: Path) -> None:
    """As wide, with fewer heads."""
    edit("transformer/config.json", num_attention_heads=1, attention_head_dim=16)(folder)
    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    for name, rows in tensors.items():
        if "norm_q" in name or "norm_k" in name or "norm_added" in name:
            tensors[name] = rows.repeat(2)
    save_file(tensors, file, metadata={"format": "pt"})


def other_weights(folder: Path) -> None:
    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["proj_out.weight"] += 1
    save_file(tensors, file, metadata={"format": "pt"})


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "scale of latents": (edit("vae/config.json", scaling_factor=0.5), "vae.scaling_factor"),
    "heads": (heads, "network.attention_head_dim"),
    "weights": (other_weights, "base model"),
}


@pytest.mark.parametrize("label", CHANGES)
def test_a_model_that_changed(kept: Kept, tmp_path: Path, label: str) -> None:
    """Before a resume, where another run begins with the weights, and where they are opened."""
    change, key = CHANGES[label]
    base = copytree(kept.base, tmp_path / "other")
    change(base)
    run = kept.again(base=base)
    said = rf"({key}|network\.num_attention_heads): the model says .* was trained with"
    with pytest.raises(CheckpointError, match=said):
        run.load(kept.folder)
    with pytest.raises(CheckpointError, match=said):
        kept.again(f"train.start={kept.run}", base=base)
    with pytest.raises(CheckpointError, match=said):
        load_run(kept.run, overrides=[f"model.path={base}"], plugins=("toykit",))


@pytest.mark.parametrize("what", ["run", "checkpoints/000000", "checkpoints/000000/current"])
def test_a_start_of_another_alpha(kept: Kept, what: str) -> None:
    path = kept.run if what == "run" else kept.run / what
    path = path.with_suffix(".safetensors") if path.name == "current" else path
    with pytest.raises(CheckpointError, match=ALPHA):
        kept.again(f"train.start={path}", lora={"rank": 4, "alpha": 15})
    with pytest.raises(CheckpointError, match=ALPHA):
        overrides = ["model.lora.alpha=15"]
        load_run(kept.run, overrides=overrides, plugins=("toykit",))


def test_a_teacher_of_another_alpha(kept: Kept) -> None:
    distilled = [f"loss={{fn: distill, teachers: {{a: {kept.run}}}}}", "likelihood={fn: reverse}"]
    lines = (kept.home / "train.jsonl").read_text().splitlines()
    tagged = [json.dumps(json.loads(line) | {"tag": "a"}) for line in lines]
    (kept.home / "tagged.jsonl").write_text("\n".join(tagged) + "\n")
    distilled += [f"prompts.train={kept.home}/tagged.jsonl"]
    kept.again(*distilled)
    with pytest.raises(CheckpointError, match=ALPHA):
        kept.again(*distilled, lora={"rank": 4, "alpha": 15})


def test_a_companion_of_other_settings(tmp_path: Path) -> None:
    """On the toy, which says nothing of itself."""
    setting = [*axes("shapes/tdm_r1"), "surrogate.alone=0", "train.ema=0", "eval.weights=current"]
    Trainer(toy(tmp_path, *setting)).save(tmp_path / "kept")
    Trainer(toy(tmp_path, *setting, "fake.lr=0.5")).load(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"fake\.updates: the config says 3, and"):
        Trainer(toy(tmp_path, *setting, "fake.updates=3")).load(tmp_path / "kept")


def test_what_models_say_of_themselves(folders: Folders, tmp_path: Path) -> None:
    """Of UNets what they predict, and from which noise; of FLUX whether guidance is an input."""
    one, two = folders.load("sd15").identity, folders.load("sd15 v").identity
    assert one["scheduler.prediction_type"] == "epsilon" != two["scheduler.prediction_type"]
    assert folders.load("flux").identity["network.guidance_embeds"] is True
    assert "base model" not in folders.load("flux", tune="full").identity
    assert "network.transformer_2.num_layers" not in folders.load("wan").identity


def test_a_fingerprint_is_of_the_numbers(folders: Folders, tmp_path: Path) -> None:
    """Whatever the file is called, and in whatever order it holds them."""
    folder = folders["sd3.5"] / "transformer"
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    other = dict(reversed(tensors.items()))
    save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt", "more": "x"})
    assert fingerprint([tmp_path]) == fingerprint([folder])
    other["proj_out.bias"] = other["proj_out.bias"] + 1
    save_file(other, tmp_path / "model.safetensors")
    assert fingerprint([tmp_path]) != fingerprint([folder])
