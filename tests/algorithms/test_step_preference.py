"""SPO: candidates of one state, their estimates, pairs, and the model that compares them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from losskit import loss_input
from rolloutkit import run
from scriptkit import script_module
from torch import Tensor
from toykit import toy

from flowrl.algorithms.credit.comparisons import candidate_pairs
from flowrl.algorithms.forest import leaf_sigmas
from flowrl.algorithms.losses.comparisons import step_preference
from flowrl.algorithms.plans.trees import candidates, comb
from flowrl.algorithms.rollout.plan_steps import counts
from flowrl.algorithms.selection.segments import siblings
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import x0_from
from flowrl.core.types import Eval, Rollout, Tree
from flowrl.models.toy import LinearFlow
from flowrl.training.trainer import Trainer

PLAN = candidates(0, steps=5, noise_scale=0.5, branch=3, first=1)


def made(model: LinearFlow) -> Rollout:
    return run(PLAN, cps, model=model, prompts=["a", "b"])


def test_a_candidate_is_judged_by_its_estimate_at_its_own_sigma() -> None:
    """Closed form: the leaf below a candidate is x - sigma v there. 3 candidates at steps 1, 2 and
    3, and the finished image: 10 images a root, of which 9 are estimates."""
    model = LinearFlow()
    ro = made(model)
    assert counts(PLAN).leaves == 10
    sigma = leaf_sigmas(ro, PLAN.tail)
    assert int((sigma > 0).sum()) * 10 == 9 * len(ro.leaf)
    here = (sigma > 0).nonzero().flatten()
    above = ro.tree.parent[ro.leaf[here]]
    assert torch.equal(sigma[here], ro.sigmas[ro.tree.step[above]])
    row = ro.tree.group[above]
    cond = {name: value[row] for name, value in ro.cond.items()}
    v = model.velocity(ro.x[above], sigma[here], cond)
    known = x0_from(ro.x[above], v, sigma[here]).detach()
    torch.testing.assert_close(ro.x[ro.leaf[here]], known, atol=1e-5, rtol=1e-5)
    # images that took more steps are finished: the same plan with tails to the end
    whole = comb(0, steps=5, noise_scale=0.5, size=2)
    assert float(leaf_sigmas(run(whole, cps), whole.tail).sum()) == 0


def test_a_finished_candidate_is_its_own_sample() -> None:
    """An independent loop: Euler steps from each candidate to sigma 0 end at the leaf below it, and
    all leaves have sigma 0, so any reward may judge them. As many leaves as without `finish`."""
    plan = candidates(0, steps=5, noise_scale=0.5, branch=3, first=1, finish=True)
    assert counts(plan).leaves == counts(PLAN).leaves == 10
    model = LinearFlow()
    ro = run(plan, cps, model=model, prompts=["a", "b"])
    assert float(leaf_sigmas(ro, plan.tail).sum()) == 0
    above = ro.tree.parent[ro.leaf]
    assert bool((ro.tree.std[above] > 0).all())  # the chain ends below the last draw, too
    for place in range(len(ro.leaf)):
        node = int(above[place])
        cond = {name: value[ro.tree.group[node]][None] for name, value in ro.cond.items()}
        x = ro.x[node][None]
        for k in range(int(ro.tree.step[node]), 5):
            here, after = ro.sigmas[k], ro.sigmas[k + 1]
            x = x + (after - here) * model.velocity(x, here[None], cond)
        torch.testing.assert_close(ro.x[ro.leaf[place]], x[0].detach(), atol=1e-5, rtol=1e-5)


def test_later_steps_are_left_out() -> None:
    """Candidates at steps 0 and 1 alone: 7 images a root; no step after them draws anything."""
    plan = candidates(0, steps=5, noise_scale=0.5, branch=3, first=0, last=1)
    assert counts(plan).leaves == 7
    ro = run(plan, cps, model=LinearFlow(), prompts=["a", "b"])
    assert set(ro.tree.step[ro.tree.std > 0].tolist()) == {1, 2}
    assert int((leaf_sigmas(ro, plan.tail) > 0).sum()) * 7 == 6 * len(ro.leaf)
    # without `last` it is the last step with noise
    whole = candidates(0, steps=5, noise_scale=0.5, branch=3, first=1, last=3)
    assert torch.equal(whole.branch, PLAN.branch) and torch.equal(whole.noise, PLAN.noise)


def pair_of(scores: list[float], least: float) -> list[float]:
    """Credit of the candidates of one state: a root, its candidates, a leaf below each."""
    size = len(scores)
    parent = torch.tensor([-1, *[0] * size, *range(1, size + 1)])
    step = torch.tensor([0, *[1] * size, *[2] * size])
    std = torch.tensor([0.0, *[1.0] * size, *[0.0] * size])
    tree = Tree(parent, step, std, torch.zeros_like(parent))
    leaf = torch.arange(size + 1, 2 * size + 1)
    sign = candidate_pairs(torch.tensor(scores), leaf, tree, least=least)
    assert float(sign[0].abs()) == 0 and float(sign[leaf].abs().sum()) == 0
    return sign[1 : size + 1].tolist()


def test_pairs_are_the_published_ones() -> None:
    """The reference's fixtures, made by the published code; 0.4 asks for a gap of .8472979."""
    assert pair_of([20.1, 20.9, 19.7, 20.4], 0.3) == [0, 1, -1, 0]
    assert pair_of([21.0, 21.1, 21.05, 20.95], 0.3) == [0, 0, 0, 0]
    assert pair_of([0.0, 0.84], 0.4) == [0, 0] and pair_of([0.0, 0.85], 0.4) == [-1, 1]
    assert pair_of([math.nan, 2.0, 1.0], 0.3) == [0, 1, -1]


