"""Stable Diffusion 3 and 3.5 as a FlowModel, over the public diffusers StableDiffusion3Pipeline."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from torch import Tensor, nn

from flowrl.errors import ConfigError, DataError, ModelError
from flowrl.models.loading import DTYPES, Part, load_pipeline, pick_device, pick_dtype
from flowrl.models.lora import add_lora, find_layers, lora_from
from flowrl.types import Cond

_CLIP = ("CLIPTokenizer", "CLIPTokenizerFast")
_PARTS = {
    "transformer": Part(("SD3Transformer2DModel",)),
    "scheduler": Part(("FlowMatchEulerDiscreteScheduler",)),
    "vae": Part(("AutoencoderKL",)),
    "text_encoder": Part(("CLIPTextModelWithProjection",)),
    "text_encoder_2": Part(("CLIPTextModelWithProjection",)),
    "text_encoder_3": Part(("T5EncoderModel",), optional=True),
    "tokenizer": Part(_CLIP),
    "tokenizer_2": Part(_CLIP),
    "tokenizer_3": Part(("T5TokenizerFast", "T5Tokenizer"), optional=True),
}
_CACHE_BYTES = 4 * 2**30  # one prompt of SD3.5 with T5 takes 2.7 MB in bfloat16


def sd3(
    path: str,
    *,
    guidance: float = 1.0,
    tune: str = "lora",
    lora: dict[str, Any] | None = None,
    layers: Sequence[str] | None = None,
    dtype: str = "float32",
    device: str = "auto",
    negative_prompt: str = "",
    t5: bool = True,
    max_sequence_length: int = 256,
    decode_batch: int = 64,
    seed: int = 0,
) -> SD3:
    """Load an SD3 pipeline from a folder or a Hugging Face id, ready to sample and to train.

    ``guidance`` above 1 turns classifier-free guidance on, as in the pipeline; ``tune`` is ``lora`` (options in
    ``lora``, see models/lora.py), ``full`` (all weights, or those of the linear ``layers`` that are named by the rule
    of ``lora.targets``) or ``none``; ``dtype`` is that of the frozen weights and the arithmetic (``auto``: bfloat16
    where the device multiplies in it), trained weights are float32 always; ``t5`` off leaves the T5 encoder out (zero
    tokens stand in its place, and about 10 GB are saved with SD3.5); ``max_sequence_length`` is the number of T5
    tokens; ``seed`` draws the LoRA.
    Raise ConfigError for a wrong option, ModelError for a wrong model.
    """
    _check_options(guidance, tune, lora, layers, dtype, negative_prompt, max_sequence_length, decode_batch)
    spec, target = lora_from(lora), pick_device(device)
    short = pick_dtype(dtype, target)
    masters = {"transformer": torch.float32} if tune == "full" else {}
    leave_out = () if t5 else ("text_encoder_3", "tokenizer_3")
    pipeline = load_pipeline(StableDiffusion3Pipeline, path, _PARTS, dtype=short, dtypes=masters, leave_out=leave_out)
    _check_configs(pipeline, path)
    transformer = pipeline.transformer
    for part in (transformer, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3):
        if part is not None:
            part.requires_grad_(False)
    if tune == "lora":
        add_lora(transformer, spec, seed=seed)
    if tune == "full":
        for part in [transformer] if layers is None else find_layers(transformer, layers, "layers"):
            part.requires_grad_(True)
    transformer.eval()
    return SD3(
        pipeline.to(target),
        guidance=guidance,
        dtype=short,
        autocast=tune == "full" and short != torch.float32,
        negative_prompt=negative_prompt,
        max_sequence_length=max_sequence_length,
        decode_batch=decode_batch,
    )


class SD3:
    """A FlowModel around one StableDiffusion3Pipeline; see the FlowModel protocol for the contract."""

    def __init__(
        self,
        pipeline: Any,
        *,
        guidance: float,
        dtype: torch.dtype,
        autocast: bool,
        negative_prompt: str,
        max_sequence_length: int,
        decode_batch: int,
    ) -> None:
        self.guidance = guidance
        self.guided = guidance > 1  # StableDiffusion3Pipeline.do_classifier_free_guidance
        self.dtype = dtype
        self.autocast = autocast  # float32 master weights, arithmetic in dtype
        self.negative_prompt = negative_prompt
        self.max_sequence_length = max_sequence_length
        self.decode_batch = decode_batch
        self._pipeline = pipeline
        self._texts: dict[str, tuple[Tensor, Tensor]] = {}
        self._texts_bytes = 0

    @property
    def transformer(self) -> Any:
        """Return the network that is trained."""
        return self._pipeline.transformer

    @property
    def device(self) -> torch.device:
        """Return where the network runs."""
        return next(self.transformer.parameters()).device

    def pipeline(self) -> Any:  # diffusers does not declare its pipelines' parts as attributes
        """Return the StableDiffusion3Pipeline with the current weights (shared, not copied).

        After ``tune="full"`` in a short dtype, call it under ``torch.autocast``: its transformer is float32.
        """
        return self._pipeline

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their name in the transformer, in module order."""
        return {name: param for name, param in self.transformer.named_parameters() if param.requires_grad}

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return [C, h, w] of the latents of a picture of ``height`` x ``width`` pixels. Raise ModelError."""
        config = self.transformer.config
        factor = self._pipeline.vae_scale_factor
        unit = factor * config.patch_size
        if height < 1 or width < 1 or height % unit or width % unit:
            raise ModelError(f"height and width must be positive multiples of {unit} pixels, got {height} x {width}")
        most = config.pos_embed_max_size
        if most and max(height, width) > most * unit:
            raise ModelError(f"height and width may be at most {most * unit} pixels here, got {height} x {width}")
        return int(config.in_channels), height // factor, width // factor

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the pipeline's own noise levels [S+1], float32 on the model's device, ending in 0.

        With ``shift`` s the scheduler shifts twice at the low end: it spreads the steps over a table that is already
        shifted, then shifts them again. A resolution-dependent shift is applied if the scheduler's config asks for it.
        """
        if steps < 1:
            raise ConfigError(f"steps: expected at least 1, got {steps}")
        _, rows, columns = self.latent_shape(height, width)
        # set_timesteps writes into the scheduler; the pipeline's own must not change under a user who is sampling.
        scheduler = copy.deepcopy(self._pipeline.scheduler)
        config = scheduler.config
        shift = {}
        if config.use_dynamic_shifting:
            patch = self.transformer.config.patch_size
            shift["mu"] = calculate_shift(
                (rows // patch) * (columns // patch),
                config.base_image_seq_len,
                config.max_image_seq_len,
                config.base_shift,
                config.max_shift,
            )
        scheduler.set_timesteps(steps, device=self.device, **shift)
        return scheduler.sigmas.to(self.device, torch.float32)

    def encode(self, prompts: list[str]) -> Cond:
        """Return ``embeds`` [G,T,D] and ``pooled`` [G,P], and both as ``negative_`` under guidance, on the device.

        Without a T5 encoder the pipeline still appends ``max_sequence_length`` zero tokens to CLIP's 77.
        """
        if not prompts:
            raise DataError("encode: expected at least one prompt, got none")
        texts = [self._text(prompt) for prompt in prompts]
        cond = dict(zip(("embeds", "pooled"), self._stack(texts), strict=True))
        if self.guided:
            negatives = [self._text(self.negative_prompt)] * len(prompts)
            cond |= zip(("negative_embeds", "negative_pooled"), self._stack(negatives), strict=True)
        return cond

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the guided velocity u + guidance (c - u), float32 [B,C,h,w], of x [B,C,h,w] at sigma [B].

        The unconditional and the conditional half run as one batch, in the pipeline's order, and both are trained.
        **Differs:** the halves are mixed in float32; the pipeline mixes them in the transformer's dtype.
        """
        embeds, pooled = cond["embeds"], cond["pooled"]
        if not self.guided:
            return self._network(x, sigma, embeds, pooled)
        embeds = torch.cat([cond["negative_embeds"], embeds])
        pooled = torch.cat([cond["negative_pooled"], pooled])
        u, c = self._network(torch.cat([x, x]), torch.cat([sigma, sigma]), embeds, pooled).chunk(2)
        return u + self.guidance * (c - u)

    def decode(self, x0: Tensor) -> Tensor:
        """Return pictures [B,3,H,W], float32 in [0,1], of latents [B,C,h,w]; ``decode_batch`` at a time."""
        vae, processor = self._pipeline.vae, self._pipeline.image_processor
        latents = x0.to(vae.device, vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        pictures = [vae.decode(part, return_dict=False)[0] for part in latents.split(self.decode_batch)]
        return processor.postprocess(torch.cat(pictures), output_type="pt").float()

    def _network(self, x: Tensor, sigma: Tensor, embeds: Tensor, pooled: Tensor) -> Tensor:
        # The scheduler computes its timesteps by this product in float32; in another dtype the network would see
        # another time than in the pipeline.
        time = sigma.to(x.device, torch.float32) * self._pipeline.scheduler.config.num_train_timesteps
        with torch.autocast(x.device.type, self.dtype if self.autocast else None, enabled=self.autocast):
            v = self.transformer(
                hidden_states=x.to(self.dtype),
                timestep=time,
                encoder_hidden_states=embeds.to(self.dtype),
                pooled_projections=pooled.to(self.dtype),
                return_dict=False,
            )[0]
        return v.float()

    def _text(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Return (embeds [T,D], pooled [P]) of one prompt on the CPU, encoding it unless it is cached."""
        if prompt in self._texts:
            return self._texts[prompt]
        # One prompt at a time: in a batch its last bits would depend on which others were not yet cached, and a
        # resumed run, whose cache starts empty, would not repeat an unbroken one.
        with torch.no_grad():
            embeds, _, pooled, _ = self._pipeline.encode_prompt(
                [prompt],
                None,
                None,
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length,
            )
        text = (embeds[0].cpu(), pooled[0].cpu())
        self._texts[prompt] = text
        self._texts_bytes += _bytes(text)
        while self._texts_bytes > _CACHE_BYTES and len(self._texts) > 1:
            self._texts_bytes -= _bytes(self._texts.pop(next(iter(self._texts))))
        return text

    def _stack(self, texts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        embeds, pooled = zip(*texts, strict=True)
        return torch.stack(embeds).to(self.device), torch.stack(pooled).to(self.device)


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _check_options(
    guidance: float,
    tune: str,
    lora: dict[str, Any] | None,
    layers: Sequence[str] | None,
    dtype: str,
    negative_prompt: str,
    max_sequence_length: int,
    decode_batch: int,
) -> None:
    """Raise ConfigError before gigabytes are read."""
    if not math.isfinite(guidance) or guidance < 0:
        raise ConfigError(f"guidance: expected a finite number of at least 0, got {guidance!r}")
    if negative_prompt and guidance <= 1:
        raise ConfigError(f"negative_prompt: has no effect unless guidance is above 1, got guidance {guidance!r}")
    if tune not in ("lora", "full", "none"):
        raise ConfigError(f"tune: expected 'lora', 'full' or 'none', got {tune!r}")
    if lora is not None and tune != "lora":
        raise ConfigError(f"lora: has no effect unless tune is 'lora', got tune {tune!r}")
    if layers is not None and tune != "full":
        raise ConfigError(f"layers: has no effect unless tune is 'full', got tune {tune!r}; with LoRA see lora.targets")
    if layers is not None and (
        isinstance(layers, str) or not layers or not all(isinstance(n, str) and n for n in layers)
    ):
        raise ConfigError(f"layers: expected a list of layer names, got {layers!r}")
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype: expected one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    if not 1 <= max_sequence_length <= 512:
        raise ConfigError(f"max_sequence_length: expected 1 to 512 tokens, got {max_sequence_length!r}")
    if decode_batch < 1:
        raise ConfigError(f"decode_batch: expected at least 1, got {decode_batch!r}")


def _check_configs(pipeline: Any, path: str) -> None:
    """Raise ModelError where the pipeline's settings contradict what a FlowModel promises."""
    scheduler, vae = pipeline.scheduler.config, pipeline.vae.config
    if scheduler.invert_sigmas or scheduler.stochastic_sampling:
        raise ModelError(
            f"{path}: scheduler with invert_sigmas or stochastic_sampling; flowrl needs the plain Euler one"
        )
    if vae.shift_factor is None or vae.scaling_factor is None:
        raise ModelError(f"{path}: vae/config.json must set scaling_factor and shift_factor")
    if vae.latent_channels != pipeline.transformer.config.in_channels:
        got = f"{vae.latent_channels} and {pipeline.transformer.config.in_channels}"
        raise ModelError(f"{path}: VAE and transformer must have the same number of latent channels, got {got}")
