"""Folders and files that strangers hand over: runs, suites, votes, prompt lists of the wild,
weights to begin with, schedulers. And requests to the server that shows runs."""

from __future__ import annotations

import inspect
import io
import json
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzzimages import damage_image, one_png
from fuzzkit import Refused, Target, damage_bytes, damage_json
from modelkit import perturb
from reportkit import make_run
from safetensors.torch import save
from starlette.testclient import TestClient
from tiny import tiny_sd3, tiny_sd15

from flowrl.core.errors import FlowRLError
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.image_files import find_images, match_prompts
from flowrl.evaluation.preference_pairs import convert_pairs
from flowrl.evaluation.suites.image_folder import (
    image_path,
    judge_of,
    load_images,
    read_lines,
    read_setting,
    scored_line,
)
from flowrl.evaluation.votes import questions, read_votes
from flowrl.models.sd3 import sd3
from flowrl.models.sd15 import sd15
from flowrl.runs.report.page import html_report
from flowrl.runs.view.app import make_app
from flowrl.training.start_weights import start_from

VOTER = "0123456789abcdef"


def packed(folder: Path) -> bytes:
    """Put a folder into a zip file, in an order that is always the same."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                name = file.relative_to(folder).as_posix()
                archive.writestr(zipfile.ZipInfo(name), file.read_bytes())
    return out.getvalue()


def unpacked(data: bytes, folder: Path) -> Path:
    """Write the folder of a zip file, in the place of an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(folder)
    return folder


