"""A run from Python: what became of it, judged, gone on with, exported and uploaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from tiny import tiny_sd3
from torch import Tensor
from toykit import linear, write_toy

import flowrl
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, ModelError, RunError
from flowrl.runs.export.export import _base_folder
from flowrl.runs.folder import EVALS, REPORT
from flowrl.runs.train import train

PLUGIN = ("toykit",)
TEXTS = [f"a {color} dot" for color in ("red", "green", "blue", "grey", "pink", "teal")]


def bright(images: Tensor, prompts: list[str]) -> Tensor:
    return images.mean((1, 2, 3))


def trained(folder: Path, **more: Any) -> flowrl.TrainedRun:
    file, given = write_toy(folder), {"rewards": bright, "prompts": TEXTS, "quiet": True}
    return flowrl.train(file, folder / "run", plugins=PLUGIN, **{**given, **more})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> flowrl.TrainedRun:
    return trained(tmp_path_factory.mktemp("toy"))


def test_what_became_of_it(run: flowrl.TrainedRun) -> None:
    assert run.gain is not None and run.summary["verdict"] == run.gain.sentence
    assert run.gain.change == pytest.approx(run.summary["gain"], abs=1e-5)
    assert (
        run.best is not None and run.best.folder == run.folder / run.summary["best"]["checkpoint"]
    )
    assert repr(run) == f"TrainedRun({str(run.folder)!r}: {run.gain.sentence})"
    assert run.config.train.iterations == 4 and run.config.prompts.test.startswith(str(run.folder))
    (image,) = run.sample("a red dot")
    assert isinstance(image, Image.Image) and image.size == (16, 16)
    assert len(run.sample(["a", "b"], images=3, seed=1, steps=2)) == 6
    assert run.report() == run.folder / REPORT
    with pytest.raises(ModelError, match="LinearFlow is around no pipeline of diffusers; sample"):
        run.pipeline  # noqa: B018 - it raises


def test_it_is_judged_by_the_functions_that_it_was_trained_with(run: flowrl.TrainedRun) -> None:
    last = json.loads((run.folder / EVALS).read_text().splitlines()[-1])
    assert flowrl.open(run.folder, rewards=bright, plugins=PLUGIN, iteration="last").evaluate()[
        "bright"
    ] == pytest.approx(last["bright"])
    assert run.evaluate(["a red dot"], eval={"images": 4})["images"] == 4
    assert [*run.evaluate(rewards="jpeg")["rewards"]] == ["jpeg"]
    # another program has no function, and is told so where one is needed
    other = flowrl.open(run.folder, plugins=PLUGIN)
    assert len(other.sample(["a red dot"])) == 1
    with pytest.raises(ConfigError, match=r"flowrl.open\(run, rewards=\{'bright': function\}\)"):
        other.evaluate()
    with pytest.raises(ConfigError, match="rewards: the run has no reward 'dark'"):
        flowrl.open(run.folder, rewards={"dark": bright}, plugins=PLUGIN)
    with pytest.raises(RunError, match="expected a run folder with config.yaml in it"):
        flowrl.open(run.folder / "samples")


def test_it_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Also from a folder that was moved, with the lists in it, to the last bit."""
    whole = trained(tmp_path / "whole")
    half = trained(tmp_path / "half", train={"iterations": 2})
    moved = tmp_path / "moved"
    shutil.move(half.folder, moved)
    again = flowrl.open(moved, rewards=bright, plugins=PLUGIN)
    done = again.resume(train={"iterations": 4}, quiet=True)
    assert done.summary["iterations"] == 4
    assert done.summary["after"]["bright"] == whole.summary["after"]["bright"]
    assert done.config.prompts.train == str(moved / "prompts/train.jsonl")
    with pytest.raises(ConfigError, match="train.group differs from the run in .*moved"):
        done.resume(train={"group": 8}, quiet=True)
    faster = done.resume(optimizer={"lr": 0.5}, train={"iterations": 5}, quiet=True)
    assert faster.summary["iterations"] == 5
    assert load_config(moved / "config.yaml", (), PLUGIN, need_rewards=False).lr == 0.5


def test_a_list_stays_the_one_that_was_trained_on(tmp_path: Path) -> None:
    first = trained(tmp_path, train={"iterations": 2})
    more: dict[str, Any] = {"train": {"iterations": 3}, "resume": "auto"}
    assert trained(tmp_path, **more).summary["iterations"] == 3
    with pytest.raises(ConfigError, match="prompts.train: .* was trained with another list"):
        trained(tmp_path, prompts=[*TEXTS, "a new dot"], **more)
    assert first.summary["iterations"] == 3


