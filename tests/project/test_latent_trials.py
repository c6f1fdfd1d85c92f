"""What the pages say of short runs against the judge of latents is what their file holds."""

from __future__ import annotations

import json

from docskit import PAGES, ROOT


def test_short_runs_are_as_said() -> None:
    file = ROOT / "assets/results/latent-trials.json"
    spo, dina, later = json.loads(file.read_text(encoding="utf-8"))["trials"]
    pages = [" ".join(PAGES[f"docs/methods/{name}.md"].split()) for name in ("spo", "dina_lrm")]
    first, *rest = [100 * row["strict"] for row in spo["eval"]]
    assert f"from {first:.1f} % to {rest[-1]:.1f}, at most {max(rest):.1f} between" in pages[0]
    first, *rest = [100 * row["strict"] for row in dina["eval"]]
    assert f"went from {first:.1f} % to {rest[-1]:.1f} " in pages[1]
    score = dina["reward/latent"]
    assert f"rose from {score[0]:.1f} to at most {max(score):.1f}" in pages[1]
    first, *_, last = [100 * row["strict"] for row in later["eval"]]
    after = later["eval"][-1]["iteration"]
    assert f"a run went from {first:.1f} % to {last:.1f} in {after} iterations" in pages[1]


def test_tdm_r1_was_begun_twice() -> None:
    file = ROOT / "assets/results/tdm-r1-trial.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    page = " ".join(PAGES["docs/methods/tdm_r1.md"].split())
    before, after = found["eval"]
    assert f"{len(found['reward_gap'])} of 60 iterations: {100 * before['strict']:.1f} %" in page
    assert f"{100 * after['strict']:.1f} after {after['iteration']} " in page
    second = found["second"]
    right, colours = second["right_in_training"], second["saturation"]
    best = max(right)
    assert f"from {100 * best:.1f} % of iteration {right.index(best) + 1} to" in page
    assert f"{100 * right[-1]:.1f} % of iteration {len(right)}, the last" in page
    assert set(second["clip_frac"]) == {0.0} and 0.55 < colours[-1] / colours[0] < 0.65
    assert "surrogate.lr=1.0e-3" in found["command"] and "surrogate.lr=2e-3" in second["command"]
