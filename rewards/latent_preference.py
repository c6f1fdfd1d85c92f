"""Reward latents, not images: DiNa-LRM (2602.11146), a preference model on a diffusion
transformer's own features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.devices import check_folder, misfits
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.files import read_json, write_json
from flowrl.core.seeds import generator
from flowrl.core.types import Cond, RewardBatch

from ._backbones.clock import Clock
from ._common.scorer import find_file, first_line, load_strict, pick_device, read_weights, source_of

WHO = "rewards.latent_preference"
WEIGHTS, SHAPE = "latent_preference.safetensors", "latent_preference.json"


class latent_preference:
    """Score clean latents [L, *] by a preference model that sees them at noise level `sigma`, the
    mean over `draws` noises -> [L], unbounded; only differences count.

    DiNa-LRM (2602.11146; HKUST-C4G/diffusion-rm af485b4): the generator's transformer, VAE and
    prompt embeddings are the judge's too, so it knows its own latents alone. `path`: a folder as
    `scripts/assets/shapes_latent_preference.py` writes it; `transformer`: a pipeline of
    StableDiffusion3Pipeline's layout, or its hub id. The noises follow from `seed` and are the same
    for all images. Finished images have no latents here, so evaluations leave this reward out. With
    `estimates` it also judges x0 estimates of noisy states, as it judges finished latents, where a
    plan compares them (`candidates`). With `states` it judges such states themselves, at their own
    noise level, and noises nothing: LPO's judge (2502.01051; Kwai-Kolors/LPO 9c2e8b8), which reads
    next states as they are. Without either, such a plan refuses it. Raises ConfigError, ModelError,
    DataError.

    **Differs:** `estimates` is ours. The library draws new noise at each call, which moves the
    order of a prompt's images. Its weights have names of their own and were not at hand. LPO's
    judge pools features of a U-Net and compares them with the prompt's as CLIP does.
    """

    judges_singly = True
    sees_latents = True

    def __init__(
        self,
        *,
        path: str,
        transformer: str,
        sigma: float = 0.1,
        draws: int = 1,
        seed: int = 0,
        estimates: bool = False,
        states: bool = False,
        device: str = "auto",
        batch: int = 64,
    ) -> None:
        if not 0 <= sigma <= 1 or draws < 1 or batch < 1:
            raise ConfigError(
                f"{WHO}: expected sigma in [0, 1], draws and batch of at least 1, got {sigma=}, "
                f"{draws=}, {batch=}"
            )
        if estimates and states:
            raise ConfigError(
                f"{WHO}: estimates and states: it judges the x0 estimates of noisy states or these "
                "themselves; set one of them"
            )
        self.sigma, self.draws, self.seed, self.batch = sigma, draws, seed, batch
        self.states, self.sees_sigma = states, estimates or states
        self.device = pick_device(device, WHO)
        weights = find_file(path, WEIGHTS, WHO)
        file = find_file(path, SHAPE, WHO)
        shape = read_json(file, dict[str, Any], error=ModelError)
        try:
            self.judge = LatentJudge(load_transformer(transformer), **shape)
        except (TypeError, ValueError) as error:  # settings of another judge
            raise ModelError(f"{WHO}: {file}: not the shape of a latent judge: {error}") from error
        load_strict(self.judge, read_weights(weights, WHO), f"{WHO}: {weights}")
        self.judge = self.judge.to(self.device).eval().requires_grad_(False)
        self.judge.transformer[0].to(self.device)

    @torch.no_grad()
    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each latent with its own prompt's embeddings."""
        if batch.latents is None:
            raise DataError(
                f"{WHO}: expected latents, which training alone has; got images. Judge finished "
                "images by another reward"
            )
        x0, cond, states = batch.latents
        channels = self.judge.transformer[0].config.in_channels
        if x0.shape[1] != channels or not {"embeds", "pooled"} <= cond.keys():
            raise DataError(
                f"{WHO}: expected latents of {channels} channels with `embeds` and `pooled`, as "
                f"the judge's own pipeline has them, got {list(x0.shape[1:])} and {sorted(cond)}"
            )
        if self.states and states is not None:
            x0 = states
        score = self._at_own_level if self.states else self._noised
        some = [slice(k, k + self.batch) for k in range(0, len(x0), self.batch)]
        parts = [score(x0[k], batch.sigma[k], self._words(cond, k)) for k in some]
        return torch.cat([torch.zeros(0), *parts])

    def _words(self, cond: Cond, some: slice) -> Cond:
        return {name: cond[name][some].to(self.device) for name in ("embeds", "pooled")}

    def _at_own_level(self, x: Tensor, sigma: Tensor, words: Cond) -> Tensor:
        """Score states [B, *] at their own noise levels [B]."""
        x, level = x.to(self.device).float(), sigma.to(self.device).float()
        return self.judge(x, level, **words).float().cpu()

    def _noised(self, x0: Tensor, _: Tensor, words: Cond) -> Tensor:
        """Score latents [B, *] at the reward's noise level."""
        clean = x0.to(self.device).float()
        sigma = torch.full((len(clean),), self.sigma, device=self.device)
        total = torch.zeros(len(clean))
        for draw in range(self.draws):
            noise = torch.randn(clean.shape[1:], generator=generator(self.seed, "latent", draw))
            x = (1 - self.sigma) * clean + self.sigma * noise.to(self.device)
            total += self.judge(x, sigma, **words).float().cpu()
        return total / self.draws


