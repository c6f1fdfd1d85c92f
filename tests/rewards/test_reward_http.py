"""What a reward server answers: scores, refusals, figures, and to whom."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any

import httpx2
import pytest
import torch
from serving import WAIT, Held, batch_of, data_of, hosted, random_images, wait_for
from starlette.testclient import TestClient
from torch import Tensor
from toykit import redness

from flowrl.core.errors import DataError
from flowrl.core.types import RewardBatch
from rewards.remote.http import make_app
from rewards.remote.read_request import RequestLimits
from rewards.remote.request_queue import RequestQueue

HERE = "http://localhost"


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
    app = make_app(queue, RequestLimits(bytes=20_000, images=6))
    with TestClient(app, base_url=HERE) as client:
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
    one = client.post("/score", json=data_of(images, rewards=["red"])).json()
    assert list(one["scores"]) == ["red"]


def test_failures_are_answered_in_json(client: TestClient) -> None:
    images = random_images(1)
    for meta, kind, text in (
        ({"fail": 1}, "reward", "RuntimeError: out of memory"),
        ({"data": 1}, "data", "a record that"),
    ):
        answer = client.post("/score", json=data_of(images, meta=[meta]))
        assert answer.status_code == 500 and answer.json()["kind"] == kind
        assert text in answer.json()["error"]
    # no content type: what a web page could send
    bare = client.post("/score", content=json.dumps(data_of(images)))
    assert bare.status_code == 415 and "application/json" in bare.json()["error"]
    for answer in (client.get("/score"), client.post("/health"), client.get("/nothing")):
        assert answer.status_code in (404, 405) and "POST /score" in answer.json()["error"]


class Leaving:
    """Leave Python where a record says so."""

    def check_record(self, record: dict[str, Any], where: str) -> None:
        if record.get("fail"):
            sys.exit("no licence")

    def __call__(self, batch: RewardBatch) -> Tensor:
        self.check_record(batch.meta[0], "")
        return redness(batch)


def test_a_reward_that_leaves_does_not_take_the_server_along() -> None:
    """A failure of a user's code is status 500 of kind "reward", or the fault of a record; what
    comes after it is answered with 200."""
    images, wrong = random_images(1), {"prompt": "p", "fail": 1}
    with (
        closing(RequestQueue({"it": Leaving()}, max_wait_s=0)) as queue,
        TestClient(make_app(queue, RequestLimits()), base_url=HERE) as client,
    ):
        asked = {"reward": "it", "records": [wrong], "places": ["line 3"]}
        told = client.post("/check", json=asked)
        assert told.json() == {"fault": "line 3: SystemExit: no licence"}
        answer = client.post("/score", json=data_of(images, meta=[wrong]))
        assert answer.status_code == 500 and answer.json()["kind"] == "reward"
        assert "SystemExit: no licence" in answer.json()["error"]
        assert client.post("/score", json=data_of(images)).status_code == 200


def test_sizes_are_refused_with_and_without_a_declared_length(client: TestClient) -> None:
    header = {"Content-Type": "application/json"}
    for size in (20_001, 30_000, 100_000):
        parts = [b" " * 1000] * (size // 1000) + [b" "]
        for content in (b" " * size, iter(parts)):  # an iterator is sent in chunks
            answer = client.post("/score", content=content, headers=header)
            assert answer.status_code == 413 and answer.json()["kind"] == "size"
            assert "20000 bytes" in answer.json()["error"]
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
    unscored = int(failing(batch_of(random_images(5))).isnan().sum())
    for name, expected in {
        'flowrl_requests_total{status="200"}': 1,
        'flowrl_requests_total{status="500"}': 1,
        'flowrl_requests_total{status="400"}': 1,
        "flowrl_images_total": 5,
        "flowrl_failures_total": 1,
        "flowrl_batches_total": 2,
        "flowrl_queue_requests": 0,
        'flowrl_calls_total{reward="red"}': 2,
        'flowrl_calls_total{reward="half"}': 1,
        'flowrl_unscored_total{reward="half"}': unscored,
    }.items():
        assert values[name] == expected, name
    inside = values['flowrl_reward_seconds_total{reward="red"}']
    assert values["flowrl_request_seconds_total"] > inside > 0
    sample = r'flowrl_[a-z_]+(\{[a-z]+="[^"]*"\})? [0-9.e+-]+|# (HELP|TYPE) flowrl_[a-z_]+ .+'
    assert [line for line in lines if not re.fullmatch(sample, line)] == []


GIVEN = [None, "", "Bearer", "Bearer wrong horse", "Basic correct horse", "correct horse"]


def test_the_token_guards_every_address(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    queue, data = RequestQueue({"red": redness}, max_wait_s=0), data_of(random_images(1))
    with TestClient(make_app(queue, RequestLimits(), b"correct horse")) as client:

        def ask(headers: Any) -> list[Any]:
            answers = [client.get(path, headers=headers) for path in ("/health", "/metrics")]
            return [client.post("/score", json=data, headers=headers), *answers]

        odd: list[dict[Any, Any]] = [{b"Authorization": "Bearer gr\u00fcn".encode()}]
        odd += [{} if given is None else {"Authorization": given} for given in GIVEN]
        for headers in (*odd, {"Authorization": "Bearer correct"}):
            for answer in ask(headers):
                assert answer.status_code == 401, headers
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["kind"] == "token" and "horse" not in answer.text
        right = ask({"Authorization": "Bearer correct horse"})
        assert [answer.status_code for answer in right] == [200] * 3
    queue.close()
    assert "horse" not in caplog.text + "".join(capfd.readouterr())


def test_clients_at_the_same_time_get_their_own_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 threads, 5 requests each, joined as they come; those beyond 3 wait and are not refused."""
    monkeypatch.setattr("rewards.remote.http.IN_HAND", 3)
    with (
        hosted({"red": redness}, batch=16) as url,
        ThreadPoolExecutor(8) as pool,
        httpx2.Client(trust_env=False) as http,
    ):

        def ask(seed: int) -> bool:
            images = random_images(1 + seed % 3, seed=seed)
            scores = http.post(f"{url}/score", json=data_of(images)).json()["scores"]["red"]
            return torch.equal(torch.tensor(scores), redness(batch_of(images)))

        assert all(pool.map(ask, range(40)))


