"""The group techniques that are compared with plain GRPO: what each changes in a config."""

from __future__ import annotations

from typing import NamedTuple


class Technique(NamedTuple):
    """What a technique changes. `{low}`, `{high}` and `{steps}` are the ground's own: a clip range,
    a wider one, and the number of trained steps; `{tau}` is OPMD's pull, `{sharp}` how sharply
    pairs are told apart. `{twice}`, `{pairs}` and `{images}` are numbers of prompts: for as many
    images as plain GRPO has with half of its images of each, with two, and with one."""

    name: str
    changes: tuple[str, ...]
    # what plain GRPO has as well, where the technique needs it
    shared: tuple[str, ...] = ()


CLIP = "clip_low: {low}, clip_high: {low}"
TREE = "plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [1, 2], ode_last: 1}"
# images of a prompt at the same noise levels and with the same noise, to compare how well they fit
ALIKE = "likelihood={fn: forward, draws: 2, times: grid, last: {steps}, shared: true}"
PROMPT = "segment={fn: prompt}"
TECHNIQUES = {
    # no techniques: what some of those below bring along, by itself
    "wide": Technique(
        "none: clip range 0.2", ("loss={fn: ppo_clip, clip_low: 0.2, clip_high: 0.2}",)
    ),
    "forward": Technique("none: forward likelihood", (ALIKE,)),
    "forward_wide": Technique(
        "none: both", ("loss={fn: ppo_clip, clip_low: 0.2, clip_high: 0.2}", ALIKE)
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
    "p3o": Technique(
        "P3O, pairs", ("credit={fn: mean_centred}", "train.group=2", "train.prompts={pairs}")
    ),
    # a tree, whose shared steps have the mean of what follows
    "salt": Technique("SALT, on a tree", (TREE,)),
    "stratified": Technique("Stratified GRPO", ("credit={fn: strata_norm, blend: 0.5}",), (TREE,)),
    # aggregates
    "gdpo": Technique("GDPO", ("aggregate={fn: gdpo}",), ("rewards.soft.weight=1.0",)),
    "canon": Technique(
        "CANON",
        ("aggregate={fn: conditional, by: soft, inter: 0.7}", "credit={fn: mean_centred}"),
    ),
    "care": Technique(
        "GRPO-CARE", ("aggregate={fn: consistency_bonus, right: strict, sure: soft}",)
    ),
    "spectral": Technique("Spectral", ("aggregate={fn: tie_break, by: soft}",)),
    "medloc": Technique(
        "MedLoc-R1",
        (
            "aggregate={fn: tightening, reward: soft, start: 0.1, target: 0.5, window: 4}",
            "rewards.soft.weight=1.0",
            "rewards.strict.weight=0.0",
        ),
    ),
    # losses
    "clip_higher": Technique(
        "DAPO, clip-higher", ("loss={fn: ppo_clip, clip_low: {low}, clip_high: {high}}",)
    ),
    "dcpo_bounds": Technique("DCPO, its bounds", ("loss={fn: density_clip, " + CLIP + "}",)),
    "reg_grpo": Technique("Reg-GRPO", ("loss={fn: group_regression, eps: {low}}", PROMPT)),
    "rec": Technique("REC-OneSide-NoIS", ("loss={fn: one_sided, " + CLIP + "}",)),
    "opmd": Technique("OPMD", ("loss={fn: opmd, tau: {tau}}",)),
    "aspo": Technique("ASPO", ("loss={fn: asymmetric_ratio, " + CLIP + "}",)),
    "ce_gppo": Technique(
        "CE-GPPO", ("loss={fn: kept_gradient, " + CLIP + ", keep_low: 0.5, keep_high: 0.5}",)
    ),
    "dhpo": Technique(
        "DHPO",
        (
            "loss={fn: hybrid_ratio, " + CLIP + ", image_low: {low}, image_high: {low}}",
            "segment={fn: fixed, sizes: [{steps}]}",
        ),
    ),
    "etr": Technique("ETR", ("loss={fn: elastic_clip, " + CLIP + "}",)),
    "trpa": Technique("TRPA", ("loss={fn: level_preference}", ALIKE, PROMPT)),
    "simpo": Technique(
        "SimPO",
        (
            "loss={fn: simple_preference, beta: {sharp}}",
            "credit={fn: best_worst}",
            "select={fn: nonzero}",
            ALIKE,
            PROMPT,
        ),
        # pairs of equal images teach nothing, and an iteration of such alone is an error
        ("rewards.soft.weight=1.0",),
    ),
    # which images are trained, and how they are averaged
    "cppo": Technique("CPPO", ("select={fn: largest, share: 0.5}",)),
    "d3s": Technique("D3S", ("select={fn: spread, keep: 4}",)),
    "balanced": Technique(
        "Balanced Aggregation",
        ("select=[{fn: largest, share: 0.5}, {fn: sign_balance}]",),
        # so that images have differently many trained draws
        (TREE, "select={fn: largest, share: 0.5}"),
    ),
    # which prompts are drawn
    "mmr1": Technique("MMR1", ("sampler={fn: variance_weighted}",)),
    "vade": Technique("VADE", ("sampler={fn: difficulty_bandit}",)),
    "knapsack": Technique(
        "Knapsack RL", ("sampler={fn: knapsack}", "train.group=4", "train.prompts={twice}")
    ),
    "prompt_replay": Technique("Prompt Replay", ("sampler={fn: prompt_replay, cooldown: 2}",)),
    "fg_expo": Technique(
        "FG-ExPO, its curriculum", ("sampler={fn: gaussian_curriculum, width: 0.2}",)
    ),
    "refill": Technique("DAPO, dynamic sampling", ("train.refill=3",)),
}
