"""Parity with diffusers, looked at by the doctor, for every adapter on tiny pipelines.

Expected: nothing on sound models, which the tests of the adapters hold to the pipelines by other
code; the name of the fault where guidance's branches are swapped or the velocity is flipped.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS, Folders
from modelkit import perturb
from torchvision.transforms.functional import to_pil_image

from flowrl.core.prompts import PromptSet
from flowrl.doctor.parity import look_at_parity

CASES: list[tuple[str, dict[str, Any]]] = [
    ("sd3", {"guidance": 4.5, "negative_prompt": "a blue dog"}),
    ("sd3.5", {"tune": "full", "dtype": "bfloat16"}),
    ("flux", {}),
    ("flux", {"true_cfg_scale": 2.0}),
    ("sd15", {"guidance": 5.0}),
    ("sd15 v", {"guidance": 4.0, "guidance_rescale": 0.7}),
    ("sdxl", {"guidance": 5.0}),
    ("z_image", {"guidance": 4.0}),
    ("flux2", {}),
    ("flux2_klein", {"guidance": 4.0}),
    ("qwen_image", {"guidance": 4.0}),
]
# guidance of Qwen-Image is no sum of its branches
PLAIN = [case for case in CASES[:-1] if case[1]]
GUIDED = [case for case in PLAIN if not {"dtype", "guidance_rescale"} & {*case[1]}]


def found(
    model: Any,
    *sources: str,
    folder: str = "",
    size: tuple[int, int] = (32, 48),
    steps: int = 5,
) -> list[str]:
    """Look at a model without a run around it."""
    records = [{"source": name} for name in sources] or [{}, {}]
    examined: Any = SimpleNamespace(
        model=model,
        texts=PROMPTS[:2],
        rollout=SimpleNamespace(sigmas=torch.zeros(steps + 1)),
        trainer=SimpleNamespace(train_set=PromptSet(PROMPTS[:2], records, "", f"{folder}/list")),
        rows=[0, 1],
        config=SimpleNamespace(image=SimpleNamespace(height=size[0], width=size[1])),
        has=lambda *names: False,
    )
    return [finding.id for finding in look_at_parity(examined).findings]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_sound_adapter(
    name: str, options: dict[str, Any], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folders.load(name, **options)
    perturb(model, 0.05)
    assert found(model) == []
    right = model.velocity
    monkeypatch.setattr(model, "velocity", lambda *args: -right(*args))
    assert found(model) == ["parity/sign"]


def test_trailing_steps_that_do_not_divide_the_timesteps(folders: Folders) -> None:
    """Diffusers' DDIM goes from 999 to 833 with six steps, and then asks at 832."""
    model = folders.load("sdxl", guidance=5.0, spacing="trailing")
    perturb(model, 0.05)
    assert found(model, steps=6) == found(model, steps=5) == []


@pytest.mark.parametrize(("name", "options"), GUIDED)
def test_swapped_guidance(
    name: str, options: dict[str, Any], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folders.load(name, **options)
    perturb(model, 0.05)
    module = "unet" if name.startswith("sd15") or name == "sdxl" else "flow_matching"
    place = f"flowrl.models.{module}.guided"

    def swapped(network: Any, scale: float, *rest: Any, **more: Any) -> Any:
        return right(network, 1 - scale, *rest, **more)

    from flowrl.models.adapter import guided as right

    monkeypatch.setattr(place, swapped)
    assert found(model) == ["parity/guidance-swapped"]


def test_prompts_with_references(folders: Folders, tmp_path: Path) -> None:
    """The first prompt's references go to both sides; without them in the pipeline the velocity
    differs."""
    for name in ("0.png", "1.png"):
        pixels = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)
        to_pil_image(pixels).save(tmp_path / name)
    model = folders.load("flux2")
    perturb(model, 0.05)
    files: dict[str, Any] = {"folder": str(tmp_path), "size": (64, 64)}
    assert found(model, "0.png", "1.png", **files) == []
    model.pipeline_sources = lambda sources: {}
    assert found(model, "0.png", "1.png", **files) == ["parity/velocity"]
