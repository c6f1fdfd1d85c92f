"""Parts of a method that are fine by themselves and cannot work together are refused before a
weight is read: a loss and a likelihood, a plan and one noise for all, a model and its levels."""

from __future__ import annotations

from pathlib import Path

import pytest
from toykit import axes, toy

from flowrl.core.errors import ConfigError
from flowrl.models.toy import LinearFlow
from flowrl.models.unet import UNetModel
from flowrl.training.rehearsal import check_plan
from flowrl.training.trainer import Trainer

CLIP = "clip_low: 0.1, clip_high: 0.1"
ODE = "plan={fn: ode, steps: 4, order: 1}"
PPO = f"loss={{fn: ppo_clip, {CLIP}}}"
ASCENT = "loss={fn: reward_ascent}"
PAIRS = ("segment={fn: prompt}", "select={fn: nonzero}", "credit={fn: best_worst}")
NO_LOG_PROB = {
    "draft": ODE,
    "draft_lv": ODE,
    "refl": ODE,
    "align_prop": ODE,
    "align_prop_each": ODE,
    "generated": "plan={fn: few_step, steps: 4}",
}
OF_LOG_PROBS = {
    f"ppo_clip, {CLIP}": (),
    f"one_sided, {CLIP}": (),
    "opmd, tau: 1.0": (),
    "ratio_regression, scale: 1.0": (),
    "awm": (),
    "regression": ("credit={fn: best_of}",),
    "diffusion_dpo, beta: 10.0": PAIRS,
    "simple_preference, beta: 1.0": PAIRS,
    "step_preference": ("segment={fn: prompt}",),
    "bound_gradient": (),
}
PRIOR = ("likelihood={fn: prior}", ODE)
AWM = ("likelihood={fn: forward, draws: 2}", "loss={fn: awm}", "plan={fn: ode, steps: 4}")
ALIKE = ("train.same_noise=true", "plan={fn: ode, steps: 4}")


def refuse(folder: Path, words: str, *changes: str) -> None:
    """Expect a ConfigError that says `words`, before the model is made."""
    given = ("rewards.red.fn=toykit.warmth", "model={fn: toykit.unloadable}", *changes)
    with pytest.raises(ConfigError, match=words):
        Trainer(toy(folder, *given))


@pytest.mark.parametrize("likelihood", NO_LOG_PROB)
@pytest.mark.parametrize("loss", OF_LOG_PROBS)
def test_a_loss_of_log_probs_needs_some(tmp_path: Path, loss: str, likelihood: str) -> None:
    """The message names both, and what fits."""
    fits = "tdm or tdm_r1" if likelihood == "generated" else "reward_ascent"
    words = f"{loss.split(',')[0]}: does not depend on what likelihood {likelihood}, .*{fits}"
    parts = (f"likelihood={{fn: {likelihood}}}", NO_LOG_PROB[likelihood])
    refuse(tmp_path, words, *parts, f"loss={{fn: {loss}}}", *OF_LOG_PROBS[loss])


@pytest.mark.parametrize("likelihood", [name for name in NO_LOG_PROB if name != "generated"])
def test_a_loss_of_images_depends_on_them(tmp_path: Path, likelihood: str) -> None:
    """The rehearsed images and their reward know the weights, also through a random path."""
    changes = (f"likelihood={{fn: {likelihood}}}", NO_LOG_PROB[likelihood], ASCENT)
    assert check_plan(toy(tmp_path, *changes)).states > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("loss={fn: nft, beta: 1.0}",), "nft: compares velocities"),
        (("loss={fn: ram}",), "ram: compares velocities"),
        (("loss={fn: dgpo, beta: 1.0}", "segment={fn: prompt}"), "dgpo: compares velocities"),
        (
            ("loss={fn: crd}", "segment={fn: prompt}", "slow={fn: ramp, slope: 0.1, limit: 0.5}"),
            "crd: compares velocities",
        ),
        ((f"loss={{fn: guard, {CLIP}}}",), "guard: divides by what a step takes off"),
        (("loss={fn: velocity_mask, most: 0.1}",), "velocity_mask: the likelihood has no velocity"),
        ((ASCENT,), "reward_ascent: the likelihood makes no images"),
        ((PPO, "kl={fn: velocity_kl, beta: 0.1}"), "velocity_kl: the likelihood has no velocity"),
        ((PPO, "kl={fn: norm_guard, beta: 0.1}"), "norm_guard: the likelihood has no velocity"),
    ],
)
def test_initial_noise_has_no_velocity(
    tmp_path: Path, changes: tuple[str, ...], words: str
) -> None:
    refuse(tmp_path, words, *PRIOR, *changes)


