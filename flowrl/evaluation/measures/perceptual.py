"""LPIPS through torchmetrics, its AlexNet by path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, ModelError
from flowrl.evaluation.measures.inception import metrics_there


def lpips(path: str | None, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Load LPIPS on AlexNet (1801.03924, version 0.1) -> a function of two stacks of images
    [n, 3, H, W] in [0, 1] that returns n distances.

    `path` is torchvision's AlexNet (alexnet-owt-7be5be79.pth, or as safetensors); the weights on
    top of it come with torchmetrics. Raises ConfigError without the extra or the file, ModelError
    for a file that is something else.
    """
    metrics_there()
    from torchmetrics.functional.image.lpips import _NoTrainLpips

    if path is None:
        raise ConfigError(
            "lpips looks through an AlexNet: give --alexnet FILE, torchvision's "
            "alexnet-owt-7be5be79.pth"
        )
    network = _NoTrainLpips(net="alex", pnet_rand=True)
    # torchvision's layer features.8 is slice4.8 here
    known = _read(path)
    own = network.net.state_dict()
    wanted = {name: f"features.{name.partition('.')[2]}" for name in own}
    wrong = [
        key for n, key in wanted.items() if key not in known or known[key].shape != own[n].shape
    ]
    if wrong:
        raise ModelError(f"{path}: expected torchvision's AlexNet, got a file without {wrong[:3]}")
    network.net.load_state_dict({name: known[key] for name, key in wanted.items()})
    network = network.to(device)

    @torch.inference_mode()
    def compare(first: Tensor, second: Tensor) -> Tensor:
        both = (images.to(device) * 2 - 1 for images in (first, second))
        return network(*both).flatten().float().cpu()

    return compare


def _read(path: str) -> dict[str, Tensor]:
    """Read a file of tensors and nothing else. Raises ModelError."""
    try:
        if Path(path).suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{path}: expected a file of tensors: {reason}") from error
    return dict(found)
