"""Read parts of a pipeline so that a tensor which is not in the files is an error.

The libraries would only warn, and go on with random weights or with none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from flowrl.core.errors import ModelError


def read_parts(
    folder: Path, kinds: Mapping[str, str], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """Read text and image encoders and VAE of a pipeline on the CPU -> {name: module}.

    `kinds` {name: class of diffusers or transformers}; `dtypes` as a pipeline takes them, with a
    "default". Raises ModelError that names file and tensor if one is missing; what the libraries
    raise else.
    """
    parts = {}
    for name, kind in kinds.items():
        library: Any = diffusers if hasattr(diffusers, kind) else transformers
        parts[name], info = getattr(library, kind).from_pretrained(
            folder / name,
            dtype=dtypes.get(name, dtypes["default"]),
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        check_complete(folder / name, info["missing_keys"])
    return parts


def check_complete(folder: Path, missing: Collection[str]) -> None:
    """Raise ModelError if tensors are missing in the files of a part."""
    if not missing:
        return
    files = sorted(folder.glob("*.safetensors"))
    where = files[0] if len(files) == 1 else folder
    shown = ", ".join(sorted(missing)[:3])
    raise ModelError(
        f"{where}: {len(missing)} tensors are missing from its safetensors files, such as {shown}; "
        "copy the file again, or save the part again with save_pretrained"
    )