@pytest.mark.parametrize(
    "options", ["", ", own: true, start: noise, spread: 0.1", ", reads: direction"]
)
@pytest.mark.parametrize("spread", ["false", "true"])
def test_every_prior_is_rehearsed(tmp_path: Path, options: str, spread: str) -> None:
    """With a mean of each prompt, one that reads the prompt, and a std that is learned."""
    likelihood = f"likelihood={{fn: prior, learn_spread: {spread}{options}}}"
    kl = "kl={fn: noise_moments, beta: 0.1}"
    assert check_plan(toy(tmp_path, likelihood, ODE, PPO, kl)).states > 0


@pytest.mark.parametrize("changes", [(), AWM, ("likelihood={fn: draft}", ODE, ASCENT)])
def test_moments_of_noise_are_those_of_a_prior(tmp_path: Path, changes: tuple[str, ...]) -> None:
    words = "noise_moments: .*take likelihood prior"
    refuse(tmp_path, words, "kl={fn: noise_moments, beta: 0.1}", *changes)


@pytest.mark.parametrize("changes", [AWM, (*AWM[:2], "plan={fn: few_step, steps: 4}")])
def test_images_of_a_prompt_have_to_differ(tmp_path: Path, changes: tuple[str, ...]) -> None:
    """From one noise, by a plan that adds none, they are one image."""
    refuse(tmp_path, "train.same_noise: all images .* set it to false", *changes, ALIKE[0])


def test_one_noise_for_all_is_fine_where_steps_have_noise(tmp_path: Path) -> None:
    """And where each prompt has a single image anyway."""
    noisy = ("likelihood={fn: forward, draws: 2}", "loss={fn: awm}", ALIKE[0])
    assert check_plan(toy(tmp_path, *noisy)).states > 0
    single = (
        "train.group=1",
        "credit={fn: reward_softmax, temperature: 1.0}",
        "loss={fn: regression}",
    )
    assert check_plan(toy(tmp_path, *AWM, ALIKE[0], *single)).states > 0


GRID = ("likelihood={fn: forward, times: grid}", *AWM[1:])
SAYS_LEVELS = "forward: draws noise levels .*times {}.*set likelihood.times to grid"
ALIGN = ("likelihood={fn: direct_align}", "plan={fn: ode, steps: 4}", "train.updates=1", ASCENT)
REDNESS = ("rewards={red: {fn: toykit.redness}}", "eval.score=red")
# what a model that knows the levels of its training timesteps alone says; "": it takes it
WHOLE: list[tuple[tuple[str, ...], str]] = []
for times in ("uniform", "logit_normal", "power_law", "grid", "any_steps"):
    said = "" if times in ("grid", "any_steps") else SAYS_LEVELS.format(times)
    WHOLE.append(((f"likelihood={{fn: forward, times: {times}}}", *AWM[1:]), said))
WHOLE += [
    # SA-Solver's grid halves the last level above 0
    ((*GRID, "plan={fn: sa_solver, steps: 4}"), "sa_solver: samples at noise levels between"),
    ((*GRID, "plan={fn: ode, steps: 4, order: 2}"), ""),
    ((*ALIGN, *REDNESS), "direct_align: takes steps between noise levels"),
]


