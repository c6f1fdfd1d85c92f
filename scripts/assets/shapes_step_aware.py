"""Train a small step-aware preference model on shapes, for shapes/spo.

    python scripts/assets/shapes_step_aware.py   # writes data/shapes_step_aware

A CLIP of a few layers is made from scratch, since its words are few, and learns in two parts. First
it learns to read: of two rendered scenes, one true to a prompt and one to another of the same task,
it has to pick the right one. Then the embedded base model draws images of a prompt, and the reward
`shapes` says which is the best and which the worst; equal ones are left out. Both images of such a
pair get the same noise at random noise levels, the base model estimates them again, and the
preference model has to pick the better one from its estimate (SPO, 2406.04314). A part of the
rendered pairs is estimated likewise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, logsigmoid
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from flowrl.config.load import load_config
from flowrl.core.noise_path import interpolate as noised
from flowrl.core.noise_path import x0_from
from flowrl.core.pixels import round_8bit
from flowrl.core.prompts import groups_of
from flowrl.core.shipped_files import resource
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from flowrl.training.rollout import sample_forest
from flowrl.training.trainer import Trainer
from rewards.step_aware import WEIGHTS, StepClip

OUT = Path("data/shapes_step_aware")
SIZE, WORDS = 64, 32
WIDTH, LAYERS, LR = 64, 4, 1e-3  # of each tower
SCENES, ROUNDS = 600, 200  # steps on rendered scenes, and on the model's own images
PROMPTS, IMAGES, LEVELS = 32, 4, 3  # of a round; noise levels of each own pair
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def make(tokens: CLIPTokenizer) -> StepClip:
    """Make an untrained model."""
    end = {"eos_token_id": tokens.eos_token_id, "bos_token_id": tokens.bos_token_id}
    both = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "projection_dim": WIDTH,
    }
    text = {**both, **end, "vocab_size": len(tokens), "max_position_embeddings": WORDS}
    seen = {**both, "image_size": SIZE, "patch_size": 8}
    return StepClip(
        CLIPModel(CLIPConfig(text_config=text, vision_config=seen, projection_dim=WIDTH))
    )


class Pairs:
    """Pairs of images of the base model, the better one first."""

    def __init__(self) -> None:
        options = [f"train.prompts={PROMPTS}", f"train.group={IMAGES}", "seed=0"]
        self.trainer = Trainer(load_config("shapes/best_of_n", options))
        records = self.trainer.train_set.records
        # the prompts of each task, tasks by name
        tasks = groups_of(self.trainer.train_set, "tag")
        self.tasks = sorted(tasks, key=lambda rows: str(records[rows[0]]["tag"]))

    @torch.no_grad()
    def draw(self, iteration: int) -> tuple[Tensor, Tensor, list[str]]:
        """Draw the pairs of an iteration -> latents of the better and the worse [P, *], prompts."""
        # images of prompts, as an iteration of training would sample them
        run = self.trainer
        run.state.iteration = iteration
        rows = run.rows()
        made = sample_forest(run, rows)
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
    def rendered(
        self, count: int, share: float, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor, Tensor, list[str]]:
        """Render up to `count` pairs of scenes -> images of the better and the worse
        [P, 3, 64, 64], sigma [P] and prompts; a `share` of them as estimated at a sigma above 0."""
        records, asked, others = self.trainer.train_set.records, [], []
        for _ in range(count):
            mine = self.tasks[rng.integers(len(self.tasks))]
            first, second = rng.integers(len(mine), size=2)
            asked.append(records[mine[first]])
            others.append(records[mine[second]])
        good, bad = (render(scenes_for(wanted, rng)) for wanted in (asked, others))
        # some scenes of another prompt are true to this one, too
        wrong = (~check(bad, asked).strict).nonzero().flatten()
        good, bad, texts = good[wrong], bad[wrong], [asked[k]["prompt"] for k in wrong.tolist()]
        sigma = torch.zeros(len(texts))
        some = int(share * len(texts))
        if some:
            sigma[:some] = torch.rand(some)
            model: Any = self.trainer.model
            x, y = (model.latents(images[:some]) for images in (good, bad))
            good[:some], bad[:some] = self.estimates(x, y, sigma[:some], texts[:some])
        return good, bad, sigma, texts

    @torch.no_grad()
    def estimates(
        self, good: Tensor, bad: Tensor, sigma: Tensor, texts: list[str]
    ) -> tuple[Tensor, Tensor]:
        """Noise both latents [P, *] of each pair alike, to sigma [P], and estimate their images ->
        [P, 3, H, W] twice."""
        model, sigma = self.trainer.model, sigma.to(good.device)
        noise, cond = torch.randn_like(good), model.encode(texts)
        found = []
        for x0 in (good, bad):
            x = noised(x0, noise, sigma)
            image = model.decode(x0_from(x, model.velocity(x, sigma, cond), sigma))
            found.append(round_8bit(image))  # as rewards see it
        return found[0], found[1]


def prepared(images: Tensor) -> Tensor:
    """Prepare images [P, 3, H, W] in [0, 1] as the saved image settings do."""
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (interpolate(images.float(), size=(SIZE, SIZE)) - mean) / std


class Learner:
    """The model, its optimizer, and how many of the last pairs it picked rightly."""

    def __init__(self, model: StepClip, tokens: CLIPTokenizer) -> None:
        self.model, self.tokens = model, tokens
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
        self.right, self.seen, self.steps = 0.0, 0, 0

    def fit(self, good: Tensor, bad: Tensor, sigma: Tensor, texts: list[str]) -> None:
        """Take one step: of each pair of images [P, 3, H, W] at sigma [P] the first is better."""
        read = self.tokens(
            texts, padding="max_length", truncation=True, max_length=WORDS, return_tensors="pt"
        )
        words = self.model.read(read["input_ids"], read["attention_mask"])
        time = sigma * 1000
        better, worse = (
            self.model.score(self.model.see(prepared(images), time), words)
            for images in (good, bad)
        )
        # the rate warms up in 50 steps
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = LR * min(1.0, self.steps / 50)
        self.optimizer.zero_grad()
        (-logsigmoid(better - worse)).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.right += float((better > worse).sum())
        self.seen += len(texts)

    def say(self, what: str) -> None:
        """Print the share of pairs since the last time that were new and picked rightly."""
        print(f"{what}: {self.right / self.seen:.3f} of {self.seen} new pairs right", flush=True)
        self.right, self.seen = 0.0, 0


def main() -> None:
    """Train, and write the folder that reward `step_aware` takes as its path."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    pairs = Pairs()
    tokens = CLIPTokenizer.from_pretrained(resource("assets/shapes-sd3/tokenizer"))
    learner = Learner(make(tokens), tokens)
    for k in range(SCENES):
        learner.fit(*pairs.rendered(64, 0.25, rng))
        if (k + 1) % 50 == 0 or k + 1 == SCENES:
            learner.say(f"scenes {k + 1}")
    for k in range(ROUNDS):
        good, bad, texts = pairs.draw(k)
        if not texts:
            continue
        # each pair at several noise levels
        texts = texts * LEVELS
        good, bad = torch.cat([good] * LEVELS), torch.cat([bad] * LEVELS)
        sigma = torch.rand(len(texts))
        learner.fit(*pairs.estimates(good, bad, sigma, texts), sigma, texts)
        if (k + 1) % 20 == 0 or k + 1 == ROUNDS:
            learner.say(f"round {k + 1}")
    save(learner.model, tokens, OUT)
    print(f"{OUT}; now flowrl train shapes/spo")


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
