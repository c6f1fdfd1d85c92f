"""What a reward server reads of a request, what it refuses before it unpacks anything, and its
queue: which requests are joined, and what each of them gets back."""

from __future__ import annotations

import base64
import io
import json
import math
import struct
import zlib
from concurrent.futures import CancelledError, Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from serving import WAIT, Held, data_of, png, random_images
from torch import Tensor
from toykit import redness

from flowrl.core.errors import RewardError, RunError
from flowrl.core.types import RewardBatch
from rewards.remote.read_request import RequestLimits, RequestRefused, parse
from rewards.remote.request_queue import Answer, RequestQueue, ScoreRequest, join


def crafted(width: int, height: int, *, depth: int = 8, color: int = 2, pixels: bytes = b"") -> str:
    """Write a PNG with any header by the format's own rules: chunks of length, name, data, CRC."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


def read(data: dict[str, Any], limits: RequestLimits | None = None) -> ScoreRequest:
    """Read a request to a server that hosts the rewards a and b."""
    return parse(json.dumps(data).encode(), ["a", "b"], limits or RequestLimits())


def test_a_request_is_read_as_it_was_sent() -> None:
    images = random_images(3)
    meta = [{"a": 1}, {}, {"b": [None, 0.1]}]
    extra = {"group": [5, 5, -1], "meta": meta, "sigma": [0, 0.5, 1.0], "rewards": ["b"]}
    got = read(data_of(images, **extra))
    assert torch.equal(got.pixels.float() / 255, images) and got.pixels.dtype == torch.uint8
    assert (got.group.tolist(), got.meta, got.sigma.tolist()) == ([5, 5, -1], meta, [0, 0.5, 1])
    assert got.names == ("b",) and got.prompts == ["p"] * 3
    bare = read(data_of(images))
    assert (bare.group.tolist(), bare.meta, bare.sigma.tolist()) == ([0, 1, 2], [{}] * 3, [0] * 3)
    assert bare.names == ("a", "b")
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
        parse(body, ["a"], RequestLimits())
    assert error.value.status == 400 and error.value.kind == "request"


PNGS = [png(random_images(1)[0]), png(random_images(1, size=5)[0])]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("prompts", [["p"], ["p", 1]]),
        ("group", [[1], [1, True], [1, 2.0], [1, 2**63]]),
        ("meta", [[{}, []], {}]),
        ("sigma", [[0, None], [0, 10**400], [0, 1e39], [0, "1e999"]]),
        ("rewards", [[], ["c"], ["a", "a"]]),
        ("images", [PNGS]),
    ],
)
def test_a_list_that_does_not_fit_is_refused(key: str, values: list[Any]) -> None:
    """Python reads 1e999, which JSON can write, as infinity."""
    for value in values:
        text = json.dumps(data_of(random_images(2), **{key: value})).replace('"1e999"', "1e999")
        with pytest.raises(RequestRefused, match=key) as error:
            parse(text.encode(), ["a", "b"], RequestLimits())
        assert error.value.status == 400


def test_images_are_measured_before_they_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bombs claim 2 gigapixels, or many small images; Pillow must not even see them."""

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("unpacked")

    monkeypatch.setattr("rewards.remote.read_request.Image.open", opened)
    bomb = crafted(50_000, 50_000, pixels=bytes(1000))
    small = RequestLimits(images=4, pixels=100, all_pixels=150)
    for images, limits, message in (
        ([bomb], RequestLimits(), "16777216 pixels in an image.*50000 x 50000"),
        ([crafted(2**31 - 1, 2**31 - 1)], RequestLimits(), "pixels"),
        ([crafted(10, 11)], small, "100 pixels"),
        ([crafted(10, 8)] * 2, small, "150 in a request, got 2 of 10 x 8"),
        ([crafted(1, 1)] * 5, small, "1 to 4 images"),
    ):
        with pytest.raises(RequestRefused, match=message) as error:
            read({"images": images, "prompts": ["p"] * len(images)}, limits)
        assert (error.value.status, error.value.kind) == (413, "size")


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_file_that_is_no_8_bit_rgb_png_is_refused() -> None:
    cut = base64.b64decode(png(random_images(1, size=64)[0]))[:900]
    photo = io.BytesIO()
    Image.new("RGB", (8, 8)).save(photo, "JPEG")
    for image, message in (
        (crafted(2, 2, color=6), "colour type 6"),
        (crafted(2, 2, depth=16), "bit depth 16"),
        (crafted(2, 2, color=3), "colour type 3"),
        (crafted(0, 2), "0 x 2"),
        # two rows of 1 + 2 * 3 bytes
        (crafted(2, 2, pixels=b"\0" * 7), "broken PNG.*expected 14 bytes of pixels, got 7"),
        (crafted(2, 2, pixels=b"\0" * 15), "broken PNG.*got more"),
        (crafted(2, 2, pixels=b"\x09" * 14), "broken PNG"),  # there is no filter 9
        (encoded(cut), "broken PNG"),
        (encoded(b"\x89PNG\r\n\x1a\n" + b"\0" * 50), "expected a PNG"),
        (encoded(photo.getvalue()), "expected a PNG"),
    ):
        with pytest.raises(RequestRefused, match=message):
            read({"images": [image], "prompts": ["p"]})