@pytest.mark.parametrize(("changes", "words"), WHOLE)
def test_a_model_of_whole_timesteps_is_asked_at_its_own_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...], words: str
) -> None:
    assert UNetModel.discrete_levels
    Trainer(toy(tmp_path, *changes))  # any other model takes them all
    monkeypatch.setattr(LinearFlow, "discrete_levels", True, raising=False)
    if not words:
        Trainer(toy(tmp_path, *changes))
        return
    with pytest.raises(ConfigError, match=words):
        Trainer(toy(tmp_path, *changes))


def test_previews_have_no_latents(tmp_path: Path) -> None:
    """Also for a reward that is only watched: it is asked all the same."""
    scout = ("scout={images: 8, steps: 2}", *AWM)
    for weight in (1.0, 0.0):
        watched = f"rewards.lat={{fn: toykit.of_latents, weight: {weight}}}"
        refuse(tmp_path, r"scout: rewards.lat .*judges latents", *scout, watched)


def test_a_credit_of_the_noise_needs_one_that_is_learned(tmp_path: Path) -> None:
    words = "value_baseline judges the initial noise, and likelihood reverse has none"
    refuse(tmp_path, words, "credit={fn: value_baseline}")


# ------------------------------------------------------------------- settings of the other families

WRONG = [
    ("shapes/diffusion_nft", ["loss.beta=0"], "nft: .*beta > 0"),
    ("shapes/dgpo", ["segment=null"], "must be in one network call"),
    ("shapes/crd", ["segment=null"], "must be in one network call"),
    ("shapes/awm", ["likelihood={fn: forward, low: 0.5, high: 1.2}"], "0 < low < high < 1"),
    ("shapes/awm", ["likelihood={fn: forward, low: -0.1}"], "0 < low < high < 1"),
    ("shapes/awm", ["likelihood={fn: forward, low: 0}"], "low=0.0, high=None; leave out"),
    ("shapes/ram", ["likelihood.high=1"], "low=None, high=1.0; leave out"),
    ("shapes/diffusion_dpo_offline", ["likelihood.low=0"], "low=0.0, high=None; leave out"),
    ("shapes/awm", ["likelihood.last=9"], "it has steps 0 to"),
    ("shapes/diffusion_nft", ["loss.labels=some"], "loss.labels"),
    ("shapes/refl", ["rewards.red.fn=toykit.reddish"], "cannot be differentiated"),
    (
        "shapes/spo",
        ["rewards={red: {fn: toykit.reddish}}"],
        "judges every image as a finished one",
    ),
    # penalties and losses of a step, under a likelihood without a std; velocities under one without
    (
        "shapes/diffusion_nft",
        ["kl={fn: transition_kl, beta: 0.1}"],
        "transition_kl: compares steps",
    ),
    (
        "shapes/diffusion_nft",
        ["kl={fn: early_mean_gap, beta: 1, steps: 2}"],
        "early_mean_gap: comp",
    ),
    ("shapes/awm", ["loss={fn: guard, clip_low: 0.1, clip_high: 0.1}"], "guard: compares steps"),
    ("shapes/awm", ["loss={fn: divergence_mask, most: 1}"], "divergence_mask: compares steps"),
    ("shapes/flow_grpo_full", ["loss={fn: nft, beta: 1}"], "nft: compares velocities"),
    ("shapes/flow_grpo_full", ["loss={fn: ram}"], "ram: compares velocities"),
    ("shapes/grpo_guard", ["segment={fn: fixed, sizes: [1, 2]}"], "guard: its ratio is that of a"),
    ("shapes/crd", ["likelihood.shared_times=false"], "likelihood.shared_times=true"),
    (
        "shapes/dense_grpo",
        ["transition.fn=stepwise_sde", "plan.noise_scale=1.5"],
        "from 0 to 1, got",
    ),
    ("shapes/pref_grpo", ["rewards={wins: {fn: win_rate, judge: {fn: nobody}}}"], "nobody"),
]


@pytest.mark.parametrize(("name", "changes", "words"), WRONG)
def test_it_is_refused_before_the_model(
    tmp_path: Path, name: str, changes: list[str], words: str
) -> None:
    refuse(tmp_path, words, *axes(name), *changes)
