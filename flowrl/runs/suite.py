"""Run a suite on a model: draw images into a folder, score them, compare with another folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.config.load import Config
from flowrl.core.errors import FlowRLError, RewardError, RunError
from flowrl.core.files import write_json, write_text
from flowrl.core.processes import World
from flowrl.core.prompt_overlap import overlap
from flowrl.core.prompts import PromptSet, check_records, load_prompts
from flowrl.core.types import FlowModel, RewardBatch
from flowrl.core.version import __version__
from flowrl.evaluation.bootstrap import paired_bootstrap
from flowrl.evaluation.frame_rewards import frames_of
from flowrl.evaluation.held_out import sample
from flowrl.evaluation.reward_call import ask, probe_rewards, rewards_of
from flowrl.evaluation.sources import check_sources, check_starts, sources_of
from flowrl.evaluation.statistics import summarize
from flowrl.evaluation.suites import picture_folder as folder
from flowrl.runs.evaluate import sampling
from flowrl.training.weights import Weights

Progress = Callable[[int, int], None] | None


def run_suite(
    model: FlowModel,
    config: Config,
    suite: str,
    out: Path,
    *,
    target: str,
    base: Weights | None = None,
    against: Path | None = None,
    progress: Progress = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Draw and score what a suite asks for, as the config's `eval` section says, into `out`.

    The initial noise of a prompt depends on `eval.seed` and its place alone, so every target draws
    from the same. What is in the folder already is kept. `against`: a folder of the same suite and
    setting, as the base model's; then the report has the paired difference to it. In a `world` of
    several processes each takes its share.

    Returns the report that `summary.json` holds. Raises RunError for a folder of another setting,
    and what rewards and prompts raise.
    """
    world = world or World()
    # all that can fail before the first image
    prompts = load_prompts(config.prompts.test)
    rewards = rewards_of(config.rewards, frames_of(config, model))
    check_records(prompts, rewards)
    check_sources(prompts, (config.image.height, config.image.width))
    check_starts(model, prompts)
    probe_rewards(rewards)
    setting = setting_of(model, config, suite, target, prompts)
    other = _other(against, setting) if against is not None else None
    if world.main:
        folder.prepare(out, setting, prompts)
    world.gather(0)  # the others wait until the folder is there
    # images, then scores; the first process says what is left, since the others write meanwhile
    count, images = len(prompts), config.eval.images
    missing = world.gather(folder.unfinished(out, count, images))[0]
    mine = [missing[place] for place in world.share(len(missing))]
    world.together(lambda: _draw(model, config, prompts, out, base, progress, mine))
    left = world.gather(_unscored(out, count, images))[0]
    rows = [left[place] for place in world.share(len(left))]
    world.together(lambda: _score(config, prompts, rewards, out, rows, world.rank))
    world.gather(0)
    # the report
    report = _report(config, prompts, out, setting)
    leaks = _leaks(config, prompts)
    if leaks:
        report["leaks"] = leaks
    if other is not None and against is not None:
        report["against"] = _compared(config, prompts, out, against, other)
    if world.main:
        _write(out, rewards, report)
    return report


def setting_of(
    model: FlowModel, config: Config, suite: str, target: str, prompts: PromptSet
) -> dict[str, Any]:
    """Return all that a score depends on: two scores are comparable where all but the target is
    equal."""
    return {
        "suite": suite,
        "target": target,
        "prompts": prompts.path,
        "prompts_hash": folder.prompts_hash(prompts),
        "count": len(prompts),
        "images": config.eval.images,
        "seed": config.eval.seed,
        "steps": config.eval.steps,
        "guidance": getattr(model, "guidance", None),
        "height": config.image.height,
        "width": config.image.width,
        "tuned": config.eval.tuned,
        "rewards": {name: call.to_dict() for name, call in config.rewards.items()},
        "batch": config.eval.batch,
        "flowrl": __version__,
    }


