"""Rewards over HTTP: joined batches, what is refused, what is answered, and a server process that
is stopped."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import re
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from PIL import Image
from serving import Process, batch_of, hosted, random_images, wait_for
from starlette.testclient import TestClient
from torch import Tensor
from toykit import redness, toy, write_toy

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.types import RewardBatch
from rewards.remote.http import make_app
from rewards.remote.read_request import Limits, RequestRefused, parse
from rewards.remote.request_queue import Answer, RequestQueue, ScoreRequest, join
from rewards.remote.server import load_rewards, read_token, serve

TOKEN = b"correct horse"
WAIT = 60.0  # seconds that a future may take before a test fails instead of hanging


class Held:
    """Score by the first value of each image; the first call waits for `go`, and every call is
    written down."""

    def __init__(self) -> None:
        self.go, self.reached, self.seen = threading.Event(), threading.Event(), list[RewardBatch]()

    def __call__(self, batch: RewardBatch) -> Tensor:
        self.seen.append(batch)
        self.reached.set()
        assert self.go.wait(WAIT)
        return batch.images[:, 0, 0, 0]


def request(
    *values: int, group: list[int] | None = None, size: int = 2, name: str = "it"
) -> ScoreRequest:
    """Ask about plain images of the given grey levels."""
    pixels = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, size, size)
    groups = torch.tensor(group if group is not None else list(range(len(values))))
    words = [f"grey {value}" for value in values]
    return ScoreRequest(
        pixels, words, groups, [{"v": v} for v in values], torch.zeros(len(values)), (name,)
    )


def after_the_first(
    queue: RequestQueue, held: Held, *requests: ScoreRequest
) -> list[Future[Answer]]:
    """Queue requests while the worker is busy with another one, then let it go on."""
    first = queue.submit(request(0))
    assert held.reached.wait(WAIT)
    futures = [queue.submit(one) for one in requests]
    held.go.set()
    assert first.result(WAIT) == {"it": [0.0]}
    return futures


# ------------------------------------------------------------------------------------------ batches


def test_requests_are_joined_up_to_the_batch_size() -> None:
    """3 + 3 fit into 8 and a third 3 does not: calls of 1, 6, 6 and 3 images, each client with
    its own scores."""
    held = Held()
    queue = RequestQueue({"it": held}, batch=8, max_wait_s=0)
    futures = after_the_first(
        queue, held, *(request(k, k + 1, k + 2) for k in (10, 20, 30, 40, 50))
    )
    for k, future in zip((10, 20, 30, 40, 50), futures, strict=True):
        wanted = (torch.tensor([k, k + 1, k + 2], dtype=torch.uint8).float() / 255).tolist()
        assert future.result(WAIT) == {"it": wanted}
    queue.close()
    assert [len(batch.prompts) for batch in held.seen] == [1, 6, 6, 3]
    assert [(b.prompts, b.meta) for b in held.seen[1:2]] == [
        (
            [f"grey {v}" for v in (10, 11, 12, 20, 21, 22)],
            [{"v": v} for v in (10, 11, 12, 20, 21, 22)],
        )
    ]
    assert (queue.counts.images, queue.counts.batches, queue.counts.failures) == (16, 4, 0)


def test_a_full_batch_does_not_wait_and_closing_does_not_either() -> None:
    """With an hour to wait, answers come only because the batch is full, and because the queue
    closes."""
    queue = RequestQueue({"it": redness}, batch=4, max_wait_s=3600)
    full = [queue.submit(request(1, 2)) for _ in range(2)]
    assert [future.result(WAIT) for future in full] == [{"it": [0.0, 0.0]}] * 2
    large = queue.submit(request(*range(9)))  # never split, so it is a batch of its own
    assert large.result(WAIT) == {"it": [0.0] * 9}
    left = queue.submit(request(1))
    assert queue.waiting() == (1, 1)
    queue.close()
    assert left.result(0) == {"it": [0.0]} and queue.counts.batches == 3
    with pytest.raises(RunError, match="shutting down"):
        queue.submit(request(1))


def test_what_does_not_fit_together_is_not_joined() -> None:
    held = Held()
    queue = RequestQueue({"it": held, "red": redness}, batch=64, max_wait_s=0)
    others = [request(1), request(2, size=3), request(3, name="red"), request(4)]
    futures = after_the_first(queue, held, *others)
    level = [float(torch.tensor(v, dtype=torch.uint8).float() / 255) for v in range(5)]
    assert [f.result(WAIT) for f in futures] == [
        {"it": [level[1]]},
        {"it": [level[2]]},
        {"red": [0.0]},
        {"it": [level[4]]},
    ]
    queue.close()
    assert [b.prompts for b in held.seen] == [["grey 0"], ["grey 1", "grey 4"], ["grey 2"]]


def win_rate(batch: RewardBatch) -> Tensor:
    """Return each image's share of images of its group that it is brighter than."""
    level = batch.images.mean((1, 2, 3))
    same = batch.group[:, None] == batch.group[None]
    return ((level[:, None] > level[None]) & same).float().sum(1) / same.sum(1)


