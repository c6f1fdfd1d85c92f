"""What the pages say of learned initial noise is what its result files hold."""

from __future__ import annotations

import json
from typing import Any

from docskit import PAGES, ROOT


def read(name: str) -> dict[str, Any]:
    """Read a result file of a comparison."""
    file = ROOT / f"assets/results/compare-{name}.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


def points(share: float) -> str:
    return f"{100 * share:.1f}"


def test_at_first_a_noise_of_its_own_showed_nothing() -> None:
    result, page = read("own-noise"), " ".join(PAGES["docs/compare.md"].split())
    gains = {entry["name"]: entry["summary"]["nfe"]["gain"] for entry in result["configs"]}
    mean, low, high = map(points, gains["shapes-find-own"])
    assert f"FIND gains {mean} points ({low} to {high}) after 43 iterations" in page
    mean, low, high = map(points, gains["shapes-zo-rank-sgd"])
    assert f"ZO-RankSGD {mean} ({low} to {high})" in page
    assert all(gain[1] < 0 for gain in gains.values())
    beside = [read(f"own-noise-{name}")["strict"] for name in ("guided", "best-of-8")]
    ends = [entry["summary"]["nfe"]["mean"] for entry in result["configs"]]
    assert max(ends) < beside[0] < beside[1] == 1


def test_noises_drawn_closer_gain() -> None:
    """Both gains with their intervals, where their seeds end, and what stands beside them."""
    result, page = read("narrow"), " ".join(PAGES["docs/compare.md"].split())
    ends = {}
    for name, words in (("zo-rank-sgd", "ZO-RankSGD"), ("find-narrow", "FIND")):
        (entry,) = [one for one in result["configs"] if one["name"] == f"shapes-{name}"]
        end = entry["summary"]["nfe"]
        ends[name] = end["mean"]
        mean, low, high = map(points, end["gain"])
        assert end["gain"][1] > 0 and [seed["seed"] for seed in entry["seeds"]] == [0, 1, 2]
        scores = [points(seed["at"]["nfe"]["score"]) for seed in entry["seeds"]]
        said = f"**{words} gains {mean} points** ({low} to {high}) after {end['iteration']:.0f}"
        assert said in page
        assert f"its seeds end at {scores[0]}, {scores[1]} and {scores[2]} %" in page
    guided, best = (read(f"narrow-{name}")["strict"] for name in ("guided", "best-of-8"))
    assert guided < min(ends.values()) and max(ends.values()) < best
    assert f"guidance {points(guided)} %, the best of eight {points(best)} %" in page


def test_the_trials_of_noise_are_as_told() -> None:
    """Which of twelve other prompts, how alike their images became, and what was tried."""
    file = ROOT / "assets/results/noise-trials.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    page = " ".join(PAGES["docs/methods/initial_noise.md"].split())
    lists = {}
    for name in ("few", "train"):
        rows = (ROOT / f"assets/shapes/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        lists[name] = {json.loads(row)["prompt"]: json.loads(row)["include"] for row in rows}
    assert len(found["prompts"]) == 12
    for text in found["prompts"]:
        assert lists["train"][text] not in lists["few"].values()
    (wide,) = [row for row in found["trials"] if row["overrides"] == "optimizer.lr=2.0e-2"]
    narrow = "likelihood.start=noise likelihood.spread=0.3 optimizer.lr=2.0e-2"
    (chosen,) = [row for row in found["trials"] if row["overrides"] == narrow]
    first, last = (chosen["diversity"][place] for place in (0, -1))
    said = f"is {wide['diversity'][0]:.2f} from N(0, 1), and in the trial that chose the config"
    assert f"{said} it was {first:.2f} at first, around one noise, and {last:.2f} at the" in page
