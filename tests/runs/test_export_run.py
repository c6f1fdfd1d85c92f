"""`flowrl export` of a whole run: the files, the model card and its code, and what is refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from exportkit import assert_code_draws, draw
from huggingface_hub import ModelCard
from modelkit import perturb
from safetensors.torch import load_file, save_file
from tiny import tiny_sd3
from torch import Tensor
from toykit import toy

from flowrl.cli.export import FORMATS as OFFERED
from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import CheckpointError, ConfigError, FlowRLError, ModelError, RunError
from flowrl.models.sd3 import sd3
from flowrl.models.toy import LinearFlow
from flowrl.runs.export.export import FORMATS, export, trained_part, write_merged
from flowrl.runs.open import open_run
from flowrl.runs.train import train
from flowrl.training import checkpoint

pytestmark = pytest.mark.integration
LORA_ONLY = ["README.md", "grid.png", "pytorch_lora_weights.safetensors"]
ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------- a whole run, by the command


class Run(NamedTuple):
    """A trained run, and the folder that the command wrote from it."""

    folder: Path
    out: Path
    said: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train SD3 for two iterations and export all formats, by the command."""
    home = tmp_path_factory.mktemp("run")
    base = tiny_sd3(home / "base", t5=True)
    model = f"model={{fn: sd3, path: {base}, lora: {{rank: 4, alpha: 14}}, max_sequence_length: 8}}"
    small = [
        "train.iterations=2",
        "train.group=2",
        "eval.images=1",
        "eval.steps=2",
        "image={height: 32, width: 32}",
    ]
    config = toy(
        home,
        model,
        *small,
        "train.ema=0.5",
        "eval.weights=ema",
        "optimizer.lr=0.05",
        "checkpoint.every=1",
    )
    train(config, home / "run", quiet=True)
    out, said = home / "new" / "tiny-red", io.StringIO()
    argv = ["export", str(home / "run"), "--out", str(out), "--plugin", "toykit"]
    with contextlib.redirect_stdout(said):
        assert main([*argv, *(word for name in FORMATS for word in ("--format", name))]) == 0
    return Run(home / "run", out, said.getvalue())


def test_the_command_names_its_files(run: Run) -> None:
    files = {file.relative_to(run.out).as_posix() for file in run.out.rglob("*") if file.is_file()}
    assert {line.removeprefix(f"{run.out}/") for line in run.said.splitlines()} == files
    own = {*LORA_ONLY, "adapter_config.json", "adapter_model.safetensors", "toy-kohya.safetensors"}
    assert own | {"model_index.json", "transformer/config.json"} <= files
    # no temporary folder is left
    assert [item.name for item in run.out.parent.iterdir()] == ["tiny-red"]
    assert (run.out / "grid.png").read_bytes() == (run.folder / "grid.png").read_bytes()


def assert_weights(out: Path, saved: Path) -> None:
    """Compare an exported LoRA with a checkpoint's weights, to the bit."""
    found, stored = load_file(out / "pytorch_lora_weights.safetensors"), load_file(saved)
    name = {key: key[len("transformer.") :].replace(".weight", ".default.weight") for key in found}
    assert set(name.values()) == set(stored)
    assert all(torch.equal(value, stored[name[key]]) for key, value in found.items())


def test_the_weights_are_those_that_were_evaluated(run: Run, tmp_path: Path) -> None:
    """By default eval.weights, here ema; else what was asked for, of the checkpoint that was asked
    for."""
    last, first = (run.folder / "checkpoints" / name for name in ("000002", "000001"))
    assert_weights(run.out, last / "ema.safetensors")
    ema, current = (load_file(last / f"{name}.safetensors") for name in ("ema", "current"))
    assert not torch.equal(next(iter(ema.values())), next(iter(current.values())))
    cases: list[tuple[dict[str, Any], Path]] = [
        ({"weights": "current"}, last / "current.safetensors"),
        ({"iteration": 1}, first / "ema.safetensors"),
        ({}, first / "ema.safetensors"),  # a checkpoint by its own folder
    ]
    for number, (options, file) in enumerate(cases):
        out = tmp_path / str(number)
        export(run.folder if options else first, out, plugins=["toykit"], **options)
        assert_weights(out, file)
        assert sorted(item.name for item in out.iterdir()) == LORA_ONLY


