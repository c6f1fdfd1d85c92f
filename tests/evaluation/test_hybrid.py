"""Hybrid inference: the trained weights take the first steps, the base model the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import redness, toy

import flowrl
from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.cli.main import main
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.pixels import round_8bit
from flowrl.core.prompts import load_prompts
from flowrl.core.seeds import generator
from flowrl.evaluation.held_out import evaluate_prompts
from flowrl.models.toy import LinearFlow
from flowrl.runs.evaluate import evaluate, sample_all
from flowrl.runs.open_run import load_run
from flowrl.runs.train import train
from flowrl.training import checkpoint
from flowrl.training.trainer import Trainer
from flowrl.training.weights import Weights

PROMPTS = ["a red dot", "a blue dot"]
STEPS = 10


def linear(*, moved: bool = False) -> LinearFlow:
    model = LinearFlow(scale=0.3)
    if moved:
        move(model)
    return model


@torch.no_grad()
def move(model: Any) -> None:
    for p in model.trainable().values():
        p.add_(0.3)


def trained() -> tuple[LinearFlow, Weights]:
    """Return a model that was moved away from its base, and the base."""
    model = linear()
    base = Weights(model.trainable())
    base.snapshot("ref")
    move(model)
    return model, base


def ode(model: LinearFlow, steps: int = STEPS, **options: Any) -> Tensor:
    """Sample three images of each prompt by the engine -> latents [6, 3, 2, 2]."""
    keys = [generator(0, "sample", i) for i in range(2)]
    options |= {"shape": (3, 2, 2), "group_size": 3, "generators": keys}
    return sample_ode(model, model.encode(PROMPTS), sigmas=model.sigmas(steps, 16, 16), **options)


@torch.no_grad()
def by_hand(
    first: LinearFlow, switch: int, texts: list[str] = PROMPTS, count: int = 3, seed: int = 0
) -> Tensor:
    """Take Euler steps from the documented noise, from step `switch` on with a base model."""
    keys = [generator(seed, "sample", i) for i in range(len(texts))]
    x = torch.cat([torch.randn(count, 3, 2, 2, generator=key) for key in keys])
    cond = {"text": first.encode(texts)["text"].repeat_interleave(count, 0)}
    sigmas, base = first.sigmas(STEPS, 16, 16), linear()
    for k in range(STEPS):
        v = (first if k < switch else base).velocity(x, sigmas[k].expand(len(x)), cond)
        x = x - (sigmas[k] - sigmas[k + 1]) * v
    return x


# --------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("tuned", "switch"), [(0.0, 0), (0.6, 6), (0.64, 6), (0.66, 7), (0.99, 10), (1.0, 10)]
)
def test_the_base_takes_the_last_steps(tuned: float, switch: int) -> None:
    """Two models in turn, written out here; `switch` is round(10 tuned)."""
    model, base = trained()
    got = ode(model, tuned=tuned, late=lambda: base.using("ref"))
    assert torch.equal(got, by_hand(linear(moved=True), switch))
    for p, q in zip(model.parameters(), linear(moved=True).parameters(), strict=True):
        assert torch.equal(p, q)  # put back


def test_the_published_split_is_30_of_50_steps() -> None:
    """Only network calls of the last 20 steps are made inside."""
    inside, seen = [False], []

    class Watching(LinearFlow):
        def velocity(self, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            seen.append(inside[0])
            return super().velocity(x, sigma, cond)

    @contextmanager
    def late() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    ode(Watching(), 50, tuned=0.6, late=late)
    assert seen == [False] * 30 + [True] * 20


@pytest.mark.parametrize("tuned", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none(tuned: float, tmp_path: Path) -> None:
    model, base = trained()
    with pytest.raises(ConfigError, match=rf"in \[0, 1\], got tuned={tuned}"):
        ode(model, tuned=tuned, late=lambda: base.using("ref"))
    with pytest.raises(ConfigError, match="eval.tuned: expected a number"):
        toy(tmp_path, f"eval.tuned={tuned}".replace("nan", ".nan"))


def test_base_weights_that_are_missing() -> None:
    message = "tuned=0.6 leaves steps to the base model, .*load_run returns"
    with pytest.raises(ConfigError, match=message):
        ode(LinearFlow(), tuned=0.6)


# ------------------------------------------------------------------------------------------- runs

HYBRID = ("eval.tuned=0.6", "eval.steps=10", "optimizer.lr=0.05")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two finished runs: `hybrid`, and `plain` without the key."""
    folder = tmp_path_factory.mktemp("home")
    train(toy(folder, *HYBRID), folder / "hybrid", quiet=True)
    train(toy(folder, *HYBRID[1:]), folder / "plain", quiet=True)
    return folder


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]


def redness_by_hand(home: Path, name: str, switch: int) -> float:
    """Sample the test prompts with a run's averaged weights by hand -> mean of all scores."""
    tuned = linear()
    files = checkpoint.load(home / name / "checkpoints" / "000004")[0]
    tuned.load_state_dict(files["ema"])
    texts = load_prompts(toy(home, *HYBRID).prompts.test).texts
    images = round_8bit(tuned.decode(by_hand(tuned, switch, texts, count=2, seed=1234)))
    return float((images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))).mean())