def test_groups_of_different_requests_stay_apart() -> None:
    """Both clients call their groups 7 and 3; a reward that compares within groups must not see the
    other's."""
    one, two = request(1, 2, 9, 4, group=[7, 7, 3, 3]), request(8, 5, 6, group=[3, 7, 7])
    assert join([one, two]).group.tolist() == [1, 1, 0, 0, 2, 3, 3]
    queue = RequestQueue({"it": win_rate}, batch=7, max_wait_s=3600)
    joined = [queue.submit(one), queue.submit(two)]
    assert [f.result(WAIT)["it"] for f in joined] == [
        [0.0, 0.5, 0.5, 0.0],
        [0.0, 0.0, 0.5],
    ]  # counted by hand
    assert queue.counts.batches == 1
    queue.close()


def test_one_bad_image_fails_one_request() -> None:
    def fragile(batch: RewardBatch) -> Tensor:
        if (batch.images == 1).any():
            raise ValueError("too bright")
        return redness(batch)

    queue = RequestQueue({"it": fragile}, batch=3, max_wait_s=3600)
    good, bad, other = (queue.submit(request(v)) for v in (1, 255, 2))
    assert good.result(WAIT) == other.result(WAIT) == {"it": [0.0]}
    with pytest.raises(ValueError, match="too bright"):
        bad.result(WAIT)
    assert (queue.counts.failures, queue.counts.images) == (1, 2)
    queue.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(3), r"expected 2 numbers.*\[3\]"),
        (torch.zeros(2, 1), r"\[2, 1\]"),
        (torch.tensor([0, -math.inf]), "infinity"),
    ],
)
def test_a_score_that_is_none_is_a_failure(values: Tensor, message: str) -> None:
    queue = RequestQueue({"it": lambda batch: values}, max_wait_s=0)
    with pytest.raises(RunError, match=message):
        queue.submit(request(1, 2)).result(WAIT)
    queue.close()


def test_nan_becomes_null_and_numbers_keep_every_bit() -> None:
    """The smallest and largest float32 and a third, from torch; NaN has no number in JSON."""
    info = torch.finfo(torch.float32)
    values = torch.tensor([1 / 3, info.max, -info.tiny, math.nan, 1e-45])
    queue = RequestQueue({"it": lambda batch: values.double()}, max_wait_s=0)
    answer = json.loads(json.dumps(queue.submit(request(*range(5))).result(WAIT)))["it"]
    assert answer[3] is None and queue.counts.unscored == {"it": 1}
    known = torch.arange(5) != 3
    assert torch.equal(
        torch.tensor([answer[i] for i in (0, 1, 2, 4)]).view(torch.int32),
        values[known].view(torch.int32),
    )
    queue.close()


def test_a_cancelled_request_is_not_scored() -> None:
    held = Held()
    queue = RequestQueue({"it": held}, batch=1, max_wait_s=0)
    first = queue.submit(request(0))
    assert held.reached.wait(WAIT)
    gone, kept = queue.submit(request(1)), queue.submit(request(2))
    assert gone.cancel()
    held.go.set()
    assert first.result(WAIT) and kept.result(WAIT)
    with pytest.raises(CancelledError):
        gone.result(0)
    queue.close()
    assert [batch.prompts for batch in held.seen] == [["grey 0"], ["grey 2"]]


# -------------------------------------------------------------------------- what a request may hold


def png(images: Tensor) -> list[str]:
    """Write images with Pillow -> base64."""
    out = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()).save(file, "PNG")
        out.append(base64.b64encode(file.getvalue()).decode())
    return out


def data_of(images: Tensor, /, **changes: Any) -> dict[str, Any]:
    return {"images": png(images), "prompts": ["p"] * len(images)} | changes