def test_two_exports_are_the_same_files(run: Run, tmp_path: Path) -> None:
    """To the bit; only the two notes in the header of diffusers' file come in any order.

    What would differ between two processes is the order of a set: the layers are sorted.
    """
    layers = json.loads((run.out / "adapter_config.json").read_text())["target_modules"]
    assert len(layers) > 2 and layers == sorted(layers)
    export(run.folder, tmp_path / "tiny-red", formats=list(FORMATS), plugins=["toykit"])
    for file in run.out.rglob("*.*"):
        first, second = (
            home / file.relative_to(run.out) for home in (run.out, tmp_path / "tiny-red")
        )
        if file.name == "pytorch_lora_weights.safetensors":
            assert sorted(first.read_bytes()) == sorted(second.read_bytes())
        else:
            assert first.read_bytes() == second.read_bytes(), file.name


def test_the_images_are_the_runs(run: Run) -> None:
    """What diffusers loads from the folder draws what the run's own model draws."""
    model = open_run(run.folder, plugins=["toykit"])[0]
    want = draw(model.pipeline(), 1.0)  # type: ignore[attr-defined]
    base = run.folder.parent / "base"
    pipeline = StableDiffusion3Pipeline.from_pretrained(base)
    pipeline.load_lora_weights(run.out, weight_name="pytorch_lora_weights.safetensors")
    for found in (pipeline, StableDiffusion3Pipeline.from_pretrained(run.out)):
        torch.testing.assert_close(draw(found, 1.0), want, rtol=0, atol=1e-5)


def test_a_full_run_on_the_shapes_model(tmp_path: Path) -> None:
    """shapes/flow_grpo_full trains named layers with their biases; its checkpoint is made up, its
    export is a pipeline.

    The plain class draws the run's images from it. LoRA formats are refused.
    """
    config = load_config("shapes/flow_grpo_full", ["model.dtype=float32"])
    model = config.call("model")()
    perturb(model, 0.02)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config.dump())
    weights = {name: value.data for name, value in model.trainable().items()}
    folder = checkpoint.checkpoint_folder(tmp_path / "run", 40)
    checkpoint.save(folder, {"current": weights, "ema": weights}, {"iteration": 40})
    for wrong in ("lora", "peft", "kohya"):
        words = f"{wrong} is for LoRA, but the run trained whole layers"
        with pytest.raises(ConfigError, match=words):
            export(tmp_path / "run", tmp_path / "no", formats=["merged", wrong])
    assert export(tmp_path / "run", tmp_path / "out")[:2] == ["README.md", "model_index.json"]
    pipeline = StableDiffusion3Pipeline.from_pretrained(tmp_path / "out")
    moved = sum(not torch.equal(a, b) for a, b in pairs(pipeline, "assets/shapes-sd3"))
    assert moved == len(weights) > 50
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Flow-GRPO, flowrl's config `shapes/flow_grpo_full`" in card and "2505.05470" in card
    assert "No evaluation of this model was made" in card and "text_encoder_3=None" in card
    options = {
        "num_inference_steps": 3,
        "guidance_scale": 1.0,
        "max_sequence_length": 1,
        "output_type": "pt",
    }
    found, want = (
        p(
            "a red circle",
            height=64,
            width=64,
            generator=torch.Generator().manual_seed(0),
            **options,
        ).images
        for p in (pipeline, model.pipeline())
    )
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def pairs(pipeline: Any, base: str) -> list[tuple[Tensor, Tensor]]:
    stored = load_file(ROOT / base / "transformer" / "diffusion_pytorch_model.safetensors")
    found = pipeline.transformer.state_dict()
    return [(value.float(), found[name]) for name, value in stored.items()]


# ----------------------------------------------------------------------------------------- the card


