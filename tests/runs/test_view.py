"""Runs live in a browser, and the blind vote: over HTTP, and in a real browser."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from browserkit import Visit, browser
from reportkit import answer_here, make_run
from serving import served
from starlette.testclient import TestClient

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.image_grids import save_strip
from flowrl.evaluation.preference_pairs import check_pairs, convert_pairs
from flowrl.evaluation.votes import ask_people, keep_image, pair_of, read_votes
from flowrl.runs.view.app import make_app, serve_view

VOTER = "0123456789abcdef"
SIDES = {"one": "a@0", "two": "a@40"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two runs: one that can be looked at, one that is damaged."""
    make_run(tmp_path / "a")
    for iteration in (0, 40):
        rng = torch.Generator().manual_seed(iteration)
        save_strip(
            torch.rand(2, 3, 8, 8, generator=rng), tmp_path / f"a/samples/{iteration:06d}.png"
        )
    make_run(tmp_path / "deep" / "b")
    (tmp_path / "deep" / "b" / "metrics.jsonl").write_text("[]\n{}\n")
    return tmp_path


@pytest.fixture
def client(home: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    answer_here(monkeypatch)
    return TestClient(make_app(home, home / "votes"), base_url="http://localhost")


def test_what_is_listed_and_told(client: TestClient, home: Path) -> None:
    listed = {run["id"]: run for run in client.get("/api/runs").json()}
    assert set(listed) == {"a", "deep/b"}
    assert listed["a"]["iterations"] == 45 and listed["a"]["score"] == 0.7
    assert listed["deep/b"]["state"] == "damaged" and "line 1" in listed["deep/b"]["error"]
    told = client.get("/api/story", params={"run": "a"}).json()
    assert told["samples"]["iterations"] == [0, 20, 40]
    assert client.get("/api/samples", params={"run": "a"}).json() == [0, 20, 40]
    known = {"run": "a", "known": told["stamp"]}
    assert client.get("/api/story", params=known).status_code == 204
    with (home / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 45, "reward": 1}\n')
    assert client.get("/api/story", params=known).json()["stamp"] != told["stamp"]
    assert client.get("/api/story", params={"run": "deep/b"}).status_code == 422


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/files/app.py", 404),
        ("/files/report.html", 404),
        ("/favicon.ico", 204),
        ("/api/story?run=../a", 404),
        ("/api/image?run=a&iteration=0&place=0", 200),
        ("/api/image?run=a&iteration=1&place=0", 422),
        ("/api/image?run=a&iteration=-1&place=0", 400),
        ("/api/image?run=a&iteration=0&place=99", 422),
        ("/api/side?ballot=x&side=left", 410),
    ],
)
def test_what_is_refused(client: TestClient, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"voter": "x"}, 400),
        ({"voter": VOTER, "one": "a", "two": "a@0"}, 400),
        ({"voter": VOTER, "one": "a@0", "two": "a@0"}, 422),
        ({"voter": VOTER, "one": "a@0", "two": "no@0"}, 422),
        ({"voter": VOTER, "one": 3, "two": "a@0"}, 400),
        ({"voter": VOTER, "extra": "x"}, 400),
    ],
)
def test_which_ballots_are_refused(client: TestClient, asked: Any, status: int) -> None:
    assert client.post("/api/ballot", json=asked).status_code == status


def test_looking_has_no_effect(client: TestClient, home: Path) -> None:
    """No address that is merely looked at hands out a ballot, or writes a file."""
    before = sorted(home.rglob("*"))
    params = {"voter": VOTER, **SIDES}
    for path in ("/", "/vote", "/api/runs", "/api/ballot", "/api/vote", "/api/scores"):
        client.get(path, params=params)
    assert sorted(home.rglob("*")) == before
    assert client.get("/api/ballot", params=params).status_code == 405
    # a form of another page cannot say that it sends JSON
    text = {"Content-Type": "text/plain"}
    assert client.post("/api/ballot", content=json.dumps(params), headers=text).status_code == 415
    twice = {"Content-Type": "application/json"}
    body = f'{{"voter": "{VOTER}", "voter": "{VOTER}"}}'
    answer = client.post("/api/ballot", content=body, headers=twice)
    assert answer.status_code == 400 and "stands twice" in answer.json()["error"]


FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": "http://localhost:9"},
    {"Origin": "null"},
    {"Origin": "http://[::1"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
]
OWN = [
    {},
    {"Origin": "http://localhost"},
    {"Sec-Fetch-Site": "same-origin", "Origin": "https://behind.a.proxy"},
    {"Sec-Fetch-Site": "none"},
]