def damage_folder(data: bytes, rng: random.Random) -> bytes:
    """Damage one or two files of a folder, or take one away."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([*files])
        if rng.random() < 0.1 and len(files) > 1:
            del files[name]
        else:
            files[name] = damage_file(name, files[name], rng)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


def damage_file(name: str, content: bytes, rng: random.Random) -> bytes:
    """Damage a file as its ending says: as JSON, a line of JSON, an image, or bytes."""
    if name.endswith(".png"):
        return damage_image(content, rng)
    try:
        if name.endswith(".json"):
            return damage_json(content, rng)
        if name.endswith(".jsonl"):
            lines = content.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = damage_json(lines[at], rng)
            return b"\n".join(lines) + b"\n"
    except (ValueError, RecursionError, IndexError):  # damaged before
        pass
    return damage_bytes(content, rng)


# --------------------------------------------------------------------------------------------- runs


def runs(home: Path) -> Target:
    """A run beside a good one: both are listed, told and reported, and the good one is whole."""
    good = make_run(home / "kept" / "good", iterations=5)
    made = make_run(home / "made", iterations=5)
    (made / "environment.json").write_text(json.dumps({"torch": "2", "gpu": None}))
    counts = {"low": 0.0, "high": 1.0, "counts": [1, 2]}
    row = {"iteration": 1, "reward": counts, "advantage": None}
    (made / "histograms.jsonl").write_text(json.dumps(row) + "\n")
    found = {"iteration": 1, "monitor": "ratio", "what": "a", "advice": "b", "action": "c"}
    (made / "findings.jsonl").write_text(json.dumps(found) + "\n")
    (made / "samples" / "verdicts.json").write_text(json.dumps({"0": [True, None]}))

    def read(data: bytes, folder: Path) -> Any:
        if not (folder / "runs" / "good").exists():
            shutil.copytree(good, folder / "runs" / "good")
        other = unpacked(data, folder / "runs" / "other")
        app = make_app(folder / "runs", folder / "votes")
        with TestClient(app, base_url="http://localhost") as client:
            listed = {run["id"]: run for run in client.get("/api/runs").json()}
            told = {name: client.get("/api/story", params={"run": name}) for name in listed}
            body = {"voter": VOTER, "one": "good@0", "two": "other@20"}
            ballot = client.post("/api/ballot", json=body)
            image = client.get("/api/image", params={"run": "good", "iteration": 0, "place": 0})
        if "other" in listed:
            html_report(folder / "runs" / "good", other, show_damaged=True)
        wrong = [answer.status_code for answer in (ballot, image, *told.values())]
        if max(wrong) >= 500 or told["good"].status_code != 200 or image.status_code != 200:
            raise AssertionError(f"answers {wrong}, {listed}")
        if "other" in told and told["other"].status_code != 200:
            raise Refused(told["other"].json()["error"])
        return listed

    def check(data: bytes, listed: Any) -> str:
        fine = listed["good"]["score"] == 0.7 and listed["good"]["iterations"] == 5
        return "" if fine else f"the good run is {listed['good']}"

    return Target([packed(made)], damage_folder, read, (FlowRLError, Refused), check)


def view_requests(home: Path) -> Target:
    """A whole request to the server of runs: 8 bytes that choose method, path and headers, then a
    body."""
    folder = home / "viewed"
    for name in ("a", "b"):
        make_run(folder / name, iterations=2)
    client = TestClient(make_app(folder, folder / "votes"), base_url="http://localhost")
    paths: tuple[str, ...] = (
        "/",
        "/vote",
        "/api/runs",
        "/api/story?run=a",
        "/api/image?run=a&iteration=0&place=0",
    )
    paths += ("/api/source?run=a&place=0&which=0", "/api/side?ballot=x&side=left", "/api/scores")
    paths += ("/api/ballot", "/api/vote", "/files/live.js", "/files/../x", "/api/image?run=a")
    methods = ("GET",) * 4 + ("POST",) * 4 + ("PUT", "HEAD", "DELETE")
    sites: tuple[dict[str, str], ...] = ({}, {}, {"Origin": "http://x"}, {"Host": "[::1"})
    kinds = ("application/json", "application/json", "text/plain", "")

    def damage(data: bytes, rng: random.Random) -> bytes:
        head = bytes(rng.randrange(256) for _ in range(8))
        return head + (damage_json(data[8:], rng) if rng.random() < 0.7 else data[8:])

    def read(data: bytes, folder: Path) -> Any:
        head, content = data[:8], data[8:]
        method, path = methods[head[0] % len(methods)], paths[head[1] % len(paths)]
        if head[2] % 4 == 0:  # an address that is cut, or goes on
            path = path[: head[3] % (len(path) + 1)] or "/"
        headers = {**sites[head[4] % len(sites)], "Content-Type": kinds[head[5] % len(kinds)]}
        answer = client.request(method, path, content=content, headers=headers)
        if answer.status_code >= 500:
            raise AssertionError(f"{answer.status_code}: {answer.text}")
        if answer.status_code >= 400:
            raise Refused(f"{answer.status_code} for {method} {path}: {answer.text}")
        return answer

    body = json.dumps({"voter": VOTER, "one": "a@0", "two": "b@20"}).encode()
    heads = [bytes(8), bytes([4, 8, 1, 0, 0, 0, 0, 0])]
    return Target([head + body for head in heads], damage, read, (Refused,))


# ------------------------------------------------------------------------------------------- suites


def suites(home: Path) -> Target:
    """The folder of a suite: its setting, scores, images, and the prompts beside them."""
    made = home / "suite"
    lines = []
    for prompt in range(2):
        for image in range(2):
            file = image_path(made, prompt, image)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(one_png(image))
            score = {"s": 0.5, "t": None}
            name = file.relative_to(made).as_posix()
            lines.append({"file": name, "prompt": prompt, "image": image, "scores": score})
        record = {"prompt": f"prompt {prompt}", "tag": "t"}
        (made / f"{prompt:05}" / "metadata.jsonl").write_text(json.dumps(record) + "\n")
    (made / "setting.json").write_text(
        json.dumps({"suite": "x", "steps": 2, "prompts": "p", "rewards": {}})
    )
    judge = judge_of(read_setting(made))
    texts = [json.dumps(scored_line(made, line, judge)) + "\n" for line in lines]
    (made / "scores.jsonl").write_text("".join(texts))

    def read(data: bytes, folder: Path) -> Any:
        out = unpacked(data, folder / "case")
        setting, scores = read_setting(out), read_lines(out)
        images = [load_images(out, prompt, 2) for prompt in range(2)]
        return setting, scores, images, match_prompts(find_images([out]), None, None)

    def check(data: bytes, found: Any) -> str:
        _, scores, images, words = found
        values = [value for line in scores.values() for value in line["scores"].values()]
        bad = [value for value in values if value is not None and not abs(value) <= 1e308]
        if bad or not all(bool(image.isfinite().all()) for image in images):
            return f"scores {bad}"
        return "" if len(words.prompts) == 4 else "other images"

    return Target([packed(made)], damage_folder, read, (FlowRLError,), check)


def votes(home: Path) -> Target:
    """A folder of votes and questions, as a page asks it and as `flowrl pairs` takes it."""
    made = home / "box"
    (made / "images").mkdir(parents=True)
    (made / "questions").mkdir()
    for seed in range(2):
        (made / "images" / f"{seed:02x}.png").write_bytes(one_png(seed))
    names = {"image_0": "images/00.png", "image_1": "images/01.png"}
    rows = []
    for voter in ("aa", "bb", "cc"):
        rows.append({"prompt": "p", **names, "label_0": 1.0, "name_0": "a@0", "voter": voter})
    (made / "votes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"pairs": [["p", *names.values()]]}
    (made / "questions" / "q.json").write_text(json.dumps(asked))

    def read(data: bytes, folder: Path) -> Any:
        box = unpacked(data, folder / "case")
        app = make_app(folder / "none", box)
        with TestClient(app, base_url="http://localhost") as client:
            answers = [client.get("/api/scores")]
            answers.append(client.post("/api/ballot", json={"voter": VOTER}))
        if max(answer.status_code for answer in answers) >= 500:
            raise AssertionError([answer.text for answer in answers])
        done = convert_pairs(box / "votes.jsonl", folder / "out")
        return read_votes(box), questions(box), done

    return Target([packed(made)], damage_folder, read, (FlowRLError,))


# ------------------------------------------------------------------------------------ prompt files

WILD: dict[str, str] = {
    "parti.tsv": 'Prompt\tCategory\tNote\na harbour\tOutdoor\t\n"H I" on a board\tWriting\t\n',
    "drawbench.csv": 'Prompts,Category\nA red car.,Colors\n"Two mugs, one tall.",Counting\n',
    "semicolon.csv": 'id;caption\n1;a cat, a dog\n2;"a; b"\n',
    "bar.csv": "prompt|style\na cat, a dog|oil\nan owl|ink\n",
    "plain.csv": 'a small house, in the rain\na "large" house\n',
    "quoted.csv": '"a small house, in the rain"\n"a ""large"" house"\n',
    "unigen.csv": 'index,prompt_zh,sub_dims_zh\n0,一只猫,"{""考点"": [""风格""]}"\n',
    "text.jsonl": '{"file_name": "1.png", "text": "a cat"}\n{"caption": "a dog"}\n',
    "meta_cap.json": json.dumps({"a/1.png": {"caption": "a house"}, "2.png": {"tags": "1girl"}}),
    "genai.json": json.dumps({"01": {"prompt": "a house", "tags": []}, "02": {"prompt": "an owl"}}),
    "data.json": json.dumps({"version": 1, "data": [{"Prompt": "a cat"}, {"Prompt": "an owl"}]}),
    "columns.json": json.dumps({"prompt": ["a cat", "an owl"], "id": [1, 2]}),
    "tasks.json": json.dumps({"colors": ["a red cat"], "counting": ["two owls"]}),
}


def wild_prompts() -> Target:
    """Prompt lists as people have them, each behind its name; no word of a prompt is invented."""

    def damage(data: bytes, rng: random.Random) -> bytes:
        name, _, content = data.partition(b"\n")
        return name + b"\n" + damage_bytes(content, rng)

    def read(data: bytes, folder: Path) -> Any:
        name, _, content = data.partition(b"\n")
        file = folder / name.decode()
        file.write_bytes(content)
        return load_prompts(file)

    def check(data: bytes, found: Any) -> str:
        text = data.partition(b"\n")[2].decode()
        if b".json" in data.partition(b"\n")[0]:
            text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda hit: chr(int(hit[1], 16)), text)
        words = {word for prompt in found.texts for word in re.findall(r"\w+", prompt)}
        invented = [word for word in words if word not in text]
        blank = [prompt for prompt in found.texts if not prompt.strip()]
        return f"invented {invented}, blank {blank}" if invented or blank else ""

    good = [f"{name}\n{text}".encode() for name, text in WILD.items()]
    return Target(good, damage, read, (FlowRLError,), check)


# ------------------------------------------------------------------------------------------ weights


def lora_files(home: Path) -> Target:
    """A file to begin with: our own parameters, and LoRA under the names of other programs. What is
    taken is finite and has moved something."""
    lora = {"rank": 2, "alpha": 6.0, "targets": ["attn.to_q"]}
    model = sd3(str(tiny_sd3(home / "sd3")), tune="lora", lora=lora)
    params = {name: p for name, p in model.trainable().items()}
    before = {name: p.detach().clone() for name, p in params.items()}
    perturb(model, 0.3)
    own = {name: p.detach().clone().contiguous() for name, p in params.items()}
    good = [save(own)]
    for prefix in ("transformer.", "base_model.model.", "diffusion_model.", ""):
        named = {}
        for name, tensor in own.items():
            key = re.sub(r"\.default(?=\.|$)", "", name).removeprefix("transformer.")
            named[prefix + key] = tensor
        good.append(save(named))
    extra = {"model": model} if "model" in inspect.signature(start_from).parameters else {}

    def read(data: bytes, folder: Path) -> Any:
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(before[name])
        file = folder / "lora.safetensors"
        file.write_bytes(data)
        start: Callable[..., None] = start_from
        start(str(file), params, **extra)
        return {name: p.detach().clone() for name, p in params.items()}

    def check(data: bytes, found: Any) -> str:
        if not all(bool(p.isfinite().all()) for p in found.values()):
            return "weights that are not finite"
        same = all(torch.equal(found[name], before[name]) for name in found)
        return "nothing moved" if same else ""

    return Target(good, damage_bytes, read, (FlowRLError,), check)


def schedulers(home: Path) -> Target:
    """The scheduler's file of a model folder: refused, or a grid of times that goes down."""
    base = tiny_sd15(home / "sd15")
    name = "scheduler/scheduler_config.json"

    def read(data: bytes, folder: Path) -> Any:
        case = folder / "sd15"
        if not case.exists():
            case.mkdir()
            for part in base.iterdir():
                if part.name != "scheduler":
                    (case / part.name).symlink_to(part)
            (case / "scheduler").mkdir()
        (case / name).write_bytes(data)
        return sd15(str(case)).sigmas(7, 64, 64)

    def check(data: bytes, sigmas: Any) -> str:
        good = bool(sigmas.isfinite().all()) and bool((sigmas.diff() < 0).all())
        return "" if good and len(sigmas) == 8 else f"sigmas {sigmas.tolist()}"

    return Target([(base / name).read_bytes()], damage_json, read, (FlowRLError,), check)
