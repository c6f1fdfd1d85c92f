"""Requests to the server of rewards, and answers of servers: good ones, how they are damaged, and
another reader to compare with."""

from __future__ import annotations

import base64
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from fuzzimages import damage_image, one_png, plain_pixels
from fuzzkit import Refused, Target, damage_bytes, damage_json
from starlette.testclient import TestClient
from torch import Tensor
from toykit import redness

from flowrl.core.errors import FlowRLError
from rewards._common.http_client import RequestFailed
from rewards._judge.answer import Answer
from rewards._judge.client import _parse
from rewards.remote.http import make_app
from rewards.remote.messages import Hosted, read_health, read_scores, refusal
from rewards.remote.read_request import RequestLimits, RequestRefused, parse
from rewards.remote.request_queue import RequestQueue
from rewards.vlm.answers import ReadingOptions
from rewards.vlm.answers import read as read_answer

LIMITS = RequestLimits(bytes=2**20, images=8, pixels=2**16, all_pixels=2**18)


def body() -> bytes:
    """Return a request that is right."""
    images = [base64.b64encode(one_png(seed)).decode() for seed in range(3)]
    meta = [{"tag": "a", "include": [{"class": "x", "count": 2}]}, {}, {"n": [1.5, None]}]
    more = {"group": [0, 0, 1], "meta": meta, "sigma": [0.0, 0.5, 1], "rewards": ["red"]}
    return json.dumps({"images": images, "prompts": ["a", "b", "ü"], **more}).encode()


def video_body() -> bytes:
    """Return a request about videos that is right."""
    images = [base64.b64encode(one_png(seed)).decode() for seed in (0, 0, 0, 0)]
    more = {"frames": 2, "group": [0, 1], "rewards": ["b"]}
    return json.dumps({"images": images, "prompts": ["a", "b"], **more}).encode()


def damage_body(data: bytes, rng: random.Random) -> bytes:
    """Damage a request, or one of its images."""
    if rng.random() < 0.6:
        return damage_json(data, rng)
    tree = json.loads(data)
    at = rng.randrange(len(tree["images"]))
    image = damage_image(base64.b64decode(tree["images"][at]), rng)
    tree["images"][at] = base64.b64encode(image).decode()
    return json.dumps(tree).encode()


def requests() -> Target:
    """The body of a request; pixels, texts and numbers are compared."""

    def check(data: bytes, found: Any) -> str:
        says = json.loads(data)
        pixels = pixels_of(says["images"])
        if len(pixels) != len(says["images"]):
            return "an image that is not whole"
        images = found.pixels.reshape(-1, *found.pixels.shape[-3:])
        if not all(map(torch.equal, pixels, images)):
            return "other pixels"
        count = len(pixels) // says.get("frames", 1)
        same = found.prompts == says["prompts"] and found.meta == says.get("meta", [{}] * count)
        same = same and found.group.tolist() == says.get("group", [*range(count)])
        return "" if same else "other texts"

    def read(data: bytes, folder: Path) -> Any:
        return parse(data, ("red", "b"), LIMITS, ("b",))

    return Target([body(), video_body()], damage_body, read, (RequestRefused,), check)


def addresses() -> Target:
    """A whole request to a server in this process: 16 bytes that choose method, path and headers,
    then its body. Every answer is JSON with a kind, and no error is the server's."""
    queue = RequestQueue({"red": redness, "b": redness}, max_wait_s=0)
    client = TestClient(make_app(queue, LIMITS, b"a-good-token"))
    heads = (
        "Bearer a-good-token",
        "Bearer a-good-token",
        "Bearer wrong",
        "",
        "Basic x",
        "\xff",
        "b",
    )
    kinds = (
        "application/json",
        "application/json",
        "application/json; charset=x",
        "text/plain",
        "",
    )
    lengths = (None, None, None, "0", "-1", "\xb2", "9" * 5000, "12 ", "1e3")
    paths = ("/score",) * 5 + ("/health", "/metrics", "/", "//score", "/score/..", "/\u00fc")
    methods = ("POST",) * 5 + ("GET", "PUT", "DELETE", "HEAD")

    def damage(data: bytes, rng: random.Random) -> bytes:
        head = bytes(rng.randrange(256) for _ in range(16))
        return head + (damage_body(data[16:], rng) if rng.random() < 0.7 else data[16:])

    def read(data: bytes, folder: Path) -> Any:
        head, content = data[:16], data[16:]

        def chosen(place: int, of: tuple[Any, ...]) -> Any:
            return of[head[place] % len(of)]

        headers = {"Authorization": chosen(0, heads), "Content-Type": chosen(1, kinds)}
        if chosen(2, lengths) is not None:
            headers["Content-Length"] = chosen(2, lengths)
        sent = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = client.request(chosen(3, methods), chosen(4, paths), content=content, headers=sent)
        if answer.status_code != 200:
            if chosen(3, methods) == "HEAD" and not answer.content:
                raise Refused("an answer to HEAD has no body")
            says = answer.json()
            raise Refused(f"{answer.status_code} {says['kind']}: {says['error']}")
        return answer

    def check(data: bytes, answer: Any) -> str:
        if answer.request.url.path != "/score":
            return ""
        right = redness_of(data[16:])
        return "" if answer.json()["scores"]["red"] == right else "another score"

    return Target([bytes(16) + body()], damage, read, (Refused,), check)


