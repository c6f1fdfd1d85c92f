"""A tiny model for the script that measures many settings."""

from __future__ import annotations

from pathlib import Path

import yaml
from estimatekit import model_config
from tiny import tiny_sd3


def tiny_config(folder: Path) -> Path:
    """Write the config of a tiny SD3 whose weights are not there."""
    tiny_sd3(folder / "weights")
    for file in (folder / "weights").rglob("*.safetensors"):
        file.unlink()
    model_config(folder, f"{{fn: sd3, path: {folder}/weights, device: cpu}}")  # and its prompts
    toy = yaml.safe_load((folder / "toy" / "toy.yaml").read_text())
    toy["model"] = {"fn": "sd3", "path": f"{folder}/weights", "device": "cpu"}
    toy["image"] = {"height": 64, "width": 64}
    toy["rewards"] = {"red": {"fn": "jpeg"}, "strict": {"fn": "jpeg", "weight": 0.0}}
    (folder / "it.yaml").write_text(yaml.safe_dump(toy))
    return folder / "it.yaml"
