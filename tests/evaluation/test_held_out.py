"""Held-out evaluation: what it samples, how it averages, hybrid inference with the base model, and
the suites."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import reddish, redness, toy

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import CheckpointError, ConfigError, RunError
from flowrl.core.pixels import round_8bit
from flowrl.core.prompt_files import PUBLISHED
from flowrl.core.prompts import PromptSet, load_prompts
from flowrl.core.seeds import generator
from flowrl.core.types import Reward, RewardBatch
from flowrl.evaluation.held_out import evaluate_prompts, sampled_images
from flowrl.evaluation.scorecard import evaluation_table
from flowrl.evaluation.suites.catalogue import SUITES, headline_of, overrides_of
from flowrl.models.toy import LinearFlow
from flowrl.runs.evaluate import evaluate, sample_all
from flowrl.runs.open_run import load_run
from flowrl.runs.train import train
from flowrl.training import checkpoint
from flowrl.training.trainer import Trainer
from flowrl.training.weights import Weights

SIZE: dict[str, int] = {"height": 16, "width": 16, "steps": 4}
TEXTS = ["a red dot", "a blue dot", "two dots", "a red dot", "no dot"]
TAGS = ["one", "one", "one", "two", "two"]


def prompts(held_out: list[bool] | None = None, tags: list[str] = TAGS) -> PromptSet:
    records: list[dict[str, Any]] = []
    for i, text in enumerate(TEXTS):
        more = {"held_out": held_out[i]} if held_out else {}
        records.append({"prompt": text, "tag": tags[i], **more})
    return PromptSet(TEXTS, records, "dots", "dots.jsonl")


def run(rewards: dict[str, Reward] | None = None, **options: Any) -> dict[str, Any]:
    """Evaluate three images of each prompt."""
    rewards = rewards or {"red": redness, "strict": reddish}
    filled = {"headline": next(iter(rewards)), "images": 3, **SIZE, **options}
    texts = filled.pop("prompts", prompts())
    return evaluate_prompts(LinearFlow(scale=0.3), texts, rewards, **filled)


def drawn(texts: list[str] = TEXTS, **options: Any) -> tuple[list[int], Tensor]:
    parts = list(sampled_images(LinearFlow(scale=0.3), texts, **{**SIZE, "images": 3, **options}))
    places, images = zip(*parts, strict=True)
    return sum(places, []), torch.cat(images)


def redder() -> Tensor:
    """Score the images that `run` evaluates by hand -> [5, 3]."""
    images = drawn()[1]
    return (images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))).double().reshape(5, 3)


# --------------------------------------------------------------------------------------- sampling


def test_images_do_not_depend_on_the_batch() -> None:
    """To the bit on this field; elsewhere to the rounding of another batch geometry."""
    for batch in (1, 2, 3, 7, 15, 1000):
        index, images = drawn(batch=batch)
        assert index == [i for i in range(5) for _ in range(3)]
        assert torch.equal(images, drawn()[1])


def test_an_image_depends_on_the_seed_and_its_prompts_place_only() -> None:
    """Other prompts around it, another batch or what was drawn before change nothing."""
    whole = drawn()[1]
    torch.manual_seed(5)
    torch.randn(7)
    others = drawn(["x", "y", "two dots", "z"], batch=2)[1]
    assert torch.equal(others[6:9], whole[6:9]) and not torch.equal(others[:3], whole[:3])
    assert not torch.equal(whole[:3], whole[9:12])  # the same words at another place
    assert not torch.equal(drawn(seed=1)[1], whole)


def test_sampling_is_euler_from_the_documented_noise_in_256_levels() -> None:
    """Oracle: sample_ode from generators of the documented key, decoded and rounded here."""
    model = LinearFlow(scale=0.3)
    keys = [generator(9, "sample", i) for i in range(2)]
    given: dict[str, Any] = {"shape": (3, 2, 2), "group_size": 3, "generators": keys}
    cond, sigmas = model.encode(TEXTS[:2]), model.sigmas(4, 16, 16)
    x0 = sample_ode(model, cond, sigmas=sigmas, **given)
    got = drawn(TEXTS[:2], seed=9)[1]
    assert torch.equal(got, torch.round(model.decode(x0) * 255) / 255) and not got.requires_grad


def test_progress_and_numbers_that_make_no_sense() -> None:
    seen: list[tuple[int, int]] = []
    drawn(batch=6, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]
    for wrong in ({"steps": 0}, {"images": 0}, {"batch": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            drawn(TEXTS, **wrong)


# ----------------------------------------------------------------------------------------- scores


def test_evaluation_is_deterministic_and_independent_of_the_batch() -> None:
    first = run()
    assert first == run()
    other = run(batch=4)
    assert other.pop("setting")["batch"] == 4 and first.pop("setting")["batch"] == 256
    assert other == first and run(seed=1)["red"] != first["red"]


def test_overall_is_the_mean_over_tasks() -> None:
    """9 images of task one, 6 of task two; oracle: plain means of the same images."""
    result, scores = run(), redder()
    means = [float(scores[:3].mean()), float(scores[3:].mean())]
    tasks = result["tasks"].values()
    assert [task["mean"] for task in tasks] == pytest.approx(means)
    assert [task["images"] for task in tasks] == [9, 6] and result["images"] == 15
    assert result["red"] == pytest.approx(sum(means) / 2)
    assert abs(result["red"] - float(scores.mean())) > 1e-4
    assert result["rewards"]["red"] == pytest.approx(float(scores.mean()))
    assert result["rewards"]["strict"] == pytest.approx(float((scores > 0).float().mean()))
    numbers = {**SIZE, "images": 3, "batch": 256, "seed": 0, "tuned": 1.0}
    setting = dict(result["setting"])
    assert len(setting.pop("prompts_hash")) == 16
    assert setting == {**numbers, "prompts": "dots", "count": 5, "guidance": None}


def test_seen_and_held_out_prompts_apart() -> None:
    """Places 1 and 4 are held out: 6 of 15 images, one prompt of each task."""
    result = run(prompts=prompts([False, True, False, False, True]))
    scores = redder().mean(1).tolist()
    assert result["held_out"]["mean"] == pytest.approx((scores[1] + scores[4]) / 2)
    assert result["seen"]["mean"] == pytest.approx(((scores[0] + scores[2]) / 2 + scores[3]) / 2)
    assert (result["seen"]["images"], result["held_out"]["images"]) == (9, 6)
    one_sided = [prompts(), prompts([True] * 5), prompts([False] * 3 + [True] * 2)]
    for listed in one_sided:
        found = run(prompts=listed)
        assert "seen" not in found and "held_out" not in found
    lines = evaluation_table(result).splitlines()
    assert lines[0].split() == ["red", "95", "%", "interval", "images"]
    names = ["one", "two", "mean over tasks", "seen", "held_out"]
    assert [line.split("  ")[0].strip() for line in lines[2:]] == names
    assert [line.split()[-1] for line in lines[2:]] == ["9", "6", "15", "9", "6"]
    assert len(set(map(len, lines))) == 1


def test_seen_and_held_out_prompts_are_compared_on_the_tasks_of_both() -> None:
    """Tasks one and two have seen and held-out prompts, three only a seen one. By hand, from the
    images' scores: three counts in the mean over tasks alone."""
    tags = ["one", "two", "three", "one", "two"]
    result = run(prompts=prompts([False, True, False, True, False], tags))
    scores = redder().mean(1).tolist()
    assert result["seen"]["mean"] == pytest.approx((scores[0] + scores[4]) / 2)
    assert result["held_out"]["mean"] == pytest.approx((scores[3] + scores[1]) / 2)
    for part in ("seen", "held_out"):
        assert {*result[part]["tasks"]} == {"one", "two"} and result[part]["images"] == 6
    assert {*result["tasks"]} == {"one", "two", "three"} and result["images"] == 15