def pixels_of(texts: list[str]) -> list[Tensor]:
    """Read images with another reader than the server's; those that are not whole are left
    out."""
    found = [plain_pixels(base64.b64decode(text)) for text in texts]
    return [one for one in found if not isinstance(one, str)]


def redness_of(data: bytes) -> list[float]:
    """Score the images of a request with another reader than the server's."""
    images = torch.stack(pixels_of(json.loads(data)["images"])).float() / 255
    return (images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))).tolist()


# ------------------------------------------------------------------------------ answers of servers


def answers() -> Target:
    """What a reward server answers, as its client reads it."""
    scores = json.dumps({"scores": {"red": [0.25, None, -3]}, "images": 3}).encode()
    limits = {"bytes": 1, "images": 64, "pixels": 5}
    health = json.dumps({"status": "ok", "rewards": ["red"], "limits": limits}).encode()
    wrong = json.dumps({"error": "a record is wrong", "kind": "data"}).encode()

    def read(data: bytes, folder: Path) -> Any:
        for status in (400, 401, 500):
            assert isinstance(refusal(status, data, "http://x"), FlowRLError | RequestFailed)
        if b"ealth" in data or b"status" in data:
            return read_health(data, "http://x", "red", 8)
        return read_scores(data, "red", 3)

    def check(data: bytes, found: Any) -> str:
        if isinstance(found, Hosted):
            told = json.loads(data)
            names = told.get("checks")
            checks = isinstance(names, list) and "red" in names
            there = "red" in told["rewards"] and found == ("red", checks, False)
            return "" if there else "the reward is not there"
        says = [math.nan if s is None else s for s in json.loads(data)["scores"]["red"]]
        same = torch.tensor(says, dtype=torch.float32).nan_to_num(7).equal(found.nan_to_num(7))
        return "" if same else "other scores"

    return Target(
        [scores, scores, health, wrong], damage_json, read, (FlowRLError, RequestFailed), check
    )


TOP = [
    {"token": "Yes", "logprob": -0.1},
    {"token": "No", "logprob": -2.5},
    {"token": "3", "logprob": -9},
]
TEXTS = (
    "Image 1 is better", "<think>no</think><answer>Image 2 is better</answer>", '{"rating": 4.5}',
    '{"categories": [{"cat_winner": "Image 1"}], "winner": "Image 2"}', "Final Score: 4",
    "Alignment Score (1-5): 3\nCoherence Score (1-5): 4\nStyle Score (1-5): 2",
    *(f"{axis} Score: Image 1: 0.5 Image 2: 0.5" for axis in ("Alignment", "Style")),
)  # fmt: skip
TEMPLATES = (
    "pair_rank",
    "think",
    "flex",
    "pair_score",
    "acs",
    "point",
    "rating",
    "yes_no",
    "level",
)


def judges() -> Target:
    """What a vision language model answers, read in every way: a number from 0 to 1, or what is
    wrong with it."""

    def completion(text: str) -> bytes:
        logprobs = {"content": [{"top_logprobs": TOP}]}
        choice = {"message": {"content": text}, "finish_reason": "stop", "logprobs": logprobs}
        return json.dumps({"choices": [choice]}).encode()

    def read(data: bytes, folder: Path) -> Any:
        answer = _parse(data)
        if not isinstance(answer, Answer):
            raise Refused(answer.text if answer else "expected a chat completion")
        return [read_answer(answer, ReadingOptions(template)) for template in TEMPLATES]

    def check(data: bytes, found: Any) -> str:
        bad = [out for out in found if not isinstance(out, str) and not 0 <= out <= 1]
        return f"scores {bad}" if bad else ""

    return Target([completion(text) for text in TEXTS], damage_json, read, (Refused,), check)


def judge_texts() -> Target:
    """The text of an answer alone."""

    def read(data: bytes, folder: Path) -> Any:
        answer = Answer(data.decode("utf-8", "replace"), [])
        return [read_answer(answer, ReadingOptions(template)) for template in TEMPLATES]

    def check(data: bytes, found: Any) -> str:
        bad = [out for out in found if not isinstance(out, str) and not 0 <= out <= 1]
        return f"scores {bad}" if bad else ""

    return Target([text.encode() for text in TEXTS], damage_bytes, read, (Refused,), check)
