"""Weights of transformers' networks: safetensors only, no code of theirs, every tensor accounted
for."""

from __future__ import annotations

from typing import Any

from flowrl.core.devices import misfits
from flowrl.core.errors import ModelError

from .scorer import first_line, local


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
    return network.eval().requires_grad_(False)