def jpeg_file() -> str:
    """Write an image that is no PNG -> base64."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def crafted(width: int, height: int, *, depth: int = 8, color: int = 2, pixels: bytes = b"") -> str:
    """Write a PNG by the format's own rules (chunks of length, name, data, CRC), with any header ->
    base64."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


def read(data: dict[str, Any], limits: Limits | None = None) -> ScoreRequest:
    """Read a request to a server that hosts the rewards a and b."""
    return parse(json.dumps(data).encode(), ["a", "b"], limits or Limits())


def test_a_request_is_read_as_it_was_sent() -> None:
    images = random_images(3)
    extra = {
        "group": [5, 5, -1],
        "meta": [{"a": 1}, {}, {"b": [None, 0.1]}],
        "sigma": [0, 0.5, 1.0],
        "rewards": ["b"],
    }
    got = read(data_of(images, **extra))
    assert torch.equal(got.pixels.float() / 255, images) and got.pixels.dtype == torch.uint8
    assert (got.group.tolist(), got.meta, got.sigma.tolist()) == (
        [5, 5, -1],
        extra["meta"],
        [0, 0.5, 1],
    )
    assert got.names == ("b",) and got.prompts == ["p"] * 3
    bare = read(data_of(images))
    assert (bare.group.tolist(), bare.meta, bare.sigma.tolist(), bare.names) == (
        [0, 1, 2],
        [{}] * 3,
        [0] * 3,
        ("a", "b"),
    )
    right = crafted(1, 1, pixels=b"\0\x01\x02\x03")  # filter 0, then one pixel
    assert read({"images": [right], "prompts": ["p"]}).pixels.flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"images": [', "not valid JSON"),
        (b'{"images": [], "prompts": [], "sigma": [NaN]}', "NaN is no number"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "got list"),
        (b'{"images": []}', r"got \['images'\]"),
        (b'{"images": [], "prompts": [], "exec": 1}', "exec"),
        (b'{"images": [], "prompts": []}', "1 to 256 images in one request, got 0"),
        (b'{"images": "abc", "prompts": ["p"]}', "images: expected a list of texts"),
        (b'{"images": ["*"], "prompts": ["p"]}', r"images\[0\]: not base64"),
        (b'{"images": ["aGVsbG8="], "prompts": ["p"]}', r"images\[0\]: expected a PNG"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as error:
        parse(body, ["a"], Limits())
    assert error.value.status == 400 and error.value.kind == "request"


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": ["p"]},
        {"prompts": ["p", 1]},
        {"group": [1]},
        {"group": [1, True]},
        {"group": [1, 2.0]},
        {"group": [1, 2**63]},
        {"meta": [{}, []]},
        {"meta": {}},
        {"sigma": [0, None]},
        {"sigma": [0, 10**400]},
        {"sigma": [0, 1e39]},
        {"rewards": []},
        {"rewards": ["c"]},
        {"rewards": ["a", "a"]},
        {"images": png(random_images(1)) + png(random_images(1, size=5))},
    ],
    ids=lambda changes: str(changes)[:25],
)
def test_a_list_that_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(RequestRefused, match=key) as error:
        read(data_of(random_images(2), **changes))
    assert error.value.status == 400


def test_numbers_beyond_json_are_refused() -> None:
    """Python reads 1e999 as infinity."""
    text = json.dumps(data_of(random_images(1), sigma=[0.5])).replace("0.5", "1e999")
    with pytest.raises(RequestRefused, match="sigma"):
        parse(text.encode(), ["a"], Limits())


