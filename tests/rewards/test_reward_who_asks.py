"""Whom a reward server answers, and in what words: foreign names, bodies that are not JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from serving import data_of, random_images
from starlette.testclient import TestClient
from torch import Tensor
from toykit import redness

from flowrl.core.errors import DataError, RewardError
from flowrl.core.types import RewardBatch
from rewards.remote.http import make_app
from rewards.remote.messages import refusal
from rewards.remote.read_request import RequestLimits
from rewards.remote.request_queue import RequestQueue

HALF = "half \ud800"  # of a surrogate pair: JSON can write it, UTF-8 cannot


class Picky:
    """Refuse every record, in words that hold its place."""

    def check_record(self, record: dict[str, Any], where: str) -> None:
        raise DataError(f"{where}: bad")

    def __call__(self, batch: RewardBatch) -> Tensor:
        if batch.meta[0].get("fail"):
            raise DataError(HALF)
        return redness(batch)


@pytest.fixture
def queue() -> Iterator[RequestQueue]:
    with closing(RequestQueue({"it": Picky()}, max_wait_s=0)) as queue:
        yield queue


def ask(queue: RequestQueue, host: str, token: bytes = b"", **headers: str) -> list[Any]:
    """Ask every address once under a name of this machine."""
    client = TestClient(make_app(queue, RequestLimits(), token), base_url="http://localhost")
    given = {"Host": host, **headers}
    answers = [client.get(path, headers=given) for path in ("/health", "/metrics")]
    asked = {"reward": "it", "records": [{}], "places": ["line 1"]}
    bodies = {"/check": asked, "/score": data_of(random_images(1))}
    return answers + [client.post(path, json=body, headers=given) for path, body in bodies.items()]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8321", 200),
        ("127.0.0.1:8321", 200),
        ("127.0.0.2", 200),
        ("[::1]:8321", 200),
        ("evil.example", 403),
        ("evil.example:8321", 403),
        ("localhost.evil.example", 403),
        ("10.0.0.5", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_without_a_token_only_this_machine_is_answered(
    queue: RequestQueue, host: str, status: int
) -> None:
    """A page from elsewhere may let its own name point here, and read what is answered."""
    answers = ask(queue, host)
    assert [answer.status_code for answer in answers] == [status] * 4
    if status == 403:
        assert all("--token-env" in answer.json()["error"] for answer in answers)
        # a client stops at once, with these words
        told = refusal(403, answers[-1].content, "http://it")
        assert isinstance(told, RewardError) and "asked as localhost" in str(told)


def test_with_a_token_every_name_is_answered(queue: RequestQueue) -> None:
    bearer = {"Authorization": "Bearer correct horse"}
    answers = ask(queue, "rewards.example", b"correct horse", **bearer)
    assert [answer.status_code for answer in answers] == [200] * 4


@pytest.mark.parametrize("path", ["/score", "/check"])
@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_what_a_form_could_send_is_refused(queue: RequestQueue, path: str, kind: str) -> None:
    client = TestClient(make_app(queue, RequestLimits()), base_url="http://localhost")
    answer = client.post(path, content=b"{}", headers={"Content-Type": kind})
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]


def test_half_of_a_surrogate_pair_is_answered_in_json(queue: RequestQueue) -> None:
    """In a fault, in what a reward raises and in a refusal."""
    client = TestClient(make_app(queue, RequestLimits()), base_url="http://localhost")

    def post(path: str, body: str) -> Any:
        return client.post(path, content=body, headers={"Content-Type": "application/json"})

    found = post("/check", '{"reward": "it", "records": [{}], "places": ["\\ud800"]}')
    assert found.status_code == 200 and found.json() == {"fault": "\ud800: bad"}
    failed = client.post("/score", json=data_of(random_images(1), meta=[{"fail": 1}]))
    assert failed.status_code == 500 and HALF in failed.json()["error"]
    refused = post("/score", '{"images": ["a"], "prompts": ["x"], "\\ud800": 1}')
    assert refused.status_code == 400 and "ud800" in refused.text
