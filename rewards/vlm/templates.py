"""The questions that rewards/vlm/judge.py asks, in flowrl's own words, and wordings read from
files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from flowrl.core.errors import ConfigError

_AXES = """\
- Alignment: does the content match the caption?
- Coherence: is it free of glitches and distortions, and does it make sense?
- Style: does it look good, whatever the caption says?
"""

WORDING = {
    "pair_rank": """\
Image 1 and Image 2 were made from the caption below. Find out which one is better. Two things \
count:
(1) how faithfully the image shows the caption: its objects, their attributes, their relations;
(2) how good it looks: clarity, detail, colour, appeal.
Compare the images on both, then end with exactly one of these sentences:
"Image 1 is better." or "Image 2 is better." or "Both images are equally good."
Text Caption: [{prompt}]""",
    "point": """\
The image was made from the caption below. Rate it by two things:
(1) how faithfully it shows the caption: its objects, their attributes, their relations;
(2) how good it looks: clarity, detail, colour, appeal.
First list the elements of the caption, one per line, as "element (type): 1" if the image has it and
"element (type): 0" if it does not. Then end with a line "Final Score: X", X from 1 (worst) to 5 \
(best).
Text Caption: [{prompt}]""",
    "acs": f"""\
The image was made from the caption below. Rate each of these from 1 (worst) to 5 (best):
{_AXES}Answer with these three lines:
Alignment Score (1-5): X
Coherence Score (1-5): Y
Style Score (1-5): Z
Text Caption: [{{prompt}}]""",
    "pair_score": f"""\
Image 1 and Image 2 were made from the caption below. Compare them in three respects:
{_AXES}In each respect share one point between the images: two numbers from 0 to 1 that sum to 1, \
the larger for the
better image. Answer in this form:
Alignment Score:
 Image 1: X
 Image 2: Y

Coherence Score:
 Image 1: X
 Image 2: Y

Style Score:
 Image 1: X
 Image 2: Y
Text Caption: [{{prompt}}]""",
    "think": """\
Compare two images, Image 1 and Image 2, that were made from one caption, as a strict and \
impartial judge.
Text Caption: [{prompt}]
Respects to compare: semantic consistency (the image shows the caption), aesthetics (composition, \
colour, expression),
authenticity (realism, detail), and at most two more that matter for this caption.
Inside <think> and </think> write for each respect a block of three lines:
Name of the respect:
    Image 1 (x/10) - short reason;
    Image 2 (y/10) - short reason
and after the last block the sums:
Total score:
Image 1: x+x+x=total
Image 2: y+y+y=total
After </think> write the verdict alone: <answer>Image 1 is better</answer> or <answer>Image 2 is \
better</answer>""",
    "flex": """\
Compare two images, Image 1 and Image 2, that were made from one caption.
Caption: [{prompt}]
Work in three categories: A. semantic alignment, B. image quality and realism, C. aesthetics. You \
may add a category D
if the caption calls for it. Choose three to five sub-dimensions per category that set these two \
images apart; share
10 points between the images in each, and name what you see as the reason.
Answer with one JSON object and nothing else:
{"prompt": "...",
 "categories": [
  {"name": "...",
   "dims": [{"name": "...", "reason_1": "...", "reason_2": "...", "score_1": 6, "score_2": 4}],
   "cat_reason": "...", "cat_winner": "Image 1 or Image 2"}],
 "reason": "...", "winner": "Image 1 or Image 2"}""",
    "yes_no": """\
Does the image show what this caption says, completely and correctly? Caption: "{prompt}"
Begin the answer with "Yes" or "No".""",
    "consistency": """\
Both images belong to one set, made from this theme: "{prompt}"
Are they consistent with each other in style, logic and identity? Begin the answer with "Yes" or \
"No".""",
    "level": """\
How well does the image match this caption, and how good is it? Caption: "{prompt}"
Answer with a single digit from 0 (not at all) to 5 (perfectly).""",
    "rating": """\
Rate the quality of the image from 1 (bad) to 5 (excellent), to two decimals. It was made from the \
caption "{prompt}".
Give reasons if you need to, then end with JSON: {"rating": X}""",
}

PAIR = frozenset({"pair_rank", "pair_score", "think", "flex"})
"""Templates that show two images and compare them."""

LOG_PROB = frozenset({"yes_no", "consistency", "level"})
"""Templates that are read from the first token's log-probs."""


def load_wording(template: str, file: str | None, sha256: str | None) -> str:
    """Return the wording of `template`, or that of `file`, with {prompt} where the caption goes.

    A file marks the caption by {prompt} or {}. `sha256`: what its hash, with {} as the mark, must
    begin with. Raises ConfigError for a file without one mark, with another hash, or with the
    doubled braces of an f-string.
    """
    # flowrl's own
    if file is None:
        if sha256 is not None:
            raise ConfigError("rewards.vlm: template_sha256 needs a template_file")
        return WORDING[template]
    # a file's, with one mark and single braces
    text = _read(Path(file).expanduser(), file)
    mark = "{prompt}" if "{prompt}" in text else "{}"
    if text.count(mark) != 1:
        raise ConfigError(
            f"rewards.vlm: template_file {file}: expected {{prompt}} once, found {mark} "
            f"{text.count(mark)} times"
        )
    if "{{" in text:
        raise ConfigError(
            f"rewards.vlm: template_file {file}: {{{{ is Python's way to write one brace in an "
            "f-string; write the text as the judge shall read it"
        )
    # the file that was meant
    found = hashlib.sha256(text.replace(mark, "{}").encode()).hexdigest()
    if sha256 is not None and not found.startswith(sha256.lower()):
        raise ConfigError(
            f"rewards.vlm: template_file {file}: expected sha256 {sha256}..., got {found[:16]}..."
        )
    return text.replace(mark, "{prompt}")


def _read(path: Path, file: str) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"rewards.vlm: template_file {file}: cannot read it as UTF-8 text: {error}"
        ) from error
    # editors end a file with a line break, the public wordings do not
    return text.removesuffix("\n")


def fill(wording: str, prompt: str) -> str:
    """Put the caption into a wording; nothing inside of the caption is replaced."""
    return wording.replace("{prompt}", prompt, 1)