def save_judge(judge: LatentJudge, shape: dict[str, Any], folder: Path) -> None:
    """Write a judge that was made as ``LatentJudge(transformer, **shape)`` into the folder that the
    reward takes as `path`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().contiguous() for name, value in judge.state_dict().items()}
    save_file(state, folder / WEIGHTS)
    write_json(folder / SHAPE, shape)


def load_transformer(path: str) -> Any:
    """Load a pipeline's transformer, float32."""
    from diffusers import SD3Transformer2DModel

    try:
        network, info = SD3Transformer2DModel.from_pretrained(
            source_of(path),
            subfolder="transformer",
            use_safetensors=True,
            torch_dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:  # offline, misspelt, another kind of model
        raise ModelError(
            f"{WHO}: {path}: expected a folder or hub id of a Stable Diffusion 3 pipeline: "
            f"{first_line(error)}"
        ) from error
    # what is missing would be random
    wrong = misfits(info)
    if wrong:
        raise ModelError(f"{WHO}: {path}: transformer: other weights than config.json has: {wrong}")
    check_folder(source_of(path), WHO, "transformer")
    return network


class LatentJudge(nn.Module):
    """DiNa-LRM's reward model (2602.11146) on the first layers of an SD3Transformer2DModel.

    Features of images and words after the layers `taps`, counted from 1, are scaled and shifted by
    the time (no change at the start), joined along their channels and made `width` wide. `queries`
    learned tokens look at all of them, then at those of the image alone; a layer of two, a linear
    one, and the mean over the queries. The transformer is frozen; only the head is trained.

    **Differs:** the code (HKUST-C4G/diffusion-rm af485b4, reward_head.py) has a LoRA of rank 64 on
    the transformer, an embedding of each layer, RMSNorm and eight heads; its first look is two
    attentions, of image and words, that are added; its gates are sigmoids of two linear layers on
    the token, behind the value's own layer and one half at the start, and the second look has none.
    Here a token's value is scaled by a sigmoid of that token, in both looks.
    """

    def __init__(
        self, transformer: Any, *, taps: Sequence[int], width: int = 128, queries: int = 4
    ) -> None:
        super().__init__()
        layers = len(transformer.transformer_blocks)
        rising = list(taps) == sorted(set(taps))
        if not taps or not rising or not 1 <= taps[0] <= taps[-1] < layers:
            raise ConfigError(
                f"latent judge: taps: expected rising layers from 1 to {layers - 1} (the last one "
                f"has no words), got {list(taps)}"
            )
        self.taps = tuple(taps)
        transformer.transformer_blocks = transformer.transformer_blocks[: taps[-1]]
        # not registered: its weights are the transformer's own
        self.transformer = [transformer.eval().requires_grad_(False)]
        inner = int(transformer.inner_dim)
        self.clock = Clock(width)
        self.films = nn.ModuleList(_still(width, 4 * inner) for _ in taps)
        self.norm = nn.LayerNorm(inner, elementwise_affine=False)
        self.join = nn.ModuleList(nn.Linear(len(taps) * inner, width) for _ in range(2))
        self.queries = nn.Parameter(0.02 * torch.randn(queries, width))
        self.looks = nn.ModuleList(_Look(width) for _ in range(2))
        self.deep = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor, sigma: Tensor, embeds: Tensor, pooled: Tensor) -> Tensor:
        """Score latents [B, *] of noise level sigma [B] -> [B]."""
        # per tapped layer: scale and shift of image and words, which depend on the noise level
        time = self.clock(1000 * sigma)
        streams: list[list[Tensor]] = [[], []]
        for film, seen in zip(self.films, self.features(x, sigma, embeds, pooled), strict=True):
            parts = film(time)[:, None].chunk(4, -1)
            for k, tokens in enumerate(seen):
                moved = self.norm(tokens.float()) * (1 + parts[2 * k]) + parts[2 * k + 1]
                streams[k].append(moved)
        # all layers side by side along the channels, made narrow: [B, N, width], [B, T, width]
        image, words = (
            join(torch.cat(stream, -1)) for join, stream in zip(self.join, streams, strict=True)
        )
        # learned queries look at both, then at the image alone, and say one number each
        state = self.queries.expand(len(x), -1, -1)
        state = state + self.looks[0](state, torch.cat([image, words], 1))
        state = state + self.looks[1](state, image)
        state = state + self.deep(state)
        score: Tensor = self.out(state).squeeze(-1).mean(-1)
        return score

    @torch.no_grad()
    def features(
        self, x: Tensor, sigma: Tensor, embeds: Tensor, pooled: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the tokens of image and words [B, N, D], [B, T, D] after each tapped layer."""
        (network,) = self.transformer
        found: list[tuple[Tensor, Tensor]] = []

        # a block of SD3 returns words first, image second
        def keep(module: nn.Module, given: Any, out: tuple[Tensor, Tensor]) -> None:
            found.append((out[1], out[0]))

        # hooks, since the network itself returns only its last layer
        hooks = [network.transformer_blocks[k - 1].register_forward_hook(keep) for k in self.taps]
        try:
            kind = next(network.parameters()).dtype
            network(
                hidden_states=x.to(kind),
                timestep=1000 * sigma.float(),
                encoder_hidden_states=embeds.to(kind),
                pooled_projections=pooled.to(kind),
            )
        finally:
            for hook in hooks:
                hook.remove()
        return found


def _still(width: int, out: int) -> nn.Linear:
    """Make a layer that says nothing at the start."""
    layer = nn.Linear(width, out)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class _Look(nn.Module):
    """Attention of queries to tokens whose values are gated."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.before, self.seen = nn.LayerNorm(width), nn.LayerNorm(width)
        self.gate = nn.Linear(width, 1)
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """Look from queries [B, Q, W] at tokens [B, N, W] -> [B, Q, W]."""
        tokens = self.seen(tokens)
        values = tokens * self.gate(tokens).sigmoid()
        found: Tensor = self.attend(self.before(queries), tokens, values, need_weights=False)[0]
        return found


def fidelity(gap: Tensor, sigma: Tensor) -> Tensor:
    """Return DiNa-LRM's loss [B] for score gaps [B], preferred less other, of latents at sigma [B].

    ``1 - sqrt(P + 1e-6)``, ``P = Phi(gap / sqrt(2 (2 sigma^2 + 0.05) + 1e-6))``: the noisier the
    pair, the larger the gap has to be. Equation of 2602.11146, its code at af485b4.
    """
    width = (2 * (2 * sigma.square() + 0.05) + 1e-6).sqrt()
    return 1 - (torch.special.ndtr(gap / width) + 1e-6).sqrt()
