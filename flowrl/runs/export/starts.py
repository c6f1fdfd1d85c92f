"""What the images of an exported model start from: how many there are, and how the code of a model
card loads them."""

from __future__ import annotations

from pathlib import Path

from flowrl.config.load import Config
from flowrl.cost.architecture import references
from flowrl.models.qwen_edit import WHOLE
from flowrl.models.qwen_edit_plus import SEEN
from flowrl.runs.folder import SAMPLES, SOURCES

# models whose images or videos always start from one, and those that take references if a prompt
# has them
EDITS = ("flux_kontext", "qwen_edit", "qwen_edit_plus", "wan_i2v")
REFERRING = ("flux2", "flux2_klein")


def start_count(config: Config, run: Path) -> int:
    """Return how many images each prompt of a run starts from; 0: they start from noise alone.

    The run's prompt list says it. Where that is not at hand any more, a run that started from
    images is known by the strip of them beside its samples, and one is assumed.
    """
    if config.model.fn not in (*EDITS, *REFERRING):
        return 0
    assumed = config.model.fn in EDITS or (run / SAMPLES / SOURCES).is_file()
    return references(config.prompts.train) or int(assumed)


def start_files(count: int) -> list[str]:
    """Name the files that a card's code loads."""
    return ["source.png"] if count == 1 else [f"source-{n}.png" for n in range(1, count + 1)]


def start_argument(count: int) -> str:
    """Return the argument of the pipeline's call: one image, or a list of them."""
    loaded = [f'load_image("{file}")' for file in start_files(count)]
    return f"image={loaded[0]}" if count == 1 else f"image=[{', '.join(loaded)}]"


def start_note(config: Config, count: int) -> str:
    """Say which images the code starts from, and how large they were in the run; "" for none."""
    if not count:
        return ""
    files, (height, width) = start_files(count), config.eval_size
    named = " and ".join(f"`{file}`" for file in files) if count < 3 else f"`{files[0]}` and so on"
    what = "is the image" if count == 1 else "are the images"
    note = f"{named} {what} to start from; the run scaled its own to {width} x {height} pixels."
    return f"\n\n{note}{_other_area(config)}"


def _other_area(config: Config) -> str:
    """Say where the run scaled a source otherwise than the pipeline of Qwen-Image-Edit does."""
    given = config.model.kwargs
    if "source_pixels" not in given:
        return ""
    seen = SEEN if config.model.fn == "qwen_edit_plus" else WHOLE
    areas = (given["source_pixels"], given["seen_pixels"] or given["source_pixels"])
    if areas == (WHOLE, seen):
        return ""
    return (
        f" Then it scaled them to an area of {areas[0]} pixels for the VAE and of {areas[1]} for "
        f"the language model. The pipeline scales to {WHOLE} and {seen}, so its images differ."
    )
