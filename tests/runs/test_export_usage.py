"""The code of a model card, run for every pipeline and every format that diffusers or peft
reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from exportkit import KINDS, assert_code_draws
from modelkit import perturb
from toykit import toy

from flowrl.runs.export.export import FORMATS, trained_part
from flowrl.runs.export.usage import CardFacts, shown, usage

pytestmark = pytest.mark.integration
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
    [(name, "lora") for name in KINDS] + [("sdxl", form) for form in ("peft", "kohya", "merged")],
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
    (tmp_path / "out").mkdir()
    FORMATS[form](trained, tmp_path / "out")
    facts = CardFacts(
        config=config,
        run=tmp_path,
        iteration=4,
        weights="current",
        folder="out",
        formats=[form],
        pipeline=trained.pipeline,
        network=trained.network,
        numbers=1,
        lora=trained.lora,
        base="",
        kohya="toy-kohya.safetensors",
    )
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
