"""Train the two heads of assets/shapes-verdicts, rewards that can be hacked: each learnt from few
verdicts about images of the base model, and from nothing else.

    python scripts/assets/shapes_verdicts.py

Each head sees `IMAGES` images of the embedded base model, of training prompts that the other does
not see, and the checker's verdict on each: reward `verdict_head`, `head` and `second`. What it says
of other images of the base model, on the validation prompts, is written to verdicts.json beside
them: how often the checker calls an image right, the area under the ROC curve and the correlation
with its verdicts, and how the two heads agree. Seeded; two minutes on one core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from flowrl.cli.options import quiet_libraries
from flowrl.core.files import write_json
from flowrl.core.prompts import Record, load_prompts
from flowrl.core.types import FlowModel
from flowrl.evaluation.held_out import sampled_images
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.runs.open_run import open_target
from rewards._backbones.dino import Backbone
from rewards._common.learned import make_head
from rewards.verdict_head import features, save_head

HEADS = ("head", "second")
DINO = "assets/shapes-dino"
OUT = Path("assets/shapes-verdicts")
IMAGES, HIDDEN, EPOCHS, LR, SEED = 240, 32, 200, 3e-3, 0  # images: that each head learns from


def main() -> None:
    """Train both, measure, write."""
    torch.set_num_threads(1)
    quiet_libraries()
    # the base model, and who looks at its images
    model = open_target("assets/shapes-sd3", settings="shapes/flow_grpo").model
    kind = {"device": "cpu", "dtype": "float32", "batch": 128, "who": "shapes_verdicts"}
    backbone = Backbone(DINO, size=None, **kind)  # type: ignore[arg-type]
    records = load_prompts("assets/shapes/train.jsonl").records
    # each head learns from prompts of its own
    order = np.random.default_rng(SEED).permutation(len(records))
    heads = []
    for place, name in enumerate(HEADS):
        mine = [records[i] for i in order[place :: len(HEADS)][:IMAGES]]
        each = math.ceil(IMAGES / len(mine))
        shown, right = judged(model, backbone, mine, each, SEED + place)
        head = make_head(shown.shape[1], HIDDEN, SEED + place)
        learn(head, shown[:IMAGES], right[:IMAGES])
        save_head(head, OUT / name)
        heads.append(head.eval())
    # what they say of other images
    other = load_prompts("assets/shapes/validation.jsonl").records
    shown, right = judged(model, backbone, other, 16, SEED + len(HEADS))
    settings = {"images": IMAGES, "hidden": HIDDEN, "epochs": EPOCHS, "lr": LR, "seed": SEED}
    found = {**settings, **measured(heads, shown, right)}
    write_json(OUT / "verdicts.json", found)
    print(found)


@torch.no_grad()
def judged(
    model: FlowModel,
    backbone: Backbone,
    records: Sequence[Record],
    images: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Sample `images` images of each prompt -> what a head is shown of each [N, F], and whether the
    checker calls it right [N]."""
    texts = [record["prompt"] for record in records]
    options: dict[str, Any] = {"height": 64, "width": 64, "steps": 10, "seed": seed}
    shown, right = [], []
    for index, pixels in sampled_images(model, texts, images=images, batch=128, **options):
        shown.append(features(backbone, pixels))
        right.append(check(pixels, [records[i] for i in index]).strict.float().cpu())
    return torch.cat(shown), torch.cat(right)


def learn(head: nn.Module, shown: Tensor, right: Tensor) -> None:
    """Fit a head to verdicts [N] about what it is shown [N, F]: Adam, all at once."""
    optimizer = torch.optim.AdamW(head.parameters(), LR, weight_decay=1e-2)
    for _ in range(EPOCHS):
        loss = binary_cross_entropy_with_logits(head(shown).squeeze(-1), right)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def measured(heads: Sequence[nn.Module], shown: Tensor, right: Tensor) -> dict[str, Any]:
    """Compare the heads' scores with the checker's verdicts, and with each other."""
    scores = [head(shown).squeeze(-1).sigmoid() for head in heads]
    found: dict[str, Any] = {"judged_images": len(right), "right": float(right.mean())}
    for name, score in zip(HEADS, scores, strict=True):
        u = stats.mannwhitneyu(score[right == 1], score[right == 0]).statistic
        area = float(u / (right.sum() * (1 - right).sum()))
        both = float(np.corrcoef(score, right)[0, 1])
        found[name] = {"auc": area, "correlation": both, "mean": float(score.mean())}
        found[name]["std"] = float(score.std())
    return {**found, "heads_correlation": float(np.corrcoef(scores[0], scores[1])[0, 1])}


if __name__ == "__main__":
    main()
