"""A plugin package for whole runs in a second: a linear field, rewards that look at its images,
and their config."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from flowrl.config.load import Config, load_config
from flowrl.core.errors import RunError
from flowrl.core.types import RewardBatch, SelectInput
from flowrl.models.toy import LinearFlow

COLORS = ("red", "green", "blue", "grey", "pink", "teal")
CONFIG = """
name: toy
seed: 3
model: {{fn: toykit.linear, scale: 0.3}}
prompts: {{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}
image: {{height: 16, width: 16}}
plan: {{fn: full, steps: 4, noise_scale: 0.5, ode_last: 1}}
transition: {{fn: dance_sde}}
rewards:
  red: {{fn: toykit.redness}}
  strict: {{fn: toykit.reddish, weight: 0.0}}
credit: {{fn: group_norm}}
likelihood: {{fn: reverse}}
loss: {{fn: ppo_clip, clip_low: 0.2, clip_high: 0.2}}
optimizer: {{fn: adamw, lr: 0.01}}
train: {{
  iterations: 4, prompts: 2, group: 4, updates: 2, micro_batch: 8, rollout_batch: 8, threads: 1
}}
eval: {{steps: 4, images: 2}}
checkpoint: {{every: 2, keep: 3}}
samples: {{every: 2, prompts: 2}}
"""


def linear(*, channels: int = 3, seed: int = 0, scale: float = 0.1) -> LinearFlow:
    """Return the toy field."""
    return LinearFlow(channels=channels, seed=seed, scale=scale)


def redness(batch: RewardBatch) -> Tensor:
    """Score images by mean red minus mean green: linear in the pixels."""
    return batch.images[:, 0].mean((1, 2)) - batch.images[:, 1].mean((1, 2))


def warmth(batch: RewardBatch) -> Tensor:
    """Score as `redness`, moved into [0, 1]: some credits need rewards that are not negative."""
    return (1 + redness(batch)) / 2


redness.differentiable = warmth.differentiable = True  # type: ignore[attr-defined]
redness.sees_sigma = True  # type: ignore[attr-defined]


def of_latents(batch: RewardBatch) -> Tensor:
    """Score by the mean of what an image is decoded from."""
    assert batch.latents is not None
    return batch.latents.x0.flatten(1).mean(1)


of_latents.sees_latents = True  # type: ignore[attr-defined]


def of_states(batch: RewardBatch) -> Tensor:
    """Score by the mean of the noisy state that an image is the estimate of."""
    assert batch.latents is not None and batch.latents.states is not None
    return batch.latents.states.flatten(1).mean(1)


of_states.sees_latents = of_states.sees_sigma = True  # type: ignore[attr-defined]


def reddish(batch: RewardBatch) -> Tensor:
    """Say 1 where an image is more red than green, else 0."""
    return (redness(batch) > 0).float()


def by_step(data: SelectInput, *, factors: list[float]) -> Tensor:
    """Weigh draws by the denoising step that they were made at."""
    tree = data.rollout.tree
    return torch.tensor([0.0, *factors, 0.0, 0.0])[tree.step] * (tree.std > 0)


def same(batch: RewardBatch) -> Tensor:
    """Like all images equally well."""
    return torch.full((len(batch.images),), 0.3)


def picky(batch: RewardBatch) -> Tensor:
    """Like all images of the first prompt equally well, and the others by their red."""
    return torch.where(batch.group == 0, torch.tensor(0.3), redness(batch))


def dull(batch: RewardBatch) -> Tensor:
    """Like all images of red and green dots equally well, and the others by their red."""
    alike = torch.tensor([prompt in ("a red dot", "a green dot") for prompt in batch.prompts])
    return torch.where(alike, torch.tensor(0.3), redness(batch))


def liar(batch: RewardBatch) -> Tensor:
    """Score as `redness`, promise a gradient and have none."""
    return redness(batch).detach()


liar.differentiable = True  # type: ignore[attr-defined]


class noise:
    """Score by chance, whatever the image."""

    def __init__(self, *, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, batch: RewardBatch) -> Tensor:
        return torch.rand(len(batch.images), generator=self.generator)


def faulty(batch: RewardBatch, *, value: Literal["nan", "inf"], count: int) -> Tensor:
    """Give `count` images of the first prompts a score that is no number."""
    scores = redness(batch)
    scores[:count] = float(value)
    return scores


def blind(batch: RewardBatch, *, prompt: str) -> Tensor:
    """Score as `redness`, but give images of one prompt no score."""
    seen = torch.tensor([text != prompt for text in batch.prompts])
    return torch.where(seen, redness(batch), torch.nan)


class gate:
    """Score as `redness`; the `call`-th time, touch a file beside `file` (.reached) and wait until
    `file` is gone."""

    def __init__(self, *, file: str, call: int) -> None:
        self.file, self.call = Path(file), call

    def __call__(self, batch: RewardBatch) -> Tensor:
        self.call -= 1
        if self.call == 0 and self.file.exists():
            self.file.with_suffix(".reached").touch()
            while self.file.exists():
                time.sleep(0.01)
        return redness(batch)


class asleep:
    """Score as `redness`; once `log` has a line, in the process whose rank stands in `file`, touch
    a file beside it (.reached) and sleep for ten minutes."""

    def __init__(self, *, file: str, log: str) -> None:
        self.file, self.log = Path(file), Path(log)

    def __call__(self, batch: RewardBatch) -> Tensor:
        begun = self.file.exists() and self.log.exists() and self.log.read_text()
        if begun and self.file.read_text() == os.environ.get("RANK", "0"):
            self.file.with_suffix(".reached").touch()
            time.sleep(600)
        return redness(batch)


def write_toy(folder: Path) -> Path:
    """Write prompt files and a config into `folder` -> the config's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in (("train", COLORS), ("test", COLORS[::-1])):
        records = [
            {
                "prompt": f"a {word} dot",
                "tag": "even" if i % 2 == 0 else "odd",
                "held_out": word in COLORS[3:],
            }
            for i, word in enumerate(words)
        ]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    config = folder / "toy.yaml"
    config.write_text(CONFIG.format(folder=folder))
    return config


def toy(folder: Path, *overrides: str) -> Config:
    """Load the toy config with overrides."""
    return load_config(write_toy(folder), overrides, ("toykit",))


def axes(name: str) -> list[str]:
    """Return the overrides that put the axes of a shipped config on the toy."""
    config = load_config(name)
    raw = config.to_dict()
    calls = ["plan", "transition", "credit", "aggregate", "segment", "select", "likelihood", "loss"]
    calls += ["kl", "old", "slow", "fake", "surrogate"]
    out = [f"{key}={json.dumps(raw[key])}" for key in calls if key in raw]
    if config.scout.images:
        out += [f"scout={json.dumps(raw['scout'])}"]
    same = str(config.train.same_noise).lower()
    out += [f"train.group={config.train.group}", f"train.same_noise={same}"]
    return [*out, f"train.updates={config.train.updates}", f"train.order={config.train.order}"]


class apprentice:
    """A reward that is trained along: it likes red more with every update. The policy learns in
    every second round."""

    def __init__(self, *, every: int = 1) -> None:
        self.every, self.taste = every, torch.tensor(0.0)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score by taste."""
        return self.taste * redness(batch) + batch.images[:, 2].mean((1, 2))

    def trains_policy(self, iteration: int) -> bool:
        """Say whether the policy learns now."""
        return (iteration + 1) % self.every == 0

    def update(self, batch: RewardBatch) -> dict[str, float]:
        """Like red more, by how red the images are."""
        self.taste = self.taste + 1 + redness(batch).mean()
        return {"taste": float(self.taste)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the taste."""
        return {"taste": self.taste.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put the taste back."""
        self.taste = state["taste"].clone()


class moody:
    """Fail from the given call on, as a server does that goes away; or say so when asked early."""

    def __init__(self, *, calls: int = 3, ready: bool = True) -> None:
        self.calls, self.ready = calls, ready

    def probe(self) -> None:
        """Say whether it could answer."""
        if not self.ready:
            raise RunError("the server is down")

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score by red as long as it lasts."""
        self.calls -= 1
        if self.calls < 0:
            raise ConnectionError("gone away")
        return redness(batch)


def blueness(batch: RewardBatch) -> Tensor:
    """Score images by their mean blue."""
    return batch.images[:, 2].mean((1, 2))


blueness.differentiable = True  # type: ignore[attr-defined]


def unloadable() -> LinearFlow:
    """Fail if a test loads the model before it found the mistake."""
    raise AssertionError("the model was loaded")


def slow(batch: RewardBatch, *, seconds: float = 0.1) -> Tensor:
    """Score by red after a while, as a server does."""
    time.sleep(seconds)
    return redness(batch)


class one_sided:
    """Fail in one process of several, from the given call on; the others score by red."""

    def __init__(self, *, rank: int, calls: int = 2) -> None:
        self.rank, self.calls = rank, calls

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score by red as long as it lasts."""
        self.calls -= 1
        if self.calls < 0 and os.environ.get("RANK") == str(self.rank):
            raise RunError("the server is down")
        return redness(batch)


class pressed:
    """Press Ctrl-C in one process of several, at the given call, unless `file` says that it was;
    score by red."""

    def __init__(self, *, rank: int, call: int, file: str) -> None:
        self.rank, self.call, self.file = rank, call, Path(file)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score by red."""
        self.call -= 1
        here = os.environ.get("RANK") == str(self.rank)
        if here and self.call == 0 and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGINT)
        return redness(batch)
