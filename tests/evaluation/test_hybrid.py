"""Hybrid inference: the trained weights take the first steps, the base model the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toykit import redness, toy

import flowrl
from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.cli.main import main
from flowrl.config.load import Config
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.pixels import round_8bit
from flowrl.core.prompts import load_prompts
from flowrl.core.seeds import generator
from flowrl.evaluation.held_out import evaluate_prompts
from flowrl.models.toy import LinearFlow
from flowrl.runs.evaluate import evaluate, sample_all
from flowrl.runs.open import load_run
from flowrl.runs.train import train
from flowrl.training import checkpoint
from flowrl.training.trainer import Trainer
from flowrl.training.weights import Weights

PROMPTS = ["a red dot", "a blue dot"]
STEPS = 10


def trained() -> tuple[LinearFlow, Weights]:
    """Return a model that was moved away from its base, and the base."""
    model = LinearFlow(scale=0.3)
    base = Weights(model.trainable())
    base.snapshot("ref")
    move(model)
    return model, base


@torch.no_grad()
def move(model: LinearFlow, by: float = 0.3) -> None:
    for p in model.trainable().values():
        p.add_(by)


def ode(model: LinearFlow, **options: Any) -> Tensor:
    keys = [generator(0, "sample", i) for i in range(2)]
    fixed: dict[str, Any] = {
        "sigmas": model.sigmas(STEPS, 16, 16),
        "shape": (3, 2, 2),
        "group_size": 3,
        "generators": keys,
    }
    return sample_ode(model, model.encode(PROMPTS), **fixed, **options)


def by_hand(first: nn.Module, second: nn.Module, switch: int) -> Tensor:
    """Sample with two models in turn: Euler steps from the documented noise."""
    x = torch.cat([torch.randn(3, 3, 2, 2, generator=generator(0, "sample", i)) for i in range(2)])
    cond = {"text": LinearFlow().encode(PROMPTS)["text"].repeat_interleave(3, 0)}
    sigmas = LinearFlow().sigmas(STEPS, 16, 16)
    for k in range(STEPS):
        with torch.no_grad():
            v = (first if k < switch else second).velocity(x, sigmas[k].expand(6), cond)  # type: ignore[operator]
        x = x - (sigmas[k] - sigmas[k + 1]) * v
    return x


def moved() -> LinearFlow:
    model = LinearFlow(scale=0.3)
    move(model)
    return model


# ----------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("tuned", "switch"), [(0.0, 0), (0.6, 6), (0.64, 6), (0.66, 7), (0.99, 10), (1.0, 10)]
)
def test_the_base_takes_the_last_steps(tuned: float, switch: int) -> None:
    """Two models in turn, written out here; `switch` is round(10 tuned)."""
    model, base = trained()
    got = ode(model, tuned=tuned, late=lambda: base.using("ref"))
    assert torch.equal(got, by_hand(moved(), LinearFlow(scale=0.3), switch))
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), moved().parameters(), strict=True)
    )  # put back


def test_the_ends_are_the_two_models() -> None:
    model, base = trained()
    assert torch.equal(ode(model, tuned=1.0, late=lambda: base.using("ref")), ode(model))
    assert torch.equal(
        ode(model, tuned=0.0, late=lambda: base.using("ref")), ode(LinearFlow(scale=0.3))
    )
    assert not torch.equal(ode(model), ode(LinearFlow(scale=0.3)))


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

    model = Watching()
    options: dict[str, Any] = {
        "shape": (3, 2, 2),
        "group_size": 1,
        "generators": [generator(0, "sample", i) for i in range(2)],
    }
    sample_ode(
        model,
        model.encode(PROMPTS),
        sigmas=model.sigmas(50, 16, 16),
        tuned=0.6,
        late=late,
        **options,
    )
    assert seen == [False] * 30 + [True] * 20


@pytest.mark.parametrize("tuned", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none(tuned: float, tmp_path: Path) -> None:
    model, base = trained()
    with pytest.raises(ConfigError, match=rf"in \[0, 1\], got tuned={tuned}"):
        ode(model, tuned=tuned, late=lambda: base.using("ref"))
    with pytest.raises(ConfigError, match="eval.tuned: expected a number"):
        toy(tmp_path, f"eval.tuned={tuned}".replace("nan", ".nan"))


def test_base_weights_that_are_missing() -> None:
    with pytest.raises(
        ConfigError, match="tuned=0.6 leaves steps to the base model, .*load_run returns"
    ):
        ode(LinearFlow(), tuned=0.6)


# --------------------------------------------------------------------------------------------- runs


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


def expected(config: Config, run: Path, switch: int) -> float:
    """Sample and score by hand: the run's averaged weights up to step `switch`, then a new model ->
    mean of all."""
    tuned = LinearFlow(scale=0.3)
    tuned.load_state_dict(checkpoint.load(run / "checkpoints" / "000004")[0]["ema"])
    texts = load_prompts(config.prompts.test).texts
    x = torch.cat(
        [torch.randn(2, 3, 2, 2, generator=generator(1234, "sample", i)) for i in range(len(texts))]
    )
    cond = {"text": tuned.encode(texts)["text"].repeat_interleave(2, 0)}
    sigmas = tuned.sigmas(10, 16, 16)
    for k in range(10):
        with torch.no_grad():
            v = (tuned if k < switch else LinearFlow(scale=0.3)).velocity(
                x, sigmas[k].expand(len(x)), cond
            )
        x = x - (sigmas[k] - sigmas[k + 1]) * v
    images = round_8bit(tuned.decode(x))
    return float((images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))).mean())


@pytest.mark.integration
def test_a_run_is_judged_by_hybrid_inference(home: Path) -> None:
    """Training is the same with and without; only evaluations and grids differ. The numbers are
    sampled by hand."""
    hybrid, plain = (rows(home / name) for name in ("hybrid", "plain"))
    assert hybrid[0]["red"] == plain[0]["red"]  # before training there is one model only
    config = toy(home, *HYBRID)
    for row, run, switch in ((hybrid[-1], home / "hybrid", 6), (plain[-1], home / "plain", 10)):
        assert row["rewards"]["red"] == pytest.approx(expected(config, run, switch), abs=1e-6)
    assert abs(hybrid[-1]["red"] - plain[-1]["red"]) > 1e-3
    assert [row["setting"]["tuned"] for row in (hybrid[-1], plain[-1])] == [0.6, 1.0]
    assert (home / "hybrid/metrics.jsonl").read_bytes() == (
        home / "plain/metrics.jsonl"
    ).read_bytes()
    grids = [(home / name / "samples/000004.png").read_bytes() for name in ("hybrid", "plain")]
    assert grids[0] != grids[1]


@pytest.mark.integration
@pytest.mark.parametrize("weights", ["ema", "current", "base"])
def test_an_opened_run_keeps_its_base(home: Path, weights: str) -> None:
    """`tuned` may also be set afterwards: a run without the key and one with it are evaluated
    alike."""
    results = []
    for name in ("hybrid", "plain"):
        run = load_run(
            home / name, weights=weights, overrides=["eval.tuned=0.6"], plugins=("toykit",)
        )
        results.append(evaluate(run.model, run.config, base=run.base))
        images = sample_all(run.model, run.config, PROMPTS, seed=0, base=run.base)
        assert images.shape == (2, 3, 16, 16)
    assert results[0] == results[1]
    last = {
        k: v
        for k, v in rows(home / "hybrid")[0 if weights == "base" else -1].items()
        if k != "iteration"
    }
    assert (results[0] == last) == (weights != "current")


@pytest.mark.integration
def test_the_ends_of_a_run(home: Path) -> None:
    """tuned=0 is the base model and 1 the plain evaluation, apart from the setting."""
    for tuned, weights in ((0, "base"), (1, "ema")):
        run = load_run(home / "plain", overrides=[f"eval.tuned={tuned}"], plugins=("toykit",))
        other = load_run(home / "plain", weights=weights, plugins=("toykit",))
        got = evaluate(run.model, run.config, base=run.base)
        want = evaluate(other.model, other.config)
        assert got.pop("setting") == {**want.pop("setting"), "tuned": tuned} and got == want
    assert run.base.names() == other.base.names() == []  # no copy that nobody needs


@pytest.mark.integration
def test_without_the_base_nothing_is_made_up(home: Path) -> None:
    model, config, _ = flowrl.open_run(home / "hybrid", plugins=("toykit",))
    with pytest.raises(ConfigError, match=r"tuned=0.6 .*load_run"):
        flowrl.evaluate(model, config)


@pytest.mark.integration
def test_the_command(home: Path, tmp_path: Path) -> None:
    """Of a run without the key: the hybrid run's own result. Of a config: its base model, hybrid or
    not."""
    report, options = tmp_path / "r.json", ["--set", "eval.tuned=0.6", "--plugin", "toykit"]
    assert main(["eval", f"{home}/plain", *options, "--json", str(report)]) == 0
    got = json.loads(report.read_text())
    assert got["setting"]["tuned"] == 0.6 and got["red"] == rows(home / "hybrid")[-1]["red"]
    more = ["--set", "eval.steps=10", "--json", str(report)]
    assert main(["eval", f"{home}/toy.yaml", *options, *more]) == 0
    assert json.loads(report.read_text())["red"] == rows(home / "hybrid")[0]["red"]
    files = []
    for name, share in (("a", "0.6"), ("b", "1")):
        files.append(tmp_path / f"{name}.png")
        argv = [
            "sample",
            f"{home}/plain",
            "a dot",
            "--set",
            f"eval.tuned={share}",
            "--out",
            str(files[-1]),
        ]
        assert main([*argv, "--plugin", "toykit"]) == 0
    assert files[0].read_bytes() != files[1].read_bytes()


@pytest.mark.integration
def test_a_checkpoint_belongs_to_the_key(home: Path) -> None:
    """The base weights are in the checkpoint, so that a resumed run is judged as before."""
    folder = home / "hybrid/checkpoints/000004"
    trainer = Trainer(toy(home, *HYBRID))
    move(trainer.model)  # type: ignore[arg-type]
    trainer.load(folder)
    ref, base = trainer.weights.state_dict()["ref"], LinearFlow(scale=0.3).trainable()
    assert all(torch.equal(ref[name], value) for name, value in base.items())
    with pytest.raises(CheckpointError, match=r"eval.tuned below 1 must be on or off"):
        Trainer(toy(home, *HYBRID[1:])).load(folder)


@pytest.mark.integration
def test_evaluation_is_the_same_in_python(home: Path) -> None:
    """`evaluate_prompts` with a `late` of one's own gives what the run gives."""
    config, run = toy(home, *HYBRID), load_run(home / "hybrid", plugins=("toykit",))
    size: dict[str, Any] = {"height": 16, "width": 16, "steps": 10, "images": 2, "seed": 1234}
    result = evaluate_prompts(
        run.model, load_prompts(config.prompts.test), {"red": redness}, headline="red",
        tuned=0.6, late=lambda: run.base.using("ref"), **size,
    )  # fmt: skip
    assert result["red"] == rows(home / "hybrid")[-1]["red"]