@pytest.mark.parametrize("token", [b"", b"correct horse"])
def test_pages_of_other_sites_are_refused(home: Path, token: bytes) -> None:
    """Another port of this machine is another site, too."""
    client = TestClient(make_app(home, home / "votes", token), base_url="http://localhost")
    bearer = {"Authorization": f"Bearer {token.decode()}"} if token else {}
    asked = {"voter": VOTER, **SIDES}
    for headers in FOREIGN:
        assert client.get("/api/runs", headers=bearer | headers).status_code == 403, headers
        answer = client.post("/api/ballot", json=asked, headers=bearer | headers)
        assert answer.status_code == 403, headers
    assert not (home / "votes").exists()
    for headers in OWN:
        answer = client.post("/api/ballot", json=asked, headers=bearer | headers)
        assert answer.status_code == 200, headers
    # a link from elsewhere may be followed
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    link["Sec-Fetch-Dest"] = "document"
    assert client.get("/", headers=bearer | link).status_code == 200


def test_who_is_refused(home: Path) -> None:
    app = make_app(home, home / "votes")
    # a page from elsewhere whose name leads here
    assert TestClient(app, base_url="http://evil.example").get("/").status_code == 403
    here = TestClient(app, base_url="http://localhost")
    for host, status in {"[::1": 403, "[::1]:8322": 200, "": 403, "127.0.0.1": 200}.items():
        assert here.get("/", headers={"Host": host}).status_code == status
    guarded = TestClient(make_app(home, home / "votes", b"correct horse"), base_url="http://box")
    assert guarded.get("/api/runs").status_code == 401
    assert guarded.get("/?token=wrong").status_code == 401
    bearer = {"Authorization": "Bearer correct horse"}
    assert guarded.get("/api/runs", headers=bearer).status_code == 200
    assert guarded.get("/?token=correct horse").status_code == 200  # and has the cookie from now on
    assert guarded.get("/api/runs").status_code == 200
    with pytest.raises(ConfigError, match="token"):
        serve_view(home, box=home / "votes", host="0.0.0.0", port=0)