def test_what_fails_leaves_no_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="nowhere"):
        trained(tmp_path, rewards=lambda images, nowhere: images)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_model_of_the_program_is_handed_over_again(tmp_path: Path) -> None:
    run = trained(tmp_path, model=linear(scale=0.3), train={"iterations": 2})
    assert flowrl.load_config(run.folder / "config.yaml", need_rewards=False).model.fn == "python"
    with pytest.raises(ConfigError, match=r"flowrl.open\(run, model=model\)"):
        flowrl.open(run.folder).sample("a red dot")
    again = flowrl.open(run.folder, model=linear(scale=0.3), rewards=bright)
    assert again.evaluate()["bright"] == pytest.approx(run.evaluate()["bright"])


def test_a_run_of_the_command_line_opens(tmp_path: Path) -> None:
    file = write_toy(tmp_path)
    train(flowrl.load_config(file, ["train.iterations=2"], PLUGIN), tmp_path / "run", quiet=True)
    run = flowrl.open(tmp_path / "run", plugins="toykit")
    assert run.gain is not None and run.evaluate()["red"] is not None


# ----------------------------------------------------------------------------------------- export

SMALL: dict[str, Any] = {
    "image": {"height": 32, "width": 32},
    "plan": {"fn": "full", "steps": 2, "noise_scale": 0.5, "ode_last": 1},
    "train": {"iterations": 1, "prompts": 2, "group": 2, "updates": 1},
    "eval": {"steps": 2, "images": 1, "every": 0},
    "samples": {"every": 0, "prompts": 1},
}


@pytest.mark.integration
def test_a_pipeline_that_was_changed_in_memory_is_not_merged_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files there are another model; of one as it came, also by an id of the hub, they are the
    same."""
    monkeypatch.chdir(tmp_path)
    pipe = StableDiffusion3Pipeline.from_pretrained(tiny_sd3(tmp_path / "sd3", t5=True))
    given: dict[str, Any] = {"prompts": TEXTS, "rewards": bright, "quiet": True}
    run = flowrl.train("sd3/flow_grpo_fast", model=pipe, **given, **SMALL)
    run.export("whole", formats=["merged"])
    with torch.no_grad():
        pipe.transformer.proj_out.weight.add_(1)
    changed = flowrl.train("sd3/flow_grpo_fast", model=pipe, **given, **SMALL)
    with pytest.raises(ConfigError, match="not those of the folder .* open the run with model="):
        changed.export("changed", formats=["merged"])
    changed.export("lora.safetensors")
    # the hub's own folder stands in for a download
    pipe.register_to_config(_name_or_path="owner/name")
    with pytest.raises(ModelError, match="a pipeline in memory of owner/name, which is not here"):
        _base_folder(pipe)
    monkeypatch.setattr(
        "flowrl.runs.export.export.snapshot_download", lambda name, **_: tmp_path / "sd3"
    )
    assert _base_folder(pipe) == tmp_path / "sd3"


@pytest.mark.integration
def test_exports_and_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run whose best is the base model, which is said."""
    monkeypatch.chdir(tmp_path)
    tiny_sd3(tmp_path / "sd3")
    given: dict[str, Any] = {"model": "sd3", "prompts": TEXTS, "rewards": lambda images: 0.5}
    run = flowrl.train(
        "sd3/flow_grpo_fast", overrides={"model": {"dtype": "float32"}}, **given, **SMALL
    )
    nothing = "no checkpoint is better than the base model: reward 0.500 before training"
    out = capsys.readouterr().err
    assert out.rstrip().splitlines()[-1].startswith(nothing)
    assert "reward did not change" in run.gain.sentence  # type: ignore[union-attr]
    assert run.best is not None and run.best.base_is_best
    assert run.export("lora.safetensors") == [Path("lora.safetensors")]
    assert nothing in capsys.readouterr().err
    files = run.export("all", formats=["lora", "merged"])
    assert nothing in (tmp_path / "all/README.md").read_text().replace(
        "No checkpoint", "no checkpoint"
    )
    assert Path("all/model_index.json") in files
    for out_file, kinds, said in [
        ("lora.safetensors", (), "is there already"),
        ("other.safetensors", ("merged",), "is one file, of the format lora"),
        ("other.ckpt", (), "weights are written as .safetensors"),
    ]:
        with pytest.raises((ConfigError, RunError), match=said):
            run.export(out_file, formats=kinds)
    # to the hub
    seen: dict[str, Any] = {}

    class Hub:
        endpoint = "https://hub"

        def __init__(self, token: str | None) -> None:
            seen["token"] = token

        def create_repo(self, repo_id: str, **how: Any) -> None:
            seen.update(how)

        def upload_folder(self, repo_id: str, folder_path: Path) -> None:
            if "refused" in repo_id:
                raise OSError("403 Forbidden")
            seen["files"] = sorted(path.name for path in folder_path.iterdir())

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert run.push_to_hub("me/mine", token="t") == "https://hub/me/mine"
    assert seen["private"] and seen["token"] == "t" and "README.md" in seen["files"]
    with pytest.raises(RunError, match="me/refused: the hub refused it: 403 Forbidden; log in"):
        run.push_to_hub("me/refused")
