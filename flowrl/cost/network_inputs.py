"""What the adapter of each kind hands its network: names and shapes only, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.cost.architecture import VIDEO, Architecture, TextShape
from flowrl.models.flux2 import positions
from flowrl.models.square_tokens import PATCH

Inputs = Callable[..., dict[str, Any]]
TOKEN_TIMES = "token_times"  # of Wan 2.2 TI2V-5B: each token has a time of its own
SEEN = 257  # tokens of what CLIP sees in the image that a video of Wan 2.1 starts from


def network_inputs(
    fn: str,
    rows: int,
    latent: tuple[int, ...],
    text: TextShape,
    architecture: Architecture,
    dtype: torch.dtype,
    source: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return the inputs of one network call with ``rows`` latents of the shape ``latent``, and of
    as many sources whose latents have these rows and columns."""
    empty = partial(torch.empty, device="meta", dtype=dtype)
    settings = architecture.part("unet" if fn not in _INPUTS else "transformer").settings
    if fn in VIDEO:
        settings = {**settings, TOKEN_TIMES: architecture.part("vae").settings.get("is_residual")}
    given = (empty, rows, latent, text, settings)
    return _INPUTS.get(fn, _unet)(*given) if source is None else _EDITS[fn](*given, source)


def _sd3(empty: Any, rows: int, latent: Any, text: TextShape, _: Any) -> dict[str, Any]:
    return {
        "hidden_states": empty(rows, *latent),
        "timestep": empty(rows, dtype=torch.float32),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
        "pooled_projections": empty(rows, text.pooled),
    }


def _with_sources(inputs: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Make the inputs of a network whose sources stand behind the noisy tokens, as if the latent
    were taller."""

    def made(
        empty: Any,
        rows: int,
        latent: Any,
        text: TextShape,
        settings: dict[str, Any],
        source: tuple[int, int],
    ) -> dict[str, Any]:
        """Return the inputs with the height of both."""
        channels, height, width = latent
        return inputs(empty, rows, (channels, height + source[0], width), text, settings)

    return made


def _flux(
    empty: Any, rows: int, latent: Any, text: TextShape, settings: dict[str, Any]
) -> dict[str, Any]:
    channels, height, width = latent
    tokens = (height // PATCH) * (width // PATCH)
    return {
        "hidden_states": empty(rows, tokens, PATCH**2 * channels),
        "timestep": empty(rows),
        "guidance": _guidance(empty, rows, settings),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
        "pooled_projections": empty(rows, text.pooled),
        "txt_ids": empty(text.tokens, 3, dtype=torch.float32),
        "img_ids": empty(tokens, 3, dtype=torch.float32),
    }


def _guidance(empty: Any, rows: int, settings: dict[str, Any]) -> Tensor | None:
    """Return the guidance number of a network that has an input for it."""
    guided = settings.get("guidance_embeds", False)
    return empty(rows, dtype=torch.float32) if guided else None


def _qwen_image(empty: Any, rows: int, latent: Any, text: TextShape, _: Any) -> dict[str, Any]:
    channels, height, width = latent
    sides = height // PATCH, width // PATCH
    return {
        "hidden_states": empty(rows, sides[0] * sides[1], PATCH**2 * channels),
        "timestep": empty(rows, dtype=torch.float32),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
        "encoder_hidden_states_mask": empty(rows, text.tokens, dtype=torch.int64),
        "img_shapes": [[(1, *sides)]] * rows,
    }


def _qwen_edit(
    empty: Any,
    rows: int,
    latent: Any,
    text: TextShape,
    settings: dict[str, Any],
    source: tuple[int, int],
) -> dict[str, Any]:
    found = _qwen_image(empty, rows, latent, text, settings)
    sides = source[0] // PATCH, source[1] // PATCH
    more = empty(rows, sides[0] * sides[1], PATCH**2 * latent[0])
    found["hidden_states"] = torch.cat([found["hidden_states"], more], 1)
    found["img_shapes"] = [[*shapes, (1, *sides)] for shapes in found["img_shapes"]]
    return found


def _z_image(empty: Any, rows: int, latent: Any, text: TextShape, _: Any) -> dict[str, Any]:
    channels, height, width = latent
    return {
        "x": list(empty(rows, channels, 1, height, width).unbind()),
        "t": empty(rows, dtype=torch.float32),
        "cap_feats": list(empty(rows, text.tokens, text.width).unbind()),
    }


def _flux2(
    empty: Any, rows: int, latent: Any, text: TextShape, settings: dict[str, Any]
) -> dict[str, Any]:
    channels, height, width = latent
    meta = torch.device("meta")
    return {
        "hidden_states": empty(rows, height * width, channels),
        "timestep": empty(rows),
        "guidance": _guidance(empty, rows, settings),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
        "txt_ids": positions(1, 1, text.tokens, meta),
        "img_ids": positions(height, width, 1, meta),
    }


def _wan(
    empty: Any, rows: int, latent: Any, text: TextShape, settings: dict[str, Any]
) -> dict[str, Any]:
    # image to video: the network takes what is given of the frames, too
    channels, (moments, height, width) = settings.get("in_channels") or latent[0], latent[1:]
    tokens = moments * (height // PATCH) * (width // PATCH)
    own = settings[TOKEN_TIMES]
    found = {
        "hidden_states": empty(rows, channels, *latent[1:]),
        "timestep": empty(*((rows, tokens) if own else (rows,)), dtype=torch.float32),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
    }
    if settings.get("image_dim"):
        found["encoder_hidden_states_image"] = empty(rows, SEEN, settings["image_dim"])
    return found


def _unet(empty: Any, rows: int, latent: Any, text: TextShape, _: Any) -> dict[str, Any]:
    added = {"text_embeds": empty(rows, text.pooled), "time_ids": empty(rows, 6)}
    return {
        "sample": empty(rows, *latent),
        "timestep": empty(rows, dtype=torch.int64),
        "encoder_hidden_states": empty(rows, text.tokens, text.width),
        "added_cond_kwargs": added if text.pooled else None,
    }


_INPUTS: dict[str, Inputs] = {
    "sd3": _sd3,
    "flux": _flux,
    "flux_kontext": _flux,
    "qwen_image": _qwen_image,
    "qwen_edit": _qwen_image,
    "qwen_edit_plus": _qwen_image,
    "z_image": _z_image,
    "flux2": _flux2,
    "flux2_klein": _flux2,
    "wan": _wan,
    "wan_i2v": _wan,
}
_EDITS: dict[str, Inputs] = {
    "flux_kontext": _with_sources(_flux),
    "flux2": _with_sources(_flux2),
    "flux2_klein": _with_sources(_flux2),
    "qwen_edit": _qwen_edit,
    "qwen_edit_plus": _qwen_edit,
}