@pytest.mark.parametrize(
    ("value", "said"),
    [(math.nan, "gave no score for an image of"), (math.inf, "gave inf for image 6, prompt")],
)
def test_an_image_without_a_score_is_an_error(value: float, said: str) -> None:
    def holey(batch: RewardBatch) -> Tensor:
        scores = redness(batch)
        scores[[text == "two dots" for text in batch.prompts]] = value
        return scores

    with pytest.raises(RunError, match=f"evaluation: reward 'holey' {said} 'two dots'"):
        run({"red": redness, "holey": holey})


def test_a_task_without_a_scored_image_is_an_error_that_says_what_helps() -> None:
    """The reward scores no image of task two, 6 of 15, which the limit of one half allows."""

    def blind(batch: RewardBatch) -> Tensor:
        known = torch.tensor([record["tag"] == "one" for record in batch.meta])
        return torch.where(known, redness(batch), torch.nan)

    said = r"no image of the task 'two', .* Mend the reward, or take .* out of .*prompts\.test"
    with pytest.raises(RunError, match=said):
        run({"blind": blind}, max_unscored=0.5)


def test_a_reward_that_scores_nothing_has_no_mean() -> None:
    """JSON has no NaN."""
    blind = {"one": reddish, "none": lambda batch: torch.full((len(batch.images),), math.nan)}
    report = run(blind, max_unscored=1.0)
    assert report["rewards"]["none"] is None and report["rewards"]["one"] > 0
    json.dumps(report, allow_nan=False)


