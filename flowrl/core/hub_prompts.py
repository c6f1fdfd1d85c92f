"""Prompts from the hub: data sets by id, files of one, and published lists by a name of their
own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.extras import install
from flowrl.core.prompt_files import COLUMNS, ENDINGS, read_items

Items = Iterator[tuple[str, Any]]

PUBLISHED = {
    "drawbench": "hub:sayakpaul/drawbench",
    "partiprompts": "hub:nateraw/parti-prompts",
    "pickscore/test": "hub:yuvalkirstain/pickapic_v1_no_images@test_unique",
    "pickscore/train": "hub:CarperAI/pickapic_v1_no_images_training_sfw",
    "hpdv2/test": "hub:zhwang/HPDv2/benchmark/*.json",
    "t2i-compbench/color": "t2i-compbench:hub:NinaKarine/t2i-compbench/color_val",
    "t2i-compbench/shape": "t2i-compbench:hub:NinaKarine/t2i-compbench/shape_val",
    "t2i-compbench/texture": "t2i-compbench:hub:NinaKarine/t2i-compbench/texture_val",
    "t2i-compbench/spatial": "t2i-compbench:hub:NinaKarine/t2i-compbench/spatial_val",
    "t2i-compbench/non_spatial": "t2i-compbench:hub:NinaKarine/t2i-compbench/non_spatial_val",
}
"""Name of a list -> where it is read from. None of them is shipped; their licences are their
owners'."""

FILE = (
    "Prompts from a file need no hub: prompts.train and prompts.test in the config, or --prompts "
    "FILE of the commands that have it"
)


def on_hub(name: str) -> bool:
    """Say whether a list is read from the hub: by name, or as `hub:...`."""
    return name in PUBLISHED or "hub:" in name


def read_hub(name: str) -> Items:
    """Read prompts of the hub -> (place, record).

    `owner/name` is a data set, `owner/name/config` one of its configs, each with `@split`; without
    it the split "train", or the only one there is. `owner/name/folder/*.json` are prompt files of
    its repository, each a task of its own. A local folder of a data set is read as one. A data set
    needs the package `datasets` (the extra `hub`); its column is the first named prompt, prompts,
    caption or text, in any case. Raises ConfigError for a hub that cannot be reached, DataError.
    """
    path, _, _ = name.partition("@")
    repository, pattern = _split(path)
    if not Path(path).is_dir() and pattern.lower().endswith(ENDINGS):
        yield from _files(name, repository, pattern)
        return
    column = ""
    for where, row in hub_rows(name):
        column = column or _column(name, row)
        plain = (str, int, float, bool, type(None))
        record = {key: value for key, value in row.items() if isinstance(value, plain)}
        yield where, {**record, "prompt": row[column]}


def hub_rows(name: str) -> Items:
    """Read the rows of a data set as they are, but for images, which are not decoded. Raises
    ConfigError."""
    path, _, split = name.partition("@")
    repository, config = (path, "") if Path(path).is_dir() else _split(path)
    found = _data_set(name, repository, config, split)
    for number, row in enumerate(found.select_columns(_light(found)), 1):
        yield f"hub:{name}, row {number}", row


def _split(path: str) -> tuple[str, str]:
    """Split `owner/name/rest` into repository and rest."""
    parts = path.split("/")
    return "/".join(parts[:2]), "/".join(parts[2:])


def _column(name: str, row: dict[str, Any]) -> str:
    named = {column.lower().removesuffix("s"): column for column in row}
    column = next((named[known] for known in COLUMNS if known in named), None)
    if column is None:
        raise DataError(f"hub:{name}: expected a column {', '.join(COLUMNS)}, got {', '.join(row)}")
    return column


def _data_set(name: str, path: str, config: str, split: str) -> Any:
    """Open a split of a data set."""
    try:
        # an optional package, so its absence is explained here
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"hub:{name}: {error}; install it with: {install('hub')}. {FILE}"
        ) from error
    try:
        found = datasets.load_dataset(path, config or None, split=split or None)
    except Exception as error:  # offline, misspelt, no such split: the library raises all sorts
        raise _unreachable(name, error) from error
    # no split was named: take "train", or the only one
    if isinstance(found, dict):
        only = "train" if "train" in found else next(iter(found))
        if only != "train" and len(found) > 1:
            raise ConfigError(f"hub:{name}: expected one of the splits {', '.join(found)} after @")
        found = found[only]
    return found


def _files(name: str, repository: str, pattern: str) -> Items:
    """Read prompt files of a repository."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, repo_type="dataset", allow_patterns=[pattern]))
    except Exception as error:  # offline, misspelt, gated
        raise _unreachable(name, error) from error
    files = sorted(folder.glob(pattern))
    if not files:
        raise _unreachable(name, FileNotFoundError(f"no file {pattern} in {repository}"))
    for file in files:
        for where, item in read_items(file):
            place = f"hub:{repository}/{file.relative_to(folder)}{where.removeprefix(str(file))}"
            record = {"prompt": item} if isinstance(item, str) else item
            yield place, {"tag": file.stem, **record} if isinstance(record, dict) else record


def _unreachable(name: str, error: Exception) -> ConfigError:
    reason = str(error).strip().partition("\n")[0]
    return ConfigError(
        f"hub:{name}: the data set cannot be read: {reason}. Is the id right, the hub in reach and "
        f"HF_HUB_OFFLINE unset? {FILE}"
    )


def _light(found: Any) -> list[str]:
    """Return the columns without images, which nobody needs to decode."""
    kinds = found.features
    return [name for name in found.column_names if hasattr(kinds[name], "dtype")]