def test_images_are_measured_before_they_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bombs claim 2 gigapixels, or many small images; Pillow must not even see them."""

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("unpacked")

    monkeypatch.setattr("rewards.remote.read_request.Image.open", opened)
    small = Limits(images=4, pixels=100, all_pixels=150)
    for images, limits, message in (
        (
            [crafted(50_000, 50_000, pixels=bytes(1000))],
            Limits(),
            "16777216 pixels in an image.*50000 x 50000",
        ),
        ([crafted(2**31 - 1, 2**31 - 1)], Limits(), "pixels"),
        ([crafted(10, 11)], small, "100 pixels"),
        ([crafted(10, 8)] * 2, small, "150 in a request, got 2 of 10 x 8"),
        ([crafted(1, 1)] * 5, small, "1 to 4 images"),
    ):
        with pytest.raises(RequestRefused, match=message) as error:
            read({"images": images, "prompts": ["p"] * len(images)}, limits)
        assert (error.value.status, error.value.kind) == (413, "size")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (crafted(2, 2, color=6), "colour type 6"),
        (crafted(2, 2, depth=16), "bit depth 16"),
        (crafted(2, 2, color=3), "colour type 3"),
        (crafted(0, 2), "0 x 2"),
        (
            crafted(2, 2, pixels=b"\0" * 7),
            "broken PNG.*expected 14 bytes of pixels, got 7",
        ),  # two rows of 1 + 2 * 3
        (crafted(2, 2, pixels=b"\0" * 15), "broken PNG.*got more"),
        (crafted(2, 2, pixels=b"\x09" * 14), "broken PNG"),  # there is no filter 9
        (
            base64.b64encode(base64.b64decode(png(random_images(1, size=64))[0])[:900]).decode(),
            "broken PNG",
        ),
        (base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 50).decode(), "expected a PNG"),
        (jpeg_file(), "expected a PNG"),
    ],
    ids=lambda value: value if " " in value else "",
)
def test_a_file_that_is_no_8_bit_rgb_png_is_refused(image: str, message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        read({"images": [image], "prompts": ["p"]})


# --------------------------------------------------------------------------------------------- HTTP


def failing(batch: RewardBatch) -> Tensor:
    if batch.meta[0].get("data"):
        raise DataError("a record that is wrong")
    if batch.meta[0].get("fail"):
        raise RuntimeError("out of memory")
    return torch.where(batch.images[:, 0, 0, 0] > 0.5, torch.nan, batch.images[:, 1, 0, 0])


@pytest.fixture
def client() -> Iterator[TestClient]:
    """Return a client of an application with two rewards, without a token."""
    queue = RequestQueue({"red": redness, "half": failing}, max_wait_s=0)
    with TestClient(make_app(queue, Limits(bytes=20_000, images=6))) as client:
        yield client
    queue.close()


def test_scores_equal_those_of_the_reward_here(client: TestClient) -> None:
    images = random_images(5)
    answer = client.post("/score", json=data_of(images))
    assert answer.status_code == 200 and "NaN" not in answer.text
    data = answer.json()
    assert data["images"] == 5 and list(data["scores"]) == ["red", "half"]
    assert torch.equal(torch.tensor(data["scores"]["red"]), redness(batch_of(images)))
    half = [math.nan if value is None else value for value in data["scores"]["half"]]
    assert torch.equal(torch.tensor(half).nan_to_num(-1), failing(batch_of(images)).nan_to_num(-1))
    assert None in data["scores"]["half"]
    assert list(client.post("/score", json=data_of(images, rewards=["red"])).json()["scores"]) == [
        "red"
    ]


def test_failures_are_answered_in_json(client: TestClient) -> None:
    images = random_images(1)
    for meta, kind, text in (
        ({"fail": 1}, "reward", "RuntimeError: out of memory"),
        ({"data": 1}, "data", "a record that"),
    ):
        answer = client.post("/score", json=data_of(images, meta=[meta]))
        assert (
            answer.status_code == 500
            and answer.json()["kind"] == kind
            and text in answer.json()["error"]
        )
    bare = client.post(
        "/score", content=json.dumps(data_of(images))
    )  # no content type: what a web page could send
    assert bare.status_code == 415 and "application/json" in bare.json()["error"]
    for answer in (client.get("/score"), client.post("/health"), client.get("/nothing")):
        assert answer.status_code in (404, 405) and "POST /score" in answer.json()["error"]


def test_sizes_are_refused_with_and_without_a_declared_length(client: TestClient) -> None:
    header = {"Content-Type": "application/json"}
    for size in (20_001, 30_000, 100_000):
        for content in (
            b" " * size,
            iter([b" " * 1000] * (size // 1000) + [b" "]),
        ):  # an iterator is sent in chunks
            answer = client.post("/score", content=content, headers=header)
            assert (
                answer.status_code == 413
                and answer.json()["kind"] == "size"
                and "20000 bytes" in answer.json()["error"]
            )
    assert client.post("/score", content=b" " * 20_000, headers=header).status_code == 400
    assert client.post("/score", json=data_of(random_images(7))).status_code == 413


def test_health(client: TestClient) -> None:
    health = client.get("/health").json()
    assert health["status"] == "ok" and health["rewards"] == ["red", "half"]
    assert health["limits"] == {"bytes": 20_000, "images": 6, "pixels": 2**26}


def test_metrics_count_what_happened(client: TestClient) -> None:
    client.post("/score", json=data_of(random_images(5)))
    client.post("/score", json=data_of(random_images(1), meta=[{"fail": 1}]))
    client.post("/score", json={})
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    values = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
    for name, wanted in {
        'flowrl_requests_total{status="200"}': 1,
        'flowrl_requests_total{status="500"}': 1,
        'flowrl_requests_total{status="400"}': 1,
        "flowrl_images_total": 5,
        "flowrl_failures_total": 1,
        "flowrl_batches_total": 2,
        "flowrl_queue_requests": 0,
        'flowrl_calls_total{reward="red"}': 2,
        'flowrl_calls_total{reward="half"}': 1,
        'flowrl_unscored_total{reward="half"}': int(
            failing(batch_of(random_images(5))).isnan().sum()
        ),
    }.items():
        assert values[name] == wanted, name
    assert (
        values["flowrl_request_seconds_total"]
        > values['flowrl_reward_seconds_total{reward="red"}']
        > 0
    )
    sample = re.compile(
        r'flowrl_[a-z_]+(\{[a-z]+="[^"]*"\})? [0-9.e+-]+|# (HELP|TYPE) flowrl_[a-z_]+ .+'
    )
    assert [line for line in lines if not sample.fullmatch(line)] == []


def test_the_token_guards_every_address(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    queue = RequestQueue({"red": redness}, max_wait_s=0)
    with TestClient(make_app(queue, Limits(), TOKEN)) as client:
        wrong = ["", "Bearer", "Bearer wrong horse", "Basic correct horse", "correct horse"]
        for given in (None, *wrong, "Bearer correct"):
            headers = {} if given is None else {"Authorization": given}
            for answer in (
                client.post("/score", json=data_of(random_images(1)), headers=headers),
                client.get("/health", headers=headers),
                client.get("/metrics", headers=headers),
            ):
                assert (
                    answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                ), given
                assert answer.json()["kind"] == "token" and "horse" not in answer.text
        odd = {b"Authorization": "Bearer gr\u00fcn".encode()}
        assert client.get("/health", headers=odd).status_code == 401
        right = {"Authorization": f"Bearer {TOKEN.decode()}"}
        assert (
            client.post("/score", json=data_of(random_images(1)), headers=right).status_code == 200
        )
        assert (
            client.get("/health", headers=right).status_code
            == client.get("/metrics", headers=right).status_code
            == 200
        )
    queue.close()
    assert "horse" not in caplog.text + "".join(capfd.readouterr())


def test_clients_at_the_same_time_get_their_own_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a real socket: 8 threads, 5 requests each, joined as they come; those beyond 3 wait and
    are not refused."""
    monkeypatch.setattr("rewards.remote.http.IN_HAND", 3)
    with (
        hosted({"red": redness}, batch=16) as url,
        ThreadPoolExecutor(8) as pool,
        httpx2.Client(trust_env=False) as http,
    ):

        def ask(seed: int) -> bool:
            images = random_images(1 + seed % 3, seed=seed)
            answer = http.post(f"{url}/score", json=data_of(images))
            return torch.equal(
                torch.tensor(answer.json()["scores"]["red"]), redness(batch_of(images))
            )

        assert all(pool.map(ask, range(40)))


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.remote.http.BODY_SECONDS", 0.05)
    with hosted({"red": redness}) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as line:
            line.sendall(
                b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 9\r\n\r\n["
            )
            assert b" 408 " in line.recv(1000).splitlines()[0]


def test_a_client_that_hangs_up_is_not_scored() -> None:
    held = Held()
    queue = RequestQueue({"it": held}, batch=1, max_wait_s=0)
    app = make_app(queue, Limits())
    body = json.dumps(data_of(random_images(1))).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/score",
        "headers": [(b"content-type", b"application/json")],
    }
    sent: list[Any] = []

    async def call(gone: asyncio.Event, more: bool = False) -> None:
        messages = iter([{"type": "http.request", "body": body, "more_body": more}])

        async def receive() -> Any:
            for message in messages:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(
            {**scope, "query_string": b"", "root_path": "", "http_version": "1.1"}, receive, send
        )

    async def both() -> None:
        stays, leaves = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(call(stays))
        await asyncio.to_thread(held.reached.wait, WAIT)
        second = asyncio.create_task(call(leaves))
        await asyncio.to_thread(wait_for, lambda: queue.waiting() == (1, 1))
        leaves.set()
        await second
        assert sent[0]["status"] == 499
        held.go.set()
        await first
        assert sent[2]["status"] == 200
        await call(leaves, more=True)  # gone before the body ended
        assert sent[4]["status"] == 499

    asyncio.run(both())
    queue.close()
    assert len(held.seen) == 1