def test_the_front_matter_is_what_a_hub_reads(run: Run, tmp_path: Path) -> None:
    """Read by huggingface_hub. A base model in a folder is not made up; --base-model names it."""
    data = ModelCard.load(run.out / "README.md").data.to_dict()
    assert (
        data["library_name"] == "diffusers"
        and data["license"] == "other"
        and "base_model" not in data
    )
    assert {"flowrl", "lora", "text-to-image"} <= set(data["tags"]) and data[
        "pipeline_tag"
    ] == "text-to-image"
    assert "\n# base_model: " in (run.out / "README.md").read_text()
    argv = [
        "export",
        str(run.folder),
        "--out",
        f"{tmp_path}/x",
        "--base-model",
        "some/base",
        "--plugin",
        "toykit",
    ]
    assert main([*argv, "--format", "peft"]) == 0
    data = ModelCard.load(tmp_path / "x" / "README.md").data.to_dict()
    assert data["base_model"] == "some/base" and data["base_model_relation"] == "adapter"
    assert (
        json.loads((tmp_path / "x/adapter_config.json").read_text())["base_model_name_or_path"]
        == "some/base"
    )


def test_the_card_tells_the_results(run: Run) -> None:
    """Before and after with the intervals of eval.jsonl; rewards, prompts and the image."""
    text = (run.out / "README.md").read_text()
    rows = [json.loads(line) for line in (run.folder / "eval.jsonl").read_text().splitlines()]
    for name in ("even", "odd"):
        cells = [row["tasks"][name] for row in rows]
        told = [f"{c['mean']:.3f} [{c['interval'][0]:.3f}, {c['interval'][1]:.3f}]" for c in cells]
        assert f"| {name} | {told[0]} | {told[1]} |" in text
    assert f"| **all (red)** | {rows[0]['red']:.3f} [{rows[0]['interval'][0]:.3f}, " in text
    assert "| `red` | `toykit.redness` | 1 |" in text and "0 (only measured)" in text
    assert "| training | `train.jsonl` | 6 |" in text and "(grid.png)" in text
    assert "rank 4, alpha 14, on `attn.add_k_proj`" in text and "moving average (ema)" in text
    assert (
        "not known: the config has none of the names of flowrl's" in text
        and "2 of 2, each of 2 prompts x 2 images" in text
    )


def test_the_card_does_not_pass_results_of_other_weights_off_as_its_own(
    run: Run, tmp_path: Path
) -> None:
    export(run.folder, tmp_path / "x", weights="current", plugins=["toykit"])
    assert "These very weights were not evaluated" in (tmp_path / "x" / "README.md").read_text()
    assert "were not evaluated" not in (run.out / "README.md").read_text()


def test_no_place_of_the_machine_is_told(run: Run) -> None:
    """No path of the run, the base model or the prompts in any text file."""
    places = [str(run.folder.parent), str(ROOT), str(Path.home()), os.uname().nodename]
    for file in run.out.rglob("*"):
        if file.suffix in (".md", ".json", ".txt"):
            text = file.read_text(encoding="utf-8")
            assert [place for place in places if len(place) > 1 and place in text] == [], file
    text = (run.out / "README.md").read_text()
    assert not re.search(r"(^|[\s`'\"(])/\w", text) and "path: base" in text


def test_the_code_of_the_card_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a folder in which base model and export lie, it draws the image that the run's own
    pipeline draws."""
    (tmp_path / "tiny-red").symlink_to(run.out)
    (tmp_path / "base").symlink_to(run.folder.parent / "base")
    monkeypatch.chdir(tmp_path)
    model = open_run(run.folder, plugins=["toykit"])[0]
    options = {"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 8}
    assert_code_draws(ModelCard.load("tiny-red/README.md").text, model, "a teal dot", options)


# ---------------------------------------------------------------------------------- what is refused


def refused(kind: type[FlowRLError], words: str, *args: Any, **options: Any) -> None:
    """Expect an error, and that nothing was written."""
    with pytest.raises(kind, match=words):
        export(*args, **{"plugins": ["toykit"], **options})


def test_folders_that_hold_something(run: Run, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("keep me")
    refused(RunError, "taken holds something already", run.folder, taken)
    refused(RunError, "mine.txt holds something already", run.folder, taken / "mine.txt")
    assert [item.name for item in tmp_path.rglob("*")] == ["taken", "mine.txt"]
    (tmp_path / "empty").mkdir()
    assert "README.md" in export(run.folder, tmp_path / "empty", plugins=["toykit"])
    refused(
        RunError,
        "cannot write .*: Not a directory; nothing half-written",
        run.folder,
        taken / "mine.txt" / "x",
    )


def test_the_command_offers_every_format() -> None:
    """The list of the command line is a copy, so that `flowrl --help` needs no torch."""
    assert list(FORMATS) == OFFERED


def test_by_default_it_is_written_into_the_run(run: Run, tmp_path: Path) -> None:
    """Also where a checkpoint is named: a checkpoint's own folder is deleted some day."""
    copied = Path(shutil.copytree(run.folder, tmp_path / "run"))
    assert main(["export", str(copied / "checkpoints" / "000001"), "--plugin", "toykit"]) == 0
    assert_weights(copied / "export", copied / "checkpoints" / "000001" / "ema.safetensors")


