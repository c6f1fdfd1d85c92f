"""`flowrl export` of a whole run: the files, the model card and its code, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from exportkit import ExportedRun, draw
from huggingface_hub import ModelCard
from modelkit import perturb
from safetensors.torch import load_file, save_file
from tiny import tiny_sd3
from torch import Tensor

from flowrl.cli.export import FORMATS as OFFERED
from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import CheckpointError, ConfigError, FlowRLError, ModelError, RunError
from flowrl.models.sd3 import sd3
from flowrl.models.toy import LinearFlow
from flowrl.runs.export.export import FORMATS, export, trained_part, write_merged
from flowrl.runs.open_run import load_run
from flowrl.training import checkpoint

pytestmark = pytest.mark.integration
LORA_ONLY = ["README.md", "grid.png", "pytorch_lora_weights.safetensors"]
ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------- a whole run, by the command


def test_the_command_names_its_files(exported: ExportedRun) -> None:
    files = {
        file.relative_to(exported.out).as_posix()
        for file in exported.out.rglob("*")
        if file.is_file()
    }
    assert {line.removeprefix(f"{exported.out}/") for line in exported.said.splitlines()} == files
    own = {*LORA_ONLY, "adapter_config.json", "adapter_model.safetensors", "toy-kohya.safetensors"}
    assert own | {"model_index.json", "transformer/config.json"} <= files
    # no temporary folder is left
    assert [item.name for item in exported.out.parent.iterdir()] == ["tiny-red"]
    assert (exported.out / "grid.png").read_bytes() == (exported.folder / "grid.png").read_bytes()


def assert_weights(out: Path, saved: Path) -> None:
    """Compare an exported LoRA with a checkpoint's weights, to the bit."""
    found, stored = load_file(out / "pytorch_lora_weights.safetensors"), load_file(saved)
    name = {key: key[len("transformer.") :].replace(".weight", ".default.weight") for key in found}
    assert set(name.values()) == set(stored)
    assert all(torch.equal(value, stored[name[key]]) for key, value in found.items())


def test_the_weights_are_those_that_were_evaluated(exported: ExportedRun, tmp_path: Path) -> None:
    """By default eval.weights, here ema; else what was asked for, of the checkpoint that was asked
    for."""
    last, first = (exported.folder / "checkpoints" / name for name in ("000002", "000001"))
    assert_weights(exported.out, last / "ema.safetensors")
    ema, current = (load_file(last / f"{name}.safetensors") for name in ("ema", "current"))
    assert not torch.equal(next(iter(ema.values())), next(iter(current.values())))
    cases: list[tuple[dict[str, Any], Path]] = [
        ({"weights": "current"}, last / "current.safetensors"),
        ({"iteration": 1}, first / "ema.safetensors"),
        ({}, first / "ema.safetensors"),  # a checkpoint by its own folder
    ]
    for number, (options, file) in enumerate(cases):
        out = tmp_path / str(number)
        export(exported.folder if options else first, out, plugins=["toykit"], **options)
        assert_weights(out, file)
        assert sorted(item.name for item in out.iterdir()) == LORA_ONLY
        # results of other weights are not passed off as its own
        assert "These very weights were not evaluated" in (out / "README.md").read_text()
    assert "were not evaluated" not in (exported.out / "README.md").read_text()


def test_two_exports_are_the_same_files(exported: ExportedRun, tmp_path: Path) -> None:
    """To the bit; only the two notes in the header of diffusers' file come in any order.

    What would differ between two processes is the order of a set: the layers are sorted.
    """
    layers = json.loads((exported.out / "adapter_config.json").read_text())["target_modules"]
    assert len(layers) > 2 and layers == sorted(layers)
    export(exported.folder, tmp_path / "tiny-red", formats=list(FORMATS), plugins=["toykit"])
    for file in exported.out.rglob("*.*"):
        first, second = (
            home / file.relative_to(exported.out) for home in (exported.out, tmp_path / "tiny-red")
        )
        if file.name == "pytorch_lora_weights.safetensors":
            assert sorted(first.read_bytes()) == sorted(second.read_bytes())
        else:
            assert first.read_bytes() == second.read_bytes(), file.name


def test_the_images_are_the_runs(exported: ExportedRun) -> None:
    """What diffusers loads from the folder draws what the run's own model draws."""
    model = load_run(exported.folder, plugins=["toykit"])[0]
    want = draw(model.pipeline(), 1.0)  # type: ignore[attr-defined]
    base = exported.folder.parent / "base"
    pipeline = StableDiffusion3Pipeline.from_pretrained(base)
    pipeline.load_lora_weights(exported.out, weight_name="pytorch_lora_weights.safetensors")
    for found in (pipeline, StableDiffusion3Pipeline.from_pretrained(exported.out)):
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
    options: dict[str, Any] = {"num_inference_steps": 3, "guidance_scale": 1.0}
    options |= {"max_sequence_length": 1, "height": 64, "width": 64, "output_type": "pt"}
    images = []
    for one in (pipeline, model.pipeline()):
        chance = torch.Generator().manual_seed(0)
        images.append(one("a red circle", generator=chance, **options).images)
    torch.testing.assert_close(*images, rtol=0, atol=1e-5)


def pairs(pipeline: Any, base: str) -> list[tuple[Tensor, Tensor]]:
    stored = load_file(ROOT / base / "transformer" / "diffusion_pytorch_model.safetensors")
    found = pipeline.transformer.state_dict()
    return [(value.float(), found[name]) for name, value in stored.items()]


