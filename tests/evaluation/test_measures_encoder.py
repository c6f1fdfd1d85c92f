"""The encoder of vendi and distance: weights that are not all there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.core.errors import ModelError
from flowrl.evaluation.measures.diversity import encoder

CPU = torch.device("cpu")


@pytest.mark.parametrize(("kind", "name"), [("missing", "kept"), ("mismatched", "cut")])
def test_an_encoder_that_lacks_weights_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    """One tensor is left out of the file, or cut: transformers would make it random. A tensor more
    does no harm."""
    shutil.copytree("assets/shapes-dino", tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("*.safetensors")
    state = load_file(file)
    save_file({**state, "head.weight": torch.zeros(2)}, file, {"format": "pt"})
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    whole = encoder("assets/shapes-dino", CPU)(images)
    assert torch.equal(encoder(str(tmp_path), CPU)(images), whole)
    victim = next(key for key in sorted(state) if key.endswith("mlp.fc1.weight"))
    cut = state.pop(victim)[:1].contiguous()
    save_file(state if name == "kept" else {**state, victim: cut}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"expected all weights of .*, got 1 {kind} .*fc1.weight"):
        encoder(str(tmp_path), CPU)
