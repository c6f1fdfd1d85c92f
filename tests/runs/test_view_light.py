"""What the live view costs beside a training: its memory, its processor time, what it sends; and
the state of a run, which its folder's lock says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from browserkit import Visit, browser
from reportkit import lines, make_run
from serving import served

from flowrl.runs.folder import is_locked, lock, try_lock
from flowrl.runs.view.app import make_app
from flowrl.runs.view.listing import Listing

ROOT = Path(__file__).resolve().parents[2]
RUNS, ITERATIONS, POLLS, EVERY = 50, 2000, 20, 2.0
MOST_MB, MOST_SHARE = 80, 0.02  # of memory, and of a core


def metrics_of(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Make up lines of metrics.jsonl as wide as those of real runs."""
    more = {f"ratio/step{k}": 1.0 for k in range(8)}
    rows = []
    for i in range(start, start + count):
        rows.append({"iteration": i, "reward": i / 1000, "grad_norm": 0.5, "kl": 1e-3, **more})
    return rows


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty runs of two thousand iterations, one of which is damaged."""
    home = tmp_path_factory.mktemp("many")
    first = make_run(home / "run00", iterations=5)
    (first / "config.yaml").write_text("train: {iterations: 4000}\n")
    timing = [{"iteration": i, "rollout": 2.0, "total": 3.0} for i in range(ITERATIONS)]
    lines(first / "metrics.jsonl", metrics_of(ITERATIONS))
    lines(first / "timing.jsonl", timing)
    for number in range(1, RUNS):
        subprocess.run(["cp", "-r", first, home / f"run{number:02d}"], check=True)
    (home / "run07" / "metrics.jsonl").write_text("[]\n{}\n")
    return home


SERVER = """
import json, resource, sys, threading, time
from pathlib import Path
import socket, uvicorn
from flowrl.core.local_server import UVICORN
from flowrl.runs.view.app import make_app

home = Path(sys.argv[1])
server = uvicorn.Server(uvicorn.Config(make_app(home, home / "votes"), **UVICORN))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)

def peak():  # ru_maxrss begins with that of the process that started this one
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024

def tell():
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        heavy = {"torch", "scipy", "diffusers", "transformers", "matplotlib"} & {*sys.modules}
        print(json.dumps({"mb": peak(), "heavy": sorted(heavy),
                          "seconds": used.ru_utime + used.ru_stime}), flush=True)
    server.should_exit = True