# -------------------------------------------------------------------------------------- the command


class learner:  # noqa: N801 - a reward that is trained along
    def __call__(self, batch: RewardBatch) -> Tensor:
        return redness(batch)

    def update(self, batch: RewardBatch) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass

    def trains_policy(self, iteration: int) -> bool:
        return True


def test_a_reward_that_learns_is_refused(tmp_path: Path) -> None:
    config = toy(tmp_path)
    object.__setattr__(config.rewards["red"], "function", learner)
    with pytest.raises(ConfigError, match="rewards.red: toykit.redness learns"):
        load_rewards(config)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_other_machines_need_a_token(
    tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded or listens."""
    monkeypatch.setattr("rewards.remote.server.load_rewards", lambda config: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="--token-env"):
        serve(toy(tmp_path), host=host, port=0)


@pytest.mark.parametrize(
    "value",
    [None, "", "short", "tab\tinside it", "gr\u00fcn gr\u00fcn gr\u00fcn", " correct horse"],
)
def test_a_token_that_is_unset_or_odd_is_refused(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("REWARD_TOKEN", value)
    with pytest.raises(ConfigError, match="REWARD_TOKEN should hold") as error:
        read_token("127.0.0.1", "REWARD_TOKEN")
    assert not value or value not in str(error.value)


def test_tokens_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", TOKEN.decode())
    assert read_token("0.0.0.0", "REWARD_TOKEN") == read_token("127.0.0.1", "REWARD_TOKEN") == TOKEN
    assert read_token("127.0.0.1", "") == read_token("::1", "") == b""


@pytest.mark.parametrize(
    "options",
    [{"max_mb": 0}, {"max_images": 0}, {"batch": 0}, {"max_wait_ms": -1.0}, {"port": 70_000}],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"serve: {next(iter(options))}"):
        serve(toy(tmp_path), **options)


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match=r'pip install "flowrl\[serve\]"'):
        serve(toy(tmp_path))


@pytest.mark.integration
def test_a_server_answers_what_is_in_flight_and_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM comes while an image is being scored: its client still gets the score."""
    config, gate = write_toy(tmp_path / "toy"), tmp_path / "gate"
    gate.touch()
    reward = f"rewards={{red: {{fn: toykit.gate, file: {gate}, call: 1}}}}"
    server = Process(
        config,
        reward,
        "--plugin",
        "toykit",
        "--port",
        "0",
        "--token-env",
        "TOKEN",
        TOKEN=TOKEN.decode(),
    )
    url = server.url()
    argv = ["serve-rewards", str(config), "--plugin", "toykit", "--port", url.rpartition(":")[2]]
    assert main(argv) == 2 and "cannot listen on 127.0.0.1" in capsys.readouterr().err
    assert (
        main([*argv[:-1], "0", "--host", "0.0.0.0"]) == 2
        and "--token-env" in capsys.readouterr().err
    )
    headers, images = {"Authorization": f"Bearer {TOKEN.decode()}"}, random_images(3)
    with (
        ThreadPoolExecutor(1) as pool,
        httpx2.Client(trust_env=False, headers=headers, timeout=WAIT) as http,
    ):
        future = pool.submit(http.post, f"{url}/score", json=data_of(images))
        wait_for(gate.with_suffix(".reached").exists)
        assert http.get(f"{url}/health").json()["rewards"] == ["red"]  # while the reward is busy
        server.process.terminate()
        with pytest.raises(httpx2.TransportError):  # it takes no new connections from now on
            wait_for(lambda: not httpx2.get(f"{url}/health", headers=headers, trust_env=False))
        gate.unlink()
        assert torch.equal(
            torch.tensor(future.result(WAIT).json()["scores"]["red"]), redness(batch_of(images))
        )
    code, printed = server.end()
    assert code == 0 and "(token needed)" in printed and "stopped; 3 images were scored" in printed
    assert TOKEN.decode() not in printed and "Traceback" not in printed
