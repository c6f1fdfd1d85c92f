"""The page of runs: what it is told, and what a real browser makes of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from browserkit import Visit, browser
from reportkit import TICKS, lines, make_run
from starlette.testclient import TestClient

from flowrl.config.load import flat
from flowrl.config.sections import MonitorsConfig
from flowrl.core.errors import RunError
from flowrl.evaluation.image_grids import save_strip
from flowrl.runs.report import samples
from flowrl.runs.report.columns import BANDS, Series, thinned
from flowrl.runs.report.page import html_report, source, story
from flowrl.runs.view.app import make_app

DOCTOR: dict[str, Any] = {
    "findings": [{"id": "std/last", "found": "std <b>0.3</b>", "change": "set `plan.ode_last=1`"}],
    "sections": {
        "gradient": {"skipped": "", "table": [["step", "rows", "norm"], ["0", "8", "0.5"]]},
        "memory": {"skipped": "no card", "table": []},
    },
    "settings": {"seed": 1, "note": "<script>alert(1)</script> & co", "eval": {"steps": 4}},
}


def detailed(folder: Path, **options: Any) -> Path:
    """A run with everything that a page can show."""
    run = make_run(folder, **options)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    more = {f"ratio/step{k}": 1 + k / 10 for k in range(3)}
    lines(run / "metrics.jsonl", [{**row, **more, "zero_std": 0.25} for row in rows])
    counted = []
    for row in rows:
        shape = {"low": -1.0, "high": 1.0, "counts": [row["iteration"], 2, 1]}
        counted.append({"iteration": row["iteration"], "reward": shape, "advantage": None})
    lines(run / "histograms.jsonl", counted)
    told = {"iteration": 4, "monitor": "ratio", "what": "it <i>grew</i>", "advice": "Lower it"}
    lines(run / "findings.jsonl", [{**told, "action": "warn"}])
    (run / "doctor.json").write_text(json.dumps(DOCTOR))
    (run / "environment.json").write_text(json.dumps({"torch": "2.9", "gpus": ["one"]}))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = detailed(tmp_path / "first & <b>bold")
    second = detailed(tmp_path / "second", shift=0.1, samples=2)
    (second / "config.yaml").write_text("seed: 1\nnote: plain\n")
    return [first, second]


def test_a_story_of_everything(runs: list[Path]) -> None:
    told = story(runs[0])
    assert told["facts"]["held-out strict score"] == "0.400 → 0.700"
    assert told["facts"]["95 % interval after"] == "0.680 to 0.720"
    assert told["config"] == {"seed": "0", "note": "<script>alert(1)</script> & co"}
    # the doctor saw seed 1; `eval` says only when a run looks at itself
    assert told["doctor"]["other"] == ["seed"]
    assert told["doctor"]["skipped"] == {"memory": "no card"}
    assert list(told["doctor"]["tables"]) == ["gradient"]
    [ratio] = told["by_step"]
    assert ratio["steps"] == [0, 1, 2] and [row[0] for row in ratio["rows"]] == [1, 1.1, 1.2]
    titles = {panel["title"] for panel in told["panels"]}
    assert {"Held-out strict score", "Groups without spread (zero std)"} <= titles
    assert "Seconds by phase" in titles and "Learning rate" not in titles


def test_bands_begin_where_the_runs_monitors_speak(tmp_path: Path) -> None:
    run = detailed(tmp_path / "run")
    (run / "config.yaml").write_text("monitors: {zero_std: {share: 0.8}, ratio: {clip: true}}\n")
    panels = {panel["title"]: panel for panel in story(run)["panels"]}
    zero = panels["Groups without spread (zero std)"]
    assert zero["band"] == {"limit": 0.8, "side": "above"}
    assert zero["group"] == panels["Training reward"]["group"] == "Is it learning?"
    assert panels["Held-out strict score"]["group"] == "Is it better?"
    assert (
        panels["Gradient norm"]["group"] == "Is it safe?" and "band" not in panels["Gradient norm"]
    )
    assert panels["Seconds by phase"]["group"] == "Time"
    # every band is that of a setting that there is
    known = flat(asdict(MonitorsConfig()), "monitors")
    assert {key for key, _ in BANDS.values()} <= set(known)


def test_a_long_curve_is_thinned_to_means_of_equal_stretches() -> None:
    """Of 0..1001 in stretches of 16: 7.5, 23.5, ..., and ten that are left: the mean of 992 to
    1001. The NaN is left out of its mean."""
    x = [float(i) for i in range(1002)]
    line = Series(numpy.array(x), numpy.array([math.nan, *x[1:]]))
    few = thinned(line, 100)
    assert few.x.tolist() == [*(7.5 + 16 * i for i in range(62)), 996.5]
    assert few.y.tolist() == [8.0, *(7.5 + 16 * i for i in range(1, 62)), 996.5]


def test_nothing_of_a_run_is_markup_or_comes_from_elsewhere(runs: list[Path]) -> None:
    text = html_report(*runs)
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None and "<" not in data[1]
    assert len(json.loads(data[1])) == 2
    assert text.count("<script") == text.count("</script>") == 2
    assert not re.search(r"(?:src|href)=.https?:|@import|fetch\(", text)
    assert "script-src 'sha256-" in text and "default-src 'none'" in text
    assert len(text) < 200_000


def test_images_are_evenly_spaced_and_keep_to_their_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", samples=11)
    monkeypatch.setattr(samples, "MOST", 3)
    found = samples.samples(run)
    assert found is not None and found["iterations"] == [0, 100, 200]
    # noise takes the most; of it three quarters of what the best quality takes
    noise = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    about = json.loads((run / "samples" / "prompts.json").read_text())
    for file in (run / "samples").glob("0*.png"):
        save_strip(noise, file)
    # a strip of eight frames, as far as its width goes
    with pytest.raises(
        RunError, match=r"height and width \(8, 8\) as prompts.json says, got \(64, 8\)"
    ):
        samples.samples(run)
    about |= {"height": 64, "width": 64}
    (run / "samples" / "prompts.json").write_text(json.dumps(about))
    whole = total(run, 10**6)
    assert 0 < total(run, whole * 3 // 4) <= whole * 3 // 4 + 100


def total(run: Path, budget: int) -> int:
    """Bytes of a run's images: of base64 three in four characters."""
    found = samples.samples(run, budget=budget)
    assert found is not None
    urls = [url for row in found["images"] for url in row]
    return sum(len(url.partition(",")[2]) * 3 // 4 for url in urls)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.yaml", "[1]", "expected a mapping"),
        ("config.yaml", "a: [", "cannot read"),
        ("doctor.json", '{"sections": [1]}', "flowrl doctor --run"),
        ("doctor.json", '{"sections": {"ratio": 5}}', "doctor.json.*makes it anew, or delete it"),
        ("doctor.json", '{"sections": {"ratio": {"table": 5}}}', "flowrl doctor --run"),
        ("doctor.json", '{"sections": {"ratio": {"table": [["a"], [NaN]]}}}', "doctor --run"),
        ("doctor.json", '{"sections": {"ratio": {"skipped": 5}}}', "flowrl doctor --run"),
        ("doctor.json", '{"findings": ["a"]}', "flowrl doctor --run"),
        ("doctor.json", '{"settings": 5, "findings": []}', "flowrl doctor --run"),
        ("findings.jsonl", '{"iteration": 1, "x": NaN}\n', "findings.jsonl, line 1: .*NaN is no"),
        ("histograms.jsonl", '{"iteration": 1, "x": Infinity}\n', "write null in its place"),
        ("summary.json", '{"before": {}, "after": {}}', "summary, 'before'"),
    ],
)
def test_a_damaged_file_is_named(runs: list[Path], name: str, text: str, message: str) -> None:
    (runs[0] / name).write_text(text)
    with pytest.raises(RunError, match=message):
        html_report(*runs)
    # and a page that looks at it live says the same
    view = TestClient(make_app(runs[0].parent, runs[0] / "votes"), base_url="http://localhost")
    answer = view.get("/api/story", params={"run": runs[0].name})
    assert answer.status_code == 422 and re.search(message, answer.json()["error"])


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\ntrain: {iterations: 9}\n")
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0, "rew')  # torn
    assert story(tmp_path)["facts"] == {"iterations logged": "0 of 9"}
    assert "9" in html_report(tmp_path)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.mark.integration