def test_wrong_arguments(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    refused(
        ConfigError,
        "expected formats out of lora, peft, kohya, merged, got 'onnx'",
        run.folder,
        out,
        formats=["onnx"],
    )
    refused(ConfigError, "dtype: expected one of auto, float32", run.folder, out, dtype="int8")
    refused(
        ConfigError, "weights: expected ema or current, got 'base'", run.folder, out, weights="base"
    )
    refused(CheckpointError, "there is no such checkpoint", run.folder, out, iteration=7)
    assert main(["export", str(tmp_path / "nowhere"), "--out", str(out)]) == 2
    assert "expected a run folder with config.yaml" in capsys.readouterr().err
    assert not out.exists()


def test_runs_that_cannot_be_exported(run: Run, tmp_path: Path) -> None:
    """Without a checkpoint, with another model, without its base model, nothing trained, no
    pipeline."""
    out, copied = tmp_path / "out", Path(shutil.copytree(run.folder, tmp_path / "run"))
    refused(
        ModelError, "no model at '.*gone'", copied, out, overrides=[f"model.path={tmp_path}/gone"]
    )
    refused(
        CheckpointError,
        "trainable parameters do not fit",
        copied,
        out,
        overrides=["model.lora.rank=3"],
    )
    refused(
        CheckpointError,
        "trainable parameters do not fit",
        copied,
        out,
        overrides=["model.tune=none", "model.lora=null"],
    )
    shutil.rmtree(copied / "checkpoints")
    refused(CheckpointError, "there is no whole checkpoint yet", copied, out)
    assert not out.exists() and [item.name for item in tmp_path.iterdir()] == ["run"]
    with pytest.raises(
        ModelError, match="expected a model around a diffusers pipeline, got a LinearFlow"
    ):
        trained_part(LinearFlow())
    with pytest.raises(ModelError, match="nothing to export"):
        trained_part(sd3(str(run.folder.parent / "base"), tune="none"))


def test_a_failure_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk while the second format is written; an unknown layer; another base model, a
    quantised one."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("flowrl.runs.export.export.save_file", full)
        refused(
            RunError,
            "No space left on device; nothing half-written",
            run.folder,
            tmp_path / "x",
            formats=list(FORMATS),
        )
    with monkeypatch.context() as patch:
        patch.setattr("flowrl.runs.export.kohya._SD3", {})
        refused(
            ModelError,
            "no key is known for the layer",
            run.folder,
            tmp_path / "x",
            formats=["lora", "kohya"],
        )
    assert list(tmp_path.iterdir()) == []
    other = tiny_sd3(tmp_path / "other", layers=1, t5=True)
    trained = trained_part(open_run(run.folder, plugins=["toykit"])[0])
    trained.pipeline.register_to_config(_name_or_path=str(other))
    (tmp_path / "x").mkdir()
    with pytest.raises(
        ModelError, match="8 of 15 trained tensors are not in its files, such as transformer_blocks"
    ):
        write_merged(trained, tmp_path / "x")
    weights = other / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({key: value.char() for key, value in load_file(weights).items()}, weights)
    shutil.rmtree(tmp_path / "x")
    (tmp_path / "x").mkdir()
    with pytest.raises(ModelError, match="safetensors: transformer_blocks.0.* is quantised"):
        write_merged(trained, tmp_path / "x")
