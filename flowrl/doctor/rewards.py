"""Can the rewards be learnt from: answers, damage, prompts, company, and spread within groups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.forest import leaf_kinds
from flowrl.core.abilities import LearnedReward, asks_people, ignores_quality, sees_latents
from flowrl.core.errors import DataError, RewardError
from flowrl.core.pixels import from_bytes
from flowrl.core.prompts import check_records
from flowrl.doctor.examined_run import ExaminedRun
from flowrl.doctor.findings import ReportSection
from flowrl.evaluation.reward_call import ask
from flowrl.evaluation.reward_tests.checks import CheckResult
from flowrl.evaluation.reward_tests.selftest import rendered, selftest
from flowrl.evaluation.score_images import PromptedImage, prompts_of_images
from flowrl.evaluation.suites.shapes.prompts import all_records

COUNT = 8  # images of the self-test
COMPANY = ("repeat", "order", "batch size")
HEAD = ["reward", "weight", "mean", "std in groups", "asked twice", "images/s"]


def look_at_rewards(examined: ExaminedRun) -> ReportSection:
    """Test each reward on good and damaged images, and on the images that the model makes now."""
    section, run = ReportSection("rewards"), examined.trainer
    section.table = [HEAD]
    images = _good_images(examined)
    minds_prompt = False
    for name, reward in run.rewards.items():
        if asks_people(reward) or sees_latents(reward):
            why = "asks people" if asks_people(reward) else "judges latents"
            section.lines.append(f"{name}: {why}, and was not asked")
            minds_prompt = True
            continue
        weight = run.reward_set.weights[name]
        rows = _tested(section, name, reward, images)
        by_check = {row.check: row for row in rows}
        learns = isinstance(reward, LearnedReward)
        # one that learns has no opinion before its first round
        minds_prompt |= bool(weight) and (learns or _minds_prompt(by_check))
        silent = learns or ignores_quality(reward)
        broken = _judge(section, name, by_check, silent=silent)
        _on_samples(examined, section, name, broken=broken or learns)
    # whether prompts matter at all
    wordless = not minds_prompt and len({image.record["prompt"] for image in images}) > 1
    if wordless and not section.findings:
        names = ", ".join(name for name, weight in run.reward_set.weights.items() if weight)
        section.find("reward/prompt", f"another prompt changes no score of {names}")
    return section


def _good_images(examined: ExaminedRun) -> list[PromptedImage]:
    """Return true scenes for prompts of shapes, else the model's own images, one group each; no
    videos."""
    known = {record["prompt"] for records in all_records().values() for record in records}
    texts = examined.trainer.train_set.texts
    if all(text in known for text in texts[:COUNT]):
        return rendered(COUNT)
    batch, out = examined.found.batch, []
    if batch.images.ndim == 5:
        return []
    size = (batch.images.shape[2], batch.images.shape[3])
    for group, row in enumerate(_turns(batch.group.cpu())[:COUNT]):
        load = partial(from_bytes, batch.images[row])
        out.append(PromptedImage(load, size, batch.meta[row], group, f"image {row + 1}"))
    return out


def _turns(group: Tensor) -> list[int]:
    """List the rows [L] with those of each group in turn."""
    place = torch.zeros_like(group)
    for number in group.unique():
        mine = group == number
        place[mine] = torch.arange(int(mine.sum()))
    return torch.argsort(place * (int(group.max()) + 1) + group).tolist()


def _tested(
    section: ReportSection, name: str, reward: Any, images: Sequence[PromptedImage]
) -> list[CheckResult]:
    """Run the self-test of `flowrl score`; what it refuses is no fault of the run."""
    if not images:
        section.lines.append(f"{name}: not tested on damaged videos: the self-test has images only")
        return []
    try:
        places = [image.name for image in images]
        check_records(prompts_of_images(images, places), {name: reward})
        return selftest(name, reward, images, batch=len(images))
    except DataError as error:
        section.lines.append(f"{name}: not tested on these images: {error}")
    except RewardError as error:
        section.find("reward/fails", str(error))
    return []


def _minds_prompt(rows: dict[str, CheckResult]) -> bool:
    row = rows.get("wrong prompt")
    if row is None or row.verdict == "skipped" and "no image" in row.found:
        return True  # nothing is known against it
    return row.verdict != "skipped" and row.figures.get("tied") != row.figures.get("pairs")


def _judge(
    section: ReportSection, name: str, rows: dict[str, CheckResult], *, silent: bool
) -> bool:
    """Turn checks of the self-test into findings -> whether there is one."""
    section.figures[name] = {check: row._asdict() for check, row in rows.items()}
    before, answers = len(section.findings), rows.get("answers")
    if answers is None or silent:
        return answers is None
    if answers.figures["scored"] < answers.figures["images"]:
        section.find("reward/nan", f"{name}: {answers.found}")
        return True
    company = [rows[check] for check in COMPANY if rows[check].verdict == "fails"]
    if company:
        section.find("reward/company", f"{name}: {company[0].check}: {company[0].found}")
        return True
    # good beside damaged
    seen = [rows[check] for check in ("blur", "noise") if rows[check].figures]
    tied = [row for row in seen if row.figures["tied"] == row.figures["pairs"]]
    words = rows["wrong prompt"].figures
    prompted = bool(words) and words["tied"] < words["pairs"]
    if len(tied) == len(seen) and not prompted and answers.figures["std"] == 0:
        section.find("reward/constant", f"{name}: {answers.found}")
    elif len(tied) == len(seen):
        section.find("reward/blind", f"{name}: {'; '.join(row.found for row in seen)}")
    elif all(row.verdict == "fails" for row in seen):
        section.find("reward/reversed", f"{name}: {'; '.join(row.found for row in seen)}")
    elif rows["wrong prompt"].verdict == "fails" and words["wrong"] > words["right"]:
        section.find("reward/reversed", f"{name}: wrong prompt: {rows['wrong prompt'].found}")
    return len(section.findings) > before


def _on_samples(examined: ExaminedRun, section: ReportSection, name: str, *, broken: bool) -> None:
    """Compare the spread within groups of the model's own images with what asking twice gives."""
    run, batch = examined.trainer, examined.found.batch
    began = time.perf_counter()
    # asked again for the same images: the speed, and how much its answer wavers
    values, again = examined.found.values[name], ask(name, run.rewards[name], batch, "doctor")
    speed = len(values) / max(time.perf_counter() - began, 1e-9)
    # spread [prompts] of finished images: previews are worse by nature
    kind = leaf_kinds(examined.rollout.tree, examined.rollout.leaf).cpu()
    groups = [values[(batch.group.cpu() == g) & (kind == 0)] for g in batch.group.unique().cpu()]
    stds = torch.stack([_std(rows) for rows in groups])
    # the difference of two answers has twice the variance of one, hence the root of 2
    floor, spread = float(_std(again - values)) / 2**0.5, float(stds.mean())
    weight = run.reward_set.weights[name]
    mean = float(values[values.isfinite()].mean())  # NaN where none was scored
    cells = [f"{weight:g}", f"{mean:.4g}", f"{spread:.3g}", f"{floor:.2g}", f"{speed:.3g}"]
    section.table.append([name, *cells])
    figures = {"mean": mean, "spread": spread, "floor": floor, "images_per_s": speed}
    section.figures.setdefault(name, {})["samples"] = figures
    # a fault that is known already would only be found once more
    if broken:
        return
    unscored = int(values.isnan().sum())
    if unscored > examined.config.train.max_unscored * len(values):
        section.find("reward/nan", f"{name}: {unscored} of {len(values)} images are not scored")
    elif spread == 0 and weight:
        section.find("reward/flat", f"{name}: {len(groups)} prompts, {len(values)} images")
    elif floor > 0.5 * spread and weight:
        section.find(
            "reward/noise",
            f"{name}: asked twice its scores differ with a std of {floor:.3g}, the images of a "
            f"prompt with {spread:.3g}",
        )


def _std(values: Tensor) -> Tensor:
    known = values[values.isfinite()].double()
    if not len(known):
        return known.new_zeros(())
    return known.std(correction=0)
