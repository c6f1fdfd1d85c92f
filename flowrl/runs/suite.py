"""Run a suite on a model: draw images into a folder, score them, compare with another folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.config.load import Config, check_eval_count, check_eval_size
from flowrl.core.errors import ConfigError, FlowRLError, RewardError, RunError
from flowrl.core.files import finite_or_none, without, write_json, write_text
from flowrl.core.identity import Facts, differences, facts_of_tensors, without_times
from flowrl.core.processes import World
from flowrl.core.prompts import (
    PromptSet,
    check_records,
    load_prompts,
    overlap,
    prompts_hash,
    task_of,
)
from flowrl.core.types import FlowModel, Reward, RewardBatch
from flowrl.core.version import __version__
from flowrl.evaluation.contents import drawing_content, prompt_files, reward_contents
from flowrl.evaluation.crossed_errors import verdicts
from flowrl.evaluation.held_out import best_places, check_tasks, chooser, sampled_images
from flowrl.evaluation.needs import weights_needed
from flowrl.evaluation.reward_call import ask, frames_of, probe_rewards, rewards_of
from flowrl.evaluation.sources import check_sources, check_starts, sources_of
from flowrl.evaluation.statistics import jackknifed, paired_difference, summarize_scores
from flowrl.evaluation.suites import image_folder as folder
from flowrl.runs.evaluate import guidance_of, sampling
from flowrl.training.checks import context_of
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
    more: Mapping[str, Any] | None = None,
    content: Facts | None = None,
) -> dict[str, Any]:
    """Draw and score what a suite asks for, as the config's `eval` section says, into `out`.

    The initial noise of a prompt depends on `eval.seed` and its place alone, so every target draws
    from the same. What is in the folder already is kept. `against`: a folder of the same suite and
    setting, as the base model's; then the report has the paired difference to it. In a `world` of
    several processes each takes its share. `more`: what else belongs to the setting, as a LoRA's
    scale. `content`: of the target's weights, as `Target` has it; else a digest of its tensors.

    Returns the report that `summary.json` holds. Raises RunError for a folder of another setting,
    and what rewards and prompts raise.
    """
    world = world or World()
    if not world.alone and context_of(config) > 1:
        raise ConfigError(
            "model.runtime.context_parallel: here each process draws its own prompts; add --set "
            "model.runtime.context_parallel=1"
        )
    # all that can fail before the first image
    prompts, rewards = _checked(model, config)
    setting = setting_of(model, config, suite, target, prompts, content) | dict(more or {})
    setting |= {folder.REWARDS: reward_contents(config, rewards)}
    _check_alike(world, setting)
    other = None
    if against is not None:
        other = _other(against, setting)
    world.by_main(partial(folder.prepare, out, setting, prompts))
    # images, then scores; the first process says what is left, since the others write meanwhile
    count, images = len(prompts), _images_per_prompt(config)
    mine = _shared(world, folder.unfinished(out, count, images))
    world.together(partial(_draw, model, config, prompts, out, base, progress, mine))
    rows = _shared(world, _unscored(out, count, images))
    world.together(partial(_score, config, prompts, rewards, out, rows, world.rank))
    world.gather(0)
    # the report
    report = make_report(config, prompts, out, setting)
    add_tables(report, config, prompts, out, rewards)
    leaks = leaks_of(config, prompts)
    if leaks:
        report["leaks"] = leaks
    if other is not None and against is not None:
        report["against"] = compared(config, prompts, out, against, other)
    if world.main:
        write_suite_report(out, rewards, report)
    return report


def _shared(world: World, prompts: list[int]) -> list[int]:
    """Return this process' share of the prompts that the first one found."""
    found = world.gather(prompts)[0]
    return [found[place] for place in world.share(len(found))]


def _checked(model: FlowModel, config: Config) -> tuple[PromptSet, dict[str, Reward]]:
    """Load prompts and rewards, and raise what model, prompts and rewards cannot do together."""
    prompts = load_prompts(config.prompts.test)
    try:
        rewards = rewards_of(config.rewards, frames_of(config, model))
    except FlowRLError as error:
        # one of several that could not be fetched: the message has the commands for all
        lines = weights_needed(config)
        if not lines:
            raise
        said = "\n  ".join([f"{error}\nthe rewards need, and do not find here:", *lines])
        raise type(error)(said) from error
    check_records(prompts, rewards)
    check_sources(prompts, config.eval_size)
    check_eval_count(config, len(prompts))
    check_eval_size(model, config)
    check_starts(model, prompts)
    probe_rewards(rewards)
    chooser(config.eval.best_by, config.headline, rewards)
    return prompts, rewards


def _check_alike(world: World, setting: Mapping[str, Any]) -> None:
    """Raise ConfigError in every process where one would draw or judge something else."""
    first, *others = world.gather(without_times(setting))
    for rank, other in enumerate(others, 1):
        wrong = differences(first, other)
        if wrong:
            raise ConfigError(
                f"process {rank} of {world.size} has another suite than process 0, there and here: "
                f"{'; '.join(wrong[:3])}; start all processes with the same command and files"
            )