def test_a_script_is_told_the_address(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line of JSON and nothing else, and a server that listens there."""
    found: dict[str, Any] = {}

    def run(self: Any, sockets: list[socket.socket]) -> None:
        found["port"] = sockets[0].getsockname()[1]

    monkeypatch.setattr("uvicorn.Server.run", run)
    assert main(["view", str(home), "--port", "0", "--json", "-"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    url = f"http://127.0.0.1:{found['port']}"
    runs = {"runs": 2, "votes": str(home / "votes")}
    assert json.loads(line) == {"url": url, "token": False, **runs}
    assert main(["view", str(home), "--port", "0", "--json", str(home / "at.json")]) == 0
    assert json.loads((home / "at.json").read_text())["runs"] == 2
    assert "2 runs at http://127.0.0.1:" in capsys.readouterr().out


def cast(client: TestClient, ballot: str, choice: str, voter: str = VOTER) -> int:
    body = {"ballot": ballot, "choice": choice, "voter": voter}
    return client.post("/api/vote", json=body).status_code


def test_a_vote_is_blind_shuffled_and_counted_once(client: TestClient, home: Path) -> None:
    left: Counter[str] = Counter()
    for number in range(40):
        found = client.post("/api/ballot", json={"voter": f"{number:08x}", **SIDES})
        assert "a@" not in found.text and "images/" not in found.text
        ballot = found.json()["ballot"]
        image = client.get("/api/side", params={"ballot": ballot, "side": "left"}).content
        assert cast(client, ballot, "left", f"{number:08x}") == 200
        assert cast(client, ballot, "right", f"{number:08x}") == 200  # a second click
        vote = read_votes(home / "votes")[-1]
        assert (home / "votes" / vote["image_0"]).read_bytes() == image
        assert vote["label_0"] == 1
        left[vote["name_0"]] += 1
    assert len(read_votes(home / "votes")) == 40
    # of 40 fair coins both sides come up at least 8 times but in one of 27,000 runs
    assert min(left["a@0"], left["a@40"]) >= 8
    assert cast(client, "unknown", "left") == 410 and cast(client, ballot, "up") == 422
    plain = client.post("/api/vote", content="{}", headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415
    assert client.post("/api/vote", json={"ballot": "x" * 5000}).status_code == 413


def test_two_browsers_at_once_lose_nothing(client: TestClient, home: Path) -> None:
    def person(number: int) -> int:
        voter, votes = f"{number:08x}", 0
        while True:
            found = client.post("/api/ballot", json={"voter": voter, **SIDES}).json()
            if found["ballot"] is None:
                return votes
            assert cast(client, found["ballot"], "tie", voter) == 200
            votes += 1

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(person, range(4))) == [2, 2, 2, 2]  # two prompts each
    assert len(read_votes(home / "votes")) == 8


def test_votes_are_scored_and_train_offline(client: TestClient, home: Path) -> None:
    """Three voters on two prompts; the later checkpoint wins one 3:0, the other 2:1."""
    for number in range(3):
        for _ in range(2):
            params = {"voter": f"{number:08x}", **SIDES}
            found = client.post("/api/ballot", json=params).json()
            shown = client.get("/api/side", params={"ballot": found["ballot"], "side": "left"})
            after: dict[str, Any] = {
                "run": "a",
                "iteration": 40,
                "place": ["a", "b"].index(found["prompt"]),
            }
            is_after = client.get("/api/image", params=after).content == shown.content
            later = "left" if is_after else "right"
            wrong = number == 0 and found["prompt"] == "a"
            other = {"left": "right", "right": "left"}[later]
            cast(client, found["ballot"], other if wrong else later, f"{number:08x}")
    before, after = client.get("/api/scores").json()
    # 5 wins against 1, each with half a win more: log(5.5 / 1.5)
    assert (before["name"], after["name"], after["votes"]) == ("a@0", "a@40", 6)
    assert after["score"] == pytest.approx(1.2993, abs=1e-4) and after["low"] < after["score"]
    done = convert_pairs(home / "votes" / "votes.jsonl", home / "pairs")
    assert (done.kept, done.ties) == (2, 0)
    check_pairs(load_prompts(done.file))


def test_a_link_opens_the_vote_and_nothing_else(home: Path) -> None:
    """Also on a server that asks all others for a token; until it is taken back."""
    box, token = home / "votes", b"correct horse"
    guarded = TestClient(make_app(home, box, token), base_url="http://box")
    viewer = {"Authorization": f"Bearer {token.decode()}"}
    assert guarded.post("/api/link", json=SIDES).status_code == 401
    wrong = {"one": "a@0", "two": "gone@0"}
    assert guarded.post("/api/link", json=wrong, headers=viewer).status_code == 422
    made = guarded.post("/api/link", json=SIDES, headers=viewer).json()
    assert made == guarded.post("/api/link", json=SIDES, headers=viewer).json()
    assert (box / "links.json").stat().st_mode & 0o077 == 0
    # whoever has it votes, by any name of the machine, also on a server that began anew
    path = made["path"]
    client = TestClient(make_app(home, box), base_url="http://a.tunnel")
    assert client.get("/").status_code == 403
    page = client.get(path)
    assert page.status_code == 200 and "/api/runs" not in page.text and ">runs<" not in page.text
    assert f"{path}/files/vote.js" in page.text
    ballot = client.post(f"{path}/api/ballot", json={"voter": VOTER})
    assert ballot.json()["of"] == 2 and "a@" not in ballot.text
    side = {"ballot": ballot.json()["ballot"], "side": "left"}
    assert client.get(f"{path}/api/side", params=side).status_code == 200
    body = {"ballot": side["ballot"], "choice": "left", "voter": VOTER}
    assert client.post(f"{path}/api/vote", json=body).status_code == 200
    (vote,) = read_votes(box)
    assert {vote["name_0"], vote["name_1"]} == {"a@0", "a@40"} and len(vote["link"]) == 8
    # and nothing else: no other pair, no page, no result, no further link
    chosen = {"voter": VOTER, "one": "a@0", "two": "a@20"}
    assert client.post(f"{path}/api/ballot", json=chosen).status_code == 400
    for other in ("scores", "runs", "story", "samples", "image", "thumbnail", "link"):
        assert client.get(f"{path}/api/{other}").status_code == 404
        assert client.post(f"{path}/api/{other}", json={}).status_code == 404
    for other in (f"{path}x", "/v/", "/v/../api/runs", f"{path}/files/links.json"):
        assert client.get(other).status_code in (403, 404), other
    bearer = {"Authorization": f"Bearer {made['token']}"}
    assert guarded.get("/api/runs", headers=bearer).status_code == 401
    assert guarded.get(f"/?token={made['token']}").status_code == 401
    for headers in FOREIGN:
        answer = client.post(f"{path}/api/ballot", json={"voter": VOTER}, headers=headers)
        assert answer.status_code == 403, headers
    here = TestClient(make_app(home, box), base_url="http://localhost")
    assert here.post("/api/link", json={"take_back": made["token"]}).json()["taken_back"]
    assert client.get(path).status_code == 404
    assert client.post(f"{path}/api/ballot", json={"voter": VOTER}).status_code == 404


@pytest.mark.parametrize(
    ("about", "said"),
    [("a@0", "expected RUN@N,RUN@N or waiting"), ("a@0,b@1", "there is no run 'b'")],
)
def test_a_link_of_the_command(
    about: str,
    said: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    line = ["view", str(home), "--port", "0", "--vote-link"]
    assert main([*line, about]) == 2 and said in capsys.readouterr().err
    for right in ("a@0,a@40", "waiting"):
        assert main([*line, right]) == 0
        _, sent = capsys.readouterr().out.splitlines()
        assert sent.startswith("to send, for votes and nothing else: http://127.0.0.1:")
        client = TestClient(make_app(home, home / "votes"), base_url="http://localhost")
        assert client.get(f"/v/{sent.rpartition('/')[2]}").status_code == 200


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.mark.integration
def test_the_live_page_in_a_browser(chromium: Any, home: Path) -> None:
    with served(make_app(home, home / "votes")) as url:
        visit = Visit(chromium, color_scheme="dark", viewport={"width": 390, "height": 844})
        page = visit.page
        page.goto(url)
        page.get_by_label("show a", exact=True).check()
        page.wait_for_selector("figure.chart")
        image = page.locator("article figure.now img").first
        assert image.get_attribute("data-iteration") == "40"
        page.locator("#checkpoint").fill("1")
        # the run goes on: the curve grows, and the slider stays where it was put
        rows = (home / "a" / "metrics.jsonl").read_text()
        (home / "a" / "metrics.jsonl").write_text(rows + '{"iteration": 45, "reward": 9}\n')
        curve = page.locator("figure", has_text="Training reward").locator(".reading")
        curve.get_by_text("iteration 45").wait_for()
        assert "9" in curve.inner_text()
        assert page.locator("#checkpoint").input_value() == "1"
        assert image.get_attribute("data-iteration") == "20"
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        row = page.locator("tr[data-run='deep/b']").inner_text()
        assert "✗ damaged" in row and "metrics.jsonl, line 1" in row
        # a row is a link, and keeps its picture
        page.locator("tr[data-run=a] td.state").click()
        page.wait_for_url("**/?run=a")
        page.wait_for_selector("figure.chart")
        assert page.locator("tr[data-run=a] img").evaluate("image => image.naturalWidth") > 0
        assert visit.said == [] and visit.elsewhere(url) == []


@pytest.mark.integration
def test_the_vote_in_two_browsers(chromium: Any, home: Path) -> None:
    with served(make_app(home, home / "votes")) as url:
        visits = [Visit(chromium), Visit(chromium, viewport={"width": 390, "height": 844})]
        for visit in visits:
            visit.page.goto(f"{url}/vote?one=a@0&two=a@40")
            visit.page.wait_for_selector("#left img")
        for key, left in (("ArrowLeft", 1), (" ", 0)):
            for visit in visits:
                visit.page.keyboard.press(key)
            for visit in visits:
                if left:
                    visit.page.get_by_text(f"{left} left of 2").wait_for()
                else:
                    visit.page.wait_for_selector("#nothing")
        votes = read_votes(home / "votes")
        assert Counter(vote["label_0"] for vote in votes) == {1: 2, 0.5: 2}
        assert len({vote["voter"] for vote in votes}) == 2
        visits[0].page.wait_for_selector("#result")
        # a run in training asks: the page that waits shows it by itself
        page = visits[1].page
        page.locator("#one").select_option("")
        page.get_by_text("No run waits").wait_for()
        other = keep_image(home / "votes", (home / "a" / "samples" / "000020.png").read_bytes())
        ask_people(home / "votes", [pair_of("a waiting prompt", votes[0]["image_0"], other)])
        page.get_by_text("a waiting prompt").wait_for()
        page.locator("#right").click()
        page.wait_for_selector("#nothing")
        assert read_votes(home / "votes")[-1]["label_0"] == 0
        for visit in visits:
            assert visit.said == [] and visit.elsewhere(url) == []


@pytest.mark.integration
def test_a_link_in_a_browser(chromium: Any, home: Path) -> None:
    """One makes it, the other opens it on a phone, votes by touch, and finds it taken back."""
    with served(make_app(home, home / "votes")) as url:
        owner = Visit(chromium)
        owner.page.goto(f"{url}/vote?one=a@0&two=a@40")
        owner.page.locator("#send").click()
        link = owner.page.locator("#address").input_value()
        assert link.startswith(f"{url}/v/")
        phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
        voter = Visit(chromium, color_scheme="dark", **phone)
        voter.page.goto(link)
        for left in (2, 1):
            voter.page.get_by_text(f"{left} left of 2").wait_for()
            voter.page.locator("#left").tap()
        voter.page.get_by_text("You have voted on all 2").wait_for()
        assert voter.page.locator("nav a, select, #result").count() == 0
        assert voter.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert all(asked.startswith(link) for asked in voter.asked)
        assert Counter(vote["label_0"] for vote in read_votes(home / "votes")) == {1: 2}
        owner.page.get_by_text("take it back").click()
        owner.page.get_by_text("opens nothing any more").wait_for()
        assert owner.said == [] and voter.said == []
        assert voter.page.goto(link).status == 404
