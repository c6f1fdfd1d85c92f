"""Apply measures to the images of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.core.devices import pick_device
from flowrl.core.errors import ConfigError, DataError, unknown
from flowrl.evaluation.image_files import ImageFile, find_images, read_image
from flowrl.evaluation.measures.features import (
    InceptionOutputs,
    distance,
    encoder,
    fid,
    inception,
    inception_score,
    kid,
    lpips,
    metrics_there,
    vendi,
)
from flowrl.evaluation.statistics import summarize_scores

MEASURES = {
    "fid": "Frechet distance to --reference, lower is better",
    "kid": "kernel distance to --reference, lower is better",
    "inception_score": "is every image clear, and do they differ",
    "lpips": "perceptual distance between images of one prompt",
    "vendi": "effective number of different images of one prompt, and of all",
    "distance": "1 - cosine between images of one prompt, and of all",
}
TO_REFERENCE, BY_INCEPTION = ("fid", "kid"), ("fid", "kid", "inception_score")
BY_ENCODER = {"vendi": vendi, "distance": distance}


class Tools(NamedTuple):
    """The files that measures look through, and what they compare with."""

    reference: Path | None = None  # a folder of images
    inception: str | None = None
    alexnet: str | None = None
    encoder: str | None = None
    batch: int = 32
    device: str = "auto"


def check_measures(names: Sequence[str], tools: Tools) -> None:
    """Refuse what could not be measured, before anything is drawn. Raises ConfigError."""
    for name in names:
        if name not in MEASURES:
            raise ConfigError(f"--measure: flowrl {unknown(name, MEASURES, 'measure')}")
    # these need an optional package
    if set(names) & {*BY_INCEPTION, "lpips"}:
        metrics_there()
    # which option each measure looks through
    needed = [("reference", TO_REFERENCE), ("inception", BY_INCEPTION), ("alexnet", ("lpips",))]
    for option, users in [*needed, ("encoder", BY_ENCODER)]:
        asked = [name for name in names if name in users]
        if asked and getattr(tools, option) is None:
            raise ConfigError(f"{' and '.join(asked)}: needs --{option}")
    for option in ("reference", "inception", "alexnet"):
        path = getattr(tools, option)
        if path is not None and not Path(path).exists():
            raise ConfigError(f"--{option}: there is no {path}")
    if tools.batch < 1:
        raise ConfigError(f"--batch: expected at least 1, got {tools.batch}")


def measure_images(folder: Path, names: Sequence[str], tools: Tools) -> dict[str, Any]:
    """Measure the images in and below a folder -> {measure: {"value", ...}, "images": n, ...}.

    The images of one prompt are those in one folder, as a suite keeps them. Values "per prompt" are
    means over prompts with a 95 % interval; "all" is over all images. Raises ConfigError,
    DataError, ModelError.
    """
    check_measures(names, tools)
    files, device = find_images([folder]), pick_device(tools.device, "--device")
    groups = _groups(files)
    found: dict[str, Any] = {"images": len(files), "prompts": len(groups)}
    if set(names) & set(BY_INCEPTION):
        found |= _inception(files, names, tools, device)
    if set(names) & set(BY_ENCODER):
        look = encoder(tools.encoder, device)
        features = torch.cat([look(part) for part in _same_size_stacks(files, tools.batch)])
        for name in names:
            if name in BY_ENCODER:
                found[name] = _varied(BY_ENCODER[name], features, groups)
    if "lpips" in names:
        found["lpips"] = _lpips(files, groups, tools, device)
    return {"images": found.pop("images"), "prompts": found.pop("prompts"), **found}


def _same_size_stacks(files: Sequence[ImageFile], size: int) -> Iterator[Tensor]:
    """Read images -> stacks [n, 3, H, W] uint8 in their order, each of one size."""
    part: list[Tensor] = []
    for file in files:
        pixels = read_image(file)[0].to(torch.uint8)
        if part and (len(part) == size or part[-1].shape != pixels.shape):
            yield torch.stack(part)
            part = []
        part.append(pixels)
    if part:
        yield torch.stack(part)


def _groups(files: Sequence[ImageFile]) -> dict[Path, list[int]]:
    """Return the places of the images of each prompt."""
    found: dict[Path, list[int]] = {}
    for place, file in enumerate(files):
        found.setdefault(file.path.parent, []).append(place)
    return found


def _inception(
    files: Sequence[ImageFile], names: Sequence[str], tools: Tools, device: torch.device
) -> dict[str, Any]:
    look = inception(tools.inception, device)
    ours = _seen(look, files, tools.batch)
    found: dict[str, Any] = {}
    if "inception_score" in names:
        found["inception_score"] = inception_score(ours.logits)
    if set(names) & set(TO_REFERENCE):
        assert tools.reference is not None
        others = _seen(look, find_images([tools.reference]), tools.batch).features
        about = {"reference": str(tools.reference), "reference_images": len(others)}
        if "fid" in names:
            found["fid"] = {"value": fid(ours.features, others), **about}
        if "kid" in names:
            found["kid"] = {**kid(ours.features, others), **about}
    return found


def _seen(
    look: Callable[[Tensor], InceptionOutputs], files: Sequence[ImageFile], size: int
) -> InceptionOutputs:
    parts = [look(part) for part in _same_size_stacks(files, size)]
    features = torch.cat([part.features for part in parts])
    return InceptionOutputs(features, torch.cat([part.logits for part in parts]))


def _varied(
    function: Callable[[Tensor], float], features: Tensor, groups: dict[Path, list[int]]
) -> dict[str, Any]:
    """Measure each prompt with several images, and all images together."""
    each = [function(features[rows]) for rows in groups.values() if len(rows) > 1]
    whole = function(features) if len(features) > 1 else None
    return {**_mean(each, "images of one prompt"), "all": whole}


def _lpips(
    files: Sequence[ImageFile], groups: dict[Path, list[int]], tools: Tools, device: torch.device
) -> dict[str, Any]:
    compare, each, pairs = lpips(tools.alexnet, device), [], 0
    for rows in groups.values():
        if len(rows) < 2:
            continue
        stacks = list(_same_size_stacks([files[row] for row in rows], len(rows)))
        if len(stacks) > 1:
            raise DataError(f"{files[rows[0]].path.parent}: lpips: expected images of one size")
        first, second = zip(*combinations(range(len(rows)), 2), strict=True)
        images, distances = stacks[0].float() / 255, []
        for start in range(0, len(first), tools.batch):
            part = slice(start, start + tools.batch)
            distances.append(compare(images[list(first[part])], images[list(second[part])]))
        each.append(float(torch.cat(distances).mean()))
        pairs += len(first)
    return {**_mean(each, "images of one prompt"), "pairs": pairs}


def _mean(each: Sequence[float], what: str) -> dict[str, Any]:
    """Average over prompts, with an interval. Raises DataError where there is nothing."""
    if not each:
        raise DataError(
            f"expected several {what} to compare, as a suite with --images 2 keeps them: several "
            "images in one folder"
        )
    summary = summarize_scores(torch.tensor(each), ["all"] * len(each))
    return {"value": summary["mean"], "interval": summary["interval"], "prompts": len(each)}