def _other(against: Path, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of the folder that is compared with. Raises RunError if it is another."""
    known = folder.read_setting(against)
    wrong = folder.different(known, setting)
    if wrong:
        raise RunError(
            f"--against {against}: its images and these are not comparable: {'; '.join(wrong)}"
        )
    return known


def _draw(
    model: FlowModel,
    config: Config,
    prompts: PromptSet,
    out: Path,
    base: Weights | None,
    progress: Progress,
    mine: Sequence[int],
) -> None:
    """Draw all images of some prompts."""
    if not mine:
        return
    size = (config.image.height, config.image.width)
    options = {**sampling(config, base), "sources": partial(sources_of, prompts, size=size)}
    for index, pixels in sample(model, prompts.texts, progress=progress, places=mine, **options):
        folder.save(out, index, pixels, config.eval.images)


def _unscored(out: Path, prompts: int, images: int) -> list[int]:
    """Return the prompts of which an image has no line."""
    known = folder.read_lines(out)
    return [p for p in range(prompts) if any((p, i) not in known for i in range(images))]


def _score(
    config: Config,
    prompts: PromptSet,
    rewards: Mapping[str, Any],
    out: Path,
    mine: Sequence[int],
    rank: int,
) -> None:
    """Score all images of some prompts, a few prompts at a time."""
    file, images = folder.score_file(out, rank), config.eval.images
    folder.mend(file)
    share = max(1, config.eval.batch // images)
    for start in range(0, len(mine), share):
        rows = mine[start : start + share]
        folder.append(file, _lines(prompts, rewards, out, rows, images))


def _lines(
    prompts: PromptSet, rewards: Mapping[str, Any], out: Path, rows: Sequence[int], images: int
) -> list[dict[str, Any]]:
    """Score all images of some prompts -> a line each."""
    # the batch that rewards see
    pixels = torch.cat([folder.load(out, row, images) for row in rows])
    index = [row for row in rows for _ in range(images)]
    records = [prompts.records[row] for row in index]
    texts, group = [prompts.texts[row] for row in index], torch.tensor(index)
    size = (pixels.shape[-2], pixels.shape[-1])
    sources = sources_of(prompts, index, size)
    batch = RewardBatch(pixels, texts, group, records, torch.zeros(len(index)), sources)
    lines: list[dict[str, Any]] = []
    for place, row in enumerate(index):
        image = place % images
        file = folder.image_path(out, row, image).relative_to(out).as_posix()
        lines.append({"file": file, "prompt": row, "image": image, "scores": {}})
    # a number each, and what a reward says of it in words
    for name, reward in rewards.items():
        told: list[dict[str, Any]] = []
        values = ask(name, _listening(reward, told), batch, "suite")
        for place, value in enumerate(values.tolist()):
            lines[place]["scores"][name] = value if value == value else None
            if told:
                lines[place].setdefault("told", {})[name] = told[place]
    return lines


def _listening(reward: Any, told: list[dict[str, Any]]) -> Any:
    """Return a reward that also keeps the line of each image, where it can explain itself."""
    if not hasattr(reward, "explain"):
        return reward

    def explained(batch: RewardBatch) -> Any:
        values, rows = reward.explain(batch)
        told.extend(rows)
        return values

    return explained


def scores_of(config: Config, prompts: PromptSet, out: Path) -> dict[str, np.ndarray]:
    """Read every score of a folder -> {reward: [P, S]}, NaN = not scored. Raises RunError for an
    image without a line."""
    lines = folder.read_lines(out)
    found: dict[str, np.ndarray] = {}
    for name in config.rewards:
        values = np.full((len(prompts), config.eval.images), np.nan)
        for place in np.ndindex(values.shape):
            if place not in lines or name not in lines[place]["scores"]:
                raise RunError(
                    f"{out}: image {place[1]} of prompt {place[0]} has no score by {name!r}: the "
                    "suite was not finished; run the same command again"
                )
            value = lines[place]["scores"][name]
            values[place] = np.nan if value is None else value
        found[name] = values
    return found


def _report(
    config: Config, prompts: PromptSet, out: Path, setting: Mapping[str, Any]
) -> dict[str, Any]:
    """Average the scores of a folder -> the report that `evaluation_table` shows."""
    name, scores = config.headline, scores_of(config, prompts, out)
    values = torch.from_numpy(scores[name].ravel())
    kept = values.isfinite()
    unscored = {k: int(np.isnan(v).sum()) for k, v in scores.items() if np.isnan(v).any()}
    share = max(unscored.values(), default=0) / len(values)
    if share > config.train.max_unscored:
        raise RewardError(
            f"{out}: {unscored} of {len(values)} images have no score; train.max_unscored="
            f"{config.train.max_unscored} is the share that may be left out"
        )
    tags = [tag for tag in _tags(prompts) for _ in range(config.eval.images)]
    whole = summarize(values[kept], [t for t, k in zip(tags, kept.tolist(), strict=True) if k])
    means = {}
    for reward, every in scores.items():
        means[reward] = float(np.nanmean(every))
    report = {"score": name, name: whole.pop("mean"), **whole, "rewards": means}
    if unscored:
        report["unscored"] = unscored
    return {**report, "setting": dict(setting)}


def _compared(
    config: Config, prompts: PromptSet, out: Path, against: Path, other: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare the headline with that of another folder, prompt by prompt."""
    name, tags = config.headline, _tags(prompts)
    ours, theirs = (scores_of(config, prompts, where)[name] for where in (out, against))
    return {
        "folder": str(against),
        "target": other["target"],
        **paired_bootstrap(ours, theirs, tags),
    }


def _tags(prompts: PromptSet) -> list[str]:
    return [str(record.get("tag", "all")) for record in prompts.records]


def _leaks(config: Config, prompts: PromptSet) -> list[str]:
    """Say what the suite's prompts share with the training prompts, where these are at hand."""
    try:
        trained = load_prompts(config.prompts.train)
    except FlowRLError:  # not on this machine
        return []
    return overlap(prompts, trained).lines(len(prompts))


def _write(out: Path, rewards: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Write the summary, and the result file of each reward that explains itself."""
    write_json(out / folder.SUMMARY, dict(report))
    lines = folder.read_lines(out)
    for name, reward in rewards.items():
        if hasattr(reward, "explain"):
            rows = []
            for _, line in sorted(lines.items()):
                row = {k: v for k, v in line["told"][name].items() if k != "score"}
                rows.append(folder.as_line({**row, "filename": line["file"]}))
            write_text(out / f"{name}.jsonl", "".join(rows))
