"""Wan 2.1's image encoder: both of its classes, names of older libraries, and loading without the
network's weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS
from diffusers import WanImageToVideoPipeline
from modelkit import edit
from safetensors.torch import load_file, save_file
from tinywan import tiny_i2v
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from transformers import CLIPVisionModel, CLIPVisionModelWithProjection
from wankit import SIZE

from flowrl.core.errors import ModelError
from flowrl.models.loading import PipelinePart, load_pipeline
from flowrl.models.wan import PARTS
from flowrl.models.wan_i2v import CLIP_VISION, IMAGE_ENCODER, wan_i2v

SMALL: dict[str, Any] = {"device": "cpu", "frames": 5, "lora": {"rank": 2}}


def source() -> Tensor:
    """Return one image [3,H,W] in 8-bit steps."""
    return torch.randint(0, 256, (3, *SIZE), generator=torch.Generator().manual_seed(1)) / 255


def renamed(folder: Path, change: Callable[[str], str]) -> Path:
    """Give the image encoder's tensors other names; return their file."""
    (file,) = (folder / IMAGE_ENCODER).glob("*.safetensors")
    stored = {change(name): tensor for name, tensor in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    return file


@pytest.mark.parametrize("kind", [CLIPVisionModelWithProjection, CLIPVisionModel])
@pytest.mark.parametrize("prefixed", [True, False])
def test_what_clip_sees_is_the_pipelines(tmp_path: Path, kind: Any, prefixed: bool) -> None:
    """Expected: what diffusers' own pipeline encodes, loaded before the file is renamed. The
    released indexes name the class with a projection, and their files have transformers 4's names,
    with ``vision_model.`` before them, which transformers 5 gives the plain class no more."""
    folder = tiny_i2v(tmp_path, experts=False, clip=kind)
    pipeline = WanImageToVideoPipeline.from_pretrained(folder)
    assert type(pipeline.image_encoder) is kind
    expected = pipeline.encode_image(to_pil_image(source()), torch.device("cpu"))
    if prefixed:
        file = renamed(folder, lambda n: re.sub(r"^(?!vision_model\.|visual_)", "vision_model.", n))
        assert any(name.startswith("vision_model.") for name in load_file(file))
    cond = wan_i2v(str(folder), **SMALL).encode_with_sources(PROMPTS[:1], [(source(),)])
    assert expected.std() > 0.1 and torch.equal(cond["image"], expected)


@pytest.mark.parametrize("kind", [CLIPVisionModelWithProjection, CLIPVisionModel])
def test_a_tensor_that_the_image_encoder_lacks(tmp_path: Path, kind: Any) -> None:
    """One tensor is under another name: it alone is missing, and the message names it."""
    folder = tiny_i2v(tmp_path, experts=False, clip=kind)
    lost = "encoder.layers.1.mlp.fc2.bias"
    file = renamed(folder, lambda name: name.replace(lost, "gone"))
    with pytest.raises(ModelError, match=rf"^{file}: 1 tensors are missing .*{re.escape(lost)}"):
        wan_i2v(str(folder), **SMALL)


@pytest.mark.parametrize("kind", [CLIPVisionModelWithProjection, CLIPVisionModel])
def test_the_network_alone_is_hollow(tmp_path: Path, kind: Any) -> None:
    """As FSDP loads it: the network has no numbers, the image encoder has those of the file; and
    the text encoders that are read later come alone."""
    folder = tiny_i2v(tmp_path, experts=False, clip=kind)
    loaded = load_pipeline(
        WanImageToVideoPipeline,
        str(folder),
        PARTS | {IMAGE_ENCODER: PipelinePart(CLIP_VISION, optional=True)},
        dtype=torch.float32,
        dtypes={"transformer": torch.float32, IMAGE_ENCODER: torch.float32},
        with_encoders=False,
        hollow=True,
    )
    network, seer = loaded.pipeline.transformer, loaded.pipeline.image_encoder
    assert all(parameter.is_meta for parameter in network.parameters())
    stored = WanImageToVideoPipeline.from_pretrained(folder).image_encoder.state_dict()
    assert all(torch.equal(stored[name], value) for name, value in seer.state_dict().items())
    assert loaded.encoders == ("text_encoder",) and loaded.pipeline.text_encoder is None
    later = loaded.read_encoders()
    assert later.text_encoder is not None
    assert (later.image_encoder, later.vae, later.transformer) == (None, None, None)


def test_another_image_encoder_is_refused(tmp_path: Path) -> None:
    folder = tiny_i2v(tmp_path, experts=False)
    edit("model_index.json", image_encoder=["transformers", "SiglipVisionModel"])(folder)
    with pytest.raises(ModelError, match="expected image_encoder to be CLIPVisionModelWith"):
        wan_i2v(str(folder), **SMALL)
