"""Parity with diffusers, looked at by the doctor, for every adapter on tiny pipelines.

Expected: nothing on sound models, which the tests of the adapters hold to the pipelines by other
code; the name of the fault where guidance's branches are swapped or the velocity is flipped.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS, Folders
from modelkit import perturb

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


def found(model: Any) -> list[str]:
    """Look at a model without a run around it."""
    patient: Any = SimpleNamespace(
        model=model,
        texts=PROMPTS[:2],
        rollout=SimpleNamespace(sigmas=torch.zeros(6)),
        config=SimpleNamespace(image=SimpleNamespace(height=32, width=48)),
        has=lambda *names: False,
    )
    return [finding.id for finding in look_at_parity(patient).findings]


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
