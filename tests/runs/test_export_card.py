"""The model card of an export, and its code, which is run for every pipeline and format."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import yaml
from adapterkit import PROMPTS, Folders, diffusers_images
from exportkit import KINDS, ExportedRun, assert_code_draws, exported_facts
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from modelkit import noise, perturb
from toykit import toy

from flowrl.runs.export.export import export, trained_part, write_lora, write_merged
from flowrl.runs.export.usage import shown, usage
from flowrl.runs.open_run import load_run

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]

# ----------------------------------------------------------------------------------------- the card


def test_the_front_matter_is_what_a_hub_reads(exported: ExportedRun, tmp_path: Path) -> None:
    """Read by huggingface_hub. A base model in a folder is not made up; --base-model names it."""
    text = (exported.out / "README.md").read_text()
    data = ModelCard(text).data.to_dict()
    assert (data["library_name"], data["license"]) == ("diffusers", "other")
    assert "base_model" not in data and "\n# base_model: " in text
    assert {"flowrl", "lora", "text-to-image"} <= set(data["tags"])
    assert data["pipeline_tag"] == "text-to-image"
    out = tmp_path / "x"
    export(exported.folder, out, formats=["peft"], base_model="some/base", plugins=["toykit"])
    data = ModelCard.load(out / "README.md").data.to_dict()
    assert data["base_model"] == "some/base" and data["base_model_relation"] == "adapter"
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "some/base"


def test_the_card_tells_the_results(exported: ExportedRun) -> None:
    """Before and after with the intervals of eval.jsonl; rewards, prompts and the image."""
    text = (exported.out / "README.md").read_text()
    rows = [json.loads(line) for line in (exported.folder / "eval.jsonl").read_text().splitlines()]
    for name in ("even", "odd"):
        cells = [row["tasks"][name] for row in rows]
        told = [f"{c['mean']:.3f} [{c['interval'][0]:.3f}, {c['interval'][1]:.3f}]" for c in cells]
        assert f"| {name} | {told[0]} | {told[1]} |" in text
    assert f"| **all (red)** | {rows[0]['red']:.3f} [{rows[0]['interval'][0]:.3f}, " in text
    assert "| `red` | `toykit.redness` | 1 |" in text and "0 (only measured)" in text
    assert "| training | `train.jsonl` | 6 |" in text and "(grid.png)" in text
    assert "rank 4, alpha 14, on `attn.add_k_proj`" in text and "moving average (ema)" in text
    assert "not known: the config has none of the names of flowrl's" in text
    assert "2 of 2, each of 2 prompts x 2 images" in text


def test_no_place_of_the_machine_is_told(exported: ExportedRun) -> None:
    """No path of the run, the base model or the prompts in any text file."""
    places = [str(exported.folder.parent), str(ROOT), str(Path.home()), os.uname().nodename]
    for file in exported.out.rglob("*"):
        if file.suffix in (".md", ".json", ".txt"):
            text = file.read_text(encoding="utf-8")
            assert [place for place in places if len(place) > 1 and place in text] == [], file
    text = (exported.out / "README.md").read_text()
    assert not re.search(r"(^|[\s`'\"(])/\w", text) and "path: base" in text


def test_the_code_of_the_card_runs(
    exported: ExportedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a folder in which base model and export lie, it draws the image that the run's own
    pipeline draws."""
    (tmp_path / "tiny-red").symlink_to(exported.out)
    (tmp_path / "base").symlink_to(exported.folder.parent / "base")
    monkeypatch.chdir(tmp_path)
    model = load_run(exported.folder, plugins=["toykit"])[0]
    options = {"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 8}
    assert_code_draws(ModelCard.load("tiny-red/README.md").text, model, "a teal dot", options)


TAG = "a | b\n# <img src=x> [c](http://d.e) `f` ![g](h) --- "


def test_what_users_wrote_is_shown_as_it_is(exported: ExportedRun, tmp_path: Path) -> None:
    """Tags of prompts, names and settings, by the reader of a hub: no mark-up of theirs, no cell or
    block that they end, nothing in the front matter."""
    run = copytree(exported.folder, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    for row in lines:
        row["tasks"] = {TAG if name == "even" else name: v for name, v in row["tasks"].items()}
    (run / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    # what a stranger may have written into the files of a run, and left out
    for name, changes in {
        "summary.json": {"finished": TAG, "seconds": None},
        "environment.json": {"python": TAG, "gpus": [TAG, 3]},
    }.items():
        told = json.loads((run / name).read_text()) | changes
        (run / name).write_text(json.dumps(told))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["negative_prompt"] = "x\n```\n# out\n"
    config["model"]["guidance"] = 2.0
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    export(run, tmp_path / "out", formats=["lora"], plugins=["toykit"])
    text = (tmp_path / "out/README.md").read_text()
    body = text.split("---", 2)[2]
    html = MarkdownIt("commonmark").enable("table").render(body)
    assert "<img src=x" not in html and "d.e" not in "".join(re.findall(r'href="[^"]*', html))
    assert html.count("<h1>") == 1 and html.count("out</h1>") == 0
    cells = re.findall(r"<td>(a \|.*?)</td>", html)
    shown = "a | b # &lt;img src=x&gt; [c](http://d.e) `f` ![g](h) ---"
    assert cells == [shown, shown]  # a tag, and the version of Python
    assert f"<td>for an unknown time on {shown} , 3, finished {shown}</td>" in html
    assert ModelCard(text).data.to_dict()["tags"][0] == "flowrl"


# ----------------------------------------------------------------------------------------- its code


CODE: dict[str, tuple[str, dict[str, Any]]] = {
    "sd3": (
        "guidance: 3.0, negative_prompt: blue, max_sequence_length: 8, t5: false",
        {"guidance_scale": 3.0, "negative_prompt": "blue", "max_sequence_length": 8},
    ),
    "flux": (
        "guidance: 2.0, true_cfg_scale: 3.0, negative_prompt: blue, max_sequence_length: 8",
        {
            "guidance_scale": 2.0,
            "true_cfg_scale": 3.0,
            "negative_prompt": "blue",
            "max_sequence_length": 8,
        },
    ),
    "sd15": (
        "guidance: 3.0, guidance_rescale: 0.5, spacing: trailing",
        {"guidance_scale": 3.0, "guidance_rescale": 0.5},
    ),
    "sdxl": (
        "guidance: 3.0, original_size: [64, 48], crop: [0, 8]",
        {"guidance_scale": 3.0, "original_size": (64, 48), "crops_coords_top_left": (0, 8)},
    ),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "lora") for name in KINDS), ("sdxl", "peft"), ("sdxl", "kohya"), ("sdxl", "merged")],
)
def test_the_code_for_each_pipeline_and_format(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It passes on what the run chose: guidance, negative prompt, sizes, spacing, a text encoder
    left out."""
    base, (chosen, options) = KINDS[name].folder(tmp_path / "base"), CODE[name]
    config = toy(
        tmp_path, f"model={{fn: {name}, path: {base}, {chosen}}}", "image={height: 32, width: 32}"
    )
    model = config.call("model")()
    perturb(model, 0.02)
    trained = trained_part(model, name="toy")
    facts = exported_facts(config, trained, form, tmp_path)
    monkeypatch.chdir(tmp_path)
    options = {"num_inference_steps": config.eval.steps, **options}
    assert_code_draws(usage(facts), model, "a red circle and a blue square", options)


def test_what_a_card_shows_of_a_config() -> None:
    """File names in place of paths of a machine, no addresses; hub ids, shipped files and all else
    as they are."""
    given = {
        "path": "/home/me/models/big/",
        "other": ["~/x.txt", "../y/z.json", "C:\\data\\p.csv", "https://10.0.0.1:8000/v1"],
        "kept": [
            "owner/name",
            "assets/shapes/train.jsonl",
            "a red circle / a dot",
            "",
            3,
            None,
            True,
        ],
    }
    assert shown(given) == {
        "path": "big",
        "other": ["x.txt", "z.json", "p.csv", "(address left out)"],
        "kept": given["kept"],
    }


@pytest.mark.parametrize("fn", ["qwen_image", "z_image", "flux2", "flux2_klein"])
def test_the_plain_pipeline_draws_the_run_s_image(
    folders: Folders, tmp_path: Path, fn: str
) -> None:
    """By load_lora_weights on the base, and from the merged pipeline."""
    options = {"lora": {"rank": 4, "alpha": 14.0}, "guidance": 3.0}
    model = folders.load(fn, **options)
    perturb(model)
    x = noise(model, 1, 32, 48)
    expected = diffusers_images(folders[fn], model, x, PROMPTS[:1], steps=2)
    base = folders.load(fn, tune="none", guidance=3.0)
    plain = diffusers_images(folders[fn], base, x, PROMPTS[:1], steps=2)
    assert (plain - expected).abs().max() > 1e-3

    trained = trained_part(model, name="tiny")
    write_lora(trained, tmp_path)
    base.pipeline().load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    found = diffusers_images(folders[fn], base, x, PROMPTS[:1], steps=2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    merged = tmp_path / "merged"
    merged.mkdir()
    write_merged(trained, merged)
    whole = type(folders)(tmp_path)
    whole._made[fn] = merged
    found = diffusers_images(
        merged, whole.load(fn, tune="none", guidance=3.0), x, PROMPTS[:1], steps=2
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
