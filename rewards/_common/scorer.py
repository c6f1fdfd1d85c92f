"""What the scorers share: images as PIL images, files of weights and strict loading (no code of
theirs is run, every tensor is accounted for), devices, batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from flowrl.core.devices import DTYPES, check_folder, check_wide, kinds_of, misfits, refuse_if
from flowrl.core.devices import pick_device as pick_device
from flowrl.core.errors import ConfigError, DataError, ModelError

OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class where it has none."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__


def pick_dtype(name: str, who: str) -> torch.dtype:
    """Return the dtype of that name. Raises ConfigError."""
    if name not in DTYPES:
        raise ConfigError(f"{who}: dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def check_images(images: Tensor) -> None:
    """Refuse what is not [L, 3, H, W], or not finite (DataError). In training, the latter at the
    end of an optimizer step: the host does not wait for the device here."""
    if images.dim() != 4 or images.shape[1] != 3:
        raise DataError(f"expected images of shape [L, 3, H, W], got {list(images.shape)}")
    refuse_if(
        images.isfinite().all().logical_not(),
        lambda: DataError("an image to be scored holds NaN or infinity"),
    )


def to_pil(images: Tensor) -> list[Image.Image]:
    """Round images [L, 3, H, W] in [0, 1] to 8 bits -> L RGB images. Raises DataError for another
    shape or a NaN."""
    check_images(images)
    levels = (images.float().clamp(0, 1) * 255).round().to(torch.uint8)
    rows = levels.permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(np.ascontiguousarray(row)) for row in rows]


def local(path: str) -> Path:
    """Return a path of the user's; ``assets/...`` is also looked for in the checkout and in the
    wheel."""
    from flowrl.core.shipped_files import resource

    given = Path(path).expanduser()
    if given.exists() or not path.startswith("assets/"):
        return given
    try:
        return resource(path)
    except ConfigError:
        return given


def find_file(path: str, name: str, who: str) -> Path:
    """Find a file of weights: `path` itself, `name` inside the folder `path`, or `name` in the hub
    repository `path`.

    Raises ModelError saying which of the three was tried.
    """
    # on this machine
    here = local(path)
    if here.is_file():
        return here
    if here.is_dir():
        if (here / name).is_file():
            return here / name
        raise ModelError(f"{who}: {here} has no file {name}")
    # on the hub; it can be offline, gated, misspelt or without the file: one message for all
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, name))
    except Exception as error:
        raise ModelError(
            f"{who}: {path!r} is no file or folder here, and {name} could not be fetched from the "
            f"hub repository of that name: {first_line(error)}. Check the spelling and the network "
            "(HF_HUB_OFFLINE must not be 1), or give a path"
        ) from error


def read_weights(file: Path, who: str) -> dict[str, Tensor]:
    """Read a state dict from safetensors, or from a torch file without running any code of it.
    Raises ModelError."""
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            state: Any = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(
            f"{who}: {file} is no readable file of weights: {first_line(error)}"
        ) from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    good = isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())
    if not good:
        raise ModelError(f"{who}: {file} holds no state dict (names with tensors)")
    check_wide(kinds_of(state), f"{who}: {file}")
    return state


def load_strict(
    module: nn.Module, state: dict[str, Tensor], where: str, *, assign: bool = False
) -> None:
    """Load a state dict whose names and shapes must be the module's own. Raises ModelError naming
    what is not. assign: the tensors become the module's, instead of being copied."""
    # what does not fit
    own = module.state_dict()
    missing = sorted(own.keys() - state.keys())
    extra = sorted(state.keys() - own.keys())
    wrong = sorted(k for k in own.keys() & state.keys() if own[k].shape != state[k].shape)
    # one message for all of it
    if missing or extra or wrong:
        detail = ""
        if wrong:
            expected, got = own[wrong[0]].shape, state[wrong[0]].shape
            detail = f" {wrong[0]}: expected {list(expected)}, got {list(got)}"
        raise ModelError(
            f"{where}: expected {len(own)} tensors of known names and shapes; {len(missing)} "
            f"missing {missing[:3]}, {len(extra)} unexpected {extra[:3]}, {len(wrong)} of another "
            f"shape{detail}"
        )
    module.load_state_dict(state, assign=assign)


def in_batches(
    function: Callable[..., Tensor], *columns: Sequence[Any] | Tensor, size: int
) -> Tensor:
    """Call ``function`` on at most `size` rows of all columns at a time -> its answers,
    concatenated, float32, CPU."""
    if not len(columns[0]):
        return torch.zeros(0)
    parts = []
    with torch.inference_mode():
        for start in range(0, len(columns[0]), size):
            rows = slice(start, start + size)
            parts.append(function(*(column[rows] for column in columns)).float().cpu())
    # outside: what is joined in inference mode could never be part of a graph
    return torch.cat(parts)


def source_of(path: str) -> str:
    """Return the folder that a path means, or the path as a hub id if there is none."""
    folder = local(path)
    return str(folder) if folder.is_dir() else path


def load_network(
    kind: Any, path: str, *, who: str, expected: str, more: bool = False, **options: Any
) -> Any:
    """Load a network from a folder or hub id, frozen and in evaluation mode.

    Args:
        kind: class of transformers. path: folder or hub id. who: the reward, for messages.
        expected: what the folder should be of, for messages. more: whether the file may have
        tensors that the network does not take. options: for ``from_pretrained``.

    Raises:
        ModelError: it cannot be loaded, or tensors are missing, of another size, or left over.
    """
    # safetensors only, and no code that comes with a model
    try:
        network, info = kind.from_pretrained(
            source_of(path),
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # named below, like the missing ones
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # offline, misspelt, no safetensors, another kind of model
        raise ModelError(
            f"{who}: {path}: expected a folder, or a hub id with HF_HUB_OFFLINE unset, of "
            f"{expected} (config.json and safetensors): {first_line(error)}"
        ) from error
    wrong = misfits(info, allowed=("unexpected",) if more else ())
    if wrong:
        raise ModelError(
            f"{who}: {path}: the weights are not those of {expected} that config.json describes: "
            f"{wrong}"
        )
    check_folder(source_of(path), who)
    return network.eval().requires_grad_(False)
