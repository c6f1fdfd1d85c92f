"""Reward videos by how well a frozen world model foresees them: physical foresight coherence
(MIND-V, 2512.06628)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch

from ._backbones.clip import load_part, positive
from ._common.scorer import in_batches, load_network, pick_device, pick_dtype, source_of

WHO = "rewards.pfc"


class pfc:
    """Score videos [L, T, 3, H, W] by V-JEPA 2's foresight -> [L] float32 in [-1, 1].

    In each window the features of `context` frames predict those of the `target` frames after
    them; s_i is the mean cosine over the predicted tokens, and the score is
    ``sum_i w_i s_i, w = softmax((1 - s) / tau)``: the worst windows count most (MIND-V, 2512.06628,
    section on the reward; `tau` to infinity is the mean, to 0 the lowest). Windows begin every
    `stride` frames. `path` is a VJEPA2Model of transformers (2506.09985) with its video processor.

    **Reconstruction:** the authors' code has no reward, and the paper gives neither windows nor
    tau. `seen` "alone" encodes the target's frames by themselves, as the paper's formula is
    written; "window" with their context, as V-JEPA 2 was trained.
    """

    judges_videos = True
    judges_singly = True

    def __init__(
        self,
        *,
        path: str = "facebook/vjepa2-vitl-fpc64-256",
        context: int = 8,
        target: int = 4,
        stride: int = 4,
        tau: float = 0.1,
        seen: Literal["alone", "window"] = "alone",
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 8,
    ) -> None:
        from transformers import VJEPA2Model, VJEPA2VideoProcessor

        # options that can be checked before anything is loaded
        self.batch, self.tau = int(positive(batch, "batch", WHO)), positive(tau, "tau", WHO)
        if seen not in ("alone", "window"):
            raise ConfigError(f'{WHO}: seen: expected "alone" or "window", got {seen!r}')
        self.seen = seen
        self.device, self.dtype = pick_device(device, WHO), pick_dtype(dtype, WHO)
        # the network, and what prepares videos for it
        expected = "a VJEPA2Model"
        network = load_network(VJEPA2Model, path, who=WHO, expected=expected, dtype=self.dtype)
        self.network = network.to(self.device)
        name = "a video processor"
        self.processor: Any = load_part(VJEPA2VideoProcessor, name, source_of(path), WHO)
        # it sees tubes of frames, so windows are whole ones
        self.tube = int(network.config.tubelet_size)  # frames that one token covers
        for key, frames in [("context", context), ("target", target), ("stride", stride)]:
            if frames < 1 or frames % self.tube:
                raise ConfigError(
                    f"{WHO}: {key}: expected a multiple of the network's {self.tube} frames, got "
                    f"{frames}"
                )
        self.context, self.target, self.stride = context, target, stride
        self.least_frames = context + target  # of a video that can be judged

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each video. Raises DataError for images, a NaN, or videos of too few frames."""
        # what the world model can watch: finite videos with a whole window
        videos = batch.images
        if videos.dim() != 5 or videos.shape[2] != 3:
            raise DataError(f"{WHO}: expected videos [L, T, 3, H, W], got {list(videos.shape)}")
        least = self.least_frames
        if videos.shape[1] < least:
            raise DataError(
                f"{WHO}: expected videos of at least context + target = {least} frames, got "
                f"{videos.shape[1]}"
            )
        if not bool(videos.isfinite().all()):
            raise DataError(f"{WHO}: a video to be scored holds NaN or infinity")
        if not len(videos):
            return torch.zeros(0)
        # windows of all videos in one batch [L N, context + target, 3, H, W], then scores [L, N]
        starts = range(0, videos.shape[1] - least + 1, self.stride)
        windows = [videos[:, start : start + least] for start in starts]
        flat = torch.stack(windows, dim=1).flatten(0, 1)
        s = in_batches(self._foresight, flat, size=self.batch).reshape(len(videos), len(windows))
        return worst_first(s, self.tau).to(videos.device)

    def _foresight(self, windows: Tensor) -> Tensor:
        """Return the mean cosine between foreseen and seen tokens of windows [B, T, 3, H, W] ->
        [B]."""
        levels = (windows.float().clamp(0, 1) * 255).round().to(torch.uint8)
        pixels = self.processor(list(levels), return_tensors="pt")["pixel_values_videos"]
        pixels = pixels.to(self.device, self.dtype)
        before, after = pixels[:, : self.context], pixels[:, self.context :]
        known = self._encode(before)
        shown = self._encode(pixels)[:, known.shape[1] :] if self.seen == "window" else None
        real = self._encode(after) if shown is None else shown
        # tokens are numbered through time, then rows, then columns
        place = torch.arange(known.shape[1] + real.shape[1], device=self.device)
        place = place.expand(len(pixels), -1)
        context, target = place[:, : known.shape[1]], place[:, known.shape[1] :]
        foreseen = self.network.predictor(known, [context], [target]).last_hidden_state
        return cosine_similarity(foreseen.float(), real.float(), dim=-1).mean(dim=1)

    def _encode(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.network.encoder(pixel_values_videos=pixels).last_hidden_state
        return found


def worst_first(s: Tensor, tau: float) -> Tensor:
    """Average scores [L, N] with weights softmax((1 - s) / tau) -> [L]: low ones weigh more."""
    return (torch.softmax((1 - s) / tau, dim=-1) * s).sum(dim=-1)
