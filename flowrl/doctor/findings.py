"""What the doctor can find: a name, what it means, what to change; and a checkup in words, tables
and plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flowrl.core.tables import text_table


class Advice(NamedTuple):
    """One entry of the catalogue."""

    means: str
    change: str


CATALOGUE: dict[str, Advice] = {
    # before anything is loaded
    "env/version": Advice(
        "an installed package is older or newer than flowrl needs",
        "install the version that is named",
    ),
    "env/package": Advice(
        "another project's package `flowrl` is installed too", "uninstall it, as the message says"
    ),
    "env/disk": Advice(
        "the checkpoints will not fit on the disk",
        "free some space, or lower `checkpoint.keep`",
    ),
    "batch/plan": Advice(
        "the plan cannot be trained with these numbers", "change the numbers that are named"
    ),
    "batch/updates": Advice(
        "an iteration makes fewer optimizer steps than `train.updates` says, or one far smaller",
        "take a `train.updates` that divides the states of an iteration",
    ),
    "batch/repeats": Advice(
        "an iteration takes more prompts than the list has, so some come twice",
        "lower `train.prompts`, or add prompts",
    ),
    "memory/card": Advice(
        "a phase needs more memory than there is", "take the profile that is named"
    ),
    "prompts/missing": Advice(
        "a prompt list is not there, or broken", "put the file there, or change `prompts`"
    ),
    "prompts/duplicates": Advice(
        "training prompts come several times, so they count more than others",
        "take the copies out of the list, or weigh tasks by `train.balance`",
    ),
    "prompts/leak": Advice(
        "held-out prompts are trained on, so their score says nothing about new prompts",
        "take them out of one of the lists",
    ),
    "prompts/cut": Advice(
        "the end of some prompts is read by no text encoder",
        "shorten them, or raise `max_sequence_length` where T5 reads",
    ),
    "start/fails": Advice("the run cannot start", "do what the message says"),
    # the model
    "text/swapped": Advice(
        "a prompt gets the text encoding of another one",
        "look at the order of rows in the model's `encode`, and at its cache",
    ),
    "parity/shift": Advice(
        "the sigma grid has another time shift than the pipeline",
        "use the shift of the pipeline's scheduler",
    ),
    "parity/grid": Advice(
        "the sigma grid is not the pipeline's", "compare the model's `sigmas` with the scheduler"
    ),
    "parity/time-rounding": Advice(
        "the network is asked about times that are rounded to bfloat16; the pipeline's are not",
        "compute sigma times 1000 in float32, and round where the pipeline does",
    ),
    "parity/time": Advice(
        "the network is asked about other times than in the pipeline",
        "compare how the model and the pipeline make a timestep of a sigma",
    ),
    "parity/text": Advice(
        "the network reads other text embeddings than in the pipeline",
        "compare `max_sequence_length`, `t5` and the negative prompt with the pipeline's call",
    ),
    "parity/sign": Advice(
        "the velocity points the other way than the pipeline's",
        "flowrl's velocity is `eps - x0`: change the sign",
    ),
    "parity/guidance-swapped": Advice(
        "guidance leads towards the negative prompt: its two branches are swapped",
        "the result is u + scale (c - u), c with the prompt",
    ),
    "parity/guidance": Advice(
        "guidance acts with another scale than the pipeline's",
        "compare the scale, and how the two branches are mixed",
    ),
    "parity/velocity": Advice(
        "the velocity is not the pipeline's, though times and texts are",
        "compare what else the network is given: guidance embedding, positions, dtype",
    ),
    "parity/latents": Advice(
        "samples without noise end elsewhere than the pipeline's",
        "compare the solver of each step, and the scale of the initial noise",
    ),
    "parity/vae": Advice(
        "the same latents decode to other images than in the pipeline",
        "compare `scaling_factor` and `shift_factor` of the VAE, and what `decode` does with them",
    ),
    # noise and its density
    "grid/first-sigma": Advice(
        "the grid starts just below 1, where the noise of an SDE explodes",
        "let the grid start at exactly 1, or put no noise on the first step",
    ),
    "transition/euler": Advice(
        "at noise scale 0 the transition is not the Euler step",
        "mend the transition: its mean has to be x + (sigma_next - sigma) v there",
    ),
    "std/last": Advice(
        "there is noise on the last step: it stays in the image and is never trained",
        "set `plan.ode_last=1`, or end the window one step earlier",
    ),
    "std/huge": Advice(
        "a draw has a std above 2, more than all the noise of a step",
        "lower `plan.noise_scale`, or keep noise off this step",
    ),
    "std/draws": Advice(
        "draws do not have the std that they are scored with",
        "mend the transition or what draws from it, unless the plan stretches noise on purpose",
    ),
    "logprob/std": Advice(
        "log-probs are not those of a Gaussian with the transition's mean and std",
        "compare the std in the log-prob with the one that noise is drawn with",
    ),
    "seeds/same": Advice(
        "different seeds give the same noise", "draw from the generator that the keys give"
    ),
    "seeds/random": Advice(
        "the same seed gives other noise the second time",
        "draw from the generator of the prompt, not from the global one",
    ),
    # the ratio
    "ratio/random": Advice(
        "the network answers differently when it is asked twice: dropout, or another random layer",
        "switch it off: `network.eval()`, dropout 0",
    ),
    "ratio/grad-mode": Advice(
        "the network answers differently when a gradient is wanted",
        "look for code that depends on grad mode; with `runtime.compile`, compile one graph",
    ),
    "ratio/batch-shape": Advice(
        "a row of the network depends on how many rows are beside it",
        "make `train.rollout_batch` equal to `train.micro_batch`, or take `model.dtype: float32`",
    ),
    "ratio/time": Advice(
        "training asks the network about another time than sampling did",
        "round times in one place for both",
    ),
    "ratio/off": Advice(
        "before any update the ratio is not 1",
        "compare noise scale, sigmas and conditioning of the draw with those of its replay",
    ),
    # rewards
    "reward/fails": Advice("a reward stops with an error", "do what its message says"),
    "reward/nan": Advice(
        "a reward leaves images unscored",
        "mend it, or allow a share with `train.max_unscored`",
    ),
    "reward/constant": Advice(
        "a reward gives every image the same score",
        "mend it: there is nothing to learn from it",
    ),
    "reward/flat": Advice(
        "the images of a prompt get equal scores, for each prompt that was tried",
        "take a graded reward, easier prompts, a larger `train.group` or more `plan.noise_scale`",
    ),
    "reward/noise": Advice(
        "a reward differs as much when asked twice as between the images of a prompt",
        "make it deterministic (temperature 0, a fixed seed), or let it answer several times",
    ),
    "reward/blind": Advice(
        "a reward does not see that an image is blurred or noisy",
        "look at what it does with the images: size, range, normalisation",
    ),
    "reward/reversed": Advice("a reward ranks damaged images above good ones", "look at its sign"),
    "reward/prompt": Advice(
        "no reward with a weight depends on the prompt",
        "add one that does, or a `kl`; if none is meant to, accept it: `--known reward/prompt`",
    ),
    "reward/company": Advice(
        "an image's score depends on the images beside it, their order or their number",
        "score images one by one, without statistics of the batch",
    ),
    # credit, gradient, update
    "credit/groups": Advice(
        "the advantages of one prompt depend on the images of another, or on another's text",
        "compare images with those of the own prompt only: look at the group ids",
    ),
    "credit/sign": Advice(
        "a better image lowers the advantage of the draws that led to it",
        "change the sign of the credit, or of the reward's weight",
    ),
    "gradient/zero": Advice(
        "no gradient reaches the trained weights",
        "look for a detach, and for layers that the loss does not depend on",
    ),
    "gradient/broken": Advice(
        "a gradient or a loss is not finite", "lower `plan.noise_scale` there, or use a wider dtype"
    ),
    "gradient/outlier": Advice(
        "one denoising step has nearly all of the gradient",
        "keep noise off this step, or balance the steps with `loss.fn=guard`",
    ),
    "gradient/direction": Advice(
        "the gradient makes better images less likely", "change the sign of the loss"
    ),
    "update/lr": Advice("the learning rate is 0", "set `optimizer.lr`"),
    "update/nothing": Advice(
        "an optimizer step leaves all trained weights as they were",
        "let the optimizer have the very parameters that the model runs with",
    ),
    "weights/reference": Advice(
        "the reference of the KL moves with the trained weights",
        "keep a copy of the weights, not the weights themselves",
    ),
    "weights/ema": Advice(
        "the averaged weights do not follow as `train.ema` says",
        "move them after each iteration, towards the current weights",
    ),
    "weights/copies": Advice(
        "a copy that `old` or `slow` describes does not follow as it says",
        "move it after each iteration by its own decay",
    ),
}
"""Name of a finding -> what it means and what to change."""


class DoctorFinding(NamedTuple):
    """One thing that should be changed before training."""

    id: str  # of `CATALOGUE`
    found: str  # with its numbers
    change: str


@dataclass
class ReportSection:
    """What one part of the preflight saw."""

    name: str
    lines: list[str] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)  # head first
    figures: dict[str, Any] = field(default_factory=dict)  # plain data, for JSON
    findings: list[DoctorFinding] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str = ""  # why nothing was looked at

    def find(self, name: str, found: str) -> None:
        """Add a finding of the catalogue, with its numbers in words."""
        self.findings.append(DoctorFinding(name, found, CATALOGUE[name].change))


class Checkup(NamedTuple):
    """The whole preflight."""

    config: str
    sections: list[ReportSection]
    known: tuple[str, ...] = ()  # findings that were asked to be left out

    def __repr__(self) -> str:
        """Name what was found; `checkup_text` says it whole."""
        said, found = "nothing to change", [finding.id for finding in self.findings]
        if found:
            said = f"{len(found)} to change: {', '.join(found)}"
        unseen = [section.name for section in self.sections if section.skipped]
        if unseen:
            said += f"; not looked at: {', '.join(unseen)}"
        return f"Checkup({self.config!r}: {said})"

    @property
    def findings(self) -> list[DoctorFinding]:
        """Return what should be changed, causes before what follows from them."""
        found = []
        for section in self.sections:
            found += [finding for finding in section.findings if finding.id not in self.known]
        return found


def checkup_text(checkup: Checkup, width: int | None = None) -> str:
    """Say what was seen, section by section, and the findings last."""
    lines: list[str] = []
    # what was looked at, with figures
    for section in checkup.sections:
        lines.append(f"{section.name} ({section.seconds:.1f} s)")
        if section.skipped:
            lines.append(f"  not looked at: {section.skipped}")
        lines += [f"  {line}" for line in section.lines]
        if len(section.table) > 1:
            inner = None if width is None else width - 2
            drawn = text_table(section.table, width=inner)
            lines += ["", *(f"  {line}".rstrip() for line in drawn.splitlines())]
        lines.append("")
    # what to change
    findings = checkup.findings
    if not findings:
        return "\n".join([*lines, "nothing to change was found"])
    lines.append(f"{len(findings)} to change, causes first")
    for finding in findings:
        lines += ["", f"{finding.id}  {CATALOGUE[finding.id].means}"]
        lines += [f"  found   {finding.found}", f"  change  {finding.change}"]
    return "\n".join(lines)


def checkup_as_json(checkup: Checkup) -> dict[str, Any]:
    """Return a checkup as plain data; numbers that JSON does not have are null."""
    sections = {}
    # by name, so that a program finds a figure without counting
    for section in checkup.sections:
        sections[section.name] = {
            "seconds": round(section.seconds, 2),
            "skipped": section.skipped,
            "lines": section.lines,
            "table": section.table,
            "figures": _plain(section.figures),
        }
    findings = [finding._asdict() for finding in checkup.findings]
    known = list(checkup.known)
    return {
        "config": checkup.config,
        "findings": findings,
        "known": known,
        "sections": sections,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