def test_the_loss_has_the_published_numbers() -> None:
    """The reference: log-ratios -.02 and .05 give z -.7 and 1.1031860; .20 is clamped to ln 1.1 and
    has no gradient: z .4531018, loss .4920424. At the base weights ln 2."""
    known = {(-0.02, 0.05): 1.1031860, (0.20, 0.05): 0.4920424, (0.0, 0.0): math.log(2)}
    for (winner, loser), value in known.items():
        now = torch.tensor([winner, loser], dtype=torch.float64, requires_grad=True)
        zero = torch.zeros(2)
        data = loss_input(now, zero, torch.tensor([1.0, -1.0]), segment=torch.tensor([4, 4]))
        data = data._replace(under={"ref": Eval(zero.double(), zero, zero)})
        loss, metrics = step_preference(data)
        assert loss.tolist() == pytest.approx([value] * 2, abs=1e-6)
        loss.sum().backward()
        assert now.grad is not None and (float(now.grad[0]) == 0) == (winner == 0.20)
        assert metrics["clip_frac"].tolist() == [float(winner == 0.20), 0]


def test_siblings_are_one_segment() -> None:
    """Draws from one state have its id; the last step's, leaves and roots have none."""
    ro = made(LinearFlow())
    ids = siblings(ro)
    drawn = (ro.tree.std > 0) & (ro.tree.step < 5)
    assert torch.equal(ids >= 0, drawn) and torch.equal(ids[drawn], ro.tree.parent[drawn])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rewards={red: {fn: toykit.reddish}}", "judges every image as a finished one"),
        ("plan={fn: full, steps: 4, noise_scale: 0.5, ode_last: 1}", "take plan candidates"),
        ("plan.first=3", "0 <= first < 3"),
        ("plan.last=3", "first <= last < that"),
        ("loss.clip=1.0", "clip < 1"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_the_model(
    tmp_path: Path, change: str, message: str
) -> None:
    changes = [
        "model={fn: toykit.unloadable}",
        "plan={fn: candidates, steps: 4, noise_scale: 0.5, branch: 4, first: 1}",
        "train.group=9",
        "credit={fn: candidate_pairs}",
        "segment={fn: siblings}",
        "loss={fn: step_preference}",
    ]
    with pytest.raises(ConfigError, match=message):
        Trainer(toy(tmp_path, *changes, change))


def test_any_reward_may_compare_finished_candidates(tmp_path: Path) -> None:
    """What is refused above is taken with `finish`: a reward of finished images. One iteration
    trains on pairs of siblings alone, a best and a worst one of each state that has them."""
    trainer = Trainer(
        toy(
            tmp_path,
            "plan={fn: candidates, steps: 4, noise_scale: 0.5, branch: 4, first: 1, finish: true}",
            "train.group=9",
            "credit={fn: candidate_pairs, least: 0.01}",
            "segment={fn: siblings}",
            "select={fn: nonzero}",
            "loss={fn: step_preference}",
            "rewards={red: {fn: toykit.reddish}}",
        )
    )
    metrics = trainer.step()
    assert metrics["trained"] > 0 and metrics["trained"] % 2 == 0


def test_the_model_is_a_clip_until_it_learns_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own image embedding at every time at the start; afterwards the time matters,
    also to the reward that is made of the folder that the script writes."""
    from transformers import CLIPTokenizer

    from flowrl.core.shipped_files import resource
    from flowrl.core.types import RewardBatch
    from rewards.step_aware import step_aware

    module = script_module("assets/shapes_step_aware")
    monkeypatch.setattr(module, "WIDTH", 32)
    monkeypatch.setattr(module, "LAYERS", 2)
    tokens = CLIPTokenizer.from_pretrained(resource("assets/shapes-sd3/tokenizer"))
    torch.manual_seed(0)
    model = module.make(tokens).eval()
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        pixels = module.prepared(images)
        known = model.clip.get_image_features(pixels).pooler_output
        for time in (0.0, 700.0):
            found = model.see(pixels, torch.full((2,), time))
            torch.testing.assert_close(found, known, atol=1e-5, rtol=1e-5)
        for part in (*model.parts, model.end):
            part[1].weight.normal_(std=0.3)
    module.save(model, tokens, tmp_path)
    reward: Any = step_aware(path=str(tmp_path), device="cpu")
    both = images[:1].repeat(2, 1, 1, 1)
    batch = RewardBatch(both, ["a circle"] * 2, torch.zeros(2).long(), [{}] * 2, torch.zeros(2))
    same, apart = reward(batch), reward(batch._replace(sigma=torch.tensor([0.0, 0.7])))
    assert float(same[0]) == float(same[1]) == float(apart[0]) != float(apart[1])


@pytest.mark.integration
def test_the_judge_of_shapes_learns_from_right_and_wrong_scenes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each rendered pair the checker calls the first right and the second wrong; half of them
    are estimates of noised ones. Sixty steps on a few of them teach a small model to pick them."""
    import numpy as np
    from transformers import CLIPTokenizer

    from flowrl.core.shipped_files import resource
    from flowrl.evaluation.suites.shapes.checker import check

    module = script_module("assets/shapes_step_aware")
    small = {"PROMPTS": 2, "IMAGES": 2, "WIDTH": 32, "LAYERS": 2, "LR": 3e-2}
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    pairs, rng = module.Pairs(), np.random.default_rng(0)
    records = {record["prompt"]: record for record in pairs.trainer.train_set.records}
    torch.manual_seed(0)
    good, bad, sigma, texts = pairs.rendered(24, 0.5, rng)
    whole = sigma == 0
    assert 6 <= int(whole.sum()) == len(texts) - int(0.5 * len(texts))
    asked = [records[text] for text, plain in zip(texts, whole.tolist(), strict=True) if plain]
    assert bool(check(good[whole], asked).strict.all())
    assert not bool(check(bad[whole], asked).strict.any())
    # the same pairs again and again are learnt
    tokens = CLIPTokenizer.from_pretrained(resource("assets/shapes-sd3/tokenizer"))
    learner = module.Learner(module.make(tokens), tokens)
    for _ in range(60):
        learner.right, learner.seen = 0.0, 0
        learner.fit(good[whole], bad[whole], sigma[whole], [r["prompt"] for r in asked])
    assert learner.right > 0.9 * learner.seen


def test_images_are_resized_without_a_filter() -> None:
    """SPO's lines by hand: the short side to 8 by bicubic interpolation, its overshoot cut off, the
    middle; images of that size already are only normalised, as their processor does."""
    from transformers import CLIPImageProcessorPil

    from rewards.step_aware import prepared

    settings = CLIPImageProcessorPil(
        size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}, image_mean=[0.5] * 3
    )
    images = torch.rand(2, 3, 21, 30, generator=torch.Generator().manual_seed(0)).round()
    small = torch.nn.functional.interpolate(
        images, (8, 11), mode="bicubic", align_corners=False, antialias=False
    )
    std = torch.tensor(settings.image_std)[:, None, None]
    assert float(small.max()) > 1.01
    wanted = (small.clamp(0, 1)[..., 2:10] - 0.5) / std
    torch.testing.assert_close(prepared(images, settings), wanted)
    square = images[..., :8, :8]
    shown = [pixel.permute(1, 2, 0).mul(255).byte().numpy() for pixel in square]
    made = settings(shown, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(prepared(square, settings), made, atol=1e-6, rtol=1e-6)


def test_the_clock_is_the_scheduler_s() -> None:
    """diffusers' own schedule of Stable Diffusion: sigma = s / (a + s) of step t is seen at t."""
    from diffusers import DDIMScheduler

    from rewards.step_aware import times

    made = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    kept = made.alphas_cumprod.double()
    steps = torch.tensor([1, 51, 500, 951])
    a, s = kept[steps].sqrt(), (1 - kept[steps]).sqrt()
    sigma: Tensor = s / (a + s)
    assert times(sigma, "sd").tolist() == steps.tolist()
    assert times(torch.tensor([0.0, 0.25, 1.0]), "flow").tolist() == [0, 250, 999]