def test_an_image_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the reward would not notice."""
    decode = LinearFlow.decode

    def failing(self: LinearFlow, x0: Tensor) -> Tensor:
        images = decode(self, x0)
        images[-1, 0, 0, 0] = math.nan
        return images

    monkeypatch.setattr(LinearFlow, "decode", failing)
    with pytest.raises(RunError, match="no score for an image of 'a blue dot' .3 of 15 images"):
        run({"one": lambda batch: torch.ones(len(batch.images))}, batch=6)


def test_rewards_build_no_graph_and_see_each_prompt_as_a_group() -> None:
    """Also the two prompts of the same words, with two prompts in a batch."""
    seen: list[int] = []

    def watching(batch: RewardBatch) -> Tensor:
        seen.extend(batch.group.tolist())
        assert not torch.is_grad_enabled()
        return redness(batch)

    run({"red": watching}, batch=6)
    assert seen == [i for i in range(5) for _ in range(3)]


# ------------------------------------------------------------------------------- hybrid inference


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
    model, config, _ = load_run(home / "hybrid", plugins=("toykit",))[:3]
    with pytest.raises(ConfigError, match=r"tuned=0.6 .*load_run"):
        evaluate(model, config)
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


# with the package datasets and without it
UNREACHED = r'hub:sayakpaul/drawbench.*(HF_HUB_OFFLINE|"\.\[hub\]").*--prompts'


def test_every_suite_has_prompts_and_rewards_that_bind() -> None:
    for name, suite in SUITES.items():
        given = (
            None if suite.prompts else "hub:none" if suite.reader else "assets/shapes/test.jsonl"
        )
        config = load_config("sd3/flow_grpo", overrides_of(name, given))
        assert [*config.rewards] == [*suite.rewards] and config.headline == [*suite.rewards][0]
        assert config.eval.images == suite.images
        here = not suite.reader and (given or suite.prompts) not in PUBLISHED
        assert not here or len(load_prompts(config.prompts.test)) > 100
        # as the headline of a comparison: the training is the config's own
        own = load_config("shapes/awm", headline_of(name, given))
        known = load_config("shapes/awm").rewards
        assert own.rewards[own.headline].mix == 0 and own.eval.images == suite.images
        assert {n: own.rewards[n] for n in known} == known
        assert own.rewards[own.headline].fn == next(iter(suite.rewards.values()))["fn"]
    with pytest.raises(ConfigError, match="clip_score.*--prompts"):
        overrides_of("clip_score", None)
    with pytest.raises(ConfigError, match=UNREACHED):
        load_prompts(load_config("shapes/awm", overrides_of("drawbench", None)).prompts.test)
    with pytest.raises(ConfigError, match="no suite 'genevl'; did you mean 'geneval'"):
        overrides_of("genevl", None)
