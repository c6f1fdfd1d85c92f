"""A tensor that is not in the files is an error that names file and tensor, in every part."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny import tiny_sd3

from flowrl.core.errors import ModelError
from flowrl.models.sd3 import sd3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd3(tmp_path_factory.mktemp("models") / "sd3", t5=True)


PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "vae", "transformer")


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_tensor(folder: Path, tmp_path: Path, part: str) -> None:
    """The last tensor in the order of names, which no other is tied to, is taken out."""
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    (file,) = (broken / part).glob("*.safetensors")
    tensors = load_file(file)
    lost = sorted(name for name in tensors if not name.startswith("shared"))[-1]
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    said = rf"^{file}: 1 tensors are missing .*{re.escape(lost.split('.', 1)[1])}"
    with pytest.raises(ModelError, match=said):
        sd3(path=str(broken), device="cpu")


def test_text_encoders_that_are_loaded_later(folder: Path, tmp_path: Path) -> None:
    """With a cache of texts they are read when a prompt is new."""
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    (file,) = (broken / "text_encoder").glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[-1])
    save_file(tensors, file, metadata={"format": "pt"})
    model = sd3(path=str(broken), device="cpu", runtime={"cache": f"{tmp_path}/texts"})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=f"^{file}: 1 tensors are missing"):
        model.encode(["a circle"])