threading.Thread(target=tell, daemon=True).start()
server.run(sockets=[listener])
"""


@pytest.mark.integration
def test_fifty_long_runs_take_little_memory_and_time(many: Path) -> None:
    """A page that looks every two seconds and shows a run; the server is a process of its own."""
    import httpx2

    command = [sys.executable, "-c", SERVER, str(many)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None

        def usage() -> dict[str, Any]:
            print("", file=process.stdin, flush=True)
            assert process.stdout is not None
            return json.loads(process.stdout.readline())

        with httpx2.Client(base_url=f"http://127.0.0.1:{int(process.stdout.readline())}") as ask:
            # the first answer comes soon, and those after it are of more and more runs
            answer = ask.get("/api/runs")
            while any("reading" in run for run in answer.json()):
                answer = ask.get("/api/runs")
            listed = answer.json()
            assert len(listed) == RUNS
            assert [run["id"] for run in listed if run["state"] == "damaged"] == ["run07"]
            told = ask.get("/api/story", params={"run": "run00"}).json()
            assert told["name"] == "run00"
            for run in listed:
                if run["state"] != "damaged":
                    shown: dict[str, Any] = {"run": run["id"], "iteration": run["sample"]}
                    assert ask.get("/api/thumbnail", params=shown).status_code == 200
            image: dict[str, Any] = {"run": "run00", "iteration": 40, "place": 0}
            assert ask.get("/api/image", params=image).status_code == 200
            # what one page asks for in POLLS times EVERY seconds
            before = usage()
            for _ in range(POLLS):
                known = {"known": answer.headers["X-Known"]}
                assert ask.get("/api/runs", params=known).status_code == 204
                same = {"run": "run00", "known": told["stamp"]}
                assert ask.get("/api/story", params=same).status_code == 204
            after = usage()
        process.stdin.close()
    share = (after["seconds"] - before["seconds"]) / (POLLS * EVERY)
    print(f"{after['mb']:.1f} MB, {100 * share:.2f} % of a core")
    assert after["heavy"] == []
    assert after["mb"] < MOST_MB
    assert share < MOST_SHARE


def test_the_lock_says_what_state_a_run_is_in(tmp_path: Path) -> None:
    """A run whose iteration takes hours is training; one that was written to just now and let go
    is stopped; one of a comparison ends without a summary."""
    run = make_run(tmp_path / "a")
    listing = Listing(tmp_path)

    def state() -> str:
        (line,) = listing.lines()
        return str(line["state"])

    assert state() == "done"
    (run / "summary.json").unlink()
    assert state() == "stopped"
    with lock(run, mend="wait"):
        long_ago = time.time() - 7200
        for file in run.rglob("*"):
            os.utime(file, (long_ago, long_ago))
        assert state() == "training"
        # a run that goes on after its end trains, too
        (run / "summary.json").write_text("{}")
        assert state() == "training"
    (run / "summary.json").unlink()
    (run / "result.json").write_text("{}")
    assert state() == "done"


def test_to_look_takes_no_lock_away(tmp_path: Path) -> None:
    """Nothing is made by looking, and whoever comes while somebody looks gets the folder."""
    assert not is_locked(tmp_path / "none") and not is_locked(tmp_path)
    assert [*tmp_path.iterdir()] == []
    with lock(tmp_path, mend="wait"):
        assert is_locked(tmp_path) and try_lock(tmp_path) is None
    assert not is_locked(tmp_path)
    code = "import sys; from pathlib import Path; from flowrl.runs.folder import is_locked\n"
    code += "print(flush=True)\nwhile True: is_locked(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        taken = 0
        for _ in range(300):
            found = try_lock(tmp_path)
            taken += found is not None
            if found is not None:
                found.release()
        process.kill()
    assert taken == 300


def test_a_log_that_grows_is_read_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (run / "config.yaml").write_text("train: {iterations: 60}\n")
    listing = Listing(tmp_path)
    (line,) = listing.lines()
    assert (line["iterations"], line["wanted"], line["seconds_left"]) == (45, 60, None)
    assert (line["before"], line["score"]) == (0.4, 0.7)
    assert line["interval"] == pytest.approx((0.68, 0.72))
    with lock(run, mend="wait"):
        (line,) = listing.lines()
        assert line["seconds_left"] == pytest.approx(15 * 3.5)
    # a torn line counts once it is whole
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 45, "rew')
        file.flush()
        assert listing.lines()[0]["iterations"] == 45
        file.write('ard": 8}\n{"iteration": 46, "reward": 9}\n')
    assert (listing.lines()[0]["iterations"], listing.lines()[0]["reward"]) == (47, 9)
    # cut by a resume, and damaged and mended
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[:10]))
    assert listing.lines()[0]["iterations"] == 10
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[]\n")
    assert "metrics.jsonl, line 11" in listing.lines()[0]["error"]
    assert listing.lines()[0]["state"] == "damaged"
    (run / "metrics.jsonl").write_text("".join(rows[:12]))
    assert listing.lines()[0]["iterations"] == 12 and "error" not in listing.lines()[0]


@pytest.mark.integration
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_fifty_runs_in_a_browser(many: Path, width: int, scheme: str) -> None:
    """One of them damaged; by keyboard from the search to a run and its curves."""
    size = {"width": width, "height": 844}
    with browser() as chromium, served(make_app(many, many / "votes")) as url:
        visit = Visit(chromium, viewport=size, color_scheme=scheme)
        page = visit.page
        page.goto(url)
        page.locator("tr[data-run]").nth(RUNS - 1).wait_for()
        page.wait_for_selector("tr.damaged")
        assert "metrics.jsonl, line 1" in page.locator("tr.damaged").inner_text()
        page.wait_for_selector("tr.reading", state="detached")
        row = page.locator("tr[data-run=run03]").inner_text()
        assert "2000 of 4000" in row and "0.4 → 0.7 [0.68, 0.72] strict" in row
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.locator("#find-run").focus()
        page.keyboard.type("run49")
        assert page.locator("tr[data-run]:visible").count() == 1
        page.keyboard.press("Tab")  # the box, then the link
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_url("**/?run=run49")
        page.wait_for_selector("figure.chart")
        headings = page.locator("#told h2").all_inner_texts()
        assert headings[:4] == ["Is it better?", "Is it learning?", "Is it safe?", "Time"]
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert visit.said == [] and visit.elsewhere(url) == []