@pytest.mark.parametrize("phone", [False, True])
def test_the_page_in_a_browser(
    chromium: Any, runs: list[Path], tmp_path: Path, phone: bool
) -> None:
    file = tmp_path / "report.html"
    file.write_text(html_report(*runs), encoding="utf-8")
    size = {"width": 390, "height": 844} if phone else {"width": 1280, "height": 900}
    visit = Visit(chromium, viewport=size, color_scheme="dark", offline=True)
    page = visit.page
    page.goto(file.as_uri())
    # the slider by keyboard: 40 is the last iteration of the first run, 20 of the second
    first, second = page.locator("article").first.locator("figure.now img").all()
    assert (first.get_attribute("data-iteration"), second.get_attribute("data-iteration")) == (
        "40",
        "20",
    )
    after = first.get_attribute("src")
    page.keyboard.press("ArrowLeft")
    assert page.locator("output").first.inner_text() == "iteration 20"
    assert first.get_attribute("src") != after
    page.keyboard.down("b")
    assert page.locator("output").first.inner_text() == "before training"
    page.keyboard.up("b")
    page.locator("#checkpoint").fill("2")
    assert (
        first.get_attribute("src") == after and first.evaluate("image => image.naturalWidth") == 8
    )
    # search
    page.keyboard.press("/") if not phone else page.locator("#search").focus()
    page.keyboard.type("zzz")
    assert page.locator("article:visible").count() == 0
    page.locator("#search").fill("")
    # a curve is read by keyboard: reward 0.44 at the last of 45 iterations, 0.43 before it
    curve = page.locator("figure", has_text="Training reward").first
    curve.focus()
    page.keyboard.press("ArrowLeft")
    assert "0.43" in curve.locator(".reading").inner_text()
    assert "0.900 [0.850, 0.950]" in page.locator("#before-after").inner_text()
    # what differs, findings, the doctor
    assert "note" in page.locator("#config").inner_text()
    assert "it <i>grew</i>" in page.locator("#monitors").inner_text()
    assert "std <b>0.3</b>" in page.locator("#doctor").inner_text()
    assert page.locator("h1").first.inner_text().endswith("first & <b>bold")
    # nothing sticks out of the screen, is missing or was refused
    wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(22, 24, 28)"  # --paper of the dark
    assert visit.said == [] and visit.elsewhere(file.as_uri()) == []


@pytest.mark.integration
def test_ticks_of_the_page_go_by_the_span(chromium: Any) -> None:
    """As those of the picture do."""
    page = Visit(chromium).page
    page.set_content("<main></main>")
    page.add_script_tag(content=source("elements.js") + source("charts.js"))
    for values, texts in TICKS:
        assert page.evaluate("values => tickTexts(values)", values) == texts.split()
