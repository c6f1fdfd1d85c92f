"""Train the world model of the moving shapes, a V-JEPA 2 small enough for a CPU, for the reward
`pfc`.

    python scripts/assets/moving_foresight.py

The encoder keeps its random weights: features of so small a world would collapse if they were
learnt, and random ones tell its pixels apart (Burda et al. 2018, 1808.04355, who foresee random
features, too). The predictor learns V-JEPA 2's task (2506.09985): of three frames it is shown the
features of the first two and says those of the third; L1, features normalised. Films are painted:
an object anywhere that moves at its pace, or, one in `STILL`, stands. No caption and no verdict is
used. What is saved has transformers' layout; foresight.json says what is foreseen of films from
places that were held out. Seeded; a minute on one core.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor
from torch.nn.functional import l1_loss
from transformers import VJEPA2Config, VJEPA2Model, VJEPA2VideoProcessor
from transformers.image_utils import IMAGENET_DEFAULT_MEAN as MEAN
from transformers.image_utils import IMAGENET_DEFAULT_STD as STD

from flowrl.cli.options import quiet_libraries
from flowrl.core.files import write_json
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.moving_shapes import EVERY, FRAMES, SIZE, paint, starts
from rewards.pfc import pfc

OUT = Path("assets/moving-vjepa")
STILL = 5  # one clip of so many stands still
HELD_OUT = 8  # one place of so many is not trained on
CONTEXT, TARGET = 2, 1  # frames that predict, frames that are predicted
ROUGH = 0.03  # noise on the pixels: films are not painted
PATCH, WIDTH, HEADS = 4, 48, 2
STEPS, BATCH, LR, SEED = 1200, 32, 1.5e-3, 0


def main() -> None:
    """Train, save, and say what is foreseen."""
    torch.set_num_threads(1)
    quiet_libraries()
    # train and save
    model, losses = trained()
    model.to(torch.float16).save_pretrained(OUT, safe_serialization=True)
    processor().save_pretrained(OUT)
    # what it foresees of clips that it was not trained on
    found = {"steps": STEPS, "batch": BATCH, "lr": LR, "seed": SEED, "loss": losses}
    found["foreseen"] = foreseen(OUT, SEED + 1)
    write_json(OUT / "foresight.json", found)
    print(found)


def processor() -> VJEPA2VideoProcessor:
    """Return what prepares videos: pixels stay as they are, channels are normalised."""
    return VJEPA2VideoProcessor(crop_size=SIZE, do_resize=False, do_center_crop=False)


def painted(held_out: bool) -> Tensor:
    """Paint every scene from everywhere [N, FRAMES, 3, SIZE, SIZE]; one place in `HELD_OUT` is held
    out, or only these are painted."""
    made = []
    for scene in EVERY:
        places = product(*starts(scene.direction, anywhere=True))
        for number, (row, column) in enumerate(places):
            if (number % HELD_OUT == 0) == held_out:
                made.append(paint(scene, row, column))
    return torch.stack(made)


def clips(films: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw clips [count, FRAMES, 3, SIZE, SIZE] of films, rough, one in `STILL` of them still."""
    drawn = films[torch.randint(len(films), (count,), generator=generator)]
    drawn[::STILL] = drawn[::STILL, :1]
    noise = torch.randn(drawn.shape, generator=generator)
    return (drawn + ROUGH * noise).clamp(0, 1)


def trained() -> tuple[VJEPA2Model, list[float]]:
    """Train the predictor for `STEPS` steps -> the model, and the mean loss of each tenth."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = VJEPA2Model(config()).train()
    model.encoder.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.predictor.parameters(), LR, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, STEPS)
    # a processor's normalisation, of many films at once
    mean, std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))
    films, losses = painted(held_out=False), list[float]()
    for _ in range(STEPS):
        # any three frames in a row
        start = int(torch.randint(FRAMES - CONTEXT - TARGET + 1, (), generator=generator))
        shown = clips(films, BATCH, generator)[:, start : start + CONTEXT + TARGET]
        loss = foresight_loss(model, (shown - mean) / std)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    tenth = STEPS // 10
    means = [sum(losses[i : i + tenth]) / tenth for i in range(0, tenth * 10, tenth)]
    return model.eval(), [round(mean, 4) for mean in means]


def foresight_loss(model: VJEPA2Model, pixels: Tensor) -> Tensor:
    """Return the L1 distance of predicted to seen features, of films [B, T, 3, H, W] as a processor
    makes them."""
    with torch.no_grad():
        seen = model.encoder(pixel_values_videos=pixels).last_hidden_state
        known = model.encoder(pixel_values_videos=pixels[:, :CONTEXT]).last_hidden_state
    place = torch.arange(seen.shape[1]).expand(len(pixels), -1)
    before, after = place[:, : known.shape[1]], place[:, known.shape[1] :]
    said = model.predictor(known, [before], [after]).last_hidden_state
    return l1_loss(said, seen[:, known.shape[1] :])


def config() -> VJEPA2Config:
    """Return the network's sizes: a token for each 4 x 4 pixels of a frame."""
    sizes: dict[str, Any] = {"patch_size": PATCH, "crop_size": SIZE, "tubelet_size": 1}
    sizes |= {"frames_per_clip": FRAMES, "hidden_size": WIDTH, "num_attention_heads": HEADS}
    sizes |= {"num_hidden_layers": 1, "mlp_ratio": 2.0, "pred_hidden_size": WIDTH}
    sizes |= {"pred_num_attention_heads": HEADS, "pred_num_hidden_layers": 3}
    return VJEPA2Config(**sizes, pred_mlp_ratio=3.0, pred_zero_init_mask_tokens=False)


@torch.no_grad()
def foreseen(path: Path, seed: int, count: int = 400) -> dict[str, float]:
    """Score clips that move, the same with a frame of another place or another colour's object, and
    still ones -> mean scores, and the chance that a clip scores above a broken one (AUC)."""
    generator = torch.Generator().manual_seed(seed)
    judge = pfc(path=str(path), context=CONTEXT, target=TARGET, stride=1, seen="window")
    moving = clips(painted(held_out=True), count, generator)[[i for i in range(count) if i % STILL]]
    # frames of other clips at one place, and frames in another order
    cut, mixed = moving.clone(), moving[:, [0, 2, 1, 4, 3]]
    cut[:, 3] = moving.roll(1, 0)[:, 3]
    kinds = {"moving": moving, "cut": cut, "mixed": mixed, "still": moving[:, :1].expand_as(moving)}
    scores = {}
    for name, videos in kinds.items():
        empty = torch.zeros(len(videos), dtype=torch.long)
        meta: list[dict[str, Any]] = [{} for _ in videos]
        batch = RewardBatch(videos, [""] * len(videos), empty, meta, empty.float())
        scores[name] = judge(batch)
    found = {name: round(float(score.mean()), 4) for name, score in scores.items()}
    for name in ("cut", "mixed"):
        u = stats.mannwhitneyu(scores["moving"], scores[name]).statistic
        found[f"auc {name}"] = round(float(u) / len(moving) ** 2, 4)
    return found


if __name__ == "__main__":
    main()
