"""Edits on the pages: their sources are shown, and equal words about two images are two samples."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browserkit import Visit, browser
from gridkit import plain
from PIL import Image
from reportkit import answer_here, make_run
from serving import served
from starlette.testclient import TestClient

from flowrl.core.prompts import load_prompts
from flowrl.evaluation.image_grids import save_strip
from flowrl.evaluation.preference_pairs import convert_pairs
from flowrl.evaluation.sources import check_sources, source_paths
from flowrl.evaluation.votes import append_vote, read_votes
from flowrl.runs.report.page import html_report
from flowrl.runs.report.samples import sample_index, samples
from flowrl.runs.view.app import make_app

VOTER = "0123456789abcdef"
SIDES = {"one": "e@0", "two": "e@20"}
BLUE, RED, GREEN = (0, 0, 255), (255, 0, 0), (0, 255, 0)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run of four edits in the same words: of blue with red, twice of red with green, and of
    green with green."""
    make_run(tmp_path / "e", samples=2)
    strips = tmp_path / "e" / "samples"
    record = {"prompts": ["swap them"] * 4, "height": 8, "width": 8}
    (strips / "prompts.json").write_text(json.dumps(record))
    sources = [plain(BLUE, RED, RED, GREEN), plain(RED, GREEN, GREEN, GREEN)]
    save_strip(torch.cat(sources, dim=3), strips / "sources.png")
    for iteration in (0, 20):
        rng = torch.Generator().manual_seed(iteration)
        save_strip(torch.rand(4, 3, 8, 8, generator=rng), strips / f"{iteration:06d}.png")
    return tmp_path


@pytest.fixture
def client(home: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    answer_here(monkeypatch)
    return TestClient(make_app(home, home / "votes"), base_url="http://localhost")


def colour(data: bytes) -> tuple[int, ...]:
    """Return the colour in the middle of an image, rounded as WebP needs it."""
    with Image.open(io.BytesIO(data)) as image:
        levels = image.convert("RGB").getpixel((4, 4))
    assert isinstance(levels, tuple)
    return tuple(255 * round(level / 255) for level in levels)


def test_a_page_knows_sources_and_tells_equal_words_apart(home: Path) -> None:
    """Of two edits that are equal in words and sources the key counts which it is."""
    found, index = samples(home / "e"), sample_index(home / "e")
    assert found is not None and index is not None
    assert len(set(found["keys"])) == 4 and index["keys"] == found["keys"]
    assert [key.rpartition("\n")[2] for key in found["keys"]] == ["0", "0", "1", "0"]
    assert index["sources"] == [2, 2, 2, 2]
    shown = []
    for urls in found["sources"]:
        shown.append([colour(base64.b64decode(url.partition(",")[2])) for url in urls])
    assert shown == [[BLUE, RED], [RED, GREEN], [RED, GREEN], [GREEN, GREEN]]
    assert "source" in html_report(home / "e")
    # the same words and sources in another run are the same sample
    (home / "e").rename(home / "f")
    again = sample_index(home / "f")
    assert again is not None and again["keys"] == found["keys"]


def test_a_run_from_noise_has_no_sources(tmp_path: Path) -> None:
    """Its keys hold the digest of nothing, the same in every run."""
    found = sample_index(make_run(tmp_path / "a"))
    other = samples(make_run(tmp_path / "b"))
    assert found is not None and other is not None
    assert found["sources"] == [0, 0] and other["sources"] == [[], []]
    assert found["keys"] == other["keys"]


def test_sources_over_http(client: TestClient) -> None:
    place: dict[str, Any] = {"run": "e", "place": 0}
    colours = []
    for which in (0, 1):
        answer = client.get("/api/source", params={**place, "which": which})
        assert answer.headers["content-type"] == "image/png"
        colours.append(colour(answer.content))
    assert colours == [BLUE, RED]
    assert client.get("/api/source", params={**place, "which": 2}).status_code == 422
    assert client.get("/api/source", params={**place, "place": 4, "which": 0}).status_code == 422


def ballots(client: TestClient) -> Iterator[tuple[dict[str, Any], list[tuple[int, ...]]]]:
    """Vote for the left on every ballot -> each, and the colours of its sources."""
    while True:
        found = client.post("/api/ballot", json={"voter": VOTER, **SIDES}).json()
        if found["ballot"] is None:
            return
        starts = []
        for which in range(found["sources"]):
            side = {"ballot": found["ballot"], "side": f"source{which}"}
            starts.append(colour(client.get("/api/side", params=side).content))
        body = {"ballot": found["ballot"], "choice": "left", "voter": VOTER}
        assert client.post("/api/vote", json=body).status_code == 200
        yield found, starts


def test_each_edit_is_voted_on_with_its_sources(client: TestClient, home: Path) -> None:
    """All four, though their words are equal; and the votes are pairs of edits to train on."""
    shown = [(found["of"], *starts) for found, starts in ballots(client)]
    want = {(4, BLUE, RED): 1, (4, RED, GREEN): 2, (4, GREEN, GREEN): 1}
    assert Counter(shown) == want
    votes = read_votes(home / "votes")
    assert len({(vote["image_0"], vote["image_1"]) for vote in votes}) == 4
    assert all(len(vote["source"]) == 2 for vote in votes)
    done = convert_pairs(home / "votes" / "votes.jsonl", home / "pairs")
    listed = load_prompts(done.file)
    check_sources(listed, (8, 8))
    pairs = []
    for row in range(len(listed)):
        pairs.append((4, *[colour(path.read_bytes()) for path in source_paths(listed, row)]))
    assert Counter(pairs) == want


def test_a_vote_without_sources_is_still_counted(client: TestClient, home: Path) -> None:
    """As earlier votes are: it stays in the scores, and the pair is asked with its sources."""
    for _ in ballots(client):
        pass
    vote = read_votes(home / "votes")[0]
    del vote["source"]
    (home / "votes" / "votes.jsonl").unlink()
    append_vote(home / "votes", vote)
    assert [row["votes"] for row in client.get("/api/scores").json()] == [1, 1]
    assert sum(1 for _ in ballots(client)) == 4
    assert [row["votes"] for row in client.get("/api/scores").json()] == [5, 5]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.mark.integration
@pytest.mark.parametrize("width", [390, 1280])
def test_sources_in_a_browser(chromium: Any, home: Path, width: int) -> None:
    """In the report, on the live page, and beside the two images of a vote."""
    file = home / "report.html"
    file.write_text(html_report(home / "e"), encoding="utf-8")
    with served(make_app(home, home / "votes")) as url:
        for address in (file.as_uri(), f"{url}/?run=e", f"{url}/vote?one=e@0&two=e@20"):
            visit = Visit(chromium, viewport={"width": width, "height": 844})
            page = visit.page
            page.goto(address)
            if "vote" in address:
                parts, images = page.locator(".trial"), ".starts img"
            else:
                parts, images = page.locator("article"), ".source img"
                page.wait_for_selector("article")
                assert page.locator("#samples .bar-of-tools").inner_text().endswith("4 prompts")
            first = parts.first.locator(images)
            first.last.wait_for()
            assert [image.get_attribute("alt")[-8:] for image in first.all()] == [
                "source 1",
                "source 2",
            ]
            first.last.scroll_into_view_if_needed()
            page.wait_for_function(
                "images => [...document.querySelectorAll(images)].every(i => i.naturalWidth == 8)",
                arg=images,
            )
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
            assert visit.said == [] and visit.elsewhere(url) in ([], [file.as_uri()])