# ---------------------------------------------------------------------------------- what is refused


def refused(kind: type[FlowRLError], words: str, *args: Any, **options: Any) -> None:
    """Expect an error."""
    with pytest.raises(kind, match=words):
        export(*args, **{"plugins": ["toykit"], **options})


def test_folders_that_hold_something(exported: ExportedRun, tmp_path: Path) -> None:
    taken, closed = tmp_path / "taken", "cannot write .*: Not a directory; nothing half-written"
    taken.mkdir()
    (taken / "mine.txt").write_text("keep me")
    refused(RunError, "taken holds something already", exported.folder, taken)
    refused(RunError, "mine.txt holds something already", exported.folder, taken / "mine.txt")
    refused(RunError, closed, exported.folder, taken / "mine.txt" / "x")
    assert [item.name for item in tmp_path.rglob("*")] == ["taken", "mine.txt"]
    (tmp_path / "empty").mkdir()
    assert "README.md" in export(exported.folder, tmp_path / "empty", plugins=["toykit"])


def test_the_command_offers_every_format() -> None:
    """The list of the command line is a copy, so that `flowrl --help` needs no torch."""
    assert list(FORMATS) == OFFERED


def test_by_default_it_is_written_into_the_run(exported: ExportedRun, tmp_path: Path) -> None:
    """Also where a checkpoint is named: a checkpoint's own folder is deleted some day."""
    copied = Path(shutil.copytree(exported.folder, tmp_path / "run"))
    argv = ["export", str(copied / "checkpoints" / "000001"), "--plugin", "toykit"]
    assert main([*argv, "--base-model", "some/base"]) == 0
    assert_weights(copied / "export", copied / "checkpoints" / "000001" / "ema.safetensors")
    data = ModelCard.load(copied / "export" / "README.md").data.to_dict()
    assert data["base_model"] == "some/base"


OTHER = "trainable parameters do not fit"
FORMS = "expected formats out of lora, peft, kohya, merged, got 'onnx'"


@pytest.mark.parametrize(
    ("kind", "words", "options"),
    [
        (ConfigError, FORMS, {"formats": ["onnx"]}),
        (ConfigError, "dtype: expected one of auto, float32", {"dtype": "int8"}),
        (ConfigError, "weights: expected ema or current, got 'base'", {"weights": "base"}),
        (CheckpointError, "there is no such checkpoint", {"iteration": 7}),
        (ModelError, "no model at '.*gone'", {"overrides": ["model.path=/nowhere/gone"]}),
        (CheckpointError, OTHER, {"overrides": ["model.lora.rank=3"]}),
        (CheckpointError, OTHER, {"overrides": ["model.tune=none", "model.lora=null"]}),
    ],
)
def test_what_cannot_be_exported(
    exported: ExportedRun,
    tmp_path: Path,
    kind: type[FlowRLError],
    words: str,
    options: dict[str, Any],
) -> None:
    """Wrong arguments; without the base model, with another one, with nothing trained."""
    refused(kind, words, exported.folder, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_weights(exported: ExportedRun, tmp_path: Path) -> None:
    """No folder of a run, one without a checkpoint; a model without a pipeline, one that is not
    tuned."""
    out = tmp_path / "out"
    refused(CheckpointError, "expected a run folder with config.yaml", tmp_path / "nowhere", out)
    (tmp_path / "run").mkdir()
    shutil.copy(exported.folder / "config.yaml", tmp_path / "run")
    refused(CheckpointError, "there is no whole checkpoint yet", tmp_path / "run", out)
    assert [item.name for item in tmp_path.iterdir()] == ["run"]
    words = "expected a model around a diffusers pipeline, got a LinearFlow"
    with pytest.raises(ModelError, match=words):
        trained_part(LinearFlow())
    with pytest.raises(ModelError, match="nothing to export"):
        trained_part(sd3(str(exported.folder.parent / "base"), tune="none"))


def test_a_failure_leaves_nothing(
    exported: ExportedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk while the second format is written; an unknown layer."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "x"
    with monkeypatch.context() as patch:
        patch.setattr("flowrl.runs.export.merge.save_file", full)
        words = "No space left on device; nothing half-written"
        refused(RunError, words, exported.folder, out, formats=list(FORMATS))
    with monkeypatch.context() as patch:
        patch.setattr("flowrl.models.files.lora_names._SD3", {})
        words = "no key is known for the layer"
        refused(ModelError, words, exported.folder, out, formats=["lora", "kohya"])
    assert list(tmp_path.iterdir()) == []


def test_base_models_that_do_not_take_the_weights(exported: ExportedRun, tmp_path: Path) -> None:
    """Another one, and one that is quantised."""
    other = tiny_sd3(tmp_path / "other", layers=1, t5=True)
    trained = trained_part(load_run(exported.folder, plugins=["toykit"])[0])
    trained.pipeline.register_to_config(_name_or_path=str(other))
    words = "8 of 15 trained tensors are not in its files, such as transformer_blocks"
    (tmp_path / "x").mkdir()
    with pytest.raises(ModelError, match=words):
        write_merged(trained, tmp_path / "x")
    weights = other / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({key: value.char() for key, value in load_file(weights).items()}, weights)
    (tmp_path / "y").mkdir()
    with pytest.raises(
        ModelError, match="safetensors: transformer_blocks.0.* holds numbers of kind int8"
    ):
        write_merged(trained, tmp_path / "y")
