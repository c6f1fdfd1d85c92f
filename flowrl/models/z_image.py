"""Z-Image and Z-Image-Turbo as a FlowModel, over the public diffusers ZImagePipeline."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from diffusers import ZImagePipeline
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas
from pydantic import Field, FiniteFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import pad

from flowrl.core.errors import ModelError
from flowrl.core.types import Cond
from flowrl.models.adapter import SquareTokenModel, check_configs
from flowrl.models.files.loading import QWEN_TOKENIZER, PipelinePart
from flowrl.models.options import (
    PATCH,
    STRICT,
    Empty,
    Facts,
    Guidance,
    Parts,
    PipelineOptions,
    Sizes,
    TextShape,
    options_of,
    pick_tuning,
    warn_if_distilled,
)
from flowrl.models.tuned_pipeline import TunedPipeline, load_for_tuning

HEAD = 3  # tokens of the chat template before the prompt
PARTS = {
    "transformer": PipelinePart(("ZImageTransformer2DModel",)),
    "scheduler": PipelinePart(("FlowMatchEulerDiscreteScheduler",)),
    "vae": PipelinePart(("AutoencoderKL",)),
    "text_encoder": PipelinePart(("Qwen3ForCausalLM", "Qwen3Model")),
    "tokenizer": PipelinePart(QWEN_TOKENIZER),
}
# as X-GenGroup/Flow-Factory trains it
TARGETS = (
    *(f"attention.to_{name}" for name in ("q", "k", "v", "out.0")),
    *(f"feed_forward.w{number}" for number in (1, 2, 3)),
)


class ZImageFacts(Facts):
    """What is known of all models that `z_image` reads."""

    pipeline = "ZImagePipeline"
    kind = "ZImageTransformer2DModel"
    spec = "z-image"
    targets = TARGETS
    typical = "Tongyi-MAI/Z-Image"
    tiny = {"z_image": {}}

    def random_texts(
        self, count: int, shape: TextShape, *, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return random embeddings, and their lengths."""
        made = super().random_texts(count, shape, device=device, dtype=dtype)
        return made | {"length": torch.full((count,), shape.tokens, device=device)}

    def inputs(self, empty: Empty, sizes: Sizes, parts: Parts) -> dict[str, Any]:
        """Return what the network is given: lists of images and texts."""
        rows, text, (channels, height, width) = empty.rows, sizes.text, sizes.latent
        return {
            "x": list(empty(rows, channels, 1, height, width).unbind()),
            "t": empty(rows, dtype=torch.float32),
            "cap_feats": list(empty(rows, text.tokens, text.width).unbind()),
        }


FACTS = ZImageFacts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ZImageOptions(PipelineOptions):
    """The options of `z_image`; **Differs:** there is no cfg_truncation, with which the pipeline
    can leave guidance out towards the end; its default never does."""

    # the pipeline's own number w in c + w (c - u), less by 1 than what other models call guidance:
    # 5 is the pipeline's default, Turbo takes 0; above 0 it doubles the network's work
    guidance: Guidance = 0.0
    # above 0: guidance may make the norm of an image's velocity this many times that of c
    cfg_normalization: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    negative_prompt: str = ""
    # tokens of a prompt with its template; beyond 992 the network has no positions
    max_sequence_length: Annotated[int, Field(ge=1, le=992)] = 512
    branches: ClassVar[tuple[str, float]] = ("guidance", 0.0)

    @property
    def cfg_scale(self) -> float:
        """Return the scale s of guidance in u + s (c - u)."""
        return 1 + self.guidance


@options_of(ZImageOptions, FACTS)
def z_image(options: ZImageOptions) -> ZImage:
    """Load a Z-Image pipeline from a folder or a Hugging Face id, ready to sample and to train.

    See `ZImageOptions` for what can be set. Raise ConfigError for a wrong option, ModelError for a
    wrong model; warn before training a step-distilled model (Turbo).
    """
    tuning = pick_tuning(options, TARGETS)
    loaded = load_for_tuning(ZImagePipeline, options.path, PARTS, tuning)
    config = loaded.pipeline.transformer.config
    check_configs(loaded.pipeline, options.path, channels=config.in_channels)
    if PATCH not in config.all_patch_size or config.siglip_feat_dim is not None:
        raise ModelError(
            f"{options.path}: transformer/config.json must have a patch size of {PATCH} and no "
            f"siglip_feat_dim, got {config.all_patch_size} and {config.siglip_feat_dim}; z_image "
            "is for models from text to image"
        )
    if options.tune != "none":
        warn_if_distilled(options.path)
    tuned = TunedPipeline(loaded, tuning, t5_tokens=options.max_sequence_length - HEAD)
    return ZImage(tuned, options)


class ZImage(SquareTokenModel[ZImageOptions]):
    """A FlowModel around one ZImagePipeline.

    Its network takes lists, of images and of texts without padding, and gives x0 - noise: v is
    that with the other sign. Positions of the image follow the length of the text, filled up to a
    multiple of 32, so a text must not be padded further. Conditioning is ``embeds`` [G,T,D],
    filled up with zeros that are cut off before each call, and ``length`` [G]. Cutting reads the
    lengths, so on an accelerator each call waits for the device once. Which texts share a call
    decides about an attention mask, and with it about last bits.
    """

    facts = FACTS

    def time(self, sigma: Tensor) -> Tensor:
        """Return the network's time input of sigma [B], in float32: 0 is noise, as in the
        pipeline."""
        return (1000 - self._timesteps(sigma)) / 1000

    def _levels(self, steps: int) -> list[float]:
        return get_default_z_image_sigmas(steps)

    def _guided(self, mixed: Tensor, c: Tensor) -> Tensor:
        """Cap the norm of each image's mixed velocity [B,C,h,w]; gradients go through both
        norms."""
        if not self.options.cfg_normalization:
            return mixed
        norm, own = (v.flatten(1).norm(dim=1)[:, None, None, None] for v in (mixed, c))
        return mixed * (self.options.cfg_normalization * own / norm).clamp(max=1)

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        images = list(x.to(self.dtype)[:, :, None].unbind())
        rows = zip(cond["embeds"].to(self.dtype), cond["length"].tolist(), strict=True)
        texts = [row[:length] for row, length in rows]
        out = self._tuned.call(images, self.time(sigma), texts, named={})
        return -out[:, :, 0]

    def _embed(self, prompt: str) -> dict[str, Tensor]:
        length = self.options.max_sequence_length
        # the pipeline writes into the list of prompts that it is given
        (embeds,), _ = self._pipeline.encode_prompt(
            [prompt],
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        tokens = torch.tensor(len(embeds), device=embeds.device)
        return {"embeds": pad(embeds, (0, 0, 0, length - len(embeds))), "length": tokens}
