"""Read the answers of judges: verdicts, ratings and log-probs. A reader returns a number, or says
what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from .._judge import answer as judged
from .._judge.answer import Answer

AXES = ("Alignment", "Coherence", "Style")
RATING = r'"rating"\s*:\s*([\d.]+)'
_VERDICT = re.compile(
    r"(image\s+1\s+is\s+better|image\s+2\s+is\s+better|both\s+images\s+are\s+equally\s+good)", re.I
)
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"


class ReadingOptions(NamedTuple):
    """How to turn answers into numbers."""

    template: str
    axes: tuple[float, float, float] = (1.0, 1.0, 1.0)  # weights of alignment, coherence, style
    w_overall: float = 1.0
    w_dims: float = 1.0
    pattern: str = RATING
    low: float = 1.0
    high: float = 5.0
    variants: bool = False


def read(answer: Answer, how: ReadingOptions) -> float | str:
    """Return an image's score, or the verdict that the first image is better (0, .5, 1), or what
    is wrong."""
    out = _READERS[how.template](answer, how)
    if not isinstance(out, str):
        return out
    by_text = _READERS[how.template] not in (yes_no, level)  # for log-probs one token is asked for
    cut = " (it was cut off at max_tokens)" if answer.cut and by_text else ""
    return f"{out}{cut} in the answer {_short(answer.text)}"


def pair_rank(answer: Answer, how: ReadingOptions) -> float | str:
    """Read the last verdict sentence: UnifiedReward's pair rank ends with it. **Differs:** theirs
    takes any."""
    found = _VERDICT.findall(_plain(answer.text))
    return _side(found[-1]) if found else "no verdict sentence"


def think(answer: Answer, how: ReadingOptions) -> float | str:
    """Read the verdict in the last <answer>...</answer> (UnifiedReward-Think); what is thought
    before is not read. **Differs:** theirs reads the first block."""
    final = _plain(answer.text).rpartition("</think>")[2]
    blocks = re.findall(r"<answer>(.*?)</answer>", final, re.DOTALL)
    sides = {_side(text) for text in _VERDICT.findall(blocks[-1])} if blocks else set()
    return sides.pop() if len(sides) == 1 else "no single verdict in <answer> tags"


def flex(answer: Answer, how: ReadingOptions) -> float | str:
    """Blend the overall winner with the mean of the first three category winners
    (UnifiedReward-Flex, Pref-GRPO).

    **Differs:** theirs averages each category's win rate by the category's name; a mean per pair is
    the same where the names agree. Theirs counts an unreadable winner as a tie; here it is left
    out, and without an overall winner the answer is missing.
    """
    # the overall winner
    verdict = _last_object(answer.text, "winner")
    overall = _winner(verdict.get("winner")) if verdict else None
    if verdict is None or overall is None:
        return "no JSON object with a readable winner"
    # the winners of the first three categories
    categories = verdict.get("categories")
    rows = categories if isinstance(categories, list) else []
    named = [row.get("cat_winner") for row in rows if isinstance(row, dict)][:3]
    dims = [side for side in map(_winner, named) if side is not None]
    if not dims:
        return overall
    # their blend
    blend = how.w_overall * overall + how.w_dims * sum(dims) / len(dims)
    return blend / (how.w_overall + how.w_dims)


def pair_score(answer: Answer, how: ReadingOptions) -> float | str:
    """Average the first image's share over the axes (UnifiedReward 2.0 pair score); both shares
    must sum to 1."""
    shares: dict[str, float] = {}
    form = rf"\b(\w+) Score:\s*Image 1:\s*{_NUMBER}\s*Image 2:\s*{_NUMBER}"
    for axis, first, second in re.findall(form, _plain(answer.text)):
        if abs(float(first) + float(second) - 1) <= 0.02:
            shares[axis] = float(first) / (float(first) + float(second))
    return _weighted(shares, how, "shares that sum to 1")


def acs(answer: Answer, how: ReadingOptions) -> float | str:
    """Average the axes' ratings, each / 5 (UnifiedReward ACS) -> [.2, 1].

    **Differs:** theirs fills a missing axis with the batch's mean; here the answer is missing.
    """
    found = re.findall(rf"\b(\w+) Score \(1-5\):\s*{_NUMBER}", _plain(answer.text))
    return _weighted(
        {axis: float(x) / 5 for axis, x in found if 1 <= float(x) <= 5}, how, "a rating from 1 to 5"
    )


def point(answer: Answer, how: ReadingOptions) -> float | str:
    """Read the rating after the last "Final Score:", / 5 (UnifiedReward point score) -> [.2, 1].

    **Differs:** theirs scores an unreadable answer 0; here it is missing.
    """
    found = re.findall(rf"Final Score:\s*{_NUMBER}", _plain(answer.text))
    if not found or not 1 <= float(found[-1]) <= 5:
        return "no rating from 1 to 5 after 'Final Score:'"
    return float(found[-1]) / 5


def rating(answer: Answer, how: ReadingOptions) -> float | str:
    """Read the last match of `pattern` as a number in [low, high], mapped to [0, 1] (Q-Insight:
    JSON, 1 to 5)."""
    found = [match.group(1) for match in re.finditer(how.pattern, answer.text, re.DOTALL)]
    try:
        value = float(found[-1])
    except (IndexError, TypeError, ValueError):
        return f"no number where the pattern {how.pattern} looks"
    if not how.low <= value <= how.high:
        return f"a rating of {value:g}, outside of [{how.low:g}, {how.high:g}],"
    return (value - how.low) / (how.high - how.low)


def yes_no(answer: Answer, how: ReadingOptions) -> float | str:
    """Return P(yes) of the first token (PaCo-Reward): see `_judge/answer.py`."""
    return judged.yes_no(answer, variants=how.variants)


def level(answer: Answer, how: ReadingOptions) -> float | str:
    """Return the mean digit / 5 (UniWorld-V2's reward): see `_judge/answer.py`."""
    return judged.level(answer)


_READERS: dict[str, Callable[[Answer, ReadingOptions], float | str]] = {
    "pair_rank": pair_rank,
    "think": think,
    "flex": flex,
    "pair_score": pair_score,
    "acs": acs,
    "point": point,
    "rating": rating,
    "yes_no": yes_no,
    "consistency": yes_no,
    "level": level,
}


def _plain(text: str) -> str:
    return text.replace("*", "")  # some judges write verdicts in bold


def _side(sentence: str) -> float:
    return {"1": 1.0, "2": 0.0}.get(sentence.split()[1], 0.5)


def _winner(value: Any) -> float | None:
    text = str(value).lower()
    # both numbers: the placeholder "Image 1/2" was echoed
    named = set(re.findall(r"(?<!\d)[12](?!\d)", text))
    if len(named) == 1:
        return 1.0 if named == {"1"} else 0.0
    return 0.5 if not named and re.search(r"\b(tie|tied|draw|both|equal|equally)\b", text) else None


def _weighted(found: dict[str, float], how: ReadingOptions, what: str) -> float | str:
    needed = [(axis, weight) for axis, weight in zip(AXES, how.axes, strict=True) if weight]
    for axis, _ in needed:
        if axis not in found:
            return f"no {axis} score with {what}"
    total = sum(weight * found[axis] for axis, weight in needed)
    return total / sum(weight for _, weight in needed)


def _last_object(text: str, key: str) -> dict[str, Any] | None:
    decoder, at, out = json.JSONDecoder(), text.find("{"), None
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):  # also a number of thousands of digits
            end = at + 1
        else:
            out = value if key in value else out
        at = text.find("{", end)
    return out


def _short(text: str) -> str:
    return repr(text if len(text) <= 160 else text[:60] + " ... " + text[-90:])
