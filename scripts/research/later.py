"""Comparisons on the present base model, whose result files fill method pages and compare.md."""

from __future__ import annotations

from typing import NamedTuple


class Later(NamedTuple):
    """A comparison on the present base model."""

    name: str  # of its marks in docs/compare.md
    file: str
    where: str  # as a method page says it
    rivals: bool = True  # its configs are to be ranked; else each has a control of its own


BETTER = "on the test prompts, at the better of two rates"
EDITS = "on the test edits, at its own rate"
STUDENT = "on the test prompts, in four steps, at its own rate"
LATER = (
    Later("families", "compare-families.json", BETTER),
    Later("own rates", "compare-own-rates.json", "on the test prompts, at its own rate"),
    Later("steps", "compare-steps.json", BETTER),
    Later("gradients", "compare-gradients.json", BETTER),
    Later("ram", "compare-ram.json", "on the test prompts, at its own rate"),
    Later("ddpo", "compare-ddpo.json", "on the test prompts, at its own rate"),
    Later("spo", "compare-spo.json", "on the test prompts, at its own rate"),
    Later("find", "compare-find.json", "on the test prompts, at its own rate"),
    Later("stepwise", "compare-stepwise.json", BETTER),
    Later("dense", "compare-dense.json", BETTER),
    Later("spo finished", "compare-spo-finished.json", "on the test prompts, at its own rate"),
    Later("spo latent", "compare-spo-latent.json", "on the test prompts, at its own rate"),
    Later(
        "spo latent fixed", "compare-spo-latent-fixed.json", "on the test prompts, at its own rate"
    ),
    Later("dance", "compare-dance.json", "on the test prompts, at its own rate"),
    Later("direct align", "compare-direct-align.json", "on the test prompts, at its own rate"),
    Later("slas", "compare-slas.json", "on the test prompts, at its own rate", rivals=False),
    Later("uni grpo", "compare-uni-grpo.json", "on the test prompts, at its own rate"),
    Later("tdm r1", "compare-tdm-r1.json", STUDENT),
    Later("tdm r1 own", "compare-tdm-r1-own.json", STUDENT),
    Later("draft lv", "compare-draft-lv.json", BETTER),
    Later("stepwise five", "compare-stepwise-five.json", BETTER),
    Later("longer", "compare-longer.json", "on the test prompts, at its own rate"),
    Later("gaussian", "compare-gaussian.json", "on the test prompts, at its own rate"),
    Later("offline", "compare-dpo-offline.json", "on the test prompts, at its own rate"),
    Later("find own", "compare-find-own.json", "on the prompts that it trains, at its own rate"),
    Later("edits", "compare-paco-rl.json", EDITS),
    Later("crd", "compare-crd.json", "on the test prompts, at its own rate"),
    Later("gardo", "compare-gardo.json", "on the test prompts, at its own rate"),
    Later("dina", "compare-dina.json", "on the test prompts, at its own rate"),
    Later("narrow", "compare-narrow.json", "on the prompts that it trains, at its own rate"),
    Later("own noise", "compare-own-noise.json", "on the prompts that it trains, at its own rate"),
    Later("imitation", "compare-imitation.json", "on the test prompts, at its own rate"),
    Later("rwr", "compare-rwr.json", "on the test prompts, at its own rate"),
    Later("combinations", "compare-combinations.json", "on the test prompts, at its own rate"),
    Later("distillation", "compare-opd.json", BETTER),
)
# looks at the test list that no comparison's file holds: spo-latent-longer.json has three
FURTHER = {"spo_latent": 3}
