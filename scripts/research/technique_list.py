"""The group techniques that are compared on equal budgets: what each changes in a config, and the
control that it is compared with.

A config is that of the control with the technique's own changes, so the control has all that the
technique brings along without being it: a tree, a likelihood, a group's size, a second reward. A
technique that lets images beyond the clip range teach, or has no such range, has the control whose
range is too wide to act; otherwise the wider range alone would pass for the technique.
"""

from __future__ import annotations

from typing import NamedTuple


class Technique(NamedTuple):
    """What a technique changes. `{low}`, `{high}` and `{steps}` are the ground's own: a clip range,
    a wider one, and the number of trained steps; `{tau}` is OPMD's pull, `{sharp}` how sharply
    pairs are told apart. `{twice}`, `{pairs}` and `{images}` are numbers of prompts: for as many
    images as plain GRPO has with half of its images of each, with two, and with one."""

    name: str
    changes: tuple[str, ...]
    # what it is compared with: a name of CONTROLS, or a row that is no technique
    control: str = "plain"


CLIP = "clip_low: {low}, clip_high: {low}"
WIDE = "loss={fn: ppo_clip, clip_low: 0.2, clip_high: 0.2}"
TREE = "plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [1, 2], ode_last: 1}"
# images of a prompt at the same noise levels and with the same noise, to compare how well they fit
ALIKE = "likelihood={fn: forward, draws: 2, times: grid, last: {steps}, shared: true}"
PROMPT = "segment={fn: prompt}"
SOFT = "rewards.soft.weight=1.0"
# of two or three trained ones
ONE_DRAW = "select={fn: fraction, share: 0.5}"
# controls that are no rows of their own; their changes are complete
CONTROLS = {
    "plain": Technique("plain", ()),
    "pairs": Technique("groups of 2", ("train.group=2", "train.prompts={pairs}")),
    "fours": Technique("groups of 4", ("train.group=4", "train.prompts={twice}")),
    "soft": Technique("both rewards", (SOFT,)),
    # so that images have differently many trained draws
    "tree_half": Technique(
        "a tree, half of its images", (TREE, "select={fn: largest, share: 0.5}")
    ),
}
TECHNIQUES = {
    # no techniques: what some of those below bring along, by itself; they are controls as well
    "wide": Technique("none: clip range 0.2", (WIDE,)),
    "forward": Technique("none: forward likelihood", (ALIKE,)),
    "forward_wide": Technique("none: forward, clip range 0.2", (WIDE, ALIKE)),
    "tree": Technique("none: a tree", (TREE,)),
    # fewer trained draws per iteration pay for more iterations
    "one_draw": Technique("none: one draw of each image, by chance", (ONE_DRAW,)),
    "one_draw_wide": Technique(
        "none: one draw of each image by chance, clip range 0.2", (ONE_DRAW,), "wide"
    ),
    "best_worst": Technique(
        "none: forward, clip range 0.2, best and worst image",
        # pairs of equal images teach nothing, and an iteration of such alone is an error
        ("credit={fn: best_worst}", "select={fn: nonzero}", SOFT),
        "forward_wide",
    ),
    # credits
    "dr_grpo": Technique("Dr.GRPO", ("credit={fn: mean_centred}",)),
    "asymre": Technique("AsymRE", ("credit={fn: mean_centred, lower: 0.1}",)),
    "mc_grpo": Technique("MC-GRPO", ("credit={fn: median_norm}", "select={fn: nonzero}")),
    "ngrpo": Technique("NGRPO", ("credit={fn: virtual_best}",)),
    "bnpo": Technique("BNPO", ("credit={fn: beta_norm}",)),
    "a_grae": Technique("A-GRAE", ("credit={fn: difficulty_balanced}",)),
    "slas": Technique("SLAS", ("credit={fn: signed_power}",)),
    "dcpo": Technique("DCPO", ("credit={fn: smooth_norm}",)),
    "riskpo": Technique("RiskPO", ("credit={fn: risk_bundles, size: 4}",)),
    "v_05": Technique("V_0.5", ("credit={fn: shrunken_mean}",)),
    "unlikely": Technique("Rewarding the Unlikely", ("credit={fn: unlikely_norm}",)),
    "copo": Technique("COPO", ("credit={fn: consistency_blend}",)),
    "single_stream": Technique(
        "Single-stream", ("credit={fn: single_stream}", "train.group=1", "train.prompts={images}")
    ),
    "p3o": Technique("P3O, pairs", ("credit={fn: mean_centred}",), "pairs"),
    # the plan `tree` gives shared steps the mean of what follows: nothing is left to change
    "salt": Technique("SALT, on a tree", (), "tree"),
    "stratified": Technique("Stratified GRPO", ("credit={fn: strata_norm, blend: 0.5}",), "tree"),
    # aggregates
    "gdpo": Technique("GDPO", ("aggregate={fn: gdpo}",), "soft"),
    "canon": Technique(
        "CANON",
        ("aggregate={fn: conditional, by: soft, inter: 0.7}", "credit={fn: mean_centred}"),
    ),
    "care": Technique(
        "GRPO-CARE", ("aggregate={fn: consistency_bonus, right: strict, sure: soft}",)
    ),
    "spectral": Technique("Spectral", ("aggregate={fn: tie_break, by: soft}",)),
    # its threshold ends where `strict` has its own, so plain GRPO is its control
    "medloc": Technique(
        "MedLoc-R1",
        (
            "aggregate={fn: tightening, reward: soft, start: 0.1, target: 0.5, window: 4}",
            SOFT,
            "rewards.strict.weight=0.0",
        ),
    ),
    # losses
    "clip_higher": Technique(
        "DAPO, clip-higher", ("loss={fn: ppo_clip, clip_low: {low}, clip_high: {high}}",), "wide"
    ),
    "dcpo_bounds": Technique(
        "DCPO, its bounds", ("loss={fn: density_clip, " + CLIP + "}",), "wide"
    ),
    "reg_grpo": Technique("Reg-GRPO", ("loss={fn: group_regression, eps: {low}}", PROMPT), "wide"),
    "rec": Technique("REC-OneSide-NoIS", ("loss={fn: one_sided, " + CLIP + "}",)),
    "opmd": Technique("OPMD", ("loss={fn: opmd, tau: {tau}}",), "wide"),
    "aspo": Technique("ASPO", ("loss={fn: asymmetric_ratio, " + CLIP + "}",)),
    "ce_gppo": Technique(
        "CE-GPPO",
        ("loss={fn: kept_gradient, " + CLIP + ", keep_low: 0.5, keep_high: 0.5}",),
        "wide",
    ),
    "dhpo": Technique(
        "DHPO",
        (
            "loss={fn: hybrid_ratio, " + CLIP + ", image_low: {low}, image_high: {low}}",
            "segment={fn: fixed, sizes: [{steps}]}",
        ),
        "wide",
    ),
    "etr": Technique("ETR", ("loss={fn: elastic_clip, " + CLIP + "}",), "wide"),
    "trpa": Technique("TRPA", ("loss={fn: level_preference}", PROMPT), "forward_wide"),
    "simpo": Technique(
        "SimPO", ("loss={fn: simple_preference, beta: {sharp}}", PROMPT), "best_worst"
    ),
    # penalties, where a clip range does not hold the run back already
    "unigrpo": Technique("UniGRPO, its velocity KL", ("kl={fn: velocity_kl, beta: 0.1}",), "wide"),
    # made for losses of the forward process, which lengthen velocities
    "norm_guard": Technique("NormGuard", ("kl={fn: norm_guard, beta: 0.1}",), "forward_wide"),
    # which images are trained, and how they are averaged
    "cppo": Technique("CPPO", ("select={fn: largest, share: 0.5}",)),
    "d3s": Technique("D3S", ("select={fn: spread, keep: 4}",)),
    # the three that train fewer images of a prompt, where no clip range holds the run back
    "mc_grpo_wide": Technique(
        "MC-GRPO, clip range 0.2", ("credit={fn: median_norm}", "select={fn: nonzero}"), "wide"
    ),
    "cppo_wide": Technique("CPPO, clip range 0.2", ("select={fn: largest, share: 0.5}",), "wide"),
    "d3s_wide": Technique("D3S, clip range 0.2", ("select={fn: spread, keep: 4}",), "wide"),
    "balanced": Technique(
        "Balanced Aggregation",
        ("select=[{fn: largest, share: 0.5}, {fn: sign_balance}]",),
        "tree_half",
    ),
    # which prompts are drawn
    "mmr1": Technique("MMR1", ("sampler={fn: variance_weighted}",)),
    "vade": Technique("VADE", ("sampler={fn: difficulty_bandit}",)),
    "knapsack": Technique("Knapsack RL", ("sampler={fn: knapsack}",), "fours"),
    "prompt_replay": Technique("Prompt Replay", ("sampler={fn: prompt_replay, cooldown: 2}",)),
    "fg_expo": Technique(
        "FG-ExPO, its curriculum", ("sampler={fn: gaussian_curriculum, width: 0.2}",)
    ),
    "refill": Technique("DAPO, dynamic sampling", ("train.refill=3",)),
}
