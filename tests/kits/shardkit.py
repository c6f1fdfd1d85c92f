"""What processes under FSDP hold, and shares in files that nobody of ours wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn

from flowrl.core.processes import shard, world
from flowrl.core.shards import here, read_into
from flowrl.models.sd3 import sd3


def held(folder: str) -> dict[str, Any]:
    """Load a tiny SD3 while nobody may read its network whole -> numbers that this process holds
    of it, and of those that are there; the tensors joined."""
    whole = AssertionError("the network was read whole")
    with mock.patch.object(SD3Transformer2DModel, "from_pretrained", side_effect=whole):
        model = sd3(folder, t5=False, max_sequence_length=1, device="cpu", tune="full")
    rows = model.network.state_dict()
    params = [*model.trainable().values()]
    return {
        "mine": sum(here(p).numel() for p in params),
        "all": sum(p.numel() for p in params),
        "sums": {name: joined(p).double().sum().item() for name, p in rows.items()},
    }


def joined(tensor: Tensor) -> Tensor:
    """Return a tensor of which each process holds some rows."""
    found: Any = tensor
    return found.full_tensor() if hasattr(found, "full_tensor") else tensor


def write_three(folder: Path, whole: dict[str, Tensor]) -> list[Path]:
    """Write rows 0, 1 to 3 and the rest of each tensor into three files, by the layout of torch's
    HuggingFaceStorageWriter."""
    files = []
    for number, (first, last) in enumerate([(0, 1), (1, 4), (4, None)]):
        info = {name: {"saved_offsets": [first] + [0] * (t.dim() - 1)} for name, t in whole.items()}
        rows = {name: t[first:last].clone() for name, t in whole.items()}
        files.append(folder / f"current-{number + 1:05d}-of-00003.safetensors")
        save_file(rows, files[-1], metadata={"DCP_SHARDING_INFO": json.dumps(info)})
    return files


def from_three(folder: str) -> dict[str, Any]:
    """Read what three processes wrote, as this one's share of two -> the tensors joined."""
    layer = nn.Linear(3, 7)
    shard(layer, ())
    files = sorted(Path(folder).glob("current-*"))
    with torch.no_grad():
        read_into(dict(layer.named_parameters()), files)
    rows = {name: joined(p).tolist() for name, p in layer.named_parameters()}
    return {"rows": rows, "rank": world().rank}
