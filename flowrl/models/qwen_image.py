"""Qwen-Image as a FlowModel, over the public diffusers QwenImagePipeline."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from diffusers import QwenImagePipeline
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import pad

from flowrl.core.errors import ModelError
from flowrl.core.types import Cond
from flowrl.models.adapter import SquareTokenModel, check_scheduler, pack, unpack
from flowrl.models.files.loading import QWEN_TOKENIZER, PipelinePart
from flowrl.models.options import (
    CALL,
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
)
from flowrl.models.tuned_pipeline import TunedPipeline, load_for_tuning
from flowrl.models.tuning import JOINT_ATTENTION

PARTS = {
    "transformer": PipelinePart(("QwenImageTransformer2DModel",)),
    "scheduler": PipelinePart(("FlowMatchEulerDiscreteScheduler",)),
    "vae": PipelinePart(("AutoencoderKLQwenImage",)),
    "text_encoder": PipelinePart(("Qwen2_5_VLForConditionalGeneration",)),
    "tokenizer": PipelinePart(QWEN_TOKENIZER),
}
# attention and both MLPs of a block, as X-GenGroup/Flow-Factory trains it
TARGETS = (
    *JOINT_ATTENTION,
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)
# settings of the networks for editing, layers and guidance by an input, with what they must be
PLAIN = {
    "zero_cond_t": False,
    "use_additional_t_cond": False,
    "use_layer3d_rope": False,
    "guidance_embeds": False,
}


class QwenImageFacts(Facts):
    """What is known of all models that `qwen_image` reads."""

    pipeline = "QwenImagePipeline"
    kind = "QwenImageTransformer2DModel"
    spec = "qwen-image"
    targets = TARGETS
    typical = "Qwen/Qwen-Image"
    packed = PATCH**2
    call = CALL | {"guidance": "true_cfg_scale"}
    needs_negative = True
    tiny = {"qwen_image": {}}

    def vae_latent(self, latent: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what the VAE decodes: a video of one frame."""
        channels, height, width = latent
        return channels, 1, height, width

    def random_texts(
        self, count: int, shape: TextShape, *, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return random embeddings, and their mask."""
        made = super().random_texts(count, shape, device=device, dtype=dtype)
        return made | {"mask": torch.ones(count, shape.tokens, device=device, dtype=torch.long)}

    def inputs(self, empty: Empty, sizes: Sizes, parts: Parts) -> dict[str, Any]:
        """Return what the network is given; the tokens of a source stand behind the others."""
        rows, text, (channels, height, width) = empty.rows, sizes.text, sizes.latent
        lots = [(1, height // PATCH, width // PATCH)]
        if sizes.source is not None:
            lots.append((1, sizes.source[0] // PATCH, sizes.source[1] // PATCH))
        images = [empty(rows, high * wide, PATCH**2 * channels) for _, high, wide in lots]
        return {
            "hidden_states": torch.cat(images, 1) if len(lots) > 1 else images[0],
            "timestep": empty(rows, dtype=torch.float32),
            "encoder_hidden_states": empty(rows, text.tokens, text.width),
            "encoder_hidden_states_mask": empty(rows, text.tokens, dtype=torch.int64),
            "img_shapes": [lots] * rows,
        }


FACTS = QwenImageFacts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class QwenImageOptions(PipelineOptions):
    """The options of `qwen_image`."""

    # the pipeline's true_cfg_scale, 4 by default there; above 1: guidance against negative_prompt,
    # which doubles the network's work
    guidance: Guidance = 1.0
    negative_prompt: str = " "
    # tokens of a prompt; a shorter one is filled up and masked
    max_sequence_length: Annotated[int, Field(ge=1, le=1024)] = 512


@options_of(QwenImageOptions, FACTS)
def qwen_image(options: QwenImageOptions) -> QwenImage:
    """Load a Qwen-Image pipeline from a folder or a Hugging Face id, ready to sample and to train.

    See `QwenImageOptions` for what can be set. Raise ConfigError for a wrong option, ModelError
    for a wrong model, such as one for editing.
    """
    tuning = pick_tuning(options, TARGETS)
    loaded = load_for_tuning(QwenImagePipeline, options.path, PARTS, tuning)
    other = [name for name, plain in PLAIN.items() if _setting(loaded.pipeline, name) != plain]
    if other:
        raise ModelError(
            f"{options.path}: transformer/config.json sets {', '.join(other)}, so this is no "
            "Qwen-Image from text to image, which qwen_image is for; give the path of one"
        )
    check_network(loaded.pipeline, options.path)
    tuned = TunedPipeline(loaded, tuning, t5_tokens=options.max_sequence_length)
    return QwenImage(tuned, options)


class QwenImage(SquareTokenModel[QwenImageOptions]):
    """A FlowModel around one QwenImagePipeline.

    Latents are [16,h,w], not the pipeline's packed [tokens,64]; its generator draws them in this
    order, so equal seeds give equal noise. Conditioning is ``embeds`` [G,T,D] of the language
    model, filled up to ``max_sequence_length``, and ``mask`` [G,T], 1 for a prompt's own tokens.
    **Differs:** the pipeline fills prompts up to the longest of a batch, and has no mask where
    all are as long. Then the kernel of attention depends on which prompts share a call, and its
    rounding with it; here every call is alike.
    """

    facts = FACTS

    one_frame = True

    def time(self, sigma: Tensor) -> Tensor:
        """Return the network's time input of sigma [B], in float32.

        Sampling and training both come here. **Differs:** the pipeline rounds 1000 sigma to the
        dtype of its latents before it divides; in bfloat16 759.5 becomes 760. The network rounds
        what it is given once, to its own dtype.
        """
        return self._timesteps(sigma) / 1000

    def _guided(self, mixed: Tensor, c: Tensor) -> Tensor:
        """Give each token of the mixed velocity [B,C,h,w] the norm that it has in c [B,C,h,w],
        where the prompt alone decides; gradients go through both norms."""
        tokens, own = pack(mixed), pack(c).norm(dim=-1, keepdim=True)
        scaled = tokens * (own / tokens.norm(dim=-1, keepdim=True))
        return unpack(scaled, mixed.shape[-2] // PATCH)

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        rows, columns = x.shape[-2] // PATCH, x.shape[-1] // PATCH
        behind, shapes = self._behind(cond)
        named = {
            "hidden_states": torch.cat([pack(x), *behind], 1).to(self.dtype),
            "timestep": self.time(sigma),
            "encoder_hidden_states": cond["embeds"].to(self.dtype),
            "encoder_hidden_states_mask": cond["mask"],
            "img_shapes": [[(1, rows, columns), *shapes]] * len(x),
        }
        return unpack(self._tuned.call(named=named)[:, : rows * columns], rows)

    def _behind(self, cond: Cond) -> tuple[list[Tensor], list[tuple[int, int, int]]]:
        """Return the tokens [B,N,4C] that stand behind the image's, and frames, rows and columns of
        each lot."""
        return [], []

    def _embed(self, prompt: str) -> dict[str, Tensor]:
        # alone in its batch, a prompt is not filled up
        embeds, _ = self._pipeline.encode_prompt(
            [prompt], device=self.text_device, max_sequence_length=self.options.max_sequence_length
        )
        return self._filled(embeds[0])

    def _filled(self, embeds: Tensor) -> dict[str, Tensor]:
        """Fill the embeddings [T,D] of a prompt up, with their mask."""
        mask = torch.ones(len(embeds), dtype=torch.long, device=embeds.device)
        empty = self.options.max_sequence_length - len(embeds)
        return {"embeds": pad(embeds, (0, 0, 0, empty)), "mask": pad(mask, (0, empty))}

    def _decode(self, x0: Tensor) -> Tensor:
        vae = self._pipeline.vae
        latents = x0.to(vae.device, vae.dtype)
        mean, std = self._moments(latents)
        return self._images(latents * std + mean)

    def _from_vae(self, latents: Tensor) -> Tensor:
        mean, std = self._moments(latents)
        return (latents - mean) / std

    def _moments(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and std [C,1,1] of each channel of the VAE's latents."""
        config = self._pipeline.vae.config
        mean, std = latents.new_tensor(config.latents_mean), latents.new_tensor(config.latents_std)
        return mean[:, None, None], std[:, None, None]


def _setting(pipeline: Any, name: str) -> Any:
    return pipeline.transformer.config.get(name, PLAIN[name])


def check_network(pipeline: Any, path: str) -> None:
    """Raise ModelError if the network's tokens are not 2 x 2 latents of the VAE."""
    check_scheduler(pipeline, path)
    config, vae = pipeline.transformer.config, pipeline.vae.config
    if config.patch_size != PATCH or {vae.z_dim, config.in_channels // PATCH**2} != {
        config.out_channels
    }:
        raise ModelError(
            f"{path}: the network must take and give squares of 2 x 2 latents of the VAE, got "
            f"patch_size {config.patch_size}, in_channels {config.in_channels}, out_channels "
            f"{config.out_channels}, and z_dim {vae.z_dim} of the VAE"
        )
