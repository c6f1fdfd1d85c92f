"""A judge of latents: features of a diffusion transformer at some noise level -> one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ConfigError

from .step_clip import Clock


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
