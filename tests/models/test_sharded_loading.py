"""Networks that are filled share by share hold what diffusers' own loader reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from tiny import tiny_sd3
from tinylm import tiny_qwen_image
from tinywan import tiny_wan

from flowrl.core.errors import ModelError
from flowrl.models.loading import fill, hollow_network

CPU = torch.device("cpu")


@pytest.mark.parametrize("make", [tiny_sd3, tiny_wan, tiny_qwen_image])
def test_a_filled_network_is_the_one_that_diffusers_loads(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """Names, dtypes and bits in bfloat16, also of what is in no file (Wan's frequencies), of what
    diffusers keeps in float32 (Wan's norms), and from several files."""
    folder = make(tmp_path) / "transformer"
    kind = json.loads((folder / "config.json").read_text())["_class_name"]
    whole = getattr(diffusers, kind).from_pretrained(folder, torch_dtype=torch.bfloat16)
    whole.save_pretrained(folder, max_shard_size="20KB")
    (folder / "diffusion_pytorch_model.safetensors").unlink(missing_ok=True)
    network = hollow_network(folder, kind, torch.bfloat16)
    assert all(parameter.is_meta for parameter in network.parameters())
    fill(network, {"": folder}, (), device=CPU)
    made = [{**dict(n.named_parameters()), **dict(n.named_buffers())} for n in (whole, network)]
    assert [*made[0]] == [*made[1]]
    for name, tensor in made[0].items():
        assert tensor.dtype == made[1][name].dtype and torch.equal(tensor, made[1][name]), name


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = tiny_sd3(tmp_path, layers=1) / "transformer"
    network = hollow_network(folder, "SD3Transformer2DModel", torch.float32)
    network.register_parameter("more", torch.nn.Parameter(torch.empty(2, 3, device="meta")))
    with pytest.raises(ModelError, match=r"transformer.*more of shape \[2, 3\], got none"):
        fill(network, {"": folder}, (), device=CPU)