@pytest.mark.integration
def test_a_run_is_judged_by_hybrid_inference(home: Path) -> None:
    """Training is the same with and without; only evaluations and grids differ."""
    hybrid, plain = rows(home / "hybrid"), rows(home / "plain")
    assert hybrid[0]["red"] == plain[0]["red"]  # before training there is one model only
    for row, name, switch in ((hybrid[-1], "hybrid", 6), (plain[-1], "plain", 10)):
        expected = redness_by_hand(home, name, switch)
        assert row["rewards"]["red"] == pytest.approx(expected, abs=1e-6)
    assert abs(hybrid[-1]["red"] - plain[-1]["red"]) > 1e-3
    assert [row["setting"]["tuned"] for row in (hybrid[-1], plain[-1])] == [0.6, 1.0]
    for file, equal in (("metrics.jsonl", True), ("samples/000004.png", False)):
        one, two = ((home / name / file).read_bytes() for name in ("hybrid", "plain"))
        assert (one == two) == equal, file


@pytest.mark.integration
@pytest.mark.parametrize("weights", ["ema", "current", "base"])
def test_an_opened_run_keeps_its_base(home: Path, weights: str) -> None:
    """`tuned` may also be set afterwards: a run without the key and one with it are alike."""
    results = []
    for name in ("hybrid", "plain"):
        change = ["eval.tuned=0.6"]
        run = load_run(home / name, weights=weights, overrides=change, plugins=("toykit",))
        results.append(evaluate(run.model, run.config, base=run.base))
        images = sample_all(run.model, run.config, PROMPTS, seed=0, base=run.base)
        assert images.shape == (2, 3, 16, 16)
    logged = rows(home / "hybrid")[0 if weights == "base" else -1]
    del logged["iteration"], logged["drift"]
    assert logged["setting"].pop("weights") == "ema"
    assert results[0] == results[1]
    assert (results[0] == logged) == (weights != "current")


@pytest.mark.integration
@pytest.mark.parametrize(("tuned", "weights"), [(0, "base"), (1, "ema")])
def test_the_ends_of_a_run(home: Path, tuned: int, weights: str) -> None:
    """tuned=0 is the base model and 1 the plain evaluation, apart from the setting."""
    run = load_run(home / "plain", overrides=[f"eval.tuned={tuned}"], plugins=("toykit",))
    other = load_run(home / "plain", weights=weights, plugins=("toykit",))
    got, want = evaluate(run.model, run.config, base=run.base), evaluate(other.model, other.config)
    assert got.pop("setting") == {**want.pop("setting"), "tuned": tuned} and got == want
    assert other.base.names() == [] and (run.base.names() == []) == (tuned == 1)


@pytest.mark.integration
def test_python_and_the_command_give_what_the_run_gives(home: Path, tmp_path: Path) -> None:
    """Of a run without the key: the hybrid run's own result. Of a config: its base model."""
    # in Python, with a `late` of one's own; without the base nothing is made up
    run = load_run(home / "hybrid", plugins=("toykit",))
    size: dict[str, Any] = {"height": 16, "width": 16, "steps": 10, "images": 2, "seed": 1234}
    own: dict[str, Any] = {"tuned": 0.6, "late": lambda: run.base.using("ref"), **size}
    texts = load_prompts(run.config.prompts.test)
    result = evaluate_prompts(run.model, texts, {"red": redness}, headline="red", **own)
    assert result["red"] == rows(home / "hybrid")[-1]["red"]
    model, config, _ = flowrl.open_run(home / "hybrid", plugins=("toykit",))
    with pytest.raises(ConfigError, match=r"tuned=0.6 .*load_run"):
        flowrl.evaluate(model, config)
    # by the command
    report, options = tmp_path / "r.json", ["--set", "eval.tuned=0.6", "--plugin", "toykit"]
    for place, more, at in (("plain", [], -1), ("toy.yaml", ["--set", "eval.steps=10"], 0)):
        assert main(["eval", f"{home}/{place}", *options, *more, "--json", str(report)]) == 0
        got = json.loads(report.read_text())
        assert got["setting"]["tuned"] == 0.6 and got["red"] == rows(home / "hybrid")[at]["red"]
    for name, share in (("a", "0.6"), ("b", "1")):
        argv = f"sample {home}/plain dot --set eval.tuned={share} --out {tmp_path}/{name}.png"
        assert main([*argv.split(), "--plugin", "toykit"]) == 0
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


@pytest.mark.integration
def test_a_checkpoint_belongs_to_the_key(home: Path) -> None:
    """The base weights are in the checkpoint, so that a resumed run is judged as before."""
    folder = home / "hybrid/checkpoints/000004"
    trainer = Trainer(toy(home, *HYBRID))
    move(trainer.model)
    trainer.load(folder)
    ref = trainer.weights.state_dict()["ref"]
    assert all(torch.equal(ref[name], value) for name, value in linear().trainable().items())
    with pytest.raises(CheckpointError, match=r"eval.tuned below 1 must be on or off"):
        Trainer(toy(home, *HYBRID[1:])).load(folder)