@contextmanager
def half_sent(url: str) -> Iterator[socket.socket]:
    """Open a line that sends one byte of nine."""
    head = "POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(f"{head}Content-Length: 9\r\n\r\n[".encode())
        yield line


@pytest.mark.parametrize("limit", ["BODY_SECONDS", "STALL_SECONDS"])
def test_a_body_that_does_not_come_is_given_up(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"rewards.remote.read_body.{limit}", 0.05)
    with hosted({"red": redness}) as url, half_sent(url) as line:
        assert b" 408 " in line.recv(1000).splitlines()[0]


@pytest.mark.parametrize("small", [True, False])
def test_half_sent_bodies_keep_nobody_waiting(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One place, three bodies whose rest never comes. Below SMALL_BYTES they hold no place, so a
    request is answered beside them; above it, one of them holds the place until it is given up."""
    monkeypatch.setattr("rewards.remote.http.IN_HAND", 1)
    monkeypatch.setattr("rewards.remote.read_body.STALL_SECONDS", WAIT if small else 1.0)
    if not small:
        monkeypatch.setattr("rewards.remote.read_body.SMALL_BYTES", 0)
    with hosted({"red": redness}) as url, ExitStack() as open_lines:
        lines = [open_lines.enter_context(half_sent(url)) for _ in range(3)]
        answer = httpx2.post(f"{url}/score", json=data_of(random_images(1)), trust_env=False)
        assert answer.status_code == 200
        for line in lines:
            line.setblocking(False)
        with pytest.raises(BlockingIOError) if small else nullcontext():
            assert b" 408 " in b"".join(line.recv(1000) for line in lines)


def test_a_client_that_hangs_up_is_not_scored() -> None:
    held = Held()
    queue = RequestQueue({"it": held}, batch=1, max_wait_s=0)
    app = make_app(queue, RequestLimits())
    body = json.dumps(data_of(random_images(1))).encode()
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/score"}
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope |= {"headers": headers, "query_string": b""}
    scope |= {"root_path": "", "http_version": "1.1"}
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

        await app(dict(scope), receive, send)

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