def _images_per_prompt(config: Config) -> int:
    """Return how many images are drawn of each prompt."""
    return config.eval.images * config.eval.best_of


def setting_of(
    model: FlowModel,
    config: Config,
    suite: str,
    target: str,
    prompts: PromptSet,
    content: Facts | None,
) -> dict[str, Any]:
    """Return all that a score depends on but the rewards' content: two scores are comparable where
    all but the target and its content is equal."""
    if content is None:
        content = {**drawing_content(config), "trained": facts_of_tensors(model.trainable())}
    # the best of several images is another score
    best = {}
    if config.eval.best_of > 1:
        best = {"best_of": config.eval.best_of, "best_by": config.eval.best_by or config.headline}
    # what is drawn (prompts, noise, steps, guidance, size) and what judges it
    return {
        "suite": suite,
        "target": target,
        "prompts": prompts.path,
        "prompts_hash": prompts_hash(prompts),
        "prompt_files": prompt_files(prompts, config),
        "count": len(prompts),
        "images": config.eval.images,
        "seed": config.eval.seed,
        "steps": config.eval.steps,
        **guidance_of(model, config),
        "height": config.eval_size[0],
        "width": config.eval_size[1],
        "tuned": config.eval.tuned,
        **best,
        "rewards": {name: call.to_dict() for name, call in config.rewards.items()},
        "batch": config.eval.batch,
        "flowrl": __version__,
        folder.MODEL: content,
    }


