"""What rewards that are trained along share: a small head, its loss, and Adam with its weights as
flat tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from flowrl.core.errors import CheckpointError
from flowrl.core.seeds import generator

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def adam(
    params: Mapping[str, nn.Parameter], lr: float, betas: tuple[float, float]
) -> torch.optim.Adam:
    """Return Adam with its moments in place and zero, so that a state always has the same names."""
    optimizer = torch.optim.Adam(params.values(), lr=lr, betas=betas)
    for p in params.values():
        moments = {name: torch.zeros_like(p) for name in _MOMENTS[1:]}
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
    return optimizer


def pack(
    params: Mapping[str, nn.Parameter], optimizer: torch.optim.Adam, counters: Mapping[str, int]
) -> dict[str, Tensor]:
    """Copy weights, moments and counters into flat tensors on the CPU: "weight.*",
    "adam.*.exp_avg", "counter.*"."""
    live = _live(params, optimizer)
    counts = {
        f"counter.{name}": torch.tensor(value, dtype=torch.int64)
        for name, value in counters.items()
    }
    return {name: value.detach().cpu().clone() for name, value in live.items()} | counts


@torch.no_grad()
def unpack(
    state: Mapping[str, Tensor],
    params: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Adam,
    counters: Mapping[str, int],
    who: str,
) -> dict[str, int]:
    """Copy a state of `pack` back, in place -> the counters. Raises CheckpointError, before
    anything is changed."""
    # refused before anything is changed
    live = _live(params, optimizer)
    expected = {name: value.shape for name, value in live.items()}
    expected |= {f"counter.{name}": torch.Size() for name in counters}
    wrong = sorted(expected.keys() ^ state.keys())
    same = expected.keys() & state.keys()
    wrong += sorted(name for name in same if state[name].shape != expected[name])
    if wrong:
        raise CheckpointError(
            f"{who}: expected {len(expected)} tensors of known names and shapes, got {len(state)}; "
            f"{len(wrong)} do not fit, first {wrong[0]}. The state was saved by a reward of "
            "another network or with other arguments"
        )
    # in place
    for name, value in live.items():
        value.copy_(state[name])
    return {name: int(state[f"counter.{name}"]) for name in counters}


def _live(params: Mapping[str, nn.Parameter], optimizer: torch.optim.Adam) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {f"weight.{name}": p for name, p in params.items()}
    for name, p in params.items():
        out |= {f"adam.{name}.{moment}": optimizer.state[p][moment] for moment in _MOMENTS}
    return out


def hinge(real: Tensor, fake: Tensor) -> Tensor:
    """Return the discriminator's loss 0.5 (mean relu(1 - real) + mean relu(1 + fake)) of logits of
    any shape -> [].

    Adv-GRPO's code (showlab/Adv-GRPO, scripts/train_sd3_fast_dino_patch.py). **Differs:** the paper
    has no factor 0.5.
    """
    return 0.5 * (relu(1 - real).mean() + relu(1 + fake).mean())


def make_head(width: int, hidden: int, seed: int) -> nn.Sequential:
    """Return Linear(width, hidden)-GELU-Linear(hidden, 1) with torch's own initial values, drawn
    from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator(seed, "head").get_state())
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 1))