# ---------------------------------------------------------------------------------------- the queue


def request(
    *values: int, group: list[int] | None = None, size: int = 2, name: str = "it"
) -> ScoreRequest:
    """Ask about plain images of the given grey levels."""
    pixels = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, size, size)
    groups = torch.tensor(group or list(range(len(values))))
    words = [f"grey {value}" for value in values]
    meta = [{"v": value} for value in values]
    return ScoreRequest(pixels, words, groups, meta, torch.zeros(len(values)), (name,))


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


def levels(*values: int) -> list[float]:
    """Return grey levels as a reward sees them."""
    return (torch.tensor(values, dtype=torch.uint8).float() / 255).tolist()


def test_requests_are_joined_up_to_the_batch_size() -> None:
    """3 + 3 fit into 8 and a third 3 does not: calls of 1, 6, 6 and 3 images."""
    held, starts = Held(), (10, 20, 30, 40, 50)
    with closing(RequestQueue({"it": held}, batch=8, max_wait_s=0)) as queue:
        requests = [request(k, k + 1, k + 2) for k in starts]
        futures = after_the_first(queue, held, *requests)
        for k, future in zip(starts, futures, strict=True):
            assert future.result(WAIT) == {"it": levels(k, k + 1, k + 2)}
    assert [len(batch.prompts) for batch in held.seen] == [1, 6, 6, 3]
    joined, values = held.seen[1], (10, 11, 12, 20, 21, 22)
    assert joined.prompts == [f"grey {v}" for v in values]
    assert joined.meta == [{"v": v} for v in values]
    assert (queue.counts.images, queue.counts.batches, queue.counts.failures) == (16, 4, 0)


def test_a_full_batch_does_not_wait_and_closing_does_not_either() -> None:
    """With an hour to wait, answers come as the batch is full, or as the queue closes."""
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
    others = [request(1), request(2, size=3), request(3, name="red"), request(4)]
    with closing(RequestQueue({"it": held, "red": redness}, max_wait_s=0)) as queue:
        answers = [f.result(WAIT) for f in after_the_first(queue, held, *others)]
    assert answers == [{"it": levels(1)}, {"it": levels(2)}, {"red": [0.0]}, {"it": levels(4)}]
    assert [b.prompts for b in held.seen] == [["grey 0"], ["grey 1", "grey 4"], ["grey 2"]]


def brighter(batch: RewardBatch) -> Tensor:
    """Return each image's share of images of its group that it is brighter than."""
    level = batch.images.mean((1, 2, 3))
    same = batch.group[:, None] == batch.group[None]
    return ((level[:, None] > level[None]) & same).float().sum(1) / same.sum(1)