def _other(against: Path, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of the folder that is compared with. Raises RunError if it is another."""
    known = folder.read_setting(against)
    wrong = folder.named_differences(known, setting, but=(*folder.FREE, folder.REWARDS))
    judges = folder.named_differences(known, setting)
    if judges and not wrong:
        raise RunError(
            f"--against {against}: its images were scored by rewards that have changed since, "
            f"there and now: {'; '.join(judges[:3])}; run the command that made it again: it "
            "scores them anew"
        )
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
    size = config.eval_size
    options = {**sampling(config, base), "sources": partial(sources_of, prompts, size=size)}
    options["images"] = _images_per_prompt(config)
    for index, pixels in sampled_images(
        model, prompts.texts, progress=progress, places=mine, **options
    ):
        folder.save_images(out, index, pixels, _images_per_prompt(config))


def _unscored(out: Path, prompts: int, images: int) -> list[int]:
    """Return the prompts of which an image has no line."""
    known = folder.read_lines(out)
    missing = []
    for prompt in range(prompts):
        if any((prompt, image) not in known for image in range(images)):
            missing.append(prompt)
    return missing


def _score(
    config: Config,
    prompts: PromptSet,
    rewards: Mapping[str, Any],
    out: Path,
    mine: Sequence[int],
    rank: int,
) -> None:
    """Score all images of some prompts, a few prompts at a time."""
    file, images = folder.score_file(out, rank), _images_per_prompt(config)
    folder.mend(file)
    judge = folder.judge_of(folder.read_setting(out))
    share = max(1, config.eval.batch // images)
    for start in range(0, len(mine), share):
        rows = mine[start : start + share]
        lines = _lines(prompts, rewards, out, rows, images)
        folder.append_scores(file, [folder.scored_line(out, line, judge) for line in lines])


def _lines(
    prompts: PromptSet, rewards: Mapping[str, Any], out: Path, rows: Sequence[int], images: int
) -> list[dict[str, Any]]:
    """Score all images of some prompts -> a line each."""
    # the batch that rewards see
    pixels = torch.cat([folder.load_images(out, row, images) for row in rows])
    group = torch.tensor(rows).repeat_interleave(images)
    index = group.tolist()
    texts, records = prompts.texts_of(index), [prompts.records[row] for row in index]
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
        details: list[dict[str, Any]] = []
        values = ask(name, _listening(reward, details), batch, "suite")
        for place, value in enumerate(values.tolist()):
            lines[place]["scores"][name] = finite_or_none(value)
            if details:
                lines[place].setdefault("details", {})[name] = details[place]
    return lines


def _listening(reward: Any, details: list[dict[str, Any]]) -> Any:
    """Return a reward that also keeps the line of each image, where it can explain itself."""
    if not hasattr(reward, "explain"):
        return reward

    def explained(batch: RewardBatch) -> Any:
        values, rows = reward.explain(batch)
        details.extend(rows)
        return values

    return explained


def scores_of(
    config: Config, prompts: PromptSet, out: Path, n: int | None = None
) -> dict[str, np.ndarray]:
    """Read the scores of a folder -> {reward: [P, S]}, NaN = not scored; with best-of-n (`n`, by
    default the config's) those of the images that were chosen. Raises RunError for an image without
    a line."""
    lines, n = folder.read_lines(out), n or config.eval.best_of
    # a table [P, S n] for each reward; every place has to be there
    found: dict[str, np.ndarray] = {}
    for name in config.rewards:
        values = np.full((len(prompts), config.eval.images * n), np.nan)
        for place in np.ndindex(values.shape):
            if place not in lines or name not in lines[place]["scores"]:
                raise RunError(
                    f"{out}: image {place[1]} of prompt {place[0]} has no score by {name!r}: the "
                    "suite was not finished; run the same command again"
                )
            score = lines[place]["scores"][name]
            if score is not None:
                values[place] = score
        found[name] = values
    if n == 1:
        return found
    # the reward that chooses decides for all: they judge the same images
    chosen = best_places(found[chooser(config.eval.best_by, config.headline, found)], n)
    return {name: np.take_along_axis(values, chosen, 1) for name, values in found.items()}


def make_report(
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
    # every reward, over prompts
    rows = np.repeat(np.arange(len(prompts)), config.eval.images)
    means, intervals = {}, {}
    for reward, every in scores.items():
        scored = np.isfinite(every.ravel())
        known = torch.from_numpy(every.ravel()[scored])
        if not len(known):
            raise RewardError(f"{out}: no image has a score by {reward!r}")
        found = summarize_scores(known, ["all"] * len(known), rows[scored].tolist())
        means[reward], intervals[reward] = found["mean"], found["interval"]
    # the headline, over tasks
    tags = [tag for tag in _tags(prompts) for _ in range(config.eval.images)]
    known_tags = [tag for tag, known in zip(tags, kept.tolist(), strict=True) if known]
    check_tasks(prompts.records, [{"tag": tag} for tag in known_tags], name)
    whole = summarize_scores(values[kept], known_tags, rows[kept.numpy()].tolist())
    report = {"score": name, name: whole.pop("mean"), **whole, "rewards": means}
    report["intervals"] = intervals
    if unscored:
        report["unscored"] = unscored
    return {**report, "setting": dict(setting)}


def compared(
    config: Config, prompts: PromptSet, out: Path, against: Path, other: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare the headline with that of another folder, prompt by prompt."""
    name, tags = config.headline, _tags(prompts)
    ours = scores_of(config, prompts, out)[name]
    theirs = scores_of(config, prompts, against, int(other.get("best_of", 1)))[name]
    return {
        "folder": str(against),
        "target": str(other.get("target", "")),
        **paired_difference(ours, theirs, tags),
    }


def add_tables(
    report: dict[str, Any],
    config: Config,
    prompts: PromptSet,
    out: Path,
    rewards: Mapping[str, Any],
) -> None:
    """Add a benchmark's own numbers, ``tables`` {reward: {name: number}}, of rewards that make such
    of the images that count (the chosen ones, where the best of several are), and their 95 %
    intervals over prompts, ``table_intervals``; null where one prompt alone decides a number."""
    # scores of all images that were drawn, n for each that counts, and which of them count [P, S]
    lines, n = folder.read_lines(out), config.eval.best_of
    every = replace(config.eval, best_of=1, images=n * config.eval.images)
    raw = scores_of(replace(config, eval=every), prompts, out)
    chosen = best_places(raw[chooser(config.eval.best_by, config.headline, raw)], n)
    for name, reward in rewards.items():
        if not hasattr(reward, "tables"):
            continue
        # the reward's rows on the images that count, prompt by prompt; unscored ones are left out
        details: list[list[dict[str, Any]]] = [[] for _ in chosen]
        for place in np.ndindex(chosen.shape):
            row = lines[place[0], int(chosen[place])]["details"][name]
            if row["score"] is not None:
                details[place[0]].append(row)
        # images of a prompt are alike, so intervals are over whole prompts
        kept = [rows for rows in details if rows]
        images = [row for rows in kept for row in rows]
        numbers = reward.tables(images)
        whole = float(verdicts(np.array([row["score"] for row in images], float)))
        intervals = jackknifed(reward.tables, kept, whole)
        report.setdefault("tables", {})[name] = numbers
        report.setdefault("table_intervals", {})[name] = {k: intervals.get(k) for k in numbers}


def _tags(prompts: PromptSet) -> list[str]:
    return [task_of(record) for record in prompts.records]


def leaks_of(config: Config, prompts: PromptSet) -> list[str]:
    """Say what the suite's prompts share with the training prompts, where these are at hand."""
    try:
        trained = load_prompts(config.prompts.train)
    except FlowRLError:  # not on this machine
        return []
    return overlap(prompts, trained).lines(len(prompts))


def write_suite_report(out: Path, rewards: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Write the summary, and the result file of each reward that explains itself."""
    write_json(out / folder.SUMMARY, dict(report))
    lines = folder.read_lines(out)
    for name, reward in rewards.items():
        if hasattr(reward, "explain"):
            rows = []
            for _, line in sorted(lines.items()):
                row = without(line["details"][name], "score")
                rows.append(folder.as_line({**row, "filename": line["file"]}))
            write_text(out / f"{name}.jsonl", "".join(rows))
