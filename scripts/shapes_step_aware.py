"""Train a small step-aware preference model on shapes, for shapes/spo.

    python scripts/shapes_step_aware.py --out data/shapes_step_aware

The embedded base model draws two images of a prompt, and the reward `shapes` says which is better;
equal ones are left out. Both latents get the same noise at one random noise level, the base model
estimates the images again, and the preference model has to pick the better one from its estimate
(SPO, 2406.04314). It is made from scratch: a CLIP of a few layers, since its words are few.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate, logsigmoid
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from flowrl.config.load import load_config
from flowrl.core.noise_path import interpolate as noised
from flowrl.core.noise_path import x0_from
from flowrl.core.shipped_files import resource
from flowrl.core.types import RewardBatch
from flowrl.training.collect import sample
from flowrl.training.trainer import Trainer
from rewards._backbones.step_clip import StepClip
from rewards.step_aware import WEIGHTS

SIZE, WORDS = 64, 32
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def make(width: int, layers: int, tokens: CLIPTokenizer) -> StepClip:
    """Make an untrained model: `layers` layers of `width` in each tower."""
    end = {"eos_token_id": tokens.eos_token_id, "bos_token_id": tokens.bos_token_id}
    both = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "projection_dim": width,
    }
    text = {**both, **end, "vocab_size": len(tokens), "max_position_embeddings": WORDS}
    seen = {**both, "image_size": SIZE, "patch_size": 8}
    return StepClip(
        CLIPModel(CLIPConfig(text_config=text, vision_config=seen, projection_dim=width))
    )


class Pairs:
    """Pairs of images of the base model, the better one first."""

    def __init__(self, prompts: int, images: int) -> None:
        options = [f"train.prompts={prompts}", f"train.group={images}"]
        self.trainer = Trainer(load_config("shapes/best_of_n", options))

    @torch.no_grad()
    def draw(self, iteration: int) -> tuple[Tensor, Tensor, list[str]]:
        """Draw the pairs of an iteration -> latents of the better and the worse [P, *], prompts."""
        # images of prompts, as an iteration of training would sample them
        run = self.trainer
        run.iteration = iteration
        rows = run.rows()
        made = sample(run, rows)
        group = made.tree.group[made.leaf]
        records = [run.train_set.records[rows[g]] for g in group.tolist()]
        words = [record["prompt"] for record in records]
        images = run.model.decode(made.x[made.leaf].float())
        # the reward says which is better
        judged = RewardBatch(images, words, group, records, torch.zeros(len(words)))
        score = run.rewards["shapes"](judged)
        # of each prompt the best and the worst; prompts whose images are equal say nothing
        good, bad, texts = [], [], []
        for g in group.unique().tolist():
            mine = (group == g).nonzero().flatten()
            best, worst = mine[score[mine].argmax()], mine[score[mine].argmin()]
            if score[best] > score[worst]:
                good.append(made.leaf[best])
                bad.append(made.leaf[worst])
                texts.append(words[int(best)])
        if not good:
            return made.x[:0], made.x[:0], []
        return made.x[torch.stack(good)].float(), made.x[torch.stack(bad)].float(), texts

    @torch.no_grad()
    def estimates(self, x0: Tensor, sigma: Tensor, noise: Tensor, texts: list[str]) -> Tensor:
        """Noise latents [P, *] to sigma [P] and estimate their images -> [P, 3, H, W]."""
        model = self.trainer.model
        x = noised(x0, noise, sigma)
        return model.decode(x0_from(x, model.velocity(x, sigma, model.encode(texts)), sigma))


def prepared(images: Tensor) -> Tensor:
    """Prepare images [P, 3, H, W] in [0, 1] as the saved image settings do."""
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (interpolate(images.float(), size=(SIZE, SIZE)) - mean) / std


def main() -> None:
    """Train, and write the folder that reward `step_aware` takes as its path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/shapes_step_aware"))
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    torch.manual_seed(0)
    pairs = Pairs(given.prompts, given.images)
    tokens = CLIPTokenizer.from_pretrained(resource("assets/shapes-sd3/tokenizer"))
    model = make(given.width, given.layers, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    right, seen = 0.0, 0
    for k in range(given.rounds):
        good, bad, texts = pairs.draw(k)
        if not texts:
            continue
        # one noise level and noise for both
        sigma, noise = torch.rand(len(texts)), torch.randn_like(good)
        both = [prepared(pairs.estimates(x0, sigma, noise, texts)) for x0 in (good, bad)]
        read = tokens(
            texts, padding="max_length", truncation=True, max_length=WORDS, return_tensors="pt"
        )
        words = model.read(read["input_ids"], read["attention_mask"])
        better, worse = (model.score(model.see(images, sigma * 1000), words) for images in both)
        optimizer.zero_grad()
        (-logsigmoid(better - worse)).mean().backward()
        optimizer.step()
        right, seen = right + float((better > worse).sum()), seen + len(texts)
        if (k + 1) % 20 == 0 or k + 1 == given.rounds:
            print(f"round {k + 1}: {right / seen:.3f} of {seen} new pairs right", flush=True)
            right, seen = 0.0, 0
    save(model, tokens, given.out)
    print(f"{given.out}; now flowrl train shapes/spo")


def save(model: StepClip, tokens: CLIPTokenizer, folder: Path) -> None:
    """Write weights, config, tokenizer and image settings."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    model.clip.config.save_pretrained(folder)
    tokens.save_pretrained(folder)
    size = {"height": SIZE, "width": SIZE}
    CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size=size, image_mean=MEAN, image_std=STD
    ).save_pretrained(folder)
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / WEIGHTS)


if __name__ == "__main__":
    main()
