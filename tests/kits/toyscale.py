"""Overrides that put the methods of configs/shapes on the toy."""

from __future__ import annotations

# a beta belongs to the size of the errors, and the toy's are about a hundred times an image model's
TOY_SCALE = {"shapes/dgpo": ["loss.beta=1.0"], "shapes/diffusion_dpo": ["loss.beta=1.0"]}
# the toy's noise is learned far from an image model's size, and its prompt vector has another name
FAST = ["likelihood.learn_spread=false", "optimizer.lr=0.05", "credit.lr=0.01"]
TOY_SCALE["shapes/find"] = [*FAST, "likelihood.reads=text"]
TOY_SCALE["shapes/find_own"] = FAST
TOY_SCALE["shapes/find_narrow"] = FAST
TOY_SCALE["shapes/prior_grpo"] = ["likelihood.reads=text", "optimizer.lr=0.05"]
TOY_SCALE["shapes/awm"] = ["optimizer.lr=0.03", "kl.ref=0.02"]
TOY_SCALE["shapes/dina_lrm"] = TOY_SCALE["shapes/awm"]  # the same axes
TOY_SCALE["shapes/awm_tree"] = ["optimizer.lr=0.06"]
TOY_SCALE["shapes/dpo_siblings"] = ["loss.beta=1.0"]
TOY_SCALE["shapes/spo_finished"] = ["credit.least=0.001", "optimizer.lr=0.05"]
# no judge of states there: candidates are finished
TOY_SCALE["shapes/drm"] = ["plan.finish=true", "credit.eps=0.0001", "optimizer.lr=0.05"]
# other tags and rewards, of which one is watched; ranges there are small
BY_TAG = "aggregate={fn: by_field, weights: {even: {red: 0.8}, odd: {red: 1.2}}}"
TOY_SCALE["shapes/qwen_recipe"] = [BY_TAG, "optimizer.lr=0.03"]
TOY_SCALE["shapes/qwen_recipe"] += ["select={fn: reward_range, low: 0.001, high: 1.0}"]
TOY_SCALE["shapes/zo_rank_sgd"] = ["optimizer.lr=0.05"]
TOY_SCALE["shapes/tdm_r1"] = ["fake.lr=0.01", "surrogate.lr=0.01", "surrogate.beta=1.0"]
TOY_SCALE["shapes/tdm_r1"] += ["surrogate.clip=0.2", "surrogate.far=5.0"]
TOY_SCALE["shapes/tdm_r1"] += ["surrogate.alone=0", "surrogate.least=0.0", "loss.least=0.0"]
TOY_SCALE["shapes/slas"] = TOY_SCALE["shapes/awm"]
# the toy's field has to become longer and move far to become red
TOY_SCALE["shapes/norm_guard"] = ["kl.beta=0.001"]
TOY_SCALE["shapes/uni_grpo"] = ["kl.beta=0.01", "optimizer.lr=0.03"]
# rewards that a method asks for by name
TOY_SCALE["shapes/gardo"] = ["rewards.novelty={fn: toykit.warmth, weight: 0}"]
SETTING = [
    "model={fn: toykit.linear, channels: 2}",
    "image.height=8",
    "image.width=8",
    "train.prompts=4",
]
SETTING += ["train.ema=0", "eval.weights=current", "train.micro_batch=64", "train.rollout_batch=64"]
SETTING += ["rewards={red: {fn: toykit.warmth}, strict: {fn: toykit.reddish, weight: 0}}"]