def test_groups_of_different_requests_stay_apart() -> None:
    """Both clients call their groups 7 and 3; expected numbers are counted by hand."""
    one, two = request(1, 2, 9, 4, group=[7, 7, 3, 3]), request(8, 5, 6, group=[3, 7, 7])
    assert join([one, two]).group.tolist() == [1, 1, 0, 0, 2, 3, 3]
    with closing(RequestQueue({"it": brighter}, batch=7, max_wait_s=3600)) as queue:
        futures = [queue.submit(one), queue.submit(two)]
        assert [f.result(WAIT)["it"] for f in futures] == [[0, 0.5, 0.5, 0], [0, 0, 0.5]]
    assert queue.counts.batches == 1


HERE = rf" \({Path(__file__).name}, "


@pytest.mark.parametrize(
    ("raised", "error", "said"),
    [
        (ValueError("too bright"), ValueError, "too bright"),
        (SystemExit("no licence"), RewardError, f"SystemExit: no licence{HERE}"),
    ],
)
def test_one_bad_image_fails_one_request(raised: Any, error: Any, said: str) -> None:
    """The thread that scores outlives `sys.exit`: the other requests are answered, those that were
    joined with it and the one after it. Grey images have redness 0."""

    def fragile(batch: RewardBatch) -> Tensor:
        if (batch.images == 1).any():
            raise raised
        return redness(batch)

    with closing(RequestQueue({"it": fragile}, batch=3, max_wait_s=3600)) as queue:
        good, bad, other = (queue.submit(request(v)) for v in (1, 255, 2))
        assert good.result(WAIT) == other.result(WAIT) == {"it": [0.0]}
        with pytest.raises(error, match=said):
            bad.result(WAIT)
        assert queue.submit(request(2, 3, 4)).result(WAIT) == {"it": [0.0] * 3}
    assert (queue.counts.failures, queue.counts.images) == (1, 5)


def test_one_reward_cannot_change_what_the_next_sees() -> None:
    """The second of two rewards gives the grey levels that were sent, and sees its records."""

    def vandal(batch: RewardBatch) -> Tensor:
        batch.images.zero_()
        batch.prompts.clear()
        batch.meta[0]["v"] = -1
        return torch.ones(2)

    seen: list[RewardBatch] = []

    def level(batch: RewardBatch) -> Tensor:
        seen.append(batch)
        return batch.images[:, 0, 0, 0]

    asked = request(7, 9)._replace(names=("vandal", "level"))
    with closing(RequestQueue({"vandal": vandal, "level": level}, max_wait_s=0)) as queue:
        assert queue.submit(asked).result(WAIT) == {"vandal": [1, 1], "level": levels(7, 9)}
    assert (seen[0].prompts, seen[0].meta) == (["grey 7", "grey 9"], [{"v": 7}, {"v": 9}])


def test_a_score_that_is_none_is_a_failure() -> None:
    for values, message in (
        (torch.zeros(3), r"expected 2 numbers.*\[3\]"),
        (torch.zeros(2, 1), r"\[2, 1\]"),
        (torch.tensor([0, -math.inf]), "infinity"),
    ):
        queue = RequestQueue({"it": lambda batch: values}, max_wait_s=0)  # noqa: B023 - used at once
        with closing(queue), pytest.raises(RunError, match=message):
            queue.submit(request(1, 2)).result(WAIT)


def test_a_cancelled_request_is_not_scored() -> None:
    held = Held()
    with closing(RequestQueue({"it": held}, batch=1, max_wait_s=0)) as queue:
        first = queue.submit(request(0))
        assert held.reached.wait(WAIT)
        gone, kept = queue.submit(request(1)), queue.submit(request(2))
        assert gone.cancel()
        held.go.set()
        assert first.result(WAIT) and kept.result(WAIT)
        with pytest.raises(CancelledError):
            gone.result(0)
    assert [batch.prompts for batch in held.seen] == [["grey 0"], ["grey 2"]]
